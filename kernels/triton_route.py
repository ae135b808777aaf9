"""Triton kernels of a router: logits of few tokens, and a warp for each token from its logits to its experts and gates.

The largest of a row is found as an integer, one instruction for a warp from Ampere on, and struck out before the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpamoe.kernels.paths import early
from dpamoe.kernels.routing import LEAST_SUM, Rule
from dpamoe.kernels.sizes import next_power_of_2
from dpamoe.kernels.triton_wait import wait_for_before

STRUCK = tl.constexpr(-(1 << 31))  # below the key of every number
NOBODY = tl.constexpr(1 << 30)
SMALLEST = tl.constexpr(LEAST_SUM)


@triton.jit
def keys_of(values):
    """Integers in the order of fp32 values: 0 and -0 are equal, what is not a number is largest."""
    bits = tl.where(values == 0.0, 0, values.to(tl.int32, bitcast=True))
    return tl.where(values != values, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def values_of(keys):
    """The inverse of `keys_of`."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def largest(keys, places):
    """The largest key, and the first place where it stands."""
    best = tl.max(keys, 0)
    return best, tl.min(tl.where(keys == best, places, NOBODY), 0)


@triton.jit
def scores_of(logits, held, SCORE: tl.constexpr):
    """Scores of a row of logits, fp32; held: where there is an expert."""
    if SCORE == "softmax":
        powers = tl.exp(logits - tl.max(tl.where(held, logits, float("-inf")), 0))
        scores = powers / tl.sum(tl.where(held, powers, 0.0), 0)
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    return scores


@triton.jit
def keep_groups(keys, expert, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr, G: tl.constexpr):
    """Keys with all groups but the best KEPT of GROUPS struck out; G: GROUPS as a power of two."""
    group, number = expert // SIZE, tl.arange(0, G)
    totals = tl.full([G], STRUCK, tl.int32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, keys, STRUCK)
        best, at = largest(own, expert)
        total = values_of(best)
        if TWO:
            total += values_of(tl.max(tl.where(expert == at, STRUCK, own), 0))
        totals = tl.where(number == g, keys_of(total), totals)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        _, at = largest(totals, number)
        totals = tl.where(number == at, STRUCK, totals)
        kept = kept | (group == at)
    return tl.where(kept, keys, STRUCK)


@triton.jit
def gates_of(scores, held, scale, NORM: tl.constexpr):
    """Gates of the chosen from their scores; held: which slots there are."""
    if NORM == "softmax":
        powers = tl.exp(scores - tl.max(tl.where(held, scores, float("-inf")), 0))
        scores = powers / tl.sum(tl.where(held, powers, 0.0), 0)
    elif NORM == "sum":
        scores = scores / (tl.sum(tl.where(held, scores, 0.0), 0) + SMALLEST)
    return scores * scale


@triton.jit(do_not_specialize=["scale"])
def route_kernel(
    logits, bias, ids, gates, scale, row, column,
    E: tl.constexpr, P: tl.constexpr, A: tl.constexpr, N: tl.constexpr, SCORE: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Experts and gates of one token; P, N, G: E, A and GROUPS as powers of two."""
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, P), tl.arange(0, N)
    held = expert < E
    wait_for_before(PDL)
    scores = scores_of(tl.load(logits + token * row + expert * column, mask=held, other=0.0).to(tl.float32), held, SCORE)
    own = keys_of(scores)
    keys = own
    if BIAS:
        keys = keys_of(scores + tl.load(bias + expert, mask=held, other=0.0).to(tl.float32))
    keys = tl.where(held, keys, STRUCK)
    if GROUPS > 1:
        keys = keep_groups(keys, expert, E // GROUPS, GROUPS, KEPT, TWO, G)
    chosen, found = tl.full([N], 0, tl.int32), tl.full([N], 0, tl.int32)
    for a in tl.static_range(A):
        best, at = largest(keys, expert)
        keys = tl.where(expert == at, STRUCK, keys)
        if BIAS:
            best = tl.max(tl.where(expert == at, own, STRUCK), 0)
        chosen = tl.where(slot == a, at, chosen)
        found = tl.where(slot == a, best, found)
    weights = gates_of(values_of(found), slot < A, scale, NORM)
    tl.store(ids + token * A + slot, chosen.to(tl.int64), mask=slot < A)
    tl.store(gates + token * A + slot, weights.to(gates.dtype.element_ty), mask=slot < A)


@triton.jit
def linear_kernel(
    x, weight, shift, logits, x_row, weight_row, IN: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One logit of one token; the weight does not wait for the kernel that writes x."""
    expert, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    own = tl.load(weight + expert * weight_row + column, mask=column < IN, other=0.0)
    wait_for_before(PDL)
    total = own.to(tl.float32) * tl.load(x + token * x_row + column, mask=column < IN, other=0.0).to(tl.float32)
    for start in tl.static_range(BLOCK, IN, BLOCK):
        live = column < IN - start
        own = tl.load(weight + expert * weight_row + start + column, mask=live, other=0.0).to(tl.float32)
        total += own * tl.load(x + token * x_row + start + column, mask=live, other=0.0).to(tl.float32)
    result = tl.sum(total, 0)
    if SHIFT:
        result += tl.load(shift + expert).to(tl.float32)
    tl.store(logits + token * tl.num_programs(0) + expert, result.to(logits.dtype.element_ty))


def linear(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """weight x + shift, [T, E] in the dtype of x, summed in fp32; any strides but along the features."""
    x, weight = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x, weight))
    (tokens, features), experts = x.shape, weight.shape[0]
    logits = torch.empty(tokens, experts, dtype=x.dtype, device=x.device)
    linear_kernel[(experts, tokens)](
        x, weight, weight if shift is None else shift.contiguous(), logits, x.stride(0), weight.stride(0), IN=features,
        BLOCK=min(2048, next_power_of_2(features)), SHIFT=shift is not None, num_warps=4, **early(x.device),
    )  # fmt: skip
    return logits


def route(logits: Tensor, bias: Tensor | None, rule: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 [T, A], the best first, and their gates [T, A]; shapes as in `ops.route`, on one device."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, rule.active, dtype=torch.int64, device=logits.device)
    gates = torch.empty(tokens, rule.active, dtype=dtype, device=logits.device)
    if tokens:
        wide = next_power_of_2(experts)
        route_kernel[(tokens,)](
            logits, logits if bias is None else bias.contiguous(), ids, gates, rule.scale, *logits.stride(),
            E=experts, P=wide, A=rule.active, N=next_power_of_2(rule.active), SCORE=rule.score, NORM=rule.norm,
            BIAS=bias is not None, GROUPS=rule.groups, KEPT=rule.kept_groups,
            TWO=rule.group_score == "two" and experts > rule.groups, G=next_power_of_2(rule.groups),
            num_warps=1 if wide <= 512 else 4, **early(logits.device),
        )  # fmt: skip
    return ids, gates
