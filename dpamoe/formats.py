"""Weights that are stored in 8 or 4 bits with scales, as plain floats: FP8 with block scales, mxfp4 blocks with exponents."""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of a 4-bit float; bit 3 is the sign
EXPONENT_BIAS = 127


def scale_value(scale: Tensor) -> Tensor:
    """Scales in fp32; bytes (ue8m0) are exponents: 2 ** (byte - 127)."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - EXPONENT_BIAS)
    return scale.float()


def block_size(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int], name: str) -> tuple[int, int]:
    """Rows and columns that share one scale of a weight [..., O, I] with scales [..., o, i].

    block: as the config says; the last block of a row or column may be short. One scale (no grid, or 1 by 1) is for all.
    Raises ValueError if the grid is neither that of `block` nor divides the weight.
    """
    rows, columns = shape[-2:]
    if len(grid) < 2 and all(size == 1 for size in grid):
        return rows, columns
    if len(grid) == len(shape) and tuple(grid[:-2]) == tuple(shape[:-2]):
        if (-(-rows // block[0]), -(-columns // block[1])) == tuple(grid[-2:]):
            return block
        if rows % grid[-2] == 0 and columns % grid[-1] == 0:
            return rows // grid[-2], columns // grid[-1]
    raise ValueError(
        f"{name} is {list(shape)} with scales {list(grid)}, which do not fit blocks of {block[0]} by {block[1]}: "
        "download the model again, or set weight_block_size in its config"
    )


def from_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """weight [..., O, I] times its block's scale, in fp32, then `dtype`; scale [..., ceil(O / rows), ceil(I / columns)]."""
    result = torch.empty(weight.shape, dtype=dtype)
    matrices, scales = weight.flatten(0, -3) if weight.dim() > 2 else weight[None], scale_value(scale)
    scales = scales.reshape(matrices.shape[0], *scales.shape[-2:]) if scales.dim() >= 2 else scales.reshape(1, 1, 1)
    scales = scales.expand(matrices.shape[0], -1, -1)
    rows, columns = weight.shape[-2:]
    for target, matrix, own in zip(result.view(-1, rows, columns), matrices, scales, strict=True):
        wide = own.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        target.copy_(matrix.float() * wide)
    return result


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [E, O, G, 16], low nibble first, scales uint8 [E, O, G] to [E, I, O], I = 32 G: inputs by outputs.

    value = sign * E2M1[nibble] * 2 ** (scale - 127).
    """
    experts, rows, groups, packed = blocks.shape
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    result = torch.empty(experts, 2 * groups * packed, rows, dtype=dtype)
    for target, own, exponents in zip(result, blocks, scales, strict=True):
        nibbles = torch.stack([own & 15, own >> 4], -1).flatten(-2)
        values = table[nibbles.int()] * scale_value(exponents)[..., None]
        target.copy_(values.view(rows, -1).T)
    return result
