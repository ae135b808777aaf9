"""The Triton kernels on a GPU, at the shape of a Qwen3-30B-A3B layer, against float64 (run with -m gpu)."""

import pytest
import torch
from torch.nn import functional as F

from dpamoe.kernels import allocation, layout, ops, paths
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
        for k in chunks[ids == expert].unique().tolist():
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
        monkeypatch.setattr(ops, "_has_own_kernels", lambda *given: False)
    x, ids, gates, chunks = routing(tokens)
    chunks = chunks if mixed else torch.full_like(chunks, 4)
    with paths.forced("prefill"):
        found = OPS.expert_ffn(x, ids, gates, chunks, *opened(layer), "silu_mul", GROUP)
    expected = exact(layer, x, ids, gates, chunks)
    product = exact(layer, x, ids, gates, chunks, torch.bfloat16).bfloat16()
    assert error(found, expected) < PREFILL_FACTOR * error(product, expected)


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
