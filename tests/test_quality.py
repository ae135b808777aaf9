"""Quality on the larger trained model by one command, against the bounds that the project promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BUDGETS = [2, 3, 4, 5, 6, 8]
FEWER = [2, 3, 4, 8]
ALLOCATIONS = ["dpa", "uniform", "gate-linear", "gate-only", "residual-only"]


@pytest.fixture(scope="module")
def points(shared):
    """DPA and Uniform-k over 20,000 held-out tokens, by name and budget."""
    return evaluated(shared, 20000, BUDGETS, ALLOCATIONS[:2])


@pytest.fixture(scope="module")
def ablations(shared):
    """All allocations over fewer tokens at some budgets: their KL differ by much, or not at all."""
    return evaluated(shared, 5000, FEWER, ALLOCATIONS)


def evaluated(shared, tokens, budgets, allocations):
    """What `dpamoe eval --json` prints for the model `small`."""
    models = shared / "models"
    command = [
        Path(sys.executable).with_name("dpamoe"), "eval", models / "small", "--json", "--max-tokens", str(tokens),
        "--text", shared / "tasks" / "heldout_ppl.txt", "--calibration", models / "calibration.txt",
        "--budgets", ",".join(map(str, budgets)), "--baselines", ",".join(allocations[1:]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["sites"], outcome["experts"]) == (5, 160)
    found = {(point["allocation"], point["budget"]): point for point in outcome["points"]}
    assert set(found) == {(name, budget) for name in allocations for budget in budgets}
    return found | {"full": outcome["full_precision"]}


@pytest.mark.parametrize("budget, bound", [(3, 0.68), (4, 0.68), (5, 0.80), (6, 0.82)])
def test_dpa_against_uniform(points, budget, bound):
    """Measured .593, .617, .679, .703."""
    assert points["dpa", budget]["kl"] <= bound * points["uniform", budget]["kl"]


@pytest.mark.parametrize("budget", [3, 4])
def test_squared_gate_against_gate(ablations, budget):
    """Measured .826, .827; over 20,000 tokens .828, .830."""
    assert ablations["dpa", budget]["kl"] <= 0.90 * ablations["gate-linear", budget]["kl"]


@pytest.mark.parametrize(
    "budget, name, nats",
    [(3, "uniform", 0.055), (4, "uniform", 0.016), (8, "uniform", 5e-4), (3, "dpa", 0.033), (4, "dpa", 0.0095)],
)
def test_absolute(points, budget, name, nats):
    """Measured Uniform .0518, .0145, .00032, DPA .0307, .0090; the prototype .0493, .0138, .00033, .0293, .0084."""
    assert points[name, budget]["kl"] <= nats


@pytest.mark.parametrize("budget", [2, 8])
def test_no_choice_makes_no_difference(ablations, budget):
    first, *others = ({**ablations[name, budget], "allocation": ""} for name in ALLOCATIONS)
    assert all(other == first for other in others)  # KL, perplexity and how many pairs read how many planes


def test_more_planes_are_better_and_cost_what_they_should(points, ablations):
    for found, budgets, allocations in ((points, BUDGETS, ALLOCATIONS[:2]), (ablations, FEWER, ALLOCATIONS)):
        for name in allocations:
            values = [found[name, budget]["kl"] for budget in budgets]
            assert values == sorted(values, reverse=True) and values[-1] > 0
            for budget in budgets:
                point = found[name, budget]
                assert point["bits_per_weight"] == budget * 1.125 + 0.125 and point["mean_planes"] == budget
    weights = 5 * 32 * 3 * 384 * 128
    # one plane more costs one bit and a share of a scale for every expert weight
    assert points["dpa", 4]["weight_bytes"] - points["dpa", 3]["weight_bytes"] == weights * 1.125 / 8
    assert points["dpa", 8]["ppl"] == pytest.approx(points["full"]["ppl"], rel=2e-3)
