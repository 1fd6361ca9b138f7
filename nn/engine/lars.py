"""The trust ratios of LARS in a step on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.cuda.dense.norm import DenseGradients
from ...kernels.cuda.dense.trust import Options, TrustRatios
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.device_gradient import converted
from .layout import Batch


class MeasuredRatios(TrustRatios):
    """What fills in the ratios; a `Part` that comes before the step.

    Args:
        batch: dense tensors.
        gradients: int64 ``[T]``: addresses of their gradients.
        plain: of a gradient that was centralized, what it was before; else None.
        acts: bool ``[T]``: which have a ratio.
        options: coefficient, epsilon, and whether ratios are clipped.
        column: where each scalar is.
    """

    def __init__(
        self,
        batch: Batch,
        gradients: np.ndarray,
        plain: Sequence[Any],
        acts: np.ndarray,
        options: tuple[Any, ...],
        column: dict[str, int],
    ) -> None:
        variables, table = batch.variables, batch.variables.table
        sizes, gradients = np.diff(table.first), gradients.copy()
        # Enqueued before the step, whose end need not be waited for to let go of them.
        self._plain = [None if g is None else _of_dtype(g, batch.g.dtype) for g in plain]
        for t, g in enumerate(self._plain):
            gradients[t] = gradients[t] if g is None else g.address
        super().__init__(
            DenseGradients(variables.w, table.addresses[:, 0], sizes),
            DenseGradients(batch.g, gradients, sizes),
            acts,
            Options(*options),
            variables.real,
            column["trust_ratio"],
        )


def _of_dtype(gradient: Any, dtype: np.dtype[Any]) -> DeviceArray:
    """A gradient of the user's, in the type in which the others of its batch are."""
    adopted = DeviceArray.adopt("LARS", "a gradient", gradient)
    assert adopted is not None
    array = adopted.contiguous("LARS", "a gradient")
    return array if array.dtype == dtype else converted(array, dtype)
