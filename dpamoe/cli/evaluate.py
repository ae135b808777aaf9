"""`dpamoe eval`: KL to full precision and perplexity against size, DPA beside Uniform-k and the single-signal allocations."""

from pathlib import Path

import dpamoe
from dpamoe import checkpoint, evaluate, plot, storage, text
from dpamoe.cli import options
from dpamoe.spec import ALLOCATIONS, EncodeSpec, check_budget

NAME = "eval"
HELP = "score a model at several budgets: KL to full precision, perplexity, size"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("model", help="an original or encoded model folder")
    parser.add_argument("--text", required=True, help="held-out UTF-8 text; blank lines separate documents")
    parser.add_argument("--budgets", type=options.numbers, default=list(evaluate.BUDGETS), help="such as 2,2.5,3,4")
    parser.add_argument("--calibration", help="text for the residual profile of an original model")
    parser.add_argument("--max-tokens", type=options.positive, help="score only the first N tokens of the text")
    parser.add_argument("--seqlen", type=options.positive, default=512, help="tokens per window")
    parser.add_argument("--reference", help="the full-precision model; default: the original, or the recorded source")
    parser.add_argument(
        "--allocations", type=lambda value: value.split(","), default=list(evaluate.REPORTED),
        help=f"which to score, of {','.join(ALLOCATIONS)}",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, help="also draw KL against size (PNG)")
    options.encode_flags(parser)
    options.device_flag(parser)


def run(args) -> dict:
    """Check all inputs before any long work, then score the reference, then every budget."""
    unknown = set(args.allocations) - set(ALLOCATIONS)
    if unknown:
        raise ValueError(f"allocations {', '.join(sorted(unknown))} are unknown: use {', '.join(ALLOCATIONS)}")
    encoded = checkpoint.is_encoded(args.model)
    spec = _held_spec(args) if encoded else options.encode_spec(args)
    for budget in args.budgets:
        check_budget(budget, spec.k_min, spec.k_max)
    if encoded and options.encode_spec(args) not in (EncodeSpec(), spec):
        raise ValueError(f"{args.model} is encoded already, with {spec}: leave the encoding flags out")
    if encoded and args.calibration:
        raise ValueError(
            f"{args.model} holds its own residual table: refresh it with `dpamoe profile`, without --calibration here"
        )
    if args.picture is not None:
        plot.check_folder(args.picture)
    calibration = None if args.calibration is None else text.read_text(args.calibration)
    source = storage.reference_of(args.model, args.reference) if encoded else args.reference or args.model
    checkpoint.read_config(source)
    ids = text.token_ids(text.load_tokenizer(source), text.read_text(args.text))
    outcome = _score(args, spec, encoded, source, ids, calibration)
    if args.picture is not None:
        outcome_picture = plot.frontier(outcome, args.picture)
        dpamoe.api.logger.info("picture: %s", outcome_picture)
    return outcome


def _held_spec(args) -> EncodeSpec:
    settings, _ = checkpoint.read_index(args.model)
    return EncodeSpec(**{name: settings[name] for name in EncodeSpec.__dataclass_fields__})


def _score(args, spec: EncodeSpec, encoded: bool, source: str, ids, calibration: str | None) -> dict:
    model = storage.load_original(source)
    element_bytes = evaluate.element_sizes(model)
    evaluate.to_run(model, args.device)
    vocabulary = model.config.get_text_config().vocab_size
    if int(ids.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {source} gives ids up to {int(ids.max())}, its model knows {vocabulary}: give its own"
        )
    length = text.window_length(model.config, args.seqlen)
    begin = getattr(model.config.get_text_config(), "bos_token_id", None)
    with evaluate.ReferenceLogits(model, text.windows(ids, length, begin, args.max_tokens)) as reference:
        if encoded:
            del model
            model = storage.load(args.model)
            element_bytes = evaluate.element_sizes(model)
            evaluate.to_run(model, args.device)
        else:
            if Path(source) != Path(args.model):
                model = evaluate.to_run(storage.load_original(args.model), args.device)
            dpamoe.transform(model, args.budgets[0], calibration=calibration, spec=spec)
        sizes = evaluate.Sizes.of(model, element_bytes)
        rows = evaluate.evaluate(model, reference, sizes, args.budgets, args.allocations)
        return evaluate.result(Path(args.model).name, model, reference, rows)


def show(outcome: dict) -> str:
    """The table."""
    return evaluate.table(outcome)
