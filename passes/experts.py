"""Find expert computations in a recording by dataflow: two matmuls by expert-indexed weights, only pointwise work between.

No names are looked at. A weight is expert-indexed when a matmul reads one slice of a stacked parameter (or all of it, batched
or grouped), or when its module is one of several siblings of the same structure.
"""

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from dpamoe.passes.record import Recording, value

aten = torch.ops.aten
# Rearrangements: they move or copy elements without changing them. Filling masked rows is one: rows of padding ids are zeroed.
VIEWS = {
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "expand", "select", "index", "index_select", "slice",
    "unsqueeze", "squeeze", "_to_copy", "clone", "contiguous", "detach", "alias", "unbind", "split", "split_with_sizes",
    "chunk", "repeat", "repeat_interleave", "gather", "embedding", "view_as", "lift_fresh", "getitem", "copy_", "to", "cat",
    "stack", "masked_fill", "masked_fill_",
}  # fmt: skip
PICKS = {"select", "index", "index_select", "unbind", "embedding", "gather", "getitem"}
MANY = 4  # siblings that are told apart from what stands beside them; two layers with a ReLU between are an expert, not experts
REDUCTIONS = {
    "index_add", "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    "sum", "mean", "cumsum", "topk", "sort", "argmax", "nonzero", "_softmax",
}  # fmt: skip


def name_of(node: fx.Node) -> str:
    """Short name of the operation: `mm`, `index_add_`, `getitem`, or the node's kind for leaves."""
    if node.op != "call_function":
        return node.op
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(node.target)


@dataclass(frozen=True)
class Family:
    """Weights of all experts: one stacked parameter, or the same parameter of sibling modules, in expert order."""

    names: tuple[str, ...]
    experts: int


@dataclass(eq=False)
class ExpertMatmul:
    """One matmul by an expert-indexed weight. expert is None where one call serves many experts. out: after its bias."""

    node: fx.Node
    data: fx.Node
    family: Family
    expert: int | None
    transposed: bool
    bias: Family | None
    out: fx.Node


@dataclass(eq=False)
class Body:
    """One occurrence of an expert: its first matmuls (one, or gate and up), its last, and the nodes between them."""

    ups: list[ExpertMatmul]
    down: ExpertMatmul
    between: list[fx.Node]


@dataclass
class Candidate:
    """All occurrences of the same experts in a recording."""

    ups: tuple[Family, ...]
    down: Family
    bodies: list[Body]

    @property
    def nodes(self) -> list[fx.Node]:
        """Every matmul of every occurrence."""
        return [matmul.node for body in self.bodies for matmul in (*body.ups, body.down)]


def sibling_families(model: nn.Module) -> dict[str, tuple[Family, int]]:
    """Parameter name -> its family and place, for parameters of two or more sibling modules of one structure.

    Where families nest, the innermost counts.
    """
    found: dict[str, tuple[Family, int]] = {}
    for path, module in model.named_modules():
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        bare = [child for child in children if not any(True for _ in child[1].parameters())]
        if bare and len(children) - len(bare) >= MANY:  # a dropout or an activation among the experts
            children = [child for child in children if child not in bare]
        shapes = [tuple((n, tuple(p.shape)) for n, p in child.named_parameters()) for _, child in children]
        if len(children) < 2 or not shapes[0] or len(set(shapes)) > 1:
            continue
        for suffix, _ in shapes[0]:
            names = tuple(f"{child}.{suffix}" for child, _ in children)
            for place, name in enumerate(names):
                found[name] = (Family(names, len(names)), place)
    return found


def _operands(node: fx.Node) -> list[tuple[fx.Node, fx.Node, fx.Node | None, bool]]:
    """(data, weight, bias, whether the weight is read as [in, out]) for each way to see a node as a matmul by a weight."""
    kind, a = name_of(node), node.args
    if kind in ("mm", "bmm", "matmul"):
        return [(a[0], a[1], None, True), (a[1], a[0], None, False)]
    if kind in ("mv", "dot"):
        return [(a[1], a[0], None, False), (a[0], a[1], None, True)]
    if kind in ("addmm", "baddbmm"):
        return [(a[1], a[2], a[0], True)]
    if kind == "linear":
        return [(a[0], a[1], a[2] if len(a) > 2 else None, False)]
    if kind.startswith("_") and "grouped_mm" in kind or kind.startswith("grouped_mm"):
        return [(a[0], a[1], None, True)]
    return []


def origin(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Follow rearrangements back to where the elements come from; also the steps, the last one first."""
    steps = []
    while name_of(node) in VIEWS:
        steps.append(node)
        first = node.args[0]
        first = first[0] if isinstance(first, list | tuple) else first
        if not isinstance(first, fx.Node):
            break
        node = first
    return node, steps


def _indexed(weight: fx.Node, siblings: dict, batched: bool) -> tuple[Family, int | None, bool] | None:
    """The family a weight operand belongs to, which expert it is, and whether it was transposed on the way; or None."""
    source, steps = origin(weight)
    if source.op != "get_attr" or not isinstance(value(source), Tensor) or value(source).dim() < 2:
        return None
    swaps, expert, picked, experts = False, None, False, value(source).shape[0]
    for step in reversed(steps):
        kind, before = name_of(step), value(step.args[0]) if isinstance(step.args[0], fx.Node) else None
        rank = before.dim() if isinstance(before, Tensor) else 0
        if _swaps(step, kind, rank):
            swaps = not swaps
        elif kind == "view" and not picked and isinstance(before, Tensor) and rank == 2 and value(step).dim() == 3:
            experts = value(step).shape[0]
        elif kind in PICKS and not picked and (kind != "select" or step.args[1] == 0):
            if rank < 2 and kind != "getitem":
                continue
            picked = True
            expert = step.args[2] if kind == "select" else step.args[1] if kind == "getitem" else None
            whole = before if kind != "getitem" else value(step.args[0].args[0])
            experts = len(value(step.args[0])) if kind == "getitem" else whole.shape[0]
    if picked or (batched and value(weight).dim() == 3 and value(weight).shape[0] == experts):
        return (Family((source.target,), experts), expert, swaps) if experts > 1 else None
    if source.target in siblings:
        family, place = siblings[source.target]
        return family, place, swaps
    return None


def _swaps(step: fx.Node, kind: str, rank: int) -> bool:
    """Whether a rearrangement exchanges the last two dimensions."""
    if kind == "transpose":
        return {step.args[1] % rank, step.args[2] % rank} == {rank - 2, rank - 1}
    return kind == "t" or (kind == "permute" and [d % rank for d in step.args[1]][-2:] == [rank - 1, rank - 2])


def expert_matmuls(recording: Recording, model: nn.Module) -> list[ExpertMatmul]:
    """Every matmul by an expert-indexed weight, in order, with a bias that is added right behind it."""
    siblings, found = sibling_families(model), []
    for node in recording.nodes:
        for data, weight, bias, in_out in _operands(node):
            batched = name_of(node) not in ("mm", "addmm", "mv", "dot", "linear")
            indexed = _indexed(weight, siblings, batched) if isinstance(weight, fx.Node) else None
            if indexed is None or not isinstance(data, fx.Node):
                continue
            family, expert, swapped = indexed
            out, bias_family = node, None
            if isinstance(bias, fx.Node):
                bias_family = _bias_family(bias, siblings, family.experts)
            else:
                out, bias_family = _added_bias(node, siblings, family.experts)
            found.append(ExpertMatmul(node, data, family, expert, in_out != swapped, bias_family, out))
            break
    return found


def _bias_family(node: fx.Node, siblings: dict, experts: int) -> Family | None:
    source, _ = origin(node)
    if source.op != "get_attr":
        return None
    if source.target in siblings and siblings[source.target][0].experts == experts:
        return siblings[source.target][0]
    tensor = value(source)
    return Family((source.target,), experts) if tensor.dim() >= 2 and tensor.shape[0] == experts else None


def _added_bias(node: fx.Node, siblings: dict, experts: int) -> tuple[fx.Node, Family | None]:
    """The node behind a matmul's rearrangements that adds an expert's bias, and the bias; the matmul itself without one."""
    last = node
    while len(last.users) == 1 and name_of(next(iter(last.users))) in VIEWS | {"add", "add_"}:
        last = next(iter(last.users))
        if name_of(last) in ("add", "add_"):
            for operand in last.args[:2]:
                family = _bias_family(operand, siblings, experts) if isinstance(operand, fx.Node) else None
                if family is not None:
                    return last, family
            break
    return node, None


def find_candidates(recording: Recording, model: nn.Module) -> list[Candidate]:
    """Pairs of expert matmuls where the second reads the first through pointwise work alone, grouped by their weights."""
    matmuls = {matmul.node: matmul for matmul in expert_matmuls(recording, model)}
    reach: dict[fx.Node, set[ExpertMatmul]] = {}
    for node in recording.nodes:
        if node in matmuls:
            reach[node] = {matmuls[node]}
        elif node.op == "call_function" and not _operands(node) and name_of(node) not in REDUCTIONS:
            found = set().union(*(reach.get(source, set()) for source in recording.inputs_of(node)))
            if found:
                reach[node] = found
    groups: dict[tuple, list[Body]] = {}
    for down in matmuls.values():
        ups = [up for up in reach.get(down.data, set()) if up.expert == down.expert and up.family != down.family]
        ups = sorted((up for up in ups if up.family.experts >= down.family.experts), key=lambda up: up.node.meta["at"])
        ups = _latest(ups)
        if ups and len(ups) <= 2:
            between = _between(recording, [up.out for up in ups], down.data)
            groups.setdefault((tuple(up.family for up in ups), down.family), []).append(Body(ups, down, between))
    candidates = [Candidate(ups, down, bodies) for (ups, down), bodies in groups.items()]
    return [candidate for candidate in candidates if _independent(recording, candidate)]


def _latest(ups: list[ExpertMatmul]) -> list[ExpertMatmul]:
    """One matmul per family: the last, where a family was read more than once."""
    return sorted({up.family: up for up in ups}.values(), key=lambda up: up.node.meta["at"])


def _between(recording: Recording, starts: list[fx.Node], end: fx.Node) -> list[fx.Node]:
    """Nodes on the way from `starts` to `end`, in order, `end` included, `starts` not."""
    if end in starts:
        return []
    first = min(node.meta["at"] for node in starts)
    below, onward = recording.ancestors([end], stop=set(starts)), set(starts)
    for node in sorted(below, key=lambda n: n.meta["at"]):
        if node.meta["at"] > first and any(source in onward for source in recording.inputs_of(node)):
            onward.add(node)
    return sorted(onward - set(starts), key=lambda n: n.meta["at"])


def _independent(recording: Recording, candidate: Candidate) -> bool:
    """Experts do not feed each other; the layers of a decoder, which are siblings too, do."""
    if len(candidate.ups[0].names) == 1:
        return True
    before: Body | None = None
    for body in sorted(candidate.bodies, key=lambda b: b.ups[0].node.meta["at"]):
        if before is not None and before.down.expert != body.down.expert and _feeds(before.ups[0].node, body.ups[0]):
            return False
        before = body
    return True


def _feeds(first: fx.Node, up: ExpertMatmul) -> bool:
    """Whether an earlier expert's first matmul is read by a later one's input; only direct reads count, not shared buffers."""
    seen: set[fx.Node] = set()
    todo = [up.data]
    while todo:
        node = todo.pop()
        if node is first:
            return True
        if node not in seen and node.meta["at"] > first.meta["at"]:
            seen.add(node)
            todo += node.all_input_nodes
    return False
