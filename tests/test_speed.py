"""Speed of allocations beside each other: what is timed, and that the model is left as it was. No timings here."""

import pytest
import torch

import dpamoe
from dpamoe import measure, speed


def test_prompts_are_the_beginnings_of_long_windows():
    windows = [torch.arange(10), torch.arange(3), torch.arange(20, 28), torch.arange(30, 40)]
    found = speed.prompts_of(windows, 8, 2)
    assert [prompt.tolist() for prompt in found] == [[list(range(8))], [list(range(20, 28))]]
    with pytest.raises(ValueError, match="prompt of 11 tokens: give a longer text or shorter prompts"):
        speed.prompts_of(windows, 11, 2)


def test_every_prompt_is_run_at_every_budget_and_allocation(transformed, random_ids, monkeypatch):
    _, model = transformed("qwen3_moe")
    dpamoe.set_spend(model, budget=5.5, allocation="gate-only")
    clock, seen = iter(range(1, 10_000)), []

    def seconds(call, device):
        spends = {experts.spend for experts in dpamoe.api.encoded_experts(model).values()}
        seen.append(spends.pop())
        call()
        return float(next(clock))

    monkeypatch.setattr(measure, "seconds", seconds)
    prompts = [ids[None] for ids in random_ids(3, 12)]
    outcome = speed.compare_speed(model, prompts, [3.0, 4.0], 5, torch.device("cpu"))
    assert [outcome[name] for name in ("prompts", "prompt_tokens", "new_tokens", "compiled")] == [3, 12, 5, False]
    timed = list(dict.fromkeys((spend.budget, spend.allocation) for spend in seen))
    assert timed == [(3.0, "uniform"), (3.0, "dpa"), (4.0, "uniform"), (4.0, "dpa")]
    # rounds of a budget: uniform, dpa, dpa, uniform, each one warm-up and three prompts, two timings each
    order = [spend.allocation for spend in seen[:32]]
    assert order == ["uniform"] * 8 + ["dpa"] * 16 + ["uniform"] * 8
    # prompts of a round take 3 4, 5 6, 7 8 after its warm-up 1 2: medians over rounds 1 and 4 (3 to 8, 27 to 32) for uniform
    first = outcome["rows"][0]
    assert (first["budget"], first["allocation"]) == (3.0, "uniform")
    assert first["ttft_ms"] == 1e3 * (7 + 27) / 2 and first["tokens_per_second"] == 5 / ((8 + 28) / 2)
    spends = {experts.spend for experts in dpamoe.api.encoded_experts(model).values()}
    assert spends == {dpamoe.SpendSpec(5.5, "gate-only")}


def test_ratios_are_dpa_over_uniform():
    rows = [
        {"budget": 4.0, "allocation": "uniform", "tokens_per_second": 10.0, "ttft_ms": 20.0},
        {"budget": 4.0, "allocation": "dpa", "tokens_per_second": 9.0, "ttft_ms": 25.0},
    ]
    assert speed.ratios(rows) == {4.0: (0.9, 1.25)}
