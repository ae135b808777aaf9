"""Which kernels compute a call, "decode", "bits" or "prefill": by measured cost where `dpamoe tune` ran, else by an estimate.

decode reads the planes of an expert once for every (token, expert) pair, prefill once for every expert that is touched; bits
multiplies planes as they stand, 1 bit each (with tied scales: put together to bytes), on the cards and weights that allow it.
The choice never changes how many planes are read, only which kernel reads them. Costs are kept per device in one JSON file,
$XDG_CACHE_HOME/dpamoe/DEVICE.json (~/.cache without the variable), read once per process and device.
"""

import importlib.util
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

PATHS = ("decode", "bits", "prefill")
FORMAT, VERSION = "dpamoe-costs", 1
# what reading a file raises that is no cost file
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)

# Pairs per distinct expert up to which decode is taken where nothing was measured: a tile of prefill costs about as much as
# two rows of decode. At 128 experts, 8 active and even routing this is 26 tokens, 208 pairs.
SHARED_PAIRS = 2.0
# The same where the bit-serial kernels can be taken: at 64 tokens of that shape, where 4.1 pairs share an expert, they are
# faster than prefill on an H200, with scales of their own (203 and 298 us at k = 4) and with tied ones (288 and 375 us).
SHARED_PAIRS_OF_BITS = 4.2
BIT_CARDS = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))  # with 1-bit products in hardware; others only imitate them
BIT_GROUP = 128
BIT_PAIRS = 1024  # that are put in order by comparing each with each

_forced: ContextVar[str | None] = ContextVar("forced", default=None)


@dataclass(frozen=True)
class Shape:
    """What the cost of a layer depends on beside the number of tokens.

    experts, active: E and A; hidden, inner: input widths of the two matmuls; gated: whether the first has 2 * inner rows;
    group_size as in `EncodeSpec`; scale_mode "shared" or "tied".
    """

    experts: int
    active: int
    hidden: int
    inner: int
    group_size: int
    gated: bool
    scale_mode: str

    @property
    def key(self) -> str:
        """Name in the cost file; the same in every version of the format."""
        kind = "gated" if self.gated else "plain"
        return f"E{self.experts} A{self.active} H{self.hidden} I{self.inner} g{self.group_size} {kind} {self.scale_mode}"


@dataclass(frozen=True)
class Costs:
    """What was measured for one shape on one device.

    microseconds: per layer, by tokens and path. uniform_from: tokens from which Uniform-k costs clearly less than planes by
    token, at `budget` planes; None for never. date (ISO), torch, triton: when and with which versions.
    """

    microseconds: dict[int, dict[str, float]]
    uniform_from: int | None
    budget: float
    date: str
    torch: str
    triton: str

    @property
    def prefill_from(self) -> int | None:
        """Smallest measured number of tokens from which prefill is faster at all larger ones; None for never."""
        both = {tokens: times for tokens, times in self.microseconds.items() if times.keys() >= {"decode", "prefill"}}
        others = {tokens: min(times[path] for path in times.keys() - {"prefill"}) for tokens, times in both.items()}
        return holds_from({tokens: times["prefill"] < others[tokens] for tokens, times in both.items()})

    @property
    def has_bits(self) -> bool:
        """Whether the 1-bit products were measured beside decode."""
        return any(times.keys() >= {"decode", "bits"} for times in self.microseconds.values())

    def few(self, tokens: int) -> str:
        """The faster of "decode" and "bits" at the nearest smaller number of tokens where both were measured, or the least."""
        both = sorted(count for count, times in self.microseconds.items() if times.keys() >= {"decode", "bits"})
        times = self.microseconds[max([count for count in both if count <= tokens], default=both[0])]
        return "bits" if times["bits"] <= times["decode"] else "decode"

    def as_dict(self) -> dict:
        """Plain dictionary, for JSON."""
        return {**vars(self), "microseconds": {str(tokens): dict(times) for tokens, times in self.microseconds.items()}}

    @staticmethod
    def from_dict(fields: dict) -> "Costs":
        """The inverse of `as_dict`. Raises one of UNUSABLE for anything else."""
        costs = Costs(**fields)
        times = {int(tokens): {path: float(us) for path, us in by.items()} for tokens, by in costs.microseconds.items()}
        start = costs.uniform_from
        if any(by.keys() - set(PATHS) or not all(0 < us < math.inf for us in by.values()) for by in times.values()):
            raise ValueError(f"microseconds must be above 0 and finite, by {', '.join(PATHS)}")
        if start is not None and (type(start) is not int or start < 1):
            raise ValueError("uniform_from must be a whole number above 0, or null")
        if not math.isfinite(budget := float(costs.budget)):
            raise ValueError("budget must be a number")
        return Costs(times, start, budget, str(costs.date), str(costs.torch), str(costs.triton))


@cache
def has_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on this device at all; else the torch code does."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def holds_from(outcomes: Mapping[int, bool]) -> int | None:
    """Smallest number from which the outcome is true at all larger ones; None if it is false at the largest."""
    start = None
    for tokens in sorted(outcomes, reverse=True):
        if not outcomes[tokens]:
            break
        start = tokens
    return start


@contextmanager
def forced(path: str) -> Iterator[None]:
    """Compute every call inside the block by one path, for benchmarks and tests. Raises ValueError for an unknown path."""
    if path not in PATHS:
        raise ValueError(f"path is {path!r}: use {', '.join(PATHS[:-1])} or {PATHS[-1]}")
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def has_bits(device: torch.device) -> bool:
    """Whether the device multiplies single bits, and Triton has the dialect, which is young, of the kernels for it."""
    if not has_triton(device) or torch.cuda.get_device_capability(device) not in BIT_CARDS:
        return False
    return _has_gluon()


def has_bit_groups(group: int, tied: bool) -> bool:
    """Whether the bit-serial kernels know such groups: of 128 inputs, with tied scales of 32 or 64, too."""
    return group == BIT_GROUP or (tied and group in (32, 64))


@cache
def has_own_prefill(device: torch.device) -> bool:
    """Whether it is a Hopper card, for which there are prefill kernels of its own, and Triton has their dialect."""
    return has_triton(device) and torch.cuda.get_device_capability(device) == (9, 0) and _has_gluon()


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch: from Hopper on a kernel begins before the one before it has ended, and waits where it must."""
    begins = device.type != "cpu" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if begins else {"PDL": False}


def _has_gluon() -> bool:
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def available(shape: Shape, device: torch.device, tokens: int = 1) -> tuple[str, ...]:
    """The paths that can compute so many tokens in layers of a shape on a device."""
    bits = has_bits(device) and has_bit_groups(shape.group_size, shape.scale_mode == "tied")
    bits = bits and tokens * shape.active <= BIT_PAIRS
    return tuple(path for path in PATHS if bits or path != "bits")


def choose(shape: Shape, tokens: int, device: torch.device, bits: bool = False) -> str:
    """One of PATHS for a call of `tokens` tokens; never reads the device, and a file at the first call only.

    bits: whether the bit-serial kernels can compute it.
    """
    path = _forced.get()
    if path is not None:
        return "decode" if path == "bits" and not bits else path
    if tokens >= _prefill_from(shape, device, bits):
        return "prefill"
    costs = measured(shape, device)
    if bits and costs is not None and costs.has_bits:
        return costs.few(tokens)
    return "bits" if bits else "decode"


@cache
def _prefill_from(shape: Shape, device: torch.device, bits: bool) -> int:
    """First number of tokens that prefill computes. The estimate fills in below and above what was measured."""
    estimate = estimated_prefill_from(shape, bits)
    costs = measured(shape, device)
    if costs is None or not costs.microseconds or (bits and not costs.has_bits):
        return estimate
    start = costs.prefill_from
    if start is None:
        return max(estimate, max(costs.microseconds) + 1)
    return min(estimate, start) if start == min(costs.microseconds) else start


def estimated_prefill_from(shape: Shape, bits: bool = False) -> int:
    """Smallest number of tokens that share each touched expert by more than SHARED_PAIRS pairs, at even routing.

    T tokens touch E (1 - (1 - A / E)^T) of E experts.
    """
    active = min(shape.active, shape.experts)
    if active == 0:
        return 1
    missed = 1 - active / shape.experts
    shared = SHARED_PAIRS_OF_BITS if bits else SHARED_PAIRS
    tokens = 1
    while tokens * active <= shared * shape.experts * (1 - missed**tokens):
        tokens += 1
    return tokens


def measured(shape: Shape, device: torch.device) -> Costs | None:
    """What was measured for a shape on a device, or None."""
    return _table(device_name(device)).get(shape.key)


def device_name(device: torch.device) -> str:
    """Name of the model of a device, such as "NVIDIA H200"; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cost_file(name: str) -> Path:
    """Where the costs of a device are kept. Raises RuntimeError for a user without a home, if XDG_CACHE_HOME is not set."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dpamoe" / f"{re.sub(r'[^A-Za-z0-9 ._()+-]', '_', name)}.json"


@cache
def _table(name: str) -> dict[str, Costs]:
    return load_costs(name)


def forget_costs() -> None:
    """Read the cost files anew at the next call."""
    _table.cache_clear()
    _prefill_from.cache_clear()


def load_costs(name: str) -> dict[str, Costs]:
    """Costs of a device by the key of the shape; none, with a warning that names it, for a file that cannot be used."""
    try:
        file = cost_file(name)
    except RuntimeError:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        header = {"format": FORMAT, "version": VERSION, "device": name}
        if not isinstance(content, dict) or {key: content.get(key) for key in header} != header:
            raise ValueError(f"it is no cost file of version {VERSION} for {name}")
        return {key: Costs.from_dict(fields) for key, fields in content["shapes"].items()}
    except FileNotFoundError:
        return {}
    except UNUSABLE as error:
        warnings.warn(
            f"{file} is ignored ({type(error).__name__}: {error}): run `dpamoe tune` to write it anew, or remove it",
            stacklevel=2,
        )
        return {}


def check_costs_can_be_saved(name: str) -> None:
    """Raise ValueError where `save_costs` could not write."""
    try:
        file = cost_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"costs cannot be saved ({error}): set XDG_CACHE_HOME to a folder that can be written") from error


def save_costs(name: str, costs: Mapping[str, Costs]) -> Path:
    """Add costs, by the key of the shape, to the file of a device in one step, and return its path. Raises OSError."""
    file = cost_file(name)
    shapes = {key: entry.as_dict() for key, entry in sorted({**load_costs(name), **costs}.items())}
    content = {"format": FORMAT, "version": VERSION, "device": name, "shapes": shapes}
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(partial, file)
    except BaseException:
        os.unlink(partial)
        raise
    forget_costs()
    return file
