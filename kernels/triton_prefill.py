"""Prefill in Triton: many tokens per expert, planes unpacked in registers to the operand of the matrix unit.

Pairs are sorted by expert and k (`triton_sort`); a tile is up to BN of them for one expert, and BM of its rows. A thread
unpacks just the weights that it holds as matrix-unit operand, so that nothing passes through shared memory: of a stretch of
128 inputs, lane l of every four takes word l, and x is reordered to match (`triton_sort.prepare_kernel`). A weight is
offset - sum of scales + sum of 2 * scale * bit, held as fp16 times a power of two per expert (`triton_sort`) and
2^(place - 11).
"""

import triton
import triton.language as tl

from dpamoe.kernels.triton_activate import activate_gated, activate_plain
from dpamoe.kernels.triton_unpack import (
    OFFSET_STEPS,
    add_pairs,
    add_plane,
    bits_beside,
    tied_scale,
    twice,
)


@triton.jit
def _fragment(p, R1: tl.constexpr, NW: tl.constexpr):
    """16 tensors of fp16 pairs [N], one per bit, as the left operand [16 NW R1, 128]; no data moves."""
    whole = bits_beside(p).reshape(R1, 2, NW, 8, 4, 2, 2, 2, 2, 2)  # parts of the row, lane, bits 0 to 3 of s, half
    return whole.permute(0, 2, 1, 3, 8, 7, 6, 5, 4, 9).reshape(16 * NW * R1, 128)


@triton.jit
def _read_scales(scales, offset, group, most, TIED: tl.constexpr, C: tl.constexpr):
    """Offset and scales of one stretch as they are stored, each [N]; tied: one scale."""
    raw, every = (tl.load(offset + group),), tl.zeros_like(group) + most
    if TIED:
        raw = raw + (tl.load(scales[0] + group),)
    else:
        for c in tl.static_range(C):
            raw = raw + (tl.load(scales[c] + group, mask=c < every, other=0.0),)
    return raw


@triton.jit
def _offset(raw, unit, power, TIED: tl.constexpr):
    """Offset times the expert's power of two, and the tied scale likewise; fp32 [N]."""
    zero = raw[0].to(tl.float32) * power
    scale = zero
    if TIED:
        scale = tied_scale(raw[1], unit) * power
        zero = raw[0].to(tl.float32) * (scale / OFFSET_STEPS)
    return zero, scale


@triton.jit
def _scale(raw, tied, power, c: tl.constexpr, TIED: tl.constexpr):
    """Scale of plane c times the expert's power of two, fp32 [N]."""
    if TIED:
        scale = tied * (0.5 ** (c + 1))
    else:
        scale = raw[c + 1].to(tl.float32) * power
    return scale


@triton.jit
def _start(base, ASM: tl.constexpr):
    """base * 2^(place - 11) for each of the 16 bits, fp16 pairs."""
    p4 = twice(base * (2.0**-7), ASM)
    p5 = add_pairs(p4, p4, ASM)
    p6 = add_pairs(p5, p5, ASM)
    p7 = add_pairs(p6, p6, ASM)
    p8 = add_pairs(p7, p7, ASM)
    p9 = add_pairs(p8, p8, ASM)
    p10 = add_pairs(p9, p9, ASM)
    p11 = add_pairs(p10, p10, ASM)
    return p8, p9, p10, p11, p4, p5, p6, p7, p8, p9, p10, p11, p4, p5, p6, p7


@triton.jit
def _read_words(planes, line, u, lane, most, WORDS: tl.constexpr, C: tl.constexpr):
    """This thread's word of every plane in stretch u, int32 [N] each."""
    words, word, every = (), u * 4 + lane, tl.zeros_like(lane) + most
    at = tl.max_contiguous(line * WORDS + word, [1])  # a thread takes one word, as the matrix unit wants it
    for c in tl.static_range(C):
        words = words + (tl.load(planes[c] + at, mask=(word < WORDS) & (c < every), other=0),)
    return words


@triton.jit
def _read_x(x, sources, step, first, end, SUB: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """128 inputs of the tile's rows of x, fp16 [128, SUB] for each part."""
    xs = ()
    for j in tl.static_range(PARTS):
        live = first + j * SUB + tl.arange(0, SUB) < end
        at = sources[j][None, :].to(tl.int64) * (STEPS * 128) + (step * 128 + tl.arange(0, 128))[:, None]
        xs = xs + (tl.load(x + at, mask=live[None, :], other=0.0),)
    return xs


@triton.jit
def _sources(order, first, end, SOURCE: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr):
    """Row of x for each pair of the tile, [SUB] for each part."""
    sources = ()
    for j in tl.static_range(PARTS):
        n = first + j * SUB + tl.arange(0, SUB)
        if SOURCE:
            sources = sources + (tl.load(order + n, mask=n < end, other=0) // SOURCE,)
        else:
            sources = sources + (n,)
    return sources


@triton.jit
def _uniform(
    x, planes, scales, offset, unit, power, line, lane, sources, first, end, most,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    BM: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile whose pairs read equally many planes: fp32 [BM, SUB] for each part."""
    LAST: tl.constexpr = WORDS - 1
    STRETCHES: tl.constexpr = (WORDS + 3) // 4
    accs = ()
    for j in tl.static_range(PARTS):
        accs = accs + (tl.zeros((BM, SUB), tl.float32),)
    raw = _read_scales(scales, offset, line * GROUPS + tl.minimum(lane, LAST) * 32 // GROUP, most, TIED, C)
    for u in range(STRETCHES):
        words = _read_words(planes, line, u, lane, most, WORDS, C)
        base, tied = _offset(raw, unit, power, TIED)
        betas = ()
        for c in tl.static_range(C):
            beta = line * 0
            if c < most:
                scale = _scale(raw, tied, power, c, TIED)
                beta = twice(scale * (2.0**14), ASM)
                base -= scale
            betas = betas + (beta,)
        ahead = tl.minimum((u + 1) * 4 + lane, LAST)
        raw = _read_scales(scales, offset, line * GROUPS + ahead * 32 // GROUP, most, TIED, C)
        parts = _start(tl.where(u * 4 + lane <= LAST, base, 0.0), ASM)
        xs = _read_x(x, sources, u, first, end, SUB, PARTS, STRETCHES)
        for c in tl.static_range(C):
            if c < most:
                parts = add_plane(parts, words[c], betas[c], ASM)
        weight = _fragment(parts, BM // (16 * NW), NW)
        new = ()
        for j in tl.static_range(PARTS):
            new = new + (tl.dot(weight, xs[j], accs[j]),)
        accs = new
    return accs


@triton.jit
def _mixed(
    x, planes, scales, offset, unit, power, line, lane, sources, counts, first, end, most, present,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    BM: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile with several k: unpacked once, plane by plane, and multiplied wherever some pair stops: fp32 [BM, MIXED]."""
    LAST: tl.constexpr = WORDS - 1
    STRETCHES: tl.constexpr = (WORDS + 3) // 4
    acc = tl.zeros((BM, MIXED), tl.float32)
    for u in range(STRETCHES):
        words = _read_words(planes, line, u, lane, most, WORDS, C)
        here = tl.minimum(u * 4 + lane, LAST)
        raw = _read_scales(scales, offset, line * GROUPS + here * 32 // GROUP, most, TIED, C)
        zero, tied = _offset(raw, unit, power, TIED)
        inside = u * 4 + lane <= LAST
        xs = _read_x(x, sources, u, first, end, MIXED, 1, STRETCHES)
        base = tl.where(inside, zero, 0.0)
        parts = (line * 0,) * 16
        for c in tl.static_range(C):
            if c < most:
                scale = _scale(raw, tied, power, c, TIED)
                parts = add_plane(parts, words[c], twice(scale * (2.0**14), ASM), ASM)
                base -= tl.where(inside, scale, 0.0)
                if (present & (2 << c)) != 0:
                    beginning = _start(base, ASM)
                    whole = ()
                    for s in tl.static_range(16):
                        whole = whole + (add_pairs(parts[s], beginning[s], ASM),)
                    product = tl.dot(_fragment(whole, BM // (16 * NW), NW), xs[0])
                    acc += tl.where((counts == c + 1)[None, :], product, 0.0)
    return acc


@triton.jit
def _store(
    accs, back, factor, order, sources, bias, out, block, expert, first, end,
    OUT: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, TARGET: tl.constexpr,
    BM: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Bias, activation and the rows of `out`."""
    HALF: tl.constexpr = OUT // 2
    width: tl.constexpr = OUT // 2 if GATED else OUT
    for j in tl.static_range(PARTS):
        n = first + j * SUB + tl.arange(0, SUB)
        live = n < end
        target = n
        if TARGET:
            target = tl.load(order + n, mask=live, other=0)
        result = accs[j] * (back * tl.load(factor + sources[j], mask=live, other=0.0))[None, :]
        if GATED:
            gate, up = tl.split(result.reshape(BM // 16, 2, 8, SUB).permute(0, 2, 3, 1))
            gate, up = gate.reshape(BM // 2, SUB), up.reshape(BM // 2, SUB)
            rows = block * (BM // 2) + tl.arange(0, BM // 2)
            if BIAS:
                gate += tl.load(bias + expert * OUT + rows, mask=rows < HALF, other=0.0).to(tl.float32)[:, None]
                up += tl.load(bias + expert * OUT + HALF + rows, mask=rows < HALF, other=0.0).to(tl.float32)[:, None]
            result = activate_gated(gate, up, ACT)
        else:
            rows = block * BM + tl.arange(0, BM)
            if BIAS:
                result += tl.load(bias + expert * OUT + rows, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
            result = activate_plain(result, ACT)
        at = target[None, :].to(tl.int64) * width + rows[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=live[None, :] & (rows < width)[:, None])


@triton.jit
def _rows_of_threads(block, BM: tl.constexpr, NW: tl.constexpr, OUT: tl.constexpr, GATED: tl.constexpr):
    """Lane of every four and row of the weight for each of the 4 BM holdings, as the matrix unit wants its left operand.

    GATED: of the two rows that a thread holds together, one is a gate row, the other its up row.
    """
    i = tl.arange(0, 4 * BM)
    within, side, strip = i // 4 % 8, i // (32 * NW) % 2, i // 32 % NW + i // (64 * NW) * NW
    if GATED:
        row = tl.minimum(block * (BM // 2) + strip * 8 + within, OUT // 2 - 1) + side * (OUT // 2)
    else:
        row = tl.minimum(block * BM + strip * 16 + side * 8 + within, OUT - 1)
    return i % 4, row


@triton.jit
def _of_expert(
    planes, scales, offset, unit, expert, groups: tl.constexpr, words: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr
):  # fmt: skip
    """Pointers to one expert's planes, as 32-bit words, scales and offset, and its unit (tied)."""
    own_planes, own_scales = (), ()
    for c in tl.static_range(C):
        own_planes = own_planes + (planes[c].to(tl.pointer_type(tl.int32)) + expert.to(tl.int64) * words,)
    for c in tl.static_range(1 if TIED else C):
        own_scales = own_scales + (scales[c] + expert.to(tl.int64) * groups,)
    tied_unit = 0.0
    if TIED:
        tied_unit = tl.load(unit + expert)
    return own_planes, own_scales, offset + expert.to(tl.int64) * groups, tied_unit


@triton.jit
def prefill_kernel(
    x, factor, order, levels, tiles, peaks, planes, scales, offset, unit, bias, out,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile: out[row of the pair] = act(W_k x + bias).

    SOURCE: x has one row for SOURCE pairs in a row; 0: x is sorted already. TARGET: out is in the order of pairs, not sorted.
    """
    WORDS: tl.constexpr = IN // 32
    blocks: tl.constexpr = (OUT + BM - 1) // BM
    block, entry = tl.program_id(0) % blocks, tiles + tl.program_id(0) // blocks * 5
    expert, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    most, present = tl.load(entry + 3), tl.load(entry + 4)
    if (expert < 0) | ((present == 1 << most) == MIXED):
        return
    lane, line = _rows_of_threads(block, BM, NW, OUT, GATED)
    own_planes, own_scales, own_offset, tied_unit = _of_expert(
        planes, scales, offset, unit, expert, OUT * GROUPS, OUT * WORDS, C, TIED
    )
    power = tl.load(peaks + expert)
    sources = _sources(order, first, end, SOURCE, SUB, BN // SUB)
    if MIXED:
        counts = tl.load(levels + first + tl.arange(0, BN), mask=first + tl.arange(0, BN) < end, other=0)
        acc = _mixed(
            x, own_planes, own_scales, own_offset, tied_unit, power, line, lane, sources, counts, first, end, most, present,
            WORDS, GROUPS, GROUP, C, TIED, BM, BN, NW, ASM,
        )  # fmt: skip
        accs = (acc,)
    else:
        accs = _uniform(
            x, own_planes, own_scales, own_offset, tied_unit, power, line, lane, sources, first, end, most,
            WORDS, GROUPS, GROUP, C, TIED, BM, SUB, BN // SUB, NW, ASM,
        )  # fmt: skip
    _store(
        accs, 1.0 / power, factor, order, sources, bias, out, block, expert, first, end,
        OUT, BIAS, ACT, GATED, TARGET, BM, SUB, BN // SUB,
    )  # fmt: skip
