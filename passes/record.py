"""Record one eager run of any module as an FX graph of aten calls, with parameter names, module calls and in-place writes.

Expert loops depend on the data, so no symbolic tracer sees all of them; a run that is merely watched sees every style.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpamoe.modes import in_mode


@dataclass
class Call:
    """One call of a submodule: its path, arguments and result with tensors as graph nodes, and the span of its nodes."""

    path: str
    args: tuple
    kwargs: dict
    start: int
    stop: int = 0
    output: Any = None


@dataclass
class Recording:
    """A recorded run. Every node has meta: value (its tensor), module (path), at (position), after (writers it must follow).

    A value shows its last state; with snapshots, meta left is a copy of what an in-place write left.

    graph: get_attr nodes are parameters and buffers by name, placeholders the input tensors, calls aten overloads. calls: in
    order of return. output: the result with tensors as nodes. writer: last node that wrote each storage.
    """

    graph: fx.Graph
    calls: list[Call] = field(default_factory=list)
    output: Any = None
    writer: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in the order of the run."""
        return list(self.graph.nodes)

    def release(self) -> None:
        """Let go of every recorded tensor: graphs are cycles, which would hold the weights until they are collected."""
        for node in self.graph.nodes:
            node.meta.clear()

    def inputs_of(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that this one reads, directly or through a tensor whose storage they wrote."""
        return [*node.all_input_nodes, *node.meta["after"]]

    def ancestors(self, roots: list[fx.Node], stop: set[fx.Node] = frozenset()) -> set[fx.Node]:
        """The roots and everything they depend on, not going through `stop`."""
        seen: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node not in seen and node not in stop:
                seen.add(node)
                todo += self.inputs_of(node)
        return seen


def value(node: fx.Node) -> Any:
    """What a node held when it was recorded."""
    return node.meta["value"]


def left(node: fx.Node) -> Any:
    """What a node held when its own call ended; its last state where no snapshots were kept."""
    return node.meta.get("left", node.meta["value"])


def storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage, valid while the recording keeps it alive."""
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    def __init__(self, root: nn.Module, execute: Callable, snapshots: bool):
        super().__init__()
        self.execute, self.snapshots = execute, snapshots
        self.recording = Recording(fx.Graph())
        self.node_of: dict[int, fx.Node] = {}
        self.kept: list[Tensor] = []  # so that no id is used twice
        self.order: list[fx.Node] = []
        self.open: list[Call] = []
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            self.leaf(tensor, "get_attr", name)

    def leaf(self, tensor: Tensor, kind: str, name: str) -> fx.Node:
        clean = name.replace(".", "_")
        node = self.recording.graph.create_node(kind, clean if kind == "placeholder" else name, name=clean)
        return self.note(node, tensor)

    def note(self, node: fx.Node, result: Any) -> fx.Node:
        path = self.open[-1].path if self.open else ""
        node.meta = {"value": result, "module": path, "at": len(self.order), "after": []}
        self.order.append(node)
        if isinstance(result, Tensor):
            self.node_of[id(result)] = node
            self.kept.append(result)
        return node

    def lift(self, leaf: Any) -> Any:
        """A tensor as its node; one that was made outside of aten becomes a constant."""
        if not isinstance(leaf, Tensor):
            return leaf
        found = self.node_of.get(id(leaf))
        return self.leaf(leaf, "get_attr", f"_constant_{len(self.order)}") if found is None else found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = self.execute(func, args, kwargs)
        graph, writer = self.recording.graph, self.recording.writer
        node = graph.create_node("call_function", func, tree_map(self.lift, tuple(args)), tree_map(self.lift, dict(kwargs)))
        self.note(node, result)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        direct = set(node.all_input_nodes)
        node.meta["after"] = list(dict.fromkeys(w for t in read if (w := writer.get(storage(t))) and w not in direct))
        if not isinstance(result, Tensor):
            for position, part in enumerate(tree_leaves(result)):
                if isinstance(part, Tensor):
                    self.note(graph.call_function(operator.getitem, (node, position)), part)
        for target in _written(func, args, kwargs):
            writer[storage(target)] = node
            self.node_of[id(target)] = node
            if self.snapshots:
                node.meta["left"] = target.clone()
        return result


def _written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """Tensors that a call writes in place, by its schema."""
    if not func._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    return written


@contextmanager
def _watched(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Note every call of every submodule inside the block."""

    def enter(path: str):
        def hook(module, given, named):
            recorder.open.append(
                Call(path, tree_map(recorder.lift, given), tree_map(recorder.lift, named), len(recorder.order))
            )

        return hook

    def leave(module, given, named, result):
        call = recorder.open.pop()
        call.stop, call.output = len(recorder.order), tree_map(recorder.lift, result)
        recorder.recording.calls.append(call)

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path), with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _execute(func, args: tuple, kwargs: dict) -> Any:
    return func(*args, **kwargs)


def record(
    model: nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    training: bool = False,
    snapshots: bool = False,
    execute: Callable = _execute,
) -> Recording:
    """Run `model` once, in eval or train mode and without gradients, and return what it computed. The model is unchanged.

    snapshots: keep copies of what in-place writes left. execute: computes one aten call, given op, args and kwargs. Raises
    whatever the model raises, with the path of the module that was running as a note.
    """
    kwargs = kwargs or {}
    recorder = _Recorder(model, execute, snapshots)
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and id(tensor) not in recorder.node_of:
            recorder.leaf(tensor, "placeholder", f"input_{len(recorder.order)}")
    try:
        with _watched(model, recorder), in_mode(model, training), torch.no_grad(), recorder:
            result = model(*args, **kwargs)
    except Exception as error:
        running = recorder.open[-1].path if recorder.open else ""
        error.add_note(f"while recording module {running or type(model).__name__!r}") if hasattr(error, "add_note") else None
        raise
    recorder.recording.output = tree_map(recorder.lift, result)
    return recorder.recording
