"""Residual tables made fit for allocation, and the tables and gates behind each way to allocate (DPA-MoE, section 3.3)."""

import numpy as np
import torch
from torch import Tensor


def project(table: Tensor, k_min: int) -> Tensor:
    """Monotone, then convex, from column k_min on: the shape on which rank selection is exact. fp32 [E, C + 1].

    Isotonic regression (pool adjacent violators) removes rises, the lower convex hull removes plateaus that trap a greedy
    allocator. Columns below k_min stay as measured. Raises ValueError for entries that are not finite.
    """
    if not bool(torch.isfinite(table).all()):
        raise ValueError(f"the residual table holds {int((~torch.isfinite(table)).sum())} entries that are not finite")
    result = table.double().clone()
    for row in result:
        row[k_min:] = torch.from_numpy(_lower_hull(_falling(row[k_min:].cpu().numpy())))
    rounded = result.float()
    return _convex_in_fp32(rounded, k_min)


def _falling(values: np.ndarray) -> np.ndarray:
    """Least-squares projection of one row on non-increasing sequences: pool adjacent violators."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value), 1])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (upper, many), (lower, few) = pools[-2], pools.pop()
            pools[-1] = [(upper * many + lower * few) / (many + few), many + few]
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def _lower_hull(values: np.ndarray) -> np.ndarray:
    """Largest convex sequence below one row."""
    corners: list[int] = []
    for x in range(len(values)):
        while len(corners) > 1:
            first, last = corners[-2], corners[-1]
            if (values[last] - values[first]) * (x - first) < (values[x] - values[first]) * (last - first):
                break
            corners.pop()
        corners.append(x)
    return np.interp(np.arange(len(values)), corners, values[corners])


def _convex_in_fp32(table: Tensor, k_min: int) -> Tensor:
    """Undo what rounding to fp32 did to equal slopes: sort the falls of each row, largest first, and add them up again."""
    result = table.clone()
    for _ in range(4):
        falls = (result[:, k_min:-1] - result[:, k_min + 1 :]).clamp_min(0).sort(1, descending=True).values
        for column in range(falls.shape[1] - 1, -1, -1):
            result[:, k_min + column] = result[:, k_min + column + 1] + falls[:, column]
        again = result[:, k_min:-1] - result[:, k_min + 1 :]
        if bool((again[:, 1:] <= again[:, :-1]).all()):
            break
    return result


def allocation_table(residuals: Tensor, allocation: str, k_min: int) -> Tensor:
    """The table that one way to allocate reads, fp32 [E, C + 1]: the residuals, their mean curve, or one falling curve.

    "uniform" gets 4^-k for every expert, whose powers of two are exact, so that equal planes are equal to the last bit.
    """
    if allocation == "gate-only":
        return project(residuals.double().mean(0, keepdim=True).float(), k_min).expand_as(residuals).contiguous()
    if allocation == "uniform":
        curve = 0.25 ** torch.arange(residuals.shape[1], device=residuals.device, dtype=torch.float32)
        return curve.expand_as(residuals).contiguous()
    return residuals


def allocation_gates(gates: Tensor, allocation: str) -> Tensor:
    """The gates that one way to allocate sees; the allocator squares them. Shape kept, dtype kept."""
    if allocation == "gate-linear":
        return gates.abs().sqrt()
    if allocation in ("residual-only", "uniform"):
        return torch.ones_like(gates)
    return gates
