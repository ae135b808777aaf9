"""Registration of the custom ops in the namespace `dpamoe`: one place where inputs are checked and fakes are given.

Letters: T tokens, A active experts per token, E experts, O out features, I in features, G groups of I, C chunks (planes).
An id outside 0 … E-1 is padding: it costs nothing and adds nothing. An encoded weight is passed as planes, scales, offset,
unit (see `layout`). On CUDA the Triton kernels run; torch code runs on the CPU, for shapes that they do not support, and for
fp32 rows while `torch.get_float32_matmul_precision()` is "highest", since the kernels multiply in fp16.
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dpamoe.kernels import allocation, grouped, paths, reference
from dpamoe.kernels.checks import (
    check_activation,
    check_block,
    check_budget,
    check_chunks,
    check_experts,
    check_pairs,
    check_rows,
    check_spent,
    check_table,
    check_thresholds,
    check_weight,
)
from dpamoe.kernels.define import define, define_counted
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.kernels.reference import is_gated

BITS = "1-bit and 8-bit products"
ALLOCATED_INSIDE = 32  # active experts up to which the decode kernel allocates by itself, in one warp


def _in_triton(x: Tensor, expert_ids: Tensor, *weights: EncodedWeight) -> bool:
    """Whether the Triton kernels compute these rows."""
    if not paths.has_triton(x.device) or not expert_ids.numel():
        return False
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return False
    from dpamoe.kernels.triton_experts import supported  # Triton is not everywhere

    return all(supported(weight) for weight in weights)


def _many_tokens(x: Tensor, weights: tuple[EncodedWeight, ...], name: str, arguments: tuple, *guesses) -> Tensor:
    """Call `prefill_ffn` or `prefill_matmul`: by the kernels that this card has of its own, else by those for any card.

    guesses: arguments that only the former take.
    """
    from dpamoe.kernels import triton_experts

    portable = getattr(triton_experts, name)
    if not paths.has_own_prefill(x.device):
        return portable(*arguments)
    from dpamoe.kernels import hopper_experts

    if not hopper_experts.usable(*weights):
        return portable(*arguments)
    own = partial(getattr(hopper_experts, name), *arguments, *guesses)
    return _or_else(own, partial(portable, *arguments), _kernels("Hopper", x.device, weights))


def _or_else(own: Callable[[], Tensor], portable: Callable[[], Tensor], kernels: tuple) -> Tensor:
    """What kernels for certain cards give, or, where they do not compile or do not fit, those for any card."""
    from triton.errors import TritonError

    if kernels not in _broken:
        try:
            return own()
        except (TritonError, RuntimeError) as error:
            if not isinstance(error, TritonError) and "PassManager" not in str(error):
                raise
            _broken.append(kernels)
            warnings.warn(f"kernels for {kernels[0]} cannot be made, those for any card run instead: {error}", stacklevel=2)
    return portable()


def _kernels(name: str, device: torch.device, weights: tuple[EncodedWeight, ...]) -> tuple:
    """What an entry of `_broken` names: kernels, device, shapes and types of scales."""
    return name, device, *((tuple(weight.offset.shape), weight.offset.dtype) for weight in weights)


_broken: list[tuple] = []  # kernels that this version of Triton does not make, on which device, for which weights


def _path(x: Tensor, expert_ids: Tensor, weight: EncodedWeight, inner: int, gated: bool, bits: bool = False) -> str:
    """Which of `paths.PATHS`; the choice never changes k. bits: whether there are 1-bit products for this call."""
    mode = "shared" if weight.unit is None else "tied"
    shape = paths.Shape(weight.offset.shape[0], expert_ids.shape[1], weight.in_features, inner, weight.group_size, gated, mode)
    return paths.choose(shape, expert_ids.shape[0], x.device, bits)


def _allocate(
    spent: Tensor | None, gates: Tensor, expert_ids: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor, k_min: int,
    convex: bool = False,
) -> Tensor:  # fmt: skip
    """Planes for every selected expert: minimise sum of gate^2 * residuals[expert, k] within the token's budget, exactly.

    gates float [T, A]; expert_ids int [T, A]; residuals fp32 [E, C + 1] (column k: error with k planes, inf where k is not
    allowed); budget fp32 0-d or [T], average planes per expert; k_max int 0-d; k_min planes at least. Returns int32 [T, A];
    each row sums to floor(A * budget + 1/2), clamped to A k_min … A k_max, or to the next smaller sum that allowed k add up
    to. Ties go to the lower slot. convex: the caller's word that every row falls by less and less from k_min on, which saves
    looking; False is always right. `allocate_counted` takes spent, too, and does what `count` does. Source: DPA-MoE, section
    3.3.
    """
    check_table(gates, expert_ids, residuals, k_min)
    check_spent(spent, residuals.shape[1])
    check_budget(budget, expert_ids.shape[0])
    if paths.has_triton(gates.device):
        from dpamoe.kernels import triton_allocate

        with torch.cuda.device_of(gates):
            return triton_allocate.allocate(gates, expert_ids, residuals, budget, k_max, k_min, convex, spent)
    return _counted(allocation.allocate(gates, expert_ids, residuals, budget, k_max, k_min, convex), spent)


def _allocate_dispatch(
    spent: Tensor | None, gates: Tensor, expert_ids: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor, k_min: int,
    convex: bool = False,
) -> Tensor:  # fmt: skip
    """Planes for every distinct expert of the batch: minimise sum over e of (sum of gate^2) * residuals[e, k_e].

    Shapes as in `allocate`, budget 0-d: average planes per distinct expert. Returns int32 [T, A], one k per expert.
    `allocate_dispatch_counted` takes spent, too, and does what `count` does.
    """
    check_table(gates, expert_ids, residuals, k_min)
    check_spent(spent, residuals.shape[1])
    if budget.dim():
        raise ValueError(f"budget {list(budget.shape)} must be 0-d: a dispatch shares one budget")
    if paths.has_triton(gates.device):
        from dpamoe.kernels import triton_allocate

        with torch.cuda.device_of(gates):
            return triton_allocate.allocate_dispatch(gates, expert_ids, residuals, budget, k_max, k_min, convex, spent)
    return _counted(allocation.allocate_dispatch(gates, expert_ids, residuals, budget, k_max, k_min, convex), spent)


def _allocate_threshold(
    spent: Tensor | None, gates: Tensor, expert_ids: Tensor, thresholds: Tensor, k_max: Tensor, k_min: int = 0
) -> Tensor:
    """Planes for every selected expert, which decides alone: how many of its thresholds gate^2 is above, k_max at most.

    gates float [T, A]; expert_ids int [T, A]; thresholds fp32 [E, C], rising along a row, -1 for a plane that every expert
    gets; k_max int 0-d. Returns int32 [T, A]; no sum is kept to. Equal thresholds hand out several planes at once. k_min: the
    caller's word that every expert gets so many, which kernels may then ask for before they know k; 0 is always right, and more
    than is so changes no result.
    `allocate_threshold_counted` takes spent, too, and does what `count` does.
    """
    check_thresholds(gates, expert_ids, thresholds, k_min)
    check_spent(spent, thresholds.shape[1] + 1)
    if paths.has_triton(gates.device):
        from dpamoe.kernels import triton_threshold

        with torch.cuda.device_of(gates):
            return triton_threshold.allocate_threshold(gates, expert_ids, thresholds, k_max, spent)
    return _counted(reference.allocate_threshold(gates, expert_ids, thresholds, k_max), spent)


def _counted(chunks: Tensor, spent: Tensor | None) -> Tensor:
    """The planes, after `count` of them where that is asked for."""
    if spent is not None:
        allocation.count(chunks, spent)
    return chunks


def _count(chunks: Tensor, spent: Tensor) -> None:
    """Add to spent, int64 [C + 1], how many of the pairs, int32 [T, A], have each number of planes; padding has 0."""
    if paths.has_triton(chunks.device):
        from dpamoe.kernels import triton_threshold

        with torch.cuda.device_of(chunks):
            return triton_threshold.count(chunks, spent)
    return allocation.count(chunks, spent)


def _allocate_threshold_fake(gates, expert_ids, thresholds, k_max, k_min=0):
    return expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)


def _allocate_fake(gates, expert_ids, residuals, budget, k_max, k_min, convex=False):
    return expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)


def _expert_matmul(
    x: Tensor, expert_ids: Tensor, chunks: Tensor,
    planes: list[Tensor], scales: list[Tensor], offset: Tensor, unit: Tensor | None, bias: Tensor | None, group_size: int,
) -> Tensor:  # fmt: skip
    """Rows times the first k planes of their expert's weight: out[t, a] = W_k[expert] x (+ bias[expert]).

    x float [T, I] or [T, A, I]; expert_ids int [T, A]; chunks int [T, A], k of each pair, 0 gives zeros; bias [E, O].
    On a GPU, where nobody waits to look at them, more planes than there are mean all, fewer than 0 none; on a CPU they raise.
    Returns [T, A, O] in the dtype of x, accumulated in fp32. Raises ValueError on shapes that do not fit.
    """
    weight = EncodedWeight(planes, scales, offset, unit, x.shape[-1], group_size)
    check_pairs(expert_ids, chunks=chunks)
    check_rows(x, expert_ids, weight)
    check_weight(weight, bias)
    check_chunks(chunks, planes)
    if _in_triton(x, expert_ids, weight):
        from dpamoe.kernels import triton_experts

        few = _path(x, expert_ids, weight, offset.shape[1], False) == "decode"
        arguments = (_with_unit_stride(x), expert_ids, chunks, weight, bias)
        with torch.cuda.device_of(x):
            if few:
                return triton_experts.decode_matmul(*arguments)
            return _many_tokens(x, (weight,), "prefill_matmul", arguments)
    return grouped.expert_matmul(x, expert_ids, chunks, weight, bias)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _expert_matmul_fake(x, expert_ids, chunks, planes, scales, offset, unit, bias, group_size):
    return x.new_empty(*expert_ids.shape, offset.shape[1])


def _expert_ffn(
    x: Tensor, expert_ids: Tensor, gates: Tensor, chunks: Tensor,
    up_planes: list[Tensor], up_scales: list[Tensor], up_offset: Tensor, up_unit: Tensor | None, up_bias: Tensor | None,
    down_planes: list[Tensor], down_scales: list[Tensor], down_offset: Tensor, down_unit: Tensor | None,
    down_bias: Tensor | None, activation: str, group_size: int, one_k: bool = False,
) -> Tensor:  # fmt: skip
    """Whole expert block: y[t] = sum over a of gates[t, a] * down_k(activation(up_k(x[t]))), k = chunks[t, a].

    x float [T, H]; gates float [T, A]; biases [E, O]; activation a name in `reference.ACTIVATIONS`; chunks out of range as in
    `expert_matmul`. Returns [T, H_out] in the dtype of x, accumulated in fp32, always in one order. one_k: the caller's guess
    that all pairs of an expert have the same k, by which kernels may choose how they cut their work; a wrong guess costs time
    alone. Raises ValueError on shapes that do not fit.
    """
    both = (
        up_planes, up_scales, up_offset, up_unit, up_bias, down_planes, down_scales, down_offset, down_unit, down_bias,
        activation, group_size,
    )  # fmt: skip
    check_pairs(expert_ids, gates=gates, chunks=chunks)
    up, down = _opened(x, expert_ids, *both)
    check_chunks(chunks, up.planes)
    block = (up, up_bias, down, down_bias, activation)
    output = _ffn_in_triton(x, expert_ids, gates, chunks, block, one_k)
    return grouped.expert_ffn(x, expert_ids, gates, chunks, *block) if output is None else output


def _opened(x, expert_ids, *both) -> tuple[EncodedWeight, EncodedWeight]:
    """Both weights of an expert block, checked; planes that only one of them has are left out."""
    up_planes, up_scales, up_offset, up_unit, up_bias, down_planes, *others, down_bias, activation, group_size = both
    check_activation(activation)
    if x.dim() != 2:
        raise ValueError(f"x {list(x.shape)} must be [tokens, features]: flatten it, as routers do")
    width = up_offset.shape[1] // (2 if is_gated(activation) else 1)
    least = min(len(up_planes), len(down_planes))
    up = EncodedWeight(up_planes[:least], up_scales, up_offset, up_unit, x.shape[-1], group_size)
    down = EncodedWeight(down_planes[:least], *others, width, group_size)
    check_rows(x, expert_ids, up)
    check_block(up, up_bias, down, down_bias)
    return up, down


def _ffn_in_triton(
    x, expert_ids, gates, chunks, block: tuple, one_k: bool, source: allocation.Allocation | allocation.Thresholds | None = None
) -> Tensor | None:
    """An expert block (up, its bias, down, its bias, activation) by the Triton kernels, or None where they do not compute it.

    source: of planes to be allocated on the way, which prefill cannot do, and which writes chunks; without it chunks is read.
    """
    up, _, down, _, activation = block
    if not _in_triton(x, expert_ids, up, down):
        return None
    from dpamoe.kernels import triton_experts

    bits = _has_bits(x, expert_ids, up, down)
    path = _path(x, expert_ids, up, down.in_features, is_gated(activation), bits)
    if source is not None and path == "prefill":
        return None
    arguments = (_with_unit_stride(x), expert_ids, gates, chunks, *block)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if path == "prefill":
            return _many_tokens(x, (up, down), "prefill_ffn", arguments, one_k)
        decode = partial(triton_experts.decode_ffn, *arguments, source)
        if path == "decode":
            return decode()
        from dpamoe.kernels import bitserial_experts

        return _or_else(partial(bitserial_experts.ffn, *arguments, source), decode, _kernels(BITS, x.device, (up, down)))


def _allocated_inside(x, expert_ids, gates, both: tuple, one_k: bool, source) -> tuple[Tensor | None, Tensor]:
    """As `_ffn_in_triton` with a source of planes, and the planes spent, int32 [T, A]."""
    chunks = torch.empty(expert_ids.shape, dtype=torch.int32, device=x.device)
    up, down = _opened(x, expert_ids, *both)
    block = (up, both[4], down, both[9], both[10])
    return _ffn_in_triton(x, expert_ids, gates, chunks, block, one_k, source), chunks


def _has_bits(x: Tensor, expert_ids: Tensor, up: EncodedWeight, down: EncodedWeight) -> bool:
    """Whether the bit-serial kernels compute this expert block."""
    if not paths.has_bits(x.device) or _kernels(BITS, x.device, (up, down)) in _broken:
        return False
    from dpamoe.kernels import bitserial_experts

    return bitserial_experts.usable(expert_ids.numel(), expert_ids.shape[1], up, down)


def _expert_ffn_fake(x, expert_ids, gates, chunks, *rest):
    return x.new_empty(x.shape[0], rest[7].shape[1])


def _routed_ffn(
    spent: Tensor | None, x: Tensor, expert_ids: Tensor, gates: Tensor, residuals: Tensor, budget: Tensor, k_max: Tensor,
    up_planes: list[Tensor], up_scales: list[Tensor], up_offset: Tensor, up_unit: Tensor | None, up_bias: Tensor | None,
    down_planes: list[Tensor], down_scales: list[Tensor], down_offset: Tensor, down_unit: Tensor | None,
    down_bias: Tensor | None, activation: str, group_size: int, k_min: int, convex: bool = False,
    one_k: bool = False, seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`allocate` and `expert_ffn` in one op; arguments as there. Returns the output and k, int32 [T, A].

    seen: gates that the allocator sees, where they are others. `routed_ffn_counted` takes spent, too, and does what `count`
    does.
    """
    seen = gates if seen is None else seen
    check_experts(residuals, up_offset.shape[0], "residuals")
    both = (
        up_planes, up_scales, up_offset, up_unit, up_bias, down_planes, down_scales, down_offset, down_unit, down_bias,
        activation, group_size,
    )  # fmt: skip
    whole = residuals.shape[1] > max(len(up_planes), len(down_planes))  # a column for each
    if convex and whole and expert_ids.shape[1] <= ALLOCATED_INSIDE and paths.has_triton(x.device):
        check_pairs(expert_ids, gates=gates)
        check_table(seen, expert_ids, residuals, k_min)
        check_budget(budget, expert_ids.shape[0])
        check_spent(spent, residuals.shape[1])
        source = allocation.Allocation(seen, residuals, budget, k_max, k_min, spent)
        output, chunks = _allocated_inside(x, expert_ids, gates, both, one_k, source)
        if output is not None:
            return output, chunks
    chunks = _allocate(spent, seen, expert_ids, residuals, budget, k_max, k_min, convex)
    return _expert_ffn(x, expert_ids, gates, chunks, *both, one_k), chunks


def _routed_ffn_fake(x, expert_ids, gates, residuals, budget, k_max, *rest):
    return x.new_empty(x.shape[0], rest[7].shape[1]), expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)


def _threshold_ffn(
    spent: Tensor | None, x: Tensor, expert_ids: Tensor, gates: Tensor, thresholds: Tensor, k_max: Tensor,
    up_planes: list[Tensor], up_scales: list[Tensor], up_offset: Tensor, up_unit: Tensor | None, up_bias: Tensor | None,
    down_planes: list[Tensor], down_scales: list[Tensor], down_offset: Tensor, down_unit: Tensor | None,
    down_bias: Tensor | None, activation: str, group_size: int, k_min: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `routed_ffn`, by `allocate_threshold`."""
    check_experts(thresholds, up_offset.shape[0], "thresholds")
    both = (
        up_planes, up_scales, up_offset, up_unit, up_bias, down_planes, down_scales, down_offset, down_unit, down_bias,
        activation, group_size,
    )  # fmt: skip
    if paths.has_triton(x.device):
        check_thresholds(gates, expert_ids, thresholds, k_min)
        check_spent(spent, thresholds.shape[1] + 1)
        source = allocation.Thresholds(gates, thresholds, k_max, spent, k_min)
        output, chunks = _allocated_inside(x, expert_ids, gates, both, False, source)
        if output is not None:
            return output, chunks
    chunks = _allocate_threshold(spent, gates, expert_ids, thresholds, k_max, k_min)
    return _expert_ffn(x, expert_ids, gates, chunks, *both), chunks


def _threshold_ffn_fake(x, expert_ids, gates, thresholds, k_max, *rest):
    return x.new_empty(x.shape[0], rest[7].shape[1]), expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)


allocate, allocate_counted = define_counted("allocate", _allocate, _allocate_fake)
allocate_dispatch, allocate_dispatch_counted = define_counted("allocate_dispatch", _allocate_dispatch, _allocate_fake)
allocate_threshold, allocate_threshold_counted = define_counted(
    "allocate_threshold", _allocate_threshold, _allocate_threshold_fake
)
expert_matmul = define("expert_matmul", _expert_matmul, _expert_matmul_fake)
expert_ffn = define("expert_ffn", _expert_ffn, _expert_ffn_fake)
routed_ffn, routed_ffn_counted = define_counted("routed_ffn", _routed_ffn, _routed_ffn_fake)
threshold_ffn, threshold_ffn_counted = define_counted("threshold_ffn", _threshold_ffn, _threshold_ffn_fake)
count = define("count", _count, lambda chunks, spent: None, ("spent",))
