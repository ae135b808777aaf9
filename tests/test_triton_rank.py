"""Rank selection as other kernels call it, for a slot and for a token, gives the planes of the torch code."""

import pytest
import torch
import triton
import triton.language as tl

from dpamoe.kernels import allocation
from dpamoe.kernels import triton_rank as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _slots(
    gates, ids, table, budget, k_max, out, experts, K_MIN: tl.constexpr, C: tl.constexpr, A: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0)
    planes = kernels.planes_of_slot(
        gates, ids, table, budget, k_max, pair // A, pair % A, experts, A, 1, A, 1, C + 1, 1, 1, K_MIN, C, A, PAD
    )
    tl.store(out + pair, planes)


@triton.jit
def _tokens(
    gates, ids, table, budget, k_max, out, experts, K_MIN: tl.constexpr, C: tl.constexpr, A: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    token, slot = tl.program_id(0), tl.arange(0, PAD)
    planes = kernels.planes_of_token(
        gates, ids, table, budget, k_max, token, experts, A, 1, A, 1, C + 1, 1, 1, K_MIN, C, A, PAD
    )
    tl.store(out + token * A + slot, planes, mask=slot < A)


@pytest.mark.parametrize("active, k_min, planes", [
    (1, 2, 8), (2, 1, 8), (3, 2, 5), (6, 2, 8), (8, 2, 8), (8, 0, 8), (8, 8, 8), (10, 7, 8), (20, 5, 8), (33, 6, 8),
])  # fmt: skip
def test_functions_for_other_kernels(random_pairs, convex_table, active, k_min, planes):
    tokens = 1 if active > 6 else 2
    table, (ids, gates, _) = convex_table(40, whole=active == 6), random_pairs(tokens, active, 40)
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = 40  # padding
    budgets, k_max = torch.tensor([(k_min + planes) / 2, 3.3])[:tokens], torch.tensor(planes, dtype=torch.int32)
    exact = allocation.allocate(gates, ids, table, budgets, k_max, k_min)
    for kernel, programs in ((_slots, tokens * active), (_tokens, tokens)):
        out = torch.empty(tokens, active, dtype=torch.int32, device=DEVICE)
        arguments = (argument.to(DEVICE) for argument in (gates, ids, table, budgets, k_max))
        padded = triton.next_power_of_2(active)
        kernel[(programs,)](*arguments, out, 40, K_MIN=k_min, C=8, A=active, PAD=padded)
        assert torch.equal(out.cpu(), exact)
