"""Residual tables made fit for allocation, and what each way to allocate sees."""

import pytest
import torch

from dpamoe.allocate import allocation_gates, allocation_table, project
from dpamoe.kernels import allocation, reference
from dpamoe.spec import ALLOCATIONS, check_budget

K_MIN = 2
NOISY_SEEDS = range(20)


def falling(row):
    """Least-squares fit by a non-increasing sequence, by the min-max formula, fp64."""
    row = torch.as_tensor(row, dtype=torch.float64)
    means = [[row[j : i + 1].mean() for i in range(len(row))] for j in range(len(row))]
    return torch.stack([min(max(means[j][k] for k in range(i, len(row))) for j in range(i + 1)) for i in range(len(row))])


def hull(row):
    """Largest convex sequence below `row`: the least value at x of all chords that span it."""

    def chord(i, j, x):
        return row[i] if i == j else row[i] + (row[j] - row[i]) * (x - i) / (j - i)

    size = len(row)
    return torch.stack([min(chord(i, j, x) for i in range(x + 1) for j in range(x, size)) for x in range(size)])


def noisy_table(seed, experts=16):
    """Residuals of about a sixth per plane, as measured on real models, under heavy noise."""
    random = torch.Generator().manual_seed(seed)
    curves = torch.exp(torch.randn(experts, 1, generator=random)) * 0.28 ** torch.arange(9)
    return curves * torch.exp(0.6 * torch.randn(experts, 9, generator=random))


def test_project_by_hand():
    raw = torch.tensor([[7.0, 9.0, 8.0, 2.0, 4.0, 3.0, 3.5, 1.0]])
    # 2 4 3 3.5 rise, so they are pooled to 3.125; the chord from there to the last 1 is the hull
    assert falling([8.0, 2.0, 4.0, 3.0, 3.5, 1.0]).tolist() == [8.0, 3.125, 3.125, 3.125, 3.125, 1.0]
    expected = [7.0, 9.0, 8.0, 3.125, *(3.125 - 2.125 * step / 4 for step in (1, 2, 3)), 1.0]
    torch.testing.assert_close(project(raw, K_MIN), torch.tensor([expected]))


@pytest.mark.parametrize("k_min", [0, 1, 2, 7, 8])
def test_project_is_the_hull_of_the_falling_fit(k_min):
    raw = noisy_table(0)
    result = project(raw, k_min)
    expected = torch.stack([hull(falling(row[k_min:])) for row in raw])
    torch.testing.assert_close(result[:, k_min:], expected.float(), rtol=2e-6, atol=0)
    assert torch.equal(result[:, :k_min], raw[:, :k_min])


@pytest.mark.parametrize("seed", NOISY_SEEDS)
def test_projected_tables_fall_and_lie_below_the_fit(seed):
    raw = noisy_table(seed)
    result = project(raw, K_MIN)
    assert result.dtype == torch.float32 and torch.isfinite(result).all() and (result > 0).all()
    assert (result[:, K_MIN:-1] >= result[:, K_MIN + 1 :]).all()
    fit = torch.stack([falling(row[K_MIN:]) for row in raw]).float()
    assert (result[:, K_MIN:] <= fit * (1 + 1e-6)).all()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_projected_tables_take_the_fast_path(scale):
    for seed in NOISY_SEEDS:
        assert allocation.is_convex(project(noisy_table(seed, 64) * scale, K_MIN), K_MIN)


def test_convex_tables_stay_as_they_are(convex_table):
    table = convex_table(32)
    torch.testing.assert_close(project(table, K_MIN), table, rtol=1e-6, atol=1e-12)
    whole = convex_table(32, whole=True)  # exact in fp32: nothing to round
    assert torch.equal(project(whole, K_MIN), whole)


def test_flat_and_zero_rows_stay_as_they_are():
    table = torch.tensor([[5.0] * 9, [0.0] * 9, [1e-30] * 9])
    assert torch.equal(project(table, K_MIN), table)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_project_refuses_what_is_not_finite(convex_table, bad):
    table = convex_table(4)
    table[1, 3] = table[2, 8] = bad
    with pytest.raises(ValueError, match="2 entries"):
        project(table, K_MIN)


def greedy(cost, spend):
    """One plane at a time to the largest next gain, on the table as it is."""
    picks = torch.zeros(cost.shape[0], dtype=torch.long)
    rows = torch.arange(cost.shape[0])
    padded = torch.nn.functional.pad(cost, (0, 1), value=float("inf"))
    for _ in range(spend):
        picks[(padded[rows, picks] - padded[rows, picks + 1]).argmax()] += 1
    return picks


def test_selection_on_the_hull_beats_greedy_on_the_raw_table():
    excess = {"greedy": [], "hull": []}
    for seed in range(60):
        raw = torch.stack([falling(row) for row in noisy_table(seed, experts=8)])  # monotone, with plateaus
        gates = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed)).softmax(-1).double()
        cost = (gates[0, :, None] ** 2 * raw)[:, K_MIN:]
        everyone = torch.arange(8)[None]
        for spend in (8, 16, 24):
            best = cost.gather(1, reference.knapsack(cost[None], torch.tensor([spend])).T).sum()
            budget, top = torch.tensor(K_MIN + spend / 8), torch.tensor(8)
            chosen = allocation.allocate(gates, everyone, project(raw.float(), K_MIN), budget, top, K_MIN)[0] - K_MIN
            for name, picks in {"hull": chosen.long(), "greedy": greedy(cost, spend)}.items():
                assert picks.sum() == spend
                excess[name].append(float(cost.gather(1, picks[:, None]).sum() / best) - 1)
    mean = {name: sum(values) / len(values) for name, values in excess.items()}
    assert min(excess["hull"]) > -1e-6
    assert mean["hull"] <= 0.05  # measured 0.011; greedy, trapped by plateaus, 6.2
    assert mean["greedy"] > 1


def test_every_allocation_has_a_table(convex_table):
    residuals = convex_table(16)
    tables = {name: allocation_table(residuals, name, K_MIN) for name in ALLOCATIONS}
    for table in tables.values():
        assert table.shape == residuals.shape and table.dtype == torch.float32 and table.is_contiguous()
        assert allocation.is_convex(table, K_MIN)
    for name in ("dpa", "gate-linear", "residual-only"):
        assert torch.equal(tables[name], residuals)
    for name in ("gate-only", "uniform"):
        assert (tables[name] == tables[name][0]).all()
    mean = residuals.double().mean(0)
    torch.testing.assert_close(tables["gate-only"][0], mean.float(), rtol=1e-6, atol=0)
    assert torch.equal(tables["uniform"][0], 0.25 ** torch.arange(9.0))


@pytest.mark.parametrize("k_min", [1, 2, 4])
def test_tables_where_experts_may_be_skipped(convex_table, k_min):
    residuals = convex_table(16)
    for name in ALLOCATIONS:
        usual, table = (allocation_table(residuals, name, k_min, skip) for skip in (False, True))
        assert torch.isinf(table[:, 1:k_min]).all()
        assert torch.equal(table[:, 0], usual[:, 0]) and torch.equal(table[:, k_min:], usual[:, k_min:])
    assert torch.isfinite(residuals).all()  # not written into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_of_every_allocation(dtype):
    gates = torch.tensor([[0.25, -0.5, 0.0, 4.0]]).to(dtype)
    seen = {name: allocation_gates(gates, name, torch.tensor(2.5)) for name in ALLOCATIONS}
    assert all(tensor.dtype == dtype for name, tensor in seen.items() if name not in ("residual-only", "uniform"))
    assert torch.equal(seen["dpa"], gates) and torch.equal(seen["gate-only"], gates)
    assert seen["residual-only"].tolist() == seen["uniform"].tolist() == [[2.5] * 4]
    torch.testing.assert_close(seen["gate-linear"].square(), gates.abs())  # squared again, the gate itself


def spent(name, residuals, ids, gates, budget):
    table, weights = allocation_table(residuals, name, K_MIN), allocation_gates(gates, name, torch.ones(()))
    return allocation.allocate(weights, ids, table, torch.tensor(budget), torch.tensor(8), K_MIN)


@pytest.mark.parametrize("active", [1, 3, 8])
@pytest.mark.parametrize("budget", [2, 3, 4, 5, 6, 7, 8])
def test_uniform_gives_everyone_the_same(random_pairs, budget, active):
    ids, gates, _ = random_pairs(9, active, 16)
    assert (spent("uniform", noisy_table(0), ids, gates, float(budget)) == budget).all()


def test_uniform_between_whole_budgets(random_pairs):
    ids, gates, _ = random_pairs(9, 4, 16)
    assert spent("uniform", noisy_table(0), ids, gates, 3.5).tolist() == [[4, 4, 3, 3]] * 9
    assert spent("uniform", noisy_table(0), ids, gates, 5.25).tolist() == [[6, 5, 5, 5]] * 9


def test_what_each_allocation_looks_at(random_pairs):
    residuals = project(noisy_table(1), K_MIN)
    ids, gates, _ = random_pairs(64, 4, 16)
    chunks = {name: spent(name, residuals, ids, gates, 4.0) for name in ALLOCATIONS}
    assert all((each.sum(1) == 16).all() for each in chunks.values())
    ordered = gates.argsort(1, descending=True)
    by_gate = chunks["gate-only"].gather(1, ordered)
    assert (by_gate[:, :-1] >= by_gate[:, 1:]).all()  # a larger gate never gets less
    other_gates = gates.flip(1)
    assert torch.equal(spent("residual-only", residuals, ids, other_gates, 4.0), chunks["residual-only"])
    assert torch.equal(spent("gate-only", residuals, (ids + 1) % 16, gates, 4.0), chunks["gate-only"])
    objectives = {"dpa": gates.double().square(), "gate-linear": gates.double(), "residual-only": torch.ones(64, 4)}
    for name, weight in objectives.items():
        costs = {n: float((weight * residuals.double()[ids, c.long()]).sum()) for n, c in chunks.items()}
        assert costs[name] <= min(costs.values()) * (1 + 1e-6)
        assert costs[name] < costs["uniform"]


@pytest.mark.parametrize("budget", [2, 8, 3.25])
def test_budgets_in_range_pass(budget):
    assert check_budget(budget, 2, 8) == budget


@pytest.mark.parametrize("budget", [1.99, 8.01, -1, float("nan"), float("inf")])
def test_budgets_out_of_range_are_refused(budget):
    with pytest.raises(ValueError, match="2 to 8"):
        check_budget(budget, 2, 8)
