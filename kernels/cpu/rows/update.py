"""Row-sparse updates: sum the gradient rows of equal indices, then apply the rule once a row.

The sums live in a small buffer per thread; no merged ``[B, D]`` gradient is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ...inner import njit
from ...tables import HOT
from ..compiler.compile import NativeFunction, part
from ..compiler.intrinsics import (
    as_pointer,
    call_address,
    load_int32,
    load_int64,
)
from ..compiler.lines import LINE, prefetch
from ..compiler.records import int64s, last_at_most
from .layout import HOT_BYTES, PADDING, RowCall, hot_of, tables_of
from .sort import first_key_at_least, share

# Lines of parameters and states that are on their way at a time: rows lie far apart, so that
# each costs a miss of the cache and of the page table, and only many at once hide them.
_LINES_AHEAD = 96
_FEWEST_AHEAD, _MOST_AHEAD = 3, 16  # keys
TILE = 1_024  # elements of a tile of a dense-equivalent sweep
_NEAR = 32  # keys that are looked at one by one for the end of a segment


@njit
def _segment_end(keys, begin, n, bits):
    """Where the segment that begins at sorted key ``begin`` ends."""
    if begin >= n:
        return n
    row, end = keys[begin] >> bits, begin + 1
    # Most rows occur a few times, and the next keys are at hand; a bisection begins in the middle
    # of a list that is in no cache.
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
def _source_mask(c):
    """The bits of a key by which its gradient is found."""
    return (1 << (c.carried_bits if c.carried_bits != 0 else c.position_bits)) - 1


@njit(inline="always")
def _accumulate(c, table, begin, end, total, fetches):
    segment = c.sorted_keys, begin, end, table.width, _source_mask(c), fetches
    call_address(table.accumulate, total, table.source, *segment)


@njit
def _range_begin(table, number):
    """The first position of the table, counted within it, that is in a range or after it."""
    begin = number * table.range
    if table.positions == 0:
        return begin
    return first_key_at_least(int64s(table.positions, table.length), table.length, begin)


@part(RowCall)
def sum_hot_range(index, slot, c):
    """Sum what the hot rows of a table have in one range of its positions."""
    if c.n_hot == 0:
        return
    keys, tables, hot = int64s(c.sorted_keys, c.n), tables_of(c), hot_of(c)
    t = last_at_most(tables.first_range, c.n_tables, index)
    number, width = index - tables[t].first_range, tables[t].width
    low = tables[t].first_position + _range_begin(tables[t], number)
    high = tables[t].first_position + _range_begin(tables[t], number + 1)
    for h in range(c.n_hot):
        if hot[h].table != t:
            continue
        row = keys[hot[h].begin] >> c.position_bits << c.position_bits
        begin = first_key_at_least(keys, hot[h].end, row + (low << c.carried_bits))
        end = first_key_at_least(keys, hot[h].end, row + (high << c.carried_bits))
        total = hot[h].values + number * hot[h].stride
        if begin >= end:  # no such positions, or they have been changed
            _clear(total, width * c.real_bytes)
        else:
            _accumulate(c, tables[t], begin, end, total, 1)


@njit
def _sum_segment(c, table, begin, end, total, fetches):
    """The summed gradient of one segment to address ``total``."""
    if end - begin <= HOT:
        _accumulate(c, table, begin, end, total, fetches)
        return
    hot = hot_of(c)
    h = last_at_most(hot.begin, c.n_hot, begin)
    ranges = c.range_numbers, 0, table.n_ranges, table.width, -1, 1
    call_address(c.add_ranges, total, c.hot + h * HOT_BYTES, *ranges)


@njit(inline="always")
def _row_bytes(c, k, width):
    """Bytes of a row of array ``k``; 0 where it has nothing of single rows."""
    sizes = c.row_bytes + 16 * k
    return width * load_int64(sizes) + load_int64(sizes + 8)


@njit(inline="always")
def _prefetch_row(c, table, row):
    for k in range(c.n_arrays):
        n_bytes = _row_bytes(c, k, table.width)
        prefetch(load_int64(table.arrays + 8 * k) + row * n_bytes, n_bytes)


@njit(inline="always")
def _own_gradient(table, position):
    """The address of one occurrence's gradient, as it was given."""
    return table.values + position * table.stride


@njit(inline="always")
def _any_gradient(table, position):
    """The address of one occurrence's gradient, if occurrences may share a gradient row."""
    row = position
    if table.gradient_rows != 0:
        row = np.int64(load_int32(table.gradient_rows + 4 * position))
    return table.values + row * table.stride


@njit(inline="always")
def _call_block(block, table, row, rows, gradient):
    call_address(block, table.arrays, row, rows, table.width, gradient, table.hp)


@njit
def _first_segment(keys, begin, n, bits):
    """Where the first segment begins that does not begin before ``begin``."""
    if 0 < begin < n and keys[begin] >> bits == keys[begin - 1] >> bits:
        return _segment_end(keys, begin, n, bits)
    return begin


@njit(inline="always")
def _table_of(tables, t, row):
    """The table of a global row, which is table ``t`` or a later one."""
    while row >= tables[t].first_row + tables[t].rows:
        t += 1
    return t


@njit
def _keys_ahead(c, table):
    """How many keys before its update a row of a table is fetched."""
    lines = 0
    for k in range(c.n_arrays):
        lines += 1 + _row_bytes(c, k, table.width) // LINE
    return max(_FEWEST_AHEAD, min(_MOST_AHEAD, _LINES_AHEAD // lines))


def _touching(gradient_of: Any) -> tuple[NativeFunction, NativeFunction]:
    """`measure_touched` and `update_touched`, for gradients that are found by a function."""

    def measure_touched(index, slot, c):
        """The measuring block on the summed rows of one share of the sorted keys."""
        n, bits, tables = c.n_valid, c.position_bits, tables_of(c)
        keys, mask = int64s(c.sorted_keys, c.n + PADDING), _source_mask(c)
        scratch = c.scratch + slot * c.scratch_bytes
        parameter, total = int64s(scratch, 1), scratch + LINE
        begin, stop = share(n, c.n_parts, index), share(n, c.n_parts, index + 1)
        begin = _first_segment(keys, begin, n, bits)
        while begin < stop:
            t = last_at_most(tables.first_row, c.n_tables, keys[begin] >> bits)
            end = _segment_end(keys, begin, n, bits)
            gradient = total
            if end - begin == 1 and tables[t].block_single != 0:
                gradient = gradient_of(tables[t], keys[begin] & mask)
            else:
                _sum_segment(c, tables[t], begin, end, total, 1)
            parameter[0] = gradient  # the rule measures the gradient, and reads nothing else
            sums = c.measured + begin * 8
            call_address(c.block, scratch, 0, 1, tables[t].width, gradient, tables[t].hp, sums)
            begin = end

    def update_touched(index, slot, c):
        """Lazy update: the rule on the rows whose segments begin in one share of the sorted keys.

        The gradient of a row that occurs once is read where it lies; others are summed first.
        """
        n, bits, tables = c.n_valid, c.position_bits, tables_of(c)
        keys, mask = int64s(c.sorted_keys, c.n + PADDING), _source_mask(c)
        total = c.scratch + slot * c.scratch_bytes
        stop = share(n, c.n_parts, index + 1)
        begin = _first_segment(keys, share(n, c.n_parts, index), n, bits)
        t, t_ahead, fetched, row_fetched = 0, 0, 0, -1
        table, later, ahead = tables[0], tables[0], _keys_ahead(c, tables[0])
        while begin < stop:
            row, end = keys[begin] >> bits, _segment_end(keys, begin, n, bits)
            if row >= table.first_row + table.rows:
                t = _table_of(tables, t, row)
                table = tables[t]
                ahead = _keys_ahead(c, table)
            # Keys that are passed over are those of a long segment, whose sum fetches for itself.
            fetched = max(fetched, end)
            while fetched < min(end + ahead, n):
                key = keys[fetched]
                if key >> bits != row_fetched:
                    row_fetched = key >> bits
                    if row_fetched >= later.first_row + later.rows:
                        t_ahead = _table_of(tables, t_ahead, row_fetched)
                        later = tables[t_ahead]
                    _prefetch_row(c, later, row_fetched - later.first_row)
                prefetch(gradient_of(later, key & mask), later.width * c.g_bytes)
                fetched += 1
            row -= table.first_row
            block, gradient = c.block, total
            if end - begin == 1 and table.block_single != 0:
                block = table.block_single
                gradient = gradient_of(table, keys[begin] & mask)
            else:
                _sum_segment(c, table, begin, end, total, end - begin > ahead)
            _call_block(block, table, row, 1, gradient)
            begin = end

    for function in (measure_touched, update_touched):
        function.__qualname__ = f"{function.__name__} {gradient_of.__name__}"
    return part(RowCall)(measure_touched), part(RowCall)(update_touched)


TOUCHING = {False: _touching(_own_gradient), True: _touching(_any_gradient)}
"""The loops over rows that occur, to measure and to update; and where tables share gradients."""


@part(RowCall)
def update_all(index, slot, c):
    """Dense-equivalent update: one sweep over the rows of one part, absent rows with g = 0.

    The sweep goes in tiles of whole rows. Tiles in which no row occurs go, as many at a
    time as there are, to the block that reads no gradient; for the others the gradient is laid out
    in a small buffer.
    """
    n, bits, tables = c.n_valid, c.position_bits, tables_of(c)
    keys = int64s(c.sorted_keys, c.n + PADDING)
    t = last_at_most(tables.first_part, c.n_tables, index)
    row = (index - tables[t].first_part) * tables[t].part
    last = min(row + tables[t].part, tables[t].rows)
    first_row, width = tables[t].first_row, tables[t].width
    tile = max(1, TILE // max(width, 1))
    buffer = c.scratch + slot * c.scratch_bytes
    begin = first_key_at_least(keys, n, (first_row + row) << bits)
    stop = first_key_at_least(keys, n, (first_row + last) << bits)
    while row < last:
        touched = (keys[begin] >> bits) - first_row if begin < stop else last
        idle = last - row if begin == stop else (touched - row) // tile * tile
        if idle > 0:
            _call_block(c.block_zero, tables[t], row, idle, buffer)
            row += idle
            continue
        height = min(tile, last - row)
        _clear(buffer, height * width * c.real_bytes)
        while begin < stop:
            r = (keys[begin] >> bits) - first_row - row
            if r >= height:
                break
            end = _segment_end(keys, begin, stop, bits)
            _sum_segment(c, tables[t], begin, end, buffer + r * width * c.real_bytes, 1)
            begin = end
        _call_block(c.block, tables[t], row, height, buffer)
        row += height
