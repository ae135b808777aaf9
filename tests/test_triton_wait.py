"""Kernels that begin before the one before has ended, by the interpreter: what that wrote is there once they have waited."""

import math
from functools import partial

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import grouped, triton_experts, triton_wait

ERROR = 4e-3  # of the norm: rows are rounded to fp16, offsets less scales to two such numbers


class Chain:
    """Launches one after the other, by the names of their kernels; each finds garbage in what the one before wrote, until its
    first program waits. One that is not launched early finds all there, and never waits."""

    def __init__(self):
        self.launched, self.early, self.written, self.waits = [], set(), [], 0

    def make_early(self, monkeypatch, module, names):
        """Let a module launch its kernels of these names in this chain."""
        monkeypatch.setattr(triton_wait, "gdc_wait", self.wait)
        monkeypatch.setattr(triton_wait, "gdc_launch_dependents", lambda: None)
        monkeypatch.setattr(module, "early", lambda device: {"PDL": True, "launch_pdl": True})
        for name in names:
            monkeypatch.setattr(module, name, Early(self, name, getattr(module, name)))

    def wait(self):
        self.waits += 1
        while self.written:
            tensor, value = self.written.pop()
            tensor.copy_(value)

    def launch(self, name, kernel, grid, *given, **options):
        tensors = [getattr(value, "base", value) for value in given]  # or that of a descriptor
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        begins = options.get("launch_pdl", False)
        if not begins:
            self.wait()
        for tensor, _ in self.written:
            tensor.fill_(math.nan if tensor.is_floating_point() else -7)
        self.waits, before = 0, [tensor.clone() for tensor in tensors]
        kernel[grid](*given, **options)
        assert self.waits == begins * math.prod(grid), "each program waits where it begins early, and none elsewhere"
        self.launched.append(name)
        if begins:
            self.early.add(name)
        self.written = [(t, t.clone()) for t, old in zip(tensors, before, strict=True) if not torch.equal(t, old)]


class Early:
    """Stands for a kernel that is launched in a chain."""

    def __init__(self, chain, name, kernel):
        self.chain, self.name, self.kernel = chain, name, kernel

    def __getitem__(self, grid):
        return partial(self.chain.launch, self.name, self.kernel, grid)


@pytest.fixture
def chain(hopper_on_cpu, monkeypatch):
    """All launches of a prefill on Hopper; counting, the products and the sum of slots are not early."""
    made = Chain()
    made.make_early(monkeypatch, triton_experts, ("count_kernel", "scan_kernel", "sort_kernel", "combine_kernel"))
    made.make_early(monkeypatch, hopper_on_cpu, ("prepare_kernel", "hopper_prefill_kernel"))
    return made


@pytest.mark.parametrize("one_k", [False, True])
def test_a_prefill_of_early_kernels(hopper_on_cpu, chain, random_encoded, random_pairs, one_k):
    """More pairs than one block of them."""
    ids, gates, chunks = random_pairs(70, 2, 3, 5)
    chunks, x = chunks.clamp(max=1 if one_k else 2), torch.randn(70, 128)
    up, down = random_encoded(3, 128, 128, 32, 2), random_encoded(3, 64, 128, 32, 2, seed=1)
    found = hopper_on_cpu.prefill_ffn(x, ids, gates, chunks, up, None, down, None, "relu", one_k)
    expected = grouped.expert_ffn(x.double(), ids, gates, chunks, up, None, down, None, "relu")
    assert float((found - expected).norm() / expected.norm()) < ERROR
    product = ["prepare_kernel", "hopper_prefill_kernel"]
    assert chain.launched == ["count_kernel", "scan_kernel", "sort_kernel", *product, *product, "combine_kernel"]
    assert chain.early == {"scan_kernel", "sort_kernel", "prepare_kernel"}


def test_a_kernel_that_is_not_launched_early_does_not_wait(monkeypatch):
    monkeypatch.setattr(triton_wait, "gdc_wait", lambda: pytest.fail("it waits"))
    counts = torch.ones(2, 16, dtype=torch.int32)
    triton_experts.scan_kernel[(1,)](counts, 1, KEYS=16, SOME=16, AT_ONCE=32, PDL=False)
    assert counts.tolist() == [[0] * 16, [1] * 16]
