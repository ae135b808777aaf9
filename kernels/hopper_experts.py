"""The expert ops for many tokens on Hopper: launches of the Gluon kernel. Other cards and shapes: `triton_experts`."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dpamoe.kernels import triton_experts
from dpamoe.kernels.hopper_prefill import hopper_prefill_kernel
from dpamoe.kernels.layout import EncodedWeight, group_width
from dpamoe.kernels.reference import is_gated
from dpamoe.kernels.triton_sort import prepare_kernel

WARPS = 4  # one warp group
BLOCK = 128  # inputs that one word of each of four lanes holds
PAIRS_AT_ONCE = 1 << 17  # of a block; a longer prompt is computed in parts, since every pair has a prepared row of its own


@dataclass(frozen=True)
class Tile:
    """How the kernel is cut: slices, each up to `pairs` pairs of one expert and k; whole: a stretch is unpacked at once."""

    slices: int
    pairs: int
    whole: bool = False


# by pairs per expert, at most: more pairs in a tile unpack a weight less often, fewer in a slice waste less of a product
TILES = ((12, Tile(2, 8)), (48, Tile(2, 32)), (1 << 62, Tile(2, 64)))
TILES_OF_ONE_K = ((12, Tile(1, 16, whole=True)), *TILES[1:])  # where no expert has pairs with several k


def words_at_once(weight: EncodedWeight) -> int:
    """Words of 32 inputs that a lane takes together: so many that four lanes share 2 or 4 scales. 0: not for this kernel."""
    group = group_width(weight.in_features, weight.group_size)
    size = weight.scales[0].element_size()
    for words in (2, 4, 1):
        fits = weight.in_features % (words * BLOCK) == 0 and group in (32 * words, 64 * words)
        if fits and words * BLOCK // group * size >= 4:  # the least that is copied without passing through registers
            return words
    return 0


def usable(*weights: EncodedWeight) -> bool:
    """Whether this kernel can read these weights: groups and widths as it takes them, tensors that begin on 16 bytes."""
    fit = all(words_at_once(weight) for weight in weights)
    return fit and all(tensor.data_ptr() % 16 == 0 for weight in weights for tensor in weight.tensors().values())


def tile_for(pairs: int, experts: int, one_k: bool = False) -> Tile:
    """The cut for so many pairs."""
    return next(tile for most, tile in (TILES_OF_ONE_K if one_k else TILES) if pairs <= most * experts)


@dataclass(frozen=True)
class Sorted:
    """Pairs by expert and k, and their tiles, as `triton_sort.sort_kernel` leaves them; peaks fp32 [2, E]."""

    order: Tensor
    tiles: Tensor
    peaks: Tensor
    tile: Tile


def sort_pairs(ids: Tensor, chunks: Tensor, tile: Tile, up: EncodedWeight, down: EncodedWeight) -> Sorted:
    """Sort the pairs for a block of two weights."""
    pairs, experts = ids.numel(), up.offset.shape[0]
    # an expert has up to 8 slices that are not full, so this many tiles beside the full ones
    most = min(pairs, (1 + -(-8 // tile.slices)) * min(pairs, experts) + pairs // (tile.slices * tile.pairs))
    tiles = torch.empty(most, 3 + 2 * tile.slices, dtype=torch.int32, device=ids.device)
    order, _, peaks = triton_experts.sort_into(tiles, ids, chunks, up, down, BN=0, MIXED=tile.pairs, SLICES=tile.slices)
    return Sorted(order, tiles, peaks, tile)


def prepare_rows(x: Tensor, by: Sorted, sharing: int, weight: EncodedWeight) -> tuple[Tensor, Tensor]:
    """Rows in sorted order for the kernel, fp16 [P, I and the sums over groups], and a factor for each, fp32 [P].

    sharing: pairs that have one row of x, 0 where x is in sorted order.
    """
    width, group = weight.in_features, group_width(weight.in_features, weight.group_size)
    pairs, sums = by.order.numel(), triton.cdiv(width // group, 64) * BLOCK
    ready = torch.empty(pairs, width + sums, dtype=torch.float16, device=x.device)
    factor = torch.empty(pairs, dtype=torch.float32, device=x.device)
    stretches = width // BLOCK
    prepare_kernel[(pairs,)](
        x, by.order, ready, factor, x.stride(0), x.shape[0], A=sharing, IN=width, STRETCHES=stretches,
        STRETCHES_PAD=triton.next_power_of_2(stretches), W=words_at_once(weight), GROUP=group, SUMS=sums,
    )  # fmt: skip
    return ready, factor


def product(
    x: Tensor, by: Sorted, second: bool, weight: EncodedWeight, bias: Tensor | None, act: str, sharing: int, out: Tensor
) -> None:
    """out[row of a pair] = act(W_k x + bias).

    second: whether it is the second weight that the pairs were sorted for, whose results go back into the order of pairs.
    """
    tile, words = by.tile, words_at_once(weight)
    ready, factor = prepare_rows(x, by, sharing, weight)
    rows = TensorDescriptor.from_tensor(ready, [tile.pairs, BLOCK], gl.NVMMASharedLayout(128, 16, 2))
    hopper_prefill_kernel[(triton.cdiv(weight.offset.shape[1], 16 * WARPS) * by.tiles.shape[0],)](
        rows, factor, by.order, by.tiles, by.peaks[int(second)], ready.shape[0], *triton_experts.tensors_of(weight, bias), out,
        **triton_experts.shape_of(weight), BIAS=bias is not None, ACT=act, GATED=act != "" and is_gated(act), TARGET=second,
        P=tile.slices, S=tile.pairs, W=words, B=words if tile.whole else 1, NW=WARPS, num_warps=WARPS,
    )  # fmt: skip


def prefill_ffn(x, ids, gates, chunks, up, up_bias, down, down_bias, activation: str, one_k: bool = False) -> Tensor:
    """The expert block for many tokens, [T, H_out]: sorted, two products, slots summed in order."""
    tokens, active = ids.shape
    out = torch.empty(tokens, down.offset.shape[1], dtype=x.dtype, device=x.device)
    step = max(1, PAIRS_AT_ONCE // active)
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        own = (x[some], ids[some], gates[some], chunks[some])
        _ffn_of_some(*own, up, up_bias, down, down_bias, activation, one_k, out[some])
    return out


def _ffn_of_some(x, ids, gates, chunks, up, up_bias, down, down_bias, activation: str, one_k: bool, out: Tensor) -> None:
    active = ids.shape[1]
    experts, width, _ = down.offset.shape
    inner = torch.float32 if x.dtype == torch.float16 else x.dtype  # fp16 could overflow between the products
    by = sort_pairs(ids, chunks, tile_for(ids.numel(), experts, one_k), up, down)
    hidden = torch.empty(ids.numel(), down.in_features, dtype=inner, device=x.device)
    product(x, by, False, up, up_bias, activation, active, hidden)
    rows = torch.empty(ids.numel(), width, dtype=inner, device=x.device)
    product(hidden, by, True, down, down_bias, "", 0, rows)
    triton_experts.combine(rows, ids, chunks, gates, experts, out)


def prefill_matmul(x: Tensor, ids: Tensor, chunks: Tensor, weight: EncodedWeight, bias: Tensor | None) -> Tensor:
    """`expert_matmul` for many tokens, [T, A, O]."""
    tokens, active = ids.shape
    experts, width, _ = weight.offset.shape
    out = torch.zeros(tokens * active, width, dtype=x.dtype, device=x.device)  # pairs that read nothing stay 0
    rows, sharing = (x.flatten(0, 1), 1) if x.dim() == 3 else (x, active)
    by = sort_pairs(ids, chunks, tile_for(ids.numel(), experts), weight, weight)
    product(rows, by, True, weight, bias, "", sharing, out)
    return out.view(tokens, active, width)
