"""Recovering what stands between the matmuls: at other row counts, in other orders, in place or not, and past the experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpamoe import program
from dpamoe.passes import activation
from dpamoe.passes.experts import find_candidates
from dpamoe.passes.record import record, value

EXPERTS, HIDDEN, INNER = 4, 12, 8


class Experts(nn.Module):
    """One loop over experts; `act` stands between the matmuls, `post` behind them; both may read parameters of their own."""

    def __init__(self, act, rows, post=None):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, rows, HIDDEN, generator=random) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=random) * INNER**-0.5)
        self.scale = nn.Parameter(torch.rand(INNER, generator=random) + 0.5)
        self.norm = nn.Parameter(torch.rand(HIDDEN, generator=random) + 0.5)
        self.act, self.post = act, post or (lambda experts, rows: rows)

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            rows = F.linear(self.act(self, F.linear(hidden[token], self.up[e])), self.down[e])
            out.index_add_(0, token, self.post(self, rows) * weights[token, slot, None])
        return out


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.scores, self.experts = nn.Linear(HIDDEN, EXPERTS), experts

    def forward(self, hidden):
        weights, index = self.scores(hidden).softmax(-1).topk(2)
        return self.experts(hidden, index, weights)


def body_of(act, rows=2 * INNER, post=None, dtype=torch.float32):
    model = Model(Experts(act, rows, post)).to(dtype)
    recording = record(model, (torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype),))
    (candidate,) = find_candidates(recording, model)
    return model, recording, max(candidate.bodies, key=lambda body: value(body.down.data).numel())


def halves(experts, hidden):
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate) * up


def by_turns(experts, hidden):
    return F.silu(hidden[..., 0::2]) * hidden[..., 1::2]


def in_place(experts, hidden):
    return hidden.chunk(2, -1)[1].mul_(2).clamp_(-1, 1).add_(hidden.chunk(2, -1)[0])


def with_parameter(experts, hidden):
    return F.silu(hidden) * (1.0 + experts.scale).float().to(hidden.dtype)


def soft_capped(experts, hidden):
    gate, up = hidden.chunk(2, -1)
    return 5 * torch.tanh(F.gelu(gate) * up / 5)


CASES = [
    (halves, 2 * INNER, "silu_mul", "rows"),
    (lambda experts, hidden: halves(experts, hidden.roll(INNER, -1)), 2 * INNER, "silu_mul", "swapped"),
    (by_turns, 2 * INNER, "silu_mul", "interleaved"),
    (lambda experts, hidden: F.silu(hidden[..., 1::2]) * hidden[..., 0::2], 2 * INNER, "silu_mul", "interleaved-swapped"),
    (lambda experts, hidden: F.relu(hidden).square(), INNER, "relu2", "rows"),
    (lambda experts, hidden: hidden * torch.sigmoid(hidden), INNER, "silu", "rows"),
    (soft_capped, 2 * INNER, "graph", "rows"),
    (lambda experts, hidden: halves(experts, hidden.clamp(-3, 3)), 2 * INNER, "graph", "rows"),
    (with_parameter, INNER, "graph", "rows"),
]
IDS = ["halves", "swapped", "by turns", "by turns, swapped", "relu2", "x sigmoid(x)", "soft cap", "clamp", "parameter"]


@pytest.mark.parametrize("act, rows, name, order", CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_is_replayed_at_any_number_of_rows(act, rows, name, order, dtype):
    model, _, body = body_of(act, rows, dtype=dtype)
    found = activation.extract(body, "experts").float()
    assert activation.reproduces(found, body, 1e-5 if dtype == torch.float32 else 5e-2)
    experts = model.experts.float()
    for count in (0, 1, 33):
        hidden = torch.randn(count, rows, generator=torch.Generator().manual_seed(count)) * 4
        torch.testing.assert_close(found(hidden), act(experts, hidden), rtol=1e-5, atol=1e-5)
    kind, way, steps = activation.classify(found, rows)
    assert (kind, way) == (name, order) and (steps is None) == (kind != "graph")
    if steps:
        parameters = dict(experts.named_parameters())
        hidden = torch.randn(5, rows) * 9
        expected = act(experts, hidden)
        torch.testing.assert_close(program.to_module(steps, parameters)(hidden), expected, rtol=1e-5, atol=1e-5)
        assert program.parameters_of(steps) == (["scale"] if act is with_parameter else [])


def test_an_op_in_place_becomes_one_out_of_place():
    _, _, body = body_of(lambda experts, hidden: hidden.mul_(2).clamp_(-1, 1), INNER)
    found = activation.extract(body, "experts")
    ops = [str(node.target) for node in found.graph.nodes if node.op == "call_function"]
    assert ops == ["aten.mul.Tensor", "aten.clamp.default"]
    hidden = torch.randn(3, INNER)
    kept = hidden.clone()
    assert torch.equal(found(hidden), (kept * 2).clamp(-1, 1)) and torch.equal(hidden, kept)


def test_a_write_through_a_view_is_not_replayed_wrongly():
    """`up` is written in place through a view of the matmul's result: either it is right, or it is refused."""
    _, _, body = body_of(in_place)
    try:
        found = activation.extract(body, "experts")
    except activation.Unknown:
        return
    right = in_place(None, hidden := torch.randn(3, 2 * INNER))
    assert torch.allclose(found(hidden), right) or not activation.reproduces(found, body, 1e-4)


def normed(experts, rows):
    scaled = rows * (1.0 + experts.norm)
    return scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-6)


def normed_at_once(experts, rows):
    """By the op that GPUs run for `rms_norm`, which also returns what a gradient needs."""
    return torch.ops.aten._fused_rms_norm(rows, [HIDDEN], experts.norm, 1e-6)[0]


@pytest.mark.parametrize("post", [normed, normed_at_once])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_the_last_matmul_is_recovered_up_to_the_gate(dtype, post):
    model, recording, body = body_of(halves, post=post, dtype=dtype)
    found = activation.extract_post(recording, body, "experts").float()
    rows = torch.randn(7, HIDDEN)
    torch.testing.assert_close(found(rows), post(model.experts.float(), rows), rtol=1e-5, atol=1e-5)
    assert program.parameters_of(program.from_graph(found.graph)) == ["norm"]


def test_nothing_follows_a_plain_expert():
    _, recording, body = body_of(halves)
    assert activation.extract_post(recording, body, "experts") is None


def test_parameters_of_others_are_refused():
    outside = nn.Parameter(torch.rand(INNER))
    model, _, body = body_of(lambda experts, hidden: hidden * outside, INNER)
    with pytest.raises(activation.Unknown, match="its experts also read _constant"):
        activation.extract(body, "experts")


def test_work_along_the_tokens_is_refused():
    _, _, body = body_of(lambda experts, hidden: hidden[::2].repeat(2, 1)[: len(hidden)].relu(), INNER)
    with pytest.raises(activation.Unknown, match="works along dimension 0 of .*, not along features"):
        activation.extract(body, "experts")


def test_numbers_made_of_truth_values():
    def masked(experts, hidden):
        return hidden * (1 - (hidden < 0).to(hidden.dtype))

    _, _, body = body_of(masked, INNER)
    assert activation.classify(activation.extract(body, "experts"), INNER)[0] == "relu"
