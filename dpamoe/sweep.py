"""Run a model over several batches at once, one layer at a time, so that only one layer needs to be in memory.

Every batch runs in a thread of its own, which stops at each layer until the layer's result is handed to it. One thread runs at
a time. What a model computes between its layers, and what it passes to them, is thus its own business. Layers are computed in
the thread of whoever sweeps, since each thread that computes would bring as many of its own as there are cores.
"""

import functools
import threading
from collections.abc import Iterable

import torch
from torch import nn


class _Stop(BaseException):
    """Ends a run whose result nobody needs; no `except Exception` of a model catches it."""


class _Run:
    """One batch on its way through the model."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict):
        self.at: str | None = None
        self.inputs: tuple[tuple, dict] = ((), {})
        self.layer = self.result = None
        self.error: BaseException | None = None
        self.stopped = self.done = False
        self.go, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, args=(model, args, kwargs), daemon=True)

    def _main(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.go.acquire()
        try:
            if not self.stopped:
                with torch.no_grad():
                    model(*args, **kwargs)
        except _Stop:
            pass
        except BaseException as error:  # handed to whoever waits for it
            self.error = error
        self.at, self.layer, self.inputs, self.done = None, None, ((), {}), True
        self.arrived.release()

    def hand_over(self, path: str, layer, inputs: tuple[tuple, dict]):
        """Called in the thread of the run, at a layer: wait for its result."""
        self.at, self.layer, self.inputs = path, layer, inputs
        self.arrived.release()
        self.go.acquire()
        if self.stopped:
            raise _Stop
        result, self.result = self.result, None
        return result

    def advance(self) -> None:
        """Compute the layer that it stands at, and let it run to the next one or to its end. Raises what the model raises."""
        if self.done:
            return
        if self.layer is not None:
            args, kwargs = self.inputs
            with torch.no_grad():
                self.result = self.layer(*args, **kwargs)
            del args, kwargs
            self.layer, self.inputs = None, ((), {})
        if not self.thread.is_alive():
            self.thread.start()
        self.go.release()
        self.arrived.acquire()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def stop(self) -> None:
        """End it where it stands."""
        self.stopped = True
        if self.thread.is_alive():
            self.go.release()
            self.thread.join()


class Sweep:
    """Batches (args, kwargs) on their way through the layers of a model; use it in a with block.

    layers: paths of the modules in front of which every batch stops. The first batch can be moved on alone.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], batches: Iterable[tuple[tuple, dict]]):
        self.model, self.layers = model, list(layers)
        self.runs = [_Run(model, args, kwargs) for args, kwargs in batches]

    def __enter__(self) -> "Sweep":
        for path in self.layers:
            self._watch(path, self.model.get_submodule(path))
        for run in self.runs:
            run.advance()
        return self

    def __exit__(self, *exception) -> None:
        for run in self.runs:
            run.stop()
        for path in self.layers:
            self.model.get_submodule(path).__dict__.pop("forward", None)

    def _watch(self, path: str, module: nn.Module) -> None:
        compute = module.forward

        def forward(*args, **kwargs):
            here = threading.current_thread()
            run = next((run for run in self.runs if run.thread is here), None)
            return compute(*args, **kwargs) if run is None else run.hand_over(path, compute, (args, kwargs))

        module.forward = functools.wraps(compute)(forward)

    @property
    def at(self) -> str | None:
        """The layer that all batches stand in front of; None when all are done. ValueError if they went different ways."""
        places = {run.at for run in self.runs}
        if len(places) > 1:
            raise ValueError(
                f"batches run through the layers in different order ({', '.join(map(str, places))}): load it whole"
            )
        return next(iter(places), None)

    @property
    def inputs(self) -> tuple[tuple, dict]:
        """What the first batch gives the layer that it stands in front of."""
        return self.runs[0].inputs

    def first(self) -> None:
        """Move the first batch alone on to its next layer."""
        self.runs[0].advance()

    def others(self) -> None:
        """Move all other batches on to their next layer."""
        for run in self.runs[1:]:
            run.advance()
