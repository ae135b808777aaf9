"""Presets: what they stand for, in memory and on the command line."""

import pytest
import torch

import dpamoe
from dpamoe import checkpoint, presets
from dpamoe.cli import options
from dpamoe.cli.main import build_parser
from dpamoe.modules import encoded_experts
from dpamoe.presets import PRESETS, Preset

TIED = dpamoe.EncodeSpec(group_size=32, scale_mode="tied")
BY_LEVEL = dpamoe.SpendSpec(allocator="threshold", skip=True)


def test_the_default_is_what_there_is_without_a_preset():
    assert PRESETS[presets.DEFAULT] == Preset(dpamoe.EncodeSpec(), dpamoe.SpendSpec())
    assert PRESETS["quality"] == Preset(TIED, BY_LEVEL) and list(PRESETS) == ["paper", "quality"]


@pytest.mark.parametrize("name, preset", PRESETS.items())
def test_settings_have_the_name_of_their_preset(name, preset):
    assert presets.preset_of(name) is preset
    spend = dpamoe.SpendSpec(3.5, skip=preset.spend.skip, allocator=preset.spend.allocator)
    assert presets.name_of(preset.encode, spend) == name
    assert presets.name_of(dpamoe.EncodeSpec(group_size=64), preset.spend) is None
    assert presets.name_of(preset.encode, dpamoe.SpendSpec(scope="dispatch")) is None


def spends(model):
    (found,) = {experts.spend for experts in encoded_experts(model).values()}
    return found


def test_in_memory(random_model, random_ids, tmp_path):
    ids = random_ids(8, 60)
    model = dpamoe.transform(random_model("qwen3_moe"), 3.0, calibration=ids, preset="quality")
    assert {experts.spec for experts in encoded_experts(model).values()} == {TIED}
    assert spends(model) == dpamoe.SpendSpec(3.0, allocator="threshold", skip=True)
    written_out = dpamoe.transform(random_model("qwen3_moe"), 3.0, calibration=ids, spec=TIED, allocator="threshold", skip=True)
    with torch.no_grad():
        assert torch.equal(model(ids[:2]).logits, written_out(ids[:2]).logits)
    assert spends(dpamoe.load(dpamoe.save(model, tmp_path / "out"), 2.5)) == dpamoe.SpendSpec(
        2.5, allocator="threshold", skip=True
    )
    dpamoe.transform(model, 2.0, preset="quality", allocator="exact")  # only spends in another way
    assert spends(model) == dpamoe.SpendSpec(2.0, skip=True)
    with pytest.raises(ValueError, match="already encoded with .*group_size=32.*load the original to encode with .*128"):
        dpamoe.transform(model, preset="paper")


def test_what_is_given_beside_a_preset_changes_it(random_model, random_ids):
    model = random_model("qwen3_moe")
    spec = dpamoe.EncodeSpec(group_size=16, iterations=0)
    dpamoe.transform(model, 1.0, calibration=random_ids(4, 60), preset="quality", spec=spec, allocator="exact")
    assert spends(model) == dpamoe.SpendSpec(1.0, skip=True)
    assert {experts.spec for experts in encoded_experts(model).values()} == {spec}
    assert all(experts.sensitivity is None for experts in encoded_experts(model).values())


def test_an_unknown_preset_changes_nothing(random_model):
    model = random_model("qwen3_moe")
    with pytest.raises(ValueError, match="preset is 'fast': use paper or quality"):
        dpamoe.transform(model, preset="fast")
    assert not encoded_experts(model)


def asked(*flags):
    args = build_parser().parse_args(["convert", "a", "--output-dir", "b", *flags])
    return options.encode_spec(args), options.spend_spec(args)


def test_flags_change_a_preset():
    assert asked() == (dpamoe.EncodeSpec(), dpamoe.SpendSpec())
    assert asked("--preset", "quality", "--budget", "2.5") == (TIED, dpamoe.SpendSpec(2.5, allocator="threshold", skip=True))
    spec, spend = asked("--preset", "quality", "--group-size", "64", "--k-max", "6", "--no-skip")
    assert spec == dpamoe.EncodeSpec(64, 2, 6, "tied") and spend == dpamoe.SpendSpec(allocator="threshold")
    spec, spend = asked("--skip", "--allocator", "threshold", "--beta", "4", "--scale-mode", "tied")
    assert spec == dpamoe.EncodeSpec(scale_mode="tied", beta=4.0) and spend == BY_LEVEL


def test_a_converted_folder_remembers_it(run, tiny_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")[:8000], encoding="utf-8")
    flags = ("--calibration", text, "--budget", 3, "--preset", "quality")
    code, out, err = run("convert", tiny_dir, "--output-dir", tmp_path / "out", *flags)
    assert code == 0, err
    code, out, _ = run("inspect", tmp_path / "out")
    assert "group size 32, tied scales, planes 2 to 8, default budget 3 per token" in out
    assert "allocator threshold, experts may be skipped, sensitivities of layers are there; preset quality" in out
    assert spends(dpamoe.load(tmp_path / "out")) == dpamoe.SpendSpec(3.0, allocator="threshold", skip=True)
    settings, weight_map = checkpoint.read_index(tmp_path / "out")
    assert checkpoint.is_weighed(settings, weight_map)
    code, out, _ = run("inspect", tmp_path / "out", "--json")
    assert all(words in out for words in ('"skip": true', '"allocator": "threshold"', '"sensitivities": true'))
