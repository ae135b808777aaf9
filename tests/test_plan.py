"""What a plan predicts is what a loaded model holds and reads."""

import json
import shutil

import pytest
import torch

import dpamoe
from dpamoe.plan import WORKING, costs_of, plan
from dpamoe.presets import PRESETS

GIB = 1 << 30
SLOW = ("qwen2_moe", "olmoe", "mixtral", "granitemoe", "deepseek_v2", "ernie4_5_moe")  # like the others, as far as sizes go
CASES = [("qwen3_moe", False), ("deepseek_v3", False), ("gpt_oss", False), ("gpt_oss", True)]
CASES += [pytest.param(family, False, marks=pytest.mark.slow) for family in SLOW]
SPEC = dpamoe.EncodeSpec(group_size=32)


def in_memory(model):
    """Bytes behind all parameters and buffers, memory that several share counted once."""
    stores = [tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def weight_bytes(costs):
    return {row["k"]: row["weight_bytes"] for row in plan(costs, GIB, 1)["rows"]}


@pytest.mark.parametrize("k_max", [2, 5, 8])
def test_bytes_of_a_loaded_model(tiny_saved, k_max):
    predicted = weight_bytes(costs_of(tiny_saved, SPEC))
    assert predicted[k_max] == pytest.approx(in_memory(dpamoe.load(tiny_saved, 2, k_max=k_max)), rel=0.01)


def test_an_original_costs_what_it_costs_once_encoded(tiny_dir, tiny_saved):
    before, after = (costs_of(folder, dpamoe.EncodeSpec()) for folder in (tiny_dir, tiny_saved))
    assert (before.encoded, after.encoded) == (False, True)
    assert before.sites == after.sites and before.cache == after.cache and before.working == after.working
    assert before.others == pytest.approx(after.others, rel=0.001)
    assert plan(before, GIB, 64)["rows"][0]["bits_per_weight"] == plan(after, GIB, 64)["rows"][0]["bits_per_weight"] == 2.375


def test_an_original_with_thresholds_costs_what_it_costs_once_encoded(random_model, random_ids, tmp_path):
    """Tied scales and what layers matter are counted: 192 counts of gates for each of 8 experts in 2 layers."""
    preset = PRESETS["quality"]
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path / "original")
    plain = costs_of(tmp_path / "original", preset.encode)
    out = dpamoe.save(dpamoe.transform(model, calibration=random_ids(4, 50), preset="quality"), tmp_path / "encoded")
    before, after = costs_of(tmp_path / "original", preset.encode, preset.spend), costs_of(out, None)
    assert before.others - plain.others == 2 * 4 * (8 * 192 + 1)
    assert before.sites == after.sites and (before.spec, before.spend) == (after.spec, after.spend)
    real = in_memory(dpamoe.load(out, 2, k_max=8)) - 2 * 4 * 8 * 9 * 3  # less thresholds and two tables that follow from others
    assert weight_bytes(before)[8] == pytest.approx(real, rel=0.01) and weight_bytes(after)[8] == pytest.approx(real, rel=0.01)
    assert plan(before, GIB, 1)["least"] == 0 and plan(plain, GIB, 1)["least"] == 2


@pytest.mark.parametrize("family, tied", CASES)
def test_every_family(family, tied, random_model, random_ids, tmp_path):
    model = random_model(family)
    model.save_pretrained(tmp_path / "original")
    spec = dpamoe.EncodeSpec(group_size=32, iterations=1, scale_mode="tied" if tied else "shared")
    out = dpamoe.save(dpamoe.transform(model, calibration=random_ids(4, 50), spec=spec), tmp_path / "encoded")
    before, after = costs_of(tmp_path / "original", spec), costs_of(out, spec)
    for k_max in (2, 8):
        real = in_memory(dpamoe.load(out, 2, k_max=k_max))
        assert weight_bytes(before)[k_max] == pytest.approx(real, rel=0.01)
        assert weight_bytes(after)[k_max] == pytest.approx(real, rel=0.01)
    assert before.sites == after.sites


@pytest.mark.parametrize("budget", [2, 3, 8])
def test_bytes_that_a_token_reads(tiny_saved, budget):
    model = dpamoe.load(tiny_saved, budget)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 40)[None])
    rows = {row["k"]: row["expert_bytes_per_token"] for row in plan(costs_of(tiny_saved, SPEC), GIB, 1)["rows"]}
    assert rows[budget] == round(dpamoe.stats(model)["bytes_per_token"])


def test_other_bytes_that_a_token_reads(tiny_saved, random_model, random_ids, tmp_path):
    """With a tied head all of the embedding is read, else one row."""
    costs = costs_of(tiny_saved, SPEC)
    assert costs.others_read == costs.others
    found = plan(costs, GIB, 100, batch=3)
    assert found["other_bytes_per_token"] == costs.others + found["cache_bytes"] // 3
    random_model("qwen3_moe").save_pretrained(tmp_path / "model")
    untied = costs_of(tmp_path / "model", SPEC)
    assert untied.others - untied.others_read == random_model("qwen3_moe").model.embed_tokens.weight.nbytes


def test_what_fits(tiny_saved):
    costs = costs_of(tiny_saved, SPEC)
    rows = plan(costs, GIB, 64, margin=0)["rows"]
    for k_max in (2, 5, 8):
        total = next(row["total_bytes"] for row in rows if row["k"] == k_max)
        found = plan(costs, total, 64, margin=0)
        assert (found["k_max"], found["budget"]) == (k_max, min(4.0, k_max))
        short = plan(costs, total - 1, 64, margin=0)
        assert short["k_max"] == (k_max - 1 if k_max > 2 else None)
    assert short["k_max"] == 7 and plan(costs, 1, 64)["budget"] is None


def test_cache_and_working_space_grow_with_context_and_batch(tiny_saved):
    costs = costs_of(tiny_saved, SPEC)
    one, long, wide = (plan(costs, GIB, *shape) for shape in ((100,), (200,), (100, 2)))
    assert 2 * one["cache_bytes"] == long["cache_bytes"] == wide["cache_bytes"]
    assert one["margin_bytes"] - WORKING == 100 * costs.working
    assert long["margin_bytes"] == wide["margin_bytes"] == one["margin_bytes"] + 100 * costs.working
    assert plan(costs, GIB, 100, margin=7)["margin_bytes"] == 7


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (1, 1, 0), (1, 1, 1, -1)])
def test_numbers_that_mean_nothing(tiny_saved, numbers):
    with pytest.raises(ValueError, match="must be 1 or more"):
        plan(costs_of(tiny_saved, SPEC), *numbers)


def test_only_the_config_of_an_original_is_needed(tiny_dir, tmp_path):
    shutil.copyfile(tiny_dir / "config.json", tmp_path / "config.json")
    assert costs_of(tmp_path, SPEC) == costs_of(tiny_dir, SPEC)


def test_a_damaged_folder_and_a_dense_model(tiny_saved, random_model, tmp_path):
    folder = shutil.copytree(tiny_saved, tmp_path / "encoded")
    (folder / "model-plane-1-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="plane-1-.*is missing"):
        costs_of(folder, SPEC)
    config = {**random_model("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no routed experts were found in .*looks dense"):
        costs_of(tmp_path, SPEC)
