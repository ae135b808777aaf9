"""Planes that encoded experts give while a test runs a model."""

from contextlib import contextmanager
from unittest import mock

from dpamoe.modules import EncodedExperts


@contextmanager
def planes():
    """A list that grows by the planes of each call of encoded experts, int32 [T, A]."""
    seen, run = [], EncodedExperts.run

    def record(self, *given):
        result, chunks = run(self, *given)
        seen.append(chunks)
        return result, chunks

    with mock.patch.object(EncodedExperts, "run", record):
        yield seen
