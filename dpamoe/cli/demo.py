"""`dpamoe demo`: the embedded trained model becomes any-precision; a table, a picture and a few words of text."""

import logging
from importlib.resources import as_file, files
from pathlib import Path

import torch

import dpamoe
from dpamoe import evaluate, plot, score, storage, tables, text
from dpamoe.calibration import example_batch
from dpamoe.cli import generate, options
from dpamoe.passes import find
from dpamoe.presets import DEFAULT, preset_of

NAME = "demo"
HELP = "make the embedded model any-precision and show quality against size: a table, a picture, generated text"
PROMPT = "The database engine"
BUDGETS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)

logger = logging.getLogger("dpamoe")


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("--picture", type=Path, default=Path("dpamoe-demo.png"), help="where the picture goes (.png or .svg)")
    options.preset_flag(parser)
    parser.add_argument("--max-tokens", type=options.positive, default=6000, help="held-out tokens that are scored")


def run(args) -> dict:
    """Encode, score, draw, generate; returns what `dpamoe eval --json` returns."""
    plot.check_folder(args.picture)
    with as_file(files("dpamoe.assets")) as assets:
        return _run(args, assets)


def _run(args, assets: Path) -> dict:
    model = storage.load_original(assets / "tiny")
    sizes = evaluate.full_sizes(model, find.find_sites(model, *example_batch(model, None)).sites)
    evaluate.to_run(model, "cpu")
    tokenizer = text.load_tokenizer(assets / "tiny")
    ids = text.token_ids(tokenizer, text.read_text(assets / "text" / "heldout.txt"))
    windows = text.windows(ids, text.window_length(model.config), model.config.bos_token_id, args.max_tokens)
    samples = {"full precision": _sample(model, tokenizer)}
    with score.measure_reference(model, windows) as reference:
        scorer = evaluate.Scorer(reference)
        full = scorer.full_precision(model) | sizes
        preset = args.preset or DEFAULT
        dpamoe.transform(model, calibration=text.read_text(assets / "text" / "calibration.txt"), preset=preset)
        logger.info("%s", dpamoe.report(model))
        jobs = evaluate.jobs(BUDGETS, ("dpa", "uniform", evaluate.name_of(preset_of(preset).spend)))
        points = evaluate.evaluate(model, scorer, evaluate.Sizes(sizes["other_bytes"]), jobs)
    outcome = evaluate.result("embedded tiny Qwen3-MoE", full, points)
    for budget in (2, 4, 8):
        with dpamoe.budget(model, budget):
            samples[f"budget {budget}"] = _sample(model, tokenizer)
    args.samples, args.drawn = samples, plot.frontier(outcome, args.picture)
    logger.info("picture: %s", args.drawn)
    return outcome if args.json else {**outcome, "picture": str(args.drawn), "samples": samples}


def _sample(model: torch.nn.Module, tokenizer) -> str:
    return generate.complete(model, tokenizer, PROMPT, 24)


def show(outcome: dict) -> str:
    """The table, the name of the picture, and the texts."""
    width = max(map(len, outcome["samples"]))
    texts = [f"  {name.ljust(width)}  {written!r}" for name, written in outcome["samples"].items()]
    parts = [tables.evaluation(outcome), f"picture: {outcome['picture']}", f"greedy text after {PROMPT!r}:", *texts]
    return "\n".join(parts)
