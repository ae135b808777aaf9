"""`dpamoe eval`: KL to full precision, perplexity and task accuracy against size, DPA beside other allocations and formats."""

import tempfile
from dataclasses import replace
from pathlib import Path

from dpamoe import evaluate, frontier, plot, static, tables, tasks
from dpamoe.api import logger
from dpamoe.cli import options
from dpamoe.evaluation_folder import open_folder
from dpamoe.presets import DEFAULT, PRESETS, preset_of
from dpamoe.spec import EncodeSpec

NAME = "eval"
HELP = "score a model at several budgets: KL to full precision, perplexity, task accuracy, size"


def arguments(parser) -> None:
    """Flags of this command."""
    wanted_flags(parser)
    parser.add_argument("--budgets", type=options.numbers, default=list(evaluate.BUDGETS), help="such as 2,2.5,3,4")
    parser.add_argument(
        "--baselines", type=options.lower_names, default=list(evaluate.REPORTED[1:]),
        help=f"beside DPA, of {','.join(name for name in evaluate.SPENDINGS if name not in ('dpa', *PRESETS))} and "
        f"{','.join(static.FORMATS)}; none: DPA alone",
    )  # fmt: skip
    parser.add_argument(
        "--presets", type=options.lower_names, default=[],
        help=f"in the place of DPA, of {','.join(PRESETS)}, each encoded in its own way; baselines are encoded as the first",
    )  # fmt: skip
    parser.add_argument("--kl", action="store_true", help="measure KL and perplexity, as without these two flags")
    parser.add_argument("--ppl", action="store_true", help="alone: perplexity without KL, which takes no space on disk")
    parser.add_argument(
        "--output-dir", type=Path, help="keep every finished point here; a run that was cut short goes on where it stopped"
    )
    parser.add_argument("--picture", type=Path, help="also draw KL against size (.png or .svg)")


def wanted_flags(parser) -> None:
    """The flags that say what is measured, on what."""
    parser.add_argument("model", help="an original or encoded model folder")
    parser.add_argument("--text", help="held-out UTF-8 text for KL and perplexity; blank lines separate documents")
    parser.add_argument("--calibration", help="text for the residual profile of an original model")
    parser.add_argument("--max-tokens", type=options.positive, help="score only the first N tokens of the text")
    parser.add_argument("--seqlen", type=options.positive, default=512, help="tokens per window")
    parser.add_argument("--reference", help="the full-precision model; default: the original, or the recorded source")
    parser.add_argument("--tasks", type=options.names, default=[], help="lm-eval tasks or groups, for accuracy")
    parser.add_argument("--include-path", help="folder with task files; only its tasks are known then")
    parser.add_argument("--limit", type=options.positive, help="items per task")
    parser.add_argument("--batch-size", type=options.positive, default=tasks.BATCH, help="sequences at a time in tasks")
    options.encode_flags(parser)
    options.device_flag(parser)


def wanted(args, **changes) -> frontier.Wanted:
    """What the flags ask for."""
    names = (
        "model",
        "text",
        "calibration",
        "max_tokens",
        "seqlen",
        "reference",
        "include_path",
        "limit",
        "batch_size",
        "device",
    )
    asked = {name: getattr(args, name) for name in names}
    return frontier.Wanted(**asked, tasks=tuple(args.tasks), **changes)


def run(args) -> dict:
    """Check all inputs before any long work, then score the reference, then every point."""
    if args.picture is not None:
        plot.check_folder(args.picture)
        if args.text is None:
            raise ValueError("--picture draws KL against size: give --text FILE, or draw accuracy with `dpamoe plot`")
    if (args.kl or args.ppl) and args.text is None:
        raise ValueError("--kl and --ppl are measured on a text: give --text FILE")
    kl = args.kl or not args.ppl
    lists = {name: tuple(getattr(args, name)) for name in ("budgets", "baselines", "presets")}
    plan = frontier.plan(wanted(args, **lists, kl=kl, spec=_spec(args)))
    if args.output_dir is None:
        with tempfile.TemporaryDirectory(prefix="dpamoe-eval-") as scratch:
            outcome = frontier.run(plan, open_folder(Path(scratch), plan.settings))
    else:
        outcome = frontier.run(plan, open_folder(args.output_dir, plan.settings))
        logger.info("results: %s; draw them with `dpamoe plot %s`", args.output_dir, args.output_dir)
    if args.picture is not None:
        logger.info("picture: %s", plot.frontier(outcome, args.picture))
    return outcome


def _spec(args) -> EncodeSpec | None:
    """The encoding, if it is not just that of the presets; one preset may be changed by flags."""
    changes, base = options.encode_changes(args), preset_of((*args.presets, DEFAULT)[0]).encode
    return replace(base, **changes) if changes else None


def show(outcome: dict) -> str:
    """The tables."""
    return tables.evaluation(outcome)
