"""What layers matter, measured at the end of a conversion: as in memory, whatever stays there, and once if it is stopped."""

import logging

import pytest
import torch

import dpamoe
from dpamoe import calibration, checkpoint, convert, own_text, sensitivity, storage, weighing
from dpamoe.convert import Job
from dpamoe.layers import outline
from dpamoe.modules import encoded_experts
from dpamoe.passes import find
from dpamoe.source import open_source

from . import sources
from .sources import contents

SPEC = dpamoe.EncodeSpec(group_size=32, scale_mode="tied", iterations=1)
SPEND = dpamoe.SpendSpec(3.0, allocator="threshold", skip=True)


@pytest.fixture(autouse=True)
def ids(monkeypatch, random_ids):
    """Random token ids as calibration, for models without a tokenizer."""
    found = random_ids(8, 100)
    monkeypatch.setattr(
        convert, "calibration_batches", lambda job, plan, partial: calibration.id_batches(plan.model, found.flatten())
    )
    return found


@pytest.fixture
def source(random_model, tmp_path):
    return sources.per_expert(random_model("qwen3_moe", {"num_hidden_layers": 3}), tmp_path / "source")


def in_memory(source, out, ids):
    model = storage.load_original(source)
    dpamoe.transform(model, 3.0, calibration=ids, spec=SPEC, allocator="threshold", skip=True)
    return dpamoe.save(model, out)


@pytest.mark.parametrize("stay", [0, 1, 3])
def test_streamed_is_what_memory_gives(source, ids, tmp_path, monkeypatch, stay, caplog):
    """Byte for byte, with no layer, one, or all of them staying in memory."""
    plan = outline(open_source(source))
    monkeypatch.setattr(own_text, "room", lambda *_: stay * plan.bytes_of(plan.mapping.below(plan.layers[0])))
    for name in ("streamed", "memory"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING, "dpamoe"):
        convert.convert(Job(source, tmp_path / "streamed" / "model", SPEC, SPEND))
    assert ("do not stay in memory: they are read 32 times" in caplog.text) == (stay < 3)
    expected = contents(in_memory(source, tmp_path / "memory" / "model", ids))
    found = contents(tmp_path / "streamed" / "model")
    for name in ("config.json", checkpoint.RESIDUALS):
        assert found[name] == expected[name]
    model = dpamoe.load(tmp_path / "streamed" / "model")
    spends = {experts.spend for experts in encoded_experts(model).values()}
    assert spends == {SPEND} and all(experts.sensitivity > 0 for experts in encoded_experts(model).values())


def test_where_no_gradient_can_be_had(source, ids, tmp_path, monkeypatch, caplog):
    """With noise on one layer after the other, as in memory; no layer stays there."""

    def without(*arguments):
        raise RuntimeError("no derivative")

    monkeypatch.setattr(own_text, "room", lambda *_: 0)
    monkeypatch.setattr(sensitivity, "by_gradient", without)
    for name in ("streamed", "memory"):
        (tmp_path / name).mkdir()
    convert.convert(Job(source, tmp_path / "streamed" / "model", SPEC, SPEND))
    assert "no gradient can be had (no derivative): sensitivities are measured with noise" in caplog.text
    expected = contents(in_memory(source, tmp_path / "memory" / "model", ids))
    assert contents(tmp_path / "streamed" / "model")[checkpoint.RESIDUALS] == expected[checkpoint.RESIDUALS]


def test_layers_that_run_again_give_the_same_numbers(source):
    """Gates are counted once, and nothing is left on the model."""
    model = storage.load_original(source)
    sites = find.find_sites(model, *calibration.example_batch(model, None)).sites
    batches = calibration.id_batches(model, torch.arange(3, 120).repeat(9))
    expected = sensitivity.measure(model, sites, batches)
    found = sensitivity.measure(model, sites, batches, [f"model.layers.{layer}" for layer in (0, 2)])
    for path, importance in expected.items():
        assert torch.equal(found[path].sensitivity, importance.sensitivity) and float(importance.sensitivity) > 0
        assert torch.equal(found[path].gate_counts, importance.gate_counts) and int(importance.gate_counts.sum()) > 0
    assert all("forward" not in vars(module) for module in model.modules())


def test_no_more_layers_are_in_memory_than_may_be(source):
    plan = outline(open_source(source))
    original, held = storage.load_original(source), []
    sites = find.find_sites(original, *calibration.example_batch(original, None)).sites

    def count(module, args):
        held.append(sum(not plan.model.get_submodule(layer).mlp.experts.down_proj.is_meta for layer in plan.layers))

    batches = [((), {"input_ids": torch.arange(3, 67)[None]})]
    with own_text.paged(plan, "cpu", plan.layers):
        for layer in plan.layers:
            plan.model.get_submodule(layer).mlp.register_forward_pre_hook(count)
        sensitivity.measure(plan.model, sites, batches, plan.layers)
    assert held == [1] * 5  # forward and, but for the first layer, in which only sums are behind the experts, backward
    assert all(parameter.is_meta for parameter in plan.model.parameters())


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_stopped_it_is_measured_once(source, tmp_path, monkeypatch, moment):
    unbroken = tmp_path / "a" / "model"
    unbroken.parent.mkdir()
    convert.convert(Job(source, unbroken, SPEC, SPEND))
    out, measured = tmp_path / "b" / "model", []
    out.parent.mkdir()
    original = sensitivity.measure

    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if moment == "before":
            patched.setattr(sensitivity, "measure", stopped)
        else:
            patched.setattr(convert, "_put_in_place", stopped)
        convert.convert(Job(source, out, SPEC, SPEND))
    assert not out.exists()
    monkeypatch.setattr(sensitivity, "measure", lambda *given: measured.append(given) or original(*given))
    convert.convert(Job(source, out, SPEC, SPEND))
    assert contents(out) == contents(unbroken) and len(measured) == (moment == "before")


def test_another_way_to_spend_is_another_result(source, tmp_path, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(convert, "_put_in_place", stopped)
        convert.convert(Job(source, tmp_path / "out", SPEC))
    with pytest.raises(ValueError, match="begun with other settings .*allocator was exact and is threshold"):
        convert.convert(Job(source, tmp_path / "out", SPEC, SPEND))


def test_sizes_are_foreseen(source, tmp_path):
    """4 bytes, and 192 numbers of 4 bytes for each of 8 experts, in each of 3 layers."""
    plain, weighed = (convert.preview(Job(source, tmp_path / "out", SPEC, spend)) for spend in (dpamoe.SpendSpec(3.0), SPEND))
    assert weighed["predicted_bytes"] - plain["predicted_bytes"] > 3 * (4 + 4 * 192 * 8)
    written = convert.convert(Job(source, tmp_path / "out", SPEC, SPEND))["bytes"]
    assert weighed["predicted_bytes"] == pytest.approx(written, rel=0.01)
    assert weighed["read_to_weigh_bytes"] == plain["read_to_weigh_bytes"] == 0  # all layers fit


def test_what_is_read_again_has_a_price(source):
    plan = outline(open_source(source))
    layer = plan.bytes_of(plan.mapping.below(plan.layers[0]))
    assert weighing.price(plan, plan.layers[:2]) == (2 * layer, 32)  # 16,384 tokens, 1,024 at a time, forward and backward
    assert weighing.weighing_memory(plan) > 2 * layer + 4 * 4 * 128 * 1024


def test_a_model_without_a_head_is_refused_first(random_model, tmp_path):
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "source")
    weighing.check_measurable(outline(open_source(tmp_path / "whole")))
    with pytest.raises(ValueError, match="Qwen3MoeModel has no output head.*--allocator exact"):
        weighing.check_measurable(outline(open_source(tmp_path / "source")))
