"""Finding where experts begin and end by value: which tensors are taken, and that nothing is taken that is not exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpamoe.passes import cut as cuts
from dpamoe.passes.cut import Refused, carry, common, find_cut
from dpamoe.passes.experts import find_candidates, name_of
from dpamoe.passes.function import recover, routed_sum
from dpamoe.passes.record import record, storage, value
from dpamoe.sites import ExpertWeights, gather

HIDDEN, INNER, EXPERTS, ACTIVE = 16, 12, 6, 2


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN))


class Block(nn.Module):
    """Experts one by one into a buffer; then something is added into the same buffer."""

    def __init__(self):
        super().__init__()
        self.router, self.crowd = nn.Linear(HIDDEN, EXPERTS), nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def scale(self, gates):
        return gates

    def forward(self, x):
        rows = x.view(-1, HIDDEN)
        gates, index = self.router(rows).float().softmax(-1).topk(ACTIVE)
        gates = self.scale(gates).to(x.dtype)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.crowd):
            token, slot = torch.where(index == number)
            total.index_add_(0, token, expert(rows[token]) * gates[token, slot, None])
        total += rows
        return total.view(x.shape)


class Masked(Block):
    """The last step of the gates is a mask that drops nothing here."""

    def scale(self, gates):
        return gates * (gates > -1).to(gates.dtype)


class Repeated(Block):
    """One row for every choice of a token."""

    def forward(self, x):
        rows = x.view(-1, HIDDEN)
        gates, index = self.router(rows).softmax(-1).topk(ACTIVE)
        repeated = rows.repeat_interleave(ACTIVE, dim=0)
        result = torch.empty_like(repeated)
        for number, expert in enumerate(self.crowd):
            result[index.flatten() == number] = expert(repeated[index.flatten() == number])
        return (result.view(-1, ACTIVE, HIDDEN) * gates[..., None]).sum(1).view(x.shape)


class Normed(Block):
    """The experts read other rows than the router."""

    def forward(self, x):
        return super().forward(F.layer_norm(x, (HIDDEN,)) + 0.1)


class InputScaled(nn.Module):
    """Every choice scales its expert's input, all gates in a table of every expert."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))

    def forward(self, x):
        rows = x.view(-1, HIDDEN)
        best, index = self.router(rows).topk(ACTIVE)
        gates = torch.full((len(rows), EXPERTS), -torch.inf).scatter(1, index, best).sigmoid()
        return (F.silu((rows * gates.T[..., None]) @ self.up) @ self.down).sum(0).view(x.shape)


class Shifted(Block):
    """Not a weighted sum: each expert's result is rounded."""

    def forward(self, x):
        rows = x.view(-1, HIDDEN)
        gates, index = self.router(rows).softmax(-1).topk(ACTIVE)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.crowd):
            token, slot = torch.where(index == number)
            total.index_add_(0, token, (expert(rows[token]) * gates[token, slot, None] * 8).round())
        return total.view(x.shape)


def made(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return kind().eval().to(dtype)


def given(batch=3, length=5, dtype=torch.float32):
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def searched(block, x=None):
    """(recording, cut, what reproduces the result) of a block's only candidate."""
    recording = record(block, (given() if x is None else x,), snapshots=True)
    (candidate,) = find_candidates(recording, block)
    with torch.no_grad():
        function = recover(recording, candidate, "")
        parameters = dict(block.named_parameters())
        parts = gather(block, function.layout, EXPERTS), function.act(parameters), function.behind(parameters)
        return recording, find_cut(recording, candidate, *parts), parts


@pytest.mark.parametrize("kind", [Block, Masked, Repeated, Normed, InputScaled])
def test_the_cut_reproduces_the_result(kind):
    recording, cut, parts = searched(made(kind))
    assert (cut.rows, cut.active) == (15, ACTIVE)
    hidden, index = value(cut.hidden).reshape(15, HIDDEN), value(cut.index).reshape(15, -1)
    gates = value(cut.weights).reshape(15, -1)
    gates = gates.gather(1, index) if cut.scored else gates
    found = routed_sum(*parts, hidden, index, gates, cut.weigh_input)
    left = cut.result.meta.get("left", value(cut.result)).reshape(15, HIDDEN)
    torch.testing.assert_close(found, left, rtol=1e-4, atol=1e-5)
    assert (cut.scored, cut.weigh_input) == (kind is InputScaled,) * 2
    assert not any(node in recording.ancestors(list(cut.inputs)) for node in (cut.result,))


def test_the_result_is_the_last_write_of_an_expert_not_of_the_buffer():
    recording, cut, _ = searched(made(Block))
    writes = [node for node in recording.nodes if name_of(node) in ("index_add_", "add_")]
    assert [name_of(node) for node in writes[-2:]] == ["index_add_", "add_"] and cut.result is writes[-2]
    assert recording.writer[storage(value(cut.result))] is writes[-1]


def test_all_choices_of_a_token_stand_in_one_row():
    _, cut, _ = searched(made(Repeated))
    assert cut.hidden.op == "placeholder" and value(cut.index).shape == (15, ACTIVE)


def test_inputs_are_traced_back_through_views_and_gates_forward_to_their_last_step():
    _, cut, _ = searched(made(Block))
    assert cut.hidden.op == "placeholder" and name_of(cut.index) == "getitem"
    assert name_of(searched(made(Masked))[1].weights) == "mul"


def test_tokens_are_those_that_the_experts_read():
    assert name_of(searched(made(Normed))[1].hidden) == "add"


def test_what_is_not_exact_is_no_cut():
    assert searched(made(Shifted))[1] is None


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_numbers_that_anything_is_close_to_are_no_result(number):
    recording = record(made(Block), (given(),))
    total = torch.full((15, HIDDEN), number)
    held = [n for n in recording.nodes if isinstance(value(n), torch.Tensor) and value(n).numel() == total.numel()]
    assert cuts._equal(total, held) is None


def test_one_token_of_one_expert_is_no_block():
    block = made(Block)
    for _ in range(3):
        torch.nn.init.normal_(block.router.weight)
        assert searched(block)[1].rows == 15


def test_a_single_batch_and_a_single_token_are_enough():
    for batch, length in [(1, 7), (1, 1)]:
        assert searched(made(Block), given(batch, length))[1].rows == batch * length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cut_is_carried_to_a_type_with_more_casts(dtype):
    block = made(Block)
    recording, cut, _ = searched(block)
    other = record(made(Block, dtype), (given(dtype=dtype),))
    moved = carry(cut, recording, other)
    assert name_of(moved.weights) == "_to_copy" and value(moved.weights).dtype == dtype  # the cast belongs to the gates
    assert name_of(moved.result) == "index_add_" and value(moved.result).dtype == dtype
    assert moved.hidden.op == "placeholder" and torch.equal(value(moved.index).sort().values, value(cut.index).sort().values)
    assert moved.result is next(n for n in reversed(other.nodes) if name_of(n) == "index_add_")


def test_a_recording_of_other_code_is_refused():
    recording, cut, _ = searched(made(Block))
    with pytest.raises(Refused, match="other code in fp32|another place"):
        carry(cut, recording, record(made(Repeated), (given(),)))


def test_common_beginning_and_end():
    assert common([1, 2, 3, 4], [1, 2, 9, 9, 4]) == (2, 1)
    assert common([1, 2], [1, 2]) == (2, 2) and common([], [1]) == (0, 0)


def test_tolerance_is_far_below_another_gate():
    recording, cut, parts = searched(made(Block))
    near = [n for n in recording.nodes if n.op != "get_attr" and isinstance(value(n), torch.Tensor)]
    index = value(cut.index)
    gates = value(cut.weights) * (1 + 10 * cuts.TOLERANCE)
    total = routed_sum(*parts, value(cut.hidden).view(15, HIDDEN), index, gates, False)
    assert cuts._equal(total, [n for n in near if value(n).numel() == total.numel() and value(n).is_floating_point()]) is None


def test_routed_sum_by_hand():
    up, down = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]]), torch.tensor([[[1.0]], [[-1.0]]])
    weights = ExpertWeights(up, down, None, torch.tensor([[0.5], [0.0]]))
    hidden, index, gates = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0, 7]]), torch.tensor([[0.5, 0.25, 9.0]])
    # expert 1: -(3 * 2) = -6; expert 0: 2 * 1 + 0.5 = 2.5; id 7 has no weights
    same = (weights, lambda rows: rows, lambda rows: rows, hidden, index, gates)
    assert routed_sum(*same, weigh_input=False).tolist() == [[0.5 * -6 + 0.25 * 2.5]]
    # scaled inputs: expert 1: -(3 * 1) = -3; expert 0: 2 * 0.25 + 0.5 = 1
    assert routed_sum(*same, weigh_input=True).tolist() == [[-3.0 + 1.0]]
