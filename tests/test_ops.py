"""The ops as callers meet them: schema and fakes, dtypes and edge shapes, errors, and a compiled call."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dpamoe.kernels import ops, paths, reference  # ops: registers torch.ops.dpamoe

from .marks import some_slow

OPS = torch.ops.dpamoe
EXPERTS, ACTIVE, WIDTH, INNER, GROUP = 4, 3, 20, 12, 8


@pytest.fixture
def up(random_encoded):
    return random_encoded(EXPERTS, 2 * INNER, WIDTH, GROUP, seed=1)


@pytest.fixture
def down(random_encoded):
    return random_encoded(EXPERTS, WIDTH, INNER, GROUP, seed=2)


def opened(weight, bias=None):
    """One encoded weight as the ops take it."""
    return weight.planes, weight.scales, weight.offset, weight.unit, bias


def allocation(convex_table, budget=3.5, k_max=8):
    """The arguments from `residuals` on, k_min excepted."""
    return convex_table(EXPERTS), torch.tensor(budget), torch.tensor(k_max, dtype=torch.int32)


def levels(k_max=8):
    """Thresholds and k_max: from skipped to all planes for gates of 3 experts, whose squares are below 1."""
    rows = (torch.rand(EXPERTS, 8, generator=torch.Generator().manual_seed(5)) * 0.3).sort(1).values
    return rows, torch.tensor(k_max, dtype=torch.int32)


def rows(tokens, *shape):
    return torch.randn(tokens, *shape, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("op", ["allocate", "allocate_dispatch"])
def test_opcheck_allocate(random_pairs, convex_table, op, tokens, id_dtype):
    ids, gates, _ = random_pairs(tokens, ACTIVE, EXPERTS)
    given = (gates, ids.to(id_dtype), *allocation(convex_table), 2)
    torch.library.opcheck(getattr(OPS, op).default, given)
    torch.library.opcheck(getattr(OPS, f"{op}_counted").default, (torch.arange(9), *given))
    with_gaps = (gates, ids.to(id_dtype).T.contiguous().T, *given[2:])
    torch.library.opcheck(getattr(OPS, op).default, with_gaps)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_opcheck_matmul(random_encoded, random_pairs, tokens, per_slot, tied):
    weight = random_encoded(EXPERTS, 5, WIDTH, GROUP, tied=tied)
    ids, _, chunks = random_pairs(tokens, ACTIVE, EXPERTS)
    x = rows(tokens, *([ACTIVE] if per_slot else []))
    torch.library.opcheck(OPS.expert_matmul.default, (x, ids, chunks, *opened(weight), GROUP))


CASES = [(tokens, dtype) for tokens in (0, 3) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("tokens, dtype", some_slow(CASES, CASES[-1:]))
def test_opcheck_ffn(random_pairs, convex_table, up, down, tokens, dtype):
    ids, gates, chunks = random_pairs(tokens, ACTIVE, EXPERTS)
    x, biases = rows(tokens).to(dtype), (torch.ones(EXPERTS, 2 * INNER), torch.ones(EXPERTS, WIDTH))
    both = (*opened(up, biases[0]), *opened(down, biases[1]), "silu_mul", GROUP)
    torch.library.opcheck(OPS.expert_ffn.default, (x, ids, gates, chunks, *both))
    torch.library.opcheck(OPS.routed_ffn.default, (x, ids, gates, *allocation(convex_table), *both, 2))
    torch.library.opcheck(OPS.threshold_ffn.default, (x, ids, gates, *levels(), *both, 1))
    spent = torch.arange(9)
    torch.library.opcheck(OPS.routed_ffn_counted.default, (spent, x, ids, gates, *allocation(convex_table), *both, 2))
    torch.library.opcheck(OPS.threshold_ffn_counted.default, (spent, x, ids, gates, *levels(), *both, 1))
    torch.library.opcheck(OPS.allocate_threshold_counted.default, (torch.arange(9), gates, ids, *levels()))
    torch.library.opcheck(OPS.count.default, (chunks, torch.arange(9)))


@pytest.mark.parametrize("op", ["routed_ffn", "threshold_ffn"])
def test_nothing_goes_back_through_an_op_that_counts(random_pairs, convex_table, up, down, op):
    """Nor is a gradient left out in silence; without gradients, and of gates alone, its results are plain."""
    ids, gates, _ = random_pairs(3, ACTIVE, EXPERTS)
    tables = (*allocation(convex_table), *opened(up), *opened(down), "silu_mul", GROUP, 2)
    if op == "threshold_ffn":
        tables = (*levels(), *tables[3:-1], 1)
    counted, x = getattr(OPS, f"{op}_counted"), rows(3).requires_grad_()
    found, chunks = counted(torch.zeros(9, dtype=torch.int64), x, ids, gates, *tables)
    assert found.requires_grad and not chunks.requires_grad
    with pytest.raises(RuntimeError, match=f"dpamoe::{op}_counted has no gradient"):
        found.sum().backward()
    with torch.no_grad():
        again, _ = counted(torch.zeros(9, dtype=torch.int64), x, ids, gates, *tables)
    assert not again.requires_grad and torch.equal(again, found)
    seen, spent = gates.clone().requires_grad_(), torch.zeros(9, dtype=torch.int64)
    planes = OPS.allocate_counted(spent, seen, ids, *allocation(convex_table), 2)
    assert not planes.requires_grad


@pytest.mark.parametrize("tokens", [0, 3])
def test_planes_are_counted_by_the_op_that_hands_them_out(random_pairs, convex_table, up, down, tokens):
    ids, gates, _ = random_pairs(tokens, ACTIVE, EXPERTS)
    x, both = rows(tokens), (*opened(up), *opened(down), "silu_mul", GROUP)
    tables = allocation(convex_table), levels()
    cases = [
        (OPS.routed_ffn_counted, (x, ids, gates, *tables[0], *both, 2)),
        (OPS.threshold_ffn_counted, (x, ids, gates, *tables[1], *both)),
        (OPS.allocate_counted, (gates, ids, *tables[0], 2)),
        (OPS.allocate_dispatch_counted, (gates, ids, *tables[0], 2)),
        (OPS.allocate_threshold_counted, (gates, ids, *tables[1])),
    ]
    for op, given in cases:
        spent = torch.arange(9)
        chunks = op(spent, *given)
        chunks = chunks if isinstance(chunks, torch.Tensor) else chunks[1]
        with pytest.raises(ValueError, match=r"spent \[8\] must be \[9\]"):
            op(torch.arange(8), *given)
        counted = torch.arange(9)
        OPS.count(chunks, counted)
        assert torch.equal(spent, counted)
        assert torch.equal(counted - torch.arange(9), torch.bincount(chunks.flatten(), minlength=9))


@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("budget", [2.0, 3.25, 8.0])
def test_routed_ffn_is_allocate_then_expert_ffn(random_pairs, convex_table, up, down, budget, tokens):
    ids, gates, _ = random_pairs(tokens, ACTIVE, EXPERTS)
    x, both = rows(tokens), (*opened(up), *opened(down), "silu_mul", GROUP)
    table = allocation(convex_table, budget)
    chunks = OPS.allocate(gates, ids, *table, 2)
    assert chunks.dtype == torch.int32
    expected = OPS.expert_ffn(x, ids, gates, chunks, *both)
    assert expected.shape == x.shape
    assert torch.equal(OPS.routed_ffn(x, ids, gates, *table, *both, 2)[0], expected)


@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("k_max", [3, 8])
def test_threshold_ffn_is_allocate_threshold_then_expert_ffn(random_pairs, up, down, k_max, tokens):
    ids, gates, _ = random_pairs(tokens, ACTIVE, EXPERTS)
    x, both = rows(tokens), (*opened(up), *opened(down), "silu_mul", GROUP)
    chunks = OPS.allocate_threshold(gates, ids, *levels(k_max))
    assert torch.equal(chunks, reference.allocate_threshold(gates, ids, *levels(k_max)))
    found, planes = OPS.threshold_ffn(x, ids, gates, *levels(k_max), *both)
    assert torch.equal(planes, chunks) and torch.equal(found, OPS.expert_ffn(x, ids, gates, chunks, *both))
    if tokens == 17:
        assert {0, 1, 2, 3} <= set(planes.flatten().tolist()) and planes.max() == k_max
        one, own = OPS.threshold_ffn(x[5:6], ids[5:6], gates[5:6], *levels(k_max), *both)
        assert torch.equal(own, planes[5:6])
        torch.testing.assert_close(one, found[5:6])


def test_a_gate_that_is_no_number_shows_only_where_its_expert_is_read(random_pairs, up, down):
    ids, gates, _ = random_pairs(4, ACTIVE, EXPERTS)
    gates[1, 0] = gates[2, 1] = float("nan")
    ids[2, 1] = EXPERTS  # padding: its gate is not read
    both = (*opened(up), *opened(down), "silu_mul", GROUP)
    found, planes = OPS.threshold_ffn(rows(4), ids, gates, *levels(), *both)
    assert planes[1, 0] == 8 and planes[2, 1] == 0
    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_routers(random_pairs, convex_table, tolerance, up, down, dtype, gate_dtype, id_dtype):
    ids, gates, _ = random_pairs(17, ACTIVE, EXPERTS)
    ids, gates, x = ids.to(id_dtype), gates.to(gate_dtype), rows(17).to(dtype)
    table = allocation(convex_table)
    chunks = OPS.allocate(gates, ids, *table, 2)
    assert torch.equal(chunks, reference.allocate(gates, ids, *table, 2))
    result = OPS.expert_ffn(x, ids, gates, chunks, *opened(up), *opened(down), "silu_mul", GROUP)
    exact = reference.expert_ffn(x.float(), ids, gates, chunks, opened(up), opened(down), "silu_mul", GROUP)
    assert result.dtype == dtype
    torch.testing.assert_close(result, exact.to(dtype), **tolerance(dtype))
    product = OPS.expert_matmul(x, ids, chunks, *opened(up), GROUP)
    judge = reference.expert_matmul(x.float(), ids, chunks, *opened(up), GROUP)
    torch.testing.assert_close(product, judge.to(dtype), **tolerance(dtype))


def test_inputs_need_not_be_contiguous(random_pairs, convex_table, up, down):
    ids, gates, _ = random_pairs(17, ACTIVE, EXPERTS)
    wide = torch.randn(WIDTH, 34, generator=torch.Generator().manual_seed(3))
    x = wide[:, ::2].T
    spread = [torch.stack([tensor, tensor], 2).flatten(1)[:, ::2] for tensor in (ids, gates)]
    assert not any(tensor.is_contiguous() for tensor in (x, *spread))
    both = (*allocation(convex_table), *opened(up), *opened(down), "silu_mul", GROUP, 2)
    assert torch.equal(OPS.routed_ffn(x, *spread, *both)[0], OPS.routed_ffn(x.contiguous(), ids, gates, *both)[0])
    chunks, slots = torch.full((17, ACTIVE), 5), x[:, None].expand(17, ACTIVE, WIDTH)
    every = OPS.expert_matmul(slots, spread[0], chunks.T.contiguous().T, *opened(up), GROUP)
    assert torch.equal(every, OPS.expert_matmul(x, ids, chunks, *opened(up), GROUP))


@pytest.mark.parametrize("sentinel", [EXPERTS, -1])
def test_sentinels_cost_nothing_and_add_nothing(random_pairs, convex_table, up, down, sentinel):
    ids, gates, _ = random_pairs(9, ACTIVE, EXPERTS)
    both = (*opened(up), *opened(down), "silu_mul", GROUP)
    padded = torch.cat([ids, torch.full((9, 1), sentinel)], 1)
    weights = torch.cat([gates, torch.full((9, 1), 7.0)], 1)
    table, x = allocation(convex_table), rows(9)
    chunks = OPS.allocate(weights, padded, *table, 2)
    assert torch.equal(chunks[:, :-1], OPS.allocate(gates, ids, *table, 2)) and not chunks[:, -1].any()
    result, expected = (OPS.routed_ffn(x, i, g, *table, *both, 2)[0] for i, g in ((padded, weights), (ids, gates)))
    assert torch.equal(result, expected)
    nobody = torch.full_like(ids, sentinel)
    assert not OPS.routed_ffn(x, nobody, gates, *table, *both, 2)[0].any()
    assert not OPS.allocate_dispatch(gates, nobody, *table, 2).any()


class _Block(nn.Module):
    def __init__(self, table, weights):
        super().__init__()
        self.table, self.weights = table, weights
        self.register_buffer("budget", torch.tensor(3.0))

    def forward(self, x, ids, gates):
        residuals, _, k_max = self.table
        routed = OPS.routed_ffn(x * 2, ids, gates, residuals, self.budget, k_max, *self.weights, "silu_mul", GROUP, 2)[0]
        return routed + x


def test_compiled_call_equals_eager_for_any_budget(random_pairs, convex_table, up, down):
    compiles = []

    def counting(graph, example_inputs):
        compiles.append(graph)
        return graph

    module = _Block(allocation(convex_table), (*opened(up), *opened(down)))
    eager, compiled = module, torch.compile(module, backend="eager", fullgraph=True)
    ids, gates, _ = random_pairs(7, ACTIVE, EXPERTS)
    counted = torch.compile(module, backend=counting, fullgraph=True)
    for budget in (2.0, 3.25, 8.0):
        module.budget.fill_(budget)
        expected = eager(rows(7), ids, gates)
        assert torch.equal(compiled(rows(7), ids, gates), expected)
        assert torch.equal(counted(rows(7), ids, gates), expected)
    crowded = torch.zeros_like(ids)  # all on one expert: shapes do not depend on the routing
    assert torch.equal(counted(rows(7), crowded, gates), eager(rows(7), crowded, gates))
    assert len(compiles) == 1


def complaint(function, *words):
    """Check that calling `function` raises a ValueError that says all the words."""
    with pytest.raises(ValueError) as caught:
        function()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("op", ["allocate", "allocate_dispatch"])
def test_allocate_refuses_what_does_not_fit(random_pairs, convex_table, op):
    ids, gates, _ = random_pairs(5, ACTIVE, EXPERTS)
    table, call = allocation(convex_table), getattr(OPS, op)
    complaint(lambda: call(gates[:, :2], ids, *table, 2), "gates [5, 2]", "expert_ids [5, 3]")
    complaint(lambda: call(gates[0], ids[0], *table, 2), "[tokens, active experts]")
    complaint(lambda: call(gates, ids, table[0][0], *table[1:], 2), "residuals [9]")
    complaint(lambda: call(gates, ids, *table, 9), "k_min (9)")
    complaint(lambda: call(gates, ids, *table, -1), "k_min (-1)")


def test_matmul_refuses_what_does_not_fit(random_pairs, up):
    ids, _, chunks = random_pairs(5, ACTIVE, EXPERTS)

    def call(x, ids, chunks):
        return lambda: OPS.expert_matmul(x, ids, chunks, *opened(up), GROUP)

    complaint(call(rows(5), ids, chunks[:4]), "chunks [4, 3]", "expert_ids [5, 3]")
    complaint(call(rows(4), ids, chunks), "x [4, 20]", "expert_ids [5, 3]")
    complaint(call(rows(5, ACTIVE + 1), ids, chunks), "x [5, 4, 20]")
    complaint(call(torch.zeros(5, 40), ids, chunks), "40 features", "5 bytes", "have 3")
    complaint(call(rows(5), ids, chunks * 0 + 9), "9", "holds 8 planes")
    complaint(call(rows(5), ids, chunks * 0 - 1), "-1", "0 to 8")


def test_weights_that_do_not_fit_each_other_are_refused(random_encoded, random_pairs, up, down):
    ids, gates, chunks = random_pairs(5, ACTIVE, EXPERTS)
    chunks = chunks * 0 + 4
    fewer = random_encoded(EXPERTS - 1, WIDTH, INNER, GROUP)
    narrow = random_encoded(EXPERTS, WIDTH, INNER + 8, GROUP)
    empty = replace(up, planes=[])

    def call(up=up, down=down, up_bias=None, down_bias=None, group=GROUP, x=None):
        x = rows(5) if x is None else x
        given = (*opened(up, up_bias), *opened(down, down_bias), "silu_mul", group)
        return lambda: OPS.expert_ffn(x, ids, gates, chunks, *given)

    assert call(up_bias=torch.ones(EXPERTS, 2 * INNER), down_bias=torch.ones(EXPERTS, WIDTH))().shape == (5, WIDTH)
    complaint(call(up_bias=torch.ones(EXPERTS)), "bias of the first weight", "[4]", "[4, 24]")
    complaint(call(down_bias=torch.ones(EXPERTS, 1)), "bias of the second weight", "[4, 1]", "[4, 20]")
    complaint(call(down=fewer), "4 experts", "3")
    complaint(call(down=narrow), "second weight", "12 features")
    complaint(call(group=2 * GROUP), "groups of 16", "other features or groups")
    complaint(call(group=0), "group_size is 0")
    complaint(call(up=empty), "0 planes")
    complaint(call(x=rows(5, ACTIVE)), "x [5, 3, 20]", "[tokens, features]")
    given = (rows(5), ids, chunks)
    complaint(lambda: OPS.expert_matmul(*given, *opened(up, torch.ones(2 * INNER)), GROUP), "bias of the weight", "[24]")
    complaint(lambda: OPS.expert_matmul(*given, *opened(up), 16), "groups of 16")


def test_tables_need_a_row_for_every_expert(random_pairs, convex_table, up, down):
    ids, gates, _ = random_pairs(5, ACTIVE, EXPERTS)
    both = (*opened(up), *opened(down), "silu_mul", GROUP)
    table, budget, k_max = allocation(convex_table)
    complaint(lambda: OPS.routed_ffn(rows(5), ids, gates, table[:3], budget, k_max, *both, 2), "residuals [3, 9]", "4 experts")
    thresholds, k_max = levels()
    complaint(lambda: OPS.threshold_ffn(rows(5), ids, gates, thresholds[:3], k_max, *both), "thresholds [3, 8]", "4 experts")


def test_an_allocation_inside_is_checked_as_one_outside(random_pairs, convex_table, up, down, monkeypatch):
    monkeypatch.setattr(paths, "has_triton", lambda device: True)
    ids, gates, _ = random_pairs(3, ACTIVE, EXPERTS)
    both = (*opened(up), *opened(down), "silu_mul", GROUP)
    table, _, k_max = allocation(convex_table)

    def call(budget, gates=gates, seen=gates):
        return lambda: OPS.routed_ffn(rows(3), ids, gates, table, budget, k_max, *both, 2, True, False, seen)

    for shape in ((2,), (3, 1), (1, 1)):
        complaint(call(torch.full(shape, 4.0)), "budget", "3 tokens")
    complaint(call(torch.tensor(4.0), gates=gates[:, :1]), "gates [3, 1]")
    complaint(call(torch.tensor(4.0), seen=gates[:1]), "gates [1, 3]")


def test_a_gate_that_is_no_number_counts_for_nothing_where_nothing_is_read(random_pairs, up, down):
    ids, gates, chunks = random_pairs(3, ACTIVE, EXPERTS)
    chunks = chunks.clamp_min(1)
    chunks[:, 1] = 0
    both = (*opened(up), *opened(down), "silu_mul", GROUP)
    expected = OPS.expert_ffn(rows(3), ids, gates, chunks, *both)
    for gate in (float("nan"), float("inf")):
        gates[:, 1] = gate
        assert torch.equal(OPS.expert_ffn(rows(3), ids, gates, chunks, *both), expected)


def test_a_block_has_the_planes_that_both_weights_hold(random_pairs, up, down):
    ids, gates, chunks = random_pairs(3, ACTIVE, EXPERTS)
    fewer = replace(down, planes=down.planes[:3], scales=down.scales[:3])
    both = (*opened(up), *opened(fewer), "silu_mul", GROUP)
    complaint(lambda: OPS.expert_ffn(rows(3), ids, gates, chunks * 0 + 4, *both), "holds 3 planes")
    assert [len(weight.planes) for weight in ops._opened(rows(3), ids, *both)] == [3, 3]


def test_ffn_refuses_what_does_not_fit(random_pairs, convex_table, up, down):
    ids, gates, chunks = random_pairs(5, ACTIVE, EXPERTS)
    few = replace(up, planes=up.planes[:4], scales=up.scales[:4])

    def call(x=None, gates=gates, chunks=chunks * 0 + 4, activation="silu_mul", up=up):
        x = rows(5) if x is None else x
        return lambda: OPS.expert_ffn(x, ids, gates, chunks, *opened(up), *opened(down), activation, GROUP)

    assert call()().shape == (5, WIDTH)
    complaint(call(activation="swish"), "'swish'", "silu_mul", "expert_matmul")
    complaint(call(gates=gates[:, :1]), "gates [5, 1]")
    complaint(call(chunks=chunks[:1]), "chunks [1, 3]")
    complaint(call(x=rows(6)), "x [6, 20]")
    complaint(call(x=torch.zeros(5, 8)), "8 features")
    complaint(call(chunks=chunks * 0 + 5, up=few), "5", "holds 4 planes")
    table = allocation(convex_table)
    both = (*opened(up), *opened(down), "swish", GROUP)
    complaint(lambda: OPS.routed_ffn(rows(5), ids, gates, *table, *both, 2), "'swish'")
    complaint(lambda: OPS.routed_ffn(rows(5), ids, gates[:3], *table, *both, 2), "gates [3, 3]")
    complaint(lambda: OPS.threshold_ffn(rows(5), ids, gates, *levels(), *both), "'swish'")
    complaint(lambda: OPS.threshold_ffn(rows(5), ids, gates[:3], *levels(), *both), "gates [3, 3]")
    complaint(lambda: OPS.threshold_ffn(rows(5), ids, gates, levels()[0][0], levels()[1], *both), "thresholds [8]")
    complaint(lambda: OPS.threshold_ffn(rows(5), ids, gates, *levels(), *both, 9), "k_min is 9", "0 to 8 planes")
    complaint(lambda: OPS.allocate_threshold(gates, ids, *levels(), -1), "k_min is -1")
