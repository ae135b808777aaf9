"""The picture of quality against size: KL to full precision over effective weight size, DPA beside Uniform-k."""

from pathlib import Path

# Okabe-Ito colours: told apart by people with any colour vision; markers differ too.
STYLES = {
    "kl_dpa": ("DPA: planes by gate and residual", "#0072B2", "o", "-"),
    "kl_uniform": ("Uniform-k: the same planes for every expert", "#D55E00", "s", "--"),
}


def check_folder(file: Path) -> None:
    """Raise ValueError unless a picture can be written there: its folder exists, and its name ends in .png."""
    if file.suffix.lower() != ".png" or file.is_dir():
        raise ValueError(f"the picture {file} must be a file whose name ends in .png")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"folder {file.absolute().parent} for the picture does not exist: make it first")


def frontier(outcome: dict, file: Path) -> Path:
    """Draw the rows of an evaluation and write a PNG; returns its path. Raises ValueError as `check_folder` does."""
    check_folder(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), dpi=160)
    for key, (label, colour, marker, line) in STYLES.items():
        points = [(row["weight_bytes"] / 1e6, row[key], row["budget"]) for row in outcome["rows"] if row.get(key) is not None]
        sizes, values, budgets = zip(*points, strict=True) if points else ((), (), ())
        axes.plot(sizes, values, line, color=colour, marker=marker, markersize=6, linewidth=1.8, label=label)
        if key == "kl_dpa":
            for size, value, budget in points:
                axes.annotate(
                    f"{budget:g}", (size, value), (-4, -13), textcoords="offset points", fontsize=9, color=colour, ha="right"
                )
    axes.set_yscale("log")
    axes.margins(y=0.08)
    axes.set_xlabel("effective weight size of the whole model, MB (labels: average planes per expert)", fontsize=10)
    axes.set_ylabel("KL to full precision, nats per token", fontsize=10)
    axes.set_title(f"One checkpoint, every operating point: {outcome['model']}", fontsize=11)
    axes.grid(True, which="major", alpha=0.35)
    axes.legend(frameon=False, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
    return file
