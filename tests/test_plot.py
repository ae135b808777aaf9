"""The picture: what is drawn where, and that a PNG comes out."""

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpamoe import plot


def outcome(rows):
    names = ("budget", "weight_bytes", "kl_dpa", "kl_uniform")
    return {"model": "toy", "rows": [dict(zip(names, row, strict=True)) for row in rows]}


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: series by label as lists of points, and the texts that stand at points."""
    series, notes = {}, []
    line, note = Axes.plot, Axes.annotate

    def plot_line(self, x, y, *rest, **named):
        series[named["label"]] = list(zip(x, y, strict=True))
        return line(self, x, y, *rest, **named)

    def annotate(self, text, xy, *rest, **named):
        notes.append((text, xy))
        return note(self, text, xy, *rest, **named)

    monkeypatch.setattr(Axes, "plot", plot_line)
    monkeypatch.setattr(Axes, "annotate", annotate)
    return series, notes


def test_points_are_the_rows(tmp_path, drawn):
    series, notes = drawn
    rows = [(2.0, 1_500_000, 0.25, 0.25), (2.5, 2_000_000, 0.125, None), (4.0, 3_000_000, 0.01, 0.02)]
    plot.frontier(outcome(rows), tmp_path / "picture.png")
    (dpa,) = [points for label, points in series.items() if label.startswith("DPA")]
    (uniform,) = [points for label, points in series.items() if label.startswith("Uniform")]
    assert dpa == [(1.5, 0.25), (2.0, 0.125), (3.0, 0.01)]
    assert uniform == [(1.5, 0.25), (3.0, 0.02)]
    assert notes == [("2", (1.5, 0.25)), ("2.5", (2.0, 0.125)), ("4", (3.0, 0.01))]


def test_axes_say_what_they_show(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, file: (figures.append(self), save(self, file)))
    plot.frontier(outcome([(2.0, 1_500_000, 0.25, 0.25)]), tmp_path / "picture.png")
    (axes,) = figures[0].axes
    assert axes.get_yscale() == "log" and "KL" in axes.get_ylabel() and "MB" in axes.get_xlabel()
    assert "toy" in axes.get_title() and len(axes.get_legend().get_texts()) == 2


def test_writes_a_png_and_keeps_no_figure_open(tmp_path):
    file = tmp_path / "picture.png"
    assert plot.frontier(outcome([(2.0, 1_500_000, 0.25, 0.25), (3.0, 2_000_000, 0.1, 0.2)]), file) == file
    image = pyplot.imread(file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert image.shape[0] > 600 and image.shape[1] > 1000 and image[..., :3].std() > 0.01
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("rows", [[(2.5, 1_500_000, 0.25, None)], [(2.0, 1_500_000, None, 0.25)]])
def test_a_series_without_points_is_left_empty(tmp_path, drawn, rows):
    plot.frontier(outcome(rows), tmp_path / "picture.png")
    assert sorted(map(len, drawn[0].values())) == [0, 1]
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_a_folder_that_does_not_exist_is_refused_before_anything_is_drawn(tmp_path, drawn):
    with pytest.raises(ValueError, match="nowhere for the picture does not exist"):
        plot.frontier(outcome([]), tmp_path / "nowhere" / "picture.png")
    with pytest.raises(ValueError, match="does not exist"):
        plot.check_folder(tmp_path / "nowhere" / "picture.png")
    assert drawn[0] == {}
    plot.check_folder(tmp_path / "picture.png")
