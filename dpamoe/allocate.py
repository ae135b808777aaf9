"""Residual tables made fit for allocation, and the tables and gates behind each way to allocate (DPA-MoE, section 3.3)."""

import numpy as np
import torch
from torch import Tensor

LARGEST = 1e30  # residuals are scaled down to this, well inside fp32


def project(table: Tensor, k_min: int) -> Tensor:
    """Monotone, then convex, from column k_min on: the shape on which rank selection is exact. fp32 [E, C + 1].

    Isotonic regression (pool adjacent violators) removes rises, the lower convex hull removes plateaus that trap a greedy
    allocator. Columns below k_min stay as measured. Raises ValueError for entries that are not finite.
    """
    if not bool(torch.isfinite(table).all()):
        raise ValueError(f"the residual table holds {int((~torch.isfinite(table)).sum())} entries that are not finite")
    result = table.double().clone()
    largest = float(result.max())
    if largest > LARGEST:  # only ratios within a site matter
        result *= LARGEST / largest
    for row in result:
        row[k_min:] = torch.from_numpy(_lower_hull(_falling(row[k_min:].cpu().numpy())))
    return _convex_in_fp32(result, k_min)


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
    """Round to fp32 so that falls, as fp32 differences, still shrink along a row: raise entries by an ulp where needed."""
    result = table.float().double()
    for column in range(table.shape[1] - 3, k_min - 1, -1):
        least = 2 * result[:, column + 1] - result[:, column + 2]
        low = least.float()
        low = torch.where(low.double() < least, torch.nextafter(low, torch.full_like(low, float("inf"))), low)
        result[:, column] = torch.maximum(result[:, column], low.double())
    return result.float()


def allocation_table(residuals: Tensor, allocation: str, k_min: int, skip: bool = False) -> Tensor:
    """The table that one way to allocate reads, fp32 [E, C + 1]: the residuals, their mean curve, or one falling curve.

    "uniform" gets 4^-k for every expert, whose powers of two are exact, so that equal planes are equal to the last bit. skip:
    column 0, the output itself, counts as well, and what lies between it and k_min is inf: those prefixes do not decode.
    """
    table = _curves(residuals, allocation, k_min)
    if not skip:
        return table
    forbidden = torch.arange(table.shape[1], device=table.device)
    return table.masked_fill((forbidden > 0) & (forbidden < k_min), float("inf"))


def _curves(residuals: Tensor, allocation: str, k_min: int) -> Tensor:
    if allocation == "gate-only":
        return project(residuals.double().mean(0, keepdim=True).float(), k_min).expand_as(residuals).contiguous()
    if allocation == "uniform":
        curve = 0.25 ** torch.arange(residuals.shape[1], device=residuals.device, dtype=torch.float32)
        return curve.expand_as(residuals).contiguous()
    return residuals


def allocation_gates(gates: Tensor, allocation: str, same: Tensor) -> Tensor:
    """The gates that one way to allocate sees, in the shape of gates; the allocator squares them.

    same: what stands for every gate where gates do not matter, 0-d and above 0; which number it is does not matter either.
    """
    if allocation == "gate-linear":
        return gates.abs().sqrt()
    if allocation in ("residual-only", "uniform"):
        return same.expand_as(gates)
    return gates
