"""The Hopper prefill kernel on such a card, at every group size, scale mode, cut and kind of input (run with -m gpu)."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import grouped, hopper_experts, paths, triton_experts
from dpamoe.kernels.layout import EncodedWeight

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no CUDA device of compute capability 9.0")]

OPS = torch.ops.dpamoe
EXPERTS, ACTIVE = 6, 3
FACTOR = 1.2  # of the error of a bf16 product with the decoded weights


def random_weight(out_features, in_features, group, tied=False, dtype=torch.float16):
    shape = (EXPERTS, out_features, in_features // group)
    planes = [torch.randint(0, 256, (*shape[:2], in_features // 8), dtype=torch.uint8, device="cuda") for _ in range(8)]
    if tied:
        scales = [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")]
        offset = torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
        return EncodedWeight(planes, scales, offset, torch.rand(EXPERTS, device="cuda") + 0.1, in_features, group)
    scales = [((torch.rand(shape, device="cuda") + 0.5) * 0.02 * 0.5**c).to(dtype) for c in range(8)]
    return EncodedWeight(planes, scales, (torch.randn(shape, device="cuda") * 0.01).to(dtype), None, in_features, group)


def opened(weight, bias=None):
    return weight.planes, weight.scales, weight.offset, weight.unit, bias


def routing(tokens, hidden, most=9):
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(ACTIVE, 1).indices
    ids[ids == 4] = EXPERTS  # padding; one expert is never used
    chunks = torch.randint(0, most, (tokens, ACTIVE), dtype=torch.int32, device="cuda")
    return torch.randn(tokens, hidden, device="cuda").bfloat16(), ids, torch.rand(tokens, ACTIVE, device="cuda"), chunks


def decoded(weight, dtype=torch.float64):
    """All experts at every k, [8, E, O, I]."""
    return torch.stack([grouped.decode(weight, k) for k in range(1, 9)]).to(dtype)


def multiply(x, ids, chunks, dense, bias):
    """Rows times the weights that their pairs read, in the dtype of `dense`; zeros where there is nothing to read."""
    out = torch.zeros(*ids.shape, dense.shape[2], dtype=dense.dtype, device="cuda")
    rows = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    for expert in range(EXPERTS):
        own = None if bias is None else bias[expert].to(dense.dtype)
        for k in range(1, 9):
            held = (ids == expert) & (chunks == k)
            out[held] = F.linear(rows[held].to(dense.dtype), dense[k - 1, expert], own)
    return out


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# group, width, words of a lane, tied scales, pairs per expert that a cut is taken for
KINDS = {
    "32": (32, 384, 1, False, (24, 96, 193)), "32 wide": (32, 4096, 1, False, (48,)),
    "64": (64, 512, 2, False, (12, 48, 96, 193)), "128": (128, 768, 2, False, (12, 24, 48, 96, 192, 193)),
    "256": (256, 1024, 4, False, (24, 193)), "32 tied": (32, 384, 1, True, (48, 192)),
    "64 tied": (64, 512, 2, True, (24, 48, 96, 193)), "128 tied": (128, 512, 4, True, (24, 193)),
}  # fmt: skip


@pytest.mark.parametrize("one_k", [False, True])
@pytest.mark.parametrize("kind, pairs", [(kind, pairs) for kind, (*_, every) in KINDS.items() for pairs in every])
def test_groups_scale_modes_and_cuts(kind, pairs, one_k):
    """Three experts fill tiles with pairs of one k, the others have all of them, whatever was guessed."""
    group, width, words, tied, _ = KINDS[kind]
    weight = random_weight(200, width, group, tied)
    x, ids, _, chunks = routing(700, width)
    chunks = torch.where(ids < 3, 5, chunks)
    assert hopper_experts.words_at_once(weight) == words
    cut = hopper_experts.cut_for(pairs, 1, one_k, weight)
    by = hopper_experts.sort_pairs(ids, chunks, cut, one_k, weight, weight)
    found = torch.zeros(ids.numel(), 200, dtype=x.dtype, device="cuda")
    hopper_experts.product(x, by, True, weight, None, "", ACTIVE, found)
    expected = multiply(x, ids, chunks, decoded(weight), None)
    found = found.view(expected.shape)
    assert error(found, expected) < FACTOR * error(multiply(x, ids, chunks, decoded(weight, torch.bfloat16), None), expected)
    assert (found[(ids == EXPERTS) | (chunks == 0)] == 0).all()


@pytest.mark.parametrize("pairs, one_k", [(32, False), (64, False), (128, False), (32, True), (128, True), (256, True)])
def test_a_program_whose_first_tile_is_not_that_of_most_planes(monkeypatch, pairs, one_k):
    """All tiles in one program, of as many pairs per expert as the cut is for; of all k, fewest the largest, or of one each."""
    weight, (x, ids, _, chunks) = random_weight(200, 768, 128), routing(2 * pairs, 768)
    several = torch.tensor([k for k in range(8, 0, -1) for _ in range(9 - k)], dtype=torch.int32, device="cuda")
    for expert in range(EXPERTS):
        held = ids == expert
        chunks[held] = expert + 1 if one_k else several[torch.arange(int(held.sum()), device="cuda") % len(several)]
    cut = hopper_experts.cut_for(pairs, 1, one_k, weight)
    by = hopper_experts.sort_pairs(ids, chunks, cut, one_k, weight, weight)
    count = int(by.tiles[0, 1])
    most, order = by.tiles[:count, 4::3].amax(1).sort()
    by.tiles[:count] = by.tiles[:count][order]  # fewest planes first, which the sort would not do
    by.tiles[0, 1] = count
    assert most[0] < most.max()
    one = SimpleNamespace(multi_processor_count=1, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    found = torch.zeros(ids.numel(), 200, dtype=x.dtype, device="cuda")
    hopper_experts.product(x, by, True, weight, None, "", ACTIVE, found)
    expected = multiply(x, ids, chunks, decoded(weight), None)
    rounded = multiply(x, ids, chunks, decoded(weight, torch.bfloat16), None)
    assert error(found.view(expected.shape), expected) < FACTOR * error(rounded, expected)


@pytest.mark.parametrize("tokens", [1, 7, 30, 80, 150, 300, 700])
@pytest.mark.parametrize("one_k", [False, True])
def test_every_cut(tokens, one_k):
    up, down = random_weight(2 * 256, 512, 128), random_weight(512, 256, 128)
    x, ids, gates, chunks = routing(tokens, 512)
    chunks = torch.full_like(chunks, 5) if one_k else chunks
    with paths.forced("prefill"):
        found = OPS.expert_ffn(x, ids, gates, chunks, *opened(up), *opened(down), "silu_mul", 128, one_k)
        again = OPS.expert_ffn(x, ids, gates, chunks, *opened(up), *opened(down), "silu_mul", 128, one_k)
    assert torch.equal(found, again)

    def exact(dtype):
        both = multiply(x, ids, chunks, decoded(up, dtype), None)
        rows = multiply(F.silu(both[..., :256]) * both[..., 256:], ids, chunks, decoded(down, dtype), None)
        return torch.einsum("tah,ta->th", rows.double(), gates.double())

    expected = exact(torch.float64)
    assert error(found, expected) < FACTOR * error(exact(torch.bfloat16).bfloat16(), expected)


@pytest.mark.parametrize(
    ("activation", "dtype", "tokens"),
    [
        ("gelu_tanh_mul", torch.bfloat16, 40), ("swigluoai", torch.float16, 40), ("relu2", torch.bfloat16, 40),
        ("gelu", torch.float16, 500), ("silu_mul", torch.float32, 500),
    ],
)  # fmt: skip
def test_biases_activations_and_row_types(activation, dtype, tokens):
    rows = 2 * 256 if activation in ("gelu_tanh_mul", "swigluoai", "silu_mul") else 256
    up, down = random_weight(rows, 512, 64), random_weight(384, 256, 64)
    up_bias, down_bias = torch.randn(EXPERTS, rows, device="cuda").half(), torch.randn(EXPERTS, 384, device="cuda").half()
    x, ids, gates, chunks = routing(tokens, 512)
    x = x.to(dtype)
    arguments = (ids, gates, chunks, *opened(up, up_bias), *opened(down, down_bias), activation, 64)
    torch.set_float32_matmul_precision("high")  # else fp32 rows are computed without the kernels
    try:
        with paths.forced("prefill"):
            found = OPS.expert_ffn(x, *arguments)
    finally:
        torch.set_float32_matmul_precision("highest")
    cpu = [[t.cpu() for t in a] if isinstance(a, list) else a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = OPS.expert_ffn(x.float().cpu(), *cpu).double().cuda()
    assert error(found, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-3)  # half of their last digit, once per rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", [64, 256])
def test_inputs_with_a_mean_and_an_expert_of_zeros(group, dtype):
    """384 inputs in groups of 64 are no whole stretches of two words for a lane."""
    width = 384 if group == 64 else 512
    weight = random_weight(96, width, group, dtype=dtype)
    for tensor in (*weight.scales, weight.offset):
        tensor[2] = 0
    x, ids, _, chunks = routing(60, width)
    x = x + 1
    with paths.forced("prefill"):
        found = OPS.expert_matmul(x + 1, ids, chunks, *opened(weight), group)
    expected = multiply(x + 1, ids, chunks, decoded(weight), None)
    assert error(found, expected) < FACTOR * error(
        multiply(x + 1, ids, chunks, decoded(weight, torch.bfloat16), None), expected
    )
    assert (found[ids == 2] == 0).all()


def test_a_long_prompt_in_parts(monkeypatch):
    up, down = random_weight(2 * 256, 512, 128), random_weight(512, 256, 128)
    x, ids, gates, chunks = routing(100, 512)
    call = (x, ids, gates, chunks, *opened(up), *opened(down), "silu_mul", 128)
    with paths.forced("prefill"):
        whole = OPS.expert_ffn(*call)
        monkeypatch.setattr(hopper_experts, "PAIRS_AT_ONCE", 120)
        torch.testing.assert_close(OPS.expert_ffn(*call), whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max()))  # bf16


@pytest.mark.parametrize("tokens", [7, 300])
def test_kernels_that_begin_early_change_nothing(monkeypatch, tokens):
    """Of a few layers in a row, each of which has the rows of the one before, by launches that go ahead of the device."""
    layers = [(random_weight(2 * 256, 512, 128), random_weight(512, 256, 128)) for _ in range(4)]
    x, ids, gates, chunks = routing(tokens, 512)

    def passed(rows):
        for up, down in 5 * layers:
            rows = F.normalize(OPS.expert_ffn(rows, ids, gates, chunks, *opened(up), *opened(down), "silu_mul", 128)) + x
        return rows

    with paths.forced("prefill"):
        early = [passed(x) for _ in range(5)]
        for module in (hopper_experts, triton_experts):
            monkeypatch.setattr(module, "early", lambda device: {"PDL": False})
        late = passed(x)
    assert late.isfinite().all() and all(torch.equal(found, late) for found in early)


def test_rows_of_their_own_and_strides():
    weight = random_weight(130, 256, 128)
    _, ids, _, chunks = routing(50, 256)
    x = torch.randn(50, 2 * ACTIVE, 256, device="cuda").bfloat16()[:, ::2]
    with paths.forced("prefill"):
        found = OPS.expert_matmul(x, ids, chunks.t().contiguous().t(), *opened(weight), 128)
    expected = multiply(x, ids, chunks, decoded(weight), None)
    assert error(found, expected) < 4e-3  # bf16 output


def test_it_is_this_kernel_that_runs(monkeypatch):
    """The tests of this file would pass through other kernels too."""
    weight, calls = random_weight(64, 256, 128), []
    monkeypatch.setattr(hopper_experts, "product", lambda *a, **k: calls.append(a))
    x, ids, _, chunks = routing(20, 256)
    with paths.forced("prefill"):
        OPS.expert_matmul(x, ids, chunks, *opened(weight), 128)
    assert len(calls) == 1
