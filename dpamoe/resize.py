"""Give the memory of planes back while a model is in use, and read them again."""

import ctypes
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpamoe import origin
from dpamoe.api import held_experts, spend_again, warn_clamped
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.modules import EncodedExperts, EncodedTensor

WEIGHTS = ("gate_up_proj", "down_proj")


def resize(model: nn.Module, k_max: int) -> nn.Module:
    """Hold only the first `k_max` planes of every expert, in place, and return the model; takes effect at once.

    Memory of dropped planes is free when this returns. Planes that are not held are read from the folder that the model was
    loaded from or last saved to; nothing else is read again. A compiled model compiles nothing anew; a CUDA graph that was
    captured by hand has to be captured again. A budget above k_max is lowered to it, with a warning, and stays there.

    Raises ValueError, and changes nothing, if k_max is outside k_min to the planes that were encoded, if the model came from
    no folder, or if that folder is gone or changed; TypeError if k_max is no whole number.
    """
    held = held_experts(model)
    first = next(iter(held.values()))
    if isinstance(k_max, bool) or not isinstance(k_max, int):
        raise TypeError(f"k_max is {k_max!r}: give a whole number of planes, {first.spec.k_min} to {first.spec.k_max}")
    if not first.spec.k_min <= k_max <= first.spec.k_max:
        raise ValueError(
            f"k_max is {k_max}, this model was encoded with {first.spec.k_min} to {first.spec.k_max} planes: use one"
        )
    offloaded = next((path for path, experts in held.items() if experts.down_proj.plane.as_list()[0].is_meta), None)
    if offloaded is not None:
        raise ValueError(f"{offloaded} is offloaded by accelerate: load the model again with k_max={k_max}")
    present = min(experts.held for experts in held.values())
    added = origin.read_planes(model, held, present, k_max) if k_max > present else {}
    made = {path: [_resized(experts, name, k_max, added) for name in WEIGHTS] for path, experts in held.items()}
    for path, experts in held.items():
        experts.hold(*made[path])
    made.clear()
    if k_max < present:
        _give_back(first.k_max.device)
    if any(experts.spend.budget > k_max for experts in held.values()):
        budget = warn_clamped(max(experts.spend.budget for experts in held.values()), k_max)
        for experts in held.values():
            experts.spend = replace(experts.spend, budget=min(experts.spend.budget, budget))
    spend_again(model)  # thresholds depend on how many planes there are
    return model


def _resized(experts: EncodedExperts, name: str, k_max: int, added: dict[str, Tensor]) -> EncodedWeight:
    """One weight of a site with `k_max` planes: those that it holds, then those that were read."""
    encoded: EncodedTensor = getattr(experts, name)
    weight = encoded.weight
    planes = _extended(weight.planes, f"{experts.site.path}.{name}.plane", k_max, added)
    scales = weight.scales
    if weight.unit is None:
        scales = _extended(scales, f"{experts.site.path}.{name}.scale", k_max, added)
    return replace(weight, planes=planes, scales=scales)


def _extended(tensors: list[Tensor], name: str, k_max: int, added: dict[str, Tensor]) -> list[Tensor]:
    device = tensors[0].device
    more = [added[f"{name}.{plane}"].to(device) for plane in range(len(tensors), k_max)]
    for tensor in more:
        if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"tensor {name} of a plane above {len(tensors)} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{tensors[0].dtype} {list(tensors[0].shape)}: the checkpoint is damaged, convert the model again"
            )
    return tensors[:k_max] + more


def _give_back(device: torch.device) -> None:
    """Return freed memory to the system; allocators keep it for themselves otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
