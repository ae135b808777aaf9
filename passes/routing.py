"""Fuse a router in front of the experts' op into one op, `linear_route` or `route`.

Nodes between a matmul and the experts that are all of kinds routers are made of (see `_is_known`) are run on sample logits and
biases, and rules of routers are tried until one gives the same experts and gates (`router_rule`). A router that no rule
matches, of which anything else is read or written elsewhere, or that gradients flow through, stays as it is. Equal scores go to
the lower expert, which `torch.topk` leaves open.
"""

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

import dpamoe.kernels.router_ops  # noqa: F401  registers torch.ops.dpamoe.route
from dpamoe.kernels.routing import Rule
from dpamoe.passes.fuse import is_ours, widened
from dpamoe.passes.router_rule import Router, callee, find_rule, sizes_of, value_of

ops = torch.ops.dpamoe
MATMULS = {torch.nn.functional.linear, torch.matmul, torch.mm, torch.addmm, operator.matmul}
METHODS = {"matmul", "mm", "__matmul__"}
# What routers are made of: nothing here draws numbers or mixes tokens, and what it writes it has made.
ALONG_ROWS = {"softmax", "topk", "sort", "sum", "max", "amax", "gather", "scatter", "scatter_"}
POINTWISE = {
    "sigmoid", "mul", "imul", "div", "truediv", "itruediv", "add", "iadd", "clamp", "masked_fill", "bool", "invert",
    "logical_not", "eq", "to", "float", "type", "type_as",
}  # fmt: skip
SHAPES = {
    "getitem", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous",
    "repeat_interleave", "zeros_like", "zeros",
}  # fmt: skip
IN_PLACE = {"imul", "itruediv", "iadd", "scatter_"}
FOLLOWING = {"ge", "lt", "abs", "float", "masked_fill", "getitem", "output"}  # what may read ids and gates beside our ops
LEAST_SHIFT = 1e-12  # numbers added to a sum up to here, against which it is nothing, keep it from 0
MOST_NODES = 80  # between logits and experts, several times what routers with groups have


def fuse_routing(gm: fx.GraphModule) -> int:
    """Turn every recognised router in front of an expert op into one op, in place; returns how many there were.

    `linear_route` takes the matmul along if nobody else reads its logits; else `route` reads them.
    """
    fused, known = 0, {}
    while pair := next((pair for pair in _pairs(gm) if pair not in known), None):
        known[pair] = None
        router = _router(gm, *pair)
        if router is None or not _fits(router):
            continue
        form = _form(router)
        if form not in known:
            known[form] = find_rule(gm, router)
        if known[form] is not None:
            rule, place = known[form]
            _replace(gm.graph, router, rule, None if place is None else router.leaves[place])
            fused += 1
    gm.graph.lint()
    gm.recompile()
    return fused


def _pairs(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The ids and gates that expert ops read."""
    places = dict.fromkeys((ops.expert_ffn, ops.routed_ffn, ops.threshold_ffn), (1, 2))
    places |= dict.fromkeys((ops.routed_ffn_counted, ops.threshold_ffn_counted), (2, 3))
    places |= dict.fromkeys((ops.allocate, ops.allocate_dispatch, ops.allocate_threshold), (1, 0))
    places |= {packet.default: at for packet, at in places.items()}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in places and len(node.args) > 3:
            pair = tuple(node.args[at] for at in places[node.target])
            if all(isinstance(part, fx.Node) for part in pair):
                yield pair


def _router(gm: fx.GraphModule, ids: fx.Node, gates: fx.Node) -> Router | None:
    """What lies between one matmul and these nodes, or None if there is none, or it is more than a router."""
    ends, inner, level = {}, set(), [ids, gates]
    while level:
        node = level.pop()
        if _is_end(node):
            ends[node] = None
        elif node not in inner:
            if not _is_known(node) or len(inner) == MOST_NODES:
                return None
            inner.add(node)
            level += [*_read_by(node), *(user for user in node.users if callee(user) in IN_PLACE and user.args[0] is node)]
    order = tuple(node for node in gm.graph.nodes if node in inner)
    logits = [node for node in ends if _is_matmul(node)]
    if len(logits) != 1 or not {ids, gates} <= inner:
        return None
    router = Router(logits[0], ids, gates, tuple(node for node in ends if node not in logits), order)
    return router if _is_alone(router) else None


def _is_end(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr") or isinstance(value_of(node), torch.SymInt) or _is_matmul(node)


def _is_matmul(node: fx.Node) -> bool:
    return node.target in {"call_function": MATMULS, "call_method": METHODS}.get(node.op, ())


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose numbers a node reads; of what it is only made like it reads none."""
    return node.all_input_nodes[:1] if callee(node) in ("type_as", "expand_as", "zeros_like") else node.all_input_nodes


def _is_known(node: fx.Node) -> bool:
    """Whether a router may be made of it; what works along rows works along the last dimension."""
    name, numbers = callee(node), [part for part in node.args[1:] if isinstance(part, int | float)]
    if name in ALONG_ROWS:
        return _dimension(node, name) in (-1, _rank(node) - 1)
    if name == "clamp":  # from below, to keep a sum from 0
        limits = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
        return limits.keys() == {"min"} and isinstance(limits["min"], float) and 0 < limits["min"] <= LEAST_SHIFT
    if name in ("add", "iadd"):
        return not node.kwargs and all(0 <= number <= LEAST_SHIFT for number in numbers)
    return name in POINTWISE and "out" not in node.kwargs or name in SHAPES


def _dimension(node: fx.Node, name: str) -> object:
    """The dimension that a node works along; None for all."""
    place = {"topk": 2}.get(name, 1)
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1 if name in ("topk", "sort") else None)
    return given[0] if isinstance(given, list | tuple) and len(given) == 1 else given


def _rank(node: fx.Node) -> int:
    value = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return value.dim() if isinstance(value, Tensor) else 0


def _is_alone(router: Router) -> bool:
    """Whether nobody else reads or writes what stands inside, or could write what it reads."""
    inner, last = set(router.inner), {router.ids, router.gates}
    for node in (*router.inner, router.logits, *router.leaves):
        others = [user for user in node.users if user not in inner]
        if node in last:
            others = [user for user in others if not is_ours(user) and callee(user) not in FOLLOWING and node in _read_by(user)]
        elif node is router.logits:
            others = [user for user in others if user.op != "output"]
        if others or (node not in inner and any(callee(u) in IN_PLACE and u.args[0] is node for u in node.users)):
            return False
    return True


def _fits(router: Router) -> bool:
    """Whether shapes and dtypes are those of a router, its leaves one number for each expert, and no gradient is asked for."""
    values = [value_of(node) for node in (router.logits, router.ids, router.gates, *router.leaves)]
    if not all(isinstance(value, Tensor) and sizes_of(value) for value in values):
        return False
    logits, ids, gates, *leaves = values
    (*tokens, experts), chosen = sizes_of(logits), sizes_of(ids)
    tokens = torch.Size(tokens).numel()
    fits = logits.dim() > 1 and len(chosen) == 2 and chosen == sizes_of(gates) and tokens == chosen[0] > 0
    floats = all(value.is_floating_point() for value in (logits, gates, *leaves))
    return (
        fits and floats and ids.dtype == torch.int64 and not logits.requires_grad
        and all(torch.Size(sizes_of(leaf)).numel() == experts for leaf in leaves)
    )  # fmt: skip


def _form(router: Router) -> tuple:
    """Equal for routers that compute the same, whatever their weights."""
    numbered = {node: n for n, node in enumerate((router.logits, *router.leaves, *router.inner))}
    arguments = [fx.map_arg((node.args, node.kwargs), lambda part: f"%{numbered.get(part)}") for node in router.inner]
    ends = [(value_of(node).shape, value_of(node).dtype, value_of(node).device) for node in (router.logits, *router.leaves)]
    targets = [node.target for node in router.inner]
    return str((targets, arguments, ends, numbered[router.ids], numbered[router.gates])), router.ordered


def _replace(graph: fx.Graph, router: Router, rule: Rule, bias: fx.Node | None) -> None:
    with graph.inserting_before(router.logits.next):
        op, arguments = _matmul_too(graph, router) or (ops.route, (graph.call_method("flatten", (router.logits, 0, -2)),))
        if bias is not None and value_of(bias).dim() != 1:
            bias = graph.call_method("flatten", (bias,))
        numbers = (rule.active, rule.score, rule.norm, rule.scale, rule.groups, rule.kept_groups, rule.group_score)
        both = graph.call_function(op.default, (*arguments, bias, *numbers, value_of(router.gates).dtype), name="route")
        for place, node in enumerate((router.ids, router.gates)):
            part = graph.call_function(operator.getitem, (both, place), name=f"routed_{place}")
            part.meta["example_value"] = value_of(node)
            node.replace_all_uses_with(part)
    for node in (*reversed(router.inner), router.logits):
        if not node.users:
            graph.erase_node(node)


def _matmul_too(graph: fx.Graph, router: Router) -> tuple[object, tuple] | None:
    """`linear_route` and its rows, weight and shift, if the logits are those of a linear layer and nobody else reads them.

    The weight is one of the model's, which no kernel right before writes; a cast that widens it is left out.
    """
    node = router.logits
    if node.target is not torch.nn.functional.linear or any(user not in router.inner for user in node.users):
        return None
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight, shift = (given.get(name) for name in ("input", "weight", "bias"))
    weight = widened(weight) or weight
    held = [part for part in (weight, shift) if part is not None]
    if not all(part.op in ("placeholder", "get_attr") and isinstance(value_of(part), Tensor) for part in held):
        return None
    fits = value_of(weight).dim() == 2 and (shift is None or value_of(shift).shape == value_of(weight).shape[:1])
    if not fits or value_of(node).dtype != value_of(x).dtype:  # autocast
        return None
    return ops.linear_route, (graph.call_method("flatten", (x, 0, -2)), weight, shift)
