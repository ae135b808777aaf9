"""The frontier of one model: full precision, static formats, and every allocation at every budget; one pass each, resumable."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from dpamoe import api, checkpoint, evaluate, static, storage, text
from dpamoe.calibration import example_batch
from dpamoe.evaluate import Scorer
from dpamoe.evaluation_folder import Folder
from dpamoe.passes import find
from dpamoe.progress import track
from dpamoe.score import measure_reference, reopen_reference
from dpamoe.sites import Site
from dpamoe.spec import ALLOCATIONS, EncodeSpec, check_budget
from dpamoe.tasks import BATCH, check_tasks, run_tasks

MODEL_FILES = ("*.safetensors", "config.json")
TASK_FILES = ("*.yaml", "*.json", "*.jsonl", "*.py")


@dataclass(frozen=True)
class Wanted:
    """What a person asks for; `plan` checks it. Defaults are those of `dpamoe eval`.

    baselines: allocations and static formats beside DPA. kl, ppl: what is measured on the text; tasks: of lm-eval, from the
    folder include_path or lm-eval's own. limit: items per task. reference: the full-precision model, if not the recorded one.
    """

    model: str
    budgets: tuple[float, ...] = evaluate.BUDGETS
    baselines: tuple[str, ...] = evaluate.REPORTED[1:]
    text: str | None = None
    calibration: str | None = None
    max_tokens: int | None = None
    seqlen: int = 512
    kl: bool = True
    ppl: bool = True
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    limit: int | None = None
    batch_size: int = BATCH
    reference: str | None = None
    spec: EncodeSpec | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Plan:
    """A checked `Wanted`: all that can be known to be wrong is right, and nothing long was done yet.

    source: folder of the full-precision model. encoded: whether wanted.model is an encoded folder. windows: int64 [L] each,
    None without text. settings: what a run that goes on in the same folder must share, as JSON.
    """

    wanted: Wanted
    source: str
    encoded: bool
    spec: EncodeSpec
    allocations: tuple[str, ...]
    formats: tuple[str, ...]
    windows: list[Tensor] | None
    calibration: str | None
    tokenizer: object
    tasks: object
    settings: dict


def plan(wanted: Wanted) -> Plan:
    """Check everything before any long work; ValueError, one sentence, for the first thing that is wrong."""
    encoded = checkpoint.is_encoded(wanted.model)
    spec = _spec(wanted, encoded)
    for budget in wanted.budgets:
        check_budget(budget, spec.k_min, spec.k_max)
    unknown = [name for name in wanted.baselines if name not in (*ALLOCATIONS, *static.FORMATS)]
    if unknown:
        raise ValueError(f"baseline {unknown[0]} is unknown: use some of {', '.join((*ALLOCATIONS, *static.FORMATS))}")
    formats = tuple(name for name in wanted.baselines if name not in ALLOCATIONS)
    static.check_formats(formats)
    if wanted.text is None and not wanted.tasks:
        raise ValueError("nothing to measure: give --text FILE for KL and perplexity, --tasks for accuracy, or both")
    chosen = check_tasks(wanted.tasks, wanted.include_path) if wanted.tasks else None
    calibration = None if wanted.calibration is None else text.read_text(wanted.calibration)
    source = str(storage.reference_of(wanted.model, wanted.reference) if encoded else wanted.reference or wanted.model)
    storage.check_original(source)
    tokenizer = text.load_tokenizer(source)
    windows = None if wanted.text is None else _windows(wanted, source, tokenizer)
    return Plan(
        wanted, source, encoded, spec, ("dpa", *(name for name in wanted.baselines if name in ALLOCATIONS)), formats,
        windows, calibration, tokenizer, chosen, _settings(wanted, source, spec, windows, calibration),
    )  # fmt: skip


def _spec(wanted: Wanted, encoded: bool) -> EncodeSpec:
    if not encoded:
        return wanted.spec or EncodeSpec()
    settings, _ = checkpoint.read_index(wanted.model)
    spec = EncodeSpec(**{name: settings[name] for name in EncodeSpec.__dataclass_fields__})
    if wanted.spec not in (None, EncodeSpec(), spec):
        raise ValueError(f"{wanted.model} is encoded already, with {spec}: leave the encoding flags out")
    if wanted.calibration:
        raise ValueError(
            f"{wanted.model} holds its own residual table: refresh it with `dpamoe profile`, without --calibration here"
        )
    return spec


def _windows(wanted: Wanted, source: str, tokenizer) -> list[Tensor]:
    """Windows of the text; ValueError for a text shorter than one, and for ids that the model does not know."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    ids = text.token_ids(tokenizer, text.read_text(wanted.text))
    vocabulary = config.get_text_config().vocab_size
    if int(ids.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {source} gives ids up to {int(ids.max())}, its model knows {vocabulary}: give its own"
        )
    length = text.window_length(config, wanted.seqlen)
    tokens = min(ids.numel(), wanted.max_tokens or ids.numel())
    if tokens < length - 1:
        raise ValueError(
            f"{wanted.text} gives {tokens} tokens, fewer than one window of {length}: give a longer text, or a smaller --seqlen"
        )
    return text.windows(ids, length, getattr(config.get_text_config(), "bos_token_id", None), wanted.max_tokens)


def _settings(wanted: Wanted, source: str, spec: EncodeSpec, windows, calibration: str | None) -> dict:
    def digest(value) -> str:
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]

    found = {
        "model": _fingerprint(wanted.model),
        "source": _fingerprint(source),
        "encoding": asdict(spec),
        "text": None if windows is None else digest([part.tolist() for part in windows]),
        "calibration": None if calibration is None else digest(calibration),
        "measures": [name for name in ("kl", "ppl") if getattr(wanted, name)],
        "tasks": sorted(wanted.tasks),
        "task files": None if wanted.include_path is None else digest(_fingerprint(wanted.include_path, TASK_FILES)),
        "limit": wanted.limit,
        "device": wanted.device.partition(":")[0],  # the CPU scores in fp32, a GPU in the model's own dtype
    }
    return json.loads(json.dumps(found))


def _fingerprint(folder: str, patterns: Sequence[str] = MODEL_FILES) -> list:
    """Names, sizes and times of files: enough to notice that they are others."""
    files = sorted(file for pattern in patterns for file in Path(folder).rglob(pattern))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def run(plan: Plan, folder: Folder) -> dict:
    """Measure whatever the folder lacks, and return all that it holds as `evaluate.result` does; also stored there."""
    jobs = folder.missing(evaluate.jobs(plan.wanted.budgets, plan.allocations))
    formats = [name for name, _ in folder.missing([(name, None) for name in plan.formats])]
    if jobs or formats or folder.full_precision() is None:
        with _scorer(plan, folder) as scorer:
            other_bytes = folder.full_precision()["other_bytes"]
            for name in track(formats, "static"):
                folder.keep(_static_point(plan, name, scorer, other_bytes))
            if jobs:
                model = encoded_model(plan)
                folder.keep_residuals(model)
                evaluate.evaluate(model, scorer, evaluate.Sizes(other_bytes), jobs, folder.keep)
    outcome = evaluate.result(Path(plan.wanted.model).name, folder.full_precision(), folder.points())
    folder.finish(outcome)
    return outcome


@contextlib.contextmanager
def _scorer(plan: Plan, folder: Folder) -> Iterator[Scorer]:
    """What measures, with the full-precision model's log-probabilities kept from before or computed now, its scores too."""
    reference = None if plan.windows is None else reopen_reference(plan.windows, folder.reference)
    with contextlib.ExitStack() as stack:
        if folder.full_precision() is None or (plan.windows is not None and reference is None):
            model, sites = _original(plan)
            sizes = evaluate.full_sizes(model, sites)
            model = evaluate.to_run(model, plan.wanted.device)
            if plan.windows is not None and reference is None:
                reference = measure_reference(model, plan.windows, folder.reference, plan.wanted.kl)
            scorer = Scorer(reference and stack.enter_context(reference), accuracy_of(plan))
            if folder.full_precision() is None:
                folder.keep_full_precision(scorer.full_precision(model) | sizes)
            del model
        else:
            scorer = Scorer(reference and stack.enter_context(reference), accuracy_of(plan))
        yield scorer


def _original(plan: Plan) -> tuple[nn.Module, list[Site]]:
    model = storage.load_original(plan.source)
    return model, find.find_sites(model, *example_batch(model, None)).sites


def accuracy_of(plan: Plan) -> Callable[[nn.Module], dict] | None:
    if plan.tasks is None:
        return None
    return partial(
        run_tasks, tokenizer=plan.tokenizer, chosen=plan.tasks, limit=plan.wanted.limit, batch_size=plan.wanted.batch_size
    )


def _static_point(plan: Plan, name: str, scorer: Scorer, other_bytes: int) -> dict:
    """One static format: quantised, dequantised, scored in the same model."""
    model, sites = _original(plan)
    model = evaluate.to_run(model, plan.wanted.device)  # first: bf16 would round what was quantised once more
    stored, notes = static.requantise_model(model, sites, name, plan.spec.group_size)
    scores = scorer.measure(model)
    size = {
        "mean_planes": None,
        "bits_per_weight": 8 * stored / sum(site.weights for site in sites),
        "weight_bytes": round(other_bytes + stored),
    }
    return {"allocation": name, "budget": None, **scores, **size, "histogram": None, "note": "; ".join(sorted(notes))}


def encoded_model(plan: Plan) -> nn.Module:
    if plan.encoded:
        return evaluate.to_run(storage.load(plan.wanted.model), plan.wanted.device)
    model = evaluate.to_run(storage.load_original(plan.wanted.model), plan.wanted.device)
    return api.transform(model, plan.wanted.budgets[0], calibration=plan.calibration, spec=plan.spec)
