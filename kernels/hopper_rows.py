"""Rows in the order that the Hopper prefill kernel multiplies them in, with their sums, in Triton."""

import triton
import triton.language as tl

from dpamoe.kernels.triton_unpack import place_power, unit_power
from dpamoe.kernels.triton_wait import wait_for_before


@triton.jit
def _sums(value, ROWS: tl.constexpr, LANES: tl.constexpr, OWN: tl.constexpr):
    """16 times the sum over the OWN inputs of each lane, fp16 [ROWS, 4 LANES], 16 columns for four lanes.

    Lane l has columns 2 l and 8 + 2 l: the sum as a fp16 number; column 2 l + 1 has what is left of it, 9 + 2 l zero.
    """
    total = tl.sum(value.reshape(ROWS, LANES, OWN), 2) * 16
    high = total.to(tl.float16)
    low = (total - high.to(tl.float32)).to(tl.float16)
    both = tl.join(tl.join(high, low), tl.join(high, low * 0))  # [ROWS, LANES, column of two, upper half]
    return both.reshape(ROWS, LANES // 4, 4, 2, 2).permute(0, 1, 4, 2, 3).reshape(ROWS, 4 * LANES)


@triton.jit(do_not_specialize=["rows"])
def prepare_kernel(
    x, places, ready, factor, x_row, rows, A: tl.constexpr, IN: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x, each divided by a power of two, as fp16 in the order of the matrix unit, wherever they are needed.

    Input 32 (l W + w) + 16 h + s of a stretch of 128 W goes to block w, column 8 s + 2 l + h, and carries
    2^(19 - place of bit s). Times the unpacked weight (weight * 2^(place - 11)) that is 2^8 too much, which factor
    takes back. Behind all IN columns there are 16 for each stretch, see `_sums`. Row i goes to places[A i] to
    places[A i + A - 1], where they are not negative; A: 0, to its own. ready [any, IN + 16 stretches]; PAD: a power of two
    from IN on. The kernel before writes places, or x where they are not asked.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, PAD)
    if A == 0:
        wait_for_before(PDL)
    value = tl.load(x + row[:, None] * x_row + at[None, :], mask=(row < rows)[:, None] & (at < IN)[None, :], other=0.0)
    value = value.to(tl.float32)
    power, inverse = unit_power(tl.max(tl.abs(value), 1))
    value = value * inverse[:, None]
    scaled = (value * place_power(at % 16, 19)[None, :]).to(tl.float16)
    moved = scaled.reshape(ROWS, PAD // (128 * W), 4, W, 2, 16).permute(0, 1, 3, 5, 2, 4).reshape(ROWS, PAD)
    sums = _sums(value, ROWS, PAD // (32 * W), 32 * W)
    SUMS: tl.constexpr = IN // (8 * W)
    column = tl.arange(0, PAD // (8 * W))
    own = (row,)
    if A:
        wait_for_before(PDL)
        own = ()
        for slot in tl.static_range(A):  # all are asked for before the first row is written
            own = own + (tl.load(places + row * A + slot, mask=row < rows, other=-1).to(tl.int64),)
    for slot in tl.static_range(len(own)):
        place = own[slot]
        held = (place >= 0) & (row < rows)
        target = ready + place[:, None] * (IN + SUMS)
        tl.store(target + at[None, :], moved, mask=held[:, None] & (at < IN)[None, :])
        tl.store(target + IN + column[None, :], sums, mask=held[:, None] & (column < SUMS)[None, :])
        tl.store(factor + place, power * 2.0**-7, mask=held)
