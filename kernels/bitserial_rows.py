"""What 1-bit products for several tokens need first, in Gluon: rows cut into bits, and pairs in the order of their experts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.bitserial_planes import bring_table, decide, fetch, look, square_layout
from dpamoe.kernels.bitserial_product import cut, input_of, lane_places
from dpamoe.kernels.triton_rank import is_held
from dpamoe.kernels.triton_wait import wait_for_before


@gluon.jit
def cut_row(x, bits, part, IN: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr, LANES: gl.constexpr):
    """Write the bits of inputs 256 NW `part` on: int32 [IN / 256, 2 groups, 32 lanes, 4], as `bitserial_asm.SLICE` has them.

    LANES: x stands in the order of lanes (`lane_of`).
    """
    lane, register = lane_places(NW)
    pair, values = part * NW + lane // 32, ()
    for group in gl.static_range(2):
        own = lane % 32 * 4 + register if LANES else input_of(lane % 32 // 4, lane % 4, register)
        at = pair * 256 + 128 * group + own
        values = values + (gl.load(x + at, mask=at < IN, other=0.0, cache_modifier=".cg").to(gl.float32),)
    for group in gl.static_range(2):
        gl.store(bits + ((pair * 2 + group) * 32 + lane % 32) * 4 + register, cut(values[group], TIED), mask=pair * 256 < IN)


@gluon.jit
def cut_kernel(x, bits, x_row, IN: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr, PDL: gl.constexpr):
    """Cut row program_id(0) of x, in the order of lanes, into bits, 256 NW inputs from 256 NW program_id(1) on."""
    wait_for_before(PDL)
    row = gl.program_id(0).to(gl.int64)
    cut_row(x + row * x_row, bits + row * ((IN + 255) // 256 * 256), gl.program_id(1), IN, NW, TIED, True)


@gluon.jit
def _ranks(
    ids, token, pairs, ids_token, ids_slot, A: gl.constexpr, E: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Of a token's slots: how many pairs have a smaller expert, how many the same, how many of those come before; int32 [N].

    Then how many experts the tokens before have.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, max(1, P // 32)], [1, 32], [NW, 1], [1, 0])
    slot = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    other = gl.arange(0, P, gl.SliceLayout(0, layout))[None, :]
    own = gl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E)
    key = gl.load(ids + (other // A).to(gl.int64) * ids_token + other % A * ids_slot, mask=other < pairs, other=E)
    own, key = gl.where(is_held(own, E), own, E).to(gl.int32), gl.where(is_held(key, E), key, E).to(gl.int32)
    there, first = other < pairs, token.to(gl.int32) * A
    less = gl.sum((there & (key < own)).to(gl.int32), 1)
    same = gl.sum((there & (key == own)).to(gl.int32), 1)
    before = gl.sum((there & (key == own) & (other < first + slot)).to(gl.int32), 1)
    experts = _different(gl.where(other < first, key, E), E, layout)
    # in one number, so that warps exchange it at once
    packed = less.to(gl.int64) | (same.to(gl.int64) << 20) | (before.to(gl.int64) << 40)
    packed = gl.convert_layout(packed, gl.SliceLayout(0, square_layout(N, NW)))
    return (packed & 0xFFFFF).to(gl.int32), ((packed >> 20) & 0xFFFFF).to(gl.int32), (packed >> 40).to(gl.int32), experts


@gluon.constexpr_function
def words_of(E):
    """Words of 32 bits, a power of two, that have a bit for each of E numbers."""
    return 1 << ((E - 1) // 32).bit_length()


@gluon.jit
def _different(key, E: gl.constexpr, layout: gl.constexpr):
    """How many numbers below E are among key, int32 [1, P] in this layout."""
    word = gl.arange(0, words_of(E), gl.SliceLayout(1, layout))[:, None]
    seen = gl.reduce_or(gl.where((key < E) & (key // 32 == word), 1 << key % 32, 0), 1)[:, None]
    return gl.sum(gl.sum(seen >> gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :] & 1, 1), 0)


@gluon.jit
def _before(flags, N: gl.constexpr, NW: gl.constexpr):
    """Of each slot: how many before it are marked; flags int32 [N], along the second dimension of `square_layout`."""
    layout: gl.constexpr = square_layout(N, NW)
    slot, rival = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :], gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    return gl.sum(gl.where(rival < slot, gl.convert_layout(flags, gl.SliceLayout(1, layout))[:, None], 0), 0)


@gluon.jit
def order_kernel(
    x, bits, ids, chunks, gates, table, budget, k_max, order, ks, entries, pairs, x_token, ids_token, ids_slot,
    chunks_token, chunks_slot, gates_token, gates_slot, row, column_of, budget_token, RULE: gl.constexpr, A: gl.constexpr,
    N: gl.constexpr, E: gl.constexpr, IN: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, COLUMNS: gl.constexpr,
    P: gl.constexpr, PARTS: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One token: its row cut into bits (in PARTS programs), and (in one more) planes of its pairs and their places.

    order, ks int32 [pairs]: pairs by expert, and their planes. entries int32 [E or pairs, 4], the fewer: an expert, where its
    pairs begin and end, planes of the first. They stand in the order in which experts first occur, so that those of many pairs
    tend to be early; each pair whose expert has an entry already leaves an empty one, the first such pair at the very end.
    """
    token, part = gl.program_id(0).to(gl.int64), gl.program_id(1)
    bring_table(table, row, (part == PARTS) & (token == 0), E, RULE, NW)
    wait_for_before(PDL)
    if part < PARTS:
        cut_row(x + token * x_token, bits + token * ((IN + 255) // 256 * 256), part, IN, NW, TIED, False)
    else:
        slot = gl.arange(0, N, gl.SliceLayout(0, square_layout(N, NW)))
        routed = (gates, ids, gates_token, gates_slot, ids_token, ids_slot)
        rule = (table, budget, k_max, row, column_of, budget_token)
        slots = look(chunks, routed, token, 0, chunks_token, chunks_slot, True, RULE, A, E, C, K_MIN, N, NW)
        told = fetch(slots, rule, token, 0, True, RULE, C, K_MIN, COLUMNS, N, NW, False)
        expert = gl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E)
        less, same, before, experts = _ranks(ids, token, pairs, ids_token, ids_slot, A, E, N, P, NW)
        k = decide(slots, told, 0, True, RULE, C, K_MIN, N, NW)
        k = gl.convert_layout(k, gl.SliceLayout(0, square_layout(N, NW)))
        if RULE != "given":
            gl.store(chunks + token * chunks_token + slot * chunks_slot, k, mask=slot < A)
        place, number = less + before, token.to(gl.int32) * A + slot
        gl.store(order + place, number, mask=slot < A)
        gl.store(ks + place, k, mask=slot < A)
        first = is_held(expert, E) & (before == 0)
        entry = experts + _before(first.to(gl.int32), N, NW)
        entry = gl.where(first, entry, pairs - 1 - number + entry)
        there = (slot < A) & (entry < E)
        gl.store(entries + 4 * entry, gl.where(first, expert, 0).to(gl.int32), mask=there)
        gl.store(entries + 4 * entry + 1, less, mask=there)
        gl.store(entries + 4 * entry + 2, gl.where(first, less + same, less), mask=there)
        gl.store(entries + 4 * entry + 3, k, mask=there)
