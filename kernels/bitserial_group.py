"""Several tokens by 1-bit products, in Gluon: planes are read once for all pairs of an expert."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dpamoe.kernels.bitserial_decode import _activated, _buffers, _dots, _scaled, _scales_of, _two_planes, _with_offset, column_weights, copy, words_layout
from dpamoe.kernels.bitserial_rows import lane_layout


@gluon.jit
def _sliced(bits, there, NWK: gl.constexpr, RT: gl.constexpr):
    """The bits of one of two groups for every warp along the inputs, as words [16 RT, 8 NWK]; bits: pointer to 256 inputs.

    there: how many warps have inputs.
    """
    layout: gl.constexpr = lane_layout(NWK * RT)
    lane = gl.arange(0, 32 * NWK * RT, gl.SliceLayout(1, layout))[:, None]
    register = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    warp = lane // 32 % NWK
    value = gl.load(bits + (warp * 64 + lane % 32) * 4 + register, mask=warp < there, other=0)
    value = value.reshape([RT, NWK, 8, 4, 2, 2]).permute([0, 5, 2, 1, 4, 3]).reshape([16 * RT, 8 * NWK])
    return gl.convert_layout(value, words_layout(NWK, RT), assert_trivial=True)


@gluon.jit
def group_kernel(
    bits, order, ks, entries, planes, scales, offset, bias, out, SHARING,
    OUT: gl.constexpr, IN: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    CAP: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr, LEAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16 RT rows (GATED: of both halves) of an expert for all its pairs: out[pair, row] = act(W_k x + bias).

    bits of row pair // SHARING, as `bitserial_rows` leaves them; entries: program_id(1) takes one. The last tile may overlap another.
    """
    WIDTH: gl.constexpr = OUT // 2 if GATED else OUT
    WORDS: gl.constexpr = IN // 32
    NW: gl.constexpr = NWK * RT
    PAIRS: gl.constexpr = (IN + 255) // 256
    PIECES: gl.constexpr = (PAIRS + NWK - 1) // NWK
    MATRICES: gl.constexpr = 2 if GATED else 1
    UNITS: gl.constexpr = PIECES * MATRICES
    tile, entry = gl.minimum(gl.program_id(0) * (16 * RT), WIDTH - 16 * RT), entries + 4 * gl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first_pair, end = gl.load(entry).to(gl.int64), gl.load(entry + 1), gl.load(entry + 2)
    if first_pair < end:
        buffers = _buffers(CAP * UNITS, NWK, RT, 8 if NWK > 1 else 2, 1 if NWK > 2 else 4 // NWK)
        first_row = expert * OUT + tile
        _ask(buffers, planes, first_row, 0, LEAST, WIDTH, WORDS, PIECES, MATRICES, CAP, NWK, RT, LEAST)
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [NWK * RT], [0]))
        most = first_pair * 0
        for n in range(first_pair, end, 32):
            most = gl.maximum(most, gl.max(gl.load(ks + n + lane, mask=n + lane < end, other=0), 0))
        _ask(buffers, planes, first_row, LEAST, most, WIDTH, WORDS, PIECES, MATRICES, CAP, NWK, RT, LEAST)
        async_copy.commit_group()
        layout: gl.constexpr = words_layout(NWK, RT)
        r = gl.arange(0, 16 * RT, gl.SliceLayout(1, layout))[:, None]
        column = gl.arange(0, 8 * NWK, gl.SliceLayout(0, layout))[None, :]
        group = column // 8 * 2 + column // 4 % 2
        at, scale_at = (first_row + r) * WORDS + column, (first_row + r) * (IN // 128) + group
        zero = gl.zeros([16 * RT, 8 * NWK], gl.float32, layout)
        weights = column_weights((column + r) * 0)
        own = ()
        for p in gl.static_range(PIECES):
            for m in gl.static_range(MATRICES):
                inside = (group + p * 2 * NWK < IN // 128) & (r >= 0)
                away = m * WIDTH * (IN // 128) + p * 2 * NWK
                own = own + (_scales_of(scales, offset, scale_at + away, most, column, inside, C),)
        pair, k = gl.load(order + first_pair), gl.load(ks + first_pair)
        X, Y = _both(bits, pair, SHARING, PAIRS, PIECES, NWK, RT)
        async_copy.wait_group(0)
        for n in range(first_pair, end):
            following = gl.minimum(n + 1, end - 1)
            next_pair, next_k = gl.load(order + following), gl.load(ks + following)
            later_X, later_Y = _both(bits, next_pair, SHARING, PAIRS, PIECES, NWK, RT)
            total = zero
            many = (column + r) * 0 + k
            for p in gl.static_range(PIECES):
                for m in gl.static_range(MATRICES):
                    offset_of, low, high = own[p * MATRICES + m]
                    total = _with_offset(total, gl.where(many > 0, offset_of, 0.0), X[p], Y[p], m == 1)
                    for first in gl.static_range(0, C, 4):
                        if first < k:
                            scale = gl.where(first + column % 4 + r * 0 < k, low if first == 0 else high, 0.0)
                            total = _planes(
                                total, first, buffers, planes, at + (p * 8 * NWK + m * WIDTH * WORDS), scale, X[p], Y[p],
                                weights, many, k, m * PIECES + p, UNITS, m == 1, C, CAP,
                            )  # fmt: skip
            result = _activated(total, bias, expert * OUT + tile, WIDTH, NWK, RT, GATED, BIAS, ACT)
            row = tile + gl.arange(0, 16 * RT, result.type.layout)
            gl.store(out + pair.to(gl.int64) * WIDTH + row, result.to(out.dtype.element_ty))
            pair, k, X, Y = next_pair, next_k, later_X, later_Y


@gluon.jit
def _both(bits, pair, SHARING, PAIRS: gl.constexpr, PIECES: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr):
    """The bits of a pair's row: of the first and of the second group of every piece."""
    source, X, Y = bits + (pair // SHARING).to(gl.int64) * (PAIRS * 256), (), ()
    for p in gl.static_range(PIECES):
        X = X + (_sliced(source + p * NWK * 256, PAIRS - p * NWK, NWK, RT),)
        Y = Y + (_sliced(source + (p * NWK * 256 + 128), PAIRS - p * NWK, NWK, RT),)
    return X, Y


@gluon.jit
def _planes(
    total, first: gl.constexpr, buffers, planes, at, scale, X, Y, weights, many, k,
    UNIT: gl.constexpr, UNITS: gl.constexpr, SECOND: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Add the products of planes `first` to `first` + 3; a second plane of two that is not read has scale 0."""
    dots = total * 0.0
    for c in gl.static_range(first, min(first + 4, C), 2):
        if c < k:
            one, other = _two_planes(buffers, planes, at, many, c, UNIT, UNITS, C, CAP)
            dots = _dots(dots, one, other, X, Y, weights, many, c, False)
    return _scaled(total, dots, scale, X, Y, SECOND)


@gluon.jit
def _ask(
    buffers, planes, first_row, first: gl.constexpr, most, WIDTH: gl.constexpr, WORDS: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr,
    CAP: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Copy the planes that are read into shared memory."""
    across: gl.constexpr = 2 * NWK
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [NWK * RT, 1], [1, 0])
    line = first_row + gl.arange(0, 16 * RT, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, 8 * NWK, gl.SliceLayout(0, layout))[None, :]
    for c in gl.static_range(first, LEAST if first < LEAST else CAP):
        if c < most:
            source = planes[c].to(gl.pointer_type(gl.int32)) + line * WORDS
            for p in gl.static_range(PIECES):
                for m in gl.static_range(MATRICES):
                    away = m * WIDTH * WORDS + p * 8 * NWK
                    copy(buffers[c * PIECES * MATRICES + m * PIECES + p], source + (word + away), mask=word + p * 8 * NWK < WORDS)
