"""The expert ops on CUDA: launches of the Triton kernels, for few tokens (decode) and for many (prefill).

Both paths need groups and rows of whole 32-bit words (`supported`); other shapes run the torch code of `grouped`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dpamoe.kernels.allocation import Allocation, Thresholds
from dpamoe.kernels.layout import EncodedWeight, group_width, groups_of
from dpamoe.kernels.paths import early
from dpamoe.kernels.reference import is_gated
from dpamoe.kernels.sizes import cdiv, next_power_of_2
from dpamoe.kernels.triton_decode import down_kernel, up_kernel
from dpamoe.kernels.triton_prefill import prefill_kernel
from dpamoe.kernels.triton_sort import combine_kernel, count_kernel, prepare_kernel, scan_kernel, sort_kernel

WORD = 32  # inputs in one 32-bit word of a plane
SORT_BLOCK = 128


@dataclass(frozen=True)
class Tile:
    """How the prefill kernel is cut: rows; pairs of an expert with one k, in parts; pairs with several k."""

    rows: int
    pairs: int
    part: int
    mixed: int
    warps: int = 4
    stages: int = 1  # more keep loads ahead, but take the registers that a further program on the chip could have


SPARING = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)  # Triton 3.9 needs more registers
PIPELINED = 2 if SPARING else 1  # one stage spills registers before, two do from then on
# by pairs per expert, at most: more pairs in a tile unpack a weight less often, fewer waste less of the matrix unit
TILES = (
    (12, Tile(64, 16, 16, 16)),
    (24, Tile(64, 32, 32, 32)),
    (64, Tile(64, 64, 64, 32)),
    (1 << 62, Tile(64, 128, 128, 32, stages=PIPELINED)),
)
SLIM_TILES = TILES[:1] + ((1 << 62, Tile(64, 32, 32, 16)),)  # elsewhere than on Hopper wider ones run out of registers


def supported(weight: EncodedWeight) -> bool:
    """Whether the Triton kernels can read this weight: inputs and groups in whole words of 32, tensors contiguous."""
    whole = weight.in_features % WORD == 0 and group_width(weight.in_features, weight.group_size) % WORD == 0
    return whole and all(tensor.is_contiguous() for tensor in weight.tensors().values())


def tiles_for(card: int) -> tuple[tuple[int, Tile], ...]:
    """The cuts that a card of this compute capability (times ten) holds in registers."""
    return TILES if 90 <= card < 100 else SLIM_TILES


def tile_for(ids: Tensor, experts: int) -> Tile:
    """The cut for these pairs, by their number per expert."""
    card = 90
    if ids.is_cuda:
        major, minor = torch.cuda.get_device_capability(ids.device)
        card = 10 * major + minor
    return next(tile for most, tile in tiles_for(card) if ids.numel() <= most * experts)


def block_of(weight: EncodedWeight) -> int:
    """Inputs in a decode unit: the largest power of two up to 128 that divides a group."""
    group = group_width(weight.in_features, weight.group_size)
    return min(128, group & -group)


def shape_of(weight: EncodedWeight) -> dict:
    """Sizes of a weight, as the kernels name them."""
    return {
        "OUT": weight.offset.shape[1], "IN": weight.in_features,
        "GROUPS": groups_of(weight.in_features, weight.group_size),
        "GROUP": group_width(weight.in_features, weight.group_size),
        "C": len(weight.planes), "TIED": weight.unit is not None,
    }  # fmt: skip


def tensors_of(weight: EncodedWeight, bias: Tensor | None) -> tuple:
    """Planes, scales, offset, unit and bias; a tensor that is not there is stood in for by one that is not read."""
    unit = weight.offset if weight.unit is None else weight.unit
    return tuple(weight.planes), tuple(weight.scales), weight.offset, unit, weight.offset if bias is None else bias.contiguous()


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """All strides, in order."""
    return tuple(stride for tensor in tensors for stride in tensor.stride())


def rule_of(source: Allocation | Thresholds | None, chunks: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict]:
    """Where `up_kernel` has k from: gates, table, budget, k_max, spent; strides of the table and of the budget; its constants.

    Tensors that its rule does not read are stood in for.
    """
    if source is None:
        return (chunks,) * 5, (0, 0, 0), {"RULE": "given", "K_MIN": 0, "COLUMNS": 0}
    spent = chunks if source.spent is None else source.spent
    if isinstance(source, Thresholds):
        table = source.thresholds
        constants = {"RULE": "threshold", "K_MIN": source.k_min, "COLUMNS": table.shape[1]}
        return (source.gates, table, table, source.k_max, spent), (*table.stride(), 0), constants
    table, budget = source.residuals, source.budget
    strides = (*table.stride(), budget.stride(0) if budget.dim() else 0)
    return (source.gates, table, budget, source.k_max, spent), strides, {"RULE": "rank", "K_MIN": source.k_min, "COLUMNS": 0}


def counts(source: Allocation | Thresholds | None) -> bool:
    """Whether planes that a source hands out are counted."""
    return source is not None and source.spent is not None


def decode_up(
    x: Tensor, ids: Tensor, chunks: Tensor, weight: EncodedWeight, bias: Tensor | None, act: str, out: Tensor,
    source: Allocation | Thresholds | None = None,
) -> None:  # fmt: skip
    """out [P, rows] = act(W_k x + bias) for every pair; x [T, I] or [T, A, I], unit stride along I.

    With a source of k chunks is written, else it is read.
    """
    tokens, active = ids.shape
    block, per_program = block_of(weight), 8 if x.is_cuda else 64
    slot = x.stride(1) if x.dim() == 3 else 0
    tables, strides, rule = rule_of(source, chunks)
    up_kernel[(tokens * active, cdiv(out.shape[-1], per_program))](
        x, ids, chunks, *tables, *tensors_of(weight, bias), out, x.stride(0), slot,
        *strides_of(ids, chunks, tables[0]), *strides,
        A=active, E=weight.offset.shape[0], **shape_of(weight), BIAS=bias is not None, ACT=act,
        GATED=act != "" and is_gated(act), BLOCK=block, ROWS=per_program,
        UNITS=min(16, next_power_of_2(cdiv(weight.in_features, block))),
        **rule, COUNT=counts(source), A_PAD=next_power_of_2(active), ASM=x.is_cuda, num_warps=4,
    )  # fmt: skip


def decode_down(
    hidden: Tensor, ids: Tensor, chunks: Tensor, gates: Tensor, weight: EncodedWeight, bias: Tensor | None, out: Tensor
) -> None:
    """out [T, rows] = sum over slots of gate * (W_k hidden + bias); hidden fp32 [P, I]."""
    tokens, active = ids.shape
    block, per_program = block_of(weight), 8 if hidden.is_cuda else 64
    units = active * cdiv(weight.in_features, block)
    at_once, warps = (32, 8) if tokens <= 2 else (16, 4)  # few programs: more of a row in each
    down_kernel[(tokens, cdiv(out.shape[1], per_program))](
        hidden, ids, chunks, gates, *tensors_of(weight, bias), out, *strides_of(ids, chunks, gates),
        A=active, E=weight.offset.shape[0], **shape_of(weight), BIAS=bias is not None, BLOCK=block,
        UNITS=min(at_once, next_power_of_2(units)), ROWS=per_program, ASM=hidden.is_cuda, num_warps=warps,
    )  # fmt: skip


@dataclass(frozen=True)
class Sorted:
    """Pairs by expert and k as `sort_kernel` leaves them, and the cut they were sorted for; peaks fp32 [2, E]."""

    order: Tensor
    levels: Tensor
    tiles: Tensor
    peaks: Tensor
    tile: Tile


def sort_pairs(ids: Tensor, chunks: Tensor, tile: Tile, up: EncodedWeight, down: EncodedWeight) -> Sorted:
    """Sort the pairs for a block of two weights."""
    pairs, experts = ids.numel(), up.offset.shape[0]
    tiles = torch.empty(min(pairs, experts) + pairs // tile.mixed, 5, dtype=torch.int32, device=ids.device)
    order, levels, peaks = sort_into(tiles, ids, chunks, up, down, BN=tile.pairs, MIXED=tile.mixed, WIDTHS=(), ONE=False)
    return Sorted(order, levels, tiles, peaks, tile)


def sort_into(
    tiles: Tensor, ids: Tensor, chunks: Tensor, up: EncodedWeight, down: EncodedWeight, **cut
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `sort_kernel`, which writes tiles; order and levels int32 [P] and peaks fp32 [2, E] as there."""
    (pairs, active), experts, device = (ids.numel(), ids.shape[1]), up.offset.shape[0], ids.device
    order, levels = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))  # both aligned
    peaks = torch.empty(2, experts, dtype=torch.float32, device=device)
    keys = 8 * next_power_of_2(experts)
    blocks = cdiv(pairs, SORT_BLOCK)
    counts = torch.empty(blocks + 1, keys, dtype=torch.int32, device=device)
    sizes = {"A": active, "E": experts, "C": min(len(up.planes), len(down.planes)), "KEYS": keys, "B": SORT_BLOCK}
    count_kernel[(blocks,)](ids, chunks, counts, pairs, *strides_of(ids, chunks), **sizes)
    scan = scan_cut(blocks, keys)
    scan_kernel[(keys // scan["SOME"],)](counts, blocks, **scan, **early(device))
    scales = [part for weight in (up, down) for part in (weight.scales[0], *tensors_of(weight, None)[2:4])]  # offset, unit
    sort_kernel[(blocks + 1 + 2 * experts,)](
        ids, chunks, counts, order, levels, tiles, peaks, *scales, pairs, blocks, tiles.shape[0], *strides_of(ids, chunks),
        **sizes, **cut, UP=up.offset[0].numel(), DOWN=down.offset[0].numel(), TIED=up.unit is not None,
        **sort_options(keys), **early(device),
    )  # fmt: skip
    return order, levels, peaks


def sort_options(keys: int) -> dict[str, int]:
    """Launch options of `sort_kernel`; left alone, ptxas spills rather than take registers that no other program wants."""
    warps, registers = (8, 96) if keys <= 1024 else (16, 128)
    return {"num_warps": warps} | ({} if torch.version.hip else {"maxnreg": registers})


def scan_cut(blocks: int, keys: int) -> dict[str, int]:
    """How `scan_kernel` is cut: up to 256 blocks at once, so that it hardly ever goes on to further ones, and so many keys."""
    at_once = min(256, max(32, next_power_of_2(blocks)))
    return {"KEYS": keys, "SOME": min(keys, max(16, 2048 // at_once)), "AT_ONCE": at_once, "num_warps": max(4, at_once // 32)}


def prepare_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows for the prefill kernel, fp16 [R, width in whole stretches of 128], and a factor for each, fp32 [R]."""
    rows, width = x.shape
    stretches = cdiv(width, 128)
    ready = torch.empty(rows, stretches * 128, dtype=torch.float16, device=x.device)
    factor = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded = next_power_of_2(stretches)
    prepare_kernel[(rows,)](x, ready, factor, x.stride(0), IN=width, STRETCHES=stretches, STRETCHES_PAD=padded)
    return ready, factor


def prefill_product(
    x: Tensor, by: Sorted, second: bool, weight: EncodedWeight, bias: Tensor | None, act: str, source: int, out: Tensor
) -> None:
    """out[row of a pair] = act(W_k x + bias).

    second: whether it is the second weight that the pairs were sorted for, whose results go back into the order of pairs.
    source: pairs that share a row of x, 0 where x is in sorted order.
    """
    tile, gated = by.tile, act != "" and is_gated(act)
    ready, factor = prepare_rows(x)
    grid = (cdiv(weight.offset.shape[1], tile.rows) * by.tiles.shape[0],)
    for mixed, pairs, part in ((False, tile.pairs, tile.part), (True, tile.mixed, tile.mixed)):
        prefill_kernel[grid](
            ready, factor, by.order, by.levels, by.tiles, by.peaks[int(second)], *tensors_of(weight, bias), out,
            **shape_of(weight), BIAS=bias is not None, ACT=act, GATED=gated, SOURCE=source, TARGET=second, BM=tile.rows,
            BN=pairs, SUB=part, MIXED=mixed, NW=tile.warps, ASM=x.is_cuda, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip


def decode_ffn(x, ids, gates, chunks, up, up_bias, down, down_bias, activation: str, source=None) -> Tensor:
    """The expert block for few tokens, [T, H_out]: two launches. With a source of k chunks is written on the way."""
    tokens, active = ids.shape
    hidden = torch.empty(tokens * active, down.in_features, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, down.offset.shape[1], dtype=x.dtype, device=x.device)
    decode_up(x, ids, chunks, up, up_bias, activation, hidden, source)
    decode_down(hidden, ids, chunks, gates, down, down_bias, out)
    return out


def combine(rows: Tensor, ids: Tensor, chunks: Tensor, gates: Tensor, experts: int, out: Tensor) -> None:
    """out [T, H] = sum over slots, in order, of gate * the row of the pair; rows [P, H]."""
    tokens, width = out.shape
    block = min(1024, next_power_of_2(width))
    combine_kernel[(tokens, cdiv(width, block))](
        rows, ids, chunks, gates, chunks, out, *strides_of(ids, chunks, gates), A=ids.shape[1], E=experts, WIDTH=width,
        B=block, KINDS=0, PDL=False,
    )  # fmt: skip


def prefill_ffn(x, ids, gates, chunks, up, up_bias, down, down_bias, activation: str) -> Tensor:
    """The expert block for many tokens, [T, H_out]: sorted, two grouped products, slots summed in order."""
    tokens, active = ids.shape
    experts, width, _ = down.offset.shape
    inner = torch.float32 if x.dtype == torch.float16 else x.dtype  # fp16 could overflow between the products
    by = sort_pairs(ids, chunks, tile_for(ids, experts), up, down)
    hidden = torch.empty(ids.numel(), down.in_features, dtype=inner, device=x.device)
    rows = torch.empty(ids.numel(), width, dtype=inner, device=x.device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    prefill_product(x, by, False, up, up_bias, activation, active, hidden)
    prefill_product(hidden, by, True, down, down_bias, "", 0, rows)
    combine(rows, ids, chunks, gates, experts, out)
    return out


def prefill_matmul(x: Tensor, ids: Tensor, chunks: Tensor, weight: EncodedWeight, bias: Tensor | None) -> Tensor:
    """`expert_matmul` for many tokens, [T, A, O]."""
    tokens, active = ids.shape
    experts, width, _ = weight.offset.shape
    out = torch.zeros(tokens * active, width, dtype=x.dtype, device=x.device)  # pairs that read nothing stay 0
    rows, source = (x.flatten(0, 1), 1) if x.dim() == 3 else (x, active)
    by = sort_pairs(ids, chunks, tile_for(ids, experts), weight, weight)
    prefill_product(rows, by, True, weight, bias, "", source, out)
    return out.view(tokens, active, width)


def decode_matmul(x: Tensor, ids: Tensor, chunks: Tensor, weight: EncodedWeight, bias: Tensor | None) -> Tensor:
    """`expert_matmul` for few tokens, [T, A, O]."""
    out = torch.empty(*ids.shape, weight.offset.shape[1], dtype=x.dtype, device=x.device)
    decode_up(x, ids, chunks, weight, bias, "", out)
    return out
