"""`dpamoe convert`: a model folder in, an encoded folder out."""

import logging
from pathlib import Path

import dpamoe
from dpamoe import checkpoint, storage, text
from dpamoe.cli import options
from dpamoe.spec import check_budget

NAME = "convert"
HELP = "encode the routed experts of a model folder"

logger = logging.getLogger("dpamoe")


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("source", help="an original model folder in Hugging Face format")
    parser.add_argument("--output-dir", required=True, type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--calibration", help="text for the residual profile; without it the model writes its own")
    parser.add_argument("--budget", type=float, default=4.0, help="default budget of the checkpoint, planes per expert")
    options.encode_flags(parser)
    options.device_flag(parser)


def run(args) -> dict:
    """Check everything that can be checked first, then load, transform and save."""
    spec = options.encode_spec(args)
    check_budget(args.budget, spec.k_min, spec.k_max)
    checkpoint.check_new(args.output_dir.absolute())
    if checkpoint.is_encoded(args.source):
        raise ValueError(f"{args.source} is encoded already: give the original model")
    calibration = None if args.calibration is None else text.read_text(args.calibration)
    model = storage.load_original(args.source).to(args.device)
    dpamoe.transform(model, args.budget, calibration=calibration, spec=spec)
    out = storage.save(model, args.output_dir)
    written = sum(file.stat().st_size for file in out.iterdir())
    return {"source": args.source, "output_dir": str(args.output_dir), "bytes": written, **dpamoe.report(model).as_dict()}


def show(outcome: dict) -> str:
    """What was encoded, and where it is."""
    lines = [
        f"routed experts encoded: {outcome['experts']} of {outcome['experts_found']} in {outcome['sites']} sites, "
        f"{outcome['expert_share']:.1%} of all parameters",
        f"expert weights: {outcome['encoded_bytes']:,} bytes encoded, {outcome['original_bytes']:,} before",
        f"wrote {outcome['output_dir']}: {outcome['bytes']:,} bytes",
    ]
    lines += [f"no calibration token reached {path}: experts {ids}" for path, ids in outcome["unreached"].items()]
    lines += [f"left alone: {path}: {reason}" for path, reason in outcome["refused"].items()]
    return "\n".join(lines)
