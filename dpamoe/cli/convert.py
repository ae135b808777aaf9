"""`dpamoe convert`: model folders in, encoded folders out, one layer in memory at a time."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from dpamoe import convert as conversion
from dpamoe import text
from dpamoe.checkpoint import partial_of
from dpamoe.cli import jobs, log_file, options
from dpamoe.tables import aligned
from dpamoe.team import Team, ToldElsewhere, launched

NAME = "convert"
HELP = "encode the routed experts of model folders, one layer in memory at a time; goes on where it was stopped"

logger = logging.getLogger("dpamoe")


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("source", nargs="*", help="original model folders in Hugging Face format")
    parser.add_argument("--batch", type=Path, metavar="FILE", help="a text file that names more of them, one a line")
    parser.add_argument(
        "--output-dir", required=True, type=Path,
        help="the folder to make, which must not exist; with several models, the folder that holds the results; a log is kept "
        "beside it, in OUTPUT_DIR.log",
    )  # fmt: skip
    parser.add_argument("--calibration", type=Path, help="text for the residual profile; without it the model writes its own")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN",
        help="leave experts alone whose module path fits, such as 'model.layers.0.*'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--max-memory", type=options.size, metavar="SIZE", help="refuse what needs more a process, such as 24GiB"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written and how much memory it takes")
    parser.add_argument("--no-resume", dest="resume", action="store_false", help="start again instead of going on")
    parser.add_argument(
        "--jobs", type=options.positive, default=1, metavar="N",
        help="start N processes with `accelerate launch`, which share the layers of each model and take a GPU each",
    )  # fmt: skip
    options.preset_flag(parser)
    options.encode_flags(parser)
    options.spend_flags(parser)
    options.device_flag(parser)


def run(args) -> dict | None:
    """Check what can be checked first, then convert one folder, or each of several and say how it went.

    One of several processes that were started together returns something.
    """
    team = launched()
    if args.jobs > 1 and team.count == 1 and not args.dry_run:
        raise SystemExit(jobs.launch(args.jobs, args.argv, args.debug))
    if team.count > 1:
        jobs.sign(logger, team)
    sources = [*args.source, *_listed(args.batch)]
    if not sources:
        raise ValueError("no model was named: give model folders, or a file that lists them with --batch")
    if args.calibration is not None:
        text.read_text(args.calibration)
    job = conversion.Job(
        Path(sources[0]), args.output_dir, options.encode_spec(args), options.spend_spec(args), args.calibration,
        tuple(args.ignore), jobs.device_of(args.device, team), args.max_memory, args.resume,
    )  # fmt: skip
    one = conversion.preview if args.dry_run else conversion.convert
    alone = len(sources) == 1 and args.batch is None
    with nullcontext() if args.dry_run else log_file.written(args.output_dir, team, args.argv, _begun(args.output_dir, alone)):
        outcome = one(job, team=team) if alone else _several(one, job, sources, team)
        if not team.main:
            return None
        for line in show(outcome).splitlines():
            logger.debug("%s", line)
        return outcome


def _begun(out: Path, alone: bool) -> Callable[[], bool]:
    """Whether anything was written yet; with several models, failures of each are worth a log from the start."""
    return lambda: partial_of(out.absolute()).is_dir() if alone else out.is_dir()


def _listed(batch: Path | None) -> list[str]:
    """Folders that a batch file names, beside it where the path is relative; empty lines and lines with # are skipped."""
    if batch is None:
        return []
    lines = [line.strip() for line in text.read_text(batch).splitlines()]
    return [str(batch.parent / line) for line in lines if line and not line.startswith("#")]


def _several(one, job: conversion.Job, sources: list[str], team: Team) -> dict:
    """Convert each into its own folder of the output folder; one that fails does not stop the others."""
    names = [Path(source).absolute().name for source in sources]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"two of the models are called {double}, and so would their results be: convert one of them apart")
    if one is conversion.convert:
        _make(job.out)
    models = []
    for source, name in zip(sources, names, strict=True):
        own = replace(job, source=Path(source), out=job.out / name)
        try:
            logger.debug("model %d of %d: %s", len(models) + 1, len(sources), source)
            models.append({"failed": False, **(one(own, again=True, team=team) or {})})
        except Exception as error:  # whatever a library raises: the other models do not depend on it
            if isinstance(error, ToldElsewhere) and not team.main:
                continue
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.error("%s failed: %s", source, reason)
            models.append({"failed": True, "source": source, "output_dir": str(own.out.absolute()), "error": reason})
    return {"models": models, "failed": sum(model["failed"] for model in models)}


def _make(folder: Path) -> None:
    """Make the folder that holds the results, if it is not there."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder}, which should hold the results, cannot be made ({error.strerror}): choose another"
        ) from error


def show(outcome: dict) -> str:
    """What was encoded, and where it is; a table for several models."""
    if "models" in outcome:
        return _table(outcome)
    if "predicted_bytes" in outcome:
        said = (
            f"{outcome['experts']} experts in {outcome['sites']} sites; would write {outcome['predicted_bytes']:,} bytes, of "
            f"which {outcome['encoded_bytes']:,} are encoded experts, and need about {outcome['memory'] / 2**30:.1f} GiB of "
            "memory"
        )
        read = outcome["read_again_bytes"]
        price = [f"without --calibration, {read:,} bytes are read from disk for the text that the model writes"] if read else []
        read = outcome["read_to_weigh_bytes"]
        price += [f"{read:,} bytes are read from disk to measure what layers matter"] if read else []
        return "\n".join([said, *price, *_left(outcome)])
    lines = [
        f"routed experts encoded: {outcome['experts']} of {outcome['experts_found']} in {outcome['sites']} sites, "
        f"{outcome['expert_share']:.1%} of all parameters",
        f"expert weights: {outcome['encoded_bytes']:,} bytes encoded, {outcome['original_bytes']:,} before",
        f"wrote {outcome['output_dir']}: {outcome['bytes']:,} bytes",
    ]
    lines += [f"no calibration token reached {path}: experts {ids}" for path, ids in outcome["unreached"].items()]
    return "\n".join(lines + _left(outcome))


def _left(outcome: dict) -> list[str]:
    """What stays in its own type, why, and how many bytes that is."""
    sizes = outcome["refused_bytes"]
    lines = [f"left as it is: {path} ({sizes[path]:,} bytes): {reason}" for path, reason in outcome["refused"].items()]
    total = [f"experts left as they are: {len(sizes)} of the modules that hold some, {sum(sizes.values()):,} bytes"]
    return lines + (total if sizes else [])


def _table(outcome: dict) -> str:
    rows, reasons = [], []
    for model in outcome["models"]:
        name = Path(model["source"]).name
        size = "" if model["failed"] else f"{model.get('bytes', model.get('predicted_bytes')):,}"
        rows.append([name, "failed" if model["failed"] else "good", size])
        reasons += [f"{name}: {model['error']}"] if model["failed"] else []
    good = len(rows) - outcome["failed"]
    tried = any("predicted_bytes" in model and "bytes" not in model for model in outcome["models"])
    done = f"{good} of {len(rows)} models {'can be ' * tried}converted"
    return "\n".join([aligned(["model", "result", "bytes"], rows), *reasons, done])
