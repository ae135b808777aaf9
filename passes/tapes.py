"""Decide, from recordings at several sizes, what of a block is kept around its experts, and which modules stay whole."""

import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpamoe.passes.cut import Cut, Refused, common, is_leaf, key_of, mutates, read_as, written
from dpamoe.passes.experts import name_of
from dpamoe.passes.record import Call, Recording, storage, value

SIZES = ((3, 5), (2, 3), (5, 2), (4, 7))  # two unknowns need three sizes, and one to contradict; [N, H] takes the products
Event = fx.Node | Call


@dataclass(frozen=True)
class BlockInputs:
    """How a block was called: one float tensor, [B, T, H] or [N, H], under `name`; everything else is plain."""

    bound: inspect.BoundArguments
    name: str
    tensor: Tensor

    def at(self, lead: tuple[int, ...], dtype: torch.dtype | None = None) -> tuple[tuple, dict]:
        """(args, kwargs) at another size: recorded rows in seeded random order, each scaled, with some noise."""
        lead = lead if self.tensor.dim() == 3 else (lead[0] * lead[1],)
        random = torch.Generator().manual_seed(1000 * lead[0] + lead[-1])
        recorded = self.tensor.detach().reshape(-1, self.tensor.shape[-1]).float().cpu()
        rows = recorded[torch.randint(recorded.shape[0], lead, generator=random)]
        rows = rows * (0.5 + torch.rand(*lead, 1, generator=random))
        rows = rows + 0.3 * recorded.square().mean().sqrt() * torch.randn(rows.shape, generator=random)
        return self.given(rows.to(self.tensor.device, dtype or self.tensor.dtype))

    def alike(self, count: int) -> tuple[tuple, dict]:
        """(args, kwargs) of `count` identical tokens, which all go to the same experts."""
        (args, kwargs), rank = self.at((1, 1)), self.tensor.dim()
        (one,) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return self.given(one.expand(*(1,) * (rank - 2), count, one.shape[-1]).contiguous())

    def given(self, tensor: Tensor) -> tuple[tuple, dict]:
        """(args, kwargs) with another tensor."""
        changed = inspect.BoundArguments(self.bound.signature, type(self.bound.arguments)(self.bound.arguments))
        changed.arguments[self.name] = tensor
        return changed.args, changed.kwargs


def inputs_of(module: nn.Module, call: Call) -> BlockInputs:
    """What a module was called with. Raises Refused unless that is one float tensor [B, T, H] or [N, H] and plain values."""
    held = tree_map(lambda leaf: value(leaf) if isinstance(leaf, fx.Node) else leaf, (call.args, call.kwargs))
    bound = inspect.signature(module.forward).bind(*held[0], **held[1])
    bound.apply_defaults()
    tensors = [name for name, given in bound.arguments.items() if isinstance(given, Tensor)]
    for name, given in bound.arguments.items():
        empty = bound.signature.parameters[name].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if empty and given:
            raise Refused(f"it is called with further arguments under *{name}, which a graph cannot take")
        plain = given is None or isinstance(given, Tensor | bool | int | float | str)
        if not empty and not plain:
            raise Refused(f"its argument {name} is a {type(given).__name__}: only one tensor and plain values can be varied")
    if len(tensors) != 1:
        raise Refused(f"it takes {len(tensors)} tensors ({', '.join(tensors)}): its size can be varied with one only")
    tensor = bound.arguments[tensors[0]]
    if not tensor.is_floating_point() or tensor.dim() not in (2, 3) or not tensor.numel() or not bool(tensor.isfinite().all()):
        raise Refused(f"its tensor {tensors[0]} is no finite float [B, T, H] or [N, H]: {tensor.dtype} {list(tensor.shape)}")
    return BlockInputs(bound, tensors[0], tensor)


@dataclass(eq=False)
class Plan:
    """What is kept of a block. Events are nodes, or whole calls of the modules in `fold`; a row is one event on every tape.

    live: nodes of the first tape that are kept. buffer: the tensor that kept code sees as the result under another name.
    echo: calls whose inner values are used too, so they run beside the graph. before, behind: rows in order. result: the cut's.
    """

    tapes: list[Recording]
    cut: Cut
    live: set[fx.Node]
    buffer: fx.Node | None
    fold: set[str] = field(default_factory=set)
    echo: list[list[Call]] = field(default_factory=list)
    before: list[list[Event]] = field(default_factory=list)
    behind: list[list[Event]] = field(default_factory=list)
    result: list[fx.Node] = field(default_factory=list)


def make_plan(tapes: list[Recording], cut: Cut, expert_names: set[str]) -> Plan:
    """Decide what of the first tape is kept and align it with the others. Raises Refused with the reason if it cannot be."""
    live, buffer = _kept(tapes[0], cut)
    plan = Plan(tapes, cut, live, buffer)
    leaves = {node for node in tapes[0].nodes if is_leaf(node)}
    region = tapes[0].ancestors([cut.result]) - live - leaves
    used = [node.target for node in live & leaves if node.op == "get_attr" and node.target in expert_names]
    if used:
        raise Refused(f"its experts' weights are also used outside of the experts ({used[0]})")
    _check_writes(plan, region)
    _fold(plan, region | {cut.result})
    align(plan)
    return plan


def _with_writer(tape: Recording, nodes: list[fx.Node], end: float) -> list[fx.Node]:
    """The nodes and the last writers, before position `end`, of their storages."""
    writers = [tape.writer.get(storage(value(node))) for node in nodes if isinstance(value(node), Tensor)]
    return [*nodes, *(w for w in writers if w is not None and w.meta["at"] < end)]


def outputs_of(tape: Recording) -> list[fx.Node]:
    """Nodes that the block returns."""
    return [leaf for leaf in tree_leaves(tape.output) if isinstance(leaf, fx.Node)]


def _kept(tape: Recording, cut: Cut) -> tuple[set[fx.Node], fx.Node | None]:
    """Nodes that the cut's inputs or the output need without the experts; the buffer in which kept code sees the result."""
    end, at = cut.result, cut.result.meta["at"]
    head = tape.ancestors(_with_writer(tape, list(cut.inputs), at))
    roots = _with_writer(tape, outputs_of(tape), float("inf"))
    if end in head:
        raise Refused("its router depends on the output of its experts")
    if end not in tape.ancestors(roots):
        raise Refused("its output does not depend on the sum over its experts")
    live = head | tape.ancestors(roots, stop={end})
    shared = [node for node in live if not is_leaf(node) and node.meta["at"] < at and stores(node) & stores(end)]
    if not (mutates(end) and shared):
        return live, None
    buffer = written(end)
    return live | tape.ancestors([buffer], stop={end}), buffer


def stores(node: fx.Node) -> set[int]:
    """Storages of a node's tensors."""
    return {storage(leaf) for leaf in tree_leaves(value(node)) if isinstance(leaf, Tensor)}


def _check_writes(plan: Plan, region: set[fx.Node]) -> None:
    """Dropped code must not write into what is kept."""
    end = plan.cut.result
    kept = set().union(*(stores(node) for node in plan.live if node.meta["at"] < end.meta["at"]))
    kept -= stores(end) if plan.buffer is not None else set()
    if any(stores(node.all_input_nodes[0]) & kept for node in region - {end} if mutates(node)):
        raise Refused("its experts write into a tensor that is used outside of them")


def _fold(plan: Plan, barred: set[fx.Node]) -> None:
    """Choose the modules that stay whole: kept in part, without any expert inside, and read through their outputs alone."""
    tape = plan.tapes[0]
    nodes, outs = tape.nodes, outputs_of(tape)
    spans = {id(call): set(nodes[call.start : call.stop]) for call in tape.calls}
    busy = {call.path for call in tape.calls if spans[id(call)] & barred}
    wanted = [*plan.cut.inputs, *outs, *([plan.buffer] if plan.buffer is not None else [])]
    for call in sorted(tape.calls, key=lambda call: (call.start, -call.stop)):
        span = spans[id(call)]
        inner = {node for node in span if not is_leaf(node)}
        if not call.path or call.path in busy or not inner & plan.live:
            continue
        if any(call.path == path or call.path.startswith(path + ".") for path in plan.fold):
            continue
        results = {leaf for leaf in tree_leaves(call.output) if isinstance(leaf, fx.Node)}
        read = {source for node in plan.live - span for source in node.all_input_nodes} | set(wanted)
        if read & inner <= results:
            plan.fold.add(call.path)
        elif results and _may_run_twice(tape, span):
            plan.echo.append(_same_call(plan.tapes, call))


def _same_call(tapes: list[Recording], call: Call) -> list[Call]:
    """A call of the first tape on every tape: the same module for the same time."""
    before = [other for other in tapes[0].calls if other.path == call.path]
    number = next(place for place, other in enumerate(before) if other is call)
    found = [[other for other in tape.calls if other.path == call.path] for tape in tapes]
    if any(len(calls) <= number for calls in found):
        raise Refused(f"its module {call.path} is not called as often at every size")
    return [calls[number] for calls in found]


def _may_run_twice(tape: Recording, span: set[fx.Node]) -> bool:
    """Whether a call draws no random numbers and writes only into its own tensors."""
    inside = [node for node in span if node.op == "call_function"]
    own = set().union(*(stores(node) for node in inside)) - set().union(*(stores(n) for n in tape.nodes if n not in span))
    random = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in inside)
    return not random and all(stores(node.all_input_nodes[0]) <= own for node in inside if mutates(node))


def place_of(event: Event) -> int:
    """Position of an event on its tape."""
    return event.start if isinstance(event, Call) else event.meta["at"]


def _events(tape: Recording, fold: set[str]) -> list[Event]:
    """A tape in order; every call of a folded module is one event."""
    starts = {call.start: call for call in tape.calls if call.path in fold and call.stop > call.start}
    nodes, events, place = tape.nodes, [], 0
    while place < len(nodes):
        call = starts.get(place)
        if call is not None:
            events.append(call)
            place = call.stop
            continue
        if not is_leaf(nodes[place]):
            events.append(nodes[place])
        place += 1
    return events


def _key(event: Event) -> tuple:
    return ("call", event.path) if isinstance(event, Call) else key_of(event)


def align(plan: Plan) -> None:
    """Find every kept event on every tape: from the front before the cut's result, from the back behind it.

    Raises Refused where kept code differs between sizes or data.
    """
    first, *others = [_events(tape, plan.fold) for tape in plan.tapes]
    nodes, middle = plan.tapes[0].nodes, first.index(plan.cut.result)

    def kept(event: Event) -> bool:
        return bool(plan.live.intersection(nodes[event.start : event.stop] if isinstance(event, Call) else [event]))

    rows = {place: [event] for place, event in enumerate(first) if place != middle and kept(event)}
    keys = [_key(event) for event in first]
    for events in others:
        front, back = common(keys, [_key(event) for event in events])
        for place, row in rows.items():
            if not (place < front if place < middle else place >= len(first) - back):
                at = row[0].path if isinstance(row[0], Call) else name_of(row[0])
                raise Refused(f"code outside of its experts changes with the number of tokens or with the data (at {at})")
            row.append(events[place if place < middle else place + len(events) - len(first)])
    plan.before = [row for place, row in rows.items() if place < middle]
    plan.behind = [row for place, row in rows.items() if place > middle]
    plan.result = _results(plan)


def _results(plan: Plan) -> list[fx.Node]:
    """The sum over the experts on every tape: what the code behind it reads in its place, or the last write of the buffer."""
    behind = [[(event.args, event.kwargs) for event in row] for row in plan.behind]
    found = read_as(plan.cut.result, [*behind, [tape.output for tape in plan.tapes]])
    if found is None and plan.buffer is not None:
        buffers = next((row for row in plan.before if row[0] is plan.buffer), None)
        if buffers is not None:
            found = [tape.writer[storage(value(node))] for tape, node in zip(plan.tapes, buffers, strict=True)]
    if found is None:
        raise Refused("the sum over its experts is read in another place at every size")
    return found
