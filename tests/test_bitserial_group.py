"""The kernels for many pairs on the CPU against fp64, and against those for few: which planes are read, and for whom."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import grouped
from dpamoe.kernels.reference import is_gated

from .in_fp64 import error
from .layouts import in_lanes
from .marks import some_slow

ERROR = 1e-4  # of the norm: inputs of both products have 16 bits, of the largest of their group


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests run before."""
    torch.manual_seed(0)


@pytest.fixture
def many(bits_on_cpu, monkeypatch):
    """The expert block by the kernels for many pairs, however few there are."""
    monkeypatch.setattr(bits_on_cpu, "FEW", 0)
    return bits_on_cpu.ffn


def make(random_encoded, experts, hidden, inner, activation, planes=8):
    rows = inner * (2 if is_gated(activation) else 1)
    up, down = random_encoded(experts, rows, hidden, 128, planes), random_encoded(experts, 64, inner, 128, planes, seed=1)
    return up, torch.randn(experts, rows), down, torch.randn(experts, 64), activation


@pytest.mark.parametrize("experts, held", some_slow([(3, 2), (40, 8), (3, 8), (40, 2)], [(3, 2), (40, 8)]))
def test_pairs_of_an_expert_with_planes_of_their_own(many, bits_on_cpu, random_encoded, monkeypatch, held, experts):
    """Experts of three pairs, of one and of none, 0 to 8 planes, padding; more experts than pairs, or fewer."""
    monkeypatch.setattr(bits_on_cpu, "planes_held", lambda *given: held)
    layer = make(random_encoded, experts, 128, 128, "gelu")
    x, ids = torch.randn(4, 128), torch.tensor([[0, 1], [0, experts], [2, 0], [-1, 2]])
    gates, chunks = torch.rand(4, 2), torch.tensor([[held, 4], [8, 3], [5, 1], [2, 0]], dtype=torch.int32)
    assert error(many(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


@pytest.mark.parametrize("hidden, inner", some_slow([(384, 256), (2176, 128)], [(384, 256)]))
def test_widths_that_are_no_whole_pieces(many, random_encoded, hidden, inner):
    layer = make(random_encoded, 2, hidden, inner, "silu_mul")
    x, ids, gates = torch.randn(2, hidden), torch.tensor([[0], [0]]), torch.rand(2, 1)
    chunks = torch.tensor([[7], [2]], dtype=torch.int32)
    assert error(many(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu_mul", "gelu"])
def test_more_pairs_of_an_expert_than_sums_are_exchanged_of_at_once(many, random_encoded, activation):
    """Nine, and eight; the same alone."""
    layer = make(random_encoded, 2, 128, 128, activation, planes=2)
    x, ids = torch.randn(17, 128), torch.arange(17)[:, None] % 2
    call = x, ids, torch.rand(17, 1), (torch.arange(17)[:, None] % 3).int()
    found = many(*call, *layer)
    assert error(found, *call, layer) < ERROR
    for some in (slice(4, 5), slice(16, 17)):
        assert torch.equal(many(*(part[some] for part in call), *layer), found[some])


@pytest.mark.parametrize("inner, group, tied", [(128, 128, False), (640, 128, False), (640, 32, True)])
def test_rows_are_cut_alike_by_each_tile_and_by_a_kernel_for_it(bits_on_cpu, random_encoded, inner, group, tied):
    """Fewer groups than warps, and more, the last of them alone."""
    weight, rows = random_encoded(2, 64, inner, group, 3, tied=tied), torch.randn(4, inner)
    ids, chunks = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[3, 1], [2, 3]], dtype=torch.int32)
    _, by = bits_on_cpu.order_pairs(rows, ids, chunks, weight, None)
    found = torch.zeros(2, 4, 64)
    lanes = in_lanes(rows)
    for given, out in zip((lanes, bits_on_cpu._cut_rows(lanes, weight)), found, strict=True):
        bits_on_cpu._group(given, by, weight, None, out, 1, "", along=1, tiles=4, programs=4, ahead=True)
    assert torch.equal(*found)
    expected = grouped.expert_matmul(rows.view(2, 2, inner).double(), ids, chunks, weight, None).flatten(0, 1)
    assert float((found[0] - expected).norm() / expected.norm()) < ERROR


@pytest.mark.slow
def test_as_the_kernels_for_few_pairs(bits_on_cpu, random_encoded, random_pairs, monkeypatch):
    """The order of adding differs, nothing else; weights of three planes."""
    layer = make(random_encoded, 3, 256, 128, "swigluoai", planes=3)
    (ids, gates, _), x = random_pairs(3, 2, 3), torch.randn(3, 256).bfloat16()
    chunks = torch.tensor([[3, 1], [2, 3], [1, 2]], dtype=torch.int32)
    few = bits_on_cpu.ffn(x.float(), ids, gates, chunks, *layer)
    monkeypatch.setattr(bits_on_cpu, "FEW", 0)
    torch.testing.assert_close(bits_on_cpu.ffn(x.float(), ids, gates, chunks, *layer), few, rtol=1e-5, atol=1e-4)  # of 16 bits


def test_the_second_product_asks_for_planes_before_its_rows_are_there(bits_on_cpu, random_encoded, early):
    """One program, which finds its rows only after it has waited."""
    from . import gluon_on_cpu

    weight, x, asked = random_encoded(1, 64, 128, 128), torch.randn(2, 128), []
    ids, chunks = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[3], [8]], dtype=torch.int32)
    early(lambda: None)
    bits, by = bits_on_cpu.order_pairs(x, ids, chunks, weight, None)
    there, found = bits.clone(), torch.empty(2, 64)

    def end():
        asked.append(sum(map(len, gluon_on_cpu.COPIES.groups)))
        bits.copy_(there)

    early(end)
    bits.fill_(-1)
    bits_on_cpu._group(bits, by, weight, None, found, 1, "", along=1, tiles=4, programs=4, ahead=True)
    expected = grouped.expert_matmul(x.double(), ids, chunks, weight, None)[:, 0]
    assert asked == [8] and float((found - expected).norm() / expected.norm()) < ERROR


def test_slots_are_added_up_once_their_rows_are_there(many, bits_on_cpu, random_encoded, early, monkeypatch):
    """All kernels as on a card where each begins before the end of the one before; rows are written where the last waits."""
    layer = make(random_encoded, 2, 128, 128, "relu_mul")
    x, ids, gates = torch.randn(2, 128), torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2)
    chunks = torch.tensor([[2, 5], [8, 3]], dtype=torch.int32)
    combine, last = bits_on_cpu.combine_kernel, []

    class Late:
        def __getitem__(self, grid):
            return lambda rows, *given, **options: self.launch(grid, rows, given, options)

        def launch(self, grid, rows, given, options):
            there = rows.clone()
            rows.fill_(float("nan"))
            early(lambda: last.append(rows.copy_(there)))
            combine[grid](rows, *given, **options)

    early(lambda: None)
    monkeypatch.setattr(bits_on_cpu, "combine_kernel", Late())
    assert error(many(x, ids, gates, chunks, *layer), x, ids, gates, chunks, layer) < ERROR
    assert len(last) == 2  # a program for each token
