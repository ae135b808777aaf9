"""Sites found without weights: the same as with them, in next to no memory."""

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dpamoe.passes.find import find_sites
from dpamoe.passes.weightless import sketch_sites, without_weights

SHARED = ("path", "experts", "top_k", "hidden", "inner", "out", "activation", "layout", "parameters", "dtype")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "olmoe"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_sketches_equal_verified_sites(random_model, random_ids, family, experts):
    model, inputs = random_model(family), {"input_ids": random_ids(1, 8)}
    sites = find_sites(model, (), inputs).sites
    model.set_experts_implementation(experts)
    sketches = sketch_sites(model.to("meta"), (), inputs)
    assert [[getattr(s, name) for name in SHARED] for s in sketches] == [[getattr(s, name) for name in SHARED] for s in sites]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_stand_ins_take_no_memory_and_leave_no_trace():
    model = nn.Sequential(nn.Linear(1 << 20, 1 << 20, device="meta"), nn.Linear(4, 4))
    kept = model[1].weight
    with without_weights(model):
        assert not model[0].weight.is_meta and model[0].weight.shape == (1 << 20, 1 << 20)
        assert model[0].weight.untyped_storage().nbytes() == 4 and model[1].weight is kept
    assert model[0].weight.is_meta and model[1].weight is kept


@pytest.mark.slow
def test_a_model_of_thirty_billion_weights_has_all_its_sites():
    config = Qwen3MoeConfig(
        num_hidden_layers=48, hidden_size=2048, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    )  # fmt: skip
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sketches = sketch_sites(model, (), {"input_ids": torch.arange(4).view(1, 4)})
    assert [s.path for s in sketches] == [f"model.layers.{layer}.mlp.experts" for layer in range(48)]
    assert {(s.experts, s.top_k, s.hidden, s.inner, s.activation) for s in sketches} == {(128, 8, 2048, 768, "silu_mul")}
    assert sum(s.parameters for s in sketches) == 48 * 128 * 3 * 2048 * 768
