"""The expert ops for many tokens on Hopper: launches of the Gluon kernel. Other cards and shapes: `triton_experts`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dpamoe.kernels import triton_experts
from dpamoe.kernels.hopper_prefill import hopper_prefill_kernel
from dpamoe.kernels.hopper_rows import prepare_kernel
from dpamoe.kernels.hopper_tiles import kinds_of
from dpamoe.kernels.layout import EncodedWeight, group_width
from dpamoe.kernels.paths import early
from dpamoe.kernels.reference import is_gated
from dpamoe.kernels.sizes import cdiv, next_power_of_2

WARPS = 4  # one warp group
ROWS = 64  # of a weight, that a warp group computes
BLOCK = 128  # inputs that one word of each of four lanes holds
ROWS_LAYOUT, SUMS_LAYOUT = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(32, 16, 2)  # of rows of x, and of their sums
SHARED = 232448  # bytes of shared memory that a program can have
REST = 28  # registers of a lane beside what is unpacked and the sums
PAIRS_AT_ONCE = 1 << 17  # of a block; a longer prompt is computed in parts, since every pair has a prepared row of its own


@dataclass(frozen=True)
class Cut:
    """How the kernel is cut: most pairs of one k in each slice of a tile, the widest first; warp groups that compute it.

    kept: blocks of x in shared memory. whole: all blocks of a stretch are unpacked at once, up to two; where there may be
    several k, and just as many are kept, each slice has its rows by itself, free for the next ones as soon as it is multiplied.
    """

    widths: tuple[int, ...]
    groups: int
    kept: int  # a multiple of how many are unpacked at once
    whole: bool = False

    @property
    def kinds(self) -> tuple[int, int, int]:
        """Rows of a tensor that are copied at once: every width, the last again where there are fewer than three."""
        kinds = kinds_of(self.widths)
        return (kinds + kinds[-1:] * 2)[:3]

    @property
    def registers(self) -> tuple[int, int]:
        """Of a lane in the groups that compute, and in the one that brings; 512 in all groups together."""
        return {2: (224, 56), 3: (152, 56), 4: (104, 64)}[self.groups]


# by pairs per expert, at most, the first that has room: more pairs in a tile unpack a weight less often, fewer in a slice waste
# less of a product
CUTS = (
    (12, Cut((16, 8, 8, 8), 3, 4, whole=True)),
    (24, Cut((16, 16, 8, 8), 3, 4, whole=True)),
    (24, Cut((16, 16, 8, 8), 2, 4)),
    (48, Cut((32, 16, 16, 8), 3, 2, whole=True)),
    (96, Cut((64, 32, 32, 16, 16, 16), 2, 2, whole=True)),
    (192, Cut((64, 32, 32, 16, 16, 16, 16), 2, 2, whole=True)),
    (1 << 62, Cut((64,) * 4, 2, 2)),
    (1 << 62, Cut((32,) * 4, 3, 2)),
    (1 << 62, Cut((32,) * 4, 2, 2)),
)
CUTS_OF_ONE_K = (
    (12, Cut((16,), 4, 4, whole=True)),
    (12, Cut((16,), 2, 4)),
    (36, Cut((32, 16), 3, 4, whole=True)),
    (36, Cut((32, 16), 2, 4, whole=True)),
    (48, Cut((32,) * 2, 3, 4, whole=True)),
    (80, Cut((64, 32), 2, 4, whole=True)),
    (144, Cut((128, 32), 2, 2)),
    (1 << 62, Cut((64, 64, 64, 64, 16), 2, 2)),
    (1 << 62, Cut((64,) * 3, 2, 2)),
    (1 << 62, Cut((64,) * 2, 2, 2)),
)


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


def blocks_at_once(cut: Cut, words: int) -> int:
    """Blocks of a stretch of so many words that are unpacked at once: all, or one where more would not fit the registers."""
    return words if cut.whole and words < 4 else 1


def shared_memory(cut: Cut, *weights: EncodedWeight, stages: int = 2) -> int:
    """Bytes of shared memory that no product of these weights exceeds, with so many stretches of planes in it."""
    row, fewest = 0, min(map(words_at_once, weights))  # row: of a stretch, its planes, scales and offsets
    for weight in weights:
        words, planes = words_at_once(weight), len(weight.planes)
        groups = BLOCK * words // group_width(weight.in_features, weight.group_size)
        scales = groups * (len(weight.scales) * weight.scales[0].element_size() + weight.offset.element_size())
        row = max(row, planes * 16 * words + scales)
    rows = sum(cut.widths) * (2 * BLOCK * cut.kept + 32 * cdiv(cut.kept, fewest))  # of x, and their sums
    return cut.groups * (stages * ROWS * row + 2048) + rows + 3584  # with what results pass through, and the barriers


def stages_of(cut: Cut, weight: EncodedWeight) -> int:
    """Stretches of planes in shared memory: three where they have room, so that a group may be ahead of others by two."""
    return 3 if shared_memory(cut, weight, stages=3) <= SHARED else 2


def under_way_together(cut: Cut, *weights: EncodedWeight) -> bool:
    """Whether all products of a stretch with one k can be: what is unpacked is copied for every slice that it is multiplied by.

    Before Triton 3.9 its assembler saw that these are the same; now, if they leave it no registers, it waits for each product.
    """
    if triton_experts.SPARING:
        return True
    unpacked = 0
    for weight in weights:
        words = words_at_once(weight)
        blocks = blocks_at_once(cut, words)
        unpacked = max(unpacked, 32 * blocks + 4 * (blocks == words))  # with the offsets, behind the last block of a stretch
    return len(cut.widths) * unpacked + sum(cut.widths) // 2 <= cut.registers[0] - REST


def cut_for(pairs: int, experts: int, one_k: bool, *weights: EncodedWeight) -> Cut:
    """The cut for so many pairs of these weights; one_k: whether most experts have pairs of one k alone."""
    cuts = CUTS_OF_ONE_K if one_k else CUTS
    room = (cut for most, cut in cuts if pairs <= most * experts and shared_memory(cut, *weights) <= SHARED)
    return next(cut for cut in room if not one_k or under_way_together(cut, *weights))


def constants_of(cut: Cut, one_k: bool, weight: EncodedWeight) -> dict:
    """What the kernel is compiled for, as it names it."""
    words = words_at_once(weight)
    return {
        "WIDTHS": cut.widths, "W": words, "B": blocks_at_once(cut, words), "NC": cut.groups, "NS": cut.kept,
        "STAGES": stages_of(cut, weight), "ONE": one_k, "REGS": cut.registers[0], "BRING": cut.registers[1],
    }  # fmt: skip


@dataclass(frozen=True)
class Sorted:
    """Pairs by expert and k, their places there, and their tiles, as `triton_sort.sort_kernel` leaves them; peaks fp32 [2, E].

    one_k: whether a tile has pairs with one k alone.
    """

    order: Tensor
    places: Tensor
    tiles: Tensor
    peaks: Tensor
    cut: Cut
    one_k: bool


def sort_pairs(ids: Tensor, chunks: Tensor, cut: Cut, one_k: bool, up: EncodedWeight, down: EncodedWeight) -> Sorted:
    """Sort the pairs for a block of two weights."""
    pairs, experts = ids.numel(), up.offset.shape[0]
    # beside the full ones of an expert: one for each of 8 slices that are not full, and one that lacks some
    most = min(pairs, 9 * experts + pairs // sum(cut.widths))
    tiles = torch.empty(most, 2 + 3 * len(cut.widths), dtype=torch.int32, device=ids.device)
    order, places, peaks = triton_experts.sort_into(tiles, ids, chunks, up, down, BN=0, MIXED=0, WIDTHS=cut.widths, ONE=one_k)
    return Sorted(order, places, tiles, peaks, cut, one_k)


def prepare_rows(x: Tensor, by: Sorted, sharing: int, weight: EncodedWeight) -> tuple[Tensor, Tensor]:
    """Rows in sorted order for the kernel, fp16 [P, I and the sums over groups], and a factor for each, fp32 [P].

    sharing: pairs that have one row of x, 0 where x is in sorted order.
    """
    width, words, pairs = weight.in_features, words_at_once(weight), by.order.numel()
    ready = torch.empty(pairs, width + width // (words * BLOCK) * 16, dtype=torch.float16, device=x.device)
    factor = torch.empty(pairs, dtype=torch.float32, device=x.device)
    padded = next_power_of_2(width)
    rows = 1 if sharing else max(1, 4096 // padded)  # 32 numbers for a lane
    prepare_kernel[(cdiv(x.shape[0], rows),)](
        x, by.places, ready, factor, x.stride(0), x.shape[0], A=sharing, IN=width, PAD=padded, W=words, ROWS=rows, num_warps=4,
        **early(x.device),
    )  # fmt: skip
    return ready, factor


def product(
    x: Tensor, by: Sorted, second: bool, weight: EncodedWeight, bias: Tensor | None, act: str, sharing: int, out: Tensor
) -> None:
    """out[row of a pair] = act(W_k x + bias).

    second: whether it is the second weight that the pairs were sorted for, whose results go back into the order of pairs.
    """
    cut = by.cut
    ready, factor = prepare_rows(x, by, sharing, weight)
    rows = {width: TensorDescriptor.from_tensor(ready, [width, BLOCK], ROWS_LAYOUT) for width in set(cut.kinds)}
    sums = {width: TensorDescriptor.from_tensor(ready, [width, 16], SUMS_LAYOUT) for width in set(cut.kinds)}
    chips = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = cdiv(weight.offset.shape[1], ROWS * cut.groups)
    hopper_prefill_kernel[(min(chips, blocks * by.tiles.shape[0]),)](
        *map(rows.get, cut.kinds), *map(sums.get, cut.kinds), factor, by.order, by.tiles, by.peaks[int(second)],
        ready.shape[0], 0,
        *triton_experts.tensors_of(weight, bias), out, **triton_experts.shape_of(weight), BIAS=bias is not None, ACT=act,
        GATED=act != "" and is_gated(act), TARGET=second, **constants_of(cut, by.one_k, weight), num_warps=WARPS,
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
    by = sort_pairs(ids, chunks, cut_for(ids.numel(), experts, one_k, up, down), one_k, up, down)
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
    by = sort_pairs(ids, chunks, cut_for(ids.numel(), experts, False, weight), False, weight, weight)
    product(rows, by, True, weight, bias, "", sharing, out)
    return out.view(tokens, active, width)
