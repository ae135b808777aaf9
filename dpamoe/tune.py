"""Measure what a layer costs by each path at every batch size, and from which size Uniform-k pays: the costs `paths` reads.

Weights and routing are random, layers are read in turn so that no cache helps, and the allocator is left out: it costs the
same on both paths.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch
from filelock import FileLock
from torch import Tensor

from dpamoe import measure, synthetic, tables
from dpamoe.kernels import paths
from dpamoe.modules import EncodedExperts, layer_shape
from dpamoe.progress import track
from dpamoe.sites import Site
from dpamoe.spec import EncodeSpec, SpendSpec, check_budget

TOKENS = tuple(1 << power for power in range(13))
AGREE = 2e-2  # of the norm: two paths, each within 3e-3 of fp64, and their outputs rounded to bf16
PAYS = 1.05  # planes by token must cost this much more than Uniform-k before the difference counts


@dataclass(frozen=True)
class Timing:
    """µs of one layer at one number of tokens, by path: planes by token (dpa), and Uniform-k at the same budget."""

    tokens: int
    dpa: dict[str, float]
    uniform: dict[str, float]


def tune(
    source: str, device: torch.device, spec: EncodeSpec, budget: float = 4.0, tokens: Sequence[int] = TOKENS,
    changes: dict | None = None,
) -> dict:  # fmt: skip
    """Measure every distinct layer shape of a model, store the costs, and return the object of `dpamoe tune --json`.

    Nothing that runs changes but the choice between kernels; Uniform-k is used only where `fallback="uniform"` asks for it.
    Raises ValueError for a model without routed experts, a budget out of range, or where costs cannot be saved.
    """
    check_budget(budget, spec.k_min, spec.k_max)
    _, sites = synthetic.with_sites(synthetic.read_config(source, changes), spec)
    name, shapes = paths.device_name(device), []
    paths.check_costs_can_be_saved(name)
    for site in synthetic.distinct(sites):
        layers = build_layers(site, spec, device)
        label = layer_shape(site, spec).key
        timings = [
            time_layers(layers, count, budget, device)
            for count in track(tokens, f"tune {label}", lambda count: f"{count} tokens")
        ]
        costs = costs_of(timings, budget)
        with FileLock(paths.cost_file(name).with_suffix(".lock")):  # what another process adds meanwhile stays
            file = paths.save_costs(name, {label: costs})
        shapes.append(_described(site, spec, len(layers), timings, costs, device))
        del layers
        measure.release(device)
    return {"model": source, **measure.facts(device), "file": str(file), "budget": budget, "shapes": shapes}


def build_layers(site: Site, spec: EncodeSpec, device: torch.device) -> list[EncodedExperts]:
    """As many random copies of a layer as fit, to be read in turn."""
    first = synthetic.encoded_layer(site, spec, device)
    more = measure.copies(first.encoded_bytes(), device)
    return [first, *(synthetic.encoded_layer(site, spec, device, seed) for seed in range(1, more))]


def time_layers(layers: list[EncodedExperts], tokens: int, budget: float, device: torch.device) -> Timing:
    """Time all paths on planes by token and on equal planes; one that disagrees with the first is left out, with a warning."""
    site = layers[0].site
    inputs = [synthetic.routing(site, tokens, device, seed) for seed in range(len(layers))]
    touched = inputs[0][1].unique().numel() / site.experts
    few = min(len(layers), measure.enough(touched * layers[0].encoded_bytes() * budget / layers[0].spec.k_max, device))
    times = []
    for allocation in ("dpa", "uniform"):  # a layer tells the kernels which of them it is set to
        spend = SpendSpec(budget, allocation)
        chunks = [_planes(layer, spend, *given[1:]) for layer, given in zip(layers, inputs, strict=True)]
        calls = [partial(layers[i].compute, *inputs[i], chunks[i]) for i in range(few)]
        by_path, expected = {}, None
        for path in paths_of(layers[0], tokens, device):
            with paths.forced(path):
                found = calls[0]().float()
                if expected is None:
                    expected = found
                if not by_path or _agrees(found, expected, path, tokens):
                    by_path[path] = measure.microseconds(calls, device)
        times.append(by_path)
    return Timing(tokens, *times)


def _agrees(found: Tensor, expected: Tensor, path: str, tokens: int) -> bool:
    """Whether a path computes what the first one does."""
    apart = float((found - expected).norm() / expected.norm())
    if apart <= AGREE:
        return True
    warnings.warn(
        f"path {path} is {apart:.2g} of the norm from {paths.PATHS[0]} at {tokens} tokens, more than {AGREE}: it is left out "
        "there; please report it with what `dpamoe doctor` prints",
        stacklevel=2,
    )
    return False


def paths_of(layer: EncodedExperts, tokens: int, device: torch.device) -> tuple[str, ...]:
    """The paths that compute so many tokens in a layer."""
    found = paths.available(layer_shape(layer.site, layer.spec), device, tokens)
    if "bits" not in found:
        return found
    from dpamoe.kernels import bitserial_experts  # Triton is not everywhere

    weights = layer.gate_up_proj.weight, layer.down_proj.weight
    bits = layer.site.fused and bitserial_experts.usable(tokens * layer.site.top_k, layer.site.top_k, *weights)
    return tuple(path for path in found if bits or path != "bits")


def _planes(layer: EncodedExperts, spend: SpendSpec, index: Tensor, weights: Tensor) -> Tensor:
    layer.set_spend(spend)
    return layer.allocate(index, weights)


def costs_of(timings: list[Timing], budget: float) -> paths.Costs:
    """The entry of the cost table: both paths by tokens, and the tokens from which planes by token cost 1.05 x Uniform-k."""
    times = {timing.tokens: timing.dpa for timing in timings}
    uniform_from = paths.holds_from({timing.tokens: ratio(timing) > PAYS for timing in timings})
    today = measure.facts(torch.device("cpu"))
    return paths.Costs(times, uniform_from, budget, today["date"], torch.__version__, _triton())


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def ratio(timing: Timing) -> float:
    """Cost of planes by token over Uniform-k, each by its faster path."""
    return min(timing.dpa.values()) / min(timing.uniform.values())


def _described(
    site: Site, spec: EncodeSpec, layers: int, timings: list[Timing], costs: paths.Costs, device: torch.device
) -> dict:
    shape = layer_shape(site, spec)
    rows = [
        {
            "tokens": timing.tokens,
            **{f"{path}_us": us for path, us in timing.dpa.items()},
            "chosen": paths.choose(shape, timing.tokens, device, "bits" in timing.dpa),
            "uniform_us": min(timing.uniform.values()),
            "dpa_over_uniform": ratio(timing),
        }
        for timing in timings
    ]
    return {
        "shape": shape.key,
        "path": site.path,
        "layers": layers,
        "rows": rows,
        "prefill_from": costs.prefill_from,
        "uniform_from": costs.uniform_from,
    }


def table(outcome: dict) -> str:
    """Each shape's rows as text, and what follows from them."""
    lines = [measure.heading(outcome)]
    for shape in outcome["shapes"]:
        measured = [path for path in paths.PATHS if any(f"{path}_us" in row for row in shape["rows"])]
        head = ("tokens", *(f"{path} µs" for path in measured), "chosen", "uniform µs", "dpa / uniform")
        rows = [
            (
                str(row["tokens"]), *(tables.cell(row.get(f"{path}_us"), ".1f") for path in measured), row["chosen"],
                f"{row['uniform_us']:.1f}", f"{row['dpa_over_uniform']:.3f}",
            )
            for row in shape["rows"]
        ]  # fmt: skip
        start, uniform = shape["prefill_from"], shape["uniform_from"]
        lines += [
            f"{shape['path']} ({shape['shape']}), budget {outcome['budget']:g}, {shape['layers']} layers in turn, per layer:",
            tables.aligned(head, rows),
            "prefill is slower at every measured batch" if start is None else f"prefill is faster from {start} tokens on",
            "Uniform-k does not pay at any measured batch"
            if uniform is None
            else f'Uniform-k pays from {uniform} tokens on; it is used only with fallback="uniform"',
        ]
    return "\n".join([*lines, f"stored in {outcome['file']}"])
