"""The settings: defaults as documented, refused values, and the range of a budget."""

import dataclasses
import json
import math

import pytest

from dpamoe.spec import EncodeSpec, SpendSpec, check_budget


def test_defaults_are_those_of_the_documents():
    assert EncodeSpec() == EncodeSpec(group_size=128, k_min=2, k_max=8, scale_mode="shared")
    assert SpendSpec() == SpendSpec(budget=4.0, allocation="dpa", scope="token", fallback=None, skip=False, allocator="exact")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"group_size": 0}, ["group_size is 0", "-1"]),
        ({"group_size": 1}, ["group_size is 1"]),
        ({"group_size": -2}, ["group_size is -2"]),
        ({"k_min": 0}, ["k_min 0", "k_max 8"]),
        ({"k_max": 9}, ["k_max 9", "<= 8"]),
        ({"k_min": 5, "k_max": 4}, ["k_min 5", "k_max 4"]),
        ({"scale_mode": "free"}, ["'free'", "shared", "tied"]),
        ({"beta": 0.0}, ["beta 0.0"]),
        ({"beta": math.nan}, ["beta nan"]),
        ({"iterations": -1}, ["iterations -1"]),
    ],
)
def test_encode_spec_refuses(fields, words):
    with pytest.raises(ValueError) as caught:
        EncodeSpec(**fields)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("fields", [{"group_size": -1}, {"group_size": 2}, {"k_min": 1, "k_max": 1}, {"iterations": 0}])
def test_encode_spec_takes_the_ends_of_its_ranges(fields):
    assert EncodeSpec(**fields).as_dict() == {**EncodeSpec().as_dict(), **fields}


def test_encode_spec_survives_json():
    spec = EncodeSpec(38, 1, 5, "tied", 1.25, 3)
    assert EncodeSpec(**json.loads(json.dumps(spec.as_dict()))) == spec


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"allocation": "gate"}, "'gate'"),
        ({"scope": "batch"}, "'batch'"),
        ({"fallback": "dpa"}, "'dpa': use uniform, or None"),
        ({"skip": 1}, "skip is 1: use True or False"),
        ({"hold": None}, "hold is None: use True or False"),
        ({"allocator": "greedy"}, "'greedy': use exact or threshold"),
        ({"allocator": "threshold", "allocation": "uniform"}, "allocation is 'uniform'"),
        ({"allocator": "threshold", "scope": "dispatch"}, "scope 'dispatch'"),
    ],
)  # fmt: skip
def test_spend_spec_refuses(fields, word):
    with pytest.raises(ValueError, match=word):
        SpendSpec(**fields)


@pytest.mark.parametrize("spec, field", [(EncodeSpec(), "k_max"), (SpendSpec(), "budget")])
def test_settings_cannot_be_changed(spec, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, field, 3)


@pytest.mark.parametrize("budget", [2, 2.0, 3.25, 8])
def test_budget_in_range_comes_back_as_float(budget):
    checked = check_budget(budget, 2, 8)
    assert checked == budget and isinstance(checked, float)


@pytest.mark.parametrize("budget", [1.99, 8.01, -1, 0, math.inf, -math.inf, math.nan])
def test_budget_out_of_range_is_refused_with_the_range(budget):
    with pytest.raises(ValueError, match=rf"budget is {budget} planes .* 2 to 8"):
        check_budget(budget, 2, 8)
