"""Quality against size, point by point: every allocation at every budget of one transformed model.

A point is a dictionary, as in `dpamoe eval --json`:

    allocation        "dpa", another name of `SPENDINGS`, a preset among them, or a static format such as "q4_k_m"
    budget            average planes per selected expert that were asked for; None for a static format
    mean_planes       average planes that were spent; None for a static format
    bits_per_weight   of the experts, scales included
    weight_bytes      of the whole model with its experts at that average (the paper's effective weight size)
    kl, kl_error, top1, ppl, accuracy, accuracy_error, macro   as `Scorer.measure` gives them
    histogram         pairs computed with k = 0, 1, … planes, by site; None for a static format
    note              what a reader of the numbers should know, or ""
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import nn

from dpamoe import api
from dpamoe.modules import encoded_experts
from dpamoe.presets import PRESETS
from dpamoe.progress import track
from dpamoe.score import ReferenceLogits, Score
from dpamoe.sites import Site
from dpamoe.spec import ALLOCATIONS, SpendSpec

BUDGETS = (2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0)
REPORTED = ("dpa", "uniform", "gate-only", "residual-only")
UNEVEN = "not uniform: a budget between two whole numbers gives earlier slots, mostly those of larger gates, one plane more"

Job = tuple[str, float]  # name of a spending and budget

# how each name spends; other settings are those of a new `SpendSpec`. A preset also says how experts are encoded.
OF_PRESETS = {name: preset.spend for name, preset in PRESETS.items()}
SPENDINGS = {name: SpendSpec(allocation=name) for name in ALLOCATIONS} | {
    "skip": SpendSpec(skip=True),
    "threshold": SpendSpec(allocator="threshold"),
    "threshold-skip": SpendSpec(allocator="threshold", skip=True),
    **OF_PRESETS,
}


def name_of(spend: SpendSpec) -> str:
    """The name in `SPENDINGS` that is no preset's and spends so, whatever the budget."""
    return next(name for name, own in SPENDINGS.items() if own == replace(spend, budget=own.budget))


@dataclass(frozen=True)
class Scorer:
    """What to measure of a model: distance to a reference, and accuracy on tasks; either may be None.

    accuracy: takes a model, returns {"accuracy": {task: share}, "stderr": {task: share}, "macro": share}.
    """

    reference: ReferenceLogits | None = None
    accuracy: Callable[[nn.Module], dict] | None = None

    def measure(self, model: nn.Module, counted: Callable[[], None] | None = None) -> dict:
        """kl and kl_error in nats per token, top1, ppl; accuracy and accuracy_error by task, and macro, their mean accuracy.

        counted: called where what the model counted is to be read: behind the text, before tasks, whose batches are padded.
        """
        score = None if self.reference is None else self.reference.compare(model)
        if score is not None and counted is not None:
            counted()
        tasks = None if self.accuracy is None else self.accuracy(model)
        if score is None and counted is not None:
            counted()
        return _fields(score, tasks)

    def full_precision(self, model: nn.Module) -> dict:
        """The same of the full-precision model itself, whose perplexity is known already."""
        score = None if self.reference is None else self.reference.score
        found = _fields(score, None if self.accuracy is None else self.accuracy(model))
        return found | {"tokens": None if score is None else score.tokens}


def _fields(score: Score | None, tasks: dict | None) -> dict:
    found = {name: None if score is None else getattr(score, name) for name in ("kl", "kl_error", "top1")}
    found["ppl"] = None if score is None else score.perplexity
    names = {"accuracy": "accuracy", "accuracy_error": "stderr", "macro": "macro"}
    return found | {name: None if tasks is None else tasks[source] for name, source in names.items()}


@dataclass(frozen=True)
class Sizes:
    """Bytes of everything but encoded experts, in the checkpoint's dtype; with the model they give the effective size."""

    other_bytes: int

    def model_bytes(self, model: nn.Module, planes: float, read: float = 1.0) -> int:
        """Size of the whole model with every expert at `planes` planes (the paper's effective weight size).

        read: share of experts that is not skipped.
        """
        return round(self.other_bytes + api.expert_bytes(model, planes, read))


def jobs(budgets: Sequence[float], allocations: Iterable[str], k_min: int = 0) -> list[Job]:
    """Every allocation at every budget, budget by budget, so that a run that is cut short has whole budgets.

    Budgets that an allocation cannot reach where prefixes from k_min planes on decode are left out, see `left_out`.
    """
    wanted = [name for name in SPENDINGS if name in set(allocations)]
    return [(name, float(budget)) for budget in budgets for name in wanted if budget >= SPENDINGS[name].least(k_min)]


def left_out(budgets: Iterable[float], allocations: Iterable[str], k_min: int) -> list[str]:
    """A sentence for each allocation that cannot reach some of these budgets."""
    sentences = []
    for name in allocations:
        below = [f"{budget:g}" for budget in budgets if budget < SPENDINGS[name].least(k_min)]
        if below:
            why = f"since it skips no expert and gives each at least {k_min} planes"
            sentences.append(f"{name} is left out at budget {', '.join(below)}, {why}")
    return sentences


def evaluate(
    model: nn.Module, scorer: Scorer, sizes: Sizes, wanted: Sequence[Job], keep: Callable[[dict], None] | None = None
) -> list[dict]:
    """Score a transformed model at every job; one point each, also given to `keep` as soon as it is there.

    The model's spending is put back, and what it counted is counted no more.
    """
    points = []
    with api.spending_kept(model):
        for allocation, budget in track(wanted, "evaluate", lambda job: f"budget {job[1]:g} {job[0]}"):
            api.set_spend(model, **asdict(replace(SPENDINGS[allocation], budget=budget)))
            api.stats(model, reset=True)
            spent: dict = {}
            point = {"allocation": allocation, "budget": budget} | scorer.measure(model, partial(_count, model, spent))
            api.stats(model, reset=True)
            size = _size(model, sizes, spent.pop("mean_planes"), spent.pop("read"))
            points.append(point | size | spent | {"note": _note(allocation, budget)})
            if keep is not None:
                keep(points[-1])
    return points


def _count(model: nn.Module, spent: dict) -> None:
    """Put mean_planes, the share of experts that was read, and histogram into `spent`."""
    found = api.stats(model)
    spent["mean_planes"], spent["read"] = found["mean_planes"], 1 - found["histogram"].get(0, 0) / found["pairs"]
    spent["histogram"] = {path: experts.spent.tolist() for path, experts in encoded_experts(model).items()}


def _size(model: nn.Module, sizes: Sizes, planes: float, read: float) -> dict:
    return {
        "mean_planes": planes,
        "bits_per_weight": api.bits_per_weight(model, planes, read),
        "weight_bytes": sizes.model_bytes(model, planes, read),
    }


def _note(allocation: str, budget: float) -> str:
    return UNEVEN if allocation == "uniform" and not budget.is_integer() else ""


def full_sizes(model: nn.Module, sites: Sequence[Site]) -> dict:
    """Of an original model: parameters, bytes of all weights and of those outside experts, bits per expert weight, counts."""
    experts = sum(site.weights * getattr(torch, site.dtype).itemsize for site in sites)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": whole,
        "other_bytes": whole - experts,
        "bits_per_weight": 8 * experts / sum(site.weights for site in sites),
        "sites": len(sites),
        "experts": sum(site.experts for site in sites),
    }


def result(name: str, full_precision: dict, points: Sequence[dict], absent: Sequence[str] = ()) -> dict:
    """The object that `dpamoe eval --json` prints; full_precision: scores and `full_sizes` of the original.

    absent: sentences about points that there cannot be, as `left_out` makes them.
    """
    full = dict(full_precision)
    heading = {"model": name} | {field: full.pop(field) for field in ("sites", "experts", "tokens")}
    return heading | {"full_precision": full, "points": list(points), "left_out": list(absent)}


def to_run(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Put a model where and how it is scored: fp32 on CPU, its own dtype elsewhere."""
    model = model.to(device)
    return model.float() if torch.device(device).type == "cpu" else model
