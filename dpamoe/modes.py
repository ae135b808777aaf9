"""Run a model in eval or train mode and leave every module in the mode it was in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """One mode inside the block. Modes are put back module by module: a model may hold parts in train and in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


def evaluating(model: nn.Module):
    """Eval mode inside the block."""
    return in_mode(model, False)
