"""The keys of a row-sparse step: made and checked in one loop, then sorted, and read by all others.

`kernels.tables` explains the terms of the loops over rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...tables import LEFT_OUT, RowSource, RowTable
from ..dense.tiles import are_aligned
from ..device.backend import load_int32, load_int64, lower_int64, store_int64
from ..device.guard import FOUND, INDEX, is_closed
from ..device.launch import on_elements
from ..device.memory import Places
from ..device.part import LaunchContext
from ..device.records import Word, row_finder, size_of
from .sort import count_kernel, scan_kernel, scatter_kernel, scratch_words, sort_keys


class TableRow(NamedTuple):
    """A table with a row-sparse gradient."""

    # Addresses of lists are biased: they are those of position 0, even if it is of another table.
    arrays: Word  # address of the addresses of the parameter and of its states
    values: Word  # biased
    hp: Word  # address of the scalars
    rows: Word
    width: Word  # elements of a row
    first_row: Word  # global row
    first_position: Word
    indices: Word  # biased
    index_bytes: Word  # 4 or 8
    bounds: Word  # address of the first position of each range, and of the end of the last one
    n_ranges: Word
    is_aligned: Word  # whether tiles are moved by vectors
    # If positions may share rows of the gradient (`sources`); otherwise 0.
    gradient_rows: Word  # int32, biased
    unit: Word  # elements from one row of the gradient to the next
    weights: Word  # biased
    winners: Word  # address of the winners of row 0
    first: Word  # the number of position 0 among the winners


_of_position = row_finder(TableRow, "first_position")


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
def is_first(keys, k):
    """Whether sorted key ``k`` is the first of its row."""
    return k == 0 or row_at(keys, k - 1) != row_at(keys, k)


@cuda.jit(device=True)
def lower_bound(keys, low, high, x):
    """The first ``i`` in ``low .. high`` with sorted key ``i`` at least ``x``; else ``high``."""
    while low < high:
        middle = (low + high) >> 1
        if key_at(keys, middle) < x:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit(device=True)
def index_at(indices, n_bytes, k):
    """Index ``k`` of a list of such of 4 or 8 bytes."""
    if n_bytes == 4:
        return np.int64(load_int32(indices + 4 * k))
    return load_int64(indices + 8 * k)


@cuda.jit
def check_kernel(tables, n_tables, n, bits, dropped_row, drops, keys, guard, base):
    """Make the key of each position, unless the address of the keys is 0.

    Bad indices get ``dropped_row`` if it ``drops`` them, else they close the guard: the smallest
    position, with ``base`` added, is what was found. What pooling left out is always dropped.
    """
    position = cuda.grid(1)
    if position >= n:
        return
    table = _of_position(tables, n_tables, position)
    index = index_at(table.indices, table.index_bytes, position)
    row = index + table.first_row
    if index < 0 or index >= table.rows:
        row = dropped_row
        if drops == 0 and (table.gradient_rows == 0 or index != LEFT_OUT):
            # Its key is made as well: the sort runs before anybody has heard of it, and the loops
            # behind it find the guard closed.
            row = 0
            lower_int64(guard + 8 * FOUND, base + position)
    if keys != 0:
        store_int64(keys + 8 * position, (row << bits) | position)


@cuda.jit(device=True)
def may_not_write(guard, base, n, tables, n_tables):
    """Whether the guard is closed; one thread keeps the index that did it, for the error."""
    if not is_closed(guard):
        return False
    is_first_block = cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0
    if is_first_block and cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0:
        position = load_int64(guard + 8 * FOUND) - base
        if 0 <= position < n:
            table = _of_position(tables, n_tables, position)
            index = index_at(table.indices, table.index_bytes, position)
            store_int64(guard + 8 * INDEX, index)
    return True


class KeySort:
    """Tables with row-sparse gradients, one at least, and scratch memory for their keys."""

    def __init__(
        self,
        tables: Sequence[RowTable],
        itemsizes: Sequence[int] = (0,),  # of the gradient, the parameter, and each state
        *,
        drop: bool = False,  # leave out indices outside of [0, N) instead of closing the guard
        base: int = 0,  # added to the position of a bad index
        real_bytes: int = 0,  # of weights
    ) -> None:
        self._tables, self._itemsizes, self._base = tables, itemsizes, base
        self._real_bytes = real_bytes
        self.n = n = sum(table.length for table in tables)  # positions
        self.n_rows = sum(table.rows for table in tables)
        self.bits = max(1, (n - 1).bit_length())  # of a key that hold the position
        self._drops, leaves_out = drop, drop or any(table.source.rows for table in tables)
        self._dropped_row = self.n_rows if leaves_out else -1
        self._row_bits = max(1, (self.n_rows if leaves_out else self.n_rows - 1).bit_length())
        self.widest = max(table.width for table in tables)
        list_words = sum(len(table.addresses) + table.ranges[1] + 1 for table in tables)
        self.n_words = len(tables) * size_of(TableRow) // 8 + list_words
        self.places = Places()
        words = n, n, scratch_words(n)
        self._sections = [self.places.add(8 * count) for count in words]
        sort_loops = (count_kernel, scan_kernel, scatter_kernel) if n else ()
        self.loops: list[Any] = [check_kernel, *sort_loops]
        self.table = 0
        self.sorted: tuple[int, ...] = ()  # what `sort` says

    @property
    def scratch_bytes(self) -> int:
        """See `DevicePart`."""
        return self.places.size

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `DevicePart`; behind the table of tables lies what it points at."""
        self.table, rows, lists, first_row, first_position = place, [], [], 0, 0
        place += len(self._tables) * size_of(TableRow)
        for table, scalars in zip(self._tables, hp.tolist(), strict=True):
            source, strides = table.source, [table.width * n for n in self._itemsizes]
            shared: tuple[int, ...] = (0, table.width, 0, 0, 0)
            own, wide = -first_position * strides[0], [source.values, *table.addresses]
            if source.rows:
                own, strides[0], shared = 0, source.stride, self._shared(source, first_position)
                # Of a pooled gradient's elements the winners, int32, are read as wide.
                wide += [source.winners, 4 * shared[1]] if source.winners else []
            is_aligned = are_aligned(np.array([*wide, *strides]))
            values = source.values + own
            firsts = table.rows, table.width, first_row, first_position
            indices = source.indices - first_position * source.index_bytes, source.index_bytes
            bounds = (first_position + table.bounds()).tolist()
            arrays, place = place, place + 8 * len(table.addresses)
            ranges = place, table.ranges[1]
            place += 8 * len(bounds)
            rows.append(
                TableRow(
                    arrays, values, scalars, *firsts, *indices, *ranges, bool(is_aligned), *shared
                )
            )
            lists += [table.addresses, bounds]
            first_row, first_position = first_row + table.rows, first_position + table.length
        return np.array([*itertools.chain(*rows, *lists)], np.int64)

    def _shared(self, source: RowSource, first_position: int) -> tuple[int, ...]:
        """Where the gradients of a table are whose occurrences share rows of them."""
        weights = source.weights and source.weights - first_position * self._real_bytes
        unit = source.stride // max(1, self._itemsizes[0])
        rows = source.rows - 4 * first_position
        return rows, unit, weights, source.winners, source.first - first_position

    def check(self, call: LaunchContext, keys: int = 0) -> None:
        """Enqueue the check of all indices, and making the keys unless their address is 0."""
        key_arguments = self.n, self.bits, self._dropped_row, int(self._drops), keys
        check = on_elements(check_kernel, self.n, call.stream)
        check(self.table, len(self._tables), *key_arguments, call.guard, self._base)

    def sort(self, call: LaunchContext) -> tuple[int, ...]:
        """Enqueue making and sorting the keys: their address, how many, bits of positions."""
        keys, spare, scratch = (call.scratch + at for at in self._sections)
        self.check(call, keys)
        # Positions are in order before and stay so.
        place = sort_keys(keys, spare, scratch, self.n, self.bits, self._row_bits, call.stream)
        self.sorted = place, self.n, self.bits
        return self.sorted
