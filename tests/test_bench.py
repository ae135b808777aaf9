"""The benchmarks on tiny configs: what a row says, bytes by hand, baselines that compute the same, one model at a time."""

import gc
import json
import signal
import weakref
from pathlib import Path

import pytest
import torch

from dpamoe import bench, bench_model, measure, synthetic
from dpamoe.cli.main import main
from dpamoe.files import write_json
from dpamoe.spec import EncodeSpec, SpendSpec

ROOT = Path(__file__).resolve().parents[1]

CPU = torch.device("cpu")
SPEC = EncodeSpec(group_size=32)
ROW = [
    "tokens", "budget", "allocation", "scope", "path", "us", "mean_planes", "bytes_read", "gb_per_s", "copy_share",
    "baseline_us", "speedup",
]  # fmt: skip
MODEL_ROW = [
    "model", "budget", "tokens_per_second", "ms_per_token", "ttft_ms", "weight_bytes", "memory_bytes", "peak_bytes",
]  # fmt: skip
# One expert of hidden 64, inner 32: up 64 x 64, down 64 x 32. A plane: 512 + 256 bytes of bits, fp16 scales of 64 * 2 and
# 64 * 1 groups of 32; offsets once.
PLANE, FIXED = 512 + 256 + 2 * (128 + 64), 2 * (128 + 64)
# Tied: one byte of scale and one of offset for each group whatever k is, and two fp32 units.
TIED_PLANE, TIED_FIXED = 512 + 256, 2 * (128 + 64) + 8


@pytest.fixture
def folder(random_model, tmp_path):
    """Function that saves the config of a small random model and gives its folder."""

    def make(family="qwen3_moe", **changes):
        random_model(family, changes).config.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return make


@pytest.fixture
def run(capsys):
    """Function that runs `dpamoe bench --json` on the CPU and gives its object."""

    def call(*arguments):
        code = main(["bench", *map(str, arguments), "--group-size", "32", "--device", "cpu", "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return call


def site_of(source, changes=None):
    model, sites = synthetic.with_sites(synthetic.read_config(source, changes), SPEC)
    return model, sites[0]


@pytest.mark.parametrize("mode, plane, fixed", [("shared", PLANE, FIXED), ("tied", TIED_PLANE, TIED_FIXED)])
def test_bytes_read_by_hand(folder, mode, plane, fixed):
    """The longest prefix of each distinct expert once; padding ids and pairs of no planes read nothing."""
    _, site = site_of(folder())
    layer = synthetic.encoded_layer(site, EncodeSpec(group_size=32, scale_mode=mode), CPU)
    index = torch.tensor([[0, 1], [1, 5], [0, 8], [3, -1]])
    chunks = torch.tensor([[2, 7], [4, 3], [6, 8], [0, 5]], dtype=torch.int32)
    assert bench.bytes_read(layer, index, chunks) == (6 + 7 + 3) * plane + 3 * fixed
    assert bench.bytes_read(layer, index[:0], chunks[:0]) == 0


@pytest.mark.parametrize("mode, plane, fixed", [("shared", PLANE, FIXED), ("tied", TIED_PLANE, TIED_FIXED)])
def test_rows_of_a_layer(folder, run, mode, plane, fixed):
    """All 8 experts are active, so at whole budgets every allocation but planes by token reads what can be counted by hand."""
    outcome = run(
        folder(), "--set", "num_experts_per_tok=8", "--tokens", "1,5", "--budget", "8,3", "--scale-mode", mode
    )  # fmt: skip
    assert (outcome["mode"], outcome["device"], outcome["times"]) == ("layer", "CPU", "CPU wall clock, not a benchmark")
    assert outcome["versions"]["torch"] == torch.__version__ and outcome["copy_gb_per_s"] > 0
    (shape,) = outcome["shapes"]
    assert outcome["complete"] is True and list(shape["baseline_us"]) == ["1", "5"]
    assert (shape["shape"], shape["layers"]) == (f"E8 A8 H64 I32 g32 gated {mode}", 2)
    rows = shape["rows"]
    assert all(list(row) == ROW and row["path"] == "torch" for row in rows)
    assert [(row["tokens"], row["budget"], row["allocation"], row["scope"]) for row in rows] == [
        (tokens, budget, *spend) for tokens in (1, 5) for spend in bench.SPENDS for budget in (8.0, 3.0)
    ]
    for row in rows:
        if row["allocation"] == "threshold-skip" and row["budget"] == 3:  # on average, and what is skipped is not read
            assert row["mean_planes"] == pytest.approx(3, abs=1.0) and row["bytes_read"] > 0
            continue
        assert row["mean_planes"] == row["budget"]
        counted = 8 * (row["budget"] * plane + fixed)
        longer = (row["allocation"], row["scope"], row["budget"], row["tokens"]) == ("dpa", "token", 3, 5)
        assert row["bytes_read"] > counted if longer else row["bytes_read"] == counted
        assert row["us"] > 0 and row["gb_per_s"] == pytest.approx(row["bytes_read"] / row["us"] / 1e3)
        assert row["copy_share"] == pytest.approx(row["gb_per_s"] / outcome["copy_gb_per_s"])
        assert list(row["baseline_us"]) == list(row["speedup"]) == ["grouped_mm", "batched_mm", "bare_grouped_mm"]
        assert all(us > 0 and row["speedup"][name] == us / row["us"] for name, us in row["baseline_us"].items())


def test_baselines_that_are_not_asked_for_or_do_not_fit(folder, run, monkeypatch):
    rows = run(folder(), "--tokens", 1, "--baselines", "none")["shapes"][0]["rows"]
    assert all(row["baseline_us"] == row["speedup"] == {} for row in rows)
    # 2 of 8 experts of 6144 weights in bf16 for each of 3 tokens: 73,728 bytes, more than half of what is free
    monkeypatch.setattr(measure, "free_bytes", lambda device: 140_000)
    *_, outcome = bench.bench_layers(folder(), CPU, SPEC, [4.0], [1, 3])
    one, three = (next(r for r in outcome["shapes"][0]["rows"] if r["tokens"] == tokens) for tokens in (1, 3))
    assert one["baseline_us"]["batched_mm"] > 0 and three["baseline_us"]["batched_mm"] is None is three["speedup"]["batched_mm"]
    assert three["baseline_us"]["grouped_mm"] > 0
    lines = bench.table(outcome).splitlines()
    assert lines[0].startswith("CPU; torch") and sum("–" in line for line in lines) == 4


def test_the_routing_and_planes_that_are_reported_are_those_computed(folder):
    _, site = site_of(folder())
    layers = [synthetic.encoded_layer(site, SPEC, CPU, seed) for seed in range(2)]
    row = next(bench._encoded_rows(layers, [3.5], [6], 1e9, CPU))
    inputs = [synthetic.routing(site, 6, CPU, seed) for seed in range(2)]
    read = []
    for layer, given in zip(layers, inputs, strict=True):
        layer.set_spend(SpendSpec(3.5))
        chunks = layer.allocate(*given[1:])
        longest = {e: int(chunks[given[1] == e].max()) for e in given[1].unique().tolist()}
        read.append(sum(k * PLANE + FIXED for k in longest.values()))
    assert (row["allocation"], row["scope"]) == ("dpa", "token") and row["bytes_read"] == round(sum(read) / 2)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_baselines_compute_the_same_experts(folder, family):
    model, site = site_of(folder(family))
    hidden, index, weights = synthetic.routing(site, 7, CPU)
    one, other = (synthetic.plain_layer(model, site, CPU, name, seed=3) for name in bench.BASELINES)
    wanted = one(hidden, index, weights)
    torch.testing.assert_close(other(hidden, index, weights), wanted, rtol=2e-2, atol=1e-4)
    if not site.layout.up_biases:
        sorted_rows = bench.bare_grouped_mm(one, site, hidden, index)()
        rows = torch.empty_like(sorted_rows)
        rows[index.flatten().sort().indices] = sorted_rows
        summed = (rows.view(7, 2, -1) * weights[..., None]).sum(1)
        torch.testing.assert_close(summed, wanted, rtol=2e-2, atol=1e-4)


def test_experts_that_transformers_computes_in_one_way_only(folder):
    model, site = site_of(folder())
    model.set_submodule(site.path, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="in one way only: leave grouped_mm out"):
        synthetic.plain_layer(model, site, CPU, "grouped_mm")


def test_whole_models(folder, run):
    flags = ("--mode", "model", "--prompts", "8,16", "--new-tokens", 3, "--budget", "4,2.5")
    outcome = run(folder(), *flags, "--baselines", "grouped_mm,batched_mm")
    assert (outcome["mode"], outcome["sites"], outcome["context"], outcome["new_tokens"]) == ("model", 2, 8, 3)
    assert (
        outcome["complete"] is True and outcome["compiled"] is False and outcome["times"] == "CPU wall clock, not a benchmark"
    )
    rows = outcome["rows"]
    assert [(row["model"], row["budget"]) for row in rows] == [
        ("dpamoe", 2.5), ("dpamoe", 4.0), ("grouped_mm", None), ("batched_mm", None),
    ]  # fmt: skip
    assert all(list(row)[: len(MODEL_ROW)] == MODEL_ROW for row in rows)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["ms_per_token"]) and row["memory_bytes"] is None
        assert list(row["ttft_ms"]) == ["8", "16"] and all(ms > 0 for ms in row["ttft_ms"].values())
    assert list(rows[0]["speedup"]) == ["grouped_mm", "batched_mm"] and "speedup" not in rows[2]
    # bf16 experts: 2 layers x 8 experts x 6144 weights; encoded: planes, offsets, and tables, four numbers and counters beside
    plain, encoded = rows[2]["weight_bytes"] - 2 * 8 * 6144 * 2, rows[0]["weight_bytes"] - 2 * 8 * (8 * PLANE + FIXED)
    assert encoded - plain == 2 * (8 * 9 * 4 + 8 * 8 * 4 + 4 * 4 + 9 * 8 + 8)


@pytest.mark.slow
def test_a_whole_model_at_a_time_in_either_order(folder, monkeypatch):
    alive = weakref.WeakSet()

    def watched(build):
        def make(*args):
            gc.collect()
            assert not alive, "the model before is still there"
            model = build(*args)
            alive.add(model)
            return model

        return make

    for name in ("encoded_model", "plain_model"):
        monkeypatch.setattr(synthetic, name, watched(getattr(synthetic, name)))
    source = folder()
    for first, order in ((False, ["dpamoe", "grouped_mm"]), (True, ["grouped_mm", "dpamoe"])):
        *_, outcome = bench_model.bench_model(source, CPU, SPEC, [4.0], [4], 2, baselines_first=first)
        assert [row["model"] for row in outcome["rows"]] == order
        assert "× grouped_mm" in bench_model.table(outcome)


LAYER = ("--tokens", "1,3", "--baselines", "grouped_mm")
MODEL = ("--mode", "model", "--prompts", "4", "--new-tokens", "2", "--budget", "2.5,4", "--baselines", "grouped_mm")


def call(source, *arguments):
    return main(["bench", source, "--group-size", "32", "--device", "cpu", *map(str, arguments)])


def rows_of(outcome):
    return outcome["rows"] if outcome["mode"] == "model" else [row for shape in outcome["shapes"] for row in shape["rows"]]


@pytest.mark.parametrize("flags, rows, others", [(LAYER, 8, 2), (MODEL, 3, 0)])
def test_every_row_is_kept_and_shown_as_soon_as_it_is_measured(folder, tmp_path, monkeypatch, capsys, flags, rows, others):
    """After each write: how many rows the file holds, and how many lines of them were printed before it."""
    file, printed, seen, outcomes = tmp_path / "bench.json", [], [], []

    def write(place, outcome):
        write_json(place, outcome)
        outcomes.append(outcome)
        kept = json.loads(place.read_text(encoding="utf-8"))
        printed.append(capsys.readouterr().out)
        seen.append((len(rows_of(kept)), kept["complete"], len(table_rows("".join(printed)))))

    monkeypatch.setattr("dpamoe.cli.bench.write_json", write)
    assert call(folder(), *flags, "--output", file) == 0
    assert seen == [
        *[(0, False, 0)] * others, *[(count, False, count - 1) for count in range(1, rows + 1)], (rows, True, rows)
    ]  # fmt: skip
    whole = (bench_model if "model" in flags else bench).table(outcomes[-1])
    assert "".join(printed) + capsys.readouterr().out == f"{whole}\n"
    assert [path.name for path in tmp_path.glob("*.json*")] == ["bench.json"]


def table_rows(text):
    """Lines of the first table."""
    return text.partition("-\n")[2].splitlines()


def test_the_object_in_the_file_is_the_one_printed(folder, run, tmp_path):
    file = tmp_path / "bench.json"
    for flags in (LAYER, MODEL):
        assert run(folder(), *flags, "--output", file) == json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("flags", [LAYER, MODEL], ids=["layer", "model"])
@pytest.mark.parametrize("end, code, words", [
    (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted; what was finished is kept"),
    (lambda: signal.raise_signal(signal.SIGTERM), 130, "interrupted; what was finished is kept"),
    (lambda: torch.empty(1 << 60), 1, "error: RuntimeError: "),
], ids=["ctrl-c", "sigterm", "error"])  # fmt: skip
def test_what_was_measured_stays_whatever_ends_the_run(
    folder, tmp_path, monkeypatch, capsys, ctrl_c, flags, end, code, words
):  # fmt: skip
    """The second of our rows does not come to its end; a file from before is replaced by what this run measured."""
    file, calls = tmp_path / "bench.json", []
    file.write_text("{}")

    def second_ends(measured):
        def measure(*args):
            calls.append(1)
            if len(calls) == 2:
                assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # else the signal would end the tests
                end()
            return measured(*args)

        return measure

    monkeypatch.setattr(bench, "_timed", second_ends(bench._timed))
    timer = bench_model.Timer
    monkeypatch.setattr(timer, "tokens_per_second", second_ends(timer.tokens_per_second))
    assert call(folder(), *flags, "--output", file) == code
    out, err = capsys.readouterr()
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept["complete"] is False and len(rows_of(kept)) == len(table_rows(out)) == 1 and words in err
    assert [path.name for path in tmp_path.glob("*.json*")] == ["bench.json"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--prompts", "8", "--baselines-first"), "--prompts, --baselines-first says nothing in --mode layer"),
        (("--mode", "model", "--tokens", "8"), "--tokens says nothing in --mode model: leave it out, or ask for --mode layer"),
    ],
)
def test_flags_of_the_other_mode_are_refused(folder, capsys, monkeypatch, flags, words):
    monkeypatch.setattr(synthetic, "read_config", None)
    assert call(folder(), *flags) == 1
    assert words in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(synthetic, "read_config", None)
    for file, words in ((tmp_path / "no" / "a.json", "which should hold a.json, does not exist"), (tmp_path, "is a folder")):
        assert call(folder(), "--output", file) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_timed_steps_are_those_of_generate(folder, family):
    config = synthetic.read_config(folder(family))
    _, sites = synthetic.with_sites(config, SPEC)
    model = synthetic.encoded_model(config, sites, SPEC, CPU).float()
    timer = bench_model.Timer(model, model.forward, CPU)
    ids = torch.randint(timer.vocabulary, (1, 6), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 6:].tolist()
        for _ in range(2):  # again from the same cache
            token, position = timer.prefill(timer.prompt(6), 16), torch.full((1, 1), 6)
            found = [int(token)]
            for _ in range(4):
                timer.decode(token, position, timer.caches[16], 1)
                found.append(int(token))
            assert found == wanted and int(position) == 10


gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@gpu
@needs_cuda
def test_a_layer_on_a_gpu(folder, capsys):
    flags = ["--group-size", "32", "--tokens", "1,16", "--budget", "4", "--json"]
    assert main(["bench", folder(), "--set", "hidden_size=256", "--set", "moe_intermediate_size=128", *flags]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["device"] == torch.cuda.get_device_name() and outcome["times"] == "CUDA graph replay, median"
    rows = outcome["shapes"][0]["rows"]
    assert len(rows) == 8 and all(row["us"] > 0 and row["path"] in ("decode", "bits", "prefill") for row in rows)


@gpu
@needs_cuda
def test_a_whole_model_on_a_gpu(folder, capsys):
    flags = ["--mode", "model", "--group-size", "32", "--prompts", "16", "--new-tokens", "8", "--json"]
    assert main(["bench", folder(), "--set", "hidden_size=256", "--set", "moe_intermediate_size=128", *flags]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["compiled"] is True and all(row["memory_bytes"] >= row["weight_bytes"] for row in outcome["rows"])


def measured_rows(name):
    """What a row of a table in the README must hold for each number of tokens of a result at k = 4."""
    measured = {}
    result = json.loads((ROOT / f"tests/benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    for row in result["shapes"][0]["rows"]:
        if row["budget"] == 4:
            own = measured.setdefault(row["tokens"], dict(row["baseline_us"]))
            own[row["allocation"], row["scope"]] = row["us"]
    ways = [("dpa", "token"), ("dpa", "dispatch"), ("threshold-skip", "token"), ("uniform", "token")]
    columns = [*ways, "grouped_mm", "bare_grouped_mm"]
    return [f"| {tokens} | " + " | ".join(f"{own[c]:.0f}" for c in columns) + " |" for tokens, own in measured.items()]


def test_the_tables_of_the_readme_are_the_measured_ones():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shapes = {"h200_olmoe": "64 experts of 2048 by 2048, 8 active", "h200_gpt_oss": "128 experts of 2880 by 2880, 4 active"}
    others = [f"| {shape} {row}" for name, shape in shapes.items() for row in measured_rows(name)]
    for table, expected, count in (("h200", measured_rows("h200_layer"), 8), ("h200 shapes", others, 9)):
        lines = readme.split(f"<!-- table: {table} -->")[1].strip().splitlines()
        assert lines[2 : 2 + len(expected)] == expected and len(expected) == count
