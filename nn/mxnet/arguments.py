"""Arguments of MXNet's optimizers: their checks, their names, and the lists of a call.

A kind that does not fit is a `TypeError`, a value out of range a `ValueError`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.formula import to_float32
from ...ops.runtime import check
from ...ops.runtime.errors import RejectedValueError, message, reject
from ..base.arguments import check_kind, count


def decay_rate(where: str, name: str, value: Any) -> float:
    """A number in [0, 1), also after rounding to float32."""
    beta = check.scalar(where, name, value)
    in_range = beta >= 0.0 and np.float32(beta) < 1.0
    check.in_range(where, name, beta, bool(in_range), "at least 0 and below 1 in float32")
    return beta


def kept_epsilon(where: str, name: str, value: Any) -> float:
    """A number of at least 0, and not one that is 0 only in float32, in which kernels take it."""
    checked = check.scalar_at_least_0(where, name, value)
    check.epsilon(where, name, checked, to_float32(checked))
    return checked


def rescale_factor(where: str, name: str, value: Any) -> float:
    """Any float32 number; NaN and infinities too, which stand for a step to be skipped."""
    factor = check.number(where, name, value)
    return check.scalar(where, name, factor) if math.isfinite(factor) else factor


def clip_bound(where: str, name: str, value: Any) -> float | None:
    """A number or None; 0 and below mean None, as in MXNet."""
    return None if value is None else check.scalar(where, name, value)


def aggregate_number(where: str, name: str, value: Any) -> float:
    """An int of at least 0, or infinity."""
    is_infinite = isinstance(value, float) and value == np.inf
    return np.inf if is_infinite else count(where, name, value)


def scheduler(where: str, name: str, value: Any) -> Any:
    """A scheduler, which computes a learning rate from the number of updates, or None."""
    if value is not None and (isinstance(value, type) or not callable(value)):
        expected = "an LRScheduler or a callable"
        reject(TypeError, where, name, "has a wrong type", expected, repr(value))
    return value


def multipliers(where: str, name: str, value: Any) -> dict[Any, float]:
    """A dict from indices or names to numbers of at least 0."""
    check_kind(where, name, value, Mapping, "a dict of numbers")
    return {k: check.scalar_at_least_0(where, f"{name}[{k!r}]", x) for k, x in value.items()}


def parameters(where: str, name: str, value: Any) -> dict[Any, Any]:
    """A copy of a dict from indices to objects with ``lr_mult`` and ``wd_mult``; None: empty."""
    check_kind(where, name, value, (Mapping, type(None)), "a dict of parameters")
    parameters = dict(value or {})
    for index, parameter in parameters.items():
        if not (hasattr(parameter, "lr_mult") and hasattr(parameter, "wd_mult")):
            expected, got = "an object with lr_mult and wd_mult", type(parameter).__name__
            reject(TypeError, where, f"{name}[{index!r}]", "has a wrong type", expected, got)
    return parameters


def names(where: str, name: str, value: Any) -> dict[Any, str]:
    """A copy of a dict from indices to names; None is an empty one."""
    table = {} if value is None else value
    if not isinstance(table, Mapping) or not all(isinstance(n, str) for n in table.values()):
        reject(TypeError, where, name, "has a wrong type", "a dict of names", repr(value))
    return dict(table)


LISTS = (list, tuple)
"""The types in which a call gives several indices, weights, gradients and states."""
Values = Sequence[Any]
Lists = tuple[Values, Values, Values, Values]


def as_lists(where: str, index: Any, weight: Any, grad: Any, state: Any) -> Lists:
    """Lists of equal length, of one element each where there is one index; no index repeats."""
    if is_one := not isinstance(index, LISTS):
        index, weight, grad, state = [index], [weight], [grad], [state]
    try:
        n_different = len(set(index))
    except TypeError:
        wrong = "has a wrong type"
        raise TypeError(message(where, "index", wrong, "ints and strs", index)) from None
    n = len(index)
    lists = () if is_one else (("weights", weight), ("grads", grad), ("states", state))
    for name, values in lists:
        if not isinstance(values, LISTS):
            check_kind(where, name, values, LISTS, "a list")
        if len(values) != n:
            wrong, expected = "has a wrong length", f"{n}, one for each index"
            reject(RejectedValueError, where, name, wrong, expected, len(values))
    if n_different != n:
        reject(ValueError, where, "indices", "repeat", "different ones", list(index))
    return index, weight, grad, state


def arguments_of(klass: type) -> list[str]:
    """Names of all arguments of a class, those that it passes on included."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names: dict[str, None] = {}
    for each in klass.__mro__:
        if each is object or "__init__" not in vars(each):
            continue
        parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
        names.update({p.name: None for p in parameters if p.kind in named})
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break  # it passes on what it decides itself
    names.pop("self", None)
    return list(names)
