"""Triton helpers shared by the expert kernels: bits of a plane used where they stand, x made ready for them.

A plane is read as 32-bit words; bit s of half h of word j is input 32 j + 16 h + s. A bit is never shifted: masked out at
position p of an fp16 number it is worth 2^(p - 24) exactly, so one `and` and one packed multiply-add use two bits, and the
other factor carries the missing 2^(19 - p) or 2^(24 - p). Positions 4 to 11 keep both factors inside fp16; the other bits get
there by swapping the bytes of each half. Packed pairs of fp16 travel as int32, so that the compiler never takes them apart.
"""

import triton
import triton.language as tl

from dpamoe.kernels.layout import TIED_OFFSET_STEPS, TIED_STEPS_PER_OCTAVE, TIED_TOP_CODE

STEPS_PER_OCTAVE = tl.constexpr(float(TIED_STEPS_PER_OCTAVE))
TOP_CODE = tl.constexpr(float(TIED_TOP_CODE))
OFFSET_STEPS = tl.constexpr(float(TIED_OFFSET_STEPS))


@triton.constexpr_function
def position(s):
    """Where bit s of a half is used: at s itself, or after the byte swap."""
    return s if 4 <= s < 12 else (s + 8) % 16


@triton.constexpr_function
def _add_bits_asm(place):
    return f"{{ .reg .b32 t; and.b32 t, $1, {1 << place | 1 << (place + 16)}; fma.rn.f16x2 $0, t, $2, $3; }}"


@triton.jit
def halves(pairs):
    """The two fp16 numbers in an int32: lower, upper."""
    lower = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return lower, (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def pair(lower, upper):
    """Two fp16 numbers as one int32."""
    low = lower.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (upper.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def add_bits(acc, words, place: tl.constexpr, x, ASM: tl.constexpr):
    """acc + (the bits at `place` of both halves as fp16 numbers) * x; all int32 of two fp16."""
    if ASM:
        acc = tl.inline_asm_elementwise(_add_bits_asm(place), "=r,r,r,r", [words, x, acc], tl.int32, True, 1)
    else:
        mask: tl.constexpr = (1 << place) | (1 << (place + 16))
        a, b = halves(acc)
        p, q = halves(words & mask)
        u, v = halves(x)
        acc = pair(a + p * u, b + q * v)
    return acc


@triton.constexpr_function
def _first_bits_asm(place):
    return f"{{ .reg .b32 t; and.b32 t, $1, {1 << place | 1 << (place + 16)}; mul.rn.f16x2 $0, t, $2; }}"


@triton.jit
def first_bits(words, place: tl.constexpr, x):
    """As `add_bits`, to nothing."""
    return tl.inline_asm_elementwise(_first_bits_asm(place), "=r,r,r", [words, x], tl.int32, True, 1)


@triton.jit
def add_pairs(x, y, ASM: tl.constexpr):
    """Sum of fp16 pairs."""
    if ASM:
        total = tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.int32, True, 1)
    else:
        a, b = halves(x)
        c, d = halves(y)
        total = pair(a + c, b + d)
    return total


@triton.jit
def swap_bytes(words, ASM: tl.constexpr):
    """Exchange the two bytes of each half."""
    if ASM:
        swapped = tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x2301;", "=r,r", [words], tl.int32, True, 1)
    else:
        swapped = ((words << 8) & (0xFF00FF00 - (1 << 32))) | ((words >> 8) & 0x00FF00FF)
    return swapped


@triton.jit
def add_plane(parts, words, scale, ASM: tl.constexpr):
    """Add 2 * scale * bit to all weights: 16 tensors of fp16 pairs, one per bit; words int32; scale: 2^14 times it, pairs."""
    swapped = swap_bytes(words, ASM)
    new = ()
    for s in tl.static_range(16):
        if position(s) == s:
            new = new + (add_bits(parts[s], words, position(s), scale, ASM),)
        else:
            new = new + (add_bits(parts[s], swapped, position(s), scale, ASM),)
    return new


@triton.jit
def bits_beside(p):
    """16 tensors of fp16 pairs [...], one per bit s, as fp16 [..., bits 0 to 3 of s, half]; no data moves."""
    q0, q1, q2, q3 = tl.join(p[0], p[1]), tl.join(p[2], p[3]), tl.join(p[4], p[5]), tl.join(p[6], p[7])
    q4, q5, q6, q7 = tl.join(p[8], p[9]), tl.join(p[10], p[11]), tl.join(p[12], p[13]), tl.join(p[14], p[15])
    low = tl.join(tl.join(q0, q1), tl.join(q2, q3))
    high = tl.join(tl.join(q4, q5), tl.join(q6, q7))
    lower, upper = halves(tl.join(low, high))
    return tl.join(lower, upper)


@triton.jit
def twice(x, ASM: tl.constexpr):
    """x, fp32, as two equal fp16 numbers in an int32."""
    if ASM:
        both = tl.inline_asm_elementwise(
            "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, h}; }", "=r,f", [x], tl.int32, True, 1
        )
    else:
        both = pair(x.to(tl.float16), x.to(tl.float16))
    return both


@triton.jit
def pinned(x, ASM: tl.constexpr):
    """x, 32 bits wide, computed once where it is: the compiler may neither repeat it in another layout nor move it."""
    if ASM:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 1)
    return x


@triton.jit
def unit_power(largest):
    """The power of two 2^e with 2^e <= largest < 2^(e + 1), and 2^-(e + 1); fp32, safe for 0 and for infinity."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23)
    inverse = tl.maximum((254 << 23) - exponent, 0).to(tl.float32, bitcast=True) * 0.5
    return exponent.to(tl.float32, bitcast=True), inverse


@triton.jit
def place_power(bit, top: tl.constexpr):
    """2^(top - place of bit s), fp32, so that the bit's own worth is made up for."""
    place = tl.where((bit >= 4) & (bit < 12), bit, (bit + 8) % 16)
    return ((127 + top - place) << 23).to(tl.float32, bitcast=True)


@triton.jit
def prepare(x, UNITS: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr):
    """x fp32 [UNITS, 32 WORDS] to (16 tensors [UNITS, WORDS] for `add_bits`, tensor s for bit s; its sums; its factors).

    Twice the sum of bit * x over a unit = factor * the fp16 sum of `add_bits`, so that a plane of +1 and -1 is that minus sums.
    """
    x = pinned(x, ASM)
    power, inverse = unit_power(tl.max(tl.abs(x), 1))
    sums = tl.sum(x, 1)
    scaled = (x * inverse[:, None] * place_power(tl.arange(0, 32 * WORDS) % 16, 19)[None, :]).to(tl.float16)
    lower, upper = tl.split(scaled.reshape(UNITS, WORDS, 2, 16).permute(0, 1, 3, 2))
    e, o = tl.split(pinned(pair(lower, upper), ASM).reshape(UNITS, WORDS, 8, 2))
    ee, eo = tl.split(e.reshape(UNITS, WORDS, 4, 2))
    oe, oo = tl.split(o.reshape(UNITS, WORDS, 4, 2))
    s0, s1, s2, s3 = _split4(ee, UNITS, WORDS), _split4(oe, UNITS, WORDS), _split4(eo, UNITS, WORDS), _split4(oo, UNITS, WORDS)
    ready = (
        s0[0], s1[0], s2[0], s3[0], s0[1], s1[1], s2[1], s3[1], s0[2], s1[2], s2[2], s3[2], s0[3], s1[3], s2[3], s3[3],
    )  # fmt: skip
    return ready, sums, power * 2.0**7


@triton.jit
def _split4(x, UNITS: tl.constexpr, WORDS: tl.constexpr):
    """[UNITS, WORDS, 4] to 4 tensors, in order."""
    e, o = tl.split(x.reshape(UNITS, WORDS, 2, 2))
    a, c = tl.split(e)
    b, d = tl.split(o)
    return a, b, c, d


@triton.jit
def bit_sums(words, ready, ASM: tl.constexpr):
    """Sum over a unit of bit * x, fp32 [ROWS, UNITS, 1] before the factor; words int32 [ROWS, UNITS, WORDS]."""
    swapped = swap_bytes(words, ASM)
    standing = words * 0
    moved = standing
    for s in tl.static_range(16):
        if position(s) == s:
            standing = add_bits(standing, words, position(s), ready[s][None], ASM)
        else:
            moved = add_bits(moved, swapped, position(s), ready[s][None], ASM)
    lower, upper = halves(add_pairs(standing, moved, ASM))
    return tl.sum(lower.to(tl.float32) + upper.to(tl.float32), 2, keep_dims=True)


@triton.jit
def tied_scale(code, unit):
    """Scale behind an 8-bit log code, as in `layout.tied_scale`."""
    return tl.where(code == 0, 0.0, tl.exp2((code.to(tl.float32) - TOP_CODE) / STEPS_PER_OCTAVE) * unit)
