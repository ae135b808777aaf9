"""Models nobody here has heard of: code from the checkpoint, wrappers around a model, prefixes of sharded training."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, dynamic_module_utils

import dpamoe
from dpamoe.modules import encoded_experts
from dpamoe.passes.find import find_sites

CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class FooConfig(PretrainedConfig):
    model_type = "foo_of_nobody"

    def __init__(self, vocab_size=64, width=32, **more):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**more)


class Person(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return self.c(nn.functional.silu(self.a(x)) * self.b(x))


class Crowd(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ask = nn.Linear(width, 6, bias=False)
        self.people = nn.ModuleList([Person(width) for _ in range(6)])

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weight, chosen = torch.topk(self.ask(flat).softmax(-1), 2, dim=-1)
        out = torch.zeros_like(flat)
        for number, person in enumerate(self.people):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, person(flat[token]) * weight[token, slot, None])
        return out.view(x.shape)


class FooForCausalLM(PreTrainedModel):
    config_class = FooConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList([Crowd(config.width) for _ in range(2)])
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, **more):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return CausalLMOutput(logits=self.head(x))
"""


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A model whose classes come from the folder it is loaded from."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "foo"
    folder.mkdir()
    (folder / "foo.py").write_text(CODE)
    auto = {"AutoConfig": "foo.FooConfig", "AutoModelForCausalLM": "foo.FooForCausalLM"}
    config = {"architectures": ["FooForCausalLM"], "auto_map": auto, "model_type": "foo_of_nobody", "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig

    torch.manual_seed(0)
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(settings, trust_remote_code=True).eval()


def test_experts_whose_outputs_are_tiny_are_found(remote):
    """As freshly made models initialise them: one output is about a millionth of the residual stream."""
    findings = find_sites(remote, (), {"input_ids": torch.arange(3, 12).view(1, -1)})
    assert [site.path for site in findings.sites] == ["layers.0", "layers.1"] and findings.refused == []


def test_code_that_came_with_the_checkpoint(remote):
    for parameter in remote.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        expected = remote(ids).logits
        dpamoe.transform(remote, 8.0, calibration=torch.randint(3, 64, (400,)), spec=dpamoe.EncodeSpec(group_size=8))
        assert [path.split(".")[:2] for path in encoded_experts(remote)] == [["layers", "0"], ["layers", "1"]]
        error = (remote(ids).logits - expected).square().mean() / expected.square().mean()
        dpamoe.set_budget(remote, 2)
        coarse = (remote(ids).logits - expected).square().mean() / expected.square().mean()
    assert error < 1e-3 and coarse > 10 * error  # 8 planes against 2, relative squared error


class Wrapper(nn.Module):
    """As sharded training wraps a module: the same call, another prefix."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_prefixes_and_wrappers_do_not_hide_experts(random_model, random_ids, family):
    model = random_model(family)
    for layer in model.model.layers:
        layer.mlp = Wrapper(layer.mlp)
        layer.mlp._fsdp_wrapped_module.experts = Wrapper(layer.mlp._fsdp_wrapped_module.experts)
    sites = find_sites(Wrapper(model), (), {"input_ids": random_ids(1, 8)}).sites
    inner = "._fsdp_wrapped_module"
    assert [site.path for site in sites] == [f"_fsdp_wrapped_module.model.layers.{n}.mlp{inner}.experts{inner}" for n in (0, 1)]
