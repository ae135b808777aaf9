"""Verify by value: a candidate becomes a site only if its own module equals the recovered experts, for every expert."""

import copy
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from dpamoe.passes.experts import Body, Candidate
from dpamoe.passes.function import TOLERANCE, Function, recover, routed_sum
from dpamoe.passes.record import Call, Recording, value
from dpamoe.passes.router import router_kind
from dpamoe.sites import ExpertWeights, Refusal, Site, gather

THE_MODEL = "the model itself"
SCALES = (1.0, 30.0, 1000.0)  # inputs are also tried scaled up, so that clamps and soft caps show


@dataclass(frozen=True)
class Boundary:
    """A module call with (hidden, index, weights) that holds all matmuls of a candidate.

    hidden [..., H]; index [T, A], or a one-hot mask [T, A, E] where masked; weights [T, A]; router: how they were chosen.
    """

    path: str
    hidden: Tensor
    index: Tensor
    weights: Tensor
    masked: bool
    router: str

    @property
    def top_k(self) -> int:
        """Choices per token."""
        return self.index.shape[-2 if self.masked else -1]


def boundary(recording: Recording, candidate: Candidate) -> Boundary | str:
    """The deepest module that runs the experts and takes hidden [T, H], index [T, A], weights [T, A]; or why none does."""
    around = sorted(_calls_around(recording, candidate.bodies[0]), key=lambda call: call.stop - call.start)
    for call in around:
        found = _boundary(recording, call, candidate.ups[0].experts)
        if found is None:
            continue
        if not call.path:
            return "it cannot be replaced inside itself: pass a module that holds it"
        if all(any(call.path == c.path for c in _calls_around(recording, body)) for body in candidate.bodies):
            return found
    inner = around[0] if around else None
    took = f": {inner.path or 'the model'} is called with ({_described(inner)})" if inner else ""
    return f"no module around its experts is called with hidden [T, H], index [T, A] and weights [T, A]{took}"


def _calls_around(recording: Recording, body: Body) -> list[Call]:
    places = [matmul.node.meta["at"] for matmul in (*body.ups, body.down)]
    return [call for call in recording.calls if call.start <= min(places) and max(places) < call.stop]


def _described(call: Call) -> str:
    def one(argument) -> str:
        held = value(argument) if isinstance(argument, fx.Node) else None
        return type(argument).__name__ if held is None else f"{str(held.dtype).removeprefix('torch.')} {list(held.shape)}"

    return ", ".join([*map(one, call.args), *(f"{name}={one(given)}" for name, given in call.kwargs.items())])


def _boundary(recording: Recording, call: Call, experts: int) -> Boundary | None:
    if call.kwargs or len(call.args) != 3 or not all(isinstance(part, fx.Node) for part in (*call.args, call.output)):
        return None
    hidden, index, weights = (value(part) for part in call.args)
    if not hidden.is_floating_point() or not weights.is_floating_point() or index.is_floating_point() or hidden.dim() < 2:
        return None
    rows = hidden.numel() // max(hidden.shape[-1], 1)
    if index.dim() == 2 and index.dtype != torch.bool and index.shape == weights.shape and index.shape[0] == rows:
        return Boundary(call.path, hidden, index, weights, False, router_kind(recording, *call.args[1:]))
    masked = index.dim() >= 3 and index.shape[-1] == experts and index.numel() == weights.numel() * experts
    if not masked or index.numel() // index[0].numel() != rows:
        return None
    return Boundary(call.path, hidden, index, weights, True, router_kind(recording, *call.args[1:]))


def owner(candidate: Candidate) -> str:
    """The module that holds all of the candidate's weights."""
    paths = [name.split(".")[:-1] for family in (*candidate.ups, candidate.down) for name in family.names]
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return ".".join(common) or THE_MODEL


def verify(
    model: nn.Module, recording: Recording, candidate: Candidate, found: Boundary, any_rows: bool = True
) -> Site | Refusal:
    """Recover layout and activation of a candidate and compare with its own module, run in fp32 on a copy.

    found: the module call around it. any_rows: the module must also agree on other numbers of tokens than the recorded one.
    """
    if any(parameter.is_meta for parameter in model.get_submodule(found.path).parameters()):
        return Refusal(found.path, "its weights are on the meta device: load them before transforming")
    try:
        function = recover(recording, candidate, found.path)
    except ValueError as error:
        return Refusal(found.path, str(error))
    return _compare(model.get_submodule(found.path), found, candidate, function, any_rows)


def _compare(module: nn.Module, found: Boundary, candidate: Candidate, function: Function, any_rows: bool) -> Site | Refusal:
    experts, layout = candidate.down.experts, function.layout
    ways = {False, True}  # whether the gate scales the input
    with torch.no_grad():
        floats = {id(p): nn.Parameter(p.detach().float(), requires_grad=False) for p in module.parameters()}
        judge = copy.deepcopy(module, floats).float().eval()  # without a second copy in the module's own type
        weights, parameters = gather(judge, layout, experts), dict(judge.named_parameters())
        parts = (weights, function.act(parameters), function.behind(parameters))
        try:
            for probe in _probes(found, experts, any_rows):
                expected = _ask(judge, found, probe, experts)
                ways = {way for way in ways if error_of(*parts, probe, expected, way) <= TOLERANCE}
            spare = _spare_experts(judge, found, candidate)
        except Exception as error:  # whatever a foreign forward may raise is the reason it is refused
            return Refusal(found.path, f"it fails when called again with other routing: {type(error).__name__}: {error}")
    if not ways:
        return Refusal(found.path, "its recovered experts do not reproduce its output")
    if isinstance(spare, str):
        return Refusal(found.path, spare)
    count = sum(parameter.numel() for parameter in module.parameters())
    dtype = str(module.get_parameter(layout.ups[0].names[0]).dtype).removeprefix("torch.")
    (up_rows, hidden), (out, inner) = weights.up.shape[1:], weights.down.shape[1:]
    return Site(
        found.path, experts, found.top_k, hidden, inner, out, up_rows, function.activation, layout, count, dtype,
        program=function.program, post=function.post, weigh_input=False not in ways, masked=found.masked, identity=spare,
        router=found.router,
    )  # fmt: skip


def _probes(call: Boundary, experts: int, any_rows: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs that together send tokens to every expert, at several scales, made of the recorded hidden states.

    As many rows as were recorded; with any_rows also one row, and one row more than recorded.
    """
    recorded = call.hidden.reshape(-1, call.hidden.shape[-1]).float()
    recorded = recorded / recorded.square().mean().sqrt().clamp_min(1e-12)
    pairs = recorded.shape[0] * call.top_k
    starts = [(recorded.shape[0], start) for start in range(0, experts, pairs)]
    probes = []
    for rows, start in starts + ([(1, 0), (recorded.shape[0] + 1, 0)] if any_rows else []):
        numbers = torch.arange(rows * call.top_k, device=recorded.device)
        hidden = recorded[torch.arange(rows, device=recorded.device) % recorded.shape[0]]
        weights = torch.linspace(0.1, 1.0, numbers.numel(), device=recorded.device).view(-1, call.top_k)
        index = ((numbers + start) % experts).view(weights.shape)
        probes += [(hidden * scale, index, weights) for scale in SCALES]
    return probes


def _ask(judge: nn.Module, call: Boundary, probe: tuple[Tensor, Tensor, Tensor], experts: int) -> Tensor | None:
    """What the module itself returns for hidden [T, H], index and weights [T, A]; None if it is no tensor of that many rows."""
    hidden, index, weights = probe
    index = index.to(call.index.dtype)
    if call.masked:
        index = nn.functional.one_hot(index.long(), experts).to(call.index.dtype)
    tokens = hidden.view(*(1,) * (call.hidden.dim() - 2), *hidden.shape)
    result = judge(tokens, index, weights)
    same = isinstance(result, Tensor) and result.shape[:-1] == tokens.shape[:-1]
    return result.flatten(0, -2) if same else None


def _spare_experts(judge: nn.Module, call: Boundary, candidate: Candidate) -> bool | str:
    """Whether ids beyond the last expert that has weights return the input; a reason if they do something else."""
    experts, named = candidate.down.experts, max(family.experts for family in candidate.ups)
    if named == experts:
        return False
    hidden, _, weights = _probes(call, experts, False)[0]
    index = (experts + torch.arange(weights.numel(), device=weights.device) % (named - experts)).view(weights.shape)
    found = _ask(judge, call, (hidden, index, weights), named)
    expected = hidden * weights.sum(-1, keepdim=True)
    if found is None or float((found - expected).abs().max()) > TOLERANCE * float(expected.abs().max()):
        return f"ids {experts} to {named - 1} have no weights and do not return their input"
    return True


def error_of(weights: ExpertWeights, act, post, probe: tuple, expected: Tensor | None, weigh_input: bool) -> float:
    """Largest difference from what is expected, relative to its largest entry; infinite where nothing can be told."""
    result = routed_sum(weights, act, post, *probe, weigh_input)
    if expected is None or expected.shape != result.shape:
        return math.inf
    size = float(expected.abs().max())
    error = float((result - expected).abs().max()) / size if size > 0 else math.nan
    return error if math.isfinite(error) else math.inf
