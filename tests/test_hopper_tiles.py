"""Tiles for the Hopper kernel, by the interpreter: every pair in one slice, read as the kernel reads them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import hopper_experts as he
from dpamoe.kernels import hopper_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, ACTIVE, PLANES = 6, 3, 8


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


SOME = [(1, (8, 8)), (40, (8, 8)), (130, (16,) * 4), (130, (16,)), (130, (64,) * 3)]
SEVERAL = [(1, (16, 8)), (40, (16, 8)), (130, (32, 8, 8)), (130, (16, 8, 8, 4)), (130, (64, 32, 32, 16, 16, 16, 16))]
ONE_K = [(False, None), (False, 4), (True, 4), (True, None)]  # the last: a wrong guess


@pytest.mark.parametrize(
    "tokens, widths, one_k, ks",
    [(*cut, *k) for cut in SOME for k in ONE_K] + [(*cut, *k) for cut in SEVERAL for k in ONE_K],
)
def test_every_pair_stands_in_one_slice_of_its_k(sorted_pairs, tokens, widths, one_k, ks):
    ids, chunks, by = sorted_pairs(tokens, he.Cut(widths, 2, 2), one_k, ks)
    held = (ids < EXPERTS) & (ids >= 0) & (chunks > 0)
    number = int(held.sum())  # beyond them nothing is written
    order, places = by.order[:number].cpu().long(), by.places.cpu()
    assert torch.equal(places[order].long(), torch.arange(number)) and (places[~held] == -1).all()
    ids, chunks, seen = ids[order], chunks[order], torch.zeros(number, dtype=torch.int)
    tiles = by.tiles[: int(by.tiles[0, 1])].tolist()
    assert len(tiles) <= by.tiles.shape[0]
    for expert, _, *rest in tiles:
        levels = rest[2::3]
        assert levels[0] > 0 and 0 <= expert < EXPERTS
        for first, end, k, width in zip(rest[::3], rest[1::3], levels, widths, strict=True):
            assert 0 <= end - first <= width and (k == 0) == (first == end)
            assert (ids[first:end] == expert).all() and (chunks[first:end] == k).all()
            seen[first:end] += 1
        assert sorted(levels, key=lambda k: k == 0) == levels  # empty ones come last
        assert not one_k or len(set(levels) - {0}) == 1
    assert (seen == 1).all()
    if one_k:  # the longest first: by slices, then by planes
        lengths = [(sum(k > 0 for k in rest[2::3]), rest[2]) for _, _, *rest in tiles]
        assert lengths == sorted(lengths, reverse=True)


def test_slices_of_several_widths_take_the_k_with_most_pairs_left(random_encoded):
    """Worked by hand: pairs 0 to 31 belong to expert 0, the last to expert 1."""
    ks = [2] * 20 + [5] * 3 + [7] * 9 + [8]
    ids, chunks = torch.tensor([0] * 32 + [1])[:, None], torch.tensor(ks, dtype=torch.int32)[:, None]
    weight = moved(random_encoded(3, 8, 128, 64, PLANES))
    by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), he.Cut((16, 8), 2, 2), False, weight, weight)
    tiles = by.tiles[:4].tolist()
    assert tiles[0][1] == 4
    assert [(expert, *slices) for expert, _, *slices in tiles] == [
        (1, 32, 33, 8, 0, 0, 0),  # of first tiles, that with the largest k
        (0, 0, 16, 2, 23, 31, 7),
        (0, 16, 20, 2, 20, 23, 5),
        (0, 31, 32, 7, 0, 0, 0),
    ]


@pytest.mark.parametrize("widths, one_k, each", [((8, 8), False, 8), ((4, 4), True, 16), ((16, 8), False, 6)])
def test_the_most_tiles_that_pairs_can_need(random_encoded, widths, one_k, each):
    """Every expert has each k once more than slices of 4 or 8 hold, which no bound may forget."""
    cut, experts = he.Cut(widths, 2, 2), 3
    ids = torch.arange(experts).repeat_interleave(8 * 9)[:, None]
    chunks = torch.arange(1, 9, dtype=torch.int32).repeat_interleave(9).repeat(experts)[:, None]
    weight = moved(random_encoded(experts, 8, 128, 64, PLANES))
    by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), cut, one_k, weight, weight)
    assert int(by.tiles[0, 1]) == experts * each <= by.tiles.shape[0]


@pytest.mark.parametrize("programs, end", [(3, 0), (3, 1), (3, 6), (3, 7), (3, 9), (3, 10), (132, 1536)])
def test_items_are_shared_out_there_and_back(monkeypatch, programs, end):
    taken, program = [], 0
    own = {"program_id": lambda axis: program, "num_programs": lambda axis: programs}
    monkeypatch.setattr(hopper_tiles, "gl", SimpleNamespace(where=torch.where, int32=torch.int32, **own))
    item_of, items_of = hopper_tiles.item_of.fn, hopper_tiles.items_of.fn
    monkeypatch.setattr(hopper_tiles, "item_of", item_of)
    while program < programs:
        taken.append([int(item_of(torch.tensor(number))) for number in range(int(items_of(torch.tensor(end))))])
        program += 1
    assert sorted(sum(taken, [])) == list(range(end))
    assert all(items == sorted(items) for items in taken)
    pairs = {items[0] + items[1] for items in taken if len(items) > 1}
    assert pairs <= {2 * programs - 1}  # who begins with the longest goes on with the shortest


def test_nothing_but_padding_makes_no_tile(random_encoded):
    ids, chunks = torch.full((5, 2), EXPERTS), torch.full((5, 2), 3, dtype=torch.int32)
    weight = moved(random_encoded(EXPERTS, 8, 128, 64, PLANES))
    by = he.sort_pairs(ids.to(DEVICE), chunks.to(DEVICE), he.CUTS[0][1], False, weight, weight)
    assert int(by.tiles[0, 1]) == 0 and (by.places == -1).all()
