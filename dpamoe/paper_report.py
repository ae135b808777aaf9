"""The Markdown report of `dpamoe reproduce`: every experiment with its table, beside what the paper says of its own models."""

import math
from collections.abc import Sequence

from dpamoe import paper, tables
from dpamoe.speed import ratios

SMALL = 1_000_000_000  # parameters


def markdown(name: str, outcome: dict, facts: dict, plots: Sequence[str]) -> str:
    """The whole report. outcome: of `reproduce.run`; facts: texts, versions, device, date; plots: names of pictures."""
    parts = [f"# DPA-MoE on {name}", _heading(outcome["frontier"], facts), *_frontier(outcome["frontier"], plots)]
    parts += _tasks(outcome["tasks"], plots)
    parts += _static(outcome["frontier"])
    parts += _speed(outcome["speed"])
    parts += _signals(outcome["frontier"])
    parts += _cross_terms(outcome["cross_terms"])
    parts += _storage(outcome["storage"])
    parts += _top_p(outcome["top_p"])
    return "\n\n".join(parts) + "\n"


def _heading(found: dict, facts: dict) -> str:
    full, versions = found["full_precision"], ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        f"{full['parameters'] / 1e6:,.1f} M parameters, {found['experts']} routed experts in {found['sites']} layers; "
        f"{full['weight_bytes'] / 1e6:,.2f} MB at full precision, perplexity {full['ppl']:.3f}.",
        f"Text: {facts['text']}, {found['tokens']} predicted tokens; calibration: {facts['calibration']}. Encoded with "
        f"{facts['encoding']}.",
        f"Written {facts['date']} on {facts['device']} ({versions}).",
    ]
    if full["parameters"] < SMALL:
        lines.append(
            "**This model is small.** Its figures say how the method behaves, not how one of billions of parameters scores. "
            f"The paper's figures, quoted in every section, are of {paper.MODELS}."
        )
    return "\n\n".join(lines)


def _section(title: str, quote: str, *parts: str) -> list[str]:
    return [f"## {title}", f"> Paper: {quote}.", *(part for part in parts if part)]


def _notes(found: dict, static: bool | None) -> str:
    """Remarks on static points, on others, or (None) on both."""
    return "\n\n".join(note.replace("*:", "\\*:") for note in tables.notes(found, static))


def _picture(plots: Sequence[str], ending: str, text: str) -> str:
    found = [name for name in plots if name.endswith(ending)]
    return f"![{text}]({found[0]})" if found else ""


def _frontier(found: dict, plots: Sequence[str]) -> list[str]:
    compared = [(budget, points["dpa"]["kl"] / points["uniform"]["kl"]) for budget, points in _whole(found).items()]
    lines = [f"KL of DPA over that of Uniform-k: {', '.join(f'{r:.2f} at k̄ = {budget:g}' for budget, r in compared)}."]
    sizes = [
        f"{abs(1 - size / uniform):.1%} {'less' if size <= uniform else 'more'} than k = {budget:g} "
        f"({abs(uniform - size) / 1e6:,.2f} MB)"
        for budget, uniform, size in equal_fidelity(found)
    ]
    lines.append(f"For the KL of Uniform-k, the whole model with DPA needs {', '.join(sizes)}.")
    return _section(
        "Quality against size", paper.FRONTIER,
        tables.markdown(*tables.kl_table(found)), _notes(found, False), "\n\n".join(found["left_out"]),
        *(lines[:1] if compared else []),
        *(lines[1:] if sizes else []),
        _picture(plots, "frontier_kl.png", "KL to full precision against effective size"),
        _picture(plots, "planes.png", "planes by layer"), _picture(plots, "residuals.png", "residuals of all experts"),
    )  # fmt: skip


def _whole(found: dict) -> dict[float, dict[str, dict]]:
    """Points by whole budget and allocation, where both DPA and Uniform-k have a KL that can be compared."""
    by_budget = tables.spread(found).items()
    return {
        budget: points
        for budget, points in by_budget
        if float(budget).is_integer() and "dpa" in points and points.get("uniform", {}).get("kl")
    }


def equal_fidelity(found: dict) -> list[tuple[float, int, float]]:
    """Where Uniform-k has a whole budget: the budget, its bytes, and the bytes that DPA needs for the same KL, more or less.

    Between two of DPA's points log KL is taken as linear in size; budgets whose KL none of them passes are left out, and the
    lowest and highest, where DPA is Uniform-k.
    """
    points = [points["dpa"] for points in tables.spread(found).values() if points.get("dpa", {}).get("kl")]
    dpa = [(point["weight_bytes"], math.log(point["kl"])) for point in points]
    rows = []
    for budget, by_name in _whole(found).items():
        uniform = by_name["uniform"]
        wanted = math.log(uniform["kl"])
        for (size, high), (next_size, low) in zip(dpa, dpa[1:], strict=False):
            if low < wanted <= high:
                rows.append((budget, uniform["weight_bytes"], size + (next_size - size) * (high - wanted) / (high - low)))
                break
    return [row for row in rows if row[1] != row[2]]


def _tasks(found: dict | None, plots: Sequence[str]) -> list[str]:
    if found is None:
        return _section("Tasks", paper.TASKS, "Not measured: `--tasks` names lm-eval tasks, `--include-path` a folder of them.")
    return _section(
        "Tasks", paper.TASKS, "Accuracy in per cent.", tables.markdown(*tables.accuracy_table(found)),
        _notes(found, None), _picture(plots, "frontier_accuracy.png", "mean accuracy against effective size"),
    )  # fmt: skip


def _static(found: dict) -> list[str]:
    if not tables.static_points(found):
        return _section("Static formats", paper.STATIC, "Not measured: name them with `--static`.")
    return _section("Static formats", paper.STATIC, tables.markdown(*tables.static_table(found)), _notes(found, True))


def _speed(found: dict) -> list[str]:
    head = ["k̄", "tok/s Uniform-k", "tok/s DPA", "change", "first token Uniform-k, ms", "first token DPA, ms", "change"]
    by, rows = {(row["budget"], row["allocation"]): row for row in found["rows"]}, []
    for budget, (speed, first) in ratios(found["rows"]).items():
        uniform, dpa = by[budget, "uniform"], by[budget, "dpa"]
        rows.append([
            f"{budget:g}", f"{uniform['tokens_per_second']:.1f}", f"{dpa['tokens_per_second']:.1f}", f"{speed - 1:+.1%}",
            f"{uniform['ttft_ms']:.1f}", f"{dpa['ttft_ms']:.1f}", f"{first - 1:+.1%}",
        ])  # fmt: skip
    how = "compiled, CUDA graphs" if found["compiled"] else "not compiled"
    text = (
        f"Medians over {found['prompts']} sequences of the text, twice each, batch 1: {found['prompt_tokens']} tokens of "
        f"prompt, then {found['new_tokens']} greedy steps ({how}); {found['device']}; times: {found['times']}."
    )
    return _section("Speed at equal budget", paper.SPEED, tables.markdown(head, rows), text)


def _signals(found: dict) -> list[str]:
    names = [name for name in tables.allocations_of(found) if name != "uniform"]
    rows = []
    for budget, points in _whole(found).items():
        base, gate = points["uniform"]["kl"], points.get("gate-only", {}).get("kl")
        cells = [f"{points[name]['kl'] / base:.3f}" if name in points else tables.NONE for name in names]
        cells.append(f"{points['dpa']['kl'] / gate - 1:+.1%}" if gate else tables.NONE)
        rows.append([f"{budget:g}", *cells])
    if not rows:
        return _section("Which signal", paper.SIGNALS, "Not measured: no whole budget at which both were scored.")
    return _section(
        "Which signal", paper.SIGNALS, "KL over that of Uniform-k.",
        tables.markdown(["k̄", *names, "dpa against gate-only"], rows),
    )  # fmt: skip


def _cross_terms(rows: Sequence[dict]) -> list[str]:
    head = ["k", "cross terms, share of the true error", "largest of a layer", "Spearman", "least", "Pearson", "least"]
    cells = [
        [
            "all" if row["k"] is None else str(row["k"]), f"{row['share']:.1%}", f"{row['share_max']:.1%}",
            *(tables.cell(row[name], ".4f") for name in ("spearman", "spearman_min", "pearson", "pearson_min")),
        ]
        for row in rows
    ]  # fmt: skip
    text = (
        f"All experts at k planes; true squared error of a layer's output against the sum that the allocator minimises, "
        f"the last row over all k together; "
        f"{rows[0]['tokens']} tokens of every layer; correlations over tokens, mean over layers."
    )
    return _section("Cross terms", paper.CROSS_TERMS, tables.markdown(head, cells), text)


def _storage(rows: Sequence[dict]) -> list[str]:
    head = [
        "layers",
        "experts",
        "sets shared",
        "sets separate",
        "expert, shared",
        "expert, separate",
        "more, scales",
        "more, all",
    ]
    cells = [
        [
            str(row["sites"]), str(row["experts"]), str(row["sets_shared"]), str(row["sets_separate"]),
            f"{row['bytes_shared']:,} bytes", f"{row['bytes_separate']:,} bytes", f"{row['increase']:+.1%}",
            f"{row['increase_with_offsets']:+.1%}",
        ]
        for row in rows
    ]  # fmt: skip
    return _section("Storage of scales", paper.STORAGE, tables.markdown(head, cells), "The last column counts offsets too.")


def _top_p(found: dict) -> list[str]:
    if found["refused"]:
        return _section("Top-p routing", paper.TOP_P, f"Not measured: {found['refused']}.")
    rows = found["rows"]
    with_tasks = any(row["macro"] is not None for row in rows)
    head = [
        "p",
        "experts",
        "active experts",
        "planes",
        "MB read per token",
        "KL",
        "ppl",
        *(["mean accuracy"] if with_tasks else []),
    ]
    cells = [
        [
            f"{row['p']:g}", row["allocation"], f"{row['active']:.2f}", f"{row['mean_planes']:.2f}",
            f"{row['megabytes_per_token']:.3f}", tables.cell(row["kl"], ".5f"), tables.cell(row["ppl"], ".3f"),
            *([tables.cell(row["macro"] and 100 * row["macro"], ".2f")] if with_tasks else []),
        ]
        for row in rows
    ]  # fmt: skip
    text = (
        f"A token keeps the fewest of its experts whose router probabilities reach p; k̄ = {rows[0]['budget']:g} over those "
        "that are left. KL to the full-precision model with all of its experts."
    )
    return _section("Top-p routing", paper.TOP_P, tables.markdown(head, cells), text)
