"""The keys of a row-sparse step: made and checked in one loop, then sorted, and read by all others.

`kernels.tables` explains the terms of the loops over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int64

from ...tables import LEFT_OUT, RowTable
from ..dense.tiles import WIDEST
from ..device.backend import launcher, load_int32, load_int64, lower_int64, store_int64
from ..device.guard import FOUND, INDEX, is_closed
from ..device.launch import Launches
from ..device.memory import Places
from ..device.part import LaunchContext
from ..device.records import Word, row_finder
from . import sort
from .sort import KEYS_PER_THREAD, THREADS, TILE, thread


class TableRow(NamedTuple):
    """A table with a row-sparse gradient: first what each step has anew."""

    # Addresses of lists are biased: they are those of position 0, even if it is of another table.
    values: Word  # biased
    hp: Word  # address of the scalars
    indices: Word  # biased
    is_aligned: Word  # whether tiles are moved by vectors
    # If positions may share rows of the gradient (`sources`); otherwise 0.
    gradient_rows: Word  # int32, biased
    weights: Word  # biased
    winners: Word  # address of the winners of row 0
    first: Word  # the number of position 0 among the winners
    unit: Word  # elements from one row of the gradient to the next
    rows: Word
    width: Word  # elements of a row
    first_row: Word  # global row
    first_position: Word
    index_bytes: Word  # 4 or 8
    n_ranges: Word
    arrays: Word  # address of the addresses of the parameter and of its states
    bounds: Word  # address of the first position of each range, and of the end of the last one


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


@cuda.jit(device=True)
def _make_keys(own, tables, n_tables, n, bits, dropped_row, drops, base, guard):
    """Make a thread's keys of the block's tile; those beyond the last position are -1.

    Bad indices get ``dropped_row`` if it ``drops`` them, else they close the guard: the smallest
    position, with ``base`` added, is what was found. What pooling left out is always dropped.
    """
    first = np.int64(cuda.blockIdx.x) * TILE + thread()
    for k in range(KEYS_PER_THREAD):
        position, own[k] = first + k * THREADS, -1
        if position < n:
            table = _of_position(tables, n_tables, position)
            index = index_at(table.indices, table.index_bytes, position)
            row = index + table.first_row
            if index < 0 or index >= table.rows:
                row = dropped_row
                if drops == 0 and (table.gradient_rows == 0 or index != LEFT_OUT):
                    # Its key is made as well: the sort runs before anybody has heard of it, and the
                    # loops behind it find the guard closed.
                    row = 0
                    lower_int64(guard + 8 * FOUND, base + position)
            own[k] = (row << bits) | position


@cuda.jit
def check_kernel(
    tables, n_tables, n, bits, dropped_row, drops, base, keys, counters, shift, mask, guard
):
    """Check all indices; make the keys and count their first digit, unless ``keys`` is 0."""
    own = cuda.local.array(KEYS_PER_THREAD, int64)
    _make_keys(own, tables, n_tables, n, bits, dropped_row, drops, base, guard)
    if keys == 0:
        return
    first = np.int64(cuda.blockIdx.x) * TILE + thread()
    for k in range(KEYS_PER_THREAD):
        if first + k * THREADS < n:
            store_int64(keys + 8 * (first + k * THREADS), own[k])
    sort.count_digits(own, counters, shift, mask)


@cuda.jit
def tile_kernel(tables, n_tables, n, bits, dropped_row, drops, base, keys, mask, guard):
    """Make and sort the keys of a list that one block can sort."""
    own = cuda.local.array(KEYS_PER_THREAD, int64)
    _make_keys(own, tables, n_tables, n, bits, dropped_row, drops, base, guard)
    sort.sort_one_tile(own, keys, n, bits, mask)


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


_N_NEW = TableRow._fields.index("unit")
_COLUMN = {name: k for k, name in enumerate(TableRow._fields)}


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
        self._itemsizes, self._base, self._real_bytes = itemsizes, base, real_bytes
        self.n = n = sum(table.length for table in tables)  # positions
        self.n_rows = sum(table.rows for table in tables)
        self.bits = max(1, (n - 1).bit_length())  # of a key that hold the position
        self._drops, leaves_out = drop, drop or any(table.source.rows for table in tables)
        self._dropped_row = self.n_rows if leaves_out else -1
        self._row_bits = max(1, (self.n_rows if leaves_out else self.n_rows - 1).bit_length())
        self.widest = max(table.width for table in tables)
        self._lay_out(tables)
        self.places = Places()
        words = (n, n, sort.scratch_words(n)) if n > TILE else (n, 0, 0)
        self._sections = [self.places.add(8 * count) for count in words]
        self._sorting = Launches(self._sort_launches)
        self.loops: list[Any] = [check_kernel]
        if n > TILE:
            self.loops += [sort.count_kernel, sort.scan_kernel, sort.scatter_kernel]
        elif n:
            self.loops = [tile_kernel]

    def _lay_out(self, tables: Sequence[RowTable]) -> None:
        """Make the words of the tables: a row for each, then the lists that it points at."""
        self._n_tables = n_tables = len(tables)
        counts = [(len(table.addresses), table.ranges[1] + 1) for table in tables]
        ends = np.cumsum(counts).reshape(-1, 2)
        self._at_lists = 8 * (n_tables * len(TableRow._fields) + ends - counts)  # bytes
        self.n_words = n_tables * len(TableRow._fields) + int(ends[-1, -1])
        self._words: np.ndarray = np.zeros(self.n_words, np.int64)
        self._rows = self._words[: n_tables * len(TableRow._fields)].reshape(n_tables, -1)
        self._addresses: list[tuple[int, ...]] = []
        self.table, self._firsts = 0, []
        first_row = first_position = 0
        for row, table in zip(self._rows, tables, strict=True):
            unit = table.width
            if table.source.rows:
                unit = table.source.stride // max(1, self._itemsizes[0])
            firsts = first_row, first_position, table.source.index_bytes, table.ranges[1]
            row[_N_NEW:-2] = unit, table.rows, table.width, *firsts
            self._firsts.append(first_position)
            first_row, first_position = first_row + table.rows, first_position + table.length
        self.put(tables)

    def put(self, tables: Sequence[RowTable]) -> None:
        """Take over where the arrays and gradients of tables of the same form lie now."""
        is_new, addresses = not self._addresses, [table.addresses for table in tables]
        self._tables = tables
        if is_new or any(table.source.positions for table in tables):
            for table, at, first in zip(tables, self._at_lists, self._firsts, strict=True):
                begin = at[1] // 8
                self._words[begin : begin + table.ranges[1] + 1] = first + table.bounds()
        if is_new or addresses != self._addresses:
            self._addresses, self._wide = addresses, []
            for table, at in zip(tables, self._at_lists, strict=True):
                begin = at[0] // 8
                self._words[begin : begin + len(table.addresses)] = table.addresses
                strides = [table.width * n for n in self._itemsizes]
                if table.source.rows:
                    strides[0] = table.source.stride
                # A sum of bits: all are multiples of a power of 2 if it is.
                self._wide.append(reduce(or_, (*table.addresses, *strides)))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the launches need for the time of the call."""
        return self.places.size

    def words(self, place: int, hp: Sequence[int]) -> np.ndarray:
        """The int64 tables, to lie at ``place``; behind that of tables lies what it points at."""
        if place != self.table:
            self.table = place
            self._rows[:, -2:] = place + self._at_lists
        each = zip(self._tables, hp, self._wide, self._firsts, strict=True)
        self._rows[:, :_N_NEW] = [self._new_words(*own) for own in each]
        return self._words

    def _new_words(
        self, table: RowTable, scalars: int, wide: int, first_position: int
    ) -> tuple[int, ...]:
        """The words of a table that are others in each step."""
        source, g_bytes = table.source, self._itemsizes[0]
        indices, wide = source.indices - first_position * source.index_bytes, wide | source.values
        if not source.rows:
            values = source.values - first_position * table.width * g_bytes
            return values, scalars, indices, wide % WIDEST == 0, 0, 0, 0, 0
        if source.argmax:  # int32, of a pooled gradient's elements, are read as wide
            wide |= source.argmax | 4 * (source.stride // max(1, g_bytes))
        weights = source.weights and source.weights - first_position * self._real_bytes
        return (
            source.values, scalars, indices, wide % WIDEST == 0, source.rows - 4 * first_position,
            weights, source.argmax, source.first - first_position,
        )  # fmt: skip

    def check(self, call: LaunchContext) -> None:
        """Enqueue the check of all indices alone."""
        check = launcher(check_kernel, max(1, sort.n_tiles(self.n)), THREADS, call.stream)
        check(*self._key_arguments, 0, 0, 0, 0, call.guard)

    @property
    def _key_arguments(self) -> tuple[int, ...]:
        options = self._dropped_row, int(self._drops), self._base
        return self.table, self._n_tables, self.n, self.bits, *options

    def sort(self, call: LaunchContext) -> None:
        """Enqueue making and sorting the keys."""
        self._sorting.run(call, self.table)

    def sorted(self, call: LaunchContext) -> tuple[int, ...]:
        """The address of the sorted keys, how many there are, and bits of their positions."""
        keys, spare, _ = (call.scratch + at for at in self._sections)
        place = keys if self.n <= TILE else sort.sorted_place(keys, spare, self._row_bits)
        return place, self.n, self.bits

    def _sort_launches(self, call: LaunchContext) -> Iterator[Any]:
        # Positions are in order before and stay so.
        keys, spare, scratch = (call.scratch + at for at in self._sections)
        stream, given = call.stream, self._key_arguments
        if self.n <= TILE:
            launch = launcher(tile_kernel, 1, THREADS, stream)
            if self.n:
                yield partial(launch, *given, keys, (1 << self._row_bits) - 1), True
            return
        launch = launcher(check_kernel, sort.n_tiles(self.n), THREADS, stream)
        count = keys, scratch, self.bits, sort.first_mask(self._row_bits)
        yield partial(launch, *given, *count), True
        of_sort = keys, spare, scratch, self.n, self.bits, self._row_bits, stream
        yield from ((run, False) for run in sort.sort_launches(*of_sort, is_counted=True))
