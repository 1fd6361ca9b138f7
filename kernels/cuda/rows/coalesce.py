"""The sums of equal rows of a gradient, written to an array of their own: no rule takes them.

All occurrences of a row are added one after the other, in order of occurrence, as NumPy's
``add.at`` adds them: the ranges of the loops of a step (`kernels`) would round otherwise. A sum
begins with 0 there, so it is never -0. Grids are those of `kernels`; ``tables`` is a table of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...storage import Storage, numba_type
from ...tables import RowTable
from ..dense.tiles import by_tiles, narrow_storer, rows_are_aligned, tile_length
from ..device.backend import (
    GEOMETRY,
    copy_in,
    copy_out,
    launcher,
    load_int64,
    store_int32,
    store_int64,
)
from ..device.guard import FOUND, NOTHING, WORDS
from ..device.launch import on_elements, tile_grid
from ..device.part import LaunchContext, placed
from ..device.records import row_reader
from . import kernels
from .kernels import add_up_rows, thread_place
from .keys import Keys, KeySort, TableRow, is_first, may_not_write, row_at
from .sort import scratch_words, sort_keys

_table_at = row_reader(TableRow)
_NO_SCALARS = np.empty((1, 0))


def _sum_of_row(g: Storage, real: Storage, length: int) -> Any:
    """``run(total, keys, k, table, column)``: of the row whose first key is ``k``."""
    add_up, real_type = add_up_rows(g, real, length), numba_type(real)

    @cuda.jit(device=True)
    def run(total, keys, k, table, column):
        add_up(total, keys, k, (row_at(keys, k) + 1) << keys.bits, table, column)
        for c in range(length):
            # -0 becomes 0, as in a sum that begins with 0.
            total[c] += real_type(0)

    return run


def _write_sum(g: Storage, real: Storage, out: Storage, length: int) -> Any:
    """``run(column, keys, k, table, place)``: the sum of a row to the row at ``place``."""
    sum_of_row, kind = _sum_of_row(g, real, length), numba_type(real)
    store = narrow_storer(real, out, length)

    @cuda.jit(device=True)
    def run(column, keys, k, table, place):
        total = cuda.local.array(length, kind)
        sum_of_row(total, keys, k, table, column)
        store(total, place, column)

    return run


@cache
def dense_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """Sums of rows to their places in an array of all rows, which holds 0 already."""
    length, out_bytes = tile_length(g, out), out.itemsize
    write = by_tiles(lambda n: _write_sum(g, real, out, n), length)

    @cuda.jit
    def loop(keys, n, bits, tables, out, is_aligned, guard):
        if may_not_write(guard, 0, n, tables, 1):
            return
        keys, (k, tile) = Keys(keys, n, bits), thread_place()
        if k < n and is_first(keys, k):
            table = _table_at(tables, 0)
            place = out + row_at(keys, k) * table.width * out_bytes
            write(tile * length, table.width, is_aligned, keys, k, table, place)

    return loop


@cache
def distinct_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """Sums and indices of the ``n_distinct`` rows that occur; their keys are at ``firsts``."""
    length, out_bytes = tile_length(g, out), out.itemsize
    write = by_tiles(lambda n: _write_sum(g, real, out, n), length)

    @cuda.jit
    def loop(keys, n, bits, tables, firsts, n_distinct, indices, out, is_aligned):
        keys, (r, tile) = Keys(keys, n, bits), thread_place()
        if r >= n_distinct:
            return
        table, k = _table_at(tables, 0), load_int64(firsts + 8 * r)
        if tile == 0:
            if table.index_bytes == 4:
                store_int32(indices + 4 * r, row_at(keys, k))
            else:
                store_int64(indices + 8 * r, row_at(keys, k))
        place = out + r * table.width * out_bytes
        write(tile * length, table.width, is_aligned, keys, k, table, place)

    return loop


class DeviceRows(NamedTuple):
    """A row-sparse gradient."""

    table: RowTable  # where its indices and values lie, and the shape of what it is of
    g: Storage  # of the values
    real: Storage  # of the arithmetic

    def keys(self) -> KeySort:
        """Keys of the table; no loop on them reads a parameter through it."""
        return KeySort([self.table], (self.g.itemsize,))

    def are_aligned(self, *arrays: tuple[int, Storage]) -> int:
        """Whether all rows of the values, and of arrays of their width, begin at whole vectors."""
        return rows_are_aligned(self.table.width, (self.table.source.values, self.g), *arrays)


def _launcher(loop: Any, rows: DeviceRows, n: int, out: Storage, stream: Any) -> Any:
    """The launch of a loop with a thread for each tile of ``n`` rows, one block at least."""
    tiles, lanes, groups = tile_grid(rows.table.width, tile_length(rows.g, out), GEOMETRY.rows)
    return launcher(loop, (max(1, -(-n // lanes)), groups), (tiles, lanes), stream)


def dense_sums(rows: DeviceRows, out: Storage, result: int, *, guard: int, stream: Any) -> None:
    """Enqueue sums in an array of all rows that holds 0, unless a bad index closes the guard."""
    keys, n = rows.keys(), rows.table.length
    if n == 0:
        return
    with placed(keys, _NO_SCALARS, [0], LaunchContext(stream, guard)) as call:
        sorted_keys, is_aligned = keys.sort(call), rows.are_aligned((result, out))
        # One block looks at the guard even where there are no columns.
        loop = _launcher(dense_sums_kernel(rows.g, rows.real, out), rows, n, out, stream)
        loop(*sorted_keys, keys.table, result, is_aligned, guard)


class DistinctRows:
    """The rows that occur in a gradient: how many, and their sums (`distinct_rows`)."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows, self.keys = rows, rows.keys()
        places, n = self.keys.places, rows.table.length
        self._words, self._spare = (places.add(8 * n) for _ in range(2))
        self._scratch = places.add(8 * scratch_words(n))
        self._found = places.add(8 * (WORDS + 1))
        self._call, self._firsts = LaunchContext(None), 0

    def enqueue(self, call: LaunchContext) -> None:
        """Enqueue the sort of the keys, and then that of the first ones of all rows."""
        found, stream, n = call.scratch + self._found, call.stream, self._rows.table.length
        copy_in(found, np.array([NOTHING] + [0] * WORDS, np.int64), stream)
        self._call = call = call._replace(guard=found)
        sorted_keys = self.keys.sort(call)
        words, spare, scratch = (
            call.scratch + at for at in (self._words, self._spare, self._scratch)
        )
        on_elements(kernels.mark_firsts_kernel, n, stream)(*sorted_keys, words)
        self._firsts = sort_keys(words, spare, scratch, n, kernels.OTHER_BIT, 1, stream)
        launcher(kernels.count_firsts_kernel, 1, 1, stream)(self._firsts, n, found + 8 * WORDS)

    def count(self) -> tuple[int, int]:
        """How many rows occur, and the position of a bad index or -1; the host waits for it."""
        found = np.empty(WORDS + 1, np.int64)
        copy_out(found, self._call.guard, self._call.stream)
        position, n_distinct = int(found[FOUND]), int(found[WORDS])
        return n_distinct, -1 if position == NOTHING else position

    def write(self, n_distinct: int, indices: int, out: Storage, result: int) -> None:
        """Enqueue writing the indices, of the size that they came in, and the sums."""
        rows, stream = self._rows, self._call.stream
        kernel = distinct_sums_kernel(rows.g, rows.real, out)
        is_aligned = rows.are_aligned((result, out))
        loop = _launcher(kernel, rows, n_distinct, out, stream)
        keys = *self.keys.sorted(self._call), self.keys.table
        loop(*keys, self._firsts, n_distinct, indices, result, is_aligned)


@contextmanager
def distinct_rows(rows: DeviceRows, stream: Any) -> Iterator[DistinctRows]:
    """The rows that occur in a gradient, of one index at least; ``with`` holds the room."""
    found = DistinctRows(rows)
    with placed(found.keys, _NO_SCALARS, [0], LaunchContext(stream)) as call:
        found.enqueue(call)
        yield found
