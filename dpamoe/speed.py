"""Tokens per second and time to the first token of one transformed model, allocation beside allocation, on real text.

As in the paper: sequences of a text, batch 1, each a prompt and greedy steps behind it. Allocations take turns in rounds that
run forwards and then backwards, so that a machine that slows down meets all of them alike.
"""

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from dpamoe import api, measure
from dpamoe.bench_model import WARM_STEPS, Timer, decoding_step
from dpamoe.progress import track

ALLOCATIONS = ("uniform", "dpa")


def prompts_of(windows: Sequence[Tensor], length: int, count: int) -> list[Tensor]:
    """The first `length` tokens of up to `count` windows that are long enough, int64 [1, length] each.

    Raises ValueError if no window is.
    """
    found = [window[None, :length] for window in windows if window.numel() >= length][:count]
    if not found:
        raise ValueError(f"no window of the text holds a prompt of {length} tokens: give a longer text or shorter prompts")
    return found


def compare_speed(
    model: nn.Module, prompts: Sequence[Tensor], budgets: Sequence[float], new_tokens: int, device: torch.device
) -> dict:
    """Medians over all prompts and both rounds; the model's spending is put back.

    Returns the machine's facts, {"prompts", "prompt_tokens", "new_tokens", "compiled"}, and rows of {"budget",
    "allocation", "tokens_per_second", "ttft_ms"}.
    """
    timer = Timer(model, decoding_step(model, True, device), device)
    times: dict[tuple[float, str], list[tuple[float, float]]] = {}
    rounds = [(b, a) for b in budgets for a in (*ALLOCATIONS, *reversed(ALLOCATIONS))]
    with torch.no_grad(), api.spending_kept(model):
        for budget, allocation in track(rounds, "speed", lambda one: f"budget {one[0]:g} {one[1]}"):
            api.set_spend(model, budget=budget, allocation=allocation, allocator="exact")
            _sequence(timer, prompts[0], WARM_STEPS["cuda" if device.type == "cuda" else "cpu"])
            times.setdefault((budget, allocation), []).extend(_sequence(timer, ids, new_tokens) for ids in prompts)
    rows = [
        {
            "budget": budget,
            "allocation": allocation,
            "tokens_per_second": new_tokens / median(decode for _, decode in taken),
            "ttft_ms": 1e3 * median(first for first, _ in taken),
        }
        for (budget, allocation), taken in times.items()
    ]
    described = {"prompts": len(prompts), "prompt_tokens": prompts[0].shape[1], "new_tokens": new_tokens}
    return {**measure.facts(device), **described, "compiled": device.type == "cuda", "rows": rows}


def _sequence(timer: Timer, ids: Tensor, steps: int) -> tuple[float, float]:
    """Seconds to the first token, and for the steps behind it."""
    ids, count, found = ids.to(timer.device), ids.shape[1], []
    length = count + max(steps, 64)  # one cache for warming up and for measuring
    first = measure.seconds(lambda: found.append(timer.prefill(ids, length)), timer.device)
    position = torch.full((1, 1), count, device=timer.device)
    cache = timer.caches[length]
    return first, measure.seconds(lambda: timer.decode(found[0], position, cache, steps), timer.device)


def ratios(rows: Sequence[dict]) -> dict[float, tuple[float, float]]:
    """DPA over Uniform-k at each budget: of tokens per second, and of time to the first token."""
    by = {(row["budget"], row["allocation"]): row for row in rows}
    return {
        budget: tuple(by[budget, "dpa"][name] / by[budget, "uniform"][name] for name in ("tokens_per_second", "ttft_ms"))
        for budget in dict.fromkeys(row["budget"] for row in rows)
    }
