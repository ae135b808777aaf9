"""The compile backend: found by its name, fuses a transformed model, counts as eager does, and says what it cannot do."""

import copy

import pytest
import torch
from torch import nn

import dpamoe
from dpamoe.modules import encoded_experts
from dpamoe.passes.backend import compile_backend

from .marks import some_slow


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that reach Inductor, with its settings; they run as they are, so that nothing is built."""
    from torch._inductor import compile_fx

    held = []

    def run(gm, example_inputs, config_patches=None):
        held.append((gm, config_patches))
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", run)
    torch.compiler.reset()
    yield held
    torch.compiler.reset()


def ops(gm):
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function" and "dpamoe" in str(n.target)]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def test_it_is_registered_by_name():
    assert "dpamoe" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("dpamoe") is compile_backend


@pytest.mark.parametrize("options", [None, {"max_autotune": False}])
def test_experts_and_allocator_are_fused_in_one_graph(transformed, random_ids, graphs, options):
    _, model = transformed("qwen3_moe")
    expected = logits(model, random_ids(2, 12))
    compiled = torch.compile(model, backend="dpamoe", fullgraph=True, options=options)
    torch.testing.assert_close(logits(compiled, random_ids(2, 12)), expected, rtol=1e-5, atol=1e-5)
    ((gm, patches),) = graphs
    assert ops(gm) == ["linear_route", "routed_ffn_counted"] * 2 and patches == options


@pytest.mark.parametrize("family", some_slow(["qwen3_moe", "gpt_oss", "deepseek_v3"], ["gpt_oss"]))
def test_counts_are_those_of_eager(transformed, random_ids, graphs, family):
    _, model = transformed(family)
    compiled = torch.compile(model, backend="dpamoe", fullgraph=True)
    spent = []
    for run in (model, compiled):
        for budget, length in [(2.0, 5), (3.25, 12), (8.0, 12)]:
            dpamoe.set_budget(model, budget)
            logits(run, random_ids(2, length))
        spent.append(dpamoe.stats(model, reset=True))
    assert spent[0] == spent[1] and spent[0]["pairs"] > 0
    assert len(graphs) == 2  # a fixed length, then any


def test_an_activation_that_no_kernel_fuses_stays_a_graph(random_model, random_ids, graphs):
    model = random_model("gpt_oss", {"swiglu_limit": 5.0})
    if model.model.layers[0].mlp.experts.limit != 5.0:
        pytest.skip("the installed transformers does not read swiglu_limit, so this activation is one that kernels fuse")
    dpamoe.transform(model, 3, calibration=random_ids(4, 50), spec=dpamoe.EncodeSpec(group_size=32))
    expected = logits(model, random_ids(2, 12))
    compiled = torch.compile(model, backend="dpamoe", fullgraph=True)
    torch.testing.assert_close(logits(compiled, random_ids(2, 12)), expected, rtol=1e-5, atol=1e-5)
    assert ops(graphs[0][0]) == ["linear_route", "allocate_counted", "expert_matmul", "expert_matmul"] * 2


def test_a_model_without_experts_goes_to_inductor_as_it_is(graphs):
    layer = nn.Linear(4, 4)
    compiled = torch.compile(layer, backend="dpamoe", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 4)), layer(torch.ones(2, 4))) and len(graphs) == 1


class Inline(nn.Module):
    """Stacked weights in a form that is nobody's experts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(3, 4, 4)) for _ in range(2))

    def forward(self, hidden):
        return torch.einsum("th,ehi->eti", hidden, self.first).sum(0) @ self.second.mean(0)


def test_stacked_weights_that_are_not_recognised_ask_for_transform(graphs):
    compiled = torch.compile(Inline(), backend="dpamoe", fullgraph=True)
    with pytest.raises(Exception, match=r"call dpamoe.transform\(model\) before"), pytest.warns(UserWarning):
        compiled(torch.randn(5, 4))
    assert graphs == []


def test_the_graph_of_dynamo_is_not_touched(transformed, random_ids, graphs):
    _, model = transformed("olmoe")
    held = []

    def watch(gm, example_inputs):
        before = [node.format_node() for node in gm.graph.nodes]
        run = compile_backend(gm, example_inputs)
        held.append(before == [node.format_node() for node in gm.graph.nodes])
        return run

    logits(torch.compile(model, backend=watch, fullgraph=True), random_ids(2, 12))
    assert held == [True] and "routed_ffn_counted" in ops(graphs[0][0])


@pytest.mark.slow
def test_a_changed_spend_is_followed(transformed, random_ids, graphs):
    """Another allocation is another computation: compiled anew, and right."""
    _, model = transformed("qwen3_moe")
    compiled = torch.compile(model, backend="dpamoe", fullgraph=True)
    for allocation in ("dpa", "uniform"):
        dpamoe.api.set_spend(model, budget=3.25, allocation=allocation)
        expected = logits(model, random_ids(2, 12))
        torch.testing.assert_close(logits(compiled, random_ids(2, 12)), expected, rtol=1e-5, atol=1e-5)


def test_a_copy_of_a_compiled_model_counts_for_itself(transformed, random_ids, graphs):
    _, model = transformed("qwen3_moe")
    twin = copy.deepcopy(model)
    logits(torch.compile(model, backend="dpamoe", fullgraph=True), random_ids(2, 12))
    assert dpamoe.stats(model)["pairs"] == 2 * 12 * 2 * 2 and dpamoe.stats(twin)["pairs"] == 0
    assert len(encoded_experts(twin)) == 2
