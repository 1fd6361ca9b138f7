"""Master copies: 16-bit weights are updated in float32, and rounded from there."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.device_gradient import convert, converted
from ...ops.runtime.row_forms import concatenated, with_values
from ...ops.runtime.row_tensor import RowTensor

_WHERE = "update_multi_precision"


def master_arguments(grad: Any, state: Any) -> tuple[Any, Any, Any]:
    """Master copy, float32 gradient and state of the master copy."""
    if isinstance(grad, list | tuple):
        grad = concatenated(_WHERE, "grad", grad)
    if isinstance(grad, RowTensor):
        grad = with_values(grad, as_float32(grad.values))
    elif grad is not None:
        grad = as_float32(adopt_anywhere(_WHERE, "grad", grad))
    return state[0], grad, state[1]


@quiet
def as_float32(array: Any) -> Any:
    """A float32 copy; of an array on a device in its framework."""
    if isinstance(array, DeviceArray):
        return converted(array, np.dtype(np.float32)).native()
    return np.array(array, np.float32, order="C")


@quiet
def round_to(weight: Any, master: Any) -> None:
    """Make a 16-bit weight the rounded master copy."""
    if isinstance(weight, DeviceArray):
        convert(adopt_anywhere(_WHERE, "the master copy", master), weight)
    else:
        weight[...] = master
