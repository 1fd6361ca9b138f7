"""One step of Adafactor on any number of tensors on the device, enqueued on a stream.

Matrices take three passes over their elements: sums of squares over rows and columns, the sizes of
directions and parameters, and the update. What follows from a pass is computed on the device before
the next one. Vectors take two passes, of which the first is that of any two-stage rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...element import Kernel
from ...rules import adafactor as rules
from ...tables import FactoredTensor
from ..dense.step import totals_kernel
from ..dense.tiles import length_of
from ..device.functions import device_function
from ..device.launch import on_grid
from ..device.part import Call
from ..device.records import multiplier, size_of
from ..device.sums import PART_BYTES
from .layout import THREADS, FactoredTables, TileRow
from .lines import lines_kernel, row_factors_kernel
from .passes import direction_kernel, squares_kernel, update_kernel


class Options(NamedTuple):
    """What all tensors have in common; see `nn.AdaFactor`."""

    epsilon2: float
    clip_threshold: float
    scale_parameter: bool


@cache
def rms_kernel(kernel: Kernel, record: Any, options: Options) -> Any:
    """A `totals_kernel`: factors of ``step`` and ``decay``, from the sizes of `size_factors`."""
    epsilon2, clip_threshold, scale_parameter = options
    size_factors, multiply = device_function(rules.size_factors), multiplier(kernel.real)
    of_step, of_decay = (kernel.column[name] * kernel.real.itemsize for name in ("step", "decay"))

    @cuda.jit(device=True)
    def follow(shared, row):
        step, decay = size_factors(
            shared[0, 0], shared[1, 0], np.float64(row.size),
            epsilon2, clip_threshold, scale_parameter,
        )  # fmt: skip
        multiply(row.hp + of_step, step)
        multiply(row.hp + of_decay, decay)

    return totals_kernel(record, 2 + len(kernel.s), 2, follow)


class MatrixStep:
    """A `Part`: the step on tensors whose second moments are those of rows and columns.

    The kernel has the storage types of the other states. There is one tensor at least, and none is
    empty; ``gradients`` are int64 ``[T]`` addresses.
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
        self._lines_at = len(tensors) * size_of(TileRow, 2 + len(kernel.s))
        self.loops = [
            squares_kernel(kernel),
            lines_kernel(kernel.prologue, kernel.real),
            row_factors_kernel(kernel.prologue, kernel.real),
            direction_kernel(kernel, options.scale_parameter),
            rms_kernel(kernel, TileRow, options),
            update_kernel(kernel),
        ]
        self.scratch_bytes = self._tables.scratch_bytes + self._tables.n_blocks * PART_BYTES

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
        for loop, (blocks, *arguments) in zip(self.loops, launches, strict=True):
            on_grid(loop, blocks, THREADS, call.stream)(*arguments, call.guard)
