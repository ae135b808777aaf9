"""Layout of encoded weights: packing, sizes in bits and bytes, and the numbers of the paper's appendix A."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpamoe.encode import encode
from dpamoe.kernels.layout import (
    bits_per_weight,
    group_width,
    groups_of,
    offset_value,
    pack_signs,
    plane_scale,
    scale_sets,
    tied_scale,
    unpack_signs,
)
from dpamoe.spec import EncodeSpec


def test_bit_i_of_byte_j_is_input_8j_plus_i():
    positive = torch.zeros(19, dtype=torch.bool)
    positive[[0, 3, 7, 9, 18]] = True
    assert pack_signs(positive).tolist() == [1 + 8 + 128, 2, 4]  # the five spare bits are 0


@pytest.mark.parametrize("width", [1, 7, 8, 9, 20])
def test_all_ones_and_all_zeros(width):
    whole, spare = divmod(width, 8)
    assert pack_signs(torch.ones(2, width, dtype=torch.bool)).tolist() == [[255] * whole + [2**spare - 1] * (spare > 0)] * 2
    assert not pack_signs(torch.zeros(2, width, dtype=torch.bool)).any()


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=41), min_size=1, max_size=4))
def test_unpack_undoes_pack(rows):
    width = max(map(len, rows))
    positive = torch.tensor([row + [False] * (width - len(row)) for row in rows])
    packed = pack_signs(positive)
    assert packed.dtype == torch.uint8 and packed.shape == (len(rows), -(-width // 8))
    assert torch.equal(unpack_signs(packed, width), torch.where(positive, 1.0, -1.0))


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=9))
def test_pack_undoes_unpack(data):
    plane = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(pack_signs(unpack_signs(plane, 8 * len(data)) > 0), plane)


@pytest.mark.parametrize(
    "k, bits", [(2, 2.375), (3, 3.5), (4, 4.625), (5, 5.75), (6, 6.875), (7, 8.0), (8, 9.125), (3.5, 4.0625)]
)
def test_bits_per_weight_of_the_papers_setting(k, bits):
    assert bits_per_weight(k, 1024, 128, "shared") == bits


def test_bits_per_weight_counts_padding():
    # 20 inputs: 3 bytes a plane are 1.2 bits a weight; groups of 8: 3 of them, 16 / 20 bits each
    assert bits_per_weight(4, 20, 8, "shared") == pytest.approx(4 * (1.2 + 2.4) + 2.4)
    assert bits_per_weight(4, 20, -1, "shared") == pytest.approx(4 * (1.2 + 0.8) + 0.8)
    assert bits_per_weight(4, 32, 32, "tied") == 4.5
    assert bits_per_weight(2, 128, 128, "shared", scale_bits=32) == 2 * 1.25 + 0.25


def test_scale_storage_of_appendix_a():
    assert (scale_sets(2, 8), scale_sets(2, 8, shared=False)) == (8, 35)
    assert scale_sets(2, 8, shared=False) / scale_sets(2, 8) == 4.375
    offset = 16 / 128
    shared = bits_per_weight(8, 128, 128, "shared") - offset
    separate = shared + (35 - 8) * 16 / 128
    assert separate / shared == 1.375  # +37.5 % of the expert's storage, offset not counted


@pytest.mark.parametrize("in_features, group_size, width, groups", [
    (128, 64, 64, 2), (20, 8, 8, 3), (24, 16, 16, 2), (704, 128, 128, 6), (640, 128, 128, 5), (38, -1, 38, 1), (1, -1, 1, 1),
])  # fmt: skip
def test_groups(in_features, group_size, width, groups):
    assert (group_width(in_features, group_size), groups_of(in_features, group_size)) == (width, groups)


@pytest.mark.parametrize("mode", ["shared", "tied"])
@pytest.mark.parametrize(
    "out_features, in_features, group_size, k_max", [(5, 20, 8, 8), (3, 24, 16, 4), (7, 38, -1, 8), (2, 64, 32, 2)]
)
def test_bytes_held_are_the_bits_promised(out_features, in_features, group_size, k_max, mode):
    weight = torch.randn(3, out_features, in_features, generator=torch.Generator().manual_seed(0))
    encoded = encode(weight, EncodeSpec(group_size=group_size, k_max=k_max, scale_mode=mode))
    promised = bits_per_weight(k_max, in_features, group_size, mode) * weight.numel() / 8
    units = 4 * 3 if mode == "tied" else 0  # one fp32 number per expert, not counted per weight
    assert encoded.nbytes() - units == pytest.approx(promised)


@pytest.mark.parametrize("scale, bits", [(1e-7, 32), (1.0, 16)])
def test_bytes_held_of_wide_and_narrow_scales(scale, bits):
    weight = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0)) * scale
    encoded = encode(weight, EncodeSpec(group_size=16))
    assert encoded.nbytes() == bits_per_weight(8, 32, 16, "shared", scale_bits=bits) * weight.numel() / 8


def test_names_of_tensors(random_encoded):
    shared, tied = (random_encoded(2, 3, 16, 8, planes=2, tied=tied).tensors() for tied in (False, True))
    assert list(shared) == ["plane.0", "plane.1", "scale.0", "scale.1", "offset"]
    assert list(tied) == ["plane.0", "plane.1", "scale", "unit", "offset"]


def test_tied_scales_by_hand():
    code = torch.tensor([[[255, 231, 1, 0]]], dtype=torch.uint8)  # 24 codes to the octave, 0 is no scale at all
    unit = torch.tensor([3.0])
    expected = torch.tensor([[[3.0, 1.5, 3.0 * 2 ** (-254 / 24), 0.0]]])
    torch.testing.assert_close(tied_scale(code, unit), expected)
    torch.testing.assert_close(plane_scale([code], unit, 0), expected / 2)
    torch.testing.assert_close(plane_scale([code], unit, 7), expected / 256)
    offset = torch.tensor([[[96, -48, 127, 5]]], dtype=torch.int8)
    by_hand = torch.tensor([[[3.0, -0.75, 127 / 96 * 3.0 * 2 ** (-254 / 24), 0.0]]])
    torch.testing.assert_close(offset_value([code], offset, unit), by_hand)


def test_tied_unit_belongs_to_its_expert():
    code = torch.full((2, 1, 1), 255, dtype=torch.uint8)
    assert tied_scale(code, torch.tensor([2.0, 5.0])).flatten().tolist() == [2.0, 5.0]
