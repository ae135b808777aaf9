"""Encoders for llama.cpp's block formats Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and IQ4_NL: float blocks to the bytes of a GGUF file.

A K-quant block holds 256 weights in sub-blocks of 16 or 32. Its fp16 super scale is shared, each sub-block has a small whole
number that multiplies it, and each weight a code:

    affine     weight = d * scale[s] * code - dmin * min[s]     Q2_K: 16 wide, 2-bit codes, 4-bit scales and mins
                                                                Q4_K, Q5_K: 32 wide, 4- and 5-bit codes, 6-bit scales and mins
    symmetric  weight = d * scale[s] * (code - middle)          Q3_K: 16 wide, 3-bit codes, 6-bit signed scales
                                                                Q6_K: 16 wide, 6-bit codes, 8-bit signed scales
    IQ4_NL     weight = d * LEVELS[code], 32 weights to a block, no sub-blocks

For each sub-block the width of a step is searched on a small grid; at each the scale (and min) follows by weighted least
squares. Then scales (and after them mins) are rounded to what the block stores; a weight takes the nearest code that decodes.
Without an importance matrix, as here, large weights count more: |x| + rms for affine, |x| for symmetric sub-blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_WEIGHTS = {"Q2_K": 256, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "IQ4_NL": 32}
BLOCK_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_NL": 18}
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

AFFINE_STEPS = tuple(0.2 * step for step in range(-6, 4))  # levels given to the range beyond the codes; 0.1 apart gains < 0.3 %
SYMMETRIC_STEPS = tuple(0.2 * step for step in range(-8, 5))  # levels given to the peak beyond the middle; clips up to 40 %
NONLINEAR_STEPS = tuple(range(-8, 9, 2))  # the same in units of LEVELS
SINGULAR = 1e-6  # a share of the Gram determinant that fp32 cannot tell from codes that are all equal
TOO_LARGE = "the weights need a scale of {:.3g}, but fp16 scales end at 65504"


@dataclass(frozen=True)
class Parts:
    """What one format stores of N blocks: codes [N, 256], scales and mins [N, sub-blocks], all uint8, steps fp16 [N, 1].

    Signed scales and codes are stored from zero on. mins, min_step: affine formats only.
    """

    codes: Tensor
    scales: Tensor
    step: Tensor
    mins: Tensor | None = None
    min_step: Tensor | None = None


def encode(blocks: Tensor, kind: str) -> Tensor:
    """Encode blocks of weights as llama.cpp stores them.

    blocks: any float dtype [N, BLOCK_WEIGHTS[kind]]. Returns uint8 [N, BLOCK_BYTES[kind]] on the same device. Takes about ten
    times the memory of fp32 blocks. What fp16 steps cannot resolve, weights below about 1e-7, becomes zero. Raises ValueError
    for an unknown kind, another shape, weights that are not finite, or so large that a step leaves fp16.
    """
    if kind not in BLOCK_BYTES:
        raise ValueError(f"no encoder for {kind!r}: use one of {', '.join(BLOCK_BYTES)}")
    if blocks.dim() != 2 or blocks.shape[1] != BLOCK_WEIGHTS[kind] or not blocks.is_floating_point():
        raise ValueError(f"{kind} encodes float [blocks, {BLOCK_WEIGHTS[kind]}], not {blocks.dtype} {list(blocks.shape)}")
    values = blocks.float()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{kind} cannot encode NaN or infinite weights: repair the checkpoint first")
    if not values.shape[0]:
        return values.new_empty(0, BLOCK_BYTES[kind], dtype=torch.uint8)
    match kind:
        case "Q2_K":
            return _pack_q2_k(_affine(values, 16, 3, 15))
        case "Q3_K":
            return _pack_q3_k(_symmetric(values, 4, 32))
        case "Q4_K":
            return _pack_q4_k(_affine(values, 32, 15, 63))
        case "Q5_K":
            return _pack_q5_k(_affine(values, 32, 31, 63))
        case "Q6_K":
            return _pack_q6_k(_symmetric(values, 32, 128))
        case _:
            return _pack_iq4_nl(*_nonlinear(values))


def fp16_step(peak: Tensor, steps: int) -> Tensor:
    """peak / steps rounded to fp16, away from zero where the nearest would lie over half a step short of the peak.

    That happens below 6e-5 only, where fp16 is coarse. Raises ValueError if it leaves fp16.
    """
    step = (peak / steps).half()
    if bool(torch.isinf(step).any()):
        raise ValueError(TOO_LARGE.format(float(peak.abs().max()) / steps))
    short = step.float().abs() * (steps + 0.5) < peak.abs()
    signed = torch.copysign(step.abs().view(torch.int16).add(short).view(torch.float16), peak.half())
    return torch.where(peak == 0, torch.zeros_like(signed), signed)


def nearest(values: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers `low` to `high` nearest to values / step, fp32; 0 where step is 0."""
    return torch.where(step == 0, 0.0, values / step).round_().clamp_(low, high)


def _normal(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sub-blocks as columns, fp32 [width, N * sub-blocks], divided by the largest weight of their block, [N, 1]."""
    unit = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (values / unit).view(-1, width).T.contiguous(), unit


# ---- affine: Q2_K, Q4_K, Q5_K


def _affine(values: Tensor, width: int, top: int, top_scale: int) -> Parts:
    """Fit weight = scale * code - min with codes 0 to `top`, scales and mins 0 to `top_scale` super steps, [N, 256].

    The mins are fitted again once the scales are whole numbers, so a sub-block whose scale comes out as 0 gets its mean.
    """
    columns, unit = _normal(values, width)
    rows, weights = values.view(-1, width), columns.abs() + columns.square().mean(0).sqrt()
    scale, low = (part.view(values.shape[0], -1) * unit for part in _affine_fit(columns, weights, top))
    step = fp16_step(scale.amax(1, keepdim=True), top_scale)
    scales = nearest(scale, step.float(), 0, top_scale)
    wide = (step.float() * scales).view(-1, 1)
    codes = nearest(rows + low.view(-1, 1), wide, 0, top)
    shares = (weights / weights.sum(0).clamp_min(torch.finfo(torch.float32).tiny)).T
    low = ((wide * codes - rows) * shares).sum(1).clamp_min(0.0).view_as(low)
    low_step = fp16_step(low.amax(1, keepdim=True), top_scale)
    mins = nearest(low, low_step.float(), 0, top_scale)
    codes = nearest(rows + (low_step.float() * mins).view(-1, 1), wide, 0, top).view_as(values)
    return Parts(codes.byte(), scales.byte(), step, mins.byte(), low_step)


def _affine_fit(columns: Tensor, weights: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and min, fp32 [S], neither below zero, of the best step on the grid for sub-blocks [width, S]."""
    bottom = columns.amin(0).clamp_max(0.0)
    span = columns.amax(0) - bottom
    best = torch.full_like(span, float("inf"))
    scale, offset = span / top, bottom
    for more in AFFINE_STEPS:
        codes = nearest(columns - bottom, span / (top + more), 0, top)
        trial, shift = _line(columns, codes, weights)
        codes = nearest(columns - shift, trial, 0, top)
        trial, shift = _line(columns, codes, weights)
        error = (weights * (columns - shift - trial * codes).square_()).sum(0)
        better = error < best  # not for NaN: a constant sub-block below zero keeps the start, all of it in the min
        best = torch.where(better, error, best)
        scale, offset = torch.where(better, trial, scale), torch.where(better, shift, offset)
    return scale, -offset


def _line(columns: Tensor, codes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset, [S], of the weighted least squares line columns = slope * codes + offset with offset at most 0.

    Codes that are all equal leave the line open: it then goes through 0, and for codes of 0 the slope is NaN.
    """
    weighted, total = weights * codes, weights.sum(0)
    first, second = weighted.sum(0), (weighted * codes).sum(0)
    value, mixed = (weights * columns).sum(0), (weighted * columns).sum(0)
    gram = total * second - first * first
    offset = (second * value - first * mixed) / gram
    through_zero = (gram <= SINGULAR * total * second) | (offset > 0)
    slope = torch.where(through_zero, mixed / second, (total * mixed - first * value) / gram)
    return slope, torch.where(through_zero, 0.0, offset)


# ---- symmetric: Q3_K, Q6_K


def _symmetric(values: Tensor, middle: int, scale_middle: int) -> Parts:
    """Fit weight = scale * (code - middle), scales -scale_middle to scale_middle - 1 super steps, [N, 256]."""
    columns, unit = _normal(values, 16)

    def levels(scaled: Tensor) -> Tensor:
        return scaled.round_().clamp_(-middle, middle - 1)

    fitted = _scale_fit(columns, levels, [-(middle + more) for more in SYMMETRIC_STEPS])
    scale = fitted.view(values.shape[0], -1) * unit
    step = fp16_step(-_peak(scale, 1), scale_middle)  # the largest scale takes the end that reaches further
    scales = nearest(scale, step.float(), -scale_middle, scale_middle - 1)
    wide = (step.float() * scales).view(-1, 1)
    codes = nearest(values.view(-1, 16), wide, -middle, middle - 1).view_as(values)
    return Parts((codes + middle).byte(), (scales + scale_middle).byte(), step)


def _scale_fit(columns: Tensor, levels: Callable[[Tensor], Tensor], reaches: list[float]) -> Tensor:
    """Scale, fp32 [S], that with `levels` of columns / scale explains most of sub-blocks [width, S].

    reaches: levels that the largest weight of a sub-block is put at before rounding, one for each try.
    """
    peak = _peak(columns, 0)[0]
    weighted = columns.abs() * columns
    best, scale = torch.zeros_like(peak), torch.zeros_like(peak)
    for reach in reaches:
        codes = levels(columns * torch.where(peak == 0, 0.0, reach / peak))
        mixed = (weighted * codes).sum(0)
        trial = mixed / (columns.abs() * codes.square()).sum(0)
        better = mixed * trial > best  # what the fit takes off the weighted sum of squares; NaN without codes
        best, scale = torch.where(better, mixed * trial, best), torch.where(better, trial, scale)
    return scale


def _peak(values: Tensor, dim: int) -> Tensor:
    """The value of largest magnitude along `dim`, with its sign; the dimension is kept."""
    return values.gather(dim, values.abs().argmax(dim, keepdim=True))


# ---- IQ4_NL


def _nonlinear(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, 32] into LEVELS and scale fp16 [N, 1]."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=values.device)
    between = (table[1:] + table[:-1]) / 2
    columns, unit = _normal(values, values.shape[1])
    reaches = [LEVELS[0] + more for more in NONLINEAR_STEPS]
    scale = _scale_fit(columns, lambda scaled: table[torch.bucketize(scaled, between)], reaches)
    step = (scale[:, None] * unit).half()
    if bool(torch.isinf(step).any()):
        raise ValueError(TOO_LARGE.format(float((scale[:, None] * unit).abs().max())))
    wide = step.float()
    return torch.bucketize(torch.where(wide == 0, 0.0, values / wide), between).byte(), step


# ---- bytes


def _interleave(codes: Tensor, bits: int, run: int) -> Tensor:
    """Codes below 2^bits, uint8 [N, M], to bytes [N, M bits / 8]: byte i of each `run` bytes holds codes i, i + run, …."""
    fields = codes.view(codes.shape[0], -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return (fields << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _bytes(step: Tensor) -> Tensor:
    return step.view(torch.uint8)


def _pack_q2_k(parts: Parts) -> Tensor:
    scales = _interleave(torch.cat([parts.scales, parts.mins], 1), 4, 16)
    return torch.cat([scales, _interleave(parts.codes, 2, 32), _bytes(parts.step), _bytes(parts.min_step)], 1)


def _pack_q3_k(parts: Parts) -> Tensor:
    scales = torch.cat([_interleave(parts.scales & 15, 4, 8), _interleave(parts.scales >> 4, 2, 4)], 1)
    return torch.cat([_interleave(parts.codes >> 2, 1, 32), _interleave(parts.codes & 3, 2, 32), scales, _bytes(parts.step)], 1)


def _pack_six_bit(parts: Parts) -> Tensor:
    """Steps, then 8 scales and 8 mins in 12 bytes: the first four whole, the upper bits of the last four above them."""
    scales, mins = parts.scales, parts.mins
    whole = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, mins)]
    rest = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    return torch.cat([_bytes(parts.step), _bytes(parts.min_step), *whole, rest], 1)


def _pack_q4_k(parts: Parts) -> Tensor:
    return torch.cat([_pack_six_bit(parts), _interleave(parts.codes, 4, 32)], 1)


def _pack_q5_k(parts: Parts) -> Tensor:
    return torch.cat([_pack_six_bit(parts), _interleave(parts.codes >> 4, 1, 32), _interleave(parts.codes & 15, 4, 32)], 1)


def _pack_q6_k(parts: Parts) -> Tensor:
    signed = parts.scales ^ 128  # from zero on to two's complement
    codes = [_interleave(parts.codes & 15, 4, 64), _interleave(parts.codes >> 4, 2, 32)]
    return torch.cat([*codes, signed, _bytes(parts.step)], 1)


def _pack_iq4_nl(codes: Tensor, step: Tensor) -> Tensor:
    return torch.cat([_bytes(step), _interleave(codes, 4, 16)], 1)
