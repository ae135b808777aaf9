"""Allocation by rank selection equals the dynamic programme; budgets hold exactly, per token and per dispatch."""

import itertools
from decimal import ROUND_FLOOR, Decimal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpamoe.kernels import allocation, reference

K_MIN = 2


def k_max(planes=8):
    return torch.tensor(planes, dtype=torch.int32)


def judge(gates, ids, table, budget, planes=8, k_min=K_MIN):
    return reference.allocate(gates, ids, table, torch.as_tensor(budget), k_max(planes), k_min)


def selected(gates, ids, table, budget, planes=8, k_min=K_MIN):
    return allocation.allocate(gates, ids, table, torch.as_tensor(budget), k_max(planes), k_min)


def objective(gates, ids, table, chunks):
    """Sum of gate^2 * residual of each token, fp64 [T]."""
    return (gates.double().square() * table.double()[ids, chunks.long()]).sum(1)


def planes_as_written(active, budget):
    """floor(A * budget + 1/2), in decimal arithmetic."""
    return int((Decimal(active) * Decimal(str(budget)) + Decimal("0.5")).to_integral_value(ROUND_FLOOR))


@pytest.mark.parametrize("active", [1, 2, 4, 8])
@pytest.mark.parametrize("budget", [2.0, 2.5, 3.3, 5.0, 7.9, 8.0])
def test_selection_equals_the_programme(random_pairs, convex_table, budget, active):
    table = convex_table(16)
    assert allocation.is_convex(table, K_MIN)
    ids, gates, _ = random_pairs(64, active, 16)
    found, exact = selected(gates, ids, table, budget), judge(gates, ids, table, budget)
    assert found.dtype == torch.int32
    assert (found.sum(1) == planes_as_written(active, budget)).all()
    least = objective(gates, ids, table, exact)
    torch.testing.assert_close(objective(gates, ids, table, found), least, rtol=1e-6, atol=0)
    falls = (gates.double().square()[..., None] * (table[:, 2:-1] - table[:, 3:]).double()[ids]).flatten(1)
    ranked = falls.sort(1, descending=True).values
    last = planes_as_written(active, budget) - active * K_MIN
    unique = torch.ones(64, dtype=torch.bool)
    if 0 < last < ranked.shape[1]:  # the last gain taken stands clear of the first one left
        unique = ranked[:, last - 1] > ranked[:, last] * (1 + 1e-5)
    assert unique.float().mean() > 0.9
    assert torch.equal(found[unique], exact[unique])


@pytest.mark.parametrize("active", [1, 3, 8])
def test_ties_fall_as_in_the_programme(random_pairs, convex_table, active):
    table = convex_table(16, whole=True)
    ids, _, _ = random_pairs(128, active, 16)
    gates = torch.randint(0, 3, ids.shape, generator=torch.Generator().manual_seed(1)).float()
    for budget in (2.0, 2.7, 4.0, 6.1, 8.0):
        assert torch.equal(selected(gates, ids, table, budget), judge(gates, ids, table, budget))


def test_ties_go_to_the_lower_slot():
    table = (0.25 ** torch.arange(9.0)).expand(4, 9)
    gates = torch.full((1, 4), 0.25)
    for find in (selected, judge):
        assert find(gates, torch.tensor([[3, 0, 1, 2]]), table, 3.5).tolist() == [[4, 4, 3, 3]]


def test_by_hand():
    residuals = torch.tensor([[9.0, 9.0, 8.0, 4.0, 2.0, 1.0], [9.0, 9.0, 6.0, 3.0, 1.0, 0.0]])
    gates = torch.tensor([[1.0, 2.0]])  # gains 4 2 1 of expert 0, and 4 times 3 2 1 of expert 1
    ids = torch.tensor([[0, 1]])
    picks = [selected(gates, ids, residuals, budget, planes=5).tolist()[0] for budget in (2, 2.5, 3, 3.5, 4, 4.5, 5)]
    assert picks == [[2, 2], [2, 3], [2, 4], [3, 4], [3, 5], [4, 5], [5, 5]]


@pytest.mark.parametrize("active", [1, 2, 4, 6, 8])
def test_budgets_round_half_up(random_pairs, convex_table, active):
    table, (ids, gates, _) = convex_table(8), random_pairs(3, active, 8)
    for hundredths in [*range(200, 801, 25), *range(200, 801, 10)]:
        budget = hundredths / 100
        expected = planes_as_written(active, budget)
        for find in (selected, judge):
            assert (find(gates, ids, table, budget).sum(1) == expected).all(), budget


@pytest.mark.parametrize(
    "active, budget, planes", [(1, 2.5, 3), (1, 3.5, 4), (1, 4.5, 5), (2, 3.25, 7), (4, 2.1, 8), (5, 2.1, 11)]
)
def test_budgets_by_hand(random_pairs, convex_table, active, budget, planes):
    ids, gates, _ = random_pairs(2, active, 8)
    assert selected(gates, ids, convex_table(8), budget).sum(1).tolist() == [planes, planes]


def test_budgets_outside_the_range_are_clamped(random_pairs, convex_table):
    ids, gates, _ = random_pairs(3, 4, 8)
    for find in (selected, judge):
        assert (find(gates, ids, convex_table(8), 0.5) == K_MIN).all()
        for most in (99.0, float("inf")):
            assert (find(gates, ids, convex_table(8), most) == 8).all()


@pytest.mark.parametrize("find", [selected, judge])
def test_one_budget_per_token(random_pairs, convex_table, find):
    table, (ids, gates, _) = convex_table(8), random_pairs(5, 4, 8)
    budgets = torch.tensor([2.0, 8.0, 3.25, 4.6, 6.0])
    together = find(gates, ids, table, budgets)
    assert together.sum(1).tolist() == [8, 32, 13, 18, 24]
    alone = [find(gates[t : t + 1], ids[t : t + 1], table, budgets[t]) for t in range(5)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("find", [selected, judge])
@pytest.mark.parametrize("k_min, planes", [(2, 4), (1, 8), (0, 8), (4, 4), (8, 8)])
def test_range_of_planes(random_pairs, convex_table, find, k_min, planes):
    table, (ids, gates, _) = convex_table(8), random_pairs(9, 3, 8)
    for budget in sorted({float(k_min), (k_min + planes) / 2, float(planes)}):
        chunks = find(gates, ids, table, budget, planes, k_min)
        assert chunks.min() >= k_min and chunks.max() <= planes
        assert (chunks.sum(1) == planes_as_written(3, budget)).all()
        assert torch.equal(chunks, judge(gates, ids, table[:, : planes + 1], budget, planes, k_min))


def test_empty_batches(convex_table):
    nothing = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.long)
    bent = convex_table(8)
    bent[0, 3] = bent[0, 2]
    for table in (convex_table(8), bent):
        arguments = (*nothing, table, torch.tensor(3.0), k_max(), K_MIN)
        assert allocation.allocate(*arguments).shape == allocation.allocate_dispatch(*arguments).shape == (0, 4)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_row_gets_the_same_planes_in_any_batch(random_pairs, convex_table, data):
    seed, experts = data.draw(st.integers(0, 999)), data.draw(st.integers(8, 20))
    table = convex_table(experts, seed=seed, whole=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        table[0, 4] = table[0, 3]  # a plateau before a fall
    ids, gates, _ = random_pairs(12, data.draw(st.integers(1, 8)), experts, seed)
    pads = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    ids = torch.where(pads, data.draw(st.sampled_from([experts, -1])), ids)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12)))
    budget = data.draw(st.floats(2, 8))
    batch = selected(gates, ids, table, budget)
    assert torch.equal(selected(gates[rows], ids[rows], table, budget), batch[rows])
    assert torch.equal(selected(gates[rows[:1]], ids[rows[:1]], table, budget), batch[rows[:1]])


@pytest.mark.parametrize("find", [selected, judge])
@pytest.mark.parametrize("sentinel", [8, -1, 1000])
def test_padding_gets_and_costs_nothing(random_pairs, convex_table, find, sentinel):
    table, (ids, gates, _) = convex_table(8), random_pairs(6, 4, 8)
    for poison in (7.0, float("nan"), float("inf")):
        padded = torch.cat([torch.full((6, 1), sentinel), ids, torch.full((6, 2), sentinel)], 1)
        weights = torch.cat([torch.full((6, 1), poison), gates, torch.full((6, 2), poison)], 1)
        chunks = find(weights, padded, table, 3.4)
        assert not chunks[:, [0, 5, 6]].any()
        assert torch.equal(chunks[:, 1:5], find(gates, ids, table, 3.4))
    assert not find(gates, torch.full_like(ids, sentinel), table, 3.4).any()


@pytest.mark.parametrize("find", [selected, judge])
def test_zero_equal_and_negative_gates(random_pairs, convex_table, find):
    table, (ids, gates, _) = convex_table(8), random_pairs(6, 4, 8)
    assert find(torch.zeros_like(gates), ids, table, 3.5).tolist() == [[8, 2, 2, 2]] * 6  # all gains tie at 0
    one_zero = gates.clone()
    one_zero[:, 2] = 0
    chunks = find(one_zero, ids, table, 6.0)
    assert (chunks[:, 2] == K_MIN).all() and (chunks.sum(1) == 24).all()
    assert torch.equal(find(-gates, ids, table, 3.5), find(gates, ids, table, 3.5))
    same = find(torch.full_like(gates, 0.25), ids, table, 4.0)
    assert torch.equal(same, find(torch.ones_like(gates), ids, table, 4.0))


def test_tables_that_are_not_convex_go_to_the_programme(random_pairs):
    random = torch.Generator().manual_seed(0)
    table = torch.rand(8, 9, generator=random)  # neither convex nor falling
    assert not allocation.is_convex(table, K_MIN)
    ids, gates, _ = random_pairs(64, 4, 8)
    for budget in (2.5, 4.0, 6.2):
        assert torch.equal(selected(gates, ids, table, budget), judge(gates, ids, table, budget))


@pytest.mark.parametrize("row, convex", [
    ([9, 9, 8, 4, 2, 1], True), ([1, 5, 8, 4, 2, 1], True), ([9, 9, 8, 6, 4, 2], True), ([9, 9, 3, 3, 3, 3], True),
    ([9, 9, 8, 7, 4, 2], False), ([9, 9, 8, 4, 4, 3], False), ([9, 9, 8, 4, 2, 2.5], False),
])  # fmt: skip
def test_convex_from_k_min_on(row, convex):
    table = torch.tensor([[9, 9, 8, 4, 2, 1], row], dtype=torch.float32)
    assert allocation.is_convex(table, 2) == convex


def forbid_one(table):
    """One plane is not allowed, as where experts may be skipped."""
    table = table.clone()
    table[:, 1] = float("inf")
    return table


def by_brute_force(gates, ids, table, planes, least, chosen_sum):
    """Least objective of each token over all k of `least`, whose sum is `chosen_sum`, fp64 [T]."""
    choices = torch.tensor([k for k in itertools.product(least, repeat=ids.shape[1]) if sum(k) == chosen_sum])
    costs = table.double()[ids[:, None], choices[None]]
    return (gates.double().square()[:, None] * costs).sum(-1).min(1).values


@pytest.mark.parametrize("planes", [2, 3, 5])
@pytest.mark.parametrize("active", [1, 2, 4])
def test_skipping_against_brute_force(random_pairs, convex_table, active, planes):
    table = forbid_one(convex_table(16, seed=3))
    ids, gates, _ = random_pairs(24, active, 16)
    possible = {sum(k) for k in itertools.product((0, *range(2, planes + 1)), repeat=active)}
    for budget in (0, 0.3, 0.5, 1, 1.25, 1.5, 2, 2.25, 2.5, 3.5, 5):
        chunks = selected(gates, ids, table, budget, planes, 0)
        spend = max(s for s in possible if s <= min(planes_as_written(active, budget), active * planes))
        assert (chunks.sum(1) == spend).all() and not (chunks == 1).any() and chunks.max() <= planes
        least = by_brute_force(gates, ids, table, planes, (0, *range(2, planes + 1)), spend)
        torch.testing.assert_close(objective(gates, ids, table, chunks), least, rtol=1e-12, atol=0)


def test_skipping_by_hand(convex_table):
    table = forbid_one(torch.tensor([[8.0, 0, 4.0, 2.0, 1.0]]).expand(3, 5))  # two planes save 4, the third 2, the fourth 1
    gates, ids = torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[2, 0, 1]])
    picks = [selected(gates, ids, table, budget, 4, 0).tolist()[0] for budget in (0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2, 3)]
    assert picks == [[0, 0, 0], [0, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0], [3, 2, 0], [4, 2, 0], [4, 3, 2]]


def test_skipping_gives_a_row_the_same_planes_in_any_batch(random_pairs, convex_table):
    table, (ids, gates, _) = forbid_one(convex_table(8)), random_pairs(40, 4, 8)
    gates[::3, 1] = 0
    ids[::5, 2] = 8
    for budget in (1.3, 2.0, 2.5):
        batch = selected(gates, ids, table, budget, 8, 0)
        for rows in ([7], [0, 39, 5, 5], list(range(39, -1, -1))):
            assert torch.equal(selected(gates[rows], ids[rows], table, budget, 8, 0), batch[rows])


def test_skipping_in_a_dispatch(random_pairs, convex_table):
    table, (ids, gates, _) = forbid_one(convex_table(8)), random_pairs(3, 2, 8)
    for budget in (0.2, 1.0, 2.0, 3.3):
        chunks = allocation.allocate_dispatch(gates, ids, table, torch.tensor(budget), k_max(), 0)
        picks = distinct_picks(ids, chunks, 8)
        present = sorted(picks)
        importance = importance_of(gates, ids, 8)[present].sqrt()[None]
        spend = planes_as_written(len(picks), budget)
        assert sum(picks.values()) == (spend if spend != 1 else 0) and 1 not in picks.values()
        spent = torch.tensor([[picks[expert] for expert in present]])
        least = by_brute_force(importance, torch.tensor([present]), table, 8, (0, *range(2, 9)), int(spent.sum()))
        torch.testing.assert_close(objective(importance, torch.tensor([present]), table, spent), least, rtol=1e-12, atol=0)


def test_select_by_hand():
    gains = torch.tensor([[[3.0, 1.0], [3.0, 2.0], [float("-inf"), float("-inf")]]]).expand(5, 3, 2)
    picks = allocation.select(gains, torch.arange(5))
    assert picks.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0], [2, 2, 0]]


def test_forbidden_planes_stay_forbidden_at_zero_weight(convex_table):
    gains = allocation.plane_gains(convex_table(3), K_MIN, k_max(4))
    assert torch.isinf(gains[:, 2:]).all() and torch.isfinite(gains[:, :2]).all()
    weighed = allocation.weigh(torch.zeros(3), gains)
    assert weighed.tolist() == [[0.0, 0.0] + [float("-inf")] * 4] * 3


def dispatched(gates, ids, table, budget, planes=8):
    return allocation.allocate_dispatch(gates, ids, table, torch.tensor(budget), k_max(planes), K_MIN)


def distinct_picks(ids, chunks, experts):
    """Planes of each distinct expert, {expert: k}; fails if one expert has two."""
    held = (ids >= 0) & (ids < experts)
    assert not chunks[~held].any()
    pairs = set(zip(ids[held].tolist(), chunks[held].tolist(), strict=True))
    assert len(pairs) == len({expert for expert, _ in pairs})
    return dict(pairs)


def importance_of(gates, ids, experts):
    """Sum of gate^2 over the tokens of each expert, fp64 [E]."""
    return torch.stack([gates.double().square()[ids == expert].sum() for expert in range(experts)])


@pytest.mark.parametrize("convex", [True, False])
@pytest.mark.parametrize("tokens, active, experts", [(1, 8, 16), (5, 2, 16), (33, 4, 8), (3, 1, 64)])
def test_dispatch_equals_the_programme(random_pairs, convex_table, tokens, active, experts, convex):
    table, (ids, gates, _) = convex_table(experts), random_pairs(tokens, active, experts)
    if not convex:
        table[:, 4] = table[:, 3]
    assert allocation.is_convex(table, K_MIN) == convex
    importance = importance_of(gates, ids, experts)
    for budget in (2.0, 2.25, 3.3, 5.5, 8.0):
        picks = distinct_picks(ids, dispatched(gates, ids, table, budget), experts)
        extra = planes_as_written(len(picks), Decimal(str(budget)) - K_MIN)
        assert sum(picks.values()) == K_MIN * len(picks) + extra
        present = sorted(picks)
        cost = importance[present, None] * table.double()[present, K_MIN:]
        exact = reference.knapsack(cost[None], torch.tensor([extra]))[0]
        found = torch.tensor([picks[expert] for expert in present]) - K_MIN
        totals = [cost.gather(1, choice[:, None]).sum() for choice in (found, exact)]
        torch.testing.assert_close(*totals, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count, budget, planes", [(1, 2.5, 3), (3, 2.5, 8), (7, 3.5, 25), (4, 2.1, 8), (5, 2.1, 11)])
def test_dispatch_rounds_half_up(convex_table, count, budget, planes):
    ids = torch.arange(count)[:, None]
    assert dispatched(torch.ones(count, 1), ids, convex_table(8), budget).sum() == planes


def test_dispatch_stays_in_range(random_pairs, convex_table):
    ids, gates, _ = random_pairs(5, 3, 8)
    assert (dispatched(gates, ids, convex_table(8), 0.1) == K_MIN).all()
    for most in (50.0, float("inf")):
        assert (dispatched(gates, ids, convex_table(8), most) == 8).all()
    chunks = dispatched(gates, ids, convex_table(8), 3.0, planes=4)
    assert chunks.max() <= 4
    picks = distinct_picks(ids, chunks, 8)
    assert sum(picks.values()) == 3 * len(picks)


@pytest.mark.parametrize("poison", [5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("sentinel", [8, -1])
def test_dispatch_does_not_see_padding(random_pairs, convex_table, sentinel, poison):
    table, (ids, gates, _) = convex_table(8), random_pairs(5, 3, 8)
    padded = torch.cat([torch.full((4, 3), sentinel), ids])
    weights = torch.cat([torch.full((4, 3), poison), gates])
    chunks = dispatched(weights, padded, table, 3.3)
    assert not chunks[:4].any()
    assert torch.equal(chunks[4:], dispatched(gates, ids, table, 3.3))
    assert not dispatched(weights[:4], padded[:4], table, 3.3).any()


def test_dispatch_gives_an_expert_of_zero_gates_no_more_than_it_must(convex_table):
    ids, gates = torch.tensor([[0, 1], [2, 1]]), torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    assert dispatched(gates, ids, convex_table(8), 4.0).tolist()[0][1] == K_MIN
    assert dispatched(torch.zeros(2, 2), ids, convex_table(8), 4.0).tolist() == [[8, 2], [2, 2]]
