"""Recover what an expert does between and behind its matmuls: replay the recorded calls on other rows, name fused ones."""

import torch
from torch import Tensor, fx, nn

from dpamoe import program
from dpamoe.kernels.reference import ACTIVATIONS, is_gated
from dpamoe.passes.experts import PICKS, REDUCTIONS, VIEWS, Body, name_of, origin
from dpamoe.passes.record import Recording, value
from dpamoe.sites import ROW_ORDERS, row_order

aten = torch.ops.aten
CLOSE = 1e-5  # relative, fp32: two ways to write one function differ by a few roundings
SCALES = (0.3, 3.0, 30.0, 1000.0)  # of random inputs, so that clamps and soft caps show
# Rearrangements of whole rows; dropped on replay. What picks or joins features stays.
OF_ROWS = VIEWS - {
    "split", "split_with_sizes", "chunk", "slice", "select", "getitem", "cat", "stack", "unbind", "index", "gather",
}  # fmt: skip
# Which argument of an op is its dimension: on replay rows are two-dimensional, so the feature dimension becomes the last.
DIMENSION = {"split": 2, "split_with_sizes": 2, "chunk": 2, "slice": 1, "select": 1, "unbind": 1, "cat": 1, "_softmax": 1}


class Unknown(ValueError):
    """The computation cannot be replayed; the text says why."""


def extract(body: Body, prefix: str) -> fx.GraphModule:
    """The nodes between the matmuls of one body as a module from [N, U] to [N, I], U the rows of all parts together.

    prefix: path below which parameters are named. Rearrangements of whole rows and casts are dropped, so that it runs at any
    number of rows and in any dtype.
    """
    return _replay([up.out for up in body.ups], body.between, body.down.data, prefix)


def extract_post(recording: Recording, body: Body, prefix: str) -> fx.GraphModule | None:
    """What follows the last matmul of a body up to where its gate comes in, from [N, O] to [N, O]; None for nothing.

    The gate is the first tensor that is neither made from the expert's output nor a parameter.
    """
    own, end = {body.down.out}, body.down.out
    for node in recording.nodes[body.down.out.meta["at"] + 1 :]:
        mine = [source for source in node.all_input_nodes if source in own]
        if not mine:
            continue
        foreign = [source for source in node.all_input_nodes if source not in own and not _constant(recording, source)]
        if foreign or name_of(node) in REDUCTIONS - {"mean", "sum"} or _over_rows(node):
            end = mine[0]
            break
        own.add(node)
    inside = sorted((own & recording.ancestors([end])) - {body.down.out}, key=lambda node: node.meta["at"])
    module = _replay([body.down.out], inside, end, prefix)
    return module if any(node.op == "call_function" for node in module.graph.nodes) else None


def _over_rows(node: fx.Node) -> bool:
    """Whether a sum or mean runs over anything but features."""
    if name_of(node) not in ("mean", "sum"):
        return False
    rank, over = value(node.args[0]).dim(), node.args[1] if len(node.args) > 1 else None
    return over is None or [place % rank for place in ([over] if isinstance(over, int) else over)] != [rank - 1]


def _constant(recording: Recording, node: fx.Node) -> bool:
    """Whether a node depends on parameters alone, not on what the model was given."""
    return all(source.op != "placeholder" for source in recording.ancestors([node]))


def _replay(starts: list[fx.Node], nodes: list[fx.Node], end: fx.Node, prefix: str) -> fx.GraphModule:
    graph, first = fx.Graph(), 0
    hidden = graph.placeholder("hidden")
    known: dict[fx.Node, fx.Node] = {}
    held: dict[str, Tensor] = {}
    for start in starts:
        width = rows_of(start).shape[1]
        part = graph.call_function(aten.slice.Tensor, (hidden, -1, first, first + width))
        known[start] = hidden if len(starts) == 1 else part
        first += width
    for node in nodes:
        known[node] = _copy(graph, node, known, held, prefix)
    graph.output(known[end])
    graph.eliminate_dead_code()
    owner = nn.Module()
    for name, tensor in held.items():
        _attach(owner, name, tensor)
    return fx.GraphModule(owner, graph, class_name="Pointwise")


def _attach(owner: nn.Module, name: str, tensor: Tensor) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            owner.add_module(parent, nn.Module())
        owner = getattr(owner, parent)
    owner.register_buffer(last, tensor)


def _copy(graph: fx.Graph, node: fx.Node, known: dict, held: dict[str, Tensor], prefix: str) -> fx.Node:
    kind, first = name_of(node), node.args[0]
    cast = kind == "_to_copy" and value(node).is_floating_point() and value(first).is_floating_point()
    only_first = sum(source in known for source in node.all_input_nodes) == 1
    if isinstance(first, fx.Node) and first in known and (cast or (kind in OF_ROWS and kind != "_to_copy" and only_first)):
        return known[first]
    moved = _of_whole_rows(node, kind)
    if moved is not None and any(source in known for source in moved):
        return next(known[source] for source in moved if source in known)

    def lookup(source: fx.Node) -> fx.Node:
        if source in known:
            return known[source]
        tensor = value(source)
        if source.op == "get_attr" and (not prefix or source.target.startswith(prefix + ".")):
            name = source.target.removeprefix(prefix + ".")
            held[name] = tensor.detach()
            return graph.get_attr(name)
        if _computable(source, known):
            known[source] = _copy(graph, source, known, held, prefix)
            return known[source]
        if isinstance(tensor, Tensor) and tensor.numel() == 1 and origin(source)[0].op != "get_attr":
            return graph.call_function(aten.scalar_tensor.default, (tensor.item(),), {"dtype": tensor.dtype})
        raise Unknown(f"its experts also read {source.target if source.op == 'get_attr' else source.name}")

    if cast:
        return lookup(first)
    args = _along_features(node, kind, list(fx.map_arg(node.args, lookup)))
    kwargs = fx.map_arg({k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}, lookup)
    target = node.target
    if kind.endswith("_") and hasattr(aten, kind[:-1]):
        target = getattr(getattr(aten, kind[:-1]), target._overloadname)  # in place becomes out of place
    return graph.call_function(target, tuple(args), kwargs)


def _computable(node: fx.Node, known: dict) -> bool:
    """Whether a node is computed, without picking, from parameters and what is known."""
    inputs = node.all_input_nodes
    return (
        bool(inputs)
        and name_of(node) not in PICKS
        and all(source.op == "get_attr" or source in known or _computable(source, known) for source in inputs)
    )


def _of_whole_rows(node: fx.Node, kind: str) -> list[fx.Node] | None:
    """What a node joins or splits along rows, not features (experts' rows side by side); None for anything else."""
    if kind == "getitem":
        split = node.args[0]
        return [split] if _of_whole_rows(split, name_of(split)) is not None else None
    if kind not in ("cat", "split", "split_with_sizes") or not node.all_input_nodes:
        return None
    place = DIMENSION[kind]
    first = value(node.all_input_nodes[0])
    along = node.args[place] if place < len(node.args) else 0
    return node.all_input_nodes if first.dim() == 2 and along % 2 == 0 else None


def _along_features(node: fx.Node, kind: str, args: list) -> list:
    place = DIMENSION.get(kind)
    if place is None:
        return args
    first = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
    shape = value(first).shape
    given = args[place] if place < len(args) else 0
    features = len(shape) - (2 if len(shape) == 3 and shape[-1] == 1 else 1)
    if given % len(shape) != features:
        raise Unknown(f"what stands between its matmuls works along dimension {given} of {list(shape)}, not along features")
    args += [0] * (place + 1 - len(args))
    args[place] = -1
    return args


def rows_of(node: fx.Node) -> Tensor:
    """What a node held as rows [N, F], for the forms that experts use: [N, F], [N, F, 1] and [E, N, F]."""
    held = value(node)
    if held.dim() == 3 and held.shape[-1] == 1 and held.shape[-2] > 1:
        held = held.squeeze(-1)
    return held.reshape(-1, held.shape[-1])


def reproduces(module: fx.GraphModule, body: Body, tolerance: float) -> bool:
    """Whether the replay gives what was recorded."""
    parts = [rows_of(up.out) for up in body.ups]
    wanted = rows_of(body.down.data).float()
    if len({part.shape[0] for part in (*parts, wanted)}) > 1 or wanted.numel() == 0:
        return False
    found = module(torch.cat(parts, 1).float())
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


def classify(module: fx.GraphModule, rows: int) -> tuple[str, str, tuple | None]:
    """(activation, row order, program): the fused activation it equals at every scale, or "graph" with its program."""
    generator = torch.Generator().manual_seed(0)
    probes = [torch.randn(64, rows, generator=generator) * scale for scale in SCALES]
    wanted = [module(probe) for probe in probes]
    best, found = CLOSE, None
    for name in ACTIVATIONS:
        if is_gated(name) and rows % 2:
            continue
        for order in ROW_ORDERS if is_gated(name) else ROW_ORDERS[:1]:
            worst = max(_difference(name, order, probe, want) for probe, want in zip(probes, wanted, strict=True))
            if worst < best:
                best, found = worst, (name, order)
    return (*found, None) if found else ("graph", "rows", program.from_graph(module.graph))


def _difference(name: str, order: str, probe: Tensor, wanted: Tensor) -> float:
    numbers = row_order(order, probe.shape[1])
    found = ACTIVATIONS[name](probe if numbers is None else probe[:, numbers])
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
