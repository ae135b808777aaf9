"""Candidates for prefill on Hopper: `try_prefill.py`. Each is checked in its own process, then timed, the best profiled."""

import csv
import io
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch.nn import functional as F
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dpamoe.kernels import grouped, triton_experts
from dpamoe.kernels import hopper_experts as he
from dpamoe.kernels.hopper_slots import hopper_slots_kernel
from dpamoe.kernels.hopper_stream import hopper_stream_kernel
from dpamoe.kernels.layout import EncodedWeight, group_width
from dpamoe.kernels.reference import is_gated
from dpamoe.kernels.triton_sort import prepare_stretches_kernel

E, A, H, INNER, GROUP, C = 128, 8, 2048, 768, 128, 8
LAYERS, SECONDS_TO_CHECK = 3, 55
MIX = (7, 5, 4, 4, 4, 3, 3, 2)


@dataclass(frozen=True)
class Cut:
    slices: int
    pairs: int
    groups: int = 3  # warp groups that compute
    kept: int = 2  # blocks of x, or slices of them
    whole: bool = False
    turns: int = 0  # 0: as it comes, 1: one after the other, 2: one once the other has begun
    slots: bool = False  # x kept by slices

    @property
    def registers(self):
        if (self.slices, self.pairs, self.groups) in ((3, 64, 3), (6, 32, 3)):
            return 160, 32
        return {2: (224, 56), 3: (152, 56), 4: (104, 64)}[self.groups]


# a letter for the turns stands at the end of a name: a 0, b 1, c 2
SHAPES = {
    "s32w": Cut(2, 32, 3, 4, True), "s64w": Cut(1, 64, 3, 4, True), "s64x4": Cut(1, 64, 4, 3), "zs32w": Cut(2, 32, 3, 8, True, 0, True),
    "u192": Cut(3, 64, 2, 2), "z192": Cut(3, 64, 2, 8, False, 0, True), "u192x3": Cut(3, 64, 3, 2), "s64k3": Cut(2, 64, 3, 3),
    "m4x64": Cut(4, 64, 2, 2), "z4x64": Cut(4, 64, 2, 8, False, 0, True), "u128": Cut(1, 128, 3, 3),
    "m4x8w": Cut(4, 8, 3, 3, True), "m6x8w": Cut(6, 8, 3, 3, True), "z4x16": Cut(4, 16, 3, 16, False, 0, True),
    "m4x32": Cut(4, 32, 3, 2), "z4x32": Cut(4, 32, 3, 12, False, 0, True), "z8x32": Cut(8, 32, 2, 16, False, 0, True),
    "z6x32": Cut(6, 32, 3, 12, False, 0, True), "z5x32": Cut(5, 32, 3, 12, False, 0, True),
}  # fmt: skip
RUNS = {
    (512, "uniform"): ("s32wa", "s32wc", "s64wa", "s64wc", "s64x4c", "zs32wc"),
    (2048, "uniform"): ("u192a", "u192b", "u192c", "z192c", "u192x3c", "s64k3c"),
    (4096, "uniform"): ("m4x64a", "m4x64c", "z4x64c", "u128c", "s64k3c", "u192x3c"),
    (512, "mix"): ("m4x8wa", "m4x8wb", "z4x16b"),
    (2048, "mix"): ("m4x32a", "m4x32b", "z4x32a", "z4x32b", "z8x32a", "z8x32b", "z6x32b"),
    (4096, "mix"): ("m4x64a", "m4x64b", "z4x64b", "z4x32b", "z8x32b", "z6x32b"),
}  # fmt: skip
PROFILED = ((4096, "uniform"), (2048, "uniform"), (512, "uniform"), (2048, "mix"))
METRICS = {
    "us": "gpu__time_duration.sum", "SM MHz": "sm__cycles_elapsed.avg.per_second",
    "instructions": "sm__inst_executed.sum", "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "tensor cycles %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "hmma cycles %": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "gmma cycles %": "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu %": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fp16 %": "sm__inst_executed_pipe_fp16.avg.pct_of_peak_sustained_active",
    "fma %": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "lsu %": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed", "L2 MB": "lts__t_bytes.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed", "DRAM MB": "dram__bytes_read.sum",
}  # fmt: skip
STALLS = (
    "barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "lg_throttle", "long_scoreboard", "math_pipe_throttle",
    "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
METRICS |= {f"~ {name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS}


def cut_of(name, kind):
    return replace(SHAPES[name[:-1]], turns="abc".index(name[-1])), kind == "uniform"


def random_weight(out_features, in_features):
    shape = (E, out_features, in_features // GROUP)
    planes = [torch.randint(0, 256, (*shape[:2], in_features // 8), dtype=torch.uint8, device="cuda") for _ in range(C)]
    scales = [((torch.rand(shape, device="cuda") + 0.5) * 0.02 * 0.5**c).half() for c in range(C)]
    return EncodedWeight(planes, scales, (torch.randn(shape, device="cuda") * 0.01).half(), None, in_features, GROUP)


def routing(tokens, kind):
    ids = torch.rand(tokens, E, device="cuda").topk(A, 1).indices
    gates = torch.rand(tokens, A, device="cuda")
    chunks = torch.full((tokens, A), 4, dtype=torch.int32, device="cuda")
    if kind == "mix":
        mix = torch.tensor(MIX, dtype=torch.int32, device="cuda").expand(tokens, A)
        chunks = mix.gather(1, torch.rand(tokens, A, device="cuda").argsort(1)).contiguous()
    return torch.randn(tokens, H, device="cuda").bfloat16(), ids, gates, chunks


def sort_pairs(ids, chunks, cut, one_k, up, down, tile=None):
    """As `hopper_experts.sort_pairs`; pairs of one k fill fewer tiles."""
    pairs = ids.numel()
    partly = 1 if one_k else 1 + -(-8 // cut.slices)
    most = min(pairs, partly * min(pairs, E) + pairs // (cut.slices * cut.pairs))
    tiles = torch.empty(most, 3 + 2 * cut.slices, dtype=torch.int32, device=ids.device)
    order, _, peaks = triton_experts.sort_into(tiles, ids, chunks, up, down, BN=0, MIXED=cut.pairs, SLICES=cut.slices)
    return he.Sorted(order, tiles, peaks, tile or he.Tile(cut.slices, cut.pairs))


def prepare(x, by, sharing, weight):
    width, words = weight.in_features, he.words_at_once(weight)
    stretches, pairs = width // 128, by.order.numel()
    ready = torch.empty(pairs, width + stretches // words * 16, dtype=torch.float16, device=x.device)
    factor = torch.empty(pairs, dtype=torch.float32, device=x.device)
    prepare_stretches_kernel[(pairs,)](
        x, by.order, ready, factor, x.stride(0), x.shape[0], A=sharing, IN=width, STRETCHES=stretches,
        STRETCHES_PAD=triton.next_power_of_2(stretches), W=words, GROUP=group_width(width, weight.group_size),
    )  # fmt: skip
    return ready, factor


def product(prepared, by, cut, one_k, second, weight, act, out):
    ready, factor = prepared
    rows = TensorDescriptor.from_tensor(ready, [cut.pairs, 128], gl.NVMMASharedLayout(128, 16, 2))
    sums = TensorDescriptor.from_tensor(ready, [cut.pairs, 16], gl.NVMMASharedLayout(32, 16, 2))
    words = he.words_at_once(weight)
    regs, bring = cut.registers
    chips = torch.cuda.get_device_properties(ready.device).multi_processor_count
    blocks = triton.cdiv(weight.offset.shape[1], 64 * cut.groups)
    kernel = hopper_slots_kernel if cut.slots else hopper_stream_kernel
    kernel[(min(chips, blocks * by.tiles.shape[0]),)](
        rows, sums, factor, by.order, by.tiles, by.peaks[int(second)], ready.shape[0], 0,
        *triton_experts.tensors_of(weight, None), out, **triton_experts.shape_of(weight), BIAS=False, ACT=act,
        GATED=act != "" and is_gated(act), TARGET=second, P=cut.slices, S=cut.pairs, W=words, B=words if cut.whole else 1,
        NC=cut.groups, NS=cut.kept, ONE=one_k, TURNS=cut.turns, REGS=regs, BRING=bring, num_warps=4,
    )  # fmt: skip


class Layer:
    """One layer in steps; each can run again alone once all have run."""

    def __init__(self, cut, kind, call, up, down):
        self.cut, self.kind, self.up, self.down = cut, kind, up, down
        self.x, self.ids, self.gates, self.chunks = call
        pairs = self.ids.numel()
        self.hidden = torch.empty(pairs, INNER, dtype=self.x.dtype, device="cuda")
        self.rows = torch.empty(pairs, H, dtype=self.x.dtype, device="cuda")
        self.out = torch.empty(self.x.shape[0], H, dtype=self.x.dtype, device="cuda")
        self.steps = ("sort", "first", "upward", "second", "downward", "combine")

    def sort(self):
        self.by = sort_pairs(self.ids, self.chunks, self.cut, self.kind == "uniform", self.up, self.down)

    def first(self):
        self.a = prepare(self.x, self.by, A, self.up)

    def upward(self):
        product(self.a, self.by, self.cut, self.kind == "uniform", False, self.up, "silu_mul", self.hidden)

    def second(self):
        self.b = prepare(self.hidden, self.by, 0, self.down)

    def downward(self):
        product(self.b, self.by, self.cut, self.kind == "uniform", True, self.down, "", self.rows)

    def combine(self):
        triton_experts.combine(self.rows, self.ids, self.chunks, self.gates, E, self.out)

    def __call__(self):
        for step in self.steps:
            getattr(self, step)()
        return self.out


def exact(call, up, down, tokens, dtype):
    """The first tokens with decoded weights, in fp64 or as bf16 products."""
    x, ids, gates, chunks = call
    out = torch.zeros(tokens, H, dtype=torch.float64, device="cuda")
    for token in range(tokens):
        for slot in range(A):
            expert, k = int(ids[token, slot]), int(chunks[token, slot])
            if expert >= E or k == 0:
                continue
            first, then = (next(grouped.prefixes(weight, expert, [k])).to(dtype) for weight in (up, down))
            gate, value = F.linear(x[token].to(dtype), first).chunk(2)
            out[token] += gates[token, slot].double() * F.linear(F.silu(gate) * value, then).double()
    return out


def check(name):
    torch.manual_seed(0)
    up, down = random_weight(2 * INNER, H), random_weight(H, INNER)
    for (tokens, kind), names in RUNS.items():
        if name not in names:
            continue
        call = routing(tokens, kind)
        call[1][:3, 0] = E  # padding
        if kind == "mix":
            call[3][1:4, 1] = 0
        layer = Layer(cut_of(name, kind)[0], kind, call, up, down)
        found, again = layer().clone(), layer().clone()
        some = 12
        expected = exact(call, up, down, some, torch.float64)
        rounded = exact(call, up, down, some, torch.bfloat16).bfloat16().double()
        old = he.prefill_ffn(*call, up, None, down, None, "silu_mul", kind == "uniform")
        norm = expected.norm()
        errors = [float((y[:some].double() - expected).norm() / norm) for y in (found, rounded, old)]
        whole = float((found.double() - old.double()).norm() / old.double().norm())
        good = errors[0] < 1.2 * errors[1] and torch.equal(found, again) and whole < 8e-3
        print(
            f"{'ok' if good else 'WRONG'} {name} T={tokens} {kind}: {errors[0]:.5f} (bf16 {errors[1]:.5f}) from old"
            f" {whole:.5f} same bits {torch.equal(found, again)}", flush=True,
        )  # fmt: skip
        if not good:
            raise SystemExit(1)


def microseconds(calls, repeats=8):
    """Median of graph replays, per call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for call in calls:
                call()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 2 / len(calls))
    return statistics.median(times[2:])


def bare(call, up, down):
    """bf16 torch._grouped_mm, two products and silu * mul, on sorted rows; nothing else."""
    x, ids, _, _ = call
    by_expert = ids.flatten().argsort()
    ends = ids.flatten().bincount(minlength=E).cumsum(0).int()
    rows = x[by_expert // A].contiguous()

    def run():
        gate, value = torch._grouped_mm(rows, up.transpose(1, 2), ends).chunk(2, 1)
        return torch._grouped_mm(F.silu(gate) * value, down.transpose(1, 2), ends)

    return run


def time_all(good):
    weights = [(random_weight(2 * INNER, H), random_weight(H, INNER)) for _ in range(LAYERS)]
    wide = [[torch.randn(E, o, i, device="cuda").bfloat16() for o, i in ((2 * INNER, H), (H, INNER))] for _ in range(LAYERS)]
    best = {}
    for (tokens, kind), names in RUNS.items():
        call = routing(tokens, kind)
        base = microseconds([bare(call, *w) for w in wide])
        old = microseconds(
            [partial(he.prefill_ffn, *call, w[0], None, w[1], None, "silu_mul", kind == "uniform") for w in weights]
        )
        print(f"T={tokens} {kind}: bare bf16 {base:.0f}, now {old:.0f} ({old / base:.2f})", flush=True)
        times = {}
        for name in names:
            if name not in good:
                continue
            try:
                layers = [Layer(cut_of(name, kind)[0], kind, call, *w) for w in weights]
                total = times[name] = microseconds(layers)
                parts = {step: microseconds([getattr(y, step) for y in layers], 3) for step in layers[0].steps}
                text = " ".join(f"{step} {value:.0f}" for step, value in parts.items())
                print(f"    {name:6} {total:.0f} ({total / base:.2f})   {text}", flush=True)
            except Exception as error:  # noqa: BLE001  the next candidate is to run
                print(f"    {name:6} {type(error).__name__}: {str(error)[:200]}", flush=True)
        if times:
            best[tokens, kind] = min(times, key=times.get)
    return best


def profiled(places):
    """What `ncu` watches: the two products of each layer."""
    torch.manual_seed(0)
    w = random_weight(2 * INNER, H), random_weight(H, INNER)
    for place in places:
        tokens, kind, name = place.split(",")
        Layer(cut_of(name, kind)[0], kind, routing(int(tokens), kind), *w)()
    torch.cuda.synchronize()


def profile(best):
    """Run this file under `ncu` and print one column for each kernel."""
    places = [f"{t},{kind},{best[t, kind]}" for t, kind in PROFILED if (t, kind) in best]
    said = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, timeout=30).stdout
    known = set(re.findall(r"^(\w+__\w+)", said, re.M))
    wanted = {title: name for title, name in METRICS.items() if not known or name.split(".")[0] in known}
    print("not known to ncu:", *[title for title in METRICS if title not in wanted])
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--print-units",
        "base",
        "--page",
        "raw",
        "--metrics",
        ",".join(wanted.values()),
    ]
    command += ["-k", "regex:hopper_(stream|slots)_kernel", sys.executable, __file__, "--profile", *places]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = said.stdout.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        print("ncu said:", said.stdout[-1500:], said.stderr[-1500:])
        return
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[first:]))))
    units, rows = rows[0], rows[1:]
    print("columns: up and down of", *places)
    for title, name in wanted.items():
        values = [row.get(name, "") for row in rows]
        print(f"{title:20}", *[f"{value:>14}" for value in values], units.get(name, ""))


def main():
    began = time.time()
    names = sorted({name for names in RUNS.values() for name in names})
    running = {
        name: subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in names
    }
    good = []
    for name, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(1, SECONDS_TO_CHECK - (time.time() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"TIMEOUT {name}\n"
        lines = said.strip().splitlines()
        print("\n".join(lines if process.returncode == 0 else [f"FAILED {name}", *lines[-6:]]), flush=True)
        good += [name] if process.returncode == 0 else []
    print(f"checked after {time.time() - began:.0f} s: {' '.join(good)}", flush=True)
    best = time_all(good)
    print(f"timed after {time.time() - began:.0f} s", flush=True)
    try:
        profile(best)
    except Exception as error:  # noqa: BLE001  the times are what matters
        print("profile:", type(error).__name__, str(error)[:500])
    print(f"done after {time.time() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--profile"]:
        profiled(sys.argv[2:])
    elif len(sys.argv) > 1:
        check(sys.argv[1])
    else:
        main()
