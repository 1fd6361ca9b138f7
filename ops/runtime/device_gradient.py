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
from .arrays import RowTensor, index_error, real_type
from .device import DeviceArray, launching
from .device_step import checked, launch_on
from .gradient_kinds import gradient_table
from .row_step import bad_index_error, check_keys
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
    from ...kernels.cuda.device.arrays import widen
    from ...kernels.cuda.device.backend import copy_within

    place = out.address
    for array in arrays:
        if array.dtype == out.dtype:
            copy_within(place, array.address, array.nbytes, stream)
        else:
            widen(array.address, array.size, place, stream)
        place += array.size * out.itemsize


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    real: np.dtype[Any] = np.dtype(real_type(dtype))
    return real


def decayed(gradient: DeviceArray, w: DeviceArray, factor: float) -> DeviceArray:
    """``gradient + factor * w`` in the type of the arithmetic on ``w``, in its framework."""
    gradient = gradient.contiguous("decay_weight", "gradients")
    made = converted(w, _real(w.dtype))
    arrays, addresses = (made, gradient), (made.address, gradient.address)
    tensor_step(SCALED, (COUPLED_DECAY,), arrays, addresses, (1.0, factor, 0.0))
    return made


def centralized(gradient: DeviceArray, w: DeviceArray | None = None) -> DeviceArray:
    """The gradient less its means over all axes but the first, or itself below two dimensions.

    With a parameter ``w`` the result has its framework and the type of the arithmetic on it.
    """
    if gradient.ndim < 2 or gradient.size == 0:
        return gradient
    made = w.empty_like(_real(w.dtype), gradient.shape) if w is not None else gradient.empty_like()
    centralize(gradient, made)
    return made


def centralize(gradient: DeviceArray, out: DeviceArray) -> None:
    """As `centralized`, into an array whose dtype decides the type of the arithmetic.

    ``out`` may be ``gradient``; below two dimensions it has to be.
    """
    from ...kernels.cuda.dense.centralize import centralize as enqueue

    if gradient.ndim < 2 or gradient.size == 0:
        return
    gradient = gradient.contiguous("gradients_centralization", "gradients")
    shape = len(gradient), gradient.size // len(gradient)
    g, real, of_out = (STORAGES[x] for x in (gradient.dtype, _real(out.dtype), out.dtype))
    with launching([out, gradient]) as stream:
        enqueue(g, real, of_out, gradient.address, shape, out.address, stream)


# Row-sparse gradients


def _rows_of(tensor: RowTensor, real: np.dtype[Any], w: int, sorter: Any) -> Any:
    """A gradient as kernels see it; ``w`` is the address of its parameter, or 0."""
    from ...kernels.cuda.rows.coalesce import Rows

    table = gradient_table(tensor)._replace(addresses=(w,))
    check_keys("RowTensor", [(table.rows, table.length)])
    return Rows(table, STORAGES[tensor.dtype], STORAGES[real], sorter)


def _contiguous(tensor: RowTensor) -> RowTensor:
    """The same, adopted again and checked: the attributes of a RowTensor can be assigned to."""
    again = RowTensor(tensor.indices, tensor.values, tensor.dense_shape)
    again.indices = again.indices.contiguous("RowTensor", "indices")
    again.values = again.values.contiguous("RowTensor", "values")
    return again


def dense(tensor: RowTensor, dtype: np.dtype[Any]) -> DeviceArray:
    """The dense array, in a dtype whose arithmetic adds the rows up.

    An index out of range is heard of later (`pending`); then all is 0.
    """
    from ...kernels.cuda.rows.coalesce import dense_sums

    tensor = _contiguous(tensor)
    made: DeviceArray = tensor.values.filled_like(0.0, dtype, tensor.dense_shape)
    error = bad_index_error([("RowTensor", len(tensor.indices), tensor.dense_shape[0])])
    with (
        launch_on([made, tensor.values, tensor.indices], None) as launch,
        checked(made.device, launch, error) as guarded,
    ):
        rows = _rows_of(tensor, _real(dtype), 0, launch.sorter)
        guard, stream = guarded.check.guard, launch.stream
        dense_sums(rows, STORAGES[dtype], made.address, guard=guard, stream=stream)
    return made


def coalesced(tensor: RowTensor) -> RowTensor:
    """Each row once, in ascending order; the host waits for the number of rows.

    Raises:
        IndexError: an index is out of range.
    """
    from ...kernels.cuda.rows.coalesce import distinct_rows

    tensor = _contiguous(tensor)
    indices, values, shape = tensor.indices, tensor.values, tensor.dense_shape
    if len(indices) == 0:
        return RowTensor(indices.copy(), values.copy(), shape)
    with launch_on([values, indices], None) as launch:
        rows = _rows_of(tensor, _real(tensor.dtype), 0, launch.sorter)
        with distinct_rows(rows, launch.stream) as distinct:
            n, bad = distinct.count()
            if bad >= 0:
                raise index_error("RowTensor", bad, int(indices.numpy()[bad]), shape[0])
            own = indices.empty_like(shape=(n,)), values.empty_like(shape=(n, *shape[1:]))
            distinct.write(n, own[0].address, STORAGES[tensor.dtype], own[1].address)
    return RowTensor(*own, shape)


def decayed_rows(tensor: RowTensor, w: DeviceArray, factor: float) -> RowTensor:
    """The gradient with ``factor * w`` once in each row that occurs, without a wait.

    Its indices are as they were, and so are those that are out of range. The first occurrence of
    a row has all of it, the others 0, in the type of the arithmetic on ``w``.
    """
    from ...kernels.cuda.rows.coalesce import decayed_sums

    real = _real(w.dtype)
    made = w.filled_like(0.0, real, tensor.values.shape)
    with launch_on([made, w, tensor.values, tensor.indices], None) as launch:
        rows = _rows_of(tensor, real, w.address, launch.sorter)
        scalars = np.array([1.0, factor, 0.0], real)
        decayed_sums(rows, STORAGES[w.dtype], scalars, made.address, launch.stream)
    return RowTensor(tensor.indices, made, tensor.dense_shape)
