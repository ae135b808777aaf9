"""Times on a device: calls replayed as one CUDA graph, the bandwidth of a copy, and the facts that belong beside them.

On a CPU the same calls are timed by the wall clock, which serves tests of the commands and says nothing about a GPU.
"""

import contextlib
import datetime
import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn

WARM_UPS, REPEATS, CPU_REPEATS = 2, 5, 3
REPEAT_SECONDS, MOST_REPLAYS = 0.02, 200  # a repeat is this long where one replay is shorter
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
CPU_BYTES = 4 << 30  # what random weights may take where the system does not say what is free
MOST_LAYERS = 16
L2_BYTES = 64 << 20  # where the device does not say

Call = Callable[[], object]


def device_of(name: str) -> torch.device:
    """A device by name, with its number where it is a GPU, as tensors name it."""
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def microseconds(calls: Sequence[Call], device: torch.device) -> float:
    """Median time of one of `calls`, made in turn, µs; on CUDA they are one graph. ValueError if they cannot be captured."""
    return microseconds_in_turn([calls], device, REPEATS if device.type == "cuda" else CPU_REPEATS)[0]


def microseconds_in_turn(jobs: Sequence[Sequence[Call]], device: torch.device, rounds: int) -> list[float]:
    """As `microseconds`, for each of several jobs, in rounds in which each runs once: what drifts drifts for all of them."""
    with torch.no_grad(), torch.cuda.device(device if device.type == "cuda" else -1):
        runs = [_graph_run(calls) if device.type == "cuda" else _plain_run(calls) for calls in jobs]
        found = [[run() for run in runs] for _ in range(rounds)]
    return [median(times) / len(calls) for times, calls in zip(zip(*found, strict=True), jobs, strict=True)]


def _graph_run(calls: Sequence[Call]) -> Callable[[], float]:
    """What replays all calls as often as a repeat takes and returns the time of one replay, µs."""
    graph = _captured(calls)
    replays = round(REPEAT_SECONDS * 1e6 / _replay(graph, 1))
    return partial(_replay, graph, max(1, min(MOST_REPLAYS, replays)))


def _plain_run(calls: Sequence[Call]) -> Callable[[], float]:
    """What makes all calls, which were made before, once and returns the time, µs."""
    for call in calls:
        call()
    return lambda: 1e6 * seconds(lambda: [call() for call in calls], torch.device("cpu"))


def seconds(run: Call, device: torch.device) -> float:
    """Time of one run by the wall clock, the work it left on the device included."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"a call could not be captured as a CUDA graph ({error}): it waits for the device or copies from the host"
        ) from error
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Time of one replay, µs."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / times


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a device-to-device copy, those read and those written counted."""
    size = COPIED_BYTES["cuda" if device.type == "cuda" else "cpu"] // 4
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # a kernel: inside a graph a plain copy goes to the copy engine, which is slower than what kernels reach
    return 8 * size / microseconds([lambda: torch.neg(source, out=target)], device) * 1e6


def copies(layer_bytes: float, device: torch.device) -> int:
    """Copies of one layer to build, so that they may be read in turn: those that fit, at most 16; 2 on a CPU."""
    if device.type != "cuda":
        return 2
    return max(1, min(MOST_LAYERS, int(0.4 * free_bytes(device) / layer_bytes)))


def enough(read_bytes: float, device: torch.device) -> int:
    """How many layers to read in turn so that no cache still holds the first when the last is done: four times its size."""
    if device.type != "cuda":
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", L2_BYTES)
    return max(2, -(-4 * cache // max(1, int(read_bytes))))


def free_bytes(device: torch.device) -> int:
    """Bytes that may be allocated now, what the caching allocator holds unused included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return CPU_BYTES


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each tensor once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what compiled functions and dropped tensors still hold."""
    import gc

    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()


def facts(device: torch.device) -> dict:
    """Device, how times were taken, date and versions: what every printed time needs beside it."""
    versions = {"torch": torch.__version__}
    for name in ("triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    times = "CUDA graph replay, median" if device.type == "cuda" else "CPU wall clock, not a benchmark"
    return {"device": name, "times": times, "date": datetime.date.today().isoformat(), "versions": versions}


def heading(outcome: dict) -> str:
    """The facts in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in outcome["versions"].items())
    return f"{outcome['device']}; {versions}; {outcome['date']}; times: {outcome['times']}"
