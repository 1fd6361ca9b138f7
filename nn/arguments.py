"""Checks of constructor arguments that several optimizers share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ops.errors import message


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
