"""Row gather: the forward of an embedding, whose backward is a row-sparse gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.cpu.gather import gather
from ..kernels.cpu.threads import allocation
from .runtime import check, device_gradient
from .runtime.arrays import adopt_anywhere
from .runtime.device import DeviceArray, device_of
from .runtime.errors import reject, reject_unknown
from .runtime.row_tensor import RowTensor


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
        reject_unknown("SparseGatherV2", unknown, SparseGatherV2)
        self._indices: Any = None
        self._shape: tuple[int, ...] = ()

    def __call__(self, params: Any, indices: Any, axis: Any = 0) -> Any:
        """Gather rows; see the class."""
        where = "SparseGatherV2"
        table = adopt_anywhere(where, "params", params)
        check.float_dtype(where, "params", table, "a floating dtype")
        if table.ndim == 0:
            reject(ValueError, where, "params", "has no rows", "at least 1 dimension", "0-d")
        if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
            reject(TypeError, where, "axis", "has a wrong type", "an int", type(axis).__name__)
        if axis != 0:
            fix = "; move the axis to the front first (numpy.moveaxis)"
            reject(ValueError, where, "axis", "is not supported", 0, axis, fix)
        index = adopt_anywhere(where, "indices", indices)
        check.index_dtype(where, index)
        if device_of(where, {"params": table, "indices": index}) is not None:
            gathered, self._indices = device_gradient.gathered(where, table, index)
            self._shape = table.shape
            return gathered.native()
        # A copy, because backward() must see the rows that were read here.
        flat = index.reshape(-1).astype(np.int64, copy=True)
        check.indices_in_range(where, flat, len(table))
        out = allocation.empty(index.shape + table.shape[1:], table.dtype)
        if out.size:
            gather(check.contiguous(table), flat, out.reshape(len(flat), -1))
        self._indices, self._shape = flat.reshape(index.shape), table.shape
        return out

    def backward(self, grad: Any) -> RowTensor:
        """The gradient of ``params`` for the gradient ``grad`` of the last call's output.

        Args:
            grad: floating, of the shape of the output. Its memory is used, not copied.

        Raises:
            RuntimeError: there was no call yet.
            TypeError, ValueError: ``grad`` does not fit the output.
        """
        where = "SparseGatherV2"
        if self._indices is None:
            raise RuntimeError(f"{where}: backward needs a call of the operator before it")
        array = adopt_anywhere(where, "grad", grad)
        device_of(where, {"the last output": self._indices, "grad": array})
        check.float_dtype(where, "grad", array)
        shape = self._indices.shape + self._shape[1:]
        if array.shape != shape:
            reject(ValueError, where, "grad", "has a wrong shape", shape, array.shape)
        if isinstance(array, DeviceArray):
            array = array.contiguous(where, "grad")
        values = array.reshape(self._indices.size, *self._shape[1:])
        return RowTensor(self._indices.reshape(self._indices.size), values, self._shape)
