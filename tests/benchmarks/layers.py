"""What the benchmarks of single layers share: flags, and the layers of each distinct shape of a model."""

import argparse
from collections.abc import Iterable, Iterator, Sequence

from dpamoe import measure, synthetic, tables
from dpamoe.modules import EncodedExperts
from dpamoe.spec import EncodeSpec
from dpamoe.tune import build_layers

ROUNDS = 15  # in which calls are timed that are compared with each other


def flags_of(about: str) -> argparse.ArgumentParser:
    """A parser of the flags that all have."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--model", default="qwen3_moe")
    parser.add_argument("--tokens", default="1,8,16,64")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale-mode", default="shared")
    parser.add_argument("--group-size", type=int, default=128)
    return parser


def layers_of(flags: argparse.Namespace) -> Iterator[list[EncodedExperts]]:
    """Random layers, to be read in turn, of every distinct shape; says on what they run."""
    device, spec = measure.device_of(flags.device), EncodeSpec(group_size=flags.group_size, scale_mode=flags.scale_mode)
    _, sites = synthetic.with_sites(synthetic.read_config(flags.model), spec)
    print(measure.heading(measure.facts(device)))
    for site in synthetic.distinct(sites):
        yield build_layers(site, spec, device)


def print_growing(head: Sequence[str], rows: Iterable[Sequence[str]], room: Sequence[str]) -> None:
    """Each row as soon as it is measured, so that a run that is cut short leaves what it has; room: cells as wide as any."""
    for number, row in enumerate(rows):
        lines = tables.growing(head, [row], [room]).splitlines()
        print(*lines[-1 if number else 0 :], sep="\n", flush=True)
