"""The generic checks of operators: everything is checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.storage import STORAGES
from .arrays import address_of, adopt, adopt_anywhere, adopt_variable
from .device import DeviceArray, device_of
from .errors import ConversionError, message

FLOATS = tuple(STORAGES)
FLOAT_NAMES = ", ".join(str(dtype) for dtype in FLOATS)
LARGEST = float(np.finfo(np.float32).max)
"""The largest float32, as a float: compared with it, a larger number is not rounded first."""


def flag(where: str, name: str, value: Any) -> bool:
    """A bool, and nothing else.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(message(where, name, "has a wrong type", "a bool", type(value).__name__))
    return value


def scalar(where: str, name: str, value: Any) -> float:
    """A finite number out of a Python or NumPy scalar or an array of shape ``()`` or ``(1,)``.

    Raises:
        TypeError: it is no real number.
        ValueError: it is NaN, infinite or beyond float32, or an array of another shape.
    """
    if type(value) is not float:
        value = number(where, name, value)
    if not -LARGEST <= value <= LARGEST:
        if math.isfinite(value):
            raise ValueError(message(where, name, "is too large", "a float32 number", value))
        raise ValueError(message(where, name, "is not finite", "a finite number", value))
    checked: float = value
    return checked


def float_attribute(where: str, name: str, value: Any) -> float:
    """A finite float (an int is none), as attributes of operators and optimizers are published.

    Raises:
        TypeError: it is no float.
        ValueError: it is not finite.
    """
    if not isinstance(value, float | np.floating):
        raise TypeError(message(where, name, "has a wrong type", "a float", type(value).__name__))
    return scalar(where, name, float(value))


def in_range(where: str, name: str, value: float, accepted: bool, expected: str) -> None:
    """Refuse a value that is not ``accepted``.

    Raises:
        ValueError: with what was ``expected``.
    """
    if not accepted:
        raise ValueError(message(where, name, "is out of range", expected, value))


def scalar_at_least_0(where: str, name: str, value: Any) -> float:
    """As `scalar`, not negative.

    Raises:
        TypeError: it is no real number.
        ValueError: it is negative or not finite.
    """
    checked = scalar(where, name, value)
    in_range(where, name, checked, checked >= 0.0, "at least 0")
    return checked


def epsilon(where: str, name: str, value: float, used: float) -> None:
    """Refuse a ``value`` that keeps from dividing by 0, and is 0 itself as it is ``used``.

    One that is given as 0 is what the caller wants.

    Raises:
        ValueError: it is 0 only since it was rounded.
    """
    if used == 0.0 and value != 0.0:
        raise ValueError(
            message(where, name, "is 0 in float32", "at least 1e-45, or 0 itself", value)
        )


def number(where: str, name: str, value: Any) -> float:
    """Any number, NaN and infinities included, out of what `scalar` takes.

    Raises:
        TypeError: it is no real number.
        ValueError: it is an int beyond all floats or an array of another shape.
    """
    if isinstance(value, bool | str | bytes) or value is None:
        raise TypeError(message(where, name, "has a wrong type", "a number", type(value).__name__))
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                message(where, name, "is too large", "a float32 number", "an int beyond all floats")
            ) from None
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        raise TypeError(message(where, name, "has a wrong type", "a number", type(value).__name__))
    array = adopt(where, name, value)
    if array.dtype not in FLOATS and array.dtype.kind not in "iu":
        raise TypeError(message(where, name, "has a wrong dtype", "a real number", array.dtype))
    if array.shape not in ((), (1,)):
        raise ValueError(
            message(where, name, "has a wrong shape", "a scalar, () or (1,)", array.shape)
        )
    return float(array.reshape(()))


def variable(where: str, name: str, value: Any) -> Any:
    """An array that can be updated in place: floating, writable, contiguous, aligned.

    It is a NumPy array, or a `DeviceArray`.

    Raises:
        TypeError: it is no array or no floating one.
        ValueError: it is read-only, not C-contiguous or not aligned.
    """
    array = adopt_variable(where, name, value)
    if array.dtype not in STORAGES:
        raise TypeError(message(where, name, "has a wrong dtype", FLOAT_NAMES, array.dtype))
    flags = array.flags
    if not flags.writeable:
        raise ValueError(
            message(where, name, "is read-only", "a writable array", "a read-only one")
        )
    if not flags.aligned:
        raise ValueError(
            message(where, name, "is not aligned", "aligned elements", "elements between addresses")
            + "; it is updated in place and cannot be copied"
        )
    if not flags.c_contiguous:
        raise ValueError(
            message(
                where,
                name,
                "is not contiguous",
                "a C-contiguous array",
                f"strides {array.strides}",
            )
            + "; it is updated in place and cannot be copied"
        )
    return array


def same_layout(where: str, variables: dict[str, Any]) -> None:
    """Variables of one operator: one dtype and one shape, in one place.

    Raises:
        ConversionError: dtypes differ (the lower ones would have to be converted).
        ValueError: shapes differ, or the places where they live.
    """
    device_of(where, variables)
    first_name, first = next(iter(variables.items()))
    dtype, shape = first.dtype, first.shape
    for name, array in variables.items():
        if array.dtype != dtype:
            raise ConversionError(
                message(where, name, f"differs in dtype from {first_name}", dtype, array.dtype)
                + "; variables are updated in place and cannot be converted"
            )
        if array.shape != shape:
            raise ValueError(
                message(where, name, f"differs in shape from {first_name}", shape, array.shape)
            )


def no_overlap(where: str, names: Sequence[str], arrays: Sequence[Any]) -> list[int]:
    """Contiguous arrays must not share memory; returns their ``addresses``.

    Raises:
        ValueError: two of them do.
    """
    addresses = [address_of(array) for array in arrays]
    end, owner = 0, ""
    for begin, n_bytes, name in sorted(
        zip(addresses, [array.nbytes for array in arrays], names, strict=True)
    ):
        if n_bytes and begin < end:
            raise ValueError(
                message(where, name, f"shares memory with {owner}", "separate arrays", "an overlap")
            )
        if begin + n_bytes > end:
            end, owner = begin + n_bytes, name
    return addresses


def gradient(
    where: str, name: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Any:
    """A contiguous gradient for a variable of ``dtype`` and ``shape``; copied if strided.

    Raises:
        TypeError: it is no floating array.
        ConversionError: its dtype is higher, so that the variable would have to be converted.
        ValueError: its shape differs.
    """
    array = floating(where, name, value, dtype)
    if array.shape != shape:
        raise ValueError(message(where, name, "has a wrong shape", shape, array.shape))
    return contiguous(array, where, name)


def floating(where: str, name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """A floating array, on the host or a device, of at most the precision of ``dtype``.

    Raises:
        TypeError: it is no floating array.
        ConversionError: its dtype is higher than ``dtype``.
    """
    array = float_array_anywhere(where, name, value)
    if not _holds(dtype, array.dtype):
        raise ConversionError(
            message(where, name, "has a higher dtype than the variable", dtype, array.dtype)
            + f"; the variable is updated in place and cannot be converted: {name}.astype({dtype})"
        )
    return array


def float_array_anywhere(where: str, name: str, value: Any) -> Any:
    """A floating array of the host, or a floating `DeviceArray`.

    Raises:
        TypeError: it is none.
    """
    array = adopt_anywhere(where, name, value)
    if array.dtype not in STORAGES:
        raise TypeError(message(where, name, "has a wrong dtype", FLOAT_NAMES, array.dtype))
    return array


def _holds(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether every number of ``other`` is one of ``dtype``; float16 and bfloat16 differ."""
    return dtype == other or dtype.itemsize > other.itemsize


def contiguous(array: Any, where: str = "", name: str = "") -> Any:
    """``array``, or a C-contiguous aligned copy of it (0-d stays 0-d).

    Raises:
        ValueError: it is on a device, and its framework has no way to make one.
    """
    if isinstance(array, DeviceArray):
        return array.contiguous(where, name)
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy(order="C")
