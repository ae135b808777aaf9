"""PTX of the products with tied scales: rows cut into two bytes, and numbers that planes were put together to.

Everything works on four registers of a lane at once (`pack=4`), in the order of `bitserial_product.words_layout`, as
`bitserial_asm` does. A lane 4g + t has of every 128 inputs the 32 of word t, so that a product m16n8k32, of which it brings 8
inputs, is one of 8 inputs each of four words: those of word t are in columns 2t (high bytes) and 2t + 1 (low bytes) alone.
"""

from triton.experimental.gluon import language as gl

from dpamoe.kernels.bitserial_asm import BYTES, integers, letters, taken_and_put

MOST = 127 * 256 + 127  # of two bytes with a sign each


def _cut() -> str:
    adds = "".join(f"shfl.sync.bfly.b32 t, sum, {lane}, 31, -1; add.s32 sum, sum, t;\n" for lane in (4, 8, 16))
    return f"""{{ .reg .f32 most, next, step; .reg .b32 a, b, c, d, t, sum, low, high;
{integers(MOST)}{adds}cvt.rn.f32.s32 next, sum;
add.s32 a, a, 128; add.s32 b, b, 128; add.s32 c, c, 128; add.s32 d, d, 128;
{BYTES}xor.b32 low, low, 0x80808080;
mov.b32 $0, high; mov.b32 $1, low; mov.b32 $2, step; mov.b32 $3, next; }}"""


def _spread() -> str:
    rounds = "".join(
        f"shfl.sync.idx.b32 u, one, from, 31, -1; shfl.sync.idx.b32 v, other, next, 31, -1;\n"
        f"selp.b32 b{r}, v, u, odd; selp.b32 b{r + 1}, u, v, odd; and.b32 b{r}, b{r}, own; and.b32 b{r + 1}, b{r + 1}, own;\n"
        "add.s32 from, from, 8; add.s32 next, next, 8;\n"
        for r in range(0, 8, 2)
    )
    return f"""{{ .reg .b32 lane, t, u, v, own, from, next, one, other, b0, b1, b2, b3, b4, b5, b6, b7; .reg .pred odd, here;
mov.u32 lane, %laneid; and.b32 t, lane, 4; setp.ne.s32 odd, t, 0; selp.b32 one, $9, $8, odd; selp.b32 other, $8, $9, odd;
and.b32 from, lane, 7; xor.b32 next, from, 4; shr.u32 u, lane, 3; and.b32 t, lane, 3; setp.eq.s32 here, u, t;
selp.b32 own, -1, 0, here;
{rounds}{" ".join(f"mov.b32 ${r}, b{r};" for r in range(8))} }}"""


def _dots() -> str:
    product = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
    text = "{ .reg .b32 " + ", ".join(f"d{i}" for i in range(8)) + ";\n"
    text += "".join(f"mov.b32 d{i}, 0; " for i in range(8)) + "\n"
    for group in range(2):
        sums = ", ".join(f"d{4 * group + i}" for i in range(4))
        for step in range(4):
            numbers = [4 + 8 * step + 2 * group + i for i in (0, 1, 4, 5)]
            of_row = [36 + 8 * group + 2 * step + i for i in range(2)]
            words = ", ".join(f"${i}" for i in numbers), ", ".join(f"${i}" for i in of_row)
            text += f"{product} {{{sums}}}, {{{words[0]}}}, {{{words[1]}}}, {{{sums}}};\n"
    for i in range(4):
        text += f"mad.lo.s32 d{2 * i}, d{2 * i}, 256, d{2 * i + 1}; cvt.rn.f32.s32 $%d, d{2 * i};\n" % i
    return text + "}"


def _scale(first: int) -> str:
    """Rows 4-7 plus scales 12-15 times (dots 8-11 plus shifts 16-19 times the sums), cut rows 20-23 and 24-27."""
    taken, put = taken_and_put(first)
    text = "{ .reg .f32 a0, a1, s0, q0, s1, q1, t, p;\n"
    text += "mov.b32 s0, $22; mov.b32 q0, $23; mov.b32 s1, $26; mov.b32 q1, $27;\n" + taken
    for i in range(4):
        text += f"fma.rn.f32 t, ${16 + i}, q{i // 2}, ${8 + i}; mul.f32 p, ${12 + i}, s{i // 2}; "
        text += f"fma.rn.f32 a{i % 2}, p, t, a{i % 2};\n"
    return text + put


# Four floats of a lane, elements g + 32t + 8j of a group for j = 0 … 3, to: their high bytes, their low bytes (both signed, in
# this order), the step of the group (fp32), the sum of the integers of word t (fp32).
CUT, CUT_LETTERS = gl.constexpr(_cut()), letters("rrrr", "ffff")
# Such a group to what the products take: 8 words, bytes j of word p of input 8j + p, in the lanes of the columns of word t.
SPREAD, SPREAD_LETTERS = gl.constexpr(_spread()), letters("r" * 8, "rrrr")
# Dots of words (8 numbers by 4 registers, and both groups spread) with rows, as fp32: sums of at most 32 * 255 * MOST.
DOTS, DOTS_LETTERS = gl.constexpr(_dots()), letters("ffff", "r" * 48)
TIED_FIRST, TIED_SECOND = gl.constexpr(_scale(0)), gl.constexpr(_scale(2))
TIED_LETTERS = letters("ffff", "f" * 16 + "r" * 8)
