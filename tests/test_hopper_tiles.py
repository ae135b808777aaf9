"""Tiles for the Hopper kernel, by the interpreter: every pair in one slice, read as the kernel reads them."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import hopper_experts as he

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
