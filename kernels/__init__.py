"""Numbers in, numbers out: reference, layout, Triton kernels and op registration; import it as `dpamoe.kernels`."""

if __name__ == "kernels":  # the repository root is on sys.path: this folder shadows Hugging Face's `kernels`, step aside
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    _elsewhere = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != _root]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _elsewhere)
    if _spec is not None and _spec.loader is not None:
        sys.modules["kernels"] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["kernels"])
    else:
        __file__ = None  # without a file transformers takes it for a bare folder, that is: `kernels` is not installed
