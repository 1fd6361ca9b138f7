"""One row-sparse step of a rule on any number of tables on the device, enqueued on a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...element import Kernel
from ...tables import HOT, RowTable
from ..dense.tiles import length_of
from ..device.backend import GEOMETRY, copy_in, fill_ones
from ..device.launch import on_elements, on_grid, tile_grid
from ..device.memory import Places, room_of
from ..device.part import Call, Sorter, placed
from . import kernels as rows
from .keys import KeySort


def check_indices(tables: Sequence[RowTable], guard: int, base: int, *, stream: Any) -> None:
    """Enqueue the check of all indices alone; a bad one closes the guard."""
    keys = KeySort(tables, Places(), base=base)
    with room_of(stream) as room:
        place = room.take(8 * keys.n_words)
        copy_in(place, keys.words(place, (0,), [0] * len(tables)), stream)
        keys.check(Call(stream, guard))


class RowStep:
    """A `Part`: the step on tables with row-sparse gradients.

    Args:
        kernel: the rule, its prologue and storage types.
        tables: at least one; their ``hp`` is not used.
        touched_only: True updates the rows that occur (lazy); False all rows, those that do
            not occur with a gradient of 0 (dense-equivalent).
        drop: leave out indices outside of ``[0, N)`` instead of closing the guard.
        sorts: whether the keys are sorted by this package.
        base: added to the position of a bad index.
    """

    def __init__(
        self,
        kernel: Kernel,
        tables: Sequence[RowTable],
        *,
        touched_only: bool,
        drop: bool = False,
        sorts: bool,
        base: int = 0,
    ) -> None:
        self._kernel, self._touched_only, self._base = kernel, touched_only, base
        places = Places()
        self._keys = KeySort(tables, places, drop=drop, sorts=sorts, base=base)
        self._sorted = 0
        self._sizes = sizes = self._keys.sizes
        self.n_words, self._length = self._keys.n_words, length_of(kernel)
        self._block = tile_grid(sizes.widest, self._length, GEOMETRY.rows)
        self._hot_stride = sizes.most_ranges * sizes.widest
        self._n_probes = -(-sizes.n // HOT) if sizes.n > HOT else 0
        self._at_hot = places.add(self._n_probes * self._hot_stride * kernel.real.itemsize)
        self._at_first = places.add(0 if touched_only else 8 * sizes.rows)
        self.scratch_bytes = places.size

    def loops(self) -> list[Any]:
        """See `Part`."""
        kernel, found = self._kernel, self._keys.loops()
        if self._n_probes:
            found.append(rows.hot_kernel(kernel.g, kernel.real, self._length))
        if not self._touched_only:
            return [*found, rows.mark_kernel, rows.sweep_kernel(kernel)]
        return [*found, rows.touched_kernel(kernel)] if self._sizes.n else found

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `Part`."""
        kernel = self._kernel
        itemsizes = [storage.itemsize for storage in (kernel.g, kernel.w, *kernel.s)]
        return self._keys.words(place, itemsizes, hp)

    def check(self, call: Call) -> None:
        """Enqueue the check of the indices alone."""
        self._keys.check(call)

    def sort(self, call: Call) -> None:
        """Enqueue the check of the indices, and sort them; they stay in the scratch memory."""
        self._sorted = self._keys.enqueue(call)

    def enqueue(self, call: Call) -> None:
        """See `Part`."""
        if not self._sorted:
            self.sort(call)
        self.update(call)
        self._sorted = 0

    def update(self, call: Call) -> None:
        """Enqueue the rule, on rows whose keys are sorted."""
        self._sum_hot(call)
        if self._touched_only:
            self._launch(rows.touched_kernel(self._kernel), self._sizes.n, call)
        else:
            self._sweep(call)

    def _arguments(self, call: Call) -> tuple[int, ...]:
        """Those of all loops over rows, but for the guard."""
        sizes = self._sizes
        return (
            *(self._sorted, sizes.n, sizes.position_bits, *self._keys.of_tables, sizes.rows),
            *(call.scratch + self._at_hot, self._hot_stride),
        )

    def _sum_hot(self, call: Call) -> None:
        """The sums of the ranges of hot rows."""
        if self._n_probes:
            tiles, lanes, tile_groups = self._block
            loop = rows.hot_kernel(self._kernel.g, self._kernel.real, self._length)
            grid = (self._n_probes, -(-self._sizes.most_ranges // lanes), tile_groups)
            on_grid(loop, grid, (tiles, lanes), call.stream)(*self._arguments(call), call.guard)

    def _launch(self, loop: Any, n: int, call: Call, *more: int) -> None:
        """A loop over ``n`` keys or rows."""
        if n:
            tiles, lanes, tile_groups = self._block
            launch = on_grid(loop, (-(-n // lanes), tile_groups), (tiles, lanes), call.stream)
            launch(*self._arguments(call), call.guard, self._base, *more)

    def _sweep(self, call: Call) -> None:
        """One sweep over all rows."""
        sizes, first = self._sizes, call.scratch + self._at_first
        if sizes.n == 0 and (sizes.rows == 0 or sizes.widest == 0):
            return
        fill_ones(first, 8 * sizes.rows, call.stream)
        if sizes.n:
            on_elements(rows.mark_kernel, sizes.n, call.stream)(
                self._sorted, sizes.n, sizes.position_bits, sizes.rows, first, call.guard
            )
        # Of no rows one block keeps a bad index.
        self._launch(rows.sweep_kernel(self._kernel), max(1, sizes.rows), call, first)

    @property
    def n_parts(self) -> int:
        """How many parts `square` writes."""
        _, lanes, tile_groups = self._block
        return -(-self._sizes.n // lanes) * tile_groups

    def square(self, call: Call, parts: int) -> None:
        """Enqueue the squares of summed rows instead, to an address; 0 behind a closed guard."""
        self.sort(call)
        self._sum_hot(call)
        loop = rows.row_squares_kernel(self._kernel.g, self._kernel.real, self._length)
        self._launch(loop, self._sizes.n, call, parts)


class RowSquares:
    """The squares of row-sparse gradients whose duplicates are summed first; `norm.Squares`.

    Args:
        kernel: of a rule that measures the gradient; its storage types are those of the sums.
        tables: at least one; only their gradients are read.
        guard: as `Call`.
        base: as `RowStep`.
        sorter: as `Call`.
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
        self._step = RowStep(kernel, tables, touched_only=True, sorts=sorter is None, base=base)
        self._call, self.n_parts = Call(None, guard, sorter), self._step.n_parts
        self._hp, self._hp_of = np.zeros((1, 1), kernel.real.dtype), [0] * len(tables)

    def enqueue(self, parts: int, stream: Any) -> None:
        """See `norm.Squares`."""
        call = self._call._replace(stream=stream)
        with placed(self._step, self._hp, self._hp_of, call) as there:
            self._step.square(there, parts)


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
        kernel: as `RowStep`.
        tables: as `RowStep`.
        hp: ``[R, F]`` scalars in the type of the arithmetic, on the host.
        hp_of: which row of ``hp`` each table uses.
        touched_only: as `RowStep`.
        drop: as `RowStep`.
        guard: as `Call`; when it is closed, nothing is written.
        base: as `RowStep`.
        sorter: as `Call`.
        stream: of Numba.
    """
    if touched_only and not any(table.length for table in tables):
        return
    step = RowStep(
        kernel, tables, touched_only=touched_only, drop=drop, sorts=sorter is None, base=base
    )
    with placed(step, hp, hp_of, Call(stream, guard, sorter)) as call:
        step.enqueue(call)
