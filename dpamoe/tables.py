"""Results as text: columns for a terminal, Markdown tables, and the tables of an evaluation."""

import math
from collections.abc import Sequence

from dpamoe.presets import PRESETS

NONE = "–"
MAIN = ("dpa", *PRESETS)  # what other allocations and formats are compared with


def cell(value: float | None, form: str) -> str:
    """A number in a format, a dash for None."""
    return NONE if value is None else format(value, form)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under a rule."""
    return growing(head, rows, rows)


def growing(head: Sequence[str], rows: Sequence[Sequence[str]], room: Sequence[Sequence[str]]) -> str:
    """The same as wide as `head` and the cells of `room`, so that further rows move no line that is printed already."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in (head, *room)) for column in range(len(head))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(outcome: dict) -> dict[float, dict[str, dict]]:
    """The points that have a budget: {budget: {allocation: point}}, budgets rising."""
    found: dict[float, dict[str, dict]] = {}
    for point in outcome["points"]:
        if point["budget"] is not None:
            found.setdefault(point["budget"], {})[point["allocation"]] = point
    return dict(sorted(found.items()))


def static_points(outcome: dict) -> list[dict]:
    """The points of static formats, smallest first."""
    return sorted((point for point in outcome["points"] if point["budget"] is None), key=lambda point: point["weight_bytes"])


def allocations_of(outcome: dict) -> list[str]:
    """Allocations that were scored, in the order of their first point."""
    return list(dict.fromkeys(point["allocation"] for point in outcome["points"] if point["budget"] is not None))


def kl_table(outcome: dict) -> tuple[list[str], list[list[str]]]:
    """Head and rows: size and KL of each allocation by budget; a star marks a Uniform budget that is no whole number."""
    names = allocations_of(outcome)
    head = ["budget", "planes", "bits/w", "MB", *(f"KL {name}" for name in names), "± dpa", "top-1 dpa", "ppl dpa"]
    rows = []
    for budget, points in spread(outcome).items():
        first = points.get("dpa") or next(iter(points.values()))
        rows.append([
            f"{budget:g}", cell(first["mean_planes"], ".3f"), f"{first['bits_per_weight']:.3f}",
            f"{first['weight_bytes'] / 1e6:.2f}", *(_starred(points.get(name), "kl", ".5f") for name in names),
            cell(points.get("dpa", {}).get("kl_error"), ".5f"), cell(points.get("dpa", {}).get("top1"), ".1%"),
            cell(points.get("dpa", {}).get("ppl"), ".3f"),
        ])  # fmt: skip
    return head, rows


def curve_table(outcome: dict) -> tuple[list[str], list[list[str]]]:
    """Head and rows: every allocation at every budget with a size of its own, as presets have."""
    head = ["allocation", "budget", "planes", "bits/w", "MB", "KL", "±", "top-1", "ppl"]
    rows = [
        [
            name, f"{budget:g}{_star(point)}", cell(point["mean_planes"], ".3f"), f"{point['bits_per_weight']:.3f}",
            f"{point['weight_bytes'] / 1e6:.2f}", cell(point["kl"], ".5f"), cell(point["kl_error"], ".5f"),
            cell(point["top1"], ".1%"), cell(point["ppl"], ".3f"),
        ]
        for name in sorted(allocations_of(outcome), key=[*MAIN, *allocations_of(outcome)].index)
        for budget, points in spread(outcome).items()
        if (point := points.get(name)) is not None
    ]  # fmt: skip
    return head, rows


def kl_at(outcome: dict, allocation: str, bits: float) -> float | None:
    """KL of an allocation at a size in bits per expert weight, log KL taken as linear between two points; None outside."""
    points = [point for point in outcome["points"] if point["allocation"] == allocation and (point["kl"] or 0) > 0]
    known = sorted((point["bits_per_weight"], math.log(point["kl"])) for point in points)
    for (low, first), (high, last) in zip(known, known[1:], strict=False):
        if low <= bits <= high:
            return math.exp(first if low == high else first + (last - first) * (bits - low) / (high - low))
    return None


def accuracy_table(outcome: dict) -> tuple[list[str], list[list[str]]]:
    """Head and rows: accuracy in per cent by task, and their mean, of full precision and of every point that has it."""
    full = outcome["full_precision"]
    tasks = list(full["accuracy"] or {})
    head = ["experts", "budget", "bits/w", "MB", *tasks, "mean"]
    rows = [_accuracies("full precision", full, tasks)]
    for budget, points in spread(outcome).items():
        rows += [
            _accuracies(name, point, tasks, f"{budget:g}{_star(point)}")
            for name, point in points.items()
            if point["accuracy"] is not None
        ]
    rows += [
        _accuracies(point["allocation"], point, tasks) for point in static_points(outcome) if point["accuracy"] is not None
    ]
    return head, rows


def _accuracies(name: str, point: dict, tasks: Sequence[str], budget: str = NONE) -> list[str]:
    sizes = [f"{point['bits_per_weight']:.3f}", f"{point['weight_bytes'] / 1e6:.2f}"]
    return [name, budget, *sizes, *(f"{100 * point['accuracy'][task]:.2f}" for task in tasks), f"{100 * point['macro']:.2f}"]


def static_table(outcome: dict) -> tuple[list[str], list[list[str]]]:
    """Head and rows: size, KL, agreement and perplexity of the static formats, and by how much others have less KL there.

    The last columns: KL of DPA and of presets at the size of the format (see `kl_at`), over that of the format.
    """
    names = [name for name in MAIN if name in allocations_of(outcome)]
    head = ["static format", "bits/w", "MB", "KL", "±", "top-1", "ppl", *(f"KL {name} / it" for name in names)]
    rows = []
    for point in static_points(outcome):
        there = [kl_at(outcome, name, point["bits_per_weight"]) for name in names]
        rows.append([
            point["allocation"], f"{point['bits_per_weight']:.3f}", f"{point['weight_bytes'] / 1e6:.2f}",
            cell(point["kl"], ".5f"), cell(point["kl_error"], ".5f"), cell(point["top1"], ".1%"), cell(point["ppl"], ".3f"),
            *(cell(kl / point["kl"] if kl and point["kl"] else None, ".2f") for kl in there),
        ])  # fmt: skip
    return head, rows


def _star(point: dict) -> str:
    return "*" if point["allocation"] == "uniform" and point["note"] else ""


def _starred(point: dict | None, field: str, form: str) -> str:
    return NONE if point is None else cell(point[field], form) + _star(point)


def notes(outcome: dict, static: bool | None = None) -> list[str]:
    """What the tables leave to be said: one line per remark, with its points; static: of static formats alone, or of others."""
    about: dict[str, list[str]] = {}
    for point in outcome["points"]:
        if point["note"] and static in (None, point["budget"] is None):
            about.setdefault(point["note"], []).append("*" if point["budget"] is not None else point["allocation"])
    return [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in about.items()]


def evaluation(outcome: dict) -> str:
    """Everything that an evaluation found, as text."""
    full = outcome["full_precision"]
    parts = []
    if any(point["budget"] is not None for point in outcome["points"]) and full["ppl"] is not None:
        own_sizes = any(name in PRESETS for name in allocations_of(outcome))
        parts.append(aligned(*(curve_table if own_sizes else kl_table)(outcome)))
    if static_points(outcome) and full["ppl"] is not None:
        parts.append(aligned(*static_table(outcome)))
    if full["accuracy"] is not None:
        parts.append(aligned(*accuracy_table(outcome)))
    parts += [*notes(outcome), *outcome["left_out"]]
    if full["ppl"] is not None:
        parts.append(f"full precision: perplexity {full['ppl']:.3f} over {outcome['tokens']} tokens")
    return "\n".join(parts)
