"""Float64 numbers that carry a bound of the rounding errors of narrower arithmetic.

With them a reference says itself how near a result must be: what cancels keeps the errors of the
terms that it is a sum of. Running error analysis, as in Higham, "Accuracy and Stability of
Numerical Algorithms" (2002), section 3.3, to first order.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

# How much a result moves with each operand, from the operands and the result.
_SLOPES: dict[Any, Callable[..., tuple[Any, ...]]] = {
    np.add: lambda *_: (1.0, 1.0), np.subtract: lambda *_: (1.0, 1.0),
    np.multiply: lambda a, b, _: (b, a), np.divide: lambda _, b, r: (1.0 / b, r / b),
    np.power: lambda a, b, _: (b * np.power(a, b - 1.0), 0.0), np.square: lambda a, _: (2.0 * a,),
    np.sqrt: lambda _, r: (0.5 / r,), np.negative: lambda *_: (1.0,),
    np.absolute: lambda *_: (1.0,), np.sign: lambda *_: (0.0,),
    np.maximum: lambda a, b, _: (a >= b, a < b), np.minimum: lambda a, b, _: (a <= b, a > b),
}  # fmt: skip
_quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore")  # what is not chosen
_EXACT = {np.negative, np.absolute, np.sign, np.maximum, np.minimum}


class Rounded(NDArrayOperatorsMixin):
    """Numbers with errors, whose unit is half of one in the last place of 1. Sums over whole arrays
    give plain numbers: they are taken in float64. Averages are taken in it too, and keep the errors
    of what they are of."""

    def __init__(self, value: Any, error: Any = 0.0) -> None:
        self.value = np.array(value, np.float64)
        self.error = np.broadcast_to(error, self.value.shape)

    @_quiet
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        assert method == "__call__"
        values = [_value(x) for x in inputs]
        result = ufunc(*values)
        if ufunc not in _SLOPES:
            assert np.asarray(result).dtype == bool, f"no bound for {ufunc}"
            return result
        error = 0.0 if ufunc in _EXACT else np.abs(result)
        for x, slope in zip(inputs, _SLOPES[ufunc](*values, result), strict=True):
            if isinstance(x, Rounded):  # what is exact adds none, however steep, nor what is flat
                none = (x.error == 0.0) | (np.asarray(slope) == 0.0)
                error = error + np.where(none, 0.0, np.abs(slope) * x.error)
        return Rounded(result, error)

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        values = function(*map(_value, args), **kwargs)
        if function in (np.average, np.reshape, np.atleast_1d):
            return Rounded(values, function(args[0].error, *args[1:], **kwargs))
        if function is not np.where:
            return values
        chosen, *branches = args
        return Rounded(values, np.where(chosen, *(getattr(x, "error", 0.0) for x in branches)))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Rounded) else x


def assert_rounded(found: np.ndarray, exact, real, factor: float, label: str = "") -> float:
    """Every element is within ``factor`` times the bound, and one rounding to its own type.

    Returns:
        The share of the bound that was needed.
    """
    __tracebackhide__ = True
    info = ml_dtypes.finfo(found.dtype)
    unit = float(np.finfo(real).eps) / 2
    stored = float(info.eps) / 2 * np.abs(exact.value) if found.dtype != real else 0.0
    least = float(info.smallest_subnormal)
    error = np.maximum(np.abs(found.astype(np.float64) - exact.value) - stored - least, 0.0)
    share = error / np.maximum(unit * exact.error, least)
    worst = np.unravel_index(np.argmax(share), share.shape)
    assert share[worst] <= factor, (
        f"{label}{tuple(map(int, worst))}: {found[worst]!r} for {exact.value[worst]!r}, "
        f"{share[worst]:.3g} times the bound"
    )
    return float(share[worst])
