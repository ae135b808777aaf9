"""Prefill on Hopper in Gluon: a tile of pairs with several k unpacks its weights once.

A tile is P slices of up to S pairs of one expert, with one k in each, and BM = 16 NW rows of the weight. Weights are unpacked
plane by plane, and wherever a k is reached its slices are multiplied (warp-group products, whose left operand is unpacked in
registers as in `triton_prefill`). Planes come ahead into shared memory, x while weights are unpacked. What does not depend on
single weights, offset - sum of scales, is a product of its own over groups. Of a stretch of 128 W inputs, lane l of every four
takes words l W to l W + W - 1, so that it needs one scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dpamoe.kernels.hopper_unpack import (
    beside,
    fragment,
    fresh,
    left_layout,
    line_of,
    pair_layout,
    product_layout,
    word_layout,
    words_of,
)
from dpamoe.kernels.triton_activate import activate_gated, activate_plain
from dpamoe.kernels.triton_unpack import OFFSET_STEPS, add_plane, tied_scale, twice

# names of Triton 3.8 and later, else those of 3.6
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _scale(raw, unit, c: gl.constexpr, TIED: gl.constexpr):
    """Scale of plane c, fp32, from what is stored."""
    return tied_scale(raw, unit) * (0.5 ** (c + 1)) if TIED else raw.to(gl.float32)


@gluon.jit
def _columns(entry, P: gl.constexpr, S: gl.constexpr, layout: gl.constexpr):
    """Place in the sorted order of each column of the tile, and whether there is a pair; both [P S]."""
    column = gl.arange(0, P * S, layout)
    slice_of = entry + 2 + column // S
    n = gl.load(slice_of) + column % S
    return n, n < gl.load(slice_of + 1)


@gluon.jit
def _multiply(accs, operand, x, block: gl.constexpr, first: gl.constexpr, levels, level, P: gl.constexpr):
    """Add operand [BM, K] times K inputs, from `first` on, of a block of x to the slices of this level.

    x [blocks P, S, 128] in shared memory.
    """
    new = ()
    K: gl.constexpr = operand.shape[1]
    for j in gl.static_range(P):
        acc = accs[j]
        if (levels >> 4 * j) & 15 == level:
            acc = hopper.warpgroup_mma(operand, x.index(block * P + j).slice(first, K, 1).permute((1, 0)), acc)
        new = new + (acc,)
    return new


@gluon.jit
def _multiply_bases(
    accs, x, scales, offset, unit, power, line, group, levels, most, present,
    first: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Add offset - sum of scales of 16 groups times the sums of x over them, each as two fp16 numbers."""
    at, inside = line[:, None] * GROUPS + group[None, :], (line[:, None] >= 0) & (group < GROUPS)[None, :]
    base = gl.load(offset + at, mask=inside, other=0).to(gl.float32)
    for c in gl.static_range(C):
        raw = gl.load(scales[0 if TIED else c] + at, mask=inside & (c < most), other=0)
        if TIED and c == 0:
            base = base * (tied_scale(raw, unit) / OFFSET_STEPS)
        if c == 0 or c < most:
            base -= _scale(raw, unit, c, TIED)
            if (present >> (c + 1)) % 2 == 1:
                whole = base * (power * 16.0)
                high = whole.to(gl.float16)
                accs = _multiply(accs, high, x, 0, first, levels, c + 1, P)
                accs = _multiply(accs, high, x, 0, first + 16, levels, c + 1, P)
                low = (whole - high.to(gl.float32)).to(gl.float16)
                accs = _multiply(accs, low, x, 0, first, levels, c + 1, P)
    return accs


@gluon.jit
def _copy_planes(
    planes, word_at, scales, scale_at, plane_buffer, scale_buffer, stage, most, C: gl.constexpr, TIED: gl.constexpr
):  # fmt: skip
    """Ask for a stretch of every plane that is read, and its scales."""
    for c in gl.static_range(C):
        if c == 0 or c < most:
            plane = planes[c].to(gl.pointer_type(gl.int32))
            copy(plane_buffer.index(stage * C + c), plane + word_at)
            if c == 0 or not TIED:
                number = stage if TIED else stage * C + c
                copy(scale_buffer.index(number), scales[c] + scale_at)


@gluon.jit
def _read_plane(
    plane_buffer, scale_buffer, stage, c, W: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """The words of a stretch of plane c, W tensors [BM, 4] int32, and their stored scale [BM, 4]."""
    lanes: gl.constexpr = word_layout(NW, 1)
    words = words_of(plane_buffer.index(stage * C + c).load(word_layout(NW, W)), W, 16 * NW, lanes)
    stored = scale_buffer.index(stage if TIED else stage * C + c)
    if stored.shape[1] == 4:
        raw = stored.load(lanes)
    else:  # one for two lanes
        raw = stored.load(gl.SliceLayout(2, pair_layout(NW)))[:, :, None].broadcast_to([16 * NW, 2, 2])
        raw = gl.convert_layout(raw.reshape(16 * NW, 4), lanes, assert_trivial=True)
    return words, raw


@gluon.jit
def _chosen(words, w, B: gl.constexpr, W: gl.constexpr):
    """The words of B blocks from w on: all of a stretch, or one."""
    if B == W:
        chosen = words
    elif W == 2:
        chosen = (gl.where(w == 0, words[0], words[1]),)
    else:
        chosen = (gl.where(w < 2, gl.where(w == 0, words[0], words[1]), gl.where(w == 2, words[2], words[3])),)
    return chosen


@gluon.jit
def _multiply_blocks(
    accs, x, arrived, phase, plane_buffer, scale_buffer, stage, w, unit, power, levels, most, present, W: gl.constexpr,
    B: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr, NW: gl.constexpr, P: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Unpack B blocks of the weight, without their offsets, plane by plane, and multiply where pairs stop."""
    BM: gl.constexpr = 16 * NW
    parts = ((gl.full((BM, 4), 0, gl.int32, word_layout(NW, 1)),) * 16,) * B
    words, raw = _read_plane(plane_buffer, scale_buffer, stage, 0, W, C, TIED, NW)
    words = _chosen(words, w, B, W)
    share = power * 2.0**14
    for c in range(most):
        later, raw_later = _read_plane(plane_buffer, scale_buffer, stage, gl.minimum(c + 1, C - 1), W, C, TIED, NW)
        if TIED:
            share = share * 0.5
            scale = tied_scale(raw, unit)
        else:
            scale = raw.to(gl.float32)
        pairs, new = twice(scale * share, True), ()
        for i in gl.static_range(B):
            new = new + (add_plane(parts[i], words[i], pairs, True),)
        parts, words, raw = new, _chosen(later, w, B, W), raw_later
        if (present >> (c + 1)) % 2 == 1:
            hopper.mbarrier.wait(arrived, phase)
            for i in gl.static_range(B):
                accs = _multiply(accs, fragment(parts[i], BM, left), x, i, 0, levels, c + 1, P)
    return accs


@gluon.jit
def _ask(x, starts, first, blocks: gl.constexpr, buffer, arrived, P: gl.constexpr, S: gl.constexpr):
    """Ask for blocks of 128 inputs of every slice, from input `first` on."""
    hopper.mbarrier.expect(arrived, blocks * P * S * 256)
    for i in gl.static_range(blocks):
        for j in gl.static_range(P):
            load_tile(x, [starts[j], first + i * 128], arrived, buffer.index(i * P + j))


@gluon.jit
def _store(
    acc, back, factor, order, bias, out, block, expert, entry,
    OUT: gl.constexpr, BIAS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, TARGET: gl.constexpr,
    BM: gl.constexpr, P: gl.constexpr, S: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Bias, activation and the rows of `out`."""
    HALF: gl.constexpr = OUT // 2
    BN: gl.constexpr = P * S
    n, live = _columns(entry, P, S, gl.SliceLayout(0, acc.type.layout))
    result = acc * (back * gl.load(factor + n, mask=live, other=0.0))[None, :]
    if GATED:
        gate, up = gl.split(result.reshape(BM // 16, 2, 8, BN).permute(0, 2, 3, 1))
        gate, up = gate.reshape(BM // 2, BN), up.reshape(BM // 2, BN)
        if BIAS:
            row = block * (BM // 2) + gl.arange(0, BM // 2, gl.SliceLayout(1, gate.type.layout))
            own = bias + expert * OUT + row
            gate += gl.load(own, mask=row < HALF, other=0.0).to(gl.float32)[:, None]
            up += gl.load(own + HALF, mask=row < HALF, other=0.0).to(gl.float32)[:, None]
        result = activate_gated(gate, up, ACT)
    else:
        if BIAS:
            row = block * BM + gl.arange(0, BM, gl.SliceLayout(1, acc.type.layout))
            result += gl.load(bias + expert * OUT + row, mask=row < OUT, other=0.0).to(gl.float32)[:, None]
        result = activate_plain(result, ACT)
    R: gl.constexpr = BM // 2 if GATED else BM
    width: gl.constexpr = HALF if GATED else OUT
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
    whole = gl.convert_layout(result.to(out.dtype.element_ty), layout)
    n, live = _columns(entry, P, S, gl.SliceLayout(0, layout))
    target = n
    if TARGET:
        target = gl.load(order + n, mask=live, other=0)
    row = block * R + gl.arange(0, R, gl.SliceLayout(1, layout))
    at = target[None, :].to(gl.int64) * width + row[:, None]
    gl.store(out + at, whole, mask=live[None, :] & (row < width)[:, None])


@gluon.jit
def _slices(entry, rows, P: gl.constexpr):
    """Beginnings of the slices of a tile, their k in 4 bits each, the largest, and a mask with bit k for each."""
    starts, levels, most, present = (), gl.load(entry) * 0, gl.load(entry) * 0, gl.load(entry) * 0
    for j in gl.static_range(P):
        level = gl.load(entry + (3 + P + j))
        starts = starts + (gl.where(level > 0, gl.load(entry + (2 + j)), rows),)  # beyond the rows nothing is read
        levels = levels | (level << 4 * j)
        most = gl.maximum(most, level)
        present = present | (1 << level)
    return starts, levels, most, present


@gluon.jit
def _offsets(expert, block, copied, width, BM: gl.constexpr, OUT: gl.constexpr, COUNT: gl.constexpr, GATED: gl.constexpr):
    """Where the first COUNT of `width` things in a row stand, for each row of the tile: int64 [BM, COUNT]."""
    line = expert.to(gl.int64) * OUT + line_of(block, gl.SliceLayout(1, copied), BM, OUT, GATED)
    return line[:, None] * width + gl.arange(0, COUNT, gl.SliceLayout(0, copied))[None, :]


@gluon.jit
def _all_bases(
    x, starts, buffer, arrived, scales, offset, unit, power, expert, block, levels, most, present,
    OUT: gl.constexpr, IN: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr, GATED: gl.constexpr,
    P: gl.constexpr, S: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """The products of the offsets, fp32 [BM, S] for each slice."""
    left: gl.constexpr = left_layout(NW, S)
    CHUNKS: gl.constexpr = (GROUPS + 15) // 16
    accs = (gl.zeros((16 * NW, S), gl.float32, product_layout(NW, S)),) * P
    line = expert.to(gl.int64) * OUT + line_of(block, gl.SliceLayout(1, left), 16 * NW, OUT, GATED)
    group = gl.arange(0, 16, gl.SliceLayout(0, left))
    for b in range((CHUNKS + 3) // 4):  # four stand in a block
        barrier()
        _ask(x, starts, IN + b * 128, 1, buffer, arrived, P, S)
        hopper.mbarrier.wait(arrived, b % 2)
        barrier()
        for i in gl.static_range(min(4, CHUNKS)):
            accs = _multiply_bases(
                accs, buffer, scales, offset, unit, power, line, 64 * b + 16 * i + group, levels, most, present,
                32 * i, GROUPS, C, TIED, P,
            )  # fmt: skip
    return accs


@gluon.jit
def _all_blocks(
    x, starts, buffer, arrived, planes, scales, offset, unit, power, expert, block, levels, most, present,
    OUT: gl.constexpr, IN: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr,
    GATED: gl.constexpr, P: gl.constexpr, S: gl.constexpr, W: gl.constexpr, B: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """W_k x of a tile, fp32 [BM, S] for each slice."""
    OWN: gl.constexpr = 128 * W // GROUP  # groups in a stretch
    word_copy: gl.constexpr = gl.BlockedLayout([1, 4], [32 // W, W], [NW, 1], [1, 0])
    size: gl.constexpr = 32 // scales[0].dtype.element_ty.primitive_bitwidth  # scales in 4 bytes, the least that is copied
    scale_copy: gl.constexpr = gl.BlockedLayout([1, size], [32, 1], [NW, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plane_buffer = gl.allocate_shared_memory(gl.int32, [2 * C, 16 * NW, 4 * W], plain)
    kept: gl.constexpr = 2 if TIED else 2 * C
    scale_buffer = gl.allocate_shared_memory(scales[0].dtype.element_ty, [kept, 16 * NW, OWN], plain)
    word_at = _offsets(expert, block, word_copy, IN // 32, 16 * NW, OUT, 4 * W, GATED)
    scale_at = _offsets(expert, block, scale_copy, GROUPS, 16 * NW, OUT, OWN, GATED)
    _copy_planes(planes, word_at, scales, scale_at, plane_buffer, scale_buffer, 0, most, C, TIED)
    async_copy.commit_group()
    accs = _all_bases(
        x, starts, buffer, arrived, scales, offset, unit, power, expert, block, levels, most, present,
        OUT, IN, GROUPS, C, TIED, GATED, P, S, NW,
    )  # fmt: skip
    for b in range(0, IN // 128, B):
        async_copy.wait_group(0)
        barrier()
        _ask(x, starts, b * 128, B, buffer, arrived, P, S)
        if IN // 128 > W:  # noqa: SIM102  Triton 3.6 cannot compile a copy that turns out never to run
            if (b % W == 0) & (b + W < IN // 128):
                word_at, scale_at = fresh(word_at, 4 * W, 4), fresh(scale_at, OWN, size)
                _copy_planes(planes, word_at, scales, scale_at, plane_buffer, scale_buffer, (b // W + 1) % 2, most, C, TIED)
        async_copy.commit_group()
        barrier()  # else the compiler sets one in front of every product
        accs = _multiply_blocks(
            accs, buffer, arrived, (b // B + (GROUPS + 63) // 64) % 2, plane_buffer, scale_buffer, b // W % 2, b % W, unit,
            power, levels, most, present, W, B, C, TIED, NW, P, left_layout(NW, S),
        )  # fmt: skip
    return accs


@gluon.jit(do_not_specialize=["rows"])
def hopper_prefill_kernel(
    x, factor, order, tiles, peaks, rows, planes, scales, offset, unit, bias, out,
    OUT: gl.constexpr, IN: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, TARGET: gl.constexpr,
    P: gl.constexpr, S: gl.constexpr, W: gl.constexpr, B: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """One tile of P slices of up to S pairs: out[row of the pair] = act(W_k x + bias).

    x: descriptor of the prepared rows [rows, IN and the sums], in sorted order. B: blocks of 128 inputs at once, W or 1.
    """
    BM: gl.constexpr = 16 * NW
    blocks: gl.constexpr = (OUT + BM - 1) // BM
    block, entry = gl.program_id(0) % blocks, tiles + gl.program_id(0) // blocks * (3 + 2 * P)
    expert = gl.load(entry)
    if expert < 0:
        return
    starts, levels, most, present = _slices(entry, rows, P)
    power, tied_unit = gl.load(peaks + expert), 0.0
    if TIED:
        tied_unit = gl.load(unit + expert)
    buffer = gl.allocate_shared_memory(gl.float16, [B * P, S, 128], gl.NVMMASharedLayout(128, 16, 2))
    arrived = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(arrived, count=1)
    accs = _all_blocks(
        x, starts, buffer, arrived, planes, scales, offset, tied_unit, power, expert, block, levels, most, present,
        OUT, IN, GROUPS, GROUP, C, TIED, GATED, P, S, W, B, NW,
    )  # fmt: skip
    _store(
        beside(accs, BM, P * S), 1.0 / power, factor, order, bias, out, block, expert, entry,
        OUT, BIAS, ACT, GATED, TARGET, BM, P, S, NW,
    )  # fmt: skip
