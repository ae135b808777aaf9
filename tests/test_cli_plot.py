"""`dpamoe plot` as people and programs call it."""

import json

import pytest

from dpamoe.cli import main as program
from dpamoe.cli import plot

SIZES = {"weight_bytes": 6_000_000, "other_bytes": 1_000_000, "bits_per_weight": 16.0}
POINTS = [
    {"allocation": name, "budget": budget, "weight_bytes": size, "kl": kl}
    for name, budget, size, kl in (("dpa", 2.0, 2_000_000, 0.2), ("dpa", 4.0, 3_000_000, 0.01), ("rtn4", None, 3_100_000, 0.03))
]


@pytest.fixture
def run(monkeypatch, capsys):
    """Function that runs the program with this command: arguments to (exit code, stdout, stderr)."""
    monkeypatch.setattr(program, "COMMANDS", (plot,))
    monkeypatch.setattr(program, "_quiet_libraries", lambda: None)  # it changes the logging of this process

    def call(*arguments):
        capsys.readouterr()
        try:
            code = program.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def folder(tmp_path):
    """An evaluation's folder with one kind of score."""
    made = tmp_path / "results"
    made.mkdir()
    outcome = {"model": "toy", "full_precision": {"macro": None, **SIZES}, "points": POINTS}
    (made / "results.json").write_text(json.dumps(outcome))
    return made


def test_pictures_are_listed_for_people(run, folder):
    code, out, err = run("plot", folder)
    files = [folder / "frontier_kl.png", folder / "frontier_kl.svg"]
    assert (code, err) == (0, "") and out == "".join(f"picture: {file}\n" for file in files)
    assert all(file.stat().st_size > 1000 for file in files)


def test_pictures_go_where_they_should_and_are_listed_as_json(run, folder, tmp_path):
    code, out, err = run("plot", folder, "--output-dir", tmp_path / "pictures", "--json")
    files = [str(tmp_path / "pictures" / f"frontier_kl.{kind}") for kind in ("png", "svg")]
    assert (code, err) == (0, "") and json.loads(out) == {"folder": str(folder), "pictures": files}
    assert [file.name for file in folder.iterdir()] == ["results.json"]


def test_drawing_again_replaces_the_pictures(run, folder):
    (folder / "frontier_kl.png").write_text("old")
    assert run("plot", folder)[0] == 0
    assert (folder / "frontier_kl.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_input_gives_one_sentence(run, folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "results.json").write_text("{")
    for arguments, words in (
        ([tmp_path / "nowhere"], "nowhere holds no results.json: give the --output-dir of a finished"),
        ([tmp_path / "file"], "file holds no results.json"),
        ([tmp_path / "damaged"], "results.json is not valid JSON"),
        ([folder, "--output-dir", tmp_path / "file"], "file is a file: name a folder"),
    ):
        code, out, err = run("plot", *arguments)
        assert (code, out) == (1, "") and err.startswith("dpamoe plot: error: ") and words in err and err.count("\n") == 1


def test_the_folder_is_required(run):
    code, _, err = run("plot")
    assert code == 2 and "folder" in err
