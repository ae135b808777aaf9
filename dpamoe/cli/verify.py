"""`dpamoe verify`: whether an encoded folder is what its original gives."""

from dataclasses import asdict

from dpamoe import compare
from dpamoe.cli import options

NAME = "verify"
HELP = "encode sampled experts of the original again and compare them with an encoded folder"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("model", help="an encoded folder")
    parser.add_argument("source", help="the original model folder it was made from")
    parser.add_argument("--samples", type=options.positive, default=2, help="layers to compare; 4 experts of each")
    parser.add_argument("--seed", type=int, default=0, help="which layers and experts")


def run(args) -> dict:
    """Check hashes, then compare."""
    hashes = compare.check_hashes(args.model)
    findings = compare.verify(args.model, args.source, args.samples, args.seed)
    bad = [finding for finding in findings if not finding.good]
    return {
        "model": args.model,
        "source": args.source,
        "hashes": hashes,
        "compared": [*map(asdict, findings)],
        "failed": len(bad),
    }


def show(outcome: dict) -> str:
    """One line for each thing compared."""
    lines = [f"{outcome['hashes']} tensors have the bytes that were written"]
    for finding in outcome["compared"]:
        word = "equal" if finding["same"] else "as good" if finding["good"] else f"differs: {finding['reason']}"
        error = "" if finding["error"] is None else f", relative squared error {finding['error']:.2e}"
        lines.append(f"{finding['name']}: {word}{error}")
    lines.append(f"{outcome['failed']} of {len(outcome['compared'])} differ")
    return "\n".join(lines)
