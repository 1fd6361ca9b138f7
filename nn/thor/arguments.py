"""Checks of the arguments of THOR.

A kind that does not fit is a `TypeError`, a value that does not fit a `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...ops.runtime import check
from ...ops.runtime.errors import message, reject
from ..base.arguments import positive_int
from ..base.parameter import Parameter
from ..base.rates import Schedule

NAME = "thor"
COMPATIBLE = "mindspore"
BLOCK_SIZE = 128
BAD_FACTORS = ("raise", "skip")


def compatibility(compat: Any, block_size: Any) -> bool:
    """Whether THOR does as MindSpore does, which has one block size."""
    if compat is not None and not (isinstance(compat, str) and compat == COMPATIBLE):
        reject(ValueError, NAME, "compat", "is unknown", f"None or {COMPATIBLE!r}", compat)
    if compat is not None and block_size != BLOCK_SIZE:
        reject(ValueError, NAME, "block_size", "is fixed by compat", BLOCK_SIZE, block_size)
    return compat is not None


def damping_of(where: str, name: str, value: Any) -> float | Parameter | Schedule:
    """A number above 0, one for each step, or a callable of the step."""
    if callable(value) and not isinstance(value, Parameter):
        if isinstance(value, type):
            reject(TypeError, where, name, "is a class", "an instance", value.__name__)
        return value  # type: ignore[no-any-return]
    expected = "a float, an array, an iterable of floats or a schedule"
    wrong = message(where, name, "has a wrong type", expected, type(value).__name__)
    if value is None or isinstance(value, bool | str | bytes | Mapping):
        raise TypeError(wrong)
    is_plain = isinstance(value, Iterable) and not hasattr(value, "__array__")
    try:
        array = np.array(list(value) if is_plain else value, np.float64)
    except (TypeError, ValueError):
        raise TypeError(wrong) from None
    if array.ndim > 1 or array.size == 0:
        expected = "a scalar or a non-empty list"
        reject(ValueError, where, name, "has a wrong shape", expected, array.shape)
    if not ((array > 0) & (array <= check.LARGEST)).all():
        reject(ValueError, where, name, "is out of range", "finite and above 0", value)
    return Parameter(array, name) if array.ndim else float(array)


def block_size_of(where: str, name: str, value: Any) -> int | None:
    """The size of the diagonal blocks; None for whole factors."""
    return None if value is None else positive_int(where, name, value)


def bad_factor_of(where: str, name: str, value: Any) -> str:
    """The treatment of a factor without an inverse."""
    if not (isinstance(value, str) and value in BAD_FACTORS):
        reject(ValueError, where, name, "is unknown", BAD_FACTORS, value)
    return value


def frequency_of(where: str, name: str, value: Any) -> int:
    """An int of at least 2, as published."""
    frequency = positive_int(where, name, value)
    check.in_range(where, name, frequency, frequency >= 2, "at least 2")
    return frequency
