"""The encoder: errors against plain rounding and separate scales, hard inputs, and independence of rows."""

import logging

import pytest
import torch

from dpamoe.encode import CHUNK_WEIGHTS, assign, check_encodable, check_weight, encode
from dpamoe.kernels.grouped import decode
from dpamoe.kernels.layout import unpack_signs
from dpamoe.sites import ExpertWeights
from dpamoe.spec import EncodeSpec

GROUP = 64
KINDS = ("gate_proj", "up_proj", "down_proj")


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def squared(values):
    """Summed squares of each expert, fp64 [E]."""
    return values.double().square().flatten(1).sum(1)


def prefix_errors(weight, encoded):
    """Squared error of each expert with 1 … C planes, relative to the weight, fp64 [E, C]."""
    planes = range(1, len(encoded.planes) + 1)
    return torch.stack([squared(decode(encoded, k) - weight.float()) for k in planes], 1) / squared(weight)[:, None]


def rounding_errors(weight, bits):
    """Relative squared error of rounding to 2^bits levels per group: a min-max grid, shrunk by the best of 11 factors."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    best = torch.full(groups.shape[:2], float("inf"), dtype=torch.float64)
    for step in range(11):
        clip = 1 - 0.05 * step
        unit = (high - low) * clip / (2**bits - 1)
        levels = ((groups - low * clip) / unit).round().clamp(0, 2**bits - 1)
        best = torch.minimum(best, (levels * unit + low * clip - groups).double().square().sum(2))
    return best.sum(1) / squared(weight)


def fitted(groups, codes):
    """Least-squares scales [N, k] and offset [N] of codes [N, g, k]."""
    basis = torch.cat([codes, torch.ones_like(groups)[..., None]], 2)
    gram = basis.mT @ basis
    gram.diagonal(dim1=1, dim2=2).mul_(1 + 1e-6)  # two equal planes
    solved = torch.linalg.solve(gram, basis.mT @ groups[..., None])[..., 0]
    return solved[:, :-1], solved[:, -1]


def separate_scale_errors(weight, planes, rounds=10):
    """Relative squared error of AnyBCQ, whose planes are nested but whose scales are those of this precision alone.

    Two planes: greedy, then by turns least squares and nearest levels. Each further plane: the sign of what is left, by
    turns with least squares over all scales; earlier codes stay.
    """
    groups = weight.reshape(-1, GROUP)
    left = groups - groups.mean(1, keepdim=True)
    first = left.sign()
    codes = torch.stack([first, (left - left.abs().mean(1, keepdim=True) * first).sign()], 2)
    every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 2)
    for _ in range(rounds):
        scales, offset = fitted(groups, codes)
        distance = (groups[..., None] - (scales @ every.T + offset[:, None])[:, None]).abs()
        codes = every[distance.argmin(2)]
    for _ in range(planes - 2):
        scales, offset = fitted(groups, codes)
        for _ in range(rounds):
            left = groups - offset[:, None] - (codes * scales[:, None, : codes.shape[2]]).sum(2)
            grown = torch.cat([codes, torch.where(left < 0, -1.0, 1.0)[..., None]], 2)
            scales, offset = fitted(groups, grown)
        codes = grown
    scales, offset = fitted(groups, codes)
    errors = (groups - offset[:, None] - (codes * scales[:, None]).sum(2)).double().square()
    return errors.view(weight.shape[0], -1).sum(1) / squared(weight)


def check_targets(weights):
    """Check the errors of stacked weights against the targets of the design, mean over experts of the ratio."""
    ratios = {"k=4 / RTN": [], "k=2 / RTN": [], "k=8 / RTN": [], "k=4 / separate": []}
    for weight in weights:
        errors = prefix_errors(weight, encode(weight, EncodeSpec(group_size=GROUP)))
        assert (errors[:, 2:] < errors[:, 1:-1]).all()  # never more with one plane more, k = 2 … 8
        for k in (2, 4, 8):
            ratios[f"k={k} / RTN"] += (errors[:, k - 1] / rounding_errors(weight, k)).tolist()
        ratios["k=4 / separate"] += (errors[:, 3] / separate_scale_errors(weight, 4)).tolist()
    mean = {name: sum(values) / len(values) for name, values in ratios.items()}
    assert mean["k=4 / RTN"] <= 1.01
    assert mean["k=2 / RTN"] <= 1.16
    assert mean["k=8 / RTN"] <= 0.97
    assert mean["k=4 / separate"] <= 0.65


def test_targets_on_gaussian_weights():
    check_targets([gaussian(3, 128, 384), gaussian(3, 384, 128, seed=1)])


def test_targets_on_trained_weights(small_weights):
    check_targets([small_weights(layer, kind, (1, 17)) for layer in (0, 2, 4) for kind in KINDS])


def test_tied_scales_at_four_bits_and_a_half(small_weights):
    spec = EncodeSpec(group_size=32, scale_mode="tied")
    weights = [small_weights(layer, kind, (1, 17)) for layer in (0, 2, 4) for kind in KINDS]
    errors = torch.cat([prefix_errors(weight, encode(weight, spec)) for weight in weights])
    assert 10 * errors[:, 3].mean().log10() <= -21.5
    assert (errors[:, 1:] < errors[:, :-1]).all()


@pytest.mark.parametrize("mode", ["shared", "tied"])
@pytest.mark.parametrize(
    "in_features, group_size", [(20, 8), (38, 38), (38, -1), (128, 38), (128, 96), (640, 128), (704, 128), (1408, 128), (24, 2)]
)
def test_groups_that_do_not_divide_decode_as_well(in_features, group_size, mode):
    weight = gaussian(2, 6, in_features)
    encoded = encode(weight, EncodeSpec(group_size=group_size, scale_mode=mode))
    errors = prefix_errors(weight, encoded)
    groups = -(-in_features // (in_features if group_size == -1 else group_size))
    assert encoded.offset.shape == (2, 6, groups) and encoded.planes[0].shape == (2, 6, -(-in_features // 8))
    assert (errors[:, 1] < 0.2).all() and (errors[:, 3] < 0.02).all() and (errors[:, 7] < 1e-4).all()
    assert (errors[:, 2:] <= errors[:, 1:-1]).all()  # two weights to a group: exact but for fp16 from k = 3 on


def test_spare_bits_are_zero():
    encoded = encode(gaussian(2, 6, 20), EncodeSpec(group_size=8))
    assert all((plane[..., -1] < 16).all() for plane in encoded.planes)


def test_padding_of_a_group_does_not_weigh():
    weight = gaussian(1, 6, 24) + 0.1  # far from 0, so that zeros in the padded half would be seen
    padded, alone = encode(weight, EncodeSpec(group_size=16)), encode(weight[..., 16:], EncodeSpec(group_size=8))
    for k in range(2, 9):
        torch.testing.assert_close(decode(padded, k)[..., 16:], decode(alone, k), rtol=2e-3, atol=0)


def test_group_wider_than_the_inputs_is_refused():
    with pytest.raises(ValueError, match=r"group_size 128 .* 20 inputs of some\.weight.* -1 for whole rows"):
        encode(gaussian(1, 2, 20), EncodeSpec(group_size=128), "some.weight")


def test_padded_groups_are_announced(caplog):
    weights = ExpertWeights(gaussian(2, 4, 704), gaussian(2, 704, 128), None, None)
    with caplog.at_level(logging.WARNING, logger="dpamoe"):
        check_encodable(weights, EncodeSpec(group_size=128), "model.layers.3.mlp.experts")
    (message,) = caplog.messages
    for part in ("model.layers.3.mlp.experts (up)", "128", "704", "64"):
        assert part in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_named_and_counted(bad, dtype):
    weight = gaussian(4, 5, 16).to(dtype)
    weight[2, 1, 3] = weight[2, 4, 0] = weight[3, 0, 0] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.1\.up holds 3 .* \(experts 2, 3\)"):
        encode(weight, EncodeSpec(group_size=8), "model.layers.1.up")


@pytest.mark.parametrize("weight", [torch.zeros(3, 8), torch.zeros(2, 3, 8, dtype=torch.int8)])
def test_other_tensors_are_refused(weight):
    with pytest.raises(ValueError, match=r"must be float \[experts, out, in\]"):
        check_weight(weight, EncodeSpec(group_size=8), "w")


def same(left, right):
    """Whether two encoded weights are equal to the bit."""
    pairs = zip(left.tensors().values(), right.tensors().values(), strict=True)
    return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)


def part(encoded, experts, rows=slice(None)):
    """Tensors of some experts and rows of an encoded weight, by name."""
    return {n: t[experts] if t.dim() == 1 else t[experts, rows] for n, t in encoded.tensors().items()}


@pytest.mark.parametrize("mode", ["shared", "tied"])
def test_encoding_is_deterministic_and_reports_progress(mode):
    spec, done = EncodeSpec(group_size=16, scale_mode=mode), []
    weight = gaussian(3, 400, 512)
    assert weight.numel() > CHUNK_WEIGHTS  # more than one step
    assert same(encode(weight, spec, progress=done.append), encode(weight.clone(), spec))
    assert sum(done) == weight.numel() and len(done) > 1


@pytest.mark.parametrize("mode", ["shared", "tied"])
@pytest.mark.parametrize("in_features", [512, 500])
def test_rows_and_experts_do_not_touch_each_other(in_features, mode):
    spec = EncodeSpec(group_size=128, scale_mode=mode)
    weight = gaussian(3, 400, in_features)
    weight[0] *= 30
    whole = encode(weight, spec)
    for expert in range(3):
        alone = encode(weight[expert : expert + 1], spec).tensors()
        assert all(torch.equal(alone[name], t) for name, t in part(whole, slice(expert, expert + 1)).items())
    if mode == "shared":  # tied scales are relative to the largest weight of the expert
        rows = encode(weight[:, 37:40], spec).tensors()
        assert all(torch.equal(rows[name], t) for name, t in part(whole, slice(None), slice(37, 40)).items())


@pytest.mark.parametrize("mode", ["shared", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_equal_their_fp32_copies(dtype, mode):
    weight = gaussian(2, 16, 64).to(dtype)
    spec = EncodeSpec(group_size=32, scale_mode=mode)
    assert same(encode(weight, spec), encode(weight.float(), spec))


def test_strided_weights_equal_their_copies():
    weight = gaussian(2, 64, 16).transpose(1, 2)
    assert same(encode(weight, EncodeSpec(group_size=32)), encode(weight.contiguous(), EncodeSpec(group_size=32)))


@pytest.mark.parametrize("mode", ["shared", "tied"])
@pytest.mark.parametrize("scale", [1e-7, 1e4, 1e-30, 1e30])
def test_tiny_and_huge_weights_lose_no_more(scale, mode):
    weight, spec = gaussian(2, 32, 128), EncodeSpec(group_size=64, scale_mode=mode)
    encoded = encode(weight * scale, spec)
    rescaled = torch.stack([squared(decode(encoded, k) / scale - weight) for k in range(1, 9)], 1) / squared(weight)[:, None]
    torch.testing.assert_close(rescaled, prefix_errors(weight, encode(weight, spec)), rtol=0.01, atol=0)


@pytest.mark.parametrize("mode", ["shared", "tied"])
def test_zero_experts_and_zero_rows_decode_to_zero(mode):
    weight = gaussian(3, 4, 32)
    weight[1], weight[2, 3] = 0, 0
    encoded = encode(weight, EncodeSpec(group_size=16, scale_mode=mode))
    for k in range(1, 9):
        decoded = decode(encoded, k)
        assert torch.isfinite(decoded).all()
        assert not decoded[1].any() and not decoded[2, 3].any()
    everything = encode(torch.zeros(2, 3, 16), EncodeSpec(group_size=16, scale_mode=mode))
    assert not decode(everything, 8).any()


@pytest.mark.parametrize("value", [0.3, -0.3, 1.0, -2e-3, 1234.5, 1e-7])
def test_constant_rows_are_exact(value):
    weight = torch.cat([torch.full((1, 2, 32), value), torch.full((1, 2, 32), -value)])
    encoded = encode(weight, EncodeSpec(group_size=16))
    exact = weight.to(encoded.offset.dtype).float()
    assert all(torch.equal(decode(encoded, k), exact) for k in range(1, 9))


@pytest.mark.parametrize("value", [0.3, -0.3, 1234.5, 1e-7])
def test_constant_rows_with_tied_scales_are_close(value):
    encoded = encode(torch.full((1, 2, 32), value), EncodeSpec(group_size=16, scale_mode="tied"))
    torch.testing.assert_close(decode(encoded, 8), torch.full((1, 2, 32), value), rtol=2**-7, atol=0)


def test_one_expert_of_another_size_keeps_one_format():
    weight = gaussian(3, 8, 32)
    weight[1] *= 1e-6
    encoded = encode(weight, EncodeSpec(group_size=16))
    assert {tensor.dtype for tensor in (*encoded.scales, encoded.offset)} == {torch.float32}
    errors = prefix_errors(weight, encoded)
    torch.testing.assert_close(errors[1, 1:], errors[0, 1:], rtol=0.5, atol=0)  # not lost beside the large ones


@pytest.mark.parametrize("k_min, k_max", [(1, 8), (2, 4), (1, 1), (8, 8), (3, 5)])
@pytest.mark.parametrize("mode", ["shared", "tied"])
def test_ranges_of_planes(k_min, k_max, mode):
    weight = gaussian(2, 32, 128)
    encoded = encode(weight, EncodeSpec(group_size=64, k_min=k_min, k_max=k_max, scale_mode=mode))
    assert len(encoded.planes) == k_max
    errors = prefix_errors(weight, encoded)
    assert (errors[:, k_min:k_max] < errors[:, k_min - 1 : k_max - 1]).all()
    assert (errors[:, -1] < {1: 0.5, 4: 0.01, 5: 0.003, 8: 1e-4}[k_max]).all()
    default = prefix_errors(weight, encode(weight, EncodeSpec(group_size=64, scale_mode=mode)))
    if (k_min, k_max) in ((2, 4), (3, 5)) and mode == "shared":  # a range of its own fits its planes better
        assert (errors[:, -1] <= default[:, k_max - 1] * 1.02).all()


def test_a_larger_beta_favours_the_last_plane():
    weight = gaussian(2, 64, 128)
    few, many = (prefix_errors(weight, encode(weight, EncodeSpec(group_size=64, beta=beta))) for beta in (1.25, 4.0))
    assert (few[:, 1] < many[:, 1]).all() and (few[:, 7] > many[:, 7]).all()


def test_the_start_shrinks_the_grid_where_that_is_better():
    weight = gaussian(1, 64, 128)
    start = encode(weight, EncodeSpec(group_size=64, k_min=2, k_max=2, iterations=0))
    groups = weight.view(-1, 64)
    low, high = groups.aminmax(dim=1)
    grid = (high - low)[:, None] / 2 * torch.tensor([0.5, 0.25])
    whole = assign(groups, grid, (high + low) / 2)[1].double().sum(0) / squared(weight)
    assert prefix_errors(weight, start)[0, 1] < 0.95 * whole[1]  # measured 0.90


def test_more_iterations_never_hurt():
    weight = gaussian(2, 64, 128)
    prefix = 2.0 ** torch.arange(-7, 1).double() * (torch.arange(1, 9) >= 2)
    errors = [prefix_errors(weight, encode(weight, EncodeSpec(group_size=64, iterations=n))) @ prefix for n in (0, 1, 8)]
    assert (errors[1] < errors[0]).all() and (errors[2] < errors[1]).all()


def test_assign_finds_the_best_of_all_codes():
    scales = torch.tensor([[0.5, 0.26, 0.125, 0.06, 0.03]]) * torch.tensor([[1.0], [3.0]])
    groups, offset = gaussian(2, 40) * 25, torch.tensor([0.01, -0.2])
    codes, errors = assign(groups, scales, offset)
    every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 5)
    levels = scales @ every.T + offset[:, None]
    nearest = (groups[..., None] - levels[:, None]).abs().amin(2)
    left = groups - offset[:, None] - torch.einsum("png,np->ng", codes, scales)
    torch.testing.assert_close(left.abs(), nearest, rtol=0, atol=1e-6)
    torch.testing.assert_close(errors[:, -1], nearest.square().sum(1), rtol=1e-4, atol=1e-7)


def test_planes_hold_the_codes_of_the_rounded_scales():
    weight = gaussian(2, 5, 32)
    encoded = encode(weight, EncodeSpec(group_size=16))
    scales = torch.stack([scale.float() for scale in encoded.scales], -1).view(-1, 8)
    codes, _ = assign(weight.view(-1, 16), scales, encoded.offset.float().flatten())
    for plane, code in zip(encoded.planes, codes, strict=True):
        assert torch.equal(unpack_signs(plane, 32), code.view(2, 5, 32))
    assert (scales[:, :-1] >= scales[:, 1:]).all()
