"""What one expert computes, recovered from a recording, and the sum over the chosen experts in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpamoe import program
from dpamoe.kernels.reference import ACTIVATIONS
from dpamoe.passes import activation
from dpamoe.passes.experts import Body, Candidate, Family
from dpamoe.passes.record import Recording, value
from dpamoe.sites import ExpertLayout, ExpertWeights, Stack, gather

TOLERANCE = 2e-4  # relative, fp32: far above reordered sums (1e-6), far below any other function
RECORDED = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # replay of a recorded activation, by its dtype


@dataclass(frozen=True)
class Function:
    """What one expert computes, as recovered: post(down(activation(up(x))))."""

    activation: str
    layout: ExpertLayout
    program: tuple | None
    post: tuple | None

    def act(self, parameters: dict[str, Tensor]):
        """Between the matmuls, for `program.run`."""
        return ACTIVATIONS[self.activation] if self.program is None else program.to_module(self.program, parameters)

    def behind(self, parameters: dict[str, Tensor]):
        """Behind the last matmul, for `program.run`."""
        return (lambda rows: rows) if self.post is None else program.to_module(self.post, parameters)


def recover(recording: Recording, candidate: Candidate, prefix: str) -> Function:
    """Recover the function of a candidate's experts, names relative to `prefix`. Raises ValueError if it cannot."""
    body = max(candidate.bodies, key=lambda body: value(body.down.data).numel())
    between = activation.extract(body, prefix)
    behind = activation.extract_post(recording, body, prefix)
    if not activation.reproduces(between, body, RECORDED.get(value(body.down.data).dtype, 5e-2)):
        raise ValueError("what stands between its matmuls could not be replayed")
    rows = sum(activation.rows_of(up.out).shape[1] for up in body.ups)
    kind, order, steps = activation.classify(between, rows)
    post = None if behind is None else program.from_graph(behind.graph)
    return Function(kind, layout_of(body, prefix, order), steps, post)


def layout_of(body: Body, path: str, order: str) -> ExpertLayout:
    """The parameters of a candidate's experts by their names below `path`."""

    def stack(family: Family, transposed: bool = False) -> Stack:
        return Stack(tuple(name.removeprefix(path + ".") for name in family.names), transposed)

    biases = [up.bias for up in body.ups]
    return ExpertLayout(
        ups=tuple(stack(up.family, up.transposed) for up in body.ups),
        down=stack(body.down.family, body.down.transposed),
        up_biases=tuple(stack(bias) for bias in biases) if all(biases) else (),
        down_bias=None if body.down.bias is None else stack(body.down.bias),
        order=order,
    )


def each_choice(weights: ExpertWeights, act, post, inputs: Tensor, index: Tensor) -> Tensor:
    """f_(index[t, a])(inputs[t, a]), no gates: inputs [T, A, H], index [T, A]; fp32 [T, A, O], zero for ids without weights."""
    result = inputs.new_zeros(*index.shape, weights.down.shape[1], dtype=torch.float32)
    for expert in range(weights.down.shape[0]):
        place = (index == expert).nonzero(as_tuple=True)
        if not place[0].numel():
            continue
        up_bias, down_bias = (None if b is None else b[expert].float() for b in (weights.up_bias, weights.down_bias))
        inner = program.run(act, F.linear(inputs[place].float(), weights.up[expert].float(), up_bias), expert)
        result[place] = program.run(post, F.linear(inner, weights.down[expert].float(), down_bias), expert)
    return result


def routed_sum(
    weights: ExpertWeights, act, post, hidden: Tensor, index: Tensor, gates: Tensor, weigh_input: bool
) -> Tensor:  # fmt: skip
    """Sum over a of gates[t, a] f(hidden[t]) or f(gates[t, a] hidden[t]); hidden [T, H], index, gates [T, A]; fp32 [T, O]."""
    wide = hidden.float()[:, None].expand(*index.shape, -1)
    gates = gates.float()[..., None]
    if weigh_input:
        return each_choice(weights, act, post, wide * gates, index).sum(1)
    return (each_choice(weights, act, post, wide, index) * gates).sum(1)


class OriginalExperts(nn.Module):
    """The float experts of a block as one module: (hidden [T, H], index [T, A], weights [T, A]) to [T, O], dtype of hidden.

    It holds no parameters of its own and reads those of `source`, the block, when it runs.
    """

    def __init__(self, source: nn.Module, function: Function, experts: int, weigh_input: bool):
        super().__init__()
        self.held, self.function, self.experts, self.weigh_input = [source], function, experts, weigh_input

    @property
    def source(self) -> nn.Module:
        """The block whose parameters these are; not a submodule."""
        return self.held[0]

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = gather(self.source, self.function.layout, self.experts)
        names = program.parameters_of(self.function.program) + program.parameters_of(self.function.post)
        parameters = {name: self.source.get_parameter(name).detach().float() for name in names}
        parts = (own, self.function.act(parameters), self.function.behind(parameters))
        return routed_sum(*parts, hidden, index, weights, self.weigh_input).to(hidden.dtype)
