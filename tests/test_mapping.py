"""File tensors to parameters: whatever transformers loads is what is made here, one part at a time."""

import pytest
import torch

from dpamoe.layers import on_meta
from dpamoe.mapping import drop_part, expert_wise, load_part, make_mapping, make_tensors
from dpamoe.source import open_source

from . import sources

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def opened(random_model, tmp_path):
    """Function from a family to (model, source, model on meta, mapping)."""

    def make(family, changes=None):
        model = random_model(family, changes)
        source = open_source(sources.per_expert(model, tmp_path / "source"))
        empty = on_meta(source)
        return model, source, empty, make_mapping(empty, source)

    return make


def test_a_whole_model_part_by_part(family, opened):
    model, source, empty, mapping = opened(family)
    assert all(parameter.is_meta for parameter in empty.parameters())
    for name in mapping.wanted:
        load_part(mapping, empty, source, [name])
    state = empty.state_dict()
    assert state.keys() == model.state_dict().keys() and not mapping.extra
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_one_module_in_and_out_of_memory(opened):
    model, source, empty, mapping = opened("qwen3_moe")
    names = mapping.below(EXPERTS)
    assert names == [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    load_part(mapping, empty, source, names)
    assert [name for name, parameter in empty.named_parameters() if not parameter.is_meta] == names
    assert torch.equal(empty.get_parameter(names[0]), model.get_parameter(names[0]))
    drop_part(mapping, empty, names)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.get_parameter(names[0]).shape == model.get_parameter(names[0]).shape


def test_experts_are_read_a_few_at_a_time(opened, monkeypatch):
    from dpamoe import mapping as module

    _, source, empty, mapping = opened("qwen3_moe")
    held = []
    original = module._convert

    def convert(recipe, keys, model, read):
        held.append(sum(len(group) for group in keys.values()))
        return original(recipe, keys, model, read)

    monkeypatch.setattr(module, "_convert", convert)
    make_tensors(mapping, empty, source, mapping.below(EXPERTS))
    assert held == [8, 8, 4, 4]  # 8 experts, of which four at a time: gate with up, then down


def test_tied_parameters_are_one(opened):
    model, source, empty, mapping = opened("qwen3_moe", {"tie_word_embeddings": True})
    assert mapping.aliases == {"model.embed_tokens.weight": ("lm_head.weight",)} and "lm_head.weight" not in mapping.wanted
    load_part(mapping, empty, source, ["model.embed_tokens.weight"])
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    assert torch.equal(empty.lm_head.weight, model.lm_head.weight)


def test_the_model_decides_the_type(random_model, tmp_path):
    """fp32 tensors of a model that its config calls bf16, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    folder = sources.per_expert(random_model("deepseek_v3"), tmp_path / "source")
    sources.change_config(folder, dtype="bfloat16")
    source = open_source(folder)
    empty = on_meta(source)
    mapping = make_mapping(empty, source)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, tensor in make_tensors(mapping, empty, source, mapping.wanted).items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_conversions_that_go_expert_by_expert():
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    def made(*operations):
        return WeightConverter(["e.*.a", "e.*.b"], "e.ab", operations=list(operations))

    assert expert_wise(made(MergeModulelist(dim=0), Concatenate(dim=1)))
    assert expert_wise(made(MergeModulelist(dim=0), Transpose(1, 2)))
    assert not expert_wise(made(MergeModulelist(dim=0), Concatenate(dim=0)))
    assert not expert_wise(made(MergeModulelist(dim=0), Transpose(0, 1)))
    assert not expert_wise(made(Concatenate(dim=1)))
