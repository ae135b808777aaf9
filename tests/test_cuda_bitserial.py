"""The bit-serial kernels on a card that has them, against float64: shapes, routings, sources of k, graphs (run with -m gpu)."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import allocation, bitserial_experts, layout, ops, paths, reference, triton_experts
from dpamoe.kernels.bitserial_decode import up_kernel
from dpamoe.kernels.layout import EncodedWeight

DEVICE = torch.device("cuda", 0)
HERE = torch.cuda.is_available() and paths.has_bits(DEVICE)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no CUDA device that multiplies single bits")]

early = pytest.mark.skipif(
    not (HERE and paths.early(DEVICE)["PDL"]), reason="no kernel begins before the end of the one before"
)

OPS = torch.ops.dpamoe
GROUP = 128
ERROR = 2e-3  # Frobenius norm, before output rounding, as of decode
ROUNDED = {torch.float32: ERROR, torch.bfloat16: 4e-3, torch.float16: ERROR}  # plus half of the last digit of the output


@dataclass(frozen=True)
class Layer:
    """Both weights of random planes and scales, and biases in fp16 or none."""

    up: EncodedWeight
    up_bias: torch.Tensor | None
    down: EncodedWeight
    down_bias: torch.Tensor | None
    active: int
    activation: str

    @property
    def experts(self):
        return self.up.offset.shape[0]

    def call(self):
        """Arguments of the ops, from the planes on."""
        both = ((self.up, self.up_bias), (self.down, self.down_bias))
        parts = [part for w, bias in both for part in (w.planes, w.scales, w.offset, w.unit, bias)]
        return [*parts, self.activation, self.up.group_size]


def random_weight(experts, rows, inputs, planes=8, tied=0):
    """Scales of their own in groups of 128, or one for all planes in groups of `tied`."""
    signs = [torch.randint(0, 256, (experts, rows, inputs // 8), dtype=torch.uint8, device=DEVICE) for _ in range(planes)]
    if tied:
        shape = (experts, rows, inputs // tied)
        code = torch.randint(200, 256, shape, dtype=torch.uint8, device=DEVICE)
        code[:, ::7] = 0
        offset = torch.randint(-128, 128, shape, dtype=torch.int8, device=DEVICE)
        return EncodedWeight(signs, [code], offset, (torch.rand(experts, device=DEVICE) + 0.5) * inputs**-0.5, inputs, tied)
    shape = (experts, rows, inputs // GROUP)
    scales = [((torch.rand(shape, device=DEVICE) + 1.5) * 0.4 * inputs**-0.5 * 0.5**c).half() for c in range(planes)]
    offset = (torch.randn(shape, device=DEVICE) * 0.1 * inputs**-0.5).half()
    return EncodedWeight(signs, scales, offset, None, inputs, GROUP)


def random_layer(experts, active, hidden, inner, activation="silu_mul", bias=False, tied=0):
    rows = inner * (2 if reference.is_gated(activation) else 1)
    biases = [torch.randn(experts, width, device=DEVICE).half() if bias else None for width in (rows, hidden)]
    up, down = (random_weight(experts, *sizes, tied=tied) for sizes in ((rows, hidden), (hidden, inner)))
    return Layer(up, biases[0], down, biases[1], active, activation)


def routing(layer, tokens, dtype=torch.bfloat16):
    """Rows, ids of which a few are padding, gates, and k from 0 to 8."""
    ids = torch.rand(tokens, max(layer.experts, layer.active), device=DEVICE).argsort(1)[:, : layer.active] % layer.experts
    if tokens > 1:
        ids[0, 0], ids[-1, -1] = layer.experts, -1
    gates = torch.rand(tokens, layer.active, device=DEVICE)
    chunks = torch.randint(0, 9, (tokens, layer.active), dtype=torch.int32, device=DEVICE)
    return torch.randn(tokens, layer.up.in_features, device=DEVICE).to(dtype), ids, gates, chunks


def multiply(weight, bias, rows, experts, k):
    """Rows [P, I] times the first k planes of their experts, fp64 [P, O]."""
    out = torch.zeros(rows.shape[0], weight.offset.shape[1], dtype=torch.float64, device=rows.device)
    offset = layout.offset_value(weight.scales, weight.offset, weight.unit)
    for expert in experts.unique().tolist():
        own = (experts == expert).nonzero().flatten()
        total = F.linear(rows[own], offset[expert].double().repeat_interleave(weight.group_size, -1))
        for c in range(int(k[own].max())):
            signs = layout.unpack_signs(weight.planes[c][expert], weight.in_features).double()
            scale = layout.plane_scale(weight.scales, weight.unit, c)[expert].double()
            part = F.linear(rows[own], signs * scale.repeat_interleave(weight.group_size, -1))
            total += torch.where((k[own] > c)[:, None], part, 0)
        out[own] = total if bias is None else total + bias[expert].double()
    return out


def exact(layer, x, ids, gates, chunks):
    """The expert block in fp64."""
    token, slot = ((ids >= 0) & (ids < layer.experts) & (chunks > 0)).nonzero(as_tuple=True)
    experts, k = ids[token, slot], chunks[token, slot]
    hidden = multiply(layer.up, layer.up_bias, x[token].double(), experts, k)
    rows = multiply(layer.down, layer.down_bias, reference.ACTIVATIONS[layer.activation](hidden), experts, k)
    out = torch.zeros(x.shape[0], rows.shape[1], dtype=torch.float64, device=x.device)
    return out.index_add_(0, token, rows * gates[token, slot].double()[:, None])


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers each time, fp32 rows by the fast kernels, whose output then is not rounded, and no fallback."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")

    def refuse(*given):
        raise AssertionError("other kernels than those of the 1-bit products run")

    with paths.forced("bits"), pytest.MonkeyPatch.context() as patch:
        for other in ("decode_ffn", "prefill_ffn"):
            patch.setattr(triton_experts, other, refuse)
        yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module", params=[0, 32], ids=["free", "tied"])
def qwen(request):
    """A layer of Qwen3-30B-A3B, which most tests share, so that its kernels are compiled once."""
    torch.manual_seed(1)
    return random_layer(128, 8, 2048, 768, tied=request.param)


def poison(layer, tokens):
    """Leave numbers that are none in the memory that the next call gets."""
    sizes = (tokens * layer.active * layer.down.in_features, tokens * layer.up.in_features, tokens * layer.active)
    for size in sizes:
        kept = [torch.full((size,), float("nan"), device=DEVICE) for _ in range(4)]
        del kept


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 8, 16, 33, 64])
def test_batches_against_float64(qwen, tokens):
    """1 and 2 by pairs, 5 and 8 by experts that are named one by one, others by all experts; rows cut first for 33, 64."""
    dtype = torch.bfloat16 if tokens in (2, 5) else torch.float32
    x, ids, gates, chunks = routing(qwen, tokens, dtype)
    poison(qwen, tokens)
    found = OPS.expert_ffn(x, ids, gates, chunks, *qwen.call())
    assert found.shape == x.shape and found.dtype == dtype
    if tokens:
        assert error(found, exact(qwen, x, ids, gates, chunks)) < ROUNDED[dtype]


@pytest.mark.parametrize("tokens, every", [(2, 1), (16, 4)])
def test_every_number_of_planes(qwen, tokens, every):
    """Alone, and each beside each other one, in both orders."""
    x, ids, gates, chunks = routing(qwen, tokens, torch.float32)
    for first in range(0, 9, every):
        same = torch.full_like(chunks, first)
        found = OPS.expert_ffn(x, ids, gates, same, *qwen.call())
        assert not found.any() if first == 0 else error(found, exact(qwen, x, ids, gates, same)) < ERROR
        mixed = (torch.arange(qwen.active, device=DEVICE) + first).remainder(9).int().expand_as(chunks)
        found = OPS.expert_ffn(x, ids, gates, mixed, *qwen.call())
        assert error(found, exact(qwen, x, ids, gates, mixed)) < ERROR


def test_pairs_that_cost_nothing(qwen):
    """Padding by any id outside, alone or beside others; a token of nothing else gets zeros."""
    for tokens in (2, 16):
        x, ids, gates, chunks = routing(qwen, tokens, torch.float32)
        chunks, ids[1] = chunks.clamp(min=2), qwen.experts
        gates[1] = float("nan")
        for outside in (qwen.experts, -1, 2**40, -(2**33)):
            ids[0, :5] = outside
            found = OPS.expert_ffn(x, ids, gates, chunks, *qwen.call())
            assert not found[1].any() and error(found, exact(qwen, x, ids, gates, chunks)) < ERROR
        assert not OPS.expert_ffn(x, torch.full_like(ids, -1), gates, chunks, *qwen.call()).any()


def test_all_tokens_choose_the_same_experts(qwen):
    x, ids, gates, chunks = routing(qwen, 64, torch.float32)
    ids = ids[5:6].expand_as(ids).contiguous()
    assert error(OPS.expert_ffn(x, ids, gates, chunks, *qwen.call()), exact(qwen, x, ids, gates, chunks)) < ERROR
    ids = torch.full_like(ids, 127)  # one expert in all slots
    assert error(OPS.expert_ffn(x, ids, gates, chunks, *qwen.call()), exact(qwen, x, ids, gates, chunks)) < ERROR


@pytest.mark.parametrize("tokens", [2, 16])
def test_strides_and_types_of_numbers(qwen, tokens):
    """Rows, ids, gates and chunks as parts of larger tensors, or transposed; int32 ids and int64 chunks."""
    x, ids, gates, chunks = routing(qwen, tokens)
    expected = OPS.expert_ffn(x, ids, gates, chunks, *qwen.call())
    wide = torch.full((tokens, 2 * x.shape[1] + 16), float("nan"), device=DEVICE, dtype=x.dtype)
    wide[:, 16 : 16 + x.shape[1]] = x
    index, weights = (torch.stack([part, torch.full_like(part, 3)], -1)[..., 0] for part in (ids.int(), gates))
    planes = chunks.long().t().contiguous().t()
    assert torch.equal(OPS.expert_ffn(wide[:, 16 : 16 + x.shape[1]], index, weights, planes, *qwen.call()), expected)


# experts, active, hidden, inner, activation, bias, rule, tokens: each compiles kernels of its own
SHAPES = [
    (9, 3, 1024, 1408, "gelu_mul", True, "threshold", 2),
    (60, 6, 2048, 1408, "gelu_tanh_mul", False, "rank", 8),
    (512, 10, 2048, 512, "relu_mul", True, "threshold", 33),
    (9, 1, 4096, 1024, "relu2", True, "given", 64),
    (9, 8, 512, 640, "swigluoai", True, "rank", 9),
    (60, 2, 1024, 2048, "swigluoai", True, "threshold", 16),
    (9, 16, 256, 128, "sigmoid_mul", False, "rank", 2),
    (9, 3, 256, 128, "silu", True, "given", 5),
    (9, 3, 256, 128, "gelu", True, "given", 5),
    (9, 3, 256, 128, "gelu_tanh", True, "given", 5),
    (9, 3, 256, 128, "relu", True, "given", 5),
]
TIED = [(*SHAPES[0], 32), (*SHAPES[1], 64), (*SHAPES[2], 32), (*SHAPES[3], 128), (*SHAPES[4], 32)]  # inputs of a tied scale


@pytest.mark.parametrize("case", [*((*shape, 0) for shape in SHAPES), *TIED], ids=lambda case: "-".join(map(str, case)))
def test_shapes_activations_and_sources(case, convex_table):
    *sizes, rule, tokens, tied = case
    layer = random_layer(*sizes, tied=tied)
    x, ids, gates, chunks = routing(layer, tokens, torch.float32)
    assert bitserial_experts.usable(ids.numel(), layer.active, layer.up, layer.down)
    k_max = torch.tensor(7, dtype=torch.int32, device=DEVICE)
    if rule == "given":
        found, expected_k = OPS.expert_ffn(x, ids, gates, chunks, *layer.call()), chunks
    elif rule == "threshold":
        table, k_min = thresholds(layer.experts), tokens % 3
        table[:, :k_min] = -1
        found, chunks = OPS.threshold_ffn(x, ids, gates, table, k_max, *layer.call(), k_min)
        expected_k = reference.allocate_threshold(gates, ids, table, k_max)
    else:
        table, budget = convex_table(layer.experts).to(DEVICE), torch.tensor(3.3, device=DEVICE)
        found, chunks = OPS.routed_ffn(x, ids, gates, table, budget, k_max, *layer.call(), 2, True)
        expected_k = allocation.allocate(*(t.cpu() for t in (gates, ids, table, budget, k_max)), 2, True).to(DEVICE)
    assert torch.equal(chunks, expected_k)
    assert error(found, exact(layer, x, ids, gates, chunks)) < ERROR


def thresholds(experts, columns=8):
    """Of squared gates below 1, rising; some planes for all, some for none."""
    table = torch.rand(experts, columns, device=DEVICE).sort(1).values
    table[::3, 0], table[::4, :2], table[1::5, -2:] = -1, -1, float("inf")
    return table


@pytest.mark.parametrize("tokens", [3, 16])
def test_thresholds_of_routers_numbers(qwen, tokens):
    """Gates that are a threshold's root, or no number; -1 and inf among thresholds; what is read is what was decided."""
    x, ids, gates, _ = routing(qwen, tokens, torch.float32)
    table, k_max = thresholds(qwen.experts), torch.tensor(6, dtype=torch.int32, device=DEVICE)
    ids[1] = torch.arange(8, device=DEVICE)
    gates = gates.bfloat16()
    table[ids[1], 4] = gates[1].float().square()  # equal: not above
    table = table.sort(1).values
    gates[2, 1] = float("nan")
    ids[2, 1] = 5
    found, planes = OPS.threshold_ffn(x, ids, gates, table, k_max, *qwen.call(), 2)  # not so of all: it changes no result
    assert torch.equal(planes, reference.allocate_threshold(gates, ids, table, k_max)) and planes[2, 1] == 6
    assert found.isnan().any(1).nonzero().flatten().tolist() == [2]
    whole = torch.arange(tokens, device=DEVICE) != 2
    assert error(found[whole], exact(qwen, x[whole], ids[whole], gates[whole], planes[whole])) < ERROR


def test_a_number_that_is_none_reaches_the_outputs_of_its_row_alone(qwen):
    for tokens in (2, 16):
        x, ids, gates, chunks = routing(qwen, tokens)
        ids, chunks = ids.remainder(qwen.experts), chunks.clamp(min=1)
        for value in (float("nan"), float("inf")):
            broken = x.clone()
            broken[1, 1000] = value
            found = OPS.expert_ffn(broken, ids, gates, chunks, *qwen.call())
            assert not found[1].isfinite().any()
            rest = torch.arange(tokens, device=DEVICE) != 1
            assert torch.equal(found[rest], OPS.expert_ffn(x, ids, gates, chunks, *qwen.call())[rest])


@pytest.mark.parametrize("tokens", [2, 16])
def test_gates_that_the_allocator_alone_sees(qwen, convex_table, tokens):
    """The same for all experts, and others: both products read the planes that they say."""
    table, budget = convex_table(qwen.experts).to(DEVICE), torch.tensor(3.3, device=DEVICE)
    k_max = torch.tensor(8, dtype=torch.int32, device=DEVICE)
    x, ids, gates, _ = routing(qwen, tokens, torch.float32)
    for seen in (torch.tensor(0.5, device=DEVICE).expand_as(gates), 0.01 / gates):
        found, planes = OPS.routed_ffn(x, ids, gates, table, budget, k_max, *qwen.call(), 2, True, False, seen)
        assert torch.equal(planes.cpu(), allocation.allocate(*(t.cpu() for t in (seen, ids, table, budget, k_max)), 2, True))
        assert error(found, exact(qwen, x, ids, gates, planes)) < ERROR


def test_a_row_alone_and_in_a_batch(qwen, convex_table):
    """The same k always; the same bits within the kernels for few pairs, and within those for many."""
    k_max, budget = torch.tensor(8, dtype=torch.int32, device=DEVICE), torch.tensor(3.3, device=DEVICE)
    table = convex_table(qwen.experts).to(DEVICE)
    x, ids, gates, _ = routing(qwen, 33)

    def call(part):
        return OPS.routed_ffn(x[part], ids[part], gates[part], table, budget, k_max, *qwen.call(), 2, True)

    many, planes = call(slice(None))
    for first in (0, 16):
        some, own = call(slice(first, first + 16))
        assert torch.equal(own, planes[first : first + 16]) and torch.equal(some, many[first : first + 16])
        few, own = call(slice(first, first + 2))
        assert torch.equal(own, planes[first : first + 2])
        torch.testing.assert_close(few, many[first : first + 2], rtol=2e-2, atol=2e-2 * float(many.abs().max()))  # bf16
        for row in range(first, first + 2):
            alone, own = call(slice(row, row + 1))
            assert torch.equal(own[0], planes[row]) and torch.equal(alone[0], few[row - first])


def is_early(layer, tokens):
    """Whether the second product reads planes before it waits for the first, of which all programs run at once."""
    programs = layer.down.in_features // 16 * tokens * layer.active
    return bitserial_experts.at_once(programs, bitserial_experts.UP_PROGRAMS, DEVICE)


class Late:
    """The first product, after which another kernel lets the second begin, and then writes anew what was written."""

    def __init__(self, write):
        self.write, self.launched = write, []

    def __getitem__(self, grid):
        return lambda *given, **options: self.launch(grid, given, options)

    def launch(self, grid, given, options):
        up_kernel[grid](*given, **options)
        self.launched.append(options["AHEAD"])
        self.write(*(given[up_kernel.arg_names.index(name)] for name in ("hidden", "chunks")))


@triton.jit
def _write_late(hidden, rows, chunks, planes, one, ROWS: tl.constexpr, PLANES: tl.constexpr, TURNS: tl.constexpr):
    """Let the next kernel begin; much later write what it waits for."""
    gdc_launch_dependents()
    turn = 0
    while turn < TURNS:
        turn += tl.load(one, volatile=True)
    for first in range(0, ROWS, 128):
        at = first + tl.arange(0, 128)
        tl.store(hidden + at, tl.load(rows + at, mask=at < ROWS), mask=at < ROWS)
    slot = tl.arange(0, 16)
    tl.store(chunks + slot, tl.load(planes + slot, mask=slot < PLANES), mask=slot < PLANES)


@early
@pytest.mark.parametrize("tokens", [1, 2])  # of which one is early on an H200
def test_planes_that_are_written_after_the_second_product_began(qwen, convex_table, monkeypatch, tokens):
    """Where the second product reads k of old, it finds out: one token; two, which it waits for."""
    table, budget = convex_table(qwen.experts).to(DEVICE), torch.tensor(3.3, device=DEVICE)
    x, ids, gates, _ = routing(qwen, tokens)
    ids.remainder_(qwen.experts)
    call = (x, ids, gates, table, budget, torch.tensor(8, dtype=torch.int32, device=DEVICE), *qwen.call(), 2, True)
    expected, planes = OPS.routed_ffn(*call)
    one = torch.ones((), dtype=torch.int32, device=DEVICE)

    def write(hidden, chunks):
        rows, written = hidden.clone(), chunks.clone()
        hidden.fill_(float("nan"))
        chunks.copy_(torch.arange(-4, 28, 2, device=DEVICE)[: chunks.numel()].view_as(chunks))
        torch.cuda.synchronize()
        _write_late[(1,)](hidden, rows, chunks, written, one, ROWS=rows.numel(), PLANES=written.numel(), TURNS=20000)

    late = Late(write)
    monkeypatch.setattr(bitserial_experts, "up_kernel", late)
    found, own = OPS.routed_ffn(*call)
    assert torch.equal(own, planes) and torch.equal(found, expected) and late.launched == [is_early(qwen, tokens)]


@triton.jit
def _write_often(chunks, planes, one, PLANES: tl.constexpr, TURNS: tl.constexpr):
    """Let the next kernel begin, and while its warps read planes write others and these again and again."""
    gdc_launch_dependents()
    slot = tl.arange(0, 16)
    mask = slot < PLANES
    own = tl.load(planes + slot, mask=mask)
    turn = 0
    while turn < TURNS:
        turn += tl.load(one, volatile=True)
        tl.store(chunks + slot, own ^ 1 ^ turn % 2, mask=mask)
    tl.store(chunks + slot, own, mask=mask)


@early
def test_planes_that_are_written_while_warps_read_them(qwen, convex_table, monkeypatch):
    """Some warps read them before, others after: all begin anew, or none, a thousand times; on an H200 results differ where
    warps do not agree."""
    table, budget = convex_table(qwen.experts).to(DEVICE), torch.tensor(3.3, device=DEVICE)
    x, ids, gates, _ = routing(qwen, 1)
    call = (x, ids, gates, table, budget, torch.tensor(8, dtype=torch.int32, device=DEVICE), *qwen.call(), 2, True)
    expected, planes = OPS.routed_ffn(*call)
    one = torch.ones((), dtype=torch.int32, device=DEVICE)
    late = Late(lambda hidden, chunks: _write_often[(1,)](chunks, planes, one, PLANES=planes.numel(), TURNS=1000))
    monkeypatch.setattr(bitserial_experts, "up_kernel", late)
    results = [OPS.routed_ffn(*call) for _ in range(1000)]
    assert set(late.launched) == {is_early(qwen, 1)} and all(torch.equal(own, planes) for _, own in results)
    wrong = sum(not torch.equal(found, expected) for found, _ in results)
    assert not wrong, f"{wrong} of {len(results)} results differ"


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_a_captured_graph_follows_routing_and_budget(qwen, convex_table, tokens):
    table = convex_table(qwen.experts).to(DEVICE)
    budget, k_max = torch.tensor(4.0, device=DEVICE), torch.tensor(8, dtype=torch.int32, device=DEVICE)
    x, ids, gates, _ = routing(qwen, tokens)
    call = (x, ids, gates, table, budget, k_max, *qwen.call(), 2, True)
    OPS.routed_ffn(*call)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, planes = OPS.routed_ffn(*call)
    for k in (2.5, 7.0):
        for held, fresh in zip((x, ids, gates), routing(qwen, tokens), strict=False):
            held.copy_(fresh)
        ids.remainder_(qwen.experts)
        budget.fill_(k)
        output.fill_(float("nan"))
        graph.replay()
        expected, own = OPS.routed_ffn(*call)
        assert torch.equal(planes, own) and torch.equal(output, expected)
        assert planes.sum(1).unique().tolist() == [int(qwen.active * k + 0.5)]


@pytest.mark.parametrize("tokens", [2, 16])
def test_without_a_synchronisation(qwen, convex_table, tokens):
    """A budget per token."""
    x, ids, gates, chunks = routing(qwen, tokens)
    table, budget = convex_table(qwen.experts).to(DEVICE), torch.linspace(2, 8, tokens, device=DEVICE)
    k_max = torch.tensor(8, dtype=torch.int32, device=DEVICE)
    given = (x, ids, gates, chunks, *qwen.call())
    routed = (x, ids, gates, table, budget, k_max, *qwen.call(), 2, True)
    expected = OPS.expert_ffn(*given), *OPS.routed_ffn(*routed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = OPS.expert_ffn(*given), *OPS.routed_ffn(*routed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(found[2].cpu(), allocation.allocate(*(t.cpu() for t in (gates, ids, table, budget, k_max)), 2, True))


@pytest.mark.parametrize("tokens, stand_ins", [(2, True), (8, True), (2, False)])
def test_four_planes_that_are_loaded(qwen, tokens, stand_ins):
    """Behind them stand-ins over the memory of the first plane, which nothing reads, or lists of four."""

    def opened(weight):
        planes, scales = (
            held[:4] + [held[0].new_empty(0).set_(held[0]) for _ in range(4 * stand_ins)]
            for held in (weight.planes, weight.scales)
        )
        tied = weight.unit is not None
        return replace(weight, planes=planes, scales=weight.scales if tied else scales)

    layer = Layer(opened(qwen.up), None, opened(qwen.down), None, qwen.active, qwen.activation)
    x, ids, gates, _ = routing(qwen, tokens, torch.float32)
    table, k_max = thresholds(qwen.experts), torch.tensor(4, dtype=torch.int32, device=DEVICE)
    found, planes = OPS.threshold_ffn(x, ids, gates, table, k_max, *layer.call())
    assert planes.max() == 4 and torch.equal(planes, reference.allocate_threshold(gates, ids, table, k_max))
    assert error(found, exact(qwen, x, ids, gates, planes)) < ERROR


def test_calls_that_go_elsewhere(qwen, monkeypatch):
    """More pairs than are put in order are decoded."""
    taken = []
    monkeypatch.setattr(triton_experts, "decode_ffn", lambda x, *rest: taken.append(len(x)) or torch.zeros_like(x))
    for tokens in (128, 129):
        OPS.expert_ffn(*routing(qwen, tokens), *qwen.call())
    assert taken == [129] and not ops._broken
