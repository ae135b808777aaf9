"""Progress: a bar on a terminal, one log line per step elsewhere, both on stderr."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

logger = logging.getLogger("dpamoe")
Item = TypeVar("Item")


def track(items: Iterable[Item], label: str, name: Callable[[Item], str] = str, every: float = 0.0) -> Iterator[Item]:
    """Pass items through; on a terminal draw a bar with ETA, else log one line per item with the time left.

    every: seconds that pass between two lines at least; the last item has one anyway.
    """
    total = len(items) if isinstance(items, Sized) else None
    if sys.stderr.isatty():
        yield from tqdm(items, desc=label, total=total, delay=1.0, dynamic_ncols=True)
        return
    start = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last < every and done != total:
            continue
        spent, last = now - start, now
        left = "" if total is None else f", {spent / done * (total - done):.0f} s left"
        logger.info("%s %d/%s %s (%.1f s%s)", label, done, "?" if total is None else total, name(item), spent, left)


def say(lines: str) -> None:
    """Print lines on stdout at once; a bar on the same terminal goes on below them."""
    with tqdm.external_write_mode():
        print(lines, flush=True)
