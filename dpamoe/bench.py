"""Time one layer's experts at random weights: by every way to hand out planes, beside transformers' bf16 experts.

Layers are read in turn, so that no cache holds the next one. On CUDA each is compiled by the backend "dpamoe", allocator and
counter included, and replayed as a CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dpamoe import measure, synthetic, tables
from dpamoe.kernels import paths
from dpamoe.kernels.reference import ACTIVATIONS
from dpamoe.modules import EncodedExperts, layer_shape
from dpamoe.passes.backend import compile_backend
from dpamoe.progress import track
from dpamoe.sites import Site, gather
from dpamoe.spec import EncodeSpec, SpendSpec, check_budget
from dpamoe.tune import build_layers, paths_of

TOKENS = (1, 8, 64, 512, 2048)
BASELINES = ("grouped_mm", "batched_mm")
BARE = "bare_grouped_mm"  # the two matmuls and what is between them: no sorting, gathering or weighted sum
GATHERS = "batched_mm"  # copies the weights of every pair, so its memory grows with the tokens
ROOM = ("10000", "2.375", "threshold-skip by token", "prefill", "100000.0", "10000.00", "10000", "100%")  # of a table's cells
SPENDS = (("dpa", "token"), ("dpa", "dispatch"), ("uniform", "token"), ("threshold-skip", "token"))


def check_baselines(names: Sequence[str]) -> None:
    """Raise ValueError unless all are implementations of experts in transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    unknown = sorted(set(names) - set(ALL_EXPERTS_FUNCTIONS.valid_keys()))
    if unknown:
        known = ", ".join(sorted(ALL_EXPERTS_FUNCTIONS.valid_keys()))
        raise ValueError(f"baselines {', '.join(unknown)} are unknown: use some of {known}, or none")


def bench_layers(
    source: str, device: torch.device, spec: EncodeSpec, budgets: Sequence[float], tokens: Sequence[int] = TOKENS,
    baselines: Sequence[str] = BASELINES, changes: dict | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Time every distinct layer shape of a model; the object of `dpamoe bench --mode layer --json`, after all that is added.

    It is the same object every time, `complete` the last time. Baselines come first, since each row stands beside them.
    Raises ValueError for a model without routed experts, an unknown baseline or a budget out of range.
    """
    check_baselines(baselines)
    for budget in budgets:
        check_budget(budget, spec.k_min, spec.k_max)
    model, sites = synthetic.with_sites(synthetic.read_config(source, changes), spec)
    copied = measure.copy_bandwidth(device)
    facts = {"mode": "layer", "model": source, **measure.facts(device), "copy_gb_per_s": copied / 1e9}
    outcome = {**facts, "complete": False, "shapes": []}
    for site in synthetic.distinct(sites):
        shape = {"shape": layer_shape(site, spec).key, "path": site.path, "baseline_us": {}, "rows": []}
        outcome["shapes"].append(shape)
        for count, times in plain_times(model, site, tokens, baselines, device):
            shape["baseline_us"][str(count)] = times
            yield outcome
        measure.release(device)
        layers = build_layers(site, spec, device)
        shape["layers"] = len(layers)
        for row in _encoded_rows(layers, budgets, tokens, copied, device):
            row["baseline_us"] = shape["baseline_us"].get(str(row["tokens"]), {})
            row["speedup"] = {name: us and us / row["us"] for name, us in row["baseline_us"].items()}
            shape["rows"].append(row)
            yield outcome
        del layers
        measure.release(device)
    outcome["complete"] = True
    yield outcome


def _encoded_rows(
    layers: list[EncodedExperts], budgets: Sequence[float], tokens: Sequence[int], copied: float, device: torch.device
) -> Iterator[dict]:
    """A row for every batch size, way to spend and budget, the largest budget first."""
    for seed, layer in enumerate(layers):
        synthetic.weigh(layer, device, seed)
    jobs = [(count, *spend) for count in tokens for spend in SPENDS]
    for count, allocation, scope in track(jobs, "bench", lambda job: f"{job[0]} tokens, {job[1]} by {job[2]}"):
        run = compiled(device)
        inputs = [synthetic.routing(layers[0].site, count, device, seed) for seed in range(len(layers))]
        for budget in sorted(budgets, reverse=True):
            for layer in layers:
                layer.set_spend(_spend(budget, allocation, scope))
            spent = {"tokens": count, "budget": budget, "allocation": allocation, "scope": scope}
            yield spent | _timed(layers, inputs, run, copied, device)


def _spend(budget: float, allocation: str, scope: str) -> SpendSpec:
    if allocation == "threshold-skip":
        return SpendSpec(budget, scope=scope, allocator="threshold", skip=True)
    return SpendSpec(budget, allocation, scope)


def call(layer: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A layer, as a model calls it."""
    return layer(hidden, index, weights)


def compiled(device: torch.device, function: Callable = call) -> Callable:
    """A function of one layer; compiled anew for every shape and way to spend, the layers share it."""
    if device.type != "cuda":
        return function
    torch.compiler.reset()
    return torch.compile(function, backend=compile_backend, dynamic=False, fullgraph=True)


def _timed(layers: list[EncodedExperts], inputs: list[tuple], run: Callable, copied: float, device: torch.device) -> dict:
    """One row: what was spent, read and taken; means over the layers."""
    chunks = [layer.allocate(*given[1:]) for layer, given in zip(layers, inputs, strict=True)]
    read = [bytes_read(layer, given[1], own) for layer, given, own in zip(layers, inputs, chunks, strict=True)]
    few = min(len(layers), measure.enough(min(read), device))
    us = measure.microseconds([partial(run, layers[i], *inputs[i]) for i in range(few)], device)
    mean_read = sum(read) / len(read)
    return {
        "path": _path(layers[0], inputs[0][1].shape[0], device),
        "us": us,
        "mean_planes": float(torch.stack(chunks).float().mean()),
        "bytes_read": round(mean_read),
        "gb_per_s": mean_read / us / 1e3,
        "copy_share": mean_read / us * 1e6 / copied,
    }


def _path(layer: EncodedExperts, tokens: int, device: torch.device) -> str:
    if device.type != "cuda":
        return "torch"
    return paths.choose(layer_shape(layer.site, layer.spec), tokens, device, "bits" in paths_of(layer, tokens, device))


def bytes_read(experts: EncodedExperts, index: Tensor, chunks: Tensor) -> int:
    """Bytes of planes, scales and offsets that a call must read: for each distinct expert its longest prefix, once."""
    count = experts.site.experts
    plane, fixed = (size / count for size in experts.bytes_per_plane())
    held = (index >= 0) & (index < count)
    longest = torch.zeros(count, dtype=chunks.dtype, device=chunks.device)
    longest.scatter_reduce_(0, index[held].long(), chunks[held], "amax")
    return round(plane * int(longest.sum()) + fixed * int((longest > 0).sum()))


@torch.no_grad()
def plain_times(
    model: nn.Module, site: Site, tokens: Sequence[int], names: Sequence[str], device: torch.device, routing=synthetic.routing
) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Tokens, and µs of bf16 experts by implementation; None where one needs more memory than there is."""
    if not names:
        return
    layers = [
        synthetic.plain_layer(model, site, device, names[0], seed)
        for seed in range(measure.copies(2 * site.weights, device))
    ]  # fmt: skip
    for count in track(tokens, "baselines", lambda count: f"{count} tokens"):
        inputs = [routing(site, count, device, seed) for seed in range(len(layers))]
        touched = inputs[0][1].unique().numel() / site.experts
        few = min(len(layers), measure.enough(2 * site.weights * touched, device))
        times = {name: _plain_time(layers[:few], inputs, name, site, device) for name in names}
        if "grouped_mm" in names:
            calls = [bare_grouped_mm(layer, site, *given[:2]) for layer, given in zip(layers[:few], inputs, strict=False)]
            times[BARE] = measure.microseconds(calls, device)
        yield count, times


def _plain_time(layers: list[nn.Module], inputs: list[tuple], name: str, site: Site, device: torch.device) -> float | None:
    if name == GATHERS and gathered_bytes(site, inputs[0][1].numel()) > measure.free_bytes(device) / 2:
        return None
    for layer in layers:
        layer.config._experts_implementation = name
    return measure.microseconds([partial(layer, *given) for layer, given in zip(layers, inputs, strict=False)], device)


def gathered_bytes(site: Site, pairs: int) -> int:
    """Bytes of the bf16 weights of so many pairs, each pair with its own copy."""
    return pairs * 2 * site.weights // site.experts


def bare_grouped_mm(experts: nn.Module, site: Site, hidden: Tensor, index: Tensor) -> Callable[[], Tensor]:
    """The two grouped matmuls and the activation between them, on rows that stand sorted already."""
    weights = gather(experts, site.layout, site.experts)
    up, down = weights.up.transpose(1, 2), weights.down.transpose(1, 2)
    ids, order = index.flatten().sort()
    rows = hidden[order // index.shape[1]]
    ends = torch.bincount(ids, minlength=site.experts).cumsum(0).int()
    between = ACTIVATIONS[site.activation]

    def run() -> Tensor:
        inner = torch.nn.functional.grouped_mm(rows, up, offs=ends)
        return torch.nn.functional.grouped_mm(between(inner), down, offs=ends)

    return run


def table(outcome: dict) -> str:
    """The rows of each shape that has some as text; what is measured later is added below."""
    lines = [measure.heading(outcome), f"a copy moves {outcome['copy_gb_per_s']:.0f} GB/s; × is the baseline's time over ours"]
    for shape in filter(lambda shape: shape["rows"], outcome["shapes"]):
        names = list(shape["rows"][0]["speedup"])
        head = ("tokens", "k̄", "allocation", "path", "µs", "MB read", "GB/s", "of copy", *(f"× {name}" for name in names))
        rows = [
            (
                str(row["tokens"]), f"{row['budget']:g}", f"{row['allocation']} by {row['scope']}", row["path"],
                f"{row['us']:.1f}", f"{row['bytes_read'] / 1e6:.2f}", f"{row['gb_per_s']:.0f}", f"{row['copy_share']:.0%}",
                *("–" if row["speedup"][name] is None else f"{row['speedup'][name]:.2f}" for name in names),
            )
            for row in shape["rows"]
        ]  # fmt: skip
        lines += [
            f"{shape['path']} ({shape['shape']}), {shape['layers']} layers in turn, per layer:",
            tables.growing(head, rows, [(*ROOM, *("100.00" for _ in names))]),
        ]
    return "\n".join(lines)
