"""Import a module of ours as soon as somebody imports the library that it extends, and not before."""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder


def when_imported(library: str, ours: str) -> None:
    """Import the module `ours` right after the module `library`; at once if that is there already."""
    if library in sys.modules:
        importlib.import_module(ours)
    else:
        sys.meta_path.insert(0, _Watch(library, ours))


class _Watch(MetaPathFinder):
    """Finds nothing itself; lets the finders behind it find one library, and acts once that has run."""

    def __init__(self, library: str, ours: str):
        self.library, self.ours = library, ours

    def find_spec(self, fullname, path=None, target=None):
        """The spec of the library, whose loader then imports our module too; None for everything else."""
        if fullname != self.library:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_both(module) -> None:
            run(module)
            importlib.import_module(self.ours)

        spec.loader.exec_module = run_both
        return spec
