"""`dpamoe plan` as people and programs call it."""

import json

import pytest

from dpamoe.cli.main import build_parser
from dpamoe.cli.plan import run, show
from dpamoe.plan import costs_of, plan


def planned(*arguments):
    return run(build_parser().parse_args(["plan", *map(str, arguments)]))


def test_the_answer_comes_first(tiny_saved):
    outcome = planned(tiny_saved, "--memory", "3MiB", "--context", 64, "--margin", "500KB")
    first, parts, _, *rows = show(outcome).splitlines()
    assert first.startswith("k_max=3 fits into 3.00 MiB, with budgets from 2 to 3; at budget 3 a token reads ")
    assert "cache for 1 × 64 tokens" in parts and "488.28 KiB working space" in parts and "once encoded" not in parts
    assert [(row.split()[0], "fits" in row) for row in rows] == [(str(k), k <= 3) for k in range(2, 9)]
    assert not outcome["failed"] and json.loads(json.dumps(outcome)) == outcome


def test_numbers_are_those_of_the_library(tiny_saved):
    outcome = planned(tiny_saved, "--memory", "1GiB", "--context", 128, "--batch", 2)
    expected = plan(costs_of(tiny_saved, None), 1 << 30, 128, 2)
    assert {key: outcome[key] for key in expected} == expected


def test_an_original_folder(tiny_dir):
    outcome = planned(tiny_dir, "--memory", "1GiB", "--context", 64, "--group-size", 64, "--k-max", 5)
    first, parts = show(outcome).splitlines()[:2]
    assert first.startswith("--k-max 5 or more, then k_max=5 fits into 1.00 GiB")
    assert parts.endswith("once encoded (group size 64, shared scales)")


def test_an_original_folder_with_a_preset(tiny_dir, tiny_saved):
    asked = (tiny_dir, "--memory", "1GiB", "--context", 64, "--preset", "quality")
    first, parts = show(planned(*asked)).splitlines()[:2]
    assert "with budgets from 0 to 8" in first and parts.endswith("once encoded (group size 32, tied scales)")
    assert show(planned(*asked, "--group-size", 64)).splitlines()[1].endswith("once encoded (group size 64, tied scales)")
    with pytest.raises(ValueError, match="is encoded already: leave --preset and the encoding flags out"):
        planned(tiny_saved, *asked[1:])


def test_nothing_fits(tiny_saved):
    outcome = planned(tiny_saved, "--memory", "1MiB", "--context", 64)
    first = show(outcome).splitlines()[0]
    assert first.startswith(f"nothing of {tiny_saved} fits into 1.00 MiB: with the fewest planes, 2, it needs 514.")
    assert outcome["failed"] and outcome["k_max"] is None


def test_an_upper_bound_says_so(tiny_saved):
    outcome = planned(tiny_saved, "--memory", "1GiB", "--context", 64)
    assert "upper bound" in show({**outcome, "cache_exact": False}) and "upper bound" not in show(outcome)


@pytest.mark.parametrize(
    "flags", [[], ["--memory", "24GiB"], ["--memory", "much", "--context", "8"], ["--memory", "1GiB", "--context", "0"]]
)
def test_usage(tiny_saved, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        planned(tiny_saved, *flags)
    assert stop.value.code == 2
