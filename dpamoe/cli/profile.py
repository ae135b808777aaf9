"""`dpamoe profile`: make or refresh the residual table of an encoded folder from calibration text."""

from dpamoe import checkpoint, storage, text
from dpamoe.cli import options

NAME = "profile"
HELP = "make or refresh the residual table of an encoded folder"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("model", help="an encoded folder")
    parser.add_argument("--calibration", required=True, help="UTF-8 text; blank lines separate documents")
    parser.add_argument("--reference", help="the original model; default: the source recorded in the folder")
    options.device_flag(parser)


def run(args) -> dict:
    """Measure on the original model, then replace the table in one step."""
    settings, _ = checkpoint.read_index(args.model, without_residuals=True)
    calibration = text.read_text(args.calibration)
    original = storage.load_original(storage.reference_of(args.model, args.reference)).to(args.device)
    unreached = storage.refresh_residuals(args.model, original, calibration)
    experts = sum(site["experts"] for site in settings["sites"])
    return {"model": args.model, "sites": len(settings["sites"]), "experts": experts, "unreached": unreached}


def show(outcome: dict) -> str:
    """How many experts were measured, and which were not reached."""
    missed = sum(map(len, outcome["unreached"].values()))
    lines = [f"measured {outcome['experts'] - missed} of {outcome['experts']} experts in {outcome['sites']} sites"]
    lines += [f"no calibration token reached {path}: experts {ids} (estimated)" for path, ids in outcome["unreached"].items()]
    return "\n".join(lines)
