"""Quantised weights mean what their formats say: numbers worked out by hand."""

import pytest
import torch

from dpamoe import formats


def test_scales_are_floats_or_exponents():
    assert formats.scale_value(torch.tensor([127, 128, 120], dtype=torch.uint8)).tolist() == [1.0, 2.0, 2.0**-7]
    assert formats.scale_value(torch.tensor([0.75], dtype=torch.bfloat16)).tolist() == [0.75]
    exponents = torch.tensor([127, 130], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert formats.scale_value(exponents).tolist() == [1.0, 8.0]


def test_a_weight_of_short_last_blocks():
    """3 by 5 in blocks of 2 by 2: the last row and the last column of blocks are short."""
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    expected = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    assert formats.from_blocks(weight, scale, (2, 2), torch.float32).tolist() == expected


def test_stacked_weights_and_single_scales():
    weight = torch.tensor([[[2.0, 4.0]], [[6.0, 8.0]]]).to(torch.float8_e4m3fn)
    stacked = formats.from_blocks(weight, torch.tensor([[[1.0]], [[0.5]]]), (1, 2), torch.bfloat16)
    assert stacked.dtype == torch.bfloat16 and stacked.tolist() == [[[2.0, 4.0]], [[3.0, 4.0]]]
    assert formats.from_blocks(weight[0], torch.tensor(3.0), (1, 2), torch.float32).tolist() == [[6.0, 12.0]]


@pytest.mark.parametrize(
    "shape, grid, block, expected",
    [
        ((256, 384), (2, 3), (128, 128), (128, 128)),
        ((130, 1), (2, 1), (128, 128), (128, 128)),
        ((4, 200, 300), (4, 2, 3), (128, 128), (128, 128)),
        ((64, 64), (64, 2), (128, 128), (1, 32)),
        ((7, 9), (), (128, 128), (7, 9)),
        ((7, 9), (1,), (128, 128), (7, 9)),
    ],
)
def test_blocks(shape, grid, block, expected):
    assert formats.block_size(shape, grid, block, "w") == expected


@pytest.mark.parametrize("grid", [(3, 2), (2,), (2, 3, 1)])
def test_scales_that_do_not_fit(grid):
    with pytest.raises(ValueError, match=r"w is \[256, 384\] with scales .* do not fit blocks of 128 by 128"):
        formats.block_size((256, 384), grid, (128, 128), "w")


def test_mxfp4_by_hand():
    """One expert, one row, one group of 32: low nibbles first, every value of E2M1, exponent 128 doubles."""
    low = torch.arange(16, dtype=torch.uint8)
    blocks = (low | (low.flip(0) << 4)).view(1, 1, 1, 16)
    result = formats.from_mxfp4(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8), torch.bfloat16)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = [2 * v for v in magnitudes] + [-2 * v for v in magnitudes]
    expected = [value for pair in zip(values, values[::-1], strict=True) for value in pair]
    assert result.shape == (1, 32, 1) and result.flatten().tolist() == expected


def test_mxfp4_stands_inputs_by_outputs():
    blocks = torch.full((2, 3, 2, 16), 0x22, dtype=torch.uint8)  # every value is 1
    scales = torch.arange(120, 132, dtype=torch.uint8).view(2, 3, 2)
    result = formats.from_mxfp4(blocks, scales, torch.float32)
    assert result.shape == (2, 64, 3)
    assert result[1, 0, 2] == 2.0 ** (130 - 127) and result[1, 63, 2] == 2.0 ** (131 - 127) and result[0, 32, 0] == 2.0**-6


def test_mxfp4_equals_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(110, 130, (3, 10, 4), dtype=torch.uint8, generator=random)
    assert torch.equal(
        formats.from_mxfp4(blocks, scales, torch.bfloat16), convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    )
