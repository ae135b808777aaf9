"""What is known of a site (one router with its experts), and how its parameters become canonical weights and back."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

ROW_ORDERS = ("rows", "interleaved", "swapped", "interleaved-swapped")


@dataclass(frozen=True)
class Stack:
    """Where one weight of all experts is stored: the name of one stacked parameter, or one name for each expert.

    transposed: an expert's matrix is stored [I, O] instead of [O, I]. A two-dimensional parameter holds its experts one after
    the other along the first dimension.
    """

    names: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class ExpertLayout:
    """How the experts of a site store their weights and biases.

    ups: the first matmul, in one part or in two (gate and up) that follow each other in the rows. up_biases: one per part,
    or empty. order: how gate and up rows stand: "rows" one after the other, gate first; "interleaved" by turns; "swapped" up
    first.
    """

    ups: tuple[Stack, ...]
    down: Stack
    up_biases: tuple[Stack, ...] = ()
    down_bias: Stack | None = None
    order: str = "rows"

    @staticmethod
    def from_dict(fields: dict) -> "ExpertLayout":
        """The inverse of `asdict`, also after a way through JSON."""

        def stack(one: dict | None) -> Stack | None:
            return None if one is None else Stack(tuple(one["names"]), one["transposed"])

        parts = {key: tuple(stack(one) for one in fields[key]) for key in ("ups", "up_biases")}
        singles = {key: stack(fields[key]) for key in ("down", "down_bias")}
        return ExpertLayout(**parts, **singles, order=fields["order"])


@dataclass(frozen=True)
class Site:
    """One router with its experts, verified: the module called with (hidden, index, weights).

    hidden, inner, out: widths of an expert's input, between its matmuls, and of its output; up_rows: rows of the first
    matmul. activation: a fused name, or "graph", then program holds it (see `program`). post: the program between an expert's
    output and its gate. parameters: all that the module holds. dtype: of its weights as found. weigh_input: the gate scales
    the expert's input instead of its output. masked: the index comes as a one-hot mask [T, A, E], all zero for a dropped
    choice. identity: ids of E and above return the input. block: the path is a block without such a module; a graph takes
    its place and holds the experts under this name. router: how it chooses, such as "softmax, topk".
    """

    path: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    out: int
    up_rows: int
    activation: str
    layout: ExpertLayout
    parameters: int
    dtype: str
    program: tuple | None = None
    post: tuple | None = None
    weigh_input: bool = False
    masked: bool = False
    identity: bool = False
    router: str = ""
    block: str = ""

    @property
    def place(self) -> str:
        """Path of the encoded experts in a transformed model."""
        return f"{self.path}.{self.block}" if self.block else self.path

    @property
    def fused(self) -> bool:
        """Whether the op `expert_ffn` computes the experts of this site, apart from identity experts."""
        return self.program is None and self.post is None and not self.weigh_input

    @property
    def weights(self) -> int:
        """Number of weights in the two stacked matrices, biases not counted."""
        return self.experts * (self.hidden * self.up_rows + self.inner * self.out)

    def as_dict(self) -> dict:
        """Plain dictionary, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict) -> "Site":
        """The inverse of `as_dict`."""
        programs = {key: None if fields[key] is None else tuple(fields[key]) for key in ("program", "post")}
        return Site(**{**fields, "layout": ExpertLayout.from_dict(fields["layout"]), **programs})


@dataclass(frozen=True)
class Refusal:
    """A module that looks like experts but was left untouched, and why; experts: how many it holds, as far as known."""

    path: str
    reason: str
    experts: int = 0


@dataclass(frozen=True)
class ExpertWeights:
    """Canonical float weights of a site: up [E, U, H], down [E, O, I], biases [E, U] and [E, O] or None; gate rows first."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite; looked at in parts, so that it takes no memory."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.detach().flatten().split(1 << 22))


def chosen(mask: Tensor) -> Tensor:
    """Expert ids [T, A] of a one-hot mask [T, A, E]; E, the padding id, where nothing is chosen."""
    mask = mask.flatten(0, -3)
    return torch.where((mask != 0).any(-1), mask.long().argmax(-1), mask.shape[-1])


def read_stack(module: nn.Module, stack: Stack, experts: int, matrix: bool = True) -> Tensor:
    """A weight of all experts, [E, O, I], or a bias, [E, O]; a view of the parameter where the layout allows."""
    tensors = [module.get_parameter(name).detach() for name in stack.names]
    if len(tensors) > 1:
        tensor = torch.stack(tensors)
    elif matrix:
        tensor = tensors[0].unflatten(0, (experts, -1)) if tensors[0].dim() == 2 else tensors[0]
    else:
        tensor = tensors[0].flatten(1)
    return (tensor.transpose(1, 2) if stack.transposed else tensor)[:experts]


def row_order(order: str, rows: int) -> Tensor | None:
    """Row numbers that put gate rows first, then up rows, int64 [rows]; None where they stand so already."""
    if order == "rows":
        return None
    numbers = torch.arange(rows)
    first, second = numbers.chunk(2) if order == "swapped" else (numbers[0::2], numbers[1::2])
    return torch.cat([first, second] if order == "interleaved" else [second, first])


def gather(experts: nn.Module, layout: ExpertLayout, count: int) -> ExpertWeights:
    """Read the weights of `count` experts in canonical form; views of the parameters where the layout allows."""

    def join(stacks: tuple[Stack, ...], matrix: bool) -> Tensor | None:
        if not stacks:
            return None
        parts = [read_stack(experts, stack, count, matrix) for stack in stacks]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        numbers = row_order(layout.order, joined.shape[1])
        return joined if numbers is None else joined[:, numbers.to(joined.device)]

    return ExpertWeights(
        join(layout.ups, True),
        read_stack(experts, layout.down, count),
        join(layout.up_biases, False),
        None if layout.down_bias is None else read_stack(experts, layout.down_bias, count, False),
    )


def scatter(weights: ExpertWeights, experts: nn.Module, layout: ExpertLayout) -> None:
    """Write canonical weights back into a module's own parameters, in place; biases are left as they are."""
    count, up = weights.up.shape[0], weights.up
    numbers = row_order(layout.order, up.shape[1])
    if numbers is not None:
        up = torch.empty_like(up).index_copy_(1, numbers.to(up.device), up)
    start = 0
    for stack in layout.ups:
        rows = read_stack(experts, stack, count).shape[1]
        _write_stack(experts, stack, up[:, start : start + rows])
        start += rows
    _write_stack(experts, layout.down, weights.down)


def _write_stack(module: nn.Module, stack: Stack, weight: Tensor) -> None:
    weight = weight.transpose(1, 2) if stack.transposed else weight
    with torch.no_grad():
        if len(stack.names) == 1:
            parameter = module.get_parameter(stack.names[0])
            whole = parameter if parameter.dim() == weight.dim() else parameter.unflatten(0, (weight.shape[0], -1))
            whole[: weight.shape[0]].copy_(weight)
        else:
            for name, part in zip(stack.names, weight, strict=True):
                module.get_parameter(name).copy_(part)
