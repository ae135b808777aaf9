"""What is known of a model before any weight is read."""

import pytest
from torch import nn

from dpamoe.layers import layers_of, on_meta, outline
from dpamoe.source import open_source

from . import sources


def test_an_outline(random_model, tmp_path):
    changes = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    source = open_source(sources.per_expert(random_model("qwen3_moe", changes), tmp_path / "source"))
    plan = outline(source)
    assert plan.layers == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert [sketch.path for sketch in plan.sketches] == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
    assert plan.rest == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert plan.bytes_of(plan.rest) == 4 * (2 * 128 * 64 + 64) and plan.experts == 16 and plan.refused == {}
    assert all(parameter.is_meta for parameter in plan.model.parameters())


def test_layers_are_the_outermost_lists_around_experts():
    def block():
        return nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})})

    model = nn.ModuleDict({
        "encoder": nn.ModuleDict({"block": nn.ModuleList([block(), nn.Linear(2, 2)])}),
        "decoder": nn.ModuleDict({"block": nn.ModuleList([block()])}), "head": block(),
    })  # fmt: skip
    paths = ["encoder.block.0.mlp.experts", "decoder.block.0.mlp.experts"]
    assert layers_of(model, paths) == ["encoder.block.0", "encoder.block.1", "decoder.block.0"]
    assert layers_of(model, ["head.mlp.experts"]) == ["head.mlp"]


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantised_model_is_built_as_a_plain_one(random_model, tmp_path, method):
    model = random_model("deepseek_v3" if method == "fp8" else "gpt_oss")
    plain = sources.per_expert(model, tmp_path / "source")
    folder, _ = sources.fp8(plain, tmp_path / "q", 128) if method == "fp8" else sources.mxfp4(plain, tmp_path / "q")
    empty = on_meta(open_source(folder))
    assert {name: p.shape for name, p in empty.named_parameters()} == {name: p.shape for name, p in model.named_parameters()}
    assert not hasattr(empty.config, "quantization_config")


def test_code_of_its_own_is_neither_run_nor_asked_about(random_model, tmp_path, monkeypatch):
    folder = sources.per_expert(random_model("qwen3_moe"), tmp_path / "source")
    own = {"model_type": "of_nobody", "architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "own.OwnConfig"}}
    sources.change_config(folder, **own)
    (folder / "own.py").write_text("raise SystemExit('was run')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    with pytest.raises(ValueError, match="names architecture OwnForCausalLM, .* transformed in memory"):
        outline(open_source(folder))
    sources.change_config(folder, architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(ValueError, match="source"):
        outline(open_source(folder))
