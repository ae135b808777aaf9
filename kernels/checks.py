"""What ops demand of the tensors they are given: a check raises a ValueError that says what was found and what is allowed."""

from torch import Tensor

from dpamoe.kernels.layout import EncodedWeight, groups_of
from dpamoe.kernels.reference import ACTIVATIONS


def check_pairs(expert_ids: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != expert_ids.shape or expert_ids.dim() != 2:
            found = f"{name} {list(tensor.shape)} and expert_ids {list(expert_ids.shape)}"
            raise ValueError(f"{found} must both be [tokens, active experts]: pass the router's outputs as they are")


def check_chunks(chunks: Tensor, planes: list[Tensor]) -> None:
    if chunks.device.type == "cpu" and chunks.numel() and not 0 <= int(chunks.min()) <= int(chunks.max()) <= len(planes):
        raise ValueError(
            f"chunks run from {int(chunks.min())} to {int(chunks.max())}, the weight holds {len(planes)} planes: "
            f"use 0 to {len(planes)}, or load more planes"
        )


def check_rows(x: Tensor, expert_ids: Tensor, weight: EncodedWeight) -> None:
    if x.shape[0] != expert_ids.shape[0] or (x.dim() == 3 and x.shape[1] != expert_ids.shape[1]):
        raise ValueError(f"x {list(x.shape)} has other rows than expert_ids {list(expert_ids.shape)}")
    check_planes(weight)
    bytes_needed = -(-x.shape[-1] // 8)
    if weight.planes[0].shape[-1] != bytes_needed:
        raise ValueError(
            f"x has {x.shape[-1]} features, which need planes of {bytes_needed} bytes a row; "
            f"these have {weight.planes[0].shape[-1]}: the weight was encoded for another input"
        )


def check_planes(weight: EncodedWeight, name: str = "weight") -> None:
    if not weight.planes or weight.offset.dim() != 3:
        found = f"{len(weight.planes)} planes and offsets {list(weight.offset.shape)}"
        raise ValueError(f"the {name} has {found}: it needs 1 plane or more, and offsets [experts, rows, groups]")


def check_weight(weight: EncodedWeight, bias: Tensor | None, name: str = "weight") -> None:
    check_planes(weight, name)
    experts, rows, groups = weight.offset.shape
    if weight.group_size != -1 and weight.group_size < 1:
        raise ValueError(f"group_size is {weight.group_size}: pass the one the {name} was encoded with, 1 or more, or -1")
    width, groups_needed = -(-weight.in_features // 8), groups_of(weight.in_features, weight.group_size)
    if weight.planes[0].shape != (experts, rows, width) or groups != groups_needed:
        raise ValueError(
            f"the {name} has planes {list(weight.planes[0].shape)} and offsets {list(weight.offset.shape)}; "
            f"{weight.in_features} features in groups of {weight.group_size} need planes [{experts}, {rows}, {width}] and "
            f"offsets [{experts}, {rows}, {groups_needed}]: it was encoded for other features or groups"
        )
    if bias is not None and bias.shape != (experts, rows):
        raise ValueError(f"the bias of the {name} is {list(bias.shape)}: it must be [{experts}, {rows}], a number for each row")


def check_block(up: EncodedWeight, up_bias: Tensor | None, down: EncodedWeight, down_bias: Tensor | None) -> None:
    check_weight(up, up_bias, "first weight of the block")
    check_weight(down, down_bias, "second weight of the block")
    if up.offset.shape[0] != down.offset.shape[0]:
        raise ValueError(
            f"the first weight of the block has {up.offset.shape[0]} experts, the second {down.offset.shape[0]}: "
            "pass two weights of the same experts"
        )
    if (up.unit is None) != (down.unit is None):
        raise ValueError("one weight of the block has tied scales and the other has not: encode both with one scale mode")


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not fused: use one of {', '.join(ACTIVATIONS)}, or two expert_matmul")


def check_table(gates: Tensor, expert_ids: Tensor, residuals: Tensor, k_min: int) -> None:
    check_pairs(expert_ids, gates=gates)
    if residuals.dim() != 2 or not 0 <= k_min < residuals.shape[1]:
        raise ValueError(
            f"residuals {list(residuals.shape)} must be [experts, k_max + 1], column k the error with k planes, "
            f"and k_min ({k_min}) one of its columns"
        )


def check_budget(budget: Tensor, tokens: int) -> None:
    if budget.dim() > 1 or (budget.dim() == 1 and budget.shape[0] != tokens):
        raise ValueError(f"budget {list(budget.shape)} must be 0-d or hold one number for each of {tokens} tokens")


def check_experts(table: Tensor, experts: int, name: str) -> None:
    if table.dim() != 2 or table.shape[0] != experts:
        raise ValueError(f"{name} {list(table.shape)} must have one row for each of {experts} experts")


def check_thresholds(gates: Tensor, expert_ids: Tensor, thresholds: Tensor, k_min: int) -> None:
    check_pairs(expert_ids, gates=gates)
    if thresholds.dim() != 2:
        raise ValueError(f"thresholds {list(thresholds.shape)} must be [experts, planes]: pass one row for each expert")
    if not 0 <= k_min <= thresholds.shape[1]:
        raise ValueError(
            f"k_min is {k_min}, thresholds hand out 0 to {thresholds.shape[1]} planes: pass how many every expert gets at "
            "least, or 0"
        )


def check_spent(spent: Tensor | None, numbers: int) -> None:
    if spent is not None and (spent.shape != (numbers,) or not spent.is_contiguous()):
        kind = "" if spent.is_contiguous() else " with gaps"
        raise ValueError(
            f"spent {list(spent.shape)}{kind} must be [{numbers}] without gaps: one count for each number of planes from 0 to "
            f"{numbers - 1}"
        )
