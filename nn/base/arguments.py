"""Checks of arguments that several optimizers and schedules share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime import check
from ...ops.runtime.errors import message


@quiet
def open_unit(where: str, name: str, value: Any, real: Any) -> float:
    """A float strictly between 0 and 1, in the arithmetic type ``real`` too.

    Raises:
        TypeError: it is no float (an int is none).
        ValueError: it is out of range.
    """
    if not isinstance(value, float | np.floating):
        raise TypeError(message(where, name, "has a wrong type", "a float", type(value).__name__))
    if not 0.0 < real(value) < 1.0:
        raise ValueError(
            message(where, name, "is out of range", f"between 0 and 1 in {real.__name__}", value)
        )
    return float(value)


@quiet
def positive_float(where: str, name: str, value: Any, real: Any) -> float:
    """A finite float above 0, in the arithmetic type ``real`` too.

    Raises:
        TypeError: it is no float (an int is none).
        ValueError: it is out of range.
    """
    if not isinstance(value, float | np.floating):
        raise TypeError(message(where, name, "has a wrong type", "a float", type(value).__name__))
    if not 0.0 < real(value) < np.inf:
        raise ValueError(
            message(
                where, name, "is out of range", f"positive and finite in {real.__name__}", value
            )
        )
    return float(value)


def arithmetic_type(params: Any) -> Any:
    """float64 when all ``params`` (arrays or parameters, or lists of them) are, else float32.

    It decides which hyper-parameters are in range, before the parameters themselves are
    checked.
    """
    entries = params if isinstance(params, list | tuple) else []
    dtypes = {getattr(entry, "dtype", None) for entry in entries}
    return np.float64 if dtypes == {np.dtype(np.float64)} else np.float32


def non_negative_float(where: str, name: str, value: Any) -> float:
    """A finite float of at least 0.

    Raises:
        TypeError: it is no float (an int is none).
        ValueError: it is negative or not finite.
    """
    number = check.float_attribute(where, name, value)
    if number < 0.0:
        raise ValueError(message(where, name, "is out of range", "at least 0", value))
    return number


def positive_int(where: str, name: str, value: Any) -> int:
    """An int, Python's or NumPy's, of at least 1.

    Raises:
        TypeError: it is no int (a bool and a float are none).
        ValueError: it is less than 1.
    """
    return _int_from(1, where, name, value)


def count(where: str, name: str, value: Any) -> int:
    """As `positive_int`, of at least 0.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.
    """
    return _int_from(0, where, name, value)


def _int_from(least: int, where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(message(where, name, "has a wrong type", "an int", type(value).__name__))
    if value < least:
        raise ValueError(message(where, name, "is out of range", f"at least {least}", value))
    return int(value)


def list_or_tuple(where: str, name: str, value: Any) -> tuple[Any, ...]:
    """The elements of a list or a tuple, out of reach of later changes to it.

    Raises:
        TypeError: another kind.
    """
    if not isinstance(value, list | tuple):
        got = type(value).__name__
        raise TypeError(message(where, name, "has a wrong type", "a list or a tuple", got))
    return tuple(value)


def step_numbers(where: str, step: Any) -> np.ndarray:
    """Steps as an array of non-negative integers, 0-d for a single one.

    Raises:
        TypeError: ``step`` is neither an int nor an array of ints.
        ValueError: a step is negative.
    """
    if isinstance(step, bool) or not (isinstance(step, int) or hasattr(step, "__array__")):
        raise TypeError(_wrong_step(where, type(step).__name__))
    steps = np.asarray(step)
    if steps.dtype.kind not in "iu":
        raise TypeError(_wrong_step(where, steps.dtype))
    if (steps < 0).any():
        raise ValueError(
            message(where, "global_step", "is out of range", "at least 0", steps.min())
        )
    return steps


def _wrong_step(where: str, got: object) -> str:
    return message(where, "global_step", "has a wrong type", "an int or an array of ints", got)
