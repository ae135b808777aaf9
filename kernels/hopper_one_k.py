"""A stretch of a tile with pairs of one k in the Hopper kernel, in Gluon: unpacked once, its slices multiplied together."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from dpamoe.kernels.hopper_bring import wait_for_rows
from dpamoe.kernels.hopper_tiles import part_of, place_of_sums, width_of
from dpamoe.kernels.hopper_unpack import (
    bases,
    chosen,
    first_plane,
    fragment,
    left_layout,
    offset_of,
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
    done = hopper.warpgroup_mma_wait(0, deps=accs)
    return (done,) if len(accs) == 1 else done


@gluon.jit
def _multiply_first(accs, parts, base, memory, number, w, count: gl.constexpr, cut: gl.constexpr):
    """Multiply the first slices by B blocks, and with the last of a stretch by its offsets; they are waited for together."""
    _, x, sums, _, _, _, _ = memory
    B: gl.constexpr = cut.B
    for i in gl.static_range(B):
        accs = _begin(accs, parts[i], x, (number + i) % cut.NS, count, cut)
    if B == cut.W:
        accs = _begin(accs, base, sums, place_of_sums(number, cut), count, cut)
    accs = _finished(accs)
    if B != cut.W:  # noqa: SIM102  one is known to the compiler, the other is not
        if w == cut.W - 1:
            accs = _finished(_begin(accs, base, sums, place_of_sums(number, cut), count, cut))
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
def multiply_one_k(accs, memory, tile, stage, w, number, own: gl.constexpr, cut: gl.constexpr):
    """Unpack B blocks of the weight, of a stretch from w on, to the k that all slices have, and multiply."""
    parts, base = _unpack(memory[0], tile, stage, w, own, cut)
    return _multiply(accs, parts, base, memory, tile[2], number, w, cut)
