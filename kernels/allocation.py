"""Allocation by rank selection: the fast exact path for convex residual tables, per token and per dispatch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpamoe.kernels import reference


@dataclass(frozen=True)
class Allocation:
    """What `allocate` takes beside the experts of the pairs; its rows of residuals are convex from k_min on.

    spent: int64 [C + 1], counts of pairs by their planes, to which these pairs are added.
    """

    gates: Tensor
    residuals: Tensor
    budget: Tensor
    k_max: Tensor
    k_min: int
    spent: Tensor | None = None


@dataclass(frozen=True)
class Thresholds:
    """What `allocate_threshold` takes beside the experts of the pairs, and spent as in `Allocation`."""

    gates: Tensor
    thresholds: Tensor
    k_max: Tensor
    spent: Tensor | None = None
    k_min: int = 0


def count(chunks: Tensor, spent: Tensor) -> None:
    """Add to spent, int64 [C + 1], how many pairs have each number of planes."""
    spent.add_((chunks.flatten()[:, None] == torch.arange(spent.numel(), device=spent.device)).sum(0))


def is_convex(residuals: Tensor, k_min: int) -> bool:
    """Whether every row falls by no more from k+1 to k+2 than from k to k+1, from column k_min on, and never rises."""
    gains = residuals[:, k_min:-1] - residuals[:, k_min + 1 :]
    return bool((gains >= 0).all() and (gains[:, 1:] <= gains[:, :-1]).all())


def select(gains: Tensor, spend: Tensor) -> Tensor:
    """Hand out `spend` planes of each row to its largest gains: int64 [R, N].

    gains [R, N, K], -inf where a plane may not be given; spend int64 [R]. Ties go to the lower slot. Exact when gains fall
    along K, since then the largest ones of every slot are its first planes.
    """
    rows, slots, steps = gains.shape
    order = gains.flatten(1).argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(slots * steps, device=gains.device) < spend[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen).view(rows, slots, steps).sum(-1)


def plane_gains(residuals: Tensor, k_min: int, k_max: Tensor) -> Tensor:
    """Fall of the residual with each further plane above k_min, fp32 [E, K]; -inf beyond k_max."""
    gains = (residuals[:, k_min:-1] - residuals[:, k_min + 1 :]).float()
    allowed = torch.arange(k_min, k_min + gains.shape[1], device=gains.device) < k_max
    return gains.where(allowed, float("-inf"))


def weigh(importance: Tensor, gains: Tensor) -> Tensor:
    """importance * gain, with forbidden planes kept at -inf whatever the importance (0 * inf is not a number)."""
    return (importance[..., None] * gains).where(gains > float("-inf"), float("-inf"))


def allocate(
    gates: Tensor, expert_ids: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor, k_min: int, convex: bool = False
) -> Tensor:
    """Planes per selected expert, int32 [T, A], one budget per token; shapes as in `ops.allocate`."""
    if not convex and not is_convex(residuals, k_min):
        return reference.allocate(gates, expert_ids, residuals, budget, k_max, k_min)
    held, spend = reference.planes_to_spend(expert_ids, residuals.shape[0], budget, k_min, k_max)
    gains = plane_gains(residuals, k_min, k_max)[expert_ids.long().where(held, 0)]
    gains = weigh(gates.float().square(), gains).masked_fill(~held[..., None], float("-inf"))
    chosen = select(gains, spend - held.sum(-1) * k_min)
    return ((chosen + k_min) * held).int()


def allocate_dispatch(gates, expert_ids, residuals, budget: Tensor, k_max: Tensor, k_min: int, convex: bool = False) -> Tensor:
    """Planes per selected expert, int32 [T, A], one k per distinct expert; shapes as in `ops.allocate_dispatch`."""
    experts = residuals.shape[0]
    held = (expert_ids >= 0) & (expert_ids < experts)
    ids = expert_ids.long().where(held, 0)
    importance = torch.zeros(experts, dtype=torch.float64, device=gates.device)
    importance.index_add_(0, ids.flatten(), gates.double().square().where(held, 0).flatten())
    present = (
        torch.zeros(experts, dtype=torch.long, device=gates.device).index_add_(0, ids.flatten(), held.long().flatten()) > 0
    )
    extra = torch.floor(present.sum() * (torch.minimum(budget.double(), k_max) - k_min) + (0.5 + 1e-5)).long()
    extra = torch.minimum(extra.clamp_min(0), present.sum() * (k_max - k_min)).view(1)
    if convex or is_convex(residuals, k_min):
        gains = weigh(importance.float(), plane_gains(residuals, k_min, k_max))
        chosen = select(gains.masked_fill(~present[:, None], float("-inf"))[None], extra)[0]
    else:
        cost = importance[:, None] * residuals.double()[:, k_min : int(k_max) + 1]
        chosen = reference.knapsack(reference.only_held(cost, present)[None], extra)[0]
    return ((chosen + k_min)[ids] * held).int().contiguous()
