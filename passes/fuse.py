"""Fuse what counts planes into the allocator, and both into the expert computation behind them: nothing is launched beside."""

import operator

import torch
from torch import fx

ops = torch.ops.dpamoe
READERS = (ops.allocate, ops.allocate_threshold, ops.expert_ffn, ops.routed_ffn, ops.threshold_ffn)  # of ids and gates
COUNTING = (ops.allocate, ops.allocate_dispatch, ops.allocate_threshold)


def fuse_allocation(gm: fx.GraphModule) -> int:
    """Turn every `allocate` whose planes one `expert_ffn` with the same ids reads into `routed_ffn`, in place.

    `allocate_threshold`, which must have the same gates too, becomes `threshold_ffn` likewise, and a lone `count` of the planes
    goes along. Other readers of the planes read them from the fused op. Returns how many pairs were fused.
    """
    fused = 0
    for expert in list(gm.graph.nodes):
        chunks = expert.args[3] if _is(expert, ops.expert_ffn) else None
        if not _feeds(chunks, expert):
            continue
        counters = [user for user in chunks.users if _is(user, ops.count)]
        counters = counters if len(counters) == 1 and len(counters[0].args[1].users) == 1 else []
        spent = counters[0].args[1] if counters else None
        place = min(user for user in chunks.users if user not in counters)
        needed = {*expert.all_input_nodes, *chunks.all_input_nodes, *([spent] if counters else [])} - {chunks}
        if any(node >= place for node in needed):
            continue
        for counter in counters:
            gm.graph.erase_node(counter)
        with gm.graph.inserting_before(place):
            both = _both(gm.graph, expert, chunks, spent)
            output = gm.graph.call_function(operator.getitem, (both, 0))
            planes = gm.graph.call_function(operator.getitem, (both, 1))
        expert.replace_all_uses_with(output)
        gm.graph.erase_node(expert)
        chunks.replace_all_uses_with(planes)
        gm.graph.erase_node(chunks)
        fused += 1
    gm.graph.lint()
    gm.recompile()
    return fused


def fuse_counting(gm: fx.GraphModule) -> int:
    """Turn every allocator whose planes one `count` reads into the op that counts, in place; returns how many there were.

    The numbers it adds to must be there before, and be read by nothing else.
    """
    fused = 0
    for counter in [node for node in gm.graph.nodes if _is(node, ops.count)]:
        chunks, spent = counter.args
        if not any(_is(chunks, op) for op in COUNTING):
            continue
        if len(spent.users) > 1 or sum(_is(user, ops.count) for user in chunks.users) > 1 or spent >= chunks:
            continue
        with gm.graph.inserting_before(chunks):
            name = _name(chunks.target)
            op = getattr(ops, f"{name}_counted").default
            both = gm.graph.call_function(op, (spent, *chunks.args), chunks.kwargs, name=name)
        both.meta.update(chunks.meta)
        chunks.replace_all_uses_with(both)
        gm.graph.erase_node(counter)
        gm.graph.erase_node(chunks)
        fused += 1
    gm.graph.lint()
    gm.recompile()
    return fused


def _feeds(chunks: object, expert: fx.Node) -> bool:
    """Whether planes are allocated for this expert block alone, in a way that can be fused."""
    if not _is(chunks, ops.allocate) and not (_is(chunks, ops.allocate_threshold) and chunks.args[0] is expert.args[2]):
        return False
    return chunks.args[1] is expert.args[1] and sum(_is(user, ops.expert_ffn) for user in chunks.users) == 1


def _both(graph: fx.Graph, expert: fx.Node, chunks: fx.Node, spent: fx.Node | None) -> fx.Node:
    """The one op that allocates as `chunks` does, computes `expert` and, with spent, counts there."""
    x, ids, gates, _, *weights = expert.args
    seen, _, *table = chunks.args
    if _is(chunks, ops.allocate_threshold):  # pairs of an expert differ in k, so that one_k, which is last, says nothing
        plain, counted, more = ops.threshold_ffn, ops.threshold_ffn_counted, {}
        thresholds, k_max, *rest = table  # k_min
        arguments = (x, ids, gates, thresholds, k_max, *weights[:12], *rest)
    else:
        plain, counted, more = ops.routed_ffn, ops.routed_ffn_counted, {} if seen is gates else {"seen": seen}
        residuals, budget, k_max, *rest = table  # k_min, convex
        arguments = (x, ids, gates, residuals, budget, k_max, *weights[:12], *rest, *weights[12:])
    name = _name(plain)
    if spent is None:
        return graph.call_function(plain.default, arguments, more, name=name)
    return graph.call_function(counted.default, (spent, *arguments), more, name=name)


def drop_widening_casts(gm: fx.GraphModule) -> int:
    """Feed the allocator's and the experts' ops the router's tensors as they are, past casts that lose nothing; in place.

    The ops take any float gates and any integer ids. A cast to a narrower type changes values and stays.
    """
    dropped = 0
    for node in list(gm.graph.nodes):
        if not any(_is(node, op) for op in READERS):
            continue
        for argument in node.args[:3]:
            source = widened(argument) if isinstance(argument, fx.Node) else None
            if source is not None:
                node.replace_input_with(argument, source)
                dropped += 1
                if not argument.users:
                    gm.graph.erase_node(argument)
    gm.graph.lint()
    gm.recompile()
    return dropped


def widened(node: fx.Node) -> fx.Node | None:
    """What a cast without loss was made from, or None."""
    casts = node.op == "call_method" and node.target in ("to", "float", "long", "int", "type", "type_as")
    if not casts or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    before, after = (n.meta.get("example_value", None) for n in (source, node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.device != after.device:
        return None
    widens = torch.promote_types(before.dtype, after.dtype) == after.dtype
    return source if widens and before.is_floating_point() == after.is_floating_point() else None


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls an op of the namespace `dpamoe`."""
    return node.op == "call_function" and str(node.target).startswith("dpamoe.")


def _name(target) -> str:
    """Of an op, without its namespace."""
    return str(target).split(".")[1]


def _is(node: object, packet) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in (packet, packet.default)
