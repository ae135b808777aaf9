"""The folder of an evaluation: points are kept one by one, and a run goes on only with the same settings."""

import json

import pytest

import dpamoe
from dpamoe.evaluation_folder import open_folder

SETTINGS = {"model": [["a", 1, 2]], "limit": None}


def point(allocation, budget, kl=1.0):
    return {"allocation": allocation, "budget": budget, "kl": kl, "weight_bytes": 1}


def test_points_are_kept_and_found(tmp_path):
    folder = open_folder(tmp_path / "out", SETTINGS)
    jobs = [("dpa", 2.0), ("dpa", 2.5), ("uniform", 2.0), ("q8_0", None)]
    assert folder.missing(jobs) == jobs and folder.points() == [] and folder.full_precision() is None
    for found in (point("q8_0", None), point("uniform", 2.0), point("dpa", 2.5), point("dpa", 2.0)):
        folder.keep(found)
    again = open_folder(tmp_path / "out", dict(SETTINGS))
    assert again.missing([*jobs, ("dpa", 3.0)]) == [("dpa", 3.0)]
    assert [(found["allocation"], found["budget"]) for found in again.points()] == [
        ("dpa", 2.0), ("uniform", 2.0), ("dpa", 2.5), ("q8_0", None),
    ]  # fmt: skip
    again.keep(point("dpa", 2.0, kl=0.5))
    assert again.point("dpa", 2.0)["kl"] == 0.5 and len(again.points()) == 4


def test_finishing_keeps_the_outcome_and_not_the_log_probabilities(tmp_path):
    folder = open_folder(tmp_path / "out", SETTINGS)
    folder.reference.write_bytes(b"0" * 100)
    folder.reference.with_suffix(".json").write_text("{}")
    folder.keep_full_precision({"ppl": 3.0, "other_bytes": 1})
    folder.finish({"model": "toy", "points": []})
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == {"model": "toy", "points": []}
    names = sorted(found.name for found in (tmp_path / "out").iterdir())
    assert names == ["full_precision.json", "points", "results.json", "settings.json"]


def test_residual_tables_are_kept(tmp_path, transformed):
    _, model = transformed("qwen3_moe")
    folder = open_folder(tmp_path / "out", SETTINGS)
    folder.keep_residuals(model)
    held = json.loads((tmp_path / "out" / "residuals.json").read_text())
    assert held["k_min"] == 2
    for path, experts in dpamoe.api.encoded_experts(model).items():
        assert held["sites"][path] == experts.residuals.tolist()


@pytest.mark.parametrize("changed", [{"limit": 5}, {"model": []}, {"more": 1}])
def test_other_settings_are_refused_by_name(tmp_path, changed):
    open_folder(tmp_path / "out", SETTINGS).keep(point("dpa", 2.0))
    with pytest.raises(ValueError, match=rf"out holds results of another {next(iter(changed))}.*; choose another --output-dir"):
        open_folder(tmp_path / "out", SETTINGS | changed)
    assert open_folder(tmp_path / "out", SETTINGS).points() == [point("dpa", 2.0)]


def test_what_is_no_evaluation_is_not_touched(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(ValueError, match="no folder of an evaluation"):
            open_folder(tmp_path / name, SETTINGS)
    with pytest.raises(ValueError, match="nowhere.* does not exist"):
        open_folder(tmp_path / "nowhere" / "out", SETTINGS)
    assert [found.name for found in (tmp_path / "mine").iterdir()] == ["thesis.txt"] and not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    assert open_folder(tmp_path / "empty", SETTINGS).points() == []


def test_short_settings_are_shown_and_long_ones_are_not(tmp_path):
    open_folder(tmp_path / "out", {"limit": 5, "model": "a" * 40})
    with pytest.raises(ValueError, match="another limit: 5 there, 7 now;"):
        open_folder(tmp_path / "out", {"limit": 7, "model": "a" * 40})
    with pytest.raises(ValueError, match="another model; choose"):
        open_folder(tmp_path / "out", {"limit": 5, "model": "b" * 40})


def test_one_run_at_a_time(tmp_path):
    first, second = open_folder(tmp_path / "out", SETTINGS), open_folder(tmp_path / "out", SETTINGS)
    with first.locked(), pytest.raises(ValueError, match="another run is measuring into .*out"), second.locked():
        pass
    with second.locked():
        pass
    assert not (tmp_path / "out" / "lock").exists()


def test_budgets_that_look_alike_have_files_of_their_own(tmp_path):
    folder = open_folder(tmp_path / "out", SETTINGS)
    folder.keep(point("dpa", 3.0000001))
    assert folder.point("dpa", 3.0) is None and folder.missing([("dpa", 3.0000001)]) == []


@pytest.mark.parametrize("name, read", [("full_precision.json", "full_precision"), ("points/dpa-2.json", "points")])
def test_a_file_without_what_it_should_hold_is_named(tmp_path, name, read):
    folder = open_folder(tmp_path / "out", SETTINGS)
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"{name.rpartition('/')[2]} lacks .*: delete it"):
        getattr(folder, read)()


def test_a_damaged_point_is_named(tmp_path):
    folder = open_folder(tmp_path / "out", SETTINGS)
    folder.keep(point("dpa", 2.0))
    (tmp_path / "out" / "points" / "dpa-2.json").write_text("{")
    with pytest.raises(ValueError, match=r"dpa-2\.json is not valid JSON .*: delete it, and run the evaluation again"):
        folder.missing([("dpa", 2.0)])
