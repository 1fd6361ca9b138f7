"""RowTensor, the row-sparse gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from . import check
from .arrays import adopt, adopt_anywhere, real_type
from .device import DeviceArray, device_of
from .errors import reject


class RowTensor:
    """A row-sparse gradient of an ``[N, ...]`` tensor: values for some of its rows.

    ``dense[i] = sum of values[b] for all b with indices[b] == i``, and 0 where there is none.
    Duplicates are allowed and summed, in any order of rows.

    Args:
        indices: ``[B]`` int32 or int64, each in ``[0, N)``; on the host or on a CUDA device.
        values: ``[B, ...]`` floating; trailing dimensions as those of the dense tensor.
        dense_shape: shape ``(N, ...)`` of the tensor.
        positions: for a tensor whose rows several processes own: int64 ``[B]`` on the host,
            ascending, the places of this process's occurrences in the whole batch. A row that
            occurs more than 512 times is then summed to the same bits as in one process that has
            the whole batch.
        batch_length: the number of occurrences in the whole batch, an int: more than the largest
            position, and 0 without positions.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape, length or position does not fit. (Index values are checked by the
            step that uses them: `IndexError`.)

    The attributes can be assigned to. Each is checked by itself then; the step that uses the
    gradient checks whether they fit together.

    Source: ``mindspore.RowTensor``.

    >>> import numpy as np
    >>> g = RowTensor(np.array([2, 0, 2]), np.ones((3, 2), np.float32), (4, 2))
    >>> g.to_dense()[:, 0].tolist()
    [1.0, 0.0, 2.0, 0.0]
    """

    __slots__ = ("batch_length", "dense_shape", "indices", "positions", "values")

    def __init__(
        self, indices: Any, values: Any, dense_shape: tuple[int, ...], *, positions: Any = None,
        batch_length: int = 0,
    ) -> None:  # fmt: skip
        self.indices, self.values, self.dense_shape = indices, values, dense_shape
        put = super().__setattr__
        put("positions", None)
        put("batch_length", 0)
        device_of("RowTensor", {"indices": self.indices, "values": self.values})
        check.row_gradient("RowTensor", "values", self.indices, self.values, self.dense_shape)
        check.float_dtype("RowTensor", "values", self.values, "a floating dtype")
        if positions is not None or type(batch_length) is not int or batch_length:
            self.positions, self.batch_length = positions, batch_length
            self.check_positions("RowTensor")

    def check_positions(self, where: str) -> None:
        """Check that the positions, if there are any, fit the indices and the batch.

        Raises:
            TypeError, ValueError: they do not.
        """
        positions, n, shape = self.positions, self.batch_length, self.indices.shape
        if positions is None:
            if n:
                wrong, expected = "is given without positions", "0, or positions in that batch"
                reject(ValueError, where, "batch_length", wrong, expected, n)
            return
        wrong = "do not fit the indices"
        if positions.dtype != np.int64:
            reject(TypeError, where, "positions", "have a wrong dtype", "int64", positions.dtype)
        if positions.shape != shape:
            reject(ValueError, where, "positions", wrong, shape, positions.shape)
        is_ascending = bool((positions[1:] > positions[:-1]).all())  # differences could overflow
        if len(positions) and not (is_ascending and positions[0] >= 0 and positions[-1] < n):
            expected, got = f"ascending ones in [0, {n})", positions
            reject(ValueError, where, "positions", "are no positions of a batch", expected, got)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes are no properties, because steps read them far more often than they change.
        if name in ("indices", "values"):
            value = adopt_anywhere("RowTensor", name, value)
        elif name == "dense_shape":
            value = _shape(value)
        elif name == "positions":
            value = None if value is None else adopt("RowTensor", name, value)
        elif name == "batch_length":
            value = _length(value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return (
            f"RowTensor(indices={self.indices.shape} {self.indices.dtype}, "
            f"values={self.values.shape} {self.values.dtype}, dense_shape={self.dense_shape})"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense tensor."""
        return self.dense_shape

    def coalesce(self) -> RowTensor:
        """Each row once, in ascending order, duplicates summed in order of occurrence.

        On a device the host works it out and waits for it.

        Raises:
            IndexError: an index is outside of ``[0, N)``.
        """
        indices = self._checked_indices()
        if isinstance(self.values, DeviceArray):
            rows, like = self._on_host().coalesce(), self.values
            arrays = like.holding(rows.indices), like.holding(rows.values)
            return RowTensor(*arrays, self.dense_shape)
        unique, places = np.unique(indices, return_inverse=True)
        total = self._summed(places.reshape(-1), (len(unique), *self.dense_shape[1:]))
        return RowTensor(unique, total, self.dense_shape)

    def to_dense(self) -> Any:
        """The dense ``[N, ...]`` array, duplicates summed in order of occurrence.

        On a device the host works it out and waits for it; the result is an array of the framework
        of the values.

        Raises:
            IndexError: an index is outside of ``[0, N)``.
        """
        indices = self._checked_indices()
        if isinstance(self.values, DeviceArray):
            return self.values.holding(self._on_host().to_dense()).native()
        return self._summed(indices, self.dense_shape)

    def _on_host(self) -> RowTensor:
        """A copy on the host of a gradient on a device, which is waited for."""
        return RowTensor(self.indices.numpy(), self.values.numpy(), self.dense_shape)

    @quiet
    def _summed(self, places: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The values added up at row ``places[b]`` of an array of ``shape``."""
        # Summed in the type of the arithmetic and rounded once at the end: in 16 bits a sum of many
        # equal terms soon stops growing.
        real = real_type(self.dtype)
        total, width = np.zeros(shape, real), math.prod(shape[1:])
        # Flat indices: NumPy adds whole rows several times more slowly.
        flat = places.astype(np.int64)[:, None] * width + np.arange(width)
        np.add.at(total.reshape(-1), flat.reshape(-1), self.values.astype(real).reshape(-1))
        return total.astype(self.dtype, copy=False)

    def _checked_indices(self) -> Any:
        """The indices, a copy on the host, if the attributes still fit together."""
        # Attributes can be assigned to, and a thread may change the indices after the check.
        if isinstance(self.values, DeviceArray):
            return RowTensor(self.indices, self.values, self.dense_shape).indices
        adopt("RowTensor", "indices", self.indices)  # refuses those on a device
        check.row_gradient("RowTensor", "values", self.indices, self.values, self.dense_shape)
        indices = np.array(self.indices)
        check.indices_in_range("RowTensor", indices, self.dense_shape[0])
        return indices


# Places in a batch, and the ends of its ranges, are int64.
_LONGEST_BATCH = 2**62


def _length(batch_length: Any) -> int:
    where, name = "RowTensor", "batch_length"
    if isinstance(batch_length, bool) or not isinstance(batch_length, int | np.integer):
        reject(TypeError, where, name, "has a wrong type", "an int", type(batch_length).__name__)
    length = int(batch_length)
    in_range, expected = 0 <= length <= _LONGEST_BATCH, f"an int from 0 to {_LONGEST_BATCH}"
    check.in_range(where, name, length, in_range, expected)
    return length


_INTS = {int}


def _shape(dense_shape: Any) -> tuple[int, ...]:
    if type(dense_shape) is tuple and {*map(type, dense_shape)} == _INTS and min(dense_shape) >= 0:
        return dense_shape
    where, name, is_list = "RowTensor", "dense_shape", isinstance(dense_shape, tuple | list)
    if not is_list or not all(isinstance(n, int | np.integer) for n in dense_shape):
        reject(TypeError, where, name, "is no shape", "a tuple of int", repr(dense_shape))
    if not dense_shape or min(dense_shape) < 0:
        wrong, got = "has no rows or a negative size", tuple(dense_shape)
        reject(ValueError, where, name, wrong, "(N, ...)", got)
    return tuple(map(int, dense_shape))
