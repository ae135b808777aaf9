"""Calibration text that a model writes itself while only some of its layers are in memory."""

import json
import logging

import pytest
import torch

import dpamoe
from dpamoe import calibration, checkpoint, convert, own_text, storage
from dpamoe.layers import outline
from dpamoe.source import open_source

from . import sources
from .test_whole_models import AT_LEAST, CANNOT_SAVE, REFUSED, language_model, model_types

SPEC = dpamoe.EncodeSpec(group_size=16, iterations=0, k_max=2)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(calibration, "WRITTEN_SEQUENCES", 4)
    monkeypatch.setattr(calibration, "WRITTEN_TOKENS", 12)


@pytest.fixture
def source(random_model, tmp_path):
    return sources.per_expert(random_model("qwen3_moe", {"num_hidden_layers": 3}), tmp_path / "source")


def written(source):
    """What the model writes when it is in memory as a whole."""
    return [kwargs["input_ids"] for _, kwargs in calibration.own_text(storage.load_original(source))]


def layer_bytes(plan):
    return plan.bytes_of(plan.mapping.below(plan.layers[0]))


def compare(kind, tmp_path):
    """What a model writes with no layer, one layer or all layers staying in memory, beside the model as a whole."""
    language_model(kind).save_pretrained(tmp_path / kind)
    plan = outline(open_source(tmp_path / kind))
    expected = written(tmp_path / kind)
    for limit in (0, layer_bytes(plan), 1 << 40):
        found = own_text.write(plan, "cpu", limit)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert all(parameter.is_meta for parameter in plan.model.parameters())


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "jamba", "minimax", "gemma4_text"])
def test_layer_by_layer_the_text_is_the_same(kind, tmp_path):
    compare(kind, tmp_path)


@pytest.mark.slow
def test_layer_by_layer_the_text_is_the_same_in_all_families(tmp_path):
    kinds = [kind for kind in model_types() if kind not in CANNOT_SAVE | REFUSED]
    for kind in kinds:
        compare(kind, tmp_path)
    assert len(kinds) >= AT_LEAST


@pytest.mark.parametrize("stay", [0, 1, 2])
def test_no_more_layers_are_in_memory_than_may_be(source, stay, caplog):
    plan = outline(open_source(source))
    held = []

    def count(module, args):
        held.append(sum(not plan.model.get_submodule(layer).mlp.experts.down_proj.is_meta for layer in plan.layers))

    again = own_text.read_again(plan, stay * layer_bytes(plan) + 1)
    with own_text.paged(plan, "cpu", again):
        for layer in plan.layers:
            plan.model.get_submodule(layer).mlp.register_forward_pre_hook(count)
        plan.model(input_ids=torch.arange(8)[None])
    assert own_text.price(plan, again) == ((3 - stay) * layer_bytes(plan), 12)
    assert held == [stay + (number >= stay) for number in range(3)]
    with caplog.at_level(logging.INFO, "dpamoe"):
        own_text.write(plan, "cpu", stay * layer_bytes(plan))
    assert "of layers do not stay in memory: to write the calibration text they are read 12 times" in caplog.text
    assert "write calibration text 12/12 token 12" in caplog.text


@pytest.mark.parametrize("share", [0.0, own_text.SHARE])
def test_converted_with_own_text_the_tables_are_those_of_memory(source, tmp_path, monkeypatch, share):
    monkeypatch.setattr(own_text, "SHARE", share)
    convert.convert(convert.Job(source, tmp_path / "streamed", SPEC, dpamoe.SpendSpec(2.0)))
    model = dpamoe.transform(storage.load_original(source), 2.0, spec=SPEC)
    dpamoe.save(model, tmp_path / "memory")
    for name in (checkpoint.RESIDUALS, "config.json"):
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()
    assert not (tmp_path / "streamed" / own_text.WRITTEN).exists()


def test_a_conversion_that_was_stopped_goes_on_with_its_text(source, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    job = convert.Job(source, tmp_path / "out", SPEC, dpamoe.SpendSpec(2.0))
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(convert, "stream", stop)
        convert.convert(job)
    kept = json.loads((tmp_path / "out.partial" / own_text.WRITTEN).read_text())["batches"]
    assert [torch.tensor(batch).tolist() for batch in kept] == [ids.tolist() for ids in written(source)]
    monkeypatch.setattr(own_text, "write", None)
    assert convert.convert(job)["experts"] == 24


def test_room_is_what_memory_leaves(source):
    plan = outline(open_source(source))
    least = own_text.writing_memory(plan)
    cache = 4 * 13 * 3 * 2 * 4 * 16 * 4  # sequences, tokens, layers, keys and values, heads, their width, fp32
    assert least == own_text.PROCESS + plan.bytes_of(plan.rest) + layer_bytes(plan) + cache
    assert own_text.room(least, "cpu", least + 1000) == 1000
    assert own_text.room(least, "cpu", least - 1000) == 0
    assert own_text.room(least, "cpu", None) > 0


def test_a_limit_counts_the_writing_too(source, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "WRITTEN_SEQUENCES", 1 << 20)
    job = convert.Job(source, tmp_path / "out", SPEC, dpamoe.SpendSpec(2.0), max_memory=16 << 30)
    with pytest.raises(ValueError, match="--max-memory allows 16.0 GiB"):
        convert.preview(job)
    text = tmp_path / "text.txt"
    text.write_text("a text")
    monkeypatch.setattr(own_text.text, "load_tokenizer", lambda folder: None)
    given = convert.Job(source, tmp_path / "out", SPEC, dpamoe.SpendSpec(2.0), text, max_memory=16 << 30)
    assert convert.preview(given)["sites"] == 3


def test_a_dry_run_says_what_is_read_for_the_text(source, tmp_path, run, monkeypatch):
    plan = outline(open_source(source))
    arguments = ("convert", source, "--output-dir", tmp_path / "out", "--group-size", "16", "--dry-run")
    assert "without --calibration" not in run(*arguments)[1]
    monkeypatch.setattr(own_text, "SHARE", 0.0)
    size = 3 * 12 * layer_bytes(plan)
    assert f"without --calibration, {size:,} bytes are read from disk for the text that the model writes" in run(*arguments)[1]


def test_a_weight_that_is_not_finite_is_named_when_it_is_read(source):
    plan = outline(open_source(source))
    damaged = sources.rewritten(
        source, source.with_name("damaged"),
        lambda tensors: {k: t.fill_(float("nan")) if ".2.mlp.experts.3.up" in k else t for k, t in tensors.items()},
    )  # fmt: skip
    plan = outline(open_source(damaged))
    with pytest.raises(ValueError, match=r"NaN or infinite weights in model.layers.2.mlp.experts.3.up_proj.weight"):
        own_text.write(plan, "cpu", 0)
    assert all(parameter.is_meta for parameter in plan.model.parameters())


def test_models_that_write_no_text_need_a_file():
    from transformers import AutoConfig, AutoModel, SwitchTransformersForConditionalGeneration

    small = {"num_layers": 1, "num_decoder_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 1, "d_kv": 8, "vocab_size": 9}
    config = AutoConfig.for_model("switch_transformers", **small)
    with torch.device("meta"):
        for model in (SwitchTransformersForConditionalGeneration(config), AutoModel.from_config(config)):
            with pytest.raises(ValueError, match="cannot write text of its own .*: give --calibration FILE"):
                own_text.check_can_write(model)
