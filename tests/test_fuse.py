"""Fusing the allocator into the experts: the graph before and after, and the same numbers; what must not be fused is not."""

import copy

import pytest
import torch
from torch import fx, nn

import dpamoe
from dpamoe.modules import encoded_experts
from dpamoe.passes.fuse import drop_widening_casts, fuse_allocation, fuse_counting
from dpamoe.threshold import count_gates

from .graphs import captured, lines


class Casts(nn.Module):
    """The two ops of encoded experts behind casts of the router's tensors, where they are not of the type already."""

    def __init__(self, experts, gates, index):
        super().__init__()
        self.experts, self.gates, self.index = experts, gates, index

    def forward(self, hidden, index, weights):
        index = index if index.dtype == self.index else index.to(self.index)
        weights = weights if weights.dtype == self.gates else weights.to(self.gates)
        return self.experts._fused(hidden, index, weights, self.experts.allocate(index, weights))


@pytest.fixture(scope="module")
def experts(transformed):
    return next(iter(encoded_experts(transformed("qwen3_moe")[1]).values()))


def inputs(tokens=9, gates=torch.float32, index=torch.int64):
    random = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, 8, generator=random).argsort(1)[:, :2]
    return torch.randn(tokens, 64, generator=random), chosen.to(index), torch.rand(tokens, 2, generator=random).to(gates)


def ops(gm):
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function" and "dpamoe" in str(n.target)]


def copies_of(example_inputs):
    """Copies of the inputs, so that counters are not shared between two runs."""
    return [t.clone() if isinstance(t, torch.Tensor) else t for t in example_inputs]


def test_graph_before_and_after(experts, snapshot):
    gm, _ = captured(experts, *inputs())
    assert ops(gm) == ["allocate", "count", "expert_ffn"] and lines(gm) == snapshot(name="before")
    assert fuse_allocation(gm) == 1
    assert ops(gm) == ["routed_ffn_counted"] and lines(gm) == snapshot(name="after")
    assert fuse_allocation(gm) == 0


@pytest.mark.parametrize("budget", [2.0, 3.25, 8.0])
def test_numbers_and_counters_hold(experts, budget):
    experts = copy.deepcopy(experts)
    experts.set_spend(dpamoe.SpendSpec(budget=budget))
    gm, example_inputs = captured(experts, *inputs())
    results = []
    for fuse in (False, True):
        if fuse:
            fuse_allocation(gm)
        copies = copies_of(example_inputs)
        with torch.no_grad():
            results.append((gm(*copies), copies))
    (before, held), (after, fused_held) = results
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    changed = [not torch.equal(a, b) for a, b in zip(held, example_inputs, strict=True)]
    assert sum(changed) == 1  # the counters, and nothing else, were written
    assert all(torch.equal(a, b) for a, b in zip(held, fused_held, strict=True))


@pytest.mark.parametrize(
    "given, gates, index, dropped",
    [
        ((torch.bfloat16, torch.int32), torch.float32, torch.int64, 4),
        ((torch.bfloat16, torch.int64), torch.float32, torch.int64, 2),
        ((torch.float32, torch.int64), torch.bfloat16, torch.int64, 0),
        ((torch.float32, torch.int64), torch.float32, torch.int32, 0),
        ((torch.float16, torch.int64), torch.bfloat16, torch.int64, 0),  # neither holds the other
    ],
    ids=["both widen", "gates widen", "gates narrow", "ids narrow", "neither"],
)
def test_only_casts_that_lose_nothing_are_dropped(experts, given, gates, index, dropped):
    model = Casts(copy.deepcopy(experts), gates, index)
    gm, example_inputs = captured(model, *inputs(9, *given))
    with torch.no_grad():
        before = gm(*copies_of(example_inputs))
        assert drop_widening_casts(gm) == dropped
        after = gm(*copies_of(example_inputs))
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert fuse_allocation(gm) == 1
    with torch.no_grad():
        torch.testing.assert_close(gm(*copies_of(example_inputs)), before, rtol=0, atol=0)


@pytest.fixture
def by_level(experts):
    """The experts with planes by thresholds."""
    experts = copy.deepcopy(experts)
    gates, ids = torch.rand(500, 2, generator=torch.Generator().manual_seed(1)), inputs(500)[1]
    experts.set_importance(torch.tensor(1.0), count_gates(gates, ids, 8).int())
    experts.set_spend(dpamoe.SpendSpec(3.0, allocator="threshold"))
    return experts


HOW = {"plain": {}, "skip": {"skip": True}, "hold": {"hold": True}}


@pytest.mark.parametrize("how", HOW)
def test_thresholds_are_fused_and_the_numbers_hold(by_level, snapshot, how):
    by_level.set_spend(dpamoe.SpendSpec(2.5, **HOW[how], allocator="threshold"))
    gm, example_inputs = captured(by_level, *inputs())
    assert ops(gm) == ["allocate_threshold", "count", "expert_ffn"] and lines(gm) == snapshot(name="before")
    held = [copies_of(example_inputs) for _ in range(2)]
    with torch.no_grad():
        before = gm(*held[0])
        assert fuse_allocation(gm) == 1
        after = gm(*held[1])
    assert ops(gm) == ["threshold_ffn_counted"] and lines(gm) == snapshot(name="after")
    (fused,) = [node for node in gm.graph.nodes if node.name == "threshold_ffn"]
    assert fused.args[-1] == by_level.least == (0 if how == "skip" else 2)
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    changed = [not torch.equal(a, b) for a, b in zip(held[0], example_inputs, strict=True)]
    assert sum(changed) == 1 + len(HOW[how])  # the counters, how far the level is raised, and nothing else
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


def test_thresholds_take_the_routers_tensors_as_they_are(by_level):
    gm, example_inputs = captured(Casts(by_level, torch.float32, torch.int64), *inputs(9, torch.bfloat16, torch.int32))
    with torch.no_grad():
        before = gm(*copies_of(example_inputs))
        assert drop_widening_casts(gm) == 4 and fuse_allocation(gm) == 1
        after = gm(*copies_of(example_inputs))
    (fused,) = [node for node in gm.graph.nodes if node.name == "threshold_ffn"]
    assert all(node.op == "placeholder" for node in fused.args[:5])
    torch.testing.assert_close(before, after, rtol=0, atol=0)


class Odd(nn.Module):
    """Experts that use an allocation as `EncodedExperts` does not."""

    def __init__(self, experts, how):
        super().__init__()
        self.experts, self.how = experts, how

    def forward(self, hidden, index, weights):
        chunks = self.experts.allocate(index, weights)
        if self.how == "other gates":
            return self.experts._fused(hidden, index, weights * 2, chunks)
        if self.how == "rows that need the planes":
            return self.experts._fused(hidden * chunks.sum(), index, weights, chunks)
        first = self.experts._fused(hidden, index, weights, chunks)
        return first + self.experts._fused(first, index, weights, chunks)


@pytest.mark.parametrize(
    "kind, how",
    [("experts", "twice"), ("by_level", "twice"), ("by_level", "other gates"), ("experts", "rows that need the planes")],
)
def test_other_uses_of_an_allocation_are_left_alone(request, kind, how):
    gm, _ = captured(Odd(request.getfixturevalue(kind), how), *inputs())
    before = lines(gm)
    assert fuse_allocation(gm) == 0 and lines(gm) == before


@pytest.mark.parametrize("allocation", ["uniform", "gate-linear", "residual-only", None])
def test_gates_that_the_allocator_alone_sees(experts, allocation):
    """Ablations, and experts weighed by other gates than were allocated by."""
    experts = copy.deepcopy(experts)
    experts.set_spend(dpamoe.SpendSpec(3.3, allocation=allocation or "dpa"))
    gm, example_inputs = captured(experts if allocation else Odd(experts, "other gates"), *inputs())
    held = [copies_of(example_inputs) for _ in range(2)]
    with torch.no_grad():
        before = gm(*held[0])
        assert fuse_allocation(gm) == 1 and ops(gm) == ["routed_ffn_counted" if allocation else "routed_ffn"]
        after = gm(*held[1])
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


def test_an_allocator_that_counts(experts):
    """Where experts cannot take the allocator in, it counts itself."""
    experts = copy.deepcopy(experts)
    experts.set_spend(dpamoe.SpendSpec(3.3, scope="dispatch"))
    gm, example_inputs = captured(experts, *inputs())
    held = [copies_of(example_inputs) for _ in range(2)]
    with torch.no_grad():
        before = gm(*held[0])
        assert fuse_allocation(gm) == 0 and ops(gm) == ["allocate_dispatch", "count", "expert_ffn"]
        assert fuse_counting(gm) == 1 and ops(gm) == ["allocate_dispatch_counted", "expert_ffn"]
        after = gm(*held[1])
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
    assert fuse_counting(gm) == 0


def test_numbers_that_others_read_are_counted_apart(experts):
    gm, _ = captured(experts, *inputs())
    counter = next(node for node in gm.graph.nodes if "count" in str(node.target))
    with gm.graph.inserting_after(counter):
        gm.graph.call_function(torch.clone, (counter.args[1],))
    assert fuse_counting(gm) == 0 and ops(gm) == ["allocate", "count", "expert_ffn"]


def counting(op, counters=1, late=False):
    """The graph of an allocator and what counts its planes; late: to numbers that are made behind it."""
    graph, names = fx.Graph(), ("gates", "ids", "table", *(() if op == "allocate_threshold" else ("budget",)), "k_max")
    given = [graph.placeholder(name) for name in names]
    given += [] if op == "allocate_threshold" else [2]  # planes at least
    spent = None if late else graph.placeholder("spent")
    chunks = graph.call_function(getattr(torch.ops.dpamoe, op), tuple(given))
    chunks.meta["kept"] = True
    spent = graph.call_function(torch.zeros, (9,), {"dtype": torch.int64}) if late else spent
    for _ in range(counters):
        graph.call_function(torch.ops.dpamoe.count, (chunks, spent))
    graph.output(chunks)
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("op", ["allocate", "allocate_dispatch", "allocate_threshold"])
def test_every_allocator_can_count(op, convex_table, random_pairs, snapshot):
    (ids, gates, _), k_max = random_pairs(5, 3, 4), torch.tensor(8)
    table = (convex_table(4)[:, :8] if op == "allocate_threshold" else convex_table(4), torch.tensor(3.3))
    given = (gates, ids, *table[: 1 if op == "allocate_threshold" else 2], k_max)
    gm = counting(op)
    spent = [torch.arange(9), torch.arange(9)]
    before = gm(*given, spent[0])
    assert fuse_counting(gm) == 1 and lines(gm) == snapshot
    assert torch.equal(gm(*given, spent[1]), before)
    assert torch.equal(*spent) and not torch.equal(spent[0], torch.arange(9))
    assert [node.meta.get("kept") for node in gm.graph.nodes if node.op == "call_function"] == [True]


@pytest.mark.parametrize("odd", [{"counters": 2}, {"late": True}])
def test_what_counts_otherwise_stays(odd):
    gm = counting("allocate", **odd)
    before = lines(gm)
    assert fuse_counting(gm) == 0 and lines(gm) == before
