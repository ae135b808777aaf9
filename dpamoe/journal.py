"""What a conversion has done so far, on disk beside what it wrote: who works on it, with which settings, which layers."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpamoe.checkpoint import JOURNAL, MARKER, check_new, partial_of
from dpamoe.files import read_json, sync, write_json

AGAIN = "start again with --no-resume"


@contextmanager
def working_in(out: Path, resume: bool) -> Iterator[Path]:
    """The folder out.partial, locked for this process; made if need be, and emptied unless `resume`.

    Raises ValueError if another process works in it, or `out` exists. The lock goes with the process, however it ends.
    """
    check_new(out)
    partial = partial_of(out)
    partial.mkdir(exist_ok=True)
    handle = os.open(partial / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ValueError(
                f"{partial} is being written by process {owner}: wait until it is done, or choose another --output-dir"
            ) from error
        if not (partial / MARKER).exists():  # the other run finished in between
            check_new(out)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        if not resume:
            _empty(partial)
        yield partial
    finally:
        os.close(handle)


def _empty(partial: Path) -> None:
    for file in partial.iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name != MARKER:
            file.unlink()


class Journal:
    """settings: what a resumed run must share; units: what is known of each finished layer; shards: state of the files."""

    def __init__(self, folder: Path, settings: dict):
        """Read the journal of a folder, or begin one. Raises ValueError if it was begun with other settings."""
        self.file, self.settings = folder / JOURNAL, settings
        self.units: dict[str, dict] = {}
        self.shards: dict[str, list[dict]] = {}
        if not self.file.is_file():
            _empty(folder)
            self.write()
            return
        content = read_json(self.file, AGAIN)
        before = content.get("settings", {})
        other = sorted(name for name in settings.keys() | before.keys() if settings.get(name) != before.get(name))
        if other:
            shown = ", ".join(
                f"{name} was {_short(before.get(name))} and is {_short(settings.get(name))}" for name in other[:3]
            )
            raise ValueError(f"{folder} was begun with other settings ({shown}): use the same, or {AGAIN}")
        self.units, self.shards = content["units"], content["shards"]

    def refresh(self) -> None:
        """Take over what another process has written meanwhile."""
        content = read_json(self.file, AGAIN)
        self.units, self.shards = content["units"], content["shards"]

    def write(self) -> None:
        """Put it on the disk in one step."""
        write_json(self.file, {"settings": self.settings, "units": self.units, "shards": self.shards})
        sync(self.file.parent)


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"


def finish(partial: Path, out: Path) -> None:
    """Give a folder that is whole its name; nothing of the work is left in it."""
    for file in sorted(partial.rglob("*")):
        sync(file)
    partial.rename(out)
    sync(out.parent)
    clear(out)


def clear(out: Path) -> bool:
    """Remove what a run that was stopped right after `finish` named the folder left in it; whether there was anything."""
    held = [out / name for name in (JOURNAL, MARKER) if (out / name).is_file()]
    for file in held:
        file.unlink()
    if held:
        sync(out)
    return bool(held)
