"""Gluon helpers of the Hopper kernel: which lane holds which words, and words made the left operand of a product there.

Operands have 64 rows, those of a warp group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dpamoe.kernels.triton_unpack import OFFSET_STEPS, bits_beside, first_bits, halves, position, swap_bytes, tied_scale, twice


@gluon.constexpr_function
def word_layout(W):
    """Words [64, 4 W] as the lanes of a warp group hold them: rows r and r + 8, W words in a row."""
    regs = [[0, 1], [0, 2]][: W.bit_length() - 1] + [[8, 0]]
    lanes = [[0, W], [0, 2 * W], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0], [32, 0]], [], [64, 4 * W])


@gluon.constexpr_function
def pair_layout():
    """[64, 2, 2] with the four lanes of a row along the last two dimensions."""
    lanes = [[0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[8, 0, 0]], lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 2, 2])


@gluon.constexpr_function
def product_layout(S):
    """A product of 64 rows and S columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S, 16])


@gluon.constexpr_function
def left_layout(S):
    """The left operand of a product with S columns."""
    return gl.DotOperandLayout(0, product_layout(S), 2)


@gluon.jit
def first_plane(words, scale):
    """As `add_plane`, to nothing."""
    swapped, new = swap_bytes(words, True), ()
    for s in gl.static_range(16):
        new = new + (first_bits(words if position(s) == s else swapped, position(s), scale),)
    return new


@gluon.jit
def fragment(p, layout: gl.constexpr):
    """16 tensors of fp16 pairs [64, 4], one per bit, as the left operand [64, 128]; no data moves."""
    whole = bits_beside(p)  # [64, lane, bits 0 to 3 of s, half]
    return gl.convert_layout(whole.permute(0, 5, 4, 3, 2, 1, 6).reshape(64, 128), layout, assert_trivial=True)


@gluon.jit
def bases(base, layout: gl.constexpr):
    """fp32 [64, 4] as the left operand [64, 16]: column 2 l + h is its upper part, 8 + 2 l + h what is left of it."""
    high = twice(base, True)
    upper, _ = halves(high)
    low = twice(base - upper.to(gl.float32), True)
    first, second = halves(gl.join(high, low))
    return gl.convert_layout(gl.join(first, second).permute(0, 2, 1, 3).reshape(64, 16), layout, assert_trivial=True)


@gluon.jit
def words_of(words, W: gl.constexpr):
    """Words [64, 4 W] as W tensors [64, 4]: word w of every lane."""
    if W == 1:
        single = (words,)
    elif W == 2:
        single = gl.split(words.reshape(64, 4, 2))
    else:
        even, odd = gl.split(words.reshape(64, 4, 2, 2))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        single = (first, second, third, fourth)
    new = ()
    for w in gl.static_range(W):
        new = new + (gl.convert_layout(single[w], word_layout(1), assert_trivial=True),)
    return new


@gluon.jit
def chosen(words, w, B: gl.constexpr, W: gl.constexpr):
    """The words of B blocks from w on: all of a stretch, or one."""
    if B == W:
        some = words
    elif W == 2:
        some = (gl.where(w == 0, words[0], words[1]),)
    else:
        some = (gl.where(w < 2, gl.where(w == 0, words[0], words[1]), gl.where(w == 2, words[2], words[3])),)
    return some


@gluon.jit
def spread(stored):
    """What is stored for the groups of a stretch, [64, 4]: one for each lane."""
    lanes: gl.constexpr = word_layout(1)
    if stored.shape[1] == 4:
        raw = stored.load(lanes)
    else:  # one for two lanes
        raw = stored.load(gl.SliceLayout(2, pair_layout()))[:, :, None].broadcast_to([64, 2, 2])
        raw = gl.convert_layout(raw.reshape(64, 4), lanes, assert_trivial=True)
    return raw


@gluon.jit
def read_plane(planes, scales, stage, c, W: gl.constexpr, C: gl.constexpr, TIED: gl.constexpr):
    """The words of a stretch of plane c, W tensors [64, 4] int32, and their stored scale [64, 4], from shared memory."""
    words = words_of(planes.index(stage * C + c).load(word_layout(W)), W)
    return words, spread(scales.index(stage if TIED else stage * C + c))


@gluon.jit
def offset_of(offsets, stage, raw, unit, power, TIED: gl.constexpr):
    """Offsets of a stretch times the power of two of the expert, fp32 [64, 4]; raw: its stored scale, where that is tied."""
    offset = spread(offsets.index(stage)).to(gl.float32)
    if TIED:
        offset = offset * (tied_scale(raw, unit) / OFFSET_STEPS)
    return offset * power


@gluon.jit
def scale_of(raw, unit, share, TIED: gl.constexpr):
    """2^14 times the scale of a plane, from what is stored, and the share that is left for the planes after it."""
    if TIED:
        share = share * 0.5
        scale = tied_scale(raw, unit) * share
    else:
        scale = raw.to(gl.float32) * share
    return scale, share


@gluon.jit
def line_of(block, layout: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr):
    """Row of the weight for each of 64; GATED: rows r and r + 8 are a gate row and its up row."""
    r = gl.arange(0, 64, layout)
    if GATED:
        row = gl.minimum(block * 32 + r // 16 * 8 + r % 8, OUT // 2 - 1) + r // 8 % 2 * (OUT // 2)
    else:
        row = gl.minimum(block * 64 + r, OUT - 1)
    return row


@gluon.jit
def fresh(at, unit: gl.constexpr):
    """The same offsets, int64, as if they were new: else the compiler holds an address for every plane all along.

    unit: the offsets of this many neighbours follow one another and begin at a multiple of it.
    """
    at = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [at], at.dtype, False, 1)
    return gl.max_contiguous(gl.multiple_of(at, [1, unit]), [1, unit])
