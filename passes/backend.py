"""`torch.compile(model, backend="dpamoe")`: fuse what only we know how to fuse, then hand the graph to Inductor.

A transformed model brings our ops along: the allocator is fused into the experts, and what follows a router's matmul into one
op. An untransformed one has its experts encoded in the graph, with a weight-only estimate of residuals unless a table is
given, and both weights in memory.
"""

import copy
import warnings

from torch import Tensor, fx, nn

import dpamoe.kernels.ops  # noqa: F401  registers torch.ops.dpamoe
from dpamoe.passes.fuse import drop_widening_casts, fuse_allocation, fuse_counting, is_ours
from dpamoe.passes.plain import encode_regions
from dpamoe.passes.routing import fuse_routing
from dpamoe.spec import EncodeSpec, check_budget

NO_TABLE = "no residual table: planes are allocated by gates and a weight-only estimate of each expert's error"
OWN_OPTIONS = ("budget", "residuals", "group_size")


def compile_backend(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: dict | None = None):
    """Compile one Dynamo graph.

    options for an untransformed model: "budget" (4.0), "residuals" (a safetensors file with fp32 [E, k_max + 1] under each
    experts module's path) and "group_size" (128); all others are settings for Inductor, by its own names. Raises ValueError
    for a graph that reads stacked expert weights of which none could be encoded: call `dpamoe.transform` first.
    """
    from torch._inductor.compile_fx import compile_fx

    own = {name: value for name, value in (options or {}).items() if name in OWN_OPTIONS}
    rest = {name: value for name, value in (options or {}).items() if name not in OWN_OPTIONS}
    work = _copy(gm)
    extras: list[Tensor] = []
    if not _has_ops(gm) and _stacked(gm, example_inputs):
        extras = _encode(work, example_inputs, **own)
    drop_widening_casts(work)
    fuse_allocation(work)
    fuse_routing(work)
    fuse_counting(work)
    compiled = compile_fx(work, [*example_inputs, *extras], config_patches=rest or None)
    return (lambda *args: compiled(*args, *extras)) if extras else compiled


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph to work on, with what tells Inductor which inputs stay in place: without it CUDA graphs are skipped."""
    work = fx.GraphModule(gm, copy.deepcopy(gm.graph), class_name=type(gm).__name__)
    work.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        work._param_name_to_source = gm._param_name_to_source
    for mine, theirs in zip(_inputs(work), _inputs(gm), strict=True):
        if hasattr(theirs, "_dynamo_source"):
            mine._dynamo_source = theirs._dynamo_source
    return work


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="placeholder")


def _encode(gm: fx.GraphModule, example_inputs: list, budget: float = 4.0, residuals: str | None = None, group_size: int = 128):
    from safetensors.torch import load_file

    spec = EncodeSpec(group_size=group_size)
    check_budget(budget, spec.k_min, spec.k_max)
    if residuals is None:
        warnings.warn(NO_TABLE, stacklevel=2)
    extras = encode_regions(gm, example_inputs, spec, budget, {} if residuals is None else load_file(residuals))
    if not extras:
        raise ValueError(
            "the graph reads stacked weights that could not be recognised as experts: call dpamoe.transform(model) before "
            "torch.compile, and see what it reports"
        )
    return extras


def _has_ops(gm: fx.GraphModule) -> bool:
    return any(map(is_ours, gm.graph.nodes))


def _stacked(gm: fx.GraphModule, example_inputs: list) -> bool:
    """Whether the graph reads two or more stacked weights."""
    return sum(isinstance(example, nn.Parameter) and example.dim() == 3 for example in example_inputs) > 1
