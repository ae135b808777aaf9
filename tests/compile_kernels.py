"""Compile the Triton kernels for a GPU that need not be here: `compile_kernels.py CARD SET`, one JSON object on stdout.

CARD: compute capability times ten. SET: "decode", "some decode" (one of each kernel), "prefill", "around" (sorting,
reordering), "allocate", "encode", "route", "hopper", "some hopper" and "one k hopper" (of which instructions are counted),
"bits", "few bits" (those for one token and for two), "tied" (as "bits", with tied scales) or "all".
Shapes are those of a Qwen3-30B-A3B layer. For each kernel: bytes of shared memory, bytes of stack, which hold nothing but
spilled registers, registers, how many 1-bit and 8-bit products its code has, how many loads stand before it first waits for
copies, how many of 32 bits before it has asked for ASKED of them, how many of 16 bits before the first, how many it asks
for before it waits for the kernel before, and how often its warps agree on numbers, what they load anew before that wait
and behind; "hopper": also the most shared memory that its cut was chosen for, its products and waits for them, how many
loads stand between products and the stores of their results, and `faults_of` its code.
"""

import json
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from compiled_code import faults_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dpamoe.kernels import (
    allocation,
    hopper_rows,
    paths,
    triton_allocate,
    triton_decode,
    triton_encode,
    triton_encode_tied,
    triton_experts,
    triton_prefill,
    triton_route,
    triton_sort,
    triton_threshold,
)
from dpamoe.kernels.layout import EncodedWeight

EXPERTS, ACTIVE, HIDDEN, INNER, GROUP, PLANES = 128, 8, 2048, 768, 128, 8
TYPES = {
    "x": "*bf16", "ids": "*i64", "chunks": "*i32", "gates": "*bf16", "planes": ("*u8",) * PLANES,
    "scales": ("*fp16",) * PLANES, "offset": "*fp16", "unit": "*fp16", "bias": "*fp16", "out": "*bf16",
    "spent": "*i64", "residuals": "*fp32", "table": "*fp32", "thresholds": "*fp32", "budget": "*fp32", "k_max": "*i32",
    "factor": "*fp32", "order": "*i32", "levels": "*i32", "places": "*i32",
    "tiles": "*i32", "counts": "*i32", "ready": "*fp16", "rows": "*bf16", "peaks": "*fp32", "up_scale": "*fp16",
    "up_offset": "*fp16", "up_unit": "*fp16", "down_scale": "*fp16", "down_offset": "*fp16", "down_unit": "*fp16",
}  # fmt: skip
MULTIPLES_OF_16 = ("x_token", "x_slot", "x_row")
ASKED = 4  # copies of two planes, each of which is one for a thread in both halves of the first product
FIXED = {"E": EXPERTS, "C": PLANES, "TIED": False, "BIAS": False, "GROUP": GROUP, "ASM": True}
UP = FIXED | {"OUT": 2 * INNER, "IN": HIDDEN, "GROUPS": HIDDEN // GROUP, "ACT": "silu_mul", "GATED": True}
DOWN = FIXED | {"OUT": HIDDEN, "IN": INNER, "GROUPS": INNER // GROUP}


def compile_for(card, kernel, constants, types=None, source=ASTSource, multiples=MULTIPLES_OF_16, counted=None, **options):
    """Shared memory and stack of one kernel, bytes, and its 1-bit products.

    multiples: numbers that are some of 16. counted: beginnings of instructions; how often they occur, and faults of the code.
    """
    types, signature, values, hints = TYPES | (types or {}), {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(position,)] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if isinstance(signature[name], tuple):
            hints |= {(position, i): [["tt.divisibility", 16]] for i in range(len(signature[name]))}
        elif signature[name].startswith("*") or name in multiples:
            hints[(position,)] = [["tt.divisibility", 16]]
    made = triton.compile(source(kernel, signature, values, hints), target=GPUTarget("cuda", card, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        listing = subprocess.run([tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True).stdout
    stack = sum(map(int, re.findall(r"STACK:(\d+)", listing)))
    facts = {"shared": made.metadata.shared, "spills": stack, "products": len(re.findall(r"\b[BI]MMA\b", listing))}
    facts["registers"] = max(map(int, re.findall(r"REG:(\d+)", listing)))
    facts["loads"] = len(re.findall(r"\bLDG\.", re.split(r"\bDEPBAR\.LE\b", listing)[0]))
    facts["ahead"] = len(re.findall(r"\bLDG\.E\s", "".join(re.split(r"\bLDGSTS\.", listing)[:ASKED])))
    facts["barriers"] = len(re.findall(r"\bBAR\.", "".join(re.split(r"\bBMMA\b", listing)[1:-1])))
    facts["halves"] = len(re.findall(r"\bLDG\.E\.U16\b", re.split(r"\bLDGSTS\.", listing)[0]))
    facts["unwaited"] = len(re.findall(r"\bLDGSTS\.", re.split(r"\bACQBULK\b", listing)[0]))
    facts["agreed"] = len(re.findall(r"ttg\.local_store %\w+, %\w+ : tensor<\d+xi32,", made.asm["ttgir"]))
    facts["anew"] = [len(re.findall(r"\bLDG\S*\.STRONG\.SYS\b", part)) for part in re.split(r"\bACQBULK\b", listing)]
    if counted is not None:
        facts |= {name: len(re.findall(rf"\s{name}[.\s]", listing)) for name in counted}
        facts["late"] = sum(map(loads_before_stores, re.split(r"\bHGMMA\b", listing)))
        facts["faults"] = faults_of(made.asm["ttgir"], listing)
    return facts


def loads_before_stores(code):
    """Loads before the last store of a piece of SASS, none where it has no store."""
    *before, _ = re.split(r"\bSTG\.", code)
    return len(re.findall(r"\bLDG\.", "".join(before)))


def decode(card, sources=("given", "rank", "threshold"), sums=("down", "down few")):
    """The two decode kernels; the first with every source of k, the second with many and with few tokens."""
    alone = {"A": ACTIVE, "BLOCK": 128, "ROWS": 8}
    up = UP | alone | {"UNITS": 16, "A_PAD": ACTIVE}
    rules = {
        "given": {"RULE": "given", "K_MIN": 0, "COLUMNS": 0, "COUNT": False},
        "rank": {"RULE": "rank", "K_MIN": 2, "COLUMNS": 0, "COUNT": True},
        "threshold": {"RULE": "threshold", "K_MIN": 0, "COLUMNS": PLANES, "COUNT": True},
    }
    down = DOWN | alone
    warps = {"down": 4, "down few": 8}
    return {
        f"up {rule}": compile_for(card, triton_decode.up_kernel, up | rules[rule], {"out": "*fp32"}, num_warps=4)
        for rule in sources
    } | {
        name: compile_for(
            card, triton_decode.down_kernel, down | {"UNITS": 4 * warps[name]}, {"x": "*fp32"}, num_warps=warps[name]
        )
        for name in sums
    }


def prefill(card):
    """Every tile of the prefill kernel, for one k and for several."""
    found = {}
    for _, tile in triton_experts.tiles_for(card):
        for mixed, pairs, part in ((False, tile.pairs, tile.part), (True, tile.mixed, tile.mixed)):
            cut = {
                "SOURCE": ACTIVE, "TARGET": False, "BM": tile.rows, "BN": pairs, "SUB": part, "MIXED": mixed,
                "NW": tile.warps,
            }  # fmt: skip
            name = f"prefill {pairs} of {part}, {'mixed' if mixed else 'uniform'}"
            if name not in found:
                found[name] = compile_for(
                    card, triton_prefill.prefill_kernel, UP | cut, {"x": "*fp16"}, num_warps=tile.warps, num_stages=tile.stages
                )
    return found


def scan(card, blocks, early):
    """Numbers of pairs before each of so many blocks."""
    cut = triton_experts.scan_cut(blocks, 8 * EXPERTS)
    warps = cut.pop("num_warps")
    return compile_for(card, triton_sort.scan_kernel, cut | early, num_warps=warps)


def sort(card, experts, early):
    """Pairs of so many experts in order, with every kind of tiles that the card takes."""
    keys = {"A": ACTIVE, "E": experts, "C": PLANES, "KEYS": 8 * experts, "B": triton_experts.SORT_BLOCK}
    scales = {"UP": 2 * INNER * HIDDEN // GROUP, "DOWN": HIDDEN * INNER // GROUP, "TIED": False}
    options = triton_experts.sort_options(8 * experts)
    tiles = {
        "sort": {"BN": 128, "MIXED": 64, "WIDTHS": (), "ONE": False},
        "slices": {"BN": 0, "MIXED": 0, "WIDTHS": (64,) * 4, "ONE": False},
        "one k": {"BN": 0, "MIXED": 0, "WIDTHS": (32, 16), "ONE": True},
        "widths": {"BN": 0, "MIXED": 0, "WIDTHS": (64, 32, 32, 16, 16, 16, 16), "ONE": False},
    }
    return {
        f"{name} {experts}": compile_for(card, triton_sort.sort_kernel, keys | scales | cut | early, **options)
        for name, cut in tiles.items()
        if card == 90 or not cut["WIDTHS"]  # slices are Hopper's
    }


def around(card):
    """Sorting, reordering and summing."""
    early = {"PDL": card >= 90}
    keys = {"A": ACTIVE, "E": EXPERTS, "C": PLANES, "KEYS": 8 * EXPERTS, "B": triton_experts.SORT_BLOCK}
    return {
        "count": compile_for(card, triton_sort.count_kernel, keys),
        **{f"scan {blocks}": scan(card, blocks, early) for blocks in (32, 256)},
        **{name: facts for experts in (EXPERTS, 4 * EXPERTS) for name, facts in sort(card, experts, early).items()},
        "prepare": compile_for(
            card, triton_sort.prepare_kernel,
            {"IN": HIDDEN, "STRETCHES": 16, "STRETCHES_PAD": 16},
        ),
        "spread": compile_for(
            card, hopper_rows.prepare_kernel, {"A": ACTIVE, "IN": HIDDEN, "PAD": HIDDEN, "W": 2, "ROWS": 1} | early,
            {"rows": "i32"},
        ),
        "hidden": compile_for(
            card, hopper_rows.prepare_kernel, {"A": 0, "IN": INNER, "PAD": 1024, "W": 2, "ROWS": 4} | early, {"rows": "i32"}
        ),
        "combine": compile_for(
            card, triton_sort.combine_kernel, {"A": ACTIVE, "E": EXPERTS, "WIDTH": HIDDEN, "B": 1024, "KINDS": 0, "PDL": False}
        ),
    }  # fmt: skip


def allocate(card):
    """Per token and per dispatch, by rank selection and by the exact programme; by thresholds."""
    types = {"expert_ids": "*i64", "gates": "*fp32", "parts": "*fp64", "numbers": "*fp64", "picks": "*i8"}
    limit = {"num_stages": 1}
    found = {}
    for convex in (True, False):
        absent = {"numbers": None, "picks": None} if convex else {}
        common = {"K_MIN": 2, "C": PLANES, "A": ACTIVE, "CONVEX": convex} | absent
        token = common | {"A_PAD": ACTIVE, "BLOCK": 32}
        dispatch = common | {"E_PAD": EXPERTS, "ROWS": 64, "BLOCK": 512} | ({"planes": None} if convex else {})
        planes = types | {"planes": "*i32"}
        found[f"token {convex}"] = compile_for(card, triton_allocate._allocate_kernel, token, types, num_warps=1, **limit)
        found[f"dispatch {convex}"] = compile_for(
            card, triton_allocate._dispatch_kernel, dispatch, planes, num_warps=8, maxnreg=255, **limit
        )
    cut = {"A": ACTIVE, "C": PLANES, "BLOCK": triton_threshold.BLOCK}
    found["threshold"] = compile_for(card, triton_threshold.threshold_kernel, cut, types, num_warps=4)
    found["counter"] = compile_for(card, triton_threshold.count_kernel, {"C": PLANES, "BLOCK": cut["BLOCK"]}, num_warps=4)
    return found


def route(card):
    """Routers of Qwen3, gpt-oss and DeepSeek-V3, and of as many experts as a kernel takes."""
    plain = {"GROUPS": 1, "KEPT": 1, "TWO": False, "G": 1, "PDL": card >= 90}
    rules = {
        "softmax": {"E": EXPERTS, "P": 128, "A": 8, "N": 8, "SCORE": "softmax", "NORM": "sum", "BIAS": False},
        "logits": {"E": 32, "P": 32, "A": 4, "N": 4, "SCORE": "logits", "NORM": "softmax", "BIAS": False},
        "sigmoid": {"E": 256, "P": 256, "A": 8, "N": 8, "SCORE": "sigmoid", "NORM": "sum", "BIAS": True},
        "most": {"E": 4096, "P": 4096, "A": 8, "N": 8, "SCORE": "sigmoid", "NORM": "none", "BIAS": True},
    }
    rules["sigmoid"] |= {"GROUPS": 8, "KEPT": 4, "TWO": True, "G": 8}
    types = {"logits": "*bf16", "bias": "*fp32", "ids": "*i64", "scale": "fp32"}
    linear = {"IN": HIDDEN, "BLOCK": HIDDEN, "SHIFT": False, "PDL": card >= 90}
    found = {
        f"route {name}": compile_for(
            card, triton_route.route_kernel, plain | rule, types, num_warps=1 if rule["P"] <= 512 else 4
        )
        for name, rule in rules.items()
    }  # fmt: skip
    weights = {"weight": "*bf16", "shift": "*bf16", "logits": "*bf16"}
    return found | {"route linear": compile_for(card, triton_route.linear_kernel, linear, weights, num_warps=4)}


def encode(card):
    """The fits of both scale modes, and the planes."""
    padded = triton.next_power_of_2(GROUP)
    width = min(padded, max(triton_encode.PART, padded // triton_encode.THREADS))
    parts = padded // width
    cut = {"GROUP": GROUP, "WIDTH": width, "PARTS": parts, "WHOLE": True, "BLOCK": max(1, triton_encode.THREADS // parts)}
    cut |= {"K": PLANES, "K_MIN": 2, "ITERATIONS": 8, "unit": None}
    tied = {"scales": ("*u8",), "offset": "*i8", "unit": "*fp32"}
    weight = {"weight": "*bf16", "beta": "fp32"}
    planes = {"GROUP": GROUP, "K": PLANES, "BLOCK": triton_encode.WRITE_BYTES, "unit": None}
    without = {name: value for name, value in cut.items() if name not in ("ITERATIONS", "unit")}
    return {
        "fit shared": compile_for(card, triton_encode.fit_shared, cut, weight, num_warps=4),
        "fit tied": compile_for(card, triton_encode_tied.fit_tied, without, weight | tied, num_warps=4),
        "write planes": compile_for(card, triton_encode.write_planes, planes, weight, num_warps=4),
    }


def hopper(card):
    """Every cut of the prefill kernel that only Hopper runs, for both products; some for one, two and four words of a lane."""
    found = {}
    if card != 90:
        return found
    from dpamoe.kernels import hopper_experts

    up, down = UP | {"TARGET": False}, DOWN | {"TARGET": True, "ACT": "", "GATED": False}
    narrow = down | {"IN": 2 * GROUP, "GROUPS": 2}  # a single stretch, after which there is nothing more to ask for
    half = up | {"GROUP": GROUP // 2, "GROUPS": 2 * HIDDEN // GROUP}
    quarter = up | {"GROUP": GROUP // 4, "GROUPS": 4 * HIDDEN // GROUP}
    wide = {"TIED": True, "IN": 4 * INNER, "GROUPS": 4 * INNER // GROUP}
    kinds = {
        "up": up,
        "down": down,
        "narrow": narrow,
        "half": half,
        "quarter": quarter,
        "tied up": up | wide,
        "tied down": down | wide,
    }
    for name, sizes in kinds.items():
        for one_k in (False, True):
            weight = weight_of(sizes)
            cuts = hopper_experts.CUTS_OF_ONE_K if one_k else hopper_experts.CUTS
            limits = sorted({min(most, 1 << 10) for most, _ in cuts})
            for pairs in limits if name in ("up", "down") else limits[::-2]:
                cut = hopper_experts.cut_for(pairs, 1, one_k, weight)
                title = f"hopper {name} {cut.widths} by {cut.groups}{', one k' if one_k else ''}"
                if title not in found:
                    found[title] = hopper_kernel(card, sizes, cut, one_k, weight, ("HGMMA", "WARPGROUP.DEPBAR"))
                    stages = hopper_experts.stages_of(cut, weight)
                    found[title]["most"] = hopper_experts.shared_memory(cut, weight, stages=stages)
    return found


def some_hopper(card, cases):
    """Products of so many pairs per expert, of several k or of one; with the instructions they are made of."""
    from dpamoe.kernels import hopper_experts

    found = {}
    for pairs, one_k in cases:
        for second, sizes in enumerate((UP | {"TARGET": False}, DOWN | {"TARGET": True, "ACT": "", "GATED": False})):
            weight = weight_of(sizes)
            cut = hopper_experts.cut_for(pairs, 1, one_k, weight)
            counted = ("HGMMA", "UTMALDG", "LDGSTS")  # products of a warp group, copies of rows, copies of planes and scales
            facts = hopper_kernel(card, sizes, cut, one_k, weight, counted)
            found[f"{pairs}, one k {one_k}, second {bool(second)}"] = facts | {"cut": vars(cut)}
    return found


def weight_of(sizes):
    """An encoded weight of these sizes without numbers."""
    shape, tied = (EXPERTS, sizes["OUT"], sizes["GROUPS"]), sizes["TIED"]
    planes = [torch.empty(*shape[:2], sizes["IN"] // 8, dtype=torch.uint8, device="meta")] * PLANES
    scales = [torch.empty(shape, dtype=torch.uint8 if tied else torch.float16, device="meta")] * (1 if tied else PLANES)
    offset = torch.empty(shape, dtype=torch.int8 if tied else torch.float16, device="meta")
    unit = torch.empty(EXPERTS, device="meta") if tied else None
    return EncodedWeight(planes, scales, offset, unit, sizes["IN"], sizes["GROUP"])


def hopper_kernel(card, sizes, cut, one_k, weight, counted=()):
    """The prefill kernel for Hopper, cut so, for a weight of these sizes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from dpamoe.kernels import hopper_experts, hopper_prefill

    constants = {key: value for key, value in sizes.items() if key not in ("E", "ASM")}
    constants |= hopper_experts.constants_of(cut, one_k, weight)
    types = {
        f"{name}{i}": f"tensordesc<fp16[{rows}, {width}],{gl.NVMMASharedLayout(2 * min(width, 64), 16, 2)!r}>"
        for name, width in (("x", hopper_experts.BLOCK), ("sums", 16))
        for i, rows in enumerate(cut.kinds)
    } | {"rows": "i32"}
    if sizes["TIED"]:
        types |= {"scales": ("*u8",), "offset": "*i8", "unit": "*fp32"}
    kernel = hopper_prefill.hopper_prefill_kernel
    return compile_for(card, kernel, constants, types, GluonASTSource, counted=counted, num_warps=hopper_experts.WARPS)


class Compiled:
    """Stands in for a kernel that is launched: compiles it for a card as that launch would."""

    def __init__(self, kernel, card, found, path):
        self.kernel, self.card, self.found, self.path = kernel, card, found, path

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        source = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        given = dict(zip(self.kernel.arg_names, arguments, strict=False))
        given |= {name: options.pop(name) for name in self.kernel.arg_names if name in options}
        fixed = [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]
        constants = {name: value for name, value in given.items() if name in fixed or (isinstance(value, int) and value == 1)}
        types = {name: type_of(value) for name, value in given.items() if name not in constants}
        multiples = [name for name, value in given.items() if isinstance(value, int) and value % 16 == 0]
        options = {name: value for name, value in options.items() if value is not None}
        name = " ".join([self.path, self.kernel.__name__, *(f"{key}={constants[key]}" for key in NAMED if key in constants)])
        if name not in self.found:
            self.found[name] = compile_for(self.card, self.kernel, constants, types, source, multiples, **options)


def type_of(value):
    """What the compiler calls a tensor, several, or a number."""
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    return f"*{POINTED[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"


POINTED = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
           torch.uint8: "u8", torch.int8: "i8"}  # fmt: skip
NAMED = ("RULE", "K_MIN", "FOUND", "AHEAD", "P", "OUT", "CUT", "KINDS")  # what tells launches of a kernel apart
SHARED = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228}  # KiB of a multiprocessor; a program takes one less


def bits(card, batches=(1, 2, 5, 24), tied=False):
    """The bit-serial kernels as they are launched for so many tokens, on the cards that have such products."""
    if (card // 10, card % 10) not in paths.BIT_CARDS:
        return {}
    from dpamoe.kernels import bitserial_experts

    found, room = {}, SHARED[card] * 1024
    facts = SimpleNamespace(
        shared_memory_per_multiprocessor=room, shared_memory_per_block_optin=room - 1024, multi_processor_count=132
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda device: facts))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda device: divmod(card, 10)))
        for name in ("up_kernel", "down_kernel", "order_kernel", "cut_kernel", "group_kernel", "combine_kernel"):
            stand_in = Compiled(getattr(bitserial_experts, name), card, found, "tied" if tied else "bits")
            stack.enter_context(mock.patch.object(bitserial_experts, name, stand_in))
        for tokens in batches:
            launch_bits(bitserial_experts.ffn, tokens, tied)
    return found


def empty_weight(rows, width, tied):
    """An encoded weight that holds nothing; with tied scales in groups of 32."""
    empty, group = partial(torch.empty, device="meta"), 32 if tied else GROUP
    planes = [empty(EXPERTS, rows, width // 8, dtype=torch.uint8) for _ in range(PLANES)]
    sizes = EXPERTS, rows, width // group
    if tied:
        codes, unit = empty(sizes, dtype=torch.uint8), empty(EXPERTS, dtype=torch.float32)
        return EncodedWeight(planes, [codes], empty(sizes, dtype=torch.int8), unit, width, group)
    scales = [empty(sizes, dtype=torch.float16) for _ in range(PLANES)]
    return EncodedWeight(planes, scales, empty(sizes, dtype=torch.float16), None, width, group)


def launch_bits(ffn, tokens, tied):
    """One call with each source of k, on tensors that hold nothing."""
    empty = partial(torch.empty, device="meta")
    sizes = (tokens, ACTIVE)
    gates, chunks, k_max = empty(sizes, dtype=torch.bfloat16), empty(sizes, dtype=torch.int32), empty((), dtype=torch.int32)
    up, down = empty_weight(2 * INNER, HIDDEN, tied), empty_weight(HIDDEN, INNER, tied)
    spent = empty(PLANES + 1, dtype=torch.int64)
    sources = (
        None,
        allocation.Allocation(gates, empty(EXPERTS, PLANES + 1), empty(()), k_max, 2, spent),
        allocation.Thresholds(gates, empty(EXPERTS, PLANES), k_max, spent, 2),
        allocation.Thresholds(gates, empty(EXPERTS, PLANES), k_max, spent),
    )
    for source in sources:
        ids = empty(sizes, dtype=torch.int64)
        ffn(empty(tokens, HIDDEN, dtype=torch.bfloat16), ids, gates, chunks, up, None, down, None, "silu_mul", source)


SETS = {
    "decode": decode, "prefill": prefill, "around": around, "allocate": allocate, "encode": encode, "hopper": hopper,
    "bits": bits, "tied": partial(bits, tied=True), "route": route,
}  # fmt: skip
PARTS = SETS | {
    "some decode": partial(decode, sources=("rank",), sums=("down few",)),
    "some hopper": partial(some_hopper, cases=((128, False), (32, False))),
    "one k hopper": partial(some_hopper, cases=((64, True), (256, True))),
    "few bits": partial(bits, batches=(1, 2)),
}

if __name__ == "__main__":
    card, chosen = int(sys.argv[1]), sys.argv[2]
    names = SETS if chosen == "all" else [chosen]
    print(json.dumps({name: facts for part in names for name, facts in PARTS[part](card).items()}))
