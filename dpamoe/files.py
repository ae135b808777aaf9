"""JSON files that are whole or not there: written beside their place, synced, then renamed."""

import json
import os
import tempfile
from pathlib import Path


def write_json(file: Path, content: dict) -> None:
    """Write an object as UTF-8 JSON; whoever reads `file`, even after a crash, finds the old contents or the new."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def check_place(file: Path) -> None:
    """Raise ValueError unless a file can be written there: into a folder that takes files, in place of nothing but a file."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"folder {folder}, which should hold {file.name}, does not exist: make it first")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give the name of a file")
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is a device or a pipe, whose place a file would take: give the name of a file")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # rights alone say nothing of /proc, or of a disk that is only read
    except OSError as error:
        raise ValueError(
            f"folder {folder}, which should hold {file.name}, cannot be written to ({error.strerror}): choose another place"
        ) from error


def read_json(file: Path, remedy: str) -> dict:
    """The object in a JSON file; ValueError, which ends with the remedy, if the file holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object: {remedy}")
    return content


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
