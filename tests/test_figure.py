"""The look of pictures and their files: kinds, same bytes every time, whole or not at all, nobody else's settings."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from dpamoe.figure import DPI, WIDTH, blank, check_folder, log_ticks


def draw(file, title="toy"):
    with blank(file, 1.0, title) as figure:
        figure.add_subplot().plot([1, 2], [3, 4], label="a line")
    return file.read_bytes()


def test_png_is_one_column_wide_and_has_no_date(tmp_path):
    written = draw(tmp_path / "a.png")
    assert written[:8] == b"\x89PNG\r\n\x1a\n" and b"Software" not in written and b"tIME" not in written
    assert pyplot.imread(tmp_path / "a.png").shape[:2] == (DPI, round(WIDTH * DPI))


def test_svg_holds_text_as_text_and_no_date(tmp_path):
    written = draw(tmp_path / "a.svg").decode()
    assert written.startswith("<?xml") and "<text" in written and ">toy</text>" in written
    assert "dc:date" not in written and "dc:creator" not in written


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_other_settings_change_nothing_and_are_not_changed(tmp_path, kind):
    usual = draw(tmp_path / f"a.{kind}")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "svg.fonttype": "path", "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert draw(tmp_path / f"b.{kind}") == usual
        assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []


def test_wide_titles_are_cut_and_signs_in_them_are_no_formulas(tmp_path):
    assert ">a$b_c$d</text>" in draw(tmp_path / "a.svg", "a$b_c$d").decode()
    long = draw(tmp_path / "b.svg", "W" * 200).decode()
    assert "WWW…</text>" in long and "W" * 40 not in long


def test_a_write_that_fails_leaves_the_old_picture_and_nothing_else(tmp_path, monkeypatch):
    old = draw(tmp_path / "a.svg")

    def fail(self, target):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        draw(tmp_path / "a.svg", "another")
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"] and (tmp_path / "a.svg").read_bytes() == old


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_drawing_that_fails_leaves_nothing(tmp_path, error):
    before = dict(matplotlib.rcParams)
    with pytest.raises(error), blank(tmp_path / "a.png", 1.0, "toy"):
        raise error
    assert list(tmp_path.iterdir()) == [] and dict(matplotlib.rcParams) == before


def test_names_and_folders_are_checked_before_anything_is_drawn(tmp_path):
    with pytest.raises(ValueError, match="nowhere for the picture does not exist: make it first"):
        check_folder(tmp_path / "nowhere" / "picture.png")
    for name in ("picture.pdf", "picture", "folder.png"):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="must be a file whose name ends in .png or .svg"):
            check_folder(tmp_path / name)
        with pytest.raises(ValueError, match="ends in .png or .svg"), blank(tmp_path / name, 1.0, ""):
            pass
    for name in ("picture.png", "picture.svg", "PICTURE.SVG"):
        check_folder(tmp_path / name)


@pytest.mark.parametrize("low", [1e-6, 2.2e-4, 0.0031, 0.41, 1.6, 6.1, 4100.0])
@pytest.mark.parametrize("ratio", [2.01, 4.0, 5.1, 20.0, 99.0, 120.0, 1e5])
def test_two_values_at_least_and_eight_at_most_are_labelled(low, ratio):
    axes = Figure().add_subplot()
    axes.set_yscale("log")
    axes.set_ylim(low, low * ratio)
    log_ticks(axes.yaxis, ratio)
    inside = [value for value in axes.yaxis.get_majorticklocs() if low <= value <= low * ratio]
    names = axes.yaxis.get_major_formatter().format_ticks(inside)
    assert 2 <= len(names) <= 8 and all(names) and len(set(names)) == len(names)
    assert not any(axes.yaxis.get_minor_formatter().format_ticks(axes.yaxis.get_minorticklocs()))


def test_small_values_are_written_as_powers():
    axes = Figure().add_subplot()
    axes.set_xscale("log")
    log_ticks(axes.xaxis, 20)
    formatter = axes.xaxis.get_major_formatter()
    assert [formatter(value) for value in (3e-6, 1e-5, 0.003, 0.5, 30)] == [
        r"3$\cdot10^{-6}$", r"1$\cdot10^{-5}$", "0.003", "0.5", "30",
    ]  # fmt: skip
    assert np.isclose(float(formatter(1.5)), 1.5)
