"""Operations on whole gradients that are not fused into a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime import device_gradient
from ...ops.runtime.arrays import adopt_anywhere, native, real_type
from ...ops.runtime.device import device_of, is_on_device
from ...ops.runtime.errors import reject
from ...ops.runtime.row_forms import concatenated, with_values
from ...ops.runtime.row_tensor import RowTensor


def _of_a_gradient(work: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: None is returned as it is, and a list of RowTensors is concatenated first."""

    @wraps(work)
    @quiet
    def read(gradient: Any, *arguments: Any) -> Any:
        if isinstance(gradient, list | tuple):
            gradient = concatenated("RowTensor", "gradients", gradient)
        return None if gradient is None else work(gradient, *arguments)

    return read


@_of_a_gradient
def decayed(gradient: Any, parameter: Any, factor: float) -> Any:
    """``gradient + factor * parameter``, rounded to the gradient's dtype."""
    where = "decay_weight"
    w = adopt_anywhere(where, "the parameter", parameter)
    if isinstance(gradient, RowTensor):
        rows = gradient.coalesce()
        device_of(where, {"the parameter": w, "gradients": rows.values})
        if is_on_device(w):
            w_rows, _ = device_gradient.gathered("SparseGatherV2", w, rows.indices)
        else:
            w_rows = w[rows.indices]
        return RowTensor(rows.indices, decayed(rows.values, w_rows, factor), rows.dense_shape)
    g = adopt_anywhere(where, "gradients", gradient)
    device_of(where, {"the parameter": w, "gradients": g})
    if g.shape != w.shape:
        reject(ValueError, where, "gradients", "has a wrong shape", w.shape, g.shape)
    if is_on_device(g):  # computed on the host, which waits
        return g.holding(decayed(g.numpy(), w.numpy(), factor)).native()
    real = real_type(w.dtype)
    return (g.astype(real) + real(factor) * w.astype(real)).astype(g.dtype)


@_of_a_gradient
def centralized(gradient: Any) -> Any:
    """``gradient - mean over all axes but the first``; unchanged below two dimensions."""
    if isinstance(gradient, RowTensor):
        # The mean of a sum is the sum of the means, so duplicates need not be summed first.
        values = centralized(gradient.values)
        return with_values(gradient, values)
    g = adopt_anywhere("gradients_centralization", "gradients", gradient)
    if g.ndim < 2 or g.size == 0:
        return native(g)
    if is_on_device(g):  # computed on the host, which waits
        return g.holding(centralized(g.numpy())).native()
    wide = g.astype(real_type(g.dtype))
    mean = wide.mean(axis=tuple(range(1, g.ndim)), keepdims=True, dtype=np.float64)
    return (wide - mean.astype(wide.dtype)).astype(g.dtype)


@_of_a_gradient
def scaled(gradient: Any, factor: float) -> Any:
    """``gradient * factor``, the factor rounded to the type of the arithmetic first."""
    if isinstance(gradient, RowTensor):
        return with_values(gradient, scaled(gradient.values, factor))
    g = adopt_anywhere("scale_grad", "gradients", gradient)
    if is_on_device(g):  # computed on the host, which waits
        return g.holding(scaled(g.numpy(), factor)).native()
    real = real_type(g.dtype)
    return (g.astype(real) * real(factor)).astype(g.dtype)
