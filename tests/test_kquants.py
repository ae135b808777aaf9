"""Block formats of llama.cpp: bytes against the decoder of the package gguf, error against llama.cpp's own encoder, edges."""

import numpy as np
import pytest
import torch

from dpamoe import kquants

quants = pytest.importorskip("gguf").quants

KINDS = sorted(kquants.BLOCK_BYTES)
AFFINE = {"Q2_K": (16, 3, 15), "Q4_K": (32, 15, 63), "Q5_K": (32, 31, 63)}  # sub-block, largest code, largest scale
SYMMETRIC = {"Q3_K": (4, 32), "Q6_K": (32, 128)}  # levels below zero of codes, of scales

# Squared error over sum of squares that `quantize_row_*_ref` (IQ4_NL: `quantize_iq4_nl`) of ggml d99724f leaves on `numbers`.
GGML = {
    "normal": {"Q2_K": 0.08819, "Q3_K": 0.022776, "Q4_K": 0.00512, "Q5_K": 0.001315, "Q6_K": 0.000315, "IQ4_NL": 0.005809},
    "heavy": {"Q2_K": 0.121297, "Q3_K": 0.035907, "Q4_K": 0.008569, "Q5_K": 0.002197, "Q6_K": 0.000669, "IQ4_NL": 0.010255},
}


def numbers(tails):
    """2^17 normal numbers, or numbers of Student's t with three degrees of freedom, fp32."""
    count = 1 << 17
    drawn = (
        np.random.default_rng(0).standard_normal(count) if tails == "normal" else np.random.default_rng(1).standard_t(3, count)
    )
    return torch.from_numpy(drawn.astype(np.float32))


def decode(stored, kind):
    return torch.from_numpy(quants.dequantize(stored.numpy(), quants.GGMLQuantizationType[kind]))


def round_trip(values, kind):
    """What decodes of values, any number of whole blocks, in their shape."""
    return decode(kquants.encode(values.reshape(-1, kquants.BLOCK_WEIGHTS[kind]), kind), kind).view_as(values)


def share(values, kind):
    """Squared error over sum of squares."""
    return float((round_trip(values, kind) - values).square().sum() / values.square().sum())


@pytest.mark.parametrize(
    "kind, size", [("Q2_K", 84), ("Q3_K", 110), ("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("IQ4_NL", 18)]
)
def test_bytes_of_a_block(kind, size):
    stored = kquants.encode(torch.randn(3, kquants.BLOCK_WEIGHTS[kind]), kind)
    assert stored.shape == (3, size) and stored.dtype == torch.uint8
    assert quants.GGML_QUANT_SIZES[quants.GGMLQuantizationType[kind]] == (kquants.BLOCK_WEIGHTS[kind], size)


def half(value):
    return list(np.float16(value).tobytes())


def test_a_ramp_from_zero_by_hand():
    """0 to 15 twice in every sub-block: 63 steps of 1 / 63, the upper bits of the last four scales in the first four bytes."""
    stored = kquants.encode(torch.arange(16.0).repeat(1, 16), "Q4_K")[0].tolist()
    pairs = [17 * code for code in range(16)]  # the same code in both nibbles
    assert stored == half(1 / 63) + half(0) + [255] * 4 + [0] * 4 + [15] * 4 + pairs * 8


def test_a_block_of_minus_ones_by_hand():
    """No scale and no code, the min alone: 15 steps of 1 / 15 in the upper nibbles."""
    assert kquants.encode(-torch.ones(1, 256), "Q2_K")[0].tolist() == [0xF0] * 16 + [0] * 64 + half(0) + half(1 / 15)


def test_a_ramp_around_zero_by_hand():
    """-4 to 3 in turn in every sub-block: scale -32 (stored as 0) steps of -1 / 32, codes 0 to 7 in two low bits and a high."""
    stored = kquants.encode(torch.arange(-4.0, 4.0).repeat(1, 32), "Q3_K")[0].tolist()
    high, low = [0x00] * 4 + [0xFF] * 4, [0x00, 0x55, 0xAA, 0xFF] * 2
    assert stored == high * 4 + low * 8 + [0] * 12 + half(-1 / 32)


@pytest.mark.parametrize("kind", sorted(AFFINE))
def test_affine_blocks_on_the_grid_come_back_exactly(kind):
    width, top, top_scale = AFFINE[kind]
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, top + 1, (50, 256 // width, width), generator=random)
    codes[..., 0], codes[..., 1] = 0, top
    scales, mins = (torch.randint(1, top_scale + 1, (50, 256 // width, 1), generator=random) for _ in range(2))
    scales[:, 3], mins[:, 5], mins[:, 6] = top_scale, top_scale, 0
    values = (2.0**-6 * scales * codes - 2.0**-5 * mins).view(50, 256)
    assert torch.equal(round_trip(values, kind), values)


@pytest.mark.parametrize("kind", sorted(SYMMETRIC))
def test_symmetric_blocks_on_the_grid_come_back_exactly(kind):
    middle, scale_middle = SYMMETRIC[kind]
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-middle, middle, (50, 16, 16), generator=random)
    codes[..., 0], codes[..., 1] = -middle, 1 - middle
    scales = torch.randint(-scale_middle, scale_middle, (50, 16, 1), generator=random)
    scales[:, 11] = -scale_middle
    values = (2.0**-6 * scales * codes).view(50, 256)
    assert torch.equal(round_trip(values, kind), values)


def test_nonlinear_blocks_on_the_grid_come_back_exactly():
    random = torch.Generator().manual_seed(0)
    levels = torch.tensor(kquants.LEVELS)[torch.randint(0, 16, (50, 32), generator=random)]
    levels[:, 0] = kquants.LEVELS[0]
    values = 2.0**-9 * levels * torch.tensor([1.0, -1.0]).repeat(25)[:, None]
    assert torch.equal(round_trip(values, "IQ4_NL"), values)


@pytest.mark.parametrize("tails", sorted(GGML))
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_that_of_llama_cpp_or_less(kind, tails):
    # Measured, Q2_K to Q6_K and IQ4_NL: normal 0.820, 0.964, 0.986, 0.953, 0.947, 0.983; heavy 0.749, 0.990, 0.987, 0.970,
    # 0.969, 0.986 of ggml's.
    assert share(numbers(tails), kind) < GGML[tails][kind]


@pytest.mark.parametrize("tails", sorted(GGML))
def test_more_bits_leave_less_error(tails):
    # Measured from one type to the next: normal 3.29, 4.35, 4.03, 4.20 and 10 times less, heavy 2.55, 4.20, 3.97, 3.29 and 9.
    errors = [share(numbers(tails), kind) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")]
    eight = quants.GGMLQuantizationType.Q8_0
    values = numbers(tails)
    rest = torch.from_numpy(quants.dequantize(quants.quantize(values.numpy(), eight), eight)) - values
    errors.append(float(rest.square().sum() / values.square().sum()))
    assert all(first > 2 * second for first, second in zip(errors[:-1], errors[1:], strict=True)), errors


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zero(kind):
    blocks = torch.zeros(2, kquants.BLOCK_WEIGHTS[kind])
    assert not round_trip(blocks, kind).any()
    blocks[1, :16] = torch.linspace(-1, 1, 16)  # beside a sub-block that is not
    found = round_trip(blocks, kind)
    assert not found[0].any() and found[1, :16].any()
    if kind != "IQ4_NL":  # none of its levels is 0
        assert not found[1, 32:].any()


@pytest.mark.parametrize("value", [1.0, -1.0, 0.02, 1e4, -1e4, 1e-4, -1e-4])
@pytest.mark.parametrize("kind", KINDS)
def test_constant_blocks_come_back(kind, value):
    """Within the rounding of one fp16 step, 2^-11, or of a subnormal one, which can be half a step of 2^-24 off."""
    found = round_trip(torch.full((1, kquants.BLOCK_WEIGHTS[kind]), value), kind)
    steps = {"Q2_K": 45, "Q3_K": 128, "Q4_K": 945, "Q5_K": 1953, "Q6_K": 4096, "IQ4_NL": 127}[kind]
    assert float((found - value).abs().max()) <= max(2**-11 * 1.01 * abs(value), steps * 2**-25)


@pytest.mark.parametrize("kind, levels", [("Q2_K", 3), ("Q4_K", 15), ("Q5_K", 31)])
def test_sub_blocks_above_zero_reach_down_to_it(kind, levels):
    """1 to 1.1: a min is taken off, never added, so the levels lie between 0 and 1.1, and the error within half of one."""
    values = torch.linspace(1.0, 1.1, 256)[None]
    assert float((round_trip(values, kind) - values).abs().max()) < 0.5 * 1.1 / levels


@pytest.mark.parametrize("size", [1e-30, 1e-12, 3e-8, 1e-6, 1e-5, 1e5])
@pytest.mark.parametrize("kind", KINDS)
def test_any_size_is_finite_and_no_worse_than_zero(kind, size):
    values = numbers("normal")[: 1 << 12]
    found = round_trip(values * size, kind)
    assert bool(torch.isfinite(found).all())
    rest = (found.double() - values.double() * size).square().sum() / (values.double() * size).square().sum()
    assert float(rest) <= 1.0
    if size >= 1e-5:
        assert float(rest) < 2 * share(values, kind)  # measured at 1e-5, where steps are subnormal: 1.51 times, Q6_K
    assert size > 1e-12 or not found.any()


@pytest.mark.parametrize("kind", [*AFFINE, *SYMMETRIC])
def test_a_large_weight_does_not_spill_into_other_sub_blocks(kind):
    """1000 in one sub-block, 0.02 with a little noise in the others, whose scales and mins all come out as 0."""
    values = 0.02 + 1e-3 * numbers("normal")[:256].view(1, 256)
    values[0, 7] = 1000.0
    for sign in (1, -1):
        found = round_trip(sign * values, kind)
        assert abs(float(found[0, 7]) - sign * 1000) < 1.0  # 2^-11 of rounding, and half a level between scale and min
        assert not found[0, 32:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_does_not_depend_on_the_others(kind):
    blocks = numbers("heavy")[: 1 << 11].view(-1, kquants.BLOCK_WEIGHTS[kind])
    changed = torch.cat([blocks[:1] * 1e3, torch.zeros_like(blocks[:1]), blocks[2:]])
    assert torch.equal(kquants.encode(blocks, kind)[2:], kquants.encode(changed, kind)[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_encoded_as_fp32(dtype):
    blocks = numbers("normal")[: 1 << 11].view(-1, 256).to(dtype)
    assert torch.equal(kquants.encode(blocks, "Q4_K"), kquants.encode(blocks.float(), "Q4_K"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_no_byte(kind):
    assert kquants.encode(torch.zeros(0, kquants.BLOCK_WEIGHTS[kind]), kind).shape == (0, kquants.BLOCK_BYTES[kind])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_are_refused(kind, value):
    blocks = torch.ones(2, kquants.BLOCK_WEIGHTS[kind])
    blocks[1, 3] = value
    with pytest.raises(ValueError, match=f"{kind} cannot encode NaN or infinite"):
        kquants.encode(blocks, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_beyond_fp16_steps_are_refused(kind):
    blocks = torch.zeros(2, kquants.BLOCK_WEIGHTS[kind])
    blocks[1, 3] = -3e38
    with pytest.raises(ValueError, match="fp16 scales end at 65504"):
        kquants.encode(blocks, kind)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no encoder for 'Q4_1': use one of Q2_K"):
        kquants.encode(torch.zeros(1, 256), "Q4_1")
    for blocks in (torch.zeros(1, 128), torch.zeros(256), torch.zeros(1, 256, dtype=torch.int32)):
        with pytest.raises(ValueError, match="Q4_K encodes float"):
            kquants.encode(blocks, "Q4_K")


def test_steps_of_fp16_reach_their_peak():
    """By hand, in units of 2^-24: 15 / 10 = 1.5 is 2 nearest even; 14 / 10 = 1.4 rounds to 1, which 10 steps leave 4 short."""
    unit = 2.0**-24
    found = kquants.fp16_step(torch.tensor([15, 14, -14, 10.4, 0, 1e-3]) * unit, 10).float() / unit
    assert found.tolist() == [2, 2, -2, 1, 0, 1]
