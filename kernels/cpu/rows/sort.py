"""Grouping of duplicate rows: a stable radix sort of ``(row, position)`` keys.

The order of the sorted keys is fixed by the input alone, whatever the number of threads.
Time and memory are O(B), never O(N).
"""

from __future__ import annotations

import numpy as np
from numba import carray

from ...inner import njit
from ...tables import HOT
from ..compiler.compile import part
from ..compiler.intrinsics import as_pointer, load_int32
from ..compiler.records import index_at, int64s, last_at_most
from .layout import PADDING, RowCall, hot_of, tables_of


@njit(inline="always")
def share(n, parts, index):
    """The first element of part ``index`` when ``n`` elements are split into ``parts``."""
    return n * index // parts


@njit(inline="always")
def _stretch(table, begin, end):
    """The part of positions ``begin .. end`` that belongs to a table, counted within the table."""
    first = table.first_position
    return max(begin - first, 0), min(end - first, table.length)


@njit(inline="always")
def _histograms(c):
    return carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)


@njit(inline="always")
def _own(c, index):
    """Begin and end of a share of the positions, and its counters."""
    begin, end = share(c.n, c.sort_parts, index), share(c.n, c.sort_parts, index + 1)
    return begin, end, _histograms(c)[index]


@njit(error_model="numpy")
def _make_keys(c, index):
    """Make the keys of a share and count their lowest digits; the first bad position, or -1.

    No other loop reads the indices, which their owner may change meanwhile.
    """
    begin, end, histogram = _own(c, index)
    tables, dropped_row, mask = tables_of(c), c.dropped_row, np.uint64(histogram.size - 1)
    bits, carried_bits, keys = c.position_bits, c.carried_bits, int64s(c.keys, c.n)
    histogram[:] = 0
    for t in range(c.n_tables):
        low, high = _stretch(tables[t], begin, end)
        n_rows, first_row = tables[t].rows, tables[t].first_row
        indices, n_bytes = tables[t].indices, tables[t].index_bytes
        first = tables[t].first_position
        for k in range(low, high):
            row = index_at(indices, n_bytes, k)
            key_row, position = row + first_row, first + k
            if row < 0 or row >= n_rows:
                if dropped_row < 0:
                    return position
                key_row = dropped_row
            # Unsigned: Numba would first test a signed index for being negative.
            histogram[np.uint64(key_row) & mask] += 1
            place = np.uint64(position)
            if carried_bits != 0:
                gradient_row = np.int64(load_int32(tables[t].gradient_rows + 4 * position))
                position = (position << carried_bits) | gradient_row
            keys[place] = (key_row << bits) | position
    return -1


@njit(inline="always")
def _count_digits(keys, begin, end, shift, histogram):
    """``histogram[d]``: how many keys of ``begin .. end`` have digit ``d`` at ``shift``."""
    mask = np.uint64(histogram.size - 1)
    for digit in range(histogram.size):
        histogram[digit] = 0
    for k in range(begin, end):
        histogram[np.uint64(keys[k] >> shift) & mask] += 1


@njit(inline="always")
def _offsets_of(histograms, n):
    """Turn counts into the places of each share's digits; False if no key would move."""
    place, most = 0, 0
    # Digit by digit, and for a digit share by share: so keys of equal digits keep the order of
    # their positions, whatever the number of shares.
    for digit in range(histograms.shape[1]):
        before = place
        for p in range(histograms.shape[0]):
            count = histograms[p, digit]
            histograms[p, digit] = place
            place += count
        most = max(most, place - before)
    return most < n


@njit(inline="always")
def _scatter(keys, begin, end, shift, offsets, out):
    """Move the keys of ``begin .. end`` to their places; equal digits keep their order."""
    mask = np.uint64(offsets.size - 1)
    for k in range(begin, end):
        key = keys[k]
        digit = np.uint64(key >> shift) & mask
        place = offsets[digit]
        out[np.uint64(place)] = key
        offsets[digit] = place + 1


@njit
def first_key_at_least(keys, n, key):
    """The first ``k <= n`` with ``keys[k] >= key`` among sorted keys."""
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def _find_hot(c):
    """List the hot segments. Each contains a multiple of HOT, so only these places are probed."""
    n, bits = c.n_valid, c.position_bits
    keys, tables, hot = int64s(c.sorted_keys, c.n), tables_of(c), hot_of(c)
    n_hot = elements = last_end = 0
    for k in range(0, n, HOT):
        if k < last_end:
            continue
        row = keys[k] >> bits
        begin = first_key_at_least(keys, n, row << bits)
        last_end = first_key_at_least(keys, n, (row + 1) << bits)
        if last_end - begin <= HOT:
            continue
        t = last_at_most(tables.first_row, c.n_tables, row)
        segment = hot[n_hot]
        segment.values = c.hot_sums + elements * c.real_bytes
        segment.stride = tables[t].width * c.real_bytes
        segment.begin, segment.end, segment.table = begin, last_end, t
        n_hot += 1
        elements += tables[t].n_ranges * tables[t].width
    c.n_hot = n_hot


@njit(inline="always")
def _finish(c, keys):
    """Record the address of the sorted keys, how many of them belong to rows, and the hot ones."""
    c.sorted_keys, c.n_valid = keys.ctypes.data, c.n
    if c.dropped_row >= 0:
        # Dropped occurrences have the row after the last one, so they lie behind the valid keys.
        c.n_valid = first_key_at_least(keys, c.n, c.dropped_row << c.position_bits)
    _find_hot(c)


@part(RowCall)
def group_serial(index, slot, c):
    """Make and sort all keys on one thread."""
    histograms = _histograms(c)
    c.bad_position = _make_keys(c, 0)
    if c.bad_position >= 0:
        return
    keys, spare = int64s(c.keys, c.n + PADDING), int64s(c.spare, c.n + PADDING)
    shift = c.position_bits
    while shift < c.position_bits + c.row_bits:
        if shift > c.position_bits:
            _count_digits(keys, 0, c.n, shift, histograms[0])
        if _offsets_of(histograms, c.n):
            _scatter(keys, 0, c.n, shift, histograms[0], spare)
            keys, spare = spare, keys
        shift += c.digit_bits
    _finish(c, keys)


# On several threads each of the following parts is a loop, one after the other in one parallel
# region. After a bad index the later loops end at once.


@part(RowCall)
def make_keys(index, slot, c):
    """Make the keys of one share, count digits, and write its bad position, or -1, to ``bad``."""
    int64s(c.bad, c.sort_parts)[index] = _make_keys(c, index)


@part(RowCall)
def place_rows(index, slot, c):
    """Find the first bad position, if any, and turn the counts of the lowest digits into places."""
    bad = int64s(c.bad, c.sort_parts)
    for k in range(c.sort_parts - 1, -1, -1):
        if bad[k] >= 0:
            c.bad_position = bad[k]
    c.shift = c.position_bits
    if c.bad_position < 0:
        c.moved = _offsets_of(_histograms(c), c.n)


@part(RowCall)
def next_digit(index, slot, c):
    """Go on to the next digit; the keys are those of the last pass that moved any."""
    c.shift += c.digit_bits
    if c.moved:
        c.keys, c.spare = c.spare, c.keys


@part(RowCall)
def count_digits(index, slot, c):
    """Count the digits of one share of the keys."""
    if c.bad_position < 0:
        begin, end, histogram = _own(c, index)
        _count_digits(int64s(c.keys, c.n), begin, end, c.shift, histogram)


@part(RowCall)
def place_digits(index, slot, c):
    """Turn all counts into places; ``moved`` tells whether the pass moves anything."""
    if c.bad_position < 0:
        c.moved = _offsets_of(_histograms(c), c.n)


@part(RowCall)
def scatter_keys(index, slot, c):
    """Move one share of the keys."""
    if c.moved:
        begin, end, offsets = _own(c, index)
        _scatter(int64s(c.keys, c.n), begin, end, c.shift, offsets, int64s(c.spare, c.n))


@part(RowCall)
def finish(index, slot, c):
    """End a sort on several threads."""
    if c.moved:
        c.keys, c.spare = c.spare, c.keys
    if c.bad_position < 0:
        _finish(c, int64s(c.keys, c.n))
