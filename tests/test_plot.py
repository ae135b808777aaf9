"""Pictures of an evaluation: what is drawn where, and that every kind of result, however small, gives a picture."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpamoe import plot

KINDS = [(name, kind) for name in ("frontier_kl", "frontier_accuracy", "planes", "residuals") for kind in ("png", "svg")]
GRID = (2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


def point(allocation, budget, megabytes, kl, **more):
    return {"allocation": allocation, "budget": budget, "weight_bytes": int(1e6 * megabytes), "kl": kl, **more}


def outcome(points, model="toy", **full):
    sizes = {"weight_bytes": 58_000_000, "other_bytes": 10_000_000, "bits_per_weight": 16.0}  # 24 million expert weights
    return {"model": model, "full_precision": {"accuracy": None, "macro": None, **sizes, **full}, "points": points}


def histogram(layers, budget, path="model.layers.{}.mlp"):
    """Pairs by planes 0 … 8, spread around the budget where it leaves room."""
    low, high = (int(budget), int(budget)) if budget in (2, 8) else (int(budget) - 1, int(budget) + 1)
    counts = [600 if k == int(budget) else 200 * (low <= k <= high) for k in range(9)]
    return {path.format(layer): counts for layer in layers}


def realistic(layers=5, budgets=GRID):
    """Three allocations with all that can be measured, and four static formats."""
    points = []
    for number, allocation in enumerate(("uniform", "dpa", "gate-only")):
        for budget in budgets:
            kl = 0.2 * 0.35 ** (budget - 2) * (1.0, 0.7, 0.8)[number]
            scores = {"kl_error": kl / 20, "accuracy": {"a": 0.6 - kl, "b": 0.5 - kl}, "macro": 0.55 - kl}
            held = histogram(range(layers), budget)
            points.append(point(allocation, budget, 10 + 3 * budget, kl, **scores, histogram=held))
    for name, megabytes, kl in (("q2_k", 18, 0.16), ("rtn4", 22.4, 0.03), ("hqq4", 22.6, 0.025), ("q8_0", 35, 0.0006)):
        points.append(point(name, None, megabytes, kl, kl_error=None, accuracy=None, macro=0.55 - kl, histogram=None))
    return outcome(points, accuracy={"a": 0.6, "b": 0.5}, macro=0.55)


def residuals(*experts, k_min=2, first=0):
    """Layers with these numbers of experts; expert e of layer l has (l + 1) * (e + 1) / 4^k at k planes."""
    sites = {
        f"layers.{first + layer}.mlp": [[(layer + 1) * (e + 1) / 4**k for k in range(9)] for e in range(count)]
        for layer, count in enumerate(experts)
    }
    return {"k_min": k_min, "sites": sites}


@dataclass
class Drawn:
    """What a picture shows: (points, look) of lines by label, bars of errors, labels at points, and the figure."""

    lines: dict = field(default_factory=dict)
    bars: list = field(default_factory=list)
    notes: dict = field(default_factory=dict)
    stairs: list = field(default_factory=list)
    images: list = field(default_factory=list)
    figures: list = field(default_factory=list)


@pytest.fixture
def drawn(monkeypatch):
    """Records what goes through the axes, in place of writing it, which takes longest."""
    seen = Drawn()

    def record(name, keep):
        usual = getattr(Axes, name)

        def call(self, *given, **named):
            keep(given, named)
            return usual(self, *given, **named)

        monkeypatch.setattr(Axes, name, call)

    record("plot", lambda given, named: seen.lines.update({named.get("label"): (list(zip(*given, strict=True)), named)}))
    record("errorbar", lambda given, named: seen.bars.append((list(zip(*given, strict=True)), named["ecolor"])))
    record("annotate", lambda given, named: seen.notes.update({given[0]: (given[1], named)}))
    record("stairs", lambda given, named: seen.stairs.append((np.array(given[0]), np.array(named["baseline"]), named["color"])))
    record("axhline", lambda given, named: seen.lines.update({named["label"]: (given[0], named)}))
    record("imshow", lambda given, named: seen.images.append((given[0], named)))
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **named: seen.figures.append(self))
    return seen


def test_every_series_is_drawn_at_its_sizes_and_kls(tmp_path, drawn):
    points = [
        point("dpa", 4.0, 3, 0.01), point("uniform", 2.0, 1.5, 0.25), point("dpa", 2.5, 2, 0.125), point("dpa", 2.0, 1.5, 0.25),
        point("uniform", 2.5, 2, 0.2), point("uniform", 4.0, 3, 0.02), point("gate-only", 4.0, 3, 0.015),
        point("rtn4", None, 3.1, 0.03),
    ]  # fmt: skip
    assert plot.frontier(outcome(points), tmp_path / "a.svg") == tmp_path / "a.svg"
    lines = {label: given for label, (given, _) in drawn.lines.items() if label}
    assert lines == {
        r"DPA (labels: $\bar{k}$)": [(1.5, 0.25), (2.0, 0.125), (3.0, 0.01)],
        "Uniform-k": [(1.5, 0.25), (2.0, 0.2), (3.0, 0.02)],
        r"Uniform-k, fractional $\bar{k}$": [(2.0, 0.2)],
        "gate only": [(3.0, 0.015)],
        "static formats": [(3.1, 0.03)],
    }
    assert {text: place for text, (place, _) in drawn.notes.items()} == {
        "2": (1.5, 0.25), "2.5": (2.0, 0.125), "4": (3.0, 0.01), "RTN4": (3.1, 0.03),
    }  # fmt: skip


def test_presets_are_curves_with_labels_and_sizes_also_in_bits(tmp_path, drawn):
    """24 million expert weights beside 10 MB: 16 MB are 2 bits per weight, 22 MB are 4."""
    points = [point("paper", 2.0, 16, 0.3), point("paper", 4.0, 22, 0.1), point("quality", 2.0, 16, 0.2)]
    points += [point("uniform", 2.5, 16, 0.25), point("quality", 4.0, 22, 0.05), point("q2_k_pure", None, 19, 0.12)]
    plot.frontier(outcome(points), tmp_path / "a.svg")
    assert drawn.lines[r"paper, at $\bar{k}$"][0] == [(16.0, 0.3), (22.0, 0.1)]
    assert drawn.lines[r"quality, at $\bar{k}$"][0] == [(16.0, 0.2), (22.0, 0.05)]
    colours = [look["color"] for label, (_, look) in drawn.lines.items() if label]
    assert len(set(colours)) == len(colours) == 4
    assert set(drawn.notes) == {"2", "4", "Q2_K_PURE"}
    (axes,), (legend,) = drawn.figures[0].axes, drawn.figures[0].legends
    assert legend.get_window_extent().x1 <= drawn.figures[0].bbox.x1
    (bits,) = axes.child_axes
    assert bits.get_xlabel() == "bits per expert weight"
    assert bits.transData.transform((2, 0))[0] == pytest.approx(axes.transData.transform((16, 1))[0])
    assert bits.transData.transform((4, 0))[0] == pytest.approx(axes.transData.transform((22, 1))[0])


def test_planes_of_presets_are_pictures_of_their_own(tmp_path):
    points = [point(name, 4.0, 1, 0.1, histogram=histogram([0], 4.0)) for name in ("quality", "paper", "uniform")]
    folder = write(tmp_path / "results", outcome(points))
    assert [file.name for file in plot.draw_all(folder) if file.suffix == ".png"] == [
        "frontier_kl.png", "planes_paper.png", "planes_quality.png",
    ]  # fmt: skip


def test_uniform_is_hollow_at_fractional_budgets_and_dpa_is_solid(tmp_path, drawn):
    plot.frontier(realistic(), tmp_path / "a.svg")
    looks = {label: look for label, (_, look) in drawn.lines.items()}
    assert looks["Uniform-k"]["linestyle"] == "--" and looks["Uniform-k"]["markevery"] == [0, 2, 3, 4, 5]
    assert "markerfacecolor" not in looks["Uniform-k"]
    hollow = looks[r"Uniform-k, fractional $\bar{k}$"]
    assert hollow["markerfacecolor"] == "white" and hollow["linestyle"] == "none"
    dpa, other = looks[r"DPA (labels: $\bar{k}$)"], looks["gate only"]
    assert "linestyle" not in dpa and "markevery" not in dpa and other["linewidth"] < 1
    assert len({dpa["color"], hollow["color"], other["color"], looks["static formats"]["color"]}) == 4


def test_bars_are_one_standard_error_where_it_is_known(tmp_path, drawn):
    points = [
        point("dpa", 2.0, 1, 0.25, kl_error=0.01), point("dpa", 3.0, 2, 0.1, kl_error=None),
        point("dpa", 4.0, 3, 0.05, kl_error=0.002), point("uniform", 2.0, 1, 0.25),
        point("rtn4", None, 3, 0.03, kl_error=0.004),
    ]  # fmt: skip
    plot.frontier(outcome(points), tmp_path / "a.svg")
    assert [bars for bars, _ in drawn.bars] == [[(1.0, 0.25, 0.01), (3.0, 0.05, 0.002)], [(3.0, 0.03, 0.004)]]
    assert [colour for _, colour in drawn.bars] == [plot.BLUE, plot.INK]


def test_axes_say_what_they_show_and_hold_all_points(tmp_path, drawn):
    plot.frontier(realistic(), tmp_path / "a.png")
    (figure,) = drawn.figures
    (axes,) = figure.axes
    assert axes.get_yscale() == "log" and "KL" in axes.get_ylabel() and axes.get_xlabel().endswith("(MB)")
    assert figure.get_suptitle() == "toy"
    low, high = axes.get_ylim()
    assert low < 0.2 * 0.35**6 * 0.7 and high > 0.2 and axes.get_xlim()[0] < 16 and axes.get_xlim()[1] > 35
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5 and legend.get_window_extent().y1 <= axes.get_window_extent().y0


def test_labels_are_apart_and_inside(tmp_path, drawn):
    plot.frontier(realistic(), tmp_path / "a.svg")
    (figure,) = drawn.figures
    frame = figure.axes[0].get_window_extent()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if not text.arrow_patch]
    assert len(boxes) >= 8
    for number, box in enumerate(boxes):
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and not any(box.shrunk(1, 0.8).overlaps(b) for b in boxes[:number])


@pytest.mark.parametrize("megabytes, unit, size", [(999.0, "MB", 999.0), (1500.0, "GB", 1.5), (250_000.0, "GB", 250.0)])
def test_sizes_are_in_the_unit_that_reads_better(tmp_path, drawn, megabytes, unit, size):
    plot.frontier(outcome([point("dpa", 4.0, megabytes, 0.1)]), tmp_path / "a.svg")
    assert drawn.lines[r"DPA (labels: $\bar{k}$)"][0] == [(pytest.approx(size), 0.1)]
    assert drawn.figures[0].axes[0].get_xlabel().endswith(f"({unit})")


def test_points_without_a_place_on_the_axis_are_left_out(tmp_path, drawn):
    points = [
        point("dpa", 2.0, 1, None),
        point("dpa", 3.0, 2, 0.1),
        point("uniform", 8.0, 3, 0.0),
        point("q8_0", None, 3, -1e-9),
    ]
    plot.frontier(outcome([*points, point("dpa", 5.0, 4, float("nan"))]), tmp_path / "a.svg")
    assert [given for given, _ in drawn.lines.values()] == [[(2.0, 0.1)], [(2.0, 0.1)]]  # its line, its markers


def test_only_fractional_uniform_points(tmp_path, drawn):
    plot.frontier(outcome([point("uniform", 2.5, 1, 0.2), point("uniform", 3.5, 2, 0.1)]), tmp_path / "a.svg")
    assert [text.get_text() for text in drawn.figures[0].legends[0].get_texts()] == [r"Uniform-k, fractional $\bar{k}$"]


@pytest.mark.parametrize("draw", [plot.frontier, plot.accuracy_frontier])
def test_without_points_the_picture_says_so(tmp_path, draw):
    text = draw(outcome([]), tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "nothing was measured" in text and "effective size of the whole model" in text


def test_accuracy_is_in_percent_with_a_line_for_full_precision(tmp_path, drawn):
    errors = {"a": 0.03, "b": 0.04}
    points = [
        point("dpa", 2.0, 1, None, macro=0.5, accuracy_error=errors),
        point("uniform", 2.0, 1, None, macro=0.45, accuracy_error=None), point("q4_k_m", None, 2, None, macro=0.52),
        point("dpa", 4.0, 2, 0.1, macro=None),
    ]  # fmt: skip
    plot.accuracy_frontier(outcome(points, accuracy={"a": 0.5, "b": 0.74}, macro=0.62), tmp_path / "a.svg")
    assert drawn.lines[r"DPA (labels: $\bar{k}$)"][0] == [(1.0, 50.0)]
    assert drawn.lines["Uniform-k"][0] == [(1.0, 45.0)] and drawn.lines["static formats"][0] == [(2.0, 52.0)]
    assert drawn.lines["full precision"][0] == 62.0
    assert drawn.bars == [([(1.0, 50.0, pytest.approx(2.5))], plot.BLUE)]  # sqrt(3^2 + 4^2) / 2
    axes = drawn.figures[0].axes[0]
    assert axes.get_ylabel() == "accuracy, mean of 2 tasks (%)" and axes.get_yscale() == "linear"


def test_accuracy_without_full_precision_has_no_line(tmp_path, drawn):
    plot.accuracy_frontier(outcome([point("dpa", 2.0, 1, None, macro=0.5)]), tmp_path / "a.svg")
    assert "full precision" not in drawn.lines and drawn.figures[0].axes[0].get_ylabel() == "accuracy (%)"


def test_bars_of_planes_are_shares_that_add_up(tmp_path, drawn):
    points = [point("dpa", b, b, 0.1, histogram=histogram(range(2), b)) for b in (2.0, 4.0, 8.0)]
    points[1]["histogram"]["model.layers.1.mlp"] = [0, 0, 1, 0, 1, 0, 2, 0, 0]
    plot.planes_by_layer(outcome(points), tmp_path / "a.svg", budgets=(4.4,))
    tops, bases = np.array([top for top, _, _ in drawn.stairs]), np.array([base for _, base, _ in drawn.stairs])
    np.testing.assert_allclose(tops - bases, [(0, 25), (20, 0), (60, 25), (20, 0), (0, 50)])  # k = 2 … 6 of both layers
    np.testing.assert_allclose(tops[-1], 100)
    assert len({colour for _, _, colour in drawn.stairs}) == 5
    axes, bar = drawn.figures[0].axes
    assert axes.get_title(loc="left") == r"$\bar{k}$ = 4" and list(bar.get_yticks()) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("budgets, panels", [((2.0, 3.0, 4.0, 5.0, 6.0, 8.0), "346"), ((2.0, 3.0, 4.0), "34"), ((8.0,), "8")])
def test_one_panel_for_each_budget_that_is_near(tmp_path, drawn, budgets, panels):
    points = [point("dpa", b, b, 0.1, histogram=histogram(range(3), b)) for b in budgets]
    plot.planes_by_layer(outcome(points), tmp_path / "a.svg")
    assert [axes.get_title(loc="left")[-1] for axes in drawn.figures[0].axes[:-1]] == list(panels)


@pytest.mark.parametrize(
    "path, layers, shown",
    [
        ("model.layers.{}.mlp", [0], ["0"]),
        ("model.layers.{}.mlp", [10, 2, 1], ["1", "2", "10"]),  # files sort paths as text
        ("model.layers.{}.mlp", list(range(3, 63)), ["10", "20", "30", "40", "50", "60"]),
        ("model.layers.{}.mlp", list(range(1, 24, 2)), ["5", "15"]),
        ("block.0.part.{}", ["b", "a"], ["0", "1"]),
    ],
)
def test_layers_are_numbered_as_in_the_model(tmp_path, drawn, path, layers, shown):
    plot.planes_by_layer(outcome([point("dpa", 4.0, 1, 0.1, histogram=histogram(layers, 4.0, path))]), tmp_path / "a.svg")
    axes = drawn.figures[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == shown
    assert axes.get_xlim() == (-0.5, len(layers) - 0.5)


def test_layers_that_no_token_reached_are_empty(tmp_path, drawn):
    held = {"layers.0": [0] * 9, "layers.1": [0, 0, 0, 0, 5, 0, 0, 0, 0]}
    plot.planes_by_layer(outcome([point("dpa", 4.0, 1, 0.1, histogram=held)]), tmp_path / "a.svg")
    np.testing.assert_array_equal(drawn.stairs[0][0], [0, 100])
    plot.planes_by_layer(outcome([point("dpa", 4.0, 1, 0.1, histogram={"layers.0": [0] * 9})]), tmp_path / "b.svg")


def test_without_histograms_planes_cannot_be_drawn(tmp_path):
    points = [point("dpa", 4.0, 1, 0.1, histogram=None), point("uniform", 4.0, 1, 0.1, histogram=histogram([0], 4.0))]
    with pytest.raises(ValueError, match="no point of dpa holds a histogram"):
        plot.planes_by_layer(outcome(points), tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k_min, planes, k", [(2, 4, 4), (6, 4, 6), (2, 1, 2), (2, 99, 8)])
def test_residuals_are_those_at_k_planes(tmp_path, drawn, k_min, planes, k):
    plot.residual_map(residuals(3, 2, k_min=k_min), tmp_path / "a.svg", planes=planes, model="toy")
    ((image, look),) = drawn.images
    np.testing.assert_allclose(image.filled(-1), np.array([(1, 2, 3), (2, 4, -(4**k))]) / 4**k)  # no third expert
    assert look["cmap"] == "viridis" and (look["norm"].vmin, look["norm"].vmax) == (
        pytest.approx(4.0**-k),
        pytest.approx(4 * 4.0**-k),
    )
    axes, bar = drawn.figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("expert", "layer") and f"$k$ = {k} " in bar.get_xlabel()


@pytest.mark.parametrize("experts, first", [((8,), 0), ((256,) * 27, 1), ((128,) * 48, 0)])
def test_residuals_of_one_layer_and_of_many(tmp_path, drawn, experts, first):
    plot.residual_map(residuals(*experts, first=first), tmp_path / "a.png")
    assert drawn.images[0][0].shape == (len(experts), experts[0])
    labels = [label.get_text() for label in drawn.figures[0].axes[0].get_yticklabels()]
    assert 1 <= len(labels) <= 9 and all(int(label) % 5 == 0 for label in labels)


def test_colours_of_residuals_span_four_decades_at_most_and_a_factor_of_two_at_least(tmp_path, drawn):
    plot.residual_map(
        {"k_min": 2, "sites": {"layers.0": [[1.0] * 9, [1e-9] * 9, [0.0] * 9, [float("nan")] * 9]}}, tmp_path / "a.svg"
    )
    plot.residual_map({"k_min": 2, "sites": {"layers.0": [[2.0] * 9, [2.0] * 9]}}, tmp_path / "b.svg")
    (wide, first), (_, second) = drawn.images
    assert (first["norm"].vmin, first["norm"].vmax) == (pytest.approx(1e-4), 1.0)
    assert list(wide.mask[0]) == [False, False, True, True]
    assert second["norm"].vmax / second["norm"].vmin == pytest.approx(2)


@pytest.mark.parametrize("sites", [{}, {"layers.0": [[0.0] * 9] * 2}])
def test_residuals_that_are_nowhere_above_0_are_refused(tmp_path, sites):
    with pytest.raises(ValueError, match="no residual at 4 planes is above 0"):
        plot.residual_map({"k_min": 2, "sites": sites}, tmp_path / "a.svg")


def write(folder, results, table=None):
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(results if isinstance(results, str) else json.dumps(results))
    if table is not None:
        (folder / "residuals.json").write_text(table if isinstance(table, str) else json.dumps(table))
    return folder


@pytest.mark.slow
def test_a_folder_gives_every_picture_and_always_the_same_bytes(tmp_path):
    folder = write(tmp_path / "results", realistic(2, (2.0, 2.5, 8.0)), residuals(8, 8))
    files = plot.draw_all(folder)
    assert files == [folder / f"{name}.{kind}" for name, kind in KINDS]
    again = plot.draw_all(folder, tmp_path / "made" / "here")
    assert [file.parent for file in again] == [tmp_path / "made" / "here"] * 8
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files if file.suffix == ".svg"}
    for name, words in {
        "frontier_kl": ("KL to full precision", ">RTN4</text>", ">2.5</text>", ">gate only</text>"),
        "frontier_accuracy": ("mean of 2 tasks", ">full precision</text>"), "planes": ("share of pairs", ">layer</text>"),
        "residuals": (">expert</text>", "mean squared error"),
    }.items():  # fmt: skip
        assert all(word in texts[name] for word in (*words, ">toy</text>"))


def test_what_was_not_measured_is_not_drawn(tmp_path):
    only_kl = write(tmp_path / "a", outcome([point("dpa", 4.0, 1, 0.1, macro=None, histogram=None)]))
    assert [file.name for file in plot.draw_all(only_kl)] == ["frontier_kl.png", "frontier_kl.svg"]
    only_tasks = write(tmp_path / "b", outcome([point("rtn4", None, 1, None, macro=0.5, histogram=None)]))
    assert [file.name for file in plot.draw_all(only_tasks)] == ["frontier_accuracy.png", "frontier_accuracy.svg"]


@pytest.mark.slow
def test_a_folder_without_results_is_told_from_a_damaged_one(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="holds no results.json: give the --output-dir of a finished `dpamoe eval`"):
            plot.draw_all(folder)
    good = outcome([point("dpa", 4.0, 1, 0.1)])
    ragged = outcome([point("dpa", 4.0, 1, 0.1, histogram={"a": [[]], "b": [1]})])
    damaged = [
        ("{", None), ("[]", None), ({}, None), (outcome([]), None), (outcome([{}]), None), (outcome([3]), None), (ragged, None),
        ({**good, "points": 4}, None), (outcome([point("dpa", 4.0, 1, "much")]), None), (good, "{"), (good, {}),
        (good, {"k_min": 2, "sites": {"a": [[1.0], [1.0, 2.0]]}}), (good, {"k_min": 2, "sites": {"a": []}}),
    ]  # fmt: skip
    for number, (results, table) in enumerate(damaged):
        folder = write(tmp_path / str(number), results, table)
        with pytest.raises(ValueError, match=f"{number}.*run `dpamoe eval … --output-dir` again"):
            plot.draw_all(folder)
        assert not list(folder.glob(".*"))


def test_pictures_go_into_a_folder(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ValueError, match="taken is a file: name a folder"):
        plot.draw_all(write(tmp_path / "a", realistic()), tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("draw", [plot.frontier, plot.accuracy_frontier, plot.planes_by_layer])
def test_names_are_checked_before_anything_is_drawn(tmp_path, drawn, draw):
    with pytest.raises(ValueError, match="nowhere for the picture does not exist"):
        draw(realistic(), tmp_path / "nowhere" / "a.png")
    with pytest.raises(ValueError, match="ends in .png or .svg"):
        draw(realistic(), tmp_path / "a.pdf")
    assert drawn.lines == {} and drawn.stairs == []
    with pytest.raises(ValueError, match="does not exist"):
        plot.check_folder(tmp_path / "nowhere" / "a.png")
