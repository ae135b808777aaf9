"""How the work of the Hopper kernel is cut: by the number of pairs, and so that registers and shared memory have room."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import hopper_experts as he
from dpamoe.kernels import triton_experts

PLANES = 8
KINDS = {"32": (32, 384, False), "64": (64, 512, False), "128": (128, 768, False), "256": (256, 1024, False),
         "64 tied": (64, 512, True), "128 tied": (128, 1024, True)}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["sparing", "copies"])
def sparing(request, monkeypatch):
    """Triton as it was before 3.9, and from then on."""
    monkeypatch.setattr(triton_experts, "SPARING", request.param)
    return request.param


@pytest.mark.parametrize("one_k, cuts", [(False, he.CUTS), (True, he.CUTS_OF_ONE_K)])
def test_cuts_by_the_number_of_pairs(random_encoded, sparing, one_k, cuts):
    weight = random_encoded(1, 4, 768, 128, PLANES)
    first = dict(reversed([(most, cut) for most, cut in cuts if not one_k or he.under_way_together(cut, weight)]))
    *limits, last = sorted(first)
    for limit, following in zip(limits, [*limits[1:], last], strict=True):
        assert he.cut_for(8 * limit, 8, one_k, weight) == first[limit] != first[following]
        assert he.cut_for(8 * limit + 1, 8, one_k, weight) == first[following]
    assert he.cut_for(0, 8, one_k, weight) == cuts[0][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one_k", [False, True])
@pytest.mark.parametrize("pairs", [1, 12, 24, 36, 48, 80, 96, 144, 192, 193])
def test_cuts_have_room(random_encoded, sparing, pairs, one_k, kind):
    group, width, tied = KINDS[kind]
    weight = random_encoded(1, 4, width, group, PLANES, tied)
    cut = he.cut_for(pairs, 1, one_k, random_encoded(1, 4, 2 * width, group, PLANES, tied), weight)
    computing, bringing = cut.registers
    assert cut.groups * computing + bringing <= 512  # of 64 Ki registers, for 128 lanes in a group
    assert computing % 8 == bringing % 8 == 0  # else the card does not take the number
    words = he.words_at_once(weight)
    blocks = he.blocks_at_once(cut, words)
    assert cut.kept % blocks == 0  # they are waited for together
    unpacked = 32 * blocks + 4 * (blocks == words)  # with the offsets, behind the last block
    copies = 1 if sparing or not one_k else len(cut.widths)
    assert sum(cut.widths) // 2 + copies * unpacked <= computing - 28  # fp32 sums; the rest is for everything else
    stages = he.stages_of(cut, weight)
    planes = cut.groups * stages * 64 * PLANES * 16 * words
    rows = cut.kept * sum(cut.widths) * 256
    assert planes + rows < he.shared_memory(cut, weight, stages=stages) <= he.SHARED
    assert stages == 3 or he.shared_memory(cut, weight, stages=3) > he.SHARED
    assert list(cut.widths) == sorted(cut.widths, reverse=True) and len(set(cut.widths)) <= len(cut.kinds) == 3
    assert cut.widths[0] <= 16 or 2 * pairs > cut.widths[0] or words == 4  # no slice is much wider than an expert has pairs


WORDS = {(32, 256, False): 1, (64, 256, False): 2, (128, 768, False): 2, (256, 512, False): 4, (32, 256, True): 1,
         (64, 256, True): 2, (128, 512, True): 4, (128, 768, True): 0, (96, 768, False): 0, (128, 896, False): 0,
         (-1, 512, False): 0, (32, 4096, False): 1}  # fmt: skip


@pytest.mark.parametrize("shape", WORDS)
def test_words_that_a_lane_takes(random_encoded, shape):
    group, width, tied = shape
    weight = random_encoded(1, 4, width, group, 2, tied)
    assert he.words_at_once(weight) == WORDS[shape]
