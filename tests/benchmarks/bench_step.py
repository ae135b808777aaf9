"""One decoding step of a whole model, kernel by kernel: what stands around the experts, and what they cost themselves.

python tests/benchmarks/bench_step.py [--model qwen3_moe] [--layers 4] [--jobs exact,threshold,uniform,grouped_mm,none]
"none" is the model without its experts: what no kernel of ours can be faster than. Jobs are built side by side, each in a
process of its own, so all of them must fit the device, and compiled one after the other: a kernel that they share is then tuned
by Inductor once, for the first. Then times are taken round by round, one job at a time, each round behind a prompt of its
own and begun by another job than the one before. What the device is busy is of steps under a profiler, others than the timed.
"""

import argparse
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations
from statistics import mean, median, quantiles

import torch
from torch import multiprocessing, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dpamoe import api, measure, synthetic, tables
from dpamoe.bench_model import Timer, decoding_step
from dpamoe.modules import encoded_experts
from dpamoe.spec import EncodeSpec

OWN = ("exact", "threshold", "uniform")
SHAPE = {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4}
CONTEXT, STEPS, PROFILED, WARM, ROUNDS = 512, 48, 10, 8, 25
PATIENCE = 1200  # seconds that a job waits for the slowest one to be compiled


class NoExperts(nn.Module):
    """Stands where experts stood and hands the rows through."""

    def forward(self, hidden_states, index, weights):
        return hidden_states


def build(job: str, config, sites, spec: EncodeSpec, device: torch.device, budget: float) -> nn.Module:
    """The model of a job at random weights."""
    if job in OWN:
        model = synthetic.encoded_model(config, sites, spec, device)
        if job == "threshold":
            for number, experts in enumerate(encoded_experts(model).values()):
                synthetic.weigh(experts, device, number)
            api.set_spend(model, allocator="threshold")
        elif job == "uniform":
            api.set_spend(model, allocation="uniform")
        api.set_budget(model, budget)
        return model
    if job != "none":
        return synthetic.plain_model(config, device, job)
    model = synthetic.skeleton(config)
    for site in sites:
        parent, _, name = site.path.rpartition(".")
        setattr(model.get_submodule(parent), name, NoExperts())
    return synthetic.fill(model, device)


def kernels_of(timer: Timer, arguments: tuple) -> list:
    """Events of all kernels of PROFILED steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        timer.decode(*arguments, PROFILED)
        torch.cuda.synchronize()
    return [event for event in seen.events() if event.device_type == DeviceType.CUDA]


def busy_microseconds(kernels: list) -> float:
    """Time in which at least one kernel runs, of a step."""
    total, end = 0.0, 0.0
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in kernels):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / PROFILED


def host_microseconds(timer: Timer, arguments: tuple) -> float:
    """Time in which a step is launched, from which on the host waits for the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    timer.decode(*arguments, PROFILED)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / PROFILED


def table_of(kernels: list, layers: int) -> str:
    """The kernels of a step, the costliest first."""
    spent = defaultdict(list)
    for event in kernels:
        spent[event.name[:96]].append(event.time_range.elapsed_us())
    rows = [
        (f"{sum(times) / PROFILED:.1f}", f"{len(times) / PROFILED:g}", f"{sum(times) / len(times):.2f}", name)
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    return tables.aligned(("µs a step", "launches", "µs each", f"kernel ({layers} layers)"), rows)


def in_turn(round_begins, own: int, jobs: int) -> Iterator[int]:
    """The rounds of job number `own`; each begins when the job before it is done."""
    for number in range(ROUNDS):
        for place in range(jobs):
            round_begins.wait(PATIENCE)
            if (number + place) % jobs == own:
                yield number


def run(job: str, flags: argparse.Namespace, own: int, jobs: int, round_begins, turn, speeds) -> None:
    """Build the model of a job; when all are built, time it in turn with others. Puts (job, tokens per second by round)."""
    start = time.perf_counter()
    device, spec = measure.device_of("cuda"), EncodeSpec()
    config = synthetic.read_config(flags.model, SHAPE | {"num_hidden_layers": flags.layers})
    _, sites = synthetic.with_sites(config, spec)
    model = build(job, config, sites, spec, device, flags.budget)
    timer = Timer(model, decoding_step(model, job in OWN, device), device)
    length = flags.context + 10 * STEPS
    with torch.no_grad():
        prompt = timer.prompt(flags.context)
        token, position = (torch.empty(1, 1, dtype=torch.int64, device=device) for _ in range(2))

        def begin() -> None:
            token.copy_(timer.prefill(prompt, length))
            position.fill_(flags.context)

        begin()
        arguments = (token, position, timer.caches[length])
        with turn:
            timer.decode(*arguments, WARM)
        print(f"{job}: ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        found, planes = [], []
        for _ in in_turn(round_begins, own, jobs):
            begin()
            if job in OWN:
                api.stats(model, reset=True)  # of the prompt
            found.append(STEPS / measure.seconds(lambda: timer.decode(*arguments, STEPS), device))
            if job in OWN:
                planes.append(api.stats(model)["mean_planes"])
        speeds.put((job, found))
        round_begins.wait(PATIENCE)
        with turn:
            spent = f", {mean(planes):.3f} planes" if job in OWN else ""
            first = timer.first_token_ms(flags.context)  # while no profiler has seen this process yet
            host, kernels = host_microseconds(timer, arguments), kernels_of(timer, arguments)
            speed, busy = median(found), busy_microseconds(kernels)
            times = f"{1e6 / speed:.0f} µs a step; under a profiler {busy:.0f} on the device; {host:.0f} to launch"
            print(f"\n{job}, {len(sites)} layers{spent}: {speed:.1f} tok/s ({min(found):.1f} to {max(found):.1f}); {times}")
            print(f"first token of {flags.context}: {first:.1f} ms, prompts not compiled")
            print(table_of(kernels, len(sites)), flush=True)
        round_begins.wait(PATIENCE)  # nothing is torn down beside what is still timed


def beside(speeds: dict[str, list[float]]) -> str:
    """Every job over each other one, by rounds, in each of which both ran: median, quartiles, and the extremes."""
    lines = []
    for job, other in permutations(speeds, 2):
        ratios = [one / two for one, two in zip(speeds[job], speeds[other], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        lines.append(f"{job} / {other}: {middle:.4f} ({low:.4f} to {high:.4f}; all {min(ratios):.3f} to {max(ratios):.3f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_moe")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--jobs", default="exact,threshold,uniform,grouped_mm,none")
    parser.add_argument("--budget", type=float, default=4.0)
    parser.add_argument("--context", type=int, default=CONTEXT)
    flags = parser.parse_args()
    jobs, context = list(dict.fromkeys(flags.jobs.split(","))), multiprocessing.get_context("spawn")
    print(measure.heading(measure.facts(measure.device_of("cuda"))), flush=True)
    round_begins, turn, speeds = context.Barrier(len(jobs)), context.Lock(), context.SimpleQueue()
    processes = [
        context.Process(target=run, args=(job, flags, own, len(jobs), round_begins, turn, speeds))
        for own, job in enumerate(jobs)
    ]
    signal.signal(signal.SIGTERM, lambda *given: sys.exit("ended by SIGTERM"))
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            time.sleep(0.2)
    finally:
        for process in processes:
            process.terminate()  # those that would wait for one that is no more
    if any(process.exitcode for process in processes):
        raise SystemExit("a job failed; what it said stands above")
    print("\n" + beside(dict(sorted(speeds.get() for _ in jobs))))


if __name__ == "__main__":
    main()
