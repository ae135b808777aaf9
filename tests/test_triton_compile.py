"""Every Triton kernel and tile compiles for the cards we name, without one: no spills, no more shared memory than they have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CARDS = (80, 86, 89, 90, 100, 120)
SMALL_SHARED = {86, 89, 120}
LIMIT = 101376  # bytes a program may take on those
PRODUCTS = (80, 86, 87, 89, 90)  # cards that multiply single bits
# Bytes of stack: "bits" outside of loops, where many pairs are put in order or, on card 90, one is computed; "tied" also scales
# that stay the same for all pairs of an expert; "hopper", in warp groups of their own roles, what changes from tile to tile or
# stretch to stretch, most in groups of 32 or where a weight is a single stretch (136 with triton 3.9, 88 with 3.6); "widths"
# and "one", the one program that cuts the pairs of 512 experts into tiles (16 and 40 with triton 3.9, none and 24 with 3.6;
# none of 128).
SPILLS = {"bits": 8, "tied": 48, "hopper": 136, "one": 40, "widths": 16}
SCRIPT = Path(__file__).with_name("compile_kernels.py")


def compiled(*choice):
    """What the compiler says of each kernel: name to {"shared", "spills"}; in a process of its own, without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, choice)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_kernels_fit_every_card(card):
    found = compiled(card, "all")
    assert found.keys() > {"up given", "up rank", "up threshold", "down", "down few"}
    assert len(found) > 10 and (card in PRODUCTS) == any(name.startswith("bits") for name in found)
    for name, facts in found.items():
        allowed = SPILLS.get(name.split()[0], 0)
        assert facts["spills"] <= allowed, f"{name} on sm_{card} spills {facts['spills']} bytes"
        assert not facts.get("faults"), f"{name}: {facts['faults']}"
        assert not facts.get("late"), f"{name} loads what its results are multiplied by, or where they go, at the end of a tile"
        if name.endswith("one k"):  # 8 products of a block, those of a stretch begun together; ptxas may wait for each instead
            assert 4 * facts["WARPGROUP.DEPBAR"] <= facts["HGMMA"], f"{name} waits for its products one by one"
        if card in SMALL_SHARED:
            assert facts["shared"] <= LIMIT, f"{name} on sm_{card} takes {facts['shared']} bytes of shared memory"
        assert facts["shared"] <= facts.get("most", facts["shared"]), f"{name}: more shared memory than its cut was chosen for"


def test_the_decode_kernels_compile_for_hopper():
    """With the allocation that is usual; the slow tests have the others."""
    found = compiled(90, "some decode")
    assert set(found) == {"up rank", "down few"}
    assert all(facts["spills"] == 0 for facts in found.values())


def assert_asked_early(found, card):
    """The first product loads its row, 8 numbers of 16 bits, before it asks for planes, and asks for two planes before
    anything of 32 bits is loaded: tables, budgets (without the barrier there, these stand in front by rank alone).

    From Hopper on the second asks before it waits for the first, of three pieces: for all planes that are given, or that most
    likely are, since all programs of the first run at once; for the fewest if the first finds k, which it loads behind.
    """
    first = {name: (facts["ahead"], facts["halves"]) for name, facts in found.items() if " up_kernel" in name}
    assert len(first) == (7 if card >= 90 else 4) and all(halves >= 8 for _, halves in first.values()), first
    assert not any(ahead for name, (ahead, _) in first.items() if "K_MIN=2" in name), first
    second = {name.split("kernel ")[1]: (facts["unwaited"], facts["ahead"]) for name, facts in found.items() if "down" in name}
    behind = {"K_MIN=0 FOUND=False AHEAD=False": 24, "K_MIN=2 FOUND=True AHEAD=False": 6, "K_MIN=0 FOUND=True AHEAD=False": 0}
    ahead = {"K_MIN=2 FOUND=True AHEAD=True": 24, "K_MIN=0 FOUND=True AHEAD=True": 24} if card >= 90 else {}
    assert second.keys() == {f"{rule} OUT=2048" for rule in behind | ahead}
    agreed = {name: facts["agreed"] for name, facts in found.items() if facts["agreed"]}
    assert agreed == {f"bits down_kernel {rule} OUT=2048": 1 for rule in ahead}, "warps that read k early may have read others"
    anew = {name: facts["anew"] for name, facts in found.items() if any(facts["anew"])}
    assert anew == {f"bits down_kernel {rule} OUT=2048": [1, 1] for rule in ahead}, (
        "k is read before the wait and again behind it"
    )
    if card >= 90:
        assert {rule: second[f"{rule} OUT=2048"][0] for rule in behind | ahead} == behind | ahead
        assert second["K_MIN=2 FOUND=True AHEAD=False OUT=2048"][1] == 0, second


@pytest.mark.slow
@pytest.mark.parametrize("card", PRODUCTS)
def test_1_bit_products_are_made_by_the_matrix_unit(card):
    """Two matrices of one piece, or one of three pieces; four planes twice, two groups, two halves of 16 bits.

    Scales and rows are asked for before planes are waited for: of two rows offset and planes 0 to 3, 4 to 7 in each matrix and
    piece; 8 numbers of a row, 2 pairs of groups that are cut; in each of 3 pieces 2 groups. Two planes of both matrices, or of
    all pieces, are asked for before k is found. Warps of the second product leave out other planes, so that between its
    products none may wait for the others.
    """
    found = compiled(card, "bits")
    assert len(found) == (26 if card >= 90 else 21)
    for name, facts in found.items():
        products = {"up": 64, "down": 96, "group": 96 if "OUT=2048" in name else 64}.get(name.split()[1].split("_")[0], 0)
        assert facts["products"] == products, name
        rows = {"up": 12 + 8, "down": 18 + 6, "group": 18 + 6 if "OUT=2048" in name else 12 + 2}
        assert facts["loads"] >= rows.get(name.split()[1].split("_")[0], 0), f"{name} on sm_{card} waits before it asks"
        assert not ("down_kernel" in name and facts["barriers"]), f"{name} on sm_{card} has a barrier that some warps pass by"
    assert_asked_early(found, card)


@pytest.mark.slow
@pytest.mark.parametrize("card", PRODUCTS)
def test_products_of_bytes_are_made_by_the_matrix_unit(card):
    """Tied scales: 4 products of each of 2 groups in each matrix, or in each of 3 pieces, however many planes."""
    found = compiled(card, "tied")
    assert len(found) == (26 if card >= 90 else 21)
    for name, facts in found.items():
        kernel = name.split()[1].split("_")[0]
        products = {"up": 16, "down": 24, "group": 24 if "OUT=2048" in name else 16}.get(kernel, 0)
        assert facts["products"] == products, name


@pytest.mark.parametrize("card, stack", [(86, 0), (90, SPILLS["bits"])])
def test_the_1_bit_products_of_few_tokens_compile(card, stack):
    """For a small card and for a large one."""
    found = compiled(card, "few bits")
    assert len(found) == (12 if card >= 90 else 7) and all(
        facts["products"] > 0 and facts["spills"] <= stack for facts in found.values()
    )
    assert card == 90 or all(facts["shared"] <= LIMIT for facts in found.values())
    assert_asked_early(found, card)
