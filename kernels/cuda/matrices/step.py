"""One step of a rule on matrices, any number of tensors of them, enqueued on a stream.

There are three passes over the elements: sums over rows and columns, what is measured, and the
update. What follows from a pass is computed on the device before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...element import Kernel
from ...tables import MatrixTensor
from ..dense.tiles import length_of
from ..dense.totals import Constants, Totals
from ..device.backend import launcher
from ..device.part import LaunchContext
from ..device.records import size_of
from .layout import THREADS, MatrixTables, TileRow
from .lines import lines_kernel, row_factors_kernel
from .passes import lines_of, measure_kernel, terms_kernel, update_kernel


class MatrixStep:
    """A `DevicePart`: the step of a rule with states of rows and columns.

    There is one tensor at least, and none is empty; ``gradients`` are int64 ``[T]`` addresses.
    ``constants`` are those that ``rule.factor`` takes.
    """

    def __init__(
        self,
        kernel: Kernel,
        tensors: Sequence[MatrixTensor],
        gradients: np.ndarray,
        constants: Constants,
    ) -> None:
        self._tables = MatrixTables(tensors, length_of(kernel), kernel.real.itemsize)
        self._gradients, self._table = gradients, 0
        self._lines_at = len(tensors) * size_of(TileRow, 2 + len(kernel.s))
        shared = kernel.rule, kernel.prologue, kernel.real
        measures_parameter = bool(dict(constants)[lines_of(kernel.rule).measures_parameter])
        self._before = terms_kernel(kernel), lines_kernel(*shared), row_factors_kernel(*shared)
        self._measure = measure_kernel(kernel, measures_parameter)
        self._update = update_kernel(kernel)
        self._totals = Totals(kernel, TileRow, constants, len(tensors))
        self.loops = [*self._before, self._measure, *self._totals.loops, self._update]
        parts_bytes = 8 * self._tables.n_blocks * kernel.rule.n_measured
        self.scratch_bytes = self._tables.scratch_bytes + parts_bytes

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `DevicePart`."""
        self._table = place
        return self._tables.words(self._gradients, hp)

    def enqueue(self, call: LaunchContext) -> None:
        """See `DevicePart`."""
        tables, scratch = self._tables, call.scratch
        n, parts = tables.n_tensors, scratch + tables.scratch_bytes
        tiles, lines = self._table, self._table + self._lines_at
        self._launch(self._before[0], tables.n_blocks, call, tiles, n, scratch)
        self._launch(self._before[1], tables.n_line_blocks, call, lines, 2 * n, scratch)
        self._launch(self._before[2], tables.n_chunk_blocks, call, lines, n, scratch)
        self._launch(self._measure, tables.n_blocks, call, tiles, n, scratch, parts)
        self._totals.follow(tiles, tables.n_blocks, parts, 0, call)
        self._launch(self._update, tables.n_blocks, call, tiles, n, scratch)

    def _launch(self, loop: Any, blocks: int, call: LaunchContext, *arguments: int) -> None:
        launcher(loop, blocks, THREADS, call.stream)(*arguments, call.guard)
