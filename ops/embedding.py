"""Row gather: the forward of an embedding, whose backward is a row-sparse gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.cpu.gather import gather
from .runtime import check, device_step
from .runtime.arrays import INDEX_DTYPES, RowTensor, adopt_anywhere, index_error
from .runtime.device import DeviceArray, device_of
from .runtime.errors import message, reject_unknown


class SparseGatherV2:
    """``out[...] = params[indices[...]]`` along axis 0, with a row-sparse backward.

    Call arguments:
        params: floating ``[N, ...]``, at least 1-d, on the host or on a CUDA device.
        indices: int32 or int64 of any shape, each in ``[0, N)``.
        axis: 0.

    Returns:
        A new array of shape ``indices.shape + params.shape[1:]``. On a device the call is
        enqueued: the row of a bad index is 0, and `fusestep.synchronize` reports it.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: ``params`` is 0-d or ``axis`` is not 0.
        IndexError: an index is out of range.

    Source: ``mindspore.ops.SparseGatherV2``.

    >>> import numpy as np
    >>> table = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> gather = SparseGatherV2()
    >>> gather(table, np.array([2, 0, 2]), 0).tolist()
    [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]
    >>> gather.backward(np.ones((3, 2), np.float32)).to_dense().tolist()
    [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]
    """

    def __init__(self, **unknown: Any) -> None:
        reject_unknown("SparseGatherV2", unknown, ())
        self._indices: Any = None
        self._shape: tuple[int, ...] = ()

    def __call__(self, params: Any, indices: Any, axis: Any = 0) -> Any:
        """Gather rows; see the class."""
        where = "SparseGatherV2"
        table = adopt_anywhere(where, "params", params)
        if table.dtype not in check.FLOATS:
            raise TypeError(
                message(where, "params", "has a wrong dtype", "a floating dtype", table.dtype)
            )
        if table.ndim == 0:
            raise ValueError(message(where, "params", "has no rows", "at least 1 dimension", "0-d"))
        _check_axis(where, axis)
        index = adopt_anywhere(where, "indices", indices)
        if index.dtype not in INDEX_DTYPES:
            raise TypeError(
                message(where, "indices", "has a wrong dtype", "int32 or int64", index.dtype)
            )
        if device_of(where, {"params": table, "indices": index}) is not None:
            return self._gather_on_device(table, index)
        # A copy, because backward() must see the rows that were read here.
        flat = index.reshape(-1).astype(np.int64, copy=True)
        bad = (flat < 0) | (flat >= len(table))
        if bad.any():
            position = int(np.argmax(bad))
            raise index_error(where, position, int(flat[position]), len(table))
        out = np.empty(index.shape + table.shape[1:], table.dtype)
        if out.size:
            gather(check.contiguous(table), flat, out.reshape(len(flat), -1))
        self._indices, self._shape = flat.reshape(index.shape), table.shape
        return out

    def _gather_on_device(self, table: DeviceArray, index: DeviceArray) -> Any:
        where, n = "SparseGatherV2", index.size
        table = table.contiguous(where, "params")
        index = index.contiguous(where, "indices")
        out = table.empty_like(shape=index.shape + table.shape[1:])
        kept = index.empty_like(np.dtype(np.int64))  # backward() must see what was read here

        def error(position: int, _: int) -> IndexError:
            return index_error(where, position, int(kept.numpy().flat[position]), len(table))

        with (
            device_step.launch_on([table, index], None) as launch,
            device_step.checked(table.device, launch, error) as guarded,
        ):
            device_step.gather(table, index, n, out, kept, guarded)
        self._indices, self._shape = kept, table.shape
        return out.native()

    def backward(self, grad: Any) -> RowTensor:
        """The gradient of ``params`` for the gradient ``grad`` of the last call's output.

        Args:
            grad: floating, of the shape of the output. Its memory is used, not copied.

        Raises:
            RuntimeError: there was no call yet.
            TypeError, ValueError: ``grad`` does not fit the output.
        """
        if self._indices is None:
            raise RuntimeError("SparseGatherV2: backward needs a call of the operator before it")
        array = adopt_anywhere("SparseGatherV2", "grad", grad)
        device_of("SparseGatherV2", {"the last output": self._indices, "grad": array})
        if array.dtype not in check.FLOATS:
            raise TypeError(
                message(
                    "SparseGatherV2", "grad", "has a wrong dtype", check.FLOAT_NAMES, array.dtype
                )
            )
        shape = self._indices.shape + self._shape[1:]
        if array.shape != shape:
            raise ValueError(
                message("SparseGatherV2", "grad", "has a wrong shape", shape, array.shape)
            )
        if isinstance(array, DeviceArray):
            array = array.contiguous("SparseGatherV2", "grad")
        values = array.reshape(self._indices.size, *self._shape[1:])
        return RowTensor(self._indices.reshape(self._indices.size), values, self._shape)


def _check_axis(where: str, axis: Any) -> None:
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(message(where, "axis", "has a wrong type", "an int", type(axis).__name__))
    if axis != 0:
        raise ValueError(
            message(where, "axis", "is not supported", 0, axis)
            + "; move the axis to the front first (numpy.moveaxis)"
        )
