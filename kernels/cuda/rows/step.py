"""One row-sparse step of a rule on any number of tables on the device, enqueued on a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...element import Kernel
from ...tables import HOT, RowTable
from ..dense.tiles import WIDEST, element_bytes, length_of
from ..device.backend import GEOMETRY, copy_in, fill_ones, launcher
from ..device.launch import on_elements, tile_grid
from ..device.memory import room_of
from ..device.part import LaunchContext, placed
from . import kernels as rows
from .keys import KeySort
from .sources import form_of

EACH, MANY = 8, 1 << 17
"""Keys of a thread, where there are many."""
HOT_BLOCKS = 2_048
"""Blocks that add up hot rows, at most: as many as a device can have at a time, and some."""


def check_indices(tables: Sequence[RowTable], guard: int, base: int, *, stream: Any) -> None:
    """Enqueue the check of all indices alone; a bad one closes the guard."""
    keys = KeySort(tables, base=base)
    with room_of(stream) as room:
        place = room.take(8 * keys.n_words)
        copy_in(place, keys.words(place, np.zeros(len(tables), np.int64)), stream)
        keys.check(LaunchContext(stream, guard))


class _RowLoops(KeySort):
    """Launches of the loops over rows; arguments as `RowStep`."""

    def __init__(self, kernel: Kernel, tables: Sequence[RowTable], **options: Any) -> None:
        real_bytes, itemsizes = kernel.real.itemsize, element_bytes(kernel).tolist()
        super().__init__(tables, itemsizes, real_bytes=real_bytes, **options)
        self._kernel, self._length = kernel, length_of(kernel)
        across, along, groups = tile_grid(self.widest, self._length, GEOMETRY.rows)
        self._block, self._tile_groups = (across, along), groups
        self._most_ranges = max(table.ranges[1] for table in tables)
        # The sums of every probe begin at a whole vector, whatever the widths.
        self._hot_stride = self._most_ranges * -(-self.widest // WIDEST) * WIDEST
        self._n_probes = -(-self.n // HOT) if self.n > HOT else 0
        hot_bytes = self._n_probes * self._hot_stride * kernel.real.itemsize
        self._at_hot, shape = self.places.add(hot_bytes), (kernel.g, kernel.real, self._length)
        self._form = form_of(tables)
        self._hot_loop = rows.hot_kernel(*shape, self._form)
        self._hot_grid = tile_grid(self.widest, self._length, rows.HOT_THREADS)
        self._at_found = self.places.add(16 * (self._n_probes + 1) if self._n_probes else 0)
        self.loops += [rows.find_hot_kernel, self._hot_loop] if self._n_probes else []

    def _launch(
        self, loop: Any, grid: Any, block: tuple[int, int], call: LaunchContext, *more: int
    ) -> None:
        """A loop on so many groups of keys, rows or ranges, and of tiles."""
        hot_sums = call.scratch + self._at_hot, self._hot_stride
        launch = launcher(loop, grid, block, call.stream)
        tables = self.table, len(self._tables), self.n_rows
        launch(*self.sorted, *tables, *hot_sums, call.guard, *more)

    def _over(self, loop: Any, n: int, tile_groups: int, call: LaunchContext, *more: int) -> None:
        if n:
            grid = -(-n // self._block[1]), tile_groups
            self._launch(loop, grid, self._block, call, self._base, *more)

    def _sum_hot(self, call: LaunchContext) -> None:
        if self._n_probes:
            found, stream = call.scratch + self._at_found, call.stream
            fill_ones(found, 8, stream)
            find = on_elements(rows.find_hot_kernel, self._n_probes, stream)
            find(*self.sorted, self.n_rows, found, call.guard)
            *block, tile_groups = self._hot_grid
            groups = -(-self._most_ranges // block[1])
            n_rows = min(self._n_probes, max(1, HOT_BLOCKS // groups))
            grid = n_rows, groups, tile_groups
            self._launch(self._hot_loop, grid, (block[0], block[1]), call, found)


class RowStep(_RowLoops):
    """A `DevicePart`: the step on tables with row-sparse gradients; options are those of `KeySort`.

    ``touched_only`` updates the rows that occur (lazy); else all rows step, those that do not occur
    with a gradient of 0 (dense-equivalent).
    """

    def __init__(
        self, kernel: Kernel, tables: Sequence[RowTable], *, touched_only: bool, **options: Any
    ) -> None:
        super().__init__(kernel, tables, **options)
        self._touched_only = touched_only
        # The lanes of a row that is measured go over all of its tiles.
        self._groups = 1 if kernel.rule.is_row_wise else self._tile_groups
        self._at_first = self.places.add(0 if touched_only else 8 * self.n_rows)
        loop = rows.touched_kernel if touched_only else rows.sweep_kernel
        self._update = loop(kernel, self._form)
        if touched_only and self.n == 0:
            self.n_words = 0
        else:
            self.loops += [self._update] if touched_only else [rows.mark_kernel, self._update]

    def enqueue(self, call: LaunchContext) -> None:
        """See `DevicePart`; the keys may be there already."""
        if not self.sorted:
            self.sort(call)
        self.update(call)
        self.sorted = ()

    def update(self, call: LaunchContext) -> None:
        """Enqueue the rule, on rows whose keys are sorted."""
        self._sum_hot(call)
        if self._touched_only:
            # Most keys of a long list are not the first of their row, and a thread that looks at
            # some of them costs as much as one that looks at one.
            each = EACH if self.n > MANY else 1
            self._over(self._update, -(-self.n // each), self._groups, call, each)
        else:
            self._sweep(call)

    def _sweep(self, call: LaunchContext) -> None:
        first = call.scratch + self._at_first
        if self.n == 0 and (self.n_rows == 0 or self.widest == 0):
            return
        fill_ones(first, 8 * self.n_rows, call.stream)
        if self.n:
            mark = on_elements(rows.mark_kernel, self.n, call.stream)
            mark(*self.sorted, self.n_rows, first, call.guard)
        # Of no rows one block keeps a bad index.
        self._over(self._update, max(1, self.n_rows), self._groups, call, first)


class RowSquares(_RowLoops):
    """`norm.Squares` of row-sparse gradients, duplicates summed first; 0 behind a closed guard."""

    def __init__(
        self, kernel: Kernel, tables: Sequence[RowTable], call: LaunchContext, base: int
    ) -> None:
        super().__init__(kernel, tables, base=base)
        self._call, self.n_parts = call, -(-self.n // self._block[1]) * self._tile_groups

    def enqueue(self, parts: int, stream: Any) -> None:
        """See `norm.Squares`."""
        no_scalars, call = np.zeros((1, 0)), self._call._replace(stream=stream)
        loop = rows.row_squares_kernel(self._kernel.g, self._kernel.real, self._length)
        with placed(self, no_scalars, [0] * len(self._tables), call) as there:
            self.sort(there)
            self._sum_hot(there)
            self._over(loop, self.n, self._tile_groups, there, parts)
