"""The order that 1-bit products read words and inputs in, by index arithmetic; the kernels themselves run on a GPU only."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import bitserial_product as product

from .layouts import held, once

G, C = torch.arange(32) // 4, torch.arange(32) % 4


@pytest.mark.parametrize("warps, tiles", [(8, 1), (4, 1), (1, 1), (1, 4)])
def test_a_warp_holds_two_groups_of_sixteen_rows(warps, tiles):
    """Registers: word c of rows g and g + 8 of the first group, and of the second, as `bitserial_asm` takes them."""
    places = held(product.words_layout(warps, tiles))
    assert once(places, 16 * tiles, 8 * warps)
    for warp in range(warps * tiles):
        for register in range(4):
            assert torch.equal(places[warp, :, register, 0], warp // warps * 16 + G + 8 * (register % 2))
            assert torch.equal(places[warp, :, register, 1], warp % warps * 8 + C + 4 * (register // 2))


@pytest.mark.parametrize("matrices", [1, 2])
def test_each_warp_adds_up_a_pair_of_its_own(matrices):
    """All that is added for a row stands in one lane; lanes 16 to 31 have the same rows again."""
    places = held(product.pairs_sums_layout(matrices, 8))
    assert once(places[:, :16], 8, 16, matrices, 8) and torch.equal(places[:, :16], places[:, 16:])
    for warp in range(8):
        assert (places[warp, ..., 0] == warp).all() and (places[warp, :, :, 1] == torch.arange(32)[:, None] % 16).all()
