"""Row-sparse updates: sum the gradient rows of equal indices, then apply the rule once a row.

The sums live in a small buffer per thread; no merged ``[B, D]`` gradient is written.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, njit

from ..compile import NativeFunction, part
from ..storage import F64, Storage
from .intrinsics import (
    as_pointer,
    call7,
    call8,
    compare_and_swap,
    cpu_pause,
    load_acquire,
    prefetch_read,
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
_AHEAD = 8  # gradient rows that are prefetched before they are summed
_LINES = 8  # lines of a row that are prefetched; the hardware follows from there
# Lines of parameters and states that are on their way at a time: rows lie far apart, so that
# each costs a miss of the cache and of the page table, and only many at once hide them.
_LINES_AHEAD = 24
_STRIPE_BITS = 14
N_STRIPES = 1 << _STRIPE_BITS
_STRIPE_SHIFT = 64 - _STRIPE_BITS


@cache
def accumulate(g: Storage, real: Storage) -> NativeFunction:
    """``total = sum of gradient rows`` of ``keys[begin:end]``, in the order of the keys.

    Compiled for a storage type of the gradient; the sum is float32 or float64.
    """
    load, carrier, itemsize = g.to_real, g.carrier, g.itemsize
    real_type = np.float64 if real is F64 else np.float32

    def accumulate_rows(total, values, keys, begin, end, width, position_mask):
        acc = carray(as_pointer(total), width, real_type)
        key = carray(as_pointer(keys), end + PADDING, np.int64)
        stride = width * itemsize
        lines = min(_LINES * _LINE, stride)
        for k in range(begin, end):
            ahead = values + (key[k + _AHEAD] & position_mask) * stride
            for line in range(0, lines, _LINE):
                prefetch_read(ahead + line)
            address = values + (key[k] & position_mask) * stride
            row = carray(as_pointer(address), width, carrier)
            if k == begin:
                for j in range(acc.size):
                    acc[j] = load(row[j])
            else:
                for j in range(acc.size):
                    acc[j] += real_type(load(row[j]))

    return NativeFunction(accumulate_rows, 7, f"accumulate {g.name} {real.name}")


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
    while end < n and keys[end] >> bits == row:
        end += 1
    return end


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
def _prefetch_row(c, table, row):
    width = table[WIDTH]
    offset = row * width * c.w_bytes
    for line in range(0, min(width * c.w_bytes, _LINES * _LINE), _LINE):
        prefetch_write(table[W] + offset + line)
    # Of an absent state the row has no bytes, so nothing is fetched.
    offset = row * width * c.s0_bytes
    for line in range(0, min(width * c.s0_bytes, _LINES * _LINE), _LINE):
        prefetch_write(table[S0] + offset + line)
    offset = row * width * c.s1_bytes
    for line in range(0, min(width * c.s1_bytes, _LINES * _LINE), _LINE):
        prefetch_write(table[S1] + offset + line)


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
def _first_segment(keys, begin, stop, bits):
    """Where the first segment begins that does not begin before ``begin``."""
    while 0 < begin < stop and keys[begin] >> bits == keys[begin - 1] >> bits:
        begin += 1
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
    begin = _first_segment(keys, begin, stop, bits)
    while begin < stop:
        t = last_at_most(tables[:, FIRST_ROW], c.n_tables, keys[begin] >> bits)
        end = _segment_end(keys, begin, n, bits)
        _sum_segment(c, tables, t, begin, end, total)
        sums = c.measured + begin * 8
        call8(c.block, total, total, 0, 0, 0, tables[t, WIDTH], tables[t, HP], sums)
        begin = end


@part
def update_touched(index, slot, call):
    """Lazy update: the rule on the rows whose segments begin in one share of the sorted keys."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    n, bits, tables = result[N_VALID], c.position_bits, _tables(c)
    keys = int64s(result[SORTED_KEYS], c.n + PADDING)
    stripes = carray(as_pointer(c.stripes), N_STRIPES, np.int32)
    total = c.scratch + slot * c.scratch_bytes
    begin, stop = share(n, c.n_parts, index), share(n, c.n_parts, index + 1)
    begin = _first_segment(keys, begin, stop, bits)
    t, ahead = 0, begin
    while begin < stop:
        row = keys[begin] >> bits
        while row >= tables[t, FIRST_ROW] + tables[t, ROWS]:
            t += 1
        row -= tables[t, FIRST_ROW]
        end = _segment_end(keys, begin, n, bits)
        lines = 3 + 3 * tables[t, WIDTH] * c.w_bytes // _LINE
        last = min(end + max(2, _LINES_AHEAD // lines), stop)
        while ahead < last:
            _prefetch_row(c, tables[t], (keys[ahead] >> bits) - tables[t, FIRST_ROW])
            ahead += 1
            while ahead < last and keys[ahead] >> bits == keys[ahead - 1] >> bits:
                ahead += 1
        _sum_segment(c, tables, t, begin, end, total)
        if c.stripes == 0:
            _call_block(c, c.block, tables[t], row, tables[t, WIDTH], total)
        else:
            stripe = _lock(stripes, tables[t, W] + row * tables[t, WIDTH] * c.w_bytes)
            _call_block(c, c.block, tables[t], row, tables[t, WIDTH], total)
            store_release(stripes, stripe, 0)
        begin = end


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
