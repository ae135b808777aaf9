"""Expert matmuls by dataflow: every way to store and call them, and stacks of weights that are no experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpamoe.passes.experts import find_candidates
from dpamoe.passes.find import find_sites
from dpamoe.passes.record import record

EXPERTS, HIDDEN, INNER, TOKENS = 4, 12, 8, 10
SNAPSHOT = ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe")


def weight(*shape):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5)


class Routed(nn.Module):
    """A router of two active experts; `expert(rows, e)` is one of them, called for the tokens that chose it."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, hidden):
        gates, index = self.scores(hidden).softmax(-1).topk(2)
        out = torch.zeros_like(hidden)
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, self.expert(hidden[token], e) * gates[token, slot, None])
        return out


class Stacked(Routed):
    def __init__(self):
        super().__init__()
        self.up, self.down = weight(EXPERTS, 2 * INNER, HIDDEN), weight(EXPERTS, HIDDEN, INNER)

    def expert(self, rows, e):
        gate, up = F.linear(rows, self.up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e])


class Transposed(Routed):
    """Biases too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = weight(EXPERTS, HIDDEN, INNER), weight(EXPERTS, INNER, HIDDEN)
        self.up_bias, self.down_bias = weight(EXPERTS, INNER), weight(EXPERTS, HIDDEN)

    def expert(self, rows, e):
        return (rows @ self.up[e] + self.up_bias[e]).relu() @ self.down[e] + self.down_bias[e]


class Flattened(Routed):
    """Experts one after the other in two dimensions, gate and up apart."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = weight(EXPERTS * INNER, HIDDEN), nn.Parameter(-weight(EXPERTS * INNER, HIDDEN).data)
        self.down = weight(EXPERTS * INNER, HIDDEN)

    def expert(self, rows, e):
        gate, up, down = (w.view(EXPERTS, INNER, HIDDEN)[e] for w in (self.gate, self.up, self.down))
        return (F.silu(rows @ gate.T) * (rows @ up.T)) @ down


class Siblings(Routed):
    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN, bias=False))  # noqa: E731
        self.experts = nn.ModuleList([make() for _ in range(EXPERTS)])

    def expert(self, rows, e):
        return self.experts[e](rows)


class Batched(Stacked):
    """All experts on all tokens at once, the gates pick afterwards."""

    def forward(self, hidden):
        gates, index = self.scores(hidden).softmax(-1).topk(2)
        dense = torch.zeros(hidden.shape[0], EXPERTS).scatter(1, index, gates)
        gate, up = torch.bmm(hidden.expand(EXPERTS, -1, -1), self.up.mT).chunk(2, -1)
        return (torch.bmm(F.silu(gate) * up, self.down.mT) * dense.T[..., None]).sum(0)


class Gathered(Stacked):
    """The weights of a token's experts are gathered."""

    def forward(self, hidden):
        gates, index = self.scores(hidden).softmax(-1).topk(2)
        pairs, wide = index.flatten(), hidden.repeat_interleave(2, 0)[..., None]
        gate, up = torch.bmm(self.up[pairs], wide).squeeze(-1).chunk(2, -1)
        rows = torch.bmm(self.down[pairs], (F.silu(gate) * up)[..., None]).squeeze(-1)
        return (rows.view(*index.shape, -1) * gates[..., None]).sum(1)


def candidates(model, tokens=TOKENS):
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    return find_candidates(record(model, (hidden,)), model)


def names(family):
    return None if family is None else family.names


@pytest.mark.parametrize(
    "kind, ups, down, transposed",
    [
        (Stacked, [("up",)], ("down",), [False, False]),
        (Transposed, [("up",)], ("down",), [True, True]),
        (Flattened, [("gate",), ("up",)], ("down",), [False, False, True]),
        (Batched, [("up",)], ("down",), [False, False]),
        (Gathered, [("up",)], ("down",), [False, False]),
    ],
)
def test_stacked_experts(kind, ups, down, transposed):
    (found,) = candidates(kind())
    assert [family.names for family in found.ups] == ups and found.down.names == down
    assert {family.experts for family in (*found.ups, found.down)} == {EXPERTS}
    body = found.bodies[0]
    assert [matmul.transposed for matmul in (*body.ups, body.down)] == transposed
    one_by_one = kind not in (Batched, Gathered)
    assert sorted(str(b.down.expert) for b in found.bodies) == (["0", "1", "2", "3"] if one_by_one else ["None"])
    assert len(found.nodes) == len(found.bodies) * len(transposed)


def test_biases_belong_to_their_matmul():
    (found,) = candidates(Transposed())
    body = found.bodies[0]
    assert (names(body.ups[0].bias), names(body.down.bias)) == (("up_bias",), ("down_bias",))
    assert body.ups[0].out is not body.ups[0].node  # the sum with the bias
    (plain,) = candidates(Stacked())
    assert names(plain.bodies[0].ups[0].bias) is None and plain.bodies[0].ups[0].out is plain.bodies[0].ups[0].node


def test_experts_that_are_modules():
    (found,) = candidates(Siblings())
    assert [names(family) for family in found.ups] == [tuple(f"experts.{e}.0.weight" for e in range(EXPERTS))]
    assert names(found.down) == tuple(f"experts.{e}.2.weight" for e in range(EXPERTS))
    assert names(found.bodies[0].ups[0].bias) == tuple(f"experts.{e}.0.bias" for e in range(EXPERTS))
    assert found.bodies[0].down.bias is None


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_ways_that_transformers_runs_experts(random_model, random_ids, implementation):
    model = random_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    found = find_candidates(record(model, (), {"input_ids": random_ids(2, 16)}), model)
    assert [candidate.down.names for candidate in found] == [(f"model.layers.{n}.mlp.experts.down_proj",) for n in range(2)]


class Decoder(nn.Module):
    """Equal layers, one after the other, as many as there could be experts; each with two matmuls."""

    def __init__(self, residual):
        super().__init__()
        self.layers, self.residual = Siblings().experts, residual

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden) + (hidden if self.residual else 0)
        return hidden


@pytest.mark.parametrize("residual", [True, False])
def test_the_layers_of_a_decoder_are_no_experts(residual):
    assert candidates(Decoder(residual)) == []


def test_two_networks_a_layer_are_no_two_experts():
    """LongCat-Flash runs two dense ones in each layer; with a residual the next layer's reads the last's through sums alone."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            two = [nn.ModuleList([nn.Sequential(*layer) for layer in Siblings().experts[:2]]) for _ in range(2)]
            self.layers = nn.ModuleList(two)

        def forward(self, hidden):
            for two in self.layers:
                for network in two:
                    hidden = hidden + network(hidden)
            return hidden

    assert candidates(Layers()) == []


def test_a_reduction_ends_an_expert():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.out = weight(EXPERTS, HIDDEN, INNER), weight(EXPERTS, INNER, HIDDEN)

        def forward(self, hidden):
            heads = torch.einsum("th,ehi->eti", hidden, self.query)
            mixed = torch.softmax(heads @ heads.mT, -1) @ heads
            return torch.einsum("eti,eih->th", mixed.mean(1, keepdim=True), self.out)

    assert candidates(Attention()) == []


@pytest.mark.parametrize("kind", SNAPSHOT)
def test_found_sites_are_as_before(random_model, random_ids, snapshot, kind):
    findings = find_sites(random_model(kind), (), {"input_ids": random_ids(2, 16)})
    assert [site.as_dict() for site in findings.sites] == snapshot
