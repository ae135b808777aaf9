"""`dpamoe bench`: time a layer's experts or a whole model at random weights, beside transformers' own experts in bf16."""

from collections.abc import Iterator
from pathlib import Path

from dpamoe import bench, bench_model, measure, synthetic
from dpamoe.api import logger
from dpamoe.cli import options
from dpamoe.cli.signals import terminated_is_interrupted
from dpamoe.files import check_place, write_json
from dpamoe.progress import say

NAME = "bench"
HELP = "time a layer's experts or a whole model at random weights, beside bf16 experts"
MODES = ("layer", "model")
OF_MODE = {"layer": ("tokens",), "model": ("prompts", "new_tokens", "baselines_first")}  # flags that the other does not have


def arguments(parser) -> None:
    """Flags of this command."""
    options.config_flags(parser)
    parser.add_argument("--mode", choices=MODES, default="layer", help="one layer's experts, or generation by a whole model")
    parser.add_argument("--tokens", type=options.counts, help="layer: batch sizes, such as 1,8,64")
    parser.add_argument("--budget", type=options.numbers, default=[4.0], help="average planes per expert, such as 4 or 2.5,3,4")
    parser.add_argument(
        "--baselines", type=options.names, default=None,
        help=f"transformers' experts beside ours, or none; default: {','.join(bench.BASELINES)}; model: {bench.BASELINES[0]}",
    )  # fmt: skip
    parser.add_argument("--prompts", type=options.counts, help="model: tokens before the first new one")
    parser.add_argument("--new-tokens", type=options.positive, help="model: tokens decoded")
    parser.add_argument("--baselines-first", action="store_true", help="model: build and time the baselines first")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="keep the object of --json here, written anew after every row; replaced if "
        "it exists",
    )  # fmt: skip
    options.device_flag(parser)


def run(args) -> dict:
    """Time what was asked for; every row is in the file, and a line of the table, as soon as it is measured."""
    _check_mode(args)
    if args.output is not None:
        check_place(args.output)
    table = bench.table if args.mode == "layer" else bench_model.table
    shown = 0
    with terminated_is_interrupted():
        for outcome in _measured(args):
            if args.output is not None:
                write_json(args.output, outcome)
            if not args.json:
                shown = _show_more(table(outcome).splitlines(), shown)
    if args.output is not None:
        logger.info("results: %s", args.output)
    return outcome


def _check_mode(args) -> None:
    """Raise ValueError for flags of the other mode, which would change nothing."""
    (other,) = OF_MODE.keys() - {args.mode}
    given = ", ".join("--" + flag.replace("_", "-") for flag in OF_MODE[other] if getattr(args, flag))
    if given:
        raise ValueError(f"{given} says nothing in --mode {args.mode}: leave it out, or ask for --mode {other}")


def _show_more(lines: list[str], shown: int) -> int:
    """Print those that are not shown yet; how many are shown then."""
    if lines[shown:]:
        say("\n".join(lines[shown:]))
    return len(lines)


def _measured(args) -> Iterator[dict]:
    """The object after every row that was added to it."""
    device, changes = measure.device_of(args.device), dict(args.set)
    spec = synthetic.held_spec(args.model, args.group_size, args.scale_mode)
    if args.mode == "layer":
        baselines = bench.BASELINES if args.baselines is None else args.baselines
        return bench.bench_layers(args.model, device, spec, args.budget, args.tokens or bench.TOKENS, baselines, changes)
    baselines = bench.BASELINES[:1] if args.baselines is None else args.baselines
    return bench_model.bench_model(
        args.model, device, spec, args.budget, args.prompts or bench_model.PROMPTS, args.new_tokens or bench_model.NEW_TOKENS,
        baselines, args.baselines_first, changes,
    )  # fmt: skip


def show(outcome: dict) -> None:
    """Nothing more: every line was printed when it was measured."""
