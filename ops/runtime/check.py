"""The generic checks of operators: everything is checked before anything is written.

They raise a `TypeError` for a kind or dtype that does not fit (`ConversionError` if a variable
would have to be converted), a `ValueError` for a value or shape, an `IndexError` for an index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.storage import I32, STORAGES
from .arrays import addresses_of, adopt, adopt_anywhere, adopt_variable
from .device import DeviceArray, device_of
from .errors import ConversionError, message, reject

FLOATS = tuple(STORAGES)
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
FLOAT_NAMES = ", ".join(str(dtype) for dtype in FLOATS)
# Kinds that are numbers as they are. (A long double is none: its rounding would be a loss.)
_NUMBERS = {int, float, *(np.dtype(code).type for code in "bBhHiIlLqQefd")}
LARGEST = float(np.finfo(np.float32).max)
"""The largest float32, as a float, so that numbers are not rounded before they are compared."""


def flag(where: str, name: str, value: Any) -> bool:
    """Return ``value``, which must be a bool."""
    if not isinstance(value, bool):
        reject(TypeError, where, name, "has a wrong type", "a bool", type(value).__name__)
    return value


def scalar(where: str, name: str, value: Any) -> float:
    """Return a finite number from a Python or NumPy scalar or an array of shape ``()`` or ``(1,)``.

    -0.0 becomes 0.0: the two are equal as keys, and must have equal results.
    """
    if type(value) is not float:
        value = number(where, name, value)
    if not -LARGEST <= value <= LARGEST:
        if math.isfinite(value):
            reject(ValueError, where, name, "is too large", "a float32 number", value)
        reject(ValueError, where, name, "is not finite", "a finite number", value)
    checked: float = value or 0.0
    return checked


def float_attribute(where: str, name: str, value: Any) -> float:
    """Return a finite float; an int is refused, since the documented type is float."""
    if not isinstance(value, float | np.floating):
        reject(TypeError, where, name, "has a wrong type", "a float", type(value).__name__)
    return scalar(where, name, float(value))


def in_range(where: str, name: str, value: float, accepted: bool, expected: str) -> None:
    """Refuse a value that is not ``accepted``."""
    if not accepted:
        reject(ValueError, where, name, "is out of range", expected, value)


def scalar_at_least_0(where: str, name: str, value: Any) -> float:
    """Return a scalar (`scalar`) that must not be negative."""
    checked = scalar(where, name, value)
    in_range(where, name, checked, checked >= 0.0, "at least 0")
    return checked


def epsilon(where: str, name: str, value: float, used: float) -> None:
    """Refuse an epsilon that becomes 0 when it is rounded (``used``); an exact 0 is accepted."""
    if used == 0.0 and value != 0.0:
        reject(ValueError, where, name, "is 0 in float32", "at least 1e-45, or 0 itself", value)


def number(where: str, name: str, value: Any) -> float:
    """Return any number, NaN and infinities included, from the kinds that `scalar` takes."""
    if type(value) in _NUMBERS or (isinstance(value, int | float) and not isinstance(value, bool)):
        try:
            return float(value)
        except OverflowError:
            wrong, got = "is too large", "an int beyond all floats"
            raise ValueError(message(where, name, wrong, "a float32 number", got)) from None
    is_array = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    if isinstance(value, bool | str | bytes) or not is_array:
        reject(TypeError, where, name, "has a wrong type", "a number", type(value).__name__)
    array = adopt(where, name, value)
    if array.dtype not in FLOATS and array.dtype.kind not in "iu":
        reject(TypeError, where, name, "has a wrong dtype", "a real number", array.dtype)
    if array.shape not in ((), (1,)):
        reject(ValueError, where, name, "has a wrong shape", "a scalar, () or (1,)", array.shape)
    return float(array.reshape(()))


def variable(where: str, name: str, value: Any, *, may_count: bool = False) -> Any:
    """Return an array that can be updated in place: floating, writable, contiguous, aligned.

    The result is a NumPy array or a `DeviceArray`. With ``may_count`` int32 is accepted too.
    """
    array = adopt_variable(where, name, value)
    if not (may_count and array.dtype == I32.dtype):
        float_dtype(where, name, array)
    flags, no_copy = array.flags, "; it is updated in place and cannot be copied"
    if not flags.writeable:
        fix = "; it is updated in place: np.array(x) makes a copy that can be"
        reject(ValueError, where, name, "is read-only", "a writable array", "a read-only one", fix)
    if not flags.aligned:
        wrong, expected, got = "is not aligned", "aligned elements", "elements between addresses"
        reject(ValueError, where, name, wrong, expected, got, no_copy)
    if not flags.c_contiguous:
        wrong, got = "is not contiguous", f"strides {array.strides}"
        reject(ValueError, where, name, wrong, "a C-contiguous array", got, no_copy)
    return array


def same_layout(where: str, variables: dict[str, Any]) -> None:
    """Check that the variables of an operator have one dtype, one shape and one device."""
    device_of(where, variables)
    first_name, first = next(iter(variables.items()))
    dtype, shape = first.dtype, first.shape
    for name, array in variables.items():
        if array.dtype != dtype:
            wrong = f"differs in dtype from {first_name}"
            fix = "; variables are updated in place and cannot be converted"
            reject(ConversionError, where, name, wrong, dtype, array.dtype, fix)
        if array.shape != shape:
            wrong = f"differs in shape from {first_name}"
            reject(ValueError, where, name, wrong, shape, array.shape)


def no_overlap(where: str, names: Sequence[str], arrays: Sequence[Any]) -> list[int]:
    """Check that contiguous arrays share no memory; returns their addresses."""
    addresses = addresses_of(arrays)
    end, owner = 0, ""
    sizes = [array.nbytes for array in arrays]
    # In the order of addresses each array has to begin behind the end of all before it.
    for begin, n_bytes, name in sorted(zip(addresses, sizes, names, strict=True)):
        if n_bytes and begin < end:
            wrong = f"shares memory with {owner}"
            reject(ValueError, where, name, wrong, "separate arrays", "an overlap")
        if begin + n_bytes > end:
            end, owner = begin + n_bytes, name
    return addresses


def gradient(
    where: str, name: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Any:
    """Return a contiguous gradient for a variable of ``dtype`` and ``shape``; copied if strided."""
    # A gradient is only read, so it may be copied; a copied variable would not be updated.
    array = floating(where, name, value, dtype)
    if array.shape != shape:
        reject(ValueError, where, name, "has a wrong shape", shape, array.shape)
    return contiguous(array, where, name)


def floating(where: str, name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a floating array, on the host or a device, of at most the precision of ``dtype``."""
    array = float_array_anywhere(where, name, value)
    # The two 16-bit types do not contain each other.
    if array.dtype != dtype and array.dtype.itemsize >= dtype.itemsize:
        wrong = "has a higher dtype than the variable"
        fix = f"; the variable is updated in place and cannot be converted: {name}.astype({dtype})"
        reject(ConversionError, where, name, wrong, dtype, array.dtype, fix)
    return array


def float_array_anywhere(where: str, name: str, value: Any) -> Any:
    """Return a floating array on the host, or a floating `DeviceArray`."""
    array = adopt_anywhere(where, name, value)
    float_dtype(where, name, array)
    return array


def float_dtype(where: str, name: str, array: Any, expected: str = FLOAT_NAMES) -> None:
    """Check that the dtype of an array is a floating dtype of this package."""
    if array.dtype not in STORAGES:
        reject(TypeError, where, name, "has a wrong dtype", expected, array.dtype)


def contiguous(array: Any, where: str = "", name: str = "") -> Any:
    """Return ``array``, or a C-contiguous aligned copy of it (0-d stays 0-d)."""
    if isinstance(array, DeviceArray):
        return array.contiguous(where, name)
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy(order="C")


# Row-sparse gradients


def out_of_range_rule(where: str, value: Any) -> str:
    """Return the option for indices outside of ``[0, N)``: ``"raise"`` or ``"drop"``."""
    if not isinstance(value, str) or value not in ("raise", "drop"):
        reject(ValueError, where, "out_of_range", "is unknown", "'raise' or 'drop'", value)
    return value


def row_gradient(
    where: str, name: str, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...]
) -> None:
    """Check dtypes and shapes of a row-sparse gradient for a variable of ``shape``."""
    index_dtype(where, indices)
    if indices.ndim != 1:
        reject(ValueError, where, "indices", "has a wrong shape", "1 dimension", indices.shape)
    if values.ndim != len(shape) or values.shape[1:] != shape[1:]:
        wanted = (len(indices), *shape[1:])
        reject(ValueError, where, name, "has a wrong shape", wanted, values.shape)
    if len(values) != len(indices):
        expected = f"{len(indices)} rows as there are indices"
        reject(ValueError, where, name, "has a wrong length", expected, len(values))


def index_dtype(where: str, indices: Any) -> None:
    """Check that indices are int32 or int64."""
    if indices.dtype not in INDEX_DTYPES:
        reject(TypeError, where, "indices", "has a wrong dtype", "int32 or int64", indices.dtype)


def indices_in_range(where: str, indices: np.ndarray, n_rows: int) -> None:
    """Check that indices on the host are in ``[0, n_rows)``."""
    # As calls of C: the methods `min` and `max` are Python's.
    least, most = np.minimum.reduce, np.maximum.reduce
    if len(indices) and (least(indices) < 0 or most(indices) >= n_rows):
        position = int(np.argmax((indices < 0) | (indices >= n_rows)))
        raise index_error(where, position, int(indices[position]), n_rows)


def index_error(where: str, position: int, index: int, n_rows: int) -> IndexError:
    """The error for ``indices[position]``, which is ``index``."""
    expected = f"0 <= index < {n_rows}"
    return IndexError(message(where, f"indices[{position}]", "is out of range", expected, index))
