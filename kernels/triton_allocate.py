"""Triton kernels of `allocate` and `allocate_dispatch`: planes per expert by rank selection, or by the exact programme.

Rank selection (exact where rows are convex): gains gate^2 * (R[k] - R[k+1]) in fp32 become integers that sort like them,
and a plane is given if fewer planes of its token go before it than may be spent. Rows that are not convex go to the
multiple-choice knapsack of `reference.knapsack`, on the device. Source: DPA-MoE, section 3.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpamoe.kernels import triton_threshold
from dpamoe.kernels.sizes import cdiv, next_power_of_2
from dpamoe.kernels.triton_rank import FORBIDDEN, extra_of, finite, is_held, key_of, selected, token_of
from dpamoe.kernels.triton_threshold import add_counts

_TOP_BIT = tl.constexpr(1 << 30)  # of the 31 that a key has
_UNSEEN = tl.constexpr(-1.0)  # sum of squared gates of an expert that nobody asked for
_BLOCK = 1024  # pairs that a program of `_hand_out` hands planes to
_COUNTED_HERE = 512  # tokens whose programs count their planes themselves: of more, too many would add to the same number
_PAIRS, _EXPERTS, _TILES = 32, 32, tl.constexpr(8)  # that one program compares at once, and how often it loads ahead
_MOST_SHARES = 64  # programs that all find what they hand out
_LEAST_PAIRS, _MOST_PARTS = 256, 64  # pairs that one program adds up at least; partial sums that are read behind it


@triton.jit
def _is_bent(row, column, square, held, STEPS: tl.constexpr):
    """Whether a held row is not convex, as `allocation.is_convex` sees it, or a gain is beyond fp32: not for `selected`."""
    bent = held & (square != square)
    upper = tl.load(row)
    earlier = tl.full(square.shape, float("inf"), tl.float32)
    for step in tl.static_range(STEPS):
        lower = tl.load(row + (step + 1) * column)
        gain = upper - lower
        bent |= held & (((gain >= 0) & (gain <= earlier) & (square * gain < float("inf"))) == 0)
        upper, earlier = lower, gain
    return tl.max(bent.to(tl.int32), 0) > 0


@triton.jit
def _programme(row, column, weight, held, extra, limit, numbers, picks, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """`reference.knapsack` of the held rows, int32 [N]; numbers, picks: room as of `_room`. Threads read what others wrote
    there, hence the barriers; costs are read back, since a fused multiply and add would round otherwise."""
    slots = tl.sum(held.to(tl.int32), 0)
    slot, states = tl.cumsum(held.to(tl.int32), 0) - 1, slots * STEPS + 1
    best, last = numbers + slots * (STEPS + 1), tl.zeros_like(extra) - 1
    for choice in tl.static_range(STEPS + 1):
        cost = weight * tl.load(row + choice * column).to(tl.float64)
        tl.store(numbers + slot * (STEPS + 1) + choice, cost, mask=held)
    for start in range(0, extra + 1, BLOCK):
        state = start + tl.arange(0, BLOCK)
        tl.store(best + state, tl.where(state == 0, 0.0, float("inf")).to(tl.float64), mask=state <= extra)
    for done in range(slots):
        tl.debug_barrier()
        costs, taken = numbers + (slots - 1 - done) * (STEPS + 1), picks + (slots - 1 - done) * states
        old, new = best + (done % 2) * states, best + (1 - done % 2) * states
        for start in range(0, extra + 1, BLOCK):
            state = start + tl.arange(0, BLOCK)
            least = tl.full([BLOCK], float("inf"), tl.float64)
            pick = tl.zeros([BLOCK], tl.int32)
            for choice in tl.static_range(STEPS + 1):
                fits = (state >= choice) & (state <= tl.where(choice <= limit, extra, -1))
                total = tl.load(old + state - choice, mask=fits, other=0.0) + tl.load(costs + choice)
                better = fits & (total <= least)
                least, pick = tl.where(better, total, least), tl.where(better, choice, pick)
            last = tl.maximum(last, tl.max(tl.where((least < float("inf")) & (done == slots - 1), state, -1), 0))
            tl.store(new + state, least, mask=state <= extra)
            tl.store(taken + state, pick.to(tl.int8), mask=state <= extra)
    tl.debug_barrier()
    chosen, left = tl.zeros_like(slot), tl.where(last < 0, extra, last)
    for done in range(slots):
        pick = tl.load(picks + done * states + left).to(tl.int32)
        chosen, left = tl.where(slot == done, pick, chosen), left - pick
    return chosen


@triton.jit
def _allocate_kernel(
    gates, expert_ids, residuals, budget, k_max, chunks, experts, numbers, picks,
    gates_row, gates_column, ids_row, ids_column, residuals_row, residuals_column, budget_row,
    spent, K_MIN: tl.constexpr, C: tl.constexpr, A: tl.constexpr, A_PAD: tl.constexpr, BLOCK: tl.constexpr,
    CONVEX: tl.constexpr,
):  # fmt: skip
    """Planes of one token, to chunks int32 [T, A]; with spent they are counted; numbers, picks: room as of `_room`."""
    STEPS: tl.constexpr = C - K_MIN
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, A_PAD)
    pairs = (gates, expert_ids, gates_row, gates_column, ids_row, ids_column)
    gate, expert, held, extra, limit = token_of(pairs, budget, k_max, token, experts, budget_row, K_MIN, C, A, A_PAD)
    row = residuals + expert * residuals_row + K_MIN * residuals_column
    square, weight = gate.to(tl.float32) * gate.to(tl.float32), gate.to(tl.float64) * gate.to(tl.float64)
    chosen = selected(row, residuals_column, square, held, extra, limit, STEPS)
    if not CONVEX:  # noqa: SIM102
        if _is_bent(row, residuals_column, square, held, STEPS):
            numbers += token * (A * (STEPS + 1) + 2 * (A * STEPS + 1))
            picks += token * A * (A * STEPS + 1)
            chosen = _programme(row, residuals_column, weight, held, extra, limit, numbers, picks, STEPS, BLOCK)
    k = tl.where(held, chosen + K_MIN, 0)
    tl.store(chunks + token * A + slot, k, mask=slot < A)
    if spent is not None:
        add_counts(spent, tl.where(slot < A, k, -1), C)


@triton.jit
def _sums(pairs, start, end, expert, A: tl.constexpr, PAIRS: tl.constexpr):
    """Sum of gate^2 of each expert over the pairs from `start` to `end`, fp64, in a fixed order; _UNSEEN if it has none."""
    gates, expert_ids, gates_row, gates_column, ids_row, ids_column = pairs
    total = tl.zeros([expert.shape[0], PAIRS], tl.float64)
    seen = tl.zeros([expert.shape[0], PAIRS], tl.int32)
    for first in range(start, end, _TILES * PAIRS):
        for tile in tl.static_range(_TILES):
            pair = first + tile * PAIRS + tl.arange(0, PAIRS)
            token, slot = (pair // A).to(tl.int64), pair % A
            own = tl.load(expert_ids + token * ids_row + slot * ids_column, mask=pair < end, other=-1)
            gate = tl.load(gates + token * gates_row + slot * gates_column, mask=pair < end, other=0.0).to(tl.float64)
            mine = own[None, :] == expert[:, None]
            total += tl.where(mine, (gate * gate)[None, :], 0.0)
            seen |= mine.to(tl.int32)
    return tl.where(tl.max(seen, 1) > 0, tl.sum(total, 1), _UNSEEN)


@triton.jit(do_not_specialize=["pairs", "pairs_each"])
def _sum_kernel(
    gates, expert_ids, parts, pairs, pairs_each, experts, gates_row, gates_column, ids_row, ids_column,
    A: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Sums of some experts over some pairs, to parts fp64 [P, E]."""
    part, expert = tl.program_id(0), tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    end = tl.minimum((part + 1) * pairs_each, pairs)
    where = (gates, expert_ids, gates_row, gates_column, ids_row, ids_column)
    total = _sums(where, part * pairs_each, end, expert, A, PAIRS)
    tl.store(parts + part * experts + expert, total, mask=expert < experts)


@triton.jit
def _sum_of_parts(parts, count, experts, E_PAD: tl.constexpr, PARTS: tl.constexpr):
    """Sum of each expert over parts fp64 [count, E]: fp64 [E_PAD], _UNSEEN where no part saw it."""
    part, expert = tl.arange(0, PARTS)[:, None], tl.arange(0, E_PAD)[None, :]
    total = tl.zeros([PARTS, E_PAD], tl.float64)
    seen = tl.zeros([PARTS, E_PAD], tl.int32)
    for start in range(0, count, PARTS):
        inside = (start + part < count) & (expert < experts)
        some = tl.load(parts + (start + part) * experts + expert, mask=inside, other=_UNSEEN)
        total += tl.where(some == _UNSEEN, 0.0, some)
        seen |= (some != _UNSEEN).to(tl.int32)
    return tl.where(tl.max(seen, 0) > 0, tl.sum(total, 0), _UNSEEN)


@triton.jit
def _by_threshold(upper, lower, square, held, extra, limit):
    """`selected` for many rows: find the extra-th largest key, two bits at a time, and take what is above and the first equal.

    upper, lower: what the table holds before and after each step. The three numbers of keys that a pair of bits is chosen by
    are counted in one, 20 bits each.
    """
    STEPS_PAD: tl.constexpr = upper.shape[1]
    allowed = tl.arange(0, STEPS_PAD)[None, :] < tl.where(held, limit, 0)[:, None]
    keys = tl.where(allowed, key_of(finite(square)[:, None], upper, lower), FORBIDDEN)
    flat = tl.reshape(keys, [held.shape[0] * STEPS_PAD])
    count = tl.sum((flat >= _TOP_BIT).to(tl.int32), 0)
    level, reached = tl.where(count >= extra, _TOP_BIT, 0), tl.where(count >= extra, count, -1)
    unit = tl.zeros_like(level) + (_TOP_BIT >> 2)
    while (unit > 0) & (reached != extra):
        one, two, three = (flat >= level + unit), (flat >= level + 2 * unit), (flat >= level + 3 * unit)
        counts = tl.sum(one.to(tl.int64) + (two.to(tl.int64) << 20) + (three.to(tl.int64) << 40), 0)
        for digit in tl.static_range(3):
            count = ((counts >> 20 * digit) & 0xFFFFF).to(tl.int32)
            level, reached = tl.where(count >= extra, level + unit, level), tl.where(count >= extra, count, reached)
        unit = unit >> 2
    above, equal = tl.sum((keys > level).to(tl.int32), 1), tl.sum((keys == level).to(tl.int32), 1)
    left = extra - tl.sum(above, 0) - (tl.cumsum(equal, 0) - equal)
    return above + tl.minimum(tl.maximum(left, 0), equal)


@triton.jit(do_not_specialize=["pairs", "part_count"])
def _dispatch_kernel(
    gates, expert_ids, parts, part_count, residuals, budget, k_max, planes, chunks, pairs, experts, numbers, picks,
    gates_row, gates_column, ids_row, ids_column, residuals_row, residuals_column, spent, K_MIN: tl.constexpr, C: tl.constexpr,
    A: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CONVEX: tl.constexpr,
):  # fmt: skip
    """Planes of every expert, from parts fp64 [part_count, E] or, if None, from the pairs. CONVEX: every program finds them and
    hands them out to its share of pairs, to chunks int32 [T, A]; else one does, to planes int32 [E], without parts to chunks
    too. ROWS: parts or pairs read at once; numbers, picks: room as of `_room`. The table is read before any sum is needed."""
    STEPS: tl.constexpr = C - K_MIN
    STEPS_PAD: tl.constexpr = max(1, triton.next_power_of_2(STEPS))
    expert, step = tl.arange(0, E_PAD), tl.arange(0, STEPS_PAD)[None, :]
    row = residuals + tl.where(expert < experts, expert, 0) * residuals_row + K_MIN * residuals_column
    gain = row[:, None] + step * residuals_column
    upper, lower = tl.load(gain, mask=step < STEPS, other=0.0), tl.load(gain + residuals_column, mask=step < STEPS, other=0.0)
    average, most = tl.load(budget), tl.load(k_max)
    if parts is None:
        where = (gates, expert_ids, gates_row, gates_column, ids_row, ids_column)
        total = _sums(where, 0, pairs, expert, A, ROWS)
    else:
        total = _sum_of_parts(parts, part_count, experts, E_PAD, ROWS)
    held = (expert < experts) & (total != _UNSEEN)
    extra, limit = extra_of(average, most, tl.sum(held.to(tl.int32), 0), K_MIN, C)
    square = total.to(tl.float32)
    chosen = _by_threshold(upper, lower, square, held, extra, limit)
    where = (expert_ids, chunks, pairs, ids_row, ids_column, spent)
    if CONVEX:
        for start in range(tl.program_id(0) * BLOCK, pairs, tl.num_programs(0) * BLOCK):
            pair, own, known = _experts_of(where, start, experts, A, BLOCK)
            _give(where, pair, tl.where(known, tl.gather(chosen + K_MIN, tl.where(known, own, 0).to(tl.int32), 0), 0), C)
    else:
        if _is_bent(row, residuals_column, square, held, STEPS):
            chosen = _programme(row, residuals_column, total, held, extra, limit, numbers, picks, STEPS, BLOCK)
        tl.store(planes + expert, chosen + K_MIN, mask=expert < experts)
        if parts is None:
            tl.debug_barrier()
            for start in range(0, pairs, BLOCK):
                pair, own, known = _experts_of(where, start, experts, A, BLOCK)
                _give(where, pair, tl.load(planes + own, mask=known, other=0), C)


@triton.jit
def _experts_of(where, start, experts, A: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK pairs from `start` on: their numbers, experts, and whether there are such experts."""
    expert_ids, _, pairs, ids_row, ids_column, _ = where
    pair = start + tl.arange(0, BLOCK)
    expert = tl.load(expert_ids + (pair // A).to(tl.int64) * ids_row + pair % A * ids_column, mask=pair < pairs, other=-1)
    return pair, expert, is_held(expert, experts)


@triton.jit
def _give(where, pair, k, C: tl.constexpr):
    """Planes of pairs to chunks int32 [T, A]; with spent they are counted."""
    _, chunks, pairs, _, _, spent = where
    tl.store(chunks + pair, k, mask=pair < pairs)
    if spent is not None:
        add_counts(spent, tl.where(pair < pairs, k, -1), C)


@triton.jit(do_not_specialize=["pairs"])
def _hand_out(
    expert_ids, planes, chunks, pairs, experts, ids_row, ids_column, spent,
    A: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Planes of the experts of BLOCK pairs, to chunks int32 [T, A]; with spent they are counted."""
    where = (expert_ids, chunks, pairs, ids_row, ids_column, spent)
    pair, own, known = _experts_of(where, tl.program_id(0) * BLOCK, experts, A, BLOCK)
    _give(where, pair, tl.load(planes + own, mask=known, other=0), C)


def _options(warps: int) -> dict:
    """Launch options; left alone, ptxas spills rather than take registers that no other program wants."""
    return {"num_warps": warps, "num_stages": 1} | ({} if torch.version.hip else {"maxnreg": min(255, 2048 // warps)})


def _room(rows: int, slots: int, steps: int, convex: bool, device) -> tuple[Tensor | None, Tensor | None]:
    """Scratch of `_programme` for each of `rows`: fp64 for costs and two rows of states, int8 for picks; none if convex."""
    if convex:
        return None, None
    states = slots * steps + 1
    numbers = torch.empty(rows, slots * (steps + 1) + 2 * states, dtype=torch.float64, device=device)
    return numbers, torch.empty(rows, slots, states, dtype=torch.int8, device=device)


def allocate(
    gates: Tensor, expert_ids: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor, k_min: int, convex: bool,
    spent: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Planes per selected expert, int32 [T, A], one budget per token; shapes as in `ops.allocate`, tensors on one device.

    convex: every row of the table is convex from k_min on (`allocation.is_convex`). If not, each token looks at its own
    rows: rank selection where they are convex, the exact programme where they are not. spent: as `ops.count` takes it, which
    is done on the way. DPA-MoE, section 3.3.
    """
    (tokens, active), columns = expert_ids.shape, residuals.shape[1] - 1
    chunks = torch.empty(tokens, active, dtype=torch.int32, device=expert_ids.device)
    here = spent if tokens <= _COUNTED_HERE else None
    if chunks.numel():
        numbers, picks = _room(tokens, active, columns - k_min, convex, chunks.device)
        padded = next_power_of_2(active)
        warps = 1 if padded <= 8 else min(16, padded // 4)
        _allocate_kernel[(tokens,)](
            gates, expert_ids, residuals, budget, k_max, chunks, residuals.shape[0], numbers, picks,
            *gates.stride(), *expert_ids.stride(), *residuals.stride(), budget.stride(0) if budget.dim() else 0, here,
            K_MIN=k_min, C=columns, A=active, A_PAD=padded, BLOCK=32 * warps, CONVEX=convex, **_options(warps),
        )  # fmt: skip
    if spent is not None and here is None:
        triton_threshold.count(chunks, spent)
    return chunks


def allocate_dispatch(
    gates: Tensor, expert_ids: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor, k_min: int, convex: bool,
    spent: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Planes per selected expert, int32 [T, A], one k per distinct expert; shapes as in `ops.allocate_dispatch`.

    convex, spent: as in `allocate`; the rows of the experts at hand count. At most two launches, three if not convex. DPA-MoE,
    section 3.3.
    """
    (tokens, active), (experts, columns) = expert_ids.shape, residuals.shape
    pairs, device, padded = tokens * active, expert_ids.device, next_power_of_2(experts)
    chunks = torch.empty(tokens, active, dtype=torch.int32, device=device)
    if not pairs:
        return chunks
    planes = None if convex else torch.empty(experts, dtype=torch.int32, device=device)
    numbers, picks = _room(1, experts, columns - 1 - k_min, convex, device)
    rows, warps = max(1, min(32, 2048 // padded)), min(16, max(8, padded // 32))
    parts, count, small = None, 0, pairs <= 2 * _TILES.value * rows  # one program does these sooner than more launches
    if not small:
        each = max(_LEAST_PAIRS, _PAIRS * cdiv(pairs, _PAIRS * _MOST_PARTS))
        count = cdiv(pairs, each)
        parts = torch.empty(count, experts, dtype=torch.float64, device=device)
        _sum_kernel[(count, cdiv(experts, _EXPERTS))](
            gates, expert_ids, parts, pairs, each, experts, *gates.stride(), *expert_ids.stride(),
            A=active, PAIRS=_PAIRS, EXPERTS=_EXPERTS,
        )  # fmt: skip
    block = 64 * warps
    _dispatch_kernel[(min(_MOST_SHARES, cdiv(pairs, block)) if convex and not small else 1,)](
        gates, expert_ids, parts, count, residuals, budget, k_max, planes, chunks, pairs, experts, numbers, picks,
        *gates.stride(), *expert_ids.stride(), *residuals.stride(), spent, K_MIN=k_min, C=columns - 1, A=active, E_PAD=padded,
        ROWS=rows if small else 4 * rows, BLOCK=block, CONVEX=convex, **_options(warps),
    )  # fmt: skip
    if not convex and not small:
        _hand_out[(cdiv(pairs, _BLOCK),)](
            expert_ids, planes, chunks, pairs, experts, *expert_ids.stride(), spent, A=active, C=columns - 1, BLOCK=_BLOCK
        )
    return chunks
