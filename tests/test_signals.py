"""A command that is told to end is interrupted, and only inside the block that asks for it."""

import signal
import threading

import pytest

from dpamoe.cli.signals import terminated_is_interrupted


def test_sigterm_interrupts_inside_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_is_interrupted():
        assert signal.getsignal(signal.SIGTERM) is not before  # else the signal would end the tests
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_change_nothing():
    before, found = signal.getsignal(signal.SIGTERM), []

    def look():
        with terminated_is_interrupted():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
