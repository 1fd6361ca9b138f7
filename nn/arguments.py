"""Checks of constructor arguments that several optimizers share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ops.errors import message


def open_unit(where: str, name: str, value: Any) -> float:
    """A float strictly between 0 and 1.

    Raises:
        TypeError: it is no float (an int is none).
        ValueError: it is out of range.
    """
    if not isinstance(value, float | np.floating):
        raise TypeError(message(where, name, "has a wrong type", "a float", type(value).__name__))
    if not 0.0 < value < 1.0:
        raise ValueError(message(where, name, "is out of range", "between 0 and 1", value))
    return float(value)


def positive_float(where: str, name: str, value: Any) -> float:
    """A finite float above 0.

    Raises:
        TypeError: it is no float (an int is none).
        ValueError: it is out of range.
    """
    if not isinstance(value, float | np.floating):
        raise TypeError(message(where, name, "has a wrong type", "a float", type(value).__name__))
    if not 0.0 < value < np.inf:
        raise ValueError(message(where, name, "is out of range", "positive and finite", value))
    return float(value)
