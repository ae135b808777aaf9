"""Decode by 1-bit products, in Gluon: a plane is an operand of the tensor cores as it stands, nothing is unpacked.

A row of x is cut, per group of 128, into 16 bits (a step and two's complement), which are the columns of products with the
planes; their popcounts are weighed by powers of two in a second product. NW warps share 16 rows of the weight: warp w takes
words 8w … 8w + 7 of a row, two groups. Planes come ahead into shared memory, up to CAP of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dpamoe.kernels.bitserial_asm import (
    FACTOR, MAYBE_0, MAYBE_2, MAYBE_4, MAYBE_6, OFFSET_FIRST, OFFSET_LETTERS, OFFSET_SECOND, PLANES, PLANES_LETTERS,
    SCALE_FIRST, SCALE_LETTERS, SCALE_SECOND,
    SLICE, SLICE_LETTERS, WEIGHTS_0, WEIGHTS_2, WEIGHTS_LETTERS,
)  # fmt: skip
from dpamoe.kernels.bitserial_planes import planes_of_slot, planes_of_token
from dpamoe.kernels.triton_activate import activate_gated, activate_plain
from dpamoe.kernels.triton_allocate import is_held

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # names of Triton 3.8, 3.6


@gluon.constexpr_function
def words_layout(NW, RT=1):
    """Words [16 RT, 8 NW] as the products take them: rows g and g + 8, word c of two groups, in lane 4g + c."""
    warps = [[0, 8 << i] for i in range(NW.bit_length() - 1)] + [[16 << i, 0] for i in range(RT.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[8, 0], [0, 4]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [16 * RT, 8 * NW]
    )


@gluon.constexpr_function
def row_copy_layout(NW):
    """[16, 8 NW] words copied 16 bytes at a time, whole rows beside each other."""
    return gl.BlockedLayout([1, 4], [16 // NW, 2 * NW], [NW, 1], [1, 0])


@gluon.constexpr_function
def own_copy_layout(NW):
    """[16, 8 NW] words copied 16 bytes at a time, each warp the 8 columns that it will read."""
    warps = [[0, 8 << i] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [1, 0], [2, 0], [4, 0], [8, 0]], warps, [], [16, 8 * NW]
    )


@gluon.jit
def _places(NW: gl.constexpr):
    """Of each register: its row and column in the words, and where its input and its scale stand in a pair of groups."""
    layout: gl.constexpr = words_layout(NW)
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 8 * NW, gl.SliceLayout(0, layout))[None, :]
    register = row // 8 + 2 * (column // 4 % 2)
    return row, column, row % 8 + 8 * (column % 4) + 32 * register, column // 4 % 2


@gluon.jit
def _bits(x, at, inside):
    """16 bits of a group: words of low and high bits, step and sum; x: pointer, at: inputs of the lane."""
    return _cut(gl.load(x + at, mask=inside, other=0.0).to(gl.float32))


@gluon.jit
def _cut(value):
    return gl.inline_asm_elementwise(SLICE, SLICE_LETTERS, [value], gl.int32, True, 4)


@gluon.jit
def _dots(dots, first, second, X, Y, weights, k, plane: gl.constexpr, MAYBE: gl.constexpr):
    """Add the dots of planes `plane` and the next with the groups X and Y; MAYBE: not in warps that read neither."""
    maybe: gl.constexpr = MAYBE_0 if plane == 0 else MAYBE_2 if plane == 2 else MAYBE_4 if plane == 4 else MAYBE_6
    code: gl.constexpr = maybe if MAYBE else PLANES
    arguments = [dots, first, second, X, Y, weights[plane // 2 % 2], weights[2], k]
    return gl.inline_asm_elementwise(code, PLANES_LETTERS, arguments, gl.float32, True, 4)


@gluon.jit
def column_weights(zero):
    """What popcounts are multiplied by, for planes 0 and 1, for 2 and 3, and more for high bits; zero: int32 words."""
    low = gl.inline_asm_elementwise(WEIGHTS_0, WEIGHTS_LETTERS, [zero], gl.int32, True, 4)
    high = gl.inline_asm_elementwise(WEIGHTS_2, WEIGHTS_LETTERS, [zero], gl.int32, True, 4)
    return low, high, gl.inline_asm_elementwise(FACTOR, WEIGHTS_LETTERS, [zero], gl.int32, True, 4)


@gluon.jit
def _scaled(total, dots, scale, X, Y, SECOND: gl.constexpr):
    code: gl.constexpr = SCALE_SECOND if SECOND else SCALE_FIRST
    return gl.inline_asm_elementwise(code, SCALE_LETTERS, [total, dots, scale, X, Y], gl.float32, True, 4)


@gluon.jit
def _with_offset(total, offset, X, Y, SECOND: gl.constexpr):
    code: gl.constexpr = OFFSET_SECOND if SECOND else OFFSET_FIRST
    return gl.inline_asm_elementwise(code, OFFSET_LETTERS, [total, offset, X, Y], gl.float32, True, 4)


@gluon.jit
def _own_scales(scales, first: gl.constexpr, at, k, column, inside, C: gl.constexpr):
    """Scales of planes `first` to `first` + 3, to each lane those of its own one; 0 where it is not read."""
    own = column % 4
    address = scales[first].to(gl.int64) + own.to(gl.int64) * 0
    for j in gl.static_range(1, 4):
        if first + j < C:
            address = gl.where(own == j, scales[first + j].to(gl.int64), address)
    source = address.to(gl.pointer_type(gl.float16))
    return gl.load(source + at, mask=inside & (first + own < k), other=0.0)


@gluon.jit
def _scales_of(scales, offset, at, k, column, inside, C: gl.constexpr):
    """Offset of a pair of groups, and scales of planes 0 to 3 and 4 to 7."""
    zero = gl.load(offset + at, mask=inside & (column % 4 == 0) & (k > 0), other=0.0)
    low = _own_scales(scales, 0, at, k, column, inside, C)
    high = low
    if C > 4:
        high = _own_scales(scales, 4, at, k, column, inside, C)
    return zero, low, high


@gluon.jit
def _two_planes(
    buffers, planes, at, k, c: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr
):  # fmt: skip
    """Words of planes c and c + 1, from shared memory, or as they stand; a plane that is not read may be anything."""
    both = ()
    for i in gl.static_range(2):
        if c + i < CAP:
            both = both + (buffers[(c + i) * UNITS + UNIT].load(at.type.layout),)
        elif c + i < C:
            both = both + (gl.load(planes[c + i].to(gl.pointer_type(gl.int32)) + at, mask=k > c + i, other=0),)
        else:
            both = both + (both[0],)
    return both


@gluon.jit
def _four_planes(
    total, first: gl.constexpr, buffers, planes, at, scale, X, Y, weights, k, fewest,
    UNIT: gl.constexpr, UNITS: gl.constexpr, SECOND: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Add the products of planes `first` to `first` + 3 with a pair of groups; plane c stands in buffer c UNITS + UNIT."""
    dots = total * 0.0
    if first + 4 <= fewest:
        for c in gl.static_range(first, min(first + 4, C), 2):
            one, other = _two_planes(buffers, planes, at, k, c, UNIT, UNITS, C, CAP)
            dots = _dots(dots, one, other, X, Y, weights, k, c, False)
    else:
        for c in gl.static_range(first, min(first + 4, C), 2):
            one, other = _two_planes(buffers, planes, at, k, c, UNIT, UNITS, C, CAP)
            dots = _dots(dots, one, other, X, Y, weights, k, c, True)
    return _scaled(total, dots, scale, X, Y, SECOND)


@gluon.jit
def _buffers(COUNT: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr, PHASES: gl.constexpr, PER_PHASE: gl.constexpr):
    """Room for COUNT pieces of planes, one allocation each: copies into views of one would wait for each other."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, PER_PHASE, PHASES, [1, 0])
    room = ()
    for _ in gl.static_range(COUNT):
        room = room + (gl.allocate_shared_memory(gl.int32, [16 * RT, 8 * NW], shared),)
    return room


@gluon.jit
def _activated(
    total, bias, at, HALF: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Sum over the warps and lanes of a row, bias and activation: fp32 [16 RT]. at: row of all experts where the tile begins."""
    if GATED:
        apart = total.reshape([16 * RT, NW, 2, 4]).permute(0, 2, 1, 3).reshape([16 * RT, 2, 4 * NW])
        gate, up = gl.split(gl.sum(apart, 2))
        if BIAS:
            own = bias + at + gl.arange(0, 16 * RT, gate.type.layout)
            gate += gl.load(own).to(gl.float32)
            up += gl.load(own + HALF).to(gl.float32)
        result = activate_gated(gate, up, ACT)
    else:
        result = gl.sum(total, 1)
        if BIAS:
            result += gl.load(bias + at + gl.arange(0, 16 * RT, result.type.layout)).to(gl.float32)
        result = activate_plain(result, ACT)
    return result


@gluon.jit
def up_kernel(
    x, ids, chunks, gates, table, budget, k_max, planes, scales, offset, bias, hidden,
    x_token, x_slot, ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot, row, column_of, budget_token,
    RULE: gl.constexpr, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    C: gl.constexpr, K_MIN: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr,
    NW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One pair, 16 rows of its expert (GATED: of both halves): hidden[pair, row] = act(W_k x + bias), fp32 or as x.

    Rules as in `planes_of_token`; where k is not given, the first program of a pair writes it to chunks.
    """
    WIDTH: gl.constexpr = OUT // 2 if GATED else OUT
    PIECES: gl.constexpr = (IN + 256 * NW - 1) // (256 * NW)
    UNITS: gl.constexpr = PIECES * (2 if GATED else 1)
    tile, pair = gl.program_id(0), gl.program_id(1)
    token, slot = (pair // A).to(gl.int64), pair % A
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: the next kernel reads ids and gates before its own wait
    expert = gl.load(ids + token * ids_token + slot * ids_slot)
    held = is_held(expert, E)
    expert = gl.where(held, expert, 0).to(gl.int64)
    k = planes_of_slot(
        chunks, gates, ids, table, budget, k_max, token, slot, chunks_token, chunks_slot, gates_token, gates_slot,
        ids_token, ids_slot, row, column_of, budget_token, RULE, A, E, C, K_MIN, N, NW,
    )  # fmt: skip
    if RULE != 0:
        if tile == 0:
            gl.store(chunks + token * chunks_token + slot * chunks_slot, k)
    if k > 0:
        total = _up_rows(
            x + token * x_token + slot * x_slot, planes, scales, offset, expert, tile, k,
            OUT, IN, C, GATED, CAP, NW, WIDTH, PIECES, UNITS,
        )  # fmt: skip
        result = _activated(total, bias, expert * OUT + tile * 16, WIDTH, NW, 1, GATED, BIAS, ACT)
        at = tile * 16 + gl.arange(0, 16, result.type.layout)
        gl.store(hidden + pair.to(gl.int64) * WIDTH + at, result.to(hidden.dtype.element_ty))


@gluon.jit
def _up_rows(
    x, planes, scales, offset, expert, tile, k, OUT: gl.constexpr, IN: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr,
    CAP: gl.constexpr, NW: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """W_k x of 16 rows, and (GATED) of those WIDTH further on: rows in registers 0 and 1, and in 2 and 3."""
    WORDS: gl.constexpr = IN // 32
    MATRICES: gl.constexpr = UNITS // PIECES
    copied: gl.constexpr = row_copy_layout(NW)
    buffers = _buffers(CAP * UNITS, NW, 1, 8, 1)
    first_row = expert * OUT + tile * 16
    line = first_row + gl.arange(0, 16, gl.SliceLayout(1, copied))[:, None]
    word = gl.arange(0, 8 * NW, gl.SliceLayout(0, copied))[None, :]
    for c in gl.static_range(CAP):
        if c < k:
            source = planes[c].to(gl.pointer_type(gl.int32)) + line * WORDS
            for p in gl.static_range(PIECES):
                inside = word + p * 8 * NW < WORDS
                copy(buffers[c * UNITS + p], source + (word + p * 8 * NW), mask=inside)
                if GATED:
                    copy(buffers[c * UNITS + PIECES + p], source + (WIDTH * WORDS + word + p * 8 * NW), mask=inside)
        if c == 1 or c == 3:
            async_copy.commit_group()
    async_copy.commit_group()
    r, column, input_, second = _places(NW)
    group = column // 8 * 2 + second
    at, scale_at = (first_row + r) * WORDS + column, (first_row + r) * (IN // 128) + group
    total = gl.zeros([16, 8 * NW], gl.float32, words_layout(NW))
    weights = column_weights(column * 0 + r * 0)
    many = column + r * 0 - (column + r * 0) + k
    own, X, Y = (), (), ()
    for p in gl.static_range(PIECES):
        inside = (group + p * 2 * NW < IN // 128) & (r >= 0)
        own = own + (_scales_of(scales, offset, scale_at + p * 2 * NW, k, column, inside, C),)
        if GATED:
            own = own + (_scales_of(scales, offset, scale_at + (WIDTH * (IN // 128) + p * 2 * NW), k, column, inside, C),)
    for p in gl.static_range(PIECES):
        start = (p * NW + column // 8) * 256 + input_
        X = X + (_bits(x, start, start < IN),)
        Y = Y + (_bits(x, start + 128, start + 128 < IN),)
        for m in gl.static_range(UNITS // PIECES):
            total = _with_offset(total, own[p * (UNITS // PIECES) + m][0], X[p], Y[p], m == 1)
    for first in gl.static_range(0, C, 4):
        if first < k:
            dots = (total * 0.0,) * UNITS
            for half in gl.static_range(first, min(first + 4, C), 2):
                if half < k:  # a second plane that is not read has scale 0
                    async_copy.wait_group(max(0, 2 - half // 2))
                    new = ()
                    for p in gl.static_range(PIECES):
                        for m in gl.static_range(MATRICES):
                            one, other = _two_planes(
                                buffers, planes, at + (p * 8 * NW + m * WIDTH * WORDS), many, half, m * PIECES + p, UNITS, C, CAP
                            )
                            dot = dots[p * MATRICES + m]
                            new = new + (_dots(dot, one, other, X[p], Y[p], weights, many, half, False),)
                    dots = new
            for p in gl.static_range(PIECES):
                for m in gl.static_range(MATRICES):
                    total = _scaled(total, dots[p * MATRICES + m], own[p * MATRICES + m][1 + first // 4], X[p], Y[p], m == 1)
    return total


@gluon.jit
def down_kernel(
    hidden, ids, chunks, gates, table, budget, k_max, planes, scales, offset, bias, out,
    ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot, row, column_of, budget_token,
    RULE: gl.constexpr, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    C: gl.constexpr, K_MIN: gl.constexpr, BIAS: gl.constexpr, NW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One token, 16 rows: out[token, row] = sum over slots of gate * (W_k hidden[pair] + bias).

    The work is cut into units of 256 inputs and up to four planes, so that a slot costs what its planes cost; each warp takes
    every NW-th of them. Where k is not given, it is found anew: chunks may not be written yet when planes are asked for.
    """
    WORDS: gl.constexpr = IN // 32
    UNITS: gl.constexpr = (A * ((IN + 255) // 256) * ((C + 3) // 4) + NW - 1) // NW
    copied: gl.constexpr = own_copy_layout(NW)
    words: gl.constexpr = words_layout(NW)
    tile, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    packed, _, _ = planes_of_token(
        chunks, gates, ids, table, budget, k_max, token, chunks_token, chunks_slot, gates_token, gates_slot, ids_token, ids_slot,
        row, column_of, budget_token, RULE, A, E, C, K_MIN, N, NW,
    )  # fmt: skip
    units = (packed * 0).to(gl.int32)
    for s in gl.static_range(A):
        units += (((packed >> (4 * s)) & 15).to(gl.int32) + 3) // 4 * ((IN + 255) // 256)
    buffers = _buffers(4 * UNITS, NW, 1, 2, 4)
    word = gl.arange(0, 8 * NW, gl.SliceLayout(0, copied))[None, :] % 8
    line = gl.arange(0, 16, gl.SliceLayout(1, copied))[:, None]
    for u in gl.static_range(UNITS):
        k, first, first_row, _, pair = _unit(ids, packed, token, ids_token, ids_slot, tile, u, A, E, OUT, IN, NW, copied)
        own = gl.max_contiguous(gl.multiple_of(pair * 8 + word, [1, 4]), [1, 4])
        at = gl.max_contiguous(gl.multiple_of((first_row + line) * WORDS + own, [1, 4]), [1, 4])
        reached = gl.max_constancy(gl.where(own < WORDS, k, 0), [1, 4])
        for c in gl.static_range(4):
            source = _plane_of(planes, c, first, C, gl.int32) + at
            copy(buffers[4 * u + c], gl.max_contiguous(gl.multiple_of(source, [1, 16]), [1, 4]), mask=c < reached)
    async_copy.commit_group()
    r, column, input_, second = _places(NW)
    weights = column_weights(column * 0 + r * 0)
    own, place = (), ()
    for u in gl.static_range(UNITS):
        k, first, first_row, slot, pair = _unit(ids, packed, token, ids_token, ids_slot, tile, u, A, E, OUT, IN, NW, words)
        group = 2 * pair + second
        inside = (group < IN // 128) & (k > 0)
        scale_at = (first_row + r) * (IN // 128) + group
        zero = gl.load(offset + scale_at, mask=inside & (column % 4 == 0) & (first == 0), other=0.0)
        scale = _unit_scales(scales, first, scale_at, k, column, inside, C)
        gate = gl.load(gates + token * gates_token + slot * gates_slot, mask=k > 0, other=0.0).to(gl.float32)
        own = own + ((zero, scale, gate),)
        place = place + ((k, (token * A + slot) * IN, pair * 256 + input_),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    whole = gl.zeros([16, 8 * NW], gl.float32, words)
    values = ()
    for u in gl.static_range(UNITS):
        k, source, start = place[u]
        low = gl.load(hidden + source + start, mask=(k > 0) & (start < IN), other=0.0, cache_modifier=".cg")
        high = gl.load(hidden + source + (start + 128), mask=(k > 0) & (start + 128 < IN), other=0.0, cache_modifier=".cg")
        values = values + ((low, high),)
    async_copy.wait_group(0)
    for u in gl.static_range(UNITS):
        if u * NW < units:
            whole += _unit_dot(values[u], own[u], place[u][0], buffers, weights, u, words)
    result = gl.sum(whole, 1)
    at = tile * 16 + gl.arange(0, 16, result.type.layout)
    if BIAS:
        for s in gl.static_range(A):
            expert = gl.load(ids + token * ids_token + s * ids_slot)
            if ((packed >> (4 * s)) & 15) > 0:
                weight = gl.load(gates + token * gates_token + s * gates_slot).to(gl.float32)
                result += weight * gl.load(bias + expert.to(gl.int64) * OUT + at).to(gl.float32)
    gl.store(out + token * OUT + at, result.to(out.dtype.element_ty))


@gluon.jit
def _unit_dot(values, own, k, buffers, weights, u: gl.constexpr, words: gl.constexpr):
    """What the u-th units of the warps add."""
    zero, scale, gate = own
    X, Y = _cut(values[0]), _cut(values[1])
    total, dots = _with_offset(gate * 0.0, zero, X, Y, False), gate * 0.0
    dots = _dots(dots, buffers[4 * u].load(words), buffers[4 * u + 1].load(words), X, Y, weights, k, 0, True)
    dots = _dots(dots, buffers[4 * u + 2].load(words), buffers[4 * u + 3].load(words), X, Y, weights, k, 2, True)
    return _scaled(total, dots, scale, X, Y, False) * gate


@gluon.jit
def _plane_of(tensors, c: gl.constexpr, first, C: gl.constexpr, dtype: gl.constexpr):
    """Pointer to plane (or scale) first + c, where first is 0 or 4, of each warp."""
    address = tensors[c].to(gl.int64)
    if c + 4 < C:
        address = gl.where(first == 0, address, tensors[c + 4].to(gl.int64))
    else:
        address = address + first.to(gl.int64) * 0
    return address.to(gl.pointer_type(dtype))


@gluon.jit
def _unit_scales(scales, first, at, k, column, inside, C: gl.constexpr):
    """Scales of planes first to first + 3, to each lane those of its own one; 0 where it is not read."""
    address = _plane_of(scales, 0, first, C, gl.float16).to(gl.int64) + column.to(gl.int64) * 0
    for c in gl.static_range(1, min(4, C)):
        address = gl.where(column % 4 == c, _plane_of(scales, c, first, C, gl.float16).to(gl.int64), address)
    return gl.load(address.to(gl.pointer_type(gl.float16)) + at, mask=inside & (column % 4 < k), other=0.0)


@gluon.constexpr_function
def by_warp(layout, NW):
    """The layout of words [16, 8 NW] with a dimension for the warps, [16, NW, 8]."""
    lanes = [[base[0], 0, base[1]] for base in layout.lane_bases]
    regs = [[base[0], 0, base[1]] for base in layout.reg_bases]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 1 << i, 0] for i in range(NW.bit_length() - 1)], [], [16, NW, 8])


@gluon.jit
def _spread(value, layout: gl.constexpr, NW: gl.constexpr):
    """One number of each warp [NW], as a tensor of words."""
    whole = value[None, :, None].broadcast_to([16, NW, 8]).reshape([16, 8 * NW])
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.jit
def _unit(
    ids, packed, token, ids_token, ids_slot, tile, u: gl.constexpr, A: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr,
    IN: gl.constexpr, NW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The u-th unit of each warp: how many planes, the first of them (0 or 4), first row of the tile, slot, which 256 inputs.

    A slot with k planes has as many units as it has pairs of groups, twice if k > 4, first the lower planes.
    """
    PAIRS: gl.constexpr = (IN + 255) // 256
    number = gl.arange(0, NW, gl.SliceLayout(0, gl.SliceLayout(2, by_warp(layout, NW)))) + u * NW
    slot, begin, end = number * 0, number * 0, (packed * 0).to(gl.int32)
    for s in gl.static_range(A):
        end += (((packed >> (4 * s)) & 15).to(gl.int32) + 3) // 4 * PAIRS
        slot += (number >= end).to(gl.int32)
        begin = gl.where(number >= end, end, begin)
    there = number < end
    slot = gl.minimum(slot, A - 1)
    expert = gl.load(ids + token * ids_token + slot * ids_slot)
    there = there & is_held(expert, E)
    k = ((packed >> (4 * slot)) & 15).to(gl.int32)
    first = gl.where(number - begin >= PAIRS, 4, 0)
    pair = (number - begin) % PAIRS
    k = gl.where(there, gl.minimum(k - first, 4), 0)
    row = gl.where(there, expert, 0).to(gl.int64) * OUT + tile * 16
    k, first, slot = _spread(k, layout, NW), _spread(first, layout, NW), _spread(slot, layout, NW)
    return k, first, _spread(row, layout, NW), slot, _spread(pair, layout, NW)
