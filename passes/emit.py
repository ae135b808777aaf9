"""Write the plan of a block as an fx.GraphModule: what comes before, experts(hidden, index, weights), what comes behind."""

import inspect
import operator
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from dpamoe.passes.cut import Refused, mutates
from dpamoe.passes.experts import name_of
from dpamoe.passes.record import Call, value
from dpamoe.passes.tapes import BlockInputs, Event, Plan, place_of

aten = torch.ops.aten
PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, slice)


def expect(found: Any, name: str, recorded: Any) -> None:
    """Guard inside a rewritten block: what the recording has fixed must still hold. Compilers evaluate it while tracing."""
    if found != recorded:
        raise ValueError(
            f"this block was rewritten for {name} = {recorded} and got {found}: revert it and transform it as it is used"
        )


def only_in_mode(module: nn.Module, args: tuple, recorded: bool) -> None:
    """Forward pre-hook of blocks whose own code differs between eval and train mode."""
    expect(module.training, "training", recorded)


def free_name(block: nn.Module) -> str:
    """A name for the experts that the block does not use."""
    name = "routed_experts"
    while hasattr(block, name):
        name += "_"
    return name


def emit(plan: Plan, block: nn.Module, inputs: BlockInputs, experts: nn.Module, name: str) -> fx.GraphModule:
    """Build the graph; parameters and kept modules are the block's own objects under their own names.

    Raises Refused where a size or a value is not explained by the sizes of the input.
    """
    writer = _Writer(plan, inputs)
    echoes = [echo for echo in plan.echo if echo[0].stop <= plan.cut.result.meta["at"]]
    for row in plan.before:
        while echoes and place_of(row[0]) >= echoes[0][0].stop:
            writer.event(echoes.pop(0))
        writer.event(row)
    for echo in echoes:
        writer.event(echo)
    writer.experts(name)
    for row in plan.behind:
        writer.event(row)
    writer.graph.output(writer.argument([tape.output for tape in plan.tapes]))
    writer.graph.eliminate_dead_code(_has_effect)
    return _module(writer, block, experts, name)


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output", "call_module") or node.target is expect or mutates(node)


def _module(writer: "_Writer", block: nn.Module, experts: nn.Module, name: str) -> fx.GraphModule:
    owner = nn.Module()
    owner.add_module(name, experts)
    modules = {node.target for node in writer.graph.nodes if node.op == "call_module"} - {name}
    tensors = {node.target for node in writer.graph.nodes if node.op == "get_attr"}
    for path in sorted(modules):
        _attach(owner, block, path)
    for path in sorted(tensors - set(writer.constants)):
        if not any(path.startswith(module + ".") for module in modules):
            _attach(owner, block, path)
    for path, tensor in writer.constants.items():
        owner.register_buffer(path, tensor, persistent=False)
    graph = fx.GraphModule(owner, writer.graph, class_name=type(block).__name__)
    for path, module in owner.named_modules():  # the constructor copies attributes, but not which buffers are saved
        graph.get_submodule(path)._non_persistent_buffers_set |= module._non_persistent_buffers_set
        if path not in modules and not any(path.startswith(kept + ".") for kept in modules):
            graph.get_submodule(path).training = block.training
    for path, held in vars(block).items():  # a parent may ask its block for them
        if (held is None or isinstance(held, PLAIN)) and not path.startswith("_") and not hasattr(graph, path):
            setattr(graph, path, held)
    graph.graph.lint()
    return graph


def _attach(owner: nn.Module, block: nn.Module, path: str) -> None:
    """Put a module, parameter or buffer of the block at the same path below `owner`."""
    *parents, last = path.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            owner.add_module(parent, nn.Module())
        owner, block = getattr(owner, parent), getattr(block, parent)
    found = getattr(block, last)
    if isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
        owner.register_buffer(last, found, persistent=last not in block._non_persistent_buffers_set)
    else:
        setattr(owner, last, found)


class _Writer:
    """The graph in the making. known: nodes of the first tape by their new nodes; same: by their like on every tape."""

    def __init__(self, plan: Plan, inputs: BlockInputs):
        self.plan, self.graph = plan, fx.Graph()
        self.known: dict[fx.Node, fx.Node] = {}
        self.same: dict[fx.Node, list[fx.Node]] = {}
        self.constants: dict[str, Tensor] = {}
        self.sizes: list[tuple[fx.Node, int, list[int]]] = []
        self.tensor = self.placeholders(inputs)

    def call(self, function: Callable, *args) -> fx.Node:
        return self.graph.call_function(function, args)

    def placeholders(self, inputs: BlockInputs) -> fx.Node:
        """forward()'s own names, order and defaults, with a guard on everything plain and on the tensor's type and rank."""
        twins = [next(node for node in tape.nodes if node.op == "placeholder") for tape in self.plan.tapes]
        found, tensor = None, value(twins[0])
        for name, held in inputs.bound.arguments.items():
            parameter = inputs.bound.signature.parameters[name]
            if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                continue
            node = self.graph.placeholder(name, default_value=parameter.default)
            if name == inputs.name:
                found = node
            else:
                self.call(expect, node, name, held)
        self.call(expect, self.call(getattr, found, "dtype"), f"{inputs.name}.dtype", tensor.dtype)
        self.call(expect, self.call(getattr, found, "ndim"), f"{inputs.name}.ndim", tensor.dim())
        self.given = twins[0]
        self.bind(twins, found)
        for place, lengths in enumerate(zip(*(value(twin).shape for twin in twins), strict=True)):
            if len(set(lengths)) > 1:
                self.sizes.append((found, place, list(lengths)))
        return found

    def bind(self, trees: list, node: fx.Node) -> None:
        """Remember that these parallel results (tensors, or nested tuples, lists and dicts of them) are `node`."""
        first = trees[0]
        if isinstance(first, fx.Node):
            self.known[first], self.same[first] = node, list(trees)
        elif isinstance(first, dict | list | tuple):
            for key in first if isinstance(first, dict) else range(len(first)):
                if any(isinstance(leaf, fx.Node) for leaf in tree_leaves(first[key])):
                    self.bind([tree[key] for tree in trees], self.call(operator.getitem, node, key))

    def argument(self, values: list) -> Any:
        """The same argument on every tape as one argument of the graph."""
        first = values[0]
        if isinstance(first, int) and not isinstance(first, bool) and all(type(other) is int for other in values):
            return self.size(values)
        if isinstance(first, fx.Node) and all(isinstance(other, fx.Node) for other in values):
            return self.value(values)
        if any(type(other) is not type(first) for other in values):
            raise Refused("an argument changes its kind with the number of tokens")
        if isinstance(first, list | tuple):
            if len({len(other) for other in values}) > 1:
                raise Refused("a list of arguments changes its length with the number of tokens or the data")
            items = [self.argument(list(others)) for others in zip(*values, strict=True)]
            if hasattr(first, "_fields"):
                return type(first)(*items)
            return items if isinstance(first, list) else tuple(items)
        if type(first) in (dict, fx.immutable_collections.immutable_dict):
            return {key: self.argument([other[key] for other in values]) for key in first}
        if isinstance(first, torch.device) and first == value(self.given).device:
            return self.call(getattr, self.tensor, "device")
        if any(other is not first and other != first for other in values):
            raise Refused(f"the value {first} depends on the number of tokens or the data")
        if first is not None and not isinstance(first, PLAIN):
            raise Refused(f"it hands on an object of type {type(first).__name__}, which a graph cannot hold")
        return first

    def value(self, twins: list[fx.Node]) -> fx.Node:
        """The new node of a tensor, or the parameter, buffer or constant that it is."""
        first = twins[0]
        if first not in self.known and first.op != "get_attr":
            raise Refused(f"the result of {name_of(first)} is needed outside of its experts")
        if first not in self.known and _is_constant(first):
            if any(not torch.equal(value(twin), value(first)) for twin in twins):
                raise Refused("a tensor made in Python depends on the number of tokens or the data")
            target = f"_constant_{len(self.constants)}"
            self.constants[target] = value(first)
            self.bind(twins, self.graph.create_node("get_attr", target))
        elif first not in self.known:
            self.bind(twins, self.graph.create_node("get_attr", first.target))
        if [_identity(twin) for twin in self.same[first]] != [_identity(twin) for twin in twins]:
            raise Refused("what a call reads changes with the number of tokens or the data")
        return self.known[first]

    def size(self, numbers: list[int]) -> int | fx.Node:
        """Parallel integers as a constant, or as a * M + b with M a product of input sizes."""
        if len(set(numbers)) == 1:
            return numbers[0]
        for parts in (c for length in range(1, len(self.sizes) + 1) for c in combinations(self.sizes, length)):
            products = [prod(lengths[tape] for _, _, lengths in parts) for tape in range(len(numbers))]
            low, high = products.index(min(products)), products.index(max(products))
            factor = Fraction(numbers[high] - numbers[low], max(1, products[high] - products[low]))
            offset = numbers[low] - factor * products[low]
            fits = all(factor * product + offset == number for product, number in zip(products, numbers, strict=True))
            if fits and offset.denominator == 1:
                return self.expression(parts, factor, int(offset))
        raise Refused(f"the size {numbers} at {self.sizes[0][2]} is no multiple of the number of tokens plus a constant")

    def expression(self, parts: tuple, factor: Fraction, offset: int) -> fx.Node:
        """factor * product of the sizes + offset."""
        result, *more = [self.call(aten.sym_size.int, node, place) for node, place, _ in parts]
        for size in more:
            result = self.call(operator.mul, result, size)
        result = result if factor.numerator == 1 else self.call(operator.mul, result, factor.numerator)
        result = result if factor.denominator == 1 else self.call(operator.floordiv, result, factor.denominator)
        return self.call(operator.add, result, offset) if offset else result

    def event(self, row: list[Event]) -> None:
        """One kept call: of a module, of an operation, or the choice of one of an operation's results."""
        first = row[0]
        args = self.argument([tuple(event.args) for event in row])
        kwargs = self.argument([dict(event.kwargs) for event in row])
        if isinstance(first, Call):
            self.bind([call.output for call in row], self.graph.call_module(first.path, args, kwargs))
        else:
            self.bind(row, self.graph.call_function(first.target, args, kwargs))

    def flat(self, node: fx.Node, width: int) -> fx.Node:
        """A cut's input as [n, width]."""
        twins = self.same.get(node, [node])
        known, held = self.value(twins), value(node)
        if held.dim() == 2 and held.shape[1] == width:
            return known
        return self.call(aten.reshape.default, known, [self.size([value(twin).numel() // width for twin in twins]), width])

    def experts(self, name: str) -> None:
        """experts(hidden, index, weights), put into the type, shape and, where kept code needs it, the buffer of the result."""
        cut, end = self.plan.cut, value(self.plan.cut.result)
        width = value(cut.weights).numel() // cut.rows
        index = self.flat(cut.index, cut.active)
        weights = self.flat(cut.weights, width)
        if cut.scored:
            index64 = index if value(cut.index).dtype == torch.int64 else self.call(aten.to.dtype, index, torch.int64)
            weights = self.call(aten.gather.default, weights, 1, index64)
        hidden = self.flat(cut.hidden, value(cut.hidden).shape[-1])
        result = self.graph.call_module(name, (hidden, index, weights))
        if end.dtype != value(cut.hidden).dtype:
            result = self.graph.call_function(aten._to_copy.default, (result,), {"dtype": end.dtype})
        if end.dim() != 2 or end.shape[0] != cut.rows:
            shapes = [list(value(node).shape) for node in self.plan.result]
            result = self.call(aten.reshape.default, result, self.argument(shapes))
        if self.plan.buffer is not None:
            result = self.call(aten.copy_.default, self.value(self.same[self.plan.buffer]), result)
        self.bind(self.plan.result, result)


def _is_constant(node: fx.Node) -> bool:
    """Whether a get_attr node is a tensor made outside of aten, not a parameter or buffer."""
    return node.target.startswith("_constant_")


def _identity(node: fx.Node) -> fx.Node | str:
    """What is the same on every tape: the name of a parameter or buffer, else the node itself."""
    return node.target if node.op == "get_attr" and not _is_constant(node) else node
