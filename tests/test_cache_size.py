"""The cache of a model, measured without its weights, is the cache that it has with them."""

import copy

import pytest
import torch
from torch import nn

from dpamoe.cache_size import cache_size


def held(model, ids):
    """Bytes of keys and values behind a run."""
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("tokens", [5, 40])
def test_every_family(family, random_model, random_ids, tokens):
    model = random_model(family)
    size = cache_size(copy.deepcopy(model).to("meta"))
    assert size.exact
    predicted, real = size.bytes(tokens), held(model, random_ids(1, tokens))
    if tokens > 16 and any(layer.window for layer in size.layers):
        assert real <= predicted <= real * 16 / 15  # transformers keeps one token less than the window of 16
    else:
        assert predicted == real


def test_the_shipped_model(tiny_model):
    """4 layers, 4 heads of 32, bf16: 2 numbers of each head and layer for a token."""
    config = tiny_model().config
    heads, width = config.num_key_value_heads, config.head_dim
    size = cache_size(tiny_model().to("meta"))
    assert size.bytes(1000) == 1000 * config.num_hidden_layers * 2 * heads * width * 2


class Broken(nn.Module):
    """A model that does not run without weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, input_ids, use_cache):
        raise RuntimeError("no")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_bound_where_the_model_does_not_run(random_model, random_ids, family):
    model = random_model(family)
    bound = cache_size(Broken(model.config))
    assert not bound.exact
    assert bound.bytes(40) >= held(model, random_ids(1, 40))
