"""The expert ops for few tokens by 1-bit products: launches of the bit-serial kernels. Other cards and shapes: `triton_experts`."""

import torch
import triton
from torch import Tensor

from dpamoe.kernels.bitserial_decode import down_kernel, up_kernel
from dpamoe.kernels.bitserial_group import group_kernel
from dpamoe.kernels.bitserial_planes import GIVEN, RANK
from dpamoe.kernels.bitserial_rows import cut_kernel, order_kernel
from dpamoe.kernels.layout import EncodedWeight, group_width
from dpamoe.kernels.reference import is_gated
from dpamoe.kernels.triton_experts import Allocation, combine, strides_of, tensors_of

GROUP = 128  # inputs that one step of the activation's bits covers
MOST_SLOTS = 16  # of a token, whose planes stand in one 64-bit number


def usable(*weights: EncodedWeight) -> bool:
    """Whether these kernels can read these weights: free fp16 scales in groups of 128, whole groups and tiles of 16 rows."""
    return all(
        weight.unit is None
        and weight.offset.dtype == torch.float16
        and group_width(weight.in_features, weight.group_size) == GROUP
        and weight.in_features % GROUP == 0
        and weight.offset.shape[1] % 16 == 0
        and all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in weight.tensors().values())
        for weight in weights
    )


def _sizes(weight: EncodedWeight) -> dict:
    return {"OUT": weight.offset.shape[1], "IN": weight.in_features, "C": len(weight.planes), "E": weight.offset.shape[0]}


def decode_ffn(
    x: Tensor, ids: Tensor, gates: Tensor, chunks: Tensor, up: EncodedWeight, up_bias: Tensor | None, down: EncodedWeight,
    down_bias: Tensor | None, activation: str, allocation: Allocation | None = None, ahead: tuple = (8, 16, 80, None),
) -> Tensor:  # fmt: skip
    """The expert block for few tokens, [T, H_out]: two launches. With an allocation chunks is written on the way."""
    tokens, active = ids.shape
    hidden = torch.empty(tokens * active, down.in_features, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, down.offset.shape[1], dtype=x.dtype, device=x.device)
    given = allocation or Allocation(gates, chunks, chunks, chunks, 0)
    table = (given.residuals, given.budget, given.k_max)
    row = (0, 0) if allocation is None else given.residuals.stride()
    each = given.budget.stride(0) if allocation is not None and given.budget.dim() else 0
    strides = (*strides_of(ids, chunks, gates), *row, each)
    common = {
        "RULE": GIVEN if allocation is None else RANK, "A": active, "N": triton.next_power_of_2(active), "K_MIN": given.k_min,
        "PDL": True, "launch_pdl": True,
    }  # fmt: skip
    gated = is_gated(activation)
    *held, _, bias = tensors_of(up, up_bias)
    up_kernel[(down.in_features // 16, tokens * active)](
        x, ids, chunks, gates, *table, *held, bias, hidden, x.stride(0), 0, *strides, **_sizes(up), **common, GATED=gated,
        ACT=activation, BIAS=up_bias is not None, CAP=ahead[0], maxnreg=ahead[2], NW=8, num_warps=8,
    )  # fmt: skip
    *held, _, bias = tensors_of(down, down_bias)
    down_kernel[(out.shape[1] // 16, tokens)](
        hidden, ids, chunks, gates, *table, *held, bias, out, *strides, **_sizes(down), **common, BIAS=down_bias is not None,
        NW=ahead[1], num_warps=ahead[1], maxnreg=ahead[3],
    )  # fmt: skip
    return out


def group_ffn(
    x: Tensor, ids: Tensor, gates: Tensor, chunks: Tensor, up: EncodedWeight, up_bias: Tensor | None, down: EncodedWeight,
    down_bias: Tensor | None, activation: str, allocation: Allocation | None = None, cut: tuple = (8, 80, 4, 8, 4, None, 2, 0),
) -> Tensor:  # fmt: skip
    """The expert block for several tokens, [T, H_out]: planes are read once for all pairs of an expert."""
    (tokens, active), experts, pairs, device = ids.shape, up.offset.shape[0], ids.numel(), x.device
    given = allocation or Allocation(gates, chunks, chunks, chunks, 0)
    row = (0, 0) if allocation is None else given.residuals.stride()
    each = given.budget.stride(0) if allocation is not None and given.budget.dim() else 0
    by_expert = pairs >= experts
    some = max(1, 2 * triton.next_power_of_2(experts) // triton.next_power_of_2(tokens)) if by_expert else 0
    bits = torch.empty(tokens, triton.cdiv(up.in_features, 256) * 256, dtype=torch.int32, device=device)
    order, ks = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    entries = torch.empty(experts if by_expert else pairs, 4, dtype=torch.int32, device=device)
    parts = triton.cdiv(up.in_features, 256 * 8)
    pdl = {"PDL": True, "launch_pdl": True}
    order_kernel[(tokens, parts + 1)](
        x, bits, ids, chunks, gates, given.residuals, given.budget, given.k_max, order, ks, entries, pairs, x.stride(0),
        *strides_of(ids, chunks, gates), *row, each, RULE=GIVEN if allocation is None else RANK, A=active,
        N=triton.next_power_of_2(active), E=experts, IN=up.in_features, C=len(up.planes), K_MIN=given.k_min,
        P=max(32, triton.next_power_of_2(pairs)), SOME=some, PARTS=parts, NW=8, num_warps=8, **pdl,
    )  # fmt: skip
    hidden = torch.empty(pairs, down.in_features, dtype=torch.float32, device=device)
    out = torch.empty(tokens, down.offset.shape[1], dtype=x.dtype, device=device)
    up_cap, up_regs, tiles, down_cap, rt, down_regs, down_tiles, major = cut
    least = given.k_min
    _group(bits, order, ks, entries, up, up_bias, hidden, active, activation, up_cap, 8, 1, up_regs, tiles, least)
    if major:
        *held, _, bias = tensors_of(down, down_bias)
        common = {"A": active, "N": triton.next_power_of_2(active), "K_MIN": given.k_min, "NW": down_cap, "num_warps": down_cap}
        down_kernel[(out.shape[1] // 16, tokens)](
            hidden, ids, chunks, gates, given.residuals, given.budget, given.k_max, *held, bias, out,
            *strides_of(ids, chunks, gates), *row, each, RULE=GIVEN, **_sizes(down), **common, BIAS=down_bias is not None,
            maxnreg=down_regs, **pdl,
        )  # fmt: skip
        return out
    inner = torch.empty(pairs, triton.cdiv(down.in_features, 256) * 256, dtype=torch.int32, device=device)
    cut_kernel[(pairs, triton.cdiv(down.in_features, 256 * 4))](
        hidden, inner, hidden.stride(0), IN=down.in_features, NW=4, num_warps=4, **pdl
    )
    rows = torch.empty(pairs, out.shape[1], dtype=torch.float32, device=device)
    _group(inner, order, ks, entries, down, down_bias, rows, 1, "", down_cap, 1, rt, down_regs, down_tiles, least)
    combine(rows, ids, chunks, gates, experts, out)
    return out


def _group(bits, order, ks, entries, weight, bias, out, sharing, activation, cap, nwk, rt, regs, tiles, least) -> None:
    *held, _, own = tensors_of(weight, bias)
    sizes = _sizes(weight)
    del sizes["E"]
    group_kernel[(triton.cdiv(out.shape[1], 16 * rt * tiles), entries.shape[0])](
        bits, order, ks, entries, *held, own, out, sharing, **sizes, GATED=activation != "" and is_gated(activation),
        ACT=activation, BIAS=bias is not None, CAP=cap, NWK=nwk, RT=rt, TILES=tiles, LEAST=least, PDL=True, num_warps=nwk * rt, launch_pdl=True,
        maxnreg=regs,
    )  # fmt: skip
