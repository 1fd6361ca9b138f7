"""Adopting a caller's arrays without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.cpu.headers import arrays as headers
from ...kernels.cpu.threads import allocation
from ...kernels.formula import ROUNDING
from ...kernels.storage import STORAGES
from .device import DeviceArray
from .errors import reject
from .frameworks import check_there, framework_of, is_tensor

_LINES_FROM = 65_536  # bytes: aligning a smaller array costs more than it gains


def real_type(dtype: np.dtype[Any]) -> Any:
    """The NumPy scalar type of the arithmetic on arrays of ``dtype``."""
    return np.float64 if dtype == np.float64 else np.float32


ROUNDINGS = {dtype: ROUNDING[real_type(dtype)] for dtype in STORAGES}
"""Functions that round numbers to the type of the arithmetic, by the dtype of an array."""


def address_of(array: Any) -> int:
    """The address of the first element of an adopted array."""
    return array.address if isinstance(array, DeviceArray) else headers.address_of(array)


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """The addresses of the first elements of several arrays."""
    if DeviceArray in map(type, arrays):
        return [a.address if type(a) is DeviceArray else address_of(a) for a in arrays]
    return headers.addresses_of(arrays)


def empty_like(array: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new array of the dtype and on the device of ``array``, and of its shape unless given.

    A large array on the host begins at a cache line.
    """
    if isinstance(array, DeviceArray):
        return array.empty_like(shape=shape)
    shape = array.shape if shape is None else shape
    is_small = math.prod(shape) * array.itemsize < _LINES_FROM
    return (np.empty if is_small else allocation.empty)(shape, array.dtype)


def native(array: Any) -> Any:
    """The array to return to a caller: NumPy's, or that of the framework of a device array."""
    return array.native() if isinstance(array, DeviceArray) else array


def adopt_anywhere(where: str, name: str, value: Any) -> Any:
    """The array of ``value`` on the host, as `adopt`, or a `DeviceArray` on a CUDA device.

    On devices, arrays of torch, CuPy and Numba are accepted, and any object with
    ``__cuda_array_interface__``.
    """
    if type(value) is np.ndarray:
        return value
    inner = getattr(value, "__fusestep_array__", value)
    there = DeviceArray.adopt(where, name, inner)
    return adopt(where, name, inner) if there is None else there


def adopt(where: str, name: str, value: Any) -> np.ndarray:
    """The NumPy view of ``value``, without a copy.

    NumPy arrays and scalars are accepted, `fusestep.nn.Parameter`, and any object on the host with
    ``__array__`` or ``__dlpack__``. Before NumPy 2 an object with DLPack alone gives a read-only
    array: that can be a gradient, but no variable.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        reject(TypeError, where, name, "is masked", "an array without a mask", "masked array")
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)  # a subclass may give shapes and indices another meaning
    if framework_of(getattr(value, "__fusestep_array__", value)) is not None:
        fix = "; copy it to the host first: there are no CUDA kernels for this"
        wrong, expected = "lives on a CUDA device", "an array on the host"
        reject(RuntimeError, where, name, wrong, expected, type(value), fix)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if is_tensor(value):  # NumPy does not check that the memory of a tensor is there
            check_there(where, name, value)
        return array
    if not hasattr(value, "__dlpack__"):
        reject(TypeError, where, name, "is no array", "an array", type(value).__name__)
    return np.from_dlpack(value)


def adopt_variable(where: str, name: str, value: Any) -> Any:
    """The array of ``value``, as `adopt_anywhere`, that can be updated in place.

    If ``value`` gives another array each time that it is read, an update would be lost.

    Raises:
        TypeError: ``value`` is no array, or gives another one each time.
    """
    array = adopt_anywhere(where, name, value)
    is_itself = array is value or isinstance(value, np.ndarray) or isinstance(array, DeviceArray)
    if not is_itself and address_of(array) != address_of(adopt(where, name, value)):
        wrong, got = "cannot be updated in place", type(value).__name__
        reject(TypeError, where, name, wrong, "an array", got)
    return array
