"""Which path computes a call: the estimate by hand, measured crossovers, forcing, and a cost file that survives damage."""

import importlib.util
import json
import os
import warnings
from dataclasses import replace

import pytest
import torch

from dpamoe.kernels import paths
from dpamoe.kernels.paths import Costs, Shape

CPU = torch.device("cpu")
SHAPE = Shape(128, 8, 2048, 768, 128, True, "shared")


def times(**by_tokens):
    """t1=(decode, prefill), … as a table of µs."""
    return {int(name[1:]): dict(zip(("decode", "prefill"), pair, strict=True)) for name, pair in by_tokens.items()}


def all_three(**by_tokens):
    """t1=(decode, bits, prefill), … as a table of µs."""
    return {int(name[1:]): dict(zip(paths.PATHS, row, strict=True)) for name, row in by_tokens.items()}


def first_prefill(shape, bits=False):
    return next(tokens for tokens in range(10_000) if paths.choose(shape, tokens, CPU, bits) == "prefill")


def save(measured):
    return paths.save_costs("cpu", {SHAPE.key: Costs(measured, None, 4.0, "2026-01-31", "2.11.0", "3.6.0")})


def test_key_is_stable():
    assert SHAPE.key == "E128 A8 H2048 I768 g128 gated shared"
    assert Shape(8, 2, 64, 32, -1, False, "tied").key == "E8 A2 H64 I32 g-1 plain tied"


@pytest.mark.parametrize(
    "experts, active, first",
    [
        (128, 8, 27),  # 208 pairs touch 104.1 experts, 216 pairs 105.6
        (8, 2, 7),  # 12 pairs touch 6.58 experts, 14 pairs 6.93
        (8, 8, 3),  # every token touches all
        (1, 1, 3),
        (4, 6, 3),  # more slots than experts
        (8, 0, 1),  # nothing to compute
    ],
)
def test_estimate_by_hand(store_costs, experts, active, first):
    assert first_prefill(Shape(experts, active, 64, 32, 32, True, "shared")) == first


@pytest.mark.parametrize(
    "measured, first",
    [
        (times(t1=(1, 9), t16=(8, 9), t32=(16, 9), t64=(32, 10)), 32),
        (times(t1=(1, 9), t4=(9, 8), t16=(8, 9), t32=(16, 9)), 32),  # one lucky measurement is no crossover
        (times(t1=(1, 9), t2048=(100, 900)), 2049),  # decode as far as measured
        (times(t1=(1, 9), t2=(2, 9)), 27),  # nothing measured where the estimate decides
        (times(t1=(9, 8), t2=(9, 8)), 1),
        (times(t512=(900, 80), t1024=(900, 80)), 27),
        ({1: {"decode": 1.0}, 8: {"decode": 5.0, "prefill": 4.0}, 16: {"prefill": 4.0}}, 8),
        ({}, 27),
    ],
)
def test_crossover(store_costs, measured, first):
    save(measured)
    assert first_prefill(SHAPE) == first
    assert first_prefill(Shape(128, 8, 2048, 768, 64, True, "shared")) == 27  # another shape


@pytest.mark.parametrize("experts, active, first", [(128, 8, 67), (8, 2, 17), (1, 1, 5), (8, 0, 1)])
def test_estimate_with_1_bit_products_by_hand(store_costs, experts, active, first):
    """66 tokens of 8 in 128 are 528 pairs, 4.2 times the experts they touch 530.0; 67 are 536 and 530.5."""
    shape = Shape(experts, active, 64, 32, 128, True, "shared")
    assert first_prefill(shape, bits=True) == first
    assert {paths.choose(shape, tokens, CPU, True) for tokens in range(1, first)} <= {"bits"}


@pytest.mark.parametrize(
    "measured, expected",
    [
        (all_three(t1=(9, 5, 90), t8=(40, 20, 90), t64=(99, 80, 60)), {1: "bits", 63: "bits", 64: "prefill"}),
        (all_three(t1=(4, 5, 90), t8=(40, 20, 90), t64=(99, 80, 60)), {1: "decode", 7: "decode", 8: "bits", 63: "bits"}),
        (all_three(t2=(9, 5, 90), t8=(10, 20, 90), t64=(99, 80, 60)), {1: "bits", 2: "bits", 8: "decode", 64: "prefill"}),
        (all_three(t1=(5, 5, 90), t8=(10, 20, 15), t64=(99, 80, 60)), {1: "bits", 8: "decode", 63: "decode", 64: "prefill"}),
        (all_three(t1=(5, 4, 3), t8=(10, 20, 9)), {1: "prefill", 8: "prefill"}),
        (all_three(t1=(5, 4, 30), t8=(10, 20, 19), t16=(50, 9, 30)), {16: "bits", 66: "bits", 67: "prefill"}),
        (times(t1=(1, 9), t16=(9, 8)), {1: "bits", 16: "bits", 66: "bits", 67: "prefill"}),  # a file of before
        (times(t1=(1, 9), t16=(9, 8)) | all_three(t4=(5, 4, 9)), {1: "bits", 15: "bits", 16: "prefill"}),
        ({1: {"bits": 1.0}}, {1: "bits", 67: "prefill"}),
        ({}, {1: "bits", 66: "bits", 67: "prefill"}),
    ],
)
def test_the_fastest_of_three(store_costs, measured, expected):
    save(measured)
    assert {tokens: paths.choose(SHAPE, tokens, CPU, True) for tokens in expected} == expected


def test_tied_scales_are_estimated_like_free_ones(store_costs):
    """And measured by themselves."""
    tied = replace(SHAPE, group_size=32, scale_mode="tied")
    assert first_prefill(tied) == 27 and first_prefill(tied, bits=True) == 67
    assert {paths.choose(tied, tokens, CPU, True) for tokens in range(1, 67)} == {"bits"}
    costs = Costs(times(t1=(1, 9), t4=(9, 8), t16=(9, 8)), None, 4.0, "2026-01-31", "2", "3")
    paths.save_costs(paths.device_name(CPU), {tied.key: costs})  # a file of before, without them
    assert [paths.choose(tied, tokens, CPU, True) for tokens in (1, 66, 67)] == ["bits", "bits", "prefill"]
    costs = Costs(all_three(t1=(9, 5, 90), t64=(99, 80, 60)), None, 4.0, "2026-01-31", "2", "3")
    paths.save_costs(paths.device_name(CPU), {tied.key: costs})
    assert [paths.choose(tied, tokens, CPU, True) for tokens in (1, 63, 64)] == ["bits", "bits", "prefill"]


def test_costs_of_1_bit_products_do_not_change_calls_without_them(store_costs):
    save(all_three(t1=(9, 5, 90), t8=(40, 20, 90), t64=(99, 40, 60)))
    assert paths.choose(SHAPE, 63, CPU) == "decode" and "bits" not in {paths.choose(SHAPE, t, CPU) for t in range(1, 200)}


def test_costs_with_1_bit_products_survive_the_file(store_costs):
    measured = all_three(t1=(9, 5, 90)) | times(t512=(80, 9))
    save(measured)
    paths.forget_costs()
    assert paths.measured(SHAPE, CPU).microseconds == measured and paths.measured(SHAPE, CPU).has_bits
    assert not Costs(times(t1=(1, 2)), None, 4.0, "2026-01-31", "2", "3").has_bits


@pytest.fixture
def card(monkeypatch):
    """Function that stands a card of a compute capability in for the one that may be here; the device."""

    def choose(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda", 0)

    def forget():
        paths.has_triton.cache_clear()
        paths.has_bits.cache_clear()

    forget()
    yield choose
    forget()


@pytest.mark.parametrize(
    "capability, bits", [((7, 5), 0), ((8, 0), 1), ((8, 6), 1), ((8, 9), 1), ((9, 0), 1), ((10, 0), 0), ((12, 0), 0)]
)
def test_cards_with_1_bit_products(card, capability, bits):
    pytest.importorskip("triton.experimental.gluon")
    device = card(capability)
    assert paths.has_bits(device) == bool(bits) and not paths.has_bits(CPU)
    assert paths.available(SHAPE, device) == (paths.PATHS if bits else ("decode", "prefill"))
    for group in (16, 32, 64, 128, -1):
        tied = replace(SHAPE, group_size=group, scale_mode="tied")
        assert ("bits" in paths.available(tied, device)) == (bits and group in (32, 64, 128))
    assert paths.available(replace(SHAPE, group_size=64), device) == ("decode", "prefill")
    most = paths.BIT_PAIRS // SHAPE.active
    assert paths.available(SHAPE, device, most) == paths.available(SHAPE, device)
    assert paths.available(SHAPE, device, most + 1) == paths.available(SHAPE, CPU) == ("decode", "prefill")


def test_no_1_bit_products_without_their_dialect(card, monkeypatch):
    device, find = card((9, 0)), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "gluon" in name else find(name))
    assert not paths.has_bits(device)


@pytest.mark.parametrize(
    "outcomes, first",
    [
        ({1: False, 2: True, 4: True}, 2),
        ({1: True, 2: False, 4: True}, 4),
        ({1: True}, 1),
        ({4: False, 1: True}, None),
        ({}, None),
    ],
)
def test_holds_from(outcomes, first):
    assert paths.holds_from(outcomes) == first


def test_forcing_ends_with_the_block(store_costs):
    with paths.forced("prefill"):
        assert paths.choose(SHAPE, 1, CPU) == "prefill"
        with paths.forced("decode"):
            assert paths.choose(SHAPE, 4096, CPU) == "decode"
        assert paths.choose(SHAPE, 1, CPU) == "prefill"
    for path in paths.PATHS:
        with paths.forced(path):
            assert [paths.choose(SHAPE, tokens, CPU, True) for tokens in (0, 1, 999)] == [path] * 3
    with paths.forced("bits"):  # where they cannot be computed so, few tokens and many are decoded
        assert {paths.choose(SHAPE, tokens, CPU) for tokens in (1, 999)} == {"decode"}
    with pytest.raises(RuntimeError), paths.forced("prefill"):
        raise RuntimeError
    assert paths.choose(SHAPE, 1, CPU) == "decode"
    with pytest.raises(ValueError, match="path is 'fast': use decode, bits or prefill"), paths.forced("fast"):
        pass


def test_the_file_is_read_once(store_costs, monkeypatch):
    store_costs(SHAPE, microseconds=times(t1=(1, 9), t16=(8, 7)))
    reads, load = [], paths.load_costs
    monkeypatch.setattr(paths, "load_costs", lambda name: reads.append(name) or load(name))
    other = Shape(8, 2, 64, 32, 32, True, "shared")
    chosen = [paths.choose(shape, tokens, CPU) for shape in (SHAPE, other) for tokens in range(1, 40)]
    assert reads == ["cpu"] and chosen.index("prefill") == 15


def test_costs_survive_the_file(store_costs):
    costs = Costs(times(t1=(1.5, 9.25), t512=(80, 9)), 256, 3.5, "2026-01-31", "2.11.0+cu130", "3.6.0")
    other = Shape(8, 2, 64, 32, 32, True, "shared")
    file = paths.save_costs("NVIDIA H200", {SHAPE.key: costs})
    paths.save_costs("NVIDIA H200", {other.key: Costs({}, None, 4.0, "2026-02-01", "2", "3")})
    assert paths.load_costs("NVIDIA H200")[SHAPE.key] == costs and len(paths.load_costs("NVIDIA H200")) == 2
    content = json.loads(file.read_text())
    assert (content["format"], content["version"], content["device"]) == ("dpamoe-costs", 1, "NVIDIA H200")
    assert content["shapes"][SHAPE.key]["microseconds"]["512"] == {"decode": 80, "prefill": 9}
    paths.save_costs("NVIDIA H200", {SHAPE.key: Costs({}, 8, 4.0, "2026-02-01", "2", "3")})  # measured again
    assert paths.load_costs("NVIDIA H200")[SHAPE.key].uniform_from == 8
    assert paths.measured(SHAPE, CPU) is None


def test_saving_is_seen_at_once(store_costs):
    assert first_prefill(SHAPE) == 27 and paths.measured(SHAPE, CPU) is None
    store_costs(SHAPE, 64, times(t1=(1, 9), t4=(8, 7)))
    assert first_prefill(SHAPE) == 4 and paths.measured(SHAPE, CPU).uniform_from == 64


def test_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert paths.cost_file("NVIDIA H200") == tmp_path / "cache" / "dpamoe" / "NVIDIA H200.json"
    assert paths.cost_file("a/../b:c").parent == tmp_path / "cache" / "dpamoe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cost_file("cpu") == tmp_path / ".cache" / "dpamoe" / "cpu.json"


def test_without_a_home_nothing_is_measured(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(paths.Path, "home", homeless)
    assert paths.load_costs("cpu") == {}
    with pytest.raises(ValueError, match="home directory.*XDG_CACHE_HOME"):
        paths.check_costs_can_be_saved("cpu")


def test_an_interrupted_save_leaves_the_old_file(store_costs, monkeypatch):
    file = store_costs(SHAPE, 8)
    before = file.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store_costs(SHAPE, 16)
    assert file.read_bytes() == before and [path.name for path in file.parent.iterdir()] == ["cpu.json"]


def changed(**fields):
    def change(content):
        content["shapes"][SHAPE.key].update(fields)

    return change


DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
    "not text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda file: file.write_text("[]"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another device": lambda content: content.update(device="NVIDIA H200"),
    "another version": lambda content: content.update(version=2),
    "another format": lambda content: content.update(format="other"),
    "no shapes": lambda content: content.pop("shapes"),
    "shapes as a list": lambda content: content.update(shapes=[1]),
    "a field too many": changed(more=1),
    "a time that is none": changed(microseconds={"1": {"decode": "fast"}}),
    "a time without end": changed(microseconds={"1": {"decode": float("inf")}}),
    "a budget that is no number": changed(budget=float("nan")),
    "a time of 400 digits": changed(microseconds={"1": {"decode": 10**400}}),
    "lists in lists": lambda file: file.write_text("[" * 100_000),
    "a time of zero": changed(microseconds={"1": {"decode": 0}}),
    "a path that is none": changed(microseconds={"1": {"other": 1}}),
    "tokens that are none": changed(microseconds={"one": {"decode": 1}}),
    "times as a list": changed(microseconds=[1]),
    "a start that is none": changed(uniform_from="always"),
    "a start of zero": changed(uniform_from=0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning(store_costs, damage):
    file = store_costs(SHAPE, 8, times(t1=(1, 9), t2=(2, 1)))
    try:
        content = json.loads(file.read_text())
        damage(content)
        file.write_text(json.dumps(content))
    except AttributeError:
        damage(file)
    paths.forget_costs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert first_prefill(SHAPE) == 27 and paths.measured(SHAPE, CPU) is None
    (warning,) = caught
    assert str(file) in str(warning.message) and "dpamoe tune" in str(warning.message)
    if file.is_file():
        with pytest.warns(UserWarning, match="ignored"):
            store_costs(SHAPE, 16)
        assert paths.measured(SHAPE, CPU).uniform_from == 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_name_of_a_gpu(store_costs):
    device = torch.device("cuda", 0)
    name = paths.device_name(device)
    assert name == torch.cuda.get_device_name(0)
    paths.save_costs(name, {SHAPE.key: Costs(times(t1=(1, 9), t4=(8, 7)), None, 4.0, "2026-01-31", "2", "3")})
    assert [paths.choose(SHAPE, tokens, device) for tokens in (3, 4)] == ["decode", "prefill"]
