"""Fusing routers: every family's is recognised and gives the same; what only looks like one, or is read elsewhere, stays."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import dpamoe
from dpamoe.modules import encoded_experts
from dpamoe.passes.fuse import drop_widening_casts, fuse_allocation
from dpamoe.passes.routing import fuse_routing

from . import graphs
from .marks import some_slow

OPS = torch.ops.dpamoe
RULES = {  # score, norm, scale, groups, kept groups, their score
    "deepseek_v2": ("softmax", "none", 1.0, 1, 1, "max"),
    "deepseek_v3": ("sigmoid", "sum", 2.5, 2, 1, "two"),
    "ernie4_5_moe": ("softmax", "sum", 1.0, 1, 1, "max"),
    "gpt_oss": ("logits", "softmax", 1.0, 1, 1, "max"),
    "granitemoe": ("logits", "softmax", 1.0, 1, 1, "max"),
    "mixtral": ("logits", "softmax", 1.0, 1, 1, "max"),
    "olmoe": ("softmax", "none", 1.0, 1, 1, "max"),
    "qwen2_moe": ("softmax", "none", 1.0, 1, 1, "max"),
    "qwen3_moe": ("softmax", "none", 1.0, 1, 1, "max"),
}
BIASED = {"deepseek_v3", "ernie4_5_moe"}  # choose with a bias
WIDTH, EXPERTS = 64, 8


def captured(*args, **kwargs):
    """The Dynamo graph of a module as the compile backend fuses it first, and its inputs."""
    gm, example_inputs = graphs.captured(*args, **kwargs)
    drop_widening_casts(gm)
    fuse_allocation(gm)
    return gm, example_inputs


def routers(gm):
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in (OPS.route.default, OPS.linear_route.default)]


def results(gm, inputs):
    """What a graph returns, from copies of its inputs, since it counts in some of them."""
    with torch.no_grad():
        out = gm(*(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs))
    return [t for t in out if isinstance(t, torch.Tensor)]


CASES = [(family, dtype) for family in sorted(RULES) for dtype in (torch.float32, torch.bfloat16)]
FAST = [(family, torch.float32) for family in ("qwen3_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe")]


@pytest.mark.parametrize("family, dtype", some_slow(CASES, FAST))
def test_routers_of_transformers(transformed, random_ids, family, dtype):
    model = transformed(family)[1].to(dtype)
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() == 2:  # a router that some versions begin with zeros: all scores are equal
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    gm, inputs = captured(model, input_ids=random_ids(2, 12), use_cache=False)
    before = results(gm, inputs)
    assert fuse_routing(gm) == len(encoded_experts(model)) == len(routers(gm))
    for node in routers(gm):
        _, _, _, bias, _, *rule, _ = node.args
        assert node.target is OPS.linear_route.default and tuple(rule) == RULES[family]
        assert (bias is not None) == (family in BIASED)
    assert not any("topk" in str(node.target) for node in gm.graph.nodes)
    rounding = 1e-5 if dtype == torch.float32 else 2**-6  # of fp32 sums in another order; a step of bf16 in each of two layers
    (found,), (expected,) = results(gm, inputs), before
    errors = (found - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    tied = 0 if dtype == torch.float32 else 2  # tokens: equal logits, which bf16 has, may go to another expert
    assert errors.median() <= rounding and (errors > rounding).sum() <= tied
    assert fuse_routing(gm) == 0


@pytest.fixture(scope="module")
def experts(transformed):
    return next(iter(encoded_experts(transformed("qwen3_moe")[1]).values()))


class Block(nn.Module):
    """A linear layer, a way to route, and the experts behind it."""

    def __init__(self, experts, route, width=WIDTH):
        super().__init__()
        self.gate, self.experts, self.route = nn.Linear(width, EXPERTS, bias=False), copy.deepcopy(experts), route
        torch.nn.init.normal_(self.gate.weight, generator=torch.Generator().manual_seed(0))
        self.register_buffer("bias", torch.linspace(-1, 1, EXPERTS))

    def forward(self, x):
        logits = self.gate(x)
        ids, gates, *more = self.route(logits, self.bias)
        return (self.experts(x, ids, gates), *more)


def plainly(logits, bias):
    gates, ids = logits.softmax(-1).topk(2, -1)
    return ids, gates


def rows(tokens):
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def by_softmax(logits):
    gates, ids = logits.softmax(-1).topk(2, -1)
    return ids, gates


def written(write):
    """Logits that are written in place on the way, in one of the forms there are."""

    def route(logits, bias):
        write(logits)
        return by_softmax(logits)

    return route


def bf16_scores(logits, bias):
    """Scores that are rounded before experts are chosen: close ones become equal."""
    gates, ids = logits.softmax(-1, dtype=torch.bfloat16).topk(2, -1)
    return ids, gates.float()


def of_limited_capacity(logits, bias):
    """Switch: an expert takes so many tokens, and others lose their gate; at the number that is looked at nobody does."""
    ids, gates = by_softmax(logits)
    taken = F.one_hot(ids, EXPERTS).sum(1).cumsum(0).gather(1, ids)
    return ids, gates * (taken <= 64)


def chosen_by(scores, logits, gates=None):
    ids = scores.topk(2, -1).indices
    return ids, (logits.sigmoid() if gates is None else gates).gather(-1, ids)


def ids_written(logits, bias):
    probabilities = logits.softmax(-1)
    ids = probabilities.topk(2, -1).indices
    ids[:, 1] = 0
    return ids, probabilities.gather(1, ids)


def bias_written(logits, bias):
    bias[:] = bias + 1
    return chosen_by(logits.sigmoid() + bias, logits)


def groups_of_zeros(logits, bias):
    """Left-out groups have score 0, which is above others with a bias below."""
    scores = logits.sigmoid() + bias
    best = scores.view(-1, 4, 2).topk(2, -1).values.sum(-1).topk(2, -1).indices
    mask = torch.zeros_like(scores.view(-1, 4, 2).amax(-1)).scatter_(1, best, 1.0)
    return chosen_by(scores.masked_fill(mask.repeat_interleave(2, 1) == 0, 0.0), logits)


def sorted_and_read(logits, bias):
    ids, gates = by_softmax(logits)
    ids, order = ids.sort(-1)
    gates = gates.gather(-1, order)
    return ids, gates, ids, gates


def scores_read(logits, bias):
    scores = logits.softmax(-1)
    gates, ids = scores.topk(2, -1)
    return ids, gates, scores


def view_written(logits, bias):
    """The first expert is shut out through a view."""
    scores = logits.softmax(-1)
    scores.view(-1, 2, EXPERTS // 2)[:, 0, 0].zero_()
    gates, ids = scores.topk(2, -1)
    return ids, gates


def summed(least):
    def route(logits, bias):
        ids, gates = chosen_by(logits.sigmoid(), logits)
        return ids, gates / (gates.sum(-1, keepdim=True) + least)

    return route


NO_ROUTERS = {
    "bf16 scores": bf16_scores,
    "cosine": lambda x, b: by_softmax(F.normalize(x, dim=-1)),
    "a limited capacity": of_limited_capacity,
    "the second best": lambda x, b: tuple(part[:, 1:] for part in reversed(x.softmax(-1).topk(3, -1))),
    "softmax over tokens": lambda x, b: by_softmax(x.softmax(0)),
    "limited logits": lambda x, b: by_softmax(x.clamp(-10, 10)),
    "a temperature": lambda x, b: by_softmax(x * 0.5),
    "a large number beside the sum": summed(1e-6),
    "small gates left out": lambda x, b: ((p := by_softmax(x))[0], p[1].masked_fill(p[1] < 0.02, 0)),
    "noise": lambda x, b: by_softmax(x + 1e-6 * torch.rand_like(x)),
    "dropout": lambda x, b: ((p := by_softmax(x))[0], F.dropout(p[1], 0.002)),
    "a limited bias": lambda x, b: chosen_by(x.sigmoid() + b.clamp(-1, 1), x),
    "a rounded bias": lambda x, b: chosen_by(x.sigmoid() + b.round(), x),
    "pruned experts": lambda x, b: chosen_by(x.sigmoid().masked_fill(b == 0, 0.0), x),
    "groups of zeros": groups_of_zeros,
    "another bias for the gates": lambda x, b: chosen_by(x + b, x),
    "logits written": written(lambda x: x.mul_(0.5)),
    "logits written by a function": written(lambda x: torch.clamp_(x, 0.0, 1.0)),
    "logits set": written(lambda x: x.__setitem__((slice(None), 0), -1e9)),
    "logits written by an activation": written(lambda x: F.relu(x, inplace=True)),
    "logits given as output": written(lambda x: torch.mul(x, 0.1, out=x)),
    "logits written in a list": written(lambda x: torch._foreach_mul_([x], 0.5)),
    "logits written through a view": written(lambda x: x[:, :2].mul_(0.5)),
    "scores written through a view": view_written,
    "scores read": scores_read,
    "ids written": ids_written,
    "the bias written": bias_written,
    "another order, which is read": sorted_and_read,
}


@pytest.mark.parametrize("route", NO_ROUTERS.values(), ids=NO_ROUTERS)
def test_what_is_no_such_router_stays(experts, route):
    gm, inputs = captured(Block(experts, route), rows(40))
    before = [str(node) for node in gm.graph.nodes]
    assert fuse_routing(gm) == 0
    assert [str(node) for node in gm.graph.nodes] == before


def logits_read(logits, bias):
    return *plainly(logits, bias), logits


def in_order_of_ids(logits, bias):
    ids, gates = by_softmax(logits)
    ids, order = ids.sort(-1)
    return ids, gates.gather(-1, order)


def seldom_different(logits, bias):
    """Groups that leave out the best expert once in many tokens."""
    scores = logits.sigmoid()
    best = scores.view(-1, 2, 4).topk(2, -1).values.sum(-1).topk(1, -1).indices
    mask = torch.zeros_like(scores.view(-1, 2, 4).amax(-1)).scatter_(1, best, 1.0)
    scores = scores.masked_fill(mask.repeat_interleave(4, 1) == 0, float("-inf"))
    return chosen_by(scores, logits)


def by_bias(logits, bias):
    return chosen_by(logits.sigmoid() + bias, logits)


def masked_by_group(logits, bias):
    """Its mask written in place, as DeepSeek's code does it, and zeros, where scores are above, for what is left out."""
    scores = logits.sigmoid()
    groups = scores.view(-1, 4, 2).max(-1).values.topk(1, -1).indices
    mask = torch.zeros(scores.shape[0], 4)
    mask.scatter_(1, groups, 1.0)
    scores = scores.masked_fill(mask.repeat_interleave(2, 1) == 0, 0.0)
    gates, ids = scores.topk(2, -1)
    gates /= gates.sum(-1, keepdim=True)
    gates *= 1.5
    return ids, gates


@pytest.mark.parametrize("tokens", some_slow([1, 2, 40], [40]))
@pytest.mark.parametrize(
    "route, op, rule",
    [
        (plainly, OPS.linear_route, ("softmax", "none", 1.0, 1, 1, "max")),
        (logits_read, OPS.route, ("softmax", "none", 1.0, 1, 1, "max")),
        (masked_by_group, OPS.linear_route, ("sigmoid", "sum", 1.5, 4, 1, "max")),
        (in_order_of_ids, OPS.linear_route, ("softmax", "none", 1.0, 1, 1, "max")),
        (seldom_different, OPS.linear_route, ("sigmoid", "none", 1.0, 2, 1, "two")),
        (by_bias, OPS.linear_route, ("sigmoid", "none", 1.0, 1, 1, "max")),
        (summed(1e-12), OPS.linear_route, ("sigmoid", "sum", 1.0, 1, 1, "max")),
    ],
)
def test_own_routers(experts, route, op, rule, tokens):
    gm, inputs = captured(Block(experts, route), rows(tokens))
    before = results(gm, inputs)
    assert fuse_routing(gm) == 1
    (node,) = routers(gm)
    assert node.target is op.default and rule == tuple(node.args[-7:-1])
    for found, expected in zip(results(gm, inputs), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


def _smaller(value):
    """The inputs of 40 tokens, for 9."""
    if isinstance(value, torch.Tensor):
        return rows(9) if value.shape == (40, WIDTH) else value
    return 9 if value == 40 else value


def test_tokens_of_any_number(experts):
    gm, inputs = captured(Block(experts, plainly), rows(40), dynamic=True)
    assert fuse_routing(gm) == 1
    smaller = [_smaller(value) for value in inputs]
    assert any(isinstance(value, torch.Tensor) and value.shape == (9, WIDTH) for value in smaller)
    with torch.no_grad():
        expected = Block(experts, plainly)(rows(9))[0]
    torch.testing.assert_close(results(gm, smaller)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_graph_before_and_after(experts, snapshot):
    gm, _ = captured(Block(experts, plainly), rows(9))
    assert graphs.lines(gm, 12) == snapshot(name="before")
    assert fuse_routing(gm) == 1 and graphs.lines(gm, 12) == snapshot(name="after")


@pytest.mark.parametrize("shape", [(WIDTH,), (3, 5, WIDTH)])
def test_rows_of_any_number_of_dimensions(experts, shape):
    """A lone row is no batch; more than two dimensions are flattened behind the router, or in front of it."""

    class Flat(Block):
        def forward(self, x):
            ids, gates = self.route(self.gate(x), self.bias)
            return self.experts(x.view(-1, WIDTH), ids.view(-1, 2), gates.view(-1, 2))

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gm, inputs = captured(Flat(experts, plainly), x)
    (before,) = results(gm, inputs)
    assert fuse_routing(gm) == (x.dim() > 1)
    torch.testing.assert_close(results(gm, inputs)[0], before, rtol=1e-4, atol=1e-5)


def test_routers_that_gradients_flow_through_stay(experts):
    class Trained(Block):
        def forward(self, x):
            ids, gates = self.route(self.gate(x), self.bias)
            with torch.no_grad():
                y = self.experts(x, ids, gates)
            return y, gates

    held = []

    def backend(gm, example_inputs):
        gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        held.append(fuse_routing(gm))
        return gm.forward

    torch.compiler.reset()
    torch.compile(Trained(experts, plainly), backend=backend)(rows(9))[1].sum().backward()
    torch.compiler.reset()
    assert held and not any(held)


def test_a_router_in_bf16_of_many_experts():
    """As many experts as there are hardly numbers of bf16 for."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4096, bias=False, dtype=torch.bfloat16)
            self.table, self.budget = torch.rand(4096, 9).cumsum(1).flip(1), torch.tensor(4.0)

        def forward(self, x):
            gates, ids = self.gate(x).softmax(-1, dtype=torch.float32).topk(2, -1)
            return OPS.allocate(gates, ids, self.table, self.budget, torch.tensor(8), 2), ids

    gm, _ = captured(Wide(), torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert fuse_routing(gm) == 1


@pytest.mark.slow
def test_a_compiled_model_gives_what_eager_gives(transformed, random_ids):
    model = transformed("deepseek_v3")[1]
    with torch.no_grad():
        expected = model(input_ids=random_ids(1, 9), use_cache=False).logits
        compiled = torch.compile(model, backend="dpamoe", fullgraph=True)
        found = compiled(input_ids=random_ids(1, 9), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert dpamoe.stats(model)["mean_planes"] == pytest.approx(4.0)


@pytest.mark.parametrize("allocation", ["uniform", "gate-linear", "residual-only"])
def test_gates_that_are_only_looked_at_for_their_size(experts, allocation):
    """Ablations: one number for all gates, or other numbers made of them."""
    block = Block(experts, plainly)
    block.experts.set_spend(dpamoe.SpendSpec(3.3, allocation=allocation))
    gm, inputs = captured(block, rows(12))
    before = results(gm, inputs)
    assert fuse_routing(gm) == 1 and not any("topk" in str(node.target) for node in gm.graph.nodes)
    torch.testing.assert_close(results(gm, inputs), before, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
