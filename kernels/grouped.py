"""Vectorised expert computation in torch: pairs grouped by expert and prefix, each plane decoded once per expert."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from dpamoe.kernels.layout import EncodedWeight, group_width, offset_value, plane_scale, unpack_signs
from dpamoe.kernels.reference import ACTIVATIONS


def segments(
    expert_ids: Tensor, chunks: Tensor, experts: int, planes: int
) -> tuple[Tensor, dict[int, list[tuple[int, int, int]]]]:
    """Sort the (token, slot) pairs by expert and plane count.

    Returns the flat pair numbers in that order, int64 [P], and for each expert its runs (k, start, stop) with k rising.
    Padding ids and pairs with 0 planes are left out; more planes than there are mean all.
    """
    ids, counts = expert_ids.flatten().long(), chunks.flatten().long().clamp(max=planes)
    stride = int(counts.max()) + 1 if counts.numel() else 1
    pairs = torch.nonzero((ids >= 0) & (ids < experts) & (counts > 0)).flatten()
    keys, order = (ids[pairs] * stride + counts[pairs]).sort(stable=True)
    runs: dict[int, list[tuple[int, int, int]]] = {}
    start = 0
    for key, length in zip(*(part.tolist() for part in keys.unique_consecutive(return_counts=True)), strict=True):
        runs.setdefault(key // stride, []).append((key % stride, start, start + length))
        start += length
    return pairs[order], runs


def prefixes(weight: EncodedWeight, expert: int, counts: list[int]) -> Iterator[Tensor]:
    """Yield one expert's weight, fp32 [O, I], at each of the rising plane counts; the tensor is reused between them."""
    table = unpack_signs(torch.arange(256, dtype=torch.uint8, device=weight.offset.device)[:, None], 8)
    scales = [scale[expert : expert + 1] for scale in weight.scales]
    unit = None if weight.unit is None else weight.unit[expert : expert + 1]
    offset = offset_value(scales, weight.offset[expert : expert + 1], unit)[0]
    width, group = weight.planes[0].shape[-1] * 8, group_width(weight.in_features, weight.group_size)
    dense = _per_input(offset, group, width).clone(memory_format=torch.contiguous_format)
    done = 0
    for count in counts:
        for c in range(done, count):
            signs = F.embedding(weight.planes[c][expert].int(), table).view(dense.shape)
            scale = plane_scale(scales, unit, c)[0]
            if width == scale.shape[-1] * group:
                grouped = (*scale.shape, group)
                dense.view(grouped).addcmul_(signs.view(grouped), scale[..., None])
            else:
                dense.addcmul_(signs, _per_input(scale, group, width))
        done = count
        yield dense[:, : weight.in_features]


def _per_input(per_group: Tensor, group_size: int, width: int) -> Tensor:
    """Spread one number per group, [O, G], over its inputs, [O, width]."""
    spread = per_group.repeat_interleave(group_size, dim=-1)
    return F.pad(spread, (0, max(0, width - spread.shape[-1])))[:, :width]


def decode(weight: EncodedWeight, k: int) -> Tensor:
    """Rebuild a whole stacked weight, fp32 [E, O, I], from its first k planes."""
    return torch.stack([next(prefixes(weight, expert, [k])).clone() for expert in range(weight.offset.shape[0])])


def expert_matmul(x: Tensor, expert_ids: Tensor, chunks: Tensor, weight: EncodedWeight, bias: Tensor | None) -> Tensor:
    """Rows times the first k planes of their expert's weight, [T, A, O]; computed in fp32, returned in the dtype of x."""
    experts, out_features, _ = weight.offset.shape
    tokens, active = expert_ids.shape
    order, runs = segments(expert_ids, chunks, experts, len(weight.planes))
    rows, source = (x.flatten(0, 1), order) if x.dim() == 3 else (x, order // max(active, 1))
    out = x.new_zeros(tokens * active, out_features, dtype=torch.float32)
    for expert, spans in runs.items():
        own_bias = None if bias is None else bias[expert].float()
        for dense, (_, start, stop) in zip(prefixes(weight, expert, [k for k, _, _ in spans]), spans, strict=True):
            out[order[start:stop]] = F.linear(rows[source[start:stop]].float(), dense, own_bias)
    return out.view(tokens, active, out_features).to(x.dtype)


def expert_ffn(
    x: Tensor, expert_ids: Tensor, gates: Tensor, chunks: Tensor,
    up: EncodedWeight, up_bias: Tensor | None, down: EncodedWeight, down_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """Whole expert block, [T, H]: sum over slots, in slot order, of gate * down(activation(up(x))); fp32 inside."""
    experts, out_features, _ = down.offset.shape
    tokens, active = expert_ids.shape
    order, runs = segments(expert_ids, chunks, experts, len(up.planes))
    source = order // max(active, 1)
    out = x.new_zeros(tokens * active, out_features, dtype=torch.float32)
    for expert, spans in runs.items():
        counts = [k for k, _, _ in spans]
        biases = [None if bias is None else bias[expert].float() for bias in (up_bias, down_bias)]
        pairs = zip(prefixes(up, expert, counts), prefixes(down, expert, counts), spans, strict=True)
        for up_dense, down_dense, (_, start, stop) in pairs:
            hidden = ACTIVATIONS[activation](F.linear(x[source[start:stop]].float(), up_dense, biases[0]))
            out[order[start:stop]] = F.linear(hidden, down_dense, biases[1])
    held = (expert_ids >= 0) & (expert_ids < experts) & (chunks > 0)
    weights = gates.float().where(held, 0.0)
    return torch.einsum("tah,ta->th", out.view(tokens, active, out_features), weights).to(x.dtype)
