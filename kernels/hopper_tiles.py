"""Tiles of the Hopper kernel in Gluon: what one of them holds, and where the rows of its results go.

A tile is P slices of one expert, the widest first, with pairs of one k in each, as `triton_sort.sort_kernel` writes them.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.triton_activate import activate_gated, activate_plain


@dataclass(frozen=True)
class _Sizes:
    OUT: int
    IN: int
    GROUPS: int
    GROUP: int
    C: int
    TIED: bool
    BIAS: bool
    ACT: str
    GATED: bool
    TARGET: bool  # whether results go back into the order of pairs
    W: int  # words of a lane in a stretch
    B: int  # blocks of 128 inputs unpacked at once: W or 1
    NC: int  # warp groups that compute
    NS: int  # blocks of x kept
    STAGES: int  # stretches of planes kept
    ONE: bool  # all slices of a tile have the same k
    WIDTHS: tuple  # most pairs of each slice

    @property
    def P(self):
        return gl.constexpr(len(self.WIDTHS.value))

    @property
    def EACH(self):
        """Whether a slice has its rows by itself, of one stretch: where there may be several k."""
        return gl.constexpr(not self.ONE.value and self.B.value == self.W.value == self.NS.value)

    @property
    def TOLD(self):
        """Blocks of x that are announced and waited for together; one for several k, else what brings them lacks registers."""
        return gl.constexpr(self.B.value if self.ONE.value else 1)

    @property
    def SUMS(self):
        """Stretches of which the sums of x are kept: as many as the blocks of x that are kept reach into."""
        return gl.constexpr((self.NS.value + self.W.value - 1) // self.W.value)

    @property
    def KINDS(self):
        """Every width once, the largest first."""
        return gl.constexpr(kinds_of(self.WIDTHS.value))


@gluon.constexpr_function
def sizes_of(*sizes):
    """What the warp groups of a kernel are compiled for, in the order of `_Sizes`."""
    *others, widths = sizes
    return _Sizes(*map(gl.constexpr, others), gl.constexpr(tuple(gl.constexpr(width).value for width in widths)))


def kinds_of(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Every width once, the largest first."""
    return tuple(sorted(set(widths), reverse=True))


@gluon.constexpr_function
def width_of(cut, j):
    """Most pairs of slice j."""
    return cut.WIDTHS.value[j]


@gluon.constexpr_function
def up_to(cut, j):
    """Most pairs of the slices before j together."""
    return sum(cut.WIDTHS.value[:j])


@gluon.constexpr_function
def kind_of(cut, j):
    """Which of all widths slice j has."""
    return cut.KINDS.value.index(cut.WIDTHS.value[j])


@gluon.constexpr_function
def number_of(cut, kind):
    """How many slices have this one of all widths."""
    return cut.WIDTHS.value.count(cut.KINDS.value[kind])


@gluon.constexpr_function
def rank_of(cut, j):
    """How many slices before j are as wide."""
    return cut.WIDTHS.value[:j].count(cut.WIDTHS.value[j])


@gluon.jit
def part_of(rings, place, j: gl.constexpr, cut: gl.constexpr):
    """What a place in shared memory holds for slice j: [width, 128 or 16], of rings [places * slices of a width, …]."""
    kind: gl.constexpr = kind_of(cut, j)
    return rings[kind].index(place * number_of(cut, kind) + rank_of(cut, j))


@gluon.jit
def place_of_sums(number, cut: gl.constexpr):
    """Where the sums of the stretch of block `number` stand."""
    return number // cut.W % cut.SUMS


@gluon.jit
def slices_of(entry, rows, P: gl.constexpr):
    """Beginnings of the slices of a tile, their k in 4 bits each, the largest, and a mask with bit k for each."""
    starts, levels, most, present = (), gl.load(entry) * 0, gl.load(entry) * 0, gl.load(entry) * 0
    for j in gl.static_range(P):
        level = gl.load(entry + (4 + 3 * j))
        starts = starts + (gl.where(level > 0, gl.load(entry + (2 + 3 * j)), rows),)  # beyond the rows nothing is read
        levels = levels | (level << 4 * j)
        most = gl.maximum(most, level)
        present = present | (1 << level)
    return starts, levels, most, present


@gluon.jit
def item_of(number):
    """The item that a program takes after `number` others: there and back through the programs, as items get shorter."""
    own, programs = gl.program_id(0), gl.num_programs(0)
    return number * programs + gl.where(number % 2 == 0, own, programs - 1 - own)


@gluon.jit
def items_of(end):
    """How many of `end` items a program takes."""
    everyone = end // gl.num_programs(0)
    return everyone + (item_of(everyone) < end).to(gl.int32)


@gluon.jit
def tile_of(item, end, blocks: gl.constexpr, tiles, peaks, unit, cut: gl.constexpr):
    """Where the tile of an item stands, and what it holds; beyond the end, something that can be read.

    Its largest k is not among it: Triton takes what only ends a loop within a loop for the same each time.
    """
    entry = tiles + gl.minimum(item, gl.maximum(end - 1, 0)) // blocks * (2 + 3 * cut.P)
    expert = gl.where(item < end, gl.load(entry), 0)
    _, levels, _, present = slices_of(entry, 0, cut.P)
    power, tied_unit = gl.load(peaks + expert), 0.0
    if cut.TIED:
        tied_unit = gl.load(unit + expert)
    return entry, expert, (tied_unit, power, levels, present)


@gluon.jit
def most_of(levels, P: gl.constexpr):
    """The largest of the k of P slices."""
    most = levels & 15
    for j in gl.static_range(1, P):
        most = gl.maximum(most, (levels >> 4 * j) & 15)
    return most


@gluon.jit
def used_of(levels, P: gl.constexpr):
    """A mask with bit j for each slice that has pairs."""
    used = levels * 0
    for j in gl.static_range(P):
        used = used | (((levels >> 4 * j) & 15 > 0).to(gl.int32) << j)
    return used


@gluon.jit
def columns_of(entry, factor, order, S: gl.constexpr, cut: gl.constexpr):
    """What the pairs of a slice are multiplied by and which row of `out` is theirs, -1 where there is none; both [S].

    Asked for before the slice is computed: from its end on, the others of a program would soon wait for this warp group.
    """
    at = gl.load(entry) + gl.arange(0, S, gl.BlockedLayout([1], [32], [4], [0]))
    live = at < gl.load(entry + 1)
    target = gl.where(live, at, -1)
    if cut.TARGET:
        target = gl.load(order + at, mask=live, other=-1)
    return gl.load(factor + at, mask=live, other=0.0), target


@gluon.jit
def _activated(result, bias, block, expert, cut: gl.constexpr):
    """Bias and activation of 64 rows; GATED: 32 are left."""
    HALF: gl.constexpr = cut.OUT // 2
    S: gl.constexpr = result.shape[1]
    if cut.GATED:
        gate, up = gl.split(result.reshape(4, 2, 8, S).permute(0, 2, 3, 1))
        gate, up = gate.reshape(32, S), up.reshape(32, S)
        if cut.BIAS:
            row = block * 32 + gl.arange(0, 32, gl.SliceLayout(1, gate.type.layout))
            own = bias + expert * cut.OUT + row
            gate += gl.load(own, mask=row < HALF, other=0.0).to(gl.float32)[:, None]
            up += gl.load(own + HALF, mask=row < HALF, other=0.0).to(gl.float32)[:, None]
        result = activate_gated(gate, up, cut.ACT)
    else:
        if cut.BIAS:
            row = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, result.type.layout))
            own = gl.load(bias + expert * cut.OUT + row, mask=row < cut.OUT, other=0.0)
            result += own.to(gl.float32)[:, None]
        result = activate_plain(result, cut.ACT)
    return result


@gluon.jit
def store(acc, back, columns, bias, out, block, expert, cut: gl.constexpr):
    """The rows of `out` for one slice, from fp32 [64, S] and what it is still to be multiplied by; columns as `columns_of`."""
    factor, target = columns
    own = gl.convert_layout(factor, gl.SliceLayout(0, acc.type.layout))
    result = _activated(acc * (back * own)[None, :], bias, block, expert, cut)
    R: gl.constexpr = 32 if cut.GATED else 64
    width: gl.constexpr = cut.OUT // 2 if cut.GATED else cut.OUT
    whole = result.to(out.dtype.element_ty)
    if whole.dtype.primitive_bitwidth == 16:  # numbers twice as wide fill whole sectors as they are
        whole = gl.convert_layout(whole, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
    target = gl.convert_layout(target, gl.SliceLayout(0, whole.type.layout))
    row = block * R + gl.arange(0, R, gl.SliceLayout(1, whole.type.layout))
    at = target[None, :].to(gl.int64) * width + row[:, None]
    gl.store(out + at, whole, mask=(target >= 0)[None, :] & (row < width)[:, None])
