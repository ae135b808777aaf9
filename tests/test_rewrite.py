"""Putting encoded experts in and taking them out: the tree of modules before and after, and the numbers."""

import weakref

import pytest
import torch
from torch import nn

from dpamoe.encode import encode
from dpamoe.modules import EncodedExperts
from dpamoe.passes import rewrite
from dpamoe.sites import ExpertLayout, Site, Stack
from dpamoe.spec import EncodeSpec

EXPERTS, HIDDEN, INNER = 4, 16, 8
LAYOUT = ExpertLayout((Stack(("up",)),), Stack(("down",)))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))


def model_with(path):
    """A model that holds plain experts at a dotted path and another layer beside them."""
    model = owner = nn.Module()
    *between, name = path.split(".")
    for part in between:
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.add_module(name, Plain())
    model.add_module("beside", nn.Linear(2, 2))
    return model


def encoded_for(model, path):
    experts = model.get_submodule(path)
    site = Site(path, EXPERTS, 2, HIDDEN, INNER, HIDDEN, INNER, "relu", LAYOUT, 0, "float32")
    spec = EncodeSpec(group_size=8)
    up, down = encode(experts.up.detach(), spec), encode(experts.down.detach(), spec)
    return EncodedExperts(site, spec, up, down, None, None, torch.ones(EXPERTS, 9))


def tree(model):
    return {path: type(module).__name__ for path, module in model.named_modules()}


@pytest.mark.parametrize("path", ["experts", "layers.0.mlp.experts", "layers.10"])
def test_only_the_module_at_the_path_changes(path):
    model = model_with(path)
    before, beside = tree(model), model.beside
    encoded = encoded_for(model, path)
    rewrite.replace(model, encoded, keep_original=False)
    assert model.get_submodule(path) is encoded and model.beside is beside
    after = tree(model)
    assert {name: kind for name, kind in after.items() if not name.startswith(path + ".")} == {**before, path: "EncodedExperts"}
    assert [name.removeprefix(path + ".") for name in after if name.startswith(path + ".")] == [
        "gate_up_proj", "gate_up_proj.plane", "gate_up_proj.scale", "down_proj", "down_proj.plane", "down_proj.scale",
    ]  # fmt: skip
    assert {name for name, _ in model.named_parameters()} == {"beside.weight", "beside.bias"}


def test_original_is_gone_unless_kept():
    for keep in (False, True):
        model = model_with("layers.0")
        alive = weakref.ref(model.get_submodule("layers.0"))
        rewrite.replace(model, encoded_for(model, "layers.0"), keep)
        assert (alive() is not None) == keep


def test_a_kept_original_is_no_part_of_the_model():
    model = model_with("layers.0")
    rewrite.replace(model, encoded_for(model, "layers.0"), keep_original=True)
    assert not [name for name in model.state_dict() if name.endswith((".up", ".down"))]
    assert not [name for name, _ in model.named_parameters() if name.startswith("layers")]


def test_restore_puts_the_same_module_back():
    model = model_with("layers.0.experts")
    before, original = tree(model), model.get_submodule("layers.0.experts")
    weights = {name: parameter.clone() for name, parameter in original.named_parameters()}
    rewrite.replace(model, encoded_for(model, "layers.0.experts"), keep_original=True)
    rewrite.restore(model, "layers.0.experts")
    assert model.get_submodule("layers.0.experts") is original and tree(model) == before
    assert all(torch.equal(parameter, weights[name]) for name, parameter in original.named_parameters())


def test_restore_without_a_kept_original_says_what_to_do():
    model = model_with("layers.0.experts")
    encoded = encoded_for(model, "layers.0.experts")
    rewrite.replace(model, encoded, keep_original=False)
    with pytest.raises(ValueError, match="layers.0.experts were not kept: transform with keep_original=True"):
        rewrite.restore(model, "layers.0.experts")
    assert model.get_submodule("layers.0.experts") is encoded


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_passes_on_both_ways(training):
    model = model_with("layers.0").train(training)
    rewrite.replace(model, encoded_for(model, "layers.0"), keep_original=True)
    assert model.get_submodule("layers.0").training == training
    model.train(not training)
    rewrite.restore(model, "layers.0")
    assert model.get_submodule("layers.0").training != training
