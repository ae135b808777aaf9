"""How much memory a language model's cache takes for one sequence, from runs of the model without its weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpamoe.passes import weightless

LENGTHS = (8, 10)  # of two runs: what differs between them grows with the sequence
NAMES = ("cache", "past_key_values", "cache_params")  # of the cache in what models return


@dataclass(frozen=True)
class Layer:
    """Cache of one layer: bytes for each token, of at most `window` tokens if there is one, and bytes that are there anyway."""

    token: float
    fixed: int
    window: int | None


@dataclass(frozen=True)
class CacheSize:
    """What one sequence costs; exact: from the model's own cache, else an upper bound from its config."""

    layers: tuple[Layer, ...]
    exact: bool

    def bytes(self, tokens: int) -> int:
        """Bytes for a sequence of `tokens` tokens."""
        return round(sum(one.fixed + one.token * min(tokens, one.window or tokens) for one in self.layers))


def cache_size(model: nn.Module) -> CacheSize:
    """Size of the cache of a model whose parameters are on the meta device; see `CacheSize`."""
    try:
        runs = [_layers(model, length) for length in LENGTHS]
    except Exception:  # whatever a model does without weights; a bound is better than no plan
        return CacheSize(_bound(model), exact=False)
    if not runs[0] or len(runs[0]) != len(runs[1]):
        return CacheSize(_bound(model), exact=False)
    layers = []
    for (short, window), (long, _) in zip(*runs, strict=True):
        token = (long - short) / (LENGTHS[1] - LENGTHS[0])
        layers.append(Layer(token, round(short - token * LENGTHS[0]), window))
    return CacheSize(tuple(layers), exact=True)


def _layers(model: nn.Module, length: int) -> list[tuple[int, int | None]]:
    """Bytes and window of every layer's cache behind one run of `length` tokens."""
    output = weightless.run(model, input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=True)
    cache = next((found for name in NAMES if (found := getattr(output, name, None)) is not None), None)
    layers = getattr(cache, "layers", None) or ([] if cache is None else [cache])
    sizes = []
    for layer in layers:
        held = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(vars(layer)) if tensor.dim() > 1}
        window = getattr(layer, "sliding_window", None)
        sizes.append((sum(held.values()), window if isinstance(window, int) else None))
    return sizes


def _tensors(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _bound(model: nn.Module) -> tuple[Layer, ...]:
    """Keys and values of every head in every layer, as if no layer shared, compressed or forgot any."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    both = sum(widths) if all(isinstance(one, int) for one in widths) else 2 * width
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    return (Layer(heads * both * dtype.itemsize, 0, None),) * config.num_hidden_layers
