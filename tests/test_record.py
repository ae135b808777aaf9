"""Recording a run: names, module paths, spans of calls, in-place writes, errors; and a model that stays as it was."""

import pytest
import torch
from torch import nn

from dpamoe.passes.experts import name_of
from dpamoe.passes.record import record, value

WIDTH = 4


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, hidden, *, scale):
        return (hidden @ self.weight + self.shift) * scale


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden):
        return self.drop(self.inner(hidden.relu(), scale=2.0)), hidden


class Writes(nn.Module):
    """Fills a buffer through views, some of which are made before others write."""

    def forward(self, hidden):
        out = torch.zeros(3, WIDTH)
        first = out[0]
        out.add_(hidden)
        first.mul_(2)
        return out + 1


class Loop(nn.Module):
    """As an expert loop: how often it runs depends on the numbers."""

    def forward(self, hidden):
        for row in (hidden[:, 0] > 0).nonzero():
            hidden = hidden + hidden[row]
        return hidden


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 1, WIDTH)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def rows(count=3):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


def test_parameters_buffers_and_inputs_are_named():
    model, hidden = Outer().eval(), rows()
    recording = record(model, (hidden,))
    leaves = {node.target: value(node) for node in recording.nodes if node.op == "get_attr"}
    assert leaves.keys() == {"inner.weight", "inner.shift"}
    assert leaves["inner.weight"] is model.inner.weight
    (given,) = [node for node in recording.nodes if node.op == "placeholder"]
    assert value(given) is hidden


def test_inputs_by_keyword_and_constants_made_outside():
    class Model(nn.Module):
        outside = torch.full((WIDTH,), 3.0)

        def forward(self, *, hidden):
            return hidden + self.outside

    recording = record(Model(), (), {"hidden": rows()})
    assert [node.op for node in recording.nodes] == ["placeholder", "get_attr", "call_function"]
    assert recording.nodes[1].target.startswith("_constant")


def test_every_node_knows_its_module_and_every_call_its_span():
    recording = record(Outer(), (rows(),))
    modules = {name_of(node): node.meta["module"] for node in recording.nodes if node.op == "call_function"}
    assert modules == {"relu": "", "mm": "inner", "add": "inner", "mul": "inner"}
    calls = {call.path: call for call in recording.calls}
    assert [call.path for call in recording.calls] == ["inner", "drop", ""]
    inner = calls["inner"]
    assert [name_of(node) for node in recording.nodes[inner.start : inner.stop]] == ["mm", "add", "mul"]
    assert [name_of(node) for node in inner.args] == ["relu"] and inner.kwargs == {"scale": 2.0}
    assert name_of(inner.output) == "mul" and calls["drop"].args == (inner.output,)
    assert recording.output[0] is inner.output and recording.output[1].op == "placeholder"
    assert all(node.meta["at"] == place for place, node in enumerate(recording.nodes))


def test_writes_through_views_are_followed():
    recording = record(Writes(), (rows(),))
    by_name = {name_of(node): node for node in recording.nodes}
    assert by_name["add_"] in recording.inputs_of(by_name["mul_"])  # which wrote the storage that `first` looks into
    assert by_name["mul_"] in recording.inputs_of(by_name["add"])
    needed = recording.ancestors([by_name["add"]])
    assert {"placeholder", "zeros", "select", "add_", "mul_", "add"} <= {name_of(node) for node in needed}
    assert by_name["zeros"] not in recording.ancestors([by_name["add"]], stop={by_name["zeros"]})
    assert torch.equal(value(recording.output), rows() * torch.tensor([[2.0], [1.0], [1.0]]) + 1)


@pytest.mark.parametrize("positive", [0, 1, 3])
def test_a_loop_that_depends_on_the_numbers(positive):
    hidden = rows().abs()
    hidden[positive:, 0] *= -1
    recording = record(Loop(), (hidden,))
    assert sum(name_of(node) == "add" for node in recording.nodes) == positive
    assert torch.equal(value(recording.output), Loop()(hidden))


def test_results_of_several_tensors_are_taken_apart():
    class Model(nn.Module):
        def forward(self, hidden):
            values, index = hidden.topk(2)
            return values.sum(), index

    recording = record(Model(), (rows(),))
    parts = [node for node in recording.nodes if name_of(node) == "getitem"]
    assert [node.args[1] for node in parts] == [0, 1] and recording.output[1] is parts[1]
    assert torch.equal(value(parts[1]), rows().topk(2).indices)


def test_the_model_is_unchanged():
    model = Outer()
    model.inner.eval()
    modes = {path: module.training for path, module in model.named_modules()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recording = record(model, (rows(),))
    assert "bernoulli" not in str(recording.graph)  # it ran in eval mode
    assert {path: module.training for path, module in model.named_modules()} == modes == {
        "": True, "inner": False, "drop": True,
    }  # fmt: skip
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not value(recording.output[0]).requires_grad


def test_an_error_says_which_module_was_running():
    model = Breaks().train()
    with pytest.raises(RuntimeError) as caught:
        record(model, (rows(),))
    if hasattr(caught.value, "__notes__"):  # Python 3.11
        assert caught.value.__notes__ == ["while recording module 'layers.1'"]
    assert model.training and all(module.training for module in model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_released_tensors_are_held_no_more():
    recording = record(Outer(), (rows(),))
    recording.release()
    assert not any(node.meta for node in recording.nodes)
