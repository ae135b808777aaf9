"""Text to token windows: reading files, finding the tokenizer, cutting windows that start with the begin token."""

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("dpamoe")
FEW_TOKENS = 256


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; ValueError if it is missing, no text, or empty."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"text file {file} does not exist: give the path of a UTF-8 text file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}): give plain text") from error
    if not text.strip():
        raise ValueError(f"text file {file} is empty: give a file with at least a few hundred words")
    return text


def load_tokenizer(model_dir: str | Path):
    """The tokenizer beside a model; ValueError if there is none."""
    from transformers import AutoTokenizer

    if not str(model_dir):
        raise ValueError("the model does not say which folder it came from, so its tokenizer is unknown: give token ids")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("it has no vocabulary")
        return tokenizer
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer could be loaded from {model_dir}: give token ids instead of text ({error})") from error


def token_ids(tokenizer, text: str) -> Tensor:
    """Token ids of a text, int64 [N]; blank lines separate documents. ValueError if there are none.

    Each document stands between the tokenizer's begin and end tokens, where it has them, as in training.
    """
    begin, end = ([token] if isinstance(token, int) else [] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    ids: list[int] = []
    for document in re.split(r"\n\s*\n", text) if begin or end else [text]:
        if document.strip():
            ids += begin + tokenizer(document.strip("\n"), add_special_tokens=False, verbose=False)["input_ids"] + end
    if len(ids) < 4:
        raise ValueError("the text holds no tokens: give at least a few hundred words")
    return torch.tensor(ids, dtype=torch.long)


def windows(ids: Tensor, length: int, bos: int | None, max_tokens: int | None = None) -> list[Tensor]:
    """Cut ids [N] into windows of at most `length` tokens, int64 [L]; each starts with bos where the model has one.

    Every token of the text is predicted once, except each window's first where there is no bos. max_tokens bounds the
    text. The last window may be shorter. ValueError for a text of under two tokens or a window too short.
    """
    if length < 2:
        raise ValueError(f"windows of {length} tokens leave nothing to predict: use 2 or more")
    ids = ids[:max_tokens]
    step = length - (bos is not None)
    parts = [part for part in ids.split(step) if bos is not None or part.numel() > 1]
    if ids.numel() < 2 or not parts:
        raise ValueError(f"the text has {ids.numel()} tokens: give at least 2, better a few thousand")
    if ids.numel() < FEW_TOKENS:
        logger.warning("the text has only %d tokens: figures from so few say little", ids.numel())
    if bos is None:
        return list(parts)
    return [part if int(part[0]) == bos else torch.cat([torch.tensor([bos]), part]) for part in parts]


def batches(parts: list[Tensor], size: int) -> list[Tensor]:
    """Stack windows of equal length into batches [B, L] of at most `size`, in order."""
    result: list[list[Tensor]] = []
    for part in parts:
        if result and len(result[-1]) < size and result[-1][0].shape == part.shape:
            result[-1].append(part)
        else:
            result.append([part])
    return [torch.stack(group) for group in result]


def window_length(config, wanted: int = 512) -> int:
    """Window length for a model: `wanted`, or the longest its positions allow if that is shorter."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(wanted, longest) if isinstance(longest, int) and longest > 1 else wanted
