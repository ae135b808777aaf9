"""Several tokens by 1-bit products, in Gluon: planes are read once for all pairs of an expert."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dpamoe.kernels.bitserial_product import (
    activated,
    add_dots,
    as_words,
    ask_rows,
    buffers_for,
    column_weights,
    cut,
    lane_of,
    lane_places,
    of_warps,
    reads,
    room_for_pairs,
    scaled,
    scales_of_rows,
    sums_of_pairs,
    two_planes,
    wait_for_copies,
    with_offset,
    words_layout,
)
from dpamoe.kernels.byte_product import put_together, stored_rows, tied_rows, tied_scales_of_rows
from dpamoe.kernels.triton_wait import wait_for_before


@gluon.jit
def _sliced(bits, there, NWK: gl.constexpr, RT: gl.constexpr):
    """The bits of one of two groups for every warp along the inputs, as words [16 RT, 8 NWK]; bits: pointer to 256 inputs.

    there: how many warps have inputs.
    """
    lane, register = lane_places(NWK * RT)
    warp = lane // 32 % NWK
    value = gl.load(bits + (warp * 64 + lane % 32) * 4 + register, mask=warp < there, other=0)
    return as_words(value, NWK, RT)


@gluon.jit
def group_kernel(
    bits, order, ks, entries, planes, scales, offset, unit, bias, out, SHARING: gl.constexpr, OUT: gl.constexpr,
    IN: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    CAP: gl.constexpr, ROOM: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr, CUT: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """16 RT rows (GATED: of both halves) of an expert for all its pairs: out[pair, row] = act(W_k x + bias).

    bits: of row pair // SHARING, as `bitserial_rows` leaves them, or (CUT, where a warp has all inputs) rows of fp32 that are
    cut here. Those, and out where warps share inputs, stand in the order of lanes (`lane_of`). A program takes one of entries;
    the last tile may overlap. AHEAD: planes are asked for at once: the kernel before lets this one begin after its own wait,
    when order and ks are there. ROOM: for planes, of which CAP are copied; 8: with tied scales numbers take their place.
    """
    WIDTH: gl.constexpr = OUT // 2 if GATED else OUT
    MATRICES: gl.constexpr = 2 if GATED else 1
    PIECES: gl.constexpr = (IN + 256 * NWK - 1) // (256 * NWK)
    wait_for_before(PDL and not AHEAD)
    expert, begin, end, first = _entry(entries + 4 * gl.program_id(1), NWK * RT)
    tile, row = _first_row(expert, OUT, WIDTH, 16 * RT)
    if begin < end:
        buffers = buffers_for(ROOM * PIECES * MATRICES, NWK, RT, 8 if NWK > 1 else 2, 1 if NWK > 2 else 4 // NWK)
        most = _most(ks, begin, end, first, NWK * RT)
        ask_rows(buffers, planes, row, 0, CAP, most, IN, WIDTH, PIECES, MATRICES, NWK, RT)
        async_copy.commit_group()
        own = _scales(scales, offset, unit + expert, row, most, IN, C, WIDTH, PIECES, MATRICES, NWK, RT, TIED)
        pair, k = gl.load(order + begin), gl.load(ks + begin)
        if AHEAD:
            wait_for_before(PDL)
        if NWK > 1:
            _shared_pairs(
                bits, order, ks, bias, out, pair, k, begin, end, tile, row, own, buffers, planes, SHARING,
                IN, C, CAP, ROOM, WIDTH, PIECES, GATED, ACT, BIAS, NWK, TIED,
            )  # fmt: skip
        else:
            _pairs(
                bits, order, ks, bias, out, pair, k, begin, end, tile, row, own, buffers, planes, SHARING,
                IN, C, CAP, ROOM, WIDTH, PIECES, GATED, ACT, BIAS, RT, CUT, TIED,
            )  # fmt: skip
    elif AHEAD:
        wait_for_before(PDL)


@gluon.jit
def _scales(
    scales, offset, unit, row, most, IN: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
    MATRICES: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """What products of a tile are scaled by: `scales_of_rows`, or (TIED) the unit of the expert, planes of the pair that reads
    most, and `tied_scales_of_rows`.
    """
    if TIED:
        line, column = _rows_and_columns(row, NWK, RT)
        each = tied_scales_of_rows(scales[0], offset, line, column, most, IN, WIDTH, PIECES, MATRICES, NWK, TIED)
        own = gl.load(unit), most, each
    else:
        own = scales_of_rows(scales, offset, row, most, IN, C, WIDTH, PIECES, MATRICES, NWK, RT)
    return own


@gluon.jit
def _rows_and_columns(first_row, NWK: gl.constexpr, RT: gl.constexpr):
    """Row of the weight and column of each word [16 RT, 8 NWK]."""
    layout: gl.constexpr = words_layout(NWK, RT)
    row = first_row + gl.arange(0, 16 * RT, gl.SliceLayout(1, layout))[:, None]
    return row, gl.arange(0, 8 * NWK, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _first_row(expert, OUT: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """The first row of a program, of its expert and of the weight."""
    tile = gl.program_id(0) * ROWS
    if WIDTH % ROWS > 0:
        tile = gl.minimum(tile, WIDTH - ROWS)
    return tile, expert.to(gl.int64) * OUT + tile


@gluon.jit
def _pairs(
    bits, order, ks, bias, out, pair, k, begin, end, tile, row, own, buffers, planes, SHARING: gl.constexpr,
    IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, ROOM: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RT: gl.constexpr, CUT: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """Rows, all inputs of which are in one warp, for pairs begin … end - 1; pair, k: the first one, and its planes."""
    MATRICES: gl.constexpr = 2 if GATED else 1
    line, column = _rows_and_columns(row, 1, RT)
    weights = column_weights((column + line.to(gl.int32)) * 0)
    rooms, given = room_for_bits(PIECES, RT, CUT), _given(bits, pair, SHARING, IN, PIECES, RT, CUT)
    wait_for_copies(0)
    if TIED and ROOM == 8:
        put_together(buffers, planes, line * (IN // 32) + column, own[1], PIECES * MATRICES, C)
    for n in range(begin, end):
        next_pair, next_k = gl.load(order + gl.minimum(n + 1, end - 1)), gl.load(ks + gl.minimum(n + 1, end - 1))
        later = _given(bits, next_pair, SHARING, IN, PIECES, RT, CUT)
        X, Y = _in_every_warp(given, rooms, PIECES, RT, CUT, TIED)
        total = _rows(
            X, Y, own, buffers, planes, line, column, weights, k, IN, C, CAP, ROOM, WIDTH, PIECES, MATRICES, 1, RT,
            TIED,
        )  # fmt: skip
        sums = gl.sum(total.reshape([16 * RT, MATRICES, 8 // MATRICES]), 2)
        result = activated(sums, bias, row, 16 * RT, WIDTH, GATED, BIAS, ACT)
        at = tile + gl.arange(0, 16 * RT, result.type.layout)
        gl.store(out + pair.to(gl.int64) * WIDTH + at, result.to(out.dtype.element_ty))
        pair, k, given = next_pair, next_k, later


@gluon.jit
def _shared_pairs(
    bits, order, ks, bias, out, pair, k, begin, end, tile, row, own, buffers, planes, SHARING: gl.constexpr,
    IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, ROOM: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """16 rows, the inputs of which NW warps share, for pairs begin … end - 1; the sums of NW pairs are exchanged at once.

    out: as the second product reads it, every group of 128 in the order of lanes (`lane_of`).
    """
    MATRICES: gl.constexpr = 2 if GATED else 1
    line, column = _rows_and_columns(row, NW, 1)
    weights, room = column_weights((column + line.to(gl.int32)) * 0), room_for_pairs(MATRICES, NW)
    X, Y = _both(bits, pair, SHARING, IN, PIECES, NW, 1)
    wait_for_copies(0)
    if TIED and ROOM == 8:
        put_together(buffers, planes, line * (IN // 32) + column, own[1], PIECES * MATRICES, C)
    order, ks, count = order + begin, ks + begin, end - begin
    for n in range(0, count):
        next_pair = gl.load(order + n + 1, mask=n + 1 < count, other=0)
        next_k = gl.load(ks + n + 1, mask=n + 1 < count, other=0)
        later = _both(bits, next_pair, SHARING, IN, PIECES, NW, 1)
        total = _rows(
            X, Y, own, buffers, planes, line, column, weights, k, IN, C, CAP, ROOM, WIDTH, PIECES, MATRICES, NW, 1,
            TIED,
        )  # fmt: skip
        number = n % NW
        room.index(number).store(of_warps(total, MATRICES, NW))
        if (number == NW - 1) | (n + 1 == count):
            result = activated(sums_of_pairs(room, MATRICES, NW), bias, row, 16, WIDTH, GATED, BIAS, ACT)
            place = gl.arange(0, 16 * NW, result.type.layout)
            there = place // 16 <= number
            own_pair = gl.load(order + (n - number + place // 16), mask=there, other=0)
            gl.store(out + (own_pair * WIDTH + lane_of(tile + place % 16)), result.to(out.dtype.element_ty), mask=there)
        k, X, Y = next_k, later[0], later[1]


@gluon.jit
def _entry(entry, NW: gl.constexpr):
    """Expert, where its pairs begin and end, planes of the first: four numbers by one load."""
    place = gl.arange(0, 4, gl.BlockedLayout([4], [32], [NW], [0]))
    found, four = gl.load(entry + place), ()
    for i in gl.static_range(4):
        four = four + (gl.sum(gl.where(place == i, found, 0), 0),)
    return four


@gluon.jit
def _most(ks, begin, end, first, NW: gl.constexpr):
    """The most planes of an expert's pairs; first: those of the first pair."""
    most = first
    if begin + 1 < end:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [NW], [0]))
        for n in range(begin, end, 32):
            most = gl.maximum(most, gl.max(gl.load(ks + n + lane, mask=n + lane < end, other=0), 0))
    return most


@gluon.jit
def _rows(
    X, Y, own, buffers, planes, row, column, weights, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
    ROOM: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr, NWK: gl.constexpr,
    RT: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """W_k x of the tile's rows: of the first matrix in registers 0 and 1, of the second in 2 and 3."""
    if TIED:
        if ROOM == 8:
            many = (column + row.to(gl.int32)) * 0 + k
            total = stored_rows(X, Y, own[2], buffers, many, k, own[1], PIECES, MATRICES, NWK, RT)
        else:
            at = row * (IN // 32) + column
            total = tied_rows(X, Y, own[2], buffers, planes, at, column, k, IN, C, CAP, WIDTH, PIECES, MATRICES, NWK, RT)
        total *= own[0]
    else:
        total = _scaled_rows(
            X, Y, own, buffers, planes, row, column, weights, k, IN, C, CAP, WIDTH, PIECES, MATRICES, NWK, RT
        )  # fmt: skip
    return total


@gluon.jit
def _scaled_rows(
    X, Y, own, buffers, planes, row, column, weights, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
    WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr,
):  # fmt: skip
    """`_rows` where every plane has a scale of its own."""
    total = gl.zeros([16 * RT, 8 * NWK], gl.float32, words_layout(NWK, RT))
    many = (column + row.to(gl.int32)) * 0 + k
    for p in gl.static_range(PIECES):
        of_word = reads(column + p * 8 * NWK, many, IN)
        for m in gl.static_range(MATRICES):
            found = own[p * MATRICES + m]
            total = with_offset(total, gl.where(many > 0, found[0], 0), X[p], Y[p], m == 1)
            for first in gl.static_range(0, C, 4):
                if first < k:
                    scale = gl.where(column % 4 + many * 0 < k - first, found[1 + first // 4], 0)
                    at = (row + m * WIDTH) * (IN // 32) + (column + p * 8 * NWK)
                    total = _planes(
                        total, first, buffers, planes, at, scale, X[p], Y[p], weights, of_word, k,
                        m * PIECES + p, PIECES * MATRICES, m == 1, C, CAP,
                    )  # fmt: skip
    return total


@gluon.jit
def _both(bits, pair, SHARING, IN: gl.constexpr, PIECES: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr):
    """The bits of a pair's row: of the first and of the second group of every piece."""
    PAIRS: gl.constexpr = (IN + 255) // 256
    source, X, Y = bits + (pair // SHARING).to(gl.int64) * (PAIRS * 256), (), ()
    for p in gl.static_range(PIECES):
        X = X + (_sliced(source + p * NWK * 256, PAIRS - p * NWK, NWK, RT),)
        Y = Y + (_sliced(source + (p * NWK * 256 + 128), PAIRS - p * NWK, NWK, RT),)
    return X, Y


@gluon.jit
def room_for_bits(PIECES: gl.constexpr, RT: gl.constexpr, CUT: gl.constexpr):
    """Shared memory in which RT warps exchange the groups that each has cut, RT groups in each part."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    rooms = ()
    if CUT:
        for _ in gl.static_range((2 * PIECES + RT - 1) // RT):
            rooms = rooms + (gl.allocate_shared_memory(gl.int32, [32 * RT, 4], shared),)
    return rooms


@gluon.jit
def _given(rows, pair, SHARING: gl.constexpr, IN: gl.constexpr, PIECES: gl.constexpr, RT: gl.constexpr, CUT: gl.constexpr):
    """The bits of a pair's row, or (CUT) its numbers in the order of lanes, RT groups at a time, one for each warp."""
    if CUT:
        lane, register = lane_places(RT)
        source, found = rows + (pair // SHARING).to(gl.int64) * IN, ()
        for first in gl.static_range(0, 2 * PIECES, RT):
            at = first * 128 + lane * 4 + register
            found = found + (gl.load(source + at, mask=at < IN, other=0.0, cache_modifier=".cg"),)
    else:
        found = _both(rows, pair, SHARING, IN, PIECES, 1, RT)
    return found


@gluon.jit
def _in_every_warp(given, rooms, PIECES: gl.constexpr, RT: gl.constexpr, CUT: gl.constexpr, TIED: gl.constexpr):
    """The bits of all groups, as `_both` gives them; CUT: each group is cut by one warp."""
    if CUT:
        whole: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [RT, 1, 1], [2, 1, 0])
        X, Y = (), ()
        for i in gl.static_range((2 * PIECES + RT - 1) // RT):
            rooms[i].store(cut(given[i], TIED))
        for group in gl.static_range(2 * PIECES):
            own = rooms[group // RT].slice(32 * (group % RT), 32).load(gl.SliceLayout(0, whole))
            value = as_words(own[None, :, :].broadcast_to([RT, 32, 4]), 1, RT)
            if group % 2 == 0:
                X = X + (value,)
            else:
                Y = Y + (value,)
    else:
        X, Y = given[0], given[1]
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
            one, other = two_planes(buffers, planes, at, many, c, UNIT, UNITS, C, CAP)
            dots = add_dots(dots, one, other, X, Y, weights, c)
    return scaled(total, dots, scale, X, Y, SECOND)
