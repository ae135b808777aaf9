"""Products of rows with weights of tied scales, in Gluon: planes put together to 8-bit numbers, groups of 32 inputs or more.

The planes of a tied scale differ by powers of two, so that they are one integer before any float work: plane 0 is the top
bit of a byte. A row of x is cut, per 128 inputs, into two bytes, and multiplied on the integer tensor cores, each 32 inputs by
themselves. Tensors of words are those of `bitserial_product`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.bitserial_product import reads, words_layout
from dpamoe.kernels.byte_asm import (
    DOTS,
    DOTS_LETTERS,
    SPREAD,
    SPREAD_LETTERS,
    TIED_FIRST,
    TIED_LETTERS,
    TIED_SECOND,
)
from dpamoe.kernels.triton_unpack import OFFSET_STEPS, tied_scale


@gluon.jit
def spread(X):
    """A group that was cut into bytes, as the products take it."""
    return gl.inline_asm_elementwise(SPREAD, SPREAD_LETTERS, [X], (gl.int32, gl.int32), True, 4)


@gluon.jit
def tied_scales(codes, offset, row, word, read, IN: gl.constexpr, TIED: gl.constexpr):
    """Scale of a number, and what is added to numbers but for k, of each word [16 RT, 8 NW]; scale 0 where nothing is read.

    A weight of k planes is scale * (number / 128 - (1 - 2 ** -k) + offset / 96). row, word: where its group stands; TIED:
    inputs in a group.
    """
    at = row * (IN // TIED) + word * 32 // TIED
    inside = read & (word < IN // 32)
    code = gl.load(codes + at, mask=inside, other=0).to(gl.int32)
    steps = gl.load(offset + at, mask=inside, other=0).to(gl.float32)
    return tied_scale(code, 1 / 128), steps * (128 / OFFSET_STEPS) - 128


@gluon.jit
def _exchanged(lower, upper, BY: gl.constexpr, MASK: gl.constexpr):
    """Bits of `upper` under MASK go where those BY higher are in `lower`, and those go there."""
    return (lower & MASK) | ((upper << BY) & ~MASK), ((lower >> BY) & MASK) | (upper & ~MASK)


@gluon.jit
def _transposed(word):
    """Byte by byte: bit i of word p from bit p of word i; eight words."""
    a0, a4 = _exchanged(word[0], word[4], 4, 0x0F0F0F0F)
    a1, a5 = _exchanged(word[1], word[5], 4, 0x0F0F0F0F)
    a2, a6 = _exchanged(word[2], word[6], 4, 0x0F0F0F0F)
    a3, a7 = _exchanged(word[3], word[7], 4, 0x0F0F0F0F)
    b0, b2 = _exchanged(a0, a2, 2, 0x33333333)
    b1, b3 = _exchanged(a1, a3, 2, 0x33333333)
    b4, b6 = _exchanged(a4, a6, 2, 0x33333333)
    b5, b7 = _exchanged(a5, a7, 2, 0x33333333)
    c0, c1 = _exchanged(b0, b1, 1, 0x55555555)
    c2, c3 = _exchanged(b2, b3, 1, 0x55555555)
    c4, c5 = _exchanged(b4, b5, 1, 0x55555555)
    c6, c7 = _exchanged(b6, b7, 1, 0x55555555)
    return c0, c1, c2, c3, c4, c5, c6, c7


@gluon.jit
def numbers_of(buffers, planes, at, k, most, UNIT: gl.constexpr, UNITS: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr):
    """Eight words of 8-bit numbers: byte j of word p has, of input 8j + p, the bits of the first k planes, plane 0 on top.

    k: words, from `reads`; most: at least all of them. Planes come as in `two_planes`.
    """
    if C <= 4:
        numbers = _numbers(buffers, planes, at, k, C, UNIT, UNITS, CAP)
    else:
        if most <= 4:
            numbers = _numbers(buffers, planes, at, k, 4, UNIT, UNITS, CAP)
        else:
            numbers = _numbers(buffers, planes, at, k, C, UNIT, UNITS, CAP)
    return numbers


@gluon.jit
def _numbers(
    buffers, planes, at, k, MOST: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, CAP: gl.constexpr
):  # fmt: skip
    """`numbers_of` at most MOST planes."""
    words = ()
    for c in gl.static_range(7, -1, -1):
        if c >= MOST:
            word = at.to(gl.int32) * 0
        elif c < CAP:
            word = gl.where(k > c, buffers[c * UNITS + UNIT].load(at.type.layout), 0)
        else:
            word = gl.load(planes[c].to(gl.pointer_type(gl.int32)) + at, mask=k > c, other=0)
        words = words + (word,)
    return _transposed(words)


@gluon.jit
def add_numbers(total, numbers, own, k, X, Y, spread_x, spread_y, SECOND: gl.constexpr):
    """total plus the products of numbers with both groups, in units of the expert, in the registers of the first matrix, or of
    the second; own: from `tied_scales`.
    """
    arguments = [
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7],
        spread_x[0], spread_x[1], spread_y[0], spread_y[1],
    ]  # fmt: skip
    dots = gl.inline_asm_elementwise(DOTS, DOTS_LETTERS, arguments, gl.float32, True, 4)
    shift = own[1] + (256 >> k).to(gl.float32) * 0.5
    code: gl.constexpr = TIED_SECOND if SECOND else TIED_FIRST
    return gl.inline_asm_elementwise(code, TIED_LETTERS, [total, dots, own[0], shift, X, Y], gl.float32, True, 4)


@gluon.jit
def tied_scales_of_rows(
    codes, offset, row, column, k, IN: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr, MATRICES: gl.constexpr,
    NW: gl.constexpr, TIED: gl.constexpr,
):  # fmt: skip
    """`tied_scales` for each piece of 256 NW inputs and each matrix (the second WIDTH rows on); row, column: of the words."""
    found = ()
    for p in gl.static_range(PIECES):
        for m in gl.static_range(MATRICES):
            word = column + p * 8 * NW
            found = found + (tied_scales(codes, offset, row + m * WIDTH, word, k > 0, IN, TIED),)
    return found


@gluon.jit
def tied_rows(
    X, Y, own, buffers, planes, at, column, k, IN: gl.constexpr, C: gl.constexpr, CAP: gl.constexpr, WIDTH: gl.constexpr,
    PIECES: gl.constexpr, MATRICES: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr,
):  # fmt: skip
    """W_k x of a tile's rows, in units of the expert: of the first matrix in registers 0 and 1, of the second in 2 and 3.

    at: where words stand, in which column; k: a number.
    """
    total = gl.zeros([16 * RT, 8 * NW], gl.float32, words_layout(NW, RT))
    many = at.to(gl.int32) * 0 + k
    for p in gl.static_range(PIECES):
        spread_x, spread_y, of_word = spread(X[p]), spread(Y[p]), reads(column + p * 8 * NW, many, IN)
        for m in gl.static_range(MATRICES):
            source = at + (p * 8 * NW + m * WIDTH * (IN // 32))
            numbers = numbers_of(buffers, planes, source, of_word, k, m * PIECES + p, PIECES * MATRICES, C, CAP)
            total = add_numbers(total, numbers, own[p * MATRICES + m], many, X[p], Y[p], spread_x, spread_y, m == 1)
    return total


@gluon.jit
def put_together(buffers, planes, at, most, UNITS: gl.constexpr, C: gl.constexpr):
    """Numbers in place of the planes in shared memory, `most` of them: word p of a unit (of piece and matrix) in the p-th."""
    many = at.to(gl.int32) * 0 + most
    for unit in gl.static_range(UNITS):
        numbers = numbers_of(buffers, planes, at, many, most, unit, UNITS, C, C)
        for p in gl.static_range(8):
            buffers[p * UNITS + unit].store(numbers[p])


@gluon.jit
def stored_rows(
    X, Y, own, buffers, many, k, most, PIECES: gl.constexpr, MATRICES: gl.constexpr, NW: gl.constexpr, RT: gl.constexpr
):  # fmt: skip
    """`tied_rows` behind `put_together`; many: k as words. The bits of planes that only other pairs read are left out."""
    layout: gl.constexpr = words_layout(NW, RT)
    total = gl.zeros([16 * RT, 8 * NW], gl.float32, layout)
    for p in gl.static_range(PIECES):
        spread_x, spread_y = spread(X[p]), spread(Y[p])
        for m in gl.static_range(MATRICES):
            numbers = ()
            for word in gl.static_range(8):
                numbers = numbers + (buffers[(word * MATRICES + m) * PIECES + p].load(layout),)
            if k < most:
                numbers = _first_planes(numbers, ((0xFF00 >> many) & 0xFF) * 0x01010101)
            total = add_numbers(total, numbers, own[p * MATRICES + m], many, X[p], Y[p], spread_x, spread_y, m == 1)
    return total


@gluon.jit
def _first_planes(numbers, mask):
    found = ()
    for word in gl.static_range(8):
        found = found + (numbers[word] & mask,)
    return found
