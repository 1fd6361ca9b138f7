"""The keys of a row-sparse step: made and checked in one loop, then sorted, and read by all others.

Terms are those of `rows.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...tables import RowTable
from ..device.backend import load_int32, load_int64, lower_int64, store_int64
from ..device.guard import FOUND, INDEX, is_closed
from ..device.launch import on_elements
from ..device.memory import Places
from ..device.part import Call
from ..device.records import row_finder
from .sort import count_kernel, scan_kernel, scatter_kernel, scratch_words, sort_keys
from .table import TableRow, n_words, sizes_of, words_of

table_of_position = row_finder(TableRow, "first_position")
table_of_row = row_finder(TableRow, "first_row")


class Keys(NamedTuple):
    """Sorted keys in a kernel."""

    place: Any  # their address
    n: Any
    bits: Any  # of a key that hold the position


@cuda.jit(device=True)
def key_at(keys, k):
    """Sorted key ``k``."""
    return load_int64(keys.place + 8 * k)


@cuda.jit(device=True)
def row_at(keys, k):
    """The global row of sorted key ``k``."""
    return key_at(keys, k) >> keys.bits


@cuda.jit(device=True)
def position_at(keys, k):
    """The position of sorted key ``k``."""
    return key_at(keys, k) & ((1 << keys.bits) - 1)


@cuda.jit(device=True)
def is_first_of_row(keys, k):
    """Whether sorted key ``k`` is the first of its row."""
    return k == 0 or row_at(keys, k - 1) != row_at(keys, k)


@cuda.jit(device=True)
def first_at_least(keys, low, high, x):
    """The first ``i`` in ``low .. high`` with sorted key ``i`` at least ``x``; else ``high``."""
    while low < high:
        middle = (low + high) >> 1
        if key_at(keys, middle) < x:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit(device=True)
def _index_at(table, position):
    if table.index_bytes == 4:
        return np.int64(load_int32(table.indices + 4 * position))
    return load_int64(table.indices + 8 * position)


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
    table = table_of_position(tables, n_tables, position)
    index = _index_at(table, position)
    row = index + table.first_row
    if index < 0 or index >= table.rows:
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
            table = table_of_position(tables, n_tables, position)
            store_int64(guard + 8 * INDEX, _index_at(table, position))
    return True


class KeySort:
    """Tables with row-sparse gradients, and the sections of scratch memory for their keys.

    Args:
        tables: at least one; their ``hp`` is not used.
        itemsizes: as `words_of`.
        drop: leave out indices outside of ``[0, N)`` instead of closing the guard.
        sorts: whether the keys are sorted by this package.
        base: added to the position of a bad index.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        itemsizes: Sequence[int] = (0,),
        *,
        drop: bool = False,
        sorts: bool = True,
        base: int = 0,
    ) -> None:
        self._tables, self._itemsizes, self._base = tables, itemsizes, base
        self.sizes, self.n_words = sizes_of(tables, drop=drop), n_words(tables)
        self._dropped_row, self._sorts = self.sizes.rows if drop else -1, sorts
        n, self.places = self.sizes.n if sorts else 0, Places()
        words = (n, n, scratch_words(n) if sorts else 0)
        self._sections = [self.places.add(8 * count) for count in words]
        self.table = 0
        self.sorted: tuple[int, ...] = ()  # what `sort` says

    @property
    def scratch_bytes(self) -> int:
        """See `Part`."""
        return self.places.size

    def loops(self) -> list[Any]:
        """See `Part`."""
        is_sorted = self.sizes.n and self._sorts
        return [check_kernel, *((count_kernel, scan_kernel, scatter_kernel) if is_sorted else ())]

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `Part`."""
        self.table = place
        return words_of(self._tables, place, self._itemsizes, hp.tolist())

    def check(self, call: Call, keys: int = 0) -> None:
        """Enqueue the check of all indices, and making the keys unless their address is 0."""
        n, bits, tables = self.sizes.n, self.sizes.position_bits, (self.table, len(self._tables))
        check = on_elements(check_kernel, n, call.stream)
        check(*tables, n, bits, self._dropped_row, keys, call.guard, self._base)

    def sort(self, call: Call) -> tuple[int, ...]:
        """Enqueue making and sorting the keys: their address, how many, bits of positions."""
        n, bits, row_bits = self.sizes.n, self.sizes.position_bits, self.sizes.row_bits
        if call.sorter is not None:
            self.check(call, call.sorter.room(n))
            place = call.sorter.sort()
        else:
            keys, spare, scratch = (call.scratch + at for at in self._sections)
            self.check(call, keys)
            # Positions are in order before and stay so.
            place = sort_keys(keys, spare, scratch, n, bits, row_bits, call.stream)
        self.sorted = place, n, bits
        return self.sorted
