"""Checks of the arguments of THOR."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...ops.runtime import check
from ...ops.runtime.errors import message
from ..base.arguments import positive_int
from ..base.parameter import Parameter
from ..schedules.base import Schedule

NAME = "thor"
COMPATIBLE = "mindspore"
BLOCK_SIZE = 128
BAD_FACTORS = ("raise", "skip")


def compatibility(compat: Any, block_size: Any) -> bool:
    """Whether THOR does as MindSpore does.

    Raises:
        ValueError: an unknown name, or a block size that MindSpore does not have.
    """
    if compat is not None and not (isinstance(compat, str) and compat == COMPATIBLE):
        raise ValueError(message(NAME, "compat", "is unknown", f"None or {COMPATIBLE!r}", compat))
    if compat is not None and block_size != BLOCK_SIZE:
        raise ValueError(message(NAME, "block_size", "is fixed by compat", BLOCK_SIZE, block_size))
    return compat is not None


def check_filter(decay_filter: Any) -> None:
    """A callable.

    Raises:
        TypeError: another kind.
    """
    if not callable(decay_filter):
        got = type(decay_filter).__name__
        raise TypeError(message(NAME, "decay_filter", "has a wrong type", "a callable", got))


def check_split(split_indices: Any) -> None:
    """None: without other processes nothing is reduced.

    Raises:
        ValueError: anything else.
    """
    if split_indices is not None:
        raise ValueError(
            message(NAME, "split_indices", "needs a communicator", "None", split_indices)
            + "; there is one process, and nothing to reduce over"
        )


def damping_of(value: Any) -> float | Parameter | Schedule:
    """A number above 0, one for each step, or a callable of the step.

    Raises:
        TypeError: another kind.
        ValueError: a value is not above 0 or not finite, or there is none.
    """
    if callable(value) and not isinstance(value, Parameter):
        if isinstance(value, type):
            raise TypeError(message(NAME, "damping", "is a class", "an instance", value.__name__))
        return value  # type: ignore[no-any-return]
    expected = "a float, an array, an iterable of floats or a schedule"
    wrong = message(NAME, "damping", "has a wrong type", expected, type(value).__name__)
    if value is None or isinstance(value, bool | str | bytes | Mapping):
        raise TypeError(wrong)
    is_plain = isinstance(value, Iterable) and not hasattr(value, "__array__")
    try:
        array = np.array(list(value) if is_plain else value, np.float64)
    except (TypeError, ValueError):
        raise TypeError(wrong) from None
    if array.ndim > 1 or array.size == 0:
        expected = "a scalar or a non-empty list"
        raise ValueError(message(NAME, "damping", "has a wrong shape", expected, array.shape))
    if not ((array > 0) & (array <= check.LARGEST)).all():
        raise ValueError(message(NAME, "damping", "is out of range", "finite and above 0", value))
    return Parameter(array, "damping") if array.ndim else float(array)


def block_size_of(value: Any) -> int | None:
    """The size of the diagonal blocks; None for whole factors.

    Raises:
        TypeError: no int.
        ValueError: it is less than 1.
    """
    return None if value is None else positive_int(NAME, "block_size", value)


def bad_factor_of(value: Any) -> str:
    """What happens to a factor without an inverse.

    Raises:
        ValueError: an unknown word.
    """
    if not (isinstance(value, str) and value in BAD_FACTORS):
        raise ValueError(message(NAME, "bad_factor", "is unknown", BAD_FACTORS, value))
    return value


def frequency_of(value: Any) -> int:
    """An int of at least 2, as published.

    Raises:
        TypeError: no int.
        ValueError: it is less than 2.
    """
    frequency = positive_int(NAME, "frequency", value)
    check.in_range(NAME, "frequency", frequency, frequency >= 2, "at least 2")
    return frequency
