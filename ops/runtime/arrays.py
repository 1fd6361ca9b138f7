"""Arrays as they come in: adopted without a copy; and the row-sparse gradient, RowTensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ...kernels.cpu import headers
from ...kernels.quiet import quiet
from ...kernels.rules.formula import ROUNDING
from ...kernels.storage import STORAGES
from .device import DeviceArray, device_of
from .errors import message
from .frameworks import framework_of

Array = np.ndarray | DeviceArray
"""What is adopted."""

INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def real_type(dtype: np.dtype[Any]) -> Any:
    """The NumPy scalar type of the arithmetic on arrays of ``dtype``."""
    return np.float64 if dtype == np.float64 else np.float32


def rounding(dtype: np.dtype[Any]) -> Callable[[float], float]:
    """What rounds a number to the type of the arithmetic on arrays of ``dtype``."""
    return ROUNDING[real_type(dtype)]


def address_of(array: Any) -> int:
    """The address of the first element of what was adopted."""
    return array.address if isinstance(array, DeviceArray) else headers.address_of(array)


def adopt_anywhere(where: str, name: str, value: Any) -> Any:
    """As `adopt`, or a `DeviceArray` for an array on a CUDA device.

    Of devices are taken arrays of torch, CuPy and Numba, and any object with
    ``__cuda_array_interface__``.
    """
    if type(value) is np.ndarray:
        return value
    inner = getattr(value, "__fusestep_array__", value)
    on_device = DeviceArray.adopt(where, name, inner)
    return adopt(where, name, inner) if on_device is None else on_device


def adopt(where: str, name: str, value: Any) -> np.ndarray:
    """The NumPy view of ``value``, without a copy.

    Taken are NumPy arrays and scalars, `fusestep.nn.Parameter`, and any object on the host
    with ``__array__`` or ``__dlpack__``.

    Raises:
        TypeError: ``value`` is no array.
        RuntimeError: ``value`` lives on a CUDA device.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            message(where, name, "is masked", "an array without a mask", "masked array")
        )
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)  # a subclass may change what shapes and indices mean
    if framework_of(getattr(value, "__fusestep_array__", value)) is not None:
        raise RuntimeError(
            message(where, name, "lives on a CUDA device", "an array on the host", type(value))
            + "; copy it to the host first: there are no CUDA kernels for this"
        )
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    raise TypeError(message(where, name, "is no array", "an array", type(value).__name__))


def adopt_variable(where: str, name: str, value: Any) -> Any:
    """As `adopt_anywhere`, for an array that is updated in place.

    Raises:
        TypeError: also when reading ``value`` twice gives two different arrays, so that an
            update of one would be lost.
    """
    array = adopt_anywhere(where, name, value)
    if isinstance(array, DeviceArray):
        return array
    if array is not value and not isinstance(value, np.ndarray):
        again = adopt(where, name, value)
        if address_of(array) != address_of(again):
            raise TypeError(
                message(where, name, "cannot be updated in place", "an array", type(value).__name__)
            )
    return array


class RowTensor:
    """A row-sparse gradient of an ``[N, ...]`` tensor: values for some of its rows.

    ``dense[i] = sum of values[b] for all b with indices[b] == i``, and 0 where there is none.
    Duplicates are allowed and summed, in any order of rows.

    Args:
        indices: ``[B]`` int32 or int64, each in ``[0, N)``; on the host or on a CUDA device.
        values: ``[B, ...]`` floating; trailing dimensions as those of the dense tensor.
        dense_shape: shape ``(N, ...)`` of the tensor.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape or length does not fit. (Index values are checked by the step that
            uses them: `IndexError`.)

    The attributes can be assigned to: then each is checked by itself, and by the step that uses
    it whether they fit together.

    Source: ``mindspore.RowTensor``.

    >>> import numpy as np
    >>> g = RowTensor(np.array([2, 0, 2]), np.ones((3, 2), np.float32), (4, 2))
    >>> g.to_dense()[:, 0].tolist()
    [1.0, 0.0, 2.0, 0.0]
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, indices: Any, values: Any, dense_shape: tuple[int, ...]) -> None:
        self.indices, self.values, self.dense_shape = indices, values, dense_shape
        device_of("RowTensor", {"indices": self.indices, "values": self.values})
        check_row_gradient("RowTensor", "values", self.indices, self.values, self.dense_shape)
        if self.values.dtype not in STORAGES:
            raise TypeError(
                message(
                    "RowTensor",
                    "values",
                    "has a wrong dtype",
                    "a floating dtype",
                    self.values.dtype,
                )
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # Not properties: steps read the attributes far more often than anyone assigns to them.
        if name in ("indices", "values"):
            value = adopt_anywhere("RowTensor", name, value)
        elif name == "dense_shape":
            value = _shape(value)
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

        On a device the host waits for the number of rows.

        Raises:
            IndexError: an index is outside of ``[0, N)``.
        """
        if self._is_on_device:
            from .device_gradient import coalesced

            return coalesced(self)
        self._check_indices()
        unique, places = np.unique(self.indices, return_inverse=True)
        total = self._summed(places.reshape(-1), (len(unique), *self.dense_shape[1:]))
        return RowTensor(unique, total, self.dense_shape)

    def to_dense(self) -> Any:
        """The dense ``[N, ...]`` array, duplicates summed in order of occurrence.

        On a device it is one of the framework of the values, and enqueued: where an index turns
        out to be out of range it is 0 throughout, and `fusestep.synchronize` raises the error.

        Raises:
            IndexError: an index is outside of ``[0, N)``.
        """
        if self._is_on_device:
            from .device_gradient import dense

            return dense(self, self.dtype).native()
        self._check_indices()
        return self._summed(self.indices, self.dense_shape)

    @quiet
    def _summed(self, places: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The values added up at row ``places[b]`` of an array of ``shape``."""
        real = real_type(self.dtype)
        total, width = np.zeros(shape, real), math.prod(shape[1:])
        # Flat indices: NumPy adds whole rows several times more slowly.
        flat = places.astype(np.int64)[:, None] * width + np.arange(width)
        np.add.at(total.reshape(-1), flat.reshape(-1), self.values.astype(real).reshape(-1))
        return total.astype(self.dtype, copy=False)

    @property
    def _is_on_device(self) -> bool:
        return isinstance(adopt_anywhere("RowTensor", "values", self.values), DeviceArray)

    def _check_indices(self) -> None:
        adopt("RowTensor", "indices", self.indices)  # refuses those on a device
        check_row_gradient("RowTensor", "values", self.indices, self.values, self.dense_shape)
        bad = (self.indices < 0) | (self.indices >= self.dense_shape[0])
        if bad.any():
            position = int(np.argmax(bad))
            index = int(self.indices[position])
            raise index_error("RowTensor", position, index, self.dense_shape[0])


def _shape(dense_shape: Any) -> tuple[int, ...]:
    is_list = isinstance(dense_shape, (tuple, list))
    if not is_list or not all(isinstance(n, (int, np.integer)) for n in dense_shape):
        raise TypeError(
            message("RowTensor", "dense_shape", "is no shape", "a tuple of int", repr(dense_shape))
        )
    if not dense_shape or min(dense_shape) < 0:
        raise ValueError(
            message(
                "RowTensor",
                "dense_shape",
                "has no rows or a negative size",
                "(N, ...)",
                tuple(dense_shape),
            )
        )
    return tuple(map(int, dense_shape))


def check_row_gradient(
    where: str, name: str, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...]
) -> None:
    """Kinds and shapes of a row-sparse gradient against the shape of its variable.

    Raises:
        TypeError: ``indices`` is not int32 or int64.
        ValueError: a shape or length does not fit.
    """
    if indices.dtype not in INDEX_DTYPES:
        raise TypeError(
            message(where, "indices", "has a wrong dtype", "int32 or int64", indices.dtype)
        )
    if indices.ndim != 1:
        raise ValueError(
            message(where, "indices", "has a wrong shape", "1 dimension", indices.shape)
        )
    if values.ndim != len(shape) or values.shape[1:] != shape[1:]:
        wanted = (len(indices), *shape[1:])
        raise ValueError(message(where, name, "has a wrong shape", wanted, values.shape))
    if len(values) != len(indices):
        expected = f"{len(indices)} rows as there are indices"
        raise ValueError(message(where, name, "has a wrong length", expected, len(values)))


def index_error(where: str, position: int, index: int, n_rows: int) -> IndexError:
    """The error for ``indices[position]``, which is ``index``."""
    return IndexError(
        message(
            where,
            f"indices[{position}]",
            "is out of range",
            f"0 <= index < {n_rows}",
            index,
        )
    )
