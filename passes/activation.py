"""Recover what an expert does between and behind its matmuls: replay the recorded calls on other rows, name fused ones."""

from collections.abc import Container
from dataclasses import dataclass, field

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
    number of rows and in any dtype. Parameters with a row for each expert are read by the ids of the rows (see `program`).
    """
    return _replay(body, [up.out for up in body.ups], body.between, body.down.data, prefix)


def extract_post(recording: Recording, body: Body, prefix: str) -> fx.GraphModule | None:
    """What follows the last matmul of a body up to where its gate comes in, from [N, O] to [N, O]; None for nothing.

    The gate is the first tensor that is neither made from the expert's output nor a parameter, nor 1 everywhere, nor just
    places of rows. What stands outside of the module `prefix` is not followed.
    """
    own, end, owned = {body.down.out}, body.down.out, ExpertParameters(body)
    for node in recording.nodes[body.down.out.meta["at"] + 1 :]:
        mine = [source for source in node.all_input_nodes if source in own]
        if not mine:
            continue
        moved = _moved_rows(node, own)
        others = [source for source in node.all_input_nodes if source not in own and not _is_one(node, source)]
        foreign = not all(owned.holds(source) or _constant(recording, source) for source in others)
        outside = prefix and not f"{node.meta['module']}.".startswith(f"{prefix}.")
        ends = foreign or name_of(node) in REDUCTIONS - {"mean", "sum"} or _over_rows(node)
        if outside or (ends and moved is None):
            end = mine[0]
            break
        own.add(node)
    inside = sorted((own & recording.ancestors([end])) - {body.down.out}, key=lambda node: node.meta["at"])
    module = _replay(body, [body.down.out], inside, end, prefix)
    return module if any(node.op == "call_function" for node in module.graph.nodes) else None


def _over_rows(node: fx.Node) -> bool:
    """Whether a sum or mean runs over anything but features."""
    if name_of(node) not in ("mean", "sum"):
        return False
    rank, over = value(node.args[0]).dim(), node.args[1] if len(node.args) > 1 else None
    return over is None or [place % rank for place in ([over] if isinstance(over, int) else over)] != [rank - 1]


def _moved_rows(node: fx.Node, own: Container[fx.Node]) -> fx.Node | None:
    """The one of `own` whose rows a node only gives other places: it picks, joins or writes rows, or sums over one choice."""
    kind, args = name_of(node), node.args
    if (joined := _of_whole_rows(node, kind)) is not None:
        return next((source for source in joined if source in own), None)
    if kind in ("index_put", "index_put_"):
        whole = len(args[1]) == 1 and not (len(args) > 3 and args[3])
        return next((source for source in (args[2], args[0]) if source in own), None) if whole else None
    if kind in ("index_copy", "index_copy_"):
        return next((source for source in (args[3], args[0]) if source in own), None) if args[1] == 0 else None
    if kind == "sum":
        shape = value(args[0]).shape
        whole = len(args) > 1 and bool(args[1]) and all(shape[at] == 1 and at % len(shape) < len(shape) - 1 for at in args[1])
    else:
        whole = (kind == "index" and len(args[1]) == 1) or (kind == "index_select" and args[1] == 0)
    return args[0] if whole and args[0] in own else None


def _is_one(product: fx.Node, factor: fx.Node) -> bool:
    """Whether a node multiplies by a factor that is 1 everywhere, as gates are where they are applied later."""
    held = value(factor)
    numbers = name_of(product) in ("mul", "mul_") and isinstance(held, Tensor) and held.is_floating_point()
    return numbers and held.numel() > 0 and bool((held == 1).all())


def _constant(recording: Recording, node: fx.Node) -> bool:
    """Whether a node depends on parameters alone, not on what the model was given."""
    return all(source.op != "placeholder" for source in recording.ancestors([node]))


class ExpertParameters:
    """Parameters that hold one number or one vector for each expert of a body, and how a node comes to one of them."""

    def __init__(self, body: Body):
        self.expert, family = body.down.expert, body.down.family
        self.count, self.homes = family.experts, []
        if len(family.names) > 1:
            parts = [name.split(".") for name in family.names]
            place = next(place for place, step in enumerate(zip(*parts, strict=True)) if len(set(step)) > 1)
            self.homes = [".".join(own[: place + 1]) + "." for own in parts]

    def holds(self, node: fx.Node) -> bool:
        """Whether a node is the part of such a parameter that belongs to the experts of its rows."""
        return self.names(node) is not None

    def names(self, node: fx.Node) -> tuple[str, ...] | None:
        """The parameter that a node is the experts' part of: one stacked name, or one name for each expert; or None."""
        root, steps = origin(node)
        if root.op != "get_attr" or not isinstance(value(root), Tensor):
            return None
        shape = value(root).shape
        if self.homes and root.target.startswith(self.homes[self.expert]) and _is_vector(shape):
            return tuple(home + root.target.removeprefix(self.homes[self.expert]) for home in self.homes)
        if not shape or shape[0] != self.count or not _is_vector(shape[1:]):
            return None
        picked = any(name_of(step) in PICKS for step in steps)
        beside = value(node).dim() == 3 and value(node).shape[:2] == (self.count, 1)  # for outputs [E, N, F]
        return (root.target,) if picked or beside else None


def _is_vector(shape: torch.Size) -> bool:
    return sum(size > 1 for size in shape) <= 1


@dataclass
class _Replay:
    """A graph in the making: what stands in it for recorded nodes, and the parameters it reads, named below `prefix`."""

    owned: ExpertParameters
    prefix: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    expert: fx.Node | None = None

    def parameter(self, node: fx.Node) -> fx.Node | None:
        """A parameter or buffer below the prefix, whole; None for anything else."""
        if node.op != "get_attr" or (self.prefix and not node.target.startswith(self.prefix + ".")):
            return None
        name = node.target.removeprefix(self.prefix + ".") if self.prefix else node.target
        self.held[name] = value(node).detach()
        return self.graph.get_attr(name)

    def of_expert(self, node: fx.Node) -> fx.Node | None:
        """The part of a parameter that belongs to the experts of the rows, [N, F] or [N, 1]; None for anything else."""
        names = self.owned.names(node)
        if names is None:
            return None
        leaves = {leaf.target: leaf for leaf in node.graph.nodes if leaf.op == "get_attr"}
        whole = [self.parameter(leaves[name]) for name in names]
        if None in whole:
            return None
        stacked = whole[0] if len(whole) == 1 else self.graph.call_function(aten.stack.default, (whole,))
        width = value(leaves[names[0]]).numel() // (self.owned.count if len(whole) == 1 else 1)
        place = self.graph.call_function(aten.clamp.default, (self.expert, 0, self.owned.count - 1))  # padding has other ids
        rows = self.graph.call_function(aten.index.Tensor, (stacked, [place]))
        return self.graph.call_function(aten.reshape.default, (rows, [-1, width]))

    def lookup(self, node: fx.Node) -> fx.Node:
        """What stands for a recorded node that a step reads. Raises Unknown if it is nothing of the experts' own."""
        if node in self.known:
            return self.known[node]
        found = self.of_expert(node)
        found = self.parameter(node) if found is None else found
        if found is not None:
            return found
        if node.op != "get_attr" and self.computable(node):
            self.known[node] = self.copy(node)
            return self.known[node]
        tensor = value(node)
        if isinstance(tensor, Tensor) and tensor.numel() == 1 and origin(node)[0].op != "get_attr":
            return self.graph.call_function(aten.scalar_tensor.default, (tensor.item(),), {"dtype": tensor.dtype})
        raise Unknown(f"its experts also read {node.target if node.op == 'get_attr' else node.name}")

    def computable(self, node: fx.Node) -> bool:
        """Whether a node is computed, without picking but by expert, from parameters and what is known."""
        if node.op == "get_attr" or node in self.known or self.owned.holds(node):
            return True
        inputs = node.all_input_nodes
        return bool(inputs) and name_of(node) not in PICKS and all(self.computable(source) for source in inputs)

    def copy(self, node: fx.Node) -> fx.Node:
        """Add one recorded call, rewritten for rows [N, F]; a mere move of rows adds nothing."""
        kind, first = name_of(node), node.args[0]
        same = self._same_rows(node, kind, first)
        if same is not None:
            return self.known[same]
        if kind == "_to_copy" and value(node).is_floating_point() and value(first).is_floating_point():
            return self.lookup(first)
        args = _along_features(node, kind, list(fx.map_arg(node.args, self.lookup)))
        others = {key: given for key, given in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
        target = node.target
        if kind.endswith("_") and hasattr(aten, kind[:-1]):
            target = getattr(getattr(aten, kind[:-1]), target._overloadname)  # in place becomes out of place
        return self.graph.call_function(target, tuple(args), fx.map_arg(others, self.lookup))

    def _same_rows(self, node: fx.Node, kind: str, first: fx.Node) -> fx.Node | None:
        """The known node whose rows a call only casts, rearranges, moves or multiplies by 1; None where it does more."""
        known = [source for source in node.all_input_nodes if source in self.known]
        if isinstance(first, fx.Node) and first in self.known and kind in OF_ROWS and len(known) == 1:
            cast = kind != "_to_copy" or (value(node).is_floating_point() and value(first).is_floating_point())
            return first if cast else None
        if (source := _moved_rows(node, self.known)) is not None:
            return source
        rest = [source for source in node.all_input_nodes if source not in self.known]
        same = known and rest and all(_is_one(node, one) and not self.computable(one) for one in rest)
        return known[0] if same else None


def _replay(body: Body, starts: list[fx.Node], nodes: list[fx.Node], end: fx.Node, prefix: str) -> fx.GraphModule:
    making, first = _Replay(ExpertParameters(body), prefix), 0
    hidden = making.graph.placeholder("hidden")
    making.expert = making.graph.placeholder(program.EXPERT, default_value=None)
    for start in starts:
        width = rows_of(start).shape[1]
        part = making.graph.call_function(aten.slice.Tensor, (hidden, -1, first, first + width))
        making.known[start] = hidden if len(starts) == 1 else part
        first += width
    for node in nodes:
        making.known[node] = making.copy(node)
    making.graph.output(making.known[end])
    making.graph.eliminate_dead_code()
    owner = nn.Module()
    for name, tensor in making.held.items():
        _attach(owner, name, tensor)
    return fx.GraphModule(owner, making.graph, class_name="Pointwise")


def _attach(owner: nn.Module, name: str, tensor: Tensor) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            owner.add_module(parent, nn.Module())
        owner = getattr(owner, parent)
    owner.register_buffer(last, tensor)


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
    if body.down.expert is None and program.by_expert(program.from_graph(module.graph)):
        return True  # whose rows these are is not known: the comparison of the whole module tells
    found = module(torch.cat(parts, 1).float(), None if body.down.expert is None else torch.tensor(body.down.expert))
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


def classify(module: fx.GraphModule, rows: int) -> tuple[str, str, tuple | None]:
    """(activation, row order, program): the fused activation it equals at every scale, or "graph" with its program."""
    steps = program.from_graph(module.graph)
    if program.by_expert(steps):
        return "graph", "rows", steps
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
    return (*found, None) if found else ("graph", "rows", steps)


def _difference(name: str, order: str, probe: Tensor, wanted: Tensor) -> float:
    numbers = row_order(order, probe.shape[1])
    found = ACTIVATIONS[name](probe if numbers is None else probe[:, numbers])
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
