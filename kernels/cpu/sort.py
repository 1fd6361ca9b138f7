"""Grouping of duplicate rows: a stable radix sort of ``(row, position)`` keys.

The order of the sorted keys is fixed by the input alone, whatever the number of threads.
Time and memory are O(B), never O(N).
"""

from __future__ import annotations

import numpy as np
from numba import carray

from ..compile import part
from ..inner import njit
from .intrinsics import as_pointer, load_int32, load_int64
from .layout import (
    BAD_POSITION,
    COLUMNS,
    FIRST_POSITION,
    FIRST_ROW,
    INDEX_BYTES,
    INDICES,
    MOVED,
    N_RESULTS,
    N_VALID,
    PADDING,
    ROWS,
    SORTED_KEYS,
    read_call,
)


@njit(inline="always")
def int64s(address, n):
    """The ``n`` int64 at ``address``."""
    return carray(as_pointer(address), n, np.int64)


@njit(inline="always")
def share(n, parts, index):
    """The first element of part ``index`` when ``n`` elements are split into ``parts``."""
    return n * index // parts


@njit(inline="always")
def position_end(c, tables, t):
    """The position after the last of table ``t``."""
    return tables[t + 1, FIRST_POSITION] if t + 1 < c.n_tables else c.n


@njit(inline="always")
def _index(indices, n_bytes, k):
    """Element ``k`` of int32 or int64 indices; the test is the same in a whole loop."""
    if n_bytes == 4:
        return np.int64(load_int32(indices + 4 * k))
    return load_int64(indices + 8 * k)


@njit(inline="always")
def _count_table(table, begin, end, dropped_row, histogram):
    """Count the lowest digits of ``indices[begin:end]``; returns the first bad one, or -1."""
    mask = np.uint64(histogram.size - 1)
    n_rows, first_row = table[ROWS], table[FIRST_ROW]
    indices, n_bytes = table[INDICES], table[INDEX_BYTES]
    for k in range(begin, end):
        row = _index(indices, n_bytes, k)
        key_row = row + first_row
        if row < 0 or row >= n_rows:
            if dropped_row < 0:
                return k
            key_row = dropped_row
        histogram[np.uint64(key_row) & mask] += 1
    return -1


@njit(inline="always")
def _scatter_table(table, begin, end, dropped_row, offsets, out, bits):
    """Move the keys of ``indices[begin:end]`` to the places of their lowest digits."""
    mask = np.uint64(offsets.size - 1)
    n_rows, first_row, first = table[ROWS], table[FIRST_ROW], table[FIRST_POSITION]
    indices, n_bytes = table[INDICES], table[INDEX_BYTES]
    for k in range(begin, end):
        row = _index(indices, n_bytes, k)
        key_row = row + first_row if 0 <= row < n_rows else dropped_row
        digit = np.uint64(key_row) & mask
        place = offsets[digit]
        out[np.uint64(place)] = (key_row << bits) | (first + k)
        offsets[digit] = place + 1


@njit(inline="always")
def _stretch(c, tables, t, begin, end):
    """The part of positions ``begin .. end`` that is of table ``t``, counted within it."""
    first = tables[t, FIRST_POSITION]
    return max(begin, first) - first, min(end, position_end(c, tables, t)) - first


@njit(error_model="numpy")
def count_rows(c, begin, end, histogram):
    """Count the lowest digits of the rows at positions ``begin .. end``; checks every index.

    Returns the first position whose index is out of range, or -1.
    """
    tables = carray(as_pointer(c.tables), (c.n_tables, COLUMNS), np.int64)
    histogram[:] = 0
    for t in range(c.n_tables):
        low, high = _stretch(c, tables, t, begin, end)
        bad = _count_table(tables[t], low, high, c.dropped_row, histogram)
        if bad >= 0:
            return tables[t, FIRST_POSITION] + bad
    return -1


@njit(error_model="numpy")
def scatter_rows(c, begin, end, offsets, out):
    """The first pass of the sort: makes the keys of positions ``begin .. end`` on its way."""
    tables = carray(as_pointer(c.tables), (c.n_tables, COLUMNS), np.int64)
    for t in range(c.n_tables):
        low, high = _stretch(c, tables, t, begin, end)
        _scatter_table(tables[t], low, high, c.dropped_row, offsets, out, c.position_bits)


@njit(inline="always")
def count_digits(keys, begin, end, shift, histogram):
    """``histogram[d]``: how many keys of ``begin .. end`` have digit ``d`` at ``shift``."""
    mask = np.uint64(histogram.size - 1)
    for digit in range(histogram.size):
        histogram[digit] = 0
    for k in range(begin, end):
        histogram[np.uint64(keys[k] >> shift) & mask] += 1


@njit(inline="always")
def offsets_of(histograms, n):
    """Turn counts into the places where each part writes each digit.

    Returns False when one digit holds all keys: the pass would move nothing.
    """
    place, most = 0, 0
    for digit in range(histograms.shape[1]):
        before = place
        for p in range(histograms.shape[0]):
            count = histograms[p, digit]
            histograms[p, digit] = place
            place += count
        most = max(most, place - before)
    return most < n


@njit(inline="always")
def scatter(keys, begin, end, shift, offsets, out):
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


@njit(inline="always")
def finish(c, keys, result):
    """Tell where the sorted keys lie, and how many of them belong to rows."""
    result[SORTED_KEYS] = keys.ctypes.data
    result[N_VALID] = c.n
    if c.dropped_row >= 0:
        result[N_VALID] = first_key_at_least(keys, c.n, c.dropped_row << c.position_bits)


@part
def group_serial(index, slot, call):
    """Keys and sort on one thread."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    histograms = carray(as_pointer(c.histogram), (1, 1 << c.digit_bits), np.int64)
    result[BAD_POSITION] = count_rows(c, 0, c.n, histograms[0])
    if result[BAD_POSITION] >= 0:
        return
    offsets_of(histograms, c.n)
    keys, spare = int64s(c.keys, c.n + PADDING), int64s(c.spare, c.n + PADDING)
    scatter_rows(c, 0, c.n, histograms[0], keys)
    shift = c.position_bits + c.digit_bits
    while shift < c.position_bits + c.row_bits:
        count_digits(keys, 0, c.n, shift, histograms[0])
        if offsets_of(histograms, c.n):
            scatter(keys, 0, c.n, shift, histograms[0], spare)
            keys, spare = spare, keys
        shift += c.digit_bits
    finish(c, keys, result)


@part
def count_rows_part(index, slot, call):
    """Counts of the lowest digit of one share; its bad position, or -1, goes to ``bad``."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    begin, end = share(c.n, c.sort_parts, index), share(c.n, c.sort_parts, index + 1)
    int64s(c.bad, c.sort_parts)[index] = count_rows(c, begin, end, histograms[index])


@part
def scatter_rows_part(index, slot, call):
    """The first pass of the sort for one share of the positions."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    begin, end = share(c.n, c.sort_parts, index), share(c.n, c.sort_parts, index + 1)
    scatter_rows(c, begin, end, histograms[index], int64s(c.keys, c.n))


@part
def count_part(index, slot, call):
    """Digit counts of one share of the keys."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    begin, end = share(c.n, c.sort_parts, index), share(c.n, c.sort_parts, index + 1)
    count_digits(int64s(c.keys, c.n), begin, end, c.shift, histograms[index])


@part
def scatter_part(index, slot, call):
    """Move one share of the keys."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    begin, end = share(c.n, c.sort_parts, index), share(c.n, c.sort_parts, index + 1)
    keys, spare = int64s(c.keys, c.n), int64s(c.spare, c.n)
    scatter(keys, begin, end, c.shift, histograms[index], spare)


@part
def offsets_part(index, slot, call):
    """Turn all counts into places; ``result[MOVED]`` tells whether the pass moves anything."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    int64s(c.result, N_RESULTS)[MOVED] = offsets_of(histograms, c.n)


@part
def finish_part(index, slot, call):
    """The last step of a sort on several threads."""
    c = read_call(call)
    finish(c, int64s(c.keys, c.n), int64s(c.result, N_RESULTS))
