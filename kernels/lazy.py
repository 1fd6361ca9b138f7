"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class lazy(Generic[_T]):  # noqa: N801  (a decorator)
    """Decorator: ``functools.cached_property`` as it is since Python 3.12, without a lock.

    That lock is shared by all objects of a class. A child that was forked while another thread
    held it would wait for it for ever. Two threads may compute the same attribute.
    """

    def __init__(self, function: Callable[[Any], _T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _T:
        if instance is None:
            return self  # type: ignore[return-value]
        found: _T = vars(instance).setdefault(self._name, self._function(instance))
        return found
