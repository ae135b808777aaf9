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


def captured(module, *args, dynamic=False, **kwargs):
    """The Dynamo graph of a module as the compile backend fuses it first, and its inputs."""
    held = []

    def backend(gm, example_inputs):
        gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        drop_widening_casts(gm)
        fuse_allocation(gm)
        held.append((gm, example_inputs))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    torch.compiler.reset()
    ((gm, example_inputs),) = held
    return gm, example_inputs


def routers(gm):
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in (OPS.route.default, OPS.linear_route.default)]


def results(gm, inputs):
    """What a graph returns, from copies of its inputs, since it counts in some of them."""
    with torch.no_grad():
        out = gm(*(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs))
    return [t for t in out if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(RULES))
def test_routers_of_transformers(transformed, random_ids, family, dtype):
    model = transformed(family)[1].to(dtype)
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
    assert errors.median() <= rounding and (errors > rounding).sum() <= 2  # equal logits in bf16 may go to another expert
    assert fuse_routing(gm) == 0


@pytest.fixture(scope="module")
def experts(transformed):
    return next(iter(encoded_experts(transformed("qwen3_moe")[1]).values()))


class Block(nn.Module):
    """A linear layer, a way to route, and the experts behind it."""

    def __init__(self, experts, route):
        super().__init__()
        self.gate, self.experts, self.route = nn.Linear(WIDTH, EXPERTS, bias=False), copy.deepcopy(experts), route
        torch.nn.init.normal_(self.gate.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        logits = self.gate(x)
        ids, gates, *more = self.route(logits, x)
        return (self.experts(x, ids, gates), *more)


def plainly(logits, x):
    gates, ids = logits.softmax(-1).topk(2, -1)
    return ids, gates


def rows(tokens):
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def bf16_scores(logits, x):
    """Scores that are rounded before experts are chosen: close ones become equal."""
    gates, ids = logits.softmax(-1, dtype=torch.bfloat16).topk(2, -1)
    return ids, gates.float()


def cosine(logits, x):
    gates, ids = F.normalize(logits, dim=-1).topk(2, -1)
    return ids, gates


def with_the_rows(logits, x):
    gates, ids = (logits + x[:, :EXPERTS]).softmax(-1).topk(2, -1)
    return ids, gates


def of_limited_capacity(logits, x):
    """Switch: an expert takes so many tokens, and others lose their gate."""
    gates, ids = logits.softmax(-1).topk(2, -1)
    taken = F.one_hot(ids, EXPERTS).sum(1).cumsum(0).gather(1, ids)
    return ids, gates * (taken <= 4)


def second_best(logits, x):
    gates, ids = logits.softmax(-1).topk(3, -1)
    return ids[:, 1:], gates[:, 1:]


def written_logits(logits, x):
    logits.mul_(0.5)
    return plainly(logits, x)


def written_through_a_view(logits, x):
    logits[:, :2].mul_(0.5)
    return plainly(logits, x)


def scores_read(logits, x):
    scores = logits.softmax(-1)
    gates, ids = scores.topk(2, -1)
    return ids, gates, scores


def view_written(logits, x):
    """The first expert is shut out through a view."""
    scores = logits.softmax(-1)
    scores.view(-1, 2, EXPERTS // 2)[:, 0, 0].zero_()
    gates, ids = scores.topk(2, -1)
    return ids, gates


NO_ROUTERS = [
    bf16_scores, cosine, with_the_rows, of_limited_capacity, second_best, written_logits, written_through_a_view, scores_read,
    view_written,
]  # fmt: skip


@pytest.mark.parametrize("route", NO_ROUTERS)
def test_what_is_no_such_router_stays(experts, route):
    gm, inputs = captured(Block(experts, route), rows(40))
    before = [str(node) for node in gm.graph.nodes]
    assert fuse_routing(gm) == 0
    assert [str(node) for node in gm.graph.nodes] == before


def logits_read(logits, x):
    return *plainly(logits, x), logits


def masked_by_group(logits, x):
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


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize(
    "route, op, rule",
    [
        (plainly, OPS.linear_route, ("softmax", "none", 1.0, 1, 1, "max")),
        (logits_read, OPS.route, ("softmax", "none", 1.0, 1, 1, "max")),
        (masked_by_group, OPS.linear_route, ("sigmoid", "sum", 1.5, 4, 1, "max")),
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


def test_a_compiled_model_gives_what_eager_gives(transformed, random_ids):
    model = transformed("deepseek_v3")[1]
    with torch.no_grad():
        expected = model(input_ids=random_ids(1, 9), use_cache=False).logits
        compiled = torch.compile(model, backend="dpamoe", fullgraph=True)
        found = compiled(input_ids=random_ids(1, 9), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert dpamoe.stats(model)["mean_planes"] == pytest.approx(4.0)
