"""Quality against size: KL and perplexity by hand, sizes by hand, and the orderings of the paper on the shipped model."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpamoe
from dpamoe import evaluate
from dpamoe.text import load_tokenizer, read_text, token_ids, windows

P = [[0.5, 0.25, 0.25], [0.1, 0.6, 0.3], [1 / 3, 1 / 3, 1 / 3]]
Q = [[0.25, 0.5, 0.25], [0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]]


class Table(nn.Module):
    """A language model of three words: the next one depends on the last one, row by row."""

    def __init__(self, probabilities, shift=0.0):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log() + shift)

    def forward(self, input_ids, use_cache):
        assert use_cache is False
        return SimpleNamespace(logits=self.logits[input_ids])


def divergence(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.fixture(scope="module")
def scored(tiny_dir, tiny_model, tiny_encoded):
    """The shipped model over 6000 held-out tokens: outcome of the evaluation, and its rows by budget."""
    ids = token_ids(load_tokenizer(tiny_dir), read_text(tiny_dir.parent / "text" / "heldout.txt"))
    original = tiny_model()
    element_bytes = evaluate.element_sizes(original)
    with evaluate.ReferenceLogits(original.float(), windows(ids, 512, 1, 6000)) as reference:
        model = evaluate.to_run(tiny_encoded(), "cpu")
        sizes = evaluate.Sizes.of(model, element_bytes)
        rows = evaluate.evaluate(model, reference, sizes, (2, 3, 4, 5, 6, 8), ("uniform", "dpa", "gate-linear"))
        return evaluate.result("tiny", model, reference, rows), {row["budget"]: row for row in rows}


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_kl_and_perplexity_by_hand(shift):
    """Windows 0 1 2 and 2 0: predicted after 0, 1, and 2; what logits are shifted by does not matter."""
    parts = [torch.tensor([0, 1, 2]), torch.tensor([2, 0])]
    with evaluate.ReferenceLogits(Table(P), parts) as reference:
        score = reference.compare(Table(Q, shift))
    kl = (divergence(P[0], Q[0]) + divergence(P[1], Q[1]) + 0) / 3
    assert reference.score.kl is None
    assert reference.score.nll == pytest.approx(-(math.log(0.25) + math.log(0.3) + math.log(1 / 3)) / 3, rel=1e-6)
    assert score.kl == pytest.approx(kl, rel=1e-6)
    assert score.nll == pytest.approx(-(math.log(0.5) + math.log(0.6) + math.log(1 / 3)) / 3, rel=1e-6)
    assert score.perplexity == pytest.approx((0.5 * 0.6 / 3) ** (-1 / 3), rel=1e-6)


def test_kl_is_from_full_precision_to_encoded_and_never_the_other_way():
    forward, backward = divergence(P[1], Q[1]), divergence(Q[1], P[1])
    with evaluate.ReferenceLogits(Table(P), [torch.tensor([1, 0])]) as reference:
        found = reference.compare(Table(Q)).kl
    assert found == pytest.approx(forward, rel=1e-6) and abs(forward - backward) > 0.01


@pytest.mark.parametrize("rows, batch", [(1024, 8), (2, 8), (1, 1), (7, 3)])
def test_windows_may_be_cut_anyhow(monkeypatch, rows, batch):
    monkeypatch.setattr(evaluate, "ROWS", rows)
    monkeypatch.setattr(evaluate, "BATCH", batch)
    ids = torch.randint(3, (500,), generator=torch.Generator().manual_seed(0))
    parts = list(ids.split(17))
    with evaluate.ReferenceLogits(Table(P), parts) as reference:
        score = reference.compare(Table(Q))
    before = torch.cat([part[:-1] for part in parts]).tolist()
    after = torch.cat([part[1:] for part in parts]).tolist()
    kl = sum(divergence(P[word], Q[word]) for word in before) / len(before)
    nll = -sum(math.log(Q[word][following]) for word, following in zip(before, after, strict=True)) / len(before)
    assert score.kl == pytest.approx(kl, rel=1e-6) and score.nll == pytest.approx(nll, rel=1e-6)


def test_a_model_is_at_no_distance_from_itself(random_model, random_ids):
    model = random_model("qwen3_moe")
    with evaluate.ReferenceLogits(model, list(random_ids(3, 40))) as reference:
        score = reference.compare(model)
        other = reference.compare(random_model("olmoe"))
    assert score.kl == 0.0 and score.nll == pytest.approx(reference.score.nll, rel=1e-6)
    assert other.kl > 0.05


def test_weight_bytes_by_hand(scored, tiny_dir):
    """All that is no routed expert in bf16, as stored, and 3,145,728 expert weights at k (1 + 16/128) + 16/128 bits."""
    with (tiny_dir / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    routed = re.compile(r"mlp\.experts\.\d+\.")
    sizes = {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    experts = sum(size for name, size in sizes.items() if routed.search(name))
    other = sum(size for name, size in sizes.items() if not routed.search(name))
    assert experts == 4 * 16 * 3 * 128 * 128 == 3_145_728
    for budget, row in scored[1].items():
        bits = budget * (1 + 16 / 128) + 16 / 128
        assert row["bits_per_weight"] == pytest.approx(bits, rel=1e-12)
        assert row["weight_bytes"] == round(2 * other + experts * bits / 8)


def test_weight_bytes_at_a_fraction_of_a_plane(transformed):
    original, model = transformed("gpt_oss")
    sizes = evaluate.Sizes.of(model)
    weights = 2 * 8 * (64 * 64 + 64 * 32)
    others = sum(p.numel() for name, p in original.named_parameters() if not name.endswith(("gate_up_proj", "down_proj")))
    assert sizes.other_bytes == 4 * others  # the biases of experts count
    assert sizes.model_bytes(model, 3.25) == 4 * others + weights * (3.25 * 1.5 + 0.5) / 8
    halves = dict.fromkeys(evaluate.element_sizes(original), 2)
    assert evaluate.Sizes.of(model, halves).other_bytes == 2 * others


def test_rows_have_the_documented_fields(random_model, random_ids):
    model = random_model("qwen3_moe")
    with evaluate.ReferenceLogits(model, list(random_ids(3, 40))) as reference:
        dpamoe.transform(model, calibration=random_ids(8, 100), spec=dpamoe.EncodeSpec(group_size=32))
        dpamoe.set_spend(model, budget=5.5, allocation="gate-only")
        rows = evaluate.evaluate(model, reference, evaluate.Sizes.of(model), (2.0, 2.5, 2.25))
        outcome = evaluate.result("toy", model, reference, rows)
    assert list(outcome) == ["model", "sites", "experts", "full_precision", "rows"]
    assert (outcome["model"], outcome["sites"], outcome["experts"]) == ("toy", 2, 16)
    assert list(outcome["full_precision"]) == ["ppl"] and json.loads(json.dumps(outcome)) == outcome
    for row in rows:
        assert list(row) == [
            "budget", "mean_planes", "bits_per_weight", "weight_bytes", "kl_uniform", "kl_dpa", "kl_gate_only",
            "kl_residual_only", "ppl_dpa", "ppl_uniform",
        ]  # fmt: skip
        whole = row["budget"] == 2.0
        assert [name for name, value in row.items() if value is None] == ([] if whole else ["kl_uniform", "ppl_uniform"])
    assert [row["mean_planes"] for row in rows] == [2.0, 2.5, 2.5]  # floor(2 * 2.25 + .5) = 5 planes for two experts
    spends = {experts.spend for experts in (layer.mlp.experts for layer in model.model.layers)}
    assert spends == {dpamoe.SpendSpec(5.5, "gate-only")}  # put back
    assert dpamoe.stats(model)["pairs"] == 0


def test_spending_is_put_back_after_an_error(transformed, random_ids):
    original, model = transformed("qwen3_moe")
    with evaluate.ReferenceLogits(original, list(random_ids(1, 8))) as reference, pytest.raises(ValueError):
        evaluate.evaluate(model, reference, evaluate.Sizes.of(model), (3.0, 99.0))
    assert dpamoe.report(model).budget == 4.0


def test_dpa_is_uniform_where_there_is_no_choice(scored):
    rows = scored[1]
    for budget in (2, 8):
        assert rows[budget]["kl_dpa"] == rows[budget]["kl_uniform"] == rows[budget]["kl_gate_linear"]
        assert rows[budget]["ppl_dpa"] == rows[budget]["ppl_uniform"]
        assert rows[budget]["mean_planes"] == budget


def test_orderings_on_the_shipped_model(scored):
    rows = scored[1]
    ratios = {budget: rows[budget]["kl_dpa"] / rows[budget]["kl_uniform"] for budget in (3, 4, 5, 6)}
    # measured .574, .566, .615, .652
    assert ratios[3] <= 0.68 and ratios[4] <= 0.68 and ratios[5] <= 0.80 and ratios[6] <= 0.82
    for budget in (3, 4):  # the squared gate against the gate: measured .772, .782
        assert rows[budget]["kl_dpa"] <= 0.90 * rows[budget]["kl_gate_linear"]
    for name in ("kl_dpa", "kl_uniform"):
        values = [row[name] for row in rows.values()]
        assert values == sorted(values, reverse=True)
    # measured .0615, .0165, .0353, .0093; the prototype: .0641, .0167, .0373, .0102
    assert rows[3]["kl_uniform"] <= 0.068 and rows[4]["kl_uniform"] <= 0.018
    assert rows[3]["kl_dpa"] <= 0.040 and rows[4]["kl_dpa"] <= 0.011
    assert rows[8]["kl_dpa"] <= 5e-4


def test_perplexity_follows_quality(scored):
    outcome, rows = scored
    full = outcome["full_precision"]["ppl"]
    assert rows[2]["ppl_dpa"] > rows[3]["ppl_uniform"] > rows[3]["ppl_dpa"] > full
    assert rows[8]["ppl_dpa"] == pytest.approx(full, rel=5e-3)


def test_the_table_shows_every_row(scored):
    outcome, rows = scored
    lines = evaluate.table(outcome).splitlines()
    assert len(lines) == 2 + len(rows) + 1
    assert lines[0].split() == [
        "budget", "planes", "bits/w", "MB", "KL", "uniform", "KL", "dpa", "KL", "gate-only", "KL", "residual-only", "KL",
        "gate-linear", "ppl", "dpa",
    ]  # fmt: skip
    assert lines[4].split() == [
        "4", "4.000", "4.625", f"{rows[4]['weight_bytes'] / 1e6:.2f}", f"{rows[4]['kl_uniform']:.5f}",
        f"{rows[4]['kl_dpa']:.5f}", "–", "–", f"{rows[4]['kl_gate_linear']:.5f}", f"{rows[4]['ppl_dpa']:.3f}",
    ]  # fmt: skip
    assert len({len(line) for line in lines[:-1]}) == 1
    assert f"{outcome['full_precision']['ppl']:.3f}" in lines[-1]


def test_models_run_in_fp32_on_a_cpu(tiny_encoded):
    model = evaluate.to_run(tiny_encoded(), "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.model.layers[0].mlp.experts.gate_up_proj.offset.dtype == torch.float16
