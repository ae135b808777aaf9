"""Activations as programs: a graph and its steps say the same, also after JSON; parameters; errors."""

import json
import operator

import pytest
import torch
from torch import fx

from dpamoe import program
from dpamoe.kernels.reference import ACTIVATIONS
from dpamoe.sites import ExpertLayout, Site, Stack

aten = torch.ops.aten
WIDTH = 6


def capped_graph() -> fx.Graph:
    """20 tanh(silu(gate) clamp(up, -7, 7) / 20) · norm.weight, gate and up by turns."""
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")
    halves = graph.call_function(aten.split.Tensor, (hidden, WIDTH, -1))
    gate, up = (graph.call_function(operator.getitem, (halves, place)) for place in range(2))
    gate = graph.call_function(aten.silu.default, (gate,))
    up = graph.call_function(aten.clamp.default, (up, -7.0, 7.0))
    product = graph.call_function(aten.mul.Tensor, (gate, up))
    product = graph.call_function(aten.div.Tensor, (product, 20))
    product = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.tanh.default, (product,)), 20))
    wide = graph.call_function(aten._to_copy.default, (graph.get_attr("norm.weight"),), {"dtype": torch.float32})
    graph.output(graph.call_function(aten.mul.Tensor, (product, wide)))
    return graph


def capped(hidden, weight):
    gate, up = hidden.chunk(2, -1)
    return 20 * torch.tanh(torch.nn.functional.silu(gate) * up.clamp(-7, 7) / 20) * weight


def site(activation="graph", steps=None, post=None):
    layout = ExpertLayout((Stack(("up",)),), Stack(("down",)))
    return Site("experts", 4, 2, 8, WIDTH, 8, 2 * WIDTH, activation, layout, 0, "float32", program=steps, post=post)


def steps():
    return program.from_graph(capped_graph())


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_steps_compute_what_the_graph_computed_also_after_json(rows):
    weight = torch.rand(WIDTH).bfloat16()
    hidden = torch.randn(rows, 2 * WIDTH, generator=torch.Generator().manual_seed(0)) * 10
    stored = tuple(json.loads(json.dumps(steps())))
    for form in (steps(), stored):
        found = program.to_module(form, {"norm.weight": weight})(hidden)
        torch.testing.assert_close(found, capped(hidden, weight.float()), rtol=1e-6, atol=1e-6)


def test_a_module_gives_back_its_steps():
    assert program.from_graph(program.to_module(steps(), {"norm.weight": torch.ones(WIDTH)}).graph) == tuple(
        json.loads(json.dumps(steps()).replace("norm.weight", "norm_weight"))
    )


def test_parameters_are_listed_once_in_order():
    assert program.parameters_of(steps()) == ["norm.weight"]
    twice = (
        {"op": "aten.mul.Tensor", "args": [{"parameter": "b"}, {"parameter": "a"}], "kwargs": {"out": [{"parameter": "b"}]}},
    )
    assert program.parameters_of(twice) == ["b", "a"]
    assert program.parameters_of(None) == []


def test_own_parameters_of_activation_and_post():
    experts = torch.nn.Module()
    experts.norm, experts.other = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
    post = ({"op": "aten.mul.Tensor", "args": [{"step": 0}, {"parameter": "other.bias"}], "kwargs": {}},)
    found = program.own_parameters(site(steps=steps(), post=post), experts)
    assert list(found) == ["norm.weight", "other.bias"]
    assert found["norm.weight"].data_ptr() == experts.norm.weight.data_ptr() and not found["norm.weight"].requires_grad


def test_activation_and_after_of_a_site():
    assert program.activation(site("relu2")) is ACTIVATIONS["relu2"] and program.after(site("relu2")) is None
    hidden, weight = torch.randn(3, 2 * WIDTH), torch.ones(WIDTH)
    found = program.activation(site(steps=steps()), {"norm.weight": weight})(hidden)
    torch.testing.assert_close(found, capped(hidden, weight), rtol=1e-6, atol=1e-6)
    post = ({"op": "aten.neg.default", "args": [{"step": 0}], "kwargs": {}},)
    assert torch.equal(program.after(site("relu2", post=post))(hidden), -hidden)


def scaled_by_expert():
    """hidden · scale[expert], as steps after a way through JSON."""
    graph = fx.Graph()
    hidden, expert = graph.placeholder("hidden"), graph.placeholder(program.EXPERT, default_value=None)
    own = graph.call_function(aten.index.Tensor, (graph.get_attr("scale"), [expert]))
    graph.output(graph.call_function(aten.mul.Tensor, (hidden, own)))
    return tuple(json.loads(json.dumps(program.from_graph(graph))))


def test_rows_with_parameters_of_their_own_expert():
    found, scale = scaled_by_expert(), torch.rand(4, WIDTH)
    assert program.by_expert(found) and program.parameters_of(found) == ["scale"]
    assert not program.by_expert(steps()) and not program.by_expert(None)
    scaled = program.to_module(found, {"scale": scale})
    hidden, ids = torch.randn(5, WIDTH), torch.tensor([3, 0, 0, 2, 1])
    assert torch.equal(program.run(scaled, hidden, ids), hidden * scale[ids])
    assert torch.equal(program.run(scaled, hidden, 2), hidden * scale[2])
    assert program.from_graph(scaled.graph) == found


def test_what_reads_no_ids_runs_with_and_without():
    hidden, ids = torch.randn(3, 2 * WIDTH), torch.tensor([0, 1, 3])
    capped_module = program.to_module(steps(), {"norm.weight": torch.ones(WIDTH)})
    assert torch.equal(program.run(capped_module, hidden, ids), capped_module(hidden))
    assert torch.equal(program.run(ACTIVATIONS["relu2"], hidden, ids), hidden.relu().square())


@pytest.mark.parametrize("op", ["aten.no_such_function.default", "prims.mul.default"])
def test_an_unknown_op_is_named(op):
    with pytest.raises(ValueError, match=f"the activation uses {op}, which torch .* does not have"):
        program.to_module(({"op": op, "args": [{"step": 0}], "kwargs": {}},))


def test_what_cannot_be_stored_is_named():
    graph = fx.Graph()
    graph.output(graph.call_function(aten.to.device, (graph.placeholder("hidden"), torch.device("cpu"), torch.float32)))
    with pytest.raises(ValueError, match="an argument of type device cannot be stored"):
        program.from_graph(graph)
