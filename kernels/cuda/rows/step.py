"""One row-sparse step of a rule on any number of tables on the device, enqueued on a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...element import Kernel
from ...tables import HOT, RowTable
from ..dense.tiles import row_tiles
from ..device.backend import copy_in, fill_ones
from ..device.launch import on_grid, tile_grid
from ..device.memory import Places, copy_scalars_and_table, room_of
from . import update as rows
from .keys import Keys, Sorter, make_keys
from .table import ROW_BYTES, Sizes, sizes_of, table_of

THREADS = 256


def check_indices(tables: Sequence[RowTable], guard: int, base: int, *, stream: Any) -> None:
    """Enqueue the check of all indices alone; a bad one closes the guard."""
    table = table_of(tables)
    with room_of(stream) as room:
        place = room.take(table.nbytes)
        copy_in(place, table, stream)
        sizes = sizes_of(tables, drop=False)
        make_keys(place, len(tables), sizes, -1, 0, (guard, base), stream)


def row_update(
    kernel: Kernel,
    tables: Sequence[RowTable],
    hp: np.ndarray,
    hp_of: Sequence[int],
    *,
    touched_only: bool,
    drop: bool,
    guard: int = 0,
    base: int = 0,
    sorter: Sorter | None,
    stream: Any,
) -> None:
    """Enqueue one step of ``kernel`` on tables with row-sparse gradients, in place.

    Args:
        kernel: the rule and its storage types.
        tables: at least one; their ``hp`` is not used.
        hp: ``[R, F]`` scalars in the type of the arithmetic, on the host.
        hp_of: which row of ``hp`` each table uses.
        touched_only: True updates the rows that occur (lazy); False all rows, those that do
            not occur with a gradient of 0 (dense-equivalent).
        drop: leave out indices outside of ``[0, N)`` instead of closing the guard.
        guard: address of the guard of the call; when it is closed, nothing is written. 0: the
            call cannot fail.
        base: added to the position of a bad index.
        sorter: sorts the keys; None: the sort of this package.
        stream: of Numba.
    """
    sizes = sizes_of(tables, drop=drop)
    if sizes.n == 0 and touched_only:
        return
    with _placed(kernel, tables, sizes, hp[list(hp_of)], touched_only, sorter, stream) as step:
        keys = step.sorted_keys(sizes.rows if drop else -1, (guard, base), sorter, stream)
        step.update(keys, guard, base, stream)


@contextmanager
def _placed(
    kernel: Kernel,
    tables: Sequence[RowTable],
    sizes: Sizes,
    hp: np.ndarray,
    touched_only: bool,
    sorter: Sorter | None,
    stream: Any,
) -> Iterator[Step]:
    """A step in the room of the stream, with its tables and a row of ``hp`` for each."""
    step, places = Step(kernel, tables, sizes, touched_only, sorter is None), Places()
    scalars = np.ascontiguousarray(hp)
    places.add(scalars.nbytes)
    at_table = places.add(len(tables) * ROW_BYTES)
    at_scratch = places.add(step.size)
    with room_of(stream) as room:
        base = room.take(places.size)
        made = step.table_with(base + scalars.strides[0] * np.arange(len(tables)))
        copy_scalars_and_table(base, scalars, at_table, made, stream)
        step.place(base + at_table, base + at_scratch)
        yield step


class RowSquares:
    """The sum of squares of row-sparse gradients whose duplicates are summed first.

    Args:
        kernel: of a rule that measures the gradient; its storage types are those of the sums.
        tables: at least one; only their gradients are read.
        guard: as `row_update`; when it is closed, the sums are 0.
        base: as `row_update`.
        sorter: as `row_update`.
    """

    def __init__(
        self,
        kernel: Kernel,
        tables: Sequence[RowTable],
        *,
        guard: int,
        base: int,
        sorter: Sorter | None,
    ) -> None:
        self._kernel = kernel
        self._tables = tables
        self._guard = guard
        self._base = base
        self._sorter = sorter
        self._sizes = sizes_of(tables, drop=False)
        self._block = _block(self._sizes.widest, _tile_length(kernel))

    @property
    def n_sums(self) -> int:
        """How many parts the sum has."""
        _, lanes, tile_groups = self._block
        return -(-self._sizes.n // lanes) * tile_groups

    def enqueue(self, sums: int, stream: Any) -> None:
        """Enqueue the sums of all parts, to an address."""
        if self.n_sums == 0:
            return
        kernel, sizes, sorter = self._kernel, self._sizes, self._sorter
        hp = np.zeros((len(self._tables), kernel.n_scalars), kernel.real.dtype)
        with _placed(kernel, self._tables, sizes, hp, True, sorter, stream) as step:
            keys = step.sorted_keys(-1, (self._guard, self._base), sorter, stream)
            step.sum_hot(keys, self._guard, stream)
            step.square(keys, self._guard, self._base, self._block, sums, stream)


class Step:
    """The scratch memory of a step, and its launches.

    Args:
        kernel: the rule and its storage types.
        tables: at least one; their ``hp`` is not used.
        sizes: theirs.
        touched_only: as `row_update`.
        sorts: whether the keys are sorted by this package.
    """

    def __init__(
        self,
        kernel: Kernel,
        tables: Sequence[RowTable],
        sizes: Sizes,
        touched_only: bool,
        sorts: bool,
    ) -> None:
        self._kernel = kernel
        self._tables = tables
        self._sizes = sizes
        self._touched_only = touched_only
        n, places = sizes.n, Places()
        self._hot_stride = sizes.most_ranges * sizes.widest
        n_probes = -(-n // HOT) if n > HOT else 0
        self._n_probes = n_probes
        self._hot_place = places.add(n_probes * self._hot_stride * kernel.real.itemsize)
        self._first_place = places.add(0 if touched_only else 8 * sizes.rows)
        self._keys = Keys(sizes, places, sorts=sorts)
        self.size = places.size
        self.table = 0
        self._base = 0

    def place(self, table: int, scratch: int) -> None:
        """Where the table of tables lies, and `size` bytes of scratch memory."""
        self.table, self._base = table, scratch

    @property
    def _hot_sums(self) -> int:
        return self._base + self._hot_place

    def table_with(self, hp_addresses: np.ndarray) -> np.ndarray:
        """The table of tables, with the address of the scalars of each."""
        tables = [
            table._replace(hp=address)
            for table, address in zip(self._tables, hp_addresses.tolist(), strict=True)
        ]
        kernel = self._kernel
        return table_of(tables, kernel.g.itemsize, [x.itemsize for x in (kernel.w, *kernel.s)])

    def loops(self) -> list[Any]:
        """All loops that are launched."""
        kernel, length, n = self._kernel, _tile_length(self._kernel), self._sizes.n
        found = self._keys.loops()
        if self._n_probes:
            found.append(rows.hot_kernel(kernel.g, kernel.real, length))
        if not self._touched_only:
            return [*found, rows.mark_kernel, rows.sweep_kernel(kernel)]
        return [*found, rows.touched_kernel(kernel)] if n else found

    def check(self, check: tuple[int, int], stream: Any) -> None:
        """The check of the indices alone; a bad one closes the guard."""
        make_keys(self.table, len(self._tables), self._sizes, -1, 0, check, stream)

    def update(self, keys: int, guard: int, base: int, stream: Any) -> None:
        """The rule, on rows whose keys are sorted."""
        self.sum_hot(keys, guard, stream)
        if self._touched_only:
            self._update_touched(keys, guard, base, stream)
        else:
            self._update_all(keys, guard, base, stream)

    def sorted_keys(
        self, dropped_row: int, check: tuple[int, int], sorter: Sorter | None, stream: Any
    ) -> int:
        """The address of the sorted keys; the indices are checked on the way."""
        tables = self.table, len(self._tables)
        return self._keys.enqueue(self._base, *tables, dropped_row, check, sorter, stream)

    def sum_hot(self, keys: int, guard: int, stream: Any) -> None:
        """The sums of the ranges of hot rows."""
        if self._n_probes == 0:
            return
        sizes, kernel = self._sizes, self._kernel
        length = _tile_length(kernel)
        tiles, lanes, tile_groups = _block(sizes.widest, length)
        loop = rows.hot_kernel(kernel.g, kernel.real, length)
        grid = (self._n_probes, -(-sizes.most_ranges // lanes), tile_groups)
        on_grid(loop, grid, (tiles, lanes), stream)(keys, *self._common, guard)

    @property
    def _common(self) -> tuple[int, ...]:
        """The arguments that the loops over rows have."""
        sizes = self._sizes
        return (
            sizes.n,
            self.table,
            len(self._tables),
            sizes.position_bits,
            sizes.rows,
            self._hot_sums,
            self._hot_stride,
        )

    def square(
        self,
        keys: int,
        guard: int,
        base: int,
        block: tuple[int, int, int],
        sums: int,
        stream: Any,
    ) -> None:
        """The squares of the summed rows."""
        sizes, kernel = self._sizes, self._kernel
        tiles, lanes, tile_groups = block
        grid = (-(-sizes.n // lanes), tile_groups)
        loop = rows.row_squares_kernel(kernel.g, kernel.real, _tile_length(kernel), tiles * lanes)
        on_grid(loop, grid, (tiles, lanes), stream)(
            keys,
            sizes.n,
            self.table,
            len(self._tables),
            sizes.position_bits,
            self._hot_sums,
            self._hot_stride,
            guard,
            base,
            sums,
        )

    def _update_touched(self, keys: int, guard: int, base: int, stream: Any) -> None:
        """Lazy: the rule on the rows that occur."""
        if self._sizes.n == 0:
            return
        tiles, lanes, tile_groups = _block(self._sizes.widest, _tile_length(self._kernel))
        grid = (-(-self._sizes.n // lanes), tile_groups)
        loop = rows.touched_kernel(self._kernel)
        on_grid(loop, grid, (tiles, lanes), stream)(keys, *self._common, guard, base)

    def _update_all(self, keys: int, guard: int, base: int, stream: Any) -> None:
        """Dense-equivalent: one sweep over all rows."""
        sizes, first = self._sizes, self._base + self._first_place
        if sizes.n == 0 and (sizes.rows == 0 or sizes.widest == 0):
            return
        fill_ones(first, 8 * sizes.rows, stream)
        if sizes.n:
            on_grid(rows.mark_kernel, -(-sizes.n // THREADS), THREADS, stream)(
                keys, sizes.n, sizes.position_bits, sizes.rows, first, guard
            )
        tiles, lanes, tile_groups = _block(sizes.widest, _tile_length(self._kernel))
        grid = (max(1, -(-sizes.rows // lanes)), tile_groups)  # one keeps a bad index
        loop = rows.sweep_kernel(self._kernel)
        on_grid(loop, grid, (tiles, lanes), stream)(first, keys, *self._common, guard, base)


def _tile_length(kernel: Kernel) -> int:
    return row_tiles(kernel.rule, kernel.prologue, kernel.w, kernel.g, kernel.s).length


def _block(widest: int, length: int) -> tuple[int, int, int]:
    """Threads of a block along the columns and along the rows, and groups of columns."""
    return tile_grid(-(-widest // length), THREADS)
