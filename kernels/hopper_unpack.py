"""Gluon helpers of the Hopper kernel: which lane holds which words, and words made the left operand of a product there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.triton_unpack import bits_beside


@gluon.constexpr_function
def word_layout(NW, W):
    """Words [BM, 4 W] as the lanes of a warp group hold them: rows r and r + 8, W words in a row."""
    regs = [[0, 1], [0, 2]][: W.bit_length() - 1] + [[8, 0]]
    warps = [[16, 0], [32, 0], [64, 0]][: NW.bit_length() - 1]
    return gl.DistributedLinearLayout(regs, [[0, W], [0, 2 * W], [1, 0], [2, 0], [4, 0]], warps, [], [16 * NW, 4 * W])


@gluon.constexpr_function
def pair_layout(NW):
    """[BM, 2, 2] with the four lanes of a row along the last two dimensions."""
    warps = [[16, 0, 0], [32, 0, 0], [64, 0, 0]][: NW.bit_length() - 1]
    lanes = [[0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[8, 0, 0]], lanes, warps, [], [16 * NW, 2, 2])


@gluon.constexpr_function
def product_layout(NW, S):
    """A product of 16 NW rows and S columns."""
    return gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, S, 16])


@gluon.constexpr_function
def left_layout(NW, S):
    """The left operand of a product with S columns."""
    return gl.DotOperandLayout(0, product_layout(NW, S), 2)


@gluon.jit
def fragment(p, BM: gl.constexpr, layout: gl.constexpr):
    """16 tensors of fp16 pairs [BM, 4], one per bit, as the left operand [BM, 128]; no data moves."""
    whole = bits_beside(p)  # [BM, lane, bits 0 to 3 of s, half]
    return gl.convert_layout(whole.permute(0, 5, 4, 3, 2, 1, 6).reshape(BM, 128), layout, assert_trivial=True)


@gluon.jit
def words_of(words, W: gl.constexpr, BM: gl.constexpr, layout: gl.constexpr):
    """Words [BM, 4 W] as W tensors [BM, 4]: word w of every lane."""
    if W == 1:
        single = (words,)
    elif W == 2:
        single = gl.split(words.reshape(BM, 4, 2))
    else:
        even, odd = gl.split(words.reshape(BM, 4, 2, 2))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        single = (first, second, third, fourth)
    new = ()
    for w in gl.static_range(W):
        new = new + (gl.convert_layout(single[w], layout, assert_trivial=True),)
    return new


@gluon.jit
def line_of(block, layout: gl.constexpr, BM: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr):
    """Row of the weight for each row of the tile; GATED: rows r and r + 8 are a gate row and its up row."""
    r = gl.arange(0, BM, layout)
    if GATED:
        row = gl.minimum(block * (BM // 2) + r // 16 * 8 + r % 8, OUT // 2 - 1) + r // 8 % 2 * (OUT // 2)
    else:
        row = gl.minimum(block * BM + r, OUT - 1)
    return row


@gluon.jit
def fresh(at, step: gl.constexpr, unit: gl.constexpr):
    """at + step, as if it were new: else the compiler holds an address for every plane in registers all along.

    unit: the offsets of this many neighbours follow one another and begin at a multiple of it.
    """
    letters: gl.constexpr = "=l,l" if at.dtype == gl.int64 else "=r,r"
    text: gl.constexpr = "mov.b64 $0, $1;" if at.dtype == gl.int64 else "mov.b32 $0, $1;"
    at = gl.inline_asm_elementwise(text, letters, [at + step], at.dtype, False, 1)
    return gl.max_contiguous(gl.multiple_of(at, [1, unit]), [1, unit])


@gluon.jit
def beside(accs, BM: gl.constexpr, BN: gl.constexpr):
    """All slices as one [BM, BN]; no data moves."""
    if len(accs) == 1:
        whole = accs[0]
    elif len(accs) == 2:
        whole = gl.join(accs[0], accs[1]).permute(0, 2, 1).reshape(BM, BN)
    elif len(accs) == 4:
        whole = gl.join(gl.join(accs[0], accs[1]), gl.join(accs[2], accs[3])).permute(0, 3, 2, 1).reshape(BM, BN)
    else:
        low = gl.join(gl.join(accs[0], accs[1]), gl.join(accs[2], accs[3]))
        high = gl.join(gl.join(accs[4], accs[5]), gl.join(accs[6], accs[7]))
        whole = gl.join(low, high).permute(0, 4, 3, 2, 1).reshape(BM, BN)
    return whole
