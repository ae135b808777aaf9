"""What ops demand of the tensors they are given: a check raises a ValueError that says what was found and what is allowed."""

from torch import Tensor

from dpamoe.kernels.layout import EncodedWeight
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
    bytes_needed = -(-x.shape[-1] // 8)
    if weight.planes[0].shape[-1] != bytes_needed:
        raise ValueError(
            f"x has {x.shape[-1]} features, which need planes of {bytes_needed} bytes a row; "
            f"these have {weight.planes[0].shape[-1]}: the weight was encoded for another input"
        )


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
