"""`dpamoe reproduce` on the first layers of the shipped model: every experiment, one report, nothing measured twice."""

import json
import logging
import shutil

import pytest

from dpamoe import calibration, reproduce
from dpamoe.cli.main import main
from dpamoe.spec import EncodeSpec

QUICK = (
    "--max-tokens", "1100", "--budgets", "2,3,4", "--static", "rtn4", "--top-p", "0.5,1", "--sequences", "2", "--prompt-tokens",
    "16", "--new-tokens", "2",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def few_words():
    """What the model writes to calibrate itself is short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "WRITTEN_TOKENS", 32)
        yield


@pytest.fixture(scope="module")
def source(short_dir, tmp_path_factory):
    """The first two layers of the shipped model in a folder of its own; read only."""
    return shutil.copytree(short_dir, tmp_path_factory.mktemp("models") / "source")


@pytest.fixture(scope="module")
def reported(source, tmp_path_factory):
    """Folder of a finished report."""
    folder = tmp_path_factory.mktemp("reports") / "report"
    assert main(["reproduce", str(source), "--output-dir", str(folder), *QUICK]) == 0
    return folder


@pytest.fixture(autouse=True)
def quiet():
    """The program sets up the logger of a process of its own."""
    logger = logging.getLogger("dpamoe")
    kept = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = kept[:2]
    logger.setLevel(kept[2])


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_the_report_holds_every_section_with_numbers(reported):
    text = (reported / "report.md").read_text(encoding="utf-8")
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "Quality against size", "Tasks", "Static formats", "Speed at equal budget", "Which signal", "Cross terms",
        "Storage of scales", "Top-p routing",
    ]  # fmt: skip
    assert "**This model is small.**" in text and "the held-out text of the package" in text
    assert "| 2 | 16 | 8 | 35 |" in text and "| rtn4 | 4.250 |" in text and "nan" not in text
    pictures = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures and all((reported / picture).is_file() for picture in pictures)


@pytest.mark.slow
def test_figures_of_the_experiments(reported):
    found = {name: json.loads((reported / f"{name}.json").read_text())["found"] for name in ("cross_terms", "top_p", "speed")}
    assert [row["k"] for row in found["cross_terms"]] == [*range(2, 9), None]
    rows = found["top_p"]["rows"]
    assert [(row["p"], row["allocation"]) for row in rows] == [(0.5, "uniform"), (0.5, "dpa"), (1.0, "uniform"), (1.0, "dpa")]
    assert rows[0]["active"] < 4 == rows[2]["active"] and rows[0]["megabytes_per_token"] < rows[2]["megabytes_per_token"]
    points = json.loads((reported / "frontier" / "results.json").read_text())["points"]
    kl = {(point["allocation"], point["budget"]): point["kl"] for point in points}
    assert rows[3]["kl"] == kl["dpa", 4.0] and rows[2]["kl"] == kl["uniform", 4.0]  # p = 1 keeps all
    assert [(row["budget"], row["allocation"]) for row in found["speed"]["rows"]] == [
        (budget, name) for budget in (3.0, 4.0) for name in ("uniform", "dpa")
    ]


@pytest.mark.slow
def test_a_second_run_measures_nothing_again(source, reported, capsys, monkeypatch):
    before = {file: file.read_bytes() for file in reported.rglob("*.json")}
    monkeypatch.setattr(reproduce.frontier, "encoded_model", None)
    monkeypatch.setattr(reproduce.storage, "load_original", None)
    code, out, err = run(capsys, "reproduce", source, "--output-dir", reported, *QUICK, "--json")
    assert code == 0, err
    assert json.loads(out)["report"] == str(reported / "report.md")
    assert before == {file: file.read_bytes() for file in reported.rglob("*.json")}


@pytest.mark.slow
def test_only_what_other_settings_touch_is_measured_again(source, reported, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(reported, tmp_path / "report")
    before = {file.name: file.read_bytes() for file in folder.glob("*.json")}
    arguments = ("reproduce", source, "--output-dir", folder, *QUICK, "--new-tokens", 3)
    code, _, err = run(capsys, *arguments)
    assert code == 0, err
    changed = {file.name for file in folder.glob("*.json") if before[file.name] != file.read_bytes()}
    assert changed == {"speed.json"}


def test_a_preset_is_an_encoding_and_a_curve(source, tmp_path, capsys, monkeypatch):
    seen = []

    def stopped(wanted, experiments):
        seen.append((wanted.spec, wanted.baselines[:4], wanted.presets))
        raise ValueError("stopped")

    monkeypatch.setattr(reproduce, "plan", stopped)
    for flags in ((), ("--preset", "quality"), ("--preset", "quality", "--group-size", "64")):
        assert run(capsys, "reproduce", source, "--output-dir", tmp_path / "out", *QUICK, *flags)[0] == 1
    usual = ("uniform", "gate-only", "residual-only")
    assert seen == [
        (None, (*usual, "rtn4"), ()),
        (EncodeSpec(32, scale_mode="tied"), (*usual, "threshold-skip"), ()),
        (EncodeSpec(64, scale_mode="tied"), (*usual, "threshold-skip"), ()),
    ]


def test_tasks_are_part_of_what_top_p_depends_on(source, tmp_path, monkeypatch):
    """Accuracies of other tasks must never stand in a report."""
    from dpamoe import frontier, tasks

    monkeypatch.setattr(frontier, "check_tasks", lambda names, folder: tasks.Chosen(dict.fromkeys(names)))
    text = str(source.parent / "text.txt")
    (source.parent / "text.txt").write_text("words of a text " * 400)
    made = []
    for names in ((), ("a",), ("b",)):
        wanted = frontier.Wanted(str(source), text=text, tasks=names)
        made.append(reproduce._settings(reproduce.plan(wanted, reproduce.Experiments()), "top_p"))
    assert made[0] != made[1] != made[2] != made[0]


@pytest.mark.slow
def test_a_model_with_few_planes(source, tmp_path, capsys):
    code, _, err = run(
        capsys,
        "reproduce",
        source,
        "--output-dir",
        tmp_path / "out",
        *QUICK,
        "--k-max",
        3,
        "--budgets",
        "2,3",
        "--static",
        "none",
    )
    assert code == 0, err
    rows = json.loads((tmp_path / "out" / "top_p.json").read_text())["found"]["rows"]
    assert {row["budget"] for row in rows} == {3.0}
    assert "Not measured: name them with `--static`" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    "more, words",
    [
        (["--top-p", "0"], "p is 0.0"),
        (["--top-p", "1.5"], "p is 1.5"),
        (["--prompt-tokens", "3000"], "prompt of 3000 tokens"),
        (["--static", "uniform"], "uniform"),
        (["--budgets", "9"], "budget is 9"),
        (["--limit", "5"], "are for tasks"),
    ],
)
def test_bad_input_before_any_work(source, tmp_path, capsys, monkeypatch, more, words):
    monkeypatch.setattr(reproduce.storage, "load_original", None)
    code, out, err = run(capsys, "reproduce", source, "--output-dir", tmp_path / "out", *QUICK, *more)
    assert (code, out) == (1, "") and words in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_not_touched(source, tmp_path, capsys):
    (tmp_path / "report.md").write_text("my notes")
    for place, words in ((tmp_path, "no folder of an earlier report"), (tmp_path / "report.md", "no folder of an earlier")):
        code, _, err = run(capsys, "reproduce", source, "--output-dir", place, *QUICK)
        assert code == 1 and words in err
    assert (tmp_path / "report.md").read_text() == "my notes" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_plot_draws_a_report_again(reported, tmp_path, capsys):
    code, out, err = run(capsys, "plot", reported, "--output-dir", tmp_path / "pictures", "--json")
    assert code == 0, err
    assert (tmp_path / "pictures" / "frontier" / "frontier_kl.svg").is_file() and len(json.loads(out)["pictures"]) == 6
