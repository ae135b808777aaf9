"""How many planes slots read, by the kernels on the CPU, of a token at once and of one slot, against the torch code."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import allocation, reference

from .marks import some_slow

EXPERTS = 6
SLOTS = [1, 2, 3, 6, 8, 10, 16]


@pytest.fixture
def token(bits_on_cpu, random_encoded):
    """Function that has the k of a routing written by the kernel for many pairs: (ids, gates, source) to int32 [T, A]."""
    weight = random_encoded(EXPERTS, 64, 128, 128)

    def write(ids, gates, source):
        chunks = torch.full(ids.shape, 77, dtype=torch.int32)
        bits_on_cpu.order_pairs(torch.randn(len(ids), 128), ids, chunks, weight, source)
        return chunks

    return write


@pytest.fixture
def block(bits_on_cpu, random_encoded):
    """Function that has it written by the kernels for few pairs: (ids, gates, chunks, source) to the output of the block."""
    up, down = random_encoded(EXPERTS, 128, 128, 128), random_encoded(EXPERTS, 64, 128, 128)
    x = torch.randn(1, 128)

    def run(ids, gates, chunks, source):
        return bits_on_cpu.ffn(x, ids, gates, chunks, up, None, down, None, "relu", source)

    return run


def routing(tokens, active):
    """Ids of which some are padding, and gates."""
    random = torch.Generator().manual_seed(active)
    ids = torch.randint(0, EXPERTS, (tokens, active), generator=random)
    ids[0, 0], ids[-1, -1] = EXPERTS, 0
    if tokens > 1:
        ids[1, -1] = -1
    return ids, torch.rand(tokens, active, generator=random)


def thresholds():
    table = torch.rand(EXPERTS, 8, generator=torch.Generator().manual_seed(1)).sort(1).values
    table[0, :2], table[1, 5:], table[2] = -1, float("inf"), 0.25
    return table


@pytest.mark.parametrize("active", SLOTS)
def test_ranks_of_a_token(token, convex_table, active):
    """A budget for each token, and one for all."""
    ids, gates = routing(3, active)
    for budget in (torch.tensor([2.0, 3.7, 8.0]), torch.tensor(4.3)):
        given = (convex_table(EXPERTS), budget, torch.tensor(7, dtype=torch.int32), 2)
        found = token(ids, gates, allocation.Allocation(gates, *given))
        assert torch.equal(found, allocation.allocate(gates, ids, *given, True))


@pytest.mark.parametrize("k_min, k_max, budget", [(2, 8, 3.7), (0, 8, 1.3), (8, 8, 8.0), (2, 1, 5.0)])
def test_equal_gains_go_to_the_lower_slot(token, convex_table, k_min, k_max, budget):
    """16 slots of one gate and one table, which all have the same planes or one more."""
    table = convex_table(EXPERTS, whole=True)[:1].expand(EXPERTS, -1).t().contiguous().t()
    gates = torch.full((2, 16), 0.25)
    ids = torch.arange(32).view(2, 16) % EXPERTS
    given = (table, torch.tensor(budget), torch.tensor(k_max, dtype=torch.int32), k_min)
    found = token(ids, gates, allocation.Allocation(gates, *given))
    assert torch.equal(found, allocation.allocate(gates, ids, *given, True)) and (found[:, 0] >= found[:, 15]).all()


@pytest.mark.parametrize("active", SLOTS)
def test_thresholds_of_a_token(token, active):
    """A gate that is a threshold's root, and one that is no number."""
    ids, gates = routing(3, active)
    ids[1, 0], gates[1, 0], ids[2, 0], gates[2, 0] = 2, 0.5, 3, float("nan")
    k_max = torch.tensor(6, dtype=torch.int32)
    found = token(ids, gates, allocation.Thresholds(gates, thresholds(), k_max))
    assert torch.equal(found, reference.allocate_threshold(gates, ids, thresholds(), k_max))
    if active > 1:  # else the place of padding
        assert found[1, 0] == 0 and found[2, 0] == 6


@pytest.mark.parametrize("rule", ["rank", "other gates", "one for all gates", "threshold", "threshold from 2 on"])
def test_slots_one_by_one(block, convex_table, rule):
    """Copies that do not wait for k, and those that do, bring the planes that are read, in both products.

    The allocator may see other gates than those that rows are added up by, such as the same for all.
    """
    (ids, gates), k_max = routing(1, 3), torch.tensor(8, dtype=torch.int32)
    if not rule.startswith("threshold"):
        seen = {"rank": gates, "other gates": 0.01 / gates}.get(rule, torch.tensor(0.5).expand_as(gates))
        given = (convex_table(EXPERTS), torch.tensor(3.5), k_max, 2)
        source, expected = allocation.Allocation(seen, *given), allocation.allocate(seen, ids, *given, True)
        assert rule == "rank" or not torch.equal(expected, allocation.allocate(gates, ids, *given, True))
    else:
        table, k_min = thresholds(), 2 if "2" in rule else 0
        table[:, :k_min] = -1
        source = allocation.Thresholds(gates, table, k_max, k_min=k_min)
        expected = reference.allocate_threshold(gates, ids, table, k_max)
    chunks = torch.full(ids.shape, 77, dtype=torch.int32)
    found = block(ids, gates, chunks, source)
    assert torch.equal(chunks, expected) and chunks.any()
    assert torch.equal(found, block(ids, gates, expected, None))


COUNTED = [("threshold", 2, 4), ("rank", 2, 4), ("rank", 9, 4), ("most", 3, 16)]


@pytest.mark.parametrize("rule, tokens, active", some_slow(COUNTED, [COUNTED[0], COUNTED[3]]))
def test_planes_are_counted(bits_on_cpu, random_encoded, convex_table, monkeypatch, rule, tokens, active):
    """In a call of few pairs, and in one whose pairs are put in order, also if all 16 slots of a token have the same planes;
    padding has no planes. Once, though several programs add up a token's slots.
    """
    monkeypatch.setattr(bits_on_cpu, "COLUMNS", 32)
    (ids, gates), k_max = routing(tokens, active), torch.tensor(7, dtype=torch.int32)
    assert (ids.numel() > bits_on_cpu.FEW) == (tokens > 2)
    up, down = random_encoded(EXPERTS, 128, 128, 128), random_encoded(EXPERTS, 64, 128, 128)
    chunks, spent = torch.full(ids.shape, -7, dtype=torch.int32), torch.arange(9)
    if rule == "rank":
        source = allocation.Allocation(gates, convex_table(EXPERTS), torch.tensor(4.3), k_max, 2, spent)
    else:
        table = torch.full((EXPERTS, 8), -1.0) if rule == "most" else thresholds()
        source = allocation.Thresholds(gates, table, k_max, spent)
    bits_on_cpu.ffn(torch.randn(tokens, 128), ids, gates, chunks, up, None, down, None, "relu", source)
    assert torch.equal(spent - torch.arange(9), torch.bincount(chunks.flatten(), minlength=9))
    assert rule != "most" or (chunks == 7).all(1).any()
