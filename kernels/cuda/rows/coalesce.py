"""The sums of equal rows of one gradient, enqueued on a stream: sort, then one of `sums`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...storage import Storage
from ...tables import RowTable
from ..dense.tiles import WIDEST, tile_length
from ..device.backend import GEOMETRY, copy_in, copy_out
from ..device.guard import FOUND, NOTHING, WORDS
from ..device.launch import on_elements, on_grid, tile_grid
from ..device.memory import Places
from ..device.part import Call, Sorter, placed
from . import sums
from .keys import KeySort
from .sort import scratch_words, sort_keys

_NO_SCALARS = np.empty((1, 0))


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


class _Sorted:
    """The sorted keys of a gradient, in scratch memory of a call (`placed`)."""

    def __init__(self, rows: Rows, *, drop: bool = False) -> None:
        self._rows, self.places = rows, Places()
        self._keys = KeySort([rows.table], self.places, drop=drop, sorts=rows.sorter is None)
        self.n_words = self._keys.n_words

    @property
    def scratch_bytes(self) -> int:
        """See `Part`."""
        return self.places.size

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `Part`."""
        return self._keys.words(place, (self._rows.g.itemsize,), hp)

    def enqueue(self, call: Call) -> tuple[int, ...]:
        """Enqueue the sort; what all loops need: keys, their number, their bits, and the table."""
        keys, sizes = self._keys.enqueue(call), self._keys.sizes
        return keys, sizes.n, sizes.position_bits, self._keys.of_tables[0]


def _launcher(loop: Any, rows: Rows, n: int, out: Storage, stream: Any) -> Any:
    """What launches a loop with a thread for each tile of ``n`` rows."""
    tiles, lanes, groups = tile_grid(rows.table.width, tile_length(rows.g, out), GEOMETRY.rows)
    return on_grid(loop, (-(-n // lanes), groups), (tiles, lanes), stream)


def _is_aligned(rows: Rows, *arrays: tuple[int, Storage]) -> int:
    """Whether all rows of the values, and of arrays of their width, begin at whole vectors."""
    both = ((rows.table.values, rows.g), *arrays)
    places = [x for address, of in both for x in (address, rows.table.width * of.itemsize)]
    return int(all(x % WIDEST == 0 for x in places))


def dense_sums(rows: Rows, out: Storage, result: int, *, guard: int, stream: Any) -> None:
    """Enqueue adding a gradient up in an array of all rows that holds 0.

    Args:
        rows: the gradient.
        out: storage of the array.
        result: its address.
        guard: of the call; it is closed by a bad index, and then nothing is written.
        stream: of Numba.
    """
    keys, n = _Sorted(rows), rows.table.length
    if n == 0:
        return
    with placed(keys, _NO_SCALARS, [0], Call(stream, guard, rows.sorter)) as call:
        sorted_keys, is_aligned = keys.enqueue(call), _is_aligned(rows, (result, out))
        # One block looks at the guard even where there are no columns.
        loop = _launcher(sums.dense_sums_kernel(rows.g, rows.real, out), rows, n, out, stream)
        loop(*sorted_keys, result, is_aligned, guard)


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
    keys, n, (parameter,) = _Sorted(rows, drop=True), rows.table.length, rows.table.addresses
    if n == 0 or rows.table.width == 0:
        return
    with placed(keys, hp[None], [0], Call(stream, 0, rows.sorter)) as call:
        sorted_keys = keys.enqueue(call)
        is_aligned = _is_aligned(rows, (parameter, w), (result, rows.real))
        loop = _launcher(sums.decayed_sums_kernel(rows.g, rows.real, w), rows, n, w, stream)
        loop(*sorted_keys, result, is_aligned)


class DistinctRows:
    """The rows that occur in a gradient: how many, and their sums (`distinct_rows`)."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self.keys = rows, _Sorted(rows)
        places, n = self.keys.places, rows.table.length
        self._words, self._spare = (places.add(8 * n) for _ in range(2))
        self._scratch = places.add(8 * scratch_words(n))
        self._found = places.add(8 * (WORDS + 1))
        self._call, self._firsts = Call(None), 0

    def enqueue(self, call: Call) -> None:
        """Enqueue the sort of the keys, and then that of the first ones of all rows."""
        found, stream, n = call.scratch + self._found, call.stream, self._rows.table.length
        copy_in(found, np.array([NOTHING] + [0] * WORDS, np.int64), stream)
        self._call = call = call._replace(guard=found)
        self._sorted_keys = self.keys.enqueue(call)
        words, spare, scratch = (
            call.scratch + at for at in (self._words, self._spare, self._scratch)
        )
        on_elements(sums.mark_firsts_kernel, n, stream)(*self._sorted_keys[:3], words)
        self._firsts = sort_keys(words, spare, scratch, n, sums.OTHER_BIT, 1, stream)
        on_grid(sums.count_firsts_kernel, 1, 1, stream)(self._firsts, n, found + 8 * WORDS)

    def count(self) -> tuple[int, int]:
        """How many rows occur, and the position of a bad index or -1; the host waits for it."""
        found = np.empty(WORDS + 1, np.int64)
        copy_out(found, self._call.guard, self._call.stream)
        position, n_distinct = int(found[FOUND]), int(found[WORDS])
        return n_distinct, -1 if position == NOTHING else position

    def write(self, n_distinct: int, indices: int, out: Storage, result: int) -> None:
        """Enqueue writing the indices, of the size that they came in, and the sums."""
        rows, stream = self._rows, self._call.stream
        kernel = sums.distinct_sums_kernel(rows.g, rows.real, out)
        is_aligned = _is_aligned(rows, (result, out))
        loop = _launcher(kernel, rows, n_distinct, out, stream)
        loop(*self._sorted_keys, self._firsts, n_distinct, indices, result, is_aligned)


@contextmanager
def distinct_rows(rows: Rows, stream: Any) -> Iterator[DistinctRows]:
    """The rows that occur in a gradient, of one index at least; ``with`` holds the room."""
    found = DistinctRows(rows)
    with placed(found.keys, _NO_SCALARS, [0], Call(stream, 0, rows.sorter)) as call:
        found.enqueue(call)
        yield found
