"""Presets: what they stand for, in memory and on the command line, and what was measured of them.

`python -m tests.test_presets` writes the table of README.md from the results in tests/benchmarks.
"""

import json
from pathlib import Path

import pytest
import torch

import dpamoe
from dpamoe import checkpoint, frontier, presets, tables
from dpamoe.cli import options
from dpamoe.cli.main import build_parser
from dpamoe.modules import encoded_experts
from dpamoe.presets import PRESETS, Preset

ROOT = Path(__file__).resolve().parents[1]
README, MARKS = ROOT / "README.md", ("<!-- table: presets -->", "<!-- end: presets -->")
MODELS = ("small", "tiny")
PLAIN = {"q2_k_pure": 2.5, "q3_k_pure": 3.5, "q4_k_pure": 4.5}  # and sizes, in bits, that each is also compared at
LESS = {"q2_k_pure": 0.35, "q3_k_pure": 0.35, "q4_k_pure": 0.30}  # KL at these sizes is lower by at least that share
TIED = dpamoe.EncodeSpec(group_size=32, scale_mode="tied")
BY_LEVEL = dpamoe.SpendSpec(allocator="threshold", skip=True)


def test_the_default_is_what_there_is_without_a_preset():
    assert PRESETS[presets.DEFAULT] == Preset(dpamoe.EncodeSpec(), dpamoe.SpendSpec())
    assert PRESETS["quality"] == Preset(TIED, BY_LEVEL) and list(PRESETS) == ["paper", "quality"]


@pytest.mark.parametrize("name, preset", PRESETS.items())
def test_settings_have_the_name_of_their_preset(name, preset):
    assert presets.preset_of(name) is preset
    spend = dpamoe.SpendSpec(3.5, skip=preset.spend.skip, allocator=preset.spend.allocator)
    assert presets.name_of(preset.encode, spend) == name
    assert presets.name_of(dpamoe.EncodeSpec(group_size=64), preset.spend) is None
    assert presets.name_of(preset.encode, dpamoe.SpendSpec(scope="dispatch")) is None


def spends(model):
    (found,) = {experts.spend for experts in encoded_experts(model).values()}
    return found


def test_in_memory(random_model, random_ids, tmp_path):
    ids = random_ids(8, 60)
    model = dpamoe.transform(random_model("qwen3_moe"), 3.0, calibration=ids, preset="quality")
    assert {experts.spec for experts in encoded_experts(model).values()} == {TIED}
    assert spends(model) == dpamoe.SpendSpec(3.0, allocator="threshold", skip=True)
    written_out = dpamoe.transform(random_model("qwen3_moe"), 3.0, calibration=ids, spec=TIED, allocator="threshold", skip=True)
    with torch.no_grad():
        assert torch.equal(model(ids[:2]).logits, written_out(ids[:2]).logits)
    assert spends(dpamoe.load(dpamoe.save(model, tmp_path / "out"), 2.5)) == dpamoe.SpendSpec(
        2.5, allocator="threshold", skip=True
    )
    dpamoe.transform(model, 2.0, preset="quality", allocator="exact")  # only spends in another way
    assert spends(model) == dpamoe.SpendSpec(2.0, skip=True)
    with pytest.raises(ValueError, match="already encoded with .*group_size=32.*load the original to encode with .*128"):
        dpamoe.transform(model, preset="paper")


def test_what_is_given_beside_a_preset_changes_it(random_model, random_ids):
    model = random_model("qwen3_moe")
    spec = dpamoe.EncodeSpec(group_size=16, iterations=0)
    dpamoe.transform(model, 1.0, calibration=random_ids(4, 60), preset="quality", spec=spec, allocator="exact")
    assert spends(model) == dpamoe.SpendSpec(1.0, skip=True)
    assert {experts.spec for experts in encoded_experts(model).values()} == {spec}
    assert all(experts.sensitivity is None for experts in encoded_experts(model).values())


def test_an_unknown_preset_changes_nothing(random_model):
    model = random_model("qwen3_moe")
    with pytest.raises(ValueError, match="preset is 'fast': use paper or quality"):
        dpamoe.transform(model, preset="fast")
    assert not encoded_experts(model)


def asked(*flags):
    args = build_parser().parse_args(["convert", "a", "--output-dir", "b", *flags])
    return options.encode_spec(args), options.spend_spec(args)


def test_flags_change_a_preset():
    assert asked() == (dpamoe.EncodeSpec(), dpamoe.SpendSpec())
    assert asked("--preset", "quality", "--budget", "2.5") == (TIED, dpamoe.SpendSpec(2.5, allocator="threshold", skip=True))
    spec, spend = asked("--preset", "quality", "--group-size", "64", "--k-max", "6", "--no-skip")
    assert spec == dpamoe.EncodeSpec(64, 2, 6, "tied") and spend == dpamoe.SpendSpec(allocator="threshold")
    spec, spend = asked("--skip", "--allocator", "threshold", "--beta", "4", "--scale-mode", "tied")
    assert spec == dpamoe.EncodeSpec(scale_mode="tied", beta=4.0) and spend == BY_LEVEL


@pytest.mark.parametrize(
    "flags, names, spec",
    [
        ((), [], None),
        (("--presets", "paper,quality"), ["paper", "quality"], None),
        (("--preset", "Quality"), ["quality"], None),
        (("--preset", "quality", "--group-size", "64"), ["quality"], dpamoe.EncodeSpec(64, scale_mode="tied")),
        (("--group-size", "64"), [], dpamoe.EncodeSpec(64)),
    ],
)
def test_eval_takes_several(flags, names, spec, monkeypatch):
    """What flags change is the first preset; `frontier.plan` refuses them with more than one."""
    seen = []

    def stopped(wanted):
        seen.append(wanted)
        raise ValueError("stopped")

    monkeypatch.setattr(frontier, "plan", stopped)
    args = build_parser().parse_args(["eval", "a", "--text", "b", *flags])
    with pytest.raises(ValueError, match="stopped"):
        args.run(args)
    assert seen[0].presets == tuple(names) and seen[0].spec == spec


@pytest.mark.slow
def test_a_converted_folder_remembers_it(run, tiny_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")[:8000], encoding="utf-8")
    flags = ("--calibration", text, "--budget", 3, "--preset", "quality")
    code, out, err = run("convert", tiny_dir, "--output-dir", tmp_path / "out", *flags)
    assert code == 0, err
    code, out, _ = run("inspect", tmp_path / "out")
    assert "group size 32, tied scales, planes 2 to 8, default budget 3 per token" in out
    assert "allocator threshold, experts may be skipped, sensitivities of layers are there; preset quality" in out
    assert spends(dpamoe.load(tmp_path / "out")) == dpamoe.SpendSpec(3.0, allocator="threshold", skip=True)
    settings, weight_map = checkpoint.read_index(tmp_path / "out")
    assert checkpoint.is_weighed(settings, weight_map)
    code, out, _ = run("inspect", tmp_path / "out", "--json")
    assert all(words in out for words in ('"skip": true', '"allocator": "threshold"', '"sensitivities": true'))


# ---- what was measured


def measured(name="results"):
    """What `dpamoe eval --presets paper,quality` found on each model, on the second or the first half of the text."""
    folders = {model: ROOT / "tests" / "benchmarks" / "results" / model / "presets" for model in MODELS}
    return {model: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for model, folder in folders.items()}


@pytest.mark.parametrize("model", MODELS)
def test_quality_has_less_error_at_every_budget_and_at_every_size(model):
    found = measured()[model]
    for budget, points in tables.spread(found).items():
        if "paper" not in points:  # which skips no expert
            assert budget < 2
            continue
        assert points["quality"]["kl"] < 0.8 * points["paper"]["kl"]
        assert points["quality"]["bits_per_weight"] < points["paper"]["bits_per_weight"] + 0.03
        if (there := tables.kl_at(found, "quality", points["paper"]["bits_per_weight"])) is not None:
            assert there < 0.8 * points["paper"]["kl"]


@pytest.mark.parametrize("model", MODELS)
def test_quality_is_below_plain_k_quants(model):
    found = measured()[model]
    formats = {point["allocation"]: point for point in tables.static_points(found)}
    for name, less in LESS.items():
        for bits in (PLAIN[name], formats[name]["bits_per_weight"]):
            assert tables.kl_at(found, "quality", bits) <= (1 - less) * formats[name]["kl"]


def ratios(found):
    """KL of quality over that of paper, by budget, and over that of each format, by its name and a size."""
    spread = tables.spread(found).items()
    by = {budget: points["quality"]["kl"] / points["paper"]["kl"] for budget, points in spread if budget >= 2}
    for point in tables.static_points(found):
        name, own = point["allocation"], point["bits_per_weight"]
        by |= {(name, bits): tables.kl_at(found, "quality", bits) / point["kl"] for bits in (own, PLAIN.get(name, own))}
    return by


@pytest.mark.parametrize("model", MODELS)
def test_the_other_half_of_the_text_says_the_same(model):
    first, second = (ratios(measured(name)[model]) for name in ("first_half", "results"))
    assert first == pytest.approx(second, abs=0.06, rel=0)
    by_budget = [ratio for key, ratio in second.items() if not isinstance(key, tuple)]
    assert len(by_budget) == 6 and min(by_budget) >= 0.25 and max(by_budget) < 0.735  # 25 to 73 per cent
    assert f"{1 - first['q4_k_pure', 4.5]:.0%}" == {"small": "30%", "tiny": "28%"}[model]


def by_budget(found):
    """Rows of KL, with bits per expert weight, by budget."""
    rows = []
    spreads = {model: tables.spread(found[model]) for model in MODELS}
    for budget in spreads["small"]:
        cells = [f"{budget:g}"]
        for model in MODELS:
            points = spreads[model][budget]
            cells += [_kl(points.get("paper")), _kl(points["quality"])]
            cells.append(f"{points['quality']['kl'] / points['paper']['kl']:.2f}" if "paper" in points else tables.NONE)
        rows.append(cells)
    return tables.markdown(["k̄", *(f"{model}{name}" for model in MODELS for name in (": paper", ": quality", ", ratio"))], rows)


def _kl(point):
    return tables.NONE if point is None else f"{point['kl']:.5f} ({point['bits_per_weight']:.3f})"


def by_size(found):
    """Rows of static formats with the KL of the presets at their size, and of plain K-quants at sizes beside theirs."""
    rows = []
    for point in tables.static_points(found["small"]):
        name, own = point["allocation"], point["bits_per_weight"]
        for bits in [own, *([PLAIN[name]] if name in PLAIN and PLAIN[name] != own else [])]:
            cells = [name, f"{own:.3f}", f"{bits:.3f}"]
            for model in MODELS:
                (static,) = [one for one in tables.static_points(found[model]) if one["allocation"] == name]
                there = [tables.kl_at(found[model], preset, bits) for preset in PRESETS]
                cells += [f"{static['kl']:.5f}", *(f"{kl:.5f}" for kl in there), f"{there[1] / static['kl'] - 1:+.0%}"]
            rows.append(cells)
    heads = ("", ": paper", ": quality", ", quality against it")
    return tables.markdown(["format", "its bits", "at", *(f"{model}{name}" for model in MODELS for name in heads)], rows)


def table():
    """The two tables of README.md."""
    found = measured()
    return f"{by_budget(found)}\n\n{by_size(found)}"


def split_readme():
    """What stands before the tables in README.md, the tables, and what follows."""
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    between, after = rest.split(MARKS[1])
    return before, between.strip("\n"), after


def test_the_tables_of_the_readme_are_what_was_measured():
    assert table() == split_readme()[1], "run `python -m tests.test_presets`, which writes them"


if __name__ == "__main__":
    before, _, after = split_readme()
    README.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")
