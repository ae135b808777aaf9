"""How far a model is from full precision: KL and top-1 agreement with log-probabilities kept on disk, and perplexity.

KL is mean KL(full || other) in nats per predicted token. The full-precision log-probabilities are computed once and
streamed from a file, so that only one model is in memory at a time.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpamoe.files import write_json
from dpamoe.progress import track
from dpamoe.text import batches

ROWS = 1024  # logits compared at a time, so that they stay in cache
BATCH = 8


@dataclass(frozen=True)
class Score:
    """What a model scores over `tokens` predicted tokens.

    kl: mean KL to the reference, nats per token, and kl_error its standard error over windows (tokens of a window depend on
    each other; None for one window). top1: share of tokens where both find the same word most likely. All three are None for
    the reference itself. nll: mean negative log-likelihood, nats per token.
    """

    nll: float
    tokens: int
    kl: float | None = None
    kl_error: float | None = None
    top1: float | None = None

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood, at most e^700."""
        return math.exp(min(self.nll, 700.0))


@dataclass(frozen=True)
class ReferenceLogits:
    """Log-probabilities of the full-precision model, fp32 on disk: in `file`, block by block at (offset, shape)."""

    windows: list[Tensor]
    score: Score
    file: object
    blocks: list[tuple[int, tuple[int, int]]]

    def __enter__(self) -> "ReferenceLogits":
        return self

    def __exit__(self, *exception) -> None:
        self.file.close()

    def block(self, number: int) -> Tensor:
        """Log-probabilities of one batch of windows, fp32 [tokens, vocabulary]."""
        offset, shape = self.blocks[number]
        return torch.from_numpy(np.memmap(self.file, dtype=np.float32, mode="c", offset=offset, shape=tuple(shape)))

    def compare(self, model: nn.Module) -> Score:
        """Score a model on the same windows; only nll where no log-probabilities were kept."""
        if not self.blocks:
            nll = sum(_nll(logits.log_softmax(-1), ids) for ids, logits in _run(model, self.windows))
            return Score(nll / self.score.tokens, self.score.tokens)
        same, nll, by_window = 0, 0.0, []
        for number, (ids, logits) in enumerate(_run(model, self.windows)):
            reference, divergences = self.block(number), []
            for rows in range(0, logits.shape[0], ROWS):
                log_q = logits[rows : rows + ROWS].log_softmax(-1)
                log_p = reference[rows : rows + ROWS].to(log_q.device)
                divergences.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64))
                same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
                nll += _nll(log_q, ids[rows : rows + ROWS])
            length = self.windows[number].shape[1] - 1
            by_window += [(float(window.sum()), length) for window in torch.cat(divergences).split(length)]
        kl, error = _mean_and_error(by_window)
        return Score(nll / self.score.tokens, self.score.tokens, kl, error, same / self.score.tokens)


def _mean_and_error(by_window: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """Mean per token of sums over windows, and its standard error, with windows as the independent draws."""
    total, tokens, count = sum(s for s, _ in by_window), sum(n for _, n in by_window), len(by_window)
    mean = total / tokens
    if count < 2:
        return mean, None
    squares = sum((s - n * mean) ** 2 for s, n in by_window)
    return mean, math.sqrt(squares * count / (count - 1)) / tokens


def measure_reference(
    model: nn.Module, windows: Sequence[Tensor], file: Path | None = None, keep: bool = True
) -> ReferenceLogits:
    """Run the full-precision model over windows and (keep) keep its log-probabilities.

    They go to `file`, with a description beside it that is written last, for `reopen_reference`; else to a scratch file that
    goes when the result is closed. Raises ValueError if they do not fit the disk or are not finite.
    """
    stacked = batches(list(windows), BATCH)
    if keep:
        _check_space(model, stacked, Path(tempfile.gettempdir()) if file is None else file.parent)
    out = tempfile.TemporaryFile(prefix="dpamoe-reference-") if file is None else file.open("w+b")  # noqa: SIM115  closed in __exit__
    blocks, nll, tokens = [], 0.0, 0
    for ids, logits in _run(model, track(stacked, "reference", lambda ids: f"{ids.shape[0]} windows of {ids.shape[1]} tokens")):
        log_p = logits.log_softmax(-1)
        if not bool(torch.isfinite(log_p).all()):
            out.close()
            raise ValueError("the full-precision model gives outputs that are not finite: repair the checkpoint first")
        nll, tokens = nll + _nll(log_p, ids), tokens + log_p.shape[0]
        if keep:
            blocks.append((out.tell(), tuple(log_p.shape)))
            out.write(log_p.cpu().numpy().tobytes())
    out.flush()
    score = Score(nll / tokens, tokens)
    if file is not None:
        write_json(_description(file), {"score": asdict(score), "blocks": blocks, "bytes": out.tell()})
    return ReferenceLogits(stacked, score, out, blocks)


def reopen_reference(windows: Sequence[Tensor], file: Path) -> ReferenceLogits | None:
    """What `measure_reference` left in a file for the same windows; None if it is not there or not whole."""
    if not _description(file).is_file() or not file.is_file():
        return None
    held = json.loads(_description(file).read_text(encoding="utf-8"))
    if file.stat().st_size != held["bytes"]:
        return None
    blocks = [(offset, tuple(shape)) for offset, shape in held["blocks"]]
    return ReferenceLogits(batches(list(windows), BATCH), Score(**held["score"]), file.open("rb"), blocks)


def remove_reference(file: Path) -> None:
    """Delete what `measure_reference` left, if anything."""
    for part in (_description(file), file):
        part.unlink(missing_ok=True)


def _description(file: Path) -> Path:
    return file.with_suffix(".json")


def _check_space(model: nn.Module, stacked: Sequence[Tensor], folder: Path) -> None:
    """Raise ValueError if the log-probabilities would not fit."""
    config = getattr(model, "config", None)
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0) if config is not None else 0
    needed, free = 4 * vocabulary * sum(ids[:, 1:].numel() for ids in stacked), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the reference log-probabilities need {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: score "
            "fewer tokens, or choose another folder"
        )


def _run(model: nn.Module, windows) -> Iterator[tuple[Tensor, Tensor]]:
    """Targets [N] and fp32 logits [N, V] of each batch of windows."""
    device = next(model.parameters()).device
    for ids in windows:
        with torch.no_grad():
            logits = model(input_ids=ids.to(device), use_cache=False).logits[:, :-1]
        yield ids[:, 1:].flatten().to(device), logits.flatten(0, 1).float()


def _nll(log_probabilities: Tensor, targets: Tensor) -> float:
    return -float(log_probabilities.gather(1, targets[:, None]).sum(dtype=torch.float64))
