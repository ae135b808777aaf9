"""Registration of the routers' ops: one place where their inputs are checked and fakes are given. See `ops` for the experts'.

Letters: T tokens, E experts, A active experts per token, H features of a row.
"""

import torch
from torch import Tensor

from dpamoe.kernels import paths, routing
from dpamoe.kernels.define import define


def _route(
    logits: Tensor, bias: Tensor | None, active: int, score: str, norm: str, scale: float, groups: int, kept_groups: int,
    group_score: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A router behind its matmul: experts of every token, int64 [T, A], the best first, and their gates [T, A] of dtype.

    logits float [T, E]; bias [E], added to the scores to choose, not to weigh; the rest as in `routing.Rule`, in fp32. Equal
    scores go to the lower expert. Raises ValueError for what does not fit.
    """
    rule = routing.Rule(active, score, norm, scale, groups, kept_groups, group_score)
    routing.check(logits, bias, rule)
    if paths.has_triton(logits.device) and logits.shape[1] <= routing.MOST_EXPERTS:
        from dpamoe.kernels import triton_route

        with torch.cuda.device_of(logits):
            return triton_route.route(logits, bias, rule, dtype)
    return routing.route(logits, bias, rule, dtype)


def _route_fake(logits, bias, active, *rest):
    shape = (logits.shape[0], active)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=rest[-1])


def _linear_route(
    x: Tensor, weight: Tensor, shift: Tensor | None, bias: Tensor | None, active: int, score: str, norm: str, scale: float,
    groups: int, kept_groups: int, group_score: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A whole router: `route` of the logits weight x + shift.

    x float [T, H]; weight [E, H] of any dtype that the one of x, to which logits are rounded, holds; shift [E]; the rest as in
    `route`. The weight may be read before the kernel in front of this op has ended, which must not write it.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} must be [tokens, features] and weight {list(weight.shape)} [experts, features]")
    if shift is not None and shift.shape != weight.shape[:1]:
        raise ValueError(f"shift {list(shift.shape)} must hold one number for each of {weight.shape[0]} experts")
    if paths.has_triton(x.device) and 0 < x.shape[0] <= routing.FEW_TOKENS:
        from dpamoe.kernels import triton_route

        with torch.cuda.device_of(x):
            logits = triton_route.linear(x, weight, shift)
    else:
        logits = torch.nn.functional.linear(x, weight.to(x.dtype), shift if shift is None else shift.to(x.dtype))
    return _route(logits, bias, active, score, norm, scale, groups, kept_groups, group_score, dtype)


def _linear_route_fake(x, weight, shift, bias, active, *rest):
    return _route_fake(x, bias, active, *rest)


route = define("route", _route, _route_fake)
linear_route = define("linear_route", _linear_route, _linear_route_fake)
