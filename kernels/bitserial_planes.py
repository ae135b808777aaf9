"""How many planes the slots of a token read, in Gluon: given, by thresholds, or by rank selection."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.bitserial_product import barrier
from dpamoe.kernels.sizes import next_power_of_2
from dpamoe.kernels.triton_rank import FORBIDDEN, NEVER_BELOW, extra_of, finite, is_held, key_of
from dpamoe.kernels.triton_threshold import count_above

_padded = gluon.constexpr_function(next_power_of_2)
_BRING = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@gluon.constexpr_function
def square_layout(N, NW):
    """[N, N] within a warp, the same in every warp."""
    across = min(N, 8)
    return gl.BlockedLayout([1, N // across], [32 // across, across], [1, NW], [1, 0])


@gluon.constexpr_function
def steps_layout(own, NW):
    """[steps of rivals, steps of own slots]: rivals along lanes, own ones shared out among warps."""
    return gl.BlockedLayout([1, max(1, own // NW)], [32, 1], [1, NW], [1, 0])


@gluon.jit
def bring_table(table, row, here, E: gl.constexpr, RULE: gl.constexpr, NW: gl.constexpr):
    """Have the rows of a rule's table in the L2 cache before ids say which are read; harmless if they change afterwards.

    here: whether this program does it, one for all.
    """
    if RULE != "given":  # noqa: SIM102  one is known to the compiler, the other is not
        if here:
            lane = gl.arange(0, 32 * NW, gl.BlockedLayout([1], [32], [NW], [0]))
            for first in gl.static_range(0, E, 32 * NW):
                at = table + gl.minimum(first + lane, E - 1) * row
                gl.inline_asm_elementwise(_BRING, "=r,l", [at], gl.int32, False, 1)


@gluon.jit
def _slots(routed, token, slot, A: gl.constexpr, E: gl.constexpr):
    """Expert, whether there is one, and gate of these slots; routed: gates, ids, and their strides."""
    gates, ids, gates_token, gates_slot, ids_token, ids_slot = routed
    expert = gl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E)
    gate = gl.load(gates + token * gates_token + slot * gates_slot, mask=slot < A, other=0.0)
    held = is_held(expert, E)
    return gl.where(held, expert, 0).to(gl.int32), held, gate


@gluon.jit
def _errors(table, row, column, expert, step, K_MIN: gl.constexpr, C: gl.constexpr):
    """Errors of experts with K_MIN + step planes, and with one more; of no meaning beyond the last."""
    at = table + expert * row + (K_MIN + step) * column
    there = step < C - K_MIN
    return gl.load(at, mask=there, other=0.0), gl.load(at + column, mask=there, other=0.0)


@gluon.jit
def _steps(first, ALL: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, N: gl.constexpr, NW: gl.constexpr):
    """Slot and step of all rivals, [N steps, 1], and of ALL slots or one, `first`, [1, own steps]."""
    STEPS: gl.constexpr = _padded(C - K_MIN)
    OWN: gl.constexpr = N * STEPS if ALL else STEPS
    layout: gl.constexpr = steps_layout(OWN, NW)
    rival = gl.arange(0, N * STEPS, gl.SliceLayout(1, layout))[:, None]
    own = gl.arange(0, OWN, gl.SliceLayout(0, layout))[None, :]
    return rival // STEPS, rival % STEPS, first + own // STEPS, own % STEPS


@gluon.jit
def look(
    chunks, routed, token, first, chunks_token, chunks_slot,
    ALL: gl.constexpr, RULE: gl.constexpr, A: gl.constexpr, E: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr,
    N: gl.constexpr, NW: gl.constexpr, AGAIN: gl.constexpr = False,
):  # fmt: skip
    """What a rule sees of a token's slots, for `fetch` and `decide`.

    ALL: of N of them, A as a power of two, 16 at most, from `first` on, which is 0; else of one, `first`, in scalars.
    routed: gates, ids, and their strides. RULE "given": of chunks, int32 [T, A], k, read anew each time if AGAIN, and later
    brought into 0 … C; "threshold", "rank": experts and gates.
    """
    if RULE == "rank":
        slot, _, own_slot, _ = _steps(first, ALL, C, K_MIN, N, NW)
        slots = _slots(routed, token, slot, A, E), _slots(routed, token, own_slot, A, E)
    else:
        slot = gl.arange(0, N, gl.SliceLayout(0, square_layout(N, NW))) if ALL else first
        if RULE == "threshold":
            slots = _slots(routed, token, slot, A, E)
        else:
            expert = gl.load(routed[1] + token * routed[4] + slot * routed[5], mask=slot < A, other=E)
            given = chunks + token * chunks_token + slot * chunks_slot
            slots = is_held(expert, E), gl.load(given, mask=slot < A, other=0, volatile=AGAIN)
    return slots


@gluon.jit
def fetch(
    slots, rule, token, first, ALL: gl.constexpr, RULE: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr,
    COLUMNS: gl.constexpr, N: gl.constexpr, NW: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """What a rule says of the slots that `look` saw, for `decide`: all that is loaded beside.

    rule: table, budget, k_max, strides of a table's rows and columns and of budgets. Tables: "threshold" fp32 [E, COLUMNS],
    "rank" fp32 [E, C + 1], convex from K_MIN on. BEHIND: whether copies that were asked for stay in front; the assembler puts
    them behind all this where it can, and moves no load across a barrier.
    """
    if BEHIND:
        barrier()
    table, budget, k_max, row, column, budget_token = rule
    if RULE == "rank":
        _, step, _, own_step = _steps(first, ALL, C, K_MIN, N, NW)
        errors = _errors(table, row, column, slots[0][0], step, K_MIN, C)
        own_errors = _errors(table, row, column, slots[1][0], own_step, K_MIN, C)
        told = errors, own_errors, gl.load(budget + token * budget_token), gl.load(k_max)
    elif RULE == "threshold":
        bars = ()
        for c in gl.static_range(COLUMNS):
            bars = bars + (gl.load(table + slots[0] * row + c * column),)
        told = bars, gl.load(k_max)
    else:
        told = ()
    return told


@gluon.jit
def decide(
    slots, told, first, ALL: gl.constexpr, RULE: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, N: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Planes of the slots that `look` saw and `fetch` was told of: int32 [N], 0 for padding, or a scalar. [N] stands along the
    lanes of every warp, by rank shared out among warps.

    RULE "rank": as `triton_rank.planes_of_token`, one comparison for each two steps.
    """
    if RULE == "rank":
        parts, limit = _by_rank(slots, told, first, ALL, C, K_MIN, N, NW)
        k = gl.sum(parts.reshape([N, parts.shape[1] // N]), 1) if ALL else gl.sum(gl.sum(parts, 1), 0)
        k = gl.minimum(k, K_MIN + limit)
    elif RULE == "threshold":
        k = gl.where(slots[1], gl.minimum(count_above(slots[2], told[0]), gl.minimum(told[1].to(gl.int32), C)), 0)
    else:
        k = gl.minimum(gl.maximum(gl.where(slots[0], slots[1], 0).to(gl.int32), 0), C)
    return k


@gluon.jit
def _by_rank(slots, told, first, ALL: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, N: gl.constexpr, NW: gl.constexpr):
    """Planes of the own slots, in as many parts as there are steps, int32 [1, own steps]; and how many one has above K_MIN.

    Sums of parts may be above that. Gains fall: a slot's own steps come in order.
    """
    slot, step, own_slot, own_step = _steps(first, ALL, C, K_MIN, N, NW)
    _, held, gate = slots[0]
    _, own_held, own_gate = slots[1]
    errors, own_errors, average, most = told
    count = gl.sum(gl.sum((held & (step == 0)).to(gl.int32), 1), 0)
    extra, limit = extra_of(average, most, count, K_MIN, C)
    key = gl.where(held & (step < limit), key_of(_square(gate), errors[0], errors[1]), FORBIDDEN)
    bar = key_of(_square(own_gate), own_errors[0], own_errors[1]) - (slot < own_slot).to(gl.int32)
    ahead = (key > gl.where(slot == own_slot, NEVER_BELOW, bar)).to(gl.int32)
    taken = gl.sum(ahead, 0, keep_dims=True) + own_step < gl.where(own_held, extra, 0)
    return taken.to(gl.int32) + gl.where(own_held & (own_step == 0), K_MIN, 0), limit


@gluon.jit
def _square(gate):
    """gate^2 in fp32, the largest number instead of inf."""
    return finite(gate.to(gl.float32) * gate.to(gl.float32))


@gluon.jit
def keep_planes(at, spent, k, mask, COUNT: gl.constexpr):
    """Write the planes of a slot, a scalar, where they belong and, COUNT, count them."""
    gl.store(at, k, mask=mask)
    if COUNT:
        gl.atomic_add(spent + k, 1, mask=mask, sem="relaxed")


@gluon.jit
def agreed(k):
    """Numbers [N] that every warp has, of which each may have read others: those of any, the same in all, by shared memory."""
    room = gl.allocate_shared_memory(gl.int32, k.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    room.store(k)
    return room.load(k.type.layout)
