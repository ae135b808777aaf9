"""What surrounds the Hopper kernel, by the interpreter: how its work is cut, and the tiles that pairs are sorted into."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import hopper_experts as he

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, ACTIVE, PLANES = 6, 3, 8
KINDS = {"32": (32, 384, False), "64": (64, 512, False), "128": (128, 768, False), "256": (256, 1024, False),
         "64 tied": (64, 512, True), "128 tied": (128, 1024, True)}  # fmt: skip


def moved(weight):
    lists = [[t.to(DEVICE) for t in part] for part in (weight.planes, weight.scales)]
    unit = None if weight.unit is None else weight.unit.to(DEVICE)
    return type(weight)(*lists, weight.offset.to(DEVICE), unit, weight.in_features, weight.group_size)


@pytest.fixture
def sorted_pairs(random_pairs, random_encoded):
    """Function that sorts random pairs, some of them padding, with the given cut; returns the pairs and what was sorted."""

    def sort(tokens, cut, one_k, ks=None):
        ids, _, chunks = random_pairs(tokens, ACTIVE, EXPERTS, 5)
        ids[0, 0] = EXPERTS  # padding
        chunks = torch.where(chunks > 0, ks, 0).int() if ks else chunks
        weight = moved(random_encoded(EXPERTS, 8, 128, 64, PLANES))
        by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), cut, one_k, weight, weight)
        return ids.flatten(), chunks.flatten(), by

    return sort


@pytest.mark.parametrize("one_k, ks", [(False, None), (False, 4), (True, 4), (True, None)])  # the last: a wrong guess
@pytest.mark.parametrize("tokens, slices, pairs", [(1, 2, 8), (40, 2, 8), (130, 4, 16), (130, 1, 16), (130, 3, 64)])
def test_every_pair_stands_in_one_slice_of_its_k(sorted_pairs, tokens, slices, pairs, one_k, ks):
    ids, chunks, by = sorted_pairs(tokens, he.Cut(slices, pairs, 2, 2), one_k, ks)
    held = (ids < EXPERTS) & (ids >= 0) & (chunks > 0)
    number = int(held.sum())  # beyond them nothing is written
    order, places = by.order[:number].cpu().long(), by.places.cpu()
    assert torch.equal(places[order].long(), torch.arange(number)) and (places[~held] == -1).all()
    ids, chunks, seen = ids[order], chunks[order], torch.zeros(number, dtype=torch.int)
    tiles = by.tiles[: int(by.tiles[0, 1])].tolist()
    assert len(tiles) <= by.tiles.shape[0]
    for expert, _, *rest in tiles:
        starts, levels = rest[: slices + 1], rest[slices + 1 :]
        assert starts[-1] > starts[0] and 0 <= expert < EXPERTS
        for first, end, k in zip(starts[:-1], starts[1:], levels, strict=True):
            assert end - first <= pairs and (k == 0) == (first == end)
            assert (ids[first:end] == expert).all() and (chunks[first:end] == k).all()
            seen[first:end] += 1
        assert sorted(levels, key=lambda k: k == 0) == levels  # empty ones come last
        assert not one_k or len(set(levels) - {0}) == 1
    assert (seen == 1).all()


@pytest.mark.parametrize("one_k", [False, True])
def test_the_most_tiles_that_pairs_can_need(random_encoded, one_k):
    """Every expert has each k once more than slices hold, which no bound may forget."""
    cut, experts = he.Cut(2, 4 if one_k else 8, 2, 2), 3
    ids = torch.arange(experts).repeat_interleave(8 * 9)[:, None]
    chunks = torch.arange(1, 9, dtype=torch.int32).repeat_interleave(9).repeat(experts)[:, None]
    weight = moved(random_encoded(experts, 8, 128, 64, PLANES))
    by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), cut, one_k, weight, weight)
    assert int(by.tiles[0, 1]) == experts * 8 * (2 if one_k else 1) <= by.tiles.shape[0]


def test_nothing_but_padding_makes_no_tile(random_encoded):
    ids, chunks = torch.full((5, 2), EXPERTS), torch.full((5, 2), 3, dtype=torch.int32)
    weight = moved(random_encoded(EXPERTS, 8, 128, 64, PLANES))
    by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), he.CUTS[0][1], False, weight, weight)
    assert int(by.tiles[0, 1]) == 0 and (by.places == -1).all()


@pytest.mark.parametrize("one_k, cuts", [(False, he.CUTS), (True, he.CUTS_OF_ONE_K)])
def test_cuts_by_the_number_of_pairs(random_encoded, one_k, cuts):
    weight, first = random_encoded(1, 4, 768, 128, PLANES), dict(reversed(cuts))
    *limits, last = sorted(first)
    for limit, following in zip(limits, [*limits[1:], last], strict=True):
        assert he.cut_for(8 * limit, 8, one_k, weight) == first[limit] != first[following]
        assert he.cut_for(8 * limit + 1, 8, one_k, weight) == first[following]
    assert he.cut_for(0, 8, one_k, weight) == cuts[0][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one_k", [False, True])
@pytest.mark.parametrize("pairs", [1, 12, 48, 192, 193])
def test_cuts_have_room(random_encoded, pairs, one_k, kind):
    group, width, tied = KINDS[kind]
    weight = random_encoded(1, 4, width, group, PLANES, tied)
    cut = he.cut_for(pairs, 1, one_k, random_encoded(1, 4, 2 * width, group, PLANES, tied), weight)
    computing, bringing = cut.registers
    assert cut.groups * computing + bringing <= 512  # of 64 Ki registers, for 128 lanes in a group
    assert computing % 8 == bringing % 8 == 0  # else the card does not take the number
    words = he.words_at_once(weight)
    unpacked = 32 * (words if cut.whole and words < 4 else 1)
    assert cut.slices * cut.pairs // 2 + unpacked <= computing - 32  # fp32 sums; the rest is for everything else
    planes = cut.groups * 2 * 64 * PLANES * 16 * words
    rows = cut.kept * cut.slices * cut.pairs * 256
    assert planes + rows < he.shared_memory(cut, weight) <= he.SHARED
    assert cut.pairs <= 16 or 2 * pairs > cut.pairs or words == 4  # no slice is much wider than an expert has pairs


WORDS = {(32, 256, False): 1, (64, 256, False): 2, (128, 768, False): 2, (256, 512, False): 4, (32, 256, True): 1,
         (64, 256, True): 2, (128, 512, True): 4, (128, 768, True): 0, (96, 768, False): 0, (128, 896, False): 0,
         (-1, 512, False): 0, (32, 4096, False): 1}  # fmt: skip


@pytest.mark.parametrize("shape", WORDS)
def test_words_that_a_lane_takes(random_encoded, shape):
    group, width, tied = shape
    weight = random_encoded(1, 4, width, group, 2, tied)
    assert he.words_at_once(weight) == WORDS[shape]
