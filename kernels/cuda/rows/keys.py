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
from .sort import counting, scanning, scattering, scratch_words, sort_keys
from .table import TableRow, n_words, sizes_of, words_of

table_of_position = row_finder(TableRow, "first_position")
table_of_row = row_finder(TableRow, "first_row")


class Keys(NamedTuple):
    """Sorted keys in a kernel.

    Attributes:
        place: their address.
        n: how many.
        bits: of a key that hold the position.
    """

    place: Any
    n: Any
    bits: Any


@cuda.jit(device=True)
def key_at(keys, k):
    """Sorted key ``k``."""
    return load_int64(keys.place + 8 * k)


@cuda.jit(device=True)
def row_at(keys, k):
    """The global row of sorted key ``k``."""
    return key_at(keys, k) >> keys.bits


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
        tables: at least one.
        places: gets the sections.
        drop: bad indices are left out instead of closing the guard.
        sorts: whether the keys are sorted by this package.
        base: added to the position of a bad index.

    Attributes:
        tables: these.
        sizes: what they add up to.
        n_words: of the table of tables.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        places: Places,
        *,
        drop: bool = False,
        sorts: bool = True,
        base: int = 0,
    ) -> None:
        self.tables, self.sizes = tables, sizes_of(tables, drop=drop)
        self.n_words, self._base, self._sorts = n_words(tables), base, sorts
        self._dropped_row = self.sizes.rows if drop else -1
        n = self.sizes.n if sorts else 0
        self._keys, self._spare = (places.add(8 * n) for _ in range(2))
        self._scratch = places.add(8 * scratch_words(n) if sorts else 0)
        self._table = 0

    def words(self, place: int, itemsizes: Sequence[int], hp: Any) -> np.ndarray:
        """As `words_of`; where they lie is known from then on."""
        self._table = place
        return words_of(self.tables, place, itemsizes, np.asarray(hp).tolist())

    def loops(self) -> list[Any]:
        """All loops that are launched."""
        sorting = [counting(), scanning(), scattering()] if self.sizes.n and self._sorts else []
        return [check_kernel, *sorting]

    @property
    def of_tables(self) -> tuple[int, int]:
        """Address of the table of tables, and its rows."""
        return self._table, len(self.tables)

    def check(self, call: Call, keys: int = 0) -> None:
        """Enqueue the check of all indices, and making the keys unless their address is 0."""
        sizes = self.sizes
        on_elements(check_kernel, sizes.n, call.stream)(
            *self.of_tables, sizes.n, sizes.position_bits, self._dropped_row,
            keys, call.guard, self._base,
        )  # fmt: skip

    def enqueue(self, call: Call) -> int:
        """Enqueue making and sorting the keys; their address."""
        sizes, sorter = self.sizes, call.sorter
        keys = call.scratch + self._keys if sorter is None else sorter.room(sizes.n)
        self.check(call, keys)
        if sorter is not None:
            return sorter.sort()
        spare, scratch = call.scratch + self._spare, call.scratch + self._scratch
        # Positions are in order before and stay so.
        bits = sizes.position_bits, sizes.row_bits
        return sort_keys(keys, spare, scratch, sizes.n, *bits, call.stream)
