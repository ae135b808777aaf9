"""The front door on real model families: what changes, what stays, what it costs, what it refuses."""

import copy
import logging
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpamoe
from dpamoe import api
from dpamoe.kernels.grouped import decode
from dpamoe.modules import EncodedExperts, encoded_experts, layer_shape
from dpamoe.passes import verify
from dpamoe.sites import ExpertWeights, scatter

from . import recorded

SPEC = dpamoe.EncodeSpec(group_size=32)
EXPERTS, HIDDEN, INNER = 8, 32, 16


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=random) * INNER**-0.5)

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for slot in range(index.shape[1]):
            gate, up = torch.einsum("th,tuh->tu", hidden, self.up[index[:, slot]]).chunk(2, -1)
            rows = torch.einsum("ti,tci->tc", F.silu(gate) * up, self.down[index[:, slot]])
            out = out + weights[:, slot, None] * rows
        return out


class Block(nn.Module):
    """No Hugging Face model: a bare router, whose scores nobody can watch, before experts; `closed` ones are never chosen."""

    def __init__(self, closed=()):
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)))
        self.bias = nn.Parameter(torch.zeros(EXPERTS))
        self.bias.data[list(closed)] = -1e4
        self.experts = Experts()

    def forward(self, hidden, scale=1.0):
        weights, index = (hidden @ self.router.T + self.bias).softmax(-1).topk(2)
        return hidden + scale * self.experts(hidden, index, weights)


def rows(count, seed=0):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def outside(model, paths):
    """Bytes of every parameter and buffer that is not in the modules at `paths`."""
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = {name: tensor for name, tensor in named if not name.startswith(tuple(f"{path}." for path in paths))}
    return {name: (tensor.dtype, tensor.detach().numpy().tobytes()) for name, tensor in kept.items()}


def write_back(original, model):
    """Put the weights that `model` decodes from all its planes into the original's own modules."""
    for path, encoded in encoded_experts(model).items():
        parts = (encoded.gate_up_proj.weight, encoded.down_proj.weight)
        up, down = (decode(part, len(part.planes)) for part in parts)
        weights = ExpertWeights(up, down, encoded.up_bias, encoded.down_bias)
        scatter(weights, original.get_submodule(path), encoded.site.layout)


def spent_by(model, ids, **inputs):
    """Chunks of every site in one pass over `ids` [B, L], each [B, L, A]."""
    with recorded.planes() as seen:
        out = logits(model, ids, **inputs)
    return [chunks.view(*ids.shape, -1) for chunks in seen], out


def test_nothing_outside_the_experts_changes(family, transformed):
    """Router, shared experts with their gates, attention, norms, dense layers: equal to the last bit."""
    original, model = transformed(family)
    paths = list(encoded_experts(model))
    before, after = outside(original, paths), outside(model, paths)
    assert after == before
    assert any("gate" in name or "router" in name for name in after)
    shared = [name for name in after if "shared_expert" in name]
    assert bool(shared) == (family in ("qwen2_moe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "ergo"))
    kinds = [
        [(path, type(module)) for path, module in each.named_modules() if not path.startswith(tuple(paths))]
        for each in (original, model)
    ]
    assert kinds[0] == kinds[1] and len(kinds[0]) > 20


def test_router_of_the_first_site_decides_as_before(family, transformed, random_ids):
    original, model = transformed(family)
    path = next(iter(encoded_experts(model)))
    calls = []
    for each in (original, model):
        hook = each.get_submodule(path).register_forward_pre_hook(lambda module, args: calls.append(args))
        logits(each, random_ids(2, 24))
        hook.remove()
    assert all(torch.equal(before, after) for before, after in zip(*calls, strict=True))


def test_surgery_costs_nothing_at_k_max(family, transformed, random_ids, tolerance):
    original, model = transformed(family)
    untouched = logits(original, random_ids(2, 24))
    write_back(original, model)
    dpamoe.set_budget(model, 8)
    found = logits(model, random_ids(2, 24))
    torch.testing.assert_close(found, logits(original, random_ids(2, 24)), **tolerance(torch.float32))
    assert not torch.equal(found, untouched)
    assert (found - untouched).norm() <= 0.01 * untouched.norm()  # measured .0008 to .0044 over the families


def test_surgery_costs_nothing_on_the_shipped_model(tiny_model, tiny_encoded, tolerance):
    original, model = tiny_model().float(), tiny_encoded().float()
    ids = torch.randint(3, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    write_back(original, model)
    dpamoe.set_budget(model, 8)
    torch.testing.assert_close(logits(model, ids), logits(original, ids), **tolerance(torch.float32))


@pytest.mark.parametrize("size", [0.5, 100.0])
def test_gpt_oss_biases_are_added_once(random_model, random_ids, tolerance, size):
    original = random_model("gpt_oss")
    for layer in original.model.layers:
        for bias in (layer.mlp.experts.gate_up_proj_bias, layer.mlp.experts.down_proj_bias):
            bias.data.normal_(std=size, generator=torch.Generator().manual_seed(3))
    model = dpamoe.transform(copy.deepcopy(original), 8, calibration=random_ids(8, 100), spec=SPEC)
    for path, encoded in encoded_experts(model).items():
        experts = original.get_submodule(path)
        assert torch.equal(encoded.down_bias, experts.down_proj_bias)
        halves = torch.cat([experts.gate_up_proj_bias[:, 0::2], experts.gate_up_proj_bias[:, 1::2]], 1)
        assert torch.equal(encoded.up_bias, halves)
    write_back(original, model)
    torch.testing.assert_close(
        logits(model, random_ids(2, 24)), logits(original, random_ids(2, 24)), **tolerance(torch.float32)
    )


def test_a_second_transform_changes_only_the_budget(transformed):
    _, model = transformed("qwen3_moe")
    held = encoded_experts(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert dpamoe.transform(model, 3.5) is model
    assert dpamoe.transform(model, 3.5, spec=SPEC) is model
    assert encoded_experts(model) == held and dpamoe.report(model).budget == 3.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="already encoded with .*group_size=32"):
        dpamoe.transform(model, 3.0, spec=dpamoe.EncodeSpec(group_size=64))
    with pytest.raises(ValueError, match="originals were not kept"):
        dpamoe.transform(model, 3.0, keep_original=True)
    with pytest.raises(ValueError, match="budget is 9"):
        dpamoe.transform(model, 9)
    assert dpamoe.report(model).budget == 3.5


def shapes_of(model):
    return {layer_shape(experts.site, experts.spec) for experts in encoded_experts(model).values()}


def test_fallback_needs_measured_costs_before_anything_is_encoded(random_model, random_ids, store_costs):
    model = random_model("qwen3_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="E8 A2 H64 I32 g32 gated shared.*on cpu.*run `dpamoe tune`"):
        dpamoe.transform(model, 3, calibration=random_ids(4, 50), spec=SPEC, fallback="uniform")
    assert not encoded_experts(model) and not hasattr(model, "dpamoe_unfinished")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="fallback is 'always': use uniform, or None"):
        dpamoe.transform(model, 3, calibration=random_ids(4, 50), spec=SPEC, fallback="always")


def test_fallback_makes_planes_depend_on_the_batch_and_nothing_else_does(transformed, random_ids, store_costs):
    _, model = transformed("qwen3_moe")
    for shape in shapes_of(model):
        store_costs(shape, uniform_from=24)
    assert dpamoe.transform(model, 3.0, fallback="uniform") is model
    logits(model, random_ids(1, 23))
    assert len(dpamoe.stats(model, reset=True)["histogram"]) > 1
    logits(model, random_ids(2, 12))
    assert dpamoe.stats(model, reset=True)["histogram"] == {3: 2 * 24 * 2}
    dpamoe.transform(model, 5.0)  # only the budget
    logits(model, random_ids(2, 12))
    assert dpamoe.stats(model, reset=True)["histogram"] == {5: 2 * 24 * 2}
    dpamoe.set_spend(model, fallback=None)
    logits(model, random_ids(2, 12))
    assert len(dpamoe.stats(model, reset=True)["histogram"]) > 1


def test_fallback_at_transform(random_model, random_ids, store_costs, transformed):
    store_costs(*shapes_of(transformed("qwen3_moe")[1]), uniform_from=24)
    model = dpamoe.transform(random_model("qwen3_moe"), 3, calibration=random_ids(4, 50), spec=SPEC, fallback="uniform")
    assert {experts.uniform_from for experts in encoded_experts(model).values()} == {24}
    with dpamoe.budget(model, 4):
        assert all(experts.spend.fallback == "uniform" for experts in encoded_experts(model).values())


def test_fallback_without_costs_changes_no_site(transformed, store_costs):
    _, model = transformed("qwen3_moe")
    before = [experts.spend for experts in encoded_experts(model).values()]
    with pytest.raises(ValueError, match="run `dpamoe tune`"):
        dpamoe.set_spend(model, budget=3.0, fallback="uniform")
    assert [experts.spend for experts in encoded_experts(model).values()] == before


def test_an_interrupted_transform_is_not_a_success_and_can_be_finished(random_model, random_ids, monkeypatch, tmp_path):
    model, done = random_model("qwen3_moe"), []
    right = api.encode_site

    def stop_at_the_second(*args):
        if done:
            raise KeyboardInterrupt
        done.append(args)
        return right(*args)

    monkeypatch.setattr(api, "encode_site", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC)
    with pytest.raises(ValueError, match="encoded in part"):
        dpamoe.save(model, tmp_path / "half")
    monkeypatch.setattr(api, "encode_site", right)
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC)
    assert dpamoe.report(model).sites == 2
    dpamoe.save(model, tmp_path / "whole")


def test_transform_inside_inference_mode_is_usable_outside(random_model, random_ids):
    model = random_model("olmoe")
    with torch.inference_mode():
        dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC)
    model(random_ids(1, 5))
    dpamoe.set_budget(model, 3)
    assert dpamoe.stats(model, reset=True)["pairs"] > 0


def test_a_transformed_model_can_be_pickled(transformed, random_ids):
    _, model = transformed("qwen3_moe")
    again, ids = pickle.loads(pickle.dumps(model)), random_ids(1, 9)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_compiled_model_is_refused_with_what_to_do(random_model):
    with pytest.raises(TypeError, match="transform the model itself, then compile it"):
        dpamoe.transform(torch.compile(random_model("olmoe"), backend="eager"))


def test_transform_returns_the_model_itself_with_the_default_budget(random_model, random_ids):
    model = random_model("olmoe").train()
    assert dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC) is model
    assert dpamoe.report(model).budget == 4.0 and model.training
    assert all(experts.training for experts in encoded_experts(model).values())


def test_transform_is_deterministic(transformed, random_model, random_ids):
    _, first = transformed("qwen3_moe")
    again = dpamoe.transform(random_model("qwen3_moe"), calibration=random_ids(16, 125), spec=SPEC)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())


def test_revert_gives_back_the_same_numbers(family, random_model, random_ids):
    model = random_model(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = logits(model, random_ids(2, 24))
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC, keep_original=True)
    assert not torch.equal(logits(model, random_ids(2, 24)), before)
    assert dpamoe.revert(model) is model and encoded_experts(model) == {}
    assert torch.equal(logits(model, random_ids(2, 24)), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC)  # and once more


def test_revert_without_kept_originals_leaves_the_model_alone(transformed):
    _, model = transformed("qwen3_moe")
    held = encoded_experts(model)
    with pytest.raises(ValueError, match="keep_original=True"):
        dpamoe.revert(model)
    assert encoded_experts(model) == held


@pytest.mark.parametrize("keep", [False, True])
def test_original_weights_are_gone_unless_kept(random_model, random_ids, keep):
    model = random_model("qwen3_moe")
    alive = [weakref.ref(parameter) for layer in model.model.layers for parameter in layer.mlp.experts.parameters()]
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC, keep_original=keep)
    assert len(alive) == 4 and {reference() is not None for reference in alive} == {keep}
    assert not [name for name, _ in model.named_parameters() if "experts" in name]


@pytest.mark.parametrize("k_max, share", [(8, 0.58), (4, 0.30), (2, 0.155)])
def test_bytes_held_of_the_shipped_model(tiny_encoded, tiny_saved, k_max, share):
    model = tiny_encoded() if k_max == 8 else dpamoe.load(tiny_saved, 2, k_max)
    tensors = [t for experts in encoded_experts(model).values() for t in (*experts.parameters(), *experts.buffers())]
    held = sum({t.data_ptr(): t.nbytes for t in tensors}.values())  # stand-ins for planes that were not read share memory
    bf16 = 2 * 4 * 16 * (256 * 128 + 128 * 128)
    report = dpamoe.report(model)
    assert report.original_bytes == bf16
    assert report.encoded_bytes == bf16 * (k_max * (1 + 16 / 128) + 16 / 128) / 16
    assert report.encoded_bytes <= share * bf16
    assert 0 < held - report.encoded_bytes <= 0.002 * bf16  # residual tables, budget, counters
    assert held <= share * bf16


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.float()], ids=["half", "bfloat16", "float"]
)
def test_casting_the_model_leaves_what_is_encoded_alone(transformed, random_ids, cast):
    _, model = transformed("gpt_oss")
    dpamoe.set_budget(model, 3.3)
    before = {
        (path, name): tensor.clone()
        for path, experts in encoded_experts(model).items()
        for name, tensor in experts.named_buffers(remove_duplicate=False)
    }
    dtype = next(cast(model).parameters()).dtype
    for path, experts in encoded_experts(model).items():
        for name, tensor in experts.named_buffers(remove_duplicate=False):
            assert tensor.dtype == before[path, name].dtype and torch.equal(tensor, before[path, name])
    out = logits(model, random_ids(2, 24))
    assert out.dtype == dtype and torch.isfinite(out).all()
    assert dpamoe.stats(model)["mean_planes"] == 3.5  # floor(2 * 3.3 + .5) = 7 planes for two experts


def test_budget_is_spent_and_counted(transformed, random_ids):
    _, model = transformed("qwen3_moe")
    assert dpamoe.stats(model)["mean_planes"] is None
    for budget, per_token in [(2, 4), (2.25, 5), (3, 6), (7.9, 16), (8, 16)]:
        dpamoe.set_budget(model, budget)
        logits(model, random_ids(2, 24))
        stats = dpamoe.stats(model, reset=True)
        assert stats["mean_planes"] == per_token / 2 and stats["pairs"] == 2 * 2 * 24 * 2
        assert sum(k * count for k, count in stats["histogram"].items()) == 2 * 2 * 24 * per_token
        assert sum(stats["histogram"].values()) == stats["pairs"] and all(2 <= k <= 8 for k in stats["histogram"])
        assert {path: own["mean_planes"] for path, own in stats["sites"].items()} == dict.fromkeys(
            encoded_experts(model), per_token / 2
        )
    assert dpamoe.stats(model)["pairs"] == 0


def test_statistics_by_hand(transformed, random_ids):
    """Two sites, 8 experts of 3 * 64 * 32 weights, two chosen; a plane costs 1 + 16 / group bits, an offset 16 / group."""
    _, model = transformed("qwen3_moe")
    weights = 3 * 64 * 32
    empty = dpamoe.stats(model)
    assert empty["tokens"] == 0 and empty["share_at_k_max"] is None and empty["bytes_per_token"] is None
    with dpamoe.budget(model, 8):
        logits(model, random_ids(2, 24))
        stats = dpamoe.stats(model, reset=True)
    group = next(iter(encoded_experts(model).values())).spec.group_size
    bits = 8 * (1 + 16 / group) + 16 / group
    assert (stats["tokens"], stats["pairs"], stats["share_at_k_max"]) == (48, 2 * 48 * 2, 1.0)
    assert stats["bytes_per_token"] == 2 * 2 * weights * bits / 8
    for own in stats["sites"].values():
        assert own == {"mean_planes": 8.0, "bytes_per_token": 2 * weights * bits / 8, "histogram": {8: 96}}
    dpamoe.set_budget(model, 7.5)  # 15 planes for two experts: 8 and 7
    logits(model, random_ids(1, 20))
    stats = dpamoe.stats(model)
    assert stats["bytes_per_token"] == 2 * 2 * weights * (7.5 * (1 + 16 / group) + 16 / group) / 8
    assert stats["share_at_k_max"] == 0.5 and stats["histogram"] == {7: 40, 8: 40}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_thresholds_spend_on_average(random_model, random_ids, family):
    model, text = random_model(family), random_ids(16, 125)
    settings = {"calibration": text, "spec": dpamoe.EncodeSpec(group_size=32)}
    dpamoe.transform(model, 3.0, **settings, allocator="threshold", skip=True)
    held = encoded_experts(model)
    assert {experts.spend for experts in held.values()} == {dpamoe.SpendSpec(3.0, allocator="threshold", skip=True)}
    for budget, skip in ((3.0, True), (1.5, True), (4.2, False)):
        dpamoe.set_spend(model, budget=budget, skip=skip)
        assert len({experts.level for experts in held.values()}) == 1  # one for the whole model
        logits(model, text)
        stats = dpamoe.stats(model, reset=True)
        assert stats["drift"] == stats["mean_planes"] - budget
        assert abs(stats["drift"]) < 0.1  # a random model, whose gates change where planes are missing
    with dpamoe.budget(model, 8):
        assert {experts.level for experts in held.values()} == {0.0}
    assert held and all(experts.level > 0 and experts.spend.budget == 4.2 for experts in held.values())
    assert dpamoe.transform(model, 5.0) is model
    assert {experts.spend for experts in held.values()} == {dpamoe.SpendSpec(5.0, allocator="threshold", skip=False)}
    dpamoe.set_spend(model, allocator="exact")
    logits(model, text)
    assert dpamoe.stats(model)["drift"] == 0 and {experts.level for experts in held.values()} == {None}


def test_a_held_budget_on_text_of_another_kind(random_model, random_ids):
    model, text = random_model("qwen3_moe"), random_ids(16, 125)
    settings = {"calibration": text, "spec": dpamoe.EncodeSpec(group_size=32)}
    dpamoe.transform(model, 4.0, **settings, allocator="threshold")
    few_words, found = text % 7 + 3, {}
    for hold in (False, True):
        dpamoe.set_spend(model, hold=hold)
        for _ in range(7):
            dpamoe.stats(model, reset=True)
            logits(model, few_words)
        found[hold] = dpamoe.stats(model)
    assert abs(found[False]["drift"]) > 0.04 > 0.01 > abs(found[True]["drift"])  # measured -.060 and .000
    assert found[False]["shift"] is None and found[True]["shift"] < 0  # too few planes: thresholds were lowered
    dpamoe.set_spend(model, allocator="exact")
    assert dpamoe.stats(model)["shift"] is None


def test_thresholds_that_were_not_measured(transformed):
    _, model = transformed("qwen3_moe")
    before = {experts.spend for experts in encoded_experts(model).values()}
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts, which was not measured"):
        dpamoe.set_spend(model, allocator="threshold")
    assert {experts.spend for experts in encoded_experts(model).values()} == before


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_skipped_experts_in_the_statistics(transformed, random_ids, family):
    _, model = transformed(family)
    dpamoe.set_spend(model, budget=1.0, skip=True)  # two planes a token: one expert of two
    logits(model, random_ids(2, 24))
    stats = dpamoe.stats(model, reset=True)
    assert stats["mean_planes"] == 1.0 and stats["histogram"] == {0: 96, 2: 96} and stats["pairs"] == 2 * 48 * 2
    plane, fixed = next(iter(encoded_experts(model).values())).bytes_per_plane()
    assert stats["bytes_per_token"] == 2 * (2 * plane + fixed) / 8  # one expert of 8 in each of two layers
    assert dpamoe.stats(model)["pairs"] == 0
    dpamoe.set_budget(model, 0)
    assert torch.isfinite(logits(model, random_ids(2, 24))).all()
    assert dpamoe.stats(model)["histogram"] == {0: 192} and dpamoe.stats(model)["bytes_per_token"] == 0
    with pytest.raises(ValueError, match="2 to 8"):
        dpamoe.set_spend(model, skip=False)
    assert all(experts.spend.skip for experts in encoded_experts(model).values())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_no_token_is_ever_above_its_share(transformed, random_ids, family):
    """What a request can count on: floor(A k + .5) planes over a token's A experts, whatever its neighbours are."""
    _, model = transformed(family)
    for budget in (2, 2.1, 2.25, 2.5, 3.75, 5, 6.3, 7.99, 8):
        for allocation in ("dpa", "gate-linear", "gate-only", "residual-only", "uniform"):
            dpamoe.set_spend(model, budget=budget, allocation=allocation)
            with recorded.planes() as seen:
                for rows, length in ((1, 1), (3, 17)):
                    logits(model, random_ids(rows, length, seed=rows))
            for chunks in seen:
                assert chunks.sum(1).max() <= math.floor(chunks.shape[1] * budget + 0.5)
                assert chunks.min() >= 2 and chunks.max() <= 8
            assert len(seen) == 2 * len(encoded_experts(model))


def test_more_planes_come_closer(transformed, random_ids):
    original, model = transformed("qwen3_moe")
    exact, errors = logits(original, random_ids(2, 24)), []
    for budget in (2, 3, 4, 6, 8):
        with dpamoe.budget(model, budget):
            errors.append(float((logits(model, random_ids(2, 24)) - exact).norm()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 20


def test_budget_holds_inside_the_block_only(transformed):
    _, model = transformed("qwen3_moe")
    dpamoe.set_spend(model, budget=5.5, allocation="uniform")
    with dpamoe.budget(model, 2.5) as same:
        assert same is model and dpamoe.report(model).budget == 2.5
        with dpamoe.budget(model, 7):
            assert dpamoe.report(model).budget == 7
        assert dpamoe.report(model).budget == 2.5
    with pytest.raises(KeyError), dpamoe.budget(model, 3):
        raise KeyError
    assert {experts.spend for experts in encoded_experts(model).values()} == {dpamoe.SpendSpec(5.5, "uniform")}
    assert {float(experts.budget) for experts in encoded_experts(model).values()} == {5.5}


@pytest.mark.parametrize("value", [1.9, 8.1, 0, -3, float("nan"), float("inf")])
def test_budget_out_of_range_changes_nothing(transformed, value):
    _, model = transformed("qwen3_moe")
    dpamoe.set_budget(model, 3.5)
    with pytest.raises(ValueError, match="this model can spend 2 to 8"):
        dpamoe.set_budget(model, value)
    with pytest.raises(ValueError, match="this model can spend 2 to 8"), dpamoe.budget(model, value):
        pass
    assert {float(experts.budget) for experts in encoded_experts(model).values()} == {3.5}


def test_budget_is_bound_by_the_planes_held(tiny_saved):
    model = dpamoe.load(tiny_saved, 3, k_max=4)
    with pytest.raises(ValueError, match="2 to 4"):
        dpamoe.set_budget(model, 4.5)
    dpamoe.set_budget(model, 4)


@pytest.mark.parametrize("changes", [{"allocation": "best"}, {"scope": "world"}, {"budget": 9}])
def test_spend_that_does_not_fit_changes_no_site(transformed, changes):
    _, model = transformed("qwen3_moe")
    before = [experts.spend for experts in encoded_experts(model).values()]
    with pytest.raises(ValueError):
        dpamoe.set_spend(model, **changes)
    assert [experts.spend for experts in encoded_experts(model).values()] == before


@pytest.mark.parametrize("call", [dpamoe.report, dpamoe.stats, dpamoe.revert, lambda model: dpamoe.set_budget(model, 4)])
def test_a_model_that_is_not_transformed_says_so(random_model, call):
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM holds no encoded experts"):
        call(random_model("qwen3_moe"))
    with pytest.raises(ValueError, match="holds no encoded experts"), dpamoe.budget(nn.Linear(2, 2), 4):
        pass


def test_report_by_hand(transformed):
    original, model = transformed("deepseek_v3")
    dpamoe.set_budget(model, 3)
    report = dpamoe.report(model)
    weights = 8 * (64 * 64 + 64 * 32)
    assert (report.sites, report.experts, report.budget) == (1, 8, 3.0)
    assert report.original_bytes == 4 * weights
    assert report.bits_per_weight == 3 * (1 + 16 / 32) + 16 / 32
    assert report.encoded_bytes == weights * (8 * 1.5 + 0.5) / 8
    assert report.expert_share == weights / sum(parameter.numel() for parameter in original.parameters())
    assert report.unreached == {} and report.refused == {}
    assert "routed experts encoded: 8 of 8 in 1 sites" in str(report)
    assert report.as_dict()["bits_per_weight"] == 5.0
    assert api.expert_bytes(model, 3) == weights * 5 / 8


def test_a_dense_model_is_an_error(random_model):
    model = random_model("llama")
    before = outside(model, [])
    with pytest.raises(ValueError, match="no routed experts were found in LlamaForCausalLM: it looks dense"):
        dpamoe.transform(model)
    assert outside(model, []) == before


def test_no_site_names_what_was_refused_and_why(random_model, monkeypatch):
    monkeypatch.setattr(verify, "TOLERANCE", -1.0)  # nothing can be as close as that
    with pytest.raises(
        ValueError, match=r"2 modules hold stacked weights .*model\.layers\.0\.mlp\.experts: its recovered experts"
    ):
        dpamoe.transform(random_model("gpt_oss"))


def test_what_is_left_alone_is_in_the_report(random_model, random_ids, caplog):
    """Next-token-prediction layers hold experts that a plain forward never calls."""
    model = random_model("qwen3_moe")
    model.mtp = copy.deepcopy(model.model.layers[0].mlp)
    with caplog.at_level(logging.WARNING, "dpamoe"):
        dpamoe.transform(model, calibration=random_ids(4, 50), spec=SPEC)
    assert dpamoe.report(model).refused == {"mtp.experts": "the example inputs never reached it"}
    assert "left alone: mtp.experts" in str(dpamoe.report(model)) and "left alone: mtp.experts" in caplog.text
    assert not isinstance(model.mtp.experts, EncodedExperts)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_weights_that_are_not_finite_name_the_tensor(random_model, random_ids, name, value):
    model = random_model("qwen3_moe")
    getattr(model.model.layers[1].mlp.experts, name).data[5, 1, 2] = value
    check_refused(model, random_ids, ValueError, rf"model\.layers\.1\.mlp\.experts\.{name} .*experts 5", {})


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"budget": 1.5}, ValueError, "2 to 8"),
        ({"budget": 6, "spec": dpamoe.EncodeSpec(group_size=32, k_max=5)}, ValueError, "2 to 5"),
        ({"spec": dpamoe.EncodeSpec()}, ValueError, r"group_size 128 exceeds the 64 inputs of model\.layers\.0\.mlp\.experts"),
        ({"spec": dpamoe.EncodeSpec(group_size=64)}, ValueError, r"group_size 64 exceeds the 32 inputs .*down"),
        ({"calibration": ""}, ValueError, "give token ids"),
        ({"calibration": []}, ValueError, "empty iterable"),
        ({"calibration": torch.zeros(0).long()}, ValueError, "no token ids"),
        ({"calibration": torch.tensor([5, 128, 7])}, ValueError, "5 to 128, the model knows 0 to 127"),
        ({"calibration": [3.5, 4, 5]}, TypeError, "inputs are float"),
        ({"calibration": [{"input_ids": torch.zeros(1, 4)}]}, (RuntimeError, TypeError), None),  # the model's own error
    ],
)
def test_bad_input_leaves_the_model_as_it_was(random_model, random_ids, arguments, error, words):
    check_refused(random_model("qwen3_moe"), random_ids, error, words, arguments)


def check_refused(model, random_ids, error, words, arguments):
    before, out = outside(model, []), logits(model, random_ids(2, 24))
    arguments = {"calibration": random_ids(4, 50), "spec": SPEC, **arguments}
    with pytest.raises(error, match=words):
        dpamoe.transform(model, **arguments)
    assert outside(model, []) == before and encoded_experts(model) == {}
    torch.testing.assert_close(logits(model, random_ids(2, 24)), out, rtol=0, atol=0, equal_nan=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_group_size_that_does_not_divide_pads_and_says_so(random_model, random_ids, caplog, tolerance):
    original = random_model("qwen3_moe", {"moe_intermediate_size": 20})
    model = copy.deepcopy(original)
    with caplog.at_level(logging.WARNING, "dpamoe"):
        dpamoe.transform(model, 8, calibration=random_ids(4, 50), spec=dpamoe.EncodeSpec(group_size=14))
    for words in ("(up): group_size 14 does not divide its 64 inputs", "(down): group_size 14 does not divide its 20 inputs"):
        assert f"model.layers.1.mlp.experts {words}" in caplog.text
    write_back(original, model)
    torch.testing.assert_close(
        logits(model, random_ids(2, 24)), logits(original, random_ids(2, 24)), **tolerance(torch.float32)
    )


def test_a_plain_module_needs_example_inputs():
    block = Block()
    with pytest.raises(TypeError, match=r"Block has no Hugging Face config .* pass example_inputs"):
        dpamoe.transform(block)
    assert type(block.experts) is Experts


@pytest.mark.parametrize(
    "example", [(rows(40),), {"hidden": rows(40), "scale": 2.0}, rows(40)], ids=["tuple", "dict", "tensor"]
)
def test_a_plain_module_with_example_inputs(example, tolerance):
    original = Block()
    model = copy.deepcopy(original)
    with pytest.warns(UserWarning, match="residuals are measured on the example inputs alone"):
        dpamoe.transform(model, 8, example_inputs=example, spec=dpamoe.EncodeSpec(group_size=16))
    write_back(original, model)
    torch.testing.assert_close(model(rows(9)), original(rows(9)), **tolerance(torch.float32))


def test_the_experts_alone_cannot_be_replaced():
    inputs = (rows(3), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="inside itself"):
        dpamoe.transform(Experts(), example_inputs=inputs)


def test_an_expert_of_zeros(random_model, random_ids, tolerance):
    original = random_model("qwen3_moe")
    for parameter in original.model.layers[0].mlp.experts.parameters():
        parameter.data[3] = 0
    model = dpamoe.transform(copy.deepcopy(original), calibration=random_ids(16, 125), spec=SPEC)
    encoded = model.model.layers[0].mlp.experts
    for part in (encoded.gate_up_proj.weight, encoded.down_proj.weight):
        assert not decode(part, 8)[3].any() and not decode(part, 2)[3].any()
    assert torch.isfinite(encoded.residuals).all() and not encoded.residuals[3, 1:].any()
    dpamoe.set_budget(model, 8)
    write_back(original, model)
    torch.testing.assert_close(
        logits(model, random_ids(2, 24)), logits(original, random_ids(2, 24)), **tolerance(torch.float32)
    )


def test_experts_that_calibration_does_not_reach_are_listed(caplog):
    model = Block(closed=(2, 5))
    with caplog.at_level(logging.WARNING, "dpamoe"):
        dpamoe.transform(model, example_inputs=(rows(3),), calibration=[(rows(200),)], spec=dpamoe.EncodeSpec(group_size=16))
    report = dpamoe.report(model)
    assert report.unreached == {"experts": [2, 5]}
    assert "no calibration token reached experts: experts [2, 5]" in str(report)
    assert "no calibration token reached experts 2, 5" in caplog.text
    table = model.experts.residuals
    assert torch.isfinite(table).all() and (table[[2, 5], 2:] > 0).all() and (table[:, 2:-1] >= table[:, 3:]).all()


def test_more_experts_than_calibration_tokens(random_model, random_ids):
    model = random_model("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 1})
    dpamoe.transform(model, calibration=random_ids(1, 8), spec=SPEC)
    for experts in encoded_experts(model).values():
        assert torch.isfinite(experts.residuals).all() and (experts.residuals[:, 2:] > 0).all()
    assert dpamoe.report(model).experts == 128
    assert torch.isfinite(logits(model, random_ids(2, 24))).all()


@pytest.mark.parametrize("form", ["ids", "rows", "dicts", "tuples", "generator", "none"])
def test_forms_of_calibration_for_a_language_model(random_model, random_ids, residual_tolerance, form):
    """Batches of the same tokens give the same table, in whatever form; None lets the model write its own."""
    ids = random_ids(16, 125)
    parts = ids.split(4)
    forms = {
        "ids": ids.flatten(), "rows": ids, "dicts": [{"input_ids": part} for part in parts],
        "tuples": [(part,) for part in parts], "generator": (part for part in parts), "none": None,
    }  # fmt: skip
    state = torch.random.get_rng_state()
    model = dpamoe.transform(random_model("olmoe"), calibration=forms[form], spec=SPEC)
    assert torch.equal(torch.random.get_rng_state(), state)
    table = model.model.layers[0].mlp.experts.residuals
    assert torch.isfinite(table).all() and (table[:, 2:] > 0).all() and dpamoe.report(model).unreached == {}
    if form in ("dicts", "tuples", "generator"):
        same = dpamoe.transform(random_model("olmoe"), calibration=list(parts), spec=SPEC)
        torch.testing.assert_close(table, same.model.layers[0].mlp.experts.residuals, rtol=0, atol=0)
    if form == "rows":
        same = dpamoe.transform(random_model("olmoe"), calibration=ids.flatten(), spec=SPEC)
        torch.testing.assert_close(table, same.model.layers[0].mlp.experts.residuals, rtol=0, atol=0)


@pytest.mark.slow
def test_calibration_text_is_read_with_the_tokenizer_of_the_model(tiny_model, tiny_dir):
    from dpamoe.text import load_tokenizer, token_ids

    text = (tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")[:20000]
    ids = token_ids(load_tokenizer(tiny_dir), text)
    spec = dpamoe.EncodeSpec(iterations=0)
    by_text, by_ids = (dpamoe.transform(tiny_model(), calibration=given, spec=spec) for given in (text, ids))
    for left, right in zip(encoded_experts(by_text).values(), encoded_experts(by_ids).values(), strict=True):
        assert torch.equal(left.residuals, right.residuals)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generation_with_a_cache_equals_greedy_steps(transformed, random_ids, family):
    original, model = transformed(family)
    prompt = random_ids(2, 5)
    for each in (original, model):
        steps = prompt
        for _ in range(8):
            following = logits(each, steps)[:, -1:]
            following[..., 2] = -torch.inf  # the end token is held back below
            steps = torch.cat([steps, following.argmax(-1)], 1)
        written = each.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=8, max_new_tokens=8,
            pad_token_id=0,
        )  # fmt: skip
        assert torch.equal(written, steps)
    assert dpamoe.stats(model)["mean_planes"] == 4.0


@pytest.mark.parametrize("padding", [0, 5, 50])
def test_left_padding_changes_no_real_token(transformed, random_ids, tolerance, padding):
    _, model = transformed("qwen3_moe")
    dpamoe.set_budget(model, 3.25)
    ids = random_ids(2, 24)
    padded = F.pad(ids, (padding, 0), value=0)
    mask = F.pad(torch.ones_like(ids), (padding, 0))
    chunks, out = spent_by(model, ids)
    padded_chunks, padded_out = spent_by(model, padded, attention_mask=mask)
    assert len(chunks) == 2
    assert all(torch.equal(more[:, padding:], less) for more, less in zip(padded_chunks, chunks, strict=True))
    torch.testing.assert_close(padded_out[:, padding:], out, **tolerance(torch.float32))


def test_right_padding_and_batch_size_change_no_real_token(transformed, random_ids, tolerance):
    """As evaluation harnesses send it: padded on the right, no attention mask."""
    _, model = transformed("qwen3_moe")
    dpamoe.set_budget(model, 3.25)
    ids, lengths = random_ids(4, 24), [24, 20, 9, 3]
    batch = ids.clone()
    for row, length in enumerate(lengths):
        batch[row, length:] = 0
    together, out = spent_by(model, batch)
    for row, length in enumerate(lengths):
        alone, own = spent_by(model, ids[row : row + 1, :length])
        for site, chunks in enumerate(alone):
            assert torch.equal(together[site][row, :length], chunks[0])
        torch.testing.assert_close(out[row, :length], own[0], **tolerance(torch.float32))


def test_a_copy_is_independent(transformed, random_ids):
    _, model = transformed("qwen3_moe")
    twin = copy.deepcopy(model)
    dpamoe.set_budget(twin, 2)
    logits(twin, random_ids(1, 8))
    assert dpamoe.report(model).budget == 4.0 and dpamoe.stats(model)["pairs"] == 0
