"""Front door: transform a model in place, choose its budget, ask what it holds and spends, take it back."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from dpamoe import calibration as calibrate
from dpamoe import program, sensitivity
from dpamoe.allocate import project
from dpamoe.encode import check_encodable, encode
from dpamoe.modules import EncodedExperts, encoded_experts, uniform_start
from dpamoe.own_format import keep_own_format
from dpamoe.passes import find, rewrite
from dpamoe.presets import preset_of
from dpamoe.profile import TOKENS_PER_EXPERT, Sample, record, residual_table
from dpamoe.progress import track
from dpamoe.sites import Refusal, Site, gather
from dpamoe.spec import EncodeSpec, SpendSpec, check_budget
from dpamoe.threshold import level_for

logger = logging.getLogger("dpamoe")


def transform(
    model: nn.Module, budget: float = 4.0, *, example_inputs=None, calibration=None, spec: EncodeSpec | None = None,
    keep_original: bool = False, fallback: str | None = None, allocator: str | None = None, skip: bool | None = None,
    preset: str | None = None,
) -> nn.Module:  # fmt: skip
    """Make the routed experts of a model any-precision, in place, and return it (DPA-MoE, section 3).

    budget: average planes per selected expert. example_inputs: a tuple or dict for one recorded run; Hugging Face models
    need none. calibration: text, token ids or an iterable of inputs for the residual profile; None lets a language model
    write its own text. keep_original: keep the original experts, for `revert`. preset: a name for all of the settings that
    follow, of which each that is given changes it: "paper" (the default) or "quality", less error at the same bytes. spec: how
    to encode. allocator: "exact" spends the budget on every token, "threshold" on average, by what it measures on the
    calibration text; skip: leave out experts whose gate is tiny; fallback: "uniform" spends the same planes on every expert in
    batches so large that this is faster, as `dpamoe tune` measured on the device that holds the experts (see `SpendSpec`).
    Router, shared experts and everything else stay as they are. A model that is already transformed only gets the budget, and
    what else is given of preset, fallback, allocator and skip.

    Raises ValueError if there are no routed experts, weights are not finite, the budget or group size does not fit, or
    nothing was measured for the fallback; TypeError if example_inputs are needed. The model is unchanged then. Interrupted
    while it encodes, it leaves some sites encoded and cannot be saved: call it again to finish.
    """
    spec, changes = _chosen(preset, spec, {"fallback": fallback, "allocator": allocator, "skip": skip})
    spend = SpendSpec(budget, **changes)
    if hasattr(model, "_orig_mod"):
        raise TypeError("the model is wrapped by torch.compile: transform the model itself, then compile it")
    if _is_done(model, spec, keep_original):
        set_spend(model, budget=budget, **changes)
        return model
    spec = spec or EncodeSpec()
    check_budget(budget, spend.least(spec.k_min), spec.k_max)
    with torch.inference_mode(False):
        _encode(model, spec, calibrate.example_batch(model, example_inputs), calibration, keep_original, spend)
    set_spend(model, **asdict(spend))
    return model


def _chosen(preset: str | None, spec: EncodeSpec | None, given: dict) -> tuple[EncodeSpec | None, dict]:
    """The encoding, and the fields of `SpendSpec` but the budget, that a preset and what is given beside it ask for."""
    changes = {name: value for name, value in given.items() if value is not None}
    if preset is None:
        return spec, changes
    named = preset_of(preset)
    return spec or named.encode, {name: value for name, value in asdict(named.spend).items() if name != "budget"} | changes


def _encode(
    model: nn.Module, spec: EncodeSpec, example: calibrate.Batch, calibration, keep_original: bool, spend: SpendSpec
) -> None:
    """Find, check, profile and encode all sites that are not encoded yet."""
    findings = find.find_sites(model, *example)
    if not findings.sites:
        raise ValueError(no_sites(model, findings.refused))
    for site in findings.sites:
        weights = gather(model.get_submodule(site.path), site.layout, site.experts)
        uniform_start(site, spec, weights.up.device, spend)
        check_encodable(weights, spec, site.path)
    batches = calibrate.calibration_batches(model, calibration, example)
    _encode_sites(model, findings, spec, list(batches), keep_original, spend.allocator == "threshold")
    model.dpamoe_refused, model.dpamoe_unfinished = findings.refused, False
    keep_own_format(model)
    for refusal in findings.refused:
        logger.warning("left alone: %s: %s", refusal.path, refusal.reason)


def _encode_sites(
    model: nn.Module, found: find.Findings, spec: EncodeSpec, batches: list, keep_original: bool, weighed: bool
) -> None:
    """Profile all sites on one pass over the batches, then encode and swap one after the other.

    weighed: on another pass over some of them, measure what each site matters.
    """
    before = {path: model.get_submodule(path) for path in found.graphs}
    rewrite.install(model, found.graphs)
    try:
        samples = record(model, found.sites, track(batches, "calibrate", lambda batch: ""), TOKENS_PER_EXPERT)
        importance = sensitivity.measure(model, found.sites, batches) if weighed else {}
    except BaseException:
        rewrite.install(model, before)
        raise
    del before
    model.dpamoe_unfinished = True
    for site in track(found.sites, "encode", lambda site: site.path):
        encoded = encode_site(rewrite.source_of(model, site), site, spec, samples.pop(site.path))
        if site.path in importance:
            encoded.set_importance(**vars(importance[site.path]))
        rewrite.replace(model, encoded, keep_original)


def encode_site(experts: nn.Module, site: Site, spec: EncodeSpec, sample: Sample) -> EncodedExperts:
    """Encode and profile one experts module; the module itself is not changed."""
    weights = gather(experts, site.layout, site.experts)
    up = encode(weights.up, spec, f"{site.path} (up)")
    down = encode(weights.down, spec, f"{site.path} (down)")
    parameters = program.own_parameters(site, experts)
    act, post = program.activation(site, parameters), program.after(site, parameters)
    table, unreached = residual_table(weights, up, down, act, sample, post)
    if unreached:
        shown = ", ".join(map(str, unreached[:12])) + (" …" if len(unreached) > 12 else "")
        logger.warning("%s: no calibration token reached experts %s; their residuals are estimated", site.path, shown)
    biases = [None if bias is None else bias.clone() for bias in (weights.up_bias, weights.down_bias)]
    residuals = project(table, spec.k_min).to(weights.up.device)
    encoded = EncodedExperts(site, spec, up, down, *biases, residuals, parameters)
    encoded.unreached = unreached
    return encoded


def _is_done(model: nn.Module, spec: EncodeSpec | None, keep_original: bool) -> bool:
    """Whether a model is transformed already; ValueError if that was in another way than is asked for now."""
    held = encoded_experts(model)
    if not held:
        return False
    present = next(iter(held.values())).spec
    if spec is not None and spec != present:
        raise ValueError(f"the model is already encoded with {present}: load the original to encode with {spec}")
    if keep_original and not all(experts.original for experts in held.values()):
        raise ValueError("the model is already encoded and its originals were not kept: load it again to keep them")
    return not getattr(model, "dpamoe_unfinished", False)


def no_sites(model: nn.Module, refused: list[Refusal]) -> str:
    """The sentence for a model without sites."""
    message = f"no routed experts were found in {type(model).__name__}"
    if refused:
        reasons = "; ".join(f"{refusal.path}: {refusal.reason}" for refusal in refused[:4])
        return f"{message}: {len(refused)} modules hold stacked weights but none is a site ({reasons})"
    return f"{message}: it looks dense, and only Mixture-of-Experts models can be transformed"


def held_experts(model: nn.Module) -> dict[str, EncodedExperts]:
    """All encoded experts of a model by module path. Raises ValueError if there are none."""
    held = encoded_experts(model)
    if not held:
        raise ValueError(f"{type(model).__name__} holds no encoded experts: call dpamoe.transform or dpamoe.load first")
    return held


def set_budget(model: nn.Module, budget: float) -> None:
    """Set the average planes per selected expert; takes effect with the next token, recompiles nothing.

    Raises ValueError outside k_min to the planes held.
    """
    set_spend(model, budget=budget)


def set_spend(model: nn.Module, **changes) -> None:
    """Change any of budget, allocation, scope, … (see `SpendSpec`) of every site; only a new budget recompiles nothing.

    The fallback holds for the device that the experts are on now: set it again after moving them. Raises ValueError for a
    value out of its range, and for a fallback without measured costs; nothing is changed then.
    """
    held = held_experts(model)
    unknown = changes.keys() - SpendSpec.__dataclass_fields__.keys()
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))} is no setting: use {', '.join(SpendSpec.__dataclass_fields__)}")
    chosen = {path: replace(experts.spend, **changes) for path, experts in held.items()}
    for path, experts in held.items():
        check_budget(chosen[path].budget, chosen[path].least(experts.spec.k_min), int(experts.k_max))
        uniform_start(experts.site, experts.spec, experts.k_max.device, chosen[path])
    _spend(held, chosen)


def _spend(held: dict[str, EncodedExperts], chosen: dict[str, SpendSpec]) -> None:
    """Make every site spend as chosen; those with the allocator "threshold" have one level, for the budget of the first."""
    by_level = [path for path, spend in chosen.items() if spend.allocator == "threshold"]
    level = None
    if by_level:
        level = level_for([held[path].priced(chosen[path]) for path in by_level], chosen[by_level[0]].budget)
    for path, experts in held.items():
        experts.set_spend(chosen[path], level if path in by_level else None)


def spend_again(model: nn.Module) -> None:
    """Go on as before with other residual tables, or another number of planes, on which thresholds depend."""
    held = held_experts(model)
    _spend(held, {path: experts.spend for path, experts in held.items()})


@contextlib.contextmanager
def spending_kept(model: nn.Module) -> Iterator[None]:
    """Whatever is spent inside the block, go back to the settings before."""
    before = {path: experts.spend for path, experts in held_experts(model).items()}
    try:
        yield
    finally:
        held = encoded_experts(model)
        _spend(held, {path: before[path] for path in held})


@contextlib.contextmanager
def budget(model: nn.Module, value: float) -> Iterator[nn.Module]:
    """Spend `value` planes per expert inside the block, then go back to the budget before."""
    with spending_kept(model):
        set_budget(model, value)
        yield model


@dataclass(frozen=True)
class Report:
    """What a transformed model holds: sites, experts, bytes now and before (in the source dtype), what was left out."""

    sites: int
    experts: int
    experts_found: int
    budget: float
    encoded_bytes: int
    original_bytes: int
    bits_per_weight: float
    expert_share: float
    unreached: dict[str, list[int]]
    refused: dict[str, str]

    def as_dict(self) -> dict:
        """Plain dictionary, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"routed experts encoded: {self.experts} of {self.experts_found} in {self.sites} sites, "
            f"{self.expert_share:.1%} of all parameters",
            f"expert weights: {self.encoded_bytes:,} bytes held, {self.original_bytes:,} before; "
            f"{self.bits_per_weight:.3f} bits per weight read at budget {self.budget:g}",
        ]
        lines += [f"no calibration token reached {path}: experts {ids}" for path, ids in self.unreached.items()]
        lines += [f"left alone: {path}: {reason}" for path, reason in self.refused.items()]
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Say what a transformed model holds. Raises ValueError if it is not transformed."""
    held = held_experts(model)
    weights = sum(experts.site.weights for experts in held.values())
    others = sum(parameter.numel() for parameter in model.parameters())
    original = sum(e.site.weights * getattr(torch, e.site.dtype).itemsize for e in held.values())
    first = next(iter(held.values()))
    encoded = sum(experts.site.experts for experts in held.values())
    refused = getattr(model, "dpamoe_refused", [])
    return Report(
        sites=len(held),
        experts=encoded,
        experts_found=encoded + sum(refusal.experts for refusal in refused),
        budget=first.spend.budget,
        encoded_bytes=sum(experts.encoded_bytes() for experts in held.values()),
        original_bytes=original,
        bits_per_weight=bits_per_weight(model, first.spend.budget),
        expert_share=weights / (weights + others),
        unreached={path: experts.unreached for path, experts in held.items() if experts.unreached},
        refused={refusal.path: refusal.reason for refusal in refused},
    )


def expert_bytes(model: nn.Module, planes: float, read: float = 1.0) -> float:
    """Bytes of all encoded experts at `planes` planes each, scales and offsets included; read: share that is not skipped."""
    sizes = [experts.bytes_per_plane() for experts in held_experts(model).values()]
    return sum(read * fixed + planes * plane for plane, fixed in sizes)


def bits_per_weight(model: nn.Module, planes: float, read: float = 1.0) -> float:
    """Bits per expert weight at `planes` planes, scales and offsets included; read: share of experts that is not skipped."""
    return 8 * expert_bytes(model, planes, read) / sum(e.site.weights for e in held_experts(model).values())


def stats(model: nn.Module, reset: bool = False) -> dict:
    """What was spent since the last reset, over all sites and by site; counted on the device, read only here.

    mean_planes: planes per pair of a token and an expert that it selected, None before the first; pairs; tokens; histogram:
    pairs by number of planes, 0 for those that were skipped; share_at_k_max: share of the pairs that read as many planes as
    the model may read; bytes_per_token: bytes of expert weights, scales included, that one token on its own reads in all
    layers (tokens of a batch that select the same expert share them); drift: mean_planes less the budget, which the allocator
    "threshold" keeps to on average only; shift: octaves by which the thresholds are raised to hold it, mean over sites, None if
    they are not (`SpendSpec.hold`); sites: {path: {"mean_planes", "bytes_per_token", "histogram"}}. Raises ValueError if
    the model is not transformed.
    """
    held = held_experts(model)
    counts = {path: [int(experts.skipped), *experts.spent[1:].tolist()] for path, experts in held.items()}
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    tokens = {path: int(e.spent.sum()) // e.site.top_k for path, e in held.items()}  # choices left out count as 0
    at_k_max = sum(counts[path][int(experts.k_max)] for path, experts in held.items())
    read = {path: _bytes_read(experts, counts[path]) for path, experts in held.items()}
    if reset:
        for experts in held.values():
            experts.spent.zero_()
            experts.skipped.zero_()
    pairs, mean, first = sum(total), _mean_planes(total), next(iter(held.values()))
    return {
        "mean_planes": mean,
        "drift": None if mean is None else mean - first.spend.budget,
        "shift": sum(float(e.shift) for e in held.values()) / len(held) if first.follows else None,
        "pairs": pairs,
        "tokens": max(tokens.values()),
        "histogram": _histogram(total),
        "share_at_k_max": at_k_max / pairs if pairs else None,
        "bytes_per_token": sum(read.values()) / max(tokens.values()) if pairs else None,
        "sites": {
            path: {
                "mean_planes": _mean_planes(own),
                "bytes_per_token": read[path] / tokens[path] if sum(own) else None,
                "histogram": _histogram(own),
            }
            for path, own in counts.items()
        },
    }


def _mean_planes(counts: list[int]) -> float | None:
    pairs = sum(counts)
    return sum(k * count for k, count in enumerate(counts)) / pairs if pairs else None


def _histogram(counts: list[int]) -> dict[int, int]:
    return {k: count for k, count in enumerate(counts) if count}


def _bytes_read(experts: EncodedExperts, counts: list[int]) -> float:
    """Bytes that pairs read, one on its own, by their number of planes."""
    plane, fixed = experts.bytes_per_plane()
    return sum(count * (k * plane + fixed) for k, count in enumerate(counts) if k) / experts.site.experts


def revert(model: nn.Module) -> nn.Module:
    """Put the original experts back, in place. Raises ValueError unless they were kept (`keep_original=True`)."""
    held = held_experts(model)
    for path, experts in held.items():
        if not experts.original:
            raise ValueError(f"the original experts of {path} were not kept: transform with keep_original=True")
    for path in held:
        rewrite.restore(model, path)
    return model


def warn_clamped(budget: float, k_max: int) -> float:
    """Clamp a budget to the planes held, with a warning."""
    if budget > k_max:
        warnings.warn(f"budget {budget:g} exceeds the {k_max} planes held: using {k_max}", stacklevel=3)
    return float(min(budget, k_max))
