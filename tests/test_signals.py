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


def test_a_handler_that_python_did_not_set_is_no_error_at_the_end(monkeypatch):
    """As in a program that has Python inside: `signal.signal` gives None then, and does not take it back."""
    install, given = signal.signal, []

    def as_embedded(number, handler):
        given.append(handler)
        install(number, handler)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "signal", as_embedded)
    try:
        with terminated_is_interrupted():
            pass
    finally:
        install(signal.SIGTERM, before)
    assert given == [signal.default_int_handler]


def test_other_threads_change_nothing():
    before, found = signal.getsignal(signal.SIGTERM), []

    def look():
        with terminated_is_interrupted():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
