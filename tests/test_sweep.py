"""Batches on their way through a model: each layer is reached by all before the next, and nothing else is different."""

import threading

import pytest
import torch
from torch import nn

from dpamoe.sweep import Sweep


class Chain(nn.Module):
    """Layers with work between them that no layer sees."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.result = {}

    def forward(self, x, key, order=(0, 1, 2)):
        for place in order:
            x = self.layers[place](x).tanh() + place
        self.result[key] = x
        return x


PATHS = ["layers.0", "layers.1", "layers.2"]


def test_layer_by_layer_is_batch_by_batch():
    model, inputs = Chain(), [torch.randn(2, 4) for _ in range(3)]
    with torch.no_grad():
        expected = [model(x, "") for x in inputs]
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    with Sweep(model, PATHS, [((x, number), {}) for number, x in enumerate(inputs)]) as sweep:
        visited = []
        while sweep.at is not None:
            visited.append(sweep.at)
            given = sweep.inputs[0][0]
            sweep.first()
            assert seen.count(False) == len(seen)
            assert given.shape == (2, 4)
            sweep.others()
    assert visited == PATHS
    assert all(torch.equal(model.result[number], x) for number, x in enumerate(expected))


def test_only_the_layer_at_hand_runs():
    model = Chain()
    ran = []
    for path in PATHS:
        model.get_submodule(path).register_forward_hook(lambda module, args, output, path=path: ran.append(path))
    with Sweep(model, PATHS, [((torch.ones(1, 4), n), {}) for n in range(2)]) as sweep:
        assert ran == [] and sweep.at == "layers.0"
        sweep.first()
        assert ran == ["layers.0"]
        with pytest.raises(ValueError, match="in different order"):
            _ = sweep.at
        sweep.others()
        assert ran == ["layers.0"] * 2 and sweep.at == "layers.1"
    assert ran == ["layers.0"] * 2  # what was under way ended where it stood
    assert not any(run.thread.is_alive() for run in sweep.runs)
    assert "forward" not in vars(model.layers[0])


def test_layers_are_computed_by_whoever_sweeps():
    model, threads = Chain(), set()
    original = model.layers[1].forward
    model.layers[1].forward = lambda x: (threads.add(threading.current_thread()), original(x))[1]
    with Sweep(model, ["layers.0", "layers.2"], [((torch.ones(1, 4), 0), {})]) as sweep:
        sweep.first()
    assert threads == {sweep.runs[0].thread}  # no layer of the sweep
    threads.clear()
    with Sweep(model, PATHS, [((torch.ones(1, 4), 0), {})]) as sweep:
        sweep.first()
        sweep.first()
    assert threads == {threading.current_thread()}


def test_a_layer_that_runs_twice_is_met_twice():
    model = Chain()
    with Sweep(model, PATHS, [((torch.ones(1, 4), n), {"order": (0, 1, 0)}) for n in range(2)]) as sweep:
        visited = []
        while sweep.at is not None:
            visited.append(sweep.at)
            sweep.first()
            sweep.others()
    assert visited == ["layers.0", "layers.1", "layers.0"]


def test_what_the_model_raises_comes_out():
    before = threading.active_count()
    with pytest.raises(IndexError), Sweep(Chain(), PATHS, [((torch.ones(1, 4), 0), {"order": (0, 7)})]) as sweep:
        sweep.first()
    with pytest.raises(RuntimeError), Sweep(Chain(), PATHS, [((torch.ones(1, 3), 0), {})]) as sweep:
        sweep.first()
    assert threading.active_count() == before
