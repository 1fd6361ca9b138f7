"""Operations on whole gradients that are not fused into a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.embedding import SparseGatherV2
from ...ops.runtime import device_gradient
from ...ops.runtime.arrays import RowTensor, adopt_anywhere, real_type
from ...ops.runtime.device import device_of, is_on_device
from ...ops.runtime.device_gradient import convert, converted
from ...ops.runtime.errors import message
from ...ops.runtime.row_forms import concatenated


@quiet
def decayed(gradient: Any, parameter: Any, factor: float) -> Any:
    """``gradient + factor * parameter``, rounded to the gradient's dtype."""
    if gradient is None:
        return None
    w = adopt_anywhere("decay_weight", "the parameter", parameter)
    if isinstance(gradient, list | tuple):
        gradient = concatenated("RowTensor", "gradients", gradient)
    if isinstance(gradient, RowTensor):
        rows = gradient.coalesce()
        device_of("decay_weight", {"the parameter": w, "gradients": rows.values})
        of_rows = SparseGatherV2()(w, rows.indices) if is_on_device(w) else w[rows.indices]
        return RowTensor(rows.indices, decayed(rows.values, of_rows, factor), rows.dense_shape)
    g = adopt_anywhere("decay_weight", "gradients", gradient)
    device_of("decay_weight", {"the parameter": w, "gradients": g})
    if g.shape != w.shape:
        raise ValueError(
            message("decay_weight", "gradients", "has a wrong shape", w.shape, g.shape)
        )
    if is_on_device(g):
        found = device_gradient.decayed(g, w, factor)
        return (found if found.dtype == g.dtype else converted(found, g.dtype)).native()
    real = real_type(w.dtype)
    return (g.astype(real) + real(factor) * w.astype(real)).astype(g.dtype)


@quiet
def centralized(gradient: Any) -> Any:
    """``gradient - mean over all axes but the first``; unchanged below two dimensions."""
    if gradient is None:
        return None
    if isinstance(gradient, list | tuple):
        gradient = concatenated("RowTensor", "gradients", gradient)
    if isinstance(gradient, RowTensor):
        # The mean of a sum is the sum of the means, so duplicates need not be summed first.
        values = centralized(gradient.values)
        return RowTensor(gradient.indices, values, gradient.dense_shape)
    g = adopt_anywhere("gradients_centralization", "gradients", gradient)
    if is_on_device(g):
        return device_gradient.centralized(g).native()
    if g.ndim < 2 or g.size == 0:
        return g
    wide = g.astype(real_type(g.dtype))
    mean = wide.mean(axis=tuple(range(1, g.ndim)), keepdims=True, dtype=np.float64)
    return (wide - mean.astype(wide.dtype)).astype(g.dtype)


@quiet
def scaled(gradient: Any, factor: float) -> Any:
    """``gradient * factor``, the factor rounded to the type of the arithmetic first."""
    if gradient is None:
        return None
    if isinstance(gradient, list | tuple):
        gradient = concatenated("RowTensor", "gradients", gradient)
    if isinstance(gradient, RowTensor):
        return RowTensor(gradient.indices, scaled(gradient.values, factor), gradient.dense_shape)
    g = adopt_anywhere("scale_grad", "gradients", gradient)
    if is_on_device(g):
        made = g.empty_like()
        convert(g, made, factor)
        return made.native()
    real = real_type(g.dtype)
    return (g.astype(real) * real(factor)).astype(g.dtype)
