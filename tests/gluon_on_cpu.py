"""The Gluon kernels of the 1-bit products on the CPU: by Triton's interpreter, with the PTX in them executed by `ptx`.

Gluon has no interpreter of its own. Layouts are left out, but for the code in PTX, which gets the registers that they say.
Copies into shared memory can be read once they were waited for, not before; what a mask leaves out is not written.
"""

import ast
import importlib.util
import linecache
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from dpamoe.kernels import bitserial_product

from . import layouts, ptx

MODULES = ("triton_wait", "bitserial_product", "byte_product", "bitserial_planes", "bitserial_rows", "bitserial_pieces",
           "bitserial_decode", "bitserial_group")  # fmt: skip
GARBAGE = 0x5A5A5A5A


LAUNCHED = ("up_kernel", "down_kernel", "order_kernel", "cut_kernel", "group_kernel")


@cache
def launched():
    """The kernels that `bitserial_experts` launches, by name."""
    return {name: Launched(getattr(kernels(), name)) for name in LAUNCHED}


@cache
def kernels():
    """Every function of those modules, as one namespace."""
    names = {
        "tl": tl,
        "gl": language({}),
        "gluon": SimpleNamespace(jit=triton.jit, constexpr_function=lambda function: function),
    }
    names |= {"async_copy": COPIES, "gdc_wait": lambda: WAITS.each(), "gdc_launch_dependents": lambda: None, "range": _range}
    for module in MODULES:
        file = Path(importlib.util.find_spec(f"dpamoe.kernels.{module}").origin)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not _replaced(node)]
        source = ast.unparse(tree).replace("gl.constexpr", "tl.constexpr")  # the interpreter looks for this name
        label = f"<{module} on the CPU>"
        linecache.cache[label] = (len(source), None, source.splitlines(True), label)  # the interpreter reads sources
        exec(compile(source, label, "exec"), names)
    names["by_warp"] = lambda layout, warps: None  # takes a layout apart
    names["most_of_warp"] = _most_of_all
    return SimpleNamespace(**names)


def _most_of_all(packed, A, IN, PIECES):
    """Warps run as one here: they take the planes of all their slots."""
    most = 0
    for slot in range(A):
        most = tl.maximum(most, (packed >> (4 * slot)).to(tl.int32) & 15)
    return most


def _range(*ends):
    """Also between numbers that were loaded."""
    return range(*(end.handle.data.item() if isinstance(end, tl.tensor) else end for end in ends))


def _replaced(node):
    if not isinstance(node, ast.ImportFrom):
        return False
    module = node.module or ""
    return "gluon" in module or module == "triton.experimental" or module.endswith("extra.cuda") or _own(module)


def _own(module):
    return module.rpartition(".")[2] in MODULES


def language(own):
    """What kernels use of `gl`; own: functions by name that stand in for others."""
    without_layout = {
        "arange": lambda first, end, layout=None: tl.arange(first, end),
        "zeros": lambda shape, dtype, layout=None: tl.zeros(shape, dtype),
        "convert_layout": lambda value, layout=None, assert_trivial=False: value,
        "load": _load,
        "store": lambda at, value, mask=None: tl.store(BOUNDS.check(at, mask), value, mask=mask_of(mask)),
        "static_range": range,
        "inline_asm_elementwise": _assembly,
        "allocate_shared_memory": lambda dtype, shape, layout: Buffer(tl.full(shape, GARBAGE, dtype)),
        "program_id": _program_id,
        "barrier": lambda: None,
        "shared_memory_descriptor": Buffer,
    }
    for hint in ("max_contiguous", "multiple_of", "max_constancy"):
        without_layout[hint] = lambda value, numbers: value
    for layout in ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DistributedLinearLayout"):
        without_layout[layout] = lambda *given: None
    return _Language(without_layout | own)


class _Language:
    """Own functions, else those of Triton, which the interpreter may have put others in place of."""

    def __init__(self, own):
        self.__dict__.update(own)

    def __getattr__(self, name):
        return getattr(tl, name)


def mask_of(mask):
    """As the interpreter takes it: of one byte each, also after & of comparisons."""
    if isinstance(mask, tl.tensor):
        return tl.tensor(TensorHandle(mask.handle.data.astype(np.bool_), tl.int1), mask.type)
    return mask


class Bounds:
    """Where the tensors of a launch begin and end: outside of them nothing may be read or written."""

    def hold(self, arguments):
        parts = [one for part in arguments for one in (part if isinstance(part, tuple) else (part,))]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        self.begins, ends = np.array(sorted((t.data_ptr(), t.data_ptr() + _bytes(t)) for t in tensors if t.numel())).T
        self.ends = np.maximum.accumulate(ends)

    def check(self, at, mask):
        """The pointers, all of which, but for those that the mask leaves out, must be of one tensor or another."""
        data, there = np.broadcast_arrays(at.handle.data, True if mask is None else mask_of(mask).handle.data)
        places, size = data[there].astype(np.int64), max(1, at.dtype.scalar.element_ty.primitive_bitwidth // 8)
        before = np.searchsorted(self.begins, places, side="right") - 1
        assert (before >= 0).all(), "memory before all tensors is read or written"
        beyond = places + size - self.ends[before]
        assert (beyond <= 0).all(), f"memory up to {beyond.max()} bytes behind a tensor is read or written"
        return at


def _bytes(tensor):
    """From its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


class Launched:
    """A kernel that reads and writes nowhere outside of the tensors it is given."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given, **options: self.launch(grid, given, options)

    def launch(self, grid, given, options):
        BOUNDS.hold((*given, *options.values()))
        self.kernel[grid](*given, **options)


def _load(at, mask=None, other=None, cache_modifier="", volatile=False):
    return tl.load(BOUNDS.check(at, mask), mask=mask_of(mask), other=other)


def _program_id(axis):
    COPIES.begin()
    return tl.program_id(axis)


def _assembly(code, letters, arguments, dtype, is_pure, pack):
    """PTX on four registers of each lane at a time, in the layout that the tensors have; what a cache is told is left out."""
    if code.value.startswith("prefetch"):
        return BOUNDS.check(arguments[0], None)
    if code.value.startswith("mov.b32 $0, $1;"):
        return arguments[0]
    assert pack == 4
    arrays = np.broadcast_arrays(*(argument.handle.data for argument in arguments))
    rows, columns = shape = arrays[0].shape
    if columns == 4:
        layout = bitserial_product.lane_layout(rows // 32)
    else:
        layout = bitserial_product.words_layout(columns // 8, rows // 16)
    place = tuple(layouts.held(layout).movedim(-1, 0).movedim(-1, 1).numpy())  # each [registers, warps, lanes]
    operands = [array[place] for array in arrays]
    assert all(operand.dtype.itemsize <= 4 for operand in operands), "a register holds 32 bits"
    kinds = dtype if isinstance(dtype, (tuple, tl.tuple)) else (dtype,)
    registers, results = ptx.run(code.value, letters.value, *operands), []
    for i, kind in enumerate(kinds):
        found = np.empty(shape, np.uint32)
        found[place] = registers[4 * i : 4 * i + 4]
        results.append(tensor_of(found.view({tl.int32: np.int32, tl.float32: np.float32}[kind]), kind))
    return results[0] if kinds is not dtype else tl.tuple(results)


class Buffer:
    """Shared memory of one piece of a plane; what was never copied may be read, and is garbage."""

    def __init__(self, value):
        self.value, self.there = value, True

    def slice(self, first, length):
        """Some rows, only to be read."""
        assert self.there, "shared memory is read before its copy was waited for"
        return Buffer(tensor_of(self.value.handle.data[first : first + length], self.value.dtype))

    def index(self, place):
        """One part of several, only to be written."""
        return SimpleNamespace(store=lambda value: self._write(place.handle.data.item(), value.handle.data))

    def _write(self, place, array):
        whole = self.value.handle.data.copy()
        whole[place] = array
        self.value = tensor_of(whole, self.value.dtype)

    def reinterpret(self, dtype, shape, layout):
        """The same in another layout."""
        assert dtype == self.value.dtype and list(shape) == list(self.value.shape)
        return self

    def load(self, layout):
        assert self.there, "shared memory is read before its copy was waited for"
        return self.value

    def store(self, value):
        """What all warps write; between a store and a load the compiler puts a barrier."""
        self.value, self.there = value, True


def tensor_of(array, dtype):
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


class Copies:
    """Copies into shared memory, in groups; words: how many were copied by all programs."""

    words = 0

    def begin(self):
        self.asked, self.groups = [], []

    def async_load(self, buffer, source, mask=None):
        there = True if mask is None else mask.handle.data
        self.words += np.broadcast_to(there, source.handle.data.shape).sum()
        buffer.value, buffer.there = tl.load(BOUNDS.check(source, mask), mask=mask_of(mask), other=GARBAGE), False
        self.asked.append(buffer)

    def commit_group(self):
        self.groups.append(self.asked)
        self.asked = []

    def wait_group(self, pending):
        done = self.groups[: len(self.groups) - pending]
        for buffer in (buffer for group in done for buffer in group):
            buffer.there = True


BOUNDS = Bounds()
COPIES = Copies()
WAITS = SimpleNamespace(each=lambda: None)  # what happens where a kernel waits for the one before it
