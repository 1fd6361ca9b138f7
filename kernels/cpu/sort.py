"""Grouping of duplicate rows: a stable radix sort of ``(row, position)`` keys.

The order of the sorted keys is fixed by the input alone, whatever the number of threads.
Time and memory are O(B), never O(N).
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from ..compile import part
from .intrinsics import as_pointer
from .layout import (
    BAD_POSITION,
    COLUMNS,
    FIRST_POSITION,
    FIRST_ROW,
    INDEX_BYTES,
    INDICES,
    MOVED,
    N_RESULTS,
    N_SEGMENTS,
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
def _share(n, parts, index):
    """The first element of part ``index`` when ``n`` elements are split into ``parts``."""
    return n * index // parts


@njit(error_model="numpy")
def build_keys(c, begin, end):
    """Keys of positions ``begin .. end``; reads every index once and checks it.

    Returns the first position whose index is out of range, or -1.
    """
    keys, bits, dropped_row = int64s(c.keys, c.n), c.position_bits, c.dropped_row
    tables = carray(as_pointer(c.tables), (c.n_tables, COLUMNS), np.int64)
    for t in range(c.n_tables):
        first = tables[t, FIRST_POSITION]
        last = tables[t + 1, FIRST_POSITION] if t + 1 < c.n_tables else c.n
        n_rows, first_row, address = tables[t, ROWS], tables[t, FIRST_ROW], tables[t, INDICES]
        is_narrow = tables[t, INDEX_BYTES] == 4
        narrow = carray(as_pointer(address), last - first, np.int32)
        wide = carray(as_pointer(address), last - first, np.int64)
        for k in range(max(begin, first), min(end, last)):
            row = np.int64(narrow[k - first]) if is_narrow else wide[k - first]
            key_row = row + first_row
            if row < 0 or row >= n_rows:
                if dropped_row < 0:
                    return k
                key_row = dropped_row
            keys[k] = (key_row << bits) | k
    return -1


@njit
def count_digits(keys, begin, end, shift, histogram):
    """``histogram[d]``: how many keys of ``begin .. end`` have digit ``d`` at ``shift``."""
    mask = histogram.size - 1
    for digit in range(histogram.size):
        histogram[digit] = 0
    for k in range(begin, end):
        histogram[(keys[k] >> shift) & mask] += 1


@njit
def offsets_of(histograms, n):
    """Turn counts into the places where each part writes each digit.

    Returns False when one digit holds all keys: the pass would move nothing.
    """
    place = 0
    for digit in range(histograms.shape[1]):
        before = place
        for p in range(histograms.shape[0]):
            count = histograms[p, digit]
            histograms[p, digit] = place
            place += count
        if place - before == n:
            return False
    return True


@njit
def scatter(keys, begin, end, shift, offsets, out):
    """Move the keys of ``begin .. end`` to their places; equal digits keep their order."""
    mask = offsets.size - 1
    for k in range(begin, end):
        key = keys[k]
        digit = (key >> shift) & mask
        out[offsets[digit]] = key
        offsets[digit] += 1


@njit
def write_starts(keys, begin, end, bits, u, starts):
    """Write the beginnings of the segments that start in ``begin .. end``, segment u first.

    Returns the number of the next segment. Every key writes ``starts[u]`` and only a new row
    moves on, which needs no branch; stopping at the last new row keeps these writes away from
    ``starts[u]`` of the next share, which another thread fills.
    """
    last = end - 1
    while last > 0 and last >= begin and keys[last] >> bits == keys[last - 1] >> bits:
        last -= 1
    previous = keys[begin - 1] >> bits if begin > 0 else np.int64(-1)
    for k in range(begin, last + 1):
        row = keys[k] >> bits
        starts[u] = k
        u += row != previous
        previous = row
    return u


@njit
def finish_segments(c, n_segments, keys, starts, result):
    """Close the last segment; leave out the one of the dropped indices."""
    starts[n_segments] = c.n
    if n_segments > 0 and keys[starts[n_segments - 1]] >> c.position_bits == c.dropped_row:
        n_segments -= 1
    result[N_SEGMENTS] = n_segments
    result[SORTED_KEYS] = keys.ctypes.data


@part
def group_serial(index, slot, call):
    """Keys, sort and segments on one thread."""
    c = read_call(call)
    result = int64s(c.result, N_RESULTS)
    result[BAD_POSITION] = build_keys(c, 0, c.n)
    if result[BAD_POSITION] >= 0:
        return
    keys, spare = int64s(c.keys, c.n + PADDING), int64s(c.spare, c.n + PADDING)
    histograms = carray(as_pointer(c.histogram), (1, 1 << c.digit_bits), np.int64)
    shift = c.position_bits
    while shift < c.position_bits + c.row_bits:
        count_digits(keys, 0, c.n, shift, histograms[0])
        if offsets_of(histograms, c.n):
            scatter(keys, 0, c.n, shift, histograms[0], spare)
            keys, spare = spare, keys
        shift += c.digit_bits
    starts = int64s(c.starts, c.n + 1)
    n_segments = write_starts(keys, 0, c.n, c.position_bits, 0, starts)
    finish_segments(c, n_segments, keys, starts, result)


@part
def keys_part(index, slot, call):
    """Keys of one share of the positions; its bad position, or -1, goes to ``counts``."""
    c = read_call(call)
    begin, end = _share(c.n, c.sort_parts, index), _share(c.n, c.sort_parts, index + 1)
    int64s(c.counts, c.sort_parts)[index] = build_keys(c, begin, end)


@part
def count_part(index, slot, call):
    """Digit counts of one share of the keys."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    begin, end = _share(c.n, c.sort_parts, index), _share(c.n, c.sort_parts, index + 1)
    count_digits(int64s(c.keys, c.n), begin, end, c.shift, histograms[index])


@part
def scatter_part(index, slot, call):
    """Move one share of the keys."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    begin, end = _share(c.n, c.sort_parts, index), _share(c.n, c.sort_parts, index + 1)
    keys, spare = int64s(c.keys, c.n), int64s(c.spare, c.n)
    scatter(keys, begin, end, c.shift, histograms[index], spare)


@part
def offsets_part(index, slot, call):
    """Turn all counts into places; ``result[MOVED]`` tells whether the pass moves anything."""
    c = read_call(call)
    histograms = carray(as_pointer(c.histogram), (c.sort_parts, 1 << c.digit_bits), np.int64)
    int64s(c.result, N_RESULTS)[MOVED] = offsets_of(histograms, c.n)


@part
def count_segments_part(index, slot, call):
    """How many segments start in one share of the sorted keys."""
    c = read_call(call)
    begin, end = _share(c.n, c.sort_parts, index), _share(c.n, c.sort_parts, index + 1)
    keys, bits = int64s(c.keys, c.n), c.position_bits
    count = 1 if begin == 0 else 0
    for k in range(max(begin, 1), end):
        count += (keys[k] >> bits) != (keys[k - 1] >> bits)
    int64s(c.counts, c.sort_parts)[index] = count


@part
def starts_part(index, slot, call):
    """Write the segments that start in one share of the sorted keys."""
    c = read_call(call)
    begin, end = _share(c.n, c.sort_parts, index), _share(c.n, c.sort_parts, index + 1)
    counts = int64s(c.counts, c.sort_parts)
    u = 0
    for p in range(index):
        u += counts[p]
    write_starts(int64s(c.keys, c.n), begin, end, c.position_bits, u, int64s(c.starts, c.n + 1))


@part
def finish_part(index, slot, call):
    """Close the segments that the shares have written."""
    c = read_call(call)
    n_segments = 0
    for p in range(c.sort_parts):
        n_segments += int64s(c.counts, c.sort_parts)[p]
    keys, starts = int64s(c.keys, c.n), int64s(c.starts, c.n + 1)
    finish_segments(c, n_segments, keys, starts, int64s(c.result, N_RESULTS))
