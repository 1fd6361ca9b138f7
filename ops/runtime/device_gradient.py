"""New arrays out of whole arrays of a device: what is not fused into a step is enqueued by itself.

The host waits for nothing, but for indices of both sizes that become one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.rules.norm import SCALED
from . import cuda
from .check import index_error
from .device import DeviceArray, launching
from .launch import launch_on
from .row_step import RowGradient
from .step import tensor_step


def converted(array: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
    """A copy in another dtype, in the same framework."""
    made = array.empty_like(dtype)
    convert(array, made)
    return made


def convert(array: DeviceArray, out: DeviceArray) -> None:
    """Write the numbers of an array, rounded, to a contiguous ``out`` of the same shape."""
    array = array.contiguous("a conversion", "array")
    tensor_step(SCALED, (), (out, array), (out.address, array.address), (1.0,))


def gathered(where: str, table: DeviceArray, index: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """The rows of ``table`` at ``index``, and the indices that were read, as int64.

    The row of a bad index is 0, and it is heard of later (`pending`).
    """
    table, index = table.contiguous(where, "params"), index.contiguous(where, "indices")
    out = table.empty_like(shape=index.shape + table.shape[1:])
    kept = index.empty_like(np.dtype(np.int64))
    n_rows = len(table)

    def error(position: int, _: int) -> IndexError:
        return index_error(where, position, int(kept.numpy().flat[position]), n_rows)

    with launch_on([table, index], error) as launch:
        table_place = table.address, n_rows, table.nbytes // max(1, n_rows)
        index_place = index.address, index.itemsize, index.size
        results = out.address, kept.address, launch.guard
        cuda.rows.gather.gather(table_place, index_place, results, launch.stream)
    return out, kept


# Row-sparse gradients


def concatenated(gradients: Sequence[RowGradient]) -> tuple[DeviceArray, DeviceArray]:
    """Gradients of one array, of one dtype and device: their indices and values as one."""
    indices = [gradient.indices.contiguous("RowTensor", "indices") for gradient in gradients]
    values = [gradient.values.contiguous("RowTensor", "values") for gradient in gradients]
    n, row_shape = sum(map(len, indices)), values[0].shape[1:]
    every = joined(values, values[0].empty_like(shape=(n, *row_shape)))
    if len({array.dtype for array in indices}) == 1:
        return joined(indices, indices[0].empty_like(shape=(n,))), every
    return indices[0].holding(np.concatenate([array.numpy() for array in indices])), every


def joined(arrays: Sequence[DeviceArray], out: DeviceArray) -> DeviceArray:
    """Contiguous arrays of one dtype, one below the other, in ``out``."""
    if arrays:
        with launching([*arrays, out]) as launch:
            place = out.address
            for array in arrays:
                cuda.device.backend.copy_within(place, array.address, array.nbytes, launch.stream)
                place += array.nbytes
    return out
