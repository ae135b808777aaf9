"""`dpamoe reproduce`: all experiments of the paper on one model, as one Markdown report with plots."""

from contextlib import ExitStack
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

import torch

from dpamoe import frontier, measure, paper_report, plot, reproduce, tables
from dpamoe import static as static_formats
from dpamoe.api import logger
from dpamoe.cli import evaluate, options
from dpamoe.evaluate import BUDGETS, name_of
from dpamoe.presets import DEFAULT, PRESETS

NAME = "reproduce"
HELP = "run all experiments of the paper on a model and write one report"
STATIC = ("q2_k", "q5_k_m", "q8_0")


def arguments(parser) -> None:
    """Flags of this command."""
    evaluate.wanted_flags(parser)
    options.preset_flag(parser)
    default = reproduce.Experiments()
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="where report and plots go; an earlier run goes on there"
    )
    parser.add_argument("--budgets", type=options.numbers, default=list(BUDGETS), help="such as 2,2.5,3,4")
    parser.add_argument("--static", type=options.lower_names, help=f"static formats, or none; default: {','.join(STATIC)}")
    parser.add_argument("--top-p", type=options.numbers, default=list(default.p), help="probabilities of top-p routing")
    parser.add_argument("--sequences", type=options.positive, default=default.sequences, help="speed: sequences of the text")
    parser.add_argument("--prompt-tokens", type=options.positive, default=default.prompt_tokens, help="speed: prompt length")
    parser.add_argument("--new-tokens", type=options.positive, default=default.new_tokens, help="speed: steps behind a prompt")


def run(args) -> dict:
    """Check, run or go on, draw, and write report.md."""
    static = args.static if args.static is not None else (STATIC if find_spec("gguf") else ())
    if args.static is None and not static:
        logger.warning('static formats are left out, the package gguf is missing: pip install "dpamoe[eval]"')
    static_formats.check_formats(static)
    reproduce.check_folder(args.output_dir)
    with ExitStack() as stack:
        text = args.text
        if text is None:
            args.text = str(stack.enter_context(as_file(files("dpamoe.assets") / "text" / "heldout.txt")))
        spec = options.encode_spec(args) if args.preset or options.encode_changes(args) else None
        names = dict.fromkeys([*frontier.BASELINES, name_of(PRESETS[args.preset or DEFAULT].spend), *static])
        baselines = tuple(name for name in names if name != "dpa")
        wanted = evaluate.wanted(args, budgets=tuple(args.budgets), baselines=baselines, spec=spec)
        experiments = reproduce.Experiments(tuple(args.top_p), args.sequences, args.prompt_tokens, args.new_tokens)
        plans = reproduce.plan(wanted, experiments)
        outcome = reproduce.run(plans, args.output_dir)
    drawn = [file for name in ("frontier", "tasks") if outcome[name] for file in plot.draw_all(args.output_dir / name)]
    names = [str(file.relative_to(args.output_dir)) for file in drawn]
    written = args.output_dir / "report.md"
    report = paper_report.markdown(Path(args.model).resolve().name, outcome, _facts(args, plans, text), names)
    written.write_text(report, encoding="utf-8")
    return {"report": str(written), "plots": names, **outcome}


def _facts(args, plans: reproduce.Plans, text: str | None) -> dict:
    spec, calibration = plans.frontier.spec, args.calibration and Path(args.calibration).name
    if plans.frontier.encoded:
        calibration = "the table of the encoded folder"
    return {
        **measure.facts(torch.device(args.device)),
        "text": Path(text).name if text else "the held-out text of the package, which this model may have seen",
        "calibration": calibration or "text that the model wrote itself",
        "encoding": f"group size {spec.group_size}, {spec.k_min} to {spec.k_max} planes, {spec.scale_mode} scales",
    }


def show(outcome: dict) -> str:
    """Where the report is, and the frontier's table."""
    return f"{tables.evaluation(outcome['frontier'])}\nreport: {outcome['report']}"
