"""The expert block alone behind given planes, by each path: every k, and a mix of k in each token.

python tests/benchmarks/bench_paths.py [--model qwen3_moe] [--tokens 1,8,16,64] [--device cuda]
    [--scale-mode shared] [--group-size 128]
"""

from collections.abc import Iterator
from functools import partial

import torch
from layers import flags_of, layers_of, print_growing

from dpamoe import measure, synthetic, tables
from dpamoe.bench import bytes_read
from dpamoe.kernels import paths
from dpamoe.modules import layer_shape
from dpamoe.tune import paths_of

MIX = (7, 5, 4, 4, 4, 3, 3, 2)  # planes of the slots of a token, repeated; 4 on average
PLANES = (2, 4, 8, "mixed")


def given(kind, tokens: int, active: int, device) -> torch.Tensor:
    """Planes of every pair, int32 [T, A]."""
    own = MIX if kind == "mixed" else (kind,)
    return torch.tensor([own[slot % len(own)] for slot in range(active)], dtype=torch.int32, device=device).repeat(tokens, 1)


def rows_of(layers, tokens: int, copied: float, device) -> Iterator[tuple[str, ...]]:
    """A row of the table for each number of planes: bytes that must be read, their time at the speed of a copy, each path's."""
    site = layers[0].site
    inputs = [synthetic.routing(site, tokens, device, seed) for seed in range(len(layers))]
    for kind in PLANES:
        chunks = given(kind, tokens, site.top_k, device)
        calls = [partial(layer.compute, *own, chunks) for layer, own in zip(layers, inputs, strict=True)]
        read = sum(bytes_read(layer, own[1], chunks) for layer, own in zip(layers, inputs, strict=True)) / len(layers)
        times = []
        shape = layer_shape(site, layers[0].spec)
        for path in paths.available(shape, device):
            with paths.forced(path):
                there = path in paths_of(layers[0], tokens, device)
                times.append(tables.cell(measure.microseconds(calls, device) if there else None, ".1f"))
        yield str(tokens), str(kind), f"{read / 1e6:.2f}", f"{read / copied * 1e6:.1f}", *times


def main() -> None:
    flags = flags_of(__doc__).parse_args()
    device = measure.device_of(flags.device)
    copied = measure.copy_bandwidth(device)
    for layers in layers_of(flags):
        shape = layer_shape(layers[0].site, layers[0].spec)
        head = ("tokens", "k", "MB", "at copy speed µs", *(f"{path} µs" for path in paths.available(shape, device)))
        rows = (row for tokens in flags.tokens.split(",") for row in rows_of(layers, int(tokens), copied, device))
        print(f"{shape.key}, {len(layers)} layers in turn")
        print_growing(head, rows, ("64", "mixed", "1000.00", "1000.0", *("10000.0" for _ in head[4:])))


if __name__ == "__main__":
    main()
