"""The frontier of one model: full precision, static formats, and every allocation at every budget; one pass each, resumable."""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from dpamoe import api, checkpoint, evaluate, static, storage, text
from dpamoe.calibration import example_batch
from dpamoe.encode import check_group
from dpamoe.evaluate import Scorer
from dpamoe.evaluation_folder import Folder
from dpamoe.modules import encoded_experts
from dpamoe.passes import find
from dpamoe.passes.rewrite import source_of
from dpamoe.presets import DEFAULT, preset_of
from dpamoe.profile import weight_error
from dpamoe.progress import track
from dpamoe.score import measure_reference, reopen_reference
from dpamoe.sites import Site, gather
from dpamoe.spec import EncodeSpec, SpendSpec, check_budget
from dpamoe.tasks import BATCH, check_tasks, run_tasks

MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.model", "*.jinja", "*.py")
TASK_FILES = ("**/*.yaml", "**/*.json", "**/*.jsonl", "**/*.py")
BASELINES = evaluate.REPORTED[1:]
HASHED = 1 << 20  # bytes at either end of a file


@dataclass(frozen=True)
class Wanted:
    """What a person asks for; `plan` checks it. Defaults are those of `dpamoe eval`.

    baselines: allocations and static formats beside DPA. presets: names of presets that stand in the place of DPA, each with
    an encoding of its own; the first is also that of the baselines. spec: another encoding than that of the preset. kl: whether
    KL is measured on the text, beside perplexity. tasks: of lm-eval, from the folder include_path or lm-eval's own. limit:
    items per task. reference: the full-precision model, if not the recorded one.
    """

    model: str
    budgets: tuple[float, ...] = evaluate.BUDGETS
    baselines: tuple[str, ...] = BASELINES
    presets: tuple[str, ...] = ()
    text: str | None = None
    calibration: str | None = None
    max_tokens: int | None = None
    seqlen: int = 512
    kl: bool = True
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

    source: folder of the full-precision model. encoded: whether wanted.model is an encoded folder. spec: the encoding of all
    but further presets; encodings: that of each allocation. windows: int64 [L] each,
    None without text. settings: what a run that goes on in the same folder must share, as JSON.
    """

    wanted: Wanted
    source: str
    encoded: bool
    spec: EncodeSpec
    encodings: dict[str, EncodeSpec]
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
    encodings = _encodings(wanted, spec)
    least = min(evaluate.SPENDINGS[name].least(spec.k_min) for name in encodings)
    for budget in wanted.budgets:
        check_budget(budget, least, spec.k_max)
    if encoded:
        _check_encoded(wanted.model, encodings, spec)
    formats = tuple(name for name in wanted.baselines if name not in evaluate.SPENDINGS)
    static.check_formats(formats)
    check_measures(wanted)
    chosen = check_tasks(wanted.tasks, wanted.include_path) if wanted.tasks else None
    calibration = None if wanted.calibration is None else text.read_text(wanted.calibration)
    source = str(storage.reference_of(wanted.model, wanted.reference) if encoded else wanted.reference or wanted.model)
    storage.check_original(source)
    tokenizer = text.load_tokenizer(source)
    windows = None if wanted.text is None else _windows(wanted, source, tokenizer)
    return Plan(
        wanted, source, encoded, spec, encodings, formats, windows, calibration, tokenizer, chosen,
        _settings(wanted, source, spec, windows, calibration),
    )  # fmt: skip


def _encodings(wanted: Wanted, spec: EncodeSpec) -> dict[str, EncodeSpec]:
    """How experts are encoded for each allocation that is asked for; ValueError for names that there are not."""
    known = [name for name in (*evaluate.SPENDINGS, *static.FORMATS) if name not in evaluate.OF_PRESETS]
    unknown = [name for name in wanted.baselines if name not in known]
    if unknown:
        raise ValueError(f"baseline {unknown[0]} is unknown: use some of {', '.join(known)}")
    mine = dict.fromkeys(wanted.presets[:1] or ["dpa"], spec)
    mine |= {name: preset_of(name).encode for name in wanted.presets[1:]}
    return mine | dict.fromkeys([name for name in wanted.baselines if name in evaluate.SPENDINGS], spec)


def _check_encoded(folder: str, encodings: dict[str, EncodeSpec], spec: EncodeSpec) -> None:
    """Raise ValueError for what an encoded folder cannot show: another encoding, or thresholds that were not measured."""
    other = next((name for name, own in encodings.items() if own != spec or preset_encoding(name) not in (None, spec)), None)
    if other is not None:
        raise ValueError(
            f"{folder} is encoded already, with {spec}, and preset {other} encodes with {preset_encoding(other)}: give the "
            "original model, or leave that preset out"
        )
    by_level = [name for name in encodings if evaluate.SPENDINGS[name].allocator == "threshold"]
    if by_level and not checkpoint.is_weighed(*checkpoint.read_index(folder)):
        raise ValueError(
            f"{by_level[0]} needs the sensitivity of layers, which {folder} does not hold: measure it with `dpamoe profile`"
        )


def preset_encoding(name: str) -> EncodeSpec | None:
    """How a preset encodes; None for an allocation that is none."""
    return preset_of(name).encode if name in evaluate.OF_PRESETS else None


def check_measures(wanted: Wanted) -> None:
    """Raise ValueError if there is nothing to measure, or settings of tasks stand without tasks."""
    if wanted.text is None and not wanted.tasks:
        raise ValueError("nothing to measure: give --text FILE for KL and perplexity, --tasks for accuracy, or both")
    if not wanted.tasks and (wanted.include_path is not None or wanted.limit is not None):
        raise ValueError("--include-path and --limit are for tasks: name some with --tasks, or leave them out")
    if wanted.limit is not None and wanted.limit < 1:
        raise ValueError(f"limit is {wanted.limit}: use 1 or more items per task, or None for all")


def _spec(wanted: Wanted, encoded: bool) -> EncodeSpec:
    """The encoding of the baselines, and of the first preset."""
    if wanted.spec is not None and len(wanted.presets) > 1:
        raise ValueError(
            f"an encoding is given with {len(wanted.presets)} presets, of which each has its own: leave the encoding flags "
            "out, or name one preset"
        )
    if not encoded:
        return wanted.spec or preset_of((*wanted.presets, DEFAULT)[0]).encode
    settings, _ = checkpoint.read_index(wanted.model)
    spec = checkpoint.spec_of(settings)
    if wanted.spec not in (None, spec):
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
    own = AutoConfig.from_pretrained(wanted.model).get_text_config().vocab_size
    if own != vocabulary:
        raise ValueError(f"{wanted.model} knows {own} tokens and its reference {source} {vocabulary}: give its original")
    if int(ids.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {source} gives ids up to {int(ids.max())}, its model knows {vocabulary}: give its own"
        )
    length = text.window_length(config, wanted.seqlen)
    if length < wanted.seqlen:
        api.logger.info("windows have %d tokens: the model takes no more", length)
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
        "measures": None if windows is None else "kl" if wanted.kl else "ppl",
        "tasks": sorted(wanted.tasks),
        "task files": None if wanted.include_path is None else _fingerprint(wanted.include_path, TASK_FILES),
        "limit": wanted.limit,
        "device": wanted.device.partition(":")[0],  # the CPU scores in fp32, a GPU in the model's own dtype
    }
    return json.loads(json.dumps(found))


def _fingerprint(folder: str, patterns: Sequence[str] = MODEL_FILES) -> str:
    """A digest of names, sizes, and the beginning and end of files: enough to notice that they are others."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in patterns for file in Path(folder).glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(HASHED))
            handle.seek(max(HASHED, size - HASHED))
            digest.update(handle.read(HASHED))
    return digest.hexdigest()[:16]


def run(plan: Plan, folder: Folder) -> dict:
    """Measure whatever the folder lacks, and return all that it holds as `evaluate.result` does; also stored there.

    Raises ValueError if the reference is not the model that was encoded, or another run measures into this folder.
    """
    with folder.locked():
        return _run(plan, folder)


def _run(plan: Plan, folder: Folder) -> dict:
    wanted, k_min = plan.wanted.budgets, plan.spec.k_min
    jobs = folder.missing(evaluate.jobs(wanted, plan.encodings, k_min))
    formats = [name for name, _ in folder.missing([(name, None) for name in plan.formats])]
    if jobs or formats or folder.full_precision() is None:
        with _scorer(plan, folder) as scorer:
            other_bytes = folder.full_precision()["other_bytes"]
            for spec in dict.fromkeys(plan.encodings[name] for name, _ in jobs):
                own = [job for job in jobs if plan.encodings[job[0]] == spec]
                model = encoded_model(plan, spec)
                _check_reference(plan, folder, model)
                if spec == plan.spec:
                    folder.keep_residuals(model)
                evaluate.evaluate(model, scorer, evaluate.Sizes(other_bytes), own, folder.keep)
                del model
            for name in track(formats, "static"):
                folder.keep(_static_point(plan, name, scorer, other_bytes))
    points = folder.points()
    held = [point for point in points if point["budget"] is not None]
    budgets = sorted({*wanted, *(point["budget"] for point in held)})
    absent = evaluate.left_out(budgets, dict.fromkeys([*plan.encodings, *(point["allocation"] for point in held)]), k_min)
    outcome = evaluate.result(Path(plan.wanted.model).resolve().name, folder.full_precision(), points, absent)
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
            folder.keep_sample(gather(source_of(model, sites[0]), sites[0].layout, 1).up)
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
    """The full-precision model and its sites; ValueError if it has none, or the groups do not fit their rows."""
    model = storage.load_original(plan.source)
    findings = find.find_sites(model, *example_batch(model, None))
    if not findings.sites:
        raise ValueError(api.no_sites(model, findings.refused))
    for site in findings.sites:
        check_group(plan.spec, min(site.hidden, site.inner), site.path)
    return model, findings.sites


def _check_reference(plan: Plan, folder: Folder, model: nn.Module) -> None:
    """Raise ValueError unless the full-precision model is the one that was encoded, by the weights of one expert."""
    sample, experts = folder.sample(), next(iter(encoded_experts(model).values()))
    if sample is None:
        return
    up = experts.gate_up_proj.weight
    alike = sample.shape[1:] == (up.offset.shape[1], up.in_features)
    error = float(weight_error(sample.to(up.offset.device), up, 0)[-1]) if alike else math.inf
    if not error <= storage.OTHER_MODEL:
        raise ValueError(
            f"{plan.source} is not the model that {plan.wanted.model} holds (relative squared error {error:.2g} of "
            f"{experts.site.path}, at most {storage.OTHER_MODEL} is allowed): give its original with --reference"
        )


def accuracy_of(plan: Plan) -> Callable[[nn.Module], dict] | None:
    """What scores a model on the plan's tasks; None if there are none."""
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


def encoded_model(plan: Plan, spec: EncodeSpec) -> nn.Module:
    """The transformed model, loaded or encoded now, where and how it is scored; it spends as a new `SpendSpec` says."""
    if plan.encoded:
        model = evaluate.to_run(storage.load(plan.wanted.model), plan.wanted.device)
    else:
        model = evaluate.to_run(storage.load_original(plan.wanted.model), plan.wanted.device)
        names = [name for name, own in plan.encodings.items() if own == spec]
        weighed = any(evaluate.SPENDINGS[name].allocator == "threshold" for name in names)
        allocator = "threshold" if weighed else None
        api.transform(model, float(spec.k_max), calibration=plan.calibration, spec=spec, allocator=allocator)
    api.set_spend(model, **asdict(SpendSpec(float(spec.k_max))))
    return model
