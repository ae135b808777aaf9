"""What allocation and counting cost inside a layer: the same planes given, or found by each allocator, compiled and replayed.

python tests/benchmarks/bench_allocation.py [--model qwen3_moe] [--tokens 1,8,16,64] [--budget 4] [--device cuda]
    [--scale-mode shared] [--group-size 128]
"""

import argparse
from functools import partial

import torch

from dpamoe import measure, synthetic, tables
from dpamoe.modules import layer_shape
from dpamoe.passes.backend import compile_backend
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.tune import build_layers

SPENDS = {"exact": {}, "threshold": {"allocator": "threshold"}, "uniform": {"allocation": "uniform"}}


def whole(layer, hidden, index, weights):
    """The layer as a model calls it."""
    return layer(hidden, index, weights)


def given(layer, hidden, index, weights, chunks):
    """Its experts alone, behind planes that are there."""
    return layer.compute(hidden, index, weights, chunks)


def compiled(function, device):
    """A function of one layer by the backend, for all layers."""
    torch.compiler.reset()
    if device.type != "cuda":
        return function
    return torch.compile(function, backend=compile_backend, dynamic=False, fullgraph=True)


@torch.no_grad()
def row_of(layers, tokens: int, budget: float, name: str, device) -> tuple[str, ...]:
    """Tokens, allocator, mean planes, µs behind given planes and µs in all."""
    for layer in layers:
        layer.set_spend(SpendSpec(budget, **SPENDS[name]))
    inputs = [synthetic.routing(layers[0].site, tokens, device, seed) for seed in range(len(layers))]
    chunks = [layer.allocate(*own[1:]) for layer, own in zip(layers, inputs, strict=True)]
    times = []
    for function, more in ((given, [(own,) for own in chunks]), (whole, [()] * len(layers))):
        run = compiled(function, device)
        calls = [partial(run, layer, *own, *planes) for layer, own, planes in zip(layers, inputs, more, strict=True)]
        times.append(measure.microseconds(calls, device))
    mean = float(torch.stack(chunks).float().mean())
    return str(tokens), name, f"{mean:.3f}", *(f"{us:.2f}" for us in times), f"{times[1] - times[0]:+.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_moe")
    parser.add_argument("--tokens", default="1,8,16,64")
    parser.add_argument("--budget", type=float, default=4.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale-mode", default="shared")
    parser.add_argument("--group-size", type=int, default=128)
    flags = parser.parse_args()
    device = measure.device_of(flags.device)
    spec = EncodeSpec(group_size=flags.group_size, scale_mode=flags.scale_mode)
    _, sites = synthetic.with_sites(synthetic.read_config(flags.model), spec)
    print(measure.heading(measure.facts(device)))
    for site in synthetic.distinct(sites):
        layers = build_layers(site, spec, device)
        for seed, layer in enumerate(layers):
            synthetic.weigh(layer, device, seed)
        jobs = [(int(tokens), name) for tokens in flags.tokens.split(",") for name in SPENDS]
        rows = [row_of(layers, tokens, flags.budget, name, device) for tokens, name in jobs]
        head = ("tokens", "allocator", "planes", "given µs", "whole µs", "more µs")
        print(f"{layer_shape(site, spec).key}, {len(layers)} layers in turn", tables.aligned(head, rows), sep="\n")


if __name__ == "__main__":
    main()
