"""Scale storage of appendix A: the paper's figures exactly, and the bytes that encoded experts really hold."""

from dataclasses import replace

import pytest
import torch

from dpamoe.encode import encode
from dpamoe.kernels.layout import bits_per_weight
from dpamoe.modules import EncodedExperts
from dpamoe.overhead import storage_overhead
from dpamoe.sites import ExpertLayout, Site, Stack
from dpamoe.spec import EncodeSpec

LAYOUT = ExpertLayout((Stack(("up",)),), Stack(("down",)))


def site(hidden=256, inner=128, gated=True, experts=3):
    rows = inner * (2 if gated else 1)
    return Site("mlp.experts", experts, 2, hidden, inner, hidden, rows, "silu_mul" if gated else "silu", LAYOUT, 0, "float32")


@pytest.mark.parametrize("widths", [(256, 128), (2048, 768), (4096, 14336)])
def test_the_papers_setting(widths):
    found = storage_overhead(site(*widths), EncodeSpec())
    assert (found["sets_shared"], found["sets_separate"], found["scale_ratio"]) == (8, 35, 4.375)
    assert found["increase"] == 0.375
    assert found["scale_bytes_shared"] * 8 == found["plane_bytes"]  # eight sets of 16 bits for 128 weights: one bit of 8
    assert (found["bits_per_weight_shared"], found["bits_per_weight_separate"]) == (9.125, 8 + 35 / 8 + 7 / 8)
    assert found["increase_with_offsets"] == pytest.approx(13.25 / 9.125 - 1)


def test_bytes_by_hand():
    # up [16, 20] and down [20, 8] in groups of 8: 3 bytes and 3 groups a row, 1 byte and 1 group a row
    found = storage_overhead(site(20, 8), EncodeSpec(group_size=8, k_min=2, k_max=4))
    assert (found["sets_shared"], found["sets_separate"]) == (4, 2 + 3 + 4)
    assert found["plane_bytes"] == 4 * (16 * 3 + 20 * 1) == 272
    assert (found["scale_bytes_shared"], found["scale_bytes_separate"]) == (4 * 68 * 2, 9 * 68 * 2)
    assert found["bytes_shared"] == 272 + 544 + 136 and found["bytes_separate"] == 272 + 1224 + 3 * 136
    assert found["increase"] == (272 + 1224) / (272 + 544) - 1
    assert found["bits_per_weight_shared"] == 8 * 952 / 480
    assert storage_overhead(site(20, 8), EncodeSpec(group_size=8, k_max=4), 32)["bytes_shared"] == 272 + 2 * (544 + 136)


def test_tied_scales_need_one_set_for_each_precision_at_most():
    spec = EncodeSpec(group_size=32, scale_mode="tied")
    found = storage_overhead(site(256, 128), spec)
    groups = (256 * 256 + 256 * 128) // 32
    assert (found["sets_shared"], found["sets_separate"], found["scale_ratio"]) == (1, 7, 7.0)
    assert found["scale_bytes_shared"] == groups + 8  # one byte each, and a unit for each of the two weights
    assert found["bytes_shared"] == 8 * groups * 4 + 2 * groups + 8
    assert found["bytes_separate"] - found["bytes_shared"] == 6 * (2 * groups + 8)
    assert found["increase_with_offsets"] < storage_overhead(site(256, 128), replace(spec, scale_mode="shared"))["increase"]


def test_one_precision_has_nothing_to_share():
    for mode in ("shared", "tied"):
        found = storage_overhead(site(), EncodeSpec(k_min=4, k_max=4, scale_mode=mode))
        assert found["increase"] == found["increase_with_offsets"] == 0 and found["scale_ratio"] == 1


@pytest.mark.parametrize("mode", ["shared", "tied"])
@pytest.mark.parametrize("widths, gated", [((20, 12), True), ((38, 11), False)])
@pytest.mark.parametrize("group_size", [8, -1])
def test_shared_bytes_are_those_that_encoded_experts_hold(widths, gated, group_size, mode):
    place, spec = site(*widths, gated), EncodeSpec(group_size=group_size, k_max=5, scale_mode=mode)
    random = torch.Generator().manual_seed(0)
    up = encode(torch.randn(3, place.up_rows, place.hidden, generator=random), spec)
    down = encode(torch.randn(3, place.out, place.inner, generator=random), spec)
    held = EncodedExperts(place, spec, up, down, None, None, torch.zeros(3, 6))
    found = storage_overhead(place, spec)
    assert found["bytes_shared"] * 3 == held.encoded_bytes()
    bits = [bits_per_weight(5, width, group_size, mode) for width in (place.hidden, place.inner)]
    sizes = [place.up_rows * place.hidden, place.out * place.inner]
    units = 8 * 8 / sum(sizes) if mode == "tied" else 0  # two fp32 numbers an expert, not counted per weight
    expected = sum(b * n for b, n in zip(bits, sizes, strict=True)) / sum(sizes)
    assert found["bits_per_weight_shared"] - units == pytest.approx(expected)


def test_the_shipped_model(tiny_encoded):
    """Widths of 128 in groups of 128: the paper's figures to the digit."""
    for experts in (m for m in tiny_encoded().modules() if isinstance(m, EncodedExperts)):
        found = storage_overhead(experts.site, experts.spec)
        assert (found["increase"], found["scale_ratio"]) == (0.375, 4.375)
        assert found["bytes_shared"] * experts.site.experts == experts.encoded_bytes()
