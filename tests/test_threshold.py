"""One threshold for the whole model: falls on the hull and levels by hand, budgets met on average, each pair by itself."""

import math

import pytest
import torch

from dpamoe import threshold
from dpamoe.kernels import reference
from dpamoe.threshold import ALWAYS, BINS, FARTHEST, WINDOW, Layer, count_gates, curve, falls, follow, level_for, thresholds

K_MIN = 2
BIN = 2 ** (1 / threshold.PARTS)  # factor between the edges of a bin


@pytest.fixture
def layers(random_pairs, convex_table):
    """Function that makes layers of 8 experts and the routing they were calibrated on."""

    def make(skip=False, tokens=2000, k_max=8):
        made, routings = [], []
        for seed, sensitivity in ((0, 1.0), (1, 30.0)):
            ids, gates, _ = random_pairs(tokens, 3, 8, seed)
            worth = falls(convex_table(8, seed=seed), K_MIN, skip) * sensitivity
            made.append(Layer(worth, count_gates(gates, ids, 8), k_max))
            routings.append((gates, ids))
        return made, routings

    return make


def planes(gates, ids, table, k_max=8):
    return torch.ops.dpamoe.allocate_threshold(gates, ids, table, torch.tensor(k_max, dtype=torch.int32))


def test_falls_by_hand():
    rows = torch.tensor([[20.0, 30, 8, 4, 3], [9.0, 30, 8, 4, 3], [1.0, 30, 8, 4, 3]])
    assert falls(rows, 2, False).tolist() == [[math.inf, math.inf, 4, 1]] * 3
    # from 20 to 8 in two steps; from 9 straight to 4, since the corner at 8 lies above; from 1 nothing is gained
    assert falls(rows, 2, True).tolist() == [[6, 6, 4, 1], [5 / 3, 5 / 3, 5 / 3, 1], [0, 0, 0, 0]]
    assert falls(rows, 1, True)[0].tolist() == [6, 6, 4, 1]  # one plane may be read, and is worth nothing


@pytest.mark.parametrize("k_min", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_falls_are_the_hull(convex_table, seed, k_min):
    """Summed up from the end they are a convex table that lies below, and touches where a threshold can stop."""
    table = convex_table(16, seed=seed).double()
    table[:, 0] = table[:, k_min] * (1 + 2 * torch.rand(16, generator=torch.Generator().manual_seed(seed)))
    each = falls(table, k_min, True)
    assert (each[:, 1:] <= each[:, :-1]).all() and (each >= 0).all()
    hull = torch.nn.functional.pad(each.flip(1).cumsum(1).flip(1), (0, 1)) + table[:, -1:]
    allowed = [0, *range(k_min, 9)]
    assert (hull[:, allowed] <= table[:, allowed] + 1e-12).all()
    stops = torch.nn.functional.pad(each[:, 1:] < each[:, :-1], (1, 1), value=True)
    assert not stops[:, 1:k_min].any()
    torch.testing.assert_close(hull[stops], table[stops], rtol=0, atol=1e-12)


def test_thresholds_by_hand():
    worth = torch.tensor([[math.inf, math.inf, 8.0, 2.0, 0.0]], dtype=torch.float64)
    assert thresholds(worth, 4.0).tolist() == [[ALWAYS, ALWAYS, 0.5, 2.0, math.inf]]
    assert thresholds(worth, math.inf).tolist() == [[ALWAYS, ALWAYS, math.inf, math.inf, math.inf]]
    assert thresholds(worth, 0.0).tolist() == [[ALWAYS] * 5]


def test_gates_are_counted_by_hand():
    gates = torch.tensor([[1.0, 0.5], [0.0, 3e-30], [100.0, -0.5]])
    counts = count_gates(gates, torch.tensor([[0, 1], [1, 2], [2, 0]]), 2)  # expert 2 is padding
    zero = -threshold.LOWEST * threshold.PARTS
    assert counts.shape == (2, BINS) and counts.sum() == 4
    assert counts[0, zero] == 1 and counts[0, zero - 8] == 1 and counts[1, zero - 8] == 1 and counts[1, 0] == 1
    assert count_gates(torch.tensor([[100.0, float("nan")]]), torch.tensor([[0, 0]]), 1)[0, -1] == 2


def test_the_curve_by_hand():
    """One expert, half of whose squared gates are in the bin from 1 on and half far below."""
    counts = torch.zeros(1, BINS, dtype=torch.int32)
    counts[0, -threshold.LOWEST * threshold.PARTS], counts[0, 0] = 10, 10
    mean = curve([Layer(torch.tensor([[math.inf, math.inf, 2.0]], dtype=torch.float64), counts, 3)])
    assert mean(math.inf) == 2.0 and mean(0) == 3.0 and mean(2.0) == 2.5  # a threshold at the lower edge of that bin
    assert mean(2.0 * BIN) == pytest.approx(2.0) and mean(2.0 * BIN**0.5) == pytest.approx(2.25)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("k_max", [4, 8])
def test_every_budget_is_met_on_average(layers, skip, k_max):
    made, routings = layers(skip, k_max=k_max)
    mean, least = curve(made), 0 if skip else K_MIN
    levels = []
    for budget in (least, least + 0.3, 2.5, 3.0, 3.7, k_max - 0.1, k_max):
        levels.append(level_for(made, budget))
        counted = mean(levels[-1])
        tables = [thresholds(layer.worth, levels[-1]) for layer in made]
        spent = [planes(*routing, table, k_max) for routing, table in zip(routings, tables, strict=True)]
        found = float(torch.stack(spent).float().mean())
        assert budget in (least, k_max) or counted == pytest.approx(budget, abs=1e-6)
        assert found == pytest.approx(budget, abs=0.02)  # gates lie unevenly in a bin of a quarter octave
        assert not skip or not any((part == 1).any() for part in spent)
    assert levels == sorted(levels, reverse=True) and levels[0] == math.inf


def test_no_other_allocation_of_as_many_planes_has_less_error(layers):
    """Planes by a threshold minimise sum of s g^2 R over the whole batch: the best of the exact programme over all pairs."""
    made, routings = layers(tokens=6)
    level = level_for(made, 3.3)
    tables = [thresholds(layer.worth, level) for layer in made]
    chunks = torch.cat([planes(*routing, table).flatten() for routing, table in zip(routings, tables, strict=True)])
    gates = torch.cat([routing[0].flatten() for routing in routings]).double()
    worth = torch.cat([one.worth[ids].flatten(0, 1) for one, (_, ids) in zip(made, routings, strict=True)])[:, K_MIN:]
    cost = gates.square()[:, None] * torch.nn.functional.pad(-worth.cumsum(1), (1, 0))
    best = reference.knapsack(cost[None], (chunks - K_MIN).sum()[None])[0]
    totals = [cost.gather(1, k.long()[:, None]).sum() for k in (chunks - K_MIN, best)]
    torch.testing.assert_close(*totals, rtol=1e-9, atol=0)


def test_layers_that_matter_more_get_more(layers):
    made, routings = layers()
    level = level_for(made, 4.0)
    tables = [thresholds(layer.worth, level) for layer in made]
    means = [planes(*routing, table).float().mean() for routing, table in zip(routings, tables, strict=True)]
    assert means[1] > means[0] + 1


def test_planes_by_hand():
    table = torch.tensor([[ALWAYS, ALWAYS, 0.25, 1.0], [0.25, 0.25, 0.5, math.inf]])
    gates = torch.tensor([[0.0, 0.5, 0.6, 9.0], [0.5, 0.6, 0.8, 9.0]])
    ids = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    assert planes(gates, ids, table).tolist() == [[2, 2, 3, 4], [0, 2, 3, 3]]
    assert planes(-gates, ids, table).tolist() == [[2, 2, 3, 4], [0, 2, 3, 3]]
    assert planes(gates, ids, table, 2).tolist() == [[2, 2, 2, 2], [0, 2, 2, 2]]
    assert planes(gates, torch.full_like(ids, 2), table).tolist() == [[0] * 4] * 2  # padding
    assert planes(torch.full_like(gates, float("nan")), ids, table).tolist() == [[4] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_a_pair_gets_the_same_planes_anywhere(random_pairs, layers, dtype, index):
    table = thresholds(layers(True)[0][0].worth, 1e-3)
    ids, gates, _ = random_pairs(30, 4, 8)
    ids, gates = ids.to(index), gates.to(dtype)
    batch = planes(gates, ids, table)
    assert batch.dtype == torch.int32 and (batch == 0).any() and (batch > 3).any()
    for rows in ([5], [29, 0, 5], list(range(30))[::-1]):
        assert torch.equal(planes(gates[rows], ids[rows], table), batch[rows])
    assert torch.equal(planes(gates[:, 2:3], ids[:, 2:3], table), batch[:, 2:3])


def test_a_level_follows_by_hand():
    """Two planes too many for three pairs, padding aside; a call of more pairs than the window counts by its own mean."""
    shift, target = torch.tensor(0.5), torch.tensor(3.0)
    chunks, held = torch.tensor([[4, 5], [2, 0]]), torch.tensor([[True, True], [True, False]])
    follow(shift, chunks, held, target)
    assert float(shift) == 0.5 + 2 / WINDOW
    follow(shift, torch.zeros_like(chunks), held & False, target)  # padding alone
    assert float(shift) == 0.5 + 2 / WINDOW
    many = torch.full((2 * WINDOW, 2), 5)
    for turns, expected in ((1, 2.5 + 2 / WINDOW), (20, FARTHEST)):
        for _ in range(turns):
            follow(shift, many, many > 0, target)
        assert float(shift) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 5000])
def test_a_held_average_comes_back(layers, random_pairs, tokens, skip):
    """Gates half or twice as large as those of calibration: the planes of the whole stream, and what each call does to them."""
    made, _ = layers(skip)
    rows, target = thresholds(made[0].worth, level_for(made[:1], 3.5)), torch.tensor(3.5)
    ids, gates, _ = random_pairs(5000, 3, 8, seed=4)
    for factor in (2.0, 0.5):
        shift = torch.zeros(())
        drift = float(planes(factor * gates, ids, rows).float().mean()) - 3.5
        assert abs(drift) > 0.3
        for _ in range(3 if tokens == 1 else 10):
            for own, some in zip((factor * gates).split(tokens), ids.split(tokens), strict=True):
                follow(shift, planes(own, some, rows * shift.exp2()), some >= 0, target)
        held = planes(factor * gates, ids, rows * shift.exp2()).float().mean()
        assert abs(float(held) - 3.5) < 0.035 and 0.5 < abs(float(shift)) < 3


def test_the_op_refuses_shapes_and_has_a_fake():
    gates, ids, table, k_max = torch.rand(3, 2), torch.zeros(3, 2).long(), torch.zeros(4, 8), torch.tensor(8)
    with pytest.raises(ValueError, match=r"gates \[3\]"):
        torch.ops.dpamoe.allocate_threshold(gates[:, 0], ids, table, k_max)
    with pytest.raises(ValueError, match=r"thresholds \[8\] must be \[experts, planes\]"):
        torch.ops.dpamoe.allocate_threshold(gates, ids, table[0], k_max)
    torch.library.opcheck(torch.ops.dpamoe.allocate_threshold, (gates, ids, table, k_max))
