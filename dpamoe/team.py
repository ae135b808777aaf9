"""Several processes on one conversion, as `accelerate launch` starts them: who is who, and how they agree and wait.

Each process that takes part holds a lock on a file of its own in the folder that is written, so that the others see when it is
gone, however it ended.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from dpamoe.journal import Journal

WORKER = "dpamoe.worker"  # name of the locked files, with the number of the process behind it
PATIENCE = timedelta(days=30)  # of whoever waits for a model to write its text; one that ends is noticed at once
PAUSE = 0.05  # seconds between two looks at the journal


class ToldElsewhere(ValueError):
    """Another process failed, and says why."""


@dataclass(frozen=True)
class Team:
    """This process as one of `count`; the first one opens the folder and puts it in place."""

    index: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the first process."""
        return self.index == 0

    def gather(self, value) -> list:
        """The values of all processes; each has to call this."""
        values = [value] * self.count
        if self.count > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def together(self, step: Callable):
        """Do a step in every process, and return its result; where it fails in one, it fails in all."""
        result, failure = None, None
        try:
            result = step()
        except Exception as error:  # the others must not wait for this process, whatever happened
            failure = error
        errors = self.gather(failure and (str(failure) or type(failure).__name__))
        first = next((number for number, error in enumerate(errors) if error), None)
        if first == self.index:
            raise failure
        if first is not None:
            raise ToldElsewhere(errors[first])
        return result


ALONE = Team()


def launched() -> Team:
    """The team that `accelerate launch` started this process in; alone without it."""
    if not torch.distributed.is_torchelastic_launched():
        return ALONE
    from accelerate import PartialState

    state = PartialState(cpu=True, timeout=PATIENCE)  # they exchange sentences alone, whatever device each computes on
    return Team(state.process_index, state.num_processes)


@contextmanager
def at_work(team: Team, folder: Path) -> Iterator[None]:
    """Be seen by the others as long as the block lasts."""
    if team.count == 1:
        yield
        return
    handle = os.open(folder / f"{WORKER}.{team.index}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_at_work(folder: Path, index: int) -> bool:
    """Whether a process is inside of `at_work`."""
    file = folder / f"{WORKER}.{index}"
    if not file.is_file():
        return False
    handle = os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def wait_for(team: Team, journal: Journal, unit: str, owner: int) -> None:
    """Wait until a unit is in the journal. Raises ValueError if the process that should do it is gone."""
    while True:
        there = is_at_work(journal.file.parent, owner)
        journal.refresh()
        if unit in journal.units:
            return
        if not there:
            raise ValueError(
                f"process {owner + 1} of {team.count}, which had to write {unit}, ended before that: see what it said, then "
                "run the same command again, which goes on where this one stopped"
            )
        time.sleep(PAUSE)
