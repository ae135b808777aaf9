"""SharedScale AnyBCQ encoder: stacked expert weights to planes whose every prefix decodes (DPA-MoE, section 3.1).

Per group W is approximated by z + sum over i <= k of alpha_i b_i for every k from k_min to k_max with the same alpha and z.
The fit minimises sum over k of w_k |W - W_k|^2, w_k = beta^(k - k_max), by turns: scales by least squares for fixed codes,
codes by successive sign for fixed scales, from a geometric start with searched clipping.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from dpamoe.kernels.layout import (
    TIED_OFFSET_STEPS,
    TIED_STEPS_PER_OCTAVE,
    TIED_TOP_CODE,
    EncodedWeight,
    group_width,
    groups_of,
    pack_signs,
    tied_scale,
)
from dpamoe.kernels.paths import has_triton
from dpamoe.sites import ExpertWeights
from dpamoe.spec import EncodeSpec

logger = logging.getLogger("dpamoe")

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
TIED_CLIPS = tuple(1.0 - 0.05 * step for step in range(11))
CHUNK_WEIGHTS = 1 << 19  # weights encoded at a time: bounds memory to about 30 MB of work space, fixed so results never vary
RIDGE = 1e-5  # pulls scales of planes that no weight distinguishes to their present value
FP16_TOP, FP16_FLOOR = 6.0e4, 2.0**-11  # weights whose scales fp16 holds; at the floor its steps add 0.4 % error at k = 8


def encode(
    weight: Tensor, spec: EncodeSpec, name: str = "weight", progress: Callable[[int], None] | None = None
) -> EncodedWeight:
    """Encode a stacked weight [E, O, I], any float dtype, on its own device; memory beyond the result is bounded.

    On a CUDA device by Triton kernels where they support it, which end in other codes of the same quality.
    name: how messages call it. progress: called with the number of weights done after each step. Deterministic, and the
    result for one row does not depend on the others. Raises ValueError for non-finite weights, shapes that are not
    [E, O, I], or groups wider than I.
    """
    half_range = check_weight(weight, spec, name)
    _, out_features, in_features = weight.shape
    group, groups = group_width(in_features, spec.group_size), groups_of(in_features, spec.group_size)
    dtype = _scale_dtype(half_range, weight)
    unit = half_range.clamp_min(torch.finfo(torch.float32).tiny) if spec.scale_mode == "tied" else None
    result = _empty(weight, groups, dtype, unit, spec)
    if has_triton(weight.device) and _encode_with_triton(weight, result, spec, progress):
        return result
    mask = _mask(in_features, group, groups, weight.device)
    rows = weight.flatten(0, 1)
    step = max(1, CHUNK_WEIGHTS // (group * groups))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step].float()
        padded = torch.nn.functional.pad(block, (0, group * groups - in_features)).view(-1, group)
        valid = None if mask is None else mask.repeat(block.shape[0], 1)
        units = None if unit is None else unit.repeat_interleave(out_features)[start : start + step]
        _encode_rows(padded, valid, units, result, start, spec)
        if progress is not None:
            progress(block.numel())
    return result


def _encode_with_triton(weight: Tensor, result: EncodedWeight, spec: EncodeSpec, progress) -> bool:
    """Fill `result` by the Triton kernels; False, with nothing done, where they do not support the weight or its groups."""
    from dpamoe.kernels import triton_encode, triton_encode_tied  # Triton is not everywhere

    if not triton_encode.supports(weight, spec.group_size):
        return False
    target = weight, result.planes, result.scales, result.offset
    if spec.scale_mode == "tied":
        triton_encode_tied.encode_tied(*target, result.unit, spec.group_size, spec.k_min, spec.beta, progress)
    else:
        triton_encode.encode_shared(*target, spec.group_size, spec.k_min, spec.beta, spec.iterations, progress)
    return True


def check_encodable(weights: ExpertWeights, spec: EncodeSpec, path: str) -> None:
    """Check both weights of a site before any work; ValueError as in `encode`. Says so where groups must be padded."""
    for kind, weight in (("up", weights.up), ("down", weights.down)):
        check_weight(weight, spec, f"{path} ({kind})")
        width = weight.shape[2]
        if width % group_width(width, spec.group_size):
            logger.warning(
                "%s (%s): group_size %d does not divide its %d inputs; the last group of each row holds %d",
                path, kind, spec.group_size, width, width % spec.group_size,
            )  # fmt: skip


def check_group(spec: EncodeSpec, width: int, name: str) -> None:
    """Raise ValueError if a group is wider than the rows of `width` inputs."""
    if spec.group_size > width:
        raise ValueError(
            f"group_size {spec.group_size} exceeds the {width} inputs of {name}: use a group_size of at most {width}, or -1 "
            "for whole rows"
        )


def check_weight(weight: Tensor, spec: EncodeSpec, name: str) -> Tensor:
    """Largest magnitude of each expert, fp32 [E]; ValueError, naming the tensor, for a weight that cannot be encoded."""
    if weight.dim() != 3 or not weight.is_floating_point():
        raise ValueError(f"{name} is {weight.dtype} {list(weight.shape)}: an expert weight must be float [experts, out, in]")
    check_group(spec, weight.shape[2], name)
    largest = torch.stack([expert.abs().amax().float() for expert in weight])
    if not bool(torch.isfinite(largest).all()):
        bad = [e for e in range(weight.shape[0]) if not bool(torch.isfinite(largest[e]))]
        count = sum(int((~torch.isfinite(weight[e])).sum()) for e in bad)
        shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        raise ValueError(
            f"{name} holds {count} NaN or infinite weights (experts {shown}): repair the checkpoint or download it again"
        )
    return largest


def _scale_dtype(half_range: Tensor, weight: Tensor) -> torch.dtype:
    """fp16 where it holds the scales of every expert, else fp32 for the whole tensor: one format for all experts."""
    nonzero = half_range[half_range > 0]
    fits = nonzero.numel() == 0 or (float(nonzero.min()) >= FP16_FLOOR and float(nonzero.max()) <= FP16_TOP)
    return torch.float16 if fits else torch.float32


def _empty(weight: Tensor, groups: int, dtype: torch.dtype, unit: Tensor | None, spec: EncodeSpec) -> EncodedWeight:
    experts, out_features, in_features = weight.shape

    def new(last: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(experts, out_features, last, dtype=dtype, device=weight.device)

    planes = [new(-(-in_features // 8), torch.uint8) for _ in range(spec.k_max)]
    if unit is not None:
        scales, offset = [new(groups, torch.uint8)], new(groups, torch.int8)
    else:
        scales, offset = [new(groups, dtype) for _ in range(spec.k_max)], new(groups, dtype)
    return EncodedWeight(planes, scales, offset, unit, in_features, spec.group_size)


def _mask(in_features: int, group: int, groups: int, device) -> Tensor | None:
    """1 for real inputs, 0 for padding, fp32 [G, group]; None where nothing is padded."""
    if group * groups == in_features:
        return None
    return (torch.arange(group * groups, device=device) < in_features).float().view(groups, group)


def _encode_rows(groups: Tensor, valid, units, result: EncodedWeight, start: int, spec: EncodeSpec) -> None:
    """Encode whole rows given as groups [N, g] and write them into `result` from row `start` on."""
    per_row = result.offset.shape[-1]
    rows = groups.shape[0] // per_row
    stop = start + rows

    def put(target: Tensor, values: Tensor) -> None:
        target.flatten(0, 1)[start:stop] = values.view(rows, -1).to(target.dtype)

    if spec.scale_mode == "tied":
        code, steps, scales, offset = _fit_tied(groups, valid, units.repeat_interleave(per_row), spec)
        put(result.scales[0], code)
        put(result.offset, steps)
    else:
        scales, offset = _fit_shared(groups, valid, spec)
        scales, offset = scales.to(result.offset.dtype), offset.to(result.offset.dtype)
        for plane, target in enumerate(result.scales):
            put(target, scales[:, plane])
        put(result.offset, offset)
    codes, _ = assign(groups, scales.float(), offset.float())
    for plane, target in enumerate(result.planes):
        put(target, pack_signs(codes[plane].view(rows, -1)[:, : result.in_features] > 0))


def assign(groups: Tensor, scales: Tensor, offset: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes by successive sign, fp32 [K, N, g] of +1 and -1, and the squared error of each prefix, [N, K].

    groups [N, g], scales [N, K] descending, offset [N]. Equal to exhaustive search when scales at least halve.
    """
    rest = groups - offset[:, None]
    if valid is not None:
        rest = rest * valid
    planes, one = scales.shape[1], torch.ones((), device=groups.device)
    codes = groups.new_empty(planes, *groups.shape)
    errors = groups.new_empty(groups.shape[0], planes)
    for plane in range(planes):
        torch.copysign(one, rest, out=codes[plane])
        rest = torch.addcmul(rest, codes[plane], scales[:, plane, None], value=-1)
        if valid is not None:
            rest = rest * valid
        errors[:, plane] = torch.linalg.vecdot(rest, rest)
    return codes, errors


def _prefix_weights(spec: EncodeSpec, device) -> Tensor:
    """Weight of each prefix k = 1 … k_max in the fit, fp32 [K]: beta^(k - k_max) from k_min on, normalised."""
    k = torch.arange(1, spec.k_max + 1, device=device)
    weights = spec.beta ** (k - spec.k_max).float() * (k >= spec.k_min)
    return weights / weights.sum()


def _extremes(groups: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    if valid is None:
        low, high = groups.aminmax(dim=1)
        return low, high
    inside = valid > 0
    return groups.masked_fill(~inside, float("inf")).amin(1), groups.masked_fill(~inside, float("-inf")).amax(1)


def _fit_shared(groups: Tensor, valid: Tensor | None, spec: EncodeSpec) -> tuple[Tensor, Tensor]:
    """Free scales per plane, fp32 [N, K] descending, and offset [N], by alternating least squares."""
    low, high = _extremes(groups, valid)
    middle, half = (low + high) / 2, (high - low) / 2
    constant = half <= middle.abs() * 1e-6  # fp32 noise around one value
    safe = torch.where(constant, 1.0, half)
    unit = (groups - middle[:, None]) / safe[:, None]
    prefix = _prefix_weights(spec, groups.device)
    scales, offset, codes, best = _geometric_start(unit, valid, prefix, spec)
    trial_scales, trial_offset, trial_codes = scales, offset, codes
    for _ in range(spec.iterations):
        trial_scales, trial_offset = _least_squares(unit, valid, trial_codes, trial_scales, trial_offset, prefix)
        trial_codes, errors = assign(unit, trial_scales, trial_offset, valid)
        total = errors @ prefix
        better = total < best
        scales = torch.where(better[:, None], trial_scales, scales)
        offset, best = torch.where(better, trial_offset, offset), torch.where(better, total, best)
    scales = torch.where(constant[:, None], 0.0, scales * safe[:, None])
    return scales, torch.where(constant, middle, middle + offset * safe)


def _geometric_start(unit: Tensor, valid, prefix: Tensor, spec: EncodeSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A uniform grid as planes, scales clip * 2^-i, with the best clip of each group: scales, offset, codes, objective."""
    total = unit.sum(1) if valid is None else (unit * valid).sum(1)
    mean = total / (unit.shape[1] if valid is None else valid.sum(1))
    halves = 2.0 ** -torch.arange(1, spec.k_max + 1, device=unit.device).float()
    best = torch.full_like(mean, float("inf"))
    clip = torch.ones_like(mean)
    for value in CLIPS:
        _, errors = assign(unit, (value * halves).expand(unit.shape[0], -1), mean * (1 - value), valid)
        objective = errors @ prefix
        clip = torch.where(objective < best, value, clip)
        best = torch.minimum(best, objective)
    scales, offset = clip[:, None] * halves, mean * (1 - clip)
    codes, _ = assign(unit, scales, offset, valid)
    return scales, offset, codes, best


def _least_squares(unit, valid, codes, scales, offset, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """Best scales and offset for fixed codes over all prefixes: solve (Gram * C) u = rhs, C_ij = c_max(i, j).

    c_m is the summed weight of the prefixes that hold plane m; the offset belongs to all. Jacobi-scaled Cholesky with a
    ridge towards the present values, which are kept where the solve is not finite.
    """
    ones = torch.ones_like(unit) if valid is None else valid
    basis = torch.cat([ones[None], codes if valid is None else codes * valid]).transpose(0, 1)
    from_plane = prefix.flip(0).cumsum(0).flip(0)
    share = torch.cat([from_plane[:1], from_plane])
    size = torch.arange(share.numel(), device=unit.device)
    matrix = (basis @ basis.transpose(1, 2)) * share[torch.maximum(size[:, None], size)]
    rhs = (basis @ unit[:, :, None])[:, :, 0] * share
    present = torch.cat([offset[:, None], scales], 1)
    jacobi = matrix.diagonal(dim1=1, dim2=2).clamp_min(1e-30).rsqrt()
    scaled = matrix * jacobi[:, :, None] * jacobi[:, None]
    scaled.diagonal(dim1=1, dim2=2).add_(RIDGE)
    factor, info = torch.linalg.cholesky_ex(scaled)
    target = rhs * jacobi + RIDGE * present / jacobi
    solved = torch.cholesky_solve(target[:, :, None], factor)[:, :, 0] * jacobi
    good = (info == 0) & torch.isfinite(solved).all(1)
    solved = torch.where(good[:, None], solved, present)
    return solved[:, 1:].abs().sort(1, descending=True).values, solved[:, 0]


def _fit_tied(groups: Tensor, valid, unit: Tensor, spec: EncodeSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One scale per group, plane i at scale * 2^-i: code [N], offset steps [N], and the scales [N, K], offset [N] they mean.

    Clips are searched; at each the scale is rounded up to its 8-bit log code and the offset to steps of scale / 96.
    """
    top, groups, unit = unit, groups / unit[:, None], torch.ones_like(unit)  # so that no square leaves the range of fp32
    low, high = _extremes(groups, valid)
    middle, half = (low + high) / 2, (high - low) / 2
    total = groups.sum(1) if valid is None else (groups * valid).sum(1)
    mean = total / (groups.shape[1] if valid is None else valid.sum(1))
    halves = 2.0 ** -torch.arange(1, spec.k_max + 1, device=groups.device).float()
    prefix = _prefix_weights(spec, groups.device)
    # the offset reaches 127 / 96 of the scale, so a nearly constant group takes its scale from its value
    floor = torch.maximum(half, middle.abs() * (TIED_OFFSET_STEPS / 127.0))
    nothing = torch.zeros_like(mean)  # code 0: a row that is dead beside its expert's others
    best = groups.square().sum(1) if valid is None else (groups * valid).square().sum(1)
    result: tuple[Tensor, ...] = (nothing, nothing, nothing[:, None] * halves, nothing)
    for clip in TIED_CLIPS:
        wanted = torch.maximum(half * clip, floor.where(half * clip * 127 < middle.abs() * TIED_OFFSET_STEPS, 0.0))
        ratio = (wanted / unit).clamp_min(1e-38)
        code = torch.where(
            wanted > 0, (TIED_TOP_CODE + TIED_STEPS_PER_OCTAVE * ratio.log2()).ceil().clamp(1, TIED_TOP_CODE), 0.0
        )
        scale = tied_scale(code.view(-1, 1, 1), unit).view(-1)
        centre = middle * clip + mean * (1 - clip)
        steps = (centre / scale.clamp_min(1e-38) * TIED_OFFSET_STEPS).round().clamp(-128, 127)
        steps = torch.where(scale > 0, steps, 0.0)
        offset = steps * (scale / TIED_OFFSET_STEPS)
        _, errors = assign(groups, scale[:, None] * halves, offset, valid)
        objective = errors @ prefix
        better = objective < best
        best = torch.minimum(best, objective)
        found = (code, steps, scale[:, None] * halves, offset)
        result = tuple(
            torch.where(better.view(-1, *(1,) * (new.dim() - 1)), new, old) for new, old in zip(found, result, strict=True)
        )
    code, steps, scales, offset = result
    return code, steps, scales * top[:, None], offset * top
