"""Find routed experts: modules called with (hidden, index, weights) that hold stacked weights, verified by value."""

import copy
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpamoe.kernels.reference import ACTIVATIONS, is_gated
from dpamoe.sites import ExpertLayout, ExpertWeights, Refusal, Site, gather

TOLERANCE = 2e-4  # relative, fp32: far above reordered sums (1e-6), far below any other function
SCALES = (1.0, 30.0, 1000.0)  # inputs are also tried scaled up, so that clamps and soft caps show


@dataclass(frozen=True)
class Findings:
    """Sites that reproduced their own output, and modules that look like sites but were refused."""

    sites: list[Site]
    refused: list[Refusal]


@dataclass
class _Call:
    hidden: Tensor
    index: Tensor
    weights: Tensor


def find_sites(model: nn.Module, args: tuple = (), kwargs: dict | None = None) -> Findings:
    """Run the model once and return its routed experts.

    A candidate is any module that directly holds stacked parameters [E, …] and is called with a float [T, H], an integer
    [T, A] and a float [T, A] tensor. It becomes a site when sum over a of weight_a * f_(index_a)(hidden), with f recovered
    from its parameters, equals what the module itself returns for inputs that reach every expert. Nothing is changed.
    Raises ValueError for stacked weights that are not finite.
    """
    calls: dict[str, object] = {}
    candidates = {path: module for path, module in model.named_modules() if _stacked(module)}
    hooks = [module.register_forward_pre_hook(_recorder(path, calls), with_kwargs=True) for path, module in candidates.items()]
    try:
        _run(model, args, kwargs or {})
    finally:
        for hook in hooks:
            hook.remove()
    places = _places(model)
    sites, refused = [], []
    for path, module in candidates.items():
        others = ", ".join(other for other in places[module] if other != path)
        shared = Refusal(path, f"it also stands at {others}: replaced here, it would still run there") if others else None
        outcome = shared or _verify(path, module, calls.get(path))
        (sites if isinstance(outcome, Site) else refused).append(outcome)
    return Findings(sites, refused)


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every path at which each module stands."""
    places: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(path)
    return places


def _run(model: nn.Module, args: tuple, kwargs: dict) -> None:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        model.train(training)


def _stacked(module: nn.Module) -> dict[str, nn.Parameter]:
    """Direct 3-D parameters that agree in their first dimension, at least two of them."""
    three = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1}
    return three if len(three) >= 2 and len({p.shape[0] for p in three.values()}) == 1 else {}


def _recorder(path: str, calls: dict[str, object]):
    def record(module, args, kwargs):
        if path in calls:
            return
        tensors = [value for value in args if isinstance(value, Tensor)]
        if kwargs or len(tensors) != len(args) or len(tensors) != 3:
            calls[path] = (
                f"it is called with {len(args)} positional and {len(kwargs)} keyword arguments, not with three tensors"
            )
            return
        hidden, index, weights = tensors
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
        floating = hidden.is_floating_point() and weights.is_floating_point() and not index.is_floating_point()
        if not floating or hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape:
            calls[path] = f"it is called with ({shapes}), not with hidden [T, H], integer index [T, A], weights [T, A]"
        elif index.dtype == torch.bool or index.shape[0] != hidden.shape[0]:
            calls[path] = f"it is called with ({shapes}): the index is not one row of expert ids per token"
        else:
            calls[path] = _Call(hidden.detach()[:256].clone(), index.detach(), weights.detach())

    return record


def _verify(path: str, module: nn.Module, call: object) -> Site | Refusal:
    """Recover layout and activation of one candidate, covering every expert; the module runs in fp32 on a copy."""
    if not path:
        return Refusal("the model itself", "it cannot be replaced inside itself: pass a module that holds it")
    if call is None:
        return Refusal(path, "the example inputs never reached it")
    if isinstance(call, str):
        return Refusal(path, call)
    parameters = _stacked(module)
    if any(parameter.is_meta for parameter in parameters.values()):
        return Refusal(path, "its weights are on the meta device: load them before transforming")
    _check_finite(path, module)
    with torch.no_grad():
        judge = copy.deepcopy(module).float().eval()
        experts, top_k = next(iter(parameters.values())).shape[0], call.index.shape[1]
        probes = _probes(call, experts)
        try:
            expected = [judge(*probe) for probe in probes]
        except Exception as error:  # whatever a foreign forward may raise is the reason it is refused
            return Refusal(path, f"it fails when called again with other routing: {type(error).__name__}: {error}")
        found = _search(judge, probes, expected)
    if found is None:
        return Refusal(path, "no known layout and activation of its weights reproduces its output")
    layout, activation = found
    weights = gather(module, layout)
    count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    dtype = str(getattr(module, layout.up).dtype).removeprefix("torch.")
    return Site(
        path,
        experts,
        top_k,
        weights.up.shape[2],
        weights.down.shape[2],
        weights.down.shape[1],
        activation,
        layout,
        count,
        dtype,
    )


def _check_finite(path: str, module: nn.Module) -> None:
    """ValueError that names the tensor: such a module never equals itself, and refusing it would pass over the damage."""
    for name, parameter in module.named_parameters(recurse=False):
        bad = [row for row, part in enumerate(parameter) if not bool(torch.isfinite(part).all())] if parameter.dim() else []
        if bad:
            shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
            raise ValueError(
                f"{path}.{name} holds NaN or infinite weights (experts {shown}): repair the checkpoint or download it again"
            )


def _probes(call: _Call, experts: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs that send tokens to every expert, at several scales: rows of the recorded hidden states."""
    top_k = call.index.shape[1]
    tokens = -(-experts // top_k) + 3
    rows = torch.arange(tokens, device=call.hidden.device) % call.hidden.shape[0]
    hidden = call.hidden[rows].float()
    hidden = hidden / hidden.square().mean().sqrt().clamp_min(1e-12)
    index = (torch.arange(tokens * top_k, device=hidden.device) % experts).view(tokens, top_k).to(call.index.dtype)
    weights = torch.linspace(0.1, 1.0, tokens * top_k, device=hidden.device).view(tokens, top_k)
    return [(hidden * scale, index, weights) for scale in SCALES]


def _search(judge: nn.Module, probes: list, expected: list[Tensor]) -> tuple[ExpertLayout, str] | None:
    """The layout and activation that come closest: gelu and its tanh form agree to within the tolerance."""
    best, found = TOLERANCE, None
    for layout in _layouts(judge, probes[0][0].shape[1]):
        weights = gather(judge, layout)
        for activation in ACTIVATIONS:
            gated = is_gated(activation)
            if weights.up.shape[1] != weights.down.shape[2] * (2 if gated else 1) or (layout.interleaved and not gated):
                continue
            worst = 0.0
            for probe, want in zip(probes, expected, strict=True):
                worst = max(worst, _error(weights, activation, probe, want))
                if worst >= best:
                    break
            else:
                best, found = worst, (layout, activation)
    return found


def _layouts(judge: nn.Module, hidden: int):
    """Every assignment of the stacked parameters to up and down that fits the input width."""
    stacked = _stacked(judge)
    flat = {name: p for name, p in judge.named_parameters(recurse=False) if p.dim() == 2}
    if len(stacked) != 2:
        return
    biases: tuple[tuple[str | None, str | None], ...] = ((None, None),)
    if flat:
        biases = tuple(itertools.permutations(flat, 2)) if len(flat) == 2 else ()
    for (up, down), up_t, down_t, interleaved, (up_bias, down_bias) in itertools.product(
        itertools.permutations(stacked, 2), (False, True), (False, True), (False, True), biases
    ):
        up_shape, down_shape = stacked[up].shape, stacked[down].shape
        rows, width = (up_shape[2], up_shape[1]) if up_t else (up_shape[1], up_shape[2])
        out = down_shape[2] if down_t else down_shape[1]
        fits = width == hidden and out == hidden
        if up_bias is not None:
            fits = fits and flat[up_bias].shape[1] == rows and flat[down_bias].shape[1] == out
        if fits:
            yield ExpertLayout(up, down, up_bias, down_bias, up_t, down_t, interleaved)


def _error(weights: ExpertWeights, activation: str, probe: tuple, expected: Tensor) -> float:
    """Largest difference from what is expected, relative to its largest entry; infinite where nothing can be told."""
    hidden, index, gates = probe
    result = torch.zeros_like(expected)
    for slot in range(index.shape[1]):
        ids = index[:, slot].long()
        inner = torch.einsum("th,tuh->tu", hidden, weights.up[ids])
        inner = inner if weights.up_bias is None else inner + weights.up_bias[ids]
        rows = torch.einsum("ti,toi->to", ACTIVATIONS[activation](inner), weights.down[ids])
        rows = rows if weights.down_bias is None else rows + weights.down_bias[ids]
        result += gates[:, slot, None] * rows
    size = float(expected.abs().max())
    error = float((result - expected).abs().max()) / size if size > 0 else math.nan
    return error if math.isfinite(error) else math.inf
