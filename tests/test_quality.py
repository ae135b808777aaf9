"""Quality on the larger trained model by one command, against the bounds that the project promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BUDGETS = [2, 3, 4, 5, 6, 8]
ALLOCATIONS = ["uniform", "dpa", "gate-linear", "gate-only", "residual-only"]


@pytest.fixture(scope="module")
def rows(shared):
    """What `dpamoe eval --json` prints for the model `small` over 20,000 held-out tokens, group size 128: rows by budget."""
    models = shared / "models"
    command = [
        Path(sys.executable).with_name("dpamoe"), "eval", models / "small", "--json", "--max-tokens", "20000",
        "--text", shared / "tasks" / "heldout_ppl.txt", "--calibration", models / "calibration.txt",
        "--budgets", ",".join(map(str, BUDGETS)), "--allocations", ",".join(ALLOCATIONS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["sites"], outcome["experts"]) == (5, 160)
    assert [row["budget"] for row in outcome["rows"]] == BUDGETS
    return {row["budget"]: row for row in outcome["rows"]} | {"full": outcome["full_precision"]["ppl"]}


@pytest.mark.parametrize("budget, bound", [(3, 0.68), (4, 0.68), (5, 0.80), (6, 0.82)])
def test_dpa_against_uniform(rows, budget, bound):
    """Measured .593, .617, .679, .703."""
    assert rows[budget]["kl_dpa"] <= bound * rows[budget]["kl_uniform"]


@pytest.mark.parametrize("budget", [3, 4])
def test_squared_gate_against_gate(rows, budget):
    """Measured .828, .830."""
    assert rows[budget]["kl_dpa"] <= 0.90 * rows[budget]["kl_gate_linear"]


@pytest.mark.parametrize(
    "budget, column, nats",
    [(3, "kl_uniform", 0.055), (4, "kl_uniform", 0.016), (8, "kl_uniform", 5e-4), (3, "kl_dpa", 0.033), (4, "kl_dpa", 0.0095)],
)
def test_absolute(rows, budget, column, nats):
    """Measured Uniform .0518, .0145, .00032, DPA .0307, .0090; the prototype .0493, .0138, .00033, .0293, .0084."""
    assert rows[budget][column] <= nats


@pytest.mark.parametrize("budget", [2, 8])
def test_no_choice_makes_no_difference(rows, budget):
    assert len({rows[budget][f"kl_{name.replace('-', '_')}"] for name in ALLOCATIONS}) == 1


def test_more_planes_are_better_and_cost_what_they_should(rows):
    for name in ALLOCATIONS:
        values = [rows[budget][f"kl_{name.replace('-', '_')}"] for budget in BUDGETS]
        assert values == sorted(values, reverse=True) and values[-1] > 0
    for budget in BUDGETS:
        assert rows[budget]["bits_per_weight"] == budget * 1.125 + 0.125 and rows[budget]["mean_planes"] == budget
    weights = 5 * 32 * 3 * 384 * 128
    # one plane more costs one bit and a share of a scale for every expert weight
    assert rows[4]["weight_bytes"] - rows[3]["weight_bytes"] == weights * 1.125 / 8
    assert rows[8]["ppl_dpa"] == pytest.approx(rows["full"], rel=2e-3)
