"""How much each layer of experts matters to what a language model says, and how large its gates are, on calibration text.

The sensitivity of a layer is the trace of the Fisher information of its experts' summed output, per token and feature: an
error d, small and in no special direction, moves the model's distribution by KL = sensitivity |d|^2 / 2.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpamoe import threshold
from dpamoe.calibration import SEED, Batch
from dpamoe.modes import evaluating
from dpamoe.sites import Site, chosen

logger = logging.getLogger("dpamoe")

TOKENS = 16384  # of calibration text, at most
ROWS = 2  # sequences at a time, since log-probabilities of a whole vocabulary are kept for the gradient
NOISE = 0.2  # of the size of a layer's output, about the error of three planes; less makes more of routers that just flip


@dataclass(frozen=True)
class Importance:
    """Of one site: sensitivity fp32 0-d, nats per squared unit of its output; gate_counts int32 [E, threshold.BINS]."""

    sensitivity: Tensor
    gate_counts: Tensor


def measure(
    model: nn.Module, sites: Sequence[Site], batches: Iterable[Batch], again: Sequence[str] = ()
) -> dict[str, Importance]:  # fmt: skip
    """Measure all sites of an original model over calibration batches (args, kwargs); by path.

    One backward pass; where no gradient can be had, one more forward pass for each site with noise on its output. again: paths
    of layers that run once more in the backward pass, instead of keeping what they computed; the numbers are the same. Raises
    ValueError for a model without logits.
    """
    parts = list(_parts(batches))
    with evaluating(model), _frozen(model):
        try:
            counts = _no_counts(sites)
            traces = by_gradient(model, sites, parts, lambda: _counting(model, sites, counts), again)
        except RuntimeError as error:  # no derivative, or no memory for it
            logger.warning("no gradient can be had (%s): sensitivities are measured with noise", " ".join(str(error).split()))
            counts = _no_counts(sites)
            with _counting(model, sites, counts), torch.no_grad():
                for args, kwargs in parts:
                    model(*args, **kwargs)
            traces = by_noise(model, sites, parts)
    return {
        site.path: Importance(torch.tensor(trace, dtype=torch.float32), counts[site.path].int())
        for site, trace in zip(sites, traces, strict=True)
    }


def by_gradient(
    model: nn.Module, sites: Sequence[Site], parts: Sequence[Batch],
    counting: Callable[[], AbstractContextManager] = nullcontext, again: Sequence[str] = (),
) -> list[float]:  # fmt: skip
    """Sensitivities by one backward pass: mean square of the gradient of -log p(y) to a layer's output, y drawn from p.

    counting: a context for the forward pass alone. again: as in `measure`.
    """
    random, total, numbers = torch.Generator().manual_seed(SEED), [0.0] * len(sites), [0] * len(sites)
    for args, kwargs in parts:
        probes: list[Tensor] = []

        def add(module, given, output, probes=probes):
            probes.append(torch.zeros_like(output, requires_grad=True))
            return output + probes[-1]

        with torch.enable_grad(), _hooked(model, sites, add), _running_again(model, again):
            with counting():
                log_p = _log_probabilities(model, args, kwargs)
            said = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=random).to(log_p.device)
            gradients = torch.autograd.grad(-log_p.gather(1, said).sum(), tuple(probes))
        for place, gradient in enumerate(gradients):
            total[place] += float(gradient.double().square().sum())
            numbers[place] += gradient.numel()
    return [square / count for square, count in zip(total, numbers, strict=True)]


def by_noise(model: nn.Module, sites: Sequence[Site], parts: Sequence[Batch]) -> list[float]:
    """The same without a gradient: twice the KL that noise on one layer's output makes, by the noise's mean square."""
    random, found = torch.Generator().manual_seed(SEED), [0.0] * len(sites)
    tokens = 0
    with torch.no_grad():
        for args, kwargs in parts:
            log_p = _log_probabilities(model, args, kwargs)
            tokens += log_p.shape[0]
            for place, site in enumerate(sites):
                sizes: list[float] = []

                def add(module, given, output, sizes=sizes):
                    sizes.append(max(float(output.float().square().mean().sqrt()), 1e-30) * NOISE)
                    return output + sizes[0] * torch.randn(output.shape, generator=random).to(output)

                with _hooked(model, [site], add):
                    log_q = _log_probabilities(model, args, kwargs)
                divergence = float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
                found[place] += 2 * divergence / (sizes[0] ** 2 * site.out)
    return [max(divergence / tokens, 0.0) for divergence in found]


def _log_probabilities(model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    """fp32 [tokens, vocabulary]; without a cache, to which a layer that runs again would add once more."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs = {**kwargs, "use_cache": False}
    output = model(*args, **kwargs)
    if getattr(output, "logits", None) is None:
        raise ValueError(
            f"{type(model).__name__} gives no logits, so what its layers matter to is unknown: use allocator='exact', or "
            "transform the language model around it"
        )
    return output.logits.flatten(0, -2).float().log_softmax(-1)


def _parts(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches of token ids a few rows at a time, up to TOKENS of them; other batches as they are."""
    left = TOKENS
    for args, kwargs in batches:
        if left <= 0:
            return
        ids = kwargs.get("input_ids")
        left -= TOKENS if ids is None else ids.numel()
        alone = ids is not None and not args and len(kwargs) == 1
        yield from [((), {"input_ids": rows}) for rows in ids.split(ROWS)] if alone else [(args, kwargs)]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside the block, so that none is kept for them."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def _hooked(model: nn.Module, sites: Sequence[Site], hook) -> Iterator[None]:
    """A forward hook on the experts of these sites inside the block."""
    with ExitStack() as stack:
        for site in sites:
            stack.callback(model.get_submodule(site.place).register_forward_hook(hook).remove)
        yield


@contextmanager
def _running_again(model: nn.Module, layers: Sequence[str]) -> Iterator[None]:
    """Inside the block these layers keep their inputs alone for a backward pass, in which they run once more."""
    before = [(module, module.__dict__.get("forward")) for module in map(model.get_submodule, layers)]
    for module, _ in before:
        module.forward = _again(module.forward)
    try:
        yield
    finally:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own


def _again(compute: Callable) -> Callable:
    @functools.wraps(compute)
    def forward(*args, **kwargs):
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward


def _no_counts(sites: Sequence[Site]) -> dict[str, Tensor]:
    return {site.path: torch.zeros(site.experts, threshold.BINS, dtype=torch.long) for site in sites}


@contextmanager
def _counting(model: nn.Module, sites: Sequence[Site], counts: dict[str, Tensor]) -> Iterator[None]:
    """Add the gates that each site is given inside the block to its counts, int64 [E, BINS] by path."""
    with ExitStack() as stack:
        for site in sites:

            def count(module, given, site=site):
                _, index, gates = given
                index = chosen(index) if site.masked else index
                counts[site.path] += threshold.count_gates(gates.detach().view(index.shape), index, site.experts).cpu()

            stack.callback(model.get_submodule(site.place).register_forward_pre_hook(count).remove)
        yield
