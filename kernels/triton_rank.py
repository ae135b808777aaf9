"""Rank selection in Triton, shared by kernels: planes of a token's slots, or of one slot (exact where rows are convex).

Gains gate^2 * (R[k] - R[k+1]) in fp32 become integers that sort like them, and a plane is given if fewer planes of its token go
before it than may be spent. Gluon kernels share what makes and compares keys (`bitserial_planes`).
Source: DPA-MoE, section 3.3.
"""

import triton
import triton.language as tl

FORBIDDEN = tl.constexpr(-1)  # sorts below every gain
NEVER_BELOW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def is_held(expert, experts):
    return expert.to(tl.uint64) < experts  # negative ids turn into huge ones


@triton.jit
def finite(square):
    """The largest fp32 instead of inf, so that a gain of 0 stays 0; NaN stays."""
    return tl.minimum(square, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def extra_planes(budget, k_max, count, K_MIN: tl.constexpr, C: tl.constexpr):
    """`extra_of` what stands at two places."""
    return extra_of(tl.load(budget), tl.load(k_max), count, K_MIN, C)


@triton.jit
def extra_of(average, most, count, K_MIN: tl.constexpr, C: tl.constexpr):
    """Planes above k_min for `count` experts and for one at most; clamping before `reference.planes_to_spend` rounds."""
    limit = tl.maximum(tl.minimum(most.to(tl.int32), C) - K_MIN, 0)
    average = tl.minimum(tl.maximum(average, K_MIN), (K_MIN + limit).to(average.dtype)).to(tl.float64)
    return (count.to(tl.float64) * average + (0.5 + 1e-5)).to(tl.int32) - count * K_MIN, limit


@triton.jit
def key_of(square, upper, lower):
    """Integer that sorts like square * (upper - lower); without its sign every NaN is on top, where torch sorts it."""
    return (square * (upper - lower)).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def keys_of(row, column, square, limit, STEPS: tl.constexpr):
    """Tuple of the keys of each row's STEPS gains, forbidden from `limit` on; row: pointers to columns k_min."""
    keys = ()
    square, upper = finite(square), tl.load(row)
    for step in tl.static_range(STEPS):
        lower = tl.load(row + (step + 1) * column)
        keys = keys + (tl.where(step < limit, key_of(square, upper, lower), FORBIDDEN),)
        upper = lower
    return keys


@triton.jit
def given_planes(row, column, square, first, own, keys, rival, extra, limit, STEPS: tl.constexpr, EACH: tl.constexpr):
    """How many of its own planes each lane gets, int32 [1, L]: of EACH, the `first`-th of its slot on.

    row, square, first, own (slot), extra: of each lane, [1, L] or scalar; keys, rival (slot): of each rival, [N, 1]. Gains
    fall, so that a slot's planes are given in order and need no comparison among each other.
    """
    square, upper = finite(square), tl.load(row + first * column, mask=first < STEPS, other=0.0)
    taken = tl.zeros_like(first)
    wins_ties, itself = (rival < own).to(tl.int32), tl.where(rival == own, NEVER_BELOW, 0)
    for i in tl.static_range(EACH):
        step = first + i
        lower = tl.load(row + (step + 1) * column, mask=step < STEPS, other=0.0)
        bar = (key_of(square, upper, lower) | itself) - wins_ties
        upper = lower
        ahead = (bar + step) * 0
        for j in tl.static_range(STEPS):
            ahead += (keys[j] > bar).to(tl.int32)
        rank = tl.sum(ahead, 0, keep_dims=True) + step
        taken += ((rank < extra) & (step < limit)).to(tl.int32)
    return taken


@triton.jit
def planes_of_slot(
    gates, expert_ids, residuals, budget, k_max, token, slot, experts,
    gates_row, gates_column, ids_row, ids_column, residuals_row, residuals_column, budget_row,
    K_MIN: tl.constexpr, C: tl.constexpr, A: tl.constexpr, A_PAD: tl.constexpr,
):  # fmt: skip
    """Planes of one slot of one token by rank selection: int32 scalar, 0 for padding.

    Pointers to gates float [T, A], expert_ids int [T, A], residuals fp32 [E, C + 1], budget fp32 [T] (row stride 0: one for
    all) and k_max int; strides in elements; A_PAD is A, padded to a power of two. Rows must be convex from K_MIN on.
    Slots times lanes fill at most one warp (A <= 32), so that no sum leaves it. Source: DPA-MoE, section 3.3.
    """
    STEPS: tl.constexpr = C - K_MIN
    LANES: tl.constexpr = min(triton.next_power_of_2(max(1, STEPS)), max(1, 32 // A_PAD))
    EACH: tl.constexpr = (STEPS + LANES - 1) // LANES
    gates += tl.cast(token, tl.int64) * gates_row
    expert_ids += tl.cast(token, tl.int64) * ids_row
    rival = tl.arange(0, A_PAD)[:, None]
    own_expert = tl.load(expert_ids + slot * ids_column)
    expert = tl.load(expert_ids + rival * ids_column, mask=rival < A, other=-1)
    own_gate = tl.load(gates + slot * gates_column).to(tl.float32)
    gate = tl.load(gates + rival * gates_column, mask=rival < A, other=0.0).to(tl.float32)
    own_held, held = is_held(own_expert, experts), is_held(expert, experts)
    count = tl.sum(held.to(tl.int32) + tl.zeros([A_PAD, LANES], tl.int32), 0, keep_dims=True)
    extra, limit = extra_planes(budget + tl.cast(token, tl.int64) * budget_row, k_max, count, K_MIN, C)
    residuals += K_MIN * residuals_column
    row = residuals + tl.where(held, expert, 0).to(tl.int32) * residuals_row
    keys = keys_of(row, residuals_column, gate * gate, tl.where(held, limit, 0), STEPS)
    own_row = residuals + tl.where(own_held, own_expert, 0).to(tl.int32) * residuals_row
    first = tl.arange(0, LANES)[None, :] * EACH
    taken = given_planes(own_row, residuals_column, own_gate * own_gate, first, slot, keys, rival, extra, limit, STEPS, EACH)
    return tl.where(own_held, tl.sum(tl.sum(taken, 1), 0) + K_MIN, 0)


@triton.jit
def token_of(pairs, budget, k_max, token, experts, budget_row, K_MIN: tl.constexpr, C: tl.constexpr, A: tl.constexpr, A_PAD):
    """Gates, experts and which of them are held, all [A_PAD]; planes above k_min for all and for one."""
    gates, expert_ids, gates_row, gates_column, ids_row, ids_column = pairs
    token, slot = tl.cast(token, tl.int64), tl.arange(0, A_PAD)
    expert = tl.load(expert_ids + token * ids_row + slot * ids_column, mask=slot < A, other=-1)
    gate = tl.load(gates + token * gates_row + slot * gates_column, mask=slot < A, other=0.0)
    held = is_held(expert, experts)
    extra, limit = extra_planes(budget + token * budget_row, k_max, tl.sum(held.to(tl.int32), 0), K_MIN, C)
    return gate, tl.where(held, expert, 0).to(tl.int32), held, extra, limit


@triton.jit
def selected(row, column, square, held, extra, limit, STEPS: tl.constexpr):
    """Planes above k_min by rank selection, int32 [N]; row: pointers [N] to columns k_min. N * N compares for two steps."""
    slot = tl.arange(0, held.shape[0])
    rival, own = slot[:, None], slot[None, :]
    keys = keys_of(row[:, None], column, square[:, None], tl.where(held, limit, 0)[:, None], STEPS)
    first = tl.zeros_like(own)
    return tl.sum(given_planes(row[None, :], column, square[None, :], first, own, keys, rival, extra, limit, STEPS, STEPS), 0)


@triton.jit
def planes_of_token(
    gates, expert_ids, residuals, budget, k_max, token, experts,
    gates_row, gates_column, ids_row, ids_column, residuals_row, residuals_column, budget_row,
    K_MIN: tl.constexpr, C: tl.constexpr, A: tl.constexpr, A_PAD: tl.constexpr,
):  # fmt: skip
    """Planes of every slot of one token by rank selection: int32 [A_PAD], 0 for padding; arguments of `planes_of_slot`."""
    pairs = (gates, expert_ids, gates_row, gates_column, ids_row, ids_column)
    gate, expert, held, extra, limit = token_of(pairs, budget, k_max, token, experts, budget_row, K_MIN, C, A, A_PAD)
    row = residuals + expert * residuals_row + K_MIN * residuals_column
    square = gate.to(tl.float32) * gate.to(tl.float32)
    return tl.where(held, selected(row, residuals_column, square, held, extra, limit, C - K_MIN) + K_MIN, 0)
