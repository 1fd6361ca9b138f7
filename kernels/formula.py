"""Formulas: the scalars of a rule from the learning rate, the decay and the number of updates."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import c_float
from operator import mul
from typing import Any, NamedTuple

import numpy as np

Numbers = tuple[float, ...]

# Powers of the last updates and their rounded bases, by type, bases and update: the next ones are a
# multiplication each.
_powers: dict[tuple[Any, Numbers, int], tuple[Numbers, Numbers]] = {}
_KEPT_POWERS = 1024


def to_float32(x: float) -> float:
    """``x`` rounded to float32, infinite beyond it."""
    return c_float(x).value


# Python's floats, not scalars of NumPy: those ask for the caller's error state, in which a power
# that underflows may be an error. Sums and products of two float32 are rounded right by way of
# float64.
ROUNDING: dict[Any, Callable[[float], float]] = {np.float32: to_float32, np.float64: float}
"""By type of the arithmetic, what rounds a number to it on the host."""
# An ``array`` rounds all of its numbers in one call, as C does, and warns of no overflow.
TYPECODES: dict[Any, str] = {np.float32: "f", np.float64: "d"}
"""By type of the arithmetic, the typecode of an ``array`` that rounds numbers to it."""


class Formula(NamedTuple):
    """The scalars of a rule as a function.

    ``function(real, lr, decay, step, constants, powers)`` returns the scalars. ``real`` is one of
    `ROUNDING`: it rounds a number to the type of the arithmetic. A result that is a sum may be left
    to be rounded by whoever stores it.
    """

    function: Callable[..., Any]
    constants: Numbers = ()  # what stays the same from step to step
    bases: Numbers = ()  # numbers whose running powers (`running_powers`) the function takes

    def at(self, real: Any, lr: float, decay: float, step: int) -> Any:
        """The scalars at update ``step`` = 1, 2, ... in NumPy's type ``real`` of the arithmetic."""
        powers = self.bases and running_powers(real, self.bases, step)
        return self.function(ROUNDING[real], lr, decay, step, self.constants, powers)


def running_powers(real: Any, bases: Numbers, step: int) -> Numbers:
    """``base**step`` of each base as MindSpore keeps it: a product rounded after every update.

    The rounding shows: at the third update of Adam ``1 - beta2**t`` is about 0.003, and the error
    of a float32 product in it is a hundred times that of the power.
    """
    last = _powers.get((real, bases, step - 1))
    if last is None:
        rounded = tuple(map(ROUNDING[real], bases))
        powers = tuple([float(_product(real(base), step)) for base in rounded])
    else:
        # In the order of all updates that were: the rounding of each shows in the next.
        powers, rounded = last
        powers = tuple(array(TYPECODES[real], map(mul, powers, rounded)))
    # All at once: what is gone is computed anew, multiplication by multiplication, to the same
    # bits.
    if len(_powers) >= _KEPT_POWERS:
        _powers.clear()
    _powers[real, bases, step] = powers, rounded
    return powers


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
