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
    compare_and_swap,
    cpu_pause,
    load_acquire,
    prefetch_read,
    prefetch_write,
    store_release,
)
from .layout import (
    COLUMNS,
    FIRST_ROW,
    HOT,
    HOT_COLUMNS,
    HOT_ELEMENTS,
    HOT_FIRST_BLOCK,
    HOT_OFFSET,
    HOT_SEGMENT,
    HOT_WIDTH,
    HP,
    N_BLOCKS,
    N_HOT,
    N_PARTS,
    N_RESULTS,
    N_SEGMENTS,
    PADDING,
    PART_BEGIN,
    PART_COLUMNS,
    PART_END,
    PART_TABLE,
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
from .sort import int64s

_LINE = 64  # bytes of a cache line
_AHEAD = 8  # gradient rows that are prefetched before they are summed
_LINES = 8  # lines of a row that are prefetched; the hardware follows from there
N_STRIPES = 1 << 14
_STRIPE_SHIFT = 64 - 14


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


@njit(inline="always")
def _row_of(keys, starts, bits, u):
    return keys[starts[u]] >> bits


@njit
def _first_segment(keys, starts, bits, n_segments, row):
    """The first segment whose global row is at least ``row``."""
    low, high = 0, n_segments
    while low < high:
        middle = (low + high) >> 1
        if _row_of(keys, starts, bits, middle) < row:
            low = middle + 1
        else:
            high = middle
    return low


@part
def find_hot(index, slot, call):
    """List the hot segments. Every one covers a multiple of HOT, so only those are probed."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    keys, starts = int64s(result[SORTED_KEYS], c.n), int64s(c.starts, c.n + 1)
    tables, hot, n_segments = _tables(c), _hot(c), result[N_SEGMENTS]
    n_hot = n_blocks = elements = 0
    last = -1
    limit = starts[n_segments]
    for k in range(0, limit, HOT):
        u = last_at_most(starts, n_segments, k)
        length = starts[u + 1] - starts[u]
        if u == last or length <= HOT:
            continue
        last = u
        t = last_at_most(
            tables[:, FIRST_ROW], c.n_tables, _row_of(keys, starts, c.position_bits, u)
        )
        width = tables[t, WIDTH]
        hot[n_hot, HOT_SEGMENT] = u
        hot[n_hot, HOT_FIRST_BLOCK] = n_blocks
        hot[n_hot, HOT_OFFSET] = elements
        hot[n_hot, HOT_WIDTH] = width
        blocks = (length + HOT - 1) // HOT
        n_hot += 1
        n_blocks += blocks
        elements += blocks * width
    result[N_HOT], result[N_BLOCKS], result[HOT_ELEMENTS] = n_hot, n_blocks, elements


@part
def sum_hot_block(index, slot, call):
    """Sum one block of a hot segment."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    keys, starts = int64s(result[SORTED_KEYS], c.n), int64s(c.starts, c.n + 1)
    hot = _hot(c)
    h = last_at_most(hot[:, HOT_FIRST_BLOCK], result[N_HOT], index)
    u, block, width = hot[h, HOT_SEGMENT], index - hot[h, HOT_FIRST_BLOCK], hot[h, HOT_WIDTH]
    tables = _tables(c)
    t = last_at_most(tables[:, FIRST_ROW], c.n_tables, _row_of(keys, starts, c.position_bits, u))
    begin = starts[u] + block * HOT
    call7(
        c.accumulate,
        c.hot_sums + (hot[h, HOT_OFFSET] + block * width) * c.real_bytes,
        tables[t, VALUES],
        result[SORTED_KEYS],
        begin,
        min(begin + HOT, starts[u + 1]),
        width,
        (1 << c.position_bits) - 1,
    )


@njit
def _sum_segment(c, tables, t, u, begin, end, total):
    """The merged gradient of segment ``u`` to address ``total``."""
    width = tables[t, WIDTH]
    result = int64s(c.result, N_RESULTS)
    if end - begin <= HOT:
        call7(
            c.accumulate,
            total,
            tables[t, VALUES],
            result[SORTED_KEYS],
            begin,
            end,
            width,
            (1 << c.position_bits) - 1,
        )
        return
    hot = _hot(c)
    h = last_at_most(hot[:, HOT_SEGMENT], result[N_HOT], u)
    sums = c.hot_sums + hot[h, HOT_OFFSET] * c.real_bytes
    n_blocks = (end - begin + HOT - 1) // HOT
    call7(c.add_blocks, total, sums, c.block_numbers, 0, n_blocks, width, -1)


@part
def plan_touched(index, slot, call):
    """Cut the segments of every table into parts of equal cost.

    A row costs ``row_cost`` for its variables, an occurrence 1 for its gradient row.
    """
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    keys, starts = int64s(result[SORTED_KEYS], c.n), int64s(c.starts, c.n + 1)
    tables, n_segments = _tables(c), result[N_SEGMENTS]
    parts = carray(as_pointer(c.parts), (c.max_parts, PART_COLUMNS), np.int64)
    budget = c.max_parts - c.n_tables
    share = (c.row_cost * n_segments + starts[n_segments]) // max(budget, 1) + 1
    p = u = 0
    for t in range(c.n_tables):
        stop = _first_segment(
            keys, starts, c.position_bits, n_segments, tables[t, FIRST_ROW] + tables[t, ROWS]
        )
        while u < stop:
            goal = c.row_cost * u + starts[u] + share
            low, high = u + 1, stop
            while low < high:
                middle = (low + high) >> 1
                if c.row_cost * middle + starts[middle] < goal:
                    low = middle + 1
                else:
                    high = middle
            parts[p, PART_TABLE], parts[p, PART_BEGIN], parts[p, PART_END] = t, u, low
            p += 1
            u = low
    result[N_PARTS] = p


@njit
def _lock(stripes, address):
    """Take the row lock of a row address; returns its stripe.

    Fibonacci hashing spreads the row addresses, which are multiples of the row size.
    """
    stripe = np.int64((np.uint64(address) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(50))
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
    offset = row * width * c.s_bytes
    for line in range(0, min(width * c.s_bytes, _LINES * _LINE), _LINE):
        prefetch_write(table[S0] + offset + line)
        prefetch_write(table[S1] + offset + line)


@njit(inline="always")
def _call_block(c, block, table, row, n, gradient):
    offset = row * table[WIDTH]
    states = offset * c.s_bytes
    call7(
        block,
        table[W] + offset * c.w_bytes,
        gradient,
        table[S0] + states,
        table[S1] + states,
        table[S2] + states,
        n,
        table[HP],
    )


@part
def update_touched(index, slot, call):
    """Lazy update: the rule on the rows of one part of the segments."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    keys, starts = int64s(result[SORTED_KEYS], c.n + PADDING), int64s(c.starts, c.n + 1)
    tables, bits = _tables(c), c.position_bits
    parts = carray(as_pointer(c.parts), (c.max_parts, PART_COLUMNS), np.int64)
    stripes = carray(as_pointer(c.stripes), N_STRIPES, np.int32)
    t = parts[index, PART_TABLE]
    first_row, width = tables[t, FIRST_ROW], tables[t, WIDTH]
    total = c.scratch + slot * c.scratch_bytes
    end = parts[index, PART_END]
    for u in range(parts[index, PART_BEGIN], end):
        if u + 2 < end:
            _prefetch_row(c, tables[t], _row_of(keys, starts, bits, u + 2) - first_row)
        row = _row_of(keys, starts, bits, u) - first_row
        _sum_segment(c, tables, t, u, starts[u], starts[u + 1], total)
        if c.stripes == 0:
            _call_block(c, c.block, tables[t], row, width, total)
        else:
            stripe = _lock(stripes, tables[t, W] + row * width * c.w_bytes)
            _call_block(c, c.block, tables[t], row, width, total)
            store_release(stripes, stripe, 0)


@njit
def _clear(address, n_bytes):
    words = carray(as_pointer(address), n_bytes // 4, np.int32)
    words[:] = 0


@part
def update_all(index, slot, call):
    """Dense-equivalent update: one sweep over the rows of one part, absent rows with g = 0.

    The sweep goes in tiles of whole rows. Tiles without a touched row go, as many at a time
    as there are, to the block that reads no gradient; for the others the gradient is laid
    out in a small buffer.
    """
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    n_segments = result[N_SEGMENTS]
    keys, starts = int64s(result[SORTED_KEYS], c.n + PADDING), int64s(c.starts, c.n + 1)
    tables, bits = _tables(c), c.position_bits
    parts = carray(as_pointer(c.parts), (c.max_parts, PART_COLUMNS), np.int64)
    t = parts[index, PART_TABLE]
    first_row, width = tables[t, FIRST_ROW], tables[t, WIDTH]
    row, end = parts[index, PART_BEGIN], parts[index, PART_END]
    tile = max(1, c.tile // max(width, 1))
    buffer = c.scratch + slot * c.scratch_bytes
    u = _first_segment(keys, starts, bits, n_segments, first_row + row)
    stop = _first_segment(keys, starts, bits, n_segments, first_row + end)
    while row < end:
        touched = _row_of(keys, starts, bits, u) - first_row if u < stop else end
        idle = touched - row if u == stop else (touched - row) // tile * tile
        if idle > 0:
            _call_block(c, c.block_zero, tables[t], row, idle * width, buffer)
            row += idle
            continue
        height = min(tile, end - row)
        _clear(buffer, height * width * c.real_bytes)
        while u < stop:
            r = _row_of(keys, starts, bits, u) - first_row - row
            if r >= height:
                break
            total = buffer + r * width * c.real_bytes
            _sum_segment(c, tables, t, u, starts[u], starts[u + 1], total)
            u += 1
        _call_block(c, c.block, tables[t], row, height * width, buffer)
        row += height
