"""How many planes the slots of a token read, in Gluon: given, by thresholds, or by rank selection, one warp for itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.triton_rank import FORBIDDEN, NEVER_BELOW, extra_planes, finite, is_held, key_of
from dpamoe.kernels.triton_threshold import planes_above

_BRING = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@gluon.constexpr_function
def square_layout(N, NW):
    """[N, N] within a warp, the same in every warp."""
    across = min(N, 8)
    return gl.BlockedLayout([1, N // across], [32 // across, across], [1, NW], [1, 0])


@gluon.constexpr_function
def padded_steps(steps):
    """Planes that may be given to a slot, as a power of two."""
    return 1 << (max(steps, 1) - 1).bit_length()


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
def _slots(gates, ids, token, slot, gates_token, gates_slot, ids_token, ids_slot, A: gl.constexpr, E: gl.constexpr):
    """Expert, whether there is one, and gate^2 in fp32 of these slots."""
    expert = gl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E)
    gate = gl.load(gates + token * gates_token + slot * gates_slot, mask=slot < A, other=0.0).to(gl.float32)
    held = is_held(expert, E)
    return gl.where(held, expert, 0).to(gl.int32), held, gate * gate


@gluon.jit
def _key(residuals, expert, square, step, row, column, K_MIN: gl.constexpr, C: gl.constexpr):
    """Keys of the gain of plane K_MIN + step; of no meaning beyond the last."""
    upper = residuals + expert * row + (K_MIN + step) * column
    there = step < C - K_MIN
    return key_of(finite(square), gl.load(upper, mask=there, other=0.0), gl.load(upper + column, mask=there, other=0.0))


@gluon.jit
def _by_rank(
    gates, ids, residuals, budget, k_max, token, first, gates_token, gates_slot, ids_token, ids_slot, row, column,
    budget_token, OWN: gl.constexpr, A: gl.constexpr, E: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, N: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Planes of OWN slots from `first` on, in as many parts as there are steps, int32 [1, OWN * steps].

    As `triton_rank.planes_of_token`, one comparison for each two steps.
    """
    STEPS: gl.constexpr = padded_steps(C - K_MIN)
    layout: gl.constexpr = steps_layout(OWN * STEPS, NW)
    rival = gl.arange(0, N * STEPS, gl.SliceLayout(1, layout))[:, None]
    own = gl.arange(0, OWN * STEPS, gl.SliceLayout(0, layout))[None, :]
    slot, step, own_slot, own_step = rival // STEPS, rival % STEPS, first + own // STEPS, own % STEPS
    expert, held, square = _slots(gates, ids, token, slot, gates_token, gates_slot, ids_token, ids_slot, A, E)
    own_expert, own_held, own_square = _slots(gates, ids, token, own_slot, gates_token, gates_slot, ids_token, ids_slot, A, E)
    count = gl.sum(gl.sum((held & (step == 0)).to(gl.int32), 1), 0)
    extra, limit = extra_planes(budget + token * budget_token, k_max, count, K_MIN, C)
    key = gl.where(held & (step < limit), _key(residuals, expert, square, step, row, column, K_MIN, C), FORBIDDEN)
    bar = _key(residuals, own_expert, own_square, own_step, row, column, K_MIN, C) - (slot < own_slot).to(gl.int32)
    ahead = (key > gl.where(slot == own_slot, NEVER_BELOW, bar)).to(gl.int32)  # gains fall: its own steps come in order
    taken = (gl.sum(ahead, 0, keep_dims=True) + own_step < extra) & (own_step < limit)
    return gl.where(own_held, taken.to(gl.int32) + gl.where(own_step == 0, K_MIN, 0), 0)


@gluon.jit
def _by_threshold(
    gates, ids, thresholds, k_max, token, slot, gates_token, gates_slot, ids_token, ids_slot, row, column,
    A: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """As `reference.allocate_threshold`, int32 of the shape of slot."""
    expert = gl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E)
    gate = gl.load(gates + token * gates_token + slot * gates_slot, mask=slot < A, other=0.0)
    return planes_above(gate, expert, thresholds, k_max, E, row, column, COLUMNS)


@gluon.jit
def planes_of_token(
    chunks, gates, ids, table, budget, k_max, token, chunks_token, chunks_slot, gates_token, gates_slot, ids_token, ids_slot,
    row, column, budget_token,
    RULE: gl.constexpr, A: gl.constexpr, E: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, COLUMNS: gl.constexpr,
    N: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Planes of the N slots of a token, int32 [N], 0 for padding; N: A as a power of two, 16 at most.

    RULE "given": chunks int32 [T, A]; "threshold": table fp32 [E, COLUMNS]; "rank": table fp32 [E, C + 1], convex from K_MIN.
    """
    slot = gl.arange(0, N, gl.SliceLayout(0, square_layout(N, NW)))
    if RULE == "rank":
        parts = _by_rank(
            gates, ids, table, budget, k_max, token, 0, gates_token, gates_slot, ids_token, ids_slot, row, column,
            budget_token, N, A, E, C, K_MIN, N, NW,
        )  # fmt: skip
        k = gl.sum(parts.reshape([N, parts.shape[1] // N]), 1)
        k = gl.convert_layout(k, gl.SliceLayout(0, square_layout(N, NW)))
    elif RULE == "threshold":
        k = _by_threshold(
            gates, ids, table, k_max, token, slot, gates_token, gates_slot, ids_token, ids_slot, row, column, A, E, COLUMNS
        )
    else:
        expert = gl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E)
        k = gl.load(chunks + token * chunks_token + slot * chunks_slot, mask=slot < A, other=0)
        k = gl.where(is_held(expert, E), k, 0).to(gl.int32)
    return k


@gluon.jit
def hand_out(at, spent, k, there, C: gl.constexpr, COUNT: gl.constexpr):
    """Write the planes of up to 16 slots, int32 [N], those that are there, and, COUNT, count them: in 64 bits first."""
    gl.store(at, k, mask=there)
    if COUNT:
        counts = gl.sum(gl.where(there, 1, 0).to(gl.int64) << 5 * k, 0)
        for c in gl.static_range(C + 1):
            number = (counts >> 5 * c) & 31
            gl.atomic_add(spent + c, number, mask=number > 0, sem="relaxed")


@gluon.jit
def keep_planes(at, spent, k, mask, COUNT: gl.constexpr):
    """Write the planes of a slot, a scalar, where they belong and, COUNT, count them."""
    gl.store(at, k, mask=mask)
    if COUNT:
        gl.atomic_add(spent + k, 1, mask=mask, sem="relaxed")


@gluon.jit
def planes_of_slot(
    chunks, gates, ids, table, budget, k_max, token, own, chunks_token, chunks_slot, gates_token, gates_slot,
    ids_token, ids_slot, row, column, budget_token,
    RULE: gl.constexpr, A: gl.constexpr, E: gl.constexpr, C: gl.constexpr, K_MIN: gl.constexpr, COLUMNS: gl.constexpr,
    N: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Planes of one slot, an int32 scalar; arguments as in `planes_of_token`."""
    if RULE == "rank":
        parts = _by_rank(
            gates, ids, table, budget, k_max, token, own, gates_token, gates_slot, ids_token, ids_slot, row, column,
            budget_token, 1, A, E, C, K_MIN, N, NW,
        )  # fmt: skip
        k = gl.sum(gl.sum(parts, 1), 0)
    elif RULE == "threshold":
        k = _by_threshold(
            gates, ids, table, k_max, token, own, gates_token, gates_slot, ids_token, ids_slot, row, column, A, E, COLUMNS
        )
    else:
        k = gl.load(chunks + token * chunks_token + own * chunks_slot)
        k = gl.where(is_held(gl.load(ids + token * ids_token + own * ids_slot), E), k, 0).to(gl.int32)
    return k
