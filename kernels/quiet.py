"""NumPy's arithmetic on the host, out of reach of the caller's error state (`numpy.seterr`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_R = TypeVar("_R")


def quiet(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: NumPy neither raises, warns nor prints in ``function``.

    What underflows, overflows or is NaN is part of the result, and no reason to stop half way.
    It costs half a microsecond: what every step does rounds without NumPy (`rules.formula`).
    """

    # Not numpy.errstate as a decorator: before NumPy 2 calls inside of each other share its memory.
    @wraps(function)
    def quiet_function(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return quiet_function
