"""Prefill on Hopper by warp groups of their own: one brings planes and rows, the others unpack and multiply 64 rows each.

A program takes tiles in turn, as long as there are any. What is brought for a tile of P slices of up to S pairs serves NC warp
groups, which wait for it and for nobody else, so that one unpacks while another multiplies. Tiles, prepared rows and unpacking
are those of `hopper_prefill`, but for the offsets: offset - sum of scales of a stretch of 128 W inputs is a product of 16 more
columns behind the stretch, whose rows are sums of x over groups.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dpamoe.kernels.hopper_prefill import (
    _chosen,
    _multiply,
    _read_plane,
    _slices,
    _store,
    barrier,
    copy,
    load_tile,
)
from dpamoe.kernels.hopper_unpack import fragment, fresh, left_layout, line_of, pair_layout, product_layout, word_layout
from dpamoe.kernels.triton_unpack import OFFSET_STEPS, add_plane, halves, tied_scale, twice

mbarrier = hopper.mbarrier


@dataclass(frozen=True)
class _Cut:
    OUT: int
    IN: int
    GROUPS: int
    GROUP: int
    C: int
    TIED: bool
    BIAS: bool
    ACT: str
    GATED: bool
    TARGET: bool
    P: int
    S: int
    W: int
    B: int
    NC: int
    NS: int
    ONE: bool
    TURNS: int  # of the groups at the tensor cores: 0 as it comes, 1 one after the other, 2 so once the other has begun


@gluon.constexpr_function
def Cut(*sizes):
    return _Cut(*sizes)


@gluon.jit
def _spread(stored, NW: gl.constexpr):
    """What is stored for the groups of a stretch, [BM, 4]: one for each lane."""
    lanes: gl.constexpr = word_layout(NW, 1)
    if stored.shape[1] == 4:
        raw = stored.load(lanes)
    else:  # one for two lanes
        raw = stored.load(gl.SliceLayout(2, pair_layout(NW)))[:, :, None].broadcast_to([16 * NW, 2, 2])
        raw = gl.convert_layout(raw.reshape(16 * NW, 4), lanes, assert_trivial=True)
    return raw


@gluon.jit
def _bases(base, BM: gl.constexpr, layout: gl.constexpr):
    """fp32 [BM, 4] as the left operand [BM, 16]: column 2 l + h is its upper part, 8 + 2 l + h what is left of it."""
    high = twice(base, True)
    upper, _ = halves(high)
    low = twice(base - upper.to(gl.float32), True)
    first, second = halves(gl.join(high, low))
    return gl.convert_layout(gl.join(first, second).permute(0, 2, 1, 3).reshape(BM, 16), layout, assert_trivial=True)


@gluon.jit
def _expect(arrived, count, bytes: gl.constexpr, P: gl.constexpr):
    """Announce that `count` slices, 1 to P, will bring so many bytes each."""
    for n in gl.static_range(P):
        mbarrier.expect(arrived, (n + 1) * bytes, pred=count == n + 1)


@gluon.jit
def _places(block, copied: gl.constexpr, width: gl.constexpr, OUT: gl.constexpr, COUNT: gl.constexpr, GATED: gl.constexpr):
    """Where the first COUNT of `width` things in a row stand within an expert, for 64 rows: int32 [64, COUNT]."""
    line = line_of(block, gl.SliceLayout(1, copied), 64, OUT, GATED)
    return line[:, None] * width + gl.arange(0, COUNT, gl.SliceLayout(0, copied))[None, :]


@gluon.jit
def _bring_planes(
    planes, scales, offset, words_at, scales_at, rings, stage, first_word, first_scale, most,
    C: gl.constexpr, TIED: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """Ask for a stretch of every plane that is read, and its scales and offsets, for all groups."""
    plane_rings, scale_rings, offset_rings = rings
    size: gl.constexpr = 32 // scales[0].dtype.element_ty.primitive_bitwidth
    own_words, own_scales = (), ()
    for j in gl.static_range(NC):
        own_words = own_words + (fresh(words_at[j] + first_word, 0, 4),)
        own_scales = own_scales + (fresh(scales_at[j] + first_scale, 0, size),)
    for j in gl.static_range(NC):
        copy(offset_rings[j].index(stage), offset + own_scales[j])
    for c in gl.static_range(C):
        if c == 0 or c < most:
            for j in gl.static_range(NC):  # a ring for each group: the compiler sets barriers between copies into one
                copy(plane_rings[j].index(stage * C + c), planes[c].to(gl.pointer_type(gl.int32)) + own_words[j])
                if c == 0 or not TIED:
                    copy(scale_rings[j].index(stage if TIED else stage * C + c), scales[c] + own_scales[j])


@gluon.jit
def _bring(given, cut: gl.constexpr):
    """The warp group that asks for everything."""
    x, sums, tiles, rows, planes, scales, offset, held = given
    rings, x_ring, sum_ring, plane_full, plane_empty, x_full, x_empty, turns = held
    OUT: gl.constexpr = cut.OUT
    IN: gl.constexpr = cut.IN
    GROUPS: gl.constexpr = cut.GROUPS
    GROUP: gl.constexpr = cut.GROUP
    C: gl.constexpr = cut.C
    TIED: gl.constexpr = cut.TIED
    GATED: gl.constexpr = cut.GATED
    P: gl.constexpr = cut.P
    S: gl.constexpr = cut.S
    W: gl.constexpr = cut.W
    NC: gl.constexpr = cut.NC
    NS: gl.constexpr = cut.NS
    blocks: gl.constexpr = (OUT + 64 * NC - 1) // (64 * NC)
    OWN: gl.constexpr = 128 * W // GROUP
    size: gl.constexpr = 32 // scales[0].dtype.element_ty.primitive_bitwidth
    word_copy: gl.constexpr = gl.BlockedLayout([1, 4], [32 // W, W], [4, 1], [1, 0])
    scale_copy: gl.constexpr = gl.BlockedLayout([1, size], [32, 1], [4, 1], [1, 0])
    turn, number = 0, 0
    for item in range(gl.program_id(0), gl.load(tiles + 1) * blocks, gl.num_programs(0)):
        block, entry = item % blocks, tiles + item // blocks * (3 + 2 * P)
        expert = gl.load(entry)
        starts, levels, most, present = _slices(entry, rows, P)
        count = most * 0
        words_at, scales_at = (), ()
        for j in gl.static_range(P):
            count += ((levels >> 4 * j) & 15 > 0).to(gl.int32)
        for j in gl.static_range(NC):
            words_at = words_at + (_places(block * NC + j, word_copy, IN // 32, OUT, 4 * W, GATED),)
            scales_at = scales_at + (_places(block * NC + j, scale_copy, GROUPS, OUT, OWN, GATED),)
        line = expert.to(gl.int64) * OUT
        for first in range(0, IN // 128, W):
            stage = turn % 2
            mbarrier.wait(plane_empty.index(stage), turn // 2 % 2 ^ 1)
            first_word, first_scale = line * (IN // 32) + first * 4, line * GROUPS + first // W * OWN
            _bring_planes(planes, scales, offset, words_at, scales_at, rings, stage, first_word, first_scale, most, C, TIED, NC)
            async_copy.mbarrier_arrive(plane_full.index(stage), increment_count=False)
            _expect(plane_full.index(stage), count, S * 32, P)
            for j in gl.static_range(P):
                at = [starts[j], IN + first // W * 16]
                load_tile(sums, at, plane_full.index(stage), sum_ring.index(stage * P + j), pred=j < count)
            for w in gl.static_range(W):
                for j in gl.static_range(P):
                    if j < count:
                        place = number % NS
                        mbarrier.wait(x_empty.index(place), number // NS % 2 ^ 1)
                        mbarrier.expect(x_full.index(place), S * 256)
                        load_tile(x, [starts[j], (first + w) * 128], x_full.index(place), x_ring.index(place))
                        number += 1
            turn += 1


@gluon.jit
def _multiply_slots(accs, operand, x, x_full, number, levels, level, P: gl.constexpr, NS: gl.constexpr):
    new = ()
    for j in gl.static_range(P):
        acc = accs[j]
        if (levels >> 4 * j) & 15 == level:
            place = (number + j) % NS
            mbarrier.wait(x_full.index(place), (number + j) // NS % 2)
            acc = hopper.warpgroup_mma(operand, x.index(place).permute((1, 0)), acc)
        new = new + (acc,)
    return new


@gluon.jit
def _multiply_all(accs, operand, x, first, P: gl.constexpr, NS: gl.constexpr):
    """Begin to add operand times a block of x, to every slice; nothing is waited for."""
    new = ()
    for j in gl.static_range(P):
        right = x.index((first + j) % NS).permute((1, 0))
        new = new + (hopper.warpgroup_mma(operand, right, accs[j], is_async=True),)
    return new


@gluon.jit
def _finished(accs, P: gl.constexpr):
    if P == 1:
        new = (hopper.warpgroup_mma_wait(0, deps=[accs[0]]),)
    elif P == 2:
        a, b = hopper.warpgroup_mma_wait(0, deps=[accs[0], accs[1]])
        new = (a, b)
    elif P == 3:
        a, b, c = hopper.warpgroup_mma_wait(0, deps=[accs[0], accs[1], accs[2]])
        new = (a, b, c)
    else:
        a, b, c, d = hopper.warpgroup_mma_wait(0, deps=[accs[0], accs[1], accs[2], accs[3]])
        new = (a, b, c, d)
    return new


@gluon.jit
def _take_turn(turns, own: gl.constexpr, round, TURNS: gl.constexpr):
    if TURNS > 0:
        mbarrier.wait(turns.index(own), round % 2 ^ 1 if own == 0 else round % 2)


@gluon.jit
def _give_turn(turns, own: gl.constexpr, TURNS: gl.constexpr, NC: gl.constexpr):
    if TURNS > 0:
        barrier()
        mbarrier.arrive(turns.index((own + 1) % NC), count=1)


@gluon.jit
def _base(offset_ring, stage, raw, unit, power, total, TIED: gl.constexpr):
    base = _spread(offset_ring.index(stage), 4).to(gl.float32)
    if TIED:
        base = base * (tied_scale(raw, unit) / OFFSET_STEPS)
    return base * (power * 16.0) - total * 2.0**-10


@gluon.jit
def _multiply_blocks(
    accs, x_ring, sum_ring, x_full, turns, number, count, round, still, rings, stage, own: gl.constexpr, w, unit, power, levels,
    most, present, W: gl.constexpr, B: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr, P: gl.constexpr, S: gl.constexpr,
    NC: gl.constexpr, NS: gl.constexpr, ONE: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Unpack B blocks of the weight plane by plane and multiply where pairs stop; with the last of a stretch its offsets."""
    plane_rings, scale_rings, offset_rings = rings
    left: gl.constexpr = left_layout(4, S)
    parts = ((gl.full((64, 4), 0, gl.int32, word_layout(4, 1)),) * 16,) * B
    total = gl.full((64, 4), 0.0, gl.float32, word_layout(4, 1))
    words, raw = _read_plane(plane_rings[own], scale_rings[own], stage, 0, W, C, TIED, 4)
    words = _chosen(words, w, B, W)
    share = power * 2.0**14
    for c in range(most):
        later, raw_later = _read_plane(plane_rings[own], scale_rings[own], stage, gl.minimum(c + 1, C - 1), W, C, TIED, 4)
        if TIED:
            share = share * 0.5
            scale = tied_scale(raw, unit) * share
        else:
            scale = raw.to(gl.float32) * share
        total += scale
        pairs, new = twice(scale, True), ()
        for i in gl.static_range(B):
            new = new + (add_plane(parts[i], words[i], pairs, True),)
        parts = new
        if not ONE:
            if (present >> (c + 1)) % 2 == 1:
                _take_turn(turns, own, round, TURNS)
                for i in gl.static_range(B):
                    operand = fragment(parts[i], 64, left)
                    accs = _multiply_slots(accs, operand, x_ring, x_full, number + i * count, levels, c + 1, P, NS)
                if B == W or w == W - 1:
                    base = _bases(_base(offset_rings[own], stage, raw, unit, power, total, TIED), 64, left)
                    accs = _multiply(accs, base, sum_ring, stage, 0, levels, c + 1, P)
                _give_turn(turns, own, TURNS, NC)
                round += 1
        words, raw = _chosen(later, w, B, W), raw_later
        number += still  # else the compiler works out where x is for every level before the first, and runs out of registers
    if ONE:
        for i in gl.static_range(B):
            for j in gl.static_range(P):
                at = number + i * count + j
                mbarrier.wait(x_full.index(at % NS), at // NS % 2, pred=j < count)
        base = _bases(_base(offset_rings[own], stage, raw, unit, power, total, TIED), 64, left)
        _take_turn(turns, own, round, TURNS)
        if (levels >> 4 * (P - 1)) & 15 > 0:
            for i in gl.static_range(B):
                accs = _multiply_all(accs, fragment(parts[i], 64, left), x_ring, number + i * P, P, NS)
            if B == W:
                accs = _multiply_all(accs, base, sum_ring, stage * P, P, 2 * P)
            if TURNS == 2:
                _give_turn(turns, own, TURNS, NC)
            accs = _finished(accs, P)
        else:
            for i in gl.static_range(B):
                operand = fragment(parts[i], 64, left)
                accs = _multiply_slots(accs, operand, x_ring, x_full, number + i * count, levels, most, P, NS)
            if B == W:
                accs = _multiply(accs, base, sum_ring, stage, 0, levels, most, P)
            if TURNS == 2:
                _give_turn(turns, own, TURNS, NC)
        if B != W:
            if w == W - 1:
                accs = _multiply_all(accs, base, sum_ring, stage * P, P, 2 * P)
                accs = _finished(accs, P)
        if TURNS == 1:
            _give_turn(turns, own, TURNS, NC)
        round += 1
    return accs, round


@gluon.jit
def _compute(given, own: gl.constexpr, cut: gl.constexpr):
    """A warp group that computes 64 rows of each tile."""
    factor, order, tiles, peaks, unit, bias, out, still, held = given
    rings, x_ring, sum_ring, plane_full, plane_empty, x_full, x_empty, turns = held
    OUT: gl.constexpr = cut.OUT
    IN: gl.constexpr = cut.IN
    C: gl.constexpr = cut.C
    TIED: gl.constexpr = cut.TIED
    BIAS: gl.constexpr = cut.BIAS
    ACT: gl.constexpr = cut.ACT
    GATED: gl.constexpr = cut.GATED
    TARGET: gl.constexpr = cut.TARGET
    P: gl.constexpr = cut.P
    S: gl.constexpr = cut.S
    W: gl.constexpr = cut.W
    B: gl.constexpr = cut.B
    NC: gl.constexpr = cut.NC
    NS: gl.constexpr = cut.NS
    ONE: gl.constexpr = cut.ONE
    TURNS: gl.constexpr = cut.TURNS
    blocks: gl.constexpr = (OUT + 64 * NC - 1) // (64 * NC)
    turn, number, round = 0, 0, 0
    for item in range(gl.program_id(0), gl.load(tiles + 1) * blocks, gl.num_programs(0)):
        block, entry = item % blocks, tiles + item // blocks * (3 + 2 * P)
        expert = gl.load(entry)
        starts, levels, most, present = _slices(entry, 0, P)
        count = most * 0
        for j in gl.static_range(P):
            count += ((levels >> 4 * j) & 15 > 0).to(gl.int32)
        power, tied_unit = gl.load(peaks + expert), 0.0
        if TIED:
            tied_unit = gl.load(unit + expert)
        accs = (gl.zeros((64, S), gl.float32, product_layout(4, S)),) * P
        for b in range(0, IN // 128, B):
            stage, w = turn % 2, b % W
            mbarrier.wait(plane_full.index(stage), turn // 2 % 2)
            accs, round = _multiply_blocks(
                accs, x_ring, sum_ring, x_full, turns, number, count, round, still, rings, stage, own, w, tied_unit, power, levels,
                most, present, W, B, C, TIED, P, S, NC, NS, ONE, TURNS,
            )  # fmt: skip
            barrier()
            for i in gl.static_range(B):
                for j in gl.static_range(P):
                    mbarrier.arrive(x_empty.index((number + i * count + j) % NS), count=1, pred=j < count)
            number += B * count
            if B == W:
                mbarrier.arrive(plane_empty.index(stage), count=1)
                turn += 1
            else:
                mbarrier.arrive(plane_empty.index(stage), count=1, pred=w == W - 1)
                turn += (w == W - 1).to(gl.int32)
        for j in gl.static_range(P):
            if (levels >> 4 * j) & 15 > 0:
                _store(
                    accs[j], 1.0 / power, factor, order, bias, out, block * NC + own, expert, entry + j,
                    OUT, BIAS, ACT, GATED, TARGET, 64, 1, S, 4,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "still"])
def hopper_slots_kernel(
    x, sums, factor, order, tiles, peaks, rows, still, planes, scales, offset, unit, bias, out,
    OUT: gl.constexpr, IN: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, TARGET: gl.constexpr,
    P: gl.constexpr, S: gl.constexpr, W: gl.constexpr, B: gl.constexpr, NC: gl.constexpr, NS: gl.constexpr,
    ONE: gl.constexpr, TURNS: gl.constexpr, REGS: gl.constexpr, BRING: gl.constexpr,
):  # fmt: skip
    """Tiles of P slices of up to S pairs: out[row of the pair] = act(W_k x + bias).

    x, sums: descriptors of the prepared rows, of 128 and of 16 columns. still: 0. NC: warp groups that compute,
    with REGS registers for a lane, BRING in the one that asks. NS: blocks of x kept.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kind: gl.constexpr = scales[0].dtype.element_ty
    kept: gl.constexpr = 1 if TIED else C
    plane_rings, scale_rings, offset_rings = (), (), ()
    for _ in gl.static_range(NC):
        plane_rings = plane_rings + (gl.allocate_shared_memory(gl.int32, [2 * C, 64, 4 * W], plain),)
        scale_rings = scale_rings + (gl.allocate_shared_memory(kind, [2 * kept, 64, 128 * W // GROUP], plain),)
        offset_rings = offset_rings + (gl.allocate_shared_memory(offset.dtype.element_ty, [2, 64, 128 * W // GROUP], plain),)
    rings = (plane_rings, scale_rings, offset_rings)
    x_ring = gl.allocate_shared_memory(gl.float16, [NS, S, 128], gl.NVMMASharedLayout(128, 16, 2))
    sum_ring = gl.allocate_shared_memory(gl.float16, [2 * P, S, 16], gl.NVMMASharedLayout(32, 16, 2))
    plane_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    plane_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [NC, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NC):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(plane_full.index(i), count=129)  # the lanes that copy, and the announcement of the sums
        mbarrier.init(plane_empty.index(i), count=NC)
    for i in gl.static_range(NS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=NC)
    held = (rings, x_ring, sum_ring, plane_full, plane_empty, x_full, x_empty, turns)
    bring = (x, sums, tiles, rows, planes, scales, offset, held)
    common = (factor, order, tiles, peaks, unit, bias, out, still, held)
    cut: gl.constexpr = Cut(OUT, IN, GROUPS, GROUP, C, TIED, BIAS, ACT, GATED, TARGET, P, S, W, B, NC, NS, ONE, TURNS)
    if NC == 2:
        gl.warp_specialize(
            [(_compute, (common, 0, cut)), (_compute, (common, 1, cut)), (_bring, (bring, cut))], [4, 4], [REGS, BRING]
        )
    elif NC == 3:
        gl.warp_specialize(
            [
                (_compute, (common, 0, cut)), (_compute, (common, 1, cut)), (_compute, (common, 2, cut)),
                (_bring, (bring, cut)),
            ],
            [4, 4, 4], [REGS, REGS, BRING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (common, 0, cut)), (_compute, (common, 1, cut)), (_compute, (common, 2, cut)),
                (_compute, (common, 3, cut)), (_bring, (bring, cut)),
            ],
            [4, 4, 4, 4], [REGS, REGS, REGS, BRING],
        )  # fmt: skip
