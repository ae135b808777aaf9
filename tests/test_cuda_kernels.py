"""The Triton kernels on a GPU, at the shape of a Qwen3-30B-A3B layer, against float64 (run with -m gpu)."""

import pytest
import torch
from torch.nn import functional as F

from dpamoe.kernels import allocation, layout, paths, reference
from dpamoe.kernels.layout import EncodedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

OPS = torch.ops.dpamoe
EXPERTS, ACTIVE, HIDDEN, INNER, GROUP = 128, 8, 2048, 768, 128
DECODE_ERROR = 2e-3  # Frobenius norm, before output rounding
PREFILL_FACTOR = 1.2  # of the error of a bf16 product with the decoded weights


def random_weight(out_features, in_features, seed):
    """Random planes and scales on the device."""
    random = torch.Generator("cuda").manual_seed(seed)
    shape = (EXPERTS, out_features, in_features // GROUP)
    planes = [
        torch.randint(0, 256, (*shape[:2], in_features // 8), dtype=torch.uint8, device="cuda", generator=random)
        for _ in range(8)
    ]
    scales = [((torch.rand(shape, device="cuda", generator=random) + 1.5) * 0.01 * 0.5**c).half() for c in range(8)]
    offset = (torch.randn(shape, device="cuda", generator=random) * 0.001).half()
    return EncodedWeight(planes, scales, offset, None, in_features, GROUP)


@pytest.fixture(scope="module")
def layer():
    return random_weight(2 * INNER, HIDDEN, 1), random_weight(HIDDEN, INNER, 2)


def opened(layer):
    return [part for w in layer for part in (w.planes, w.scales, w.offset, w.unit, None)]


def routing(tokens, seed=0):
    random = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=random).topk(ACTIVE, 1).indices
    gates = torch.rand(tokens, ACTIVE, device="cuda", generator=random)
    chunks = torch.randint(2, 9, (tokens, ACTIVE), dtype=torch.int32, device="cuda", generator=random)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=random)
    return x.bfloat16(), ids, gates, chunks


def thresholds(skip=True, seed=7):
    """Thresholds fp32 [E, 8] for squared gates below 1, and k_max; an expert may be skipped or reads two planes at least."""
    rows = torch.rand(EXPERTS, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).sort(1).values
    rows[:, :2] = rows[:, 1:2] if skip else -1.0
    return rows, torch.tensor(8, dtype=torch.int32, device="cuda")


def decoded(weight, expert, k):
    """One expert from its first k planes, fp64."""
    value = weight.offset[expert].double().repeat_interleave(GROUP, -1)
    for c in range(k):
        signs = layout.unpack_signs(weight.planes[c][expert], weight.in_features).double()
        value += weight.scales[c][expert].double().repeat_interleave(GROUP, -1) * signs
    return value


def exact(layer, x, ids, gates, chunks, dtype=torch.float64):
    """The expert block in `dtype`, bf16 with its roundings between the products; returned in fp64."""
    up, down = layer
    out = torch.zeros(x.shape[0], HIDDEN, dtype=torch.float64, device="cuda")
    for expert in ids.unique().tolist():
        for k in chunks[(ids == expert) & (chunks > 0)].unique().tolist():  # 0: skipped
            token, slot = ((ids == expert) & (chunks == k)).nonzero(as_tuple=True)
            both = F.linear(x[token].to(dtype), decoded(up, expert, k).to(dtype))
            hidden = F.silu(both[:, :INNER]) * both[:, INNER:]
            rows = F.linear(hidden, decoded(down, expert, k).to(dtype)).double()
            out.index_add_(0, token, rows * gates[token, slot].double()[:, None])
    return out


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture
def tf32():
    """Lets fp32 rows use the fast kernels, whose output then is not rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_decode_against_float64(layer, tf32, tokens):
    x, ids, gates, chunks = routing(tokens)
    with paths.forced("decode"):
        found = OPS.expert_ffn(x.float(), ids, gates, chunks, *opened(layer), "silu_mul", GROUP)
    assert error(found, exact(layer, x, ids, gates, chunks)) < DECODE_ERROR


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("tokens", "special"), [(64, True), (300, True), (2048, True), (64, False), (300, False)])
def test_prefill_against_a_bf16_product(layer, monkeypatch, tokens, special, mixed):
    if not special:  # the kernels of every card, on cards that have one of their own
        monkeypatch.setattr(paths, "has_own_prefill", lambda *given: False)
    x, ids, gates, chunks = routing(tokens)
    chunks = chunks if mixed else torch.full_like(chunks, 4)
    with paths.forced("prefill"):
        found = OPS.expert_ffn(x, ids, gates, chunks, *opened(layer), "silu_mul", GROUP)
    expected = exact(layer, x, ids, gates, chunks)
    product = exact(layer, x, ids, gates, chunks, torch.bfloat16).bfloat16()
    assert error(found, expected) < PREFILL_FACTOR * error(product, expected)


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_a_table_of_fewer_planes_than_the_weights_hold(layer, convex_table, path):
    """Kernels that allocate on their way read a column for every plane: this table goes to the allocator of its own."""
    x, ids, gates, _ = routing(2)
    table = (
        convex_table(EXPERTS)[:, :5].cuda(),
        torch.tensor(3.3, device="cuda"),
        torch.tensor(4, dtype=torch.int32, device="cuda"),
    )
    expected = OPS.allocate(gates, ids, *table, 2)
    with paths.forced(path):
        found, planes = OPS.routed_ffn(x, ids, gates, *table, *opened(layer), "silu_mul", GROUP, 2, True)
        assert torch.equal(planes, expected) and int(planes.max()) <= 4
        assert torch.equal(found, OPS.expert_ffn(x, ids, gates, planes, *opened(layer), "silu_mul", GROUP))


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_a_row_alone_and_in_a_batch(layer, convex_table, path):
    x, ids, gates, _ = routing(24)
    table = convex_table(EXPERTS).cuda(), torch.tensor(3.3, device="cuda"), torch.tensor(8, dtype=torch.int32, device="cuda")
    with paths.forced(path):
        whole, planes = OPS.routed_ffn(x, ids, gates, *table, *opened(layer), "silu_mul", GROUP, 2, True)
        again, _ = OPS.routed_ffn(x, ids, gates, *table, *opened(layer), "silu_mul", GROUP, 2, True)
        assert torch.equal(whole, again)
        for row in (0, 7, 23):
            one = slice(row, row + 1)
            alone, own = OPS.routed_ffn(x[one], ids[one], gates[one], *table, *opened(layer), "silu_mul", GROUP, 2, True)
            assert torch.equal(own, planes[one])
            torch.testing.assert_close(alone, whole[one], rtol=2e-2, atol=2e-2 * float(whole.abs().max()))  # bf16
    cpu = [t.cpu() for t in (gates, ids, *table)]
    assert torch.equal(planes.cpu(), allocation.allocate(*cpu, 2, True))


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_a_captured_graph_follows_routing_and_budget(layer, convex_table, path):
    table = convex_table(EXPERTS).cuda()
    budget, k_max = torch.tensor(4.0, device="cuda"), torch.tensor(8, dtype=torch.int32, device="cuda")
    x, ids, gates, _ = routing(16)
    call = (x, ids, gates, table, budget, k_max, *opened(layer), "silu_mul", GROUP, 2, True)
    with paths.forced(path):
        OPS.routed_ffn(*call)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, planes = OPS.routed_ffn(*call)
        for seed, k in ((5, 2.5), (6, 7.0)):
            for held, fresh in zip((x, ids, gates), routing(16, seed), strict=False):
                held.copy_(fresh)
            budget.fill_(k)
            output.fill_(float("nan"))
            graph.replay()
            expected, own = OPS.routed_ffn(*call)
            assert torch.equal(planes, own) and torch.equal(output, expected)
            assert planes.sum(1).unique().tolist() == [int(ACTIVE * k + 0.5)]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_thresholds_in_decode_against_float64(layer, tf32, tokens, skip):
    x, ids, gates, _ = routing(tokens)
    with paths.forced("decode"):
        found, planes = OPS.threshold_ffn(x.float(), ids, gates, *thresholds(skip), *opened(layer), "silu_mul", GROUP)
    expected = reference.allocate_threshold(gates, ids, *thresholds(skip))
    assert torch.equal(planes, expected) and (tokens == 1 or (expected == 0).any() == skip)
    assert error(found, exact(layer, x, ids, gates, planes)) < DECODE_ERROR


@pytest.mark.parametrize(("tokens", "special"), [(64, True), (300, True), (300, False)])
def test_thresholds_in_prefill_against_a_bf16_product(layer, monkeypatch, tokens, special):
    if not special:
        monkeypatch.setattr(paths, "has_own_prefill", lambda *given: False)
    x, ids, gates, _ = routing(tokens)
    with paths.forced("prefill"):
        found, planes = OPS.threshold_ffn(x, ids, gates, *thresholds(), *opened(layer), "silu_mul", GROUP)
    assert torch.equal(planes, reference.allocate_threshold(gates, ids, *thresholds()))
    expected = exact(layer, x, ids, gates, planes)
    product = exact(layer, x, ids, gates, planes, torch.bfloat16).bfloat16()
    assert error(found, expected) < PREFILL_FACTOR * error(product, expected)


@pytest.mark.parametrize("path", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_thresholds_for_a_row_alone_and_in_a_batch(layer, path, dtype):
    """Among the gates are roots of thresholds, and none; among the ids padding; gates and ids are as routers leave them."""
    x, ids, gates, _ = routing(24)
    table, k_max = thresholds()
    gates = gates.to(dtype)
    table[ids[3], 4] = gates[3].float().square()  # equal: not above
    table[:, 4:] = table[:, 4:].sort(1).values
    ids[5, 2], ids[6, 0], gates[7, 1] = EXPERTS, -1, float("nan")
    expected = reference.allocate_threshold(gates.cpu(), ids.cpu(), table.cpu(), k_max.cpu())
    with paths.forced(path):
        for index in (ids, ids.int()):
            found, planes = OPS.threshold_ffn(x, index, gates, table, k_max, *opened(layer), "silu_mul", GROUP)
            assert torch.equal(planes.cpu(), expected) and planes[5, 2] == 0 and planes[7, 1] == 8
            assert found.isnan().any(1).nonzero().flatten().tolist() == [7]
        for row in (0, 3, 5, 23):
            one = slice(row, row + 1)
            alone, own = OPS.threshold_ffn(x[one], ids[one], gates[one], table, k_max, *opened(layer), "silu_mul", GROUP)
            assert torch.equal(own, planes[one])
            torch.testing.assert_close(alone, found[one], rtol=2e-2, atol=2e-2 * float(found[0].abs().max()))  # bf16


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_a_captured_graph_follows_gates_and_thresholds(layer, path):
    table, k_max = thresholds()
    x, ids, gates, _ = routing(16)
    call = (x, ids, gates, table, k_max, *opened(layer), "silu_mul", GROUP)
    with paths.forced(path):
        OPS.threshold_ffn(*call)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, planes = OPS.threshold_ffn(*call)
        seen = []
        for seed, scale, most in ((5, 0.1, 8), (6, 1.0, 5)):
            for held, fresh in zip((x, ids, gates), routing(16, seed), strict=False):
                held.copy_(fresh)
            table.copy_(thresholds(seed=seed)[0] * scale)
            k_max.fill_(most)
            output.fill_(float("nan"))
            graph.replay()
            expected, own = OPS.threshold_ffn(*call)
            assert torch.equal(planes, own) and torch.equal(output, expected)
            assert torch.equal(planes, reference.allocate_threshold(gates, ids, table, k_max)) and planes.max() == most
            seen.append(float(planes.float().mean()))
        assert seen[0] > seen[1] + 1


def test_thresholds_without_a_synchronisation(layer):
    x, ids, gates, _ = routing(512)
    call = (x, ids, gates, *thresholds(), *opened(layer), "silu_mul", GROUP)
    OPS.threshold_ffn(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, found = OPS.threshold_ffn(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, reference.allocate_threshold(gates, ids, *thresholds()))


@pytest.mark.parametrize("scope", ["allocate", "allocate_dispatch"])
@pytest.mark.parametrize("convex", [True, False])
def test_allocation_without_a_synchronisation(convex_table, scope, convex):
    _, ids, gates, _ = routing(512)
    table, budget = convex_table(EXPERTS).cuda(), torch.tensor(3.7, device="cuda")
    call = (gates, ids, table, budget, torch.tensor(8, dtype=torch.int32, device="cuda"), 2, convex)
    op = getattr(OPS, scope)
    op(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = op(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), getattr(allocation, scope)(*(t.cpu() for t in call[:5]), 2, True))
