"""Encode in Triton: scales of every group fitted in registers, then the planes written byte by byte (DPA-MoE, section 3.1).

A program holds BLOCK groups as [WIDTH, BLOCK, PARTS]: input PARTS index * WIDTH + WIDTH index of a group. The first axis lies
within a thread, so that the signs of a plane are one word of WIDTH <= 32 bits there, two planes meet in one popcount, and sums
over a group cross few threads. What belongs to a group is [1, BLOCK, 1]. Levels are a tuple: the offset, then K scales.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpamoe.kernels.layout import group_width
from dpamoe.kernels.sizes import cdiv, next_power_of_2
from dpamoe.kernels.triton_unpack import OFFSET_STEPS, tied_scale

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
THREADS = 128  # parts of groups in one program
PART = 16  # inputs in a part: with 32, registers spill on some devices
WIDEST_GROUP = 4096  # THREADS parts of 32, which is what a word holds
WRITE_BYTES = 256  # bytes of each plane in one program
LAUNCH_WEIGHTS = 1 << 26  # a few milliseconds, so that progress is seen
INTEGERS = (  # one binary for all shapes, so that a row alone is computed as in a batch
    "total", "out_features", "in_features", "groups", "stride_e", "stride_o", "stride_i",
)  # fmt: skip
POINTERS = ("weight", "planes", "scales", "offset", "unit")

CLIP_STARTS = tl.constexpr(6)
CLIP_STEP = tl.constexpr(0.1)
RIDGE = tl.constexpr(1e-5)
NOISE = tl.constexpr(1e-6)
SIGN = tl.constexpr(0x80000000)


@triton.constexpr_function
def below(row, column):
    """Where (row, column) of a strictly lower triangle lies, rows laid end to end."""
    return row * (row - 1) // 2 + column


@triton.jit
def bits_of(value):
    """The bits of fp32 numbers, uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def take_plane(rest, scale):
    """What a plane of this scale >= 0 and the sign of `rest` leaves of it."""
    return rest - (bits_of(scale) | (bits_of(rest) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def popcount(bits):
    """Set bits of uint32 words, int32; in the form that compilers know as one instruction."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def over_parts(values):
    """Sum over the last axis, kept."""
    return tl.sum(values, 2, keep_dims=True)


@triton.jit
def over_group(values):
    """Sum over the inputs of each group, [1, BLOCK, 1]."""
    return over_parts(tl.sum(values, 0, keep_dims=True))


@triton.jit
def load_groups(
    weight, total, out_features, in_features, groups, stride_e, stride_o, stride_i,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The groups of this program, counted along the rows of a stacked weight: fp32, 0 where `live` is not; and `live`.

    Loaded as one row of all, whose layout over threads compilers agree on: only its slowest axis lies within a thread.
    """
    flat = tl.arange(0, WIDTH * BLOCK * PARTS)
    part = flat % (BLOCK * PARTS)
    number = tl.minimum(tl.program_id(0) * BLOCK + part // PARTS, total - 1)
    row, group = number // groups, number % groups
    place = flat // (BLOCK * PARTS) + part % PARTS * WIDTH
    column = group * GROUP + place
    line = (row // out_features).to(tl.int64) * stride_e + (row % out_features).to(tl.int64) * stride_o
    live = tl.full(flat.shape, 1, tl.int1) if WHOLE else (place < GROUP) & (column < in_features)
    x = tl.load(weight + (line + column.to(tl.int64) * stride_i), mask=live, other=0.0).to(tl.float32)
    return x.reshape(WIDTH, BLOCK, PARTS), live.reshape(WIDTH, BLOCK, PARTS)


@triton.jit
def extremes(x, live):
    """Smallest and largest weight of each group."""
    low = tl.min(tl.where(live, x, float("inf")), 0, keep_dims=True)
    high = tl.max(tl.where(live, x, float("-inf")), 0, keep_dims=True)
    return tl.min(low, 2, keep_dims=True), tl.max(high, 2, keep_dims=True)


@triton.jit
def prefix_weights(beta, K: tl.constexpr):
    """Weights beta^(k - K) of the prefixes k = 1 ... K in the fit."""
    weights = (beta * 0.0 + 1.0,)
    for _ in tl.static_range(K - 1):
        weights = (weights[0] / beta,) + weights
    return weights


@triton.jit
def shares(weights, K: tl.constexpr, K_MIN: tl.constexpr):
    """Summed weight of all prefixes that hold the offset, then each plane."""
    held = (weights[K - 1],)
    for p in tl.static_range(1, K):
        held = ((held[0] + weights[K - 1 - p]) if K - p >= K_MIN else held[0],) + held
    return (held[0],) + held


@triton.jit
def objective(x, live, levels, weights, K: tl.constexpr, K_MIN: tl.constexpr):
    """Weighted squared error of all prefixes of each group, codes by successive sign."""
    rest, error = x - levels[0], 0.0
    for p in tl.static_range(K):
        rest = take_plane(rest, levels[p + 1])
        if p + 1 >= K_MIN:
            error += tl.sum(tl.where(live, rest * rest, 0.0), 0, keep_dims=True) * weights[p]
    return over_parts(error)


@triton.jit
def moments(x, live, levels, weights, K: tl.constexpr, K_MIN: tl.constexpr):
    """As `objective`; also, of each plane, its codes as words [1, BLOCK, PARTS] with 1 for -1, and the sum of code * weight."""
    rest, error = x - levels[0], 0.0
    place = tl.arange(0, x.shape[0])[:, None, None].to(tl.uint32)
    known = tl.sum(live.to(tl.uint32) << place, 0, keep_dims=True)
    words, sums = (), ()
    for p in tl.static_range(K):
        sign = bits_of(rest) & SIGN
        words = words + (tl.sum((sign >> 31) << place, 0, keep_dims=True) & known,)
        sums = sums + (over_group((bits_of(x) ^ sign).to(tl.float32, bitcast=True)),)
        rest = take_plane(rest, levels[p + 1])
        if p + 1 >= K_MIN:
            error += tl.sum(tl.where(live, rest * rest, 0.0), 0, keep_dims=True) * weights[p]
    return over_parts(error), words, sums


@triton.jit
def correlations(words, size, K: tl.constexpr):
    """Mean products of codes, as the strictly lower triangle of the constant 1 and the K planes."""
    step = -2.0 / size
    triangle = ()
    for i in tl.static_range(K):
        triangle = triangle + (over_parts(popcount(words[i])).to(tl.float32) * step + 1.0,)
        for j in tl.static_range(i):
            triangle = triangle + (over_parts(popcount(words[i] ^ words[j])).to(tl.float32) * step + 1.0,)
    return triangle


@triton.jit
def cholesky_solve(triangle, diagonal, target, N: tl.constexpr):
    """Solution of a symmetric system of N unknowns; not finite where it is not definite."""
    factor, inverse, forward = (), (), ()
    for i in tl.static_range(N):
        y = target[i]
        pivot = tl.zeros(y.shape, tl.float32) + diagonal[i]
        for j in tl.static_range(i):
            value = triangle[below(i, j)]
            for k in tl.static_range(j):
                value -= factor[below(i, k)] * factor[below(j, k)]
            value *= inverse[j]
            factor = factor + (value,)
            pivot -= value * value
            y -= value * forward[j]
        inverse = inverse + (tl.rsqrt(pivot),)
        forward = forward + (y * inverse[i],)
    solved = ()
    for later in tl.static_range(N):
        y = forward[N - 1 - later]
        for k in tl.static_range(later):
            y -= factor[below(N - later + k, N - 1 - later)] * solved[k]
        solved = (y * inverse[N - 1 - later],) + solved
    return solved


@triton.jit
def insert(ordered, value, COUNT: tl.constexpr):
    """Add a value to COUNT descending ones."""
    longer = ()
    for i in tl.static_range(COUNT):
        longer = longer + (tl.maximum(ordered[i], value),)
        value = tl.minimum(ordered[i], value)
    return longer + (value,)


@triton.jit
def least_squares(words, sums, size, levels, share, K: tl.constexpr):
    """Best levels, scales descending, for fixed codes over all prefixes; the given ones where the solve fails.

    sums: of each group's weights, then of each plane's code * weight. Row i >= j of the system, divided by the size of the
    group: share_i * correlation of i and j, with a ridge towards the given levels; the offset's code is 1.
    """
    plain = correlations(words, size, K)
    triangle, diagonal, target = (), (), ()
    for i in tl.static_range(K + 1):
        diagonal = diagonal + (share[i] * (1.0 + RIDGE),)
        target = target + ((sums[i] / size + levels[i] * RIDGE) * share[i],)
        for j in tl.static_range(i):
            triangle = triangle + (plain[below(i, j)] * share[i],)
    solved = cholesky_solve(triangle, diagonal, target, K + 1)
    check = tl.zeros(size.shape, tl.float32)
    for i in tl.static_range(K + 1):
        check += tl.abs(solved[i])
    good = check < float("inf")
    scales = ()
    for p in tl.static_range(K):
        scales = insert(scales, tl.where(good, tl.abs(solved[p + 1]), levels[p + 1]), p)
    return (tl.where(good, solved[0], levels[0]),) + scales


@triton.jit
def grid(offset, scale, K: tl.constexpr):
    """Levels of a uniform grid: scales that halve, from half of `scale`."""
    levels = (offset,)
    for p in tl.static_range(K):
        levels = levels + (scale * 0.5 ** (p + 1),)
    return levels


@triton.jit
def clipped_grid(x, live, mean, weights, K: tl.constexpr, K_MIN: tl.constexpr):
    """Levels of a uniform grid with the best clip of each group."""
    clip = tl.full(mean.shape, 1.0, tl.float32)
    best = tl.full(mean.shape, float("inf"), tl.float32)
    for step in range(CLIP_STARTS):
        trial = tl.zeros(mean.shape, tl.float32) + (1.0 - step * CLIP_STEP)
        error = objective(x, live, grid(mean * (1.0 - trial), trial, K), weights, K, K_MIN)
        clip = tl.where(error < best, trial, clip)
        best = tl.minimum(error, best)
    return grid(mean * (1.0 - clip), clip, K)


@triton.jit
def alternate(x, live, beta, K: tl.constexpr, K_MIN: tl.constexpr, ITERATIONS: tl.constexpr):
    """Levels of normalised groups: the best of a geometric start and ITERATIONS rounds of least squares."""
    weights = prefix_weights(beta, K)
    share = shares(weights, K, K_MIN)
    size, total = over_group(live.to(tl.int32)).to(tl.float32), over_group(x)
    levels = clipped_grid(x, live, total / size, weights, K, K_MIN)
    chosen, best = levels, tl.full(size.shape, float("inf"), tl.float32)
    for _ in range(ITERATIONS + 1):
        error, words, sums = moments(x, live, levels, weights, K, K_MIN)
        kept = ()
        for i in tl.static_range(K + 1):
            kept = kept + (tl.where(error < best, levels[i], chosen[i]),)
        chosen, best = kept, tl.minimum(error, best)
        levels = least_squares(words, (total,) + sums, size, levels, share, K)
    return chosen


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def fit_shared(
    weight, scales, offset, unit, total, out_features, in_features, groups, stride_e, stride_o, stride_i, beta,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, K_MIN: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Scales and offset of the `total` groups of a stacked weight; unit is None."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    x, live = load_groups(
        weight, total, out_features, in_features, groups, stride_e, stride_o, stride_i, GROUP, WIDTH, PARTS, WHOLE, BLOCK
    )
    low, high = extremes(x, live)
    middle, half = (low + high) * 0.5, (high - low) * 0.5
    constant = half <= tl.abs(middle) * NOISE
    half = tl.where(constant, 1.0, half)
    levels = alternate(tl.where(live, (x - middle) / half, 0.0), live, beta, K, K_MIN, ITERATIONS)
    zero = tl.where(constant, middle, middle + levels[0] * half)
    tl.store(offset + number, zero.to(offset.dtype.element_ty), mask=number < total)
    for p in tl.static_range(K):
        scale = tl.where(constant, 0.0, levels[p + 1] * half)
        tl.store(scales[p] + number, scale.to(offset.dtype.element_ty), mask=number < total)


@triton.jit
def load_levels(scales, offset, unit, at, expert, inside, K: tl.constexpr):
    """Levels of stored groups, fp32; unit is None unless scales are tied."""
    zero = tl.load(offset + at, mask=inside, other=0).to(tl.float32)
    if unit is not None:
        own_unit = tl.load(unit + expert, mask=inside, other=0.0)
        scale = tied_scale(tl.load(scales[0] + at, mask=inside, other=0), own_unit)
        levels = grid(zero * (scale / OFFSET_STEPS), scale, K)
    else:
        levels = (zero,)
        for p in tl.static_range(K):
            levels = levels + (tl.load(scales[p] + at, mask=inside, other=0.0).to(tl.float32),)
    return levels


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def write_planes(
    weight, planes, scales, offset, unit, total, out_features, in_features, groups, stride_e, stride_o, stride_i,
    GROUP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The codes of `total` bytes of each plane by successive sign, from the levels as they are stored."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = (in_features + 7) // 8
    row, byte = number // width, number % width
    expert = row // out_features
    line = expert.to(tl.int64) * stride_e + (row % out_features).to(tl.int64) * stride_o
    packed = ()
    for _ in tl.static_range(K):
        packed = packed + (tl.zeros((BLOCK,), tl.uint32),)
    for t in tl.static_range(8):
        column = byte * 8 + t
        inside = (number < total) & (column < in_features)
        if t == 0 or GROUP % 8 != 0:
            levels = load_levels(scales, offset, unit, row * groups + column // GROUP, expert, inside, K)
        x = tl.load(weight + (line + column.to(tl.int64) * stride_i), mask=inside, other=0.0)
        rest = x.to(tl.float32) - levels[0]
        longer = ()
        for p in tl.static_range(K):
            positive = (bits_of(rest) >> 31) ^ 1
            longer = longer + (packed[p] | tl.where(inside, positive << t, 0),)
            rest = take_plane(rest, levels[p + 1])
        packed = longer
    for p in tl.static_range(K):
        tl.store(planes[p] + number, packed[p].to(tl.uint8), mask=number < total)


def supports(weight: Tensor, group_size: int) -> bool:
    """Whether these kernels can encode a stacked weight [E, O, I]: fp32, fp16 or bf16, groups of at most 4096 inputs."""
    return weight.dtype in DTYPES and weight.numel() > 0 and group_width(weight.shape[2], group_size) <= WIDEST_GROUP


def encode_shared(
    weight: Tensor, planes: list[Tensor], scales: list[Tensor], offset: Tensor, group_size: int,
    k_min: int, beta: float, iterations: int, progress: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Encode a stacked weight with one scale per plane and group, as `dpamoe.encode` does, into tensors of its layout.

    weight: [E, O, I] that `supports` accepts, finite, any strides. planes: K contiguous uint8 [E, O, ceil(I / 8)]; scales: K
    contiguous [E, O, G]; offset: contiguous [E, O, G], all of its dtype (fp16, or fp32 where fp16 cannot hold the range), all
    on the device of the weight. k_min, beta, iterations: as in `EncodeSpec`. progress: called with the number of weights of
    each launch. No work space; no row depends on another. Validates nothing. Source: DPA-MoE, section 3.1.
    """
    encode_with(fit_shared, (k_min, iterations), weight, planes, scales, offset, None, group_size, beta, progress)


def encode_with(
    fit, settings: tuple, weight: Tensor, planes: list[Tensor], scales: list[Tensor], offset: Tensor, unit: Tensor | None,
    group_size: int, beta: float, progress: Callable[[int], None] | None,
) -> None:  # fmt: skip
    """Run a kernel that fits levels, then the one that writes planes, on a few experts at a time.

    settings: the last arguments of `fit`. The others are those of `encode_shared`.
    """
    experts, out_features, in_features = weight.shape
    group, groups, width = group_width(in_features, group_size), offset.shape[-1], planes[0].shape[-1]
    padded = next_power_of_2(group)
    word, whole = min(padded, max(PART, padded // THREADS)), padded * groups == in_features
    block = max(1, THREADS * word // padded)
    step = max(1, LAUNCH_WEIGHTS // (out_features * in_features))
    count = len(planes)
    for first in range(0, experts, step):
        part, own_offset, *own = (tensor[first : first + step] for tensor in (weight, offset, *planes, *scales))
        levels = tuple(own[count:]), own_offset, None if unit is None else unit[first : first + step]
        rows, shape = part.shape[0] * out_features, (out_features, in_features, groups, *part.stride())
        with torch.cuda.device_of(weight):
            fit[(cdiv(rows * groups, block),)](
                part, *levels, rows * groups, *shape, float(beta),
                group, word, padded // word, whole, block, count, *settings, num_warps=4,
            )  # fmt: skip
            write_planes[(cdiv(rows * width, WRITE_BYTES),)](
                part, tuple(own[:count]), *levels, rows * width, *shape, group, count, WRITE_BYTES, num_warps=4
            )
        if progress is not None:
            progress(part.numel())
