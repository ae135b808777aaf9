"""The command line: every command as people and programs call it, its exit codes, and one sentence for every bad input."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import calibration, checkpoint, mapping, storage
from dpamoe.cli.main import COMMANDS, build_parser, main
from dpamoe.shards import Shards

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(sys.executable).with_name("dpamoe")
OUTCOME = ["model", "sites", "experts", "tokens", "full_precision", "points", "left_out"]


def by_name(outcome, field="kl"):
    """One field of every point, by allocation and budget."""
    return {(point["allocation"], point["budget"]): point[field] for point in outcome["points"]}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Undo what the program does to logging and warnings, which are its own in a process of its own."""
    from transformers.utils import logging as theirs

    logger = logging.getLogger("dpamoe")
    kept = logger.handlers, logger.propagate, logger.level
    verbosity, bar = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    yield
    logger.handlers, logger.propagate = kept[:2]
    logger.setLevel(kept[2])
    theirs.set_verbosity(verbosity)
    if bar:
        theirs.enable_progress_bar()


@pytest.fixture(scope="module")
def texts(tiny_dir, tmp_path_factory):
    """Folder with some of the shipped texts: calibration.txt and heldout.txt, and two without words."""
    folder = tmp_path_factory.mktemp("texts")
    for name, size in (("calibration.txt", 15_000), ("heldout.txt", 6_000)):
        (folder / name).write_text((tiny_dir.parent / "text" / name).read_text(encoding="utf-8")[:size], encoding="utf-8")
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\n\t\n")
    return folder


@pytest.fixture(scope="module")
def converted(source, texts):
    """What `dpamoe convert --json` prints for it, with the encoded folder beside it; read only."""
    out = source.parent / "encoded"
    command = [PROGRAM, "convert", source, "--output-dir", out, "--calibration", texts / "calibration.txt", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out, done.stderr


@pytest.fixture(scope="module")
def encoded(converted):
    """The encoded folder; read only."""
    return converted[1]


@pytest.fixture(scope="module")
def dense(random_model, tmp_path_factory):
    """Folder of a model without experts."""
    folder = tmp_path_factory.mktemp("dense") / "llama"
    random_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(source, tmp_path):
    """Function that makes a copy of the shipped model with tensors changed by a function on their dict."""

    def make(change):
        folder = shutil.copytree(source, tmp_path / "damaged")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def check_failed(outcome, *words):
    """One sentence on stderr, in one line, nothing on stdout, exit code 1."""
    code, out, err = outcome
    assert (code, out) == (1, ""), err
    (line,) = err.splitlines()
    assert re.match(
        r"dpamoe (plan|convert|verify|inspect|eval|plot|reproduce|generate|profile|tune|bench|demo|doctor): error: \S", line
    )
    assert all(word in line for word in words), line
    assert "Traceback" not in line


def test_convert_reports_what_it_encoded_and_wrote(converted):
    outcome, out, log = converted
    assert outcome["output_dir"] == str(out) and outcome["source"] == str(out.parent / "source")
    assert (outcome["sites"], outcome["experts"], outcome["budget"]) == (4, 64, 4.0)
    assert outcome["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert outcome["encoded_bytes"] == 3_145_728 * (8 * 1.125 + 0.125) / 8
    assert outcome["original_bytes"] == 2 * 3_145_728 and outcome["bits_per_weight"] == 4.625
    assert outcome["unreached"] == {} and outcome["refused"] == {}
    # the whole is no larger than its parts: other tensors in bf16, experts, tables, and headers and texts
    other = sum(
        t.numel() * 2 for name, t in load_file(out.parent / "source" / "model.safetensors").items() if ".experts." not in name
    )
    assert 0 <= outcome["bytes"] - outcome["encoded_bytes"] - other <= 220_000
    assert "Traceback" not in log and not list(out.parent.glob("*.partial"))
    # no terminal: one line per layer, with the time left
    assert re.findall(r"^dpamoe: encode (\d/4) (\S+) \([\d.]+ s, \d+ s left\)$", log, re.M) == [
        (f"{layer + 1}/4", f"model.layers.{layer}.mlp.experts") for layer in range(4)
    ]


@pytest.mark.slow
def test_convert_prints_the_count_of_experts_for_people(run, source, texts, tmp_path):
    flags = ("--group-size", 48, "--k-max", 3, "--budget", 2.5, "--scale-mode", "tied")
    code, out, err = run("convert", source, "--output-dir", tmp_path / "out", "--calibration", texts / "heldout.txt", *flags)
    assert code == 0, err
    assert out.startswith("routed experts encoded: 64 of 64 in 4 sites, 87.0% of all parameters")
    assert str(tmp_path / "out") in out
    for words in ("(up): group_size 48 does not divide its 128 inputs", "the last group of each row holds 32"):
        assert words in err
    model = dpamoe.load(tmp_path / "out")
    spec = model.model.layers[0].mlp.experts.spec
    assert (spec.group_size, spec.k_min, spec.k_max, spec.scale_mode) == (48, 2, 3, "tied")
    assert dpamoe.report(model).budget == 2.5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["source"] is not None


@pytest.mark.slow
def test_convert_without_calibration_lets_the_model_write(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "WRITTEN_TOKENS", 32)
    code, _, err = run("convert", source, "--output-dir", tmp_path / "out", "--k-max", 2, "--budget", 2)
    assert code == 0, err
    assert dpamoe.report(dpamoe.load(tmp_path / "out")).unreached == {}


def test_inspect_of_an_encoded_folder(run, encoded):
    code, out, err = run("inspect", encoded, "--json")
    assert (code, err) == (0, "")
    held = json.loads(out)
    assert (held["encoded"], held["complete"], held["group_size"], held["k_min"], held["k_max"]) == (True, True, 128, 2, 8)
    assert (held["default_budget"], held["budget_scope"], held["source"]) == (4.0, "token", "../source")
    assert [site["path"] for site in held["sites"]] == [f"model.layers.{layer}.mlp.experts" for layer in range(4)]
    assert [row["k"] for row in held["planes"]] == list(range(2, 9))
    weights = sorted(encoded.glob("*.safetensors"))
    for row in held["planes"]:
        read = [file for file in weights if not re.search(rf"plane-[{row['k']}-9]-", file.name)]
        assert row["bits_per_weight"] == row["k"] * 1.125 + 0.125
        assert row["bytes"] == sum(file.stat().st_size for file in read)
    code, out, err = run("inspect", encoded)
    assert (code, err) == (0, "") and out.count("16 experts, top 4, 128 → 128 → 128, silu_mul, bfloat16") == 4
    assert "complete; group size 128" in out and "k=8: 9.125 bits per expert weight" in out


def test_inspect_of_an_original_folder(run, source, random_model, tmp_path):
    code, out, err = run("inspect", source, "--json")
    assert (code, err) == (0, "")
    held = json.loads(out)
    assert held["encoded"] is False and len(held["sites"]) == 4 and held["refused"] == {}
    assert held["expert_share"] == pytest.approx(3_145_728 / 3_614_080)
    random_model("gpt_oss").save_pretrained(tmp_path / "gpt")
    for flags, word in ((), "2 sites found"), (("--verify",), "2 sites verified"):
        code, out, _ = run("inspect", tmp_path / "gpt", *flags)
        assert code == 0 and "swigluoai, float32, biases, transposed, gate and up interleaved" in out and word in out


def test_eval_of_an_encoded_folder_prints_the_documented_object(run, encoded, texts):
    code, out, err = run(
        "eval", encoded, "--text", texts / "heldout.txt", "--budgets", "3,2,2.5,8", "--max-tokens", 600, "--json"
    )
    assert code == 0, err
    outcome = json.loads(out)
    assert list(outcome) == OUTCOME
    assert [outcome[name] for name in OUTCOME[:4]] == ["encoded", 4, 64, 599]  # the text begins with the begin token
    kl = by_name(outcome)
    assert list(kl) == [
        (name, budget) for budget in (2, 2.5, 3, 8) for name in ("dpa", "gate-only", "residual-only", "uniform")
    ]
    assert kl["dpa", 2] == kl["uniform", 2] and kl["dpa", 8] == kl["uniform", 8]
    assert kl["dpa", 2] > kl["dpa", 2.5] > kl["dpa", 3] > kl["dpa", 8] > 0
    assert kl["dpa", 3] < kl["uniform", 3]
    assert by_name(outcome, "ppl")["dpa", 8] == pytest.approx(outcome["full_precision"]["ppl"], rel=0.02)
    assert re.search(r"^dpamoe: evaluate 16/16 budget 8 uniform \(.* s left\)", err, re.M)


@pytest.mark.slow
def test_eval_of_an_original_folder_equals_that_of_its_encoded_one(run, source, encoded, texts):
    shared = ("--text", texts / "heldout.txt", "--budgets", "3", "--max-tokens", 600, "--baselines", "gate-linear", "--json")
    code, out, err = run("eval", source, *shared, "--calibration", texts / "calibration.txt")
    assert code == 0, err
    here, there = json.loads(out), json.loads(run("eval", encoded, *shared)[1])
    assert list(by_name(here)) == list(by_name(there)) == [("dpa", 3), ("gate-linear", 3)]
    assert here["full_precision"] == there["full_precision"]
    assert by_name(here, "weight_bytes") == by_name(there, "weight_bytes")
    # tables measured in fp32 here and in bf16 there
    assert by_name(here) == pytest.approx(by_name(there), rel=0.02)


@pytest.mark.slow
def test_eval_for_people_with_a_picture(run, encoded, source, texts, tmp_path):
    code, out, err = run(
        "eval", encoded, "--text", texts / "heldout.txt", "--budgets", "2,4.5", "--max-tokens", 300, "--seqlen", 64,
        "--reference", source, "--picture", tmp_path / "kl.png",
    )  # fmt: skip
    assert code == 0, err
    firsts = [line.split()[0] for line in out.splitlines()]
    assert firsts == ["budget", "-" * len(out.splitlines()[1]), "2", "4.5", "*:", "full"]
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG") and "kl.png" in err


def test_eval_goes_on_where_it_stopped(run, encoded, texts, tmp_path, monkeypatch):
    """Ctrl-C at the third point: exit 130, two points kept; the next run computes the others and nothing twice."""
    from dpamoe import evaluate, score

    arguments = (
        "eval", encoded, "--text", texts / "heldout.txt", "--budgets", "2,3", "--max-tokens", 300, "--seqlen", 64,
        "--baselines", "uniform", "--output-dir", tmp_path / "out", "--json",
    )  # fmt: skip
    compare, compared = score.ReferenceLogits.compare, []

    def interrupted(self, model):
        if len(compared) == 2:
            raise KeyboardInterrupt
        compared.append(model)
        return compare(self, model)

    monkeypatch.setattr(score.ReferenceLogits, "compare", interrupted)
    code, out, err = run(*arguments)
    assert (code, out) == (130, "")
    names = {file.name for file in (tmp_path / "out" / "points").iterdir()}
    assert names == {"dpa-2.json", "uniform-2.json"} and (tmp_path / "out" / "reference.logits").exists()
    before = {name: (tmp_path / "out" / "points" / name).read_bytes() for name in names}
    monkeypatch.setattr(score.ReferenceLogits, "compare", lambda self, model: (compared.append(model), compare(self, model))[1])
    monkeypatch.setattr(evaluate.Scorer, "full_precision", None)  # known already
    code, out, err = run(*arguments)
    assert code == 0 and len(compared) == 4, err
    assert before == {name: (tmp_path / "out" / "points" / name).read_bytes() for name in names}
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "full_precision.json", "points", "residuals.json", "results.json", "settings.json",
    ]  # fmt: skip
    monkeypatch.setattr(storage, "load", None)  # nothing is left to do, so nothing is loaded
    monkeypatch.setattr(storage, "load_original", None)
    assert run(*arguments)[:2] == (0, out) and json.loads(out) == json.loads((tmp_path / "out" / "results.json").read_text())
    check_failed(run(*arguments, "--max-tokens", 290), "results of another text", "another --output-dir")


def test_generate(run, encoded, source):
    code, out, err = run("generate", encoded, "--prompt", "The database", "--budget", 3, "--max-new-tokens", 6, "--json")
    assert code == 0, err
    outcome = json.loads(out)
    assert list(outcome) == ["model", "prompt", "text", "mean_planes"]
    assert outcome["prompt"] == "The database" and outcome["mean_planes"] == 3.0 and outcome["text"]
    again = run("generate", encoded, "--prompt", "The database", "--budget", 3, "--max-new-tokens", 6)
    assert again[:2] == (0, "The database" + outcome["text"] + "\n")
    code, out, err = run("generate", encoded, "--prompt", "The database", "--k-max", 3, "--max-new-tokens", 2, "--json")
    assert code == 0 and json.loads(out)["mean_planes"] == 3.0
    assert err == "dpamoe: budget 4 exceeds the 3 planes held: using 3\n"
    code, out, err = run("generate", source, "--prompt", "The database", "--max-new-tokens", 2, "--json")
    assert code == 0 and json.loads(out)["mean_planes"] is None


def test_generate_at_eight_planes_writes_what_the_original_writes(run, encoded, source):
    texts = [
        run("generate", *which, "--prompt", "The database engine", "--max-new-tokens", 12)[1]
        for which in ((source,), (encoded, "--budget", 8))
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_profile_replaces_the_table_alone(run, encoded, source, texts, tmp_path):
    folder = shutil.copytree(encoded, tmp_path / "encoded")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    arguments = ("profile", folder, "--calibration", texts / "heldout.txt", "--reference", source)
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    assert json.loads(out) == {"model": str(folder), "sites": 4, "experts": 64, "unreached": {}}
    changed = {file.name for file in folder.iterdir() if before.get(file.name) != file.read_bytes()}
    assert changed == {checkpoint.RESIDUALS, checkpoint.INDEX}  # which knows now what thresholds need
    code, out, _ = run(*arguments)
    assert (code, out) == (0, "measured 64 of 64 experts in 4 sites\n")


def test_doctor(run):
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    outcome = json.loads(out)
    assert outcome["ops"]["cpu"] == "ok" and outcome["failed"] is False
    assert outcome["versions"]["torch"] == torch.__version__ and outcome["versions"]["dpamoe"] == dpamoe.__version__
    code, out, _ = run("doctor")
    assert code == 0 and f"torch {torch.__version__}" in out and "ops: ok" in out


def test_doctor_fails_where_the_ops_are_wrong(run, monkeypatch):
    from dpamoe.cli import doctor

    right = doctor.reference.expert_ffn
    monkeypatch.setattr(doctor.reference, "expert_ffn", lambda *args: right(*args) * 1.01)
    code, out, _ = run("doctor", "--json")
    outcome = json.loads(out)
    assert code == 1 and outcome["failed"] is True and "off by" in outcome["ops"]["cpu"]


@pytest.mark.slow
def test_demo_prints_what_eval_prints(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("demo", "--max-tokens", 300, "--json")
    assert code == 0, err
    outcome = json.loads(out)
    assert list(outcome) == OUTCOME and (outcome["sites"], outcome["experts"]) == (4, 64)
    budgets = [2, 2.5, 3, 3.5, 4, 5, 6, 7, 8]
    assert list(by_name(outcome)) == [(name, budget) for budget in budgets for name in ("dpa", "uniform")]
    assert (tmp_path / "dpamoe-demo.png").read_bytes().startswith(b"\x89PNG") and files(tmp_path) == [Path("dpamoe-demo.png")]


@pytest.mark.slow
def test_demo_for_people(run, tmp_path, monkeypatch):
    from dpamoe.cli import demo

    monkeypatch.setattr(demo, "BUDGETS", (2.0, 4.0))
    code, out, err = run("demo", "--max-tokens", 100, "--picture", tmp_path / "picture.png")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[0] == "budget" and f"picture: {tmp_path / 'picture.png'}" in lines
    names = ["full precision", "budget 2", "budget 4", "budget 8"]
    written = [line.strip() for line in lines[-4:]]
    assert [line[: len(name)] for line, name in zip(written, names, strict=True)] == names
    assert all(len(line) > 30 for line in written) and "routed experts encoded: 64 of 64" in err


@pytest.mark.slow
def test_demo_with_a_preset(run, tmp_path, monkeypatch):
    from dpamoe.cli import demo

    monkeypatch.setattr(demo, "BUDGETS", (2.0,))
    code, out, err = run("demo", "--max-tokens", 500, "--preset", "quality", "--picture", tmp_path / "picture.png", "--json")
    assert code == 0, err
    kl = by_name(json.loads(out))
    assert list(kl) == [("dpa", 2), ("uniform", 2), ("threshold-skip", 2)] and kl["threshold-skip", 2] < 0.6 * kl["dpa", 2]


BAD_INPUT = {
    "convert a dense model": (["convert", "{dense}", "--output-dir", "{out}"], ["no routed experts", "looks dense"]),
    "inspect a dense model": (["inspect", "{dense}"], ["no routed experts", "looks dense"]),
    "convert a missing folder": (["convert", "{no}", "--output-dir", "{out}"], ["nowhere does not exist"]),
    "inspect a missing folder": (["inspect", "{no}"], ["nowhere does not exist"]),
    "eval a missing folder": (["eval", "{no}", "--text", "{text}"], ["nowhere does not exist"]),
    "generate with a missing folder": (["generate", "{no}", "--prompt", "a"], ["nowhere does not exist"]),
    "profile a missing folder": (["profile", "{no}", "--calibration", "{text}"], ["nowhere does not exist"]),
    "a folder that is no model": (["inspect", "{texts}"], ["has no config.json"]),
    "a group too wide": (
        ["convert", "{source}", "--output-dir", "{out}", "--group-size", "256"],
        ["group_size 256 exceeds the 128 inputs of model.layers.0.mlp.experts"],
    ),
    "a group of one": (["convert", "{source}", "--output-dir", "{out}", "--group-size", "1"], ["group_size is 1"]),
    "convert at a budget too high": (
        ["convert", "{source}", "--output-dir", "{out}", "--budget", "9"], ["budget is 9", "2 to 8"],
    ),
    "convert at a budget beyond k_max": (
        ["convert", "{source}", "--output-dir", "{out}", "--k-max", "3"], ["budget is 4", "2 to 3"],
    ),
    "eval at a budget too low": (["eval", "{source}", "--text", "{text}", "--budgets", "1,2"], ["budget is 1", "2 to 8"]),
    "eval an encoded folder at a budget too high": (
        ["eval", "{encoded}", "--text", "{text}", "--budgets", "9"], ["budget is 9", "2 to 8"],
    ),
    "eval at no number": (["eval", "{encoded}", "--text", "{text}", "--budgets", "nan"], ["budget is nan", "2 to 8"]),
    "generate at a budget too low": (["generate", "{encoded}", "--prompt", "a", "--budget", "1"], ["budget is 1", "2 to 8"]),
    "generate at a budget beyond k_max": (
        ["generate", "{encoded}", "--prompt", "a", "--budget", "4", "--k-max", "3"], ["budget is 4", "2 to 3"],
    ),
    "k_max beyond the file": (["generate", "{encoded}", "--prompt", "a", "--k-max", "9"], ["k_max 9", "planes 2 to 8"]),
    "k_max below the file": (["generate", "{encoded}", "--prompt", "a", "--k-max", "1"], ["k_max 1", "planes 2 to 8"]),
    "k_max that nobody encodes": (["convert", "{source}", "--output-dir", "{out}", "--k-max", "9"], ["k_max 9", "<= 8"]),
    "eval an empty text": (["eval", "{encoded}", "--text", "{texts}/empty.txt"], ["empty.txt is empty"]),
    "eval a blank text": (["eval", "{source}", "--text", "{texts}/blank.txt"], ["blank.txt is empty"]),
    "eval a missing text": (["eval", "{encoded}", "--text", "{texts}/none.txt"], ["none.txt does not exist"]),
    "eval fewer tokens than a window": (
        ["eval", "{encoded}", "--text", "{text}", "--max-tokens", "100"], ["100 tokens, fewer than one window of 512"],
    ),
    "eval windows of one token": (["eval", "{encoded}", "--text", "{text}", "--seqlen", "1"], ["windows of 1 tokens"]),
    "eval nothing": (["eval", "{encoded}"], ["nothing to measure", "--text FILE", "--tasks"]),
    "eval into a folder of something else": (
        ["eval", "{encoded}", "--text", "{text}", "--output-dir", "{texts}"], ["no folder of an evaluation"],
    ),
    "eval into no folder": (["eval", "{encoded}", "--text", "{text}", "--output-dir", "{no}/a"], ["does not exist"]),
    "eval an unknown task": (
        ["eval", "{encoded}", "--tasks", "nonsense", "--include-path", "{texts}"], ["holds no *.yaml file"],
    ),
    "eval tasks of a missing folder": (
        ["eval", "{encoded}", "--tasks", "a", "--include-path", "{no}"], ["nowhere", "does not exist"],
    ),
    "convert with an empty text": (
        ["convert", "{source}", "--output-dir", "{out}", "--calibration", "{texts}/empty.txt"], ["empty.txt is empty"],
    ),
    "profile with an empty text": (["profile", "{encoded}", "--calibration", "{texts}/empty.txt"], ["empty.txt is empty"]),
    "an output that exists": (["convert", "{source}", "--output-dir", "{texts}"], ["exists: choose another name"]),
    "an output in no folder": (["convert", "{source}", "--output-dir", "{no}/deep"], ["does not exist: make it first"]),
    "convert what is encoded": (["convert", "{encoded}", "--output-dir", "{out}"], ["is encoded already"]),
    "profile what is not encoded": (["profile", "{source}", "--calibration", "{text}"], ["is not a dpamoe checkpoint"]),
    "a budget for what is not encoded": (["generate", "{source}", "--prompt", "a", "--budget", "3"], ["is not encoded"]),
    "an allocation that is none": (
        ["eval", "{encoded}", "--text", "{text}", "--baselines", "uniform,best"], ["best", "gate-only", "q4_k_m"],
    ),
    "calibration for what is encoded": (
        ["eval", "{encoded}", "--text", "{text}", "--calibration", "{text}"], ["dpamoe profile"],
    ),
    "a reference that is missing": (["eval", "{encoded}", "--text", "{text}", "--reference", "{no}"], ["does not exist"]),
    "a picture in no folder": (["eval", "{encoded}", "--text", "{text}", "--picture", "{no}/a.png"], ["does not exist"]),
    "tune without a GPU": (["tune", "{source}", "--device", "cpu"], ["dpamoe tune measures GPU kernels"]),
    "bench a dense model": (["bench", "{dense}", "--group-size", "32"], ["no routed experts", "looks dense"]),
    "bench what is nowhere": (["bench", "{no}"], ["nowhere is no folder", "model type of transformers", "on the hub"]),
    "bench a folder that is no model": (["bench", "{texts}"], ["has no config.json"]),
    "bench at a budget too high": (["bench", "{source}", "--budget", "4,9"], ["budget is 9", "2 to 8"]),
    "bench a group too wide": (["bench", "{source}", "--group-size", "256"], ["group_size 256 exceeds the 128 inputs"]),
    "bench a field that is none": (["bench", "{source}", "--set", "layers=3"], ["does not take layers=3", "no field layers"]),
    "bench a baseline that is none": (
        ["bench", "{source}", "--baselines", "grouped_mm,best"], ["baselines best are unknown", "batched_mm"],
    ),
    "a demo picture in no folder": (["demo", "--max-tokens", "100", "--picture", "{no}/a.png"], ["does not exist"]),
}  # fmt: skip


@pytest.mark.parametrize("arguments, words", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_fails_with_one_sentence(run, source, encoded, dense, texts, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    places = {
        "source": source, "encoded": encoded, "dense": dense, "texts": texts, "text": texts / "heldout.txt",
        "no": tmp_path / "nowhere", "out": tmp_path / "out",
    }  # fmt: skip
    watched = [tmp_path, source.parent, dense.parent, texts]
    before = [files(folder) for folder in watched]
    check_failed(run(*(argument.format(**places) for argument in arguments)), *words)
    assert [files(folder) for folder in watched] == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("calibrated", [True, False])
def test_weights_that_are_not_finite_name_their_tensor(run, damaged, texts, tmp_path, value, calibrated):
    def change(tensors):
        tensors["model.layers.1.mlp.experts.5.up_proj.weight"][3, 4] = value

    arguments = ["convert", damaged(change), "--output-dir", tmp_path / "out"]
    arguments += ["--calibration", texts / "calibration.txt"] if calibrated else []
    code, out, err = run(*arguments)
    words = "model.safetensors holds NaN or infinite weights in model.layers.1.mlp.experts.5.up_proj.weight"
    assert (code, out) == (1, "") and words in err.splitlines()[-1] and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_expert_of_zeros_is_encoded(run, damaged, texts, tmp_path):
    def change(tensors):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"model.layers.1.mlp.experts.5.{name}.weight"].zero_()

    arguments = ("--output-dir", tmp_path / "out", "--calibration", texts / "calibration.txt")
    code, _, err = run("convert", damaged(change), *arguments)
    assert code == 0, err
    table = dpamoe.load(tmp_path / "out").model.layers[1].mlp.experts.residuals
    assert torch.isfinite(table).all() and not table[5, 1:].any()


@pytest.mark.slow
def test_calibration_that_reaches_few_experts(run, source, tmp_path):
    (tmp_path / "short.txt").write_text("One word.")
    code, out, err = run("convert", source, "--output-dir", tmp_path / "out", "--calibration", tmp_path / "short.txt", "--json")
    assert code == 0, err
    for layer in dpamoe.load(tmp_path / "out").model.layers:
        assert torch.isfinite(layer.mlp.experts.residuals).all() and (layer.mlp.experts.residuals[:, 2:] > 0).all()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: (folder / "model-plane-2-00001-of-00001.safetensors").unlink(), ["plane-2", "is missing"]),
        (lambda folder: os.truncate(folder / "model-plane-2-00001-of-00001.safetensors", 446_943), ["446943 bytes, 446944"]),
        (lambda folder: (folder / checkpoint.INDEX).unlink(), ["incomplete"]),
        (lambda folder: os.truncate(folder / checkpoint.INDEX, 700), [checkpoint.INDEX, "not valid JSON"]),
        (lambda folder: os.truncate(folder / "config.json", 700), ["config.json is not valid JSON"]),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "eval", "generate", "profile"])
def test_an_encoded_folder_that_is_not_whole(run, encoded, source, texts, tmp_path, command, damage, words):
    folder = shutil.copytree(encoded, tmp_path / "encoded")
    damage(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    more = {
        "inspect": [], "generate": ["--prompt", "a"], "eval": ["--text", texts / "heldout.txt", "--reference", source],
        "profile": ["--calibration", texts / "heldout.txt", "--reference", source],
    }  # fmt: skip
    check_failed(run(command, folder, *more[command]), *words)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_tokenizer_that_is_not_whole(run, source, texts, tmp_path, command, damage):
    folder = shutil.copytree(source, tmp_path / "source")
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    else:
        os.truncate(folder / "tokenizer.json", 5000)
    more = ["--prompt", "a"] if command == "generate" else ["--text", texts / "heldout.txt"]
    check_failed(run(command, folder, *more), "no tokenizer could be loaded", str(folder))


@pytest.mark.parametrize("command", ["convert", "inspect", "eval", "generate"])
@pytest.mark.parametrize("by", [1, 1 << 20])
def test_a_truncated_original_names_file_and_sizes(run, source, texts, tmp_path, command, by):
    folder = shutil.copytree(source, tmp_path / "source")
    os.truncate(folder / "model.safetensors", 7_254_400 - by)
    more = {
        "convert": ["--output-dir", tmp_path / "out"], "inspect": [], "generate": ["--prompt", "a"],
        "eval": ["--text", texts / "heldout.txt"],
    }  # fmt: skip
    words = f"model.safetensors has {7_254_400 - by} bytes, its header describes 7254400"
    check_failed(run(command, folder, *more[command]), words)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_original_under_other_names_is_refused(run, damaged, tmp_path):
    """transformers only warns and makes the experts up: garbage that looks like success."""

    def change(tensors):
        for name in [name for name in tensors if name.startswith("model.layers")]:
            tensors[name.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)

    check_failed(run("convert", damaged(change), "--output-dir", tmp_path / "out"), "lacks 44 tensors of the model")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "COMMAND"),
        (["frobnicate"], "invalid choice"),
        (["convert", "a"], "--output-dir"),
        (["eval"], "model"),
        (["eval", "a", "--baselines", "uniform,,dpa"], "not a list of names"),
        (["eval", "a", "--text", "b", "--budgets", "2,x"], "not a list of numbers"),
        (["eval", "a", "--text", "b", "--max-tokens", "0"], "not a whole number above 0"),
        (["eval", "a", "--text", "b", "--seqlen", "-5"], "expected one argument|not a whole number above 0"),
        (["generate", "a", "--prompt", "b", "--max-new-tokens", "1.5"], "not a whole number above 0"),
        (["demo", "--max-tokens", "0"], "not a whole number above 0"),
        (["generate", "a"], "--prompt"),
        (["convert", "a", "--output-dir", "b", "--scale-mode", "free"], "invalid choice"),
        (["convert", "a", "--output-dir", "b", "--group-size", "many"], "invalid int"),
        (["convert", "a", "--output-dir", "b", "--device", "nonsense"], "no device of this machine"),
        (["generate", "a", "--prompt", "b", "--device", "cuda:77"], "no device of this machine"),
        (["bench", "a", "--tokens", "1,x"], "not a list of whole numbers"),
        (["bench", "a", "--tokens", "0"], "not a list of whole numbers"),
        (["bench", "a", "--set", "num_hidden_layers"], "not a field and its value"),
        (["bench", "a", "--mode", "fast"], "invalid choice"),
        (["tune"], "model"),
        (["doctor", "--unknown"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_ends_with_2(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: dpamoe") and re.search(words, err.splitlines()[-1])


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0 and all(re.search(rf"^    {command.NAME}\b", out, re.M) for command in COMMANDS)
    names = [
        "demo",
        "plan",
        "convert",
        "verify",
        "profile",
        "inspect",
        "eval",
        "plot",
        "reproduce",
        "generate",
        "tune",
        "bench",
        "doctor",
    ]
    assert [command.NAME for command in COMMANDS] == names
    for command in COMMANDS:
        code, out, _ = run(command.NAME, "--help")
        assert code == 0 and "--json" in out


def test_a_full_disk_leaves_no_output(run, source, texts, tmp_path, monkeypatch):
    def full(self, group, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Shards, "append", full)
    code, out, err = run(
        "convert", source, "--output-dir", tmp_path / "out", "--calibration", texts / "heldout.txt", "--k-max", 2, "--budget", 2
    )
    assert (code, out) == (1, "") and "No space left on device" in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_debug_shows_where_an_error_comes_from(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        main(["inspect", str(tmp_path / "nowhere"), "--debug"])


def test_everything_is_checked_before_the_model_is_loaded(run, source, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(mapping, "make_tensors", lambda *args: pytest.fail("loaded"))
    monkeypatch.setattr(storage, "load_original", lambda *args: pytest.fail("loaded"))
    for more in (["--budget", 9], ["--calibration", texts / "empty.txt"], ["--k-max", 9], ["--group-size", 0]):
        check_failed(run("convert", source, "--output-dir", tmp_path / "out", *more))
    check_failed(run("convert", source, "--output-dir", texts))
    assert not list(tmp_path.iterdir())
    check_failed(run("eval", source, "--text", texts / "heldout.txt", "--budgets", "1"))


@pytest.mark.slow
def test_the_installed_program(tmp_path):
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"dpamoe {dpamoe.__version__}\n")
    done = subprocess.run([PROGRAM, "inspect", tmp_path / "nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"dpamoe inspect: error: model folder {tmp_path / 'nowhere'} does not exist"]


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(encoded):
    command = f"{shlex.quote(str(PROGRAM))} inspect {shlex.quote(str(encoded))} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr


def fenced_lines():
    """Lines of all fenced blocks in README.md, each with the comment in front of its block."""
    lines, comment, inside = (ROOT / "README.md").read_text(encoding="utf-8").splitlines(), "", False
    for line in lines:
        if line.startswith("```"):
            inside = not inside
        elif inside:
            yield comment, line
        elif line.strip():
            comment = line.strip()


@pytest.mark.parametrize(
    "name, parts", [("demo", ["pip install", "dpamoe demo"]), ("test", ["pip install", ".[test]", "pytest"])]
)
def test_readme_has_the_two_commands(name, parts):
    (line,) = [line for comment, line in fenced_lines() if comment == f"<!-- command: {name} -->"]
    assert all(part in line for part in parts)


def test_readme_names_only_commands_that_exist():
    """Each line `dpamoe COMMAND …` parses; what stands behind two spaces is explanation."""
    lines = [re.split(r"\s{2,}", line)[0] for _, line in fenced_lines() if line.startswith("dpamoe ")]
    assert {line.split()[1] for line in lines} | {"demo"} == {command.NAME for command in COMMANDS}
    for line in lines:
        assert build_parser().parse_args(shlex.split(line)[1:]).command == line.split()[1]
