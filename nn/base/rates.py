"""Learning rates and weight decays: fixed, listed by step, or computed by a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from ...kernels.storage import STORAGES
from ...ops.runtime import arrays, check
from ...ops.runtime.check import LARGEST
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import message, reject
from .arguments import check_kind
from .numbers import item, on_device
from .parameter import Parameter

Schedule = Callable[[int], Any]
Rate = Parameter | Schedule
"""A fixed or listed value (a `Parameter` that may be assigned to) or a schedule."""


def learning_rate(where: str, name: str, value: Any) -> Rate:
    """The learning rate of a user, checked: a schedule, or a parameter of that ``name``.

    `Optimizer` says which values are accepted.
    """
    if callable(value) and not isinstance(value, Parameter):
        return _schedule(where, "learning_rate", value)
    there = on_device(where, "learning_rate", value)
    if there is not None:
        return Parameter(there, name)
    array = _numbers(where, value)
    if array.ndim > 1 or array.size == 0:
        expected = "a scalar or a non-empty list"
        reject(ValueError, where, "learning_rate", "has a wrong shape", expected, array.shape)
    is_usable = bool(((array >= 0) & (array <= LARGEST)).all())
    check.in_range(where, "learning_rate", value, is_usable, "finite and at least 0")
    return Parameter(array, name)


def _numbers(where: str, value: Any) -> np.ndarray:
    if isinstance(value, bool | int | float | np.floating):
        return np.array(_float(value))
    expected = "a float, an int, an array, an iterable of floats or a schedule"
    wrong = partial(message, where, "learning_rate", "has a wrong type", expected)
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = arrays.adopt(where, "learning_rate", value)
        if array.dtype.kind not in "fiu" and array.dtype not in STORAGES:
            raise TypeError(wrong(array.dtype))
        return np.array(array, np.float64)
    is_other = isinstance(value, str | bytes | np.generic | Mapping | Set)
    if is_other or not isinstance(value, Iterable):
        raise TypeError(wrong(type(value).__name__))
    try:
        return np.array([_float(x) for x in value])
    except (TypeError, ValueError):
        raise TypeError(wrong(type(value).__name__)) from None


def _float(value: Any) -> float:
    """The float of a number; an int beyond all floats is infinite, hence out of range later."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def weight_decay(where: str, value: Any) -> float | Schedule:
    """The weight decay of a user, checked: a float or int >= 0, or a callable of the step."""
    if callable(value):
        return _schedule(where, "weight_decay", value)
    kinds = bool | int | float | np.floating
    check_kind(where, "weight_decay", value, kinds, "a float, an int or a schedule")
    decay = _float(value)
    is_usable = 0 <= decay <= LARGEST
    check.in_range(where, "weight_decay", value, is_usable, "finite and at least 0")
    return decay


def _schedule(where: str, name: str, value: Any) -> Schedule:
    if isinstance(value, type):
        argument = f"{name} {value.__name__}"
        reject(TypeError, where, argument, "is a class", "an instance", "the class")
    return value  # type: ignore[no-any-return]


def value_at(where: str, name: str, rate: Rate | float, step: int) -> float:
    """The value for ``step`` = 0, 1, 2, ...; a list without a value for it raises RuntimeError."""
    if isinstance(rate, float):
        return rate
    if not isinstance(rate, Parameter):
        return _scheduled(where, name, rate(step))
    array = rate.array
    if isinstance(array, DeviceArray):
        return _finite(where, name, item(array))
    if array.ndim == 0:
        return _finite(where, name, float(array))
    if step >= len(array):
        wrong, fix = f"has no value for step {step}", "; give a longer list or a schedule"
        reject(RuntimeError, where, name, wrong, f"{step + 1} values", len(array), fix)
    return _finite(where, name, float(array[step]))


class PerOwnerRates:
    """The learning rates, or the weight decays, of several owners, one each.

    ``where`` and ``name`` are the names of the optimizer and of the value in errors.
    """

    def __init__(self, where: str, name: str, rates: Sequence[Rate | float]) -> None:
        self._where = where
        self._name = name
        self._rates = list({id(rate): rate for rate in rates}.values())
        place = {id(rate): k for k, rate in enumerate(self._rates)}
        self._places = [place[id(rate)] for rate in rates]
        self._all_differ = len(self._rates) == len(rates)

    def at(self, step: int) -> list[float]:
        """The value of each owner at ``step``; a schedule that several share is asked once."""
        values = [value_at(self._where, self._name, rate, step) for rate in self._rates]
        return values if self._all_differ else [values[k] for k in self._places]


def _scheduled(where: str, name: str, value: Any) -> float:
    try:
        if value is None or isinstance(value, str):
            raise TypeError
        number = float(np.asarray(value, np.float64).reshape(()))
    except (TypeError, ValueError):
        raise TypeError(
            message(where, name, "has a schedule that returned no number", "a float", repr(value))
        ) from None
    return _finite(where, name, number)


def _finite(where: str, name: str, value: float) -> float:
    if not 0 <= value <= LARGEST:
        if math.isfinite(value):
            expected = "at least 0 and a float32 number"
            reject(ValueError, where, name, "is out of range", expected, value)
        reject(ValueError, where, name, "is not finite", "a finite number", value)
    return value
