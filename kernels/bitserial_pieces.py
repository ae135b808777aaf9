"""What each warp has of a token's second product, in Gluon: pairs of groups of its slots, found, asked for and placed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.bitserial_product import (
    copy,
    lane_layout,
    lane_places,
    pair_places,
    pairs_layout,
    places,
    reads,
    scales_of,
    words_layout,
)
from dpamoe.kernels.byte_product import tied_scales
from dpamoe.kernels.triton_rank import is_held

# the number of a warp, the same in all its lanes for the compiler, too
_WARP = gl.constexpr("{ .reg .b32 w; mov.u32 w, %tid.x; shr.b32 w, w, 5; shfl.sync.idx.b32 $0, w, $1, 31, 0xffffffff; }")


@gluon.constexpr_function
def own_copy_layout(NW):
    """[16, 8 NW] words copied 16 bytes at a time, each warp the 8 columns that it will read."""
    warps = [[0, 8 << i] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 4], [1, 0], [2, 0], [4, 0], [8, 0]], warps, [], [16, 8 * NW])


@gluon.constexpr_function
def by_warp(layout, NW):
    """The layout of words [16, 8 NW] with a dimension for the warps, [16, NW, 8]."""
    lanes = [[base[0], 0, base[1]] for base in layout.lane_bases]
    regs = [[base[0], 0, base[1]] for base in layout.reg_bases]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 1 << i, 0] for i in range(NW.bit_length() - 1)], [], [16, NW, 8])


@gluon.jit
def _spread(value, layout: gl.constexpr, NW: gl.constexpr):
    """One number of each warp [NW], as a tensor of words."""
    value = gl.convert_layout(value, gl.SliceLayout(0, gl.SliceLayout(2, by_warp(layout, NW))), assert_trivial=True)
    whole = value[None, :, None].broadcast_to([16, NW, 8]).reshape([16, 8 * NW])
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.jit
def _beside(value, NW: gl.constexpr):
    """One number of each warp [NW], along the middle of `pairs_layout`."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, pairs_layout(NW)))
    return gl.convert_layout(value, layout, assert_trivial=True)[None, :, None]


@gluon.constexpr_function
def by_warp_and_lane(NW):
    """`lane_layout` with a dimension for the warps, [NW, 32, 4]."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [NW, 1, 1], [2, 1, 0])


@gluon.jit
def _in_lanes(value, NW: gl.constexpr):
    """One number of each warp [NW], in each register of `lane_layout`."""
    value = gl.convert_layout(value, gl.SliceLayout(1, gl.SliceLayout(2, by_warp_and_lane(NW))), assert_trivial=True)
    whole = value[:, None, None].broadcast_to([NW, 32, 4]).reshape([32 * NW, 4])
    return gl.convert_layout(whole, lane_layout(NW), assert_trivial=True)


@gluon.jit
def _groups_in_lanes(row, pair, k, IN: gl.constexpr, NW: gl.constexpr):
    """Where lanes find the first group of a pair of groups in rows that stand in their order, and how many are to be read."""
    lane, register = lane_places(NW)
    place = lane % 32 * 4 + register
    source = gl.max_contiguous(gl.multiple_of(_in_lanes(row + pair * 256, NW) + place, [1, 4]), [1, 4])
    groups = gl.minimum(_in_lanes(gl.where(k > 0, IN // 128 - 2 * pair, 0), NW), 2)
    return source, gl.max_constancy(groups, [1, 4])


@gluon.jit
def find_pieces(
    ids, gates, ids_slot, gates_slot, A: gl.constexpr, E: gl.constexpr, IN: gl.constexpr, PIECES: gl.constexpr, NW: gl.constexpr
):
    """Pairs of groups of each warp: planes that there may be, expert, slot, number in the row, gate; all [NW]."""
    PAIRS: gl.constexpr = (IN + 255) // 256
    warp = gl.arange(0, NW, gl.SliceLayout(0, gl.SliceLayout(2, by_warp(words_layout(NW), NW))))
    found = ()
    for p in gl.static_range(PIECES):
        number = warp * PIECES + p
        slot, there = gl.minimum(number // PAIRS, A - 1), number < A * PAIRS
        expert = gl.load(ids + slot * ids_slot, mask=there, other=E)
        gate = gl.load(gates + slot * gates_slot, mask=there, other=0.0).to(gl.float32)
        held = is_held(expert, E)
        found = found + ((gl.where(held, 15, 0), gl.where(held, expert, 0).to(gl.int64), slot, number % PAIRS, gate),)
    return found


@gluon.jit
def give_planes(found, packed, PIECES: gl.constexpr):
    """Pairs of groups as `find_pieces` finds them, with the planes that are read, and gates that are 0 where none is.

    packed: planes of every slot in four bits each, none of which is read of padding.
    """
    known = ()
    for p in gl.static_range(PIECES):
        most, expert, slot, pair, gate = found[p]
        k = (packed >> (4 * slot)).to(gl.int32) & most
        known = known + ((k, expert, slot, pair, gl.where(k > 0, gate, 0.0)),)
    return known


@gluon.jit
def most_of_warp(packed, A: gl.constexpr, IN: gl.constexpr, PIECES: gl.constexpr):
    """The most planes that any slot of this warp's pairs of groups reads, another number in each warp."""
    PAIRS: gl.constexpr = (IN + 255) // 256
    first = gl.inline_asm_elementwise(_WARP, "=r,r", [0], gl.int32, True, 1) * PIECES
    most = 0
    for p in gl.static_range(0, PIECES, PIECES if PAIRS % PIECES == 0 else 1):
        slot = gl.minimum((first + p) // PAIRS, A - 1)
        most = gl.maximum(most, (packed >> (4 * slot)).to(gl.int32) & 15)
    return most


@gluon.jit
def ask_pieces(
    buffers, planes, found, first_row, first: gl.constexpr, last: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr,
    PIECES: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Copy planes first … last - 1, as far as they are read, of every warp's pairs of groups."""
    copied: gl.constexpr = own_copy_layout(NW)
    word = gl.arange(0, 8 * NW, gl.SliceLayout(0, copied))[None, :] % 8
    line = first_row + gl.arange(0, 16, gl.SliceLayout(1, copied))[:, None]
    for p in gl.static_range(PIECES):
        k, expert, _, pair, _ = found[p]
        own = gl.max_contiguous(gl.multiple_of(_spread(pair, copied, NW) * 8 + word, [1, 4]), [1, 4])
        at = (_spread(expert * OUT, copied, NW) + line) * (IN // 32) + own
        at = gl.max_contiguous(gl.multiple_of(at, [1, 4]), [1, 4])
        reached = gl.max_constancy(gl.where(own < IN // 32, _spread(k, copied, NW), 0), [1, 4])
        for c in gl.static_range(first, last):
            copy(buffers[c * PIECES + p], planes[c].to(gl.pointer_type(gl.int32)) + at, mask=c < reached)


@gluon.jit
def place_pieces(
    found, scales, offset, unit, first_input, first_row, OUT: gl.constexpr, IN: gl.constexpr, C: gl.constexpr,
    PIECES: gl.constexpr, NW: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """Of each piece: planes, also of each word, where words stand, gate, where lanes find their inputs, how many groups of them
    there are to read (both in `lane_layout`), scales.
    """
    r, column = places(NW)
    line, _, own = pair_places(NW, 1)
    words: gl.constexpr = words_layout(NW)
    pieces = ()
    for p in gl.static_range(PIECES):
        k, expert, slot, pair, gate = found[p]
        row = expert * OUT
        if TIED:
            gate *= gl.load(unit + expert)
            of_row, of_word = _spread(row, words, NW) + (first_row + r), _spread(pair, words, NW) * 8 + column % 8
            scale = tied_scales(scales[0], offset, of_row, of_word, _spread(k, words, NW) > 0, IN, TIED)
        else:
            of_row, of_pair, of_k = _beside(row, NW) + (first_row + line), _beside(pair, NW), _beside(k, NW)
            scale = scales_of(scales, offset, of_row, of_pair, own, of_k, IN, C, NW, 1)
        source, groups = _groups_in_lanes(first_input + slot * IN, pair, k, IN, NW)
        k, row, pair = _spread(k, words, NW), _spread(row, words, NW) + (first_row + r), _spread(pair, words, NW)
        word = pair * 8 + column % 8
        at = row * (IN // 32) + word
        pieces = pieces + ((k, reads(word, k, IN), at, _spread(gate, words, NW), source, groups, scale),)
    return pieces
