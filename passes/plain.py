"""Encode the experts of an untransformed model inside a Dynamo graph: cut each experts module out, verify, put ops in.

Dynamo notes on every node which module it came from. The nodes of a module that reads stacked weights, run alone as a function
of (hidden, index, weights), are found and verified like any other experts; what does not verify stays as it is.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from dpamoe.allocate import project
from dpamoe.encode import check_encodable, encode
from dpamoe.kernels.allocation import is_convex
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.kernels.reference import ACTIVATIONS
from dpamoe.passes.find import find_sites
from dpamoe.profile import Sample, residual_table
from dpamoe.sites import Site, gather
from dpamoe.spec import EncodeSpec

logger = logging.getLogger("dpamoe")
LOW = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass
class Region:
    """The nodes of one experts module in a Dynamo graph, what they read from outside, and the one result used outside.

    roles: which of what they read is "hidden", "index" and "weights"; None if they do not read just these and weights.
    """

    path: str
    nodes: list[fx.Node]
    outside: list[fx.Node]
    output: fx.Node
    roles: dict[str, fx.Node] | None


def encode_regions(
    gm: fx.GraphModule, example_inputs: list, spec: EncodeSpec, budget: float, residuals: dict[str, Tensor]
) -> list[Tensor]:
    """Replace verified experts by `allocate` and `expert_ffn`, in place; returns the tensors for the placeholders it appended.

    residuals: tables fp32 [E, k_max + 1] by module path; a site without one gets a weight-only estimate.
    """
    held = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), example_inputs, strict=True))
    extras: list[Tensor] = []
    for region in find_regions(gm, held):
        alone, call = _alone(region, held)
        if alone is None:
            logger.warning("left alone: %s: it is not a function of (hidden, index, weights)", region.path)
            continue
        found = find_sites(alone, call, any_rows=False)  # sizes are numbers in this graph
        site = found.sites[0] if found.sites else None
        if site is None or not site.fused or site.masked or site.identity:
            why = found.refused[0].reason if site is None and found.refused else "no single op computes its experts"
            logger.warning("left alone: %s: %s", region.path, why)
            continue
        _replace(gm, region, alone.experts, site, spec, budget, residuals.get(region.path), extras)
    gm.graph.lint()
    gm.recompile()
    return extras


def find_regions(gm: fx.GraphModule, held: dict[fx.Node, object]) -> list[Region]:
    """One region for each deepest module whose nodes read two or more stacked parameters."""
    readers: dict[str, set[fx.Node]] = {}
    for node, example in held.items():
        if isinstance(example, nn.Parameter) and example.dim() == 3 and node.users:
            paths = [_paths(user) for user in node.users]
            shared = [path for path in paths[0] if all(path in other for other in paths)]
            if shared:
                readers.setdefault(shared[-1], set()).add(node)
    regions = []
    for path, parameters in readers.items():
        nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output") and path in _paths(n)]
        inside = set(nodes)
        outside = list(dict.fromkeys(source for n in nodes for source in n.all_input_nodes if source not in inside))
        results = [n for n in nodes if any(user not in inside for user in n.users)]
        if len(parameters) > 1 and len(results) == 1:
            given = [n for n in outside if isinstance(n.meta.get("example_value"), Tensor) and not _is_weight(n, held)]
            regions.append(Region(path, nodes, outside, results[0], _roles(given)))
    return regions


def _paths(node: fx.Node) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _hint(number) -> int:
    return number.node.hint if isinstance(number, torch.SymInt) else int(number)


class _Alone(nn.Module):
    """Holds a region's graph under a name, so that it can be found as a module of its own."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.experts(hidden, index, weights)


def _alone(region: Region, held: dict[fx.Node, object]) -> tuple[_Alone | None, tuple]:
    """The region as a module of (hidden, index, weights) with its own parameters, in fp32, and random inputs for it."""
    graph, known, owner, inputs = fx.Graph(), {}, nn.Module(), {}
    if region.roles is None:
        return None, ()
    device = next(held[n].device for n in region.outside if _is_weight(n, held))
    for name, node in region.roles.items():
        known[node] = graph.placeholder(name)
        shape, dtype = [_hint(d) for d in node.meta["example_value"].shape], node.meta["example_value"].dtype
        inputs[name] = torch.zeros(shape, dtype=LOW.get(dtype, dtype), device=device)
    for position, node in enumerate(n for n in region.outside if n not in known):
        example = node.meta.get("example_value", held.get(node))
        if _is_weight(node, held):
            owner.register_parameter(f"weight_{position}", nn.Parameter(held[node].detach().float(), requires_grad=False))
            known[node] = graph.get_attr(f"weight_{position}")
        else:
            known[node] = _hint(example)  # a size: this graph is run at the recorded one only
    for node in region.nodes:
        known[node] = _copy(graph, known, node)
    graph.output(known[region.output])
    experts = max(p.shape[0] for p in owner.parameters() if p.dim() == 3)
    generator = torch.Generator(device).manual_seed(0)
    inputs["hidden"].normal_(generator=generator)
    inputs["index"].random_(experts, generator=generator)
    inputs["weights"].uniform_(0.1, 1.0, generator=generator)
    return _Alone(fx.GraphModule(owner, graph, class_name="Experts")), tuple(inputs[n] for n in ("hidden", "index", "weights"))


def _is_weight(node: fx.Node, held: dict[fx.Node, object]) -> bool:
    return node.op == "placeholder" and isinstance(held.get(node), nn.Parameter)


def _roles(nodes: list[fx.Node]) -> dict[str, fx.Node] | None:
    """Which of three tensors is hidden [T, H], index [T, A] and weights [T, A]; None if they are not these."""
    floats = [n for n in nodes if n.meta["example_value"].is_floating_point()]
    others = [n for n in nodes if n not in floats]
    if len(floats) != 2 or len(others) != 1 or any(n.meta["example_value"].dim() != 2 for n in nodes):
        return None
    same = [n for n in floats if n.meta["example_value"].shape == others[0].meta["example_value"].shape]
    if len(same) != 1:
        return None
    return {"hidden": next(n for n in floats if n is not same[0]), "index": others[0], "weights": same[0]}


def _copy(graph: fx.Graph, known: dict, node: fx.Node):
    """Copy a node with sizes put in as numbers and low float dtypes widened to fp32."""

    def plain(argument):
        if isinstance(argument, fx.Node):
            return known[argument]
        return LOW.get(argument, argument) if isinstance(argument, torch.dtype) else argument

    if isinstance(node.meta.get("example_value"), torch.SymInt):
        return _hint(node.meta["example_value"])
    args, kwargs = (fx.node.map_aggregate(part, plain) for part in (node.args, node.kwargs))
    return graph.create_node(node.op, node.target, args, kwargs)


def _replace(gm, region: Region, experts: nn.Module, site: Site, spec: EncodeSpec, budget, table, extras: list[Tensor]) -> None:
    weights = gather(experts, site.layout, site.experts)
    check_encodable(weights, spec, region.path)
    up, down = (encode(w, spec, f"{region.path} ({kind})") for kind, w in (("up", weights.up), ("down", weights.down)))
    if table is None:
        nothing = Sample(site.experts, 0)
        table = project(residual_table(weights, up, down, ACTIVATIONS[site.activation], nothing)[0], spec.k_min)
    device = weights.up.device
    graph, last = gm.graph, [n for n in gm.graph.nodes if n.op == "placeholder"][-1]

    def lift(tensor: Tensor | None) -> fx.Node | None:
        nonlocal last
        if tensor is None:
            return None
        with graph.inserting_after(last):
            last = graph.placeholder(f"dpamoe_{len(extras)}")
        last._dynamo_source, last.meta["example_value"] = None, tensor
        last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}  # stays where it is, as far as CUDA graphs go
        extras.append(tensor)
        return last

    def lifted(weight: EncodedWeight, bias: Tensor | None) -> tuple:
        parts = [[lift(tensor) for tensor in group] for group in (weight.planes, weight.scales)]
        return (*parts, lift(weight.offset), lift(weight.unit), lift(bias))

    both = (*lifted(up, weights.up_bias), *lifted(down, weights.down_bias))
    numbers = [torch.tensor(number, device=device) for number in (float(budget), len(up.planes))]
    limits = [lift(tensor) for tensor in (table.to(device), *numbers)]
    hidden, index, gates = (region.roles[name] for name in ("hidden", "index", "weights"))
    with graph.inserting_before(region.output):
        chunks = graph.call_function(
            torch.ops.dpamoe.allocate.default, (gates, index, *limits, spec.k_min, is_convex(table, spec.k_min))
        )
        args = (hidden, index, gates, chunks, *both, site.activation, spec.group_size)
        output = graph.call_function(torch.ops.dpamoe.expert_ffn.default, args)
    region.output.replace_all_uses_with(output)
    for node in reversed(region.nodes):
        graph.erase_node(node)
