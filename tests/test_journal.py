"""What a conversion keeps about itself: one process in a folder, one set of settings, nothing left at the end."""

import os

import pytest

from dpamoe.checkpoint import MARKER
from dpamoe.journal import JOURNAL, Journal, clear, finish, working_in


def test_one_process_at_a_time(tmp_path):
    out = tmp_path / "out"
    with working_in(out, True) as partial:
        assert partial == tmp_path / "out.partial" and (partial / MARKER).read_text() == f"{os.getpid()}\n"
        with pytest.raises(ValueError, match=f"written by process {os.getpid()}: wait until it is done"), working_in(out, True):
            pass
        (partial / "kept").touch()
    with working_in(out, True) as partial:
        assert (partial / "kept").is_file()
    with working_in(out, False) as partial:
        assert [file.name for file in partial.iterdir()] == [MARKER]


def test_a_folder_of_someone_else(tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(ValueError, match="is in the way and not from a broken conversion"), working_in(tmp_path / "out", True):
        pass


def test_a_journal_is_read_again_with_the_same_settings(tmp_path):
    journal = Journal(tmp_path, {"budget": 4.0, "spec": {"k_max": 8}})
    journal.units["layer"] = {"sites": []}
    journal.write()
    assert Journal(tmp_path, {"budget": 4.0, "spec": {"k_max": 8}}).units == {"layer": {"sites": []}}
    with pytest.raises(ValueError, match=r"other settings \(budget was 4.0 and is 3\): use the same, or start again"):
        Journal(tmp_path, {"budget": 3, "spec": {"k_max": 8}})
    (tmp_path / JOURNAL).write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON .*start again with --no-resume"):
        Journal(tmp_path, {})


def test_what_no_journal_knows_is_removed(tmp_path):
    (tmp_path / "stray.growing").touch()
    Journal(tmp_path, {})
    assert [file.name for file in tmp_path.iterdir()] == [JOURNAL]


def test_a_whole_folder_gets_its_name_and_nothing_of_the_work_stays(tmp_path):
    with working_in(tmp_path / "out", True) as partial:
        Journal(partial, {})
        (partial / "weights").write_text("…")
        finish(partial, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["weights"] and not partial.exists()
    assert not clear(tmp_path / "out")
    (tmp_path / "out" / MARKER).touch()
    assert clear(tmp_path / "out") and [file.name for file in (tmp_path / "out").iterdir()] == ["weights"]
