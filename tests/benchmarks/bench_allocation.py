"""What allocation and counting cost inside a layer: the same planes given, or found by each allocator, compiled and replayed.

python tests/benchmarks/bench_allocation.py [--model qwen3_moe] [--tokens 1,8,16,64] [--budget 4] [--device cuda]
    [--scale-mode shared] [--group-size 128]
"""

from functools import partial

import torch
from layers import ROUNDS, flags_of, layers_of, print_growing

from dpamoe import measure, synthetic
from dpamoe.bench import call, compiled
from dpamoe.modules import layer_shape
from dpamoe.spec import SpendSpec

SPENDS = {"exact": {}, "threshold": {"allocator": "threshold"}, "uniform": {"allocation": "uniform"}}


def given(layer, hidden, index, weights, chunks):
    """Its experts alone, behind planes that are there."""
    return layer.compute(hidden, index, weights, chunks)


def allocated(layer, hidden, index, weights):
    """Its experts behind planes that it finds, which nobody counts."""
    return layer.compute(hidden, index, weights, layer.allocate(index, weights))


@torch.no_grad()
def row_of(layers, tokens: int, budget: float, name: str, device) -> tuple[str, ...]:
    """Tokens, allocator, mean planes, µs behind given planes, with allocation, and with counting, too."""
    for layer in layers:
        layer.set_spend(SpendSpec(budget, **SPENDS[name]))
    inputs = [synthetic.routing(layers[0].site, tokens, device, seed) for seed in range(len(layers))]
    chunks = [layer.allocate(*own[1:]) for layer, own in zip(layers, inputs, strict=True)]
    jobs = []
    nothing = [()] * len(layers)
    for function, more in ((given, [(own,) for own in chunks]), (allocated, nothing), (call, nothing)):
        run = compiled(device, function)
        jobs.append([partial(run, layer, *own, *planes) for layer, own, planes in zip(layers, inputs, more, strict=True)])
    times = measure.microseconds_in_turn(jobs, device, ROUNDS)
    mean = float(torch.stack(chunks).float().mean())
    more = (f"{us:.2f} ({us - times[0]:+.2f})" for us in times[1:])
    return str(tokens), name, f"{mean:.3f}", f"{times[0]:.2f}", *more


def main() -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--budget", type=float, default=4.0)
    flags = parser.parse_args()
    device = measure.device_of(flags.device)
    for layers in layers_of(flags):
        for seed, layer in enumerate(layers):
            synthetic.weigh(layer, device, seed)
        jobs = [(int(tokens), name) for tokens in flags.tokens.split(",") for name in SPENDS]
        rows = (row_of(layers, tokens, flags.budget, name, device) for tokens, name in jobs)
        head = ("tokens", "allocator", "planes", "given µs", "allocated µs", "and counted µs")
        key = layer_shape(layers[0].site, layers[0].spec).key
        print(f"{key}, {len(layers)} layers in turn")
        print_growing(head, rows, ("64", "threshold", "4.000", "1000.00", "1000.00 (+10.00)", "1000.00 (+10.00)"))


if __name__ == "__main__":
    main()
