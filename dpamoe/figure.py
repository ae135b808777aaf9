"""The look of all pictures, and how they are written: whole or not at all, and the same bytes for the same input.

They are one column of a two-column page wide, with text of 9 pt.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = (".png", ".svg")
WIDTH, DPI = 3.4, 400  # inches
LOOK = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "axes.titlelocation": "left", "axes.linewidth": 0.5, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.major.width": 0.5, "ytick.major.width": 0.5, "xtick.minor.width": 0.3, "ytick.minor.width": 0.3,
    "xtick.major.size": 2.5, "ytick.major.size": 2.5, "xtick.minor.size": 1.5, "ytick.minor.size": 1.5,
    "xtick.major.pad": 2, "ytick.major.pad": 2, "axes.labelpad": 2.5, "axes.titlepad": 4,
    "grid.color": "#E6E6E6", "grid.linewidth": 0.4, "axes.axisbelow": True, "legend.frameon": False,
    "legend.handlelength": 2.2, "legend.columnspacing": 1.2, "legend.labelspacing": 0.25, "legend.borderpad": 0.2,
    "lines.linewidth": 1.3, "lines.markersize": 4, "savefig.dpi": DPI, "figure.dpi": DPI, "svg.fonttype": "none",
    "svg.hashsalt": "dpamoe", "figure.constrained_layout.h_pad": 0.03, "figure.constrained_layout.w_pad": 0.03,
}  # fmt: skip
UNDATED = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}


def check_folder(file: Path) -> None:
    """Raise ValueError unless a picture can be written there: its folder exists, and its name ends in .png or .svg."""
    if file.suffix.lower() not in KINDS or file.is_dir():
        raise ValueError(f"the picture {file} must be a file whose name ends in .png or .svg")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"folder {file.absolute().parent} for the picture does not exist: make it first")


@contextmanager
def blank(file: Path, height: float, title: str) -> Iterator:
    """An empty figure, `height` inches high, which is written as `file` when the block ends without an error.

    A title that is too wide is cut. Raises ValueError as `check_folder` does.
    """
    check_folder(file)
    from matplotlib import style
    from matplotlib.figure import Figure

    kind = file.suffix.lower()
    with style.context(["default", LOOK]):  # the settings of the person who calls neither matter nor change
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        if title:
            written = figure.suptitle(title, x=0.02, ha="left", fontsize=9, parse_math=False)
            while written.get_window_extent().width > 0.96 * WIDTH * DPI:
                title = title[:-1]
                written.set_text(f"{title}…")
        yield figure
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind[1:], metadata=UNDATED[kind])
    whole = file.with_name(f".{file.name}.partial")
    try:
        whole.write_bytes(drawn.getvalue())
        whole.replace(file)
    finally:
        whole.unlink(missing_ok=True)


def log_ticks(axis, ratio: float) -> None:
    """Label two to five values of a log axis whose end is `ratio` times its start, or its powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_minor_formatter(NullFormatter())
    if ratio < 100:
        axis.set_major_locator(LogLocator(subs=(1, 3) if ratio > 10 else (1, 2, 5) if ratio > 4 else (1, 1.5, 2, 3, 4, 6, 8)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _written(value)))


def _written(value: float) -> str:
    digits, power = f"{value:.1e}".split("e")
    return f"{value:g}" if 1e-3 <= value < 1e4 else rf"{float(digits):g}$\cdot10^{{{int(power)}}}$"
