"""JSON files are whole or not there, whatever goes wrong while one is written."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from dpamoe.files import check_place, read_json, write_json


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"b": [1, None, "ä"], "a": 2.5})
    assert read_json(file, "") == {"b": [1, None, "ä"], "a": 2.5}
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("content", [{"a": float("nan")}, {"a": object()}])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, content):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(file, content)
    assert read_json(file, "") == {"a": 1} and len(list(tmp_path.iterdir())) == 1


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})

    def fail(handle):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(file, {"a": 2})
    assert read_json(file, "") == {"a": 1} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b""])
def test_a_damaged_file_gets_a_sentence_with_the_remedy(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json .*: copy it"):
        read_json(tmp_path / "a.json", "copy it")


def test_where_a_file_may_be_written(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    check_place(tmp_path / "new.json")
    check_place(tmp_path / "old.json")
    with pytest.raises(ValueError, match=f"folder {tmp_path / 'no'}, which should hold a.json, does not exist: make it first"):
        check_place(tmp_path / "no" / "a.json")
    with pytest.raises(ValueError, match="is a folder: give the name of a file"):
        check_place(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a device or a pipe, whose place a file would take"):
        check_place(tmp_path / "pipe")


def test_a_folder_that_takes_no_files_is_found_before_it_is_written_to(tmp_path, monkeypatch):
    def refused(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)  # root may write anywhere
    with pytest.raises(ValueError, match=f"folder {tmp_path}, which should hold a.json, cannot be written to .Read-only file"):
        check_place(tmp_path / "a.json")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no folder that takes no files whoever asks")
def test_a_folder_of_the_system_takes_no_files():
    with pytest.raises(ValueError, match="folder /proc, which should hold a.json, cannot be written to"):
        check_place(Path("/proc/a.json"))


def test_looking_for_a_place_leaves_nothing(tmp_path):
    check_place(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())
