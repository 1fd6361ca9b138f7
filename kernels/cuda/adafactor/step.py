"""One step of Adafactor on any number of tensors on the device, enqueued on a stream.

Matrices take three passes over their elements: sums of squares over rows and columns, the sizes of
directions and parameters, and the update. What follows from a pass is computed on the device before
the next one. Vectors take two passes, of which the first is that of any two-stage rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...element import Kernel
from ...tables import FactoredTensor
from ..dense.chunks import TensorRow
from ..dense.step import DenseStep
from ..dense.tiles import length_of
from ..device.launch import on_grid
from ..device.part import Call
from ..device.records import size_of
from ..device.sums import PART_BYTES
from .layout import THREADS, FactoredTables, TileRow
from .lines import lines_kernel, row_factors_kernel
from .passes import direction_kernel, update_kernel
from .rms import Options, rms_kernel
from .sums import squares_kernel


def vector_step(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    options: Options,
) -> DenseStep:
    """The step on tensors whose second moments are kept in full; arguments as `DenseStep`."""
    follow = rms_kernel(kernel, TensorRow, options)
    return DenseStep(kernel, addresses, gradients, sizes, follow)


class MatrixStep:
    """A `Part`: the step on tensors whose second moments are those of rows and columns.

    Args:
        kernel: the rule and its storage types, those of states of rows and columns left out.
        tensors: at least one, none of them empty.
        gradients: int64 ``[T]``: addresses of their gradients.
        options: what all have in common.
    """

    def __init__(
        self,
        kernel: Kernel,
        tensors: Sequence[FactoredTensor],
        gradients: np.ndarray,
        options: Options,
    ) -> None:
        self._tables = FactoredTables(tensors, length_of(kernel), kernel.real.itemsize)
        self._gradients, self._table = gradients, 0
        self._lines_at = len(tensors) * size_of(TileRow, 1 + len(kernel.s))
        self._loops = (
            squares_kernel(kernel),
            lines_kernel(kernel.prologue, kernel.real),
            row_factors_kernel(kernel.prologue, kernel.real),
            direction_kernel(kernel, options.scale_parameter),
            rms_kernel(kernel, TileRow, options),
            update_kernel(kernel),
        )
        self.scratch_bytes = self._tables.scratch_bytes + self._tables.n_blocks * PART_BYTES

    def loops(self) -> list[Any]:
        """See `Part`."""
        return list(self._loops)

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `Part`."""
        self._table = place
        return self._tables.words(self._gradients, hp)

    def enqueue(self, call: Call) -> None:
        """See `Part`."""
        tables, scratch = self._tables, call.scratch
        n, parts = tables.n_tensors, scratch + tables.scratch_bytes
        tiles, lines = self._table, self._table + self._lines_at
        launches = (
            (tables.n_blocks, tiles, n, scratch),
            (tables.n_line_blocks, lines, 2 * n, scratch),
            (tables.n_chunk_blocks, lines, n, scratch),
            (tables.n_blocks, tiles, n, scratch, parts),
            (n, tiles, n, tables.n_blocks, parts),
            (tables.n_blocks, tiles, n, scratch),
        )
        for loop, (blocks, *arguments) in zip(self._loops, launches, strict=True):
            on_grid(loop, blocks, THREADS, call.stream)(*arguments, call.guard)
