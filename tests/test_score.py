"""Distance to full precision: KL, its error, agreement and perplexity by hand; log-probabilities on disk."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpamoe import score
from dpamoe.score import measure_reference, remove_reference, reopen_reference

P = [[0.5, 0.25, 0.25], [0.1, 0.6, 0.3], [1 / 3, 1 / 3, 1 / 3]]
Q = [[0.25, 0.5, 0.25], [0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]]
PARTS = [torch.tensor([0, 1, 2]), torch.tensor([2, 0])]


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


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_scores_by_hand(shift):
    """Windows 0 1 2 and 2 0: predicted after 0, 1, and 2; what logits are shifted by does not matter."""
    with measure_reference(Table(P), PARTS) as reference:
        found = reference.compare(Table(Q, shift))
    first, second = divergence(P[0], Q[0]) + divergence(P[1], Q[1]), 0.0
    mean = (first + second) / 3
    assert reference.score.kl is None and reference.score.tokens == found.tokens == 3
    assert reference.score.nll == pytest.approx(-(math.log(0.25) + math.log(0.3) + math.log(1 / 3)) / 3, rel=1e-6)
    assert found.kl == pytest.approx(mean, rel=1e-6)
    error = math.sqrt(2 * ((first - 2 * mean) ** 2 + (second - mean) ** 2)) / 3  # windows of 2 and 1 tokens
    assert found.kl_error == pytest.approx(error, rel=1e-6)
    assert found.top1 == 1 / 3  # only where all words are alike, and the first is named
    assert found.nll == pytest.approx(-(math.log(0.5) + math.log(0.6) + math.log(1 / 3)) / 3, rel=1e-6)
    assert found.perplexity == pytest.approx((0.5 * 0.6 / 3) ** (-1 / 3), rel=1e-6)


def test_kl_is_from_full_precision_to_encoded_and_never_the_other_way():
    forward, backward = divergence(P[1], Q[1]), divergence(Q[1], P[1])
    with measure_reference(Table(P), [torch.tensor([1, 0])]) as reference:
        found = reference.compare(Table(Q))
    assert found.kl == pytest.approx(forward, rel=1e-6) and abs(forward - backward) > 0.01
    assert found.kl_error is None  # of one window


@pytest.mark.parametrize("rows, batch", [(1024, 8), (2, 8), (1, 1), (7, 3)])
def test_windows_may_be_cut_anyhow(monkeypatch, rows, batch):
    ids = torch.randint(3, (500,), generator=torch.Generator().manual_seed(0))
    parts = list(ids.split(17))
    with measure_reference(Table(P), parts) as reference:
        expected = reference.compare(Table(Q))
    monkeypatch.setattr(score, "ROWS", rows)
    monkeypatch.setattr(score, "BATCH", batch)
    with measure_reference(Table(P), parts) as reference:
        found = reference.compare(Table(Q))
    before = torch.cat([part[:-1] for part in parts]).tolist()
    after = torch.cat([part[1:] for part in parts]).tolist()
    kl = sum(divergence(P[word], Q[word]) for word in before) / len(before)
    nll = -sum(math.log(Q[word][following]) for word, following in zip(before, after, strict=True)) / len(before)
    assert found.kl == pytest.approx(kl, rel=1e-6) and found.nll == pytest.approx(nll, rel=1e-6)
    assert found.kl_error == pytest.approx(expected.kl_error, rel=1e-6) and found.top1 == expected.top1


def test_the_error_is_that_of_repeated_draws():
    """The spread of the mean over 200 draws of 20 windows is what each draw says of itself."""
    generator = torch.Generator().manual_seed(0)
    draws = [list(torch.randint(3, (20, 9), generator=generator)) for _ in range(200)]
    found = []
    for parts in draws:
        with measure_reference(Table(P), parts) as reference:
            found.append(reference.compare(Table(Q)))
    spread = torch.tensor([one.kl for one in found]).std()
    said = torch.tensor([one.kl_error for one in found]).mean()
    assert float(said / spread) == pytest.approx(1.0, abs=0.15)  # 200 draws know a spread to 5 %


def test_a_model_is_at_no_distance_from_itself(random_model, random_ids):
    model = random_model("qwen3_moe")
    with measure_reference(model, list(random_ids(3, 40))) as reference:
        same = reference.compare(model)
        other = reference.compare(random_model("olmoe"))
    assert same.kl == 0.0 == same.kl_error and same.top1 == 1.0
    assert same.nll == pytest.approx(reference.score.nll, rel=1e-6)
    assert other.kl > 0.05 and other.top1 < 0.5


def test_kept_log_probabilities_are_found_again(tmp_path):
    file = tmp_path / "reference.logits"
    with measure_reference(Table(P), PARTS, file) as reference:
        expected = reference.compare(Table(Q))
    assert file.stat().st_size == 3 * 3 * 4
    with reopen_reference(PARTS, file) as again:
        assert again.compare(Table(Q)) == expected and again.score == reference.score
    remove_reference(file)
    remove_reference(file)
    assert reopen_reference(PARTS, file) is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut", "undescribed", "gone"])
def test_log_probabilities_that_are_not_whole_are_not_used(tmp_path, harm):
    file = tmp_path / "reference.logits"
    with measure_reference(Table(P), PARTS, file):
        pass
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        file.with_suffix(".json" if harm == "undescribed" else ".logits").unlink()
    assert reopen_reference(PARTS, file) is None


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not finite"):
        measure_reference(Table(P, math.nan), PARTS, tmp_path / "reference.logits")
    assert reopen_reference(PARTS, tmp_path / "reference.logits") is None


def test_a_disk_that_is_too_small_is_noticed_before_the_work(random_model, random_ids, monkeypatch):
    model = random_model("qwen3_moe")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 128 * 2 * 19 - 1))
    monkeypatch.setattr(model, "forward", None)
    with pytest.raises(ValueError, match="free: score fewer tokens"):
        measure_reference(model, list(random_ids(2, 20)))


def test_perplexity_alone_keeps_nothing(tmp_path):
    with measure_reference(Table(P), PARTS, tmp_path / "a.logits", keep=False) as reference:
        found = reference.compare(Table(Q))
    assert (tmp_path / "a.logits").stat().st_size == 0
    assert found.kl is found.top1 is None and found.perplexity == pytest.approx((0.5 * 0.6 / 3) ** (-1 / 3), rel=1e-6)
