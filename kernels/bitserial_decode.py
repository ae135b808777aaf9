"""Decode for few pairs by 1-bit products, in Gluon: a program for 16 rows of one pair's expert, then of one token's experts.

NW warps share 16 rows of the weight: warp w takes words 8w … 8w + 7 of a row, two groups. Planes come ahead into shared
memory, up to CAP of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dpamoe.kernels.bitserial_planes import planes_of_slot, square_layout
from dpamoe.kernels.bitserial_product import (
    activated,
    add_dots,
    ask_rows,
    bits_of,
    buffers_for,
    column_weights,
    copy,
    cut,
    places,
    scaled,
    scales_of,
    scales_of_rows,
    two_planes,
    with_offset,
    words_layout,
)
from dpamoe.kernels.triton_allocate import is_held


@gluon.constexpr_function
def own_copy_layout(NW):
    """[16, 8 NW] words copied 16 bytes at a time, each warp the 8 columns that it will read."""
    warps = [[0, 8 << i] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 4], [1, 0], [2, 0], [4, 0], [8, 0]], warps, [], [16, 8 * NW])


@gluon.jit
def _ask_stages(
    buffers, planes, row, early: gl.constexpr, k, CAP: gl.constexpr, IN: gl.constexpr, WIDTH: gl.constexpr,
    PIECES: gl.constexpr, MATRICES: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Ask for the planes from `early` on; 0 and 1, 2 and 3, 4 to 7 are waited for one after the other."""
    ask_rows(buffers, planes, row, early, min(2, CAP), k, IN, WIDTH, PIECES, MATRICES, NW, 1)
    async_copy.commit_group()
    ask_rows(buffers, planes, row, 2, min(4, CAP), k, IN, WIDTH, PIECES, MATRICES, NW, 1)
    async_copy.commit_group()
    ask_rows(buffers, planes, row, 4, CAP, k, IN, WIDTH, PIECES, MATRICES, NW, 1)
    async_copy.commit_group()


@gluon.jit
def up_kernel(
    x, ids, chunks, gates, table, budget, k_max, planes, scales, offset, bias, hidden,
    x_token, x_slot, ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot, row, column, budget_token,
    RULE: gl.constexpr, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    C: gl.constexpr, K_MIN: gl.constexpr, COLUMNS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr, CAP: gl.constexpr, NW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One pair, 16 rows of its expert (GATED: of both halves): hidden[pair, row] = act(W_k x + bias).

    Rules as in `planes_of_token`; where k is not given, it is written to chunks. The K_MIN first planes do not wait for k.
    """
    WIDTH: gl.constexpr = OUT // 2 if GATED else OUT
    MATRICES: gl.constexpr = 2 if GATED else 1
    PIECES: gl.constexpr = (IN + 256 * NW - 1) // (256 * NW)
    EARLY: gl.constexpr = min(K_MIN, CAP, 2)
    tile, pair = gl.program_id(0), gl.program_id(1)
    token, slot = (pair // A).to(gl.int64), pair % A
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: the next kernel reads ids and gates before its own wait
    expert = gl.load(ids + token * ids_token + slot * ids_slot)
    first_row = gl.where(is_held(expert, E), expert, 0).to(gl.int64) * OUT + tile * 16
    buffers = buffers_for(CAP * PIECES * MATRICES, NW, 1, 8, 1)
    ask_rows(buffers, planes, first_row, 0, EARLY, C, IN, WIDTH, PIECES, MATRICES, NW, 1)
    k = planes_of_slot(
        chunks, gates, ids, table, budget, k_max, token, slot, chunks_token, chunks_slot, gates_token, gates_slot,
        ids_token, ids_slot, row, column, budget_token, RULE, A, E, C, K_MIN, COLUMNS, N, NW,
    )  # fmt: skip
    if RULE != "given":  # noqa: SIM102
        if tile == 0:
            gl.store(chunks + token * chunks_token + slot * chunks_slot, k)
    _ask_stages(buffers, planes, first_row, EARLY, k, CAP, IN, WIDTH, PIECES, MATRICES, NW)
    if k > 0:
        total = _up_rows(
            x + token * x_token + slot * x_slot, buffers, planes, scales, offset, first_row, k,
            IN, C, CAP, NW, WIDTH, PIECES, MATRICES,
        )  # fmt: skip
        result = activated(total, bias, first_row, WIDTH, NW, 1, GATED, BIAS, ACT)
        out = hidden + pair.to(gl.int64) * WIDTH + tile * 16
        gl.store(out + gl.arange(0, 16, result.type.layout), result.to(hidden.dtype.element_ty))


@gluon.jit
def _up_rows(
    x, buffers, planes, scales, offset, row, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, NW: gl.constexpr,
    WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr,
):  # fmt: skip
    """W_k x of 16 rows, and of those WIDTH further on: rows in registers 0 and 1, and in 2 and 3."""
    r, column, input_, _ = places(NW)
    at = (row + r) * (IN // 32) + column
    total = gl.zeros([16, 8 * NW], gl.float32, words_layout(NW))
    many = (column + r) * 0 + k
    own = scales_of_rows(scales, offset, row + r, column, k, IN, C, WIDTH, PIECES, MATRICES, NW)
    X, Y = (), ()
    for p in gl.static_range(PIECES):
        start = (p * NW + column // 8) * 256 + input_
        X = X + (bits_of(x, start, start < IN),)
        Y = Y + (bits_of(x, start + 128, start + 128 < IN),)
        for m in gl.static_range(MATRICES):
            total = with_offset(total, own[p * MATRICES + m][0], X[p], Y[p], m == 1)
    weights = column_weights((column + r) * 0)
    for first in gl.static_range(0, C, 4):
        if first < k:
            dots = (total * 0.0,) * (PIECES * MATRICES)
            for c in gl.static_range(first, min(first + 4, C), 2):
                if c < k:
                    async_copy.wait_group(max(0, 2 - c // 2))
                    dots = _dots(dots, buffers, planes, at, many, c, X, Y, weights, IN, C, CAP, NW, WIDTH, PIECES, MATRICES)
            for p in gl.static_range(PIECES):
                for m in gl.static_range(MATRICES):
                    scale = own[p * MATRICES + m][1 + first // 4]
                    total = scaled(total, dots[p * MATRICES + m], scale, X[p], Y[p], m == 1)
    return total


@gluon.jit
def _dots(
    dots, buffers, planes, at, many, c: gl.constexpr, X, Y, weights, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
    NW: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr,
):  # fmt: skip
    """Add the dots of planes c and c + 1 in every piece of both matrices; a second one that is not read has scale 0."""
    new = ()
    for p in gl.static_range(PIECES):
        for m in gl.static_range(MATRICES):
            source = at + (p * 8 * NW + m * WIDTH * (IN // 32))
            one, other = two_planes(buffers, planes, source, many, c, m * PIECES + p, PIECES * MATRICES, C, CAP)
            dot = dots[p * MATRICES + m]
            new = new + (add_dots(dot, one, other, X[p], Y[p], weights, many, c, False),)
    return new


@gluon.jit
def down_kernel(
    hidden, ids, chunks, gates, planes, scales, offset, bias, out,
    ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot,
    GIVEN: gl.constexpr, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    C: gl.constexpr, K_MIN: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, NW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One token, 16 rows: out[token, row] = sum over slots of gate * (W_k hidden[pair] + bias).

    GIVEN: chunks are older than the kernel before this one, which else writes them: then only the K_MIN planes that every
    pair reads are asked for before its end.
    """
    PIECES: gl.constexpr = (A * ((IN + 255) // 256) + NW - 1) // NW
    EARLY: gl.constexpr = CAP if GIVEN else min(K_MIN, CAP)
    tile, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    buffers = buffers_for(CAP * PIECES, NW, 1, 2, 4)
    ids, chunks, gates = ids + token * ids_token, chunks + token * chunks_token, gates + token * gates_token
    strides = (ids_slot, chunks_slot)
    _ask_pieces(buffers, planes, ids, chunks, strides, tile, 0, EARLY, GIVEN, A, E, OUT, IN, PIECES, NW)
    if PDL and not GIVEN:
        gdc_wait()
    _ask_pieces(buffers, planes, ids, chunks, strides, tile, EARLY, CAP, True, A, E, OUT, IN, PIECES, NW)
    async_copy.commit_group()
    fewest, most = _range(ids, chunks, strides, A, N, E, C, NW)
    pieces = _pieces(
        ids, chunks, gates, strides, gates_slot, scales, offset, token * (A * IN), tile, A, E, OUT, IN, C, PIECES, NW
    )
    if PDL and GIVEN:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    whole = _down_rows(hidden, pieces, buffers, planes, fewest, most, IN, C, CAP, PIECES, NW)
    result = gl.sum(whole, 1)
    at = tile * 16 + gl.arange(0, 16, result.type.layout)
    if BIAS:
        for s in gl.static_range(A):
            expert = gl.load(ids + s * ids_slot)
            if is_held(expert, E) & (gl.load(chunks + s * chunks_slot) > 0):
                gate = gl.load(gates + s * gates_slot).to(gl.float32)
                result += gate * gl.load(bias + expert.to(gl.int64) * OUT + at).to(gl.float32)
    gl.store(out + token * OUT + at, result.to(out.dtype.element_ty))


@gluon.jit
def _pieces(
    ids, chunks, gates, strides, gates_slot, scales, offset, first_input, tile, A: gl.constexpr, E: gl.constexpr,
    OUT: gl.constexpr, IN: gl.constexpr, C: gl.constexpr, PIECES: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Of each piece: planes, where its words stand, gate, where its inputs begin, the first one's number, scales."""
    r, column, input_, second = places(NW)
    pieces = ()
    for p in gl.static_range(PIECES):
        k, row, slot, pair = _piece(ids, chunks, strides, tile, p, True, A, E, OUT, IN, PIECES, NW, words_layout(NW))
        group = 2 * pair + second
        own = scales_of(scales, offset, (row + r) * (IN // 128) + group, k, column, group < IN // 128, C)
        gate = gl.load(gates + slot * gates_slot, mask=k > 0, other=0.0).to(gl.float32)
        at = (row + r) * (IN // 32) + (pair * 8 + column % 8)
        pieces = pieces + ((k, at, gate, first_input + slot * IN, pair * 256 + input_, own),)
    return pieces


@gluon.jit
def _down_rows(
    hidden, pieces, buffers, planes, fewest, most, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
    PIECES: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Sum over the slots of gate * W_k hidden, for 16 rows."""
    X, Y = (), ()
    for p in gl.static_range(PIECES):
        k, _, _, source, start, _ = pieces[p]
        X = X + (gl.load(hidden + source + start, mask=(k > 0) & (start < IN), other=0.0, cache_modifier=".cg"),)
        start += 128
        Y = Y + (gl.load(hidden + source + start, mask=(k > 0) & (start < IN), other=0.0, cache_modifier=".cg"),)
    r, column, _, _ = places(NW)
    weights = column_weights((column + r) * 0)
    whole = gl.zeros([16, 8 * NW], gl.float32, words_layout(NW))
    async_copy.wait_group(0)
    for p in gl.static_range(PIECES):
        k, at, gate, _, _, own = pieces[p]
        whole += gate * _piece_dot(cut(X[p]), cut(Y[p]), own, buffers, planes, at, weights, k, fewest, most, p, PIECES, C, CAP)
    return whole


@gluon.jit
def _range(ids, chunks, strides, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, C: gl.constexpr, NW: gl.constexpr):
    """Fewest planes of a token's slots that read any, and most."""
    slot = gl.arange(0, N, gl.SliceLayout(0, square_layout(N, NW)))
    expert = gl.load(ids + slot * strides[0], mask=slot < A, other=E)
    k = gl.load(chunks + slot * strides[1], mask=slot < A, other=0)
    k = gl.where(is_held(expert, E), k, 0).to(gl.int32)
    return gl.min(gl.where(k > 0, k, C), 0), gl.max(k, 0)


@gluon.jit
def _piece_dot(
    X, Y, own, buffers, planes, at, weights, k, fewest, most, p: gl.constexpr, PIECES: gl.constexpr, C: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """What the p-th pair of groups of each warp adds."""
    own_zero = (X * 0).to(gl.float32)
    total = with_offset(own_zero, own[0], X, Y, False)
    for first in gl.static_range(0, C, 4):
        if first < most:
            dots = own_zero
            for c in gl.static_range(first, min(first + 4, C), 2):
                one, other = two_planes(buffers, planes, at, k, c, p, PIECES, C, CAP)
                if first + 4 <= fewest:
                    dots = add_dots(dots, one, other, X, Y, weights, k, c, False)
                else:
                    dots = add_dots(dots, one, other, X, Y, weights, k, c, True)
            total = scaled(total, dots, own[1 + first // 4], X, Y, False)
    return total


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
def _piece(
    ids, chunks, strides, tile, p: gl.constexpr, KNOWN: gl.constexpr, A: gl.constexpr, E: gl.constexpr,
    OUT: gl.constexpr, IN: gl.constexpr, PIECES: gl.constexpr, NW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of the p-th pair of groups of each warp: planes that are read (KNOWN, else 8), first row of the tile, slot, number."""
    PAIRS: gl.constexpr = (IN + 255) // 256
    number = gl.arange(0, NW, gl.SliceLayout(0, gl.SliceLayout(2, by_warp(layout, NW)))) * PIECES + p
    slot, pair = gl.minimum(number // PAIRS, A - 1), number % PAIRS
    expert = gl.load(ids + slot * strides[0])
    there = is_held(expert, E) & (number < A * PAIRS)
    k = gl.load(chunks + slot * strides[1]) if KNOWN else slot * 0 + 8
    k = gl.where(there, k, 0).to(gl.int32)
    row = gl.where(there, expert, 0).to(gl.int64) * OUT + tile * 16
    return _spread(k, layout, NW), _spread(row, layout, NW), _spread(slot, layout, NW), _spread(pair, layout, NW)


@gluon.jit
def _ask_pieces(
    buffers, planes, ids, chunks, strides, tile, first: gl.constexpr, last: gl.constexpr, KNOWN: gl.constexpr,
    A: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr, PIECES: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Copy planes first … last - 1, as far as they are read, of every warp's pairs of groups."""
    copied: gl.constexpr = own_copy_layout(NW)
    if first < last:
        word = gl.arange(0, 8 * NW, gl.SliceLayout(0, copied))[None, :] % 8
        line = gl.arange(0, 16, gl.SliceLayout(1, copied))[:, None]
        for p in gl.static_range(PIECES):
            k, row, _, pair = _piece(ids, chunks, strides, tile, p, KNOWN, A, E, OUT, IN, PIECES, NW, copied)
            own = gl.max_contiguous(gl.multiple_of(pair * 8 + word, [1, 4]), [1, 4])
            at = gl.max_contiguous(gl.multiple_of((row + line) * (IN // 32) + own, [1, 4]), [1, 4])
            reached = gl.max_constancy(gl.where(own < IN // 32, k, 0), [1, 4])
            for c in gl.static_range(first, last):
                copy(buffers[c * PIECES + p], planes[c].to(gl.pointer_type(gl.int32)) + at, mask=c < reached)
