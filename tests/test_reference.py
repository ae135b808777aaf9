"""The judge itself: decoding and experts against numbers worked by hand, the knapsack against trying everything."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpamoe.kernels import reference


def hand_made():
    """One weight of 1 x 10 in groups of 4 with two planes, and what it decodes to with 1 and 2 planes."""
    planes = [torch.tensor([[[0b01010011, 0b10]]], dtype=torch.uint8), torch.tensor([[[0b00001111, 0b01]]], dtype=torch.uint8)]
    scales = [torch.tensor([[[1.0, 2.0, 4.0]]]).half(), torch.tensor([[[0.5, 0.25, 0.125]]]).half()]
    offset = torch.tensor([[[10.0, 20.0, 30.0]]]).half()
    one = [11, 11, 9, 9, 22, 18, 22, 18, 26, 34]
    two = [11.5, 11.5, 9.5, 9.5, 21.75, 17.75, 21.75, 17.75, 26.125, 33.875]
    return planes, scales, offset, {0: [10] * 4 + [20] * 4 + [30] * 2, 1: one, 2: two}


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_decode_by_hand(chunks):
    planes, scales, offset, expected = hand_made()
    assert reference.decode(planes, scales, offset, None, chunks, 10, 4).tolist() == [[expected[chunks]]]


def test_decode_tied_by_hand():
    planes = [torch.tensor([[[0b1001]]], dtype=torch.uint8), torch.tensor([[[0b0101]]], dtype=torch.uint8)]
    code = torch.tensor([[[255, 231, 0]]], dtype=torch.uint8)  # scales 4, 2 and 0
    offset = torch.tensor([[[96, -48, 7]]], dtype=torch.int8)  # offsets 4, -1 and 0
    decoded = reference.decode(planes, [code], offset, torch.tensor([4.0]), 2, 5, 2)
    assert decoded.tolist() == [[[4 + 2 + 1, 4 - 2 - 1, -1 - 1 + 0.5, -1 + 1 - 0.5, 0]]]


def test_experts_by_hand():
    planes, scales, offset, decoded = hand_made()
    x = torch.arange(10.0)[None]
    ids, chunks = torch.tensor([[0, 0, 1, -1, 0]]), torch.tensor([[1, 2, 2, 2, 0]])
    one, two = (sum(i * w for i, w in enumerate(decoded[k])) for k in (1, 2))
    bias = torch.tensor([[100.0]])
    out = reference.expert_matmul(x, ids, chunks, planes, scales, offset, None, bias, 4)
    assert out.tolist() == [[[one + 100], [two + 100], [0], [0], [0]]]  # padding and 0 planes get no bias either
    narrow = ([torch.tensor([[[1]]], dtype=torch.uint8)] * 2, [torch.ones(1, 1, 1)] * 2, torch.zeros(1, 1, 1), None, None)
    gates = torch.tensor([[0.5, 0.25, 9.0, 9.0, 9.0]])
    up, down = (planes, scales, offset, None, bias), narrow
    summed = reference.expert_ffn(x, ids, gates, chunks, up, down, "relu", 4)
    assert summed.tolist() == [[0.5 * (one + 100) * 1 + 0.25 * (two + 100) * 2]]


FORMULAS = {
    "silu": lambda v: v / (1 + math.exp(-v)),
    "gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
    "gelu_tanh": lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    "relu": lambda v: max(v, 0.0),
    "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
    "relu2": lambda v: max(v, 0.0) ** 2,
}
GATE, UP = [-9.0, -1.0, 0.0, 0.5, 3.0, 8.0, 7.5], [2.0, -8.0, 5.0, -0.5, 9.0, 1.0, -7.5]


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_activations_by_formula(name, tolerance):
    if name == "swigluoai":  # gpt-oss: gate capped at 7, up at +-7, one added to up
        pairs = [(min(gate, 7.0), min(max(up, -7.0), 7.0)) for gate, up in zip(GATE, UP, strict=True)]
        expected = [(up + 1) * gate / (1 + math.exp(-1.702 * gate)) for gate, up in pairs]
    elif name.endswith("_mul"):
        expected = [FORMULAS[name.removesuffix("_mul")](gate) * up for gate, up in zip(GATE, UP, strict=True)]
    else:
        expected = [FORMULAS[name](value) for value in GATE + UP]
    result = reference.ACTIVATIONS[name](torch.tensor([GATE + UP]))
    torch.testing.assert_close(result, torch.tensor([expected]), **tolerance(torch.float32))


def best_by_trying(cost, spend):
    """Least cost [R] and the picks that reach it, first in falling lexicographic order: int64 [R, N]."""
    rows, slots, choices = cost.shape
    every = torch.tensor(list(itertools.product(reversed(range(choices)), repeat=slots)))
    totals = torch.stack([one[torch.arange(slots), every].sum(1) for one in cost])
    totals = totals.where(every.sum(1) == spend[:, None], float("inf"))
    return totals.amin(1), every[totals.argmin(1)]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 6])
def test_knapsack_is_the_best_of_all(slots):
    rows, choices = 84, 6 if slots == 6 else 7  # 504 tables in all
    random = torch.Generator().manual_seed(slots)
    cost = torch.rand(rows, slots, choices, generator=random, dtype=torch.float64)
    cost[::2] = cost[::2].sort(2, descending=True).values  # half of them fall, none is convex
    spend = torch.randint(0, slots * (choices - 1) + 1, (rows,), generator=random)
    spend[:2] = torch.tensor([0, slots * (choices - 1)])
    chosen = reference.knapsack(cost, spend)
    least, picks = best_by_trying(cost, spend)
    assert torch.equal(chosen.sum(1), spend)
    assert torch.equal(chosen, picks)
    torch.testing.assert_close(cost.gather(2, chosen[..., None]).sum((1, 2)), least, rtol=1e-14, atol=0)


@pytest.mark.parametrize("slots", [2, 4, 5])
def test_knapsack_gives_ties_to_lower_slots(slots):
    random = torch.Generator().manual_seed(slots)
    cost = torch.randint(0, 3, (100, slots, 4), generator=random).double()  # whole numbers: many optima
    spend = torch.randint(0, 3 * slots + 1, (100,), generator=random)
    assert torch.equal(reference.knapsack(cost, spend), best_by_trying(cost, spend)[1])


def test_knapsack_never_picks_what_is_forbidden():
    random = torch.Generator().manual_seed(0)
    cost = torch.rand(200, 4, 5, generator=random, dtype=torch.float64)
    cost[:, :, 1:] = cost[:, :, 1:].where(torch.rand(200, 4, 4, generator=random) < 0.7, float("inf"))
    spend = torch.randint(0, 17, (200,), generator=random)
    least, picks = best_by_trying(cost, spend)
    possible = least < float("inf")
    assert 50 < int(possible.sum()) < 200
    assert torch.equal(reference.knapsack(cost[possible], spend[possible]), picks[possible])


def test_knapsack_rows_do_not_touch_each_other():
    random = torch.Generator().manual_seed(0)
    cost = torch.rand(9, 5, 7, generator=random, dtype=torch.float64)
    spend = torch.tensor([0, 30, 3, 11, 17, 29, 1, 8, 20])
    together = reference.knapsack(cost, spend)
    alone = [reference.knapsack(cost[row : row + 1], spend[row : row + 1]) for row in range(9)]
    assert torch.equal(together, torch.cat(alone))


def test_knapsack_without_rows():
    assert reference.knapsack(torch.zeros(0, 4, 7, dtype=torch.float64), torch.zeros(0, dtype=torch.long)).shape == (0, 4)


class _CountComparisons(TorchDispatchMode):
    """Adds up the elements that the comparison operators produce."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.le.Tensor, torch.ops.aten.lt.Tensor):
            self.count += result.numel()
        return result


@pytest.mark.parametrize("budget", [2, 3, 4, 6.5, 8])
def test_knapsack_stays_within_the_papers_transitions(budget):
    cost = torch.rand(1, 8, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spend = int(8 * budget) - 8 * 2  # above k_min = 2 of 8 experts
    counter = _CountComparisons()
    with counter:
        reference.knapsack(cost, torch.tensor([spend]))
    by_hand = 8 * sum(spend + 1 - choice for choice in range(min(7, spend + 1)))
    assert counter.count == by_hand <= 8 * 64 * 7  # 3,584


def test_only_held_leaves_one_free_choice():
    cost = torch.tensor([[[3.0, 2.0, 1.0], [float("nan"), 5.0, 4.0]]], dtype=torch.float64)
    limited = reference.only_held(cost, torch.tensor([[True, False]]))
    assert limited.tolist() == [[[3.0, 2.0, 1.0], [0.0, float("inf"), float("inf")]]]
