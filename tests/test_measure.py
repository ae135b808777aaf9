"""Timing: every call once a round, memory counted once, and on a GPU a graph that is faster than its launches."""

import pytest
import torch
from torch import nn

from dpamoe import measure

CPU = torch.device("cpu")
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_all_calls_are_made_equally_often_without_gradients():
    made = []

    def call(name):
        made.append((name, torch.is_grad_enabled()))

    assert measure.microseconds([lambda: call("a"), lambda: call("b")], CPU) > 0
    assert made.count(("a", False)) == made.count(("b", False)) == 4 and len(made) == 8


def test_jobs_run_in_turn():
    """Each once to begin with, then all in every round."""
    made = []
    times = measure.microseconds_in_turn([[lambda: made.append("a")] * 2, [lambda: made.append("b")]], CPU, rounds=3)
    assert len(times) == 2 and min(times) > 0
    assert "".join(made) == "aab" + 3 * "aab"


def test_time_is_that_of_one_call():
    slow = torch.nn.Linear(512, 512)
    x = torch.randn(512, 512)
    one, four = (measure.microseconds([lambda: slow(x)] * count, CPU) for count in (1, 4))
    assert 0.3 < one / four < 3


def test_copy_bandwidth_is_plausible():
    assert 1e8 < measure.copy_bandwidth(CPU) < 1e13


def test_a_tensor_that_stands_twice_is_counted_once():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    model.register_buffer("held", torch.zeros(3, dtype=torch.int16))
    model[1].again = model[0].weight
    assert measure.held_bytes(model) == 2 * 32 * 4 + 6


def test_facts_mark_times_of_a_cpu():
    facts = measure.facts(CPU)
    assert facts["times"] == "CPU wall clock, not a benchmark" and facts["versions"]["torch"] == torch.__version__
    assert measure.heading(facts).startswith("CPU; torch ")


@gpu
@needs_cuda
def test_copies_are_bound_by_memory_and_by_a_limit():
    device = measure.device_of("cuda")
    assert device.index is not None and measure.copies(1, device) == measure.MOST_LAYERS
    assert measure.copies(10 * measure.free_bytes(device), device) == 1
    assert measure.enough(1 << 40, device) == 2 and measure.enough(1 << 20, device) > 16


@gpu
@needs_cuda
def test_a_graph_replays_the_calls():
    device = measure.device_of("cuda")
    x, total = torch.ones(4, device=device), torch.zeros(4, device=device)
    assert 0 < measure.microseconds([lambda: total.add_(x)] * 3, device) < 50
    assert float(total[0]) > 3 * measure.REPEATS
    assert measure.copy_bandwidth(device) > 1e10


@gpu
@needs_cuda
def test_graphs_replayed_in_turn_take_what_each_takes_alone():
    device = measure.device_of("cuda")
    x = torch.zeros(1 << 24, device=device)
    short, long = [lambda: x[: 1 << 20].add_(1)], [lambda: x.add_(1)]
    one, two = measure.microseconds_in_turn([short, long], device, rounds=3)
    assert two > 2 * one  # 16 times the bytes, beside the launch


@gpu
@needs_cuda
def test_a_call_that_waits_for_the_device_is_named():
    device = measure.device_of("cuda")
    with pytest.raises(ValueError, match="could not be captured as a CUDA graph"):
        measure.microseconds([lambda: torch.ones(4, device=device).nonzero()], device)
