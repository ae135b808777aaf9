"""The Triton expert kernels, decode and prefill, against the torch code: by the interpreter, on a GPU as they are."""

import pytest
import torch

from dpamoe.kernels import grouped, reference

from .marks import some_slow

te = pytest.importorskip("dpamoe.kernels.triton_experts")
triton_sort = pytest.importorskip("dpamoe.kernels.triton_sort")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = {"decode": te.decode_ffn, "prefill": te.prefill_ffn}
ERROR = 4e-3  # of the Frobenius norm: decode adds 8 products in fp16, and so few inputs do not average its rounding out
EXPERTS, ACTIVE, WIDTH, INNER, PLANES = 4, 2, 160, 96, 3  # neither a power of two nor whole units of 128; few planes: speed


def relative(found, expected):
    """Frobenius norm of the difference over that of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def on_device(*values):
    """Tensors and encoded weights on the device under test."""
    moved = []
    for value in values:
        if isinstance(value, torch.Tensor) or value is None:
            moved.append(None if value is None else value.to(DEVICE))
        else:
            parts = [[t.to(DEVICE) for t in part] for part in (value.planes, value.scales)]
            unit = None if value.unit is None else value.unit.to(DEVICE)
            moved.append(type(value)(*parts, value.offset.to(DEVICE), unit, value.in_features, value.group_size))
    return moved


def rows(tokens, *shape, dtype=torch.float32, seed=3):
    return torch.randn(tokens, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def biases(out_features, inner, seed=4):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(EXPERTS, out_features, generator=random), torch.randn(EXPERTS, inner, generator=random)


@pytest.fixture
def layer(random_encoded):
    """Function that makes both encoded weights and biases of one layer, [E, …], and its activation."""

    def make(activation="silu_mul", group=32, tied=False, bias=False, width=WIDTH, inner=INNER, experts=EXPERTS):
        up_rows = inner * (2 if reference.is_gated(activation) else 1)
        groups = (width, inner) if group == -1 else (group, group)
        up = random_encoded(experts, up_rows, width, groups[0], PLANES, tied, seed=1)
        down = random_encoded(experts, width, inner, groups[1], PLANES, tied, seed=2)
        both = biases(up_rows, width) if bias else (None, None)
        return up, both[0], down, both[1], activation

    return make


def routing(random_pairs, tokens, active=ACTIVE, experts=EXPERTS, seed=0):
    ids, gates, chunks = random_pairs(tokens, active, experts, seed)
    return ids, gates, chunks.clamp(max=PLANES)


def run(path, x, ids, gates, chunks, layer):
    """One path on the device under test, back on the CPU."""
    *weights, activation = layer
    return PATHS[path](*on_device(x, ids, gates, chunks, *weights), activation).cpu()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "activation, group, tied, bias",
    [
        ("silu_mul", 32, False, False),
        ("swigluoai", 32, True, True),
        pytest.param("gelu", 96, False, True, marks=pytest.mark.slow),
        pytest.param("relu2", -1, False, False, marks=pytest.mark.slow),
    ],
)
def test_every_mix_of_planes(random_pairs, layer, path, activation, group, tied, bias):
    made = layer(activation, group, tied, bias, width=192 if group == 96 else WIDTH)
    ids, gates, chunks = routing(random_pairs, 3)
    x = rows(3, made[0].in_features)
    ids[0, 0] = EXPERTS  # padding
    assert len(chunks.unique()) > 0
    found = run(path, x, ids, gates, chunks, made)
    assert relative(found, grouped.expert_ffn(x, ids, gates, chunks, *made)) < ERROR


@pytest.mark.parametrize("path", PATHS)
def test_planes_out_of_range_are_brought_into_it(random_pairs, layer, path):
    """A number of planes beyond all must not become another expert's, where pairs are sorted by both."""
    made = layer("silu_mul", 32, False, False)
    ids, gates, chunks = routing(random_pairs, 3)
    ids[:, 0] = EXPERTS - 2
    chunks[:, 0] = torch.tensor([PLANES + 1, 99, -1])
    x = rows(3, made[0].in_features)
    found = run(path, x, ids, gates, chunks, made)
    assert torch.equal(found, run(path, x, ids, gates, chunks.clamp(0, PLANES), made))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["gelu_mul", "gelu_tanh_mul", "relu_mul", "sigmoid_mul", "silu", "gelu_tanh", "relu"])
def test_activations(random_pairs, layer, path, name):
    made = layer(name, width=32, inner=32)
    ids, gates, chunks = routing(random_pairs, 1)
    chunks = chunks.clamp(min=1)
    x = rows(1, 32)
    assert relative(run(path, x, ids, gates, chunks, made), grouped.expert_ffn(x, ids, gates, chunks, *made)) < ERROR


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 1.2e-2), (torch.float16, 4e-3)])  # bf16 is cut, not rounded, there
def test_rows_in_half_precision(random_pairs, layer, path, dtype, error):
    made = layer(width=64, inner=32)
    ids, gates, chunks = routing(random_pairs, 2)
    chunks = chunks.clamp(min=2)
    x = rows(2, 64, dtype=dtype)
    found = run(path, x, ids, gates.to(dtype), chunks, made)
    expected = grouped.expert_ffn(x.float(), ids, gates.to(dtype), chunks, *made)
    assert found.dtype == dtype and relative(found, expected) < error


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_any_magnitude_of_rows(random_pairs, layer, path):
    made = layer(width=64, inner=32, activation="relu_mul")
    ids, gates, chunks = routing(random_pairs, 3)
    chunks = chunks.clamp(min=2)
    x = rows(3, 64) * torch.tensor([1e-12, 1.0, 1e12])[:, None]
    found, expected = (f(x) for f in (
        lambda x: run(path, x, ids, gates, chunks, made), lambda x: grouped.expert_ffn(x, ids, gates, chunks, *made),
    ))  # fmt: skip
    assert all(relative(found[row], expected[row]) < ERROR for row in range(3))
    assert not run(path, torch.zeros(3, 64), ids, gates, chunks, made).any()


@pytest.mark.parametrize("experts, active, tokens", some_slow([(1, 1, 17), (5, 3, 9), (60, 6, 3)], [(1, 1, 17), (5, 3, 9)]))
def test_prefill_sorts_any_routing(random_pairs, layer, experts, active, tokens):
    made = layer(width=32, inner=32, experts=experts)
    ids, gates, chunks = routing(random_pairs, tokens, active, experts)
    x = rows(tokens, 32)
    assert relative(run("prefill", x, ids, gates, chunks, made), grouped.expert_ffn(x, ids, gates, chunks, *made)) < ERROR


@pytest.mark.parametrize("uniform", [True, False])
def test_pairs_are_sorted_into_tiles(random_pairs, random_encoded, uniform):
    ids, _, chunks = random_pairs(130, 3, 7, 5)  # more than one block of pairs
    ids[3] = 2
    ids[4, 0], ids[5, 1] = -1, 7
    chunks = torch.where(chunks > 0, 4, 0).int() if uniform else chunks
    weights = random_encoded(7, 40, 64, 32, 8), random_encoded(7, 64, 32, 32, 8, seed=1)
    by = te.sort_pairs(*on_device(ids, chunks), te.Tile(64, 32, 32, 16, 1), *on_device(*weights))
    order, levels, tiles, peaks = (t.cpu() for t in (by.order, by.levels, by.tiles, by.peaks))
    flat, counts = ids.flatten(), chunks.flatten()
    held = (flat >= 0) & (flat < 7) & (counts > 0)
    number = int(held.sum())
    expected = sorted(torch.nonzero(held).flatten().tolist(), key=lambda p: (int(flat[p]), int(counts[p]), p))
    assert order[:number].tolist() == expected
    assert torch.equal(levels[:number].long(), counts[order[:number].long()].long())
    live = tiles[tiles[:, 0] >= 0].tolist()
    assert [n for _, first, end, _, _ in live for n in range(first, end)] == list(range(number))
    for expert, first, end, most, present in live:
        found = {int(k) for k in levels[first:end]}
        assert {int(flat[p]) for p in order[first:end]} == {expert}
        assert most == max(found) and present == sum(1 << k for k in found)
        assert end - first <= (32 if uniform else 16)
    for weight, peak in zip(weights, peaks, strict=True):
        largest = torch.stack([t.float().abs().flatten(1).amax(1) for t in (weight.scales[0], weight.offset)]).amax(0)
        assert ((largest * peak < 1) & (largest * peak >= 0.5)).all()  # every expert is asked for


@pytest.mark.parametrize("blocks, keys", [(1, 8), (32, 128), (75, 128), (300, 64)])
def test_numbers_before_each_block_of_pairs(blocks, keys):
    """One program and several; last: more blocks than are taken at once, and no multiple of those."""
    counts = torch.randint(0, 9, (blocks, keys), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    scanned = on_device(torch.cat([counts, torch.full((1, keys), -1, dtype=torch.int32)]))[0]
    cut = te.scan_cut(blocks, keys)
    triton_sort.scan_kernel[(keys // cut["SOME"],)](scanned, blocks, **cut, PDL=False)
    expected = torch.cat([torch.zeros(1, keys, dtype=torch.int64), counts.cumsum(0)])
    assert torch.equal(scanned.cpu().long(), expected)


def test_prefill_and_decode_matmul(random_pairs, random_encoded):
    weight = random_encoded(EXPERTS, 40, 64, 32, PLANES)
    ids, _, chunks = routing(random_pairs, 4)
    bias, x = torch.ones(EXPERTS, 40), rows(4, 64)
    per_slot = rows(4, ACTIVE, 64)
    for values in (x, per_slot):
        expected = grouped.expert_matmul(values, ids, chunks, weight, bias)
        for op in (te.decode_matmul, te.prefill_matmul):
            found = op(*on_device(values, ids, chunks, weight, bias)).cpu()
            assert relative(found, expected) < ERROR
            assert not found[(chunks == 0)].any()


def test_allocation_inside_decode(random_pairs, convex_table, layer):
    made = layer(width=32, inner=32)
    ids, gates, _ = random_pairs(3, ACTIVE, EXPERTS)
    ids[1, 1] = EXPERTS
    table, x = convex_table(EXPERTS, PLANES), rows(3, 32)
    budget, k_max = torch.tensor(2.5), torch.tensor(PLANES, dtype=torch.int32)
    expected = reference.allocate(gates, ids, table, budget, k_max, 2)
    chunks = torch.full((3, ACTIVE), -7, dtype=torch.int32, device=DEVICE)
    *weights, activation = made
    spent = torch.zeros(PLANES + 1, dtype=torch.int64, device=DEVICE)
    source = te.Allocation(*on_device(gates, table, budget, k_max), 2, spent)
    moved = on_device(x, ids, gates)
    found = te.decode_ffn(*moved, chunks, *on_device(*weights), activation, source)
    assert torch.equal(chunks.cpu(), expected)
    assert torch.equal(spent.cpu(), torch.bincount(expected.flatten(), minlength=PLANES + 1))
    assert relative(found.cpu(), grouped.expert_ffn(x, ids, gates, expected, *made)) < ERROR


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_read_beyond_a_weight(random_pairs, layer, path):
    up, _, down, _, activation = layer()  # 5 and 3 groups a row, which no power of two divides
    ids, gates, chunks = routing(random_pairs, 2)
    ids[:], chunks[:] = EXPERTS - 1, PLANES  # the last expert, whose last row ends the tensors

    def guarded(weight):
        """The same weight, with NaN behind its scales and offset."""

        def before_nan(t):
            return torch.cat([t.flatten(), torch.full((64,), float("nan")).to(t.dtype)])[: t.numel()].view(t.shape)

        return type(weight)(weight.planes, [before_nan(t) for t in weight.scales], before_nan(weight.offset), None,
                            weight.in_features, weight.group_size)  # fmt: skip

    made = guarded(up), None, guarded(down), None, activation
    x = rows(2, WIDTH)
    assert relative(run(path, x, ids, gates, chunks, made), grouped.expert_ffn(x, ids, gates, chunks, *made)) < ERROR


@pytest.mark.slow
def test_rows_need_not_be_contiguous(random_pairs, layer):
    made = layer(width=32, inner=32)
    ids, gates, chunks = routing(random_pairs, 3)
    wide = [torch.stack([t, t], 2).flatten(1)[:, ::2] for t in (ids, gates, chunks)]
    assert not any(t.is_contiguous() for t in wide)
    x = rows(6, 32)[::2]
    for path in PATHS:
        assert torch.equal(run(path, x, *wide, made), run(path, x.contiguous(), ids, gates, chunks, made))


def test_what_is_supported(random_encoded):
    assert te.supported(random_encoded(2, 8, 96, 32)) and te.supported(random_encoded(2, 8, 96, 96))
    assert not te.supported(random_encoded(2, 8, 40, 8)) and not te.supported(random_encoded(2, 8, 96, 48))
