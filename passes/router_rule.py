"""Which rule a router follows, found by its answers to sample logits and biases: rules are tried until one gives the same."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from dpamoe.kernels import routing
from dpamoe.kernels.routing import Rule
from dpamoe.passes.fuse import is_ours

LEAST_SUM = 1e-6  # of the scores of the chosen: less, and what keeps a sum from 0 shows
ROWS = 256  # tokens by which a rule is found, at least a quarter of them without equal scores
LOGITS = (1.5, 1.5, 12.0)  # spreads of sample logits
BIASES = ((0.2, 0.0), (1.0, 0.0), (0.3, -1.0), (0.0, 1.0), (5.0, 0.0))  # spreads and means of sample biases
ROUNDINGS = 2  # of the gates' dtype: sums and powers may be taken in another order
OWN_ROUNDING = 2e-5  # the same for fp32: exponentials of numbers up to about 50, summed over the experts


@dataclass(frozen=True)
class Router:
    """Nodes from logits to ids and gates. leaves: other tensors read; inner: the nodes in between, in order."""

    logits: fx.Node
    ids: fx.Node
    gates: fx.Node
    leaves: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]

    @property
    def ordered(self) -> bool:
        """Whether anybody but our ops, to whom the order of the chosen is nothing, reads ids or gates."""
        others = {user for node in (self.ids, self.gates) for user in node.users} - set(self.inner)
        return not all(is_ours(user) for user in others)


def value_of(node: fx.Node) -> object:
    """What Dynamo saw there: a tensor, a number, or nothing for tuples."""
    return node.meta.get("example_value")


def callee(node: fx.Node) -> str:
    """Name of the function or method that a node of Dynamo's calls, `output` or `placeholder` of one that calls nothing."""
    if node.op in ("output", "placeholder"):
        return node.op
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def sizes_of(value: Tensor) -> tuple[int, ...] | None:
    """The shape, with numbers where it is symbolic; None where those are known at run time only."""
    found = tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape)
    return None if None in found else found


@dataclass(frozen=True)
class Sample:
    """One call of a router: its logits [T, E], what stood in its leaves, [E] each, and its answer."""

    logits: Tensor
    leaves: list[Tensor]
    ids: Tensor
    gates: Tensor


def find_rule(gm: fx.GraphModule, router: Router) -> tuple[Rule, int | None] | None:
    """The rule that gives what the router gives, and which of its leaves is the bias."""
    samples, active = _answers(gm, router), sizes_of(value_of(router.ids))[1]
    constants = [value for node in router.inner for value in _constants((node.args, node.kwargs))]
    scales = dict.fromkeys([1.0, *(float(constant) for constant in constants if constant > 0)])
    for rule, place in _choices(constants, samples[0].logits.shape[1], active, len(router.leaves)):
        seen = [_seen(sample, rule, place) for sample in samples]
        same = all(torch.equal(found.sort(-1).values, ids.sort(-1).values) for found, _, ids, _ in seen)
        if not same or 4 * sum(len(found) for found, *_ in seen) < sum(len(sample.ids) for sample in samples):
            continue
        for norm, scale in itertools.product(routing.NORMS, scales):
            whole = replace(rule, norm=norm, scale=scale)
            if all(_same(*one, whole, router.ordered) for one in seen):
                return whole, place
    return None


@torch.no_grad()
def _answers(gm: fx.GraphModule, router: Router) -> list[Sample]:
    """What the router answers to random logits and biases."""
    alone, random, like = _alone(gm, router), torch.Generator().manual_seed(0), value_of(router.logits)
    shape = sizes_of(like)
    rows, experts = torch.Size(shape[:-1]).numel(), shape[-1]
    samples = []
    for turn in range(max(-(-ROWS // rows), len(BIASES) * len(LOGITS))):
        logits = torch.randn(shape, generator=random).mul(LOGITS[turn % len(LOGITS)]).to(like.device, like.dtype)
        spread, mean = BIASES[turn // len(LOGITS) % len(BIASES)]
        leaves = [_drawn(value_of(node), spread, mean, random) for node in router.leaves]
        ids, gates = alone(logits.clone(), *(leaf.clone() for leaf in leaves))
        flat = logits.view(rows, experts)[:ROWS]
        samples.append(Sample(flat, [leaf.flatten() for leaf in leaves], ids[:ROWS], gates[:ROWS]))
    return samples


def _drawn(like: Tensor, spread: float, mean: float, random: torch.Generator) -> Tensor:
    """Numbers for a bias; without a spread ones and zeros."""
    drawn = torch.randn(sizes_of(like), generator=random)
    drawn = drawn * spread + mean if spread else (drawn > 0).float()
    return drawn.to(like.device, like.dtype)


def _alone(gm: fx.GraphModule, router: Router) -> fx.GraphModule:
    """The router as a graph of its own: (logits, leaves) to (ids, gates)."""
    graph, made = fx.Graph(), {}
    for node in (router.logits, *router.leaves):
        made[node] = graph.placeholder(node.name)
    for node in router.inner:
        if callee(node) == "type_as":
            made[node] = graph.call_method("to", (made[node.args[0]], value_of(node).dtype))
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output((made[router.ids], made[router.gates]))
    return fx.GraphModule(gm, graph)


def _choices(constants: list, experts: int, active: int, leaves: int) -> Iterator[tuple[Rule, int | None]]:
    """Ways to choose, with the numbers that stand in the router; plain ones first."""
    whole = dict.fromkeys(value for value in constants if isinstance(value, int) and 1 <= value <= experts)
    groups = [(1, 1, "max")]
    for count, kept in itertools.product(whole, whole):
        if count > 1 and kept < count and experts % count == 0 and active <= experts // count * kept:
            groups += [(count, kept, score) for score in routing.GROUP_SCORES]
    for group, score, place in itertools.product(groups, routing.SCORES, (*range(leaves), None)):
        yield Rule(active, score, "none", 1.0, *group), place


def _constants(arguments: object) -> list[int | float]:
    """The finite numbers among arguments, however deep."""
    if isinstance(arguments, dict):
        return _constants(tuple(arguments.values()))
    if isinstance(arguments, tuple | list):
        return [value for part in arguments for value in _constants(part)]
    number = isinstance(arguments, int | float) and not isinstance(arguments, bool)
    return [arguments] if number and abs(arguments) < float("inf") else []


def _bias(sample: Sample, place: int | None) -> Tensor | None:
    return None if place is None else sample.leaves[place]


def _decided(sample: Sample, rule: Rule, place: int | None) -> Tensor:
    """The rows that tell rules apart, int64 [R].

    In the others scores are equal among which the rule chooses, of experts or of groups, or the chosen have next to nothing
    together, so that what keeps their sum from 0 shows.
    """
    scores = routing.SCORES[rule.score](sample.logits.float())
    found = routing.choice(scores, _bias(sample, place), rule)
    clear = _clear(found, rule.active)
    if rule.score != "logits":
        clear &= scores.gather(-1, found.topk(rule.active, -1).indices).sum(-1) > LEAST_SUM
    if rule.groups > 1:
        scores = scores if place is None else scores + _bias(sample, place).float()
        clear &= _clear(routing.group_scores(scores, rule), rule.kept_groups)
    return clear.nonzero()[:, 0]


def _clear(values: Tensor, count: int) -> Tensor:
    """Whether the largest of each row and the next all differ, by more than another order of summing could change."""
    best = values.topk(min(count + 1, values.shape[-1]), -1).values
    return ((best[:, :-1] - best[:, 1:]) > OWN_ROUNDING * best[:, :-1].abs()).all(-1)


def _seen(sample: Sample, rule: Rule, place: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the rows that tell rules apart: experts that the rule chooses, their scores, the router's experts and gates."""
    rows = _decided(sample, rule, place)
    return *routing.choose(sample.logits[rows], _bias(sample, place), rule), sample.ids[rows], sample.gates[rows]


def _same(ids: Tensor, scores: Tensor, expected_ids: Tensor, expected: Tensor, rule: Rule, ordered: bool) -> bool:
    """Whether the rule gives the same experts the same gates and, ordered, in the same order."""
    if ordered and not torch.equal(ids, expected_ids):
        return False
    rounding = max(OWN_ROUNDING, ROUNDINGS * torch.finfo(expected.dtype).eps)
    least = torch.finfo(expected.dtype).tiny  # below it numbers have fewer digits, or none
    gates = routing.weights(scores, rule).gather(-1, ids.argsort(-1))
    return torch.allclose(gates, expected.float().gather(-1, expected_ids.argsort(-1)), rtol=rounding, atol=least)
