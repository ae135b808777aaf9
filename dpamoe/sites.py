"""What is known of a site (one router with its experts), and how its parameters become canonical weights and back."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from dpamoe.kernels.reference import is_gated


@dataclass(frozen=True)
class ExpertLayout:
    """How an experts module stores its weights.

    up, down: parameter names, [E, O, I], or [E, I, O] where transposed. up_bias, down_bias: names of [E, O] parameters.
    interleaved: gate and up rows alternate instead of standing one after the other.
    """

    up: str
    down: str
    up_bias: str | None = None
    down_bias: str | None = None
    up_transposed: bool = False
    down_transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Site:
    """One router with its experts, verified: the module called with (hidden, index, weights).

    hidden, inner, out: widths of an expert's input, between its matmuls, and of its output. parameters: all that the
    module holds. dtype: of its weights as found.
    """

    path: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    out: int
    activation: str
    layout: ExpertLayout
    parameters: int
    dtype: str

    @property
    def up_rows(self) -> int:
        """Rows of the first matmul: 2 * inner for a gated activation."""
        return self.inner * (2 if is_gated(self.activation) else 1)

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
        return Site(**{**fields, "layout": ExpertLayout(**fields["layout"])})


@dataclass(frozen=True)
class Refusal:
    """A module that looks like experts but was left untouched, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class ExpertWeights:
    """Canonical float weights of a site: up [E, U, H], down [E, O, I], biases [E, U] and [E, O] or None; gate rows first."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


def gather(experts: nn.Module, layout: ExpertLayout) -> ExpertWeights:
    """Read a module's expert weights in canonical form; views of the parameters where the layout allows."""

    def read(name: str | None, transposed: bool = False, interleaved: bool = False) -> Tensor | None:
        if name is None:
            return None
        tensor = getattr(experts, name).detach()
        tensor = tensor.transpose(1, 2) if transposed else tensor
        return torch.cat([tensor[:, 0::2], tensor[:, 1::2]], 1) if interleaved else tensor

    return ExpertWeights(
        read(layout.up, layout.up_transposed, layout.interleaved),
        read(layout.down, layout.down_transposed),
        read(layout.up_bias, interleaved=layout.interleaved),
        read(layout.down_bias),
    )


def scatter(weights: ExpertWeights, experts: nn.Module, layout: ExpertLayout) -> None:
    """Write canonical weights back into a module's own parameters, in place; biases are left as they are."""
    up = weights.up
    if layout.interleaved:
        gate, linear = up.chunk(2, dim=1)
        up = torch.stack([gate, linear], 2).flatten(1, 2)
    with torch.no_grad():
        getattr(experts, layout.up).copy_(up.transpose(1, 2) if layout.up_transposed else up)
        down = weights.down.transpose(1, 2) if layout.down_transposed else weights.down
        getattr(experts, layout.down).copy_(down)
