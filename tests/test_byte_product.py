"""Weights of tied scales by the bit-serial kernels on the CPU, against fp64: few pairs and many, planes, groups, widths."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels.reference import is_gated

from .in_fp64 import error
from .marks import some_slow

ERROR = 1e-4  # of the norm: inputs of both products have 16 bits, of the largest of their group


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests run before."""
    torch.manual_seed(0)


@pytest.fixture(params=[0, 32], ids=["many", "few"])
def ffn(request, bits_on_cpu, monkeypatch):
    """The expert block by the kernels for many pairs, however few there are, or by those for few."""
    monkeypatch.setattr(bits_on_cpu, "FEW", request.param)
    return bits_on_cpu.ffn


@pytest.fixture
def block(random_encoded):
    """Function that makes both weights and biases of a layer, and its activation."""

    def make(experts=3, hidden=128, inner=128, activation="silu_mul", bias=True, planes=8, group=32):
        rows = inner * (2 if is_gated(activation) else 1)
        up = random_encoded(experts, rows, hidden, group, planes, tied=True)
        down = random_encoded(experts, 64, inner, group, planes, tied=True, seed=1)
        biases = [torch.randn(experts, width) if bias else None for width in (rows, 64)]
        return up, biases[0], down, biases[1], activation

    return make


@pytest.mark.parametrize("held", some_slow([2, 8], [2]))
def test_planes_in_shared_memory_and_as_they_stand(ffn, bits_on_cpu, block, monkeypatch, held):
    """Slots from 0 to 8 planes, up to four in one call; one is padding, and one token has nothing else."""
    monkeypatch.setattr(bits_on_cpu, "planes_held", lambda *given: held)
    layer, x = block(activation="relu"), torch.randn(2, 128)
    ids = torch.tensor([[0, 1, 2], [2, 3, -1]])
    gates, chunks = torch.rand(2, 3), torch.tensor([[4, 0, 8], [5, 2, 7]], dtype=torch.int32)
    gates[1, 1:] = float("nan")
    for own in (chunks, chunks.clamp(max=3)):
        assert error(ffn(x, ids, gates, own, *layer), x, ids, gates.nan_to_num(0), own, layer) < ERROR
    chunks[1, 0] = 0
    assert not ffn(x[1:2], ids[1:2], gates[1:2], chunks[1:2], *layer).any()


@pytest.mark.parametrize("group, width", some_slow([(64, 128), (-1, 128), (128, 256)], [(64, 128)]))
def test_groups_of_more_inputs(ffn, block, group, width):
    layer, x = block(group=group, hidden=width, inner=width), torch.randn(2, width)
    ids, gates = torch.tensor([[0, 2], [1, 2]]), torch.rand(2, 2)
    chunks = torch.tensor([[7, 2], [4, 3]], dtype=torch.int32)
    assert error(ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


@pytest.mark.parametrize("planes, held", [(2, 8), (4, 5), (5, 8)])
def test_weights_of_fewer_planes(ffn, bits_on_cpu, block, monkeypatch, planes, held):
    """With room in shared memory for numbers, or for no more than the planes."""
    monkeypatch.setattr(bits_on_cpu, "planes_held", lambda *given: held)
    layer, x, ids = block(planes=planes, activation="gelu"), torch.randn(1, 128), torch.tensor([[2, 0]])
    gates, chunks = torch.rand(1, 2), torch.tensor([[planes, 2]], dtype=torch.int64)
    assert error(ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


WIDTHS = [(384, 128, 2), (2176, 128, 1), (128, 384, 2)]


@pytest.mark.parametrize("hidden, inner, active", some_slow(WIDTHS, WIDTHS[:2]))
def test_widths_that_are_no_whole_pieces(ffn, block, random_pairs, hidden, inner, active):
    """Odd numbers of groups of 128, and more pieces than warps."""
    layer = block(hidden=hidden, inner=inner, activation="silu", bias=False)
    (ids, gates, _), chunks = random_pairs(1, active, 3), torch.tensor([[5, 2, 8][:active]], dtype=torch.int32)
    x = torch.randn(1, hidden)
    assert error(ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


def test_nearly_constant_groups(ffn, block):
    """Code 0 is scale 0, with any offset; every offset step, and inputs that all add up."""
    layer, x = block(activation="relu"), torch.rand(1, 128) + 1
    for weight in (layer[0], layer[2]):
        weight.scales[0].view(-1)[::3] = 0
        weight.offset.view(-1).copy_(torch.arange(weight.offset.numel()) % 256 - 128)
    ids, gates, chunks = torch.tensor([[1, 0]]), torch.rand(1, 2), torch.tensor([[8, 3]], dtype=torch.int32)
    assert error(ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


def test_a_number_that_is_none_stays_in_its_token(ffn, block):
    layer, x, ids = block(activation="silu"), torch.randn(2, 128), torch.tensor([[2], [1]])
    gates, chunks = torch.rand(2, 1), torch.full((2, 1), 3, dtype=torch.int32)
    x[1, 50] = float("nan")
    found = ffn(x, ids, gates, chunks, *layer)
    assert found[1].isnan().all() and error(found[:1], x[:1], ids[:1], gates[:1], chunks[:1], layer) < ERROR


@pytest.mark.parametrize("held", some_slow([8, 3], [8]))
def test_pairs_of_an_expert_that_read_more_or_fewer_planes(bits_on_cpu, block, monkeypatch, held):
    """What one pair reads beyond another does not reach it."""
    monkeypatch.setattr(bits_on_cpu, "FEW", 0)
    monkeypatch.setattr(bits_on_cpu, "planes_held", lambda *given: held)
    layer, x, ids = block(experts=2, activation="relu"), torch.randn(6, 128), torch.tensor([[0], [0], [1], [0], [1], [0]])
    gates, chunks = torch.rand(6, 1), torch.tensor([[1], [8], [3], [0], [2], [5]], dtype=torch.int32)
    found = bits_on_cpu.ffn(x, ids, gates, chunks, *layer)
    assert not found[3].any()
    for t in (0, 1, 2, 4, 5):
        own = slice(t, t + 1)
        assert error(found[own], x[own], ids[own], gates[own], chunks[own], layer) < ERROR


def test_a_token_alone_and_among_others(ffn, block):
    """The same bits, whoever shares its experts."""
    layer, x = block(experts=2, activation="relu", planes=5), torch.randn(2, 128)
    ids, gates = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2)
    chunks = torch.tensor([[2, 5], [4, 3]], dtype=torch.int32)
    whole = ffn(x, ids, gates, chunks, *layer)
    for t in range(2):
        some = slice(t, t + 1)
        assert torch.equal(ffn(x[some], ids[some], gates[some], chunks[some], *layer), whole[some])
