"""The Triton encoders against the torch ones: errors of every prefix, hard inputs, independence of rows."""

import os
from dataclasses import replace

import pytest
import torch

from dpamoe import encode as encode_module
from dpamoe.encode import assign, encode
from dpamoe.kernels.grouped import decode
from dpamoe.kernels.layout import EncodedWeight, groups_of, unpack_signs
from dpamoe.spec import EncodeSpec

triton_encode = pytest.importorskip("dpamoe.kernels.triton_encode")
triton_encode_tied = pytest.importorskip("dpamoe.kernels.triton_encode_tied")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 before triton is imported"
)
MODES = pytest.mark.parametrize("mode", ["shared", "tied"])
MORE = 1.005  # squared error of an encoder beside the other's, which sums in another order
ROWS = 128 if INTERPRETED else 2048  # the more, the closer the encoders, which at k = 8 may end in other minima of a group
BRIEF = {"k_min": 1, "k_max": 3, "iterations": 2}  # the interpreter takes seconds for the whole


@pytest.fixture(autouse=True)
def large_programs(monkeypatch):
    """Fewer programs, which the interpreter runs one by one at the same price for any size."""
    if INTERPRETED:
        monkeypatch.setattr(triton_encode, "THREADS", 4096)
        monkeypatch.setattr(triton_encode, "WRITE_BYTES", 4096)


def random(*shape, degrees=None, seed=0):
    """Normal weights, or of Student's t distribution."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if degrees is not None:
        normal *= (torch.randn(degrees, *shape, generator=generator, dtype=torch.float64).square().mean(0)).rsqrt()
    return (normal * 0.02).float().to(DEVICE)


def in_triton(weight, spec, progress=None):
    """Encode by the Triton kernels into tensors that hold something else before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "has_triton", lambda device: True)
        patch.setattr(encode_module, "_empty", poisoned(encode_module._empty))
        patch.setattr(encode_module, "_encode_rows", None)  # the torch encoder
        return encode(weight, spec, progress=progress)


def poisoned(make):
    """The same tensors, filled with NaN or 77."""

    def made(*args):
        result = make(*args)
        for tensor in (*result.planes, *result.scales, result.offset):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        return result

    return made


def in_torch(weight, spec):
    """Encode by torch operations, on the CPU."""
    return encode(weight.cpu(), spec)


def on_cpu(encoded):
    def move(tensors):
        return [tensor.cpu() for tensor in tensors]

    unit = None if encoded.unit is None else encoded.unit.cpu()
    return replace(encoded, planes=move(encoded.planes), scales=move(encoded.scales), offset=encoded.offset.cpu(), unit=unit)


def errors(weight, encoded):
    """Squared error of each expert with 1 ... C planes, fp64 [E, C]."""
    encoded, weight = on_cpu(encoded), weight.cpu().double()
    return torch.stack([(decode(encoded, k) - weight).square().sum((1, 2)) for k in range(1, len(encoded.planes) + 1)], 1)


def check_as_good(weight, spec):
    """Check both encoders against each other, prefix by prefix; the Triton one's result."""
    ours = in_triton(weight, spec)
    theirs = in_torch(weight, spec)
    assert {n: (t.dtype, t.shape) for n, t in ours.tensors().items()} == {
        n: (t.dtype, t.shape) for n, t in theirs.tensors().items()
    }
    found, wanted = (errors(weight, encoded)[:, spec.k_min - 1 :] for encoded in (ours, theirs))
    assert (found <= wanted * MORE).all() and (wanted <= found * MORE).all()
    assert (found[:, 1:] <= found[:, :-1]).all()
    return ours


def same(left, right):
    """Whether two encoded weights are equal to the bit."""
    pairs = zip(left.tensors().values(), right.tensors().values(), strict=True)
    return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)


@MODES
def test_errors_of_normal_and_heavy_tailed_weights(mode):
    weight = torch.cat([random(1, ROWS, 200), random(1, ROWS, 200, degrees=4)])
    check_as_good(weight, EncodeSpec(group_size=64, scale_mode=mode))


@MODES
def test_errors_of_bf16_weights(mode):
    check_as_good(random(1, ROWS, 256).bfloat16(), EncodeSpec(group_size=128, scale_mode=mode))


def test_errors_of_fp16_weights():
    check_as_good(random(2, 32, 64).half(), EncodeSpec(group_size=32, **BRIEF))


@MODES
@pytest.mark.parametrize(
    "in_features, group_size", [(20, 8), (38, 38), (38, -1), (128, 38), (200, 96), (77, 19), (24, 2), (5, 5), (640, 640)]
)
def test_groups_of_any_width(in_features, group_size, mode):
    check_as_good(random(2, 40, in_features), EncodeSpec(group_size=group_size, scale_mode=mode, **BRIEF))


@pytest.mark.parametrize("in_features, group_size", [(20, 8), (77, 19)])
def test_planes_hold_the_codes_of_the_stored_scales(in_features, group_size):
    weight = random(2, 5, in_features)
    encoded = on_cpu(in_triton(weight, EncodeSpec(group_size=group_size, **BRIEF)))
    groups = groups_of(in_features, group_size)
    padded = torch.nn.functional.pad(weight.cpu(), (0, groups * group_size - in_features)).view(-1, group_size)
    scales = torch.stack([scale.float() for scale in encoded.scales], -1).view(-1, 3)
    codes, _ = assign(padded, scales, encoded.offset.float().flatten())
    for plane, code in zip(encoded.planes, codes, strict=True):
        assert torch.equal(unpack_signs(plane, in_features), code.view(2, 5, -1)[..., :in_features])
        assert (plane[..., -1] < 1 << (in_features % 8)).all()  # spare bits
    assert (scales[:, :-1] >= scales[:, 1:]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"k_min": 1, "k_max": 1},
        {"k_min": 4, "k_max": 4},
        {"k_min": 3, "k_max": 5, "beta": 1.25},
        {"k_min": 1, "k_max": 4, "beta": 4.0},
        {"k_max": 4, "iterations": 0},
    ],
)
def test_settings(changes):
    weight, spec = random(2, 32, 128), EncodeSpec(group_size=64, **{"iterations": 3, **changes})
    check_as_good(weight, spec)
    if spec.k_min < spec.k_max:
        check_as_good(weight, replace(spec, scale_mode="tied"))


@pytest.mark.parametrize("value", [0.3, -0.3, 1234.5, -2e-3, 1e-7])
def test_constant_groups_are_exact(value):
    weight = random(2, 3, 48) * abs(value)
    weight[0, :, :16], weight[1, 1] = value, -value
    encoded = on_cpu(in_triton(weight, EncodeSpec(group_size=16, **BRIEF)))
    exact = weight.cpu().to(encoded.offset.dtype).float()
    for k in range(1, 4):
        decoded = decode(encoded, k)
        assert torch.equal(decoded[0, :, :16], exact[0, :, :16]) and torch.equal(decoded[1, 1], exact[1, 1])
        assert torch.isfinite(decoded).all()


def test_constant_groups_with_tied_scales_are_close():
    weight = torch.cat([torch.full((1, 2, 32), 0.3), torch.full((1, 2, 32), -1234.5)]).to(DEVICE)
    encoded = on_cpu(in_triton(weight, EncodeSpec(group_size=16, scale_mode="tied")))
    torch.testing.assert_close(decode(encoded, 8), weight.cpu(), rtol=2**-7, atol=0)


@MODES
def test_zeros_stay_zero(mode):
    weight = random(3, 4, 32)
    weight[1], weight[2, 3] = 0, 0
    decoded = decode(on_cpu(in_triton(weight, EncodeSpec(group_size=16, scale_mode=mode, **BRIEF))), 3)
    assert torch.isfinite(decoded).all()
    assert not decoded[1].any() and not decoded[2, 3].any() and decoded[0].any()


@MODES
@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e6, 1e30])
def test_tiny_and_huge_weights_lose_no_more(scale, mode):
    weight, spec = random(2, 16, 64), EncodeSpec(group_size=32, scale_mode=mode, **BRIEF)
    encoded = on_cpu(in_triton(weight * scale, spec))
    left = torch.stack([(decode(encoded, k).double() / scale - weight.cpu()).square().sum((1, 2)) for k in range(1, 4)], 1)
    torch.testing.assert_close(left, errors(weight, in_torch(weight, spec)), rtol=0.01, atol=0)


@MODES
def test_rows_and_experts_do_not_touch_each_other(mode, monkeypatch):
    spec = EncodeSpec(group_size=32, scale_mode=mode, **BRIEF)
    weight = random(3, 13, 100)
    weight[0] *= 30
    whole = in_triton(weight, spec)
    alone = in_triton(weight[1:2], spec)
    assert same(part(whole, slice(1, 2)), alone)
    if mode == "shared":  # tied scales are relative to the largest weight of the expert
        assert same(part(whole, slice(2, 3), slice(7, 8)), in_triton(weight[2:3, 7:8], spec))
    monkeypatch.setattr(triton_encode, "THREADS", 64)
    monkeypatch.setattr(triton_encode, "WRITE_BYTES", 128)
    assert same(in_triton(weight, spec), whole)


def part(encoded, experts, rows=slice(None)):
    """Some experts and rows of an encoded weight."""
    unit = None if encoded.unit is None else encoded.unit[experts]
    planes, scales = ([tensor[experts, rows] for tensor in tensors] for tensors in (encoded.planes, encoded.scales))
    return EncodedWeight(planes, scales, encoded.offset[experts, rows], unit, encoded.in_features, encoded.group_size)


def test_strided_weights_equal_their_copies():
    spec = EncodeSpec(group_size=32, **BRIEF)
    for weight in (random(2, 64, 16).transpose(1, 2), random(4, 16, 64)[::2], random(2, 16, 96)[..., 16:80]):
        assert same(in_triton(weight, spec), in_triton(weight.contiguous(), spec))


def test_launches_report_progress(monkeypatch):
    weight, spec, done = random(5, 6, 40), EncodeSpec(group_size=16, **BRIEF), []
    whole = in_triton(weight, spec, done.append)
    assert done == [weight.numel()]
    monkeypatch.setattr(triton_encode, "LAUNCH_WEIGHTS", 500)
    assert same(in_triton(weight, spec, done.append), whole)
    assert done[1:] == [480, 480, 240]


def test_other_weights_are_left_to_torch(monkeypatch):
    assert triton_encode.supports(torch.empty(1, 2, 4096), -1)
    assert not triton_encode.supports(torch.empty(1, 2, 4097), -1)
    assert not triton_encode.supports(torch.empty(1, 2, 64, dtype=torch.float64), 32)
    assert not triton_encode.supports(torch.empty(0, 2, 64), 32)
    weight, spec = random(1, 3, 64).cpu(), EncodeSpec(group_size=32, **BRIEF)
    expected = encode(weight, spec)
    monkeypatch.setattr(encode_module, "has_triton", lambda device: True)
    assert same(encode(weight.double(), spec), expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@MODES
def test_weights_on_a_cuda_device_are_encoded_by_these_kernels(mode):
    weight, spec = random(2, 64, 256), EncodeSpec(group_size=64, scale_mode=mode)
    assert same(encode(weight, spec), in_triton(weight, spec))
