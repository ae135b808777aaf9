"""Static formats: what is stored by hand, llama.cpp's choice of types, error against round to nearest, whole models."""

import sys

import pytest
import torch
from safetensors import safe_open
from torch import nn

from dpamoe import calibration, static
from dpamoe.passes.find import find_sites
from dpamoe.sites import ExpertLayout, Site, Stack, gather

OWN = [name for name in static.FORMATS if name not in static.LLAMA]
JETMOE = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "kv_channels": 16}

# Squared error of a type of llama.cpp over that of round to nearest with as many bits per weight or slightly more: name, role,
# rtn, its group size; then measured on the experts of the shipped model, on normal, and on heavy-tailed numbers.
AGAINST_RTN = [
    ("q2_k", "up", "rtn2", 48, (0.396, 0.396, 0.264)),  # 2.625 bits, rtn 2.667
    ("q2_k", "down", "rtn3", 64, (0.591, 0.592, 0.449)),  # Q3_K: 3.4375, 3.5
    ("q4_k_m", "up", "rtn4", 64, (0.627, 0.627, 0.480)),  # 4.5, 4.5
    ("q5_k_m", "up", "rtn5", 64, (0.662, 0.661, 0.540)),  # 5.5, 5.5
    ("q6_k", "up", "rtn6", 56, (0.686, 0.683, 0.719)),  # 6.5625, 6.571
    ("q8_0", "up", "rtn8", 64, (1.029, 1.027, 1.239)),  # 8.5, 8.5: symmetric, so the largest code is rarely reached
]


def random_weight(experts=2, out_features=6, in_features=256, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    return torch.randn(experts, out_features, in_features, generator=random).to(dtype)


def requantise(weight, name, role="up", layer=0, layers=1, group_size=128):
    return static.requantise(weight, name, role, layer, layers, group_size)


def squared_error(weight, name, **more):
    return float((requantise(weight, name, **more).weight - weight).square().sum())


@pytest.fixture(scope="module")
def samples(tiny_dir):
    """Name to weights [1, 21, 16128], rows that all blocks and groups divide: trained, normal, Student's t of three degrees."""
    count, random = 21 * 16128, torch.Generator().manual_seed(0)
    with safe_open(tiny_dir / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118  not a dict
        trained = torch.cat([file.get_tensor(name).float().flatten() for name in names])[:count]
    normal = torch.randn(count, generator=random)
    heavy = normal / torch.randn(3, count, generator=random).square().mean(0).sqrt()
    return {name: flat.view(1, 21, 16128) for name, flat in {"tiny": trained, "normal": normal, "heavy": heavy}.items()}


# ---- names


def test_all_names_are_allowed():
    pytest.importorskip("gguf")
    static.check_formats(static.FORMATS)
    mixed, pure = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0"), ("q2_k_pure", "q3_k_pure", "q4_k_pure", "q5_k_pure")
    assert static.FORMATS[:11] == (*mixed, *pure, "rtn2") and len(static.FORMATS) == 24


@pytest.mark.parametrize("name", ["q4_k", "Q4_K_M", "rtn1", "rtn9", "hqq", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=f"unknown format '{name}': use one of q2_k, q3_k_m, .*hqq8"):
        static.check_formats(["rtn4", name])


def test_without_gguf_only_its_formats_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as where it is not installed
    static.check_formats(OWN)
    assert requantise(random_weight(), "rtn4").bits == 4.25
    for refused in (lambda: static.check_formats(["rtn4", "q6_k"]), lambda: requantise(random_weight(), "q6_k")):
        with pytest.raises(ValueError, match=r'q6_k needs the package gguf: pip install "dpamoe\[eval\]"'):
            refused()


# ---- llama.cpp's choice of types


@pytest.mark.parametrize(
    "name, layers, expected",
    [
        ("q2_k", 3, ["Q3_K"] * 3),
        ("q3_k_m", 4, ["Q4_K"] * 4),
        ("q3_k_m", 32, ["Q5_K"] * 2 + ["Q4_K"] * 30),
        ("q4_k_m", 1, ["Q6_K"]),  # from 7 * 1 // 8 = 0 on
        ("q4_k_m", 4, ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]),  # the third by threes, the fourth from 7 * 4 // 8 = 3 on
        ("q4_k_m", 16, ["Q6_K" if layer in (0, 1, 4, 7, 10, 13, 14, 15) else "Q4_K" for layer in range(16)]),
        ("q5_k_m", 16, ["Q6_K" if layer in (0, 1, 4, 7, 10, 13, 14, 15) else "Q5_K" for layer in range(16)]),
        ("q6_k", 2, ["Q6_K"] * 2),
        ("q8_0", 2, ["Q8_0"] * 2),
        ("q2_k_pure", 3, ["Q2_K"] * 3),
        ("q3_k_pure", 32, ["Q3_K"] * 32),
        ("q4_k_pure", 16, ["Q4_K"] * 16),
        ("q5_k_pure", 16, ["Q5_K"] * 16),
    ],
)
def test_types_of_down_by_hand(name, layers, expected):
    assert [static.tensor_type(name, "down", layer, layers) for layer in range(layers)] == expected
    assert {static.tensor_type(name, "up", layer, layers) for layer in range(layers)} == {static.LLAMA[name]}


@pytest.mark.parametrize(
    "name, up, down",
    [
        ("q2_k", 84 / 32, 110 / 32), ("q3_k_m", 110 / 32, 144 / 32), ("q4_k_m", 144 / 32, 210 / 32),
        ("q5_k_m", 176 / 32, 210 / 32), ("q6_k", 210 / 32, 210 / 32), ("q8_0", 34 / 4, 34 / 4),
        ("q2_k_pure", 84 / 32, 84 / 32), ("q3_k_pure", 110 / 32, 110 / 32), ("q4_k_pure", 144 / 32, 144 / 32),
    ],
)  # fmt: skip
def test_bits_of_a_layer_that_takes_more(name, up, down):
    pytest.importorskip("gguf")
    found = [requantise(random_weight(), name, role, layer=7, layers=8) for role in static.ROLES]
    assert [one.bits for one in found] == [up, down] and {one.note for one in found} == {""}


def test_rows_that_are_no_whole_blocks_are_flattened_with_a_note():
    """Two rows of 384 are three blocks: the same as one row of 768; Q8_0 has blocks of 32."""
    pytest.importorskip("gguf")
    weight = random_weight(3, 2, 384)
    found = requantise(weight, "q4_k_m")
    assert found.note == "rows of 384 do not divide 256: flattened" and found.bits == 4.5
    assert torch.equal(found.weight, requantise(weight.view(3, 1, 768), "q4_k_m").weight.view(3, 2, 384))
    assert requantise(weight, "q8_0").note == ""
    assert requantise(random_weight(2, 8, 20), "q8_0").note == "rows of 20 do not divide 32: flattened"


@pytest.mark.parametrize(
    "name, role, other, bits, measured",
    [
        ("q2_k", "up", "IQ4_NL", 4.5, 6.4e-3), ("q2_k", "down", "IQ4_NL", 4.5, 6.4e-3), ("q4_k_m", "up", "Q5_0", 5.5, 2.2e-3),
        ("q5_k_m", "up", "Q5_1", 6.0, 1.66e-3), ("q6_k", "up", "Q8_0", 8.5, 3.6e-5),
    ],
)  # fmt: skip
def test_experts_that_are_no_whole_blocks_take_another_type_with_a_note(name, role, other, bits, measured):
    pytest.importorskip("gguf")
    found = requantise(random_weight(2, 3, 96), name, role)
    kind = static.tensor_type(name, role, 0, 1)
    assert found.note == f"rows of 96, and experts of 3 of them, do not divide 256: {other} for {kind}" and found.bits == bits
    assert float((found.weight - random_weight(2, 3, 96)).square().mean()) < 1.05 * measured


@pytest.mark.parametrize("name", ["q3_k_m", "q6_k", "q8_0"])
def test_what_no_block_divides_stays_in_half_precision(name):
    pytest.importorskip("gguf")
    weight = random_weight(2, 3, 20)
    found = requantise(weight, name)
    assert found.note.endswith(f"F16 for {static.LLAMA[name]}") and found.bits == 16
    assert torch.equal(found.weight, weight.half().float())


# ---- error


@pytest.mark.parametrize("name, role, rtn, group_size, measured", AGAINST_RTN)
def test_llama_cpp_against_round_to_nearest_of_equal_bits(samples, name, role, rtn, group_size, measured):
    pytest.importorskip("gguf")
    for weight, ratio in zip(samples.values(), measured, strict=True):
        found = squared_error(weight, name, role=role) / squared_error(weight, rtn, group_size=group_size)
        assert found < 1.02 * ratio
    assert requantise(weight[:, :1], name, role).bits <= requantise(weight[:, :1], rtn, group_size=group_size).bits


@pytest.mark.parametrize("bits, measured", [(2, 0.941), (3, 0.944), (4, 0.948), (8, 0.949)])
def test_half_quadratic_against_round_to_nearest(samples, bits, measured):
    weight = samples["tiny"][:, :8]
    assert squared_error(weight, f"hqq{bits}") / squared_error(weight, f"rtn{bits}") < 1.02 * measured


@pytest.mark.parametrize("method", ["rtn", "hqq"])
def test_each_bit_quarters_the_error(method):
    """Measured: 5.4 to 4.06 times less a bit (rtn), 5.6 to 3.99 (hqq); offsets in fp16 cost a little at eight."""
    errors = [squared_error(random_weight(), f"{method}{bits}") for bits in range(2, 9)]
    assert all(first > 3.8 * second for first, second in zip(errors[:-1], errors[1:], strict=True))


# ---- round to nearest and half-quadratic by hand


def test_round_to_nearest_by_hand():
    """Two bits: 0 to 3 with 1.4 and 1.6 between; -2 to 4 in steps of 2; a constant; the last group of a row has two."""
    row = [0.0, 1.4, 1.6, 3.0, -2.0, 0.9, 1.1, 4.0, 0.5, 0.5, 0.5, 0.5, 6.0, 9.0]
    found = requantise(torch.tensor([[row]]), "rtn2", group_size=4)
    assert found.weight[0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, -2.0, 0.0, 2.0, 4.0, 0.5, 0.5, 0.5, 0.5, 6.0, 9.0]
    assert found.bits == 2 + 32 * 4 / 14 and found.note == ""


def test_round_to_nearest_stays_within_half_a_step():
    weight = random_weight(3, 5, 96)
    for group_size, width in ((32, 32), (-1, 96)):
        found = requantise(weight, "rtn5", group_size=group_size)
        groups, rest = weight.view(-1, width), (found.weight - weight).view(-1, width)
        low, high = groups.aminmax(dim=1)
        rounding = 2.0**-11 * low.abs() + 2.0**-11 * (high - low)  # of offset and scale to fp16
        assert bool((rest.abs().amax(1) <= (high - low) / 62 + rounding).all())
        assert found.bits == 5 + 32 / width


def test_half_quadratic_moves_the_offset_by_hand():
    """Codes 0, 0, 0, 0, 3 in steps of 0.1 leave 0.02 in three of five: their mean over all, 0.012, becomes the offset."""
    weight = torch.tensor([[[0.0, 0.02, 0.02, 0.02, 0.3]]])
    near = {"rtol": 0, "atol": 1e-4}  # scale and offset are fp16
    torch.testing.assert_close(requantise(weight, "rtn2", group_size=5).weight[0, 0], torch.tensor([0, 0, 0, 0, 0.3]), **near)
    moved = torch.tensor([0.012, 0.012, 0.012, 0.012, 0.312])
    torch.testing.assert_close(requantise(weight, "hqq2", group_size=5).weight[0, 0], moved, **near)


def test_half_quadratic_takes_large_errors_out_by_hand():
    """Codes 0, 0, 0, 0, 3 in steps of 10: three errors of 2 - z go into the sparse part but for (2 - z)^-0.3 / beta of each.

    So z becomes 3 / 5 (z + (2 - z)^-0.3 / beta), where least squares alone would take 1.2 at once. The sum of errors, 6 - z, is
    least at the largest z.
    """
    offset, beta, offsets = 0.0, 10.0, []
    for _ in range(20):
        offsets.append(offset)
        offset, beta = 0.6 * (offset + (2 - offset) ** -0.3 / beta), beta * 1.01
    assert 0.11 < max(offsets) < 0.12
    found = requantise(torch.tensor([[[0.0, 2.0, 2.0, 2.0, 30.0]]]), "hqq2", group_size=5).weight[0, 0]
    torch.testing.assert_close(found, max(offsets) + torch.tensor([0.0, 0.0, 0.0, 0.0, 30.0]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e-4, 1e4])
@pytest.mark.parametrize("name", ["rtn2", "rtn8", "hqq4", "q3_k_m", "q8_0"])
def test_any_size_is_finite_and_no_worse_than_zero(name, size):
    if name in static.LLAMA:
        pytest.importorskip("gguf")
    weight = random_weight() * size
    weight[1, 2] = 0.0
    found = requantise(weight, name).weight
    assert bool(torch.isfinite(found).all()) and not found[1, 2].any()
    assert float((found.double() - weight).square().sum()) <= float(weight.double().square().sum())


# ---- what goes in and comes out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["q4_k_m", "rtn4", "hqq4"])
def test_dtype_and_shape_stay_and_the_input_too(name, dtype):
    pytest.importorskip("gguf")
    weight = random_weight(dtype=dtype)
    before = weight.clone()
    found = requantise(weight, name).weight
    assert found.dtype == dtype and found.shape == weight.shape and torch.equal(weight, before)
    assert torch.equal(found, requantise(weight.float(), name).weight.to(dtype))


@pytest.mark.parametrize("name", ["q4_k_m", "q8_0", "rtn4"])
def test_views_and_pieces_are_quantised_as_whole_tensors(name, monkeypatch):
    """A transposed view of [E, I, O]; and in steps of 512 weights instead of all at once."""
    pytest.importorskip("gguf")
    weight = random_weight()
    expected = requantise(weight, name).weight
    assert torch.equal(requantise(weight.mT.contiguous().mT, name).weight, expected)
    monkeypatch.setattr(static, "CHUNK_WEIGHTS", 512)
    found = requantise(weight, name).weight
    alike = (found - expected).abs() <= 1e-3 * expected.abs()
    assert float(alike.float().mean()) > 0.98  # measured 1; sums in another order may decide a tie between two fits


@pytest.mark.parametrize("name", ["rtn4", "q4_k_m", "q8_0"])
def test_weights_that_cannot_be_stored_are_refused(name):
    pytest.importorskip("gguf")
    weight = random_weight()
    weight[1, 3, 5] = float("nan")
    with pytest.raises(ValueError, match="expert 1 holds NaN or infinite weights"):
        requantise(weight, name)
    weight[1, 3, 5] = 1e30
    with pytest.raises(ValueError, match="more than the format can|fp16 scales end at 65504"):
        requantise(weight, name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "rtn"}, "unknown format 'rtn'"), ({"role": "gate"}, "role 'gate'"), 
        ({"layer": 3, "layers": 3}, "layer 3 of 3"),
        ({"group_size": 512}, "group_size is 512, the rows hold 256"), ({"group_size": 1}, "group_size is 1"),
        ({"weight": torch.zeros(4, 4)}, r"weight is torch.float32 \[4, 4\]"),
        ({"weight": torch.zeros(1, 4, 256, dtype=torch.int8)}, "weight is torch.int8"),
        ({"weight": torch.zeros(1, 4, 256, device="meta")}, "on meta: it must be float"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        requantise(**{"weight": random_weight(), "name": "rtn4", **change})


# ---- whole models


def sites_of(model):
    return find_sites(model, *calibration.example_batch(model, None)).sites


def copies(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family, changes", [("qwen3_moe", None), ("mixtral", None), ("gpt_oss", None), ("jetmoe", JETMOE)])
def test_only_expert_weights_of_a_model_change(random_model, random_ids, family, changes):
    """gpt_oss: transposed, interleaved, with biases; jetmoe: in a block that has no module of its own for them."""
    model = random_model(family, changes)
    sites, before, ids = sites_of(model), copies(model), random_ids(4, 32)
    held = [gather(model.get_submodule(site.path), site.layout, site.experts) for site in sites]
    expected = [[requantise(part.clone(), "rtn8", group_size=32).weight for part in (one.up, one.down)] for one in held]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    stored, notes = static.requantise_model(model, sites, "rtn8", 32)
    assert stored == 2 * 8 * 3 * 64 * 32 * 9 / 8 and notes == set()
    for site, (up, down) in zip(sites, expected, strict=True):
        found = gather(model.get_submodule(site.path), site.layout, site.experts)
        assert torch.equal(found.up, up) and torch.equal(found.down, down)
    names = {f"{site.path}.{name}" for site in sites for stack in (*site.layout.ups, site.layout.down) for name in stack.names}
    after = model.state_dict()
    assert {name for name, tensor in before.items() if not torch.equal(tensor, after[name])} == names
    with torch.no_grad():
        rest = (model(input_ids=ids).logits - logits).abs().amax(-1) / logits.abs().amax()
    assert float(rest.median()) < 0.01  # measured 0.001 to 0.003; a few tokens may take another expert


def test_weights_on_the_grid_change_nothing(random_model):
    """Weights that a format holds exactly come back exactly, so that all that changes is what it cannot hold."""
    model = random_model("gpt_oss")
    sites = sites_of(model)
    static.requantise_model(model, sites, "rtn4", 32)
    once = copies(model)
    static.requantise_model(model, sites, "rtn8", 32)  # a group of up to 16 values 17 levels apart
    after = model.state_dict()
    for name, tensor in once.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()))


def test_the_shipped_model_by_hand(tiny_model):
    """Four layers, 16 experts of 3 * 128 * 128: up at 4.5 bits, down at 4.5 in two layers and 6.5625 in two."""
    pytest.importorskip("gguf")
    model = tiny_model()
    stored, notes = static.requantise_model(model, sites_of(model), "q4_k_m", 128)
    assert stored == 16 * 128 * 128 * (4 * 2 * 4.5 + 2 * 4.5 + 2 * 6.5625) / 8
    assert notes == {"rows of 128 do not divide 256: flattened"}
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def lists_and_a_flat_stack():
    """A model with one site: gate and up of three experts in a module each, down of all in one matrix."""
    random = torch.Generator().manual_seed(0)
    model, experts = nn.Module(), nn.Module()
    model.add_module("experts", experts)
    for name in ("e0", "e1", "e2", "f0", "f1", "f2"):
        experts.add_module(name, nn.Linear(16, 8, bias=False))
        experts.get_submodule(name).weight.data.normal_(generator=random)
    experts.flat = nn.Parameter(torch.randn(3 * 16, 8, generator=random))
    ups = tuple(Stack(tuple(f"{part}{number}.weight" for number in range(3))) for part in "ef")
    layout = ExpertLayout(ups, Stack(("flat",)))
    return model, Site("experts", 3, 2, 16, 8, 16, 16, "silu_mul", layout, 0, "float32")


def test_lists_of_experts_and_flat_stacks_are_written_in_order():
    model, site = lists_and_a_flat_stack()
    up, flat = model.experts.f2.weight.detach().clone(), model.experts.flat.detach().clone()
    static.requantise_model(model, [site], "rtn3", 8)
    assert torch.equal(model.experts.f2.weight, requantise(up[None], "rtn3", group_size=8).weight[0])
    assert torch.equal(model.experts.flat, requantise(flat[None], "rtn3", group_size=8).weight[0])


def test_weights_that_cannot_be_written_back_are_refused():
    """All rows of all experts are one row in memory."""
    model, site = lists_and_a_flat_stack()
    model.experts.flat = nn.Parameter(torch.zeros(1, 8).expand(48, 8))
    with pytest.raises(ValueError, match="expert weights of experts cannot be written back: .*single memory location"):
        static.requantise_model(model, [site], "rtn3", 8)


def test_errors_name_the_site():
    model, site = lists_and_a_flat_stack()
    model.experts.flat.data[17, 0] = float("inf")
    with pytest.raises(ValueError, match=r"experts \(down\): expert 1 holds NaN or infinite weights"):
        static.requantise_model(model, [site], "rtn3", 8)


def test_transformed_models_and_no_sites_are_refused(transformed):
    model, encoded = transformed("qwen3_moe")
    for given, sites in ((encoded, sites_of(model)), (model, [])):
        with pytest.raises(ValueError, match="give the sites of a model that is not transformed"):
            static.requantise_model(given, sites, "rtn4", 32)
