"""One row-sparse step of a rule on any number of tables on the device, enqueued on a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...element import Kernel
from ...tables import HOT, RowTable
from ..dense.tiles import WIDEST, element_bytes, length_of
from ..device.backend import GEOMETRY, fill_ones, launcher
from ..device.launch import Launches, on_elements, tile_grid
from ..device.part import LaunchContext, placed
from . import kernels as rows
from .keys import KeySort
from .sources import form_of

HOT_BLOCKS = 2_048
"""Blocks that add up hot rows, at most: as many as a device can have at a time, and some."""
_NO_SCALARS = np.empty((1, 0))


def check_indices(tables: Sequence[RowTable], guard: int, base: int, *, stream: Any) -> None:
    """Enqueue the check of all indices alone; a bad one closes the guard."""
    keys = KeySort(tables, base=base)
    with placed(keys, _NO_SCALARS, [0] * len(tables), LaunchContext(stream, guard)) as call:
        keys.check(call)


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
        self.loops += [self._hot_loop] if self._n_probes else []

    def _launch(
        self, loop: Any, grid: Any, block: tuple[int, int], call: LaunchContext, *more: int
    ) -> tuple[Any, bool]:
        """A loop on so many groups of keys, rows or ranges, and of tiles."""
        launch = launcher(loop, grid, block, call.stream)
        tables = self.table, self._n_tables, self.n_rows
        hot_sums = call.scratch + self._at_hot, self._hot_stride
        return partial(launch, *self.sorted(call), *tables, *hot_sums, *more), True

    def _over(
        self, loop: Any, n: int, tile_groups: int, call: LaunchContext, *more: int
    ) -> Iterator[Any]:
        if n:
            grid = -(-n // self._block[1]), tile_groups
            yield self._launch(loop, grid, self._block, call, self._base, *more)

    def _sum_hot(self, call: LaunchContext) -> Iterator[Any]:
        if self._n_probes:
            *block, tile_groups = tile_grid(self.widest, self._length, rows.HOT_THREADS)
            groups = -(-self._most_ranges // block[1])
            n_blocks = min(self._n_probes, max(1, HOT_BLOCKS // groups))
            grid = n_blocks, groups, tile_groups
            yield self._launch(self._hot_loop, grid, (block[0], block[1]), call)


class RowStep(_RowLoops):
    """A `DevicePart`: the step on tables with row-sparse gradients; options are those of `KeySort`.

    ``touched_only`` updates the rows that occur (lazy); else all rows step, those that do not occur
    with a gradient of 0 (dense-equivalent).
    """

    def __init__(
        self, kernel: Kernel, tables: Sequence[RowTable], *, touched_only: bool, **options: Any
    ) -> None:
        super().__init__(kernel, tables, **options)
        self._touched_only, self._updating = touched_only, Launches(self._update_launches)
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
        self.sort(call)
        self.update(call)

    def update(self, call: LaunchContext) -> None:
        """Enqueue the rule, on rows whose keys are sorted."""
        self._updating.run(call, self.table)

    def _update_launches(self, call: LaunchContext) -> Iterator[Any]:
        yield from self._sum_hot(call)
        if self._touched_only:
            # Most keys of a long list are not the first of their row, and a thread that looks at
            # some of them costs as much as one that looks at one.
            each = GEOMETRY.keys if self.n > GEOMETRY.many else 1
            yield from self._over(self._update, -(-self.n // each), self._groups, call, each)
            return
        first = call.scratch + self._at_first
        if self.n == 0 and (self.n_rows == 0 or self.widest == 0):
            return
        yield partial(fill_ones, first, 8 * self.n_rows, call.stream), False
        if self.n:
            mark = on_elements(rows.mark_kernel, self.n, call.stream)
            yield partial(mark, *self.sorted(call), self.n_rows, first), True
        # Of no rows one block keeps a bad index.
        yield from self._over(self._update, max(1, self.n_rows), self._groups, call, first)


class RowSquares(_RowLoops):
    """`norm.Squares` of row-sparse gradients, duplicates summed first; 0 behind a closed guard."""

    def __init__(self, kernel: Kernel, tables: Sequence[RowTable], guard: int, base: int) -> None:
        super().__init__(kernel, tables, base=base)
        self._guard, self.n_parts = guard, -(-self.n // self._block[1]) * self._tile_groups

    def enqueue(self, parts: int, stream: Any) -> None:
        call, hp_of = LaunchContext(stream, self._guard), [0] * self._n_tables
        loop = rows.row_squares_kernel(self._kernel.g, self._kernel.real, self._length)
        with placed(self, _NO_SCALARS, hp_of, call) as there:
            self.sort(there)
            squares = self._over(loop, self.n, self._tile_groups, there, parts)
            for launch, _ in (*self._sum_hot(there), *squares):
                launch(self._guard)
