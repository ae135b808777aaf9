"""Finding routed experts: every family by what it computes, nothing that is not a site, no layout that only looks right."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpamoe
from dpamoe import program
from dpamoe.kernels.reference import ACTIVATIONS
from dpamoe.passes import find, verify
from dpamoe.passes.find import find_sites
from dpamoe.sites import ExpertLayout, ExpertWeights, Refusal, Stack

EXPERTS, HIDDEN, INNER = 6, 24, 12


def laid_out(up, down, up_bias=None, down_bias=None, up_t=False, down_t=False, interleaved=False):
    """Layout of experts in stacked parameters of these names."""
    biases = [None if name is None else Stack((name,)) for name in (up_bias, down_bias)]
    ups = () if biases[0] is None else (biases[0],)
    order = "interleaved" if interleaved else "rows"
    return ExpertLayout((Stack((up,), up_t),), Stack((down,), down_t), ups, biases[1], order)


PLAIN = laid_out("gate_up_proj", "down_proj")
GPT_OSS = laid_out("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", True, True, True)
ODD = {  # activation, rows of the first matmul, layout, and parameters beside the weights: biases, norms
    "gpt_oss": ("swigluoai", 64, GPT_OSS, 8 * (64 + 64)),
    "ergo": ("relu2", 32, laid_out("up_proj", "down_proj", up_t=True, down_t=True), 8 * 64),
}
# what each family of the conftest holds: paths of its sites; all have 8 experts, 64 -> 32 -> 64, two active
PATHS = {
    "qwen3_moe": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "qwen2_moe": ["model.layers.1.mlp.experts"],
    "olmoe": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "mixtral": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "granitemoe": ["model.layers.0.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"],
    "deepseek_v2": ["model.layers.1.mlp.experts"],
    "deepseek_v3": ["model.layers.1.mlp.experts"],
    "ernie4_5_moe": ["model.layers.1.mlp.experts"],
    "gpt_oss": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "ergo": ["model.layers.1.mlp.experts"],
}


class Experts(nn.Module):
    """Routed experts of our own under names that say nothing; `activation` stands between the two matmuls."""

    def __init__(self, activation, rows=2 * INNER):
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.alpha = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=random) * INNER**-0.5)
        self.omega = nn.Parameter(torch.randn(EXPERTS, rows, HIDDEN, generator=random) * HIDDEN**-0.5)
        self.activation = activation

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for slot in range(index.shape[1]):
            inner = self.activation(torch.einsum("th,tuh->tu", hidden, self.omega[index[:, slot]]))
            out = out + weights[:, slot, None] * torch.einsum("ti,tci->tc", inner, self.alpha[index[:, slot]])
        return out


class Block(nn.Module):
    """A router of two active experts before `experts`; `call` says how they are called."""

    def __init__(self, experts, call=None):
        super().__init__()
        self.scores, self.experts = nn.Linear(HIDDEN, EXPERTS), experts
        self.call = call or (lambda experts, hidden, index, weights: experts(hidden, index, weights))

    def forward(self, hidden):
        weights, index = self.scores(hidden).softmax(-1).topk(2)
        return hidden + self.call(self.experts, hidden, index, weights)


def found_in(block, tokens=9):
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    return find_sites(block, (hidden,))


def gated(function):
    return lambda inner: function(inner[..., :INNER]) * inner[..., INNER:]


def test_every_family_is_found_and_verified(family, random_model, random_ids):
    model = random_model(family)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    findings = find_sites(model, (), {"input_ids": random_ids(2, 16)})
    assert findings.refused == []
    assert [site.path for site in findings.sites] == PATHS[family]
    for site in findings.sites:
        assert (site.experts, site.top_k, site.hidden, site.inner, site.out) == (8, 2, 64, 32, 64)
        activation, rows, layout, others = ODD.get(family, ("silu_mul", 64, PLAIN, 0))
        assert (site.activation, site.up_rows, site.dtype, site.layout) == (activation, rows, "float32", layout)
        assert site.weights == 8 * (rows * 64 + 64 * 32) and site.parameters == site.weights + others
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_are_verified_in_fp32(random_model, random_ids, dtype):
    model = random_model("qwen3_moe").to(dtype)
    findings = find_sites(model, (), {"input_ids": random_ids(2, 16)})
    assert [site.path for site in findings.sites] == PATHS["qwen3_moe"]
    assert {site.dtype for site in findings.sites} == {str(dtype).removeprefix("torch.")}
    assert all(parameter.dtype == dtype for parameter in model.parameters())


@pytest.mark.parametrize(
    "act, name",
    [("gelu", "gelu_mul"), ("gelu_pytorch_tanh", "gelu_tanh_mul"), ("relu", "relu_mul"), ("sigmoid", "sigmoid_mul")],
)
def test_activation_is_recovered_from_the_numbers(random_model, random_ids, act, name):
    findings = find_sites(random_model("qwen3_moe", {"hidden_act": act}), (), {"input_ids": random_ids(2, 16)})
    assert [site.activation for site in findings.sites] == [name, name]


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_own_experts_under_meaningless_names(name):
    rows = 2 * INNER if name.endswith("_mul") or name == "swigluoai" else INNER
    (site,) = found_in(Block(Experts(ACTIVATIONS[name], rows))).sites
    assert (site.activation, site.layout) == (name, laid_out("omega", "alpha"))
    assert (site.experts, site.top_k, site.hidden, site.inner, site.up_rows) == (EXPERTS, 2, HIDDEN, INNER, rows)


def test_a_subclass_under_another_name_is_found(random_model, random_ids):
    model = random_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.herd = layer.mlp.experts
        layer.mlp.herd.__class__ = type("Zebra", (type(layer.mlp.experts),), {})
        del layer.mlp.experts
        layer.mlp.forward = MethodType(_herd_forward, layer.mlp)
    findings = find_sites(model, (), {"input_ids": random_ids(2, 16)})
    assert [site.path for site in findings.sites] == ["model.layers.0.mlp.herd", "model.layers.1.mlp.herd"]


def _herd_forward(self, hidden_states):
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, index = self.gate(flat)
    return self.herd(flat, index, weights).view_as(hidden_states)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_sites_and_residuals_do_not_depend_on_how_experts_run(random_model, random_ids, residual_tolerance, implementation):
    tables, sites = [], []
    for name in ("eager", implementation):
        model = random_model("qwen3_moe")
        model.set_experts_implementation(name)
        sites.append(find_sites(model, (), {"input_ids": random_ids(2, 16)}).sites)
        dpamoe.transform(model, calibration=random_ids(8, 125), spec=dpamoe.EncodeSpec(group_size=32))
        tables.append([layer.mlp.experts.residuals for layer in model.model.layers])
    assert sites[0] == sites[1] and len(sites[0]) == 2
    assert torch.equal(tables[0][0], tables[1][0])  # what reaches the first layer does not depend on it
    torch.testing.assert_close(tables[0][1] / tables[1][1], torch.ones(8, 9), **residual_tolerance)


@pytest.mark.parametrize("biases", [0.5, 100.0])
def test_gpt_oss_layout_holds_whatever_the_biases(random_model, random_ids, biases):
    model = random_model("gpt_oss")
    for layer in model.model.layers:
        for bias in (layer.mlp.experts.gate_up_proj_bias, layer.mlp.experts.down_proj_bias):
            bias.data.fill_(biases)
            bias.data[:, ::2] *= -1
    assert [site.layout for site in find_sites(model, (), {"input_ids": random_ids(2, 16)}).sites] == [GPT_OSS] * 2


def swap_gate_and_up(weights):
    gate, up = weights.up.chunk(2, dim=1)
    return ExpertWeights(torch.cat([up, gate], 1), weights.down, weights.up_bias, weights.down_bias)


def transpose_up(weights):
    return ExpertWeights(weights.up.mT, weights.down, weights.up_bias, weights.down_bias)  # 64 x 64 here: the shape fits


def drop_up_bias(weights):
    return ExpertWeights(weights.up, weights.down, None, weights.down_bias)


def drop_down_bias(weights):
    return ExpertWeights(weights.up, weights.down, weights.up_bias, None)


def shift_one_expert(weights):
    return ExpertWeights(weights.up, weights.down.roll(1, 0), weights.up_bias, weights.down_bias)


def damage_last_expert(weights):
    damaged = weights.down.clone()
    damaged[-1, 0, 0] *= 1.1
    return ExpertWeights(weights.up, damaged, weights.up_bias, weights.down_bias)


@pytest.mark.parametrize(
    "family, damage",
    [
        ("qwen3_moe", swap_gate_and_up), ("qwen3_moe", transpose_up), ("qwen3_moe", shift_one_expert),
        ("qwen3_moe", damage_last_expert), ("gpt_oss", swap_gate_and_up), ("gpt_oss", transpose_up),
        ("gpt_oss", drop_up_bias), ("gpt_oss", drop_down_bias),
    ],
)  # fmt: skip
def test_a_wrong_recovery_is_refused(random_model, random_ids, monkeypatch, family, damage):
    model = random_model(family)
    inputs = {"input_ids": random_ids(2, 16)}
    assert len(find_sites(model, (), inputs).sites) == 2
    right = verify.gather

    def wrong(experts, layout, count):
        weights = right(experts, layout, count)
        if damage is transpose_up and layout.ups[0].transposed != (family == "gpt_oss"):
            return weights  # two wrongs would make a right
        return damage(weights)

    monkeypatch.setattr(verify, "gather", wrong)
    findings = find_sites(model, (), inputs)
    assert findings.sites == []
    assert [refusal.path for refusal in findings.refused] == PATHS[family]
    assert all("reproduce its output" in refusal.reason for refusal in findings.refused)


@pytest.mark.parametrize(
    "activation",
    [
        lambda inner: F.silu(inner[..., :INNER].clamp(max=7)) * inner[..., INNER:].clamp(-7, 7),
        lambda inner: F.silu(inner[..., :INNER]) * inner[..., INNER:].clamp(-7, 7),
        lambda inner: 20 * torch.tanh(F.silu(inner[..., :INNER]) * inner[..., INNER:] / 20),
    ],
    ids=["clamp both", "clamp up", "soft cap"],
)
def test_what_shows_only_on_large_inputs_is_not_taken_for_silu(activation):
    block = Block(Experts(activation))
    hidden = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.01
    plain = Block(Experts(gated(F.silu)))
    plain.load_state_dict(block.state_dict())
    torch.testing.assert_close(block(hidden), plain(hidden), rtol=1e-5, atol=1e-7)  # nobody could tell from this input
    (site,) = find_sites(block, (hidden,)).sites
    assert site.activation == "graph"
    inner = torch.randn(5, 2 * INNER) * 40
    torch.testing.assert_close(program.activation(site)(inner), activation(inner), rtol=1e-5, atol=1e-5)
    assert [site.activation for site in find_sites(plain, (hidden,)).sites] == ["silu_mul"]


@pytest.mark.parametrize("changes", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.5}])
def test_other_constants_than_those_of_gpt_oss_are_not_taken_for_them(random_model, random_ids, changes):
    model, (name, value) = random_model("gpt_oss", changes), *changes.items()
    if getattr(model.model.layers[0].mlp.experts, name.removeprefix("swiglu_")) != value:
        pytest.skip("this transformers does not read the constants from the config")
    findings = find_sites(model, (), {"input_ids": random_ids(2, 16)})
    assert [site.activation for site in findings.sites] == ["graph"] * 2


class _Extra(Experts):
    def forward(self, hidden, index, weights, more=None):
        return super().forward(hidden, index, weights)


class _Dense(Experts):
    """Called with a dense weight for every expert, not with an index."""

    def forward(self, hidden, full):
        index = torch.arange(EXPERTS).expand(hidden.shape[0], -1)
        return super().forward(hidden, index, full)


class _OneHot(Experts):
    def forward(self, hidden, mask, weights):
        return super().forward(hidden, mask.long().topk(2).indices, weights)


class _Batched(Experts):
    def forward(self, hidden, index, weights):
        return super().forward(hidden[0], index[0], weights[0])[None]


class _Normed(Experts):
    """Not a sum of experts alone: a norm follows."""

    def forward(self, hidden, index, weights):
        return F.layer_norm(super().forward(hidden, index, weights), (HIDDEN,))


class _Stateful(Experts):
    """Depends on more than its three arguments."""

    calls = 0

    def forward(self, hidden, index, weights):
        self.calls += 1
        return super().forward(hidden, index, weights) * self.calls


class _Picky(Experts):
    def forward(self, hidden, index, weights):
        if index.shape[0] != 9:
            raise RuntimeError("nine tokens only")
        return super().forward(hidden, index, weights)


def _full(hidden, index, weights):
    return torch.zeros(hidden.shape[0], EXPERTS).scatter(1, index, weights)


def _one_hot(index):
    return F.one_hot(index, EXPERTS).sum(1).bool()


@pytest.mark.parametrize(
    "experts, call, reason",
    [
        (Experts, lambda e, h, i, w: e(hidden=h, index=i, weights=w), "hidden=float32 [9, 24], index=int64 [9, 2]"),
        (Experts, lambda e, h, i, w: e(h, i, weights=w), "int64 [9, 2], weights=float32 [9, 2]"),
        (_Extra, lambda e, h, i, w: e(h, i, w, None), "float32 [9, 2], NoneType"),
        (_Dense, lambda e, h, i, w: e(h, _full(h, i, w)), "float32 [9, 24], float32 [9, 6]"),
        (_OneHot, lambda e, h, i, w: e(h, _one_hot(i), w), "float32 [9, 24], bool [9, 6], float32 [9, 2]"),
        (_Batched, lambda e, h, i, w: e(h[None], i[None], w[None])[0], "float32 [1, 9, 24]"),
        (Experts, lambda e, h, i, w: h, "never reached"),
        (_Normed, None, "reproduce its output"),
        (_Stateful, None, "reproduce its output"),
        (_Picky, None, "RuntimeError: nine tokens only"),
    ],
)
def test_stacked_weights_called_otherwise_are_refused_with_a_reason(experts, call, reason):
    findings = found_in(Block(experts(gated(F.silu)), call))
    assert findings.sites == []
    (refusal,) = findings.refused
    assert refusal.path == "experts" and reason in refusal.reason


def test_weights_on_the_meta_device_are_refused():
    def call(experts, *inputs):
        return experts(*(tensor.to("meta") for tensor in inputs)).new_zeros(inputs[0].shape, device="cpu")

    findings = found_in(Block(Experts(gated(F.silu)).to("meta"), call))
    assert findings.sites == [] and "meta device" in findings.refused[0].reason


@pytest.mark.parametrize("name", ["alpha", "omega"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_name_their_tensor(name, value):
    block = Block(Experts(gated(F.silu)))
    getattr(block.experts, name).data[4, 3, 2] = value
    with pytest.raises(ValueError, match=rf"experts\.{name} holds NaN or infinite weights \(experts 4\)"):
        found_in(block)


class SoftMixture(nn.Module):
    """Every expert for every token: nothing is routed."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, hidden):
        inner = torch.einsum("th,eih->tei", hidden, self.up).relu()
        return torch.einsum("tei,ehi,te->th", inner, self.down, self.scores(hidden).softmax(-1))


class LayerList(nn.Module):
    """As many equal layers as a router could have experts, one after the other."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(HIDDEN, INNER), nn.SiLU(), nn.Linear(INNER, HIDDEN))  # noqa: E731
        self.layers = nn.ModuleList([make() for _ in range(EXPERTS)])
        self.scores = nn.Linear(HIDDEN, EXPERTS)  # its width is the number of layers, and it feeds nothing of them

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden, self.scores(hidden).topk(2)


class SharedStack(nn.Module):
    """Two stacked weights that every token meets whole, as in a bank of attention heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER)) for _ in range(2))

    def forward(self, hidden):
        query, key = (torch.einsum("th,ehi->eti", hidden, weight) for weight in (self.query, self.key))
        return query @ key.mT


@pytest.mark.parametrize("module, refused", [(SoftMixture, ["0"]), (LayerList, []), (SharedStack, ["0"])])
def test_nothing_is_found_where_nothing_is_routed(module, refused):
    findings = found_in(nn.Sequential(module()))
    assert findings.sites == []
    assert [refusal.path for refusal in findings.refused] == refused


def test_a_dense_model_has_neither_sites_nor_refusals(random_model, random_ids):
    findings = find_sites(random_model("llama"), (), {"input_ids": random_ids(2, 16)})
    assert findings == find.Findings([], [])


def test_an_output_as_wide_as_the_experts_is_no_router(random_model, random_ids):
    """Dense layers with out_features equal to the number of experts, beside real ones."""
    model = random_model("deepseek_v3", {"vocab_size": 128})
    model.model.layers[0].mlp.probe = nn.Linear(64, 8)
    findings = find_sites(model, (), {"input_ids": random_ids(2, 16)})
    assert [site.path for site in findings.sites] == PATHS["deepseek_v3"] and findings.refused == []


def test_experts_that_the_model_is_itself_are_refused():
    experts = Experts(gated(F.silu))
    findings = find_sites(experts, (torch.randn(3, HIDDEN), torch.zeros(3, 2).long(), torch.ones(3, 2)))
    assert findings.sites == [] and "inside itself" in findings.refused[0].reason


def test_experts_that_stand_in_two_places_are_refused(random_model, random_ids):
    """Replaced in one place they would stay as they are in the other: half a success, and no byte saved."""
    model = random_model("qwen3_moe", {"num_hidden_layers": 3})
    model.model.layers[2].mlp.experts = model.model.layers[0].mlp.experts
    findings = find_sites(model, (), {"input_ids": random_ids(2, 16)})
    assert [site.path for site in findings.sites] == ["model.layers.1.mlp.experts"]
    (refusal,) = findings.refused
    assert refusal.path == "model.layers.0.mlp.experts" and "also stands at model.layers.2.mlp.experts" in refusal.reason


def test_training_mode_is_kept_even_when_the_model_fails():
    block = Block(Experts(gated(F.silu))).train()
    found_in(block)
    assert block.training
    with pytest.raises(RuntimeError):
        find_sites(block, (torch.zeros(3, HIDDEN + 1),))
    assert block.training and not block.experts._forward_pre_hooks


def test_a_layer_that_the_example_never_runs_is_listed():
    """As with next-token-prediction layers, which hold experts that a plain forward does not call."""
    model = nn.Module()
    model.body, model.spare = Block(Experts(gated(F.silu))), Block(Experts(gated(F.silu)))
    model.forward = lambda hidden: model.body(hidden)
    findings = found_in(model)
    assert [site.path for site in findings.sites] == ["body.experts"]
    assert findings.refused == [Refusal("spare.experts", "the example inputs never reached it", EXPERTS)]
