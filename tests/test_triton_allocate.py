"""The Triton allocators give the planes of the torch ones, to the last bit, on any table and in any layout."""

import pytest
import torch

from dpamoe.kernels import allocation, reference
from dpamoe.kernels import triton_allocate as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K_MIN = 2
BUDGETS = (2.0, 2.5, 3.3, 4.0, 7.9, 8.0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill everything that `torch.empty` gives with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def k_max(planes=8):
    return torch.tensor(planes, dtype=torch.int32)


def found(name, gates, ids, table, budget, planes=8, k_min=K_MIN, convex=None, counted=True):
    """Planes from the kernel called `name`, which counts them, too; whether the table is convex is looked up unless given."""
    convex = allocation.is_convex(table, k_min) if convex is None else convex
    arguments = (gates, ids, table, torch.as_tensor(budget), torch.as_tensor(planes, dtype=torch.int32))
    spent = torch.arange(table.shape[1], device=DEVICE) if counted else None
    chunks = getattr(kernels, name)(*(argument.to(DEVICE) for argument in arguments), k_min, convex, spent)
    assert chunks.dtype == torch.int32 and chunks.shape == ids.shape and chunks.is_contiguous()
    if counted:
        added = spent.cpu() - torch.arange(table.shape[1])
        assert torch.equal(added, torch.bincount(chunks.cpu().flatten(), minlength=table.shape[1]))
    return chunks.cpu()


def expected(name, gates, ids, table, budget, planes=8, k_min=K_MIN):
    return getattr(allocation, name)(gates, ids, table, torch.as_tensor(budget), k_max(planes), k_min)


def agree(name, *arguments, **settings):
    """Fail unless kernel and torch give the same planes; return them."""
    chunks = found(name, *arguments, **settings)
    settings = {key: value for key, value in settings.items() if key not in ("convex", "counted")}
    assert torch.equal(chunks, expected(name, *arguments, **settings))
    return chunks


def test_many_tokens_are_counted_apart(monkeypatch, random_pairs, convex_table):
    monkeypatch.setattr(kernels, "_COUNTED_HERE", 4)
    for tokens in (4, 5):
        ids, gates, _ = random_pairs(tokens, 2, 8)
        agree("allocate", gates, ids, convex_table(8), 3.3)


@pytest.mark.parametrize("name, tokens", [("allocate", 5), ("allocate_dispatch", 5), ("allocate_dispatch", 300)])
def test_planes_need_not_be_counted(random_pairs, convex_table, name, tokens):
    ids, gates, _ = random_pairs(tokens, 2, 8)
    agree(name, gates, ids, convex_table(8), 4.0, counted=False)


def test_a_program_hands_out_more_than_once(monkeypatch, random_pairs, convex_table):
    monkeypatch.setattr(kernels, "_MOST_SHARES", 1)
    ids, gates, _ = random_pairs(600, 2, 8)
    agree("allocate_dispatch", gates, ids, convex_table(8), 3.3)


def bend(table, rows=slice(None)):
    """A plateau before a fall in some rows: not convex any more."""
    bent = table.clone()
    bent[rows, 4] = bent[rows, 3]
    return bent


def with_padding(ids, sentinel, seed=0):
    pads = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    return torch.where(pads, sentinel, ids), pads


@pytest.mark.parametrize("active, experts", [(1, 1), (2, 128), (6, 60), (8, 128), (10, 512)])
def test_selection_equals_the_programme(random_pairs, convex_table, active, experts):
    table, (ids, gates, _) = convex_table(experts), random_pairs(len(BUDGETS), active, experts)
    budgets = torch.tensor(BUDGETS)
    chunks = agree("allocate", gates, ids, table, budgets)
    assert torch.equal(chunks, reference.allocate(gates, ids, table, budgets, k_max(), K_MIN))


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_batches(random_pairs, convex_table, tokens):
    table, (ids, gates, _) = convex_table(16), random_pairs(tokens, 2, 16)
    agree("allocate", gates, ids, table, 3.3)
    agree("allocate", gates[:3], ids[:3], bend(table, slice(0, 16, 2)), 4.1)


@pytest.mark.parametrize("active, convex", [(8, True), (3, False)])
def test_ties_go_to_the_lower_slot(random_pairs, convex_table, active, convex):
    ids, _, _ = random_pairs(5, active, 16)
    gates = torch.randint(0, 3, ids.shape, generator=torch.Generator().manual_seed(1)).float()
    table, budgets = convex_table(16, whole=True), torch.tensor([2.0, 2.7, 4.0, 6.1, 8.0])
    table = table if convex else bend(table)
    chunks = agree("allocate", gates, ids, table, budgets)
    assert torch.equal(chunks, reference.allocate(gates, ids, table, budgets, k_max(), K_MIN))
    equal = (0.25 ** torch.arange(9.0)).expand(4, 9)
    assert found("allocate", torch.full((1, 4), 0.25), torch.tensor([[3, 0, 1, 2]]), equal, 3.5).tolist() == [[4, 4, 3, 3]]


@pytest.mark.parametrize("planes", range(2, 9))
def test_largest_precision(random_pairs, convex_table, planes):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 2, 8)
    for shape in (table, bend(table)):
        for second in (5.0, float("inf")):
            chunks = agree("allocate", gates, ids, shape, torch.tensor([2.7, second]), planes=planes)
            assert chunks.max() <= planes


@pytest.mark.parametrize("k_min, planes", [(0, 8), (1, 8), (1, 1), (4, 6), (8, 8)])
def test_smallest_precision(random_pairs, convex_table, k_min, planes):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 3, 8)
    budgets = torch.tensor([float(k_min), (k_min + planes) / 2])
    for shape in (table, bend(table)):
        agree("allocate", gates, ids, shape, budgets, planes=planes, k_min=k_min)
    useless_first = table.clone()
    useless_first[:, 1] = 2 * table[:, 0]  # one plane is worse than none
    agree("allocate", gates, ids, useless_first, budgets, planes=planes, k_min=k_min)


@pytest.mark.parametrize("name", ["allocate", "allocate_dispatch"])
@pytest.mark.parametrize("planes", [2, 8])
def test_skipping(random_pairs, convex_table, name, planes):
    """0 planes or 2 and more: where one plane would be left over, it is not spent."""
    table, (ids, gates, _) = convex_table(8), random_pairs(4, 3, 8)
    table[:, 1], gates[1, 2], ids[2, 0] = float("inf"), 0, 8
    for budget in (0.0, 0.4, 1.0, 1.4, 2.0, 2.5):
        chunks = agree(name, gates, ids, table, budget, planes=planes, k_min=0)
        assert not (chunks == 1).any()


def test_tables_that_are_not_convex():
    random = torch.Generator().manual_seed(0)
    table = torch.rand(8, 9, generator=random)
    for active in (1, 4, 10):
        ids, gates = torch.randint(0, 8, (2, active), generator=random), torch.rand(2, active, generator=random)
        agree("allocate", gates, ids, table, torch.tensor([2.5, 6.2]))
    agree("allocate", gates, ids, bend(table.sort(1, descending=True).values, slice(0, 4)), 4.0)


def test_tokens_of_convex_rows_do_not_mind_the_others(random_pairs, convex_table):
    table, (ids, gates, _) = convex_table(8), random_pairs(4, 3, 7)
    bent = bend(table, slice(7, 8))
    assert torch.equal(found("allocate", gates, ids, bent, 3.3), found("allocate", gates, ids, table, 3.3))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_residuals_beyond_all_numbers(random_pairs, convex_table, value):
    ids, gates, _ = random_pairs(1, 3, 3)
    for column in (0, 2, 5):
        table = convex_table(3)
        table[1, column] = value
        agree("allocate", gates, ids, table, 3.3, convex=False)
    table[1] = value
    agree("allocate", gates, ids, table, 3.3, convex=False)


def test_gates_beyond_all_numbers(random_pairs, convex_table):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 4, 8)
    huge = gates * torch.tensor([[1e25], [-1.0]])
    exact = reference.allocate(huge, ids, table, torch.tensor(3.3), k_max(), K_MIN)
    assert torch.equal(found("allocate", huge, ids, table, 3.3, convex=False), exact)
    for gate in (0.0, float("nan"), float("inf"), 1e30):
        gates[0, 1] = gate
        assert found("allocate", gates[:1], ids[:1], table, 3.3).sum() == 13


@pytest.mark.parametrize("convex", [True, False])
def test_a_row_alone_and_in_a_batch(random_pairs, convex_table, convex):
    table, (ids, gates, _) = convex_table(16), random_pairs(4, 3, 16)
    table = table if convex else bend(table, slice(0, 12))
    ids, _ = with_padding(ids, -1)
    budgets = torch.tensor([2.0, 8.0, 3.25, 4.6])
    together = agree("allocate", gates, ids, table, budgets)
    alone = [found("allocate", gates[t : t + 1], ids[t : t + 1], table, budgets[t]) for t in range(4)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("name", ["allocate", "allocate_dispatch"])
@pytest.mark.parametrize("sentinel", [8, -1, 1 << 40])
def test_padding_gets_and_costs_nothing(random_pairs, convex_table, name, sentinel):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 3, 8)
    padded, pads = with_padding(ids, sentinel)
    for shape, poison in ((table, float("nan")), (bend(table), float("inf"))):
        plain = agree(name, gates, padded, shape, 3.4)
        assert not plain[pads].any()
        assert torch.equal(found(name, gates.masked_fill(pads, poison), padded, shape, 3.4), plain)
    assert not found(name, gates, torch.full_like(ids, sentinel), bend(table), 3.4).any()


@pytest.mark.parametrize("name", ["allocate", "allocate_dispatch"])
def test_empty_batches(convex_table, name):
    table = convex_table(8)
    for shape in (table, bend(table)):
        assert agree(name, torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.long), shape, 3.0).shape == (0, 4)
        assert agree(name, torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.long), shape, 3.0).shape == (3, 0)


@pytest.mark.parametrize("name", ["allocate", "allocate_dispatch"])
@pytest.mark.parametrize("gate_type", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_types_of_a_router(random_pairs, convex_table, name, gate_type, id_type):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 2, 8)
    table = bend(table, slice(0, 4)) if id_type == torch.int32 else table
    agree(name, gates.to(gate_type), with_padding(ids, -1)[0].to(id_type), table, 3.5)


@pytest.mark.parametrize("name", ["allocate", "allocate_dispatch"])
def test_layouts(random_pairs, convex_table, name):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 6, 8)
    for shape in (table, bend(table)):
        plain = agree(name, gates[:, ::2].contiguous(), ids[:, ::2].contiguous(), shape, 3.3)
        wide = torch.full((8, 12), float("nan"))
        wide[:, 1:10] = shape
        assert torch.equal(found(name, gates[:, ::2], ids.T.contiguous().T[:, ::2], wide[:, 1:10], 3.3), plain)
        assert torch.equal(found(name, gates.T.contiguous().T[:, ::2], ids[:, ::2], shape.T.contiguous().T, 3.3), plain)


def test_layouts_of_budgets(random_pairs, convex_table):
    table, (ids, gates, _) = convex_table(8), random_pairs(2, 3, 8)
    assert torch.equal(
        found("allocate", gates, ids, table, torch.tensor(3.3).expand(2)), found("allocate", gates, ids, table, 3.3)
    )
    agree("allocate", gates, ids, table, torch.tensor([[2.5, 0.0], [7.9, 0.0]])[:, 0])


@pytest.mark.parametrize("tokens, active, experts", [
    (1, 1, 1), (1, 8, 16), (5, 2, 60), (17, 6, 60), (40, 8, 128), (70, 8, 8), (3, 10, 512), (65, 8, 512),
])  # fmt: skip
def test_dispatch(random_pairs, convex_table, tokens, active, experts):
    table, (ids, gates, _) = convex_table(experts), random_pairs(tokens, active, experts)
    ids, _ = with_padding(ids, experts)
    for budget in BUDGETS if experts < 100 else (2.5, 3.3)[: 1 + (tokens < 10)]:
        chunks = agree("allocate_dispatch", gates, ids, table, budget)
        if ids[ids < experts].numel():
            assert len({*zip(ids.flatten().tolist(), chunks.flatten().tolist(), strict=True)}) == ids.unique().numel()


@pytest.mark.parametrize("tokens, active, experts, k_min", [
    (2, 1, 1, 2), (3, 3, 6, 2), (70, 8, 8, 2), (10, 8, 24, 1), (3, 8, 512, 2),
])  # fmt: skip
def test_dispatch_of_tables_that_are_not_convex(random_pairs, convex_table, tokens, active, experts, k_min):
    table, (ids, gates, _) = convex_table(experts), random_pairs(tokens, active, experts)
    table[:, k_min + 1] = table[:, k_min] + 0.01
    for budget in (2.0, 3.3, 8.0) if experts < 8 else (k_min + 0.8,):
        agree("allocate_dispatch", gates, ids, table, budget, k_min=k_min)


@pytest.mark.parametrize("convex", [True, False])
def test_dispatch_ties_go_to_the_lower_expert(random_pairs, convex_table, convex):
    ids, _, _ = random_pairs(20, 2, 16)
    gates = torch.randint(0, 3, ids.shape, generator=torch.Generator().manual_seed(1)).float()
    table = convex_table(16, whole=True)
    for budget in (2.0, 2.3, 3.7, 5.1, 8.0):
        agree("allocate_dispatch", gates, ids, table if convex else bend(table), budget)
    assert found("allocate_dispatch", torch.zeros(2, 2), torch.tensor([[3, 5], [5, 3]]), table, 4.0).tolist() == [
        [6, 2],
        [2, 6],
    ]


@pytest.mark.parametrize("planes", [2, 3, 6, 8])
def test_dispatch_in_range(random_pairs, convex_table, planes):
    table, (ids, gates, _) = convex_table(8), random_pairs(5, 3, 8)
    for budget, shape in ((0.1, table), (2.6, bend(table)), (50.0, table), (50.0, bend(table)), (float("inf"), table)):
        assert agree("allocate_dispatch", gates, ids, shape, budget, planes=planes).max() <= planes
    for k_min in (0, 1, 8):
        agree("allocate_dispatch", gates, ids, table, k_min + 0.0, k_min=k_min)


def test_dispatch_counts_infinite_gates(random_pairs, convex_table):
    ids, gates, _ = random_pairs(4, 2, 8)
    for gate in (float("nan"), float("inf"), 1e30):
        gates[0, 0] = gate
        chunks = found("allocate_dispatch", gates, ids, convex_table(8), 4.0)
        assert (
            sum(dict(zip(ids.flatten().tolist(), chunks.flatten().tolist(), strict=True)).values()) == 4 * ids.unique().numel()
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["allocate", "allocate_dispatch"])
@pytest.mark.parametrize("tokens", [4, 2048])
def test_on_the_device_inside_a_graph(random_pairs, convex_table, name, tokens):
    whole = convex_table(128)
    (ids, gates, _), (other_ids, other_gates, _) = random_pairs(tokens, 8, 128), random_pairs(tokens, 8, 128, seed=1)
    for table in (whole, bend(whole, slice(0, 128, 3))):
        convex = allocation.is_convex(table, K_MIN)
        held = [argument.cuda() for argument in (gates, ids, table, torch.tensor(3.3), k_max())]
        function = getattr(kernels, name)
        function(*held, K_MIN, convex)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # refuses whatever waits for the device
            chunks = function(*held, K_MIN, convex)
        for new_gates, new_ids, budget, planes in ((gates, ids, 3.3, 8), (other_gates, other_ids, 4.7, 6)):
            for tensor, value in zip(held, (new_gates, new_ids, table, torch.tensor(budget), k_max(planes)), strict=True):
                tensor.copy_(value)
            graph.replay()
            exact = expected(name, new_gates, new_ids, table, budget, planes=planes)
            assert (chunks.cpu() != exact).float().mean() < 1e-4  # rows that are convex: fp32 here, the programme there
            first = chunks.clone()
            graph.replay()
            assert torch.equal(chunks, first)
