"""Rows prepared for the Hopper kernel, by the interpreter, and what it computes from them, in torch."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import grouped
from dpamoe.kernels import hopper_experts as he
from dpamoe.kernels.layout import group_width

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(32, 256), (64, 256), (64, 384), (128, 768), (256, 512), (32, 1024), (32, 2304)]


def sorted_as(places):
    """Pairs at these places of the order, -1 for those that are not there."""
    places = torch.tensor(places, dtype=torch.int32)
    return he.Sorted(places, places.to(DEVICE), places, places, he.CUTS[0][1], False)


def as_the_kernel_reads(weight, expert, k, words):
    """One expert's weight without offsets, in the order and with the factors that prepared rows expect: fp64 [O, I]."""
    rows, width = weight.offset.shape[1], weight.in_features
    bits = torch.stack([plane[expert] for plane in weight.planes[:k]])
    bits = ((bits[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).double().reshape(k, rows, width)
    scale = torch.stack([s[expert].double() for s in weight.scales[:k]])
    dense = (bits * 2 * scale.repeat_interleave(group_width(width, weight.group_size), -1)).sum(0)
    place = torch.tensor([s if 4 <= s < 12 else (s + 8) % 16 for s in range(16)])
    # input 32 (l words + w) + 16 h + s: block w, column 8 s + 2 l + h
    parts = dense.reshape(rows, width // (128 * words), 4, words, 2, 16) * 2.0 ** (place - 11)
    return parts.permute(0, 1, 3, 5, 2, 4).reshape(rows, width)


def bases_as_the_kernel_reads(weight, expert, k, words):
    """offset - sum of scales as the left operand of the products with sums: fp64 [O, 16 for each stretch]."""
    base = 16 * (weight.offset[expert].double() - sum(scale[expert].double() for scale in weight.scales[:k]))
    lanes = base.repeat_interleave(group_width(weight.in_features, weight.group_size) // (32 * words), 1)
    upper = lanes.half().double()
    rest = (lanes - upper).half().double()
    columns = torch.stack([upper, rest], 1).repeat_interleave(2, 2)  # 2 l + h, for all stretches
    return columns.reshape(base.shape[0], 2, -1, 8).transpose(1, 2).flatten(1)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("group, width", SHAPES)
def test_prepared_rows_times_planes_and_sums_times_offsets(random_encoded, group, width, mean):
    weight, k, places = random_encoded(2, 24, width, group, 4), 3, [3, 0, -1, 2, 1, -1]
    x = (torch.randn(3, width, generator=torch.Generator().manual_seed(1)) + mean).bfloat16()
    ready, factor = (t.cpu().double() for t in he.prepare_rows(x.to(DEVICE), sorted_as(places), 2, weight))
    words = he.words_at_once(weight)
    of_pairs = torch.tensor([places.index(place) for place in range(4)])
    rows = x[of_pairs // 2].double()
    found = ready[:4, :width] @ as_the_kernel_reads(weight, 1, k, words).T
    found += ready[:4, width:] @ bases_as_the_kernel_reads(weight, 1, k, words).T
    expected = rows @ next(grouped.prefixes(weight, 1, [k])).double().T
    assert (found * factor[:4, None] - expected).norm() < 2**-10 * expected.norm()  # x is rounded to fp16 after its scaling


@pytest.mark.parametrize("group, width", [(128, 768), (64, 384), (256, 2048)])
def test_rows_in_order_are_prepared_alike(random_encoded, group, width):
    """Several in a program, the last of which has fewer."""
    weight, rows = random_encoded(1, 8, width, group, 2), 11
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(2))[:, ::2].contiguous().bfloat16().to(DEVICE)
    alone = he.prepare_rows(x, sorted_as(list(range(rows))), 1, weight)
    together = he.prepare_rows(x, sorted_as([-1] * rows), 0, weight)  # places are not asked
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_rows_of_zeros_and_of_largest_numbers(random_encoded):
    weight = random_encoded(1, 8, 256, 64, 2)
    x = torch.zeros(2, 256)
    x[1] = 3e38
    ready, factor = he.prepare_rows(x.to(DEVICE), sorted_as([0, 1]), 1, weight)
    assert not ready[0].any() and ready.isfinite().all() and factor.isfinite().all()
