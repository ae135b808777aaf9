"""Decode in Triton: few tokens, one product of a row with the first k planes of its expert for every (token, expert) pair."""

import triton
import triton.language as tl

from dpamoe.kernels.triton_activate import activate_gated, activate_plain
from dpamoe.kernels.triton_rank import planes_of_slot
from dpamoe.kernels.triton_threshold import planes_above
from dpamoe.kernels.triton_unpack import OFFSET_STEPS, bit_sums, prepare, tied_scale


@triton.jit
def _offsets(scales, offset, unit, group, live, experts, TIED: tl.constexpr):
    """Offset of each group, fp32, and (tied) its scale."""
    zero = tl.load(offset + group, mask=live, other=0).to(tl.float32)
    scale = zero
    if TIED:
        scale = tied_scale(tl.load(scales[0] + group, mask=live, other=0), tl.load(unit + experts))
        zero = zero * (scale / OFFSET_STEPS)
    return zero, scale


@triton.jit
def _alpha(scales, tied, c: tl.constexpr, group, read, TIED: tl.constexpr):
    """Scale of plane c, fp32, 0 where it is not read."""
    if TIED:
        alpha = tl.where(read, tied * (0.5 ** (c + 1)), 0.0)
    else:
        alpha = tl.load(scales[c] + group, mask=read, other=0.0).to(tl.float32)
    return alpha


@triton.jit
def _product(
    planes, scales, offset, unit, experts, chunks, most, block, rows, ready, sums, factor,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    C: tl.constexpr, TIED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows of the units' experts times the units of x, fp32 [ROWS, UNITS, 1]; rows [ROWS, 1, 1], else [1, UNITS, 1]."""
    line = experts.to(tl.int64) * OUT + rows
    word = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[None, None, :]
    at = line * (IN // 32) + word
    live = (rows < OUT) & (chunks > 0) & (block * BLOCK < IN)  # beyond stands another row, or nothing
    inside = live & (word < IN // 32)
    group = line * GROUPS + block * BLOCK // GROUP
    zero, tied = _offsets(scales, offset, unit, group, live, experts, TIED)
    total = zero * 0.0
    for first in tl.static_range(0, C, 4):
        if first < most:
            words, alphas = (), ()
            for c in tl.static_range(first, min(first + 4, C)):
                source = planes[c].to(tl.pointer_type(tl.int32))
                words = words + (tl.load(source + at, mask=inside & (c < chunks), other=0),)
                alphas = alphas + (_alpha(scales, tied, c, group, live & (c < chunks), TIED),)
            for c in tl.static_range(first, min(first + 4, C)):
                if c < most:
                    total += alphas[c - first] * bit_sums(words[c - first], ready, ASM)
                    zero -= alphas[c - first]
    return total * factor[None, :, None] + zero * sums[None, :, None]


@triton.jit
def _rows_of_pair(
    x, planes, scales, offset, unit, expert, k, rows,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """W_k x of the given rows, and (GATED) of those half the weight further on; fp32 [ROWS, 1, 1]."""
    first_half = tl.zeros((ROWS, UNITS, 1), tl.float32)
    second_half = first_half
    chunks = tl.zeros((1, 1, 1), tl.int32) + k  # a lone number compared and spread has no right type in some interpreters
    for first in tl.static_range(0, (IN + BLOCK - 1) // BLOCK, UNITS):
        block = first + tl.arange(0, UNITS)[None, :, None]
        at = (first + tl.arange(0, UNITS)[:, None]) * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + at, mask=at < IN, other=0.0).to(tl.float32)
        ready, sums, factor = prepare(value, UNITS, BLOCK // 32, ASM)
        first_half += _product(
            planes, scales, offset, unit, expert, chunks, k, block, rows, ready, sums, factor,
            OUT, IN, GROUPS, GROUP, BLOCK, C, TIED, ASM,
        )  # fmt: skip
        if GATED:
            second_half += _product(
                planes, scales, offset, unit, expert, chunks, k, block, rows + OUT // 2, ready, sums, factor,
                OUT, IN, GROUPS, GROUP, BLOCK, C, TIED, ASM,
            )  # fmt: skip
    return tl.sum(first_half, 1, keep_dims=True), tl.sum(second_half, 1, keep_dims=True)


@triton.jit
def _finish(first, second, bias, at, live, OUT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr):
    """Bias (where live) and activation."""
    if BIAS:
        first += tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
        if GATED:
            second += tl.load(bias + at + OUT // 2, mask=live, other=0.0).to(tl.float32)
    if GATED:
        first = activate_gated(first, second, ACT)
    else:
        first = activate_plain(first, ACT)
    return first


@triton.jit
def _planes_of_pair(
    given, gates, ids, table, budget, k_max, token, slot, expert, gates_token, gates_slot, ids_token, ids_slot,
    table_row, table_column, budget_token, E: tl.constexpr, C: tl.constexpr, A: tl.constexpr,
    RULE: tl.constexpr, K_MIN: tl.constexpr, COLUMNS: tl.constexpr, A_PAD: tl.constexpr,
):  # fmt: skip
    """k of one pair by a rule of `up_kernel`, int32 scalar; given: pointer to where it stands if the rule is that."""
    if RULE == "rank":
        k = planes_of_slot(
            gates, ids, table, budget, k_max, token, slot, E, gates_token, gates_slot, ids_token, ids_slot,
            table_row, table_column, budget_token, K_MIN, C, A, A_PAD,
        )  # fmt: skip
    elif RULE == "threshold":
        gate = tl.load(gates + token * gates_token + slot * gates_slot)
        k = planes_above(gate, expert, table, k_max, E, table_row, table_column, COLUMNS)
    else:
        k = tl.load(given)
    return tl.minimum(k, C)


@triton.jit
def up_kernel(
    x, ids, chunks, gates, table, budget, k_max, spent, planes, scales, offset, unit, bias, out,
    x_token, x_slot, ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot, table_row, table_column,
    budget_token,
    A: tl.constexpr, E: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, TIED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, RULE: tl.constexpr, K_MIN: tl.constexpr, COLUMNS: tl.constexpr,
    COUNT: tl.constexpr, A_PAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One pair, ROWS rows of its expert: out[pair, row] = act(W_k x + bias).

    RULE: "given", k is read from chunks; else it comes from the gates in every program, and the first one of a pair writes it
    there: "rank", by rank selection over a table of residuals, "threshold", by the COLUMNS thresholds of a table. COUNT: and
    counts it in spent.
    """
    pair, tile = tl.program_id(0), tl.program_id(1)
    token, slot = pair // A, pair % A
    own = chunks + token * chunks_token + slot * chunks_slot
    expert = tl.load(ids + token * ids_token + slot * ids_slot)
    k = _planes_of_pair(
        own, gates, ids, table, budget, k_max, token, slot, expert, gates_token, gates_slot, ids_token, ids_slot,
        table_row, table_column, budget_token, E, C, A, RULE, K_MIN, COLUMNS, A_PAD,
    )  # fmt: skip
    if RULE != "given":  # noqa: SIM102
        if tile == 0:
            tl.store(own, k)
            if COUNT:
                tl.atomic_add(spent + k, tl.full([], 1, tl.int64), sem="relaxed")
    expert = expert.to(tl.int32)
    width: tl.constexpr = OUT // 2 if GATED else OUT
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None, None]
    k = tl.where((expert >= 0) & (expert < E), k, 0)
    first, second = _rows_of_pair(
        x + token * x_token + slot * x_slot, planes, scales, offset, unit, expert, k, rows,
        OUT, IN, GROUPS, GROUP, C, TIED, GATED, BLOCK, UNITS, ROWS, ASM,
    )  # fmt: skip
    result = _finish(first, second, bias, expert * OUT + rows, rows < tl.where(k > 0, width, 0), OUT, ACT, GATED, BIAS)
    tl.store(out + pair * width + rows, result.to(out.dtype.element_ty), mask=rows < width)


@triton.jit
def _slots(
    ids, chunks, ids_token, ids_slot, chunks_token, chunks_slot, token, slot, A: tl.constexpr, E: tl.constexpr, C: tl.constexpr
):
    """Expert and k of some slots of a token; 0 and 0 for those that hold none."""
    expert = tl.load(ids + token * ids_token + slot * ids_slot, mask=slot < A, other=E).to(tl.int32)
    k = tl.load(chunks + token * chunks_token + slot * chunks_slot, mask=slot < A, other=0)
    held = (expert >= 0) & (expert < E)
    return tl.where(held, expert, 0), tl.where(held, tl.minimum(k, C), 0)


@triton.jit
def down_kernel(
    x, ids, chunks, gates, planes, scales, offset, unit, bias, out, ids_token, ids_slot, chunks_token, chunks_slot,
    gates_token, gates_slot,
    A: tl.constexpr, E: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, TIED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr,
    ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One token, ROWS rows: out[token, row] = sum over slots of gate * (W_k x[pair] + bias)."""
    token, tile = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None, None]
    blocks: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    total = tl.zeros((ROWS, UNITS, 1), tl.float32)
    for first in range(0, A * blocks, UNITS):
        number = first + tl.arange(0, UNITS)[None, :, None]
        expert, k = _slots(ids, chunks, ids_token, ids_slot, chunks_token, chunks_slot, token, number // blocks, A, E, C)
        flat = first + tl.arange(0, UNITS)
        slot, at = flat // blocks, (flat % blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        _, read = _slots(ids, chunks, ids_token, ids_slot, chunks_token, chunks_slot, token, slot, A, E, C)
        gate = tl.load(gates + token * gates_token + slot * gates_slot, mask=read > 0, other=0.0).to(tl.float32)
        value = tl.load(x + (token * A + slot)[:, None] * IN + at, mask=(at < IN) & (read > 0)[:, None], other=0.0)
        ready, sums, factor = prepare(value.to(tl.float32), UNITS, BLOCK // 32, ASM)
        total += _product(
            planes, scales, offset, unit, expert, k, tl.max(read, 0), number % blocks, rows, ready, sums * gate, factor * gate,
            OUT, IN, GROUPS, GROUP, BLOCK, C, TIED, ASM,
        )  # fmt: skip
    result = tl.sum(total, 1, keep_dims=True)
    if BIAS:
        for slot in range(A):
            expert, k = _slots(ids, chunks, ids_token, ids_slot, chunks_token, chunks_slot, token, slot, A, E, C)
            gate = tl.load(gates + token * gates_token + slot * gates_slot, mask=k > 0, other=0.0).to(tl.float32)
            value = tl.load(bias + expert * OUT + rows, mask=rows < tl.where(k > 0, OUT, 0), other=0.0)
            result += gate * value.to(tl.float32)
    tl.store(out + token * OUT + rows, result.to(out.dtype.element_ty), mask=rows < OUT)
