"""Find by value where the experts of a block begin and end: tokens, choices and gates go in, their weighted sum comes out.

For blocks with no module of their own around the experts. Nothing is assumed of the layout: a cut is accepted if a recorded
tensor equals sum over a of weight_a * f_(index_a)(hidden), or of f_(index_a)(weight_a * hidden).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from dpamoe.passes.activation import rows_of
from dpamoe.passes.experts import Candidate, name_of
from dpamoe.passes.function import TOLERANCE, each_choice
from dpamoe.passes.record import Recording, left, storage, value
from dpamoe.sites import ExpertWeights

SAME_ORDER = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach"}


class Refused(ValueError):
    """A block that cannot be rewritten safely; the text says why."""


@dataclass(frozen=True)
class Cut:
    """Nodes of one recording, in any shape of the order: hidden [n, H], index [n, A], weights [n, A] or [n, E], result [n, O].

    result is the last write of an expert. scored: weights hold every expert's gate, of which index picks. weigh_input: the
    gate scales the expert's input.
    """

    hidden: fx.Node
    index: fx.Node
    weights: fx.Node
    result: fx.Node
    rows: int
    active: int
    scored: bool
    weigh_input: bool

    @property
    def inputs(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """What goes into the experts."""
        return self.hidden, self.index, self.weights


def find_cut(recording: Recording, candidate: Candidate, weights: ExpertWeights, act: Callable, post: Callable) -> Cut | None:
    """Search the recorded tensors for a cut of one candidate; None if no combination reproduces a recorded tensor.

    Tokens in the fewest rows are tried first, so that all choices of a token stand in one row.
    """
    late = _downstream(recording, candidate.nodes)
    early = [node for node in recording.nodes if _given(recording, node, late)]
    ends = [node for node in recording.nodes if node in late and _usable(node) and value(node).is_floating_point()]
    experts, width = weights.up.shape[:3:2]
    for hidden in _tokens(early, width):
        rows = value(hidden).reshape(-1, width).float()
        results = [end for end in ends if value(end).numel() == rows.shape[0] * weights.down.shape[1]]
        for weigh_input in _ways(candidate, rows) if results else ():
            for index in _choices(recording, early, rows.shape[0], experts):
                ids = value(index).reshape(rows.shape[0], -1).long()
                wide = rows[:, None].expand(*ids.shape, -1)
                plain = None if weigh_input else each_choice(weights, act, post, wide, ids)
                for gate, amount in _gates(early, ids, experts):
                    total = each_choice(weights, act, post, wide * amount, ids) if plain is None else plain * amount
                    end = _equal(total.sum(1), results)
                    if end is not None:
                        scored = value(gate).numel() != ids.numel()
                        return _settle(recording, Cut(hidden, index, gate, end, *ids.shape, scored, weigh_input))
    return None


def _ways(candidate: Candidate, rows: Tensor) -> tuple[bool, ...]:
    """Whether gates may scale the input, told by what all experts read: rows of these tokens, multiples of them, or neither."""
    data = torch.cat([rows_of(body.ups[0].data).float() for body in candidate.bodies])
    if data.shape[-1] != rows.shape[-1]:
        return False, True  # an expert may read its tokens as columns
    size = data.abs().amax().clamp_min(1e-30)  # squares of large numbers would overflow
    data, rows = data[data.abs().amax(1) > 0] / size, rows / size
    if bool((torch.cdist(data, rows, compute_mode="donot_use_mm_for_euclid_dist").amin(1) <= 1e-4 * data.norm(dim=1)).all()):
        return (False,)
    like = (F.normalize(data, dim=1) @ F.normalize(rows, dim=1).T).abs().amax(1)
    return (True,) if bool((like > 1 - 1e-4).all()) else ()


def _downstream(recording: Recording, roots: list[fx.Node]) -> set[fx.Node]:
    """The roots and everything that depends on them."""
    found = set(roots)
    for node in recording.nodes:
        if any(source in found for source in recording.inputs_of(node)):
            found.add(node)
    return found


def _given(recording: Recording, node: fx.Node, late: set[fx.Node]) -> bool:
    """Whether a node's final value is made from the block's input without the experts."""
    if node in late or not _usable(node) or node.op == "get_attr":
        return False
    return recording.writer.get(storage(value(node))) not in late


def _usable(node: fx.Node) -> bool:
    held = value(node)
    return isinstance(held, Tensor) and held.numel() > 0 and held.dim() > 0 and bool(torch.isfinite(held).all())


def _tokens(early: list[fx.Node], width: int) -> Iterator[fx.Node]:
    """What may be the tokens, [..., H]: the fewest rows first, then the earliest; each set of rows once."""
    wide = [node for node in early if value(node).dim() > 1 and value(node).shape[-1] == width]
    found = [node for node in wide if value(node).is_floating_point()]
    yield from _distinct(sorted(found, key=lambda node: (value(node).numel(), node.meta["at"])))


def _choices(recording: Recording, early: list[fx.Node], rows: int, experts: int) -> Iterator[fx.Node]:
    """What may be expert ids, A to a token; they must depend on the input."""
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    whole = [node for node in early if value(node).dtype in kinds and value(node).numel() % rows == 0]
    fit = [node for node in whole if value(node).numel() <= rows * experts]
    ids = [node for node in fit if int(value(node).min()) >= 0 and int(value(node).max()) < experts]
    yield from _distinct([node for node in ids if any(source.op == "placeholder" for source in recording.ancestors([node]))])


def _distinct(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    seen: list[Tensor] = []
    for node in nodes:
        flat = value(node).flatten()
        if not any(flat.shape == other.shape and torch.equal(flat, other) for other in seen):
            seen.append(flat)
            yield node


def _gates(early: list[fx.Node], ids: Tensor, experts: int) -> Iterator[tuple[fx.Node, Tensor]]:
    """What may be gates, with their amounts [n, A, 1]: one for each choice, then one for each expert; the latest first.

    The latest, because a mask for dropped tokens may change nothing in a short recording.
    """
    floats = [node for node in reversed(early) if value(node).is_floating_point()]
    rows = ids.shape[0]
    yield from ((n, value(n).reshape(*ids.shape, 1).float()) for n in floats if value(n).numel() == ids.numel())
    for node in floats:
        held = value(node)
        if held.dim() > 1 and held.shape[-1] == experts and held.numel() == rows * experts != ids.numel():
            yield node, held.reshape(rows, experts).gather(1, ids)[..., None].float()


def _equal(total: Tensor, ends: list[fx.Node]) -> fx.Node | None:
    """The first recorded tensor that equals a result [n, O]; of in-place writes that leave it so, the last."""
    size = float(total.abs().max())
    if not 1e-20 < size < float("inf"):  # nothing equals nothing
        return None
    near = [end for end in ends if float((left(end).reshape(total.shape).float() - total).abs().max()) <= TOLERANCE * size]
    alike = [end for end in near if storage(value(end)) == storage(value(near[0]))]
    writes = [end for end in alike if mutates(end)]
    return writes[-1] if writes else next(iter(near), None)


def _settle(recording: Recording, cut: Cut) -> Cut:
    """Inputs traced back through views that keep the order."""
    width = value(cut.hidden).shape[-1]
    return replace(
        cut, hidden=_peel(recording, cut.hidden, width), index=_peel(recording, cut.index),
        weights=_peel(recording, cut.weights, value(cut.weights).shape[-1] if cut.scored else None),
    )  # fmt: skip


def _peel(recording: Recording, node: fx.Node, width: int | None = None) -> fx.Node:
    """Back through views of unchanged order (and last dimension `width`), unless the storage is written after them."""
    while name_of(node) in SAME_ORDER and isinstance(node.args[0], fx.Node):
        source, writer = node.args[0], recording.writer.get(storage(value(node)))
        written = writer is not None and writer.meta["at"] > source.meta["at"]
        if source.op == "get_attr" or written or (width is not None and value(source).shape[-1] != width):
            break
        node = source
    return node


def is_leaf(node: fx.Node) -> bool:
    """Whether a node is a parameter, buffer, constant or input rather than a call."""
    return node.op != "call_function"


def mutates(node: fx.Node) -> bool:
    """Whether a node writes in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written(node: fx.Node) -> fx.Node:
    """The tensor that a chain of in-place writes began with."""
    while mutates(node):
        node = node.all_input_nodes[0]
    return node


def is_cast(node: fx.Node) -> bool:
    """Whether a node turns a float tensor into another float type."""
    return name_of(node) == "_to_copy" and value(node).is_floating_point() and value(node.args[0]).is_floating_point()


def key_of(node: fx.Node) -> tuple:
    """What two recordings of the same code have in common at a node."""
    return node.target, node.meta["module"], node.args[1] if name_of(node) == "getitem" else None


def common(first: list, second: list) -> tuple[int, int]:
    """Lengths of the common beginning and of the common end of two lists."""
    least = min(len(first), len(second))
    front = next((i for i in range(least) if first[i] != second[i]), least)
    return front, next((i for i in range(least) if first[-1 - i] != second[-1 - i]), least)


def read_as(node: fx.Node, rows: Iterable[list]) -> list[fx.Node] | None:
    """What is read on every recording where the first reads `node`, by the arguments of each call on all of them; or None."""
    for trees in rows:
        leaves = [tree_leaves(tree) for tree in trees]
        for group in zip(*leaves, strict=False):
            if group[0] is node and all(isinstance(leaf, fx.Node) for leaf in group):
                return list(group)
    return None


def carry(cut: Cut, found: Recording, wanted: Recording) -> Cut:
    """The same cut in a recording of another dtype, in which float casts come and go and everything else is alike.

    Raises Refused if the two run different code.
    """
    ours, theirs = ([n for n in r.nodes if not is_leaf(n) and not is_cast(n)] for r in (found, wanted))
    front, back = common([key_of(n) for n in ours], [key_of(n) for n in theirs])
    inputs = {node.target: node for node in wanted.nodes if node.op == "placeholder"}

    def moved(node: fx.Node) -> fx.Node:
        node = _uncast(node)
        if node.op == "placeholder":
            return inputs[node.target]
        place = ours.index(node) if node in ours else len(ours)
        if place >= front:
            raise Refused(f"it runs other code in fp32 than in its own type (at {node.name})")
        return theirs[place]

    weights = moved(cut.weights)
    while len(weights.users) == 1 and is_cast(next(iter(weights.users))):
        weights = next(iter(weights.users))
    behind = [
        [_arguments(a), _arguments(b)] for a, b in zip(ours[len(ours) - back :], theirs[len(theirs) - back :], strict=True)
    ]
    ends = read_as(_uncast(cut.result), [*behind, [fx.map_arg(r.output, _uncast) for r in (found, wanted)]])
    if ends is None and mutates(cut.result):
        ends = [cut.result, wanted.writer.get(storage(value(moved(written(cut.result)))))]
    if ends is None or ends[1] is None:
        raise Refused("it reads the sum over its experts in another place in fp32 than in its own type")
    return replace(cut, hidden=moved(cut.hidden), index=moved(cut.index), weights=weights, result=ends[1])


def _uncast(node: fx.Node) -> fx.Node:
    while not is_leaf(node) and is_cast(node):
        node = node.args[0]
    return node


def _arguments(node: fx.Node) -> tuple:
    return fx.map_arg((node.args, node.kwargs), _uncast)
