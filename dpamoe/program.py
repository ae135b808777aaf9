"""A pointwise computation as a short list of aten calls: kept in a checkpoint as JSON, run as an FX graph.

Each step is {"op": "aten.silu.default", "args": […], "kwargs": {…}}; {"step": n} stands for the result of step n, step 0 for
the input [N, U]; {"parameter": "name"} for a parameter of the experts module; {"expert": true} for the ids of the experts
whose rows these are, int64 [N] or 0-d; {"dtype": "float32"} for a dtype. The last step is the result [N, I].
"""

import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx, nn

from dpamoe.kernels.reference import ACTIVATIONS
from dpamoe.sites import Site

EXPERT = "expert"  # the second input of a program


def from_graph(graph: fx.Graph) -> tuple[dict, ...]:
    """The steps of a graph: placeholders `hidden` and, if it reads ids, `expert`; parameters as get_attr.

    Raises ValueError for arguments that are not plain.
    """
    numbers: dict[fx.Node, int] = {}
    steps: list[dict] = []

    def plain(value):
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return {"parameter": value.target}
            return {"step": numbers[value]} if value in numbers else {EXPERT: True}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"an activation with an argument of type {type(value).__name__} cannot be stored")

    for node in graph.nodes:
        if node.op == "placeholder" and node.target != EXPERT:
            numbers[node] = 0
        elif node.op == "call_function":
            name = "getitem" if node.target is operator.getitem else str(node.target)
            steps.append({"op": name, "args": plain(node.args), "kwargs": {k: plain(v) for k, v in node.kwargs.items()}})
            numbers[node] = len(steps)
    return tuple(steps)


def parameters_of(steps: tuple[dict, ...] | None) -> list[str]:
    """Names of the parameters that the steps read, each once, in order."""
    return list(dict.fromkeys(stand["parameter"] for stand in _stands(steps) if "parameter" in stand))


def by_expert(steps: tuple[dict, ...] | None) -> bool:
    """Whether the steps read which experts the rows belong to."""
    return any(EXPERT in stand for stand in _stands(steps))


def _stands(steps: tuple[dict, ...] | None) -> Iterator[dict]:
    """Every argument that stands for something else."""
    left = [[step["args"], list(step["kwargs"].values())] for step in reversed(steps or ())]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list | tuple):
            left.extend(reversed(value))


def to_module(steps: tuple[dict, ...], parameters: dict[str, Tensor] | None = None) -> fx.GraphModule:
    """The steps as a module from [N, U] to [N, I], and ids of experts if they read them; parameters by name.

    Raises ValueError for an op that this torch does not have.
    """
    graph, held = fx.Graph(), {}
    nodes = [graph.placeholder("hidden")]
    expert = graph.placeholder(EXPERT, default_value=None)

    def real(value):
        if isinstance(value, dict) and "parameter" in value:
            place = value["parameter"].replace(".", "_")
            held[place] = parameters[value["parameter"]]
            return graph.get_attr(place)
        if isinstance(value, dict) and EXPERT in value:
            return expert
        if isinstance(value, dict):
            return nodes[value["step"]] if "step" in value else getattr(torch, value["dtype"])
        return [real(item) for item in value] if isinstance(value, list | tuple) else value

    for step in steps:
        kwargs = {key: real(item) for key, item in step["kwargs"].items()}
        nodes.append(graph.call_function(_target(step["op"]), tuple(real(step["args"])), kwargs))
    graph.output(nodes[-1])
    return fx.GraphModule(held, graph, class_name="Pointwise")


def run(function: Callable, rows: Tensor, expert: Tensor | int | None) -> Tensor:
    """What a fused activation or a program makes of rows [N, U].

    expert: whose rows they are, ids [N] or one for all; may be None for what reads no ids.
    """
    if not isinstance(function, fx.GraphModule):
        return function(rows)
    return function(rows, torch.tensor(expert, device=rows.device) if isinstance(expert, int) else expert)


def activation(site: Site, parameters: dict[str, Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """What stands between the matmuls of a site, from [N, U] to [N, I], for `run`: a fused activation or its program."""
    return ACTIVATIONS[site.activation] if site.program is None else to_module(site.program, parameters)


def after(site: Site, parameters: dict[str, Tensor] | None = None) -> Callable[[Tensor], Tensor] | None:
    """What a site does to an expert's output before its gate, from [N, O] to [N, O], for `run`; None for nothing."""
    return None if site.post is None else to_module(site.post, parameters)


def own_parameters(site: Site, experts: nn.Module) -> dict[str, Tensor]:
    """The parameters of an experts module that its programs read, by name."""
    names = parameters_of(site.program) + parameters_of(site.post)
    return {name: experts.get_parameter(name).detach() for name in names}


def _target(name: str):
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if namespace != "aten" or not hasattr(torch.ops.aten, packet):
        raise ValueError(f"the activation uses {name}, which torch {torch.__version__} does not have")
    return getattr(getattr(torch.ops.aten, packet), overload)
