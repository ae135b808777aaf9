"""A warp that runs PTX on the CPU: the instructions that kernels are written in, by all 32 lanes at once, in numpy.

A register is uint32 [32] or, of several warps, [warps, 32] (a half of one uint16), a predicate bool of that shape. Fragments
of matrices as the PTX manual gives them: row or column g = lane / 4, and c = lane % 4 along the other dimension. An instruction
that is not known is an error.
"""

import re
from functools import cache

import numpy as np

LANES = np.arange(32, dtype=np.uint32)
ROW, PART = LANES // 4, LANES % 4


def run(code, letters, *operands):
    """Registers [results, 32] that the code writes; operands: arrays [registers, 32] of 4 bytes, or of 2, packed in pairs.

    With a dimension for warps between the two, each warp runs the code.

    Results may be given the registers of operands. The code runs a second time so, each result in place of the operand of its
    number, and must come to the same, unless the one result is written last of all.
    """
    results = letters.count("=")
    registers = [row for operand in operands for row in packed(operand)]
    assert len(registers) == len(letters.split(",")) - results, "operands fill as many registers as there are letters"
    ways = [_Warp({f"${i}": np.full(32, 0xDEADBEEF, np.uint32) for i in range(results)}, registers, results)]
    if results > 1 or not _written_last(code):
        ways.append(_Warp({}, registers, results, {f"${i}": f"${results + i}" for i in range(results)}))
    for warp in ways:
        warp.run(code)
    found = [np.stack([np.broadcast_to(warp.read(f"${i}"), registers[0].shape) for i in range(results)]) for warp in ways]
    assert (found[0] == found[-1]).all(), "a result is written before the operand in its register is read"
    return found[0]


def packed(operand):
    """Rows of registers: 4 bytes each, or two of 2 bytes, the first in the low half."""
    operand = np.ascontiguousarray(operand)
    if operand.dtype.itemsize == 2:
        halves = operand.view(np.uint16).astype(np.uint32)
        return halves[0::2] | halves[1::2] << 16
    return operand.view(np.uint32)


def _float(register):
    return np.ascontiguousarray(register, np.uint32).view(np.float32)


def _bits(value):
    return np.ascontiguousarray(value, np.float32).view(np.uint32)


def _half(register):
    """Two fp16 numbers of a register, [2, lanes]."""
    return np.stack([register & 0xFFFF, register >> 16]).astype(np.uint16).view(np.float16)


@cache
def _statements(code):
    """Name and operands of every statement."""
    found = []
    for statement in code.strip().removeprefix("{").removesuffix("}").split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            name, operands = re.fullmatch(r"\s*([\w.]+)\s+(.*?)\s*", statement, re.DOTALL).groups()
            found.append((name, [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{}]+", operands) if part.strip()]))
    return found


@cache
def _written_last(code):
    """Whether no statement but the last writes result 0."""
    *others, _ = _statements(code)
    return all("$0" not in operands[0] for _, operands in others)


@cache
def _constant(name):
    """A number that is written in the code, or that of the lane, in every lane; None for the name of a register."""
    if name == "%laneid":
        return LANES
    digits, base = (name[2:], 16) if name.startswith("0f") else (name, 0)
    if not re.match(r"-?\d", name):
        return None
    return np.full(32, int(digits, base) & 0xFFFFFFFF, np.uint32)


class _Warp:
    """Registers of 32 lanes, by name."""

    def __init__(self, results, operands, first, names=None):
        self.registers = results | {f"${first + i}": row.astype(np.uint32) for i, row in enumerate(operands)}
        self.names = names or {}

    def read(self, name):
        name = self.names.get(name, name)
        constant = _constant(name)
        return self.registers[name] if constant is None else constant

    def write(self, name, value):
        self.registers[self.names.get(name, name)] = value

    def run(self, code):
        for name, operands in _statements(code):
            into, values = operands[0], [self._values(operand) for operand in operands[1:]]
            with np.errstate(all="ignore"):
                if into.startswith("{"):
                    split = _unpack if name == "mov.b32" else INSTRUCTIONS[name]
                    for own, value in zip(self._names(into), split(*values), strict=True):
                        self.write(own, value)
                else:
                    self.write(into, INSTRUCTIONS[name](*values))

    def _names(self, operand):
        return [part.strip() for part in operand.strip("{}").split(",")]

    def _values(self, operand):
        if operand.startswith("{"):
            return [self.read(name) for name in self._names(operand)]
        return self.read(operand)


def _unpack(register):
    return [(register & 0xFFFF).astype(np.uint16), (register >> 16).astype(np.uint16)]


def _prmt(a, b, selector):
    result = np.uint32(0)
    for i in range(4):
        nibble = selector >> 4 * i & 0xF
        assert (nibble < 8).all(), "copies of a sign are not known"
        result = result | (np.where(nibble < 4, a, b) >> 8 * (nibble & 3) & 0xFF) << 8 * i
    return result


def _lop3(a, b, c, table):
    result = np.uint32(0)
    for index in range(8):
        if table[0] >> index & 1:
            result = result | (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


def _shf_left(low, high, by):
    by = by & 31
    return ((high.astype(np.uint64) << 32 | low) << by >> 32).astype(np.uint32)


def _fma(a, b, c):
    """fp64 holds the product, and the sum of what the kernels add: a second rounding is seen in no test."""
    result = _float(a).astype(np.float64) * _float(b) + _float(c)
    return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), _bits(result))


def _rcp_ftz(value):
    """A subnormal result is 0."""
    result = 1 / _float(value)
    return _bits(np.where(np.abs(result) < np.finfo(np.float32).tiny, 0 * result, result))


def _max(a, b):
    """Of a number and what is none, the number."""
    return np.where(np.isnan(_float(a)) & np.isnan(_float(b)), 0x7FFFFFFF, _bits(np.fmax(_float(a), _float(b)))).astype(
        np.uint32
    )


def _max_nan(a, b):
    return np.where(np.isnan(_float(a)) | np.isnan(_float(b)), 0x7FFFFFFF, _bits(np.fmax(_float(a), _float(b)))).astype(
        np.uint32
    )


def _both(halves):
    """Two numbers, [2, lanes], as fp16 in one register."""
    low, high = halves.astype(np.float16).view(np.uint16).astype(np.uint32)
    return low | high << 16


def _move(value):
    """A register, or one made of two of 16 bits."""
    return value[0].astype(np.uint32) | value[1].astype(np.uint32) << 16 if isinstance(value, list) else value


def _shuffle(value, mask, clamp, members):
    assert (clamp == 31).all() and (members == 0xFFFFFFFF).all()
    return value[..., LANES ^ mask]


def _shuffle_from(value, source, clamp, members):
    assert (clamp == 31).all() and (members == 0xFFFFFFFF).all() and (source < 32).all()
    return np.take_along_axis(value, np.broadcast_to(source, value.shape).astype(np.int64), -1)


def _byte_product(a, b, c):
    """m16n8k32 of bytes without a sign and bytes with one: bytes 4t … 4t + 3 and 16 on of row g and g + 8, of column g."""
    warps = a[0].shape[:-1]
    left, right = np.zeros((*warps, 16, 32)), np.zeros((*warps, 32, 8))  # fp64 holds the sums, and is multiplied fast
    for i in range(4):
        for j in range(4):
            left[..., ROW + 8 * (i % 2), 4 * PART + 16 * (i // 2) + j] = a[i] >> 8 * j & 0xFF
    for i in range(2):
        for j in range(4):
            right[..., 4 * PART + 16 * i + j, ROW] = (b[i] >> 8 * j & 0xFF).astype(np.uint8).view(np.int8)
    product = (left @ right).astype(np.int64)
    return [(product[..., ROW + 8 * (i // 2), 2 * PART + i % 2] + c[i].view(np.int32)).astype(np.uint32) for i in range(4)]


def _binary_product(a, b, c):
    """m16n8k128: D [16, 8] = popcount(A row and B column) + C; word c of row g and g + 8, word c of column g."""
    warps = a[0].shape[:-1]
    words, columns = np.zeros((*warps, 16, 4), np.uint32), np.zeros((*warps, 8, 4), np.uint32)
    for half in range(2):
        words[..., ROW + 8 * half, PART] = a[half]
    columns[..., ROW, PART] = b[0]
    both = words[..., :, None, :] & columns[..., None, :, :]
    counts = np.unpackbits(both.view(np.uint8), axis=-1).sum(-1, dtype=np.uint32)
    return [counts[..., ROW + 8 * (i // 2), 2 * PART + i % 2] + c[i] for i in range(4)]


def _half_product(a, b, c):
    """m16n8k16, fp16 to fp32. Must be exact in fp32, as the popcounts are, so that no order of adding matters."""
    warps = a[0].shape[:-1]
    left, right = np.zeros((*warps, 16, 16)), np.zeros((*warps, 16, 8))
    for i in range(4):
        for j, half in enumerate(_half(a[i])):
            left[..., ROW + 8 * (i % 2), 2 * PART + 8 * (i // 2) + j] = half
    for i in range(2):
        for j, half in enumerate(_half(b[i])):
            right[..., 2 * PART + 8 * i + j, ROW] = half
    product = left @ right
    result = [_float(c[i]).astype(np.float64) + product[..., ROW + 8 * (i // 2), 2 * PART + i % 2] for i in range(4)]
    assert all(((one.astype(np.float32) == one) | np.isnan(one)).all() for one in result), "a sum of popcounts is rounded"
    return [_bits(one) for one in result]


INSTRUCTIONS = {
    "mov.u32": lambda a: a,
    "mov.f32": lambda a: a,
    "mov.b32": _move,
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "neg.f32": lambda a: a ^ 0x80000000,
    "max.f32": _max,
    "max.NaN.f32": _max_nan,
    "mul.f32": lambda a, b: _bits(_float(a) * _float(b)),
    "rcp.approx.ftz.f32": _rcp_ftz,
    "fma.rn.f32": _fma,
    "mul.rn.f16x2": lambda a, b: _both(_half(a).astype(np.float32) * _half(b)),
    "fma.rn.f16x2": lambda a, b, c: _both(_half(a).astype(np.float64) * _half(b) + _half(c)),
    "cvt.rn.f16.f32": lambda a: _float(a).astype(np.float16).view(np.uint16),
    "cvt.rn.f32.s32": lambda a: _bits(a.view(np.int32)),
    "cvt.f32.f16": lambda a: _bits(a.view(np.float16)),
    "add.s32": lambda a, b: a + b,
    "mul.lo.s32": lambda a, b: a * b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": _shf_left,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "selp.b32": lambda a, b, chosen: np.where(chosen, a, b),
    "setp.eq.s32": lambda a, b: a == b,
    "setp.ne.s32": lambda a, b: a != b,
    "shfl.sync.bfly.b32": _shuffle,
    "shfl.sync.idx.b32": _shuffle_from,
    "redux.sync.max.u32": lambda a, members: np.broadcast_to(a.max(-1, keepdims=True), a.shape),
    "redux.sync.add.s32": lambda a, members: np.broadcast_to(a.sum(-1, keepdims=True, dtype=np.uint32), a.shape),
    "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc": _binary_product,
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32": _byte_product,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": _half_product,
}
