"""A site's numbers, and its weights on the way to canonical form and back."""

import itertools
import json

import pytest
import torch
from torch import nn

from dpamoe.sites import ExpertLayout, ExpertWeights, Site, gather, scatter

EXPERTS, HIDDEN, INNER = 3, 5, 4


def holder(**tensors):
    """A module that holds tensors as parameters."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def site(activation, layout=None):
    return Site("layers.3.experts", EXPERTS, 2, HIDDEN, INNER, HIDDEN + 1, activation, layout or ExpertLayout("a", "b"), 7, "x")


@pytest.mark.parametrize("activation, rows", [("silu_mul", 8), ("swigluoai", 8), ("relu2", 4), ("gelu", 4)])
def test_rows_and_weights_by_hand(activation, rows):
    assert site(activation).up_rows == rows
    assert site(activation).weights == 3 * (5 * rows + 4 * 6)


def test_site_survives_json():
    layout = ExpertLayout("w1", "w2", "b1", "b2", up_transposed=True, interleaved=True)
    before = site("swigluoai", layout)
    assert Site.from_dict(json.loads(json.dumps(before.as_dict()))) == before


def test_gather_by_hand():
    """Two experts, two inputs, inner width 2: rows gate0 up0 gate1 up1, stored input first."""
    up = torch.arange(16.0).view(2, 2, 4)  # [E, H, 2 I]
    down = torch.arange(8.0).view(2, 2, 2)  # [E, I, H]
    bias = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    module = holder(up=up, down=down, up_bias=bias, down_bias=bias[:, :2])
    found = gather(module, ExpertLayout("up", "down", "up_bias", "down_bias", True, True, True))
    assert found.up[0].tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert found.down[0].tolist() == [[0, 2], [1, 3]]
    assert found.up_bias.tolist() == [[1, 3, 2, 4], [5, 7, 6, 8]]
    assert found.down_bias.tolist() == [[1, 2], [5, 6]]


def test_gather_shares_memory_where_the_layout_allows():
    module = holder(up=torch.randn(EXPERTS, 2 * INNER, HIDDEN), down=torch.randn(EXPERTS, INNER, HIDDEN))
    found = gather(module, ExpertLayout("up", "down", down_transposed=True))
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
    layout = ExpertLayout("up", "down", "bias", None, up_t, down_t, interleaved)
    canonical = gather(module, layout)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    new = ExpertWeights(canonical.up * 2 + 1, canonical.down * 3 - 1, torch.zeros_like(bias), None)
    scatter(new, module, layout)
    torch.testing.assert_close(module.up.detach(), before["up"] * 2 + 1, rtol=0, atol=0)
    torch.testing.assert_close(module.down.detach(), before["down"] * 3 - 1, rtol=0, atol=0)
    assert torch.equal(module.bias, before["bias"])  # as documented: biases are left as they are
    again = gather(module, layout)
    assert torch.equal(again.up, new.up) and torch.equal(again.down, new.down)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_scatter_keeps_the_dtype_of_the_module():
    module = holder(up=torch.zeros(EXPERTS, INNER, HIDDEN).bfloat16(), down=torch.zeros(EXPERTS, HIDDEN, INNER).bfloat16())
    up, down = torch.full((EXPERTS, INNER, HIDDEN), 0.3), torch.full((EXPERTS, HIDDEN, INNER), 0.7)
    scatter(ExpertWeights(up, down, None, None), module, ExpertLayout("up", "down"))
    assert module.up.dtype == torch.bfloat16
    assert torch.equal(module.up.detach(), up.bfloat16()) and torch.equal(module.down.detach(), down.bfloat16())
