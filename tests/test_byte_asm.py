"""The PTX of the products with tied scales, executed by a warp on the CPU: bytes of rows, their places, dots, scales."""

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import byte_asm as asm

from . import ptx

G, T = np.arange(32) // 4, np.arange(32) % 4
HALF = 0.51  # what an integer may miss: a half, and roundings in fp32, 2 ** -24 of MOST each
EXACT = 1e-6  # of the norm: fp32 sums of a few numbers


def run(name, letters, *operands):
    return ptx.run(getattr(asm, name).value, getattr(asm, letters).value, *operands)


def cut(x):
    """Registers of 128 inputs cut into bytes: high, low, step, sum."""
    register = np.arange(4)[:, None]
    return run("CUT", "CUT_LETTERS", np.asarray(x, np.float32)[G + 32 * T + 8 * register])


def signed_bytes(words):
    """Bytes of registers [R, 32] with their signs, [R, 4, 32]."""
    return np.stack([(words >> 8 * j & 0xFF).astype(np.uint8).view(np.int8).astype(np.int64) for j in range(4)], 1)


def integers(words):
    """The 128 integers that the bytes stand for."""
    found = np.zeros(128, np.int64)
    high, low = signed_bytes(words[:2])
    found[G + 32 * T + 8 * np.arange(4)[:, None]] = 256 * high + low
    return found


def numbers(register):
    return register.view(np.float32)


def random_inputs(seed=0):
    return np.random.default_rng(seed).standard_normal(128).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 3e30])
def test_bytes_of_the_nearest_integers(scale):
    x = random_inputs() * np.float32(scale)
    words = cut(x)
    found, step, sums = integers(words), numbers(words[2]), numbers(words[3])
    assert step[0] == pytest.approx(np.abs(x).max() / asm.MOST, rel=EXACT) and (step == step[0]).all()
    assert np.abs(found).max() == asm.MOST and np.abs(found - x.astype(np.float64) / step[0]).max() <= HALF
    assert (sums == found.reshape(4, 32).sum(1)[T]).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_extremes(sign):
    words = cut(np.full(128, sign * 3.0))
    assert (integers(words) == sign * asm.MOST).all() and (numbers(words[3]) == sign * asm.MOST * 32).all()


def test_zeros_and_numbers_that_are_none():
    words = cut(np.zeros(128))
    assert not words[:2].any() and not numbers(words[3]).any() and np.isfinite(numbers(words[2])).all()
    x = random_inputs()
    x[77] = np.nan
    assert np.isnan(numbers(cut(x)[2])).all()


def test_each_lane_has_the_words_of_its_column_or_zeros():
    words = cut(random_inputs())
    high, low = signed_bytes(words[:2])
    spread = signed_bytes(run("SPREAD", "SPREAD_LETTERS", words))
    for lane in range(32):
        word, half = G[lane] // 2, (high, low)[G[lane] % 2]
        for p in range(8):
            expected = half[:, 4 * p + word] if T[lane] == word else 0
            assert (spread[p, :, lane] == expected).all()


def test_dots_of_both_groups():
    """Numbers of two rows a lane, each dot in the lane of its word."""
    random = np.random.default_rng(1)
    weights, rows = random.integers(0, 256, (2, 16, 128)), [cut(random_inputs(2)), cut(random_inputs(3))]
    registers = np.zeros((8, 4, 32), np.uint32)
    for group in range(2):
        for half in range(2):
            for j in range(4):
                at = 32 * T + 8 * j + np.arange(8)[:, None]
                registers[:, 2 * group + half] |= weights[group][G + 8 * half, at].astype(np.uint32) << 8 * j
    spread = [run("SPREAD", "SPREAD_LETTERS", row) for row in rows]
    found = numbers(run("DOTS", "DOTS_LETTERS", registers.reshape(32, 32), *spread))
    for group in range(2):
        exact = (weights[group] * integers(rows[group])).reshape(16, 4, 32).sum(2)
        for half in range(2):
            assert (found[2 * group + half] == exact[G + 8 * half, T].astype(np.float32)).all()


@pytest.mark.parametrize("name, first", [("TIED_FIRST", 0), ("TIED_SECOND", 2)])
def test_scales_and_shifts(name, first):
    random = np.random.default_rng(4)
    total, dots, scales, shifts = (random.standard_normal((4, 32)).astype(np.float32) for _ in range(4))
    rows = [cut(random_inputs(5)), cut(random_inputs(6))]
    found = numbers(run(name, "TIED_LETTERS", total, dots, scales, shifts, *rows))
    step, sums = (np.repeat([numbers(row[i]) for row in rows], 2, 0).astype(np.float64) for i in (2, 3))
    each, expected = scales * step * (dots + shifts * sums), total.astype(np.float64)
    expected[first : first + 2] += each[:2] + each[2:]
    assert np.linalg.norm(found - expected) <= EXACT * np.linalg.norm(expected)
