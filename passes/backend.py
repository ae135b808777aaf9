"""`torch.compile(model, backend="dpamoe")`: fuse what only we know how to fuse, then hand the graph to Inductor."""

import copy

import torch
from torch import Tensor, fx

import dpamoe.kernels.ops  # noqa: F401  registers torch.ops.dpamoe
from dpamoe.passes.fuse import drop_widening_casts, fuse_allocation


def compile_backend(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: dict | None = None):
    """Compile one Dynamo graph of a transformed model.

    The allocator is fused into the expert computation and lossless casts in front of the ops are dropped, on a copy of the
    graph; Inductor does the rest. options: settings for Inductor, by its own names. Raises ValueError for a graph that
    computes routed experts which are not encoded: call `dpamoe.transform` first.
    """
    from torch._inductor.compile_fx import compile_fx

    if not any(node.op == "call_function" and "dpamoe" in str(node.target) for node in gm.graph.nodes):
        _refuse_plain_experts(gm)
        return compile_fx(gm, example_inputs, config_patches=options)
    fused = fx.GraphModule(gm, copy.deepcopy(gm.graph), class_name=type(gm).__name__)
    drop_widening_casts(fused)
    fuse_allocation(fused)
    return compile_fx(fused, example_inputs, config_patches=options)


def _refuse_plain_experts(gm: fx.GraphModule) -> None:
    """ValueError if a graph without our ops reads stacked expert weights: the model was not transformed."""
    names = []
    for node in gm.graph.nodes:
        held = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(held, torch.nn.Parameter) and held.dim() == 3:
            source = getattr(node.meta.get("grapharg"), "source", None)
            names.append(node.name if source is None else source.name if isinstance(source.name, str) else source.name())
    if len(names) > 1:
        raise ValueError(
            f"the graph reads stacked weights that are not encoded ({', '.join(names[:2])}, …): call dpamoe.transform(model) "
            "before torch.compile, so that its experts are found and verified"
        )
