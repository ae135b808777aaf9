"""Warp groups of the Hopper kernel, in Gluon, whose tiles have pairs of one k, for which a weight is unpacked once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from dpamoe.kernels.hopper_bring import barrier, mbarrier, wait_for_rows
from dpamoe.kernels.hopper_tiles import part_of, store, tile_of, width_of
from dpamoe.kernels.hopper_unpack import (
    bases,
    chosen,
    first_plane,
    fragment,
    left_layout,
    offset_of,
    product_layout,
    read_plane,
    scale_of,
)
from dpamoe.kernels.triton_unpack import add_plane, twice


@gluon.jit
def _unpack(rings, tile, stage, w, own: gl.constexpr, cut: gl.constexpr):
    """B blocks of the weight, of a stretch from w on, as `fragment` takes them; and offsets less all scales, fp32 [64, 4]."""
    unit, power, levels, _ = tile
    planes, scales, offsets = rings[0][own], rings[1][own], rings[2][own]
    B: gl.constexpr = cut.B
    W: gl.constexpr = cut.W
    C: gl.constexpr = cut.C
    words, raw = read_plane(planes, scales, stage, 0, W, C, cut.TIED)
    later, raw_later = read_plane(planes, scales, stage, min(1, C - 1), W, C, cut.TIED)
    offset = offset_of(offsets, stage, raw, unit, power * 16.0, cut.TIED)
    words = chosen(words, w, B, W)
    total, share = scale_of(raw, unit, power * 2.0**14, cut.TIED)
    pairs, parts = twice(total, True), ()
    for i in gl.static_range(B):
        parts = parts + (first_plane(words[i], pairs),)
    for c in range(1, levels & 15):
        words, raw = chosen(later, w, B, W), raw_later
        later, raw_later = read_plane(planes, scales, stage, gl.minimum(c + 1, C - 1), W, C, cut.TIED)
        scale, share = scale_of(raw, unit, share, cut.TIED)
        total += scale
        pairs, new = twice(scale, True), ()
        for i in gl.static_range(B):
            new = new + (add_plane(parts[i], words[i], pairs, True),)
        parts = new
    return parts, offset - total * 2.0**-10


@gluon.jit
def _add(acc, numbers, right, S: gl.constexpr):
    """Begin to add what is unpacked times inputs, or bases times sums, to a slice of S columns."""
    left: gl.constexpr = left_layout(S)
    if right.shape[0] == 16:  # noqa: SIM108  a layout must not be chosen by an expression
        operand = bases(numbers, left)
    else:
        operand = fragment(numbers, left)
    return hopper.warpgroup_mma(operand, right, acc, is_async=True)


@gluon.jit
def _begin(accs, numbers, rings, place, count: gl.constexpr, cut: gl.constexpr):
    """`_add` what a place in shared memory holds to the first slices."""
    new = ()
    for j in gl.static_range(count):
        right = part_of(rings, place, j, cut).permute((1, 0))
        new = new + (_add(accs[j], numbers, right, width_of(cut, j)),)
    return new


@gluon.jit
def _finished(accs):
    """Wait for what was begun."""
    if len(accs) == 1:
        new = (hopper.warpgroup_mma_wait(0, deps=[accs[0]]),)
    elif len(accs) == 2:
        a, b = hopper.warpgroup_mma_wait(0, deps=[accs[0], accs[1]])
        new = (a, b)
    elif len(accs) == 3:
        a, b, c = hopper.warpgroup_mma_wait(0, deps=[accs[0], accs[1], accs[2]])
        new = (a, b, c)
    else:
        a, b, c, d = hopper.warpgroup_mma_wait(0, deps=[accs[0], accs[1], accs[2], accs[3]])
        new = (a, b, c, d)
    return new


@gluon.jit
def _multiply_first(accs, parts, base, memory, number, w, count: gl.constexpr, cut: gl.constexpr):
    """Multiply the first slices by B blocks, and with the last of a stretch by its offsets; they are waited for together."""
    _, x, sums, _, _, _, _ = memory
    B: gl.constexpr = cut.B
    for i in gl.static_range(B):
        accs = _begin(accs, parts[i], x, (number + i) % cut.NS, count, cut)
    if B == cut.W:
        accs = _begin(accs, base, sums, (number + (B - 1)) % cut.NS, count, cut)
    accs = _finished(accs)
    if B != cut.W:  # noqa: SIM102  one is known to the compiler, the other is not
        if w == cut.W - 1:
            accs = _finished(_begin(accs, base, sums, number % cut.NS, count, cut))
    return accs


@gluon.jit
def _multiply(accs, parts, base, memory, levels, number, w, cut: gl.constexpr):
    """`_multiply_first` as many slices as the tile has."""
    wait_for_rows(memory[5], number, cut)
    for count in gl.static_range(1, cut.P + 1):
        used = (levels >> 4 * (count - 1)) & 15 > 0
        if count < cut.P:
            used = used & ((levels >> 4 * count) & 15 == 0)
        if used:
            done, new = _multiply_first(accs, parts, base, memory, number, w, count, cut), ()
            for j in gl.static_range(cut.P):
                new = new + ((done[j] if j < count else accs[j]),)
            accs = new
    return accs


@gluon.jit
def compute_one_k(given, own: gl.constexpr, cut: gl.constexpr):
    """A warp group that computes 64 rows of each tile."""
    factor, order, tiles, peaks, unit, bias, out, _, memory = given
    rings, _, _, plane_full, plane_empty, _, x_empty = memory
    B: gl.constexpr = cut.B
    W: gl.constexpr = cut.W
    blocks: gl.constexpr = (cut.OUT + 64 * cut.NC - 1) // (64 * cut.NC)
    turn, number, end = 0, 0, gl.load(tiles + 1) * blocks
    entry, expert, tile = tile_of(gl.program_id(0), end, blocks, tiles, peaks, unit, cut)
    for item in range(gl.program_id(0), end, gl.num_programs(0)):
        next_entry, next_expert, next_tile = tile_of(item + gl.num_programs(0), end, blocks, tiles, peaks, unit, cut)
        accs = ()
        for j in gl.static_range(cut.P):
            accs = accs + (gl.zeros((64, width_of(cut, j)), gl.float32, product_layout(width_of(cut, j))),)
        for b in range(0, cut.IN // 128, B):
            stage, w = turn % 2, b % W
            mbarrier.wait(plane_full.index(stage), turn // 2 % 2)
            parts, base = _unpack(rings, tile, stage, w, own, cut)
            accs = _multiply(accs, parts, base, memory, tile[2], number, w, cut)
            barrier()
            for i in gl.static_range(B):
                mbarrier.arrive(x_empty.index((number + i) % cut.NS), count=1)
            number += B
            if B == W:
                mbarrier.arrive(plane_empty.index(stage), count=1)
                turn += 1
            else:
                mbarrier.arrive(plane_empty.index(stage), count=1, pred=w == W - 1)
                turn += (w == W - 1).to(gl.int32)
        for j in gl.static_range(cut.P):
            if (tile[2] >> 4 * j) & 15 > 0:
                row_block = item % blocks * cut.NC + own
                store(accs[j], 1.0 / tile[1], factor, order, bias, out, row_block, expert, entry + (2 + 3 * j), cut)
        entry, expert, tile = next_entry, next_expert, next_tile
