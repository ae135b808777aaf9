"""Time a whole model at random weights, batch 1: tokens per second and time to the first token, encoded beside bf16.

Every model has a static cache. A prompt runs as `generate` runs it, not compiled; on CUDA a decoding step is compiled and
replayed as a CUDA graph. Only one model is in memory at a time.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from dpamoe import api, measure, synthetic, tables
from dpamoe.bench import BASELINES, GATHERS, check_baselines, gathered_bytes
from dpamoe.passes.backend import compile_backend
from dpamoe.progress import track
from dpamoe.sites import Site
from dpamoe.spec import EncodeSpec, check_budget

PROMPTS = (512, 2048)
NEW_TOKENS = 64
REPEATS = 3
WARM_STEPS = {"cuda": 8, "cpu": 1}  # compiling, and recording the graph
OURS = "dpamoe"


def bench_model(
    source: str, device: torch.device, spec: EncodeSpec, budgets: Sequence[float], prompts: Sequence[int] = PROMPTS,
    new_tokens: int = NEW_TOKENS, baselines: Sequence[str] = BASELINES[:1], baselines_first: bool = False,
    changes: dict | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Build, time and free the encoded model, then each baseline, or the other way round.

    Yields the object of `dpamoe bench --mode model --json` after every row: the same object, `complete` the last time.
    Raises ValueError for a model without routed experts, an unknown baseline or a budget out of range.
    """
    check_baselines(baselines)
    for budget in budgets:
        check_budget(budget, spec.k_min, spec.k_max)
    config = synthetic.read_config(source, changes)
    jobs = [*baselines, OURS] if baselines_first else [OURS, *baselines]
    _, sites = synthetic.with_sites(config, spec)
    described = {"sites": len(sites), "context": prompts[0], "new_tokens": new_tokens, "compiled": device.type == "cuda"}
    facts = {"mode": "model", "model": source, **measure.facts(device), **described, "baselines": list(baselines)}
    outcome = {**facts, "complete": False, "rows": []}
    for name in track(jobs, "bench", str):
        for row in _job(name, config, sites, spec, budgets, prompts, new_tokens, device):
            outcome["rows"].append(row)
            _compare(outcome["rows"])
            yield outcome
        measure.release(device)
    outcome["complete"] = True
    yield outcome


def _compare(rows: list[dict]) -> None:
    """Put beside each of our rows its speed over every baseline that is measured by now."""
    others = [row for row in rows if row["model"] != OURS]
    for row in rows:
        if row["model"] == OURS:
            row["speedup"] = {other["model"]: row["tokens_per_second"] / other["tokens_per_second"] for other in others}


@torch.no_grad()
def _job(
    name: str, config, sites: list[Site], spec: EncodeSpec, budgets: Sequence[float], prompts: Sequence[int], new_tokens: int,
    device: torch.device,
) -> Iterator[dict]:  # fmt: skip
    """Build one model, time it (at every budget), and drop it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    encoded = name == OURS
    model = synthetic.encoded_model(config, sites, spec, device) if encoded else synthetic.plain_model(config, device, name)
    held = {"weight_bytes": measure.held_bytes(model), "memory_bytes": _allocated(device)}
    timer = Timer(model, decoding_step(model, encoded, device), device)
    for budget in budgets if encoded else [None]:
        if budget is not None:
            api.set_budget(model, budget)
        first = {str(count): _first_token(timer, name, sites, count) for count in prompts}
        speed = timer.tokens_per_second(prompts[0], new_tokens)
        row = {"model": name, "budget": budget, "tokens_per_second": speed, "ms_per_token": 1e3 / speed, "ttft_ms": first}
        yield {**row, **held, "peak_bytes": _peak(device)}


def _first_token(timer: "Timer", name: str, sites: list[Site], count: int) -> float | None:
    if name == GATHERS and gathered_bytes(sites[0], count * sites[0].top_k) > measure.free_bytes(timer.device) / 2:
        return None
    return timer.first_token_ms(count)


def decoding_step(model: nn.Module, encoded: bool, device: torch.device) -> Callable:
    """One decoding step, as CUDA graph where there is CUDA."""
    if device.type != "cuda":
        return model.forward
    torch.compiler.reset()
    if encoded:
        return torch.compile(model.forward, backend=compile_backend, options={"triton.cudagraphs": True})
    return torch.compile(model.forward, mode="reduce-overhead")


class Timer:
    """Runs one model at batch 1: a prompt, then greedy steps, each length with its own static cache."""

    def __init__(self, model: nn.Module, step: Callable, device: torch.device):
        self.model, self.step, self.device = model, step, device
        self.caches: dict[int, object] = {}
        self.vocabulary = model.config.get_text_config().vocab_size
        accepted = inspect.signature(model.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"  # its older name

    def prompt(self, count: int) -> Tensor:
        """A prompt of random tokens, int64 [1, count]."""
        return torch.randint(self.vocabulary, (1, count), generator=torch.Generator().manual_seed(count)).to(self.device)

    def first_token_ms(self, count: int) -> float:
        """Median time from a prompt of `count` tokens to the next token, ms."""
        ids = self.prompt(count)
        self.prefill(ids, count)
        return 1e3 * median(measure.seconds(lambda: self.prefill(ids, count), self.device) for _ in range(REPEATS))

    def tokens_per_second(self, count: int, new_tokens: int) -> float:
        """Median speed of decoding behind a prompt of `count` tokens."""
        warm = WARM_STEPS["cuda" if self.device.type == "cuda" else "cpu"]
        token = self.prefill(self.prompt(count), count + warm + REPEATS * new_tokens)
        position = torch.full((1, 1), count, device=self.device)
        cache = self.caches[count + warm + REPEATS * new_tokens]
        self.decode(token, position, cache, warm)
        times = [
            measure.seconds(lambda: self.decode(token, position, cache, new_tokens), self.device) for _ in range(REPEATS)
        ]  # fmt: skip
        return new_tokens / median(times)

    def prefill(self, ids: Tensor, length: int) -> Tensor:
        """Run a prompt [1, N] from an empty cache of `length` places; the token that follows, [1, 1]."""
        from transformers import StaticCache

        if length in self.caches:
            self.caches[length].reset()
        else:
            self.caches[length] = StaticCache(config=self.model.config, max_cache_len=length)
        out = self.model(input_ids=ids, use_cache=True, **{self.cache_name: self.caches[length]}, **self.last_only)
        return out.logits[:, -1:].argmax(-1)

    def decode(self, token: Tensor, position: Tensor, cache, steps: int) -> None:
        """Greedy steps; token and position are moved on in place."""
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            out = self.step(input_ids=token, position_ids=position, use_cache=True, **{self.cache_name: cache})
            token.copy_(out.logits[:, -1:].argmax(-1))
            position.add_(1)


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def table(outcome: dict) -> str:
    """The rows as text, each as it was when it was measured; those that stand before a baseline come once more at the end."""
    note = "compiled, CUDA graphs" if outcome["compiled"] else "not compiled"
    decoding = f"decoding of {outcome['new_tokens']} tokens behind {outcome['context']}, {note}; prompts not compiled"
    lines = [measure.heading(outcome), f"{outcome['sites']} layers of experts, batch 1; {decoding}"]
    rows, names = outcome["rows"], outcome["baselines"]
    if not rows:
        return "\n".join(lines)
    before = [[row["model"] for row in rows[:position]] for position in range(len(rows))]
    lines.append(_columns(outcome, [_cells(row, names, known) for row, known in zip(rows, before, strict=True)]))
    late = [row for row, known in zip(rows, before, strict=True) if row["model"] == OURS and not {*names} <= {*known}]
    if outcome["complete"] and late:
        lines += [
            "beside the baselines, measured later:",
            _columns(outcome, [_cells(row, names, names) for row in late]),
        ]
    return "\n".join(lines)


def _columns(outcome: dict, rows: list[list[str]]) -> str:
    prompts, names = outcome["rows"][0]["ttft_ms"], outcome["baselines"]
    head = [
        "experts", "k̄", "tok/s", "ms/token", *(f"first of {count}, ms" for count in prompts),
        "weights GB", "held GB", "peak GB", *(f"× {name}" for name in names),
    ]  # fmt: skip
    numbers = ["2.375", "10000.0", "1000.00", *("10000.0" for _ in prompts), *["1000.00"] * 3, *("100.00" for _ in names)]
    return tables.growing(head, rows, [[name, *numbers] for name in (OURS, *names)])


def _cells(row: dict, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """One line; names: all baselines, known: those that are compared with."""
    speedup = {name: factor for name, factor in row.get("speedup", {}).items() if name in known}
    return [
        row["model"], tables.cell(row["budget"], "g"), f"{row['tokens_per_second']:.1f}", f"{row['ms_per_token']:.2f}",
        *(tables.cell(ms, ".1f") for ms in row["ttft_ms"].values()),
        *(tables.cell(row[key] and row[key] / 1e9, ".2f") for key in ("weight_bytes", "memory_bytes", "peak_bytes")),
        *(tables.cell(speedup.get(name), ".2f") for name in names),
    ]  # fmt: skip
