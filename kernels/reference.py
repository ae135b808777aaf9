"""The meaning of every op in plain torch: slow, obvious, the judge of all kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dpamoe.kernels.layout import group_width, offset_value, plane_scale, unpack_signs


def _gated(function):
    def activation(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return function(gate) * up

    return activation


def _swigluoai(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")


# What may stand between the two matmuls of an expert.
ACTIVATIONS = {
    "silu_mul": _gated(F.silu),
    "gelu_mul": _gated(F.gelu),
    "gelu_tanh_mul": _gated(_gelu_tanh),
    "relu_mul": _gated(F.relu),
    "sigmoid_mul": _gated(torch.sigmoid),
    "swigluoai": _swigluoai,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": lambda hidden: F.relu(hidden).square(),
}


def is_gated(activation: str) -> bool:
    """Whether it takes [..., 2 I] (gate rows first, then up rows) to [..., I]; the others keep the width."""
    return activation.endswith("_mul") or activation == "swigluoai"


def decode(planes, scales, offset, unit, chunks: int, in_features: int, group_size: int) -> Tensor:
    """Rebuild a stacked weight, fp32 [E, O, I], from its first `chunks` planes (DPA-MoE, section 3.1)."""

    def wide(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(group_width(in_features, group_size), dim=-1)[..., :in_features]

    weight = wide(offset_value(scales, offset, unit))
    for c in range(chunks):
        weight = weight + wide(plane_scale(scales, unit, c)) * unpack_signs(planes[c], in_features)
    return weight


def planes_to_spend(expert_ids: Tensor, experts: int, budget: Tensor, k_min: int, k_max: Tensor) -> tuple[Tensor, Tensor]:
    """Which slots hold an expert, bool [T, A], and how many planes each token may spend, int64 [T].

    floor(A k + 1/2) over the A real slots, kept between A k_min and A k_max. The 1e-5 undoes the fp32 rounding of a budget
    such as 2.1, so that halves round up as they are written.
    """
    held = (expert_ids >= 0) & (expert_ids < experts)
    active = held.sum(-1)
    spend = torch.floor(active * torch.minimum(budget.double(), k_max) + (0.5 + 1e-5)).long()  # no whole number is infinite
    return held, torch.minimum(torch.maximum(spend, active * k_min), active * k_max)


def knapsack(cost: Tensor, spend: Tensor) -> Tensor:
    """Exact multiple-choice knapsack, one per row: pick one column of every slot, columns summing to `spend`, least cost.

    cost fp64 [R, N, K] (column j costs j; inf forbids it), spend int64 [R]. Returns int64 [R, N]. Where several
    solutions are optimal, lower slots get more; where none adds up to `spend`, the next smaller sum that one adds up to is
    spent. O(N * S * K) for S = the largest spend (DPA-MoE, section 3.3).
    """
    rows, slots, choices = cost.shape
    states = int(spend.max()) + 1 if rows else 1
    best = cost.new_full((rows, states), float("inf"))
    best[:, 0] = 0
    picks = torch.zeros(rows, slots, states, dtype=torch.long, device=cost.device)
    for slot in reversed(range(slots)):
        after = torch.full_like(best, float("inf"))
        for choice in range(min(choices, states)):
            total = best[:, : states - choice] + cost[:, slot, choice, None]
            better = total <= after[:, choice:]
            after[:, choice:] = torch.where(better, total, after[:, choice:])
            picks[:, slot, choice:] = torch.where(better, choice, picks[:, slot, choice:])
        best = after
    chosen = torch.zeros(rows, slots, dtype=torch.long, device=cost.device)
    left = _reachable(best, spend)
    for slot in range(slots):
        chosen[:, slot] = picks[:, slot].gather(1, left[:, None])[:, 0]
        left -= chosen[:, slot]
    return chosen


def _reachable(best: Tensor, spend: Tensor) -> Tensor:
    """Largest sum up to `spend` int64 [R] of finite cost, by best fp64 [R, states]; `spend` itself if there is none."""
    sums = torch.arange(best.shape[1], device=best.device)
    within = torch.isfinite(best) & (spend[:, None] >= sums)
    return torch.where(within.any(1), (within * sums).amax(1), spend)


def only_held(cost: Tensor, held: Tensor) -> Tensor:
    """Costs [..., K] with every choice but the first forbidden, and that one free, where no expert is held."""
    nothing = torch.full_like(cost, float("inf"))
    nothing[..., 0] = 0
    return cost.where(held[..., None], nothing)


def allocate(gates: Tensor, expert_ids: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor, k_min: int) -> Tensor:
    """Planes per selected expert: minimise sum of gate^2 * residuals[expert, k] under the token's budget, exactly.

    Shapes as in `ops.allocate`. Any table is allowed, inf where a k is not: this is the dynamic programme. DPA-MoE, section
    3.3.
    """
    held, spend = planes_to_spend(expert_ids, residuals.shape[0], budget, k_min, k_max)
    table = residuals.double()[expert_ids.long().where(held, 0), k_min : int(k_max) + 1]
    cost = only_held(gates.double().square()[..., None] * table, held)
    chosen = knapsack(cost, spend - held.sum(-1) * k_min)
    return ((chosen + k_min) * held).int()


def allocate_threshold(gates: Tensor, expert_ids: Tensor, thresholds: Tensor, k_max: Tensor) -> Tensor:
    """Planes per selected expert: how many of its thresholds gate^2 is above, k_max at most; every pair by itself.

    Shapes as in `ops.allocate_threshold`.
    """
    held = (expert_ids >= 0) & (expert_ids < thresholds.shape[0])
    own = thresholds[expert_ids.long().where(held, 0)]
    above = ~(gates.float().square()[..., None] <= own)  # NaN too, whose output shows it then
    return (torch.minimum(above.sum(-1), k_max) * held).int()


def expert_matmul(x, expert_ids, chunks, planes, scales, offset, unit, bias, group_size: int) -> Tensor:
    """Rows times the first k planes of their expert's weight, one pair at a time; shapes as in `ops.expert_matmul`."""
    tokens, active = expert_ids.shape
    experts, out_features, _ = offset.shape
    out = x.new_zeros(tokens, active, out_features)
    for t in range(tokens):
        for a in range(active):
            expert = int(expert_ids[t, a])
            if not 0 <= expert < experts or chunks[t, a] == 0:
                continue
            one = slice(expert, expert + 1)
            weight = decode(
                [plane[one] for plane in planes], [scale[one] for scale in scales], offset[one],
                None if unit is None else unit[one], int(chunks[t, a]), x.shape[-1], group_size,
            )[0]  # fmt: skip
            row = x[t, a] if x.dim() == 3 else x[t]
            product = row.float() @ weight.T
            out[t, a] = product if bias is None else product + bias[expert].float()
    return out


def expert_ffn(x, expert_ids, gates, chunks, up: tuple, down: tuple, activation: str, group_size: int) -> Tensor:
    """Whole expert block, sum over a of gate * down(activation(up(x))); up and down are (planes, ..., unit, bias)."""
    hidden = ACTIVATIONS[activation](expert_matmul(x, expert_ids, chunks, *up, group_size))
    rows = expert_matmul(hidden, expert_ids, chunks, *down, group_size)
    held = (expert_ids >= 0) & (expert_ids < up[2].shape[0]) & (chunks > 0)
    weights = gates.float().where(held, 0.0)
    return (rows.float() * weights[..., None]).sum(1).to(x.dtype)
