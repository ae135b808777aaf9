"""Results as text: what stands in which column, what is starred, what is left out."""

import pytest

from dpamoe import tables


def point(allocation, budget, kl, macro=None, note=""):
    return {
        "allocation": allocation, "budget": budget, "mean_planes": budget, "bits_per_weight": 1.125 * (budget or 4) + 0.125,
        "weight_bytes": int(1e6 * (budget or 4)), "kl": kl, "kl_error": kl and kl / 10, "top1": kl and 1 - kl, "ppl": 20.0,
        "accuracy": macro and {"one": macro - 0.1, "two": macro + 0.1}, "macro": macro, "note": note,
    }  # fmt: skip


def outcome(*points, macro=None, ppl=19.5):
    full = {"ppl": ppl, "accuracy": macro and {"one": macro, "two": macro}, "macro": macro}
    full |= {"bits_per_weight": 16.0, "weight_bytes": 57_500_000}
    found = {"full_precision": full, "points": list(points), "left_out": []}
    return {"model": "toy", "sites": 1, "experts": 4, "tokens": 123, **found}


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_kl_by_budget_and_allocation():
    found = outcome(
        point("dpa", 4.0, 0.01), point("uniform", 4.0, 0.02), point("dpa", 2.0, 0.2), point("uniform", 2.5, 0.1, note="x")
    )
    head, lines = tables.kl_table(found)
    assert head == ["budget", "planes", "bits/w", "MB", "KL dpa", "KL uniform", "± dpa", "top-1 dpa", "ppl dpa"]
    assert lines == [
        ["2", "2.000", "2.375", "2.00", "0.20000", "–", "0.02000", "80.0%", "20.000"],
        ["2.5", "2.500", "2.938", "2.50", "–", "0.10000*", "–", "–", "–"],
        ["4", "4.000", "4.625", "4.00", "0.01000", "0.02000", "0.00100", "99.0%", "20.000"],
    ]


def test_static_formats_stand_by_size():
    small, large = point("q2_k", None, 0.3), point("q8_0", None, 0.001)
    large["weight_bytes"] = 9_000_000
    head, lines = tables.static_table(outcome(large, small))
    assert [line[0] for line in lines] == ["q2_k", "q8_0"] and len(head) == len(lines[0])
    assert lines[0][1:] == ["4.625", "4.00", "0.30000", "0.03000", "70.0%", "20.000"]


def test_presets_have_sizes_of_their_own():
    """Bits per weight at 4 and 2 planes: 4.625 and 2.375, and 0.1 less for quality."""
    points = [point(name, budget, kl) for name, budget, kl in (
        ("quality", 2.0, 0.08), ("paper", 4.0, 0.01), ("uniform", 2.5, 0.1), ("paper", 2.0, 0.16), ("quality", 4.0, 0.005),
    )]  # fmt: skip
    for one in points[:1] + points[4:]:
        one["bits_per_weight"] -= 0.1
    points[2]["note"] = "uneven"
    head, lines = tables.curve_table(outcome(*points))
    assert head == ["allocation", "budget", "planes", "bits/w", "MB", "KL", "±", "top-1", "ppl"]
    assert [line[:4] + line[5:6] for line in lines] == [
        ["paper", "2", "2.000", "2.375", "0.16000"], ["paper", "4", "4.000", "4.625", "0.01000"],
        ["quality", "2", "2.000", "2.275", "0.08000"], ["quality", "4", "4.000", "4.525", "0.00500"],
        ["uniform", "2.5*", "2.500", "2.938", "0.10000"],
    ]  # fmt: skip
    text = tables.evaluation(outcome(*points) | {"left_out": ["uniform is left out at budget 1"]})
    assert "allocation" in text.splitlines()[0] and "uniform is left out at budget 1" in text.splitlines()


def test_kl_between_two_points_is_linear_in_its_logarithm():
    found = outcome(point("dpa", 2.0, 0.16), point("dpa", 4.0, 0.01), point("uniform", 3.0, 0.5), point("dpa", 6.0, 0.0))
    assert tables.kl_at(found, "dpa", (2.375 + 4.625) / 2) == pytest.approx(0.04)  # the square root of 0.16 * 0.01
    assert tables.kl_at(found, "dpa", 2.375) == pytest.approx(0.16) and tables.kl_at(found, "dpa", 4.625) == pytest.approx(0.01)
    assert tables.kl_at(found, "dpa", 2.3) is tables.kl_at(found, "dpa", 4.7) is tables.kl_at(found, "uniform", 3.5) is None


def test_static_formats_beside_what_has_their_size():
    points = [point("paper", 2.0, 0.16), point("paper", 4.0, 0.01), point("quality", 3.9, 0.02), point("quality", 4.1, 0.005)]
    small, large = point("q4_k_pure", None, 0.02), point("q8_0", None, 0.001)
    large["bits_per_weight"] = 8.5
    head, lines = tables.static_table(outcome(*points, small, large))
    assert head[-2:] == ["KL paper / it", "KL quality / it"]
    assert [line[-2:] for line in lines] == [["0.50", "0.50"], ["–", "–"]]  # 0.01 and the middle of 0.02 and 0.005, over 0.02


def test_accuracies_in_per_cent_with_full_precision_first():
    found = outcome(point("dpa", 3.0, 0.1, 0.6), point("uniform", 3.0, 0.2), point("q8_0", None, 0.1, 0.7), macro=0.75)
    head, lines = tables.accuracy_table(found)
    assert head == ["experts", "budget", "bits/w", "MB", "one", "two", "mean"]
    assert lines == [
        ["full precision", "–", "16.000", "57.50", "75.00", "75.00", "75.00"],
        ["dpa", "3", "3.500", "3.00", "50.00", "70.00", "60.00"],
        ["q8_0", "–", "4.625", "4.00", "60.00", "80.00", "70.00"],
    ]


def test_everything_that_was_measured_is_shown_and_nothing_else():
    text = tables.evaluation(
        outcome(point("dpa", 3.0, 0.1), point("uniform", 2.5, 0.3, note="uneven"), point("q2_k", None, 0.2, note="flat"))
    )
    assert "full precision: perplexity 19.500 over 123 tokens" in text
    assert "*: uneven" in text and "q2_k: flat" in text and "mean" not in text
    only_tasks = tables.evaluation(outcome(point("dpa", 3.0, None, 0.6), macro=0.75, ppl=None))
    assert "KL" not in only_tasks and "perplexity" not in only_tasks and "60.00" in only_tasks


def test_lines_that_are_printed_stay_when_rows_are_added():
    room = [["1", "4444"]]
    one, two = (tables.growing(["a", "b"], [["1", "22"], ["2", "333"]][:count], room) for count in (1, 2))
    assert one == "a     b\n-------\n1    22" and two == f"{one}\n2   333"
    wider = tables.growing(["a", "b"], [["1", "22"], ["2", "55555"]], room)
    assert wider == f"{one}\n2  55555"


def test_columns_are_aligned():
    text = tables.aligned(["a", "long"], [["1", "2"], ["333", "4"]])
    assert text.splitlines() == ["  a  long", "---------", "  1     2", "333     4"]
    assert tables.markdown(["a", "b"], [["1", "2"]]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
