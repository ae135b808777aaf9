"""Grouped expert computation equals the reference, pair by pair, whatever the shapes, prefixes and routing."""

import pytest
import torch

from dpamoe.kernels import grouped, reference

SHAPES = [(20, 8), (24, 16), (38, -1), (16, 16), (9, 3), (1, -1), (130, 128)]  # inputs, group size


def as_tuple(weight):
    """The tensors in the order of the reference."""
    return weight.planes, weight.scales, weight.offset, weight.unit


def judge_matmul(x, ids, chunks, weight, bias=None):
    return reference.expert_matmul(x.float(), ids, chunks, *as_tuple(weight), bias, weight.group_size).to(x.dtype)


def judge_ffn(x, ids, gates, chunks, up, up_bias, down, down_bias, activation):
    encoded = [(*as_tuple(up), up_bias), (*as_tuple(down), down_bias)]
    return reference.expert_ffn(x.float(), ids, gates.float(), chunks, *encoded, activation, up.group_size).to(x.dtype)


def block(random_encoded, experts, width, inner, group_size, activation, tied=False, planes=8):
    """Both weights of an expert block, [E, inner (twice if gated), width] and [E, width + 1, inner]."""
    rows = inner * (2 if activation.endswith("_mul") or activation == "swigluoai" else 1)
    up = random_encoded(experts, rows, width, group_size, planes, tied, seed=1)
    return up, random_encoded(experts, width + 1, inner, group_size, planes, tied, seed=2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("in_features, group_size", SHAPES)
def test_decode_equals_reference(random_encoded, tolerance, in_features, group_size, tied):
    weight = random_encoded(3, 5, in_features, group_size, tied=tied)
    for k in range(1, 9):
        expected = reference.decode(*as_tuple(weight), k, in_features, group_size)
        torch.testing.assert_close(grouped.decode(weight, k), expected, **tolerance(torch.float32))


@pytest.mark.parametrize("counts", [[1], [2, 3], [2, 5, 8], [0, 1, 8], [4, 4]])
def test_prefixes_are_those_asked_for(random_encoded, tolerance, counts):
    weight = random_encoded(2, 5, 20, 8)
    found = [dense.clone() for dense in grouped.prefixes(weight, 1, counts)]
    expected = [reference.decode(*as_tuple(weight), k, 20, 8)[1] for k in counts]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), **tolerance(torch.float32))


def test_segments_by_hand():
    ids = torch.tensor([[2, 0], [0, 3], [2, -1], [2, 0]])  # 3 experts: 3 and -1 are padding
    chunks = torch.tensor([[4, 2], [0, 8], [2, 2], [4, 8]])
    order, runs = grouped.segments(ids, chunks, 3, 8)
    assert order.tolist() == [1, 7, 4, 0, 6]
    assert runs == {0: [(2, 0, 1), (8, 1, 2)], 2: [(2, 2, 3), (4, 3, 5)]}
    assert grouped.segments(ids, chunks, 3, 3)[1] == {0: [(2, 0, 1), (3, 1, 2)], 2: [(2, 2, 3), (3, 3, 5)]}  # 3 are all


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("in_features, group_size", SHAPES)
def test_matmul_equals_reference(random_encoded, random_pairs, tolerance, in_features, group_size, per_slot, tied):
    weight = random_encoded(5, 7, in_features, group_size, tied=tied)
    ids, _, chunks = random_pairs(17, 3, 5)
    x = torch.randn(17, *([3] if per_slot else []), in_features, generator=torch.Generator().manual_seed(3))
    bias = torch.full((5, 7), 100.0) + torch.arange(5)[:, None]
    result = grouped.expert_matmul(x, ids, chunks, weight, bias)
    torch.testing.assert_close(result, judge_matmul(x, ids, chunks, weight, bias), **tolerance(torch.float32))


def test_every_expert_at_every_prefix(random_encoded, tolerance):
    experts, counts = 8, torch.tensor([0, 2, 3, 4, 5, 6, 7, 8])
    weight = random_encoded(experts, 6, 20, 8)
    ids = torch.arange(experts).expand(8, experts)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    for shift in range(8):  # slot a of token t reads counts[t + a]: all mixes, and expert e at every k
        chunks = counts[(torch.arange(8)[:, None] + torch.arange(experts) + shift) % 8]
        result = grouped.expert_matmul(x, ids, chunks, weight, None)
        dense = torch.stack([torch.zeros(8, 6, 20), *(grouped.decode(weight, k) for k in range(1, 9))])
        expected = torch.einsum("tai,ti->ta", dense[chunks, ids, 0], x)
        torch.testing.assert_close(result[..., 0], expected, **tolerance(torch.float32))
        torch.testing.assert_close(result, judge_matmul(x, ids, chunks, weight), **tolerance(torch.float32))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_ffn_equals_reference(random_encoded, random_pairs, tolerance, activation, tied):
    up, down = block(random_encoded, 5, 20, 12, 8, activation, tied)
    ids, gates, chunks = random_pairs(17, 3, 5)
    x = torch.randn(17, 20, generator=torch.Generator().manual_seed(3))
    arguments = (x, ids, gates, chunks, up, None, down, None, activation)
    torch.testing.assert_close(grouped.expert_ffn(*arguments), judge_ffn(*arguments), **tolerance(torch.float32))


@pytest.mark.parametrize("width, inner, group_size", [(24, 40, 16), (38, 20, -1), (20, 9, 8), (64, 48, 32)])
def test_ffn_with_biases_equals_reference(random_encoded, random_pairs, tolerance, width, inner, group_size):
    up, down = block(random_encoded, 4, width, inner, group_size, "swigluoai")
    ids, gates, chunks = random_pairs(17, 3, 4)
    x = torch.randn(17, width, generator=torch.Generator().manual_seed(3))
    biases = [torch.linspace(-1, 1, weight.offset[..., 0].numel()).view(4, -1) + 100 for weight in (up, down)]
    arguments = (x, ids, gates, chunks, up, biases[0], down, biases[1], "swigluoai")
    torch.testing.assert_close(grouped.expert_ffn(*arguments), judge_ffn(*arguments), **tolerance(torch.float32))


def test_bias_is_added_once(random_encoded):
    up, down = block(random_encoded, 2, 8, 8, 8, "relu")
    silent = [tensor.zero_() for weight in (up, down) for tensor in (*weight.scales, weight.offset)]
    assert not any(tensor.any() for tensor in silent)  # what is left of an expert is its down bias
    ids, gates = torch.tensor([[0, 1]]), torch.tensor([[0.75, 0.5]])
    out = grouped.expert_ffn(
        torch.ones(1, 8), ids, gates, torch.tensor([[2, 8]]), up, None, down, torch.full((2, 9), 100.0), "relu"
    )
    assert out.tolist() == [[125.0] * 9]


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("experts, active", [(1, 1), (4, 1), (4, 4)])
def test_few_tokens_and_few_experts(random_encoded, random_pairs, tolerance, tokens, experts, active):
    up, down = block(random_encoded, experts, 20, 12, 8, "silu_mul")
    ids, gates, chunks = random_pairs(tokens, active, experts)
    x = torch.randn(tokens, 20, generator=torch.Generator().manual_seed(3))
    arguments = (x, ids, gates, chunks, up, None, down, None, "silu_mul")
    result = grouped.expert_ffn(*arguments)
    assert result.shape == (tokens, 21)
    torch.testing.assert_close(result, judge_ffn(*arguments), **tolerance(torch.float32))
    rows = grouped.expert_matmul(x, ids, chunks, up, None)
    assert rows.shape == (tokens, active, 24)
    torch.testing.assert_close(rows, judge_matmul(x, ids, chunks, up), **tolerance(torch.float32))


@pytest.mark.parametrize("crowded", [True, False])
def test_crowded_and_empty_experts(random_encoded, tolerance, crowded):
    up, down = block(random_encoded, 64, 16, 8, 8, "gelu_mul")
    ids = torch.full((11, 2), 63) if crowded else torch.arange(22).view(11, 2)
    gates, chunks = torch.linspace(0, 1, 22).view(11, 2), torch.tensor([2, 8]).expand(11, 2)
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(3))
    arguments = (x, ids, gates, chunks, up, None, down, None, "gelu_mul")
    torch.testing.assert_close(grouped.expert_ffn(*arguments), judge_ffn(*arguments), **tolerance(torch.float32))


def test_padding_adds_nothing(random_encoded, random_pairs):
    up, down = block(random_encoded, 4, 20, 12, 8, "silu_mul")
    ids, gates, chunks = random_pairs(9, 4, 4)
    padded, poison = ids.clone(), gates.clone()
    padded[:, 1], padded[:, 3], padded[5] = 4, -1, 4
    poison[(padded < 0) | (padded == 4)] = float("nan")
    x = torch.randn(9, 20, generator=torch.Generator().manual_seed(3))
    x[5] = float("nan")  # a token that no expert of ours holds
    biases = torch.full((4, 24), 100.0), torch.full((4, 21), 100.0)
    result = grouped.expert_ffn(x, padded, poison, chunks, up, biases[0], down, biases[1], "silu_mul")
    skipped = chunks.clone()
    skipped[(padded < 0) | (padded == 4)] = 0
    expected = grouped.expert_ffn(x, ids, gates, skipped, up, biases[0], down, biases[1], "silu_mul")
    assert torch.equal(result, expected)
    assert not result[5].any()
    assert not grouped.expert_matmul(x, padded, chunks, up, biases[0])[:, [1, 3]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_fp32(random_encoded, random_pairs, tolerance, dtype):
    up, down = block(random_encoded, 4, 20, 12, 8, "silu_mul")
    ids, gates, chunks = random_pairs(17, 2, 4)
    x = torch.randn(17, 20, generator=torch.Generator().manual_seed(3)).to(dtype)
    biases = torch.randn(4, 24).to(dtype), torch.randn(4, 21).to(dtype)
    arguments = (x, ids, gates.to(dtype), chunks, up, biases[0], down, biases[1], "silu_mul")
    result = grouped.expert_ffn(*arguments)
    assert result.dtype == dtype
    torch.testing.assert_close(result, judge_ffn(*arguments), **tolerance(dtype))
    rows = grouped.expert_matmul(x, ids, chunks, up, biases[0])
    torch.testing.assert_close(rows, judge_matmul(x, ids, chunks, up, biases[0]), **tolerance(dtype))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("ids, total", [([2, 1, 0], 1.0), ([0, 2, 1], 0.0), ([2, 1, 0, 3, 3, 3, 3, 0], 2.0)])
def test_slots_are_added_in_order(random_encoded, ids, total, tokens):
    up, down = block(random_encoded, 4, 16, 8, 8, "relu")
    for tensor in (*up.scales, up.offset, *down.scales, down.offset):
        tensor.zero_()
    bias = torch.tensor([1.0, -1e8, 1e8, 0.0])[:, None].expand(4, 17)  # fp32: 1 is lost if 1e8 comes first
    ids = torch.tensor([ids] * tokens)
    gates, chunks = torch.ones(ids.shape), torch.full(ids.shape, 8)
    out = grouped.expert_ffn(torch.ones(tokens, 16), ids, gates, chunks, up, None, down, bias, "relu")
    assert out.tolist() == [[total] * 17] * tokens
