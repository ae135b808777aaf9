"""Thresholds on the device: planes of every pair as the reference gives them, by the kernel alone and inside decode."""

import math

import pytest
import torch

from dpamoe.kernels import grouped, reference
from dpamoe.kernels.allocation import Thresholds

from .marks import some_slow

te = pytest.importorskip("dpamoe.kernels.triton_experts")
threshold = pytest.importorskip("dpamoe.kernels.triton_threshold")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, ACTIVE, PLANES, WIDTH = 5, 3, 4, 32
ERROR = 4e-3  # of the Frobenius norm: decode multiplies in fp16
# never skipped, and stopping before the last plane; skipped or two planes; all; none; one for very little
ROWS = [[-1, -1, 0.25, math.inf], [0.25, 0.25, 0.5625, 4], [-1] * 4, [math.inf] * 4, [0, 1e-8, 1, 1]]
SPECIAL = [0.5, -0.5, 0.75, 2.0, 0.0, 1e-15, 1.0, 0.50001, float("nan"), float("inf"), 3e-5]


def routing(dtype, index=torch.int64, tokens=37):
    """Ids with padding on both sides, and gates among which are the roots of thresholds, numbers close by and none."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, ACTIVE), generator=random)
    gates = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (tokens, ACTIVE), generator=random)]
    every = torch.cartesian_prod(torch.arange(-1, EXPERTS + 1), torch.arange(len(SPECIAL)))
    every = torch.cat([every, every[: -len(every) % ACTIVE]])
    ids = torch.cat([ids, every[:, 0].view(-1, ACTIVE)])
    return ids.to(index), torch.cat([gates, torch.tensor(SPECIAL)[every[:, 1]].view(-1, ACTIVE)]).to(dtype)


def table():
    return torch.tensor(ROWS, dtype=torch.float32)


def limit(k_max=PLANES):
    return torch.tensor(k_max, dtype=torch.int32)


def allocate(gates, ids, rows, k_max):
    """Planes of the kernel, which are the same whether they are counted or not."""
    given, spent = [t.to(DEVICE) for t in (gates, ids, rows, k_max)], torch.arange(rows.shape[1] + 1, device=DEVICE)
    chunks = threshold.allocate_threshold(*given, spent)
    assert torch.equal(chunks, threshold.allocate_threshold(*given))
    counted = torch.bincount(chunks.flatten(), minlength=spent.numel())
    assert torch.equal(spent, counted + torch.arange(spent.numel(), device=DEVICE))
    return chunks.cpu()


@pytest.fixture
def layer(random_encoded):
    return random_encoded(EXPERTS, 2 * WIDTH, WIDTH, 32, PLANES), None, random_encoded(EXPERTS, WIDTH, WIDTH, 32, PLANES), None


def decode(x, ids, gates, rows, k_max, layer):
    """Output and planes of the decode path, whose planes are nowhere before."""
    chunks, spent = torch.full(ids.shape, -7, dtype=torch.int32, device=DEVICE), torch.arange(PLANES + 1, device=DEVICE)
    x, ids, gates, rows, k_max = (t.to(DEVICE) for t in (x, ids, gates, rows, k_max))
    out = te.decode_ffn(x, ids, gates, chunks, *map(moved, layer), "silu_mul", Thresholds(gates, rows, k_max, spent))
    counted = torch.bincount(chunks.flatten(), minlength=PLANES + 1)
    assert torch.equal(spent, counted + torch.arange(PLANES + 1, device=DEVICE))
    return out.cpu(), chunks.cpu()


def moved(weight):
    """An encoded weight or a bias, on the device under test."""
    if weight is None or isinstance(weight, torch.Tensor):
        return None if weight is None else weight.to(DEVICE)
    parts = [[t.to(DEVICE) for t in part] for part in (weight.planes, weight.scales)]
    return type(weight)(*parts, weight.offset.to(DEVICE), None, weight.in_features, weight.group_size)


def test_by_hand():
    gates, ids = torch.tensor([[0.5, 0.75, 0.5], [0.50001, 0.8, 0.0]]), torch.tensor([[0, 1, 1], [0, 1, 9]])
    assert allocate(gates, ids, table(), limit()).tolist() == [[2, 2, 0], [3, 3, 0]]


@pytest.mark.parametrize("k_max", [2, PLANES])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_planes_equal_the_reference(dtype, index, k_max):
    ids, gates = routing(dtype, index)
    expected = reference.allocate_threshold(gates, ids, table(), limit(k_max))
    assert set(expected.flatten().tolist()) == set(range(k_max + 1))
    found = allocate(gates, ids, table(), limit(k_max))
    assert found.dtype == torch.int32 and torch.equal(found, expected)


def test_more_pairs_than_a_program_takes_and_any_strides(random_pairs):
    ids, gates, _ = random_pairs(1001, ACTIVE, EXPERTS)
    rows = (torch.rand(EXPERTS, 8, generator=torch.Generator().manual_seed(1)) * 0.5).sort(1).values
    expected = reference.allocate_threshold(gates, ids, rows, limit(8))
    assert len(expected.unique()) > 4
    assert torch.equal(allocate(gates, ids, rows, limit(8)), expected)
    wide = [torch.stack([t, t], 2).flatten(1)[:, ::2] for t in (gates, ids)]
    assert not any(t.is_contiguous() for t in wide)
    assert torch.equal(allocate(*wide, rows.T.contiguous().T, limit(8)), expected)
    assert allocate(gates[:0], ids[:0], rows, limit(8)).shape == (0, ACTIVE)


@pytest.mark.parametrize("tokens", [0, 1, 301])
def test_planes_are_counted(random_pairs, tokens):
    _, _, chunks = random_pairs(tokens, ACTIVE, EXPERTS)
    spent = torch.arange(9, device=DEVICE)
    threshold.count(torch.stack([chunks, chunks], 2).flatten(1)[:, ::2].to(DEVICE), spent)
    assert torch.equal(spent.cpu() - torch.arange(9), torch.bincount(chunks.flatten(), minlength=9))


DTYPES = [(0, torch.float32), (1, torch.bfloat16), (2, torch.float16)]


@pytest.mark.parametrize("part, dtype", some_slow(DTYPES, DTYPES[:1]))
def test_decode_finds_the_same_planes(layer, part, dtype):
    ids, gates = (t[part::3] for t in routing(dtype, tokens=0))  # every expert with every gate, in one of the three
    gates = gates.masked_fill(gates.isinf(), 2.0)  # an output of numbers, but for the gates that are none
    x = torch.randn(ids.shape[0], WIDTH, generator=torch.Generator().manual_seed(3))
    expected = reference.allocate_threshold(gates, ids, table(), limit())
    out, chunks = decode(x, ids, gates, table(), limit(), layer)
    assert torch.equal(chunks, expected)
    sound = ~(gates.isnan() & (expected > 0)).any(1)
    assert torch.equal(out.isnan().any(1), ~sound) and 0 < sound.sum() < len(sound)
    gates = gates.nan_to_num()
    right = grouped.expert_ffn(x, ids, gates, expected, *layer, "silu_mul").double()
    assert float((out - right)[sound].norm() / right[sound].norm()) < ERROR


def test_a_row_alone_and_in_any_batch(layer):
    ids, gates = routing(torch.bfloat16, tokens=4)
    x = torch.randn(ids.shape[0], WIDTH, generator=torch.Generator().manual_seed(3))
    whole = allocate(gates, ids, table(), limit())
    for row in (0, 5, len(ids) - 1):
        one = slice(row, row + 1)
        assert torch.equal(allocate(gates[one], ids[one], table(), limit()), whole[one])
        assert torch.equal(decode(x[one], ids[one], gates[one], table(), limit(), layer)[1], whole[one])
    assert torch.equal(allocate(gates.flip(0), ids.flip(0), table(), limit()), whole.flip(0))


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_skipped_experts_are_not_read(random_encoded, path):
    """Scales and offsets of an expert that nobody may read are no numbers, and so is its bias; nothing of them comes out."""

    def poisoned(weight):
        for part in (*weight.scales, weight.offset):
            part[3] = float("nan")
        return weight

    bias = torch.ones(EXPERTS, WIDTH)
    bias[3] = float("nan")
    layer = (
        poisoned(random_encoded(EXPERTS, 2 * WIDTH, WIDTH, 32, PLANES)), torch.cat([bias, bias], 1),
        poisoned(random_encoded(EXPERTS, WIDTH, WIDTH, 32, PLANES, seed=2)), bias,
    )  # fmt: skip
    ids, gates = torch.tensor([[3, 0, 1], [3, 3, EXPERTS], [2, 3, -1]]), torch.tensor([[9.0, 0.7, 0.3]] * 3)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3))
    chunks = reference.allocate_threshold(gates, ids, table(), limit())
    assert chunks.tolist() == [[0, 3, 0], [0, 0, 0], [4, 0, 0]]
    if path == "decode":
        out, found = decode(x, ids, gates, table(), limit(), layer)
        assert torch.equal(found, chunks)
    else:
        out = te.prefill_ffn(*map(moved, (x, ids, gates, chunks, *layer)), "silu_mul").cpu()
    right = grouped.expert_ffn(x, ids, gates, chunks, *layer, "silu_mul")
    assert not right.isnan().any() and not out[1].any()
    assert float((out - right).norm() / right.norm()) < ERROR
