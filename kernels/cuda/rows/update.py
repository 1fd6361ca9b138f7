"""The loops of a row-sparse step on the device: keys, sums of equal rows, and the rule.

Keys are as on the CPU, ``row << bits | position`` (`cpu.layout`), and so is the order of every
sum: up to `HOT` occurrences of a row one after the other, more of them range by range of
positions and the ranges in order. Hence no atomics on floats, and the same bits in every run.

A thread has a tile of columns of one row. It adds up the gradients of the row in registers and
runs the rule, so no sum is written to memory, but for those of the ranges of hot rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import Kernel
from ...storage import Storage, numba_type
from ...tables import HOT
from ..dense.measure import SUMS_BYTES, add_tree
from ..dense.tiles import row_tiles, sums
from ..device.backend import load_int32, load_int64, lower_int64, store_float64, store_int64
from ..device.guard import FOUND, INDEX, is_closed
from .search import first_at_least, last_at_most
from .table import (
    FIRST_POSITION,
    FIRST_ROW,
    HP,
    INDEX_BYTES,
    INDICES,
    IS_ALIGNED,
    N_RANGES,
    RANGE,
    ROW_BYTES,
    ROWS,
    S0,
    S1,
    S2,
    VALUES,
    WIDTH,
    W,
)


@cuda.jit(device=True)
def _index_at(tables, n_tables, position):
    """The table of a position, and the index there."""
    t = last_at_most(tables + 8 * FIRST_POSITION, ROW_BYTES, n_tables, position)
    table = tables + t * ROW_BYTES
    indices, n_bytes = load_int64(table + 8 * INDICES), load_int64(table + 8 * INDEX_BYTES)
    if n_bytes == 4:
        return table, load_int32(indices + 4 * position)
    return table, load_int64(indices + 8 * position)


@cuda.jit
def check_kernel(tables, n_tables, n, bits, dropped_row, keys, guard, base):
    """Make the key of each position, and close the guard at the first bad index.

    Args:
        tables: address of the table of tables.
        n_tables: its rows.
        n: positions.
        bits: of a key that hold the position.
        dropped_row: the row that bad indices get, or -1: they close the guard.
        keys: address of the keys, or 0: indices are checked only.
        guard: address of the guard of the call.
        base: added to a bad position, the smallest of which is what was found.
    """
    position = cuda.grid(1)
    if position >= n:
        return
    table, index = _index_at(tables, n_tables, position)
    row = index + load_int64(table + 8 * FIRST_ROW)
    if index < 0 or index >= load_int64(table + 8 * ROWS):
        row = dropped_row
        if dropped_row < 0:
            row = 0
            lower_int64(guard + 8 * FOUND, base + position)
    if keys != 0:
        store_int64(keys + 8 * position, (row << bits) | position)


@cuda.jit(device=True)
def may_not_write(guard, base, n, tables, n_tables):
    """Whether the guard is closed; one thread keeps the index that did it, for the error."""
    if not is_closed(guard):
        return False
    is_first = cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0
    if is_first and cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0:
        position = load_int64(guard + 8 * FOUND) - base
        if 0 <= position < n:
            _, index = _index_at(tables, n_tables, position)
            store_int64(guard + 8 * INDEX, index)
    return True


@cuda.jit(device=True)
def row_of_key(keys, k, bits):
    """The row of sorted key ``k``."""
    return load_int64(keys + 8 * k) >> bits


@cuda.jit(device=True)
def is_first_of_row(keys, k, bits):
    """Whether sorted key ``k`` is the first of its row."""
    return k == 0 or row_of_key(keys, k - 1, bits) != row_of_key(keys, k, bits)


@cache
def add_up_rows(g: Storage, real: Storage, length: int) -> Any:
    """``run(total, keys, k, n, limit, mask, values, stride)``: a sum of gradient rows.

    It begins with key ``k`` and ends before the first key that is ``limit`` or more. Four rows
    are loaded at once, so that their way from memory is not waited for four times.
    """
    start, add, add_4, _ = sums(g, real, length)

    @cuda.jit(device=True)
    def run(total, keys, k, n, limit, mask, values, stride):
        start(total, values + (load_int64(keys + 8 * k) & mask) * stride)
        k += 1
        while k + 4 <= n and load_int64(keys + 8 * (k + 3)) < limit:
            add_4(
                total,
                values + (load_int64(keys + 8 * k) & mask) * stride,
                values + (load_int64(keys + 8 * (k + 1)) & mask) * stride,
                values + (load_int64(keys + 8 * (k + 2)) & mask) * stride,
                values + (load_int64(keys + 8 * (k + 3)) & mask) * stride,
            )
            k += 4
        while k < n:
            key = load_int64(keys + 8 * k)
            if key >= limit:
                break
            add(total, values + (key & mask) * stride)
            k += 1

    return run


@cache
def hot_kernel(g: Storage, real: Storage, length: int) -> Any:
    """The loop that sums hot rows range by range; the same for every rule.

    A hot row covers a multiple of `HOT` in the list of keys, so only those are probed, one by a
    block. The sum of range ``r`` goes to ``sums[probe * stride + r * width]``, of the first such
    probe of the row.

    ``loop[(probes, groups of ranges, groups of tiles), (tiles, ranges)]``
    """
    of_tile, of_one = (_of_range(g, real, count) for count in (length, 1))

    @cuda.jit
    def loop(keys, n, tables, n_tables, bits, n_rows, hot_sums, stride, guard):
        probe = np.int64(cuda.blockIdx.x)
        k, number = probe * HOT, np.int64(cuda.blockIdx.y) * cuda.blockDim.y + cuda.threadIdx.y
        tile = np.int64(cuda.blockIdx.z) * cuda.blockDim.x + cuda.threadIdx.x
        if k >= n or is_closed(guard):
            return
        row = row_of_key(keys, k, bits)
        if row >= n_rows or (k >= HOT and row_of_key(keys, k - HOT, bits) == row):
            return
        begin = first_at_least(keys, max(0, k - HOT), k, row << bits)
        if begin + HOT >= n or row_of_key(keys, begin + HOT, bits) != row:
            return
        t = last_at_most(tables + 8 * FIRST_ROW, ROW_BYTES, n_tables, row)
        table = tables + t * ROW_BYTES
        width, column = load_int64(table + 8 * WIDTH), tile * length
        if number >= load_int64(table + 8 * N_RANGES) or column >= width:
            return
        place = probe * stride + number * width + column
        if load_int64(table + 8 * IS_ALIGNED) and column + length <= width:
            of_tile(keys, begin, n, bits, row, table, number, column, hot_sums, place)
            return
        for c in range(min(length, width - column)):
            of_one(keys, begin, n, bits, row, table, number, column + c, hot_sums, place + c)

    return loop


def _of_range(g: Storage, real: Storage, length: int) -> Any:
    """``run(keys, begin, n, bits, row, table, number, column, hot_sums, place)``.

    It sums what a row has in range ``number``; the keys of the row begin at ``begin``.
    """
    add_up, store = add_up_rows(g, real, length), sums(g, real, length).store
    real_type, real_bytes, g_bytes = numba_type(real), real.itemsize, g.itemsize

    @cuda.jit(device=True)
    def run(keys, begin, n, bits, row, table, number, column, hot_sums, place):
        positions = load_int64(table + 8 * RANGE)
        first = load_int64(table + 8 * FIRST_POSITION) + number * positions
        # Beyond the last position a sum would run over into the next row.
        limit = min((row << bits) + first + positions, (row + 1) << bits)
        k = first_at_least(keys, begin, n, (row << bits) + first)
        total = cuda.local.array(length, real_type)
        if k == n or load_int64(keys + 8 * k) >= limit:
            for c in range(length):
                total[c] = real_type(0)
        else:
            stride = load_int64(table + 8 * WIDTH) * g_bytes
            values = load_int64(table + 8 * VALUES) + column * g_bytes
            add_up(total, keys, k, n, limit, (1 << bits) - 1, values, stride)
        store(hot_sums + place * real_bytes, total)

    return run


@cache
def sum_of_row(g: Storage, real: Storage, length: int) -> Any:
    """``run(total, keys, k, n, bits, table, column, hot_sums, hot_stride)``.

    The summed gradient of the row whose first key is ``k``; 0 where ``k`` is -1.
    """
    add_up, (start, add, _, _) = add_up_rows(g, real, length), sums(real, real, length)
    real_type, real_bytes, g_bytes = numba_type(real), real.itemsize, g.itemsize

    @cuda.jit(device=True)
    def run(total, keys, k, n, bits, table, column, hot_sums, hot_stride):
        if k < 0:
            for c in range(length):
                total[c] = real_type(0)
            return
        row, width = row_of_key(keys, k, bits), load_int64(table + 8 * WIDTH)
        if k + HOT < n and row_of_key(keys, k + HOT, bits) == row:
            probe, n_ranges = (k + HOT - 1) // HOT, load_int64(table + 8 * N_RANGES)
            place = hot_sums + (probe * hot_stride + column) * real_bytes
            start(total, place)
            for r in range(1, n_ranges):
                add(total, place + r * width * real_bytes)
            return
        values = load_int64(table + 8 * VALUES) + column * g_bytes
        mask, limit = (1 << bits) - 1, (row + 1) << bits
        add_up(total, keys, k, n, limit, mask, values, width * g_bytes)

    return run


@cache
def _update_tile(kernel: Kernel) -> Any:
    """``run(keys, k, n, bits, table, row, tile, hot_sums, hot_stride)``: sum and update.

    On one tile of columns of row ``row`` of a table; ``k`` as in `sum_of_row`.
    """
    length, update, update_one, read_hp = row_tiles(
        kernel.rule, kernel.prologue, kernel.w, kernel.g, kernel.s
    )
    real = numba_type(kernel.real)
    sum_tile, sum_one = (sum_of_row(kernel.g, kernel.real, count) for count in (length, 1))

    @cuda.jit(device=True)
    def run(keys, k, n, bits, table, row, tile, hot_sums, hot_stride):
        width, column = load_int64(table + 8 * WIDTH), tile * length
        if column >= width:
            return
        w, hp = load_int64(table + 8 * W), read_hp(load_int64(table + 8 * HP))
        s0, s1 = load_int64(table + 8 * S0), load_int64(table + 8 * S1)
        s2, i = load_int64(table + 8 * S2), row * width + column
        if load_int64(table + 8 * IS_ALIGNED) and column + length <= width:
            total = cuda.local.array(length, real)
            sum_tile(total, keys, k, n, bits, table, column, hot_sums, hot_stride)
            update(w, s0, s1, s2, i, total, hp)
            return
        for c in range(min(length, width - column)):
            one = cuda.local.array(1, real)
            sum_one(one, keys, k, n, bits, table, column + c, hot_sums, hot_stride)
            update_one(w, s0, s1, s2, i + c, one, hp)

    return run


@cache
def touched_kernel(kernel: Kernel) -> Any:
    """The lazy loop: a thread has a tile of one key, and works if its row begins there.

    ``loop[(groups of keys, groups of tiles), (tiles, keys)]``
    """
    update_tile = _update_tile(kernel)

    @cuda.jit
    def loop(keys, n, tables, n_tables, bits, n_rows, hot_sums, hot_stride, guard, base):
        if may_not_write(guard, base, n, tables, n_tables):
            return
        k = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        tile = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
        if k >= n or not is_first_of_row(keys, k, bits):
            return
        row = row_of_key(keys, k, bits)
        if row >= n_rows:
            return
        t = last_at_most(tables + 8 * FIRST_ROW, ROW_BYTES, n_tables, row)
        table = tables + t * ROW_BYTES
        row -= load_int64(table + 8 * FIRST_ROW)
        update_tile(keys, k, n, bits, table, row, tile, hot_sums, hot_stride)

    return loop


@cuda.jit
def mark_kernel(keys, n, bits, n_rows, first, guard):
    """Write to ``first[row]`` where the keys of each row begin; the others are -1 already."""
    k = cuda.grid(1)
    if k >= n or is_closed(guard) or not is_first_of_row(keys, k, bits):
        return
    row = row_of_key(keys, k, bits)
    if row < n_rows:
        store_int64(first + 8 * row, k)


@cache
def sweep_kernel(kernel: Kernel) -> Any:
    """The dense-equivalent loop: a thread has a tile of one row of all there are.

    ``loop[(groups of rows, groups of tiles), (tiles, rows)]``
    """
    update_tile = _update_tile(kernel)

    @cuda.jit
    def loop(first, keys, n, tables, n_tables, bits, n_rows, hot_sums, hot_stride, guard, base):
        if may_not_write(guard, base, n, tables, n_tables):
            return
        row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        tile = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
        if row >= n_rows:
            return
        k = load_int64(first + 8 * row)
        t = last_at_most(tables + 8 * FIRST_ROW, ROW_BYTES, n_tables, row)
        table = tables + t * ROW_BYTES
        row -= load_int64(table + 8 * FIRST_ROW)
        update_tile(keys, k, n, bits, table, row, tile, hot_sums, hot_stride)

    return loop


@cache
def row_squares_kernel(g: Storage, real: Storage, length: int, threads: int) -> Any:
    """The squares of summed rows: what the threads of a block have, added up in a fixed tree.

    ``loop[(groups of keys, groups of tiles), (tiles, keys)]`` with ``threads`` threads writes one
    float64 for each block to ``sums``.
    """
    squares_of_tile = _squares_of_tile(g, real, length)

    @cuda.jit
    def loop(keys, n, tables, n_tables, bits, hot_sums, hot_stride, guard, base, sums):
        is_bad = may_not_write(guard, base, n, tables, n_tables)
        k = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        tile = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
        thread, own = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x, 0.0
        if k < n and not is_bad and is_first_of_row(keys, k, bits):
            row = row_of_key(keys, k, bits)
            t = last_at_most(tables + 8 * FIRST_ROW, ROW_BYTES, n_tables, row)
            table = tables + t * ROW_BYTES
            own = squares_of_tile(keys, k, n, bits, table, tile, hot_sums, hot_stride)
        shared = cuda.shared.array((1, threads), float64)
        shared[0, thread] = own
        add_tree(shared, thread, threads, 1)
        if thread == 0:
            block = np.int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
            store_float64(sums + block * SUMS_BYTES, shared[0, 0])

    return loop


def _squares_of_tile(g: Storage, real: Storage, length: int) -> Any:
    """``run(keys, k, n, bits, table, tile, hot_sums, hot_stride)``: a float64."""
    sum_tile, sum_one = (sum_of_row(g, real, count) for count in (length, 1))
    real_type = numba_type(real)

    @cuda.jit(device=True)
    def run(keys, k, n, bits, table, tile, hot_sums, hot_stride):
        width, column, squares = load_int64(table + 8 * WIDTH), tile * length, 0.0
        if load_int64(table + 8 * IS_ALIGNED) and column + length <= width:
            total = cuda.local.array(length, real_type)
            sum_tile(total, keys, k, n, bits, table, column, hot_sums, hot_stride)
            for c in range(length):
                squares += np.float64(total[c]) * np.float64(total[c])
            return squares
        for c in range(min(length, width - column)):
            one = cuda.local.array(1, real_type)
            sum_one(one, keys, k, n, bits, table, column + c, hot_sums, hot_stride)
            squares += np.float64(one[0]) * np.float64(one[0])
        return squares

    return run
