"""New arrays out of whole arrays of a device: what is not fused into a step is enqueued by itself.

The host waits for nothing here, but in `coalesced`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.rules.gradient import COUPLED_DECAY
from ...kernels.rules.norm import SCALED
from ...kernels.storage import STORAGES
from . import cuda
from .arrays import real_type
from .check import index_error
from .device import DeviceArray, launching
from .launch import launch_on
from .row_step import IndexList, RowGradient, bad_index_error, check_keys, row_table
from .step import tensor_step


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    real: np.dtype[Any] = np.dtype(real_type(dtype))
    return real


def converted(array: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
    """A copy in another dtype, in the same framework."""
    made = array.empty_like(dtype)
    convert(array, made)
    return made


def convert(array: DeviceArray, out: DeviceArray, factor: float = 1.0) -> None:
    """Write ``factor * array``, rounded to its dtype, to a contiguous ``out`` of the same shape."""
    array = array.contiguous("a conversion", "array")
    tensor_step(SCALED, (), (out, array), (out.address, array.address), (factor,))


def decayed(gradient: DeviceArray, w: DeviceArray, factor: float) -> DeviceArray:
    """``gradient + factor * w`` in the type of the arithmetic on ``w``, in its framework."""
    gradient = gradient.contiguous("decay_weight", "gradients")
    made = converted(w, _real(w.dtype))
    arrays, addresses = (made, gradient), (made.address, gradient.address)
    tensor_step(SCALED, (COUPLED_DECAY,), arrays, addresses, (1.0, factor, 0.0))
    return made


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
    dtype = np.result_type(*(array.dtype for array in indices))
    joined = indices[0].empty_like(dtype, (n,)), values[0].empty_like(shape=(n, *row_shape))
    with launching([*values, *indices]) as stream:
        for arrays, out in zip((indices, values), joined, strict=True):
            _join(arrays, out, stream)
    return joined


def _join(arrays: Sequence[DeviceArray], out: DeviceArray, stream: Any) -> None:
    """Enqueue copies of arrays, one after the other, to ``out``."""
    place = out.address
    for array in arrays:
        if array.dtype == out.dtype:
            cuda.device.backend.copy_within(place, array.address, array.nbytes, stream)
        else:
            cuda.device.arrays.widen(array.address, array.size, place, stream)
        place += array.size * out.itemsize


def joined(arrays: Sequence[DeviceArray], out: DeviceArray) -> DeviceArray:
    """Contiguous arrays of one dtype, one below the other, in ``out``."""
    if arrays:
        with launching([*arrays, out]) as stream:
            _join(arrays, out, stream)
    return out


def dense(gradient: RowGradient, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
    """The dense array, in a dtype whose arithmetic adds the rows up.

    An index out of range is heard of later (`pending`); then all is 0.
    """
    gradient = _contiguous(gradient)
    made: DeviceArray = gradient.values.filled_like(0.0, dtype, shape)
    error = bad_index_error([IndexList("RowTensor", len(gradient.indices), shape[0])])
    with launch_on([made, *gradient.arrays], error) as launch:
        rows = _rows_of(gradient, shape, _real(dtype))
        cuda.rows.coalesce.dense_sums(
            rows, STORAGES[dtype], made.address, guard=launch.guard, stream=launch.stream
        )
    return made


def coalesced(gradient: RowGradient, shape: tuple[int, ...]) -> tuple[DeviceArray, DeviceArray]:
    """Each row once, in ascending order: indices and values; the host waits for their number."""
    gradient = _contiguous(gradient)
    indices, values, *_ = gradient
    if len(indices) == 0:
        return indices.copy(), values.copy()
    with launch_on(gradient.arrays) as launch:
        rows = _rows_of(gradient, shape, _real(values.dtype))
        with cuda.rows.coalesce.distinct_rows(rows, launch.stream) as distinct:
            n, bad = distinct.count()
            if bad >= 0:
                raise index_error("RowTensor", bad, int(indices.numpy()[bad]), shape[0])
            own = indices.empty_like(shape=(n,)), values.empty_like(shape=(n, *shape[1:]))
            distinct.write(n, own[0].address, STORAGES[values.dtype], own[1].address)
    return own


def _contiguous(gradient: RowGradient) -> RowGradient:
    named = (gradient.indices, "indices"), (gradient.values, "values")
    return RowGradient.of(*(array.contiguous("RowTensor", name) for array, name in named))


def _rows_of(gradient: RowGradient, shape: tuple[int, ...], real: np.dtype[Any]) -> Any:
    """A gradient as kernels see it."""
    table = row_table((0,), shape, gradient.source)
    check_keys("RowTensor", [(table.rows, table.length)])
    return cuda.rows.coalesce.DeviceRows(table, STORAGES[gradient.dtype], STORAGES[real])
