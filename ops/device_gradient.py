"""New arrays out of whole arrays of a device: what is not fused into a step is enqueued by itself.

The host waits for nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.rules.norm import SCALED
from .arrays import RowTensor
from .device import DeviceArray, launching
from .step import tensor_step


def converted(array: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
    """A copy in another dtype, in the same framework."""
    made = array.empty_like(dtype)
    convert(array, made)
    return made


def convert(array: DeviceArray, out: DeviceArray, factor: float = 1.0) -> None:
    """Write ``factor * array``, rounded to its dtype, to a contiguous ``out`` of the same shape."""
    array = array.contiguous("a conversion", "array")
    tensor_step(SCALED, (), (out, array), (out.address, array.address), (factor,))


def concatenated(parts: Sequence[RowTensor]) -> RowTensor:
    """Row-sparse gradients of one tensor, of one dtype and device, as one."""
    indices, values = (
        [array.contiguous("RowTensor", name) for array in arrays]
        for name, arrays in (
            ("indices", [part.indices for part in parts]),
            ("values", [part.values for part in parts]),
        )
    )
    n, row_shape = sum(map(len, indices)), values[0].shape[1:]
    dtype = np.result_type(*(array.dtype for array in indices))
    joined = indices[0].empty_like(dtype, (n,)), values[0].empty_like(shape=(n, *row_shape))
    with launching([*values, *indices]) as stream:
        for arrays, out in zip((indices, values), joined, strict=True):
            _join(arrays, out, stream)
    return RowTensor(*joined, parts[0].dense_shape)


def _join(arrays: Sequence[DeviceArray], out: DeviceArray, stream: Any) -> None:
    """Enqueue copies of arrays, one after the other, to ``out``."""
    from ..kernels.cuda.backend import copy_within
    from ..kernels.cuda.widen import widen

    place = out.address
    for array in arrays:
        if array.dtype == out.dtype:
            copy_within(place, array.address, array.nbytes, stream)
        else:
            widen(array.address, array.size, place, stream)
        place += array.size * out.itemsize
