"""What warps of the second product are given, and that no kernel for few pairs copies more planes than are read."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import allocation
from dpamoe.kernels import bitserial_pieces as pieces

from . import gluon_on_cpu
from .layouts import held, once
from .marks import some_slow

EXPERTS = 4


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_copies_of_sixteen_bytes_for_their_own_warp(warps):
    """Each warp copies the eight columns of words that it reads, a lane four words in a row."""
    places = held(pieces.own_copy_layout(warps))
    assert once(places, 16, 8 * warps)
    assert (places[..., 1] // 8 == torch.arange(warps)[:, None, None]).all() and (places[:, :, 0, 1] % 4 == 0).all()
    assert (places[..., 0] == places[:, :, :1, 0]).all()
    assert torch.equal(places[..., 1] - places[:, :, :1, 1], torch.arange(4).expand_as(places[..., 1]))


@pytest.mark.parametrize("rule", some_slow(["rank", "threshold"], ["rank"]))
def test_no_plane_is_copied_that_is_not_read(bits_on_cpu, random_encoded, convex_table, rule):
    """Not for padding either, although two planes are asked for before k is known."""
    ids, k_max = torch.tensor([[0, EXPERTS, 2], [3, 1, -1]]), torch.tensor(8, dtype=torch.int32)
    gates = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    table = torch.linspace(0.1, 0.9, 8).expand(EXPERTS, -1).clone()
    table[:, :2] = -1
    source = {
        "rank": allocation.Allocation(gates, convex_table(EXPERTS), torch.tensor(3.5), k_max, 2),
        "threshold": allocation.Thresholds(gates, table, k_max, k_min=2),
    }[rule]
    chunks = torch.full(ids.shape, 77, dtype=torch.int32)
    up, down = random_encoded(EXPERTS, 64, 128, 128), random_encoded(EXPERTS, 64, 64, 64)
    before = gluon_on_cpu.COPIES.words
    bits_on_cpu.ffn(torch.randn(2, 128), ids, gates, chunks, up, None, down, None, "relu", source)
    assert (chunks == 0).sum() == 2 and chunks.max() < 7  # which stand in shared memory here
    assert gluon_on_cpu.COPIES.words - before == chunks.sum() * 64 * (128 + 64) // 32
