"""The expert block for few tokens by bit-serial kernels: their launches. Other cards, shapes: `triton_experts`.

Planes with scales of their own are operands of 1-bit products; those of a tied scale are put together to 8-bit numbers first.

Up to FEW pairs a program works for one pair (`bitserial_decode`); more pairs are put in the order of their experts first, so
that planes are read once for all pairs of an expert (`bitserial_rows`, `bitserial_group`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpamoe.kernels.allocation import Allocation, Thresholds
from dpamoe.kernels.bitserial_decode import down_kernel, up_kernel
from dpamoe.kernels.bitserial_group import group_kernel
from dpamoe.kernels.bitserial_rows import cut_kernel, order_kernel
from dpamoe.kernels.layout import EncodedWeight, group_width
from dpamoe.kernels.paths import BIT_GROUP, BIT_PAIRS, early, has_bit_groups
from dpamoe.kernels.reference import is_gated
from dpamoe.kernels.sizes import cdiv, next_power_of_2
from dpamoe.kernels.triton_experts import counts, rule_of, strides_of, tensors_of
from dpamoe.kernels.triton_sort import combine_kernel

MOST_SLOTS = 16  # of a token, whose planes stand in one 64-bit number
MOST_PIECES = 8  # of 256 inputs that a warp takes one after the other: the code is written out for each
FEW = 16  # pairs up to which putting them in order costs more: 3 tokens with 8 experts each of 128, on an H200
WARPS = 8
UP_PROGRAMS = 3  # of the first product of few pairs, that share a multiprocessor
REGISTERS = 1 << 16  # of a multiprocessor
COLUMNS = 128  # of an output row that a program adds up
CUT_PAIRS = 128  # up to which a tile of the second product cuts rows for itself: above, a launch costs less than its work


def usable(pairs: int, active: int, up: EncodedWeight, down: EncodedWeight) -> bool:
    """Whether these kernels can read these weights: fp16 scales in groups of 128, or tied ones in groups that divide that.

    Widths must be whole groups of 128 and tiles of 64 rows.
    """
    pieces = max(pieces_of(up.in_features, WARPS), cdiv(active * pieces_of(down.in_features, 1), WARPS))
    few = (
        pairs <= BIT_PAIRS
        and active <= MOST_SLOTS
        and len(up.planes) == len(down.planes)
        and max(pieces, pieces_of(down.in_features, 1)) <= MOST_PIECES
    )
    return few and all(
        has_bit_groups(group_width(weight.in_features, weight.group_size), weight.unit is not None)
        and weight.offset.dtype == (torch.float16 if weight.unit is None else torch.int8)
        and weight.in_features % BIT_GROUP == 0
        and weight.offset.shape[1] % 64 == 0
        and weight.planes[0].numel() // 4 < 1 << 31
        and all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in weight.tensors().values())
        for weight in (up, down)
    )


def planes_held(pieces: int, programs: int, device: torch.device, beside: int = 1024) -> int:
    """Planes that stand in shared memory, so that so many programs fit on a multiprocessor; others are read as they stand.

    pieces: of 256 inputs and 16 rows that a program has of a plane, 512 bytes each. beside: bytes of shared memory for what
    warps exchange; a multiprocessor keeps 1024 more of each program.
    """
    properties = torch.cuda.get_device_properties(device)
    room = min(properties.shared_memory_per_multiprocessor // programs, properties.shared_memory_per_block_optin)
    return max(1, min(8, (room - 1024 - beside) // (512 * pieces)))


def spare_pieces(size: int, programs: int, device: torch.device) -> int:
    """Pieces of 4 KiB that a program of `size` bytes of shared memory must add to have a multiprocessor for itself.

    The last programs of the kernel before end at different times, and the first multiprocessor that is free would take two
    of these programs where another is free a little later. 0 where there are more programs than multiprocessors.
    """
    properties = torch.cuda.get_device_properties(device)
    if programs > properties.multi_processor_count:
        return 0
    return max(0, (properties.shared_memory_per_multiprocessor // 2 - size) // (512 * WARPS) + 1)


def at_once(programs: int, each: int, device: torch.device) -> bool:
    """Whether all programs of a kernel most likely run at once, `each` on a multiprocessor, where the next one begins early."""
    return early(device)["PDL"] and programs <= each * torch.cuda.get_device_properties(device).multi_processor_count


def registers_of(warps: int, programs: int) -> int:
    """Registers that a thread may have, so that so many programs fit on a multiprocessor."""
    return REGISTERS // (32 * warps * programs) // 8 * 8


def pieces_of(inputs: int, warps: int) -> int:
    """Pieces of 256 inputs that a warp has, if so many share them."""
    return cdiv(cdiv(inputs, 256), warps)


def _launch(device: torch.device, warps: int, registers: int | None = None) -> dict:
    return {"num_warps": warps, "maxnreg": registers} | early(device)


def _sizes(weight: EncodedWeight, bias: Tensor | None) -> dict:
    return {
        "OUT": weight.offset.shape[1], "IN": weight.in_features, "C": len(weight.planes), "BIAS": bias is not None,
        "TIED": tied_group(weight),
    }  # fmt: skip


def tied_group(weight: EncodedWeight) -> int:
    """Inputs that have a tied scale together; 0 where every plane has scales of its own."""
    return 0 if weight.unit is None else group_width(weight.in_features, weight.group_size)


def ffn(
    x: Tensor, ids: Tensor, gates: Tensor, chunks: Tensor, up: EncodedWeight, up_bias: Tensor | None, down: EncodedWeight,
    down_bias: Tensor | None, activation: str, source: Allocation | Thresholds | None = None,
) -> Tensor:  # fmt: skip
    """The expert block, [T, H_out]; with a source of k chunks is written on the way. x has unit stride along its inputs."""
    out = torch.empty(ids.shape[0], down.offset.shape[1], dtype=x.dtype, device=x.device)
    block = (up, up_bias, down, down_bias, activation)
    (_of_pairs if ids.numel() <= FEW else _of_experts)(x, ids, gates, chunks, block, source, out)
    return out


def _of_pairs(x: Tensor, ids: Tensor, gates: Tensor, chunks: Tensor, block: tuple, source, out: Tensor) -> None:
    """Two launches: a program for a pair, then for a token."""
    up, up_bias, down, down_bias, activation = block
    tokens, active = ids.shape
    gated, slots = is_gated(activation), next_power_of_2(active)
    hidden = torch.empty(tokens * active, down.in_features, dtype=torch.float32, device=x.device)
    tables, strides, rule = rule_of(source, chunks)
    held = planes_held(WARPS * pieces_of(up.in_features, WARPS) * (1 + gated), UP_PROGRAMS, x.device)
    registers = None if up.unit is None else registers_of(WARPS, UP_PROGRAMS)  # free scales need fewer
    programs = down.in_features // 16 * tokens * active
    ahead = source is not None and at_once(programs, UP_PROGRAMS, x.device)
    up_kernel[(down.in_features // 16, tokens * active)](
        x, ids, chunks, *tables, *tensors_of(up, up_bias), hidden, x.stride(0), *strides_of(ids, chunks, tables[0]), *strides,
        **rule, **_sizes(up, up_bias), COUNT=counts(source), A=active, N=slots, E=up.offset.shape[0], GATED=gated,
        ACT=activation, CAP=min(held, len(up.planes)), AHEAD=ahead, NW=WARPS, **_launch(x.device, WARPS, registers),
    )  # fmt: skip
    pieces = WARPS * cdiv(active * pieces_of(down.in_features, 1), WARPS)
    held, programs = min(planes_held(pieces, 1, x.device), len(down.planes)), out.shape[1] // 16 * tokens
    down_kernel[(out.shape[1] // 16, tokens)](
        hidden, ids, chunks, gates, *tensors_of(down, down_bias), out, *strides_of(ids, chunks, gates),
        **_sizes(down, down_bias), K_MIN=rule["K_MIN"], FOUND=source is not None, AHEAD=ahead, A=active, N=slots,
        E=up.offset.shape[0], CAP=held, SPARE=spare_pieces(512 * held * pieces, programs, x.device), NW=WARPS,
        **_launch(x.device, WARPS),
    )  # fmt: skip


def _of_experts(x: Tensor, ids: Tensor, gates: Tensor, chunks: Tensor, block: tuple, source, out: Tensor) -> None:
    """Pairs in order and rows cut, the first product, its rows cut, the second product, slots summed: four launches or five."""
    up, up_bias, down, down_bias, activation = block
    active, experts, pairs, device = ids.shape[1], up.offset.shape[0], ids.numel(), x.device
    bits, order = order_pairs(x, ids, chunks, up, source)
    hidden = torch.empty(pairs, down.in_features, dtype=torch.float32, device=device)
    _group(bits, order, up, up_bias, hidden, active, activation, along=WARPS, tiles=1, programs=3, ahead=False)
    inner = hidden if pairs <= CUT_PAIRS else _cut_rows(hidden, down)
    rows = torch.empty(pairs, out.shape[1], dtype=torch.float32, device=device)
    _group(inner, order, down, down_bias, rows, 1, "", along=1, tiles=4, programs=4, ahead=True)
    combine_kernel[(ids.shape[0], cdiv(out.shape[1], COLUMNS))](
        rows, ids, chunks, gates, source.spent if counts(source) else chunks, out, *strides_of(ids, chunks, gates), A=active,
        E=experts, WIDTH=out.shape[1], B=COLUMNS, KINDS=len(up.planes) + 1 if counts(source) else 0, **_launch(device, 2),
    )  # fmt: skip


def _cut_rows(rows: Tensor, weight: EncodedWeight) -> Tensor:
    """The bits of rows that are multiplied by a weight, int32 [P, .]; rows: fp32, in the order of lanes."""
    pairs, inputs = rows.shape
    bits = torch.empty(pairs, 256 * pieces_of(inputs, 1), dtype=torch.int32, device=rows.device)
    cut_kernel[(pairs, pieces_of(inputs, 4))](
        rows, bits, rows.stride(0), IN=inputs, NW=4, TIED=tied_group(weight), **_launch(rows.device, 4)
    )  # fmt: skip
    return bits


@dataclass(frozen=True)
class Order:
    """Pairs by expert, their planes, and where each expert's begin and end, as `bitserial_rows.order_kernel` leaves them."""

    pairs: Tensor
    planes: Tensor
    entries: Tensor


def order_pairs(x: Tensor, ids: Tensor, chunks: Tensor, up: EncodedWeight, source) -> tuple[Tensor, Order]:
    """Rows of x cut into bits, int32 [T, .], and the pairs in order; with a source of k chunks is written on the way."""
    (tokens, active), experts, pairs, device = ids.shape, up.offset.shape[0], ids.numel(), x.device
    bits = torch.empty(tokens, 256 * pieces_of(up.in_features, 1), dtype=torch.int32, device=device)
    order, planes = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    entries = torch.empty(min(experts, pairs), 4, dtype=torch.int32, device=device)
    parts = pieces_of(up.in_features, WARPS)
    tables, strides, rule = rule_of(source, chunks)
    order_kernel[(tokens, parts + 1)](
        x, bits, ids, chunks, *tables[:4], order, planes, entries, pairs, x.stride(0), *strides_of(ids, chunks, tables[0]),
        *strides, **rule, A=active, N=next_power_of_2(active), E=experts, IN=up.in_features,
        C=len(up.planes), P=max(32, next_power_of_2(pairs)), PARTS=parts, NW=WARPS, TIED=tied_group(up),
        **_launch(device, WARPS),
    )  # fmt: skip
    return bits, Order(order, planes, entries)


def _group(
    bits: Tensor, by: Order, weight: EncodedWeight, bias: Tensor | None, out: Tensor, sharing: int, activation: str,
    along: int, tiles: int, programs: int, ahead: bool,
) -> None:  # fmt: skip
    """out [P, rows] = act(W_k x + bias): along warps share the inputs of 16 rows, in each of so many tiles.

    bits: rows that are cut, or rows of fp32, which tiles of a single warp along the inputs cut for themselves.

    programs: how many share a multiprocessor from Hopper on; one less before, where fewer planes stand in shared memory, so
    that those read as they stand are not spilled.
    ahead: whether planes are asked for while the kernel before still runs.
    """
    programs -= torch.cuda.get_device_capability(out.device) < (9, 0)
    gated = activation != "" and is_gated(activation)
    own, cut = pieces_of(weight.in_features, along), bits.dtype == torch.float32
    beside = 512 * tiles * cdiv(2 * own, tiles) if cut else 64 * along * along * (1 + gated)  # bits, or sums of pairs
    room = planes_held(along * tiles * own * (1 + gated), programs, out.device, beside)
    held = min(room, len(weight.planes))
    room = room if weight.unit is not None and room == 8 else held
    group_kernel[(cdiv(out.shape[1], 16 * tiles), by.entries.shape[0])](
        bits, by.pairs, by.planes, by.entries, *tensors_of(weight, bias), out, **_sizes(weight, bias), SHARING=sharing,
        GATED=gated, ACT=activation, CAP=held, ROOM=room, NWK=along, RT=tiles, CUT=cut,
        AHEAD=ahead, **_launch(out.device, along * tiles, registers_of(along * tiles, programs)),
    )  # fmt: skip
