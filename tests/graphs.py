"""Graphs that Dynamo captures, for tests of passes: the graph and its inputs, and a graph as text."""

import copy

import torch
from torch import fx


def captured(module, *args, dynamic=False, **kwargs):
    """The Dynamo graph of a module and the inputs it is called with."""
    held = []

    def backend(gm, example_inputs):
        held.append((gm, example_inputs))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    torch.compiler.reset()
    ((gm, example_inputs),) = held
    return fx.GraphModule(gm, copy.deepcopy(gm.graph)), example_inputs


def lines(gm, most=4):
    """What a graph computes, a line a node, with as few arguments (most) as tell the story."""
    out = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            shown = ", ".join("[…]" if isinstance(a, list | tuple) else str(a) for a in node.args[:most])
            out.append(f"{node.name} = {name}({shown})")
    return out
