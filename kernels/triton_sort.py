"""Around the prefill kernel in Triton: pairs sorted by expert and k, rows reordered for the matrix unit, slots summed."""

import triton
import triton.language as tl

from dpamoe.kernels.triton_unpack import place_power, tied_scale, unit_power
from dpamoe.kernels.triton_wait import wait_for_before

LEVELS = tl.constexpr(8)  # k = 1 … 8


@triton.jit
def _keys(
    ids, chunks, pairs, at, ids_token, ids_slot, chunks_token, chunks_slot, A: tl.constexpr, E: tl.constexpr, C: tl.constexpr
):
    """8 * expert + k - 1 for each of the pairs `at`, and whether there is anything to compute for it; C planes are all."""
    inside = at < pairs
    token, slot = at // A, at % A
    expert = tl.load(ids + token * ids_token + slot * ids_slot, mask=inside, other=-1).to(tl.int32)
    k = tl.load(chunks + token * chunks_token + slot * chunks_slot, mask=inside, other=0)
    held = (expert >= 0) & (expert < E) & (k > 0)
    return tl.where(held, expert * LEVELS + tl.minimum(k, C) - 1, 0), held


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    ids, chunks, counts, pairs, ids_token, ids_slot, chunks_token, chunks_slot,
    A: tl.constexpr, E: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """counts int32 [blocks, KEYS]: how often each key occurs in each block of B pairs."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    key, held = _keys(ids, chunks, pairs, at, ids_token, ids_slot, chunks_token, chunks_slot, A, E, C)
    tl.store(counts + tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.histogram(key, KEYS, mask=held))


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(counts, blocks, KEYS: tl.constexpr, SOME: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """counts int32 [blocks + 1, KEYS]: of each key, from its numbers in the blocks to those before them, and in all (last).

    A program takes SOME keys, AT_ONCE blocks at a time.
    """
    key, some = tl.program_id(0) * SOME + tl.arange(0, SOME), tl.arange(0, AT_ONCE)
    before = tl.zeros((SOME,), tl.int32)
    wait_for_before(PDL)
    for first in range(0, blocks, AT_ONCE):
        block = first + some[:, None]
        at = counts + block * KEYS + key[None, :]
        count = tl.load(at, mask=block < blocks, other=0)
        tl.store(at, before[None, :] + tl.cumsum(count, 0) - count, mask=block < blocks)
        before += tl.sum(count, 0)
    tl.store(counts + blocks * KEYS + key, before)


@triton.jit
def _peak(scale, offset, unit, expert, NUMBER: tl.constexpr, TIED: tl.constexpr):
    """A power of two under which the scales and offsets of one expert are below 1; NUMBER of them."""
    at_once: tl.constexpr = 8192  # fewer would wait for memory again and again
    largest = tl.zeros((at_once,), tl.float32)
    for first in range(0, NUMBER, at_once):
        at = first + tl.arange(0, at_once)
        value = tl.load(scale + expert.to(tl.int64) * NUMBER + at, mask=at < NUMBER, other=0).to(tl.float32)
        if not TIED:
            zero = tl.load(offset + expert.to(tl.int64) * NUMBER + at, mask=at < NUMBER, other=0).to(tl.float32)
            value = tl.maximum(value, tl.abs(zero))
        largest = tl.maximum(largest, value)
    top = tl.max(largest, 0)
    if TIED:
        top = 2 * tied_scale(top, tl.load(unit + expert))  # offsets reach 4/3 of the scale
    power, inverse = unit_power(top)
    return tl.minimum(inverse, 2.0**100)  # of an expert of zeros too, times a little more, within fp32


@triton.jit
def _keys_and_ranks(ids, chunks, pairs, first, strides, A: tl.constexpr, E: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """`_keys` of B pairs from `first` on, and how many of these stand before each and have its key."""
    ids_token, ids_slot, chunks_token, chunks_slot = strides
    own = tl.arange(0, B)
    at_once: tl.constexpr = 16
    key, held = _keys(ids, chunks, pairs, first + own, ids_token, ids_slot, chunks_token, chunks_slot, A, E, C)
    rank = tl.zeros((B,), tl.int32)
    for start in range(0, B, at_once):  # loaded again: all at once would fill the registers
        other = start + tl.arange(0, at_once)
        other_key, there = _keys(ids, chunks, pairs, first + other, ids_token, ids_slot, chunks_token, chunks_slot, A, E, C)
        same = (key[:, None] == other_key[None, :]) & there[None, :] & (other[None, :] < own[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    return key, held, rank


@triton.jit(do_not_specialize=["pairs", "blocks", "most_tiles"])
def sort_kernel(
    ids, chunks, counts, order, levels, tiles, peaks, up_scale, up_offset, up_unit, down_scale, down_offset, down_unit,
    pairs, blocks, most_tiles, ids_token, ids_slot, chunks_token, chunks_slot,
    A: tl.constexpr, E: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, B: tl.constexpr, BN: tl.constexpr,
    MIXED: tl.constexpr, WIDTHS: tl.constexpr, ONE: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, TIED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """order int32 [P]: pairs by expert, then k; levels int32 [P]: their k; counts as `scan_kernel` leaves them.

    One program more writes tiles int32 [most_tiles, 5]: expert (-1: none), first, end, most k, and a mask with bit k for every
    k that occurs. An expert of one k gets tiles of BN pairs, others of MIXED. With WIDTHS they are those of `_write_one_k`
    (ONE), `_write_slices` or `_write_widths`, and levels is the place of each pair in the order, -1 where there is none. 2 E
    programs more find peaks fp32 [2, E], powers of two that bring an expert's scales and offsets below 1: UP and DOWN groups
    of the two weights. What is found from pairs and weights alone, older than the kernel before, does not wait for it.
    """
    block, totals = tl.program_id(0), counts + blocks * KEYS
    if block < blocks:
        at = block * B + tl.arange(0, B)
        strides = (ids_token, ids_slot, chunks_token, chunks_slot)
        key, held, rank = _keys_and_ranks(ids, chunks, pairs, block * B, strides, A, E, C, B)
        wait_for_before(PDL)
        total = tl.load(totals + tl.arange(0, KEYS))
        start = tl.cumsum(total, 0) - total + tl.load(counts + block * KEYS + tl.arange(0, KEYS))
        place = tl.gather(start, key, 0) + rank
        tl.store(order + place, at, mask=held)
        if len(WIDTHS):
            tl.store(levels + at, tl.where(held, place, -1), mask=at < pairs)
        else:
            tl.store(levels + place, key % LEVELS + 1, mask=held)
    elif block == blocks:
        wait_for_before(PDL)
        _write_any(tiles, tl.load(totals + tl.arange(0, KEYS)), most_tiles, KEYS, BN, MIXED, WIDTHS, ONE)
    else:
        up, down = (up_scale, up_offset, up_unit), (down_scale, down_offset, down_unit)
        _write_peak(peaks, totals, up, down, block - blocks - 1, E, UP, DOWN, TIED, PDL)


@triton.jit
def _write_peak(
    peaks, totals, up, down, place, E: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, TIED: tl.constexpr, PDL: tl.constexpr
):
    """The peak of one expert in one of two weights; PDL: found before it is known which experts have pairs, so of all."""
    expert, asked = place % E, True
    if not PDL:
        asked = tl.sum(tl.load(totals + expert * LEVELS + tl.arange(0, LEVELS)), 0) > 0
    if asked:
        if place < E:
            peak = _peak(*up, expert, UP, TIED)
        else:
            peak = _peak(*down, expert, DOWN, TIED)
        wait_for_before(PDL)
        tl.store(peaks + place, peak)


@triton.jit
def _write_any(
    tiles, own, most_tiles, KEYS: tl.constexpr, BN: tl.constexpr, MIXED: tl.constexpr, WIDTHS: tl.constexpr, ONE: tl.constexpr
):
    """All tiles of the kind that is asked for, from the number of pairs with each key."""
    if len(WIDTHS) == 0:
        _write_tiles(tiles, own.reshape(KEYS // LEVELS, LEVELS), most_tiles, KEYS // LEVELS, BN, MIXED)
    elif ONE:
        _write_one_k(tiles, own, KEYS, WIDTHS)
    elif WIDTHS[0] == WIDTHS[len(WIDTHS) - 1]:
        _write_slices(tiles, own.reshape(KEYS // LEVELS, LEVELS), KEYS // LEVELS, len(WIDTHS), WIDTHS[0])
    else:
        _write_widths(tiles, own.reshape(KEYS // LEVELS, LEVELS), KEYS // LEVELS, WIDTHS)


@triton.jit
def _write_tiles(tiles, own, most_tiles, E_PAD: tl.constexpr, BN: tl.constexpr, MIXED: tl.constexpr):
    """All tiles, from the number of pairs of each expert with each k, int32 [E_PAD, 8]."""
    expert, level = tl.arange(0, E_PAD), tl.arange(0, LEVELS)
    number = tl.sum(own, 1)
    step = tl.where(tl.max(own, 1) == number, BN, MIXED)
    tile = tl.cumsum((number + step - 1) // step, 0)
    start, ends = tl.cumsum(number, 0) - number, tl.cumsum(own, 1)
    for turn in range(0, tl.max((number + step - 1) // step, 0)):
        first = turn * step
        last = tl.minimum(first + step, number)
        found = (own > 0) & (ends > first[:, None]) & (ends - own < last[:, None])
        entry = tiles + (tile - (number + step - 1) // step + turn) * 5
        live = first < number
        tl.store(entry, expert, mask=live)
        tl.store(entry + 1, start + first, mask=live)
        tl.store(entry + 2, start + last, mask=live)
        tl.store(entry + 3, tl.max(tl.where(found, level[None, :] + 1, 0), 1), mask=live)
        tl.store(entry + 4, tl.sum(tl.where(found, 2 << level[None, :], 0), 1), mask=live)
    for first in range(tl.max(tile, 0), most_tiles, 128):
        rest = first + tl.arange(0, 128)
        tl.store(tiles + rest * 5, tl.full((128,), -1, tl.int32), mask=rest < most_tiles)


@triton.constexpr_function
def _room(widths):
    """Pairs that a tile has room for."""
    return sum(tl.constexpr(width).value for width in widths)


@triton.jit
def _write_one_k(tiles, own, KEYS: tl.constexpr, WIDTHS: tl.constexpr):
    """All tiles of pairs of one expert and k, which fill one slice after the other; own int32 [KEYS].

    tiles int32 [any, 2 + 3 slices]: expert, the number of tiles in the first and free in the others, and where each slice
    begins and ends and its k, 0 for an empty one. Those with most slices come first, and of these the ones with the largest
    k, since they take longest: what is left at the end is short.
    """
    EXPERTS: tl.constexpr = KEYS // LEVELS
    ROOM: tl.constexpr = _room(WIDTHS)
    start = _by_level(tl.cumsum(own, 0) - own, KEYS)
    own = _by_level(own, KEYS)
    full, rest = own // ROOM, own % ROOM
    used, begun = (rest > 0).to(tl.int32), 0
    for j in tl.static_range(len(WIDTHS) - 1):
        begun += WIDTHS[j]
        used += (rest > begun).to(tl.int32)
    first_full, last_tile, written = full, full, 0
    for fewer in tl.static_range(len(WIDTHS)):  # slices that tiles lack, of which the largest k stand last
        found = (used == len(WIDTHS) - fewer).to(tl.int32) + (full if fewer == 0 else 0)
        written += tl.sum(found, 0)
        place = written - tl.cumsum(found, 0)
        if fewer == 0:
            first_full, last_tile = place, place + full
        else:
            last_tile = tl.where(found > 0, place, last_tile)
    tl.store(tiles + 1, written)
    for turn in range(0, (tl.max(own, 0) + ROOM - 1) // ROOM):
        first = turn * ROOM
        live = first < own
        entry = tiles + tl.where(first + ROOM <= own, first_full + turn, last_tile) * (2 + 3 * len(WIDTHS))
        tl.store(entry, tl.arange(0, KEYS) % EXPERTS, mask=live)
        for j in tl.static_range(len(WIDTHS)):
            last = first + WIDTHS[j]
            tl.store(entry + 2 + 3 * j, start + tl.minimum(first, own), mask=live)
            tl.store(entry + 3 + 3 * j, start + tl.minimum(last, own), mask=live)
            tl.store(entry + 4 + 3 * j, tl.where(first < own, tl.arange(0, KEYS) // EXPERTS + 1, 0), mask=live)
            first = last


@triton.jit
def _by_level(numbers, KEYS: tl.constexpr):
    """Numbers of all keys, first those of k = 1."""
    return tl.trans(numbers.reshape(KEYS // LEVELS, LEVELS)).reshape(KEYS)


@triton.jit
def _write_slices(tiles, own, EXPERTS: tl.constexpr, SLICES: tl.constexpr, S: tl.constexpr):
    """As `_write_one_k`, of SLICES slices of up to S pairs of one k each; own int32 [EXPERTS, 8]."""
    expert, number = tl.arange(0, EXPERTS), tl.sum(own, 1)
    start = tl.cumsum(number, 0) - number
    each = (own + S - 1) // S
    ends = tl.cumsum(each, 1)
    slices = tl.sum(each, 1)
    count = (slices + SLICES - 1) // SLICES
    tile = tl.cumsum(count, 0)
    tl.store(tiles + 1, tl.max(tile, 0))
    for turn in range(0, tl.max(count, 0)):
        entry = tiles + (tile - count + turn) * (2 + 3 * SLICES)
        live = turn < count
        tl.store(entry, expert, mask=live)
        for j in range(SLICES + 1):
            done = tl.minimum(turn * SLICES + j, slices)
            before = tl.sum(tl.minimum(own, tl.maximum(done[:, None] - (ends - each), 0) * S), 1)
            k = tl.sum((ends <= done[:, None]).to(tl.int32), 1) + 1
            tl.store(entry + 2 + 3 * j, start + before, mask=live & (j < SLICES))
            tl.store(entry + 3 * j, start + before, mask=live & (j > 0))
            tl.store(entry + 4 + 3 * j, tl.where(done < slices, k, 0), mask=live & (j < SLICES))


@triton.jit
def _write_widths(tiles, own, EXPERTS: tl.constexpr, WIDTHS: tl.constexpr):
    """As `_write_slices`, of slices that differ in width: a tile takes the k with most pairs left, again for every slice.

    own int32 [EXPERTS, 8]. First come the first tiles of all experts, each time those with the largest k before others, since
    they take longest.
    """
    expert, level = tl.arange(0, EXPERTS), tl.arange(0, LEVELS)
    number = tl.sum(own, 1)
    start = (tl.cumsum(number, 0) - number)[:, None] + tl.cumsum(own, 1) - own
    left, written = own, 0
    while tl.max(tl.max(left, 1), 0) > 0:
        most = tl.max(tl.where(left > 0, level[None, :] + 1, 0), 1)
        queue = (most[:, None] == level[None, :] + 1).to(tl.int32)
        length = tl.sum(queue, 0)
        before = tl.sum(length, 0) - tl.cumsum(length, 0)
        entry = tiles + (written + tl.sum(queue * (tl.cumsum(queue, 0) - 1 + before[None, :]), 1)) * (2 + 3 * len(WIDTHS))
        live = most > 0
        tl.store(entry, expert, mask=live)
        for j in tl.static_range(len(WIDTHS)):
            rest, chosen = tl.max(left, 1, return_indices=True)
            taken = tl.where(level[None, :] == chosen[:, None], tl.minimum(rest, WIDTHS[j])[:, None], 0)
            first = tl.sum(tl.where(taken > 0, start + own - left, 0), 1)
            tl.store(entry + 2 + 3 * j, first, mask=live)
            tl.store(entry + 3 + 3 * j, first + tl.sum(taken, 1), mask=live)
            tl.store(entry + 4 + 3 * j, tl.where(rest > 0, chosen + 1, 0), mask=live)
            left -= taken
        written += tl.sum(length, 0)
    tl.store(tiles + 1, written)


@triton.jit
def prepare_kernel(x, ready, factor, x_row, IN: tl.constexpr, STRETCHES: tl.constexpr, STRETCHES_PAD: tl.constexpr):
    """One row of x, divided by a power of two, as fp16 in the order of the matrix unit; ready [rows, 128 STRETCHES].

    Input 32 l + 16 h + s of a stretch goes to place 8 s + 2 l + h and carries 2^(19 - place of bit s). Times the unpacked
    weight (weight * 2^(place - 11)) that is 2^8 too much, which factor [rows] takes back.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, STRETCHES_PAD * 128)
    value = tl.load(x + row * x_row + at, mask=at < IN, other=0.0).to(tl.float32)
    power, inverse = unit_power(tl.max(tl.abs(value), 0))
    scaled = (value * inverse * place_power(at % 16, 19)).to(tl.float16)
    moved = scaled.reshape(STRETCHES_PAD, 4, 2, 16).permute(0, 3, 1, 2).reshape(STRETCHES_PAD * 128)
    tl.store(ready + row * (STRETCHES * 128) + at, moved, mask=at < STRETCHES * 128)
    tl.store(factor + row, power * 2.0**-7)


@triton.jit
def combine_kernel(
    rows, ids, chunks, gates, spent, out, ids_token, ids_slot, chunks_token, chunks_slot, gates_token, gates_slot,
    A: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, KINDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over slots, in order, of gate * rows[pair]; pairs that were not computed are left out.

    KINDS: numbers of planes that are counted in spent, of up to 31 slots; 0: none.
    PDL: the kernel before, which writes rows, may still run; what else is read is older.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    parts, counts = (), tl.zeros((), tl.int64)
    for slot in tl.static_range(A):
        expert = tl.load(ids + token * ids_token + slot * ids_slot)
        k = tl.load(chunks + token * chunks_token + slot * chunks_slot)
        gate = tl.load(gates + token * gates_token + slot * gates_slot).to(tl.float32)
        parts = parts + ((gate, (expert >= 0) & (expert < E) & (k > 0)),)
        counts += tl.cast(1, tl.int64) << 5 * k
    wait_for_before(PDL)
    if tl.program_id(1) == 0:
        for kind in tl.static_range(KINDS):
            number = (counts >> 5 * kind) & 31
            tl.atomic_add(spent + kind, number, mask=number > 0, sem="relaxed")
    total = tl.zeros((B,), tl.float32)
    for slot in tl.static_range(A):
        gate, held = parts[slot]
        inside = at < tl.where(held, WIDTH, 0)
        value = tl.load(rows + (token * A + slot) * WIDTH + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        total += tl.where(held, gate * value, 0.0)
    tl.store(out + token * WIDTH + at, total.to(out.dtype.element_ty), mask=at < WIDTH)
