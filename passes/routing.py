"""Fuse a router in front of the experts' op into one op, `linear_route` or `route`; recognised by value, not by form.

The nodes in between are run on sample logits, and rules of routers are tried until one gives the same experts and gates. A
router that no rule matches, or whose nodes are read elsewhere too, stays as it is.
"""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

import dpamoe.kernels.router_ops  # noqa: F401  registers torch.ops.dpamoe.route
from dpamoe.kernels import routing
from dpamoe.kernels.routing import Rule

ops = torch.ops.dpamoe
MATMULS = {torch.nn.functional.linear, torch.matmul, torch.mm, torch.addmm, operator.matmul}
METHODS = {"matmul", "mm", "__matmul__"}
IN_PLACE = {
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior", "ixor")
}
MOST_NODES = 80  # between logits and experts, several times what routers with groups have
LEAST_ROWS = 48  # a rule is believed that is right for so many tokens
BIAS_SPREAD = 0.2  # enough to change who is chosen
ROUNDINGS = 2  # of the gates' dtype: sums and powers may be taken in another order
OWN_ROUNDING = 1e-5  # the same for fp32: exponentials of numbers up to about 5, summed over the experts


@dataclass(frozen=True)
class Router:
    """Nodes from logits to ids and gates. leaves: other tensors read; inner: the nodes in between, in order."""

    logits: fx.Node
    ids: fx.Node
    gates: fx.Node
    leaves: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]


def fuse_routing(gm: fx.GraphModule) -> int:
    """Turn every recognised router in front of an expert op into one op, in place; returns how many there were.

    `linear_route` takes the matmul along if nobody else reads its logits; else `route` reads them.
    """
    fused = 0
    for ids, gates in _pairs(gm):
        router = _router(gm, ids, gates)
        found = router and _rule(gm, router)
        if found:
            _replace(gm.graph, router, *found)
            fused += 1
    gm.graph.lint()
    gm.recompile()
    return fused


def _pairs(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """The ids and gates that expert ops read, each pair once."""
    places = {ops.expert_ffn: (1, 2), ops.routed_ffn: (1, 2), ops.threshold_ffn: (1, 2)}
    places |= dict.fromkeys((ops.allocate, ops.allocate_dispatch, ops.allocate_threshold), (1, 0))
    known = {packet.default: at for packet, at in places.items()} | places
    found = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in known:
            pair = tuple(node.args[at] for at in known[node.target])
            if all(isinstance(part, fx.Node) for part in pair):
                found[pair] = None
    return list(found)


def _router(gm: fx.GraphModule, ids: fx.Node, gates: fx.Node) -> Router | None:
    """What lies between one matmul and these nodes, or None if there is none, or it is read by others."""
    ends, inner, level = {}, set(), [ids, gates]
    while level and len(inner) <= MOST_NODES:
        node = level.pop()
        if _is_end(node):
            ends[node] = None
        elif node not in inner:
            inner.add(node)
            level += [*_read_by(node), *(user for user in node.users if _writes(user, node))]
    order = tuple(node for node in gm.graph.nodes if node in inner)
    logits = [node for node in ends if _is_matmul(node)]
    leaves = tuple(node for node in ends if node not in logits)
    last = {ids, gates}
    read_elsewhere = any(user not in inner for node in order if node not in last for user in node.users)
    if level or len(logits) != 1 or not last <= inner or read_elsewhere or _written_aside(gm, {*ends, *inner}, inner):
        return None
    return Router(*logits, ids, gates, leaves, order)


def _is_end(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr") or isinstance(_value(node), torch.SymInt) or _is_matmul(node)


def _is_matmul(node: fx.Node) -> bool:
    return node.target in {"call_function": MATMULS, "call_method": METHODS}.get(node.op, ())


def _value(node: fx.Node) -> object:
    """What Dynamo saw there: a tensor, a number, or nothing for tuples."""
    return node.meta.get("example_value")


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose numbers a node reads; of what it is only made like it reads none."""
    return node.all_input_nodes[:1] if _is_cast(node) else node.all_input_nodes


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "type_as"


def _written_aside(gm: fx.GraphModule, whole: set[fx.Node], inner: set[fx.Node]) -> bool:
    """Whether any of the nodes is written in place, itself or through views of it, by one that is not inner, or is an end."""
    for node in gm.graph.nodes:
        if not (node.args and isinstance(node.args[0], fx.Node) and _writes(node, node.args[0])):
            continue
        source = node.args[0]
        while source not in whole and source.args and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        if source in whole and (node not in inner or source not in inner):
            return True
    return False


def _writes(node: fx.Node, target: fx.Node) -> bool:
    """Whether a node writes into its first argument, and that is target."""
    if not node.args or node.args[0] is not target:
        return False
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    return node.op == "call_function" and node.target in IN_PLACE


def _hint(value: int | torch.SymInt) -> int:
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def _rule(gm: fx.GraphModule, router: Router) -> tuple[Rule, fx.Node | None, torch.dtype] | None:
    """The rule that gives what the router gives, its bias, and the dtype of the gates."""
    values = [_value(node) for node in (router.logits, router.ids, router.gates)]
    if not all(isinstance(value, Tensor) for value in values):
        return None
    logits, ids, gates = values
    shapes = [tuple(map(_hint, value.shape)) for value in values]
    experts, fits = shapes[0][-1], len(shapes[1]) == 2 and shapes[1] == shapes[2] and 0 not in shapes[0]
    floats = logits.is_floating_point() and gates.is_floating_point()
    if not (fits and floats and ids.dtype == torch.int64 and shapes[1][0] * experts == torch.Size(shapes[0]).numel()):
        return None
    if any(_numbers(node) != experts for node in router.leaves):  # sizes too: what depends on them may differ at others
        return None
    seen = _answers(gm, router, shapes[0], logits)
    for rule, bias in _candidates(router, experts, shapes[1][1]):
        if all(_same(sample, rule, bias) for sample in seen):
            return rule, bias, gates.dtype
    return None


def _numbers(node: fx.Node) -> int | None:
    """How many floats a tensor has; None for anything else."""
    value = _value(node)
    return _hint(value.numel()) if isinstance(value, Tensor) and value.is_floating_point() else None


@dataclass(frozen=True)
class Sample:
    """One call of a router: its logits [T, E], what stood in its leaves, and its answer."""

    logits: Tensor
    leaves: dict[fx.Node, Tensor]
    ids: Tensor
    gates: Tensor


@torch.no_grad()
def _answers(gm: fx.GraphModule, router: Router, shape: tuple[int, ...], like: Tensor) -> list[Sample]:
    """What the router answers to random logits, no two of a row equal, and random biases; half the rows are alike."""
    alone, random = _alone(gm, router), torch.Generator().manual_seed(0)
    rows, experts = torch.Size(shape[:-1]).numel(), shape[-1]
    pool = torch.randn(16 * experts + 1024, generator=random).mul(1.5).to(like.dtype).unique()
    samples = []
    for _ in range(-(-LEAST_ROWS // rows)):
        picked = torch.stack([torch.randperm(len(pool), generator=random)[:experts] for _ in range(rows)])
        picked[1 : rows // 2] = picked[0]  # all to the same experts, which shows where their number is limited
        logits, leaves = pool[picked].to(like.device), {}
        for node in router.leaves:
            spread = torch.rand(experts, generator=random).mul(2 * BIAS_SPREAD).sub(BIAS_SPREAD)
            leaves[node] = spread.to(_value(node).device, _value(node).dtype).view(_value(node).shape)
        ids, gates = alone(logits.view(shape).clone(), *(leaf.clone() for leaf in leaves.values()))
        samples.append(Sample(logits, leaves, ids, gates))
    return samples


def _alone(gm: fx.GraphModule, router: Router) -> fx.GraphModule:
    """The router as a graph of its own: (logits, leaves) to (ids, gates)."""
    graph, made = fx.Graph(), {}
    for node in (router.logits, *router.leaves):
        made[node] = graph.placeholder(node.name)
    for node in router.inner:
        if _is_cast(node):
            made[node] = graph.call_method("to", (made[node.args[0]], _value(node).dtype))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output((made[router.ids], made[router.gates]))
    return fx.GraphModule(gm, graph)


def _candidates(router: Router, experts: int, active: int) -> Iterator[tuple[Rule, fx.Node | None]]:
    """Rules that the router may follow, with the numbers that stand in it."""
    constants = [value for node in router.inner for value in _constants((node.args, node.kwargs))]
    whole = dict.fromkeys(value for value in constants if isinstance(value, int) and 1 <= value <= experts)
    scales = dict.fromkeys([1.0, *(float(value) for value in constants if value > 0)])
    groups = [(1, 1, "max")]
    for count, kept in itertools.product(whole, whole):
        if count > 1 and kept < count and experts % count == 0 and active <= experts // count * kept:
            groups += [(count, kept, score) for score in routing.GROUP_SCORES]
    for score, bias, group, norm, scale in itertools.product(
        routing.SCORES, (*router.leaves, None), groups, routing.NORMS, scales
    ):  # fmt: skip
        yield Rule(active, score, norm, scale, *group), bias


def _constants(arguments: object) -> list[int | float]:
    """The finite numbers among arguments, however deep."""
    if isinstance(arguments, dict):
        return _constants(tuple(arguments.values()))
    if isinstance(arguments, tuple | list):
        return [value for part in arguments for value in _constants(part)]
    number = isinstance(arguments, int | float) and not isinstance(arguments, bool)
    return [arguments] if number and abs(arguments) < float("inf") else []


def _same(sample: Sample, rule: Rule, bias: fx.Node | None) -> bool:
    """Whether the rule chooses the same experts, in any order, and gives them the same gates."""
    ids, gates = routing.route(sample.logits, None if bias is None else sample.leaves[bias].flatten(), rule, torch.float32)
    (ids, places), (expected, others) = ids.sort(-1), sample.ids.sort(-1)
    if not torch.equal(ids, expected):
        return False
    rounding = max(OWN_ROUNDING, ROUNDINGS * torch.finfo(sample.gates.dtype).eps)
    expected = sample.gates.float().gather(-1, others)
    return torch.allclose(gates.gather(-1, places), expected, rtol=rounding, atol=0.0)


def _replace(graph: fx.Graph, router: Router, rule: Rule, bias: fx.Node | None, dtype: torch.dtype) -> None:
    with graph.inserting_before(router.logits.next):
        op, arguments = _matmul_too(graph, router) or (ops.route, (graph.call_method("flatten", (router.logits, 0, -2)),))
        if bias is not None and _value(bias).dim() != 1:
            bias = graph.call_method("flatten", (bias,))
        numbers = (rule.active, rule.score, rule.norm, rule.scale, rule.groups, rule.kept_groups, rule.group_score)
        both = graph.call_function(op.default, (*arguments, bias, *numbers, dtype), name="route")
        for place, node in enumerate((router.ids, router.gates)):
            part = graph.call_function(operator.getitem, (both, place))
            part.meta["example_value"] = _value(node)
            node.replace_all_uses_with(part)
    for node in (*reversed(router.inner), router.logits):
        if not node.users:
            graph.erase_node(node)


def _matmul_too(graph: fx.Graph, router: Router) -> tuple[object, tuple] | None:
    """`linear_route` and its rows, weight and shift, if the logits are those of a linear layer and nobody else reads them."""
    node = router.logits
    if node.target is not torch.nn.functional.linear or any(user not in router.inner for user in node.users):
        return None
    given = [*node.args, *(node.kwargs[name] for name in ("input", "weight", "bias")[len(node.args) :] if name in node.kwargs)]
    x, weight, shift = (*given, None)[:3]
    values = [_value(part) for part in (x, weight, node)]
    same = all(isinstance(value, Tensor) and value.dtype == values[0].dtype for value in values)
    if not same or values[1].dim() != 2:  # autocast, or no weight at all
        return None
    return ops.linear_route, (graph.call_method("flatten", (x, 0, -2)), weight, shift)
