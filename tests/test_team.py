"""Processes that share a conversion: agreeing, being seen, and waiting for one that is gone."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from dpamoe import team
from dpamoe.journal import Journal
from dpamoe.team import ALONE, Team, ToldElsewhere


class Talking(Team):
    """One of two processes; the other one always says the same."""

    said = None

    def gather(self, value):
        return [value, self.said] if self.main else [self.said, value]


def test_alone_a_step_is_a_call():
    assert team.launched() == ALONE and ALONE.main and ALONE.gather(3) == [3]
    assert ALONE.together(lambda: 5) == 5
    with pytest.raises(OSError, match="broken"):
        ALONE.together(lambda: (_ for _ in ()).throw(OSError("broken")))


@pytest.mark.parametrize("index", [0, 1])
def test_what_fails_in_one_fails_in_all_and_the_first_says_so(index):
    here = Talking(index, 2)
    assert here.together(lambda: "good") == "good"

    def fail():
        raise ValueError("own")

    with pytest.raises(ValueError, match="own") as caught:
        here.together(fail)
    assert caught.type is ValueError
    here.__class__.said = "other"
    try:
        with pytest.raises(ToldElsewhere, match="other"):
            here.together(lambda: "good")
        with pytest.raises(ValueError) as caught:
            here.together(fail)
        assert (caught.type, str(caught.value)) == ((ValueError, "own") if index == 0 else (ToldElsewhere, "other"))
    finally:
        here.__class__.said = None


def test_one_alone_leaves_no_file(tmp_path):
    with team.at_work(ALONE, tmp_path):
        assert not list(tmp_path.iterdir()) and not team.is_at_work(tmp_path, 0)


def test_a_process_is_seen_until_it_is_gone_however_it_ends(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from dpamoe.team import Team, at_work\n"
        "with at_work(Team(1, 2), Path(sys.argv[1])): print('here', flush=True); time.sleep(600)"
    )
    assert not team.is_at_work(tmp_path, 1)
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        assert team.is_at_work(tmp_path, 1) and team.is_at_work(tmp_path, 1) and not team.is_at_work(tmp_path, 0)
        process.send_signal(signal.SIGKILL)
    assert not team.is_at_work(tmp_path, 1)


def test_waiting_ends_with_the_unit_or_with_its_owner(tmp_path):
    here, pair = Journal(tmp_path, {}), Team(0, 2)
    there = Journal(tmp_path, {})
    with pytest.raises(ValueError, match="process 2 of 2, which had to write b, ended before that: see what it said"):
        team.wait_for(pair, here, "b", 1)

    def write():
        there.units["b"] = {"sites": []}
        there.shards["base"] = []
        there.write()

    with team.at_work(Team(1, 2), tmp_path):
        timer = threading.Timer(3 * team.PAUSE, write)
        timer.start()
        team.wait_for(pair, here, "b", 1)
        timer.join()
    assert here.units == there.units and here.shards == {"base": []}
    team.wait_for(pair, here, "b", 1)  # done, and its owner gone
    assert os.path.exists(tmp_path / f"{team.WORKER}.1")
