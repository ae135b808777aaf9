"""Conversions from end to end: every form of source gives the bytes of the model it means, and damage gives a sentence."""

import json
import logging
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import calibration, checkpoint, convert, storage, stream
from dpamoe.convert import Job
from dpamoe.modules import encoded_experts

from . import sources
from .sources import contents

SPEC = dpamoe.EncodeSpec(group_size=32, iterations=1)


@pytest.fixture
def given_ids(monkeypatch, random_ids):
    """Random token ids as calibration, for models without a tokenizer."""
    ids = random_ids(8, 100)

    def batches(job, plan, partial):
        return calibration.id_batches(plan.model, ids.flatten())

    monkeypatch.setattr(convert, "calibration_batches", batches)
    return ids


def tensors_of(folder):
    index = json.loads((folder / checkpoint.INDEX).read_text())
    return checkpoint.read_tensors(folder, index["weight_map"]), index


def assert_same(folder, other):
    """Equal tensors, config and hashes."""
    (tensors, index), (expected, other_index) = tensors_of(folder), tensors_of(other)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert index["hashes"] == other_index["hashes"]
    for file in ("config.json", checkpoint.RESIDUALS):
        assert (folder / file).read_bytes() == (other / file).read_bytes()


def in_memory(source, out, ids, spec=SPEC):
    model = storage.load_original(source)
    dpamoe.transform(model, calibration=ids, spec=spec)
    return dpamoe.save(model, out)


@pytest.fixture
def folders(tmp_path):
    """Function that makes an own folder at one depth, so that relative paths in configs are equal."""

    def make(name):
        (tmp_path / name).mkdir()
        return tmp_path / name / "model"

    return make


def test_streamed_is_what_memory_gives(family, random_model, given_ids, folders, tmp_path):
    source = sources.per_expert(random_model(family), tmp_path / "source")
    streamed = folders("streamed")
    outcome = convert.convert(Job(source, streamed, SPEC))
    assert_same(streamed, in_memory(source, folders("memory"), given_ids))
    loaded = dpamoe.load(streamed)
    assert dpamoe.report(loaded).as_dict().items() >= {
        name: outcome[name] for name in ("sites", "experts", "encoded_bytes", "original_bytes", "bits_per_weight")
    }.items()  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fused_and_sharded_sources_give_the_same_bytes(model_type, random_model, given_ids, folders, tmp_path):
    model = random_model(model_type)
    single = sources.per_expert(model, tmp_path / "source")
    expected = folders("single")
    convert.convert(Job(single, expected, SPEC))
    for name, make in (
        ("fused", lambda out: sources.fused(model, single, out)), ("sharded", lambda out: sources.sharded(single, out)),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        source = make(tmp_path / name / "source")
        convert.convert(Job(source, tmp_path / name / "model", SPEC))
        own, other = contents(tmp_path / name / "model"), contents(expected)
        for files in (own, other):  # which name the source
            files.pop("config.json"), files.pop("README.md")
        assert own == other


@pytest.mark.parametrize("block, suffix", [(128, "weight_scale_inv"), (24, "weight_scale_inv"), (24, "scale")])
def test_fp8_is_the_bf16_model_that_it_means(random_model, given_ids, folders, tmp_path, block, suffix):
    """Dims of 64, 32 and 96 are no multiples of 128 and of 24."""
    plain = sources.per_expert(random_model("deepseek_v3"), tmp_path / "source")
    source, meant = sources.fp8(plain, tmp_path / "fp8", block, suffix)
    convert.convert(Job(source, folders("a"), SPEC))
    convert.convert(Job(meant, folders("b"), SPEC))
    assert tensors_of(tmp_path / "a" / "model")[1]["hashes"] == tensors_of(tmp_path / "b" / "model")[1]["hashes"]
    dpamoe.load(tmp_path / "a" / "model")


def test_mxfp4_is_the_bf16_model_that_it_means(random_model, given_ids, folders, tmp_path):
    plain = sources.per_expert(random_model("gpt_oss"), tmp_path / "source")
    source, meant = sources.mxfp4(plain, tmp_path / "mxfp4")
    convert.convert(Job(source, folders("a"), SPEC))
    convert.convert(Job(meant, folders("b"), SPEC))
    assert tensors_of(tmp_path / "a" / "model")[1]["hashes"] == tensors_of(tmp_path / "b" / "model")[1]["hashes"]
    model = dpamoe.load(tmp_path / "a" / "model")
    assert len(encoded_experts(model)) == 2 and "quant_method" in json.dumps(model.config.to_dict())


def change(function):
    """Damage: change tensors of a folder in one file."""

    def damage(folder):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        function(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def resize(by):
    def damage(folder):
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size + by)

    return damage


BEYOND = "model.layers.2.mlp.experts.5.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def put(name, value):
    def function(tensors):
        tensors[name].view(-1)[3] = value

    return change(function)


def rename(before, after):
    def function(tensors):
        for name in [name for name in tensors if before in name]:
            tensors[name.replace(before, after)] = tensors.pop(name)

    return change(function)


def remove(part):
    def function(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change(function)


def with_index(edit):
    def damage(folder):
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        edit(names)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return damage


def halve_vocabulary(folder):
    sources.change_config(folder, vocab_size=64)


@pytest.mark.parametrize(
    "damage, words",
    [
        (resize(-1), ["model.safetensors has", "its header describes", "copy it again"]),
        (resize(+1), ["model.safetensors has", "truncated or padded"]),
        (resize(-20000), ["model.safetensors has", "its header describes"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["has no safetensors files"]),
        (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"????????" * 9), ["no readable safetensors header"]),
        (with_index(lambda names: names.update(x="other.safetensors")), ["other.safetensors is missing", "index.json"]),
        (with_index(lambda names: names.pop(EXPERT)), [EXPERT, "does not put there"]),
        (with_index(lambda names: names.update(x="model.safetensors")), ["model.safetensors lacks x"]),
        (rename("model.layers", "model.language_model.layers"), ["lacks", "such as model.layers.0"]),
        (remove(EXPERT), ["lacks the tensor mlp.experts.5.up_proj.weight", "8 experts (1 are missing)"]),
        (remove(".up_proj."), ["mlp.experts.0.up_proj.weight", "8 are missing"]),
        (remove("lm_head"), ["lacks 1 tensors of the model, such as lm_head.weight"]),
        (rename("layers.1.mlp.experts.5", "layers.1.mlp.experts.8"), ["8 experts (1 are missing)"]),
        (change(lambda t: t.update({EXPERT.replace("5", "8"): t[EXPERT].clone()})), ["experts.8.up_proj", "has 8 experts"]),
        (change(lambda t: t.update({BEYOND: t[EXPERT].clone()})), ["layers.2.mlp.experts.5", "does not have"]),
        (change(lambda t: t.update({EXPERT: t[EXPERT][:, :-1].contiguous()})), ["gate_up_proj", "config"]),
        (halve_vocabulary, ["embed_tokens.weight is [128, 64]", "its config says [64, 64]"]),
        (put(EXPERT, float("nan")), ["model.safetensors holds NaN or infinite weights", EXPERT]),
        (put(EXPERT, float("-inf")), ["model.safetensors holds NaN or infinite weights", EXPERT]),
        (put("model.layers.0.input_layernorm.weight", float("inf")), ["model.layers.0.input_layernorm.weight"]),
        (lambda folder: sources.change_config(folder, quantization_config={"quant_method": "awq"}), ["quantized with awq"]),
        (lambda folder: sources.change_config(folder, architectures=["NoSuch"]), ["names architecture NoSuch"]),
        (lambda folder: sources.change_config(folder, model_type="of_nobody"), ["names model type of_nobody", "transform"]),
    ],
)  # fmt: skip
def test_damaged_sources(qwen, given_ids, tmp_path, damage, words):
    source = shutil.copytree(qwen, tmp_path / "source")
    damage(source)
    with pytest.raises(ValueError) as caught:
        convert.convert(Job(source, tmp_path / "out", SPEC))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial" / checkpoint.INDEX).exists()  # which loading needs


@pytest.fixture(scope="module")
def qwen(random_model, tmp_path_factory):
    """A folder of a random Qwen3-MoE; copy it before changing anything."""
    return sources.per_expert(random_model("qwen3_moe"), tmp_path_factory.mktemp("models") / "source")


def test_fp8_without_scales(random_model, tmp_path):
    plain = sources.per_expert(random_model("deepseek_v3"), tmp_path / "source")
    source, _ = sources.fp8(plain, tmp_path / "fp8", 128)
    remove("experts.3.up_proj.weight_scale_inv")(source)
    with pytest.raises(
        ValueError, match=r"model.safetensors holds model.layers.1.*experts.3.up_proj.weight as F8_E4M3 without"
    ):
        convert.convert(Job(source, tmp_path / "out", SPEC))


def test_mxfp4_without_scales(random_model, tmp_path):
    plain = sources.per_expert(random_model("gpt_oss"), tmp_path / "source")
    source, _ = sources.mxfp4(plain, tmp_path / "mxfp4")
    remove("layers.1.mlp.experts.down_proj_scales")(source)
    with pytest.raises(ValueError, match="down_proj_blocks without .*down_proj_scales of its shape"):
        convert.convert(Job(source, tmp_path / "out", SPEC))


def test_an_expert_of_zeros_is_an_expert(qwen, given_ids, tmp_path):
    source = shutil.copytree(qwen, tmp_path / "source")

    def zero(tensors):
        for name in tensors:
            if ".1.mlp.experts.5." in name:
                tensors[name].zero_()

    change(zero)(source)
    assert convert.convert(Job(source, tmp_path / "out", SPEC))["experts"] == 16
    up = encoded_experts(dpamoe.load(tmp_path / "out"))["model.layers.1.mlp.experts"].gate_up_proj.weight
    assert not up.offset[5].any() and not any(scale[5].any() for scale in up.scales)


@pytest.mark.parametrize(
    "group_size, words", [(48, "exceeds the 32 inputs"), (1000, "exceeds the 32 inputs of model.layers.0.mlp")]
)
def test_groups_that_are_too_wide_are_refused_first(qwen, tmp_path, group_size, words):
    with pytest.raises(ValueError, match=words):
        convert.convert(Job(qwen, tmp_path / "out", dpamoe.EncodeSpec(group_size=group_size)))
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("spec", [{"group_size": 24}, {"scale_mode": "tied"}, {"group_size": -1}, {"k_min": 1, "k_max": 5}])
def test_every_way_to_encode(qwen, given_ids, folders, spec):
    spec = dpamoe.EncodeSpec(**{"iterations": 1, "group_size": 32, **spec})
    streamed = folders("streamed")
    convert.convert(Job(qwen, streamed, spec))
    memory = in_memory(qwen, folders("memory"), given_ids, spec)
    assert tensors_of(streamed)[1]["hashes"] == tensors_of(memory)[1]["hashes"]


def test_a_tied_head(random_model, given_ids, folders, tmp_path):
    source = sources.per_expert(random_model("qwen3_moe", {"tie_word_embeddings": True}), tmp_path / "source")
    assert "lm_head.weight" not in load_file(source / "model.safetensors")
    streamed = folders("streamed")
    convert.convert(Job(source, streamed, SPEC))
    assert_same(streamed, in_memory(source, folders("memory"), given_ids))
    double = sources.rewritten(
        source, tmp_path / "double", lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()}
    )
    convert.convert(Job(double, folders("again"), SPEC))
    assert tensors_of(tmp_path / "again" / "model")[1]["hashes"] == tensors_of(streamed)[1]["hashes"]
    change(lambda t: t["lm_head.weight"].mul_(2))(double)
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight with different values|tie_word_embeddings"):
        convert.convert(Job(double, tmp_path / "never", SPEC))


def test_tensors_that_the_model_does_not_use_are_named(qwen, given_ids, tmp_path, caplog):
    source = shutil.copytree(qwen, tmp_path / "source")
    change(lambda t: t.update({"model.mtp.weight": torch.ones(3)}))(source)
    with caplog.at_level(logging.WARNING, "dpamoe"):
        convert.convert(Job(source, tmp_path / "out", SPEC))
    assert "left out: 1 tensors that the model does not use, such as model.mtp.weight" in caplog.text
    assert "model.mtp.weight" not in tensors_of(tmp_path / "out")[0]


def test_ignored_experts_stay_as_they_are(qwen, given_ids, tmp_path):
    outcome = convert.convert(Job(qwen, tmp_path / "out", SPEC, ignore=("model.layers.0.*",)))
    assert (outcome["sites"], outcome["experts"], outcome["experts_found"]) == (1, 8, 16)
    assert outcome["refused"] == {"model.layers.0.mlp.experts": "ignored, as --ignore asks"}
    assert outcome["refused_bytes"] == {"model.layers.0.mlp.experts": 8 * 3 * 64 * 32 * 4}
    model = dpamoe.load(tmp_path / "out")
    assert list(encoded_experts(model)) == ["model.layers.1.mlp.experts"]
    original = storage.load_original(qwen)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(model.get_parameter(name), original.get_parameter(name))
    for pattern, words in (("*", "leaves none of the 2"), ("lm_head", "fits none of the 2 routed experts")):
        with pytest.raises(ValueError, match=words):
            convert.convert(Job(qwen, tmp_path / "never", SPEC, ignore=(pattern,)))


def test_dense_models(random_model, tmp_path):
    source = sources.per_expert(random_model("llama"), tmp_path / "source")
    with pytest.raises(ValueError, match="no routed experts .* it looks dense"):
        convert.convert(Job(source, tmp_path / "out", SPEC))
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_predicted_is_written(qwen, given_ids, tmp_path):
    foreseen = convert.preview(Job(qwen, tmp_path / "out", SPEC))
    assert not list(tmp_path.iterdir())
    outcome = convert.convert(Job(qwen, tmp_path / "out", SPEC))
    assert foreseen["predicted_bytes"] == pytest.approx(outcome["bytes"], rel=0.01)
    assert foreseen["encoded_bytes"] == outcome["encoded_bytes"] and foreseen["experts"] == outcome["experts"]


def scaled(factor):
    def function(tensors):
        for name in tensors:
            if ".1.mlp.experts." in name:
                tensors[name].mul_(factor)

    return change(function)


def test_scales_that_need_more_room_are_said_and_counted(qwen, given_ids, tmp_path, caplog):
    source = shutil.copytree(qwen, tmp_path / "source")
    scaled(1e-7)(source)
    with caplog.at_level(logging.INFO, "dpamoe"):
        outcome = convert.convert(Job(source, tmp_path / "out", SPEC))
    foreseen = convert.preview(Job(source, tmp_path / "other", SPEC))
    rows = 8 * (64 * 2 + 64 * 1)  # experts, rows of both matrices with their groups of 32
    assert (
        f"not as predicted: 18 tensors of scales need fp32, since fp16 does not hold their range (+{rows * 9 * 2:,}"
        in caplog.text
    )
    assert outcome["bytes"] - foreseen["predicted_bytes"] == pytest.approx(rows * 9 * 2, rel=0.05)  # texts are estimated


def test_experts_that_turn_out_different_are_said_and_counted(qwen, given_ids, tmp_path, caplog, monkeypatch):
    original = stream.verified_sites

    def without_the_first(plan, layer, inputs):
        sites, refused = original(plan, layer, inputs)
        return ([], {sites[0].path: "odd"}) if layer == "model.layers.0" else (sites, refused)

    monkeypatch.setattr(stream, "verified_sites", without_the_first)
    with caplog.at_level(logging.INFO, "dpamoe"):
        outcome = convert.convert(Job(qwen, tmp_path / "out", SPEC))
    assert "not as predicted: model.layers.0.mlp.experts stays as it is" in caplog.text
    assert outcome["refused"] == {"model.layers.0.mlp.experts": "odd"} and outcome["sites"] == 1
    assert list(encoded_experts(dpamoe.load(tmp_path / "out"))) == ["model.layers.1.mlp.experts"]


def test_a_size_that_nothing_explains_is_an_error(qwen, given_ids, tmp_path, monkeypatch):
    original = storage.copy_companions

    def and_more(source, folder):
        original(source, folder)
        (folder / "twice.bin").write_bytes(bytes(20_000))

    with monkeypatch.context() as patched:
        patched.setattr(storage, "copy_companions", and_more)
        with pytest.raises(
            ValueError, match=r"out.partial has .* bytes, and what was encoded takes .*: something is there twice"
        ):
            convert.convert(Job(qwen, tmp_path / "out", SPEC))
    with pytest.raises(ValueError, match="out.partial is being written, or was left unfinished: run the same command again"):
        dpamoe.load(tmp_path / "out.partial")
    convert.convert(Job(qwen, tmp_path / "out", SPEC, resume=False))


def test_a_machine_with_too_little_memory_is_warned_of(qwen, given_ids, tmp_path, monkeypatch, caplog):
    free = type("Free", (), {"available": 100 << 20})
    monkeypatch.setattr(convert.psutil, "virtual_memory", lambda: free)
    with caplog.at_level(logging.WARNING, "dpamoe"):
        convert.convert(Job(qwen, tmp_path / "out", SPEC))
    assert "1 processes need about 0.7 GiB of memory together, and 0.1 GiB are free: the system may end them" in caplog.text


def test_too_little_memory_is_said_first(qwen, tmp_path):
    with pytest.raises(ValueError, match=r"needs about .* GiB of memory, .* model.layers.0, .* --max-memory allows 0.2 GiB"):
        convert.convert(Job(qwen, tmp_path / "out", SPEC, max_memory=200 << 20))
    assert not list(tmp_path.iterdir())
