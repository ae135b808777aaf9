"""Routers: the rules by hand, the ops and their kernels against them, and what does not fit is said."""

import pytest
import torch

import dpamoe.kernels.router_ops  # noqa: F401
from dpamoe.kernels import routing
from dpamoe.kernels.routing import Rule

triton_route = pytest.importorskip("dpamoe.kernels.triton_route")

OPS = torch.ops.dpamoe
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2e-6  # exponentials and sums of fp32, of up to 300 numbers, in another order
RULES = {  # experts, rule, whether experts are chosen with a bias
    "softmax": (128, Rule(8, "softmax", "sum"), False),
    "softmax, not summed": (60, Rule(4, "softmax", "none"), False),
    "the chosen": (32, Rule(4, "logits", "softmax"), False),
    "DeepSeek-V2": (160, Rule(6, "softmax", "none", 16.0, 8, 3, "max"), False),
    "DeepSeek-V3": (256, Rule(8, "sigmoid", "sum", 2.5, 8, 4, "two"), True),
    "ERNIE": (64, Rule(6, "softmax", "sum"), True),
    "three groups": (21, Rule(5, "sigmoid", "none", 1.0, 3, 2, "two"), True),
    "groups of one": (8, Rule(3, "sigmoid", "sum", 1.0, 8, 4, "two"), True),
    "everyone": (5, Rule(5, "softmax", "none"), False),
    "a lone expert": (1, Rule(1, "sigmoid", "none"), False),
    "300": (300, Rule(16, "softmax", "sum"), True),
}


@pytest.fixture(params=RULES.values(), ids=RULES.keys())
def case(request):
    """Logits of 17 tokens, bias and rule."""
    experts, rule, biased = request.param
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(17, experts, generator=random)
    bias = 0.2 * torch.randn(experts, generator=random) if biased else None
    return logits, bias, rule


def parts(rule):
    return (rule.active, rule.score, rule.norm, rule.scale, rule.groups, rule.kept_groups, rule.group_score)


def by_hand(logits, bias, rule):
    """One token after the other, one expert after the other, in double precision: the set of experts and their gates."""
    found = []
    for row in logits.double():
        scores = {"softmax": row.softmax(0), "sigmoid": row.sigmoid(), "logits": row}[rule.score].tolist()
        chosen_by = [score + (0 if bias is None else float(bias[e])) for e, score in enumerate(scores)]
        size = len(scores) // rule.groups
        count = {"max": 1, "two": 2}[rule.group_score]
        worth = [sum(sorted(chosen_by[g * size : (g + 1) * size])[-count:]) for g in range(rule.groups)]
        kept = sorted(range(rule.groups), key=lambda g: -worth[g])[: rule.kept_groups]
        left = [e for e in range(len(scores)) if e // size in kept]
        ids = sorted(left, key=lambda e: -chosen_by[e])[: rule.active]
        gates = torch.tensor([scores[e] for e in ids], dtype=torch.float64)
        gates = {"none": gates, "sum": gates / gates.sum(), "softmax": gates.softmax(0)}[rule.norm]
        found.append((ids, (gates * rule.scale).tolist()))
    return found


def test_the_rules_by_hand(case):
    logits, bias, rule = case
    ids, gates = routing.route(logits, bias, rule, torch.float32)
    expected = by_hand(logits, bias, rule)
    assert ids.dtype == torch.int64 and ids.tolist() == [row for row, _ in expected]
    torch.testing.assert_close(gates.double(), torch.tensor([row for _, row in expected]).double(), rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_follows_the_rules(case, dtype):
    logits, bias, rule = case
    logits = logits.to(dtype).to(DEVICE)
    bias = None if bias is None else bias.to(DEVICE)
    ids, gates = triton_route.route(logits, bias, rule, torch.float32)
    expected_ids, expected = routing.route(logits, bias, rule, torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(gates, expected, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_rows_apart_and_gates_of_another_dtype(tokens):
    logits = torch.randn(8, 2 * tokens, generator=torch.Generator().manual_seed(0)).to(DEVICE).T[::2]
    rule = Rule(2, "softmax", "sum")
    ids, gates = triton_route.route(logits, None, rule, torch.bfloat16)
    expected_ids, expected = routing.route(logits, None, rule, torch.bfloat16)
    assert ids.shape == (tokens, 2) and gates.dtype == torch.bfloat16 and torch.equal(ids, expected_ids)
    torch.testing.assert_close(gates, expected, rtol=2**-7, atol=0)  # a step of bf16


def test_what_is_no_ordinary_number():
    """Equal scores go to the lower expert; infinities are numbers; not a number comes first, and gives no number."""
    nan, inf = float("nan"), float("inf")
    rows = [[1, 3, 3, 3], [-inf, -inf, 0, -inf], [0, 1, inf, 2], [5, nan, 7, 6], [0.0, -0.0, -1, -2]]
    logits = torch.tensor(rows, device=DEVICE)
    for take in (triton_route.route, routing.route):
        ids, gates = take(logits, None, Rule(2, "logits", "none"), torch.float32)
        assert ids.tolist() == [[1, 2], [2, 0], [2, 3], [1, 2], [0, 1]]
        assert gates[1].tolist() == [0, -inf] and gates[3].isnan().tolist() == [True, False]
    ids, gates = triton_route.route(torch.full((1, 8), -200.0, device=DEVICE), None, Rule(2, "sigmoid", "sum"), torch.float32)
    assert ids.tolist() == [[0, 1]] and gates.tolist() == [[0, 0]]  # no score left of any: nothing is divided by 0


@pytest.mark.parametrize("shape", [(1, 128, 2048), (3, 5, 96), (2, 7, 5000)])
@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_the_logits_of_few_tokens(shape, dtype, rounding):
    tokens, experts, features = shape
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, features + 8, generator=random).to(dtype)[:, :features] for n in (tokens, experts))
    for shift in (None, torch.randn(experts, generator=random).to(dtype)):
        found = triton_route.linear(x.to(DEVICE), weight.to(DEVICE), None if shift is None else shift.to(DEVICE)).cpu()
        exact = x.double() @ weight.double().T + (0 if shift is None else shift.double())
        assert found.dtype == dtype and found.shape == (tokens, experts)
        assert (found.double() - exact).abs().max() <= rounding * exact.abs().max()


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_opcheck(tokens):
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, 16, generator=random), torch.randn(8, 16, generator=random)
    shift, bias, rule = torch.randn(8, generator=random), torch.rand(8, generator=random), Rule(2, "sigmoid", "sum", 2.5, 4, 2)
    torch.library.opcheck(OPS.route.default, (x @ weight.T, bias, *parts(rule), torch.bfloat16))
    torch.library.opcheck(OPS.linear_route.default, (x, weight, shift, bias, *parts(rule), torch.float32))
    ids, gates = OPS.linear_route(x, weight, shift, bias, *parts(rule), torch.float32)
    expected_ids, expected = OPS.route(x @ weight.T + shift, bias, *parts(rule), torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(gates, expected, rtol=1e-5, atol=1e-6)  # the matmuls differ in order


@pytest.mark.parametrize(
    "rule, said",
    [
        (Rule(2, "tanh", "sum"), "score 'tanh' is no rule of a router: use one of logits, softmax, sigmoid"),
        (Rule(2, "softmax", "max"), "norm 'max' is no rule"),
        (Rule(2, "softmax", "sum", 1.0, 2, 1, "mean"), "group_score 'mean' is no rule"),
        (Rule(9, "softmax", "sum"), "9 experts cannot be chosen among the 8 that groups leave"),
        (Rule(3, "softmax", "sum", 1.0, 4, 1), "3 experts cannot be chosen among the 2"),
        (Rule(2, "softmax", "sum", 1.0, 3, 2), "2 of 3 groups do not fit 8 experts"),
        (Rule(2, "softmax", "sum", 1.0, 2, 3), "3 of 2 groups do not fit"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule, said):
    with pytest.raises(ValueError, match=said):
        OPS.route(torch.zeros(1, 8), None, *parts(rule), torch.float32)


def test_tensors_that_do_not_fit_are_refused():
    rule, dtype = parts(Rule(2, "softmax", "sum")), torch.float32
    with pytest.raises(ValueError, match=r"logits \[8\] must be \[tokens, experts\]"):
        OPS.route(torch.zeros(8), None, *rule, dtype)
    with pytest.raises(ValueError, match=r"bias \[7\] must hold one number for each of 8 experts"):
        OPS.route(torch.zeros(1, 8), torch.zeros(7), *rule, dtype)
    with pytest.raises(ValueError, match=r"x \[1, 5\] must be \[tokens, features\] and weight \[8, 6\]"):
        OPS.linear_route(torch.zeros(1, 5), torch.zeros(8, 6), None, None, *rule, dtype)
