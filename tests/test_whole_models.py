"""Whole tiny language models of every mixture in the installed transformers: logits, generation, storage, compilation."""

import copy
import functools

import pytest
import torch
from torch import nn

import dpamoe
from dpamoe.modules import encoded_experts

from .test_families import SMALL, blocks, shrink, write_back

AT_LEAST = 40
HEADS = SMALL["num_attention_heads"]
# What small configs need beside the sizes of a block, by a setting that they have.
WHERE_PRESENT = {
    "kv_lora_rank": {
        "num_key_value_heads": HEADS, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "qk_head_dim": 16,
    },
    "attn_layer_offset": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0, "expert_layer_period": 1},
    "linear_num_key_heads": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "mamba_n_heads": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "initializer_range": {"initializer_range": 0.1},
    "bos_token_id": {"bos_token_id": 1},
    "eos_token_id": {"eos_token_id": 2},
    "first_k_dense_replace": {"first_k_dense_replace": 1},
    "mlp_only_layers": {"mlp_only_layers": [0]},
    "vocab_size_per_layer_input": {"vocab_size_per_layer_input": SMALL["vocab_size"]},
    "unpadded_vocab_size": {"unpadded_vocab_size": SMALL["vocab_size"]},
}  # fmt: skip
# What the config of a model type needs for two layers, the second with attention and experts.
CHANGES = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3},
    **dict.fromkeys(
        ("qwen3_next", "qwen4_exp", "qwen4_exp_text"), {"layer_types": ["linear_attention", "full_attention"]}
    ),
    "zaya": {"num_experts_per_tok": 1},
    "hunyuan_v1_moe": {"head_dim": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
}


@functools.cache
def model_types() -> list[str]:
    """Model types of causal language models whose folder in transformers holds a block of routed experts."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families = {block.family for block in blocks()}
    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if model_type_to_module_name(kind) in families]


def settle(config) -> None:
    """Settings that follow from the small sizes, in place."""
    for present, changes in WHERE_PRESENT.items():
        if present in vars(config) and getattr(config, present) is not None:
            for name, value in changes.items():
                setattr(config, name, value)
    if len(vars(config).get("layer_types") or ()) > 2:
        config.layer_types = [config.layer_types[0], config.layer_types[-1]]


def language_model(kind: str, **changes) -> nn.Module:
    """A tiny random causal language model in fp32."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kinds = ("text_config",) if "text_config" in CONFIG_MAPPING[kind].sub_configs else ()
    layers = {"num_hidden_layers": SMALL["num_hidden_layers"], **CHANGES.get(kind, {})}
    config = CONFIG_MAPPING[kind](**(dict.fromkeys(kinds, layers) if kinds else layers))
    shrink(config)
    settle(text := config.get_text_config())
    for name, value in {**CHANGES.get(kind, {}), **changes}.items():
        if not isinstance(value, dict):
            setattr(text, name, value)
    config = type(config).from_dict(config.to_dict())  # some settings are worked out anew when a config is read
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(length))


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits

