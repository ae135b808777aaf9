"""The log of an unattended run: a file beside the output, one line per event with its time, kept whatever happens."""

import logging
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from dpamoe import __version__
from dpamoe.team import Team


def beside(out: Path) -> Path:
    """The log of what is written into `out`."""
    return out.absolute().with_name(f"{out.absolute().name}.log")


@contextmanager
def written(out: Path, team: Team, argv: list[str], begun: Callable[[], bool]) -> Iterator[None]:
    """Append to the log of `out` what is said inside the block, finer than on stderr, and how it ended.

    A new log is made when the work has `begun`, so that a mistake in the command leaves nothing behind. A folder that
    cannot be written to has no log, and is complained about by whoever writes the output.
    """
    logger, handler = logging.getLogger("dpamoe"), _File(beside(out), begun)
    number = f"[{team.index + 1}/{team.count}] " if team.count > 1 else ""
    handler.setFormatter(_OneLine(f"%(asctime)s {number}%(message)s"))
    levels = {other: other.level for other in logger.handlers}
    before, start = logger.level, time.monotonic()
    for other in logger.handlers:
        other.setLevel(max(other.level, before))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        logger.debug("begins: dpamoe %s", shlex.join(argv))
        logger.debug("dpamoe %s, torch %s, transformers %s", __version__, version("torch"), version("transformers"))
        yield
        logger.debug("ends after %.0f s", time.monotonic() - start)
    except KeyboardInterrupt:
        logger.debug("interrupted after %.0f s", time.monotonic() - start)
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        logger.debug("failed after %.0f s: %s", time.monotonic() - start, reason or type(error).__name__)
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        for other, level in levels.items():
            other.setLevel(level)
        handler.close()


class _File(logging.FileHandler):
    """A file that is made once `begun` says so, and may be on a full disk: what cannot be noted is not another error."""

    def __init__(self, file: Path, begun: Callable[[], bool]):
        super().__init__(file, encoding="utf-8", delay=True)
        self.begun, self.waiting = begun, []

    def emit(self, record: logging.LogRecord) -> None:
        """Write what waited, and this."""
        self.waiting.append(record)
        if self.stream is None and not Path(self.baseFilename).is_file() and not self.begun():
            return
        with suppress(OSError):
            for one in self.waiting:
                super().emit(one)
        self.waiting.clear()

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Close it, whatever was lost."""
        with suppress(OSError):
            super().close()


class _OneLine(logging.Formatter):
    """Every event on one line."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split("\n"))
