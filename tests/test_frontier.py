"""The frontier of one model: what is checked before any work, static points, tasks, and going on in the same folder."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import calibration, evaluate, frontier, sensitivity, storage, tasks
from dpamoe.evaluation_folder import open_folder
from dpamoe.frontier import Wanted


@pytest.fixture(scope="module")
def text(tiny_dir, tmp_path_factory):
    """A file with some of the shipped held-out text."""
    file = tmp_path_factory.mktemp("texts") / "heldout.txt"
    file.write_text((tiny_dir.parent / "text" / "heldout.txt").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    """What the model writes to calibrate itself is short."""
    monkeypatch.setattr(calibration, "WRITTEN_TOKENS", 32)


@pytest.fixture
def wanted(source, text):
    """Something quick to ask for: short windows of a short text, two budgets."""
    return Wanted(str(source), budgets=(2.0, 4.0), baselines=("uniform",), text=text, max_tokens=400, seqlen=64)


@pytest.fixture
def of_encoded(wanted, tiny_saved):
    """The same of a folder that is encoded already."""
    return dataclasses.replace(wanted, model=str(tiny_saved), reference=wanted.model)


def run(wanted, folder):
    plan = frontier.plan(wanted)
    return frontier.run(plan, open_folder(folder, plan.settings))


@pytest.mark.slow
def test_static_formats_are_points_of_their_own_size(wanted, tmp_path):
    pytest.importorskip("gguf")
    outcome = run(dataclasses.replace(wanted, baselines=("rtn4", "q8_0")), tmp_path / "out")
    points = {point["allocation"]: point for point in outcome["points"] if point["budget"] is None}
    full = outcome["full_precision"]
    assert set(points) == {"rtn4", "q8_0"}
    experts = 3_145_728
    assert full["weight_bytes"] - full["other_bytes"] == 2 * experts
    assert points["rtn4"]["bits_per_weight"] == 4.25 and points["q8_0"]["bits_per_weight"] == 8.5
    for point in points.values():
        assert point["weight_bytes"] == full["other_bytes"] + experts * point["bits_per_weight"] / 8
        assert point["histogram"] is point["mean_planes"] is None
    assert points["rtn4"]["kl"] > points["q8_0"]["kl"] > 0
    dpa = {point["budget"]: point for point in outcome["points"] if point["allocation"] == "dpa"}
    assert dpa[2.0]["kl"] > points["rtn4"]["kl"] > dpa[4.0]["kl"]  # measured .28, .017, .009 on 4,000 tokens


@pytest.mark.slow
def test_points_do_not_depend_on_how_often_a_run_stopped(wanted, tmp_path):
    asked = dataclasses.replace(wanted, spec=dpamoe.EncodeSpec(iterations=0))
    whole = run(asked, tmp_path / "whole")
    run(dataclasses.replace(asked, budgets=(4.0,)), tmp_path / "parts")
    parts = run(dataclasses.replace(asked, budgets=(2.0,)), tmp_path / "parts")
    assert parts == whole  # the second run of two adds to what is there


@pytest.mark.slow
def test_a_model_that_changed_is_noticed(wanted, source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "model")
    mine = dataclasses.replace(wanted, model=str(folder), budgets=(2.0,), baselines=())
    run(mine, tmp_path / "out")
    (folder / "model.safetensors").touch()
    assert len(run(mine, tmp_path / "out")["points"]) == 1  # the same weights at another time
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match="holds results of another model; choose another --output-dir"):
        run(mine, tmp_path / "out")


@pytest.mark.slow
def test_thresholds_need_what_was_measured(wanted, tiny_saved, tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "TOKENS", 1000)
    asked = dataclasses.replace(wanted, baselines=("threshold",), budgets=(3.0,))
    with pytest.raises(ValueError, match="threshold needs the sensitivity of layers, which .* does not hold.*dpamoe profile"):
        frontier.plan(dataclasses.replace(asked, model=str(tiny_saved)))
    exact, threshold = run(asked, tmp_path / "out")["points"]
    assert (exact["allocation"], threshold["allocation"]) == ("dpa", "threshold")
    assert exact["mean_planes"] == 3 and 0 < abs(threshold["mean_planes"] - 3) < 0.1


@pytest.mark.slow
def test_presets_are_curves_with_an_encoding_each(wanted, tmp_path):
    """As measured one by one; what was measured before is kept."""
    asked = dataclasses.replace(wanted, presets=("paper", "quality"), budgets=(2.0,))
    outcome = run(asked, tmp_path / "both")
    points = {point["allocation"]: point for point in outcome["points"]}
    assert set(points) == {"paper", "quality", "uniform"}
    assert points["paper"]["kl"] == points["uniform"]["kl"] > 2 * points["quality"]["kl"]  # at two planes: nothing to choose
    assert points["paper"]["bits_per_weight"] == 2.375 and 2 < points["quality"]["bits_per_weight"] < 2.5
    spec = dpamoe.EncodeSpec(group_size=32, scale_mode="tied")
    alone = run(dataclasses.replace(wanted, spec=spec, budgets=(2.0,), baselines=("threshold-skip",)), tmp_path / "one")
    same = next(point for point in alone["points"] if point["allocation"] == "threshold-skip")
    assert same | {"allocation": "quality"} == points["quality"]
    assert run(dataclasses.replace(wanted, presets=("paper",), budgets=(2.0,)), tmp_path / "both") == outcome
    with pytest.raises(ValueError, match="holds results of another encoding"):
        run(dataclasses.replace(wanted, presets=("quality",), budgets=(2.0,)), tmp_path / "both")


def test_an_encoded_folder_has_the_preset_that_it_was_encoded_with(of_encoded, tmp_path):
    mine = dataclasses.replace(of_encoded, budgets=(3.0,), baselines=())
    (point,) = run(dataclasses.replace(mine, presets=("paper",)), tmp_path / "out")["points"]
    assert point["allocation"] == "paper"
    for presets in (("quality",), ("paper", "quality")):
        with pytest.raises(ValueError, match="is encoded already, with .*, and preset quality encodes with .*group_size=32"):
            frontier.plan(dataclasses.replace(mine, presets=presets))


def test_budgets_below_the_fewest_planes_are_for_those_that_skip(of_encoded, tmp_path):
    asked = dataclasses.replace(of_encoded, budgets=(0.0, 1.5, 2.0), baselines=("skip", "uniform"))
    outcome = run(asked, tmp_path / "out")
    found = [(point["allocation"], point["budget"]) for point in outcome["points"]]
    assert found == [("skip", 0), ("skip", 1.5), ("dpa", 2), ("skip", 2), ("uniform", 2)]
    kl = [point["kl"] for point in outcome["points"] if point["allocation"] == "skip"]
    assert kl[0] > 2 * kl[1] > 2 * kl[2] and outcome["points"][0]["bits_per_weight"] == 0
    why = "is left out at budget 0, 1.5, since it skips no expert and gives each at least 2 planes"
    assert outcome["left_out"] == [f"dpa {why}", f"uniform {why}"]
    again = run(dataclasses.replace(of_encoded, budgets=(2.0,), baselines=()), tmp_path / "out")
    assert again == outcome  # about all that the folder holds
    with pytest.raises(ValueError, match="budget is 0.0 planes per expert, this model can spend 2 to 8"):
        frontier.plan(dataclasses.replace(asked, baselines=("uniform",)))


def test_tasks_are_scored_for_every_point(of_encoded, tmp_path, monkeypatch):
    """What `run_tasks` gives stands in every point, beside KL or alone; the model is at the point's budget then."""
    seen = []

    def run_tasks(model, tokenizer, chosen, limit, batch_size):
        spends = {experts.spend.budget for experts in dpamoe.api.encoded_experts(model).values()}
        seen.append((spends, chosen, limit, batch_size))
        model(input_ids=torch.tensor([[1, 5, 9]]))
        return {"accuracy": {"a": 0.25}, "stderr": {"a": 0.1}, "macro": 0.25}

    monkeypatch.setattr(frontier, "run_tasks", run_tasks)
    monkeypatch.setattr(frontier, "check_tasks", lambda names, folder: tasks.Chosen(dict.fromkeys(names)))
    asked = dataclasses.replace(of_encoded, baselines=(), text=None, tasks=("a",), limit=5, batch_size=3)
    outcome = run(asked, tmp_path / "out")
    assert [(budgets, limit, size) for budgets, _, limit, size in seen] == [(set(), 5, 3), ({2.0}, 5, 3), ({4.0}, 5, 3)]
    assert [point["accuracy"] for point in outcome["points"]] == [{"a": 0.25}] * 2
    assert outcome["full_precision"]["macro"] == 0.25 and outcome["tokens"] is outcome["points"][0]["kl"] is None
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert again == outcome


def test_a_reference_that_is_not_the_original(of_encoded, source, random_model, tmp_path):
    """Same shapes, other experts: everything would be measured, and nothing would mean a thing."""
    other = shutil.copytree(source, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    for name in [name for name in tensors if ".experts.0." in name]:
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    mine = dataclasses.replace(of_encoded, reference=str(other))
    with pytest.raises(ValueError, match="other is not the model that .* holds .*give its original with --reference"):
        run(mine, tmp_path / "out")
    with pytest.raises(ValueError, match="is not the model that"):  # also with the log-probabilities kept from before
        run(mine, tmp_path / "out")
    random_model("qwen3_moe").save_pretrained(tmp_path / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / "small")
    with pytest.raises(ValueError, match="knows 2048 tokens and its reference .* 128|ids up to"):
        frontier.plan(dataclasses.replace(mine, reference=str(tmp_path / "small")))


def test_a_model_without_experts(wanted, random_model, source, tmp_path):
    random_model("llama", {"vocab_size": 2048}).save_pretrained(tmp_path / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / "dense")
    with pytest.raises(ValueError, match="no routed experts were found .* looks dense"):
        run(dataclasses.replace(wanted, model=str(tmp_path / "dense")), tmp_path / "out")


def test_groups_that_are_too_wide_are_noticed_before_the_reference_is_run(wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "measure_reference", None)
    with pytest.raises(ValueError, match="group_size 1000 exceeds the 128 inputs"):
        run(dataclasses.replace(wanted, spec=dpamoe.EncodeSpec(group_size=1000)), tmp_path / "out")


def test_planes_are_counted_on_the_text_alone(of_encoded, tmp_path, monkeypatch):
    def run_tasks(model, tokenizer, chosen, limit, batch_size):
        model(input_ids=torch.full((5, 50), 9))
        return {"accuracy": {"a": 0.25}, "stderr": {"a": 0.1}, "macro": 0.25}

    monkeypatch.setattr(frontier, "run_tasks", run_tasks)
    monkeypatch.setattr(frontier, "check_tasks", lambda names, folder: tasks.Chosen(dict.fromkeys(names)))
    mine = dataclasses.replace(of_encoded, budgets=(4.0,), baselines=())
    alone = run(mine, tmp_path / "a")["points"][0]
    both = run(dataclasses.replace(mine, tasks=("a",)), tmp_path / "b")["points"][0]
    assert both["histogram"] == alone["histogram"] and both["macro"] == 0.25


@pytest.mark.parametrize(
    "change, words",
    [
        ({"include_path": "nowhere"}, "--include-path and --limit are for tasks"),
        ({"limit": 5}, "--include-path and --limit are for tasks"),
        ({"budgets": (1.0,)}, "budget is 1.0 .* 2 to 8"),
        ({"budgets": (9.0,)}, "budget is 9.0"),
        ({"baselines": ("uniform", "q9_k")}, "q9_k"),
        ({"baselines": ("quality",)}, "baseline quality is unknown"),
        ({"presets": ("best",)}, "preset is 'best': use paper or quality"),
        ({"presets": ("paper", "quality"), "spec": dpamoe.EncodeSpec(group_size=64)}, "leave the encoding flags out"),
        ({"text": None}, "nothing to measure"),
        ({"max_tokens": 62}, "62 tokens, fewer than one window of 64"),
        ({"seqlen": 1}, "windows of 1 tokens"),
        ({"text": "nowhere.txt"}, "nowhere.txt does not exist"),
        ({"calibration": "nowhere.txt"}, "nowhere.txt does not exist"),
        ({"model": "nowhere"}, "nowhere does not exist"),
        ({"reference": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_bad_input_is_noticed_before_any_model_is_loaded(wanted, monkeypatch, change, words):
    monkeypatch.setattr(storage, "load_original", None)
    with pytest.raises(ValueError, match=words):
        frontier.plan(dataclasses.replace(wanted, **change))


def test_a_checkpoint_without_its_residual_table(of_encoded, tiny_saved, tmp_path):
    folder = shutil.copytree(tiny_saved, tmp_path / "encoded")
    (folder / "model-residuals.safetensors").unlink()
    with pytest.raises(ValueError, match="model-residuals.safetensors is missing"):
        frontier.plan(dataclasses.replace(of_encoded, model=str(folder)))


@pytest.mark.slow
def test_sizes_of_an_encoded_folder_are_those_of_its_source(of_encoded, wanted, tmp_path):
    encoded, original = (
        run(dataclasses.replace(asked, baselines=()), tmp_path / name) for name, asked in (("a", of_encoded), ("b", wanted))
    )
    assert [p["weight_bytes"] for p in encoded["points"]] == [p["weight_bytes"] for p in original["points"]]
    assert encoded["full_precision"] == original["full_precision"]
    sites, experts = encoded["sites"], encoded["experts"]
    assert (sites, experts) == (4, 64) and evaluate.BUDGETS[-1] == 8
