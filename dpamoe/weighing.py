"""What the layers of a source folder matter: measured at the end of a conversion, with as much in memory as there is room for.

Every layer runs once for the forward pass and once more for the backward pass of each few rows of text, so that what it
computes is kept for one layer at a time; a layer that does not stay in memory is read each time.
"""

import logging
import math

from dpamoe import own_text, sensitivity
from dpamoe.calibration import LENGTH
from dpamoe.forecast import PROCESS
from dpamoe.layers import Outline
from dpamoe.sites import Site
from dpamoe.stream import Work, finish_unit

logger = logging.getLogger("dpamoe")
UNIT = "what layers matter"  # in the journal
COPIES = 4  # of log-probabilities in fp32: themselves, what is drawn from, and gradients


def check_measurable(plan: Outline) -> None:
    """ValueError for a model without an output head, whose distribution nothing can move."""
    if not hasattr(plan.model, "get_output_embeddings") or plan.model.get_output_embeddings() is None:
        raise ValueError(
            f"a {type(plan.model).__name__} has no output head, so what its layers matter to is unknown: convert with "
            "--allocator exact, or the language model around it"
        )


def weighing_memory(plan: Outline) -> int:
    """The least memory it takes: what is outside of layers, the largest layer twice, and log-probabilities of a few rows."""
    largest = max(plan.bytes_of(plan.mapping.below(layer)) for layer in plan.layers)
    vocabulary = plan.model.config.get_text_config().vocab_size
    return PROCESS + plan.bytes_of(plan.rest) + 2 * largest + COPIES * 4 * vocabulary * sensitivity.ROWS * LENGTH


def read_again(plan: Outline, device: str, max_memory: int | None) -> list[str]:
    """The layers that do not stay in memory."""
    return own_text.read_again(plan, own_text.room(weighing_memory(plan), device, max_memory))


def price(plan: Outline, again: list[str]) -> tuple[int, int]:
    """Bytes of layers that do not stay in memory, and how often they are read at most."""
    parts = math.ceil(sensitivity.TOKENS / (sensitivity.ROWS * LENGTH))
    return sum(plan.bytes_of(plan.mapping.below(layer)) for layer in again), 2 * parts


def weigh(work: Work, max_memory: int | None) -> None:
    """Measure all sites of a conversion and write what was found beside their residual tables, unless that is done."""
    plan, journal = work.plan, work.journal
    sites = [Site.from_dict(fields) for path in plan.layers for fields in journal.units[path]["sites"]]
    if UNIT in journal.units or not sites:
        return
    again = read_again(plan, work.device, max_memory)
    size, times = price(plan, again)
    logger.info("measure what layers matter, by a backward pass over calibration text")
    if again:
        logger.warning(
            "%.1f GiB of layers do not stay in memory: they are read %d times, %.0f GiB in all",
            size / 2**30, times, size * times / 2**30,
        )  # fmt: skip
    batches = [  # the first is the example
        (args, {name: tensor.to(work.device) for name, tensor in kwargs.items()}) for args, kwargs in work.batches[1:]
    ]
    with own_text.paged(plan, work.device, again):
        found = sensitivity.measure(plan.model, sites, batches, plan.layers)  # what they compute would add up, too
    for path, importance in found.items():
        work.shards.append("residuals", {f"{path}.{name}": tensor for name, tensor in vars(importance).items()})
    finish_unit(work, UNIT, {"sites": [], "unreached": {}, "refused": {}})
