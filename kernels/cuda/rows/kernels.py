"""The loops of a row-sparse step on the device: sums of equal rows, and the rule.

The order of every sum is that of the CPU: up to `HOT` occurrences of a row one after the other,
more of them range by range of positions and the ranges in order. Hence no atomics on floats, and
the same bits in every run.

A thread has a tile of columns of one row. It adds up the gradients of the row in registers and
runs the rule, so no sum is written to memory, but for those of the ranges of hot rows. Grids are
``[(groups of keys or rows, groups of tiles), (tiles, keys or rows)]``.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...element import Kernel
from ...storage import Storage, numba_type
from ...tables import HOT
from ..dense.row_wise import Lane, row_updater
from ..dense.tiles import (
    access,
    add_between,
    add_next,
    by_tiles,
    length_of,
    update_summed_tile,
    wide_loader,
    with_sum,
)
from ..device.backend import (
    GEOMETRY,
    for_blocks,
    load_int64,
    on_device,
    store_int64,
)
from ..device.guard import is_closed
from ..device.records import hp_reader, row_finder
from ..device.sums import store_part
from .keys import Keys, TableRow, is_first, key_at, lower_bound, may_not_write, position_at, row_at
from .sources import CHOSEN, OWN, WEIGHTED, SourceForm

THREADS = GEOMETRY.rows
AT_ONCE, HOT_AT_ONCE, HOT_THREADS = 4, 32, GEOMETRY.hot
"""Rows of gradients that are on their way from memory together, to a thread of a row and to one of
a hot row: few threads add those up, so that they may have many registers, and small blocks of
them, so that many multiprocessors take part."""
_of_row = row_finder(TableRow, "first_row")


class HotSums(NamedTuple):
    """The sums of the ranges of hot rows, in a kernel.

    Every multiple of `HOT` in the list of keys is a *probe*; a hot row covers one. The sum of range
    ``r`` lies at ``place[probe * stride + r * width]``, of the first such probe of the row.
    """

    place: Any
    stride: Any


@cuda.jit(device=True)
def thread_place():
    """The number of the key or row of a thread, and that of its tile."""
    k = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
    return k, np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x


@cache
def add_up_rows(g: Storage, real: Storage, length: int, form: SourceForm = OWN) -> Any:
    """``run(total, keys, k, limit, table, column)``: a sum of gradient rows.

    It begins with key ``k`` and ends before the first key that is ``limit`` or more.
    """
    place_of, start = form.place(g, real), form.start(g, real, length)
    of_key = _of_key(place_of)
    add_one, add_some = (add_next(start, of_key, real, length, n) for n in (1, AT_ONCE))

    @cuda.jit(device=True)
    def run(total, keys, k, limit, table, column):
        start(total, place_of(table, position_at(keys, k)), column)
        k += 1
        while k + AT_ONCE <= keys.n and key_at(keys, k + AT_ONCE - 1) < limit:
            add_some(total, column, k, keys, table)
            k += AT_ONCE
        while k < keys.n and key_at(keys, k) < limit:
            add_one(total, column, k, keys, table)
            k += 1

    return run


def _of_key(place_of: Any) -> Any:
    """``run(k, keys, table)``: where the gradient of a key lies."""
    return on_device(lambda k, keys, table: place_of(table, position_at(keys, k)))


@cache
def sum_of_row(g: Storage, real: Storage, length: int, form: SourceForm = OWN) -> Any:
    """``run(total, keys, k, table, column, hot)``: the row whose first key is ``k``; 0 for -1."""
    add_up, start = add_up_rows(g, real, length, form), wide_loader(real, real, length)
    real_type, real_bytes = numba_type(real), real.itemsize
    of_range = on_device(lambda r, place, width: place + r * width * real_bytes)
    add_ranges = add_between(start, of_range, real, length, AT_ONCE)

    @cuda.jit(device=True)
    def run(total, keys, k, table, column, hot):
        if k < 0:
            for c in range(length):
                total[c] = real_type(0)
            return
        row = row_at(keys, k)
        # A row is hot where the key HOT places after its first one is still its own.
        if k + HOT < keys.n and row_at(keys, k + HOT) == row:
            probe = (k + HOT - 1) // HOT
            place = hot.place + probe * hot.stride * real_bytes
            start(total, place, column)
            add_ranges(total, column, 1, table.n_ranges, place, table.width)
        else:
            add_up(total, keys, k, (row + 1) << keys.bits, table, column)

    return run


def _sum_of_range(g: Storage, real: Storage, length: int, form: SourceForm) -> Any:
    """``run(column, keys, begin, row, table, number, place)``: what a row has in a range."""
    place_of, start = form.place(g, real), form.start(g, real, length)
    at_once = HOT_AT_ONCE if length > 1 else AT_ONCE
    add_all = add_between(start, _of_key(place_of), real, length, at_once)
    store, real_type = access(real, length).store, numba_type(real)

    @cuda.jit(device=True)
    def run(column, keys, begin, row, table, number, place):
        bound, first = table.bounds + 8 * number, row << keys.bits
        low, high = load_int64(bound), load_int64(bound + 8)
        k = lower_bound(keys, begin, keys.n, first + low)
        end = lower_bound(keys, k, min(keys.n, k + high - low), first + high)
        total = cuda.local.array(length, real_type)
        if k == end:
            for c in range(length):
                total[c] = real_type(0)
        else:
            start(total, place_of(table, position_at(keys, k)), column)
            add_all(total, column, k + 1, end, keys, table)
        store(total, place, column)

    return run


@cuda.jit(device=True)
def _hot_begin(keys, probe, n_rows):
    """The first key of the hot row whose first probe this is; -1 if it is that of none."""
    k = probe * HOT
    row = row_at(keys, k)
    if row >= n_rows or (k >= HOT and row_at(keys, k - HOT) == row):
        return -1
    begin = lower_bound(keys, max(0, k - HOT), k, row << keys.bits)
    return begin if begin + HOT < keys.n and row_at(keys, begin + HOT) == row else -1


@cache
def hot_kernel(g: Storage, real: Storage, length: int, form: SourceForm = OWN) -> Any:
    """``loop[(rows, groups of ranges, groups of tiles), (tiles, ranges)]``: sums of hot rows."""
    sum_range = by_tiles(lambda n: _sum_of_range(g, real, n, form), length)
    real_bytes = real.itemsize

    @for_blocks(HOT_THREADS, 1)
    def loop(keys, n, bits, tables, n_tables, n_rows, hot_sums, hot_stride, guard):
        keys, probe = Keys(keys, n, bits), np.int64(cuda.blockIdx.x)
        number = np.int64(cuda.blockIdx.y) * cuda.blockDim.y + cuda.threadIdx.y
        tile = np.int64(cuda.blockIdx.z) * cuda.blockDim.x + cuda.threadIdx.x
        if is_closed(guard):
            return
        while probe * HOT < n:
            begin = _hot_begin(keys, probe, n_rows)
            if begin >= 0:
                row = row_at(keys, begin)
                table = _of_row(tables, n_tables, row)
                if number < table.n_ranges:
                    column, width, is_aligned = tile * length, table.width, table.is_aligned
                    place = hot_sums + (probe * hot_stride + number * width) * real_bytes
                    sum_range(column, width, is_aligned, keys, begin, row, table, number, place)
            probe += cuda.gridDim.x

    return loop


def _summed_gradient(kernel: Kernel, form: SourceForm, length: int) -> Any:
    """``load(total, column, first, keys, k, table, hot)``: as `with_sum` takes it."""
    sum_up = sum_of_row(kernel.g, kernel.real, length, form)

    @cuda.jit(device=True)
    def load(total, column, first, keys, k, table, hot):
        sum_up(total, keys, k, table, column, hot)

    return load


@cache
def _row_update(kernel: Kernel, form: SourceForm) -> Any:
    """``run(is_there, keys, k, row, tables, n_tables, tile, hot)``: a tile of a global row."""
    length, gradient = length_of(kernel), partial(_summed_gradient, kernel, form)
    update = by_tiles(lambda n: with_sum(kernel, gradient, update_summed_tile, n), length)
    read_hp = hp_reader(kernel.rule, kernel.prologue, kernel.real)

    @cuda.jit(device=True)
    def run(is_there, keys, k, row, tables, n_tables, tile, hot):
        if not is_there:
            return
        table = _of_row(tables, n_tables, row)
        if tile * length < table.width:
            first, shape = (row - table.first_row) * table.width, (table.width, table.is_aligned)
            source, hp = (keys, k, table, hot), read_hp(table.hp)
            update(tile * length, *shape, first, table.arrays, source, hp)

    return run


@cache
def _row_wise_update(kernel: Kernel, form: SourceForm) -> Any:
    """The update by a rule that measures rows: tiles are lanes, and all threads take part."""
    update = row_updater(kernel, partial(_summed_gradient, kernel, form), THREADS)

    @cuda.jit(device=True)
    def run(is_there, keys, k, row, tables, n_tables, tile, hot):
        table = _of_row(tables, n_tables, row)
        lane, lanes = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
        place = Lane(cuda.threadIdx.y * lanes + lane, lane, lanes)
        width = table.width if is_there else np.int64(0)
        shape, source = (width, table.is_aligned), (keys, k, table, hot)
        update(place, row - table.first_row, *shape, table.arrays, source, table.hp)

    return run


def _updater(kernel: Kernel, form: SourceForm) -> tuple[Any, Any]:
    """The function that updates a tile, and the decorator of the loop."""
    # As many blocks as there are registers for: the way to a shared row takes some, a weight more,
    # a maximum most, and so do two sums of a row, above all those of eight columns.
    blocks = {WEIGHTED: 3, CHOSEN: 2}.get(form, 4)
    if kernel.rule.is_row_wise:
        blocks = 2 if form is CHOSEN or length_of(kernel) > 4 else 3
        return _row_wise_update(kernel, form), for_blocks(THREADS, blocks)
    return _row_update(kernel, form), for_blocks(THREADS, blocks)


@cache
def touched_kernel(kernel: Kernel, form: SourceForm = OWN) -> Any:
    """The lazy loop: a thread has a tile of ``each`` keys, and works where their rows begin."""
    update, compiled = _updater(kernel, form)

    @compiled
    def loop(keys, n, bits, tables, n_tables, n_rows, hot_sums, hot_stride, base, each, guard):
        if may_not_write(guard, base, n, tables, n_tables):
            return
        keys, hot = Keys(keys, n, bits), HotSums(hot_sums, hot_stride)
        place, tile = thread_place()
        for k in range(place * each, (place + 1) * each):
            row = n_rows
            if k < n and is_first(keys, k):
                row = row_at(keys, k)
            update(row < n_rows, keys, k, row, tables, n_tables, tile, hot)

    return loop


@cuda.jit
def mark_kernel(keys, n, bits, n_rows, first, guard):
    """Write to ``first[row]`` where the keys of each row begin; the others are -1 already."""
    k, keys = cuda.grid(1), Keys(keys, n, bits)
    if k >= n or is_closed(guard) or not is_first(keys, k):
        return
    row = row_at(keys, k)
    if row < n_rows:
        store_int64(first + 8 * row, k)


@cache
def sweep_kernel(kernel: Kernel, form: SourceForm = OWN) -> Any:
    """The dense-equivalent loop: a thread has a tile of one row of all there are."""
    update, compiled = _updater(kernel, form)

    @compiled
    def loop(keys, n, bits, tables, n_tables, n_rows, hot_sums, hot_stride, base, first, guard):
        if may_not_write(guard, base, n, tables, n_tables):
            return
        (row, tile), hot = thread_place(), HotSums(hot_sums, hot_stride)
        is_there = row < n_rows
        k = load_int64(first + 8 * row) if is_there else -1
        update(is_there, Keys(keys, n, bits), k, row, tables, n_tables, tile, hot)

    return loop


def _squares_of_tile(g: Storage, real: Storage, length: int) -> Any:
    """``run(column, keys, k, table, hot, own)``: added to a float64."""
    sum_up, real_type = sum_of_row(g, real, length), numba_type(real)

    @cuda.jit(device=True)
    def run(column, keys, k, table, hot, own):
        total = cuda.local.array(length, real_type)
        sum_up(total, keys, k, table, column, hot)
        for c in range(length):
            own[0] += np.float64(total[c]) * np.float64(total[c])

    return run


@cache
def row_squares_kernel(g: Storage, real: Storage, length: int) -> Any:
    """The squares of summed rows: each block writes its part of them."""
    add_squares = by_tiles(lambda n: _squares_of_tile(g, real, n), length)

    @cuda.jit
    def loop(keys, n, bits, tables, n_tables, n_rows, hot_sums, hot_stride, base, parts, guard):
        is_bad = may_not_write(guard, base, n, tables, n_tables)
        keys, (k, tile) = Keys(keys, n, bits), thread_place()
        thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        total, hot = cuda.local.array(1, float64), HotSums(hot_sums, hot_stride)
        total[0] = 0.0
        if k < n and not is_bad and is_first(keys, k):
            table = _of_row(tables, n_tables, row_at(keys, k))
            add_squares(tile * length, table.width, table.is_aligned, keys, k, table, hot, total)
        shared = cuda.shared.array((1, THREADS), float64)
        shared[0, thread] = total[0]
        block = np.int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
        store_part(parts, block, shared, thread, THREADS, 1)

    return loop
