"""Verifying by value: odd ways to call experts that are right, and lookalikes that are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpamoe
from dpamoe.kernels.grouped import decode
from dpamoe.passes.experts import find_candidates
from dpamoe.passes.find import find_sites
from dpamoe.passes.record import record
from dpamoe.passes.verify import Boundary, boundary, error_of, owner
from dpamoe.program import by_expert
from dpamoe.sites import ExpertWeights, scatter

EXPERTS, SPARE, HIDDEN, INNER = 4, 2, 16, 8


class Experts(nn.Module):
    """A loop over experts; subclasses change one thing each."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=random) * INNER**-0.5)
        self.norm = nn.Parameter(torch.rand(HIDDEN, generator=random) + 0.5)

    def expert(self, rows, e):
        gate, up = F.linear(rows, self.up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e])

    def weighed(self, rows, gates, e):
        return self.expert(rows, e) * gates

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, self.weighed(hidden[token], weights[token, slot, None], e))
        return out


class GateFirst(Experts):
    def weighed(self, rows, gates, e):
        return self.expert(rows * gates, e)


class Normed(Experts):
    def weighed(self, rows, gates, e):
        rows = self.expert(rows, e) * self.norm
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * gates


class NormedApart(Experts):
    """A norm for each expert, picked where one expert is computed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4)) + 0.5)

    def normed(self, rows, own):
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * own

    def weighed(self, rows, gates, e):
        return self.normed(self.expert(rows, e), self.norm[e]) * gates


class NormedRoutes(NormedApart):
    """Every choice has a row of its own, written where it belongs, and is normed there, before the gates come in."""

    def forward(self, hidden, index, weights):
        routes, ids = hidden.repeat_interleave(index.shape[1], 0), index.flatten()
        out = torch.zeros_like(routes)
        for e in range(EXPERTS):
            if e % 2:
                out[ids == e] = self.expert(routes[ids == e], e)
            else:
                own = (ids == e).nonzero()[:, 0]
                out.index_copy_(0, own, self.expert(routes[own], e))
        out = self.normed(out, self.norm[ids.clamp(max=EXPERTS - 1)]).view(*index.shape, HIDDEN)
        return (out * weights[..., None]).sum(1)


class NormedSorted(NormedApart):
    """Rows sorted by expert and weighed by 1, brought back and summed over one choice; then normed and weighed."""

    def forward(self, hidden, index, weights):
        ids, order = index.flatten().sort(stable=True)
        routes = hidden.repeat_interleave(index.shape[1], 0)[order]
        parts = [self.expert(routes[ids == e], e) for e in range(EXPERTS)]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        out = torch.cat(parts) * torch.ones_like(routes[:, :1])
        out = out[back].view(-1, 1, HIDDEN).sum(1)
        return (self.normed(out, self.norm[index.flatten()]).view(*index.shape, HIDDEN) * weights[..., None]).sum(1)


class NormedDense(NormedApart):
    """All experts on all tokens in one product, a number and a norm for each expert beside them."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.5, 2.0, EXPERTS))

    def forward(self, hidden, index, weights):
        gate, up = torch.bmm(hidden.expand(EXPERTS, -1, -1), self.up.mT).chunk(2, -1)
        out = torch.bmm(F.silu(gate) * up * self.slope.view(-1, 1, 1), self.down.mT)
        out = self.normed(out, self.norm[:, None])
        gates = torch.zeros(hidden.shape[0], EXPERTS).scatter_add_(1, index, weights)
        return (out * gates.T[..., None]).sum(0)


class NormedChild(nn.Module):
    """One expert with a slope and a norm of its own."""

    def __init__(self, number):
        super().__init__()
        random = torch.Generator().manual_seed(number)
        self.up, self.down = nn.Linear(HIDDEN, 2 * INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)
        for linear in (self.up, self.down):
            linear.weight.data = torch.randn(linear.weight.shape, generator=random) * linear.in_features**-0.5
        self.slope = nn.Parameter(torch.rand(INNER, generator=random) + 0.5)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.norm.weight.data = torch.rand(HIDDEN, generator=random) + 0.5

    def forward(self, rows):
        gate, up = self.up(rows).chunk(2, -1)
        return self.norm(self.down(F.silu(gate * self.slope) * up))


class NormedChildren(nn.ModuleList):
    def __init__(self):
        super().__init__(NormedChild(number) for number in range(EXPERTS))

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for e, child in enumerate(self):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, child(hidden[token]) * weights[token, slot, None])
        return out


class Masked(Experts):
    """Called with a one-hot mask [T, A, E], all zero for a dropped choice."""

    def forward(self, hidden, mask, weights):
        return super().forward(hidden, torch.where(mask.any(-1), mask.long().argmax(-1), EXPERTS), weights)


class Identity(nn.Module):
    """Ids of EXPERTS and above stand for no weights; `spare` says what they do."""

    def __init__(self, spare):
        super().__init__()
        self.inner, self.spare = Experts(), spare
        self.up = nn.Parameter(torch.cat([self.inner.up.data, torch.zeros(SPARE, 2 * INNER, HIDDEN)]))
        self.down = nn.Parameter(self.inner.down.data)
        del self.inner

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for e in range(EXPERTS + SPARE):
            token, slot = torch.where(index == e)
            rows = hidden[token]
            if e < EXPERTS:
                gate, up = F.linear(rows, self.up[e]).chunk(2, -1)
                rows = F.linear(F.silu(gate) * up, self.down[e])
            else:
                rows = self.spare(rows)
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


class Model(nn.Module):
    def __init__(self, experts, named=EXPERTS, masked=False):
        super().__init__()
        self.scores, self.experts, self.masked = nn.Linear(HIDDEN, named), experts, masked
        nn.init.normal_(self.scores.weight, generator=torch.Generator().manual_seed(3))

    def forward(self, hidden):
        weights, index = self.scores(hidden).softmax(-1).topk(2)
        index, weights = index.flatten(0, -2), weights.flatten(0, -2)
        if self.masked:
            index = F.one_hot(index, EXPERTS) * (weights > 0.2)[..., None]  # as where a capacity drops choices
        return self.experts(hidden.flatten(0, -2), index, weights).view_as(hidden)


def rows(*shape):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(sum(shape)))


def odd(kind):
    return {
        "plain": lambda: Model(Experts()),
        "gate first": lambda: Model(GateFirst()),
        "normed": lambda: Model(Normed()),
        "normed apart": lambda: Model(NormedApart()),
        "normed routes": lambda: Model(NormedRoutes()),
        "normed, sorted": lambda: Model(NormedSorted()),
        "normed, dense": lambda: Model(NormedDense()),
        "normed children": lambda: Model(NormedChildren()),
        "masked": lambda: Model(Masked(), masked=True),
        "identity": lambda: Model(Identity(lambda rows: rows), EXPERTS + SPARE),
    }[kind]()


KINDS = {
    "plain": {},
    "gate first": {"weigh_input": True},
    "normed": {"post": True},
    "normed apart": {"post": True},
    "normed routes": {"post": True},
    "normed, sorted": {"post": True},
    "normed, dense": {"post": True, "program": True},
    "normed children": {"post": True, "program": True},
    "masked": {"masked": True},
    "identity": {"identity": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_experts_are_seen_for_what_they_are(kind):
    findings = find_sites(odd(kind), (rows(2, 12),))
    (site,) = findings.sites
    assert findings.refused == [] and site.activation == ("graph" if "program" in KINDS[kind] else "silu_mul")
    assert (site.experts, site.top_k, site.hidden, site.inner) == (EXPERTS, 2, HIDDEN, INNER)
    seen = {"weigh_input": site.weigh_input, "masked": site.masked, "identity": site.identity}
    seen |= {"post": site.post is not None, "program": site.program is not None}
    assert all(by_expert(steps) for steps in (site.program, site.post) if steps) == (kind != "normed")
    assert seen == {name: KINDS[kind].get(name, False) for name in seen}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_experts_compute_the_same_when_encoded(kind, tolerance):
    original = odd(kind)
    model, inputs = copy.deepcopy(original), rows(2, 12)
    dpamoe.transform(model, 8, example_inputs=(inputs,), calibration=[(inputs,)], spec=dpamoe.EncodeSpec(group_size=8))
    encoded = model.experts
    up, down = (decode(part.weight, 8) for part in (encoded.gate_up_proj, encoded.down_proj))
    scatter(ExpertWeights(up, down, None, None), original.experts, encoded.site.layout)
    for shape in [(1, 0), (1, 1), (1, 7), (3, 171)]:
        with torch.no_grad():
            torch.testing.assert_close(model(rows(*shape)), original(rows(*shape)), **tolerance(torch.float32))


@pytest.mark.parametrize(
    "spare", [lambda rows: rows * 0.5, lambda rows: rows.relu(), torch.zeros_like], ids=["half", "relu", "zero"]
)
def test_spare_experts_that_are_no_identity_are_refused(spare):
    findings = find_sites(Model(Identity(spare), EXPERTS + SPARE), (rows(2, 12),))
    assert findings.sites == []
    assert "ids 4 to 5 have no weights and do not return their input" in findings.refused[0].reason


class DropsOne(Experts):
    """The last expert is another function than the others."""

    def expert(self, rows, e):
        return super().expert(rows, e) * (0.999 if e == EXPERTS - 1 else 1.0)


class Capacity(Experts):
    """Only the first tokens of each expert are served."""

    def forward(self, hidden, index, weights):
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            weights = weights.clone()
            weights[token[3:], slot[3:]] = 0
        return super().forward(hidden, index, weights)


class Scaled(Experts):
    """Right on one token, wrong on more."""

    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights) * (1 + 0.01 * hidden.shape[0])


class NormedByFirst(NormedApart):
    """All experts are scaled by what belongs to the first one."""

    def weighed(self, rows, gates, e):
        return self.normed(self.expert(rows, e), self.norm[0]) * gates


@pytest.mark.parametrize("kind", [DropsOne, Capacity, Scaled, NormedByFirst])
def test_what_only_nearly_is_a_sum_over_experts_is_refused(kind):
    findings = find_sites(Model(kind()), (rows(2, 12),))
    assert findings.sites == []
    assert [refusal.path for refusal in findings.refused] == ["experts"] and findings.refused[0].reason


def test_boundary_is_the_deepest_call_with_three_arguments():
    model = nn.ModuleDict({"block": odd("plain")})
    model.forward = lambda hidden: model["block"](hidden)
    recording = record(model, (rows(2, 12),))
    (candidate,) = find_candidates(recording, model)
    found = boundary(recording, candidate)
    assert isinstance(found, Boundary) and found.path == "block.experts" == owner(candidate)
    assert found.top_k == 2 and found.hidden.shape == (24, HIDDEN) and not found.masked


def test_errors_that_cannot_be_told_are_infinite():
    weights = ExpertWeights(torch.ones(2, 4, 3), torch.ones(2, 3, 4), None, None)
    probe = torch.ones(1, 3), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    same = torch.relu, lambda rows: rows
    right = torch.full((1, 3), 12.0)  # 4 rows of 1 + 1 + 1
    assert error_of(weights, *same, probe, right, False) == 0.0
    assert error_of(weights, *same, probe, right * 2, False) == 0.5
    assert error_of(weights, *same, probe, None, False) == float("inf")
    assert error_of(weights, *same, probe, right[:, :2], False) == float("inf")
    assert error_of(weights, *same, probe, torch.zeros(1, 3), False) == float("inf")
    assert error_of(weights, *same, probe, right * float("nan"), False) == float("inf")
