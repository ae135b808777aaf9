"""The warp group of the Hopper kernel, in Gluon, that brings planes, scales, offsets and rows into shared memory.

Planes and scales come by the copies of Ampere, the addresses of which are a lane's own, rows by those of Hopper. STAGES of
the former are kept and NS blocks of 128 inputs of the latter, or, where those are one stretch and k differs (EACH), that of
every slice by itself; both sides wait for each other at barriers in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dpamoe.kernels.hopper_tiles import (
    item_of,
    items_of,
    kind_of,
    number_of,
    part_of,
    place_of_sums,
    slices_of,
    up_to,
    width_of,
)
from dpamoe.kernels.hopper_unpack import fresh, line_of

mbarrier = hopper.mbarrier
# names of Triton 3.8 and later, else those of 3.6
load_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _rows(places: gl.constexpr, width: gl.constexpr, columns: gl.constexpr):
    """Shared memory for rows of x or sums over them, as the matrix unit reads it."""
    layout: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)
    return gl.allocate_shared_memory(gl.float16, [places, width, columns], layout)


@gluon.jit
def kept(scales, offset, cut: gl.constexpr):
    """Shared memory for all that is brought, and the barriers at which it is waited for."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    C: gl.constexpr = cut.C
    OWN: gl.constexpr = 128 * cut.W // cut.GROUP
    STAGES: gl.constexpr = cut.STAGES
    SCALES: gl.constexpr = STAGES if cut.TIED else STAGES * C
    planes, own_scales, offsets, x, sums = (), (), (), (), ()
    for _ in gl.static_range(cut.NC):  # of each group alone: the compiler sets barriers between copies into one
        planes = planes + (gl.allocate_shared_memory(gl.int32, [STAGES * C, 64, 4 * cut.W], plain),)
        own_scales = own_scales + (gl.allocate_shared_memory(scales[0].dtype.element_ty, [SCALES, 64, OWN], plain),)
        offsets = offsets + (gl.allocate_shared_memory(offset.dtype.element_ty, [STAGES, 64, OWN], plain),)
    for i in gl.static_range(len(cut.KINDS)):
        x = x + (_rows(cut.NS * number_of(cut, i), cut.KINDS[i], 128),)
        sums = sums + (_rows(cut.SUMS * number_of(cut, i), cut.KINDS[i], 16),)
    plane_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    plane_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    WAITED: gl.constexpr = cut.P if cut.EACH else cut.NS // cut.TOLD
    x_full = gl.allocate_shared_memory(gl.int64, [WAITED, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [WAITED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(plane_full.index(i), count=128)  # lanes that copy
        mbarrier.init(plane_empty.index(i), count=128 * cut.NC)
    for i in gl.static_range(WAITED):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=128 * cut.NC)
    return (planes, own_scales, offsets), x, sums, plane_full, plane_empty, x_full, x_empty


@gluon.jit
def release(empty):
    """Every lane of a warp group that computes tells `empty` for itself that it has read what this stands for.

    It does so as after copies of its own, of which it has none: around a word for all lanes at once the compiler has them wait
    for each other, before it, and again before whatever they read next.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def wait_for_rows(x_full, number, cut: gl.constexpr):
    """Wait for B blocks of the rows of all slices."""
    for i in gl.static_range(0, cut.B, cut.TOLD):
        mbarrier.wait(x_full.index((number + i) % cut.NS // cut.TOLD), (number + i) // cut.NS % 2)


@gluon.jit
def _expect(arrived, count, bytes: gl.constexpr, cut: gl.constexpr):
    """Announce that `count` slices, 1 to P, will bring so many bytes for each pair that they have room for."""
    for n in gl.static_range(cut.P):
        mbarrier.expect(arrived, up_to(cut, n + 1) * bytes, pred=count == n + 1)


@gluon.jit
def _places(block, layout: gl.constexpr, width: gl.constexpr, COUNT: gl.constexpr, cut: gl.constexpr):
    """Where the first COUNT of `width` things in a row stand within an expert, for 64 rows: int32 [64, COUNT]."""
    line = line_of(block, gl.SliceLayout(1, layout), cut.OUT, cut.GATED)
    return line[:, None] * width + gl.arange(0, COUNT, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _bring_planes(sources, places, rings, stage, first_word, first_scale, most, cut: gl.constexpr):
    """Ask for a stretch of every plane that is read, and its scales and offsets, for all groups."""
    planes, scales, offset = sources
    words_at, scales_at = places
    plane_rings, scale_rings, offset_rings = rings
    C: gl.constexpr = cut.C
    size: gl.constexpr = 32 // scales[0].dtype.element_ty.primitive_bitwidth
    own_words, own_scales = (), ()
    for j in gl.static_range(cut.NC):
        own_words = own_words + (fresh(words_at[j] + first_word, 4),)
        own_scales = own_scales + (fresh(scales_at[j] + first_scale, size),)
    for j in gl.static_range(cut.NC):
        copy(offset_rings[j].index(stage), offset + own_scales[j])
    for c in gl.static_range(C):
        if c == 0 or c < most:
            for j in gl.static_range(cut.NC):
                copy(plane_rings[j].index(stage * C + c), planes[c].to(gl.pointer_type(gl.int32)) + own_words[j])
                if c == 0 or not cut.TIED:
                    copy(scale_rings[j].index(stage if cut.TIED else stage * C + c), scales[c] + own_scales[j])


@gluon.jit
def _bring_rows(x, sums, starts, count, first, number, memory, cut: gl.constexpr):
    """Ask for a stretch of the rows of every slice, block `first` on, and with the last block their sums over it."""
    _, x_ring, sum_ring, _, _, x_full, x_empty = memory
    for w in gl.static_range(cut.W):
        place = number % cut.NS
        arrived = x_full.index(place // cut.TOLD)
        if w % cut.TOLD == 0:
            mbarrier.wait(x_empty.index(place // cut.TOLD), number // cut.NS % 2 ^ 1)
            _expect(arrived, count, 256 * cut.TOLD + (32 if w + cut.TOLD == cut.W else 0), cut)
        for j in gl.static_range(cut.P):
            at = [starts[j], (first + w) * 128]
            load_tile(x[kind_of(cut, j)], at, arrived, part_of(x_ring, place, j, cut), pred=j < count)
            if w == cut.W - 1:
                at = [starts[j], cut.IN + first // cut.W * 16]
                held = part_of(sum_ring, place_of_sums(number, cut), j, cut)
                load_tile(sums[kind_of(cut, j)], at, arrived, held, pred=j < count)
        number += 1
    return number


@gluon.jit
def _bring_slices(x, sums, starts, levels, most, first, phases, memory, cut: gl.constexpr):
    """Ask for a stretch of the rows of every slice and their sums over it, in the order in which they are multiplied."""
    _, x_ring, sum_ring, _, _, x_full, x_empty = memory
    for c in range(most):
        for j in gl.static_range(cut.P):
            if (levels >> 4 * j) & 15 == c + 1:
                mbarrier.wait(x_empty.index(j), (phases >> j) % 2 ^ 1)
                mbarrier.expect(x_full.index(j), width_of(cut, j) * (256 * cut.W + 32))
                at = [starts[j], cut.IN + first // cut.W * 16]
                load_tile(sums[kind_of(cut, j)], at, x_full.index(j), part_of(sum_ring, 0, j, cut))
                for w in gl.static_range(cut.W):
                    at = [starts[j], (first + w) * 128]
                    load_tile(x[kind_of(cut, j)], at, x_full.index(j), part_of(x_ring, w, j, cut))


@gluon.jit
def bring(given, cut: gl.constexpr):
    """All that the tiles of a program need, in turn."""
    x, sums, tiles, tile_count, rows, sources, memory = given
    rings, _, _, plane_full, plane_empty, _, _ = memory
    IN: gl.constexpr = cut.IN
    W: gl.constexpr = cut.W
    blocks: gl.constexpr = (cut.OUT + 64 * cut.NC - 1) // (64 * cut.NC)
    OWN: gl.constexpr = 128 * W // cut.GROUP
    size: gl.constexpr = 32 // sources[1][0].dtype.element_ty.primitive_bitwidth  # scales in 4 bytes, the least that is copied
    word_copy: gl.constexpr = gl.BlockedLayout([1, 4], [32 // W, W], [4, 1], [1, 0])
    scale_copy: gl.constexpr = gl.BlockedLayout([1, size], [32, 1], [4, 1], [1, 0])
    turn, number, end = 0, 0, tile_count * blocks
    phases = end * 0  # of the slices, one bit each
    for taken in range(items_of(end)):
        item = item_of(taken)
        block, entry = item % blocks, tiles + item // blocks * (2 + 3 * cut.P)
        expert = gl.load(entry)
        starts, levels, most, present = slices_of(entry, rows, cut.P)
        count = most * 0
        words_at, scales_at = (), ()
        for j in gl.static_range(cut.P):
            count += ((levels >> 4 * j) & 15 > 0).to(gl.int32)
        for j in gl.static_range(cut.NC):
            words_at = words_at + (_places(block * cut.NC + j, word_copy, IN // 32, 4 * W, cut),)
            scales_at = scales_at + (_places(block * cut.NC + j, scale_copy, cut.GROUPS, OWN, cut),)
        line = expert.to(gl.int64) * cut.OUT
        for first in range(0, IN // 128, W):
            stage = turn % cut.STAGES
            mbarrier.wait(plane_empty.index(stage), turn // cut.STAGES % 2 ^ 1)
            first_word, first_scale = line * (IN // 32) + first * 4, line * cut.GROUPS + first // W * OWN
            _bring_planes(sources, (words_at, scales_at), rings, stage, first_word, first_scale, most, cut)
            async_copy.mbarrier_arrive(plane_full.index(stage), increment_count=False)
            if cut.EACH:
                _bring_slices(x, sums, starts, levels, most, first, phases, memory, cut)
                phases = phases ^ ((1 << count) - 1)
            else:
                number = _bring_rows(x, sums, starts, count, first, number, memory, cut)
            turn += 1
