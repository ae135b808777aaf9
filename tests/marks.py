"""Which parameters of a test are for `pytest -m slow` alone."""

import pytest


def some_slow(cases, fast):
    """Parameters of a test, a tuple for several each; all but the fast ones are slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
