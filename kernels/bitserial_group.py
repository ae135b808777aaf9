"""Several tokens by 1-bit products, in Gluon: planes are read once for all pairs of an expert."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dpamoe.kernels.bitserial_asm import WEIGHTS, WEIGHTS_LETTERS
from dpamoe.kernels.bitserial_decode import _activated, _buffers, _four_planes, _scales_of, _with_offset, copy, words_layout
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
    CAP: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr, PDL: gl.constexpr,
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
    most = first_pair * 0
    for n in range(first_pair, end):
        most = gl.maximum(most, gl.load(ks + n))
    if most > 0:
        buffers = _buffers(CAP * UNITS, NWK, RT, 8 if NWK > 1 else 2, 1 if NWK > 2 else 4 // NWK)
        first_row = expert * OUT + tile
        _ask(buffers, planes, first_row, most, WIDTH, WORDS, PIECES, MATRICES, CAP, NWK, RT)
        layout: gl.constexpr = words_layout(NWK, RT)
        r = gl.arange(0, 16 * RT, gl.SliceLayout(1, layout))[:, None]
        column = gl.arange(0, 8 * NWK, gl.SliceLayout(0, layout))[None, :]
        group = column // 8 * 2 + column // 4 % 2
        at, scale_at = (first_row + r) * WORDS + column, (first_row + r) * (IN // 128) + group
        zero = gl.zeros([16 * RT, 8 * NWK], gl.float32, layout)
        weights = gl.inline_asm_elementwise(WEIGHTS, WEIGHTS_LETTERS, [column + r * 0], gl.int32, True, 4)
        own = ()
        for p in gl.static_range(PIECES):
            for m in gl.static_range(MATRICES):
                inside = (group + p * 2 * NWK < IN // 128) & (r >= 0)
                away = m * WIDTH * (IN // 128) + p * 2 * NWK
                own = own + (_scales_of(scales, offset, scale_at + away, most, column, inside, C),)
        async_copy.wait_group(0)
        for n in range(first_pair, end):
            pair, k = gl.load(order + n), gl.load(ks + n)
            source = bits + (pair // SHARING).to(gl.int64) * (PAIRS * 256)
            total = zero
            many = (column + r) * 0 + k
            for p in gl.static_range(PIECES):
                X = _sliced(source + p * NWK * 256, PAIRS - p * NWK, NWK, RT)
                Y = _sliced(source + (p * NWK * 256 + 128), PAIRS - p * NWK, NWK, RT)
                for m in gl.static_range(MATRICES):
                    offset_of, low, high = own[p * MATRICES + m]
                    total = _with_offset(total, gl.where(many > 0, offset_of, 0.0), X, Y, m == 1)
                    for first in gl.static_range(0, C, 4):
                        if first < k:
                            scale = gl.where(first + column % 4 + r * 0 < k, low if first == 0 else high, 0.0)
                            total = _four_planes(
                                total, first, buffers, planes, at + (p * 8 * NWK + m * WIDTH * WORDS), scale, X, Y,
                                weights, many, k, m * PIECES + p, UNITS, m == 1, C, CAP,
                            )  # fmt: skip
            result = _activated(total, bias, expert * OUT + tile, WIDTH, NWK, RT, GATED, BIAS, ACT)
            row = tile + gl.arange(0, 16 * RT, result.type.layout)
            gl.store(out + pair.to(gl.int64) * WIDTH + row, result.to(out.dtype.element_ty))


@gluon.jit
def _ask(
    buffers, planes, first_row, most, WIDTH: gl.constexpr, WORDS: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr,
    CAP: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr,
):  # fmt: skip
    """Copy the planes that are read into shared memory."""
    across: gl.constexpr = 2 * NWK
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [NWK * RT, 1], [1, 0])
    line = first_row + gl.arange(0, 16 * RT, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, 8 * NWK, gl.SliceLayout(0, layout))[None, :]
    for c in gl.static_range(CAP):
        if c < most:
            source = planes[c].to(gl.pointer_type(gl.int32)) + line * WORDS
            for p in gl.static_range(PIECES):
                for m in gl.static_range(MATRICES):
                    away = m * WIDTH * WORDS + p * 8 * NWK
                    copy(buffers[c * PIECES * MATRICES + m * PIECES + p], source + (word + away), mask=word + p * 8 * NWK < WORDS)
    async_copy.commit_group()
