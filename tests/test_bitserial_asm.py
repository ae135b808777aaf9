"""The PTX of the bit-serial products, executed by a warp on the CPU: bits of slices, popcounts, scales and offsets."""

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import bitserial_asm as asm

from . import ptx

G, C = np.arange(32) // 4, np.arange(32) % 4
MOST = 32767
HALF = 0.51  # what an integer may miss: a half, and roundings in fp32, 2 ** -24 of 32767 each
EXACT = 1e-6  # of the norm: fp32 sums of a few numbers


def run(name, letters, *operands):
    return ptx.run(getattr(asm, name).value, getattr(asm, letters).value, *operands)


def cut(x):
    """Registers of 128 inputs cut into bits: words of low and high bits, step, sum."""
    register = np.arange(4)[:, None]
    return run("SLICE", "SLICE_LETTERS", np.asarray(x, np.float32)[G + 32 * C + 8 * register])


def integers(words):
    """The 128 integers that words of low and high bits stand for: bit n in lane 4n + c, bit i of it of input 32c + i."""
    bits = [(words[half][:, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(8, 128).astype(np.int64) for half in range(2)]
    weights = 2 ** np.arange(16)[:, None] * np.where(np.arange(16) == 15, -1, 1)[:, None]
    return (np.concatenate(bits) * weights).sum(0)


def numbers(register):
    """A register as fp32."""
    return register.view(np.float32)


def step_and_sum(words):
    """Both are the same in every lane."""
    step, total = numbers(words[2]), numbers(words[3])
    assert len(set(words[2])) == len(set(words[3])) == 1
    return float(step[0]), float(total[0])


def random_inputs(seed=0, size=128):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 3e30])
def test_a_slice_holds_the_bits_of_the_nearest_integers(scale):
    x = random_inputs() * np.float32(scale)
    words = cut(x)
    found, (step, total) = integers(words), step_and_sum(words)
    assert step == pytest.approx(np.abs(x).max() / MOST, rel=EXACT) and np.abs(found).max() == MOST
    assert np.abs(found - x.astype(np.float64) / step).max() <= HALF and total == found.sum()


def test_every_input_has_a_place_of_its_own():
    """The largest input, and one bit of another, at each place."""
    for place in range(128):
        x = np.zeros(128)
        x[place], x[(place + 1) % 128] = -1.0, 2 ** (place % 15) / MOST
        expected = np.zeros(128, np.int64)
        expected[place], expected[(place + 1) % 128] = -MOST, 2 ** (place % 15)
        assert (integers(cut(x)) == expected).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_extremes_and_their_sum(sign):
    words = cut(np.full(128, sign * 3.0))
    assert (integers(words) == sign * MOST).all() and step_and_sum(words)[1] == sign * MOST * 128
    top = words[1][4 * 7 :]  # bit 15: the sign
    assert (top == (0 if sign > 0 else 0xFFFFFFFF)).all()


def test_a_group_of_zeros():
    words = cut(np.zeros(128))
    assert not words[:2].any() and step_and_sum(words)[1] == 0 and np.isfinite(numbers(words[2])).all()


def test_numbers_too_small_to_matter():
    """Steps become no smaller, so that the reciprocal is finite; what is lost then is next to nothing."""
    for largest in (2.0**-98, 2.0**-101, 2.0**-115, 2.0**-126, 2.0**-140):
        x = random_inputs().astype(np.float64)
        x = (x * largest / np.abs(x).max()).astype(np.float32)
        words = cut(x)
        step, _ = step_and_sum(words)
        assert np.abs(integers(words) * step - x).max() <= HALF * max(np.abs(x).max(), asm.SMALLEST) / MOST


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 77])
def test_what_is_no_number_reaches_every_output(value, place):
    x = random_inputs()
    x[place] = value
    words = cut(x)
    assert not np.isfinite(numbers(words[2])).any()
    tile = Tile(1)
    for second in (False, True):
        found = tile.multiply((words, cut(random_inputs(1))), 4, second)
        assert np.isnan(found).all()


class Tile:
    """16 rows of a weight of 256 inputs: bits [8, 16, 256], scales [8, 16, 2] and offsets [16, 2]."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.bits = random.integers(0, 2, (8, 16, 256), dtype=np.uint8)
        size = random.random((8, 16, 2)) + 0.5
        self.scales = (size * 0.5 ** np.arange(8)[:, None, None]).astype(np.float16)
        self.offsets = random.standard_normal((16, 2)).astype(np.float16)

    def words(self, plane):
        """Registers of one plane: word c of rows g and g + 8, of the first group and then of the second."""
        words = np.packbits(self.bits[plane], axis=-1, bitorder="little").view(np.uint32)
        return np.stack([words[G + 8 * (i % 2), C + 4 * (i // 2)] for i in range(4)])

    def own(self, values):
        """fp16 of both groups side by side in one register, for rows g and g + 8, twice: [4, 32]; values [lanes, 16, 2]."""
        both = np.ascontiguousarray(values).view(np.uint32)[..., 0]
        return np.stack([both[np.arange(32), G + 8 * (i % 2)] for i in range(4)])

    def dots(self, groups, first, k):
        """Registers of the dots of planes `first` to `first` + 3 as the kernels add them up, two at a time."""
        dots = np.zeros((4, 32), np.float32)
        for plane in range(first, min(first + 4, 8), 2):
            if plane < k:
                weights = run(f"WEIGHTS_{plane % 4}", "WEIGHTS_LETTERS", np.zeros((4, 32), np.uint32))
                factor = run("FACTOR", "WEIGHTS_LETTERS", np.zeros((4, 32), np.uint32))
                both = self.words(plane), self.words(plane + 1)
                dots = run("PLANES", "PLANES_LETTERS", dots, *both, *groups, weights, factor)
        return dots

    def multiply(self, groups, k, second=False):
        """W_k x of 16 rows, as the kernels compute it; second: in registers 2 and 3."""
        which = "SECOND" if second else "FIRST"
        total = numbers(np.zeros((4, 32), np.uint32))
        offsets = np.where((C == 0)[:, None, None], self.offsets[None], np.float16(0))
        total = run(f"OFFSET_{which}", "OFFSET_LETTERS", total, self.own(offsets), *groups)
        for first in (0, 4):
            if first < k:
                own = np.where((first + C < k)[:, None, None], self.scales[first + C], np.float16(0))
                dots = self.dots(groups, first, k)
                total = run(f"SCALE_{which}", "SCALE_LETTERS", total, dots, self.own(own), *groups)
        rows = numbers(total).reshape(4, 8, 4).sum(-1)
        assert not rows[:2].any() if second else not rows[2:].any()
        return rows[2:].reshape(16) if second else rows[:2].reshape(16)

    def expected(self, steps, values, k):
        """The same in whole numbers and fp64; values int64 [256]."""
        out = np.zeros(16)
        for group in range(2):
            part = slice(128 * group, 128 * group + 128)
            dots = 2 * self.bits[:k, :, part].astype(np.int64) @ values[part] - values[part].sum()
            own = (self.scales[:k, :, group].astype(np.float64) * dots).sum(0)
            out += steps[group] * (own + self.offsets[:, group].astype(np.float64) * values[part].sum())
        return out

    def dense(self, k):
        """The weight, fp64 [16, 256]."""
        signs = 2.0 * self.bits[:k] - 1
        return np.repeat(self.offsets.astype(np.float64), 128, 1) + (np.repeat(self.scales[:k], 128, -1) * signs).sum(0)


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def both_groups(x):
    groups = cut(x[:128]), cut(x[128:])
    return groups, np.concatenate([integers(words) for words in groups]), [step_and_sum(words)[0] for words in groups]


@pytest.mark.parametrize("inputs", ["random", "extreme", "highest", "lowest"])
def test_dots_are_exact(inputs):
    """Lane 4g + c has those of plane c with rows g and g + 8: of the first group and of the second."""
    x = random_inputs(2, 256) * np.repeat([1.0, 1e-3], 128)
    x = {"random": x, "extreme": np.sign(x), "highest": np.ones(256), "lowest": -np.ones(256)}[inputs]
    tile = Tile(3)
    tile.bits[0], tile.bits[1] = 1, 0
    groups, values, _ = both_groups(x)
    for first in (0, 4):
        found = numbers(tile.dots(groups, first, 8)).astype(np.float64) * asm.SUBNORMALS
        for register in range(4):
            row, group = G + 8 * (register // 2), slice(128 * (register % 2), 128 * (register % 2) + 128)
            own = tile.bits[first + C, row, group].astype(np.int64)
            assert (found[register] == own @ values[group]).all()


@pytest.mark.parametrize("k", range(1, 9))
def test_products_of_every_number_of_planes(k):
    x, tile = random_inputs(4, 256) * np.repeat([1.0, 0.1], 128), Tile(k)
    groups, values, steps = both_groups(x)
    expected = tile.expected(steps, values, k)
    assert error(expected, tile.dense(k) @ (values * np.repeat(steps, 128))) < 1e-12
    assert error(expected, tile.dense(k) @ x) < 5e-5  # 16 bits, of the largest input of a group
    for second in (False, True):
        assert error(tile.multiply(groups, k, second), expected) < EXACT


def test_one_matrix_leaves_the_other_alone():
    groups, tile, before = both_groups(random_inputs(5, 256))[0], Tile(6), random_inputs(7).reshape(4, 32)
    own = tile.own(np.repeat(tile.scales[:1], 32, 0))
    dots = tile.dots(groups, 0, 8)
    for second, which in enumerate(("FIRST", "SECOND")):
        kept = slice(0, 2) if second else slice(2, 4)
        for found in (
            run(f"SCALE_{which}", "SCALE_LETTERS", before, dots, own, *groups),
            run(f"OFFSET_{which}", "OFFSET_LETTERS", before, own, *groups),
        ):
            assert (numbers(found)[kept] == before[kept]).all() and (numbers(found) != before).sum() == 64


def test_planes_that_are_not_read_may_be_anything():
    tile, other = Tile(10), Tile(11)
    other.bits[:3], other.scales, other.offsets = tile.bits[:3], tile.scales, tile.offsets
    groups = both_groups(random_inputs(12, 256))[0]
    assert (tile.multiply(groups, 3) == other.multiply(groups, 3)).all()
    assert (tile.multiply(groups, 4) != other.multiply(groups, 4)).all()
