"""`dpamoe plot`: the pictures of an evaluation: quality against size, planes by layer, residuals; each as PNG and SVG."""

from pathlib import Path

from dpamoe import plot
from dpamoe.evaluation_folder import RESULTS

NAME = "plot"
HELP = "draw what an evaluation kept: quality against size, planes by layer, residuals (PNG and SVG)"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("folder", type=Path, help="the --output-dir of a finished `dpamoe eval` or `dpamoe reproduce`")
    parser.add_argument("--output-dir", type=Path, help="where the pictures go, made if missing; default: the same folder")


def run(args) -> dict:
    """Draw everything that was measured; pictures of the same names are replaced."""
    parts = [args.folder / name for name in ("frontier", "tasks") if (args.folder / name / RESULTS).is_file()]
    places = [(part, args.output_dir and args.output_dir / part.name) for part in parts] or [(args.folder, args.output_dir)]
    pictures = [file for place in places for file in plot.draw_all(*place)]
    return {"folder": str(args.folder), "pictures": [str(picture) for picture in pictures]}


def show(outcome: dict) -> str:
    """The name of every picture."""
    return "\n".join(f"picture: {picture}" for picture in outcome["pictures"])
