"""Find the routed experts of a model whose weights are not in memory: the shape of each site, not yet verified.

Parameters on the meta device are replaced for one run by real tensors of zero stride, which take no memory whatever their
shape. All router scores are equal then, so some experts are chosen and the dataflow is that of a real run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpamoe.modes import evaluating
from dpamoe.passes import activation
from dpamoe.passes.experts import Candidate, find_candidates
from dpamoe.passes.function import layout_of
from dpamoe.passes.record import Recording, record
from dpamoe.passes.verify import boundary, owner
from dpamoe.sites import ExpertLayout

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten._grouped_mm}


@dataclass(frozen=True)
class Sketch:
    """One site as far as dataflow tells: fields as in `Site`; top_k and activation are None, with a reason, where unknown."""

    path: str
    experts: int
    top_k: int | None
    hidden: int
    inner: int
    out: int
    activation: str | None
    layout: ExpertLayout
    parameters: int
    dtype: str
    reason: str
    router: str = ""

    def as_dict(self) -> dict:
        """Plain dictionary, for JSON."""
        return asdict(self)


@contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Stand-ins of zero stride for parameters and buffers on the meta device inside the block; back on meta after it."""
    swapped: list[tuple[nn.Module, str, torch.Tensor, bool]] = []
    stand_ins: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    swapped.append((module, name, tensor, is_parameter))
    try:
        for module, name, tensor, is_parameter in swapped:
            if id(tensor) not in stand_ins:
                zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                stand_ins[id(tensor)] = nn.Parameter(zeros, requires_grad=False) if is_parameter else zeros
            (module._parameters if is_parameter else module._buffers)[name] = stand_ins[id(tensor)]
        yield
    finally:
        for module, name, tensor, is_parameter in swapped:
            (module._parameters if is_parameter else module._buffers)[name] = tensor


def sketch_sites(model: nn.Module, args: tuple = (), kwargs: dict | None = None) -> list[Sketch]:
    """Run the model once without its weights and describe what looks like routed experts; the model is unchanged."""
    with without_weights(model):
        recording = record(model, args, kwargs, execute=_shortcut)
        try:
            return [_sketch(model, recording, candidate) for candidate in find_candidates(recording, model)]
        finally:
            recording.release()


class _Shortcut(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _shortcut(func, args, kwargs or {})


def run(model: nn.Module, *args, **kwargs):
    """Call the model once without its weights: the result has the right shapes, its numbers mean nothing."""
    with without_weights(model), evaluating(model), torch.no_grad(), _Shortcut():
        return model(*args, **kwargs)


def _shortcut(func, args: tuple, kwargs: dict):
    """A product with a stand-in is all zeros: its shape is enough, and no library has to take strides of zero."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    products = getattr(func, "overloadpacket", None) in PRODUCTS
    if not products or not any(tensor.dim() > 1 and tensor.numel() > 1 and not any(tensor.stride()) for tensor in tensors):
        return func(*args, **kwargs)

    if func.overloadpacket is aten._grouped_mm:  # rows [N, I] by stacks [E, I, O]; it has no shape rule for fp32
        return tensors[0].new_zeros(tensors[0].shape[0], tensors[1].shape[-1])

    def shape_only(leaf):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf

    result = func(*tree_map(shape_only, args), **tree_map(shape_only, kwargs))
    return torch.zeros(result.shape, dtype=result.dtype, device=tensors[0].device)


def _sketch(model: nn.Module, recording: Recording, candidate: Candidate) -> Sketch:
    found, body = boundary(recording, candidate), candidate.bodies[0]
    path = owner(candidate) if isinstance(found, str) else found.path
    kind, order, reason = None, "rows", found if isinstance(found, str) else ""
    try:
        between = activation.extract(body, path)
        kind, order, _ = activation.classify(between, sum(activation.rows_of(up.out).shape[1] for up in body.ups))
    except ValueError as error:
        reason = reason or str(error)
    widths = [activation.rows_of(node).shape[1] for node in (body.ups[0].data, body.down.data, body.down.out)]
    names = {name for family in (*candidate.ups, candidate.down) for name in family.names}
    parameters = [model.get_parameter(name) for name in names]
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    top_k = None if isinstance(found, str) else found.top_k
    counted = parameters if isinstance(found, str) else model.get_submodule(path).parameters()
    total = sum(parameter.numel() for parameter in counted)
    router = "" if isinstance(found, str) else found.router
    layout = layout_of(body, path, order)
    return Sketch(path, candidate.down.experts, top_k, *widths, kind, layout, total, dtype, reason, router)
