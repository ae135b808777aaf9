"""Tuning: crossovers from made-up times, the stored file, what follows for calls, and the command."""

import json

import pytest
import torch

from dpamoe import measure, synthetic, tune
from dpamoe.cli.main import main
from dpamoe.kernels import paths
from dpamoe.modules import EncodedExperts, layer_shape
from dpamoe.spec import EncodeSpec, SpendSpec

CPU = torch.device("cpu")
SPEC = EncodeSpec(group_size=32)
KEY = "E8 A2 H64 I32 g32 gated shared"
TOKENS = [1, 4, 16, 64]


@pytest.fixture
def folder(random_model, tmp_path):
    random_model("qwen3_moe").config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def made_up(monkeypatch):
    """Times by path and planes: decode by pairs, prefill flat; planes by token cost 8 % more from 16 tokens on."""

    def microseconds(calls, device):
        chunks = calls[0].args[-1]
        uniform = len(chunks.unique()) == 1
        path = paths.choose(None, 0, device)  # what is forced
        slower = 1.08 if chunks.shape[0] >= 16 and not uniform else 1.0
        return slower * (float(chunks.numel()) if path == "decode" else 20.0)

    monkeypatch.setattr(measure, "microseconds", microseconds)


def test_costs_are_stored_and_followed(folder, store_costs, made_up):
    outcome = tune.tune(folder, CPU, SPEC, 4.0, TOKENS)
    (shape,) = outcome["shapes"]
    assert (shape["shape"], shape["path"], shape["layers"]) == (KEY, "model.layers.0.mlp.experts", 2)
    assert (shape["prefill_from"], shape["uniform_from"]) == (16, 16)
    assert [row["chosen"] for row in shape["rows"]] == ["decode", "decode", "prefill", "prefill"]
    first, *_, last = shape["rows"]
    assert list(first) == ["tokens", "decode_us", "prefill_us", "chosen", "uniform_us", "dpa_over_uniform"]
    assert first["decode_us"] == 2 and first["prefill_us"] == 20 and first["dpa_over_uniform"] == 1
    assert last["uniform_us"] == 20 and last["dpa_over_uniform"] == pytest.approx(1.08)
    costs = paths.load_costs("cpu")[KEY]
    assert costs.microseconds[64] == pytest.approx({"decode": 138.24, "prefill": 21.6}) and costs.budget == 4.0
    assert (costs.torch, costs.uniform_from) == (torch.__version__, 16)
    shape = paths.Shape(8, 2, 64, 32, 32, True, "shared")
    assert [paths.choose(shape, tokens, CPU) for tokens in (15, 16)] == ["decode", "prefill"]
    assert json.loads(paths.cost_file("cpu").read_text())["shapes"].keys() == {KEY}
    assert outcome["file"] == str(paths.cost_file("cpu"))


@pytest.mark.parametrize("dpa, start", [(10.4, None), (10.6, 8)])
def test_uniform_pays_where_planes_by_token_cost_a_twentieth_more(dpa, start):
    timing = tune.Timing(8, {"decode": 20.0, "prefill": dpa}, {"decode": 10.0, "prefill": 15.0})
    assert tune.costs_of([timing], 4.0).uniform_from == start


def test_a_table_with_1_bit_products(folder, store_costs, monkeypatch):
    """Times by pairs: bits cost most for one token and least up to 16; the file and the table have all three."""
    spec = EncodeSpec(group_size=128)
    cost = {"decode": 2.0, "bits": 1.0, "prefill": 0.0}

    def microseconds(calls, device):
        path = paths.choose(None, 0, device, True)
        return cost[path] * calls[0].args[-1].numel() + {"decode": 1, "bits": 5, "prefill": 65}[path]

    monkeypatch.setattr(measure, "microseconds", microseconds)
    monkeypatch.setattr(paths, "has_bits", lambda device: True)
    outcome = tune.tune(folder, CPU, spec, 4.0, TOKENS, {"moe_intermediate_size": 128, "hidden_size": 128})
    (shape,) = outcome["shapes"]
    first, *_ = shape["rows"]
    assert list(first) == ["tokens", "decode_us", "bits_us", "prefill_us", "chosen", "uniform_us", "dpa_over_uniform"]
    assert [row["chosen"] for row in shape["rows"]] == ["decode", "bits", "bits", "prefill"]
    assert [row["bits_us"] for row in shape["rows"]] == [7, 13, 37, 133] and shape["prefill_from"] == 64
    assert [row["uniform_us"] for row in shape["rows"]] == [5, 13, 37, 65]
    assert paths.load_costs("cpu")[shape["shape"]].microseconds[4] == {"decode": 17, "bits": 13, "prefill": 65}
    lines = tune.table(outcome).splitlines()
    assert any("decode µs" in line and "bits µs" in line and "prefill µs" in line for line in lines)
    rows = [line.split() for line in lines if line.split()[0] in map(str, TOKENS)]
    assert [row[:5] for row in rows[1::2]] == [
        ["4", "17.0", "13.0", "65.0", "bits"],
        ["64", "257.0", "133.0", "65.0", "prefill"],
    ]


def test_uniform_is_measured_but_never_spent_unasked(folder, store_costs, made_up):
    tune.tune(folder, CPU, SPEC, 4.0, TOKENS)
    _, (site, *_) = synthetic.with_sites(synthetic.read_config(folder), SPEC)
    layer = synthetic.encoded_layer(site, SPEC, CPU)
    _, index, weights = synthetic.routing(site, 64, CPU)
    layer.set_spend(SpendSpec(4.0))
    assert len(layer.allocate(index, weights).unique()) > 1
    layer.set_spend(SpendSpec(4.0, fallback="uniform"))
    assert layer.uniform_from == 16 and (layer.allocate(index, weights) == 4).all()


def test_where_uniform_never_pays(folder, store_costs, monkeypatch):
    monkeypatch.setattr(measure, "microseconds", lambda calls, device: 5.0)
    outcome = tune.tune(folder, CPU, SPEC, 4.0, [1, 4])
    assert outcome["shapes"][0]["uniform_from"] is None and outcome["shapes"][0]["prefill_from"] is None
    words = tune.table(outcome)
    assert "Uniform-k does not pay" in words and "prefill is slower at every measured batch" in words


def test_measuring_for_real(folder, store_costs):
    outcome = tune.tune(folder, CPU, SPEC, 2.5, [1, 3], {"num_hidden_layers": 1})
    (shape,) = outcome["shapes"]
    assert all(row[name] > 0 for row in shape["rows"] for name in ("decode_us", "prefill_us", "uniform_us"))
    assert outcome["times"] == "CPU wall clock, not a benchmark" and json.dumps(outcome, allow_nan=False)
    assert KEY in tune.table(outcome) and str(outcome["file"]) in tune.table(outcome)


def test_both_paths_get_the_same_planes_at_the_budget(folder, store_costs, monkeypatch):
    seen, spends = [], []

    def microseconds(calls, device):
        seen.append((paths.choose(None, 0, device), [call.args[-1] for call in calls]))
        spends.append({call.func.__self__.spend.allocation for call in calls})
        return 1.0

    monkeypatch.setattr(measure, "microseconds", microseconds)
    _, (site, *_) = synthetic.with_sites(synthetic.read_config(folder), SPEC)
    tune.time_layers(tune.build_layers(site, SPEC, CPU), 12, 3.5, CPU)
    assert [path for path, _ in seen] == ["decode", "prefill"] * 2
    assert spends == [{"dpa"}] * 2 + [{"uniform"}] * 2  # as layers tell the kernels
    for (_, one), (_, other) in (seen[:2], seen[2:]):
        assert all(torch.equal(a, b) and (a.sum(1) == 7).all() for a, b in zip(one, other, strict=True))
    assert not torch.equal(seen[0][1][0], seen[2][1][0]) and not torch.equal(seen[0][1][0], seen[0][1][1])


def test_a_path_that_computes_something_else_is_left_out(folder, store_costs, made_up, monkeypatch):
    """Off by 3 %, or no number at all; the first path stands for itself."""
    compute = EncodedExperts.compute
    for factor in (1.03, float("nan")):
        wrong = lambda self, *given, by=factor: compute(self, *given) * (by if paths.choose(None, 0, CPU) == "prefill" else 1)  # noqa: E731
        monkeypatch.setattr(EncodedExperts, "compute", wrong)
        with pytest.warns(UserWarning, match="path prefill is .* of the norm from decode at 64 tokens, more than 0.02"):
            outcome = tune.tune(folder, CPU, SPEC, 4.0, TOKENS)
        assert paths.load_costs("cpu")[KEY].microseconds[64].keys() == {"decode"}
        assert outcome["shapes"][0]["prefill_from"] is None and KEY in tune.table(outcome)


def test_nothing_is_measured_that_cannot_be_saved(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tune, "build_layers", None)
    with pytest.raises(ValueError, match="cannot be saved.*file.*XDG_CACHE_HOME"):
        tune.tune(folder, CPU, SPEC, tokens=[1])


def test_a_budget_out_of_range(folder, store_costs):
    with pytest.raises(ValueError, match="budget is 9"):
        tune.tune(folder, CPU, SPEC, 9.0, [1])


def test_the_command_without_a_gpu(folder, capsys):
    assert main(["tune", folder, "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert (
        err.startswith("dpamoe tune: error: ")
        and "dpamoe tune measures GPU kernels, on a CPU there is nothing to choose" in err
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_command_on_a_gpu(folder, store_costs, capsys):
    assert main(["tune", folder, "--group-size", "32", "--tokens", "1,8,64", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    (shape,) = outcome["shapes"]
    assert outcome["device"] == torch.cuda.get_device_name() and [row["tokens"] for row in shape["rows"]] == [1, 8, 64]
    assert all(row["decode_us"] > 0 and row["prefill_us"] > 0 for row in shape["rows"])
    _, (site, *_) = synthetic.with_sites(synthetic.read_config(folder), SPEC)
    assert paths.measured(layer_shape(site, SPEC), torch.device("cuda", 0)) is not None
