"""Pictures of an evaluation: quality against size, planes spent by layer, residuals; as PNG or SVG."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from dpamoe import labels
from dpamoe.evaluation_folder import RESIDUALS, RESULTS
from dpamoe.figure import KINDS, blank, log_ticks
from dpamoe.figure import check_folder as check_folder  # for those who draw after long work
from dpamoe.files import read_json

# Okabe-Ito colours: told apart by people with any colour vision; markers and dashes differ too.
BLUE, VERMILLION, GREEN, INK = "#0072B2", "#D55E00", "#009E73", "#333333"
MUTED = (
    (GREEN, "^", (0, (4, 1.5))), ("#CC79A7", "v", (0, (1, 1))), ("#56B4E9", "d", (0, (5, 1, 1, 1))), ("#999999", "x", "-"),
)  # fmt: skip
MAIN = {  # curves with labels of budgets: colour, marker and name, which is short enough for two columns
    "dpa": (BLUE, "o", r"DPA (labels: $\bar{k}$)"), "paper": (BLUE, "o", r"paper, at $\bar{k}$"),
    "quality": (GREEN, "^", r"quality, at $\bar{k}$"),
}  # fmt: skip
PANELS = (3.0, 4.0, 6.0)  # budgets whose planes are drawn; at both ends of the range every pair has the same number
MIDDLE = 4  # planes whose residuals are drawn
REACH = 21  # of the labels of budgets, 1/72 inch
DECADES = 4  # of residuals that colours tell apart


@dataclass(frozen=True)
class _Point:
    """One point of a series: size of the model, value with its standard error, and the budget or the name of the format."""

    size: float
    value: float
    error: float | None
    name: float | str

    def ends(self) -> tuple[float, float]:
        """Where its bar begins and ends, on a log axis; a bar down to 0 would have no end."""
        error = self.error or 0.0
        return max(self.value - error, self.value / 3), self.value + error

    def whole(self) -> bool:
        """Whether its budget is a whole number of planes."""
        return float(self.name).is_integer()


Series = dict[str, list[_Point]]  # points by allocation, in order of size


def frontier(outcome: dict, file: Path) -> Path:
    """Draw KL, on a log axis, against the size of the whole model; returns `file`.

    outcome: as `dpamoe eval --json` prints it. Bars are one standard error. Raises ValueError as `check_folder` does.
    """
    curves, static = _series(outcome, "kl", lambda point: point.get("kl_error"))
    ends = [point.ends() for points in (*curves.values(), static) for point in points]
    with blank(file, 3.6, outcome["model"]) as figure:
        axes = figure.add_subplot()
        axes.set_ylabel("KL to full precision (nats/token)")
        if ends:
            _log_scale(axes, min(low for low, _ in ends), max(high for _, high in ends))
        _fill(figure, axes, curves, static, outcome["full_precision"])
    return file


def accuracy_frontier(outcome: dict, file: Path) -> Path:
    """Draw mean accuracy over tasks against the size of the whole model, with a line for full precision; returns `file`.

    Bars are one standard error of the mean, of tasks whose own are known. Raises ValueError as `check_folder` does.
    """
    full = outcome["full_precision"]
    curves, static = _series(outcome, "macro", _macro_error)
    curves = {name: [_in_percent(point) for point in points] for name, points in curves.items()}
    static = [_in_percent(point) for point in static]
    tasks = len(full.get("accuracy") or {})
    with blank(file, 3.6, outcome["model"]) as figure:
        axes = figure.add_subplot()
        axes.set_ylabel(f"accuracy, mean of {tasks} tasks (%)" if tasks > 1 else "accuracy (%)")
        reference = None if full.get("macro") is None else 100 * full["macro"]
        _fill(figure, axes, curves, static, full, reference)
    return file


def _in_percent(point: _Point) -> _Point:
    return replace(point, value=100 * point.value, error=None if point.error is None else 100 * point.error)


def _macro_error(point: dict) -> float | None:
    """Standard error of a mean over tasks that were measured independently."""
    errors = list((point.get("accuracy_error") or {}).values())
    return math.sqrt(sum(error**2 for error in errors)) / len(errors) if errors and None not in errors else None


def _series(outcome: dict, field: str, error_of: Callable[[dict], float | None]) -> tuple[Series, list[_Point]]:
    """What is to be drawn: points of allocations at budgets, and of static formats; sizes in bytes."""
    curves, static = {}, []
    for point in sorted(outcome["points"], key=lambda point: point["weight_bytes"]):
        value, budget = point.get(field), point["budget"]
        if value is None or not math.isfinite(value) or (field == "kl" and value <= 0):  # no place on a log axis
            continue
        name = point["allocation"].upper() if budget is None else budget
        series = static if budget is None else curves.setdefault(point["allocation"], [])
        series.append(_Point(point["weight_bytes"], value, error_of(point), name))
    return curves, static


def _fill(figure, axes, curves: Series, static: list[_Point], full: dict, reference: float | None = None) -> None:
    """Draw all series against size with their labels and a legend below; scale and label the axes of sizes.

    full: what the outcome says of full precision.
    """
    largest = max((point.size for points in (*curves.values(), static) for point in points), default=0)
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    axes.set_xlabel(f"effective size of the whole model ({name})")
    axes.margins(x=0.07, y=0.12)
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    axes.grid(True, which="major")
    curves = {key: [replace(point, size=point.size / unit) for point in points] for key, points in curves.items()}
    static = [replace(point, size=point.size / unit) for point in static]
    main = {key: curves[key] for key in MAIN if key in curves}
    for key, points in main.items():
        _draw_main(axes, points, *MAIN[key])
    _draw_uniform(axes, curves.get("uniform", []))
    _draw_bars(axes, static, INK)
    _draw(axes, static, INK, label="static formats", marker="D", linestyle="none", markersize=3.4, zorder=4.5)
    others = [key for key in curves if key not in (*MAIN, "uniform")]
    looks = [look for look in MUTED if look[0] not in [MAIN[key][0] for key in main]]
    for number, key in enumerate(others):
        _draw_other(axes, key, curves[key], *looks[number % len(looks)])
    if reference is not None:
        axes.axhline(reference, color=INK, linewidth=0.8, linestyle=(0, (6, 3)), label="full precision")
    if not largest:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color=INK)
        axes.set(xticks=[], yticks=[])
        return
    _bits_axis(axes, full, unit)
    figure.legend(loc="outside lower left", ncols=2)
    budgets = [
        (f"{point.name:g}", (point.size, point.value), MAIN[key][0], REACH) for key, points in main.items() for point in points
    ]
    _label(figure, axes, budgets + [(point.name, (point.size, point.value), INK, math.inf) for point in static])


def _bits_axis(axes, full: dict, unit: float) -> None:
    """A second axis of sizes at the top, in bits per expert weight: what is no expert has the same size in all points."""
    outside, weights = full["other_bytes"] / unit, (full["weight_bytes"] - full["other_bytes"]) / full["bits_per_weight"] / unit
    both = (lambda size: (size - outside) / weights, lambda bits: outside + bits * weights)
    top = axes.secondary_xaxis("top", functions=both)
    top.set_xlabel("bits per expert weight")
    top.spines["top"].set_visible(True)


def _draw(axes, points: list[_Point], colour: str, zorder: float = 2, **look) -> None:
    """One series, without the bars of its errors; nothing if it has no point."""
    if points:
        axes.plot([p.size for p in points], [p.value for p in points], color=colour, zorder=zorder, **look)


def _draw_bars(axes, points: list[_Point], colour: str) -> None:
    known = [(point.size, point.value, point.error) for point in points if point.error is not None]
    if known:
        axes.errorbar(*zip(*known, strict=True), fmt="none", ecolor=colour, elinewidth=0.8, zorder=2)


def _draw_main(axes, points: list[_Point], colour: str, marker: str, name: str) -> None:
    _draw_bars(axes, points, colour)
    _draw(axes, points, colour, label=name, marker=marker)
    _draw(axes, points, colour, zorder=4, linestyle="none", marker=marker)  # only its line is below other series


def _draw_uniform(axes, points: list[_Point]) -> None:
    """Filled at whole budgets, hollow between, where some slots have one plane more than others."""
    whole, between = ([point for point in points if point.whole() is kind] for kind in (True, False))
    places = [number for number, point in enumerate(points) if point.whole()]
    _draw_bars(axes, points, VERMILLION)
    _draw(axes, points, VERMILLION, label="Uniform-k" if whole else None, marker="s", markevery=places, linestyle="--")
    look = {"marker": "s", "linestyle": "none", "zorder": 3.5}
    _draw(axes, whole, VERMILLION, **look)
    _draw(axes, between, VERMILLION, label=r"Uniform-k, fractional $\bar{k}$", markerfacecolor="white", **look)


def _draw_other(axes, name: str, points: list[_Point], colour: str, marker: str, dashes) -> None:
    _draw_bars(axes, points, colour)
    look = {"marker": marker, "markersize": 2.2, "linestyle": dashes, "linewidth": 0.7, "zorder": 3}
    _draw(axes, points, colour, label=name.replace("-", " "), **look)


def _log_scale(axes, low: float, high: float) -> None:
    """Make the y axis logarithmic, from a little below `low` to a little above `high`; bars of errors may leave it."""
    middle, half = math.sqrt(low * high), max(math.sqrt(high / low), 2.0) * (high / low) ** 0.09 * 1.1
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(middle / half, middle * half)
    log_ticks(axes.yaxis, half**2)


def _label(figure, axes, wanted: Sequence[tuple]) -> None:
    """Write each (text, point, colour, reach) where it hides least, with a line to its point where it is not near."""
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    figure.draw_without_rendering()  # lays out, so that positions are final
    scale = 72 / figure.dpi
    drawn = [(line, line.get_transform().transform(line.get_xydata()) * scale) for line in axes.get_lines()]
    busy = [labels.along(path) for line, path in drawn if line.get_linestyle() != "None"]
    busy += [labels.on_markers(path) for line, path in drawn if line.get_marker() != "None"]
    bars = [segment for found in axes.collections if hasattr(found, "get_segments") for segment in found.get_segments()]
    busy += [labels.along(axes.transData.transform(segment) * scale) for segment in bars]
    frame = axes.get_window_extent().get_points() * scale
    texts = []
    for text, point, _, reach in wanted:
        probe = axes.text(0, 0, text, parse_math=False)
        width, height = probe.get_window_extent().size * (1, 1 if "_" in text else 0.8) * scale  # other letters stay above
        probe.remove()
        texts.append(labels.Label(tuple(axes.transData.transform(point) * scale), (width, height), reach))
    for (text, point, colour, _), (middle, far) in zip(wanted, labels.arrange(texts, np.concatenate(busy), frame), strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            text, point, middle - axes.transData.transform(point) * scale, textcoords="offset points", color=colour,
            ha="center", va="center", zorder=6, parse_math=False, arrowprops=leader if far > labels.NEAR else None,
        ).set_in_layout(False)  # fmt: skip


def planes_by_layer(outcome: dict, file: Path, budgets: Iterable[float] = PANELS, allocation: str = "dpa") -> Path:
    """Draw how an allocation spends planes in each layer, one panel for the point nearest to each of `budgets`; returns `file`.

    Each layer is one bar, split by the share of its pairs (token, selected expert) computed with k planes. Raises ValueError
    if no point has a histogram, and as `check_folder` does.
    """
    held = [point for point in outcome["points"] if point["allocation"] == allocation and point.get("histogram")]
    if not held:
        raise ValueError(f"no point of {allocation} holds a histogram of planes: evaluate that allocation")
    nearest = {point["budget"]: point for at in budgets for point in [min(held, key=lambda p: abs(p["budget"] - at))]}
    shares = {budget: _shares(nearest[budget]["histogram"]) for budget in sorted(nearest)}
    used = np.flatnonzero(sum(table.sum(0) for _, table in shares.values()))
    kinds = range(used[0], used[-1] + 1) if used.size else range(1)
    with blank(file, 0.95 + 0.85 * len(shares), outcome["model"]) as figure:
        from matplotlib import cm, colormaps, colors

        panels = figure.subplots(len(shares), sharex=True, squeeze=False)[:, 0]
        colour = cm.ScalarMappable(colors.BoundaryNorm([k - 0.5 for k in (*kinds, kinds.stop)], 256), colormaps["viridis"])
        for axes, (budget, (_, table)) in zip(panels, shares.items(), strict=True):
            axes.set_title(rf"$\bar{{k}}$ = {budget:g}")
            _stack(axes, table, {k: colour.to_rgba(k) for k in kinds})
        _number_layers(panels[-1].xaxis, next(iter(shares.values()))[0])
        panels[-1].set_xlabel("layer")
        figure.supylabel("share of pairs (%)", fontsize=9)
        bar = figure.colorbar(colour, ax=panels, ticks=list(kinds), label=r"planes $k$", aspect=12 * len(shares))
        bar.outline.set_visible(False)
        bar.minorticks_off()
    return file


def _shares(histogram: dict[str, list[float]]) -> tuple[list[int], np.ndarray]:
    """Numbers of the layers in order, and the share of each number of planes in each layer in percent, [layers, C + 1]."""
    layers, paths = _in_order(histogram)
    counts = np.array([histogram[path] for path in paths], dtype=np.float64)
    return layers, 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _stack(axes, table: np.ndarray, colours: dict[int, tuple]) -> None:
    edges, below = np.arange(len(table) + 1) - 0.5, np.zeros(len(table))
    for k, colour in colours.items():
        axes.stairs(below + table[:, k], edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = below + table[:, k]
    axes.vlines(edges[1:-1], 0, 100, color="white", linewidth=min(1.0, 12 / len(table)))
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 100), yticks=(0, 50, 100))


def _in_order(sites: Iterable[str]) -> tuple[list[int], list[str]]:
    """Layers and paths of sites: by the first number in the path if it differs in all, else counted as they come."""
    numbers = {path: int(found.group()) for path in sites if (found := re.search(r"\d+", path))}
    paths = list(sites)
    if len(set(numbers.values())) == len(paths):
        paths.sort(key=numbers.__getitem__)
        return [numbers[path] for path in paths], paths
    return list(range(len(paths))), paths


def _number_layers(axis, layers: list[int], most: int = 9) -> None:
    """At most `most` ticks at rows 0, 1, … of an axis that say which layers they are."""
    round_ones = ([row for row, layer in enumerate(layers) if layer % step == 0] for step in (1, 2, 5, 10, 20, 50, 100, 200))
    rows = next((rows for rows in round_ones if 0 < len(rows) <= most), [0])
    axis.set_ticks(rows, [str(layers[row]) for row in rows])


def residual_map(residuals: dict, file: Path, planes: int = MIDDLE, model: str = "") -> Path:
    """Draw the residual of every expert of every layer at one number of planes, in colours on a log scale; returns `file`.

    residuals: {"k_min": int, "sites": {path: [[float] * (C + 1)] * E}}. `planes` is moved into k_min … C; layers with fewer
    experts than others end in grey. Raises ValueError if there is no residual above 0, and as `check_folder` does.
    """
    layers, paths = _in_order(residuals["sites"])
    tables = [np.array(residuals["sites"][path], dtype=np.float64) for path in paths]
    k = min(max(planes, residuals["k_min"]), *(table.shape[1] - 1 for table in tables)) if tables else planes
    values = np.full((len(tables), max((len(table) for table in tables), default=0)), np.nan)
    for row, table in zip(values, tables, strict=True):
        row[: len(table)] = table[:, k]
    shown = np.ma.masked_invalid(np.where(values > 0, values, np.nan))
    if not shown.count():
        raise ValueError(f"no residual at {k} planes is above 0: profile the model on more text")
    height = min(max(0.14 * len(tables), 0.35), 2.2)
    with blank(file, 1.15 + height, model) as figure:
        from matplotlib import colors

        axes = figure.add_subplot(facecolor="#D9D9D9")
        high = float(shown.max())
        low = max(float(shown.min()), high / 10**DECADES)
        spare = math.sqrt(max(2 * low / high, 1))  # so that the colours span a factor of two at least
        norm = colors.LogNorm(low / spare, high * spare)
        image = axes.imshow(shown, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.set(xlabel="expert", ylabel="layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _number_layers(axes.yaxis, layers, min(9, int(height / 0.13)))
        ends = "min" if low > float(shown.min()) else "neither"
        bar = figure.colorbar(image, ax=axes, location="bottom", fraction=0.3, aspect=30, extend=ends, pad=0.02)
        bar.set_label(rf"residual at $k$ = {k} (mean squared error)")
        bar.outline.set_visible(False)
        log_ticks(bar.ax.xaxis, norm.vmax / norm.vmin)
    return file


def draw_all(folder: Path, out: Path | None = None) -> list[Path]:
    """Draw what the folder of an evaluation holds into `out`, by default the same folder; returns the files.

    frontier_kl, frontier_accuracy, planes (of presets planes_NAME) and residuals, each as PNG and SVG; those for which nothing
    was measured are left out. Raises ValueError if results.json is missing, damaged or without anything to draw, or `out` is a
    file.
    """
    again = "run `dpamoe eval … --output-dir` again"
    if not (folder / RESULTS).is_file():
        raise ValueError(
            f"{folder} holds no {RESULTS}: give the --output-dir of a finished `dpamoe eval` or `dpamoe reproduce`"
        )
    outcome = read_json(folder / RESULTS, again)
    residuals = read_json(folder / RESIDUALS, again) if (folder / RESIDUALS).is_file() else None
    out = folder if out is None else out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder for the pictures")
    try:
        jobs = _jobs(outcome, residuals)
        out.mkdir(parents=True, exist_ok=True)
        return [draw(file=out / f"{name}{kind}") for name, draw in jobs.items() for kind in KINDS]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        raise ValueError(f"what {folder} holds cannot be drawn ({reason}): {again}") from error


def _jobs(outcome: dict, residuals: dict | None) -> dict[str, partial]:
    """By name, the functions that draw what was measured."""
    jobs = {}
    for name, field, draw in (("frontier_kl", "kl", frontier), ("frontier_accuracy", "macro", accuracy_frontier)):
        if any(_series(outcome, field, lambda point: None)):
            jobs[name] = partial(draw, outcome)
    spent = {point["allocation"] for point in outcome["points"] if point.get("histogram")}
    for name in [name for name in MAIN if name in spent]:
        jobs["planes" if name == "dpa" else f"planes_{name}"] = partial(planes_by_layer, outcome, allocation=name)
    if residuals is not None:
        jobs["residuals"] = partial(residual_map, residuals, model=outcome["model"])
    if not jobs:
        raise ValueError("no point has a KL, an accuracy or a histogram")
    return jobs
