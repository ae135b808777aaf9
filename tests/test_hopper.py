"""What surrounds the Hopper kernel, by the interpreter: slices, prepared rows, and what it computes from them, in torch."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import grouped
from dpamoe.kernels import hopper_experts as he
from dpamoe.kernels.layout import group_width

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, ACTIVE, PLANES = 6, 3, 8


def moved(weight):
    lists = [[t.to(DEVICE) for t in part] for part in (weight.planes, weight.scales)]
    unit = None if weight.unit is None else weight.unit.to(DEVICE)
    return type(weight)(*lists, weight.offset.to(DEVICE), unit, weight.in_features, weight.group_size)


@pytest.fixture
def sorted_pairs(random_pairs, random_encoded):
    """Function that sorts random pairs with the given cut; returns the pairs and what was sorted."""

    def sort(tokens, tile, one_k=False):
        ids, _, chunks = random_pairs(tokens, ACTIVE, EXPERTS, 5)
        ids[0, 0] = EXPERTS  # padding
        chunks = torch.where(chunks > 0, 4, 0).int() if one_k else chunks
        weight = moved(random_encoded(EXPERTS, 8, 128, 64, PLANES))
        by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), tile, weight, weight)
        return ids.flatten(), chunks.flatten(), by

    return sort


@pytest.mark.parametrize("one_k", [False, True])
@pytest.mark.parametrize("tokens, slices, pairs", [(1, 2, 8), (40, 2, 8), (130, 4, 16), (130, 1, 16)])
def test_every_pair_stands_in_one_slice_of_its_k(sorted_pairs, tokens, slices, pairs, one_k):
    ids, chunks, by = sorted_pairs(tokens, he.Tile(slices, pairs), one_k)
    held = int(((ids < EXPERTS) & (ids >= 0) & (chunks > 0)).sum())  # beyond them nothing is written
    order = by.order[:held].cpu().long()
    ids, chunks, seen = ids[order], chunks[order], torch.zeros(held, dtype=torch.int)
    for expert, _, *rest in by.tiles.tolist():
        if expert < 0:
            continue
        starts, levels = rest[: slices + 1], rest[slices + 1 :]
        assert starts[-1] > starts[0]
        for first, end, k in zip(starts[:-1], starts[1:], levels, strict=True):
            assert end - first <= pairs and (k == 0) == (first == end)
            assert (ids[first:end] == expert).all() and (chunks[first:end] == k).all()
            seen[first:end] += 1
    assert (seen == 1).all()


def test_the_most_tiles_that_pairs_can_need(random_encoded):
    """Every expert has each k once more than slices hold, which no bound may forget."""
    tile, experts = he.Tile(2, 8), 3
    ids = torch.arange(experts).repeat_interleave(8 * 9)[:, None]
    chunks = torch.arange(1, 9, dtype=torch.int32).repeat_interleave(9).repeat(experts)[:, None]
    weight = moved(random_encoded(experts, 8, 128, 64, PLANES))
    by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), tile, weight, weight)
    assert int((by.tiles[:, 0] >= 0).sum()) == experts * 8 <= by.tiles.shape[0]


def test_cuts_by_the_number_of_pairs():
    assert he.tile_for(0, 8) == he.TILES[0][1] and he.tile_for(12 * 8, 8) == he.TILES[0][1]
    assert he.tile_for(12 * 8 + 1, 8) == he.TILES[1][1] and he.tile_for(10**7, 8) == he.TILES[-1][1]
    assert he.tile_for(1, 8, one_k=True) == he.TILES_OF_ONE_K[0][1]


SHAPES = {(32, 256, False): 1, (64, 256, False): 2, (128, 768, False): 2, (256, 512, False): 4, (32, 256, True): 1,
          (64, 256, True): 2, (128, 512, True): 4, (128, 768, True): 0, (96, 768, False): 0, (128, 896, False): 0,
          (-1, 512, False): 0, (32, 4096, False): 1}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_words_that_a_lane_takes(random_encoded, shape):
    group, width, tied = shape
    weight = random_encoded(1, 4, width, group, 2, tied)
    assert he.words_at_once(weight) == SHAPES[shape]


def as_the_kernel_reads(weight, expert, k, words):
    """One expert's weight without offsets, in the order and with the factors that prepared rows expect: fp64 [O, I]."""
    rows, width = weight.offset.shape[1], weight.in_features
    bits = torch.stack([plane[expert] for plane in weight.planes[:k]]).cpu()
    bits = ((bits[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).double().reshape(k, rows, width)
    scale = torch.stack([s[expert].double().cpu() for s in weight.scales[:k]])
    dense = (bits * 2 * scale.repeat_interleave(group_width(width, weight.group_size), -1)).sum(0)
    place = torch.tensor([s if 4 <= s < 12 else (s + 8) % 16 for s in range(16)])
    # input 32 (l words + w) + 16 h + s: block w, column 8 s + 2 l + h
    parts = dense.reshape(rows, width // (128 * words), 4, words, 2, 16) * 2.0 ** (place - 11)
    return parts.permute(0, 1, 3, 5, 2, 4).reshape(rows, width)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("group, width", [(32, 256), (64, 256), (128, 768), (256, 512), (32, 1024), (32, 2304)])
def test_prepared_rows_times_planes_and_sums_times_offsets(random_encoded, group, width, mean):
    weight, k = moved(random_encoded(2, 24, width, group, 4)), 3
    x = (torch.randn(5, width, generator=torch.Generator().manual_seed(1)) + mean).bfloat16()
    order = torch.tensor([3, 0, 9, 6, -1, 2**30], dtype=torch.int32)  # the last two were not written
    by = he.Sorted(order.to(DEVICE), order, order, he.TILES[0][1])
    ready, factor = (t.cpu().double() for t in he.prepare_rows(x.to(DEVICE), by, 2, weight))
    ready, factor, rows = ready[:4], factor[:4], x[order[:4].long() // 2].double()
    groups = width // group
    place = torch.arange((ready.shape[1] - width) // 2)
    place = width + place // 16 * 32 + place % 16
    high, low = ready[:, place], ready[:, place + 16]
    assert not high[:, groups:].any() and not low[:, groups:].any()
    base = weight.offset[1].double().cpu() - sum(scale[1].double().cpu() for scale in weight.scales[:k])
    base_high = (16 * base).half().double()
    base_low = (16 * base - base_high).half().double()
    found = ready[:, :width] @ as_the_kernel_reads(weight, 1, k, he.words_at_once(weight)).T
    found += (high + low)[:, :groups] @ base_high.T + high[:, :groups] @ base_low.T
    expected = rows @ next(grouped.prefixes(weight, 1, [k])).double().cpu().T
    assert (found * factor[:, None] - expected).norm() < 2**-10 * expected.norm()  # x is rounded to fp16 after its scaling
