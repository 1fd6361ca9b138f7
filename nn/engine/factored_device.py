"""Steps of Adafactor on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.cuda.adafactor.rms import Options
from ...kernels.cuda.adafactor.step import MatrixStep, vector_step
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
    sizes = np.diff(table.first)
    step = vector_step(kernel, table.addresses, gradients, sizes, Options(*options))
    return Parts(measured, step)


def matrices_part(
    kernel: Kernel,
    tensors: Sequence[FactoredTensor],
    gradients: np.ndarray,
    options: SizeOptions,
    measured: Part | None,
) -> Part:
    """Tensors whose second moments are those of rows and columns."""
    return Parts(measured, MatrixStep(kernel, tensors, gradients, Options(*options)))
