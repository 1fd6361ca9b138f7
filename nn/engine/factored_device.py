"""Steps of Adafactor on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.cuda.adafactor.step import MatrixStep, Options, rms_kernel
from ...kernels.cuda.dense.step import DenseStep, TensorRow
from ...kernels.cuda.device.part import Part, Parts
from ...kernels.element import Kernel
from ...kernels.tables import FactoredTensor, TensorTable

SizeOptions = tuple[float, float, bool]
"""Epsilon of a parameter's size, threshold of clipping, whether steps are relative to sizes."""


def vectors_part(
    kernel: Kernel,
    table: TensorTable,
    gradients: np.ndarray,
    options: SizeOptions,
    measured: Part | None,
) -> Part:
    """Tensors whose second moments are kept in full; ``measured`` completes the scalars."""
    sizes, follow = np.diff(table.first), rms_kernel(kernel, TensorRow, Options(*options))
    return Parts(measured, DenseStep(kernel, table.addresses, gradients, sizes, follow))


def matrices_part(
    kernel: Kernel,
    tensors: Sequence[FactoredTensor],
    gradients: np.ndarray,
    options: SizeOptions,
    measured: Part | None,
) -> Part:
    """Tensors whose second moments are those of rows and columns."""
    return Parts(measured, MatrixStep(kernel, tensors, gradients, Options(*options)))
