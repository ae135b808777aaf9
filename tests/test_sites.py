"""A site's numbers, and its weights on the way to canonical form and back."""

import itertools
import json

import pytest
import torch
from torch import nn

from dpamoe.sites import ExpertLayout, ExpertWeights, Site, Stack, gather, scatter

EXPERTS, HIDDEN, INNER = 3, 5, 4


def laid_out(up, down, up_bias=None, down_bias=None, up_t=False, down_t=False, interleaved=False):
    """Layout of experts in stacked parameters of these names."""
    biases = [None if name is None else Stack((name,)) for name in (up_bias, down_bias)]
    ups = () if biases[0] is None else (biases[0],)
    order = "interleaved" if interleaved else "rows"
    return ExpertLayout((Stack((up,), up_t),), Stack((down,), down_t), ups, biases[1], order)


def holder(**tensors):
    """A module that holds tensors as parameters."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def site(layout, **more):
    return Site("layers.3.experts", EXPERTS, 2, HIDDEN, INNER, HIDDEN + 1, 8, "silu_mul", layout, 7, "x", **more)


def test_weights_by_hand():
    assert site(laid_out("a", "b")).weights == 3 * (5 * 8 + 4 * 6)


def test_site_survives_json():
    step = {"op": "aten.mul.Tensor", "args": [{"step": 0}, {"parameter": "norm.weight"}], "kwargs": {}}
    lists = ExpertLayout((Stack(("0.w", "1.w", "2.w")), Stack(("0.v", "1.v", "2.v"))), Stack(("0.o", "1.o", "2.o"), True))
    for layout in (laid_out("w1", "w2", "b1", "b2", up_t=True, interleaved=True), lists):
        before = site(layout, program=(step,), post=(step, step), masked=True)
        assert Site.from_dict(json.loads(json.dumps(before.as_dict()))) == before


def test_experts_of_sibling_modules_and_flattened_stacks_are_read_and_written_in_order():
    random = torch.Generator().manual_seed(0)
    module = nn.Module()
    for expert in range(EXPERTS):
        child = holder(gate=torch.randn(INNER, HIDDEN, generator=random), up=torch.randn(INNER, HIDDEN, generator=random))
        module.add_module(f"e{expert}", child)
    module.register_parameter("flat", nn.Parameter(torch.randn(EXPERTS * HIDDEN, INNER, generator=random)))
    names = [tuple(f"e{expert}.{part}" for expert in range(EXPERTS)) for part in ("gate", "up")]
    layout = ExpertLayout(tuple(Stack(part) for part in names), Stack(("flat",)))
    found = gather(module, layout, EXPERTS)
    assert torch.equal(found.up[1], torch.cat([module.e1.gate, module.e1.up]))
    assert torch.equal(found.down[2], module.flat[2 * HIDDEN : 3 * HIDDEN])
    new = ExpertWeights(found.up + 1, found.down - 1, None, None)
    scatter(new, module, layout)
    again = gather(module, layout, EXPERTS)
    assert torch.equal(again.up, new.up) and torch.equal(again.down, new.down)


def test_gather_by_hand():
    """Two experts, two inputs, inner width 2: rows gate0 up0 gate1 up1, stored input first."""
    up = torch.arange(16.0).view(2, 2, 4)  # [E, H, 2 I]
    down = torch.arange(8.0).view(2, 2, 2)  # [E, I, H]
    bias = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    module = holder(up=up, down=down, up_bias=bias, down_bias=bias[:, :2])
    found = gather(module, laid_out("up", "down", "up_bias", "down_bias", True, True, True), 2)
    assert found.up[0].tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert found.down[0].tolist() == [[0, 2], [1, 3]]
    assert found.up_bias.tolist() == [[1, 3, 2, 4], [5, 7, 6, 8]]
    assert found.down_bias.tolist() == [[1, 2], [5, 6]]


def test_gather_shares_memory_where_the_layout_allows():
    module = holder(up=torch.randn(EXPERTS, 2 * INNER, HIDDEN), down=torch.randn(EXPERTS, INNER, HIDDEN))
    found = gather(module, laid_out("up", "down", down_t=True), EXPERTS)
    assert found.up.data_ptr() == module.up.data_ptr() and found.down.data_ptr() == module.down.data_ptr()
    assert found.up_bias is None and found.down_bias is None and not found.up.requires_grad


@pytest.mark.parametrize("up_t, down_t, interleaved", list(itertools.product([False, True], repeat=3)))
def test_scatter_undoes_gather(up_t, down_t, interleaved):
    random = torch.Generator().manual_seed(0)
    up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=random)
    bias = torch.randn(EXPERTS, 2 * INNER, generator=random)
    stored = {"up": up.mT.contiguous() if up_t else up, "down": down.mT.contiguous() if down_t else down}
    module = holder(**stored, bias=bias)
    layout = laid_out("up", "down", "bias", None, up_t, down_t, interleaved)
    canonical = gather(module, layout, EXPERTS)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    new = ExpertWeights(canonical.up * 2 + 1, canonical.down * 3 - 1, torch.zeros_like(bias), None)
    scatter(new, module, layout)
    torch.testing.assert_close(module.up.detach(), before["up"] * 2 + 1, rtol=0, atol=0)
    torch.testing.assert_close(module.down.detach(), before["down"] * 3 - 1, rtol=0, atol=0)
    assert torch.equal(module.bias, before["bias"])  # as documented: biases are left as they are
    again = gather(module, layout, EXPERTS)
    assert torch.equal(again.up, new.up) and torch.equal(again.down, new.down)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_scatter_keeps_the_dtype_of_the_module():
    module = holder(up=torch.zeros(EXPERTS, INNER, HIDDEN).bfloat16(), down=torch.zeros(EXPERTS, HIDDEN, INNER).bfloat16())
    up, down = torch.full((EXPERTS, INNER, HIDDEN), 0.3), torch.full((EXPERTS, HIDDEN, INNER), 0.7)
    scatter(ExpertWeights(up, down, None, None), module, laid_out("up", "down"))
    assert module.up.dtype == torch.bfloat16
    assert torch.equal(module.up.detach(), up.bfloat16()) and torch.equal(module.down.detach(), down.bfloat16())
