"""Calibration inputs: text, token ids, any iterable of inputs, or text that the language model writes itself."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dpamoe import text as texts
from dpamoe.modes import evaluating

SAMPLES, LENGTH, BATCH, SEED = 128, 512, 8, 0
WRITTEN_SEQUENCES, WRITTEN_TOKENS = 32, 256

Batch = tuple[tuple, dict]


def is_language_model(model: nn.Module) -> bool:
    """Whether the model has a Hugging Face config and takes input_ids."""
    return hasattr(model, "config") and "input_ids" in inspect.signature(model.forward).parameters


def example_batch(model: nn.Module, example_inputs: tuple | dict | Tensor | None) -> Batch:
    """What one recorded run needs, as (args, kwargs); Hugging Face models make their own token ids, [2, 16]."""
    if example_inputs is not None:
        return as_batch(model, example_inputs)
    if not is_language_model(model):
        raise TypeError(
            f"{type(model).__name__} has no Hugging Face config to make inputs from: pass example_inputs=(tensor, …) or a dict"
        )
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocabulary, (2, 16), generator=generator).to(device_of(model))
    kwargs = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = ids
    return (), kwargs


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter, or of its first buffer; CPU for a model without tensors in memory."""
    held = (t.device for part in (model.parameters(), model.buffers()) for t in part if not t.is_meta)
    return next(held, torch.device("cpu"))


def as_batch(model: nn.Module, inputs: tuple | dict | Tensor) -> Batch:
    """One item of an iterable as (args, kwargs): a tuple is positional, a dict is keywords, a tensor the only input."""
    if isinstance(inputs, Tensor):
        return ((), {"input_ids": inputs.view(-1, inputs.shape[-1])}) if is_language_model(model) else ((inputs,), {})
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise TypeError(f"inputs are {type(inputs).__name__}: pass a tensor, a tuple of positional or a dict of keyword arguments")


def calibration_batches(model: nn.Module, calibration, example: Batch, length: int = LENGTH) -> Iterable[Batch]:
    """Turn `calibration` into batches for the residual profile: text, texts, a Path to one, token ids, inputs, or None.

    None: a language model writes its own text; any other module is measured on its example inputs, with a warning.
    Raises ValueError for empty text or no inputs.
    """
    if calibration is None:
        if is_language_model(model) and hasattr(model, "generate") and not getattr(model.config, "is_encoder_decoder", False):
            return own_text(model)
        warnings.warn("no calibration data: residuals are measured on the example inputs alone", stacklevel=3)
        return [example]
    if isinstance(calibration, Path):
        calibration = texts.read_text(calibration)
    if isinstance(calibration, Mapping):
        return [as_batch(model, calibration)]
    if not isinstance(calibration, str | Tensor):
        calibration = _joined(list(calibration))
    if isinstance(calibration, str):
        ids = texts.token_ids(texts.load_tokenizer(getattr(model, "name_or_path", "")), calibration)
        return id_batches(model, ids, length)
    if isinstance(calibration, Tensor):
        return _tensor_batches(model, calibration, length)
    return [as_batch(model, item) for item in calibration]


def _joined(items: list) -> str | Tensor | list:
    """Texts as one text of several documents, token ids or lists of them as one tensor, anything else as it is."""
    if not items:
        raise ValueError("calibration is an empty iterable: give at least one input, or None")
    if all(isinstance(item, str) for item in items):
        return "\n\n".join(items)
    if all(isinstance(item, list) and item and all(isinstance(token, int) for token in item) for item in items):
        items = [token for item in items for token in item]
    if all(isinstance(item, int) for item in items):
        return torch.tensor(items)
    return items


def _tensor_batches(model: nn.Module, tensor: Tensor, length: int) -> list[Batch]:
    if not is_language_model(model):
        return [as_batch(model, tensor)]
    if tensor.is_floating_point():
        raise TypeError("calibration is a float tensor, and this language model takes token ids: give integers")
    return id_batches(model, tensor.flatten(), length)


def id_batches(model: nn.Module, ids: Tensor, length: int = LENGTH, samples: int = SAMPLES) -> list[Batch]:
    """Windows of token ids in seeded random order, so that stopping early still sees the whole text."""
    config = model.config.get_text_config()
    vocabulary = config.vocab_size
    if not ids.numel():
        raise ValueError("calibration holds no token ids: give at least 2, better a few thousand, or None")
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise ValueError(f"token ids run from {int(ids.min())} to {int(ids.max())}, the model knows 0 to {vocabulary - 1}")
    begin = getattr(config, "bos_token_id", None)
    begin = begin if isinstance(begin, int) and 0 <= begin < vocabulary else None
    parts = texts.windows(ids.cpu(), texts.window_length(model.config, length), begin)
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(SEED))[:samples]
    device = device_of(model)
    return [((), {"input_ids": batch.to(device)}) for batch in texts.batches([parts[i] for i in order], BATCH)]


def written_tokens(model: nn.Module) -> int:
    """Tokens of each sequence that a model writes itself: 256, or as many as its positions allow."""
    return min(WRITTEN_TOKENS, texts.window_length(model.config) - 1)


def own_text(model: nn.Module) -> list[Batch]:
    """Text that the model writes itself: 32 samples of 256 tokens at temperature 1, seeded; the end token is held back."""
    config = model.config.get_text_config()
    start = config.bos_token_id if isinstance(getattr(config, "bos_token_id", None), int) else 0
    device = device_of(model)
    tokens = written_tokens(model)
    prompt = torch.full((WRITTEN_SEQUENCES, 1), start, device=device)
    rng = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with evaluating(model), rng, torch.no_grad():
        torch.manual_seed(SEED)
        written = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=start,
        )  # fmt: skip
    return [((), {"input_ids": part}) for part in written.split(BATCH)]
