"""The Hopper prefill kernel whole on the CPU: its sources run as Python on the tensors of Triton's interpreter.

Layouts are left out, but for those that copies of Hopper must find in shared memory; PTX is run by `ptx`, and groups take turns
as `warp_groups` says. Reads and writes outside of the tensors of a launch are errors, and so are results made of what had not
arrived. The lanes of a group are at one place all along, so a barrier among them that is missing is not seen.
"""

import ast
import importlib.util
import math
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gluon_language
from triton.runtime.interpreter import GridExecutor

from . import gluon_on_cpu, ptx
from .gluon_on_cpu import mask_of, tensor_of
from .warp_groups import Barrier, Groups, Part

MODULES = (
    "triton_unpack",
    "triton_activate",
    "hopper_unpack",
    "hopper_tiles",
    "hopper_bring",
    "hopper_one_k",
    "hopper_prefill",
)
LANES = 128  # of a warp group
BARRIERS = "barriers"
KINDS = {tl.float16: np.float16, tl.float32: np.float32, tl.int32: np.int32, tl.int8: np.int8, tl.uint8: np.uint8}


class Hopper:
    """Launches of the kernel; the seed is for the order in which its groups go on and copies arrive."""

    def __init__(self, seed):
        self.random, self.bounds = Random(seed), gluon_on_cpu.Bounds()
        plain, language = SimpleNamespace(jit=_plain, constexpr_function=_plain), gluon_on_cpu.language(self._language())
        self.names = {"triton": plain, "gluon": plain, "gl": language, "tl": language, "range": _range, "interpreted": tl}
        self.names |= {"hopper": self._hopper(), "async_copy": self._async_copy()}
        for module in MODULES:
            file = Path(importlib.util.find_spec(f"dpamoe.kernels.{module}").origin)
            tree = ast.parse(file.read_text(encoding="utf-8"))
            tree.body = [node for node in tree.body if not _replaced(node)]
            exec(compile(tree, str(file), "exec"), self.names)

    def __getitem__(self, grid):
        return partial(self._launch, grid)

    def _launch(self, grid, *arguments, **options):
        self.bounds.hold(arguments)
        kernel = self.names["hopper_prefill_kernel"]
        GridExecutor(kernel, list(signature(kernel).parameters), grid)(*arguments, **options)

    def _language(self):
        return {
            "constexpr": constexpr,
            "program_id": lambda axis: tl.program_id(axis),
            "full": lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
            "inline_asm_elementwise": _assembly,
            "allocate_shared_memory": self._allocate,
            "warp_specialize": self._specialize,
            "load": self._load,
            "store": self._store,
            "NVMMASharedLayout": gluon_language.NVMMASharedLayout,
            "NVMMADistributedLayout": lambda *given: None,
            "DotOperandLayout": lambda *given: None,
        }

    def _hopper(self):
        barriers = SimpleNamespace(
            MBarrierLayout=lambda: BARRIERS, init=Barrier.init, wait=self._wait, arrive=self._arrive, expect=self._expect
        )
        return SimpleNamespace(
            mbarrier=barriers,
            tma=SimpleNamespace(async_load=self._load_tile),
            warpgroup_mma=self._multiply,
            warpgroup_mma_wait=self._finish,
        )

    def _async_copy(self):
        return SimpleNamespace(async_load=self._copy, mbarrier_arrive=self._arrive_after_copies)

    def _specialize(self, parts, warps, registers):
        """Run all groups; this program ends when they do."""
        assert len(warps) == len(registers) == len(parts) - 1
        self.groups, self.asked = Groups(self.random), [[] for _ in parts]
        self.reading = [[] for _ in parts]
        self.groups.run([partial(function, *given) for function, given in parts])
        assert not any(self.reading), "products are still under way at the end"

    def _allocate(self, dtype, shape, layout):
        if layout is BARRIERS:
            return Ring([Barrier() for _ in range(shape[0])])
        return Ring([Filled(self, list(shape[1:]), KINDS[dtype], layout) for _ in range(shape[0])])

    def read(self, part):
        """By the group whose turn it is, at once."""
        own, known = self.groups.current, self._known()
        return part.read(own, known, known[own])

    def _known(self):
        return self.groups.known[self.groups.current]

    def _load(self, at, mask=None, other=None):
        self.bounds.check(at, mask)
        return tl.load(at, mask=mask_of(mask), other=other)

    def _store(self, at, value, mask):
        at, mask = tl.broadcast(at, value)[0], tl.broadcast(mask, value)[0]
        self.bounds.check(at, mask)
        assert not np.isnan(value.handle.data[mask.handle.data.astype(bool)]).any(), "a result of what had not arrived"
        tl.store(at, value, mask=mask_of(mask))

    def _wait(self, barrier, phase):
        assert int(phase) in (0, 1)
        self.groups.wait(barrier, int(phase))

    def _arrive(self, barrier, count=1, pred=True):
        if pred:
            self.groups.tell(barrier.arrive, count)

    def _expect(self, barrier, count, pred=True):
        if pred:
            self.groups.tell(barrier.expect, count)

    def _copy(self, part, source):
        """Of Ampere."""
        self.bounds.check(source, None)
        value = tl.load(source).handle.data
        assert value.shape[1] * value.itemsize >= 4, "less than a copy can move"
        part.ask(self._known())
        self.asked[self.groups.current].append((part, value))

    def _arrive_after_copies(self, barrier, increment_count):
        """Of every lane; of the group's own copies, at once where it has none."""
        assert not increment_count
        own = self.groups.current
        asked, self.asked[own] = self.asked[own], []
        if not asked:
            self.groups.tell(barrier.arrive, LANES)
            return

        def land():
            barrier.arrive(LANES, {part: copy for own in asked for part, copy in own[0].land(own[1]).items()})

        self.groups.under_way.append(land)
        self.groups.pause()

    def _load_tile(self, source, at, barrier, part, pred=True):
        """Zeros where the tensor has ended."""
        if not pred:
            return
        assert source.layout == part.layout and source.block_shape == part.shape, "a copy of another layout"
        (row, column), tile = map(int, at), np.zeros(part.shape, part.dtype)
        some = source.base.numpy()[row : row + part.shape[0], column : column + part.shape[1]]
        tile[: some.shape[0], : some.shape[1]] = some
        part.ask(self._known())

        def land():
            barrier.land(tile.nbytes, part.land(tile))

        self.groups.under_way.append(land)
        self.groups.pause()

    def _multiply(self, left, right, sums, is_async=False):
        part, own = right.part, self.groups.current
        sums = sums.value if isinstance(sums, Pending) else sums
        assert left.dtype == tl.float16 and sums.dtype == tl.float32
        right = part.read(own, self._known(), math.inf).T.astype(np.float64)
        total = sums.handle.data + left.handle.data.astype(np.float64) @ right
        self.reading[own].append(part)
        new = Pending(value=tensor_of(total.astype(np.float32), tl.float32))
        self.groups.pause()
        return new if is_async else self._finish(0, [new])

    def _finish(self, pending, deps):
        assert pending == 0
        own = self.groups.current
        for part in self.reading[own]:
            part.read(own, self._known(), self._known()[own])
        self.reading[own] = []
        done = tuple(sums.value for sums in deps)
        return done if len(done) > 1 else done[0]


class constexpr:
    """What the compiler knows, as it is, so that sums of it and a tensor are tensors. The interpreter looks for the name."""

    def __new__(cls, value):
        return {int: _Int, bool: _Int, tuple: _Tuple}.get(type(value), lambda known: known)(value)


class _Int(int):
    value = property(int)


class _Tuple(tuple):
    value = property(tuple)


def _plain(function=None, **options):
    """As a decorator, with options or without: the function itself."""
    return function or _plain


def _replaced(node):
    if isinstance(node, ast.Import):
        return all(name.name.split(".")[0] == "triton" for name in node.names)
    if not isinstance(node, ast.ImportFrom):
        return False
    return node.module.startswith("triton.experimental") or node.module.rpartition(".")[2] in MODULES


def _range(*ends):
    """Of numbers that the compiler does not know."""
    for i in range(*map(int, ends)):
        yield tl.full((), i, tl.int32)


class Ring(list):
    """Shared memory of several parts, or barriers."""

    def index(self, place):
        place = int(place)
        assert 0 <= place < len(self), "a place outside of shared memory"
        return self[place]


class Filled(Part):
    """A part as kernels use it."""

    def __init__(self, hopper, *given):
        super().__init__(*given)
        self.hopper = hopper

    def load(self, layout):
        value = self.hopper.read(self)
        return tensor_of(value, next(kind for kind, own in KINDS.items() if own == value.dtype))

    def permute(self, order):
        """To be the right side of a product, and nothing else."""
        assert tuple(order) == (1, 0)
        return SimpleNamespace(part=self, shape=self.shape[::-1])


@dataclass(frozen=True)
class Pending:
    """The sums of a product that is not waited for yet."""

    value: tl.tensor


def _assembly(code, letters, arguments, dtype, is_pure, pack):
    """PTX on single registers."""
    assert pack == 1
    if code == "mov.b64 $0, $1;":
        return arguments[0]
    arrays = [argument.handle.data for argument in arguments]
    found = ptx.run(code, letters, *(array.reshape(1, -1, 32) for array in arrays))
    return tensor_of(found.view(np.int32).reshape(arrays[0].shape), dtype)
