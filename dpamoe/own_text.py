"""The calibration text of a conversion: of a file, or written by the model itself with a few of its layers in memory.

To write text, a model runs once for every token. Layers that fit stay in memory, the others are read again each time.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import torch
from torch import nn

from dpamoe import calibration as calibrate
from dpamoe import text
from dpamoe.cache_size import cache_size
from dpamoe.files import read_json, write_json
from dpamoe.forecast import PROCESS
from dpamoe.layers import Outline
from dpamoe.mapping import drop_part, load_part
from dpamoe.progress import track
from dpamoe.stream import check_finite, give_back

logger = logging.getLogger("dpamoe")
SHARE = 0.4  # of the memory that is free may hold layers while the model writes
WRITTEN = "dpamoe.calibration.json"  # token ids that the model wrote, while the conversion is under way
SECONDS = 10.0  # between two lines of progress


def check_source(model: nn.Module, file: Path | None) -> None:
    """ValueError if there will be no calibration text: no tokenizer for that of a file, or a model that writes none."""
    if file is None:
        check_can_write(model)
    else:
        text.read_text(file)
        text.load_tokenizer(model.name_or_path)


def check_can_write(model: nn.Module) -> None:
    """ValueError for a model that cannot write its own calibration text."""
    if not hasattr(model, "generate") or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"a {type(model).__name__} cannot write text of its own to measure residuals on: give --calibration FILE with text"
        )


def writing_memory(plan: Outline) -> int:
    """The least memory that writing takes: what is outside of layers, the largest layer, and the cache of all sequences."""
    largest = max(plan.bytes_of(plan.mapping.below(layer)) for layer in plan.layers)
    cache = calibrate.WRITTEN_SEQUENCES * cache_size(plan.model).bytes(1 + calibrate.written_tokens(plan.model))
    return PROCESS + plan.bytes_of(plan.rest) + largest + cache


def room(least: int, device: str, max_memory: int | None) -> int:
    """Bytes of layers that may stay in memory during a run that takes `least` bytes with its largest layer alone."""
    rooms = [SHARE * psutil.virtual_memory().available + PROCESS - least]
    if max_memory is not None:
        rooms.append(max_memory - least)
    if torch.device(device).type == "cuda":
        rooms.append(torch.cuda.mem_get_info(device)[0] + PROCESS - least)
    return max(0, int(min(rooms)))


def batches(plan: Outline, file: Path | None, kept: Path, device: str, max_memory: int | None) -> list[calibrate.Batch]:
    """Token ids for the residual profile: of a text file, else of text that was kept, or that the model writes now."""
    if file is not None:
        return list(calibrate.calibration_batches(plan.model, text.read_text(file), None))
    if kept.is_file():
        ids = [torch.tensor(batch) for batch in read_json(kept, "start again with --no-resume")["batches"]]
    else:
        ids = write(plan, device, room(writing_memory(plan), device, max_memory))
    return [((), {"input_ids": batch}) for batch in ids]


def keep(found: list[calibrate.Batch], kept: Path) -> None:
    """Keep what a model wrote, so that a conversion that was stopped goes on with it, and other processes start with it."""
    if not kept.is_file():
        write_json(kept, {"batches": [kwargs["input_ids"].tolist() for _, kwargs in found]})


def write(plan: Outline, device: str, limit: int) -> list[torch.Tensor]:
    """Let the model write, with at most `limit` bytes of layers in memory beside the one that runs; int64 [B, L] each.

    The text is the one that the model writes when it is in memory as a whole.
    """
    again = read_again(plan, limit)
    size, tokens = price(plan, again)
    if again:
        logger.warning(
            "%.1f GiB of layers do not stay in memory: to write the calibration text they are read %d times, %.0f GiB in all; "
            "--calibration FILE with text of your use saves that", size / 2**30, tokens, size * tokens / 2**30,
        )  # fmt: skip
    steps = iter(track(range(tokens), "write calibration text", lambda step: f"token {step + 1}", SECONDS))
    with paged(plan, device, again):

        def step(*_) -> None:
            next(steps, None)

        hook = plan.model.register_forward_pre_hook(step)
        try:
            written = calibrate.own_text(plan.model)
        finally:
            hook.remove()
    next(steps, None)
    return [kwargs["input_ids"].cpu() for _, kwargs in written]


def read_again(plan: Outline, limit: int) -> list[str]:
    """The layers that do not stay in memory if `limit` bytes of them may, the first ones first."""
    again = []
    for layer in plan.layers:
        size = plan.bytes_of(plan.mapping.below(layer))
        if size > limit:
            again.append(layer)
        else:
            limit -= size
    return again


def price(plan: Outline, again: list[str]) -> tuple[int, int]:
    """Bytes of layers that are read for every token that is written, and how often."""
    return sum(plan.bytes_of(plan.mapping.below(layer)) for layer in again), calibrate.written_tokens(plan.model)


@contextmanager
def paged(plan: Outline, device: str, again: list[str]) -> Iterator[None]:
    """The whole model in use: the layers of `again` are in memory only while they run, the others stay.

    Raises ValueError for a weight that is not finite as soon as it is read.
    """
    with ExitStack() as stack:
        stack.enter_context(_held(plan, plan.rest, device))
        for layer in plan.layers:
            names = plan.mapping.below(layer)
            held = _while_it_runs(plan, layer, names, device) if layer in again else _held(plan, names, device)
            stack.enter_context(held)
        yield


@contextmanager
def _held(plan: Outline, names: list[str], device: str) -> Iterator[None]:
    try:
        load_part(plan.mapping, plan.model, plan.source, names, device)
        check_finite(plan, names)
        yield
    finally:
        drop_part(plan.mapping, plan.model, names)
        give_back()


@contextmanager
def _while_it_runs(plan: Outline, layer: str, names: list[str], device: str) -> Iterator[None]:
    module, checked = plan.model.get_submodule(layer), False
    compute = module.forward

    @functools.wraps(compute)
    def forward(*args, **kwargs):
        nonlocal checked
        load_part(plan.mapping, plan.model, plan.source, names, device)
        try:
            if not checked:
                check_finite(plan, names)
            checked = True
            return compute(*args, **kwargs)
        finally:
            drop_part(plan.mapping, plan.model, names)
            give_back()

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
