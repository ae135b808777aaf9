"""Decode for few pairs by 1-bit products, in Gluon: a program for 16 rows of one pair's expert, then of one token's experts.

NW warps share 16 rows of the weight: warp w takes words 8w … 8w + 7 of a row, two groups. Planes come ahead into shared
memory, up to CAP of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dpamoe.kernels.bitserial_pieces import ask_pieces, find_pieces, give_planes, most_of_warp, place_pieces
from dpamoe.kernels.bitserial_planes import agreed, bring_table, decide, fetch, keep_planes, look
from dpamoe.kernels.bitserial_product import (
    activated,
    add_dots,
    as_words,
    ask_rows,
    buffers_for,
    column_weights,
    cut,
    input_of,
    lane_of,
    places,
    reads,
    room_for_sums,
    scaled,
    scales_of_rows,
    summed,
    two_planes,
    wait_for_copies,
    with_offset,
    words_layout,
)
from dpamoe.kernels.byte_product import add_numbers, numbers_of, spread, tied_rows, tied_scales_of_rows
from dpamoe.kernels.triton_rank import is_held
from dpamoe.kernels.triton_wait import let_next_begin, wait_for_before

_MOVE = gl.constexpr("mov.b32 $0, $1;")


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
    x, ids, chunks, gates, table, budget, k_max, spent, planes, scales, offset, unit, bias, hidden,
    x_token, ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot, row, column, budget_token,
    RULE: gl.constexpr, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    C: gl.constexpr, K_MIN: gl.constexpr, COLUMNS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    COUNT: gl.constexpr, CAP: gl.constexpr, AHEAD: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One pair, 16 rows of its expert (GATED: of both halves): hidden[pair, row] = act(W_k x + bias).

    Rules as in `look`, k as in `keep_planes` where it is not given. Two of the K_MIN first planes do not wait for k. AHEAD: the
    next kernel begins only when k of all pairs most likely was written.
    """
    WIDTH: gl.constexpr = OUT // 2 if GATED else OUT
    MATRICES: gl.constexpr = 2 if GATED else 1
    PIECES: gl.constexpr = (IN + 256 * NW - 1) // (256 * NW)
    EARLY: gl.constexpr = min(K_MIN, CAP, 2)
    tile, pair = gl.program_id(0), gl.program_id(1)
    token, slot = (pair // A).to(gl.int64), pair % A
    bring_table(table, row, tile + pair == 0, E, RULE, NW)
    wait_for_before(PDL, not AHEAD)  # only now may the next begin: it reads ids and gates before its own wait
    expert = gl.load(ids + token * ids_token + slot * ids_slot)
    first_row = gl.where(is_held(expert, E), expert, 0).to(gl.int64) * OUT + tile * 16
    buffers = buffers_for(CAP * PIECES * MATRICES, NW, 1, 8, 1)
    routed = (gates, ids, gates_token, gates_slot, ids_token, ids_slot)
    slots = look(chunks, routed, token, slot, chunks_token, chunks_slot, False, RULE, A, E, C, K_MIN, N, NW)
    lower, upper = _inputs(x + token * x_token, IN, NW, PIECES)
    ask_rows(buffers, planes, first_row, 0, EARLY, gl.where(is_held(expert, E), C, 0), IN, WIDTH, PIECES, MATRICES, NW, 1)
    rule, weight = (table, budget, k_max, row, column, budget_token), (planes, scales, offset, unit + expert)
    told = fetch(slots, rule, token, slot, False, RULE, C, K_MIN, COLUMNS, N, NW, EARLY > 0)
    X, Y = _cut(lower, PIECES, TIED), _cut(upper, PIECES, TIED)
    k = decide(slots, told, slot, False, RULE, C, K_MIN, N, NW)
    _ask_stages(buffers, planes, first_row, EARLY, k, CAP, IN, WIDTH, PIECES, MATRICES, NW)
    if RULE != "given":
        keep_planes(chunks + token * chunks_token + slot * chunks_slot, spent, k, tile == 0, COUNT)
    let_next_begin(PDL and AHEAD)
    if k > 0:
        total = _up_rows(X, Y, buffers, weight, first_row, k, IN, C, CAP, NW, WIDTH, PIECES, MATRICES, TIED)
        total = summed(total, room_for_sums(MATRICES, NW), MATRICES, NW)
        result = activated(total, bias, first_row, 16, WIDTH, GATED, BIAS, ACT)
        gl.store(hidden + pair.to(gl.int64) * WIDTH + lane_of(tile * 16 + gl.arange(0, 16, result.type.layout)), result)


@gluon.jit
def _up_rows(
    X, Y, buffers, weight, row, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, NW: gl.constexpr, WIDTH: gl.constexpr,
    PIECES: gl.constexpr, MATRICES: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """W_k x of 16 rows, and of those WIDTH further on: rows in registers 0 and 1, and in 2 and 3."""
    planes, scales, offset, unit = weight
    if TIED:
        total = _up_rows_tied(
            X, Y, buffers, planes, scales[0], offset, row, k, IN, C, CAP, NW, WIDTH, PIECES, MATRICES, TIED
        ) * gl.load(unit)  # fmt: skip
    else:
        total = _up_rows_free(X, Y, buffers, planes, scales, offset, row, k, IN, C, CAP, NW, WIDTH, PIECES, MATRICES)
    return total


@gluon.jit
def _up_rows_free(
    X, Y, buffers, planes, scales, offset, row, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, NW: gl.constexpr,
    WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr,
):  # fmt: skip
    """`_up_rows` where every plane has scales of its own."""
    r, column = places(NW)
    at = (row + r) * (IN // 32) + column
    total = gl.zeros([16, 8 * NW], gl.float32, words_layout(NW))
    many = (column + r) * 0 + k
    own, words = scales_of_rows(scales, offset, row, k, IN, C, WIDTH, PIECES, MATRICES, NW, 1), ()
    for p in gl.static_range(PIECES):
        of_word = reads(column + p * 8 * NW, many, IN)
        for m in gl.static_range(MATRICES):
            total = with_offset(total, own[p * MATRICES + m][0], X[p], Y[p], m == 1)
            words = words + ((at + (p * 8 * NW + m * WIDTH * (IN // 32)), of_word),)
    weights = column_weights((column + r) * 0)
    for first in gl.static_range(0, C, 4):
        if first < k:
            dots = (total * 0.0,) * (PIECES * MATRICES)
            for c in gl.static_range(first, min(first + 4, C), 2):
                if c < k:
                    if c == 0:
                        wait_for_copies(2)
                    else:
                        async_copy.wait_group(max(0, 2 - c // 2))
                    dots = _dots(dots, X, Y, words, buffers, planes, weights, c, C, CAP, PIECES, MATRICES)
            for p in gl.static_range(PIECES):
                for m in gl.static_range(MATRICES):
                    scale = own[p * MATRICES + m][1 + first // 4]
                    total = scaled(total, dots[p * MATRICES + m], scale, X[p], Y[p], m == 1)
    return total


@gluon.jit
def _inputs(x, IN: gl.constexpr, NW: gl.constexpr, PIECES: gl.constexpr):
    """The row of x: of the first and of the second group of every piece."""
    r, column = places(NW)
    input_ = input_of(r % 8, column % 4, r // 8 + 2 * (column // 4 % 2))
    X, Y = (), ()
    for p in gl.static_range(PIECES):
        start = (p * NW + column // 8) * 256 + input_
        X = X + (gl.load(x + start, mask=start < IN, other=0.0),)
        start += 128
        Y = Y + (gl.load(x + start, mask=start < IN, other=0.0),)
    return X, Y


@gluon.jit
def _cut(parts, PIECES: gl.constexpr, TIED: gl.constexpr):
    """Groups of every piece in 16 bits each."""
    bits = ()
    for p in gl.static_range(PIECES):
        bits = bits + (cut(parts[p].to(gl.float32), TIED),)
    return bits


@gluon.jit
def _up_rows_tied(
    X, Y, buffers, planes, codes, offset, row, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, NW: gl.constexpr,
    WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """`_up_rows` with tied scales, in units of the expert."""
    r, column = places(NW)
    own = tied_scales_of_rows(codes, offset, row + r, column, k, IN, WIDTH, PIECES, MATRICES, NW, TIED)
    wait_for_copies(0)
    at = (row + r) * (IN // 32) + column
    return tied_rows(X, Y, own, buffers, planes, at, column, k, IN, C, CAP, WIDTH, PIECES, MATRICES, NW, 1)


@gluon.jit
def _dots(
    dots, X, Y, words, buffers, planes, weights, c: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, PIECES: gl.constexpr,
    MATRICES: gl.constexpr,
):  # fmt: skip
    """Add the dots of planes c and c + 1 in every piece of all matrices; a second one that is not read has scale 0.

    words: of each, where they stand and how many planes of them are read, a piece of every matrix before the next.
    """
    new = ()
    for p in gl.static_range(PIECES):
        for m in gl.static_range(MATRICES):
            at, of_word = words[p * MATRICES + m]
            one, other = two_planes(buffers, planes, at, of_word, c, m * PIECES + p, PIECES * MATRICES, C, CAP)
            new = new + (add_dots(dots[p * MATRICES + m], one, other, X[p], Y[p], weights, c),)
    return new


@gluon.jit
def down_kernel(
    hidden, ids, chunks, gates, planes, scales, offset, unit, bias, out,
    ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot,
    A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr, C: gl.constexpr,
    K_MIN: gl.constexpr, FOUND: gl.constexpr, AHEAD: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, SPARE: gl.constexpr,
    NW: gl.constexpr, TIED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One token, 16 rows: out[token, row] = sum over slots of gate * (W_k hidden[pair] + bias).

    FOUND: whether the kernel before writes chunks. The K_MIN first planes do not wait for it, as far as they stand in shared
    memory; all others do, which costs less, where K_MIN is 2, than to find k anew. AHEAD: they do not, either, since chunks are
    most likely written when this kernel begins; they are read again behind the wait, and all is done again should they differ.
    SPARE: pieces of shared memory that only keep another program off the multiprocessor.
    """
    PIECES: gl.constexpr = (A * ((IN + 255) // 256) + NW - 1) // NW
    tile, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    buffers = buffers_for(CAP * PIECES + SPARE, NW, 1, 2, 4)
    slots = chunks, (gates, ids, gates_token, gates_slot, ids_token, ids_slot), token, chunks_token, chunks_slot
    weight, row = (planes, scales, offset, unit), tile * 16
    if AHEAD:
        whole, packed, again = gl.zeros([16, 8 * NW], gl.float32, words_layout(NW)), token, tile >= 0
        while again:
            # the same number: what depends on it would otherwise be found before the loop, and kept in registers
            row = gl.inline_asm_elementwise(_MOVE, "=r,r", [tile * 16], gl.int32, False, 1)
            whole, packed, again = _sum_of_slots(
                hidden, slots, buffers, weight, row, A, N, E, OUT, IN, C, K_MIN, FOUND, True, CAP, PIECES, SPARE, NW, TIED, PDL
            )  # fmt: skip
    else:
        whole, packed, _ = _sum_of_slots(
            hidden, slots, buffers, weight, row, A, N, E, OUT, IN, C, K_MIN, FOUND, False, CAP, PIECES, SPARE, NW, TIED, PDL
        )  # fmt: skip
    result = gl.sum(summed(whole, room_for_sums(1, NW), 1, NW), 1)
    at = tile * 16 + gl.arange(0, 16, result.type.layout)
    if BIAS:
        result += _biases(bias, ids + token * ids_token, gates + token * gates_token, packed, at, ids_slot, gates_slot, A, OUT)
    gl.store(out + token * OUT + at, result.to(out.dtype.element_ty))


@gluon.jit
def _sum_of_slots(
    hidden, slots, buffers, weight, row, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    C: gl.constexpr, K_MIN: gl.constexpr, FOUND: gl.constexpr, AHEAD: gl.constexpr, CAP: gl.constexpr, PIECES: gl.constexpr,
    SPARE: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Sum over slots of gate * W_k hidden for 16 rows from `row` on, fp32 words; planes of all slots, in four bits each.

    Then whether chunks changed meanwhile, so that both are of no use.
    """
    EARLY: gl.constexpr = min(K_MIN, CAP)
    _, routed, token, _, _ = slots
    gates, ids, gates_token, gates_slot, ids_token, ids_slot = routed
    planes, scales, offset, unit = weight
    found = find_pieces(ids + token * ids_token, gates + token * gates_token, ids_slot, gates_slot, A, E, IN, PIECES, NW)
    ask_pieces(buffers, planes, found, row, 0, EARLY, OUT, IN, PIECES, NW)
    wait_for_before(PDL and FOUND and not AHEAD)
    every = _planes_of(slots, A, N, E, C, K_MIN, AHEAD, NW)
    if AHEAD:
        every = agreed(every)  # all warps begin anew, or none: they wait for each other
    most = gl.max(every, 0)
    packed = gl.sum(every.to(gl.int64) << 4 * gl.arange(0, N, every.type.layout), 0)
    found = give_planes(found, packed, PIECES)
    ask_pieces(buffers, planes, found, row, EARLY, CAP, OUT, IN, PIECES, NW)
    async_copy.commit_group()
    _hold_spare(buffers, most > C, CAP * PIECES, SPARE, NW)
    pieces = place_pieces(found, scales, offset, unit, token * (A * IN), row, OUT, IN, C, PIECES, NW, TIED)
    wait_for_before(PDL and (AHEAD or not FOUND))
    written = _planes_of(slots, A, N, E, C, K_MIN, AHEAD, NW) if AHEAD else every
    own = most_of_warp(packed, A, IN, PIECES)
    whole = _down_rows(hidden, pieces, buffers, planes, most, own, IN, C, CAP, PIECES, NW, TIED)
    return whole, packed, gl.max((written != every).to(gl.int32), 0) > 0


@gluon.jit
def _planes_of(
    slots, A: gl.constexpr, N: gl.constexpr, E: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, AHEAD: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Planes of a token's slots by chunks, int32 [N]; AHEAD: read anew each time."""
    chunks, routed, token, chunks_token, chunks_slot = slots
    seen = look(chunks, routed, token, 0, chunks_token, chunks_slot, True, "given", A, E, C, K_MIN, N, NW, AHEAD)
    return decide(seen, (), 0, True, "given", C, K_MIN, N, NW)


@gluon.jit
def _hold_spare(buffers, never, first: gl.constexpr, SPARE: gl.constexpr, NW: gl.constexpr):
    """Keep SPARE pieces of shared memory from `first` on, which nobody uses: no compiler knows that `never` is false."""
    if never:
        for spare in gl.static_range(SPARE):
            buffers[first + spare].store(gl.zeros([16, 8 * NW], gl.int32, words_layout(NW)))


@gluon.jit
def _biases(bias, ids, gates, packed, at, ids_slot, gates_slot, A: gl.constexpr, OUT: gl.constexpr):
    """Sum over the slots that read something of gate * bias."""
    total = (at * 0).to(gl.float32)
    for s in gl.static_range(A):
        if ((packed >> (4 * s)) & 15) > 0:
            own = bias + gl.load(ids + s * ids_slot).to(gl.int64) * OUT
            total += gl.load(gates + s * gates_slot).to(gl.float32) * gl.load(own + at).to(gl.float32)
    return total


@gluon.jit
def _down_rows(
    hidden, pieces, buffers, planes, most, own_most, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr,
    PIECES: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """Sum over the slots of gate * W_k hidden, for 16 rows."""
    X, Y = (), ()
    for p in gl.static_range(PIECES):
        source, groups = pieces[p][4:6]
        x = gl.load(hidden + source, mask=groups > 0, other=0.0, cache_modifier=".cg")
        y = gl.load(hidden + 128 + source, mask=groups > 1, other=0.0, cache_modifier=".cg")
        X, Y = X + (as_words(x, NW, 1),), Y + (as_words(y, NW, 1),)
    whole = gl.zeros([16, 8 * NW], gl.float32, words_layout(NW))
    wait_for_copies(0)
    X, Y = _cut(X, PIECES, TIED), _cut(Y, PIECES, TIED)
    if TIED:
        for p in gl.static_range(PIECES):
            k, of_word, at, gate, _, _, own = pieces[p]
            whole += gate * _tied_dot(X[p], Y[p], own, buffers, planes, at, k, of_word, most, p, PIECES, C, CAP)
    else:
        found = _free_dots(X, Y, pieces, buffers, planes, own_most, C, CAP, PIECES, NW)
        for p in gl.static_range(PIECES):
            whole += pieces[p][3] * found[p]
    return whole


@gluon.jit
def _free_dots(
    X, Y, pieces, buffers, planes, most, C: gl.constexpr, CAP: gl.constexpr, PIECES: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """What every pair of groups of each warp adds, scales of its own for every plane.

    A warp takes as many planes as any of its own slots reads (`most`), each plane in all pieces before the next: no warp may
    wait for the others in here. What a slot does not read has scale 0; a branch around each product cost more, since those
    before and behind it do not overlap.
    """
    r, column = places(NW)
    weights = column_weights((column + r) * 0)
    zero, totals, words = (X[0] * 0).to(gl.float32), (), ()
    for p in gl.static_range(PIECES):
        totals = totals + (with_offset(zero, pieces[p][6][0], X[p], Y[p], False),)
        words = words + ((pieces[p][2], pieces[p][1]),)
    for first in gl.static_range(0, C, 4):
        if first < most:
            dots = (zero,) * PIECES
            for c in gl.static_range(first, min(first + 4, C), 2):
                if c < most:
                    dots = _dots(dots, X, Y, words, buffers, planes, weights, c, C, CAP, PIECES, 1)
            totals = _scaled_pieces(totals, dots, X, Y, pieces, first, PIECES)
    return totals


@gluon.jit
def _scaled_pieces(totals, dots, X, Y, pieces, first: gl.constexpr, PIECES: gl.constexpr):
    """Add the dots of planes `first` to `first` + 3, times their scales."""
    new = ()
    for p in gl.static_range(PIECES):
        new = new + (scaled(totals[p], dots[p], pieces[p][6][1 + first // 4], X[p], Y[p], False),)
    return new


@gluon.jit
def _tied_dot(
    X, Y, own, buffers, planes, at, k, of_word, most, p: gl.constexpr, PIECES: gl.constexpr, C: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """What the p-th pair of groups of each warp adds, with tied scales; of_word: planes that are read of each word."""
    spread_x, spread_y, zero = spread(X), spread(Y), (X * 0).to(gl.float32)
    numbers = numbers_of(buffers, planes, at, of_word, most, p, PIECES, C, CAP)
    return add_numbers(zero, numbers, own, k, X, Y, spread_x, spread_y, False)
