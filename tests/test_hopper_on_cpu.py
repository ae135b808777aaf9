"""The Hopper kernel whole, as its launches call it, on the CPU against fp64; and that `hopper_on_cpu` sees what goes wrong."""

import math
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.runtime.errors import InterpreterError

from dpamoe.kernels import grouped
from dpamoe.kernels.hopper_experts import Cut
from dpamoe.kernels.layout import EncodedWeight, pack_signs

from .hopper_on_cpu import LANES
from .marks import some_slow
from .warp_groups import Barrier, Groups, Part

EXPERTS, ROWS = 4, 72  # one whole warp group, and 8 rows for the next
EXACT = 2.0**-20  # numbers of few bits: only sums in fp32 are rounded
ROUNDED = 2e-3  # scales and sums of them have 11 bits


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests run before."""
    torch.manual_seed(0)


def few_bits(width, group, planes):
    """A weight that the kernel holds exactly, but for offsets less scales, which need both parts of their product.

    Each expert has half the scales of the one before.
    """
    shape = (EXPERTS, ROWS, width // group)
    signs = torch.rand(planes, *shape[:2], width) < 0.5
    size = 2.0 ** -torch.arange(EXPERTS)[:, None, None]
    scales = [((torch.randint(128, 256, shape) >> c | 1) * 2.0**-9 * size).half() for c in range(planes)]
    offset = (torch.randint(-2047, 2048, shape) * 2.0**-11 * size).half()
    return EncodedWeight([pack_signs(positive) for positive in signs], scales, offset, None, width, group)


def routed(ks, width, tokens=11):
    """Whole numbers with a mean; an expert of all tokens, one of half, one of a few, one of none; padding; k = 0."""
    other = torch.tensor([1, 1, EXPERTS, 3]).repeat(tokens)[:tokens]
    ids = torch.stack([torch.zeros(tokens, dtype=torch.long), other], 1)
    chunks = torch.tensor(ks, dtype=torch.int32).repeat(2 * tokens)[: 2 * tokens].reshape(tokens, 2)
    chunks[3] = 0
    return torch.randint(0, 128, (tokens, width)).float(), ids, chunks


def expected(x, ids, chunks, weight):
    """fp64 [T, A, O], NaN for pairs that read nothing."""
    out = torch.full((*ids.shape, weight.offset.shape[1]), float("nan"), dtype=torch.float64)
    for k in set(chunks.flatten().tolist()) - {0}:
        dense = grouped.decode(weight, k).double()
        for token, slot in torch.nonzero((chunks == k) & (ids < EXPERTS)).tolist():
            out[token, slot] = dense[ids[token, slot]] @ x[token].double()
    return out


def multiplied(he, x, ids, chunks, weight, cut, one_k):
    """What the kernel makes of them, NaN where it writes nothing."""
    by = he.sort_pairs(ids, chunks, cut, one_k, weight, weight)
    found = torch.full((ids.numel(), weight.offset.shape[1]), float("nan"))
    he.product(x, by, True, weight, None, "", 2, found)
    return found.view(*ids.shape, -1)


def error(found, exact):
    """Of the norm; both must have the same rows."""
    assert torch.equal(found.isnan(), exact.isnan())
    return float((found - exact).nan_to_num().norm() / exact.nan_to_num().norm())


MIXED = [3, 1, 2, 2, 3, 3, 1, 0, 3]
ALL = [8, 1, 2, 7, 3, 3, 5, 0, 4, 6, 8]
# group, width, `Cut`, whether one k is guessed, k of the pairs in turn
CASES = {
    "one k, two slices": (128, 256, Cut((8, 8), 3, 4, whole=True), True, [3]),
    "one k, slices of two widths": (128, 256, Cut((16, 8), 3, 2), True, [1]),
    "one k where there may be several": (128, 256, Cut((16, 8, 8), 2, 2), False, [2]),
    "a wrong guess, four blocks kept": (64, 256, Cut((8, 8), 2, 4, whole=True), True, MIXED),
    "a wrong guess, three slices": (128, 256, Cut((8,) * 3, 2, 2), True, MIXED),
    "several widths": (128, 256, Cut((16, 8, 8), 2, 2), False, MIXED),
    "several widths, all at once": (64, 256, Cut((32, 16, 16, 8), 2, 4, whole=True), False, MIXED),
    "rows of each slice": (64, 512, Cut((16, 8, 8), 2, 2, whole=True), False, MIXED),
    "one k, two words": (128, 512, Cut((8, 8), 2, 2, whole=True), True, MIXED),
    "rows of each slice, one word": (32, 256, Cut((16, 8), 2, 1, whole=True), False, MIXED),
    "one word": (32, 256, Cut((16, 8), 2, 3, whole=True), False, MIXED),
}  # fmt: skip
LARGER = {
    "one k, four groups": (128, 512, Cut((16,), 4, 4, whole=True), True, [8]),
    "one k, full and other tiles": (128, 768, Cut((16,) * 3, 3, 2), True, [5]),
    "one k, a slice": (64, 512, Cut((16,), 2, 2), True, [2]),
    "a wrong guess": (128, 512, Cut((32, 32), 3, 4, whole=True), True, ALL),
    "one k, four words": (256, 1024, Cut((8,) * 4, 2, 2), True, ALL),
    "four words": (256, 1024, Cut((16, 8, 8), 2, 2), False, ALL),
    "seven slices": (64, 768, Cut((64, 32, 32, 16, 16, 16, 16), 2, 2, whole=True), False, ALL),
    "rows of four slices": (128, 512, Cut((32, 16, 16, 8), 3, 2, whole=True), False, ALL),
    "a wrong guess, wide slices": (128, 768, Cut((64,) * 3, 2, 2, whole=True), True, ALL),
    "many tiles": (128, 512, Cut((8, 8), 2, 4, whole=True), False, ALL),
}


@pytest.mark.parametrize("case", CASES)
def test_cuts_and_guesses(hopper_on_cpu, case):
    group, width, cut, one_k, ks = CASES[case]
    weight, (x, ids, chunks) = few_bits(width, group, 3), routed(ks, width)
    found = multiplied(hopper_on_cpu, x, ids, chunks, weight, cut, one_k)
    assert error(found, expected(x, ids, chunks, weight)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGER)
def test_eight_planes_and_longer_rows(hopper_on_cpu, case):
    group, width, cut, one_k, ks = LARGER[case]
    weight, (x, ids, chunks) = few_bits(width, group, 8), routed(ks, width, 61)
    found = multiplied(hopper_on_cpu, x, ids, chunks, weight, cut, one_k)
    assert error(found, expected(x, ids, chunks, weight)) < EXACT


@pytest.mark.parametrize("cut", [Cut((16, 8), 2, 4, whole=True), Cut((16, 8), 3, 2), Cut((8, 8, 8), 2, 4, whole=True)])
def test_tiles_of_one_k_with_some_or_all_slices(hopper_on_cpu, cut):
    """25 pairs of an expert fill a tile of 24 and a slice of the next; half of them, one or two slices."""
    weight, (x, ids, chunks) = few_bits(256, 64, 2), routed([2], 256, 26)
    by = hopper_on_cpu.sort_pairs(ids, chunks, cut, True, weight, weight)
    used = {sum(k > 0 for k in tile[4::3]) for tile in by.tiles[: int(by.tiles[0, 1])].tolist()}
    assert len(used) > 1 and max(used) == len(cut.widths)
    found = multiplied(hopper_on_cpu, x, ids, chunks, weight, cut, True)
    assert error(found, expected(x, ids, chunks, weight)) < EXACT


TIED = {
    "group 64": (64, 256, Cut((16, 8, 8), 2, 4, whole=True), False),
    "group 128": (128, 512, Cut((8,), 2, 2), True),
}


@pytest.mark.parametrize("case", TIED)
def test_tied_scales(hopper_on_cpu, random_encoded, case):
    group, width, cut, one_k = TIED[case]
    weight, (x, ids, chunks) = random_encoded(EXPERTS, ROWS, width, group, 2, tied=True), routed([1, 2, 2, 0], width)
    found = multiplied(hopper_on_cpu, x, ids, chunks, weight, cut, one_k)
    assert error(found, expected(x, ids, chunks, weight)) < ROUNDED


def block(he, random_encoded, activation, one_k, ks, tokens, dtype):
    """Error of a whole expert block, in the cut that is chosen for it."""
    hidden, inner, planes = 256, 128, max(ks)
    up = random_encoded(EXPERTS, inner * (2 if activation == "silu_mul" else 1), hidden, 128, planes)
    down = random_encoded(EXPERTS, 64, inner, 64, planes, seed=1)
    biases = [torch.randn(EXPERTS, weight.offset.shape[1]) for weight in (up, down)]
    assert he.usable(up, down)
    _, ids, chunks = routed(ks, hidden, tokens)
    x, gates = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 2)
    found = he.prefill_ffn(x, ids, gates, chunks, up, biases[0], down, biases[1], activation, one_k)
    exact = grouped.expert_ffn(x.double(), ids, gates, chunks, up, biases[0], down, biases[1], activation)
    return error(found, exact)


@pytest.mark.parametrize("activation, one_k", [("silu_mul", False), ("relu2", True)])
def test_a_block_with_biases(hopper_on_cpu, random_encoded, monkeypatch, activation, one_k):
    """Tiles are shared out among three programs."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    assert block(hopper_on_cpu, random_encoded, activation, one_k, [1, 1, 2], 5, torch.float32) < ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation, one_k", [("silu_mul", False), ("silu_mul", True), ("relu", False)])
def test_a_block_of_other_types(hopper_on_cpu, random_encoded, tolerance, activation, one_k, dtype):
    allowed = 2 * tolerance(dtype)["rtol"]  # of a norm
    assert block(hopper_on_cpu, random_encoded, activation, one_k, ALL, 40, dtype) < allowed


def test_nothing_to_read(hopper_on_cpu):
    weight, (x, ids, chunks) = few_bits(256, 128, 2), routed([0], 256)
    assert not hopper_on_cpu.prefill_matmul(x, ids, chunks, weight, None).any()
    ids.fill_(EXPERTS)
    assert not hopper_on_cpu.prefill_matmul(x, ids, chunks + 2, weight, None).any()


ONE_K, TOGETHER = (Cut((8, 8), 2, 2), True), (Cut((8, 8), 2, 2), False)
SLICES = Cut((16, 8), 2, 1, whole=True), False  # each has its rows by itself


def small(he, seed, cut=ONE_K, **changed):
    """A product of a few tiles in an order of its own, after functions of the kernel were changed."""
    names = he.hopper_prefill_kernel.names
    names.update(changed)
    he.hopper_prefill_kernel.random.seed(seed)
    torch.manual_seed(0)
    weight, (x, ids, chunks) = few_bits(128, 32, 1), routed([1], 128)
    return multiplied(he, x, ids, chunks, weight, *cut)


@pytest.mark.parametrize("cut", [ONE_K, TOGETHER, SLICES], ids=["one k", "together", "slices"])
def test_no_order_of_groups_and_copies_matters(hopper_on_cpu, cut, monkeypatch):
    orders, found, pause = [], [], Groups.pause

    def noted(groups, ready=None):
        orders[-1].append(groups.current)
        pause(groups, ready)

    monkeypatch.setattr(Groups, "pause", noted)
    for seed in (1, 1, 2):
        orders.append([])
        found.append(small(hopper_on_cpu, seed, cut).nan_to_num())
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def nothing(*given, **options):
    """Stands for what is left out."""


def without_waits(names, count):
    """No wait at barriers that count so many."""
    barriers = names["mbarrier"]

    def wait(barrier, phase):
        if barrier.count != count:
            barriers.wait(barrier, phase)

    return {"mbarrier": SimpleNamespace(**{**vars(barriers), "wait": wait})}


ARRIVED, STUCK, MORE = "of what had not arrived", "wait for what never happens", "more arrive at a barrier"
READ, COPIED, OUTSIDE = "where others may read", "where another may be under way", "behind a tensor"
# a cut, functions that take the place of others, by the names of those, and what may be said of it first
FAULTS = {
    "rows are not waited for": (ONE_K, lambda names: without_waits(names, 1), (ARRIVED, COPIED, MORE)),
    "planes are not waited for": (ONE_K, lambda names: without_waits(names, LANES), (ARRIVED, COPIED, STUCK)),
    "room is not waited for": (ONE_K, lambda names: without_waits(names, 2 * LANES), (ARRIVED, READ, COPIED, STUCK, MORE)),
    "products are not waited for": (ONE_K, lambda names: {"_finished": lambda accs: accs}, ("'Pending' object has no", READ)),
    "rows of several slices are not waited for": (TOGETHER, lambda names: {"wait_for_rows": nothing}, (ARRIVED, COPIED, MORE)),
    "no bytes are announced": (ONE_K, lambda names: {"_expect": nothing}, (STUCK,)),
    "rows behind the last": (
        ONE_K, lambda names: {"line_of": lambda block, *given: block * 64 + names["gl"].arange(0, 64)}, (OUTSIDE,),
    ),
    "rows of a slice are not waited for": (SLICES, lambda names: without_waits(names, 1), (ARRIVED, COPIED, MORE)),
    "planes are not waited for by slices": (SLICES, lambda names: without_waits(names, LANES), (ARRIVED, COPIED)),
    "room of a slice is not waited for": (
        SLICES, lambda names: without_waits(names, 2 * LANES), (ARRIVED, READ, COPIED, STUCK, MORE),
    ),
    "room is not given back": (ONE_K, lambda names: {"release": nothing}, (STUCK,)),
    "room of a slice is not given back": (SLICES, lambda names: {"release": nothing}, (STUCK,)),
    "phases of slices stay": (
        SLICES, lambda names: {"used_of": lambda levels, P: levels * 0}, (ARRIVED, READ, COPIED, STUCK, MORE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", some_slow(range(5), [0]))
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(hopper_on_cpu, fault, seed):
    cut, change, said = FAULTS[fault]
    with pytest.raises(InterpreterError, match="|".join(said)):
        small(hopper_on_cpu, seed, cut, **change(hopper_on_cpu.hopper_prefill_kernel.names))


def test_a_group_that_fails_ends_the_others():
    groups = Groups(Random(0))

    def fail():
        groups.pause()
        raise ValueError("its own error")

    with pytest.raises(ValueError, match="its own error"):
        groups.run([lambda: groups.pause(lambda: False), fail])


def test_a_copy_that_nobody_waits_for():
    groups = Groups(Random(0))
    with pytest.raises(AssertionError, match="still under way"):
        groups.run([lambda: groups.under_way.append(nothing)])


def test_a_barrier_ends_with_arrivals_and_bytes():
    """Two arrive, one of which announces 8 bytes; what comes before it was announced counts too."""
    barrier = Barrier()
    barrier.init(2)
    barrier.land(3, {"a": 1})
    barrier.expect(8, {"b": 2})
    barrier.arrive(1, {"b": 1})
    assert barrier.phase == 0 and not barrier.passed
    barrier.land(5, {})
    assert barrier.phase == 1 and barrier.passed == {"a": 1, "b": 2}
    barrier.arrive(1, {})
    with pytest.raises(AssertionError, match="more arrive"):
        barrier.arrive(2, {})


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_what_was_copied_is_garbage_to_those_who_do_not_know(dtype):
    part = Part((2, 4), dtype, None)
    part.ask({})
    told = part.land(np.ones((2, 4), dtype))
    assert (part.read(0, told, 3) == 1).all()
    garbage = part.read(1, {}, math.inf)  # which no copy can make worse
    assert np.isnan(garbage).all() if dtype == "float16" else (garbage == 0x5A5A5A5A).all()
    for far in (math.inf, 4):
        part.read(1, told, far)
        with pytest.raises(AssertionError, match="others may read"):
            part.ask({**told, 0: 3, 1: 3})
    with pytest.raises(AssertionError, match="another may be under way"):
        part.ask({0: 3, 1: 4})
    part.ask({**told, 0: 3, 1: 4})
    assert not (part.read(0, told, 4) == 1).any()  # of the copy before this one
