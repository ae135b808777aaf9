"""Random weights at the shape of a real model: configs by name, sites as found with weights, layouts that decode."""

import pytest
import torch
from transformers import AutoConfig

from dpamoe import synthetic
from dpamoe.kernels import reference
from dpamoe.kernels.grouped import decode
from dpamoe.modules import encoded_experts
from dpamoe.passes.find import find_sites
from dpamoe.passes.weightless import sketch_sites
from dpamoe.spec import EncodeSpec, SpendSpec

CPU = torch.device("cpu")
SPEC = EncodeSpec(group_size=32)


@pytest.fixture
def folder(random_model, tmp_path):
    """Function that saves the config of a small random model and gives its folder."""

    def make(family, **changes):
        random_model(family, changes).config.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return make


def test_a_model_type_has_the_defaults_of_its_class():
    config = synthetic.read_config("qwen3_moe")
    assert config.to_dict() == AutoConfig.for_model("qwen3_moe").to_dict()


def test_changes_of_a_config(folder):
    changes = {"num_hidden_layers": 5, "moe_intermediate_size": 48, "rms_norm_eps": 1e-5}
    config = synthetic.read_config(folder("qwen3_moe"), changes)
    assert (config.num_hidden_layers, config.moe_intermediate_size, config.rms_norm_eps) == (5, 48, 1e-5)
    assert config.hidden_size == 64 and config.num_experts == 8


@pytest.mark.parametrize("layers", [1, 7])
def test_lists_of_layers_follow_their_number(folder, layers):
    config = synthetic.read_config(folder("gpt_oss"), {"num_hidden_layers": layers})
    assert config.layer_types == (["sliding_attention", "full_attention"] * 4)[:layers]


def test_an_encoded_folder_is_a_source_too(tiny_saved):
    config = synthetic.read_config(str(tiny_saved))
    assert getattr(config, "quantization_config", None) is None and config.num_experts == 16
    assert synthetic.held_spec(str(tiny_saved), None, None) == EncodeSpec()
    assert synthetic.held_spec(str(tiny_saved), 64, "tied") == EncodeSpec(group_size=64, scale_mode="tied")
    assert synthetic.held_spec("qwen3_moe", None, None) == EncodeSpec()


@pytest.mark.parametrize(
    "source, changes, words",
    [
        ("nowhere", None, "nowhere is no folder with a config.json and no model type of transformers"),
        ("{folder}", {"layers": 3}, "does not take layers=3: it has no field layers"),
        ("{folder}", {"text.layers": 3}, "it has no field text.layers"),
        ("{folder}", {"num_experts": "many"}, "does not take num_experts='many'"),
        ("{empty}", None, "has no config.json"),
    ],
)
def test_sources_and_changes_that_do_not_fit(folder, tmp_path, source, changes, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=words):
        synthetic.read_config(source.format(folder=folder("qwen3_moe"), empty=tmp_path / "empty"), changes)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("layers", [2, 7])
def test_sites_equal_those_of_all_layers(folder, family, layers):
    changes = {"num_hidden_layers": layers, **({"mlp_only_layers": [0, 5]} if family == "qwen2_moe" else {})}
    model, sites = synthetic.with_sites(synthetic.read_config(folder(family), changes), SPEC)
    sketches = sketch_sites(model, (), {"input_ids": torch.arange(4).view(1, 4)})
    shared = ("path", "experts", "top_k", "hidden", "inner", "out", "activation", "layout", "parameters")
    assert [[getattr(s, name) for name in shared] for s in sites] == [[getattr(s, name) for name in shared] for s in sketches]
    assert all(parameter.is_meta for parameter in model.parameters()) and len(synthetic.distinct(sites)) == 1


def test_sites_are_those_that_are_verified_with_weights(random_model, random_ids):
    model = random_model("gpt_oss")
    verified = find_sites(model, (), {"input_ids": random_ids(1, 8)}).sites
    _, sites = synthetic.with_sites(model.config, SPEC)
    for site, other in zip(sites, verified, strict=True):
        assert site.up_rows == other.up_rows and site.fused and other.fused and site.layout == other.layout


@pytest.mark.parametrize(
    "family, changes, spec, words",
    [
        ("llama", {}, SPEC, "no routed experts .* looks dense"),
        ("qwen3_moe", {}, EncodeSpec(group_size=64), "group_size 64 exceeds the 32 inputs of model.layers.0.mlp.experts"),
        ("qwen3_moe", {"hidden_act": "tanh"}, SPEC, "is not fused"),
        (
            "qwen3_moe",
            {"hidden_act": "none"},
            SPEC,
            "makes no qwen3_moe model of this config .KeyError: 'none'.: use sizes and",
        ),
        (
            "qwen3_moe",
            {"hidden_size": -4},
            SPEC,
            "makes no qwen3_moe model of this config .RuntimeError.*: use sizes and names",
        ),
        ("qwen3_moe", {"num_experts_per_tok": 0}, SPEC, "experts chooses 0 of 8 experts for a token: use 1 to 8"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, SPEC, "use another model, or sizes that go together"),
    ],
)
def test_models_that_cannot_be_made_up(folder, family, changes, spec, words):
    with pytest.raises(ValueError, match=words):
        synthetic.with_sites(synthetic.read_config(folder(family), changes), spec)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("in_features, group_size", [(64, 32), (52, 16), (52, -1)])
def test_random_planes_are_an_encoded_weight(random_encoded, in_features, group_size, tied):
    spec = EncodeSpec(group_size, scale_mode="tied" if tied else "shared")
    made = synthetic.encoded_weight(3, 5, in_features, spec, torch.Generator().manual_seed(0))
    wanted = random_encoded(3, 5, in_features, group_size, 8, tied)
    for name, tensor in wanted.tensors().items():
        assert (made.tensors()[name].shape, made.tensors()[name].dtype) == (tensor.shape, tensor.dtype)
    assert made.tensors().keys() == wanted.tensors().keys() and made.nbytes() == wanted.nbytes()
    if in_features % 8:
        assert all(int(plane[..., -1].max()) < 1 << in_features % 8 for plane in made.planes)
    size = float(decode(made, 8).square().mean().sqrt())
    assert 0.3 < size * in_features**0.5 < 3


def test_a_layer_computes_and_differs_by_seed(folder):
    _, (site, *_) = synthetic.with_sites(synthetic.read_config(folder("gpt_oss")), SPEC)
    first, again, other = (synthetic.encoded_layer(site, SPEC, CPU, seed) for seed in (0, 0, 1))
    hidden, index, weights = synthetic.routing(site, 6, CPU)
    assert first.up_bias is not None and (first.residuals.diff(n=2, dim=1) > 0).all()  # convex
    first.set_spend(SpendSpec(4.0))
    again.set_spend(SpendSpec(4.0))
    out = first(hidden, index, weights)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all()) and torch.equal(out, again(hidden, index, weights))
    assert not torch.equal(first.gate_up_proj.weight.planes[0], other.gate_up_proj.weight.planes[0])
    part = [(w.planes, w.scales, w.offset, w.unit, b) for w, b in (
        (first.gate_up_proj.weight, first.up_bias), (first.down_proj.weight, first.down_bias),
    )]  # fmt: skip
    wanted = reference.expert_ffn(hidden, index, weights, first.allocate(index, weights), *part, "swigluoai", 32)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def test_routing_is_a_routing():
    from dpamoe.sites import ExpertLayout, Site, Stack

    site = Site("experts", 8, 3, 16, 4, 16, 8, "silu_mul", ExpertLayout((Stack(("up",)),), Stack(("down",))), 0, "float32")
    hidden, index, weights = synthetic.routing(site, 50, CPU, seed=4)
    assert hidden.shape == (50, 16) and index.shape == weights.shape == (50, 3) and index.dtype == torch.int64
    assert index.unique().tolist() == list(range(8)) and all(len(set(row)) == 3 for row in index.tolist())
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(50), rtol=2e-2, atol=0)
    assert torch.equal(index, synthetic.routing(site, 50, CPU, seed=4)[1])
    assert not torch.equal(index, synthetic.routing(site, 50, CPU, seed=5)[1])


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_runs_and_ties_what_was_tied(folder, random_ids, tied):
    config = synthetic.read_config(folder("qwen3_moe"), {"tie_word_embeddings": tied})
    _, sites = synthetic.with_sites(config, SPEC)
    encoded, plain = synthetic.encoded_model(config, sites, SPEC, CPU), synthetic.plain_model(config, CPU, "grouped_mm")
    assert list(encoded_experts(encoded)) == [site.path for site in sites] and not encoded_experts(plain)
    for model in (encoded, plain):
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert (model.model.norm.weight == 1).all() and 0.01 < float(model.model.embed_tokens.weight.std()) < 0.03
        with torch.no_grad():
            assert bool(model(input_ids=random_ids(1, 8)).logits.isfinite().all())
    assert {type(parameter) for parameter in encoded.parameters()} == {torch.nn.Parameter}
    assert torch.equal(plain.model.rotary_emb.inv_freq, encoded.model.rotary_emb.inv_freq)
