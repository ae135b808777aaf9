"""Static quantisation of expert weights for comparison: llama.cpp's formats, round to nearest, and half-quadratic (HQQ).

Weights are quantised and dequantised, so any model runs with them; sizes are those of the stored form, all scales counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpamoe import kquants
from dpamoe.kernels.layout import group_width, groups_of
from dpamoe.modules import encoded_experts
from dpamoe.passes.rewrite import source_of
from dpamoe.sites import ExpertWeights, Site, gather, scatter

PURE = "_pure"  # of a name: no mix of types, as llama.cpp's `llama-quantize --pure`
LLAMA = {
    "q2_k": "Q2_K", "q3_k_m": "Q3_K", "q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K", "q8_0": "Q8_0",
    **{f"q{bits}_k{PURE}": f"Q{bits}_K" for bits in (2, 3, 4, 5)},
}  # fmt: skip
FORMATS = (*LLAMA, *(f"{method}{bits}" for method in ("rtn", "hqq") for bits in range(2, 9)))
ROLES = ("up", "down")
FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # rows of whole 32 weights
CHUNK_WEIGHTS = 1 << 18  # weights quantised at a time: bounds memory to about 20 MB of work space

# Half-quadratic quantisation as published: exponent of the error, weight of the split and its growth, rounds
HQQ_NORM, HQQ_BETA, HQQ_GROWTH, HQQ_ROUNDS = 0.7, 10.0, 1.01, 20


@dataclass(frozen=True)
class Requantised:
    """A weight after quantising and dequantising: as it was but for its values.

    bits: per weight as stored, scales counted. note: what had to be done differently from the format's name, or "".
    """

    weight: Tensor
    bits: float
    note: str


def check_formats(names: Sequence[str]) -> None:
    """ValueError for a name outside FORMATS, or for a format of llama.cpp where the package gguf is not installed."""
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"unknown format {name!r}: use one of {', '.join(FORMATS)}")
    for name in names:
        if name in LLAMA:
            _gguf(name)


def _gguf(name: str):
    """The decoder of GGUF files, an optional dependency."""
    try:
        from gguf import quants
    except ImportError as error:
        raise ValueError(f'format {name} needs the package gguf: pip install "dpamoe[eval]"') from error
    return quants


def requantise(weight: Tensor, name: str, role: str, layer: int, layers: int, group_size: int) -> Requantised:
    """Quantise and dequantise the weights of all experts of one layer.

    weight [E, O, I], any float dtype, on its own device. name: of FORMATS. role: "up" (gate and up rows) or "down". layer:
    number of the layer among the `layers` with experts, from 0; with role it decides the type in llama.cpp's mixes (see
    `tensor_type`). group_size: weights that share a scale in rtn and hqq, along the row, -1 for whole rows; llama.cpp's
    formats have their own. Raises ValueError for what does not fit together, weights that are not finite, or so large that
    the format's fp16 scales cannot hold them.
    """
    check_formats([name])
    if weight.dim() != 3 or not weight.is_floating_point() or weight.is_meta:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} on {weight.device}: it must be float [E, O, I], loaded"
        )
    if role not in ROLES or not 0 <= layer < layers:
        raise ValueError(f"role {role!r}, layer {layer} of {layers}: use {' or '.join(ROLES)}, and 0 to layers - 1")
    if name in LLAMA:
        kind, note = _fitting(tensor_type(name, role, layer, layers), *weight.shape[1:])
        return Requantised(_each(weight, lambda expert: _as_stored(expert, kind)), _bits(kind), note)
    bits = int(name[-1])
    _, _, in_features = weight.shape
    if group_size != -1 and not 2 <= group_size <= in_features:
        raise ValueError(
            f"group_size is {group_size}, the rows hold {in_features}: use 2 to {in_features}, or -1 for whole rows"
        )
    width = group_width(in_features, group_size)
    fit = _half_quadratic if name.startswith("hqq") else _nearest
    stored = bits + 32 * groups_of(in_features, group_size) / in_features
    return Requantised(_each(weight, lambda expert: _grouped(expert, width, bits, fit)), stored, "")


def _each(weight: Tensor, quantise: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantise expert by expert; `quantise` takes and returns fp32 [O, I]."""
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for number, expert in enumerate(weight.detach()):
        values = expert.float()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"expert {number} holds NaN or infinite weights: repair the checkpoint or download it again")
        result[number] = quantise(values.contiguous())
        if not bool(torch.isfinite(result[number]).all()):
            raise ValueError(f"expert {number} holds weights up to {float(values.abs().max()):.3g}, more than the format can")
    return result


# ---- llama.cpp


def tensor_type(name: str, role: str, layer: int, layers: int) -> str:
    """Type that llama.cpp's `llama-quantize`, without an importance matrix, gives an expert tensor of one layer.

    Gate and up take the type in the name, and so does down in a name that ends in `PURE`. Down takes more in the mixes, as
    `llama_tensor_get_type` chooses for `ffn_down` of any architecture but Falcon: Q3_K throughout for q2_k; Q5_K in the first
    sixteenth of the layers and Q4_K after it for q3_k_m; Q6_K for q4_k_m and q5_k_m in the first eighth of the layers, the
    last eighth, and every third between. It
    counts all layers of a model; here only those with experts are counted, the same unless some layers are dense.
    """
    base = LLAMA[name]
    if role == "up":
        return base
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    match name:
        case "q2_k":
            return "Q3_K"
        case "q3_k_m":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "q4_k_m" | "q5_k_m" if more:
            return "Q6_K"
    return base


def _fitting(kind: str, out_features: int, in_features: int) -> tuple[str, str]:
    """The type to use for rows of this length, and a note where it or its blocks are not what llama.cpp means by `kind`.

    llama.cpp changes the type wherever a row is not whole blocks. Here blocks run on over the rows of an expert if those fill
    whole blocks together, for its size and error are then those of the format. Otherwise its fallback: IQ4_NL for Q2_K and
    Q3_K (newer versions: Q4_0, of the same size), Q5_0, Q5_1 and Q8_0 for Q4_K, Q5_K and Q6_K, else F16.
    """
    block = 32 if kind == "Q8_0" else 256
    if in_features % block == 0:
        return kind, ""
    if out_features * in_features % block == 0:
        return kind, f"rows of {in_features} do not divide {block}: flattened"
    other = FALLBACK[kind] if kind in FALLBACK and in_features % 32 == 0 else "F16"
    return other, f"rows of {in_features}, and experts of {out_features} of them, do not divide {block}: {other} for {kind}"


def _bits(kind: str) -> float:
    """Bits per weight of a type of GGUF."""
    quants = _gguf(kind)
    weights, size = quants.GGML_QUANT_SIZES[quants.GGMLQuantizationType[kind]]
    return 8 * size / weights


def _as_stored(expert: Tensor, kind: str) -> Tensor:
    """Weights as a GGUF file of this type gives them back, blocks running over the rows; fp32, the shape of `expert`."""
    quants = _gguf(kind)
    code = quants.GGMLQuantizationType[kind]
    result = torch.empty_like(expert)
    with np.errstate(all="ignore"):  # what overflows is seen in the result
        for part, target in zip(expert.view(-1).split(CHUNK_WEIGHTS), result.view(-1).split(CHUNK_WEIGHTS), strict=True):
            if kind in kquants.BLOCK_BYTES:
                stored = kquants.encode(part.view(-1, kquants.BLOCK_WEIGHTS[kind]), kind).cpu().numpy().reshape(-1)
            else:
                stored = quants.quantize(part.cpu().numpy(), code)
            target.copy_(torch.from_numpy(quants.dequantize(stored, code)))
    return result


# ---- round to nearest, and half-quadratic


def _grouped(expert: Tensor, width: int, bits: int, fit: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Tensor:
    """Quantise rows [O, I] in groups of `width`, the last one shorter where it must be, as offset + scale * code.

    scale and offset (the zero) are fp16; codes are nearest to what decodes. fit: (groups, scale, offset, largest code) to a
    better offset.
    """
    whole = expert.shape[1] // width * width
    if whole < expert.shape[1]:
        rest = expert.shape[1] - whole
        parts = [(expert[:, :whole], width), (expert[:, whole:], rest)]
        return torch.cat([_grouped(part.contiguous(), wide, bits, fit) for part, wide in parts], 1)
    top = 2**bits - 1
    groups = expert.view(-1, width)
    result = torch.empty_like(groups)
    step = max(1, CHUNK_WEIGHTS // width)
    for start in range(0, groups.shape[0], step):
        part = groups[start : start + step]
        low, high = part.aminmax(dim=1, keepdim=True)
        scale = kquants.fp16_step(high - low, top).float()
        offset = fit(part, scale, low, top).half().float()
        result[start : start + step] = offset + scale * kquants.nearest(part - offset, scale, 0, top)
    return result.view_as(expert)


def _nearest(groups: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    """Round to nearest: the smallest weight is the offset."""
    return low


def _half_quadratic(groups: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    """Offset that minimises the sum of |error|^0.7 over a group for a fixed scale, [N, 1] (HQQ, Badri and Shaji 2023).

    By turns: a sparse part takes what a shrinkage by |error|^(0.7 - 1) / beta leaves of the error, and the offset becomes the
    mean of what remains between weights and codes; beta grows. The offset with the least mean |error| of each group is kept.
    The shrinkage is in the weights' own unit, as published, so for weights of 0.1 and less the sparse part is mostly empty.
    """
    offset, beta = low, HQQ_BETA
    best, least = low, torch.full_like(low, float("inf"))
    for _ in range(HQQ_ROUNDS):
        codes = kquants.nearest(groups - offset, scale, 0, top)
        error = groups - offset - scale * codes
        size = error.abs()
        mean = size.mean(1, keepdim=True)
        best, least = torch.where(mean < least, offset, best), torch.minimum(mean, least)
        sparse = error.sign() * (size - size.pow(HQQ_NORM - 1) / beta).clamp_min(0.0)
        offset = (groups - sparse - scale * codes).mean(1, keepdim=True)
        beta *= HQQ_GROWTH
    return best


# ---- whole models


def requantise_model(model: nn.Module, sites: Sequence[Site], name: str, group_size: int) -> tuple[int, set[str]]:
    """Quantise and dequantise the expert weights of a model in place; nothing else of it changes, biases included.

    sites: as `find_sites` found them in this model, in order; the model must not be transformed. The weights keep their
    dtype, which adds its own rounding. Returns the bytes of
    all expert weights as stored, and what `requantise` noted. Raises ValueError as it does, and for a site whose weights
    cannot be written back; sites before it are changed then.
    """
    check_formats([name])
    if not sites or encoded_experts(model):
        raise ValueError("there are no float experts to quantise: give the sites of a model that is not transformed")
    stored, notes = 0.0, set()
    for layer, site in enumerate(sites):
        experts = source_of(model, site)
        weights = gather(experts, site.layout, site.experts)
        done = {}
        for role, weight in (("up", weights.up), ("down", weights.down)):
            try:
                done[role] = requantise(weight, name, role, layer, len(sites), group_size)
            except ValueError as error:
                raise ValueError(f"{site.path} ({role}): {error}") from error
            stored += weight.numel() * done[role].bits / 8
            notes.add(done[role].note)
        _write_back(ExpertWeights(done["up"].weight, done["down"].weight, None, None), experts, site)
    return round(stored), notes - {""}


def _write_back(weights: ExpertWeights, experts: nn.Module, site: Site) -> None:
    """Put weights into a site's own parameters and read them again; ValueError where they do not hold them."""
    reason = "they share memory with each other"
    try:
        scatter(weights, experts, site.layout)
        again = gather(experts, site.layout, site.experts)
        if torch.equal(again.up, weights.up) and torch.equal(again.down, weights.down):
            return
    except (RuntimeError, ValueError) as error:
        reason = str(error)
    raise ValueError(f"the expert weights of {site.path} cannot be written back: {reason}")
