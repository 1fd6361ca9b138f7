"""The sums of equal rows of one gradient, enqueued on a stream: sort, then one of `row_sums`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...storage import Storage
from ...tables import RowTable
from ..device.backend import copy_in, copy_out
from ..device.guard import NOTHING, WORDS
from ..device.launch import on_grid, tile_grid
from ..device.memory import Places, room_of
from . import sums as row_sums
from .keys import Keys, Sorter
from .sort import scratch_words, sort_keys
from .table import ROW_BYTES, sizes_of, table_of

THREADS = 256
_ALIGN = 16  # bytes


class Rows(NamedTuple):
    """A row-sparse gradient.

    Attributes:
        table: where its indices and values lie, and the shape of what it is of.
        g: storage of the values.
        real: of the arithmetic.
        sorter: sorts the keys; None: the sort of this package.
    """

    table: RowTable
    g: Storage
    real: Storage
    sorter: Sorter | None


class _Sorting:
    """The sections of a room in which the keys of a gradient are made and sorted."""

    def __init__(self, rows: Rows, *, drop: bool = False) -> None:
        self._rows = rows
        self.sizes = sizes_of([rows.table], drop=drop)
        self._dropped_row = self.sizes.rows if drop else -1
        self.places = Places()
        self._table = self.places.add(ROW_BYTES)
        self._keys = Keys(self.sizes, self.places, sorts=rows.sorter is None)

    def enqueue(self, base: int, guard: int, stream: Any) -> tuple[int, int]:
        """Check the indices and sort the keys; their address, and that of the table."""
        table = table_of([self._rows.table], self._rows.g.itemsize)
        place = base + self._table
        copy_in(place, table, stream)
        check, sorter = (guard, 0), self._rows.sorter
        keys = self._keys.enqueue(base, place, 1, self._dropped_row, check, sorter, stream)
        return keys, place


def _grid(n: int, width: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    tiles, lanes, groups = tile_grid(-(-width // length), THREADS)
    return (-(-n // lanes), groups), (tiles, lanes)


def _is_aligned(width: int, *arrays: tuple[int, Storage]) -> int:
    """Whether all rows of arrays begin at multiples of 16 bytes."""
    places = [x for address, storage in arrays for x in (address, width * storage.itemsize)]
    return int(all(x % _ALIGN == 0 for x in places))


def dense_sums(rows: Rows, out: Storage, result: int, *, guard: int, stream: Any) -> None:
    """Enqueue adding a gradient up in an array of all rows that holds 0.

    Args:
        rows: the gradient.
        out: storage of the array.
        result: its address.
        guard: of the call; it is closed by a bad index, and then nothing is written.
        stream: of Numba.
    """
    sorting, table = _Sorting(rows), rows.table
    n = sorting.sizes.n
    if n == 0:
        return
    with room_of(stream) as room:
        base = room.take(sorting.places.size)
        keys, tables = sorting.enqueue(base, guard, stream)
        loop = row_sums.dense_sums_kernel(rows.g, rows.real, out)
        # One block looks at the guard even where there are no columns.
        grid, block = _grid(n, table.width, row_sums.tile_length(rows.g, out))
        is_aligned = _is_aligned(table.width, (table.values, rows.g), (result, out))
        bits, shape = sorting.sizes.position_bits, (table.values, table.width)
        on_grid(loop, grid, block, stream)(
            keys, n, tables, bits, table.rows, *shape, result, is_aligned, guard
        )


def decayed_sums(rows: Rows, w: Storage, hp: np.ndarray, result: int, stream: Any) -> None:
    """Enqueue the sums of rows with their decay, at the first occurrence of each row.

    Args:
        rows: the gradient; its table has the address of the parameter. Bad indices are left out.
        w: storage of the parameter.
        hp: the scalars, in the type of the arithmetic.
        result: address of an array of the shape of the values, in the type of the arithmetic, that
            holds 0.
        stream: of Numba.
    """
    sorting, table = _Sorting(rows, drop=True), rows.table
    n, at_hp, (parameter,) = sorting.sizes.n, sorting.places.add(hp.nbytes), table.addresses
    if n == 0 or table.width == 0:
        return
    with room_of(stream) as room:
        base = room.take(sorting.places.size)
        copy_in(base + at_hp, hp, stream)
        keys, _ = sorting.enqueue(base, 0, stream)
        loop = row_sums.decayed_sums_kernel(rows.g, rows.real, w)
        grid, block = _grid(n, table.width, row_sums.tile_length(rows.g, w))
        arrays = ((table.values, rows.g), (parameter, w), (result, rows.real))
        on_grid(loop, grid, block, stream)(
            keys, n, sorting.sizes.position_bits, table.rows, table.values, table.width,
            parameter, base + at_hp, result, _is_aligned(table.width, *arrays),
        )  # fmt: skip


class DistinctRows:
    """The rows that occur in a gradient: how many, and their sums. ``with`` holds the room.

    Args:
        rows: the gradient, of one index at least.
        stream: of Numba.
    """

    def __init__(self, rows: Rows, stream: Any) -> None:
        self._rows = rows
        self._stream = stream
        self._sorting = _Sorting(rows)
        places, n = self._sorting.places, self._sorting.sizes.n
        self._n = n
        self._words, self._spare = (places.add(8 * n) for _ in range(2))
        self._scratch = places.add(8 * scratch_words(n))
        self._found = places.add(8 * (WORDS + 1))
        self._room = room_of(stream)

    def __enter__(self) -> DistinctRows:
        self._room.__enter__()
        try:
            self._enqueue()
        except BaseException:
            self._room.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._room.__exit__()

    def _enqueue(self) -> None:
        stream, n, bits = self._stream, self._n, self._sorting.sizes.position_bits
        self._base = base = self._room.take(self._sorting.places.size)
        copy_in(base + self._found, np.array([NOTHING] + [0] * WORDS, np.int64), stream)
        self._keys, _ = self._sorting.enqueue(base, base + self._found, stream)
        words = base + self._words
        on_grid(row_sums.mark_firsts_kernel, -(-n // THREADS), THREADS, stream)(
            self._keys, n, bits, words
        )
        spare, scratch = base + self._spare, base + self._scratch
        self._firsts = sort_keys(words, spare, scratch, n, row_sums.OTHER_BIT, 1, stream)
        count = base + self._found + 8 * WORDS
        on_grid(row_sums.count_firsts_kernel, 1, 1, stream)(self._firsts, n, count)

    def count(self) -> tuple[int, int]:
        """How many rows occur, and the position of a bad index or -1; the host waits for it."""
        found = np.empty(WORDS + 1, np.int64)
        copy_out(found, self._base + self._found, self._stream)
        position = int(found[0])
        return int(found[WORDS]), -1 if position == NOTHING else position

    def write(self, n_distinct: int, indices: int, out: Storage, result: int) -> None:
        """Enqueue writing the indices, of the size that they came in, and the sums."""
        rows, table, bits = self._rows, self._rows.table, self._sorting.sizes.position_bits
        loop = row_sums.distinct_sums_kernel(rows.g, rows.real, out)
        grid, block = _grid(n_distinct, table.width, row_sums.tile_length(rows.g, out))
        is_aligned = _is_aligned(table.width, (table.values, rows.g), (result, out))
        on_grid(loop, grid, block, self._stream)(
            self._keys, self._n, bits, self._firsts, n_distinct, table.values, table.width,
            indices, table.index_bytes, result, is_aligned,
        )  # fmt: skip
