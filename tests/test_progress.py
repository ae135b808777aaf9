"""Progress: what passes through, and what is said on a terminal and elsewhere."""

import io
import logging
import re
import sys

import pytest

from dpamoe import progress


@pytest.fixture
def lines(monkeypatch):
    """Log lines of `dpamoe` as they come, with stderr no terminal."""
    kept = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())
    logger = logging.getLogger("dpamoe")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logger.manager._clear_cache()
    yield kept
    logger.manager._clear_cache()


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_line_per_item_where_there_is_no_terminal(lines):
    items = ["a", "b", "c"]
    assert list(progress.track(items, "encode", lambda item: item * 2)) == items
    assert [re.sub(r"[\d.]+ s", "N s", line) for line in lines] == [
        "encode 1/3 aa (N s, N s left)",
        "encode 2/3 bb (N s, N s left)",
        "encode 3/3 cc (N s, N s left)",
    ]


def test_items_of_unknown_number_have_no_time_left(lines):
    assert list(progress.track(iter([1, 2]), "calibrate")) == [1, 2]
    assert [re.sub(r"[\d.]+ s", "N s", line) for line in lines] == ["calibrate 1/? 1 (N s)", "calibrate 2/? 2 (N s)"]


def test_a_line_comes_after_its_item_and_items_are_taken_one_at_a_time(lines):
    taken = []

    def source():
        for number in range(5):
            taken.append(number)
            yield number

    tracked = progress.track(source(), "encode")
    assert next(tracked) == 0 and taken == [0] and lines == []
    assert next(tracked) == 1 and taken == [0, 1] and len(lines) == 1
    tracked.close()
    assert taken == [0, 1]


def test_nothing_to_do_says_nothing(lines):
    assert list(progress.track([], "encode")) == []
    assert lines == []


def test_a_bar_and_no_lines_on_a_terminal(lines, monkeypatch):
    drawn = []

    def bar(items, desc, total, **settings):
        drawn.append((desc, total))
        return items

    monkeypatch.setattr(progress, "tqdm", bar)
    monkeypatch.setattr(sys, "stderr", _Terminal())
    assert list(progress.track(["a", "b"], "encode")) == ["a", "b"]
    assert drawn == [("encode", 2)] and lines == []


def test_the_bar_goes_to_stderr(monkeypatch, capsys):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "tqdm", lambda items, **settings: _real_bar(items, settings))
    assert list(progress.track(range(3), "encode")) == [0, 1, 2]
    assert "encode" in terminal.getvalue() and "3/3" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def _real_bar(items, settings):
    from tqdm import tqdm

    return tqdm(items, **{**settings, "delay": 0})


def test_lines_may_be_some_seconds_apart(lines, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    assert list(progress.track(range(8), "write", every=3.0)) == list(range(8))
    assert [line.split(" (")[0] for line in lines] == ["write 3/8 2", "write 6/8 5", "write 8/8 7"]


def test_what_is_said_stands_on_lines_of_its_own_above_the_bar(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    for number in _real_bar(range(2), {"desc": "bench", "file": terminal}):
        progress.say(f"row {number}")
    first, second, rest = re.split(r"row \d\n", terminal.getvalue())
    assert all("bench" in part and not part.rpartition("\r")[2].strip() for part in (first, second)) and "bench" in rest
