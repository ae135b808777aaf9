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
}  # fmt: skip


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
        if getattr(config, present, None) is not None:
            for name, value in changes.items():
                setattr(config, name, value)
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = [types[0], types[-1]]


def language_model(kind: str, **changes) -> nn.Module:
    """A tiny random causal language model in fp32."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind]()
    shrink(config)
    settle(config.get_text_config())
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(length))


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits

