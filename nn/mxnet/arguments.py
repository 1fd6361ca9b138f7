"""Arguments of MXNet's optimizers: attributes that are checked whenever they are assigned to, and
the lists of a call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.rules.formula import to_float32
from ...ops.runtime import check
from ...ops.runtime.errors import RejectedValueError, message
from ..base.arguments import count

Check = Callable[[str, str, Any], Any]
"""``check(where, name, value)`` returns the checked value, or raises."""


class Checked:
    """An attribute whose values go through ``accept`` when they are assigned."""

    def __init__(self, accept: Check) -> None:
        self._accept = accept

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{type(instance).__name__}: {self._name} is not set") from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = self._accept(type(instance).__name__, self._name, value)


def decay_rate(where: str, name: str, value: Any) -> float:
    """A number in [0, 1), also after rounding to float32.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    beta = check.scalar(where, name, value)
    in_range = beta >= 0.0 and np.float32(beta) < 1.0
    check.in_range(where, name, beta, bool(in_range), "at least 0 and below 1 in float32")
    return beta


def kept_epsilon(where: str, name: str, value: Any) -> float:
    """A number of at least 0, and not one that is 0 only in float32, in which kernels take it.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    checked = check.scalar_at_least_0(where, name, value)
    check.epsilon(where, name, checked, to_float32(checked))
    return checked


def rescale_factor(where: str, name: str, value: Any) -> float:
    """Any float32 number; NaN and infinities too, which stand for a step to be skipped.

    Raises:
        TypeError: it is no number.
        ValueError: it is finite, but beyond float32.
    """
    factor = check.number(where, name, value)
    return check.scalar(where, name, factor) if math.isfinite(factor) else factor


def clip_bound(where: str, name: str, value: Any) -> float | None:
    """A number or None; 0 and below mean None, as in MXNet.

    Raises:
        TypeError: it is neither.
        ValueError: it is not finite.
    """
    return None if value is None else check.scalar(where, name, value)


def aggregate_number(where: str, name: str, value: Any) -> float:
    """An int of at least 0, or infinity.

    Raises:
        TypeError: it is neither.
        ValueError: it is negative.
    """
    if isinstance(value, float) and value == np.inf:
        return value
    return count(where, name, value)


def scheduler(where: str, name: str, value: Any) -> Any:
    """None, or what computes a learning rate from the number of updates.

    Raises:
        TypeError: it is neither None nor callable, or it is a class.
    """
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise TypeError(
            message(where, name, "has a wrong type", "an LRScheduler or a callable", repr(value))
        )
    return value


def multipliers(where: str, name: str, value: Any) -> dict[Any, float]:
    """A dict from indices or names to numbers of at least 0.

    Raises:
        TypeError: it is no dict, or a value is no number.
        ValueError: a value is negative or not finite.
    """
    if not isinstance(value, Mapping):
        got = type(value).__name__
        raise TypeError(message(where, name, "has a wrong type", "a dict of numbers", got))
    return {k: check.scalar_at_least_0(where, f"{name}[{k!r}]", x) for k, x in value.items()}


def parameters(where: str, name: str, value: Any) -> dict[Any, Any]:
    """A copy of a dict from indices to objects with ``lr_mult`` and ``wd_mult``; None: empty.

    Raises:
        TypeError: it is no dict, or an object has not both.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        got = type(value).__name__
        raise TypeError(message(where, name, "has a wrong type", "a dict of parameters", got))
    for index, parameter in value.items():
        if not (hasattr(parameter, "lr_mult") and hasattr(parameter, "wd_mult")):
            expected = "an object with lr_mult and wd_mult"
            got = type(parameter).__name__
            raise TypeError(message(where, f"{name}[{index!r}]", "has a wrong type", expected, got))
    return dict(value)


def names(where: str, name: str, value: Any) -> dict[Any, str]:
    """A copy of a dict from indices to names; None is an empty one.

    Raises:
        TypeError: it is no dict, or a name is no str.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(n, str) for n in value.values()):
        raise TypeError(message(where, name, "has a wrong type", "a dict of names", repr(value)))
    return dict(value)


def is_list(index: Any) -> bool:
    """Whether there are several indices."""
    return isinstance(index, list | tuple)


def as_lists(
    where: str, index: Any, weight: Any, grad: Any, state: Any
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Lists of equal length, of one element each where there is one index.

    Raises:
        TypeError: there are several indices, but no list of something else.
        ValueError: the lengths differ, or an index repeats.
    """
    if not is_list(index):
        index, weight, grad, state = [index], [weight], [grad], [state]
    try:
        n_different = len(set(index))
    except TypeError:
        raise TypeError(
            message(where, "index", "has a wrong type", "ints and strs", index)
        ) from None
    for name, values in (("weights", weight), ("grads", grad), ("states", state)):
        if not is_list(values):
            got = type(values).__name__
            raise TypeError(message(where, name, "has a wrong type", "a list", got))
        if len(values) != len(index):
            expected = f"{len(index)}, one for each index"
            raise RejectedValueError(
                message(where, name, "has a wrong length", expected, len(values))
            )
    if n_different != len(index):
        raise ValueError(message(where, "indices", "repeat", "different ones", list(index)))
    return index, weight, grad, state


def arguments_of(klass: type) -> list[str]:
    """Names of all arguments of a class, those that it passes on included."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found: dict[str, None] = {}
    for each in klass.__mro__:
        if each is object or "__init__" not in vars(each):
            continue
        parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
        found.update({p.name: None for p in parameters if p.kind in named})
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break  # it passes on what it decides itself
    found.pop("self", None)
    return list(found)
