"""Planes by one threshold for the whole model: plane k + 1 goes to an expert of layer l if g^2 s_l (R[k] - R[k+1]) > level.

g is the gate, s_l the sensitivity of the layer and R the residual table of the expert, on its lower convex hull. Every pair of
a token and an expert decides alone, by comparing g^2 with thresholds level / (s_l (R[k] - R[k+1])). The level that spends a
budget on average follows from how often calibration text gave each expert gates of each size; it is known for every budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST, OCTAVES, PARTS = -40, 48, 4  # squared gates from 2^-40 to 2^8 are counted in quarters of an octave
BINS = OCTAVES * PARTS
ALWAYS = -1.0  # a threshold below every squared gate
WINDOW = 4096  # pairs of a site that a held level follows: it moves by 0.01 planes then while the text stays of one kind
FARTHEST = 16.0  # octaves that it moves at most, either way
STEPS, RANGE = 64, 500.0  # halvings of the range of log2(level), which is -500 … 500: finer than fp64 can tell


@dataclass(frozen=True)
class Layer:
    """What a layer's planes are worth, and the gates that they are worth it to.

    worth fp64 [E, C]: s_l times the fall of the residual with each plane, inf for planes that every expert gets, falling along
    a row. gate_counts int [E, BINS]: calibration pairs by squared gate. k_max: most planes that may be read.
    """

    worth: Tensor
    gate_counts: Tensor
    k_max: int


def bin_of(squares: Tensor) -> Tensor:
    """Place of squared gates among the bins, fp64, 0 … BINS; the whole part is the bin."""
    return ((squares.double().log2() - LOWEST) * PARTS).clamp(0, BINS).nan_to_num(BINS)


def count_gates(gates: Tensor, expert_ids: Tensor, experts: int) -> Tensor:
    """Pairs by expert and squared gate, int64 [E, BINS], of gates float and expert_ids int [T, A]; padding is left out."""
    held = (expert_ids >= 0) & (expert_ids < experts)
    place = bin_of(gates[held].double().square()).long().clamp_max(BINS - 1)
    return torch.bincount(expert_ids[held].long() * BINS + place, minlength=experts * BINS).view(experts, BINS)


def falls(residuals: Tensor, k_min: int, skip: bool) -> Tensor:
    """Fall of the residual with each plane, on the hull, fp64 [E, C], of a table fp32 [E, C + 1] as `allocate.project` makes.

    inf for the first k_min planes. skip: the hull starts at 0 planes instead, and its first step is one of k_min planes or
    more, which count alike, so that a threshold gives all of them or none.
    """
    table = residuals.double().cpu()
    each = (table[:, :-1] - table[:, 1:]).clamp_min(0)
    planes = torch.arange(1, table.shape[1])
    if not skip:
        return each.masked_fill(planes <= k_min, float("inf"))
    mean = ((table[:, :1] - table[:, 1:]) / planes).clamp_min(0)[:, k_min - 1 :]
    steepest, at = mean.max(1, keepdim=True)
    return torch.where(planes <= at + k_min, steepest, each).cummin(1).values


def thresholds(worth: Tensor, level: float) -> Tensor:
    """What a squared gate must be above for each plane, fp32 [E, C]; worth as in `Layer`. Level 0 gives every plane to all."""
    if level == 0:
        return torch.full(worth.shape, ALWAYS)
    return (level / worth).masked_fill(torch.isinf(worth), ALWAYS).float()


def follow(shift: Tensor, chunks: Tensor, held: Tensor, target: Tensor) -> None:
    """Raise a layer's level by the planes per pair beyond its target: shift fp32 0-d, in octaves, is changed in place.

    chunks int [T, A]; held bool [T, A], False for padding; target fp32 0-d, planes per pair. One plane too many in WINDOW pairs
    or more is an octave. An octave takes half a plane off a pair, or less, so that this goes on without swinging until the
    average is met. No synchronisation.
    """
    beyond = (chunks - target * held).sum()
    shift.add_(beyond / held.sum().clamp_min(WINDOW)).clamp_(-FARTHEST, FARTHEST)


def curve(layers: Sequence[Layer]) -> Callable[[float], float]:
    """The function from a level to the planes per pair that it spends on the calibration pairs, which never rises.

    Gates inside of a bin count as spread evenly over it.
    """
    worth = torch.cat([layer.worth[:, : layer.k_max] for layer in layers])
    counts = torch.cat([layer.gate_counts for layer in layers]).double().cpu()
    above = torch.nn.functional.pad(counts.flip(1).cumsum(1).flip(1), (0, 1))  # [N, BINS + 1]: pairs from each edge on
    pairs = float(counts.sum())

    def mean(level: float) -> float:
        place = bin_of(thresholds(worth, level).clamp_min(0))
        first = place.long().clamp_max(BINS - 1)
        given = above.gather(1, first + 1) + (first + 1 - place) * counts.gather(1, first)
        return float(given.sum()) / max(pairs, 1.0)

    return mean


def level_for(layers: Sequence[Layer], budget: float) -> float:
    """The level that spends `budget` planes per pair on the calibration pairs; inf for the least, 0 for all planes."""
    mean = curve(layers)
    if budget <= mean(float("inf")):
        return float("inf")
    if budget >= mean(0):
        return 0.0
    low, high = -RANGE, RANGE
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(2.0**middle) > budget else (low, middle)
    return 2.0**high
