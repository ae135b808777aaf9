"""Acting on an import: ours follows the library, once, and never comes before it."""

import importlib
import sys

import pytest

from dpamoe.on_import import when_imported


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A library and a module of ours that counts how often it ran, importable by name."""
    (tmp_path / "some_library.py").write_text("value = 1\n")
    (tmp_path / "our_part.py").write_text("import some_library\nsome_library.value += 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "some_library", "our_part"
    sys.meta_path[:] = before
    for name in ("some_library", "our_part"):
        sys.modules.pop(name, None)


def test_ours_runs_right_after_the_library(modules):
    when_imported(*modules)
    assert not {*modules} & sys.modules.keys()
    assert importlib.import_module("some_library").value == 2
    assert "our_part" in sys.modules


def test_at_once_where_the_library_is_there(modules):
    library = importlib.import_module("some_library")
    when_imported(*modules)
    assert library.value == 2


def test_twice_runs_once(modules):
    when_imported(*modules)
    when_imported(*modules)
    assert importlib.import_module("some_library").value == 2


def test_a_library_that_is_missing_stays_missing(modules):
    when_imported("no_such_library", modules[1])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_library")
    assert modules[1] not in sys.modules
