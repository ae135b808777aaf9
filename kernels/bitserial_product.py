"""Products of rows with planes on the 1-bit tensor cores, in Gluon: what the bit-serial kernels share.

A row of x is cut, per group of 128, into 16 bits (a step and two's complement), which are the columns of products with the
planes; their popcounts are weighed by powers of two in a second product. A plane is the other operand as it stands in memory,
nothing is unpacked. (Of 8 bits a step would be 1/127 of the largest of 128, some 2.8 deviations: an error of 6e-3, where 2e-3
is the most that is wanted.) Tensors of words are [16 RT, 8 NW]: RT tiles of 16 rows, and for each warp along a row eight words
of 32 inputs, which are two groups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dpamoe.kernels.bitserial_asm import (
    FACTOR,
    OFFSET_FIRST,
    OFFSET_LETTERS,
    OFFSET_SECOND,
    PLANES,
    PLANES_LETTERS,
    SCALE_FIRST,
    SCALE_LETTERS,
    SCALE_SECOND,
    SLICE,
    SLICE_LETTERS,
    WEIGHTS_0,
    WEIGHTS_2,
    WEIGHTS_LETTERS,
)
from dpamoe.kernels.byte_asm import CUT, CUT_LETTERS
from dpamoe.kernels.triton_activate import activate_gated, activate_plain

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # names of Triton 3.8, 3.6
MEMORY = gl.shared_memory_descriptor
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # names of Triton 3.9, 3.6
seen_as = getattr(MEMORY, "reinterpret", None) or MEMORY._reinterpret  # names of Triton 3.9, 3.6


@gluon.constexpr_function
def words_layout(NW, RT=1):
    """Words [16 RT, 8 NW] as the products take them: rows g and g + 8, word c of two groups, in lane 4g + c."""
    warps = [[0, 8 << i] for i in range(NW.bit_length() - 1)] + [[16 << i, 0] for i in range(RT.bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0], [0, 4]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [16 * RT, 8 * NW])


@gluon.constexpr_function
def lane_layout(NW):
    """What the lanes of NW warps hold, four registers each, [32 NW, 4]: memory in this order is read 16 bytes at a time."""
    return gl.BlockedLayout([1, 4], [32, 1], [NW, 1], [1, 0])


@gluon.jit
def lane_places(NW: gl.constexpr):
    """Lane, of all warps, and register in `lane_layout`, each along its dimension."""
    layout: gl.constexpr = lane_layout(NW)
    lane = gl.arange(0, 32 * NW, gl.SliceLayout(1, layout))[:, None]
    return lane, gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def as_words(value, NW: gl.constexpr, RT: gl.constexpr):
    """A group of every warp, in the order of `lane_layout`, as words [16 RT, 8 NW]."""
    value = value.reshape([RT, NW, 8, 4, 2, 2]).permute([0, 5, 2, 1, 4, 3]).reshape([16 * RT, 8 * NW])
    return gl.convert_layout(value, words_layout(NW, RT), assert_trivial=True)


@gluon.jit
def input_of(part, word, register):
    """Which input of a group stands in a register of a lane before it is cut; part 0 to 7, word 0 to 3."""
    return part + 32 * word + 8 * register


@gluon.jit
def lane_of(input_):
    """Where an input of a row stands among the registers of lanes, in the order of `lane_layout`: `input_of` turned round."""
    return input_ // 128 * 128 + 16 * (input_ % 8) + 4 * (input_ // 32 % 4) + input_ // 8 % 4


@gluon.jit
def places(NW: gl.constexpr):
    """Of each register: its row and column in the words."""
    layout: gl.constexpr = words_layout(NW)
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    return row, gl.arange(0, 8 * NW, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def cut(value, TIED: gl.constexpr):
    """A group in 16 bits each: words of low and high bits (TIED: bytes), step and sum."""
    if TIED:
        result = gl.inline_asm_elementwise(CUT, CUT_LETTERS, [value], gl.int32, True, 4)
    else:
        result = gl.inline_asm_elementwise(SLICE, SLICE_LETTERS, [value], gl.int32, True, 4)
    return result


@gluon.jit
def wait_for_copies(pending: gl.constexpr):
    """Wait for all groups of copies but the last `pending` ones.

    The barrier changes no result: the assembler puts the wait before loads that precede it, which then begin only when planes
    are there, but it moves neither across a barrier.
    """
    barrier()
    async_copy.wait_group(pending)


@gluon.jit
def add_dots(dots, first, second, X, Y, weights, plane: gl.constexpr):
    """Add the dots of planes `plane` and the next with the groups X and Y."""
    arguments = [dots, first, second, X, Y, weights[plane // 2 % 2], weights[2]]
    return gl.inline_asm_elementwise(PLANES, PLANES_LETTERS, arguments, gl.float32, True, 4)


@gluon.jit
def column_weights(zero):
    """What popcounts are multiplied by, for planes 0 and 1, for 2 and 3, and more for high bits; zero: int32 words."""
    low = gl.inline_asm_elementwise(WEIGHTS_0, WEIGHTS_LETTERS, [zero], gl.int32, True, 4)
    high = gl.inline_asm_elementwise(WEIGHTS_2, WEIGHTS_LETTERS, [zero], gl.int32, True, 4)
    return low, high, gl.inline_asm_elementwise(FACTOR, WEIGHTS_LETTERS, [zero], gl.int32, True, 4)


@gluon.jit
def scaled(total, dots, scale, X, Y, SECOND: gl.constexpr):
    code: gl.constexpr = SCALE_SECOND if SECOND else SCALE_FIRST
    return gl.inline_asm_elementwise(code, SCALE_LETTERS, [total, dots, scale, X, Y], gl.float32, True, 4)


@gluon.jit
def with_offset(total, offset, X, Y, SECOND: gl.constexpr):
    code: gl.constexpr = OFFSET_SECOND if SECOND else OFFSET_FIRST
    return gl.inline_asm_elementwise(code, OFFSET_LETTERS, [total, offset, X, Y], gl.float32, True, 4)


@gluon.constexpr_function
def pairs_layout(NW, RT=1):
    """[16 RT, NW, 4]: what words 8w … 8w + 7 of a row have in common for both groups, for each word c of four."""
    warps = [[0, 1 << i, 0] for i in range(NW.bit_length() - 1)] + [[16 << i, 0, 0] for i in range(RT.bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[8, 0, 0]], lanes, warps, [], [16 * RT, NW, 4])


@gluon.jit
def pair_places(NW: gl.constexpr, RT: gl.constexpr):
    """Row, pair of groups and word of four in `pairs_layout`, each along its dimension."""
    layout: gl.constexpr = pairs_layout(NW, RT)
    row = gl.arange(0, 16 * RT, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    pair = gl.arange(0, NW, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    return row, pair, gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def _both_groups(source, inside, second, NW: gl.constexpr, RT: gl.constexpr, ALIGNED: gl.constexpr):
    """Two fp16 numbers that follow one another in one int32, as words [16 RT, 8 NW] (the same for both groups).

    source: pointers [16 RT, NW, 4], ALIGNED to 4 bytes; inside: which are read, second: of those also the second number.
    """
    if ALIGNED:
        both = gl.load(source.to(gl.pointer_type(gl.int32)), mask=inside, other=0)
    else:
        low = gl.load(source, mask=inside, other=0.0).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        both = low | (gl.load(source + 1, mask=inside & second, other=0.0).to(gl.int16, bitcast=True).to(gl.int32) << 16)
    whole = gl.join(both, both).permute(0, 1, 3, 2).reshape([16 * RT, 8 * NW])
    return gl.convert_layout(whole, words_layout(NW, RT), assert_trivial=True)


@gluon.jit
def scales_of(scales, offset, row, pair, own, k, IN: gl.constexpr, C: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr):
    """Offset of a pair of groups, and scales of planes 0 to 3 and 4 to 7, to each lane those of its own; 0 if not read.

    row, pair, own (word of four), k: of a shape that spreads to [16 RT, NW, 4]; results as `_both_groups` gives them.
    """
    at = row * (IN // 128) + 2 * pair + own * 0
    own, first_there, both_there = own + (at * 0).to(gl.int32), pair < (IN + 255) // 256, 2 * pair + 1 < IN // 128
    ALIGNED: gl.constexpr = IN % 256 == 0
    found = (_both_groups(offset + at, (own == 0) & (k > 0) & first_there, both_there, NW, RT, ALIGNED),)
    for first in gl.static_range(0, C, 4):
        address = scales[first].to(gl.int64) + own.to(gl.int64) * 0
        for j in gl.static_range(1, min(4, C - first)):
            address = gl.where(own == j, scales[first + j].to(gl.int64), address)
        source = address.to(gl.pointer_type(gl.float16)) + at
        found = found + (_both_groups(source, (first + own < k) & first_there, both_there, NW, RT, ALIGNED),)
    return found


@gluon.jit
def scales_of_rows(
    scales, offset, row, k, IN: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
    MATRICES: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr,
):  # fmt: skip
    """`scales_of` of 16 RT rows from `row` on, for each piece of 256 NW inputs and each matrix (the second WIDTH rows on)."""
    line, pair, own = pair_places(NW, RT)
    found = ()
    for p in gl.static_range(PIECES):
        for m in gl.static_range(MATRICES):
            found = found + (scales_of(scales, offset, row + m * WIDTH + line, pair + p * NW, own, k, IN, C, NW, RT),)
    return found


@gluon.jit
def reads(word, k, IN: gl.constexpr):
    """Planes that are read of each word of a row: none behind its inputs."""
    return gl.where(word < IN // 32, k, 0)


@gluon.jit
def two_planes(
    buffers, planes, at, k, c: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr
):  # fmt: skip
    """Words of planes c and c + 1, from shared memory, or as they stand; a plane that is not read may be anything.

    k: planes that are read of each word, from `reads`.
    """
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
def buffers_for(COUNT: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr, PHASES: gl.constexpr, PER_PHASE: gl.constexpr):
    """Room for COUNT pieces of planes, one allocation each: copies into views of one would wait for each other."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, PER_PHASE, PHASES, [1, 0])
    room = ()
    for _ in gl.static_range(COUNT):
        room = room + (gl.allocate_shared_memory(gl.int32, [16 * RT, 8 * NW], shared),)
    return room


@gluon.jit
def ask_rows(
    buffers, planes, row, first: gl.constexpr, last: gl.constexpr, most, IN: gl.constexpr, WIDTH: gl.constexpr,
    PIECES: gl.constexpr, MATRICES: gl.constexpr, NWK: gl.constexpr, RT: gl.constexpr,
):  # fmt: skip
    """Copy planes first … last - 1, as far as they are read, of 16 RT rows from `row` on, and of those WIDTH further."""
    across: gl.constexpr = 2 * NWK
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [NWK * RT, 1], [1, 0])
    line = row + gl.arange(0, 16 * RT, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, 8 * NWK, gl.SliceLayout(0, layout))[None, :]
    for c in gl.static_range(first, last):
        if c < most:
            source = planes[c].to(gl.pointer_type(gl.int32)) + line * (IN // 32)
            for p in gl.static_range(PIECES):
                inside = word + p * 8 * NWK < IN // 32
                for m in gl.static_range(MATRICES):
                    at = m * WIDTH * (IN // 32) + word + p * 8 * NWK
                    copy(buffers[(c * MATRICES + m) * PIECES + p], source + at, mask=inside)


@gluon.constexpr_function
def sums_layout(MATRICES, NW):
    """What NW warps found for 16 rows of each matrix, [16, MATRICES, NW], all of a row in one lane, the same in every warp."""
    few = NW.bit_length() - 1
    regs = [[0, 1, 0]] * (MATRICES - 1) + [[0, 0, 1 << i] for i in range(few)]
    lanes = [[1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 0, 0]] * few, [], [16, MATRICES, NW])


@gluon.jit
def room_for_sums(MATRICES: gl.constexpr, NW: gl.constexpr):
    """Shared memory in which the warps of a tile of 16 rows exchange what they found, rows side by side: no bank conflicts."""
    return gl.allocate_shared_memory(gl.float32, [16, MATRICES, NW], gl.SwizzledSharedLayout(1, 1, 1, [1, 0, 2]))


@gluon.jit
def of_warps(total, MATRICES: gl.constexpr, NW: gl.constexpr):
    """What each warp found for 16 rows, fp32 [16, MATRICES, NW]."""
    apart = total.reshape([16, NW, 2, 4]) if MATRICES == 2 else total.reshape([16, NW, 1, 8])
    return gl.sum(apart, 3).permute(0, 2, 1)


@gluon.jit
def summed(total, room, MATRICES: gl.constexpr, NW: gl.constexpr):
    """Sum over the words of a row: fp32 [16, MATRICES]; the warps of one tile exchange their sums by way of `room`."""
    room.store(of_warps(total, MATRICES, NW))
    return gl.sum(room.load(sums_layout(MATRICES, NW)), 2)


@gluon.constexpr_function
def pairs_sums_layout(MATRICES, NW):
    """What NW warps found for NW pairs, [NW, 16, MATRICES, NW]: all of a row in one lane, a pair in each warp."""
    few = NW.bit_length() - 1
    regs = [[0, 0, 1, 0]] * (MATRICES - 1) + [[0, 0, 0, 1 << i] for i in range(few)]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0], [0, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[1 << i, 0, 0, 0] for i in range(few)], [], [NW, 16, MATRICES, NW])


@gluon.jit
def room_for_pairs(MATRICES: gl.constexpr, NW: gl.constexpr):
    """As `room_for_sums`, for each of NW pairs."""
    return gl.allocate_shared_memory(gl.float32, [NW, 16, MATRICES, NW], gl.SwizzledSharedLayout(1, 1, 1, [1, 0, 2]))


@gluon.jit
def sums_of_pairs(room, MATRICES: gl.constexpr, NW: gl.constexpr):
    """Sums over the words of a row for NW pairs, fp32 [16 NW, MATRICES], each pair's by one warp; those not left: anything."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 3, 0])
    whole = seen_as(room, gl.float32, [NW, 16, MATRICES, NW], shared)
    return gl.sum(whole.load(pairs_sums_layout(MATRICES, NW)), 3).reshape([16 * NW, MATRICES])


@gluon.jit
def activated(
    sums, bias, at, ROWS: gl.constexpr, HALF: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, ACT: gl.constexpr
):  # fmt: skip
    """Bias and activation of rows, fp32 [R, 1], or [R, 2] where GATED, to [R].

    The biases of ROWS rows, which repeat, begin at `at`.
    """
    if GATED:
        gate, up = gl.split(sums)
        if BIAS:
            own = bias + at + gl.arange(0, gate.shape[0], gate.type.layout) % ROWS
            gate += gl.load(own).to(gl.float32)
            up += gl.load(own + HALF).to(gl.float32)
        result = activate_gated(gate, up, ACT)
    else:
        result = gl.sum(sums, 1)
        if BIAS:
            result += gl.load(bias + at + gl.arange(0, result.shape[0], result.type.layout) % ROWS).to(gl.float32)
        result = activate_plain(result, ACT)
    return result
