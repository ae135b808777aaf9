"""The expert block alone behind given planes, by each path and behind a router, beside bf16: every k, and a mix of k.

python tests/benchmarks/bench_paths.py [--model qwen3_moe] [--tokens 1,8,16,64] [--device cuda]
    [--scale-mode shared] [--group-size 128]

"behind a router": the router, from rows to experts and gates, and then the experts, less the time of the router alone, in turn.
"""

from collections.abc import Iterator
from functools import partial

import torch
from layers import ROUNDS, flags_of, layers_of, print_growing

from dpamoe import bench, measure, synthetic, tables
from dpamoe.kernels import paths
from dpamoe.kernels.router_ops import linear_route
from dpamoe.modules import layer_shape
from dpamoe.tune import paths_of

MIX = (7, 5, 4, 4, 4, 3, 3, 2)  # planes of the slots of a token, repeated; 4 on average
PLANES = (2, 4, 8, "mixed")
ROUTER = ("softmax", "sum", 1.0, 1, 1, "max")  # score, norm, scale, groups, kept groups, their score
BASELINE = "grouped_mm"


def given(kind, tokens: int, active: int, device) -> torch.Tensor:
    """Planes of every pair, int32 [T, A]."""
    own = MIX if kind == "mixed" else (kind,)
    return torch.tensor([own[slot % len(own)] for slot in range(active)], dtype=torch.int32, device=device).repeat(tokens, 1)


def route(hidden, router, active: int):
    """Experts and gates of every row, by the op that a router is fused into."""
    return linear_route(hidden, router, None, None, active, *ROUTER, hidden.dtype)


def router_of(site, device, seed: int) -> torch.Tensor:
    """A random router, bf16 [E, H]."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(site.experts, site.hidden, device=device, generator=generator).mul_(site.hidden**-0.5).bfloat16()


def routed(site, tokens: int, device, seed: int = 0):
    """As `synthetic.routing`, by a router."""
    hidden, _, _ = synthetic.routing(site, tokens, device, seed)
    return hidden, *route(hidden, router_of(site, device, seed), site.top_k)


def behind_a_router(layer, router, chunks, hidden):
    """The router, then the experts."""
    return layer.compute(hidden, *route(hidden, router, layer.site.top_k), chunks)


def rows_of(layers, tokens: int, copied: float, device) -> Iterator[tuple[str, ...]]:
    """A row of the table for each number of planes: bytes that must be read, their time at the speed of a copy, each path's."""
    site = layers[0].site
    inputs = [routed(site, tokens, device, seed) for seed in range(len(layers))]
    routers = [router_of(site, device, seed) for seed in range(len(layers))]
    alone = [partial(route, own[0], router, site.top_k) for own, router in zip(inputs, routers, strict=True)]
    for kind in PLANES:
        chunks = given(kind, tokens, site.top_k, device)
        calls = [partial(layer.compute, *own, chunks) for layer, own in zip(layers, inputs, strict=True)]
        read = sum(bench.bytes_read(layer, own[1], chunks) for layer, own in zip(layers, inputs, strict=True)) / len(layers)
        times = []
        shape = layer_shape(site, layers[0].spec)
        for path in paths.available(shape, device):
            with paths.forced(path):
                there = path in paths_of(layers[0], tokens, device)
                times.append(measure.microseconds(calls, device) if there else None)
        both = [
            partial(behind_a_router, layer, router, chunks, own[0])
            for layer, router, own in zip(layers, routers, inputs, strict=True)
        ]
        router_us, whole_us = measure.microseconds_in_turn([alone, both], device, ROUNDS)
        cells = (tables.cell(us, ".1f") for us in (*times, whole_us - router_us))
        yield str(tokens), str(kind), f"{read / 1e6:.2f}", f"{read / copied * 1e6:.1f}", *cells


@torch.no_grad()
def main() -> None:
    flags = flags_of(__doc__).parse_args()
    device, counts = measure.device_of(flags.device), [int(tokens) for tokens in flags.tokens.split(",")]
    copied = measure.copy_bandwidth(device)
    model = synthetic.skeleton(synthetic.read_config(flags.model))
    for layers in layers_of(flags):
        site, shape = layers[0].site, layer_shape(layers[0].site, layers[0].spec)
        plain = {tokens: us[BASELINE] for tokens, us in bench.plain_times(model, site, counts, [BASELINE], device, routed)}
        measure.release(device)
        columns = (*paths.available(shape, device), "behind a router", BASELINE)
        head = ("tokens", "k", "MB", "at copy speed µs", *(f"{name} µs" for name in columns))
        rows = (
            (*row, tables.cell(plain[tokens], ".1f")) for tokens in counts for row in rows_of(layers, tokens, copied, device)
        )
        print(f"{shape.key}, {len(layers)} layers in turn")
        print_growing(head, rows, ("64", "mixed", "1000.00", "1000.0", *("10000.0" for _ in head[4:])))


if __name__ == "__main__":
    main()
