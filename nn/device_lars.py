"""The trust ratios of LARS in a step on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.cuda.norm import DenseGradients
from ..kernels.cuda.trust import Options, TrustRatios
from .layout import Batch


class MeasuredRatios:
    """What fills in the ratios; a `device_program.Measured`.

    Args:
        batch: dense tensors.
        gradients: int64 ``[T]``: addresses of their gradients.
        acts: bool ``[T]``: which have a ratio.
        options: coefficient, epsilon, and whether ratios are clipped.
        column: where each scalar is.
    """

    def __init__(
        self,
        batch: Batch,
        gradients: np.ndarray,
        acts: np.ndarray,
        options: tuple[Any, ...],
        column: dict[str, int],
    ) -> None:
        variables, table = batch.variables, batch.variables.table
        sizes = np.diff(table.first)
        self._ratios = TrustRatios(
            DenseGradients(variables.w, table.addresses[:, 0], sizes),
            DenseGradients(batch.g, gradients, sizes),
            acts,
            Options(*options),
            variables.real,
        )
        self.scratch_bytes = self._ratios.scratch_bytes
        self._offset = column["trust_ratio"] * variables.real.itemsize

    def loops(self) -> list[Any]:
        """See `device_program.Part`."""
        return self._ratios.loops()

    def words(self, place: int, hp: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """See `device_program.Part`."""
        return self._ratios.words(place, hp + self._offset, numbers)

    def enqueue(self, scratch: int, guard: int, stream: Any) -> None:
        """Enqueue the norms, and the change of the scalars."""
        self._ratios.enqueue(scratch, guard, stream)
