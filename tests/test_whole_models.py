"""Whole tiny language models of every mixture in the installed transformers: logits, generation, storage, compilation."""

import copy
import functools
import re
from importlib.metadata import version

import pytest
import torch
from torch import nn

import dpamoe
from dpamoe.modules import encoded_experts
from dpamoe.sites import Site

from .marks import some_slow
from .test_families import README, SMALL, blocks, shrink, write_back

AT_LEAST = 50
REFUSED = {"doge"}  # no site is found in it; see the reason in test_families
NO_STATIC_CACHE = {"deepseek_v4"}  # its layers fail in transformers itself
CANNOT_SAVE = {"jetmoe", "llama4_text"}  # blocks that become graphs
FAST = {"deepseek_v3", "gpt_oss", "jamba", "longcat_flash", "qwen3_moe"}
COMPILED = [
    "qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx", "ernie4_5_moe", "gemma4_text", "granitemoe", "hy_v4", "longcat_flash",
    "minimax_m3_vl_text", "mixtral", "phimoe",
]  # fmt: skip
INDUCTOR = ["qwen3_moe", "gpt_oss", "hy_v4"]
LENGTHS = (1, 2, 3, 7, 64, 513)
SPEC = dpamoe.EncodeSpec(group_size=16)
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
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), {"layer_types": ["linear_attention", "full_attention"]}),
    **dict.fromkeys(("beam", "deepseek_v32", "glm_moe_dsa"), {"mlp_layer_types": ["dense", "sparse"]}),
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "kolibri1_1": {
        "layer_types": ["sliding_attention", "indexed_attention"],
        "index_layers": [1],
        "kv_source_layers": [0, 1],
        "index_num_heads": 1,
        "head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "hunyuan_v1_moe": {"head_dim": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
}


@functools.cache
def model_types() -> list[str]:
    """Model types of causal language models whose folder in transformers holds a block of routed experts, text only."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families = {block.family for block in blocks()}
    kinds = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if model_type_to_module_name(kind) in families]
    return [kind for kind in kinds if "text_config" not in CONFIG_MAPPING[kind].sub_configs]


def settle(config) -> None:
    """Settings that follow from the small sizes, in place."""
    for present, changes in WHERE_PRESENT.items():
        if present in vars(config) and getattr(config, present) is not None:
            for name, value in changes.items():
                setattr(config, name, value)
    if len(vars(config).get("layer_types") or ()) > 2:
        config.layer_types = [config.layer_types[0], config.layer_types[-1]]


def language_model(kind: str) -> nn.Module:
    """A tiny random causal language model in fp32."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind](**{"num_hidden_layers": SMALL["num_hidden_layers"], **CHANGES.get(kind, {})})
    shrink(config)
    settle(config)
    for name, value in CHANGES.get(kind, {}).items():
        if not isinstance(value, dict):
            setattr(config, name, value)
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


def tensors(model: nn.Module) -> dict:
    """Every parameter and buffer by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def encoded_names(original: nn.Module, site: Site) -> set[str]:
    """Names in the original of what a site's encoded experts stand for."""
    if not site.block:
        return {name for name in tensors(original) if name.startswith(f"{site.path}.")}
    stacks = [*site.layout.ups, site.layout.down, *site.layout.up_biases, site.layout.down_bias]
    return {f"{site.path}.{name}" for stack in stacks if stack is not None for name in stack.names}


def encoded(kind: str) -> tuple[nn.Module, nn.Module]:
    """A model and its transformed twin at k = 8; for what a new release of transformers brings there may be none yet."""
    try:
        original = language_model(kind)
        return original, dpamoe.transform(copy.deepcopy(original), 8, calibration=ids(4, 32), spec=SPEC)
    except Exception as error:
        if re.search(rf"\b{kind}\b", README.read_text(encoding="utf-8")):
            raise
        pytest.xfail(f"not in README.md yet, so new in transformers {version('transformers')}: {error}")


def write(model: nn.Module, **settings) -> torch.Tensor:
    prompt = ids(2, 5)
    return model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=6, max_new_tokens=6,
        pad_token_id=0, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", some_slow([kind for kind in model_types() if kind not in REFUSED], FAST))
def test_a_whole_model(kind, tolerance, tmp_path):
    original, model = encoded(kind)
    held = encoded_experts(model)
    assert held and not dpamoe.report(model).refused

    gone = set().union(*(encoded_names(original, experts.site) for experts in held.values()))
    before = {name: tensor for name, tensor in tensors(original).items() if name not in gone}
    after = {name: tensor for name, tensor in tensors(model).items() if not name.startswith(tuple(f"{p}." for p in held))}
    assert before.keys() == after.keys() and len(after) > 5
    assert all(torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in after.items())

    reference, tokens = write_back(original, model), ids(2, 12)
    found, expected = logits(model, tokens), logits(reference, tokens)
    size = expected.abs().max()
    torch.testing.assert_close(found / size, expected / size, **tolerance(torch.float32))
    assert not torch.equal(found, logits(original, tokens))

    assert torch.equal(write(model), write(reference))
    if kind not in NO_STATIC_CACHE:
        assert torch.equal(write(model, cache_implementation="static"), write(reference))

    if kind in CANNOT_SAVE:
        with pytest.raises(ValueError, match="cannot be saved yet"):
            dpamoe.save(model, tmp_path / "saved")
        return
    again = dpamoe.load(dpamoe.save(model, tmp_path / "saved"), budget=8)
    assert torch.equal(logits(again, tokens), found)


def test_enough_models_are_covered():
    assert len(set(model_types()) - REFUSED) >= AT_LEAST


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_refused_model_is_left_as_it_is(kind):
    model = language_model(kind)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="no routed experts were found"):
        dpamoe.transform(model, calibration=ids(4, 32), spec=SPEC)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPILED)
def test_one_graph_for_all_budgets_and_three_for_all_lengths(kind):
    """fullgraph=True forbids graph breaks. The first graph is made for the sizes that Dynamo saw, the second for a single
    token, the third for any number of tokens: one more than a site alone, which is called with a symbolic size at once."""
    _, model = encoded(kind)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    tokens = ids(2, 12)
    dpamoe.set_budget(model, 2)
    low = logits(compiled, tokens)
    for step in range(10):
        dpamoe.set_budget(model, 2.6 + 0.6 * step)
        torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1 and not torch.equal(logits(compiled, tokens), low)
    for length in LENGTHS:
        tokens = ids(1, length)
        torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    assert len(graphs) <= 3
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", INDUCTOR)
def test_eager_and_inductor_agree(kind, tolerance):
    _, model = encoded(kind)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="dpamoe", fullgraph=True)
    for budget, tokens in [(8, ids(2, 12)), (2.6, ids(2, 12)), (4.3, ids(2, 12)), (4.3, ids(3, 7)), (4.3, ids(3, 9))]:
        dpamoe.set_budget(model, budget)
        dpamoe.stats(model, reset=True)
        expected = logits(model, tokens)
        spent = dpamoe.stats(model, reset=True)
        size = expected.abs().max()
        torch.testing.assert_close(logits(compiled, tokens) / size, expected / size, **tolerance(torch.float32))
        assert dpamoe.stats(model) == spent
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch.compiler.reset()
