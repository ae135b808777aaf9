"""Triton kernels of `allocate_threshold`, where a pair compares its squared gate with its expert's thresholds, and `count`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpamoe.kernels.sizes import cdiv

BLOCK = 256  # pairs of one program


@triton.jit
def planes_above(gate, expert, thresholds, k_max, experts, row, column, C: tl.constexpr):
    """Planes of pairs, int32 of the shape of gate and expert: how many of C thresholds gate^2 is above, k_max at most.

    Pointers to thresholds fp32 [E, C], strides row and column, and to k_max int; 0 for an expert outside 0 … experts - 1.
    A gate that is not a number is above every threshold, as in `reference.allocate_threshold`.
    """
    held = (expert >= 0) & (expert < experts)
    own = thresholds + tl.where(held, expert, 0).to(tl.int32) * row
    bars = ()
    for c in tl.static_range(C):
        bars = bars + (tl.load(own + c * column),)
    return tl.where(held, tl.minimum(count_above(gate, bars), tl.load(k_max).to(tl.int32)), 0)


@triton.jit
def count_above(gate, bars):
    """How many thresholds, fp32 in a tuple, gate^2 is above, int32 of the shape of gate; one that is no number is above all."""
    square = gate.to(tl.float32) * gate.to(tl.float32)
    above = tl.where(square <= bars[0], 0, 1)
    for c in tl.static_range(1, len(bars)):
        above += tl.where(square <= bars[c], 0, 1)
    return above


@triton.jit(do_not_specialize=["pairs"])
def threshold_kernel(
    gates, expert_ids, thresholds, k_max, chunks, pairs, experts,
    gates_row, gates_column, ids_row, ids_column, thresholds_row, thresholds_column,
    spent, A: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Planes of BLOCK pairs, to chunks int32 [T, A]; with spent they are counted there."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, slot = (pair // A).to(tl.int64), pair % A
    expert = tl.load(expert_ids + token * ids_row + slot * ids_column, mask=pair < pairs, other=-1)
    gate = tl.load(gates + token * gates_row + slot * gates_column, mask=pair < pairs, other=0.0)
    k = planes_above(gate, expert, thresholds, k_max, experts, thresholds_row, thresholds_column, C)
    tl.store(chunks + pair, k, mask=pair < pairs)
    if spent is not None:
        add_counts(spent, tl.where(pair < pairs, k, -1), C)


@triton.jit
def add_counts(spent, k, C: tl.constexpr):
    """Add to spent int64 [C + 1] how often each number of planes, 0 to C, occurs in a block."""
    for c in tl.static_range(C + 1):
        number = tl.sum((k == c).to(tl.int32), 0)
        tl.atomic_add(spent + c, number.to(tl.int64), mask=number > 0, sem="relaxed")


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(chunks, spent, pairs, C: tl.constexpr, BLOCK: tl.constexpr):
    """Add to spent int64 [C + 1] how many of BLOCK pairs have each number of planes."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    add_counts(spent, tl.load(chunks + pair, mask=pair < pairs, other=-1), C)


def count(chunks: Tensor, spent: Tensor) -> None:
    """As `ops.count`, in one launch; tensors on one device."""
    if chunks.numel():
        chunks = chunks.contiguous()
        count_kernel[(cdiv(chunks.numel(), BLOCK),)](
            chunks, spent, chunks.numel(), C=spent.numel() - 1, BLOCK=BLOCK, num_warps=4
        )


def allocate_threshold(
    gates: Tensor, expert_ids: Tensor, thresholds: Tensor, k_max: Tensor, spent: Tensor | None = None
) -> Tensor:
    """Planes per selected expert, int32 [T, A], in one launch; shapes as in `ops.allocate_threshold`, tensors on one device.

    spent: as `count` takes it, which is done on the way.
    """
    chunks = torch.empty(expert_ids.shape, dtype=torch.int32, device=expert_ids.device)
    if chunks.numel():
        threshold_kernel[(cdiv(chunks.numel(), BLOCK),)](
            gates, expert_ids, thresholds, k_max, chunks, chunks.numel(), thresholds.shape[0],
            *gates.stride(), *expert_ids.stride(), *thresholds.stride(), spent,
            A=expert_ids.shape[1], C=thresholds.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return chunks
