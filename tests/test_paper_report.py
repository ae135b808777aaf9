"""The report of `dpamoe reproduce`: what each section says, from numbers made by hand."""

import pytest

from dpamoe import paper, paper_report


def point(allocation, budget, kl, size, macro=None):
    return {
        "allocation": allocation, "budget": budget, "mean_planes": budget, "bits_per_weight": 1.125 * budget + 0.125,
        "weight_bytes": size, "kl": kl, "kl_error": kl / 10, "top1": 0.9, "ppl": 20.0, "accuracy": macro and {"one": macro},
        "macro": macro, "note": "",
    }  # fmt: skip


@pytest.fixture
def outcome():
    full = {"ppl": 19.5, "accuracy": None, "macro": None, "bits_per_weight": 16.0, "weight_bytes": 57_500_000}
    full |= {"parameters": 28_800_000}
    frontier = {
        "model": "toy", "sites": 5, "experts": 160, "tokens": 123, "full_precision": full,
        "points": [
            point("dpa", 2.0, 0.16, 2_000_000), point("uniform", 2.0, 0.16, 2_000_000),
            point("dpa", 4.0, 0.01, 4_000_000), point("uniform", 4.0, 0.04, 4_000_000),
            point("gate-only", 4.0, 0.02, 4_000_000),
        ],
        "left_out": ["uniform is left out at budget 1"],
    }  # fmt: skip
    cross = {"k": 2, "share": 0.3, "share_max": 0.4, "spearman": 0.999, "spearman_min": 0.9, "pearson": 0.98}
    cross |= {"pearson_min": None, "tokens": 2048}
    storage = {"sites": 5, "experts": 32, "sets_shared": 8, "sets_separate": 35, "bytes_shared": 1000, "bytes_separate": 1500}
    storage |= {"increase": 0.375, "increase_with_offsets": 0.5}
    speeds = [
        {"budget": 4.0, "allocation": "uniform", "tokens_per_second": 10.0, "ttft_ms": 20.0},
        {"budget": 4.0, "allocation": "dpa", "tokens_per_second": 9.0, "ttft_ms": 25.0},
    ]
    top_p = {
        "p": 0.25, "allocation": "dpa", "budget": 4.0, "active": 1.5, "mean_planes": 4.0, "megabytes_per_token": 0.5, "kl": 0.3,
        "ppl": 30.0, "macro": None,
    }  # fmt: skip
    return {
        "frontier": frontier, "tasks": None, "cross_terms": [cross], "storage": [storage],
        "top_p": {"rows": [top_p], "refused": None},
        "speed": {
            "rows": speeds, "prompts": 3, "prompt_tokens": 8, "new_tokens": 4, "compiled": False, "device": "CPU",
            "times": "wall",
        },
    }  # fmt: skip


FACTS = {
    "versions": {"torch": "2.13"}, "date": "2026-01-01", "device": "CPU", "times": "wall", "text": "a.txt",
    "calibration": "b.txt", "encoding": "group size 128",
}  # fmt: skip


def test_every_section_stands_beside_the_papers_figure(outcome):
    text = paper_report.markdown("toy", outcome, FACTS, ["frontier/frontier_kl.png", "frontier/frontier_kl.svg"])
    for quote in (
        paper.FRONTIER, paper.TASKS, paper.STATIC, paper.SPEED, paper.SIGNALS, paper.CROSS_TERMS, paper.STORAGE, paper.TOP_P,
    ):  # fmt: skip
        assert f"\n> Paper: {quote}.\n" in text
    assert "![KL to full precision against effective size](frontier/frontier_kl.png)" in text and "planes.png" not in text
    assert "28.8 M parameters, 160 routed experts in 5 layers; 57.50 MB at full precision, perplexity 19.500" in text
    assert "Text: a.txt, 123 predicted tokens; calibration: b.txt" in text and "2026-01-01 on CPU (torch 2.13)" in text


def test_small_models_are_called_small(outcome):
    assert "**This model is small.**" in paper_report.markdown("toy", outcome, FACTS, [])
    outcome["frontier"]["full_precision"]["parameters"] = 30_000_000_000
    assert "small" not in paper_report.markdown("toy", outcome, FACTS, [])


def test_figures_of_the_sections(outcome):
    text = paper_report.markdown("toy", outcome, FACTS, [])
    assert "KL of DPA over that of Uniform-k: 1.00 at k̄ = 2, 0.25 at k̄ = 4." in text
    assert "| 4 | 10.0 | 9.0 | -10.0% | 20.0 | 25.0 | +25.0% |" in text
    assert "| 4 | 0.250 | 0.500 | -50.0% |" in text and "| 2 | 1.000 | – | – |" in text
    assert "| 2 | 30.0% | 40.0% | 0.9990 | 0.9000 | 0.9800 | – |" in text
    assert "| 5 | 32 | 8 | 35 | 1,000 bytes | 1,500 bytes | +37.5% | +50.0% |" in text
    assert "| 0.25 | dpa | 1.50 | 4.00 | 0.500 | 0.30000 | 30.000 |" in text
    assert "Not measured: `--tasks` names lm-eval tasks" in text and "Not measured: name them with `--static`" in text


def test_size_at_equal_fidelity(outcome):
    """KL falls from .16 to .01 over 2 MB; .04 is half way in its logarithm: 3 MB do what Uniform-4 does with 4."""
    ((budget, uniform, dpa),) = paper_report.equal_fidelity(outcome["frontier"])
    assert (budget, uniform) == (4.0, 4_000_000) and dpa == pytest.approx(3_000_000)
    text = paper_report.markdown("toy", outcome, FACTS, [])
    assert "For the KL of Uniform-k, the whole model with DPA needs 25.0% less than k = 4 (1.00 MB)." in text


def test_budgets_that_are_left_out_are_said(outcome):
    assert "\n\nuniform is left out at budget 1\n\n" in paper_report.markdown("toy", outcome, FACTS, [])


def test_where_dpa_is_worse_it_says_so(outcome):
    points = {(p["allocation"], p["budget"]): p for p in outcome["frontier"]["points"]}
    points["dpa", 4.0]["kl"], points["uniform", 4.0]["kl"] = 0.04, 0.02
    outcome["frontier"]["points"].append(point("dpa", 8.0, 0.01, 8_000_000))
    text = paper_report.markdown("toy", outcome, FACTS, [])
    assert "2.00 at k̄ = 4" in text and "needs 50.0% more than k = 4 (2.00 MB)." in text


def test_parts_without_numbers_are_left_out(outcome):
    outcome["frontier"]["points"] = [p for p in outcome["frontier"]["points"] if p["allocation"] != "uniform"]
    outcome["top_p"] = {"rows": [], "refused": "experts are chosen by masks"}
    text = paper_report.markdown("toy", outcome, FACTS, [])
    assert "over that of Uniform-k:" not in text and "For the KL" not in text and "no whole budget" in text
    assert "Not measured: experts are chosen by masks." in text


def test_tasks_with_full_precision_beside_them(outcome):
    full = outcome["frontier"]["full_precision"] | {"accuracy": {"one": 0.75}, "macro": 0.75, "ppl": None}
    outcome["tasks"] = outcome["frontier"] | {"full_precision": full, "points": [point("dpa", 3.0, 0.1, 3_000_000, 0.5)]}
    text = paper_report.markdown("toy", outcome, FACTS, ["tasks/frontier_accuracy.png"])
    assert (
        "| full precision | – | 16.000 | 57.50 | 75.00 | 75.00 |" in text
        and "| dpa | 3 | 3.500 | 3.00 | 50.00 | 50.00 |" in text
    )
    assert "(tasks/frontier_accuracy.png)" in text
