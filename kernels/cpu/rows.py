"""Row-sparse updates: sum the gradient rows of equal indices, then apply the rule once a row.

The sums live in a small buffer per thread; no merged ``[B, D]`` gradient is written.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from ..compile import part
from ..inner import njit
from .intrinsics import (
    as_pointer,
    call7,
    call8,
    compare_and_swap,
    cpu_pause,
    load_acquire,
    prefetch_write,
    store_release,
)
from .layout import (
    COLUMNS,
    FIRST_POSITION,
    FIRST_RANGE,
    FIRST_ROW,
    HOT,
    HOT_BEGIN,
    HOT_COLUMNS,
    HOT_ELEMENTS,
    HOT_END,
    HOT_OFFSET,
    HOT_TABLE,
    HP,
    N_HOT,
    N_RESULTS,
    N_VALID,
    PADDING,
    PART_BEGIN,
    PART_COLUMNS,
    PART_END,
    PART_TABLE,
    RANGE,
    ROWS,
    S0,
    S1,
    S2,
    SORTED_KEYS,
    VALUES,
    WIDTH,
    W,
    read_call,
)
from .search import last_at_most
from .sort import first_key_at_least, int64s, position_end, share

_LINE = 64  # bytes of a cache line
_LINES = 8  # lines of a row that are prefetched; the hardware follows from there
# Lines of parameters and states that are on their way at a time: rows lie far apart, so that
# each costs a miss of the cache and of the page table, and only many at once hide them.
# Measured at 256-byte rows: 32 take a fifth longer, 128 no less.
_LINES_AHEAD = 64
RING = 16  # segments found ahead of their update; a power of 2
_NEAR = 32  # keys that are looked at one by one for the end of a segment
_STRIPE_BITS = 14
N_STRIPES = 1 << _STRIPE_BITS
_STRIPE_SHIFT = 64 - _STRIPE_BITS


@njit(inline="always")
def _tables(c):
    return carray(as_pointer(c.tables), (c.n_tables, COLUMNS), np.int64)


@njit(inline="always")
def _hot(c):
    return carray(as_pointer(c.hot), (c.n // HOT + 1, HOT_COLUMNS), np.int64)


@njit
def _segment_end(keys, begin, n, bits):
    """Where the segment that begins at sorted key ``begin`` ends."""
    if begin >= n:
        return n
    row, end = keys[begin] >> bits, begin + 1
    near = min(begin + _NEAR, n)
    while end < near and keys[end] >> bits == row:
        end += 1
    if end < near or end == n:
        return end
    return first_key_at_least(keys, n, (row + 1) << bits)


@njit
def _clear(address, n_bytes):
    words = carray(as_pointer(address), n_bytes // 4, np.int32)
    words[:] = 0


@njit(inline="always")
def _n_ranges(c, tables, t):
    n_positions = position_end(c, tables, t) - tables[t, FIRST_POSITION]
    return (n_positions + tables[t, RANGE] - 1) // tables[t, RANGE]


@njit(inline="always")
def _accumulate(c, table, sorted_keys, begin, end, total):
    mask = (1 << c.position_bits) - 1
    call7(c.accumulate, total, table[VALUES], sorted_keys, begin, end, table[WIDTH], mask)


@part
def find_hot(index, slot, call):
    """List the hot segments. Every one covers a multiple of HOT, so only those are probed."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    n, bits = result[N_VALID], c.position_bits
    keys, tables, hot = int64s(result[SORTED_KEYS], c.n), _tables(c), _hot(c)
    n_hot = elements = last_end = 0
    for k in range(0, n, HOT):
        if k < last_end:
            continue
        row = keys[k] >> bits
        begin = first_key_at_least(keys, n, row << bits)
        last_end = first_key_at_least(keys, n, (row + 1) << bits)
        if last_end - begin <= HOT:
            continue
        t = last_at_most(tables[:, FIRST_ROW], c.n_tables, row)
        hot[n_hot, HOT_BEGIN], hot[n_hot, HOT_END] = begin, last_end
        hot[n_hot, HOT_OFFSET], hot[n_hot, HOT_TABLE] = elements, t
        n_hot += 1
        elements += _n_ranges(c, tables, t) * tables[t, WIDTH]
    result[N_HOT], result[HOT_ELEMENTS] = n_hot, elements


@part
def sum_hot_range(index, slot, call):
    """Sum what the hot rows of a table have in one range of its positions."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    keys, hot, tables = int64s(result[SORTED_KEYS], c.n), _hot(c), _tables(c)
    t = last_at_most(tables[:, FIRST_RANGE], c.n_tables, index)
    number, width = index - tables[t, FIRST_RANGE], tables[t, WIDTH]
    first = tables[t, FIRST_POSITION] + number * tables[t, RANGE]
    for h in range(result[N_HOT]):
        if hot[h, HOT_TABLE] != t:
            continue
        row = keys[hot[h, HOT_BEGIN]] >> c.position_bits << c.position_bits
        begin = first_key_at_least(keys, hot[h, HOT_END], row + first)
        end = first_key_at_least(keys, hot[h, HOT_END], row + first + tables[t, RANGE])
        total = c.hot_sums + (hot[h, HOT_OFFSET] + number * width) * c.real_bytes
        if begin == end:
            _clear(total, width * c.real_bytes)
        else:
            _accumulate(c, tables[t], result[SORTED_KEYS], begin, end, total)


@njit
def _sum_segment(c, tables, t, begin, end, total):
    """The summed gradient of one segment to address ``total``."""
    result = int64s(c.result, N_RESULTS)
    if end - begin <= HOT:
        _accumulate(c, tables[t], result[SORTED_KEYS], begin, end, total)
        return
    hot = _hot(c)
    h = last_at_most(hot[:, HOT_BEGIN], result[N_HOT], begin)
    sums = c.hot_sums + hot[h, HOT_OFFSET] * c.real_bytes
    n_ranges = _n_ranges(c, tables, t)
    call7(c.add_ranges, total, sums, c.range_numbers, 0, n_ranges, tables[t, WIDTH], -1)


@njit
def _lock(stripes, address):
    """Take the row lock of a row address; returns its stripe.

    Fibonacci hashing spreads the row addresses, which are multiples of the row size.
    """
    stripe = np.int64(
        (np.uint64(address) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(_STRIPE_SHIFT)
    )
    while True:
        if load_acquire(stripes, stripe) == 0 and compare_and_swap(stripes, stripe, 0, 1) == 0:
            return stripe
        cpu_pause()


@njit(inline="always")
def _prefetch_stretch(address, n_bytes):
    """The lines of a stretch of memory.

    It need not begin at the start of a line (NumPy's large arrays begin 16 bytes later), so
    its last byte may lie in one line more. Only a single element, of 8 bytes at most, cannot.
    """
    for line in range(0, min(n_bytes, _LINES * _LINE), _LINE):
        prefetch_write(address + line)
    if n_bytes > 8:
        prefetch_write(address + n_bytes - 1)


@njit(inline="always")
def _prefetch_row(c, table, row):
    # Of an absent state the row has no bytes, so nothing is fetched.
    width = table[WIDTH]
    _prefetch_stretch(table[W] + row * width * c.w_bytes, width * c.w_bytes)
    _prefetch_stretch(table[S0] + row * width * c.s0_bytes, width * c.s0_bytes)
    _prefetch_stretch(table[S1] + row * width * c.s1_bytes, width * c.s1_bytes)


@njit(inline="always")
def _call_block(c, block, table, row, n, gradient):
    offset = row * table[WIDTH]
    call7(
        block,
        table[W] + offset * c.w_bytes,
        gradient,
        table[S0] + offset * c.s0_bytes,
        table[S1] + offset * c.s1_bytes,
        table[S2] + offset * c.s2_bytes,
        n,
        table[HP],
    )


@njit
def _first_segment(keys, begin, n, bits):
    """Where the first segment begins that does not begin before ``begin``."""
    if 0 < begin < n and keys[begin] >> bits == keys[begin - 1] >> bits:
        return _segment_end(keys, begin, n, bits)
    return begin


@part
def measure_touched(index, slot, call):
    """The measuring block on the summed rows of one share of the sorted keys."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    n, bits, tables = result[N_VALID], c.position_bits, _tables(c)
    keys = int64s(result[SORTED_KEYS], c.n + PADDING)
    total = c.scratch + slot * c.scratch_bytes
    begin, stop = share(n, c.n_parts, index), share(n, c.n_parts, index + 1)
    begin = _first_segment(keys, begin, n, bits)
    while begin < stop:
        t = last_at_most(tables[:, FIRST_ROW], c.n_tables, keys[begin] >> bits)
        end = _segment_end(keys, begin, n, bits)
        _sum_segment(c, tables, t, begin, end, total)
        sums = c.measured + begin * 8
        call8(c.block, total, total, 0, 0, 0, tables[t, WIDTH], tables[t, HP], sums)
        begin = end


@njit(inline="always")
def _update_row(c, table, row, total):
    """The block on one row, under its lock where rows have locks."""
    stripes = carray(as_pointer(c.stripes), N_STRIPES, np.int32)
    stripe = 0
    if c.stripes != 0:
        stripe = _lock(stripes, table[W] + row * table[WIDTH] * c.w_bytes)
    _call_block(c, c.block, table, row, table[WIDTH], total)
    if c.stripes != 0:
        store_release(stripes, stripe, 0)


@njit(inline="always")
def _table_of(tables, t, row):
    """The table of a global row, which is table ``t`` or a later one."""
    while row >= tables[t, FIRST_ROW] + tables[t, ROWS]:
        t += 1
    return t


@njit
def _rows_ahead(c, table):
    """How many rows of a table may be on their way to the caches at a time."""
    lines = 3 + 3 * table[WIDTH] * c.w_bytes // _LINE
    return max(2, min(RING - 1, _LINES_AHEAD // lines))


@part
def update_touched(index, slot, call):
    """Lazy update: the rule on the rows whose segments begin in one share of the sorted keys.

    Segments are found a few rows ahead of their update. Where they begin is kept in a ring,
    while their parameters and states are on the way to the caches.
    """
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    n, bits, tables = result[N_VALID], c.position_bits, _tables(c)
    keys = int64s(result[SORTED_KEYS], c.n + PADDING)
    ring = c.scratch + slot * c.scratch_bytes
    begins, total = int64s(ring, RING), ring + 8 * RING
    stop = share(n, c.n_parts, index + 1)
    ahead = _first_segment(keys, share(n, c.n_parts, index), n, bits)
    found = done = t = t_ahead = 0
    most = _rows_ahead(c, tables[t])
    while True:
        while ahead < stop and found - done < most:
            row = keys[ahead] >> bits
            t_ahead = _table_of(tables, t_ahead, row)
            _prefetch_row(c, tables[t_ahead], row - tables[t_ahead, FIRST_ROW])
            begins[found & (RING - 1)] = ahead
            found += 1
            ahead = _segment_end(keys, ahead, n, bits)
        if done == found:
            return
        begin = begins[done & (RING - 1)]
        done += 1
        end = begins[done & (RING - 1)] if done < found else ahead
        row = keys[begin] >> bits
        if row >= tables[t, FIRST_ROW] + tables[t, ROWS]:
            t = _table_of(tables, t, row)
            most = _rows_ahead(c, tables[t])
        _sum_segment(c, tables, t, begin, end, total)
        _update_row(c, tables[t], row - tables[t, FIRST_ROW], total)


@part
def update_all(index, slot, call):
    """Dense-equivalent update: one sweep over the rows of one part, absent rows with g = 0.

    The sweep goes in tiles of whole rows. Tiles without a touched row go, as many at a time
    as there are, to the block that reads no gradient; for the others the gradient is laid
    out in a small buffer.
    """
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    n, bits, tables = result[N_VALID], c.position_bits, _tables(c)
    keys = int64s(result[SORTED_KEYS], c.n + PADDING)
    parts = carray(as_pointer(c.parts), (c.n_parts, PART_COLUMNS), np.int64)
    t = parts[index, PART_TABLE]
    first_row, width = tables[t, FIRST_ROW], tables[t, WIDTH]
    row, last = parts[index, PART_BEGIN], parts[index, PART_END]
    tile = max(1, c.tile // max(width, 1))
    buffer = c.scratch + slot * c.scratch_bytes
    begin = first_key_at_least(keys, n, (first_row + row) << bits)
    stop = first_key_at_least(keys, n, (first_row + last) << bits)
    while row < last:
        touched = (keys[begin] >> bits) - first_row if begin < stop else last
        idle = last - row if begin == stop else (touched - row) // tile * tile
        if idle > 0:
            _call_block(c, c.block_zero, tables[t], row, idle * width, buffer)
            row += idle
            continue
        height = min(tile, last - row)
        _clear(buffer, height * width * c.real_bytes)
        while begin < stop:
            r = (keys[begin] >> bits) - first_row - row
            if r >= height:
                break
            end = _segment_end(keys, begin, stop, bits)
            _sum_segment(c, tables, t, begin, end, buffer + r * width * c.real_bytes)
            begin = end
        _call_block(c, c.block, tables[t], row, height * width, buffer)
        row += height
