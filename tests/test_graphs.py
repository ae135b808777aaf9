"""What transform makes of a block, as Dynamo sees it: a snapshot of the graph before and after, and that the numbers hold."""

import copy

import pytest
import torch
import transformers

import dpamoe
from dpamoe.kernels.grouped import decode
from dpamoe.modules import encoded_experts
from dpamoe.sites import ExpertWeights, scatter

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe"]
WRITTEN_WITH = ("5.25.0", "2.13.0")  # other releases of transformers and torch write other graphs; the numbers hold in all
BLOCKS = {"granitemoe": "model.layers.1.block_sparse_moe"}


def graph_of(block, hidden):
    """Dynamo's graph of a block, one line per call: result = operation(arguments)."""
    lines = []

    def backend(gm, inputs):
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
                lines.append(f"{node.name} = {target}({', '.join(source.name[-40:] for source in node.all_input_nodes)})")
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(block, backend=backend, fullgraph=True)(hidden)
    torch._dynamo.reset()
    return lines, result


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_before_and_after(random_model, random_ids, tolerance, snapshot, family):
    model = random_model(family)
    model.set_experts_implementation("grouped_mm")
    path = BLOCKS.get(family, "model.layers.1.mlp")
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    original = copy.deepcopy(model)
    before, _ = graph_of(model.get_submodule(path), hidden)
    dpamoe.transform(model, 8.0, calibration=random_ids(4, 50), spec=dpamoe.EncodeSpec(group_size=32))
    after, found = graph_of(model.get_submodule(path), hidden)
    for place, experts in encoded_experts(model).items():
        up, down = decode(experts.gate_up_proj.weight, 8), decode(experts.down_proj.weight, 8)
        scatter(ExpertWeights(up, down, None, None), original.get_submodule(place), experts.site.layout)
    expected = original.get_submodule(path)(hidden)
    first = [result[0] if isinstance(result, tuple) else result for result in (found, expected)]
    torch.testing.assert_close(*first, **tolerance(torch.float32))
    if (transformers.__version__, torch.__version__.split("+")[0]) != WRITTEN_WITH:
        pytest.skip("the numbers hold; the snapshot is of transformers {}, torch {}".format(*WRITTEN_WITH))
    assert {"before": before, "after": after} == snapshot


@pytest.mark.slow
def test_compiles_over_many_lengths(transformed, random_ids):
    """The first single token, then one graph for every other length."""
    _, model = transformed("qwen3_moe")
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=lambda gm, inputs: graphs.append(gm) or gm.forward, fullgraph=True)
    with torch.no_grad():
        for tokens in (1, 2, 3, 7, 64, 513):
            compiled(random_ids(1, tokens), use_cache=False)
    torch._dynamo.reset()
    assert len(graphs) <= 2
