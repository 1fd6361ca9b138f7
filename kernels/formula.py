"""Formulas: the scalars of a rule from the learning rate, the decay and the number of updates."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from typing import Any, NamedTuple

import numpy as np

# Powers of the last updates and their rounded bases, by type, beta and update: the next one is one
# multiplication.
_powers: dict[tuple[Any, float, int], tuple[float, float]] = {}
_KEPT_POWERS = 1024


Numbers = tuple[float, ...]


def to_float32(x: float) -> float:
    """``x`` rounded to float32, infinite beyond it."""
    return c_float(x).value


# Python's floats, not scalars of NumPy: those ask for the caller's error state, in which a power
# that underflows may be an error. Sums and products of two float32 are rounded right by way of
# float64.
ROUNDING: dict[Any, Callable[[float], float]] = {np.float32: to_float32, np.float64: float}
"""By type of the arithmetic, what rounds a number to it on the host."""


class Formula(NamedTuple):
    """The scalars of a rule as a function.

    ``function(real, lr, decay, step, constants, powers)`` returns the scalars. ``real`` is one of
    `ROUNDING`: it rounds a number to the type of the arithmetic. A result that is a sum may be left
    to be rounded by whoever stores it.
    """

    function: Callable[..., Any]
    constants: Numbers = ()  # what stays the same from step to step
    bases: Numbers = ()  # numbers whose running powers (`running_power`) the function takes

    def at(self, real: Any, lr: float, decay: float, step: int) -> Any:
        """The scalars at update ``step`` = 1, 2, ... in NumPy's type ``real`` of the arithmetic."""
        powers = self.bases and tuple([running_power(real, base, step) for base in self.bases])
        return self.function(ROUNDING[real], lr, decay, step, self.constants, powers)


def running_power(real: Any, beta: float, step: int) -> float:
    """``beta**step`` as MindSpore keeps it: a product rounded after every update.

    The rounding shows: at the third update of Adam ``1 - beta2**t`` is about 0.003, and the error
    of a float32 product in it is a hundred times that of the power.
    """
    known = _powers.get((real, beta, step - 1))
    rounded = ROUNDING[real]
    if known is None:
        base = rounded(beta)
        power = float(_product(real(base), step))
    else:
        power, base = known
        power = rounded(power * base)
    # All at once: what is gone is computed anew, multiplication by multiplication, to the same
    # bits.
    if len(_powers) >= _KEPT_POWERS:
        _powers.clear()
    _powers[real, beta, step] = power, base
    return power


def _product(beta: Any, count: int) -> Any:
    """``1 * beta * beta * ...``, rounded after every multiplication."""
    power, chunk = beta.dtype.type(1), 65_536
    with np.errstate(under="ignore"):
        while count > 0 and power * beta != power:  # in the end it is 0 or moves no more
            factors = np.full(min(count, chunk) + 1, beta)
            factors[0] = power
            power = np.multiply.accumulate(factors)[-1]
            count -= chunk
    return power
