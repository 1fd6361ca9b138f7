"""Steps of Adafactor on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.cuda.adafactor import step as factored
from ...kernels.cuda.adafactor.layout import FactoredTables
from ...kernels.cuda.adafactor.sizes import Options, sizes_kernel
from ...kernels.cuda.dense import tensor_table
from ...kernels.cuda.dense import update as dense
from ...kernels.cuda.dense.measure import SUMS_BYTES
from ...kernels.element import Kernel
from ...kernels.tables import FactoredTensor, TensorTable
from .program import DensePart, Measured

SizeOptions = tuple[float, float, bool]
"""Epsilon of a parameter's size, threshold of clipping, whether steps are relative to sizes."""


def vectors_part(
    kernel: Kernel,
    table: TensorTable,
    gradients: np.ndarray,
    options: SizeOptions,
    measured: Measured | None,
) -> DensePart:
    """Tensors whose second moments are kept in full; arguments as `device_program.DensePart`."""
    row_bytes = tensor_table.ROW_BYTES
    follow = sizes_kernel(kernel.real, Options(*options), dense.THREADS, row_bytes)
    sizes = np.diff(table.first)
    return DensePart(kernel, table.addresses, gradients, sizes, measured, follow)


def matrices_part(
    kernel: Kernel,
    tensors: Sequence[FactoredTensor],
    gradients: np.ndarray,
    options: SizeOptions,
    measured: Measured | None,
) -> MatricesPart:
    """Tensors whose second moments are those of rows and columns; see `MatricesPart`."""
    tables = FactoredTables(tensors, factored.length_of(kernel), kernel.real.itemsize)
    return MatricesPart(factored.loops_of(kernel, Options(*options)), tables, gradients, measured)


class MatricesPart:
    """A `device_program.Part` of matrices.

    Args:
        loops: of the step.
        tables: the matrices.
        gradients: int64 ``[T]``: addresses of their gradients.
        measured: completes the scalars, or None.
    """

    def __init__(
        self,
        loops: factored.Loops,
        tables: FactoredTables,
        gradients: np.ndarray,
        measured: Measured | None,
    ) -> None:
        self._loops, self._tables, self._gradients = loops, tables, gradients
        self._measured = measured
        own = tables.n_blocks * SUMS_BYTES
        self.scratch_bytes = max(own, measured.scratch_bytes if measured else 0)
        self.kept_bytes = tables.scratch
        self._table = 0

    def loops(self) -> list[Any]:
        """See `Part`."""
        return [*self._loops, *(self._measured.loops() if self._measured else ())]

    def words(self, place: int, kept: int, hp: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """See `Part`."""
        self._table = place
        table = self._tables.at(kept, self._gradients, hp)
        if self._measured is None:
            return table
        measured = self._measured.words(place + table.nbytes, hp, numbers)
        return np.concatenate([table, measured])

    def enqueue(self, scratch: int, guard: int, sorter: Any, stream: Any) -> None:  # noqa: ARG002
        """See `Part`."""
        if self._measured is not None:
            self._measured.enqueue(scratch, guard, stream)
        factored.enqueue(self._loops, self._tables, self._table, scratch, guard, stream)
