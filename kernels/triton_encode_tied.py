"""Encode in Triton with tied scales: one 8-bit scale and offset per group, clips searched (DPA-MoE, section 3.1)."""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from dpamoe.kernels.triton_encode import (
    INTEGERS,
    POINTERS,
    encode_with,
    extremes,
    grid,
    load_groups,
    objective,
    over_group,
    prefix_weights,
    shares,
)
from dpamoe.kernels.triton_unpack import OFFSET_STEPS, STEPS_PER_OCTAVE, TOP_CODE, tied_scale

CLIPS = tl.constexpr(11)
CLIP_STEP = tl.constexpr(0.05)
LEAST = tl.constexpr(2.0**-126)  # of normal fp32 numbers


@triton.jit
def rounded_levels(middle, half, mean, clip):
    """Codes of the scale, rounded up, and of the offset of one clip, as whole fp32 numbers."""
    reach = tl.abs(middle) * (OFFSET_STEPS / 127.0)  # the offset ends at 127 steps: a nearly constant group needs this scale
    wanted = tl.maximum(half * clip, tl.where(half * clip < reach, tl.maximum(half, reach), 0.0))
    code = tl.ceil(tl.log2(tl.maximum(wanted, LEAST)) * STEPS_PER_OCTAVE + TOP_CODE)
    code = tl.where(wanted > 0, tl.minimum(tl.maximum(code, 1.0), TOP_CODE), 0.0)
    scale = tied_scale(code, 1.0)
    steps = tl.floor((middle * clip + mean * (1.0 - clip)) / tl.maximum(scale, LEAST) * OFFSET_STEPS + 0.5)
    return code, tl.where(scale > 0, tl.minimum(tl.maximum(steps, -128.0), 127.0), 0.0), scale


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def fit_tied(
    weight, scales, offset, unit, total, out_features, in_features, groups, stride_e, stride_o, stride_i, beta,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, K_MIN: tl.constexpr,
):  # fmt: skip
    """Codes of the scale and offset of the `total` groups of a stacked weight."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    x, live = load_groups(
        weight, total, out_features, in_features, groups, stride_e, stride_o, stride_i, GROUP, WIDTH, PARTS, WHOLE, BLOCK
    )
    expert = tl.minimum(number, total - 1) // groups // out_features
    x = x / tl.load(unit + expert)  # so that no square leaves the range of fp32
    low, high = extremes(x, live)
    middle, half = (low + high) * 0.5, (high - low) * 0.5
    mean = over_group(x) / over_group(live.to(tl.int32)).to(tl.float32)
    weights = prefix_weights(beta, K)
    best = over_group(x * x) * shares(weights, K, K_MIN)[0]
    best_code, best_steps = tl.zeros(best.shape, tl.float32), tl.zeros(best.shape, tl.float32)
    for step in range(CLIPS):
        code, steps, scale = rounded_levels(middle, half, mean, 1.0 - step * CLIP_STEP)
        error = objective(x, live, grid(steps * (scale / OFFSET_STEPS), scale, K), weights, K, K_MIN)
        best_code, best_steps = tl.where(error < best, code, best_code), tl.where(error < best, steps, best_steps)
        best = tl.minimum(error, best)
    tl.store(scales[0] + number, best_code.to(tl.int32).to(tl.uint8), mask=number < total)
    tl.store(offset + number, best_steps.to(tl.int32).to(tl.int8), mask=number < total)


def encode_tied(
    weight: Tensor, planes: list[Tensor], scales: list[Tensor], offset: Tensor, unit: Tensor, group_size: int,
    k_min: int, beta: float, progress: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Encode a stacked weight with one scale per group, as `dpamoe.encode` does, into tensors of its layout.

    As `triton_encode.encode_shared`, but scales: one contiguous uint8 [E, O, G]; offset: contiguous int8 [E, O, G]; unit: fp32
    [E], at least the largest magnitude of each expert and above 0. Source: DPA-MoE, section 3.1.
    """
    encode_with(fit_tied, (k_min,), weight, planes, scales, offset, unit, group_size, beta, progress)
