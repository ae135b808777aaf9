"""Encoded experts as a module: equal to the reference, indifferent to batch mates, padding, casts and recompilation."""

import dataclasses

import pytest
import torch

import dpamoe
from dpamoe.kernels import reference
from dpamoe.kernels.grouped import expert_ffn
from dpamoe.kernels.reference import is_gated
from dpamoe.modules import EncodedExperts, encoded_experts, layer_shape
from dpamoe.program import EXPERT
from dpamoe.sites import ExpertLayout, Site, Stack
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.threshold import count_gates

EXPERTS, HIDDEN, INNER = 6, 40, 24


@pytest.fixture
def experts(random_encoded, convex_table):
    """Function that makes encoded experts of random planes."""

    def make(activation="silu_mul", tied=False, biased=False, group_size=16, planes=8, k_min=2):
        rows = INNER * (2 if is_gated(activation) else 1)
        biases = ((Stack(("up_bias",)),), Stack(("down_bias",))) if biased else ()
        layout = ExpertLayout((Stack(("up",)),), Stack(("down",)), *biases)
        site = Site("experts", EXPERTS, 3, HIDDEN, INNER, HIDDEN, rows, activation, layout, 0, "float32")
        spec = EncodeSpec(group_size, k_min, planes, "tied" if tied else "shared")
        up = random_encoded(EXPERTS, rows, HIDDEN, group_size, planes, tied)
        down = random_encoded(EXPERTS, HIDDEN, INNER, group_size, planes, tied, seed=1)
        random = torch.Generator().manual_seed(2)
        biases = [torch.randn(EXPERTS, width, generator=random) if biased else None for width in (rows, HIDDEN)]
        return EncodedExperts(site, spec, up, down, *biases, convex_table(EXPERTS, planes))

    return make


@pytest.fixture
def routing(random_pairs):
    """Function that makes hidden [T, H], index [T, 3], weights [T, 3]."""

    def make(tokens, seed=0):
        index, weights, _ = random_pairs(tokens, 3, EXPERTS, seed)
        return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)), index, weights

    return make


@pytest.fixture
def compiles():
    """Backend for torch.compile that runs the graph as it is, and the graphs it was given."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    yield backend, graphs
    torch._dynamo.reset()


def by_reference(module, hidden, index, weights):
    """The same block by the reference, and its chunks."""
    chunks = reference.allocate(weights, index, module.table, module.budget, module.k_max, module.least)
    up, down = module.gate_up_proj.weight, module.down_proj.weight
    parts = [(w.planes, w.scales, w.offset, w.unit) for w in (up, down)]
    biased = [(*part, bias) for part, bias in zip(parts, (module.up_bias, module.down_bias), strict=True)]
    out = reference.expert_ffn(hidden, index, weights, chunks, *biased, module.site.activation, module.spec.group_size)
    return out, chunks


@pytest.mark.parametrize("budget", [2, 3.5, 8])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"tied": True}, {"biased": True, "activation": "swigluoai"}, {"activation": "relu2"}, {"group_size": -1},
        {"group_size": 15, "planes": 8}, {"k_min": 1},
    ],
)  # fmt: skip
def test_forward_equals_reference(experts, routing, tolerance, settings, budget):
    module, inputs = experts(**settings), routing(11)
    module.set_spend(SpendSpec(budget))
    expected, chunks = by_reference(module, *inputs)
    assert torch.equal(module.allocate(*inputs[1:]), chunks)
    torch.testing.assert_close(module(*inputs), expected, **tolerance(torch.float32))


@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16, torch.float16])
def test_router_weights_of_any_float_dtype(experts, routing, tolerance, gates):
    module, (hidden, index, weights) = experts(), routing(7)
    module.set_spend(SpendSpec(3.5))
    rounded = weights.to(gates)
    expected, chunks = by_reference(module, hidden, index, rounded.float())
    found = module(hidden, index, rounded)
    assert found.dtype == torch.float32 and torch.equal(module.allocate(index, rounded), chunks)
    torch.testing.assert_close(found, expected, **tolerance(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_the_hidden_states(experts, routing, tolerance, dtype):
    module, (hidden, index, weights) = experts(), routing(7)
    hidden = hidden.to(dtype)
    found = module(hidden, index, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(found, by_reference(module, hidden.float(), index, weights)[0].to(dtype), **tolerance(dtype))


def test_no_token_gives_no_row(experts):
    module = experts()
    empty = module(torch.zeros(0, HIDDEN), torch.zeros(0, 3).long(), torch.zeros(0, 3))
    assert empty.shape == (0, HIDDEN) and module.spent.sum() == 0


def test_a_sentinel_id_costs_and_adds_nothing(experts, routing, tolerance):
    """index == experts pads under expert parallelism: the rest of the token spends its own planes only."""
    module, (hidden, index, weights) = experts(), routing(6)
    module.set_spend(SpendSpec(3.5))
    index[:, 2], weights[:, 2] = EXPERTS, 0.0
    chunks = module.allocate(index, weights)
    assert (chunks[:, 2] == 0).all() and (chunks.sum(1) == 7).all()  # floor(2 * 3.5 + .5)
    assert torch.equal(chunks[:, :2], module.allocate(index[:, :2], weights[:, :2]))
    alone = module(hidden, index[:, :2], weights[:, :2])
    torch.testing.assert_close(module(hidden, index, weights), alone, **tolerance(torch.float32))
    index[3] = EXPERTS
    assert not module(hidden, index, weights)[3].any()


def test_ids_that_are_no_expert_have_no_parameters(experts, routing, tolerance):
    """Padding, -1 and E and above, meets programs that read parameters by expert: it adds nothing, as elsewhere."""
    module, (hidden, index, weights) = experts(), routing(6)
    place = {"op": "aten.clamp.default", "args": [{EXPERT: True}, 0, EXPERTS - 1], "kwargs": {}}
    own = {"op": "aten.index.Tensor", "args": [{"parameter": "scale"}, [{"step": 1}]], "kwargs": {}}
    post = (place, own, {"op": "aten.mul.Tensor", "args": [{"step": 0}, {"step": 2}], "kwargs": {}})
    scale = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0)) + 0.5
    up, down = module.gate_up_proj.weight, module.down_proj.weight
    site = dataclasses.replace(module.site, post=post)
    scaled = EncodedExperts(site, module.spec, up, down, None, None, module.residuals, {"scale": scale})
    each = torch.stack([module(hidden, ids[:, None], weight[:, None]) for ids, weight in zip(index.T, weights.T, strict=True)])
    expected = (each * scale[index.T]).sum(0)
    torch.testing.assert_close(scaled(hidden, index, weights), expected, **tolerance(torch.float32))
    index[:, 0], index[:, 2] = -1, EXPERTS + 5
    torch.testing.assert_close(scaled(hidden, index, weights), each[1] * scale[index[:, 1]], **tolerance(torch.float32))


def test_a_row_alone_and_in_a_batch(experts, routing, tolerance):
    module, (hidden, index, weights) = experts(), routing(8)
    module.set_spend(SpendSpec(3.25))
    chunks, whole = module.allocate(index, weights), module(hidden, index, weights)
    for row in range(8):
        one = slice(row, row + 1)
        assert torch.equal(module.allocate(index[one], weights[one]), chunks[one])
        torch.testing.assert_close(module(hidden[one], index[one], weights[one]), whole[one], **tolerance(torch.float32))


def test_output_is_the_weighted_sum_of_the_slots(experts, routing, tolerance):
    module, (hidden, index, weights) = experts(), routing(5)
    up, down = module.gate_up_proj.weight, module.down_proj.weight
    chunks = module.allocate(index, weights)
    slots = [
        expert_ffn(hidden, index[:, [slot]], torch.ones(5, 1), chunks[:, [slot]], up, None, down, None, "silu_mul")
        for slot in range(3)
    ]
    found = module(hidden, index, weights)
    assert torch.equal(module(hidden, index, weights), found)
    expected = sum(weights[:, slot, None] * rows for slot, rows in enumerate(slots))
    torch.testing.assert_close(found, expected, **tolerance(torch.float32))


def test_spent_counts_pairs_by_planes(experts, routing):
    module, (hidden, index, weights) = experts(), routing(9)
    module.set_spend(SpendSpec(3.5))
    chunks = module.allocate(index, weights)
    assert module.spent.sum() == 0  # asking is not spending
    for _ in range(2):
        module(hidden, index, weights)
    assert torch.equal(module.spent, 2 * chunks.flatten().bincount(minlength=9))
    assert module.spent.sum() == 54 and (module.spent * torch.arange(9)).sum() == 2 * 9 * 11  # floor(3 * 3.5 + .5) = 11


@pytest.mark.parametrize("allocation", ["dpa", "gate-linear", "gate-only", "residual-only", "uniform"])
def test_each_allocation_minimises_its_own_cost(experts, routing, allocation):
    module, (_, index, weights) = experts(), routing(40)
    module.set_spend(SpendSpec(3.0, allocation))
    importance = {"dpa": weights.square(), "gate-only": weights.square(), "gate-linear": weights}
    gates = importance.get(allocation, torch.ones_like(weights)).sqrt()
    mean = module.residuals.mean(0, keepdim=True).expand(EXPERTS, -1)
    table = {"gate-only": mean, "uniform": (0.25 ** torch.arange(9.0)).expand(EXPERTS, -1)}.get(allocation, module.residuals)
    expected = reference.allocate(gates, index, table, module.budget, module.k_max, 2)
    chunks = module.allocate(index, weights)
    cost = [(gates.square() * table[index, k.long()]).sum(1) for k in (chunks, expected)]
    torch.testing.assert_close(*cost, rtol=1e-6, atol=0)
    assert (chunks.sum(1) == 9).all()
    assert bool((chunks == 3).all()) == (allocation == "uniform")


@pytest.mark.parametrize("scope", ["token", "dispatch"])
@pytest.mark.parametrize("budget", [0.0, 1.5, 2.0, 3.0])
def test_skipped_experts_add_nothing_and_are_counted(experts, routing, tolerance, budget, scope):
    module, (hidden, index, weights) = experts(biased=True), routing(12)
    index[3, 1] = EXPERTS
    module.set_spend(SpendSpec(budget, scope=scope, skip=True))
    chunks, held = module.allocate(index, weights), index < EXPERTS
    assert not (chunks == 1).any() and (not chunks.any() if budget == 0 else chunks.any())
    found = module(hidden, index, weights)
    alone = torch.zeros_like(found)
    for slot in range(3):  # gates of the others stay as they are
        kept = (chunks[:, slot] > 0).nonzero()[:, 0]
        if len(kept):
            one = (hidden[kept], index[kept, slot : slot + 1], weights[kept, slot : slot + 1], chunks[kept, slot : slot + 1])
            alone[kept] += module.compute(*one)
    torch.testing.assert_close(found, alone, **tolerance(torch.float32))
    assert int(module.skipped) == int((chunks[held] == 0).sum()) and int(module.spent[0]) == int((chunks == 0).sum())


def test_a_row_skips_the_same_experts_in_any_batch(experts, routing):
    module, (_, index, weights) = experts(), routing(20)
    module.set_spend(SpendSpec(2.0, skip=True))
    batch = module.allocate(index, weights)
    assert (batch == 0).any() and (batch > 2).any() and (batch.sum(1) == 6).all()
    for rows in ([4], [19, 0, 4]):
        assert torch.equal(module.allocate(index[rows], weights[rows]), batch[rows])


def test_skipping_needs_no_new_graph_for_a_new_budget(experts, routing, compiles):
    module, inputs = experts(), routing(7)
    backend, graphs = compiles
    module.set_spend(SpendSpec(2.0, skip=True))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for budget in (2.0, 0.5, 3.3):
        module.set_spend(SpendSpec(budget, skip=True))
        assert torch.equal(compiled(*inputs), module(*inputs))
    assert len(graphs) == 1


@pytest.fixture
def weighed(experts, routing):
    """Function that makes encoded experts whose gates were counted on 500 tokens."""

    def make(**settings):
        module, (_, index, weights) = experts(**settings), routing(500, seed=9)
        module.set_importance(torch.tensor(3.0), count_gates(weights, index, EXPERTS).int())
        return module

    return make


@pytest.mark.parametrize("skip", [False, True])
def test_thresholds_spend_the_budget_on_average(weighed, routing, tolerance, skip):
    module, inputs = weighed(), routing(500)
    for budget in (0.5 if skip else 2, 2.5, 4, 8):
        module.set_spend(SpendSpec(budget, skip=skip, allocator="threshold"))
        chunks = module.allocate(*inputs[1:])
        assert float(chunks.float().mean()) == pytest.approx(budget, abs=0.15)  # other tokens than were counted
        assert not (chunks == 1).any() and (skip or chunks.min() >= 2)
        assert torch.equal(module.allocate(inputs[1][7:8], inputs[2][7:8]), chunks[7:8])
    hidden, index, weights = (part[:9] for part in inputs)
    up, down = module.gate_up_proj.weight, module.down_proj.weight
    expected = expert_ffn(hidden, index, weights, module.allocate(index, weights), up, None, down, None, "silu_mul")
    torch.testing.assert_close(module(hidden, index, weights), expected, **tolerance(torch.float32))


def test_thresholds_keep_to_the_planes_held(weighed, routing):
    module, (_, index, weights) = weighed(), routing(500)
    module.k_max.fill_(4)
    for budget in (3.0, 4.0):
        module.set_spend(SpendSpec(budget, allocator="threshold"))
        chunks = module.allocate(index, weights)
        assert chunks.max() == 4 and float(chunks.float().mean()) == pytest.approx(budget, abs=0.15)


def test_thresholds_without_what_they_need(experts):
    module = experts()
    module.set_spend(SpendSpec(3.0))
    with pytest.raises(ValueError, match="sensitivity of experts, which was not measured.*dpamoe profile"):
        module.set_spend(SpendSpec(5.0, allocator="threshold"))
    assert module.spend == SpendSpec(3.0) and float(module.budget) == 3.0


def test_thresholds_of_a_new_table(weighed, routing, convex_table):
    module, (_, index, weights) = weighed(), routing(20)
    module.set_spend(SpendSpec(3.0, allocator="threshold"))
    before, level = module.thresholds.clone(), module.level
    module.set_residuals(convex_table(EXPERTS, seed=5))
    assert module.level == level and not torch.equal(module.thresholds, before)
    module.set_spend(SpendSpec(3.0))
    assert torch.equal(module.allocate(index, weights), reference_planes(module, index, weights))


def reference_planes(module, index, weights):
    return reference.allocate(weights, index, module.residuals, module.budget, module.k_max, 2)


@pytest.mark.parametrize("skip", [False, True])
def test_thresholds_need_no_new_graph_for_a_new_budget(weighed, routing, compiles, skip):
    module, inputs = weighed(), routing(7)
    backend, graphs = compiles
    module.set_spend(SpendSpec(3.0, skip=skip, allocator="threshold"))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    spent = []
    for budget in (3.0, 2.2, 7.0):
        module.set_spend(SpendSpec(budget, skip=skip, allocator="threshold"))
        spent.append(int(module.allocate(*inputs[1:]).sum()))
        assert torch.equal(compiled(*inputs), module(*inputs))
    assert len(graphs) == 1 and spent[1] < spent[0] < spent[2]


@pytest.mark.parametrize("skip", [False, True])
def test_a_held_budget_comes_back(weighed, routing, compiles, skip):
    """On a stream of gates of another size; compiled, in one graph for all budgets."""
    module, (hidden, index, weights) = weighed(), routing(2000)
    backend, graphs = compiles
    module.set_spend(SpendSpec(3.0, skip=skip, allocator="threshold", hold=True))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for budget in (3.0, 4.0):
        module.set_spend(SpendSpec(budget, skip=skip, allocator="threshold", hold=True))
        assert float(module.target) == pytest.approx(budget, abs=1e-5) and float(module.shift) == 0  # starts anew
        before = float(module.allocate(index, 2 * weights).float().mean())
        for _ in range(8):
            compiled(hidden, index, 2 * weights)
        after = float(module.allocate(index, 2 * weights).float().mean())
        assert abs(before - budget) > 0.3 and abs(after - budget) < 0.01 * budget
    assert len(graphs) == 1


def test_a_budget_that_is_not_held_has_no_history(weighed, routing):
    module, inputs = weighed(), routing(300)
    index, weights = inputs[1:]
    plain, held = (SpendSpec(3.0, allocator="threshold", hold=hold) for hold in (False, True))
    module.set_spend(plain)
    expected, result = module.allocate(index, weights), module(*inputs)
    module(inputs[0], index, 2 * weights)
    assert torch.equal(module.allocate(index, weights), expected) and float(module.shift) == 0
    module.set_spend(held)
    assert torch.equal(module(*inputs), result)  # nothing was computed before
    for _ in range(6):
        module(inputs[0], index, 2 * weights)
    assert not torch.equal(module.allocate(index, weights), expected)
    shift = float(module.shift)
    module(inputs[0], torch.full_like(index, EXPERTS), weights)  # padding
    assert float(module.shift) == shift > 0
    module.set_spend(plain)
    assert torch.equal(module(*inputs), result)
    module.set_spend(SpendSpec(3.0, hold=True))  # exact, which holds it anyway
    module(*inputs)
    assert float(module.shift) == 0 and module.allocate(index, weights).float().mean() == 3


def test_dispatch_scope_gives_an_expert_one_k(experts, routing):
    module, (_, index, weights) = experts(), routing(20)
    module.set_spend(SpendSpec(3.0, scope="dispatch"))
    chunks = module.allocate(index, weights)
    per_expert = [chunks[index == expert].unique() for expert in index.unique().tolist()]
    assert all(len(values) == 1 for values in per_expert)
    assert sum(int(values) for values in per_expert) == 3 * len(per_expert)
    module.set_spend(SpendSpec(3.0))
    assert not torch.equal(module.allocate(index, weights), chunks)


def test_the_kernels_are_told_where_experts_have_one_k(experts, routing, store_costs, monkeypatch):
    module, inputs, said = experts(), routing(20), []

    def listen(name, place):
        op = getattr(torch.ops.dpamoe, name)
        monkeypatch.setattr(torch.ops.dpamoe, name, lambda *given: (said.append(given[place]), op(*given))[1])

    listen("expert_ffn", -1), listen("routed_ffn_counted", -2)
    store_costs(layer_shape(module.site, module.spec), uniform_from=12)
    guesses = {
        SpendSpec(3.0): (False, False), SpendSpec(3.0, "gate-only"): (False, False), SpendSpec(3.0, "uniform"): (True, True),
        SpendSpec(3.5, "uniform"): (True, True), SpendSpec(3.0, scope="dispatch"): (True, True),
        SpendSpec(3.0, fallback="uniform"): (True, False),
    }  # fmt: skip
    for spend, expected in guesses.items():
        module.set_spend(spend)
        for part in (inputs, [tensor[:11] for tensor in inputs]):
            module(*part)
        assert tuple(said[-2:]) == expected


def test_a_new_table_is_spent_by_at_once(experts, routing, convex_table):
    module, (_, index, weights) = experts(), routing(20)
    module.set_spend(SpendSpec(3.0, "gate-only"))
    fresh = convex_table(EXPERTS, seed=5)
    module.set_residuals(fresh)
    assert module.residuals is fresh and not torch.equal(module.table, fresh)
    module.set_spend(SpendSpec(3.0))
    expected = reference.allocate(weights, index, fresh, torch.tensor(3.0), torch.tensor(8), 2)
    assert torch.equal(module.allocate(index, weights), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.double()]
)
def test_casts_leave_what_is_encoded_alone(experts, routing, cast, tied):
    module, inputs = experts(tied=tied, biased=True), routing(6)
    module.set_spend(SpendSpec(3.3))
    before = {name: tensor.clone() for name, tensor in module.named_buffers(remove_duplicate=False)}
    expected = module(*inputs)
    cast(module)
    after = dict(module.named_buffers(remove_duplicate=False))
    before["spent"] = after["spent"]
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in after.items())
    assert torch.equal(module(*inputs), expected)


def test_buffers_have_the_names_of_the_checkpoint(experts):
    shared, tied = experts(planes=3, biased=True), experts(planes=3, tied=True)
    projections = ("gate_up_proj", "down_proj")
    planes = {f"{name}.plane.{c}" for name in projections for c in range(3)} | {f"{name}.offset" for name in projections}
    assert set(shared.state_dict()) == planes | {"residuals", "up_bias", "down_bias"} | {
        f"{name}.scale.{c}" for name in projections for c in range(3)
    }
    assert set(tied.state_dict()) == planes | {"residuals"} | {
        f"{name}.{part}" for name in projections for part in ("scale", "unit")
    }
    assert shared.budget.shape == () and shared.budget.dtype == torch.float32
    assert shared.k_max.shape == () and int(shared.k_max) == 3 and shared.residuals.shape == (EXPERTS, 4)


@pytest.mark.parametrize("tied, plane, fixed", [(False, 6 * (360 + 448), 6 * 448), (True, 6 * 360, 6 * (448 + 8))])
def test_bytes_by_hand(experts, tied, plane, fixed):
    """For each of 6 experts: codes 48 * 5 + 40 * 3 = 360 bytes a plane; 48 * 3 + 40 * 2 = 224 groups of 16 inputs.

    Shared scales: fp16 for each plane and group, and fp16 offsets. Tied: one byte each, and two fp32 units per expert.
    """
    module = experts(tied=tied)
    assert module.bytes_per_plane() == (plane, fixed)
    assert module.encoded_bytes() == 8 * plane + fixed


def test_encoded_experts_lists_them_by_path(experts):
    model = torch.nn.Module()
    model.first, model.plain = torch.nn.Sequential(experts()), torch.nn.Linear(2, 2)
    model.second = experts()
    assert list(encoded_experts(model).items()) == [("first.0", model.first[0]), ("second", model.second)]
    assert encoded_experts(model.plain) == {}


def test_shape_of_a_layer(experts):
    assert layer_shape(experts().site, experts().spec).key == "E6 A3 H40 I24 g16 gated shared"
    plain = experts(activation="relu2", tied=True)
    assert layer_shape(plain.site, plain.spec).key == "E6 A3 H40 I24 g16 plain tied"


@pytest.mark.parametrize("scope", ["token", "dispatch"])
def test_fallback_gives_equal_planes_in_large_calls_only(experts, routing, store_costs, scope):
    module, (hidden, index, weights) = experts(), routing(20)
    store_costs(layer_shape(module.site, module.spec), uniform_from=12)
    module.set_spend(SpendSpec(5.0, scope=scope))
    expected = {tokens: module.allocate(index[:tokens], weights[:tokens]) for tokens in (11, 12, 20)}
    module.set_spend(SpendSpec(5.0, scope=scope, fallback="uniform"))
    assert torch.equal(module.allocate(index[:11], weights[:11]), expected[11])
    for tokens in (12, 20):
        assert (expected[tokens] != 5).any() and (module.allocate(index[:tokens], weights[:tokens]) == 5).all()
    module(hidden, index, weights)
    assert module.spent[5] == 60 and module.spent.sum() == 60
    module.set_spend(SpendSpec(5.0, scope=scope))
    assert module.uniform_from is None and torch.equal(module.allocate(index, weights), expected[20])


def test_fallback_where_uniform_never_pays(experts, routing, store_costs):
    module, (_, index, weights) = experts(), routing(20)
    store_costs(layer_shape(module.site, module.spec), uniform_from=None)
    module.set_spend(SpendSpec(3.0))
    expected = module.allocate(index, weights)
    module.set_spend(SpendSpec(3.0, fallback="uniform"))
    assert module.uniform_from is None and torch.equal(module.allocate(index, weights), expected)


def test_fallback_without_costs_changes_nothing(experts, routing, store_costs):
    module, (_, index, weights) = experts(), routing(20)
    module.set_spend(SpendSpec(3.0))
    expected = module.allocate(index, weights)
    with pytest.raises(ValueError, match=r"experts \(E6 A3 H40 I24 g16 gated shared\) on cpu, and none were .* `dpamoe tune`"):
        module.set_spend(SpendSpec(5.0, fallback="uniform"))
    assert module.spend == SpendSpec(3.0) and float(module.budget) == 3.0
    assert torch.equal(module.allocate(index, weights), expected)


def test_fallback_compiles_to_a_guard_on_the_number_of_tokens(experts, routing, store_costs, tolerance, compiles):
    backend, graphs = compiles
    module = experts()
    store_costs(layer_shape(module.site, module.spec), uniform_from=12)
    module.set_spend(SpendSpec(3.0, fallback="uniform"))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for tokens in (5, 13, 9, 11, 12, 20, 6, 40):
        inputs = routing(tokens)
        torch.testing.assert_close(compiled(*inputs), module(*inputs), **tolerance(torch.float32))
    assert len(graphs) <= 3  # one length, any length on either side


@pytest.mark.parametrize("allocation", ["dpa", "gate-only"])
def test_ten_budgets_cost_one_compile(experts, routing, tolerance, compiles, allocation):
    backend, graphs = compiles
    module, inputs = experts(), routing(9)
    module.set_spend(SpendSpec(8.0, allocation))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for budget in (2, 2.5, 3, 3.25, 4, 5, 6, 7, 7.5, 8):
        dpamoe.set_budget(module, budget)
        torch.testing.assert_close(compiled(*inputs), module(*inputs), **tolerance(torch.float32))
    assert len(graphs) == 1


def test_other_routing_costs_no_compile(experts, routing, tolerance, compiles):
    """All tokens to one expert, then spread: shapes depend on tokens and slots only."""
    backend, graphs = compiles
    module, (hidden, index, weights) = experts(), routing(9)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for routed in (torch.zeros_like(index), index, torch.full_like(index, EXPERTS)):
        expected = module(hidden, routed, weights)
        torch.testing.assert_close(compiled(hidden, routed, weights), expected, **tolerance(torch.float32))
    assert len(graphs) == 1


def test_a_whole_model_compiles_once_for_ten_budgets(transformed, random_ids, tolerance, compiles):
    backend, graphs = compiles
    _, model = transformed("qwen3_moe")
    ids = random_ids(2, 16)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for budget in (2, 2.5, 3, 3.25, 4, 5, 6, 7, 7.5, 8):
            dpamoe.set_budget(model, budget)
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits, **tolerance(torch.float32))
    assert len(graphs) == 1
