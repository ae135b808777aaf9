"""PTX of the bit-serial products: rows cut into bits, 1-bit products with planes, popcounts added up on the tensor cores.

Everything works on four registers of a lane at once (`pack=4`), in the order of `bitserial_product.words_layout`: word c of
group 2w for rows g and g + 8, then of group 2w + 1, in lane 4g + c of warp w: the left operands of two m16n8k128 products.
"""

import struct

from triton.experimental.gluon import language as gl

SUBNORMALS = 2.0**24  # a popcount n stands as the fp16 number n / SUBNORMALS
SMALLEST = 2.0**-100  # largest input of a group from which steps follow it: 32767 through it is finite
_ONES = 1.5 * 2.0**23  # the last bit of its fp32 mantissa is worth 1, also when 2 ** 22 is added or taken away


def as_float(value: float) -> str:
    """An fp32 number as PTX has it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def letters(results: str, arguments: str) -> gl.constexpr:
    """Constraints: one letter for each register."""
    return gl.constexpr(",".join([f"={letter}" for letter in results] + list(arguments)))


def _swap(word: str, bit: int) -> str:
    """Exchange bit 0, 1 or 2 of the position in a word with bit 2, 3 or 4 of the lane's number, between two lanes."""
    lane, mask = 4 << bit, (0x55555555, 0x33333333, 0x0F0F0F0F)[bit]
    return (
        f"shfl.sync.bfly.b32 other, {word}, {lane}, 31, -1; and.b32 t, lane, {lane}; setp.ne.s32 upper, t, 0;\n"
        f"selp.b32 t, {32 - (1 << bit)}, {1 << bit}, upper; shf.l.wrap.b32 other, other, other, t;\n"
        f"selp.b32 t, {mask ^ 0xFFFFFFFF}, {mask}, upper; lop3.b32 {word}, t, {word}, other, 0xCA;\n"
    )


def integers(most: int) -> str:
    """Four floats of a lane, $4-$7, as integers a, b, c, d of at most `most`, in steps that 128 of a warp share.

    Of a, b, c, d the low 16 bits count; `sum` is what they add up to, and `step` the step. To be declared before: most, next,
    step (f32), a, b, c, d, t, sum (b32). A number is rounded by adding it to one so large that its last bit is worth 1.
    """
    rounded = "".join(
        f"fma.rn.f32 next, ${4 + i}, most, {as_float(_ONES)}; mov.b32 {name}, next; " for i, name in enumerate("abcd")
    )
    base = -4 * int(as_float(_ONES)[2:], 16) & 0xFFFFFFFF
    return f"""abs.f32 most, $4; abs.f32 next, $5; max.NaN.f32 most, most, next;
abs.f32 next, $6; max.NaN.f32 most, most, next; abs.f32 next, $7; max.NaN.f32 most, most, next;
mov.b32 a, most; redux.sync.max.u32 a, a, -1; mov.b32 most, a; max.NaN.f32 most, most, {as_float(SMALLEST)};
mul.f32 step, most, {as_float(1 / most)};
mul.f32 most, most, {as_float(2.0**-10)}; rcp.approx.ftz.f32 most, most; mul.f32 most, most, {as_float(most * 2.0**-10)};
{rounded}
add.s32 sum, a, b; add.s32 t, c, d; add.s32 sum, sum, t; add.s32 sum, sum, {base:#x};
"""


# bytes 0 of a, b, c, d to `low`, bytes 1 to `high`, in this order
BYTES = """prmt.b32 a, a, b, 0x5140; prmt.b32 c, c, d, 0x5140;
prmt.b32 low, a, c, 0x5410; prmt.b32 high, a, c, 0x7632;
"""


def _slice() -> str:
    swaps = "".join(_swap(word, bit) for bit in range(3) for word in ("low", "high"))
    return f"""{{ .reg .f32 most, next, step; .reg .b32 a, b, c, d, t, sum, other, lane, low, high; .reg .pred upper;
{integers(32767)}redux.sync.add.s32 sum, sum, -1; cvt.rn.f32.s32 next, sum;
mov.u32 lane, %laneid; {BYTES}{swaps}mov.b32 $0, low; mov.b32 $1, high; mov.b32 $2, step; mov.b32 $3, next; }}"""


def _count(words: str, column: tuple[str, str], weight: str) -> str:
    """Popcounts of one group with both halves of the activation, each times its power of two, added to one output column."""
    low, high = column
    product = "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc"
    return f"""{product} {{a0, a1, a2, a3}}, {{{words}}}, {{{low}}}, {{z, z, z, z}};
{product} {{b0, b1, b2, b3}}, {{{words}}}, {{{high}}}, {{z, z, z, z}};
prmt.b32 a0, a0, a1, 0x5410; prmt.b32 a1, a2, a3, 0x5410; prmt.b32 b0, b0, b1, 0x5410; prmt.b32 b1, b2, b3, 0x5410;
mul.rn.f16x2 v, {weight}, $28;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{d0, d1, d2, d3}}, {{a0, a1, b0, b1}}, {{{weight}, v}}, {{d0, d1, d2, d3}};
"""


def _planes() -> str:
    """D 4-7 plus the dots of two planes, words 8-11 and 12-15; bits of both groups 16-19 and 20-23, weights 24-27, 28."""
    low, high = ("$16", "$17"), ("$20", "$21")
    work = _count("$8, $9", low, "$24") + _count("$10, $11", high, "$25")
    work += _count("$12, $13", low, "$26") + _count("$14, $15", high, "$27")
    return f"""{{ .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3, z, v; .reg .f32 d0, d1, d2, d3;
mov.b32 z, 0; mov.f32 d0, $4; mov.f32 d1, $5; mov.f32 d2, $6; mov.f32 d3, $7;
{work}mov.f32 $0, d0; mov.f32 $1, d1; mov.f32 $2, d2; mov.f32 $3, d3; }}"""


def _halves(first: str, second: str) -> str:
    """The scales of row g (one register: group 2w low, 2w + 1 high) and of row g + 8 as fp32: p0, p2 and p1, p3."""
    lines = [
        f"mov.b32 {{h0, h1}}, {register}; cvt.f32.f16 p{row}, h0; cvt.f32.f16 p{row + 2}, h1;"
        for row, register in enumerate((first, second))
    ]
    return " ".join(lines) + "\n"


_HEAD = "{ .reg .f32 a0, a1, p0, p1, p2, p3, s0, q0, s1, q1, t; .reg .f16 h0, h1;\n"


def _steps(first: int, second: int) -> str:
    """Step and sum of both groups, from registers of the sliced rows."""
    return f"mov.b32 s0, ${first}; mov.b32 q0, ${first + 1}; mov.b32 s1, ${second}; mov.b32 q1, ${second + 1};\n"


def taken_and_put(first: int) -> tuple[str, str]:
    """The two registers of 4-7 that stand for rows g and g + 8 of one of two matrices, taken out and put back."""
    others = [i for i in range(4) if i not in (first, first + 1)]
    taken = f"mov.f32 a0, ${4 + first}; mov.f32 a1, ${5 + first};\n"
    put = f"mov.f32 ${first}, a0; mov.f32 ${first + 1}, a1; " + " ".join(f"mov.f32 ${i}, ${4 + i};" for i in others)
    return taken, put + " }"


def _scale(first: int) -> str:
    """Rows 4-7 plus scales 12-13 times (2 dots 8-11 minus the sums), sliced rows 16-19 and 20-23."""
    taken, put = taken_and_put(first)
    text = _HEAD + _steps(18, 22) + "neg.f32 q0, q0; neg.f32 q1, q1;\n" + taken + _halves("$12", "$13")
    text += "mul.f32 p0, p0, s0; mul.f32 p1, p1, s0; mul.f32 p2, p2, s1; mul.f32 p3, p3, s1;\n"
    for dot, total, scale, row in ((8, "q0", 0, 0), (9, "q1", 2, 0), (10, "q0", 1, 1), (11, "q1", 3, 1)):
        text += f"fma.rn.f32 t, ${dot}, {as_float(2 * SUBNORMALS)}, {total}; fma.rn.f32 a{row}, p{scale}, t, a{row};\n"
    return text + put


def _offset(first: int) -> str:
    """Rows 4-7 plus offsets 8-9 times what the activations add up to, sliced rows 12-15 and 16-19."""
    taken, put = taken_and_put(first)
    text = _HEAD + _steps(14, 18) + "mul.f32 s0, s0, q0; mul.f32 s1, s1, q1;\n" + taken + _halves("$8", "$9")
    text += "fma.rn.f32 a0, p0, s0, a0; fma.rn.f32 a0, p2, s1, a0; fma.rn.f32 a1, p1, s0, a1; fma.rn.f32 a1, p3, s1, a1;\n"
    return text + put


# Four floats of a lane, elements g + 32c + 8j of a group for j = 0 … 3, to: its word of the low bits (lane 4g + c: bit g of the
# 16, inputs 32c … 32c + 31), its word of the high bits, the step of the group (fp32), the sum of the group's integers (fp32).
SLICE = gl.constexpr(_slice())
SLICE_LETTERS = letters("rrrr", "ffff")


def _weights(first: int) -> str:
    """Of output columns `first` to `first` + 3: 2^c of this lane's two low bit columns if it is its column, else 0, as fp16."""
    text = "{ .reg .b32 lane, own, w; .reg .pred here; mov.u32 lane, %laneid; and.b32 w, lane, 3; shr.u32 own, lane, 2;\n"
    text += "mul.lo.s32 w, w, 0x08000800; add.s32 w, w, 0x40003C00;\n"
    for i in range(4):
        text += f"setp.eq.s32 here, own, {first + i}; selp.b32 ${i}, w, 0, here;\n"
    return text + "}"


# weights of the low bits, of the output columns of planes 0 and 1 (also 4 and 5), and of planes 2 and 3 (6 and 7)
WEIGHTS_0, WEIGHTS_2 = gl.constexpr(_weights(0)), gl.constexpr(_weights(4))
# what they are multiplied by for the high bits: 256, negative for the top one
FACTOR = gl.constexpr("""{ .reg .b32 lane; .reg .pred last; mov.u32 lane, %laneid; and.b32 lane, lane, 3;
setp.eq.s32 last, lane, 3; selp.b32 $0, 0xDC005C00, 0x5C005C00, last; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }""")
WEIGHTS_LETTERS = letters("rrrr", "rrrr")

PLANES, PLANES_LETTERS = gl.constexpr(_planes()), letters("ffff", "f" * 4 + "r" * 24)

# for rows of the first matrix (registers 0 and 1) and of the second (2 and 3)
SCALE_FIRST, SCALE_SECOND = gl.constexpr(_scale(0)), gl.constexpr(_scale(2))
SCALE_LETTERS = letters("ffff", "f" * 8 + "r" * 12)
OFFSET_FIRST, OFFSET_SECOND = gl.constexpr(_offset(0)), gl.constexpr(_offset(2))
OFFSET_LETTERS = letters("ffff", "f" * 4 + "r" * 12)
