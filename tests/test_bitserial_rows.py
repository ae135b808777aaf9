"""Rows cut into bits and pairs put in order, by the kernels on the CPU; where lanes leave and find their registers."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import bitserial_product

from .layouts import held, in_lanes, once
from .marks import some_slow


def cut(bits):
    """What bits [T, 2 W] stand for, fp64 [T, 256 W]: bit n in lane 4n + c, bit i of it of input 32 c + i."""
    words = bits.reshape(bits.shape[0], -1, 32, 4)  # [T, groups, lanes, (low, high, step, sum)]
    parts = [(words[..., half, None] >> torch.arange(32)) & 1 for half in range(2)]  # [T, groups, lanes, 32]
    each = torch.cat([part.unflatten(2, (8, 4)) for part in parts], 2).flatten(3)  # [T, groups, 16, 128]
    weights = torch.tensor([2**n for n in range(15)] + [-(2**15)])
    values = (each * weights[:, None]).sum(2)
    assert torch.equal(values.sum(-1).float(), words[..., 0, 3].contiguous().view(torch.float32))
    return (values * words[..., 0, 2, None].contiguous().view(torch.float32).double()).flatten(1)


@pytest.mark.parametrize("inputs", [128, 384, 2048, 2176])
def test_rows_of_any_stride(bits_on_cpu, random_encoded, inputs):
    """By the kernel for rows alone, and by that which orders pairs; after an odd group comes one of zeros."""
    wide = torch.randn(2, inputs + 64, generator=torch.Generator().manual_seed(1))
    x = wide[:, 32 : 32 + inputs]
    bits = torch.full((2, -(-inputs // 256) * 256), 77, dtype=torch.int32)
    parts = bits_on_cpu.pieces_of(inputs, 4)
    lanes = wide.clone()
    lanes[:, 32 : 32 + inputs] = in_lanes(x)
    bits_on_cpu.cut_kernel[(2, parts)](lanes[:, 32:], bits, x.stride(0), IN=inputs, NW=4, TIED=0, PDL=False)
    largest = x.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True)
    found = cut(bits)
    assert ((found[:, :inputs] - x).unflatten(1, (-1, 128)).abs() <= 0.51 / 32767 * largest).all()
    assert not found[:, inputs:].any()
    weight = random_encoded(3, 64, inputs, 128)
    ids, chunks = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int32)
    assert torch.equal(bits_on_cpu.order_pairs(x, ids, chunks, weight, None)[0], bits)


@pytest.mark.parametrize("experts", some_slow((2, 5, 48, 130), (2, 130)))
@pytest.mark.parametrize("tokens, active", [(1, 16), (3, 10), (7, 6), (24, 2), (40, 1)])
def test_pairs_in_the_order_of_their_experts(bits_on_cpu, random_encoded, experts, tokens, active):
    """Each expert's pairs stand together, in their own order, once, with their planes; padding stands in no entry.

    Experts stand in the order in which they first occur, empty entries behind them.
    """
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, active), generator=random)
    ids = torch.where(ids == experts, 2**40, ids)
    chunks = torch.randint(0, 9, (tokens, active), generator=random, dtype=torch.int32)
    _, by = bits_on_cpu.order_pairs(torch.randn(tokens, 128), ids, chunks, random_encoded(experts, 64, 128, 128, 8), None)
    flat, k = ids.flatten(), chunks.flatten()
    seen = []
    assert len(by.entries) == min(experts, tokens * active)
    for expert, begin, end, first in by.entries.tolist():
        if begin < end:
            assert by.pairs[begin:end].tolist() == (flat == expert).nonzero().flatten().tolist()
            assert torch.equal(by.planes[begin:end], k[flat == expert]) and first == by.planes[begin]
            seen.append(expert)
    assert seen == [expert for expert in dict.fromkeys(flat.tolist()) if 0 <= expert < experts]
    assert (by.entries[: len(seen), 1] < by.entries[: len(seen), 2]).all()
    assert by.pairs.sort().values.tolist() == list(range(tokens * active))
    assert not by.planes[(flat[by.pairs.long()] < 0) | (flat[by.pairs.long()] >= experts)].any()


@pytest.mark.parametrize("warps, tiles", [(8, 1), (4, 1), (1, 4)])
def test_what_lanes_left_is_found_in_the_order_of_words(warps, tiles):
    """`bitserial_group` reshapes registers [32 lanes, 4] to words; each stays in its lane and register."""
    left = held(bitserial_product.lane_layout(warps * tiles))
    assert once(left, 32 * warps * tiles, 4)
    number = torch.arange(32 * warps * tiles * 4).reshape(-1, 4)
    words = number.reshape(tiles, warps, 8, 4, 2, 2).permute(0, 5, 2, 1, 4, 3).reshape(16 * tiles, 8 * warps)
    found = held(bitserial_product.words_layout(warps, tiles))
    assert torch.equal(words[found[..., 0], found[..., 1]], number[left[..., 0], left[..., 1]])
