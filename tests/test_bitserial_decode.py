"""The kernels for few pairs on the CPU against fp64: planes, slots, widths, activations, shared memory."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import allocation
from dpamoe.kernels.reference import ACTIVATIONS, is_gated

from .in_fp64 import error
from .marks import some_slow

ERROR = 1e-4  # of the norm: inputs of both products have 16 bits, of the largest of their group


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests run before."""
    torch.manual_seed(0)


@pytest.fixture
def block(random_encoded):
    """Function that makes both weights and biases of a layer, and its activation."""

    def make(experts=3, hidden=256, inner=128, activation="silu_mul", bias=True, planes=8):
        rows = inner * (2 if is_gated(activation) else 1)
        weights = random_encoded(experts, rows, hidden, 128, planes), random_encoded(experts, 64, inner, 128, planes, seed=1)
        biases = [torch.randn(experts, width) if bias else None for width in (rows, 64)]
        return weights[0], biases[0], weights[1], biases[1], activation

    return make


def rows(tokens, width):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("held", some_slow((1, 3, 8), (1,)))
def test_planes_in_shared_memory_and_as_they_stand(bits_on_cpu, block, monkeypatch, held):
    """Slots from 0 to 8 planes; one is padding, and one token has nothing else."""
    monkeypatch.setattr(bits_on_cpu, "planes_held", lambda *given: held)
    layer, x = block(hidden=128, activation="relu"), rows(3, 128)
    ids = torch.tensor([[0, 1, 2], [2, 3, -1], [1, 1, 0]])
    gates, chunks = torch.rand(3, 3), torch.tensor([[held, 0, 8], [3, 5, 7], [1, 2, 6]], dtype=torch.int32)
    gates[1, 1:] = float("nan")
    found = bits_on_cpu.ffn(x, ids, gates, chunks, *layer)
    assert error(found, x, ids, gates.nan_to_num(0), chunks, layer) < ERROR
    chunks[1, 0] = 0
    assert not bits_on_cpu.ffn(x[1:2], ids[1:2], gates[1:2], chunks[1:2], *layer).any()


@pytest.mark.parametrize("k", some_slow(range(1, 9), (1, 3, 8)))
def test_every_number_of_planes(bits_on_cpu, block, k):
    layer, x, ids = block(hidden=128, activation="silu"), rows(1, 128), torch.tensor([[2]])
    gates, chunks = torch.rand(1, 1), torch.full((1, 1), k, dtype=torch.int32)
    assert error(bits_on_cpu.ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


@pytest.mark.parametrize("activation", some_slow(ACTIVATIONS, ("silu_mul", "swigluoai", "gelu", "relu2")))
def test_activations(bits_on_cpu, block, activation):
    layer, x, ids = block(hidden=128, activation=activation), rows(1, 128), torch.tensor([[2, 0]])
    gates, chunks = torch.rand(1, 2), torch.tensor([[3, 6]], dtype=torch.int32)
    assert error(bits_on_cpu.ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


WIDTHS = [(384, 128, 2), (2176, 128, 1), (128, 384, 3)]


@pytest.mark.parametrize("hidden, inner, active", some_slow(WIDTHS, WIDTHS[:2]))
def test_widths_that_are_no_whole_pieces(bits_on_cpu, block, random_pairs, hidden, inner, active):
    """Odd numbers of groups, and more pieces than warps."""
    layer = block(hidden=hidden, inner=inner, activation="silu", bias=False)
    (ids, gates, _), chunks = random_pairs(1, active, 3), torch.tensor([[5, 2, 8][:active]], dtype=torch.int32)
    found = bits_on_cpu.ffn(rows(1, hidden), ids, gates, chunks, *layer)
    assert error(found, rows(1, hidden), ids, gates, chunks, layer) < ERROR


def test_weights_of_fewer_planes(bits_on_cpu, block):
    layer, x, ids = block(hidden=128, planes=3), rows(1, 128), torch.tensor([[2, 0]])
    gates, chunks = torch.rand(1, 2), torch.tensor([[3, 2]], dtype=torch.int64)
    assert error(bits_on_cpu.ffn(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


@pytest.mark.parametrize("tokens", [1, 8])
def test_planes_out_of_range_are_brought_into_it(bits_on_cpu, block, tokens):
    """Also where the planes of all slots stand in one number, a few bits each; 8 tokens: where pairs are put in order."""
    layer, x, ids = block(hidden=128), rows(tokens, 128), torch.tensor([[2, 0, 1]]).repeat(tokens, 1)
    gates, chunks = torch.rand(tokens, 3), torch.tensor([[17, -1, 16]], dtype=torch.int32).repeat(tokens, 1)
    found = bits_on_cpu.ffn(x, ids, gates, chunks, *layer)
    assert torch.equal(found, bits_on_cpu.ffn(x, ids, gates, chunks.clamp(0, 8), *layer))
    assert error(found, x, ids, gates, chunks.clamp(0, 8), layer) < ERROR


@pytest.mark.parametrize("tokens", [1, 8])
def test_thresholds_hand_out_no_more_planes_than_there_are(bits_on_cpu, block, tokens):
    layer, x, ids = block(hidden=128, planes=6), rows(tokens, 128), torch.tensor([[2, 0, 1]]).repeat(tokens, 1)
    gates, chunks = torch.rand(tokens, 3), torch.zeros(tokens, 3, dtype=torch.int32)
    source = allocation.Thresholds(gates, torch.full((3, 8), -1.0), torch.tensor(8, dtype=torch.int32))
    found = bits_on_cpu.ffn(x, ids, gates, chunks, *layer, source)
    assert (chunks == 6).all() and error(found, x, ids, gates, chunks, layer) < ERROR


def test_a_number_that_is_none_stays_in_its_token(bits_on_cpu, block):
    layer, x, ids = block(hidden=128, activation="silu"), rows(2, 128), torch.tensor([[2], [1]])
    gates, chunks = torch.rand(2, 1), torch.full((2, 1), 3, dtype=torch.int32)
    x[1, 50] = float("nan")
    found = bits_on_cpu.ffn(x, ids, gates, chunks, *layer)
    assert found[1].isnan().all() and error(found[:1], x[:1], ids[:1], gates[:1], chunks[:1], layer) < ERROR


def sources(convex_table, gates):
    """Where k is from: given, by rank and by thresholds, of two planes at least or none."""
    k_max, table = torch.tensor(8, dtype=torch.int32), torch.linspace(0.1, 0.9, 8).repeat(3, 1)
    table[:, :2] = -1
    return {
        "given": None,
        "rank": allocation.Allocation(gates, convex_table(3), torch.tensor(3.5), k_max, 2),
        "thresholds": allocation.Thresholds(gates, table, k_max, k_min=2),
        "thresholds from none on": allocation.Thresholds(gates, table - 0.3, k_max),
    }


# rule, whether k is read before it is surely written, planes asked for at each wait of a program: again, where k was old
ASKED = [
    ("given", False, [8]),
    ("rank", True, [8, 16]),
    ("rank", False, [2]),
    ("thresholds", False, [2]),
    ("thresholds from none on", True, [8, 16]),
    ("thresholds from none on", False, [0]),
]


@pytest.mark.parametrize("rule, ahead, asked", some_slow(ASKED, ASKED[:3]))
def test_the_second_product_waits_for_what_the_first_writes(
    bits_on_cpu, block, convex_table, early, monkeypatch, rule, ahead, asked
):
    """On a card where it begins before the end of the first: hidden rows, and k that is found there, are there where it waits.

    Of planes it asks before for all that are given, or for the fewest; or for those of a k that may be old, and is found out.
    """
    from . import gluon_on_cpu

    layer, x, ids = block(hidden=128, activation="relu"), rows(2, 128), torch.tensor([[0, 3, 2], [1, 1, -1]])
    gates, chunks = torch.rand(2, 3), torch.tensor([[2, 0, 5], [3, 4, 0]], dtype=torch.int32)
    source = sources(convex_table, gates)[rule]
    expected = bits_on_cpu.ffn(x, ids, gates, chunks, *layer, source)
    down, found, waits, copies = bits_on_cpu.down_kernel, chunks.clone(), [], gluon_on_cpu.COPIES
    begin, old = copies.begin, torch.tensor([[1000, -3, 0], [0, 8, 1]], dtype=torch.int32)

    class Late:
        def __getitem__(self, grid):
            return lambda hidden, ids, k, *given, **options: self.launch(grid, (hidden, k), (ids, *given), options)

        def launch(self, grid, written, given, options):
            there = [tensor.clone() for tensor in written]

            def program_begins():
                written[0].fill_(float("nan"))
                if source is not None:
                    written[1].copy_(old)
                begin()

            def wait():
                waits.append(sum(map(len, [*copies.groups, copies.asked])))
                for tensor, value in zip(written, there, strict=True):
                    tensor.copy_(value)

            early(wait)
            monkeypatch.setattr(copies, "begin", program_begins)
            down[grid](written[0], given[0], written[1], *given[1:], **options)

    early(lambda: None)
    monkeypatch.setattr(bits_on_cpu, "at_once", lambda *given: ahead)
    monkeypatch.setattr(bits_on_cpu, "down_kernel", Late())
    assert torch.equal(bits_on_cpu.ffn(x, ids, gates, found, *layer, source), expected) and torch.equal(found, chunks)
    assert waits == asked * 8  # four tiles of each of two tokens
