"""Prefill on Hopper in Gluon: warp groups that wait for nobody else unpack and multiply 64 rows of a tile each.

A program takes tiles (`hopper_tiles`) in turn, as long as there are any. What one warp group brings for a tile (`hopper_bring`)
serves NC others, so that one unpacks while another multiplies. Weights are unpacked in registers, plane by plane, to the left
operand of products of a warp group, and wherever a k is reached its slices are multiplied. Of a stretch of 128 W inputs, lane l
of every four takes words l W to l W + W - 1, so that it needs one scale. What does not depend on single weights,
offset - sum of scales, is multiplied by sums of x, which stand in 16 columns for each stretch behind the rows (`hopper_rows`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from dpamoe.kernels.hopper_bring import bring, kept, mbarrier, release, wait_for_rows
from dpamoe.kernels.hopper_one_k import multiply_one_k
from dpamoe.kernels.hopper_tiles import (
    columns_of,
    item_of,
    items_of,
    most_of,
    part_of,
    place_of_sums,
    sizes_of,
    store,
    tile_of,
    used_of,
    width_of,
)
from dpamoe.kernels.hopper_unpack import (
    bases,
    chosen,
    fragment,
    left_layout,
    offset_of,
    product_layout,
    read_plane,
    scale_of,
    word_layout,
)
from dpamoe.kernels.triton_unpack import add_plane, twice


@gluon.jit
def _multiply_slice(acc, parts, base, memory, number, last, phases, j: gl.constexpr, cut: gl.constexpr):
    """Multiply slice j by B blocks, and with the last of a stretch by its offsets."""
    _, x, sums, _, _, x_full, x_empty = memory
    left: gl.constexpr = left_layout(width_of(cut, j))
    if cut.EACH:
        mbarrier.wait(x_full.index(j), (phases >> j) % 2)
    for i in gl.static_range(cut.B):
        place = number + i
        if not cut.EACH:
            place = place % cut.NS
        right = part_of(x, place, j, cut).permute((1, 0))
        acc = hopper.warpgroup_mma(fragment(parts[i], left), right, acc, is_async=cut.B == cut.W)
    right = part_of(sums, place_of_sums(number, cut), j, cut).permute((1, 0))
    if cut.B == cut.W:
        acc = hopper.warpgroup_mma(bases(base, left), right, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    elif last:
        acc = hopper.warpgroup_mma(bases(base, left), right, acc)
    if cut.EACH:
        release(x_empty.index(j))
    return acc


@gluon.jit
def _multiply_level(accs, parts, base, memory, number, levels, level, last, phases, cut: gl.constexpr):
    """Multiply the slices of a level, one after the other."""
    new = ()
    for j in gl.static_range(cut.P):
        acc = accs[j]
        if (levels >> 4 * j) & 15 == level:
            acc = _multiply_slice(acc, parts, base, memory, number, last, phases, j, cut)
        new = new + (acc,)
    return new


@gluon.jit
def _multiply_blocks(accs, memory, tile, stage, w, number, still, phases, own: gl.constexpr, cut: gl.constexpr):
    """Unpack B blocks of the weight, of a stretch from w on, plane by plane, and multiply where pairs stop."""
    unit, power, levels, present = tile
    planes, scales, offsets = memory[0]
    B: gl.constexpr = cut.B
    W: gl.constexpr = cut.W
    C: gl.constexpr = cut.C
    TIED: gl.constexpr = cut.TIED
    parts = ((gl.full((64, 4), 0, gl.int32, word_layout(1)),) * 16,) * B
    total = gl.full((64, 4), 0.0, gl.float32, word_layout(1))
    words, raw = read_plane(planes[own], scales[own], stage, 0, W, C, TIED)
    words = chosen(words, w, B, W)
    share = power * 2.0**14
    if cut.EACH:
        number = phases * still  # the only place there is
    for c in range(most_of(levels, cut.P)):
        later, raw_later = read_plane(planes[own], scales[own], stage, gl.minimum(c + 1, C - 1), W, C, TIED)
        scale, share = scale_of(raw, unit, share, TIED)
        total += scale
        pairs, new = twice(scale, True), ()
        for i in gl.static_range(B):
            new = new + (add_plane(parts[i], words[i], pairs, True),)
        parts = new
        if (present >> (c + 1)) % 2 == 1:
            if not cut.EACH:  # noqa: SIM102  one is known to the compiler, the other is not
                if present & ((2 << c) - 2) == 0:  # the first of the block
                    wait_for_rows(memory[5], number, cut)
            base = offset_of(offsets[own], stage, raw, unit, power * 16.0, TIED) - total * 2.0**-10
            last = B == W or w == W - 1
            accs = _multiply_level(accs, parts, base, memory, number, levels, c + 1, last, phases, cut)
        words, raw = chosen(later, w, B, W), raw_later
        number += still  # else the compiler works out where x is for every level before the first, and runs out of registers
    return accs


@gluon.jit
def _begun(entry, factor, order, cut: gl.constexpr):
    """Sums of all slices of a tile, none yet, and their `columns_of`."""
    accs, columns = (), ()
    for j in gl.static_range(cut.P):
        accs = accs + (gl.zeros((64, width_of(cut, j)), gl.float32, product_layout(width_of(cut, j))),)
        columns = columns + (columns_of(entry + (2 + 3 * j), factor, order, width_of(cut, j), cut),)
    return accs, columns


@gluon.jit
def _compute(given, own: gl.constexpr, cut: gl.constexpr):
    """A warp group that computes 64 rows of each tile."""
    factor, order, tiles, tile_count, peaks, unit, bias, out, still, memory = given
    _, _, _, plane_full, plane_empty, _, x_empty = memory
    B: gl.constexpr = cut.B
    W: gl.constexpr = cut.W
    blocks: gl.constexpr = (cut.OUT + 64 * cut.NC - 1) // (64 * cut.NC)
    turn, number, end = 0, 0, tile_count * blocks
    phases = end * 0  # of the slices, one bit each
    entry, expert, tile = tile_of(item_of(0), end, blocks, tiles, peaks, unit, cut)
    for taken in range(items_of(end)):
        next_entry, next_expert, next_tile = tile_of(item_of(taken + 1), end, blocks, tiles, peaks, unit, cut)
        accs, columns = _begun(entry, factor, order, cut)
        for b in range(0, cut.IN // 128, B):
            stage, w = turn % cut.STAGES, b % W
            mbarrier.wait(plane_full.index(stage), turn // cut.STAGES % 2)
            if cut.ONE:
                accs = multiply_one_k(accs, memory, tile, stage, w, number, own, cut)
            else:
                accs = _multiply_blocks(accs, memory, tile, stage, w, number, still, phases, own, cut)
            if cut.EACH:
                phases = phases ^ used_of(tile[2], cut.P)
            else:
                for i in gl.static_range(0, B, cut.TOLD):
                    release(x_empty.index((number + i) % cut.NS // cut.TOLD))
            number += B
            if B == W:
                release(plane_empty.index(stage))
                turn += 1
            else:
                if w == W - 1:
                    release(plane_empty.index(stage))
                turn += (w == W - 1).to(gl.int32)
        row_block = item_of(taken) % blocks * cut.NC + own
        for j in gl.static_range(cut.P):
            if (tile[2] >> 4 * j) & 15 > 0:
                store(accs[j], 1.0 / tile[1], columns[j], bias, out, row_block, expert, cut)
        entry, expert, tile = next_entry, next_expert, next_tile


@gluon.jit(do_not_specialize=["rows", "still"])
def hopper_prefill_kernel(
    x0, x1, x2, sums0, sums1, sums2, factor, order, tiles, peaks, rows, still, planes, scales, offset, unit, bias, out,
    OUT: gl.constexpr, IN: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, TARGET: gl.constexpr,
    WIDTHS: gl.constexpr, W: gl.constexpr, B: gl.constexpr, NC: gl.constexpr, NS: gl.constexpr, STAGES: gl.constexpr,
    ONE: gl.constexpr, REGS: gl.constexpr, BRING: gl.constexpr,
):  # fmt: skip
    """Tiles of slices of up to WIDTHS pairs: out[row of the pair] = act(W_k x + bias).

    x, sums: descriptors of the prepared rows, in sorted order, of 128 and of 16 columns and of as many rows as a slice of each
    width takes, the largest first. still: 0. A lane has REGS registers in the warp groups that compute, BRING in the one that
    brings.
    """
    cut: gl.constexpr = sizes_of(OUT, IN, GROUPS, GROUP, C, TIED, BIAS, ACT, GATED, TARGET, W, B, NC, NS, STAGES, ONE, WIDTHS)
    memory = kept(scales, offset, cut)
    tile_count = gl.load(tiles + 1)
    common = (factor, order, tiles, tile_count, peaks, unit, bias, out, still, memory)
    needs = ((x0, x1, x2), (sums0, sums1, sums2), tiles, tile_count, rows, (planes, scales, offset), memory)
    if NC == 2:
        gl.warp_specialize(
            [(_compute, (common, 0, cut)), (_compute, (common, 1, cut)), (bring, (needs, cut))], [4, 4], [REGS, BRING]
        )
    elif NC == 3:
        gl.warp_specialize(
            [(_compute, (common, 0, cut)), (_compute, (common, 1, cut)), (_compute, (common, 2, cut)), (bring, (needs, cut))],
            [4, 4, 4], [REGS, REGS, BRING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (common, 0, cut)), (_compute, (common, 1, cut)), (_compute, (common, 2, cut)),
                (_compute, (common, 3, cut)), (bring, (needs, cut)),
            ],
            [4, 4, 4, 4], [REGS, REGS, REGS, BRING],
        )  # fmt: skip
