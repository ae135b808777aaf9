"""Canonical layout of an encoded weight: packing of planes, sizes in bits and bytes, the two scale modes.

A stacked expert weight [E, O, I] is held as one tensor per plane, so that planes can be dropped, loaded and sharded alone:

    planes   list of C uint8 [E, O, ceil(I / 8)]   bit i of byte j is input 8 j + i; 1 means +1, 0 means -1; spare bits are 0
    shared   scales  list of C fp16 [E, O, G]      G = ceil(I / group_size); fp32 where fp16 cannot hold the range
             offset  fp16 [E, O, G]                (same dtype as the scales)
             unit    None
    tied     scales  list of 1 uint8 [E, O, G]     scale = unit * 2 ** ((code - 255) / 24), code 0 is scale 0; plane c has
                                                   scale * 2 ** -(c + 1)
             offset  int8 [E, O, G]                in steps of scale / 96
             unit    fp32 [E]                      the largest scale of each expert

The weight read from the first k planes is  offset[g] + sum over c < k of scale[c, g] * (+1 or -1)   (DPA-MoE, section 3.1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_MODES = ("shared", "tied")
TIED_STEPS_PER_OCTAVE = 24
TIED_TOP_CODE = 255
TIED_OFFSET_STEPS = 96


@dataclass(frozen=True)
class EncodedWeight:
    """One stacked expert weight as planes; shapes and dtypes as in the module docstring. group_size -1: whole rows."""

    planes: list[Tensor]
    scales: list[Tensor]
    offset: Tensor
    unit: Tensor | None
    in_features: int
    group_size: int

    def tensors(self) -> dict[str, Tensor]:
        """Name every tensor as the checkpoint does: plane.{c}, scale.{c} (tied: scale), offset, unit."""
        named = {f"plane.{c}": plane for c, plane in enumerate(self.planes)}
        if self.unit is None:
            named |= {f"scale.{c}": scale for c, scale in enumerate(self.scales)}
        else:
            named |= {"scale": self.scales[0], "unit": self.unit}
        return named | {"offset": self.offset}

    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


def group_width(in_features: int, group_size: int) -> int:
    """Weights in a group: group_size, or the whole row for -1."""
    return in_features if group_size == -1 else group_size


def groups_of(in_features: int, group_size: int) -> int:
    """Number of groups along the input dimension, the last one padded where group_size does not divide."""
    return -(-in_features // group_width(in_features, group_size))


def pack_signs(positive: Tensor) -> Tensor:
    """Pack bool [..., I] into uint8 [..., ceil(I / 8)], lowest bit first."""
    spare = -positive.shape[-1] % 8
    if spare:
        positive = torch.nn.functional.pad(positive, (0, spare))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=positive.device)
    return (positive.unflatten(-1, (-1, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(plane: Tensor, in_features: int) -> Tensor:
    """Unpack uint8 [..., ceil(I / 8)] into fp32 [..., I] of +1 and -1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=plane.device)
    bits = (plane.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :in_features].float() * 2 - 1


def plane_scale(scales: list[Tensor], unit: Tensor | None, plane: int) -> Tensor:
    """Scale of one plane, fp32 [E, O, G], for either scale mode."""
    if unit is None:
        return scales[plane].float()
    return tied_scale(scales[0], unit) * 2.0 ** -(plane + 1)


def offset_value(scales: list[Tensor], offset: Tensor, unit: Tensor | None) -> Tensor:
    """Offset of each group, fp32 [E, O, G], for either scale mode."""
    if unit is None:
        return offset.float()
    return offset.float() * (tied_scale(scales[0], unit) / TIED_OFFSET_STEPS)


def tied_scale(code: Tensor, unit: Tensor) -> Tensor:
    """Scale behind an 8-bit log code: unit * 2 ** ((code - 255) / 24), and 0 for code 0; fp32 [E, O, G]."""
    scale = torch.exp2((code.float() - TIED_TOP_CODE) / TIED_STEPS_PER_OCTAVE) * unit.view(-1, 1, 1)
    return torch.where(code == 0, 0.0, scale)


def bits_per_weight(k: float, in_features: int, group_size: int, scale_mode: str, scale_bits: int = 16) -> float:
    """Bits per expert weight when k planes are read, scales and offsets included: k (1 + 16 / g) + 16 / g for shared scales.

    Padding counts: planes end on whole bytes and the last group may be short.
    """
    groups = groups_of(in_features, group_size) / in_features
    plane = 8 * -(-in_features // 8) / in_features
    if scale_mode == "tied":
        return k * plane + 16 * groups
    return k * (plane + scale_bits * groups) + scale_bits * groups


def scale_sets(k_min: int, k_max: int, shared: bool = True) -> int:
    """Scale sets stored for precisions k_min to k_max: k_max when shared, one set of k for each k otherwise (appendix A)."""
    return k_max if shared else sum(range(k_min, k_max + 1))
