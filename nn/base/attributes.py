"""Attributes of optimizers that are checked when they are assigned to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.runtime.errors import reject

Accept = Callable[[str, str, Any], Any]


class Checked:
    """An attribute whose values go through ``accept(where, name, value)`` when assigned."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self._name]
        except KeyError:
            raise AttributeError(f"{instance._name}: {self._name} is not set") from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = self._accept(instance._name, self._name, value)


class Fixed(Checked):
    """A `Checked` attribute from which more was made than a step makes anew, such as the rule.

    Where ``is_fixed(optimizer)``, one that has a value keeps it.
    """

    def __init__(self, accept: Accept, is_fixed: Callable[[Any], bool] = lambda _: True) -> None:
        super().__init__(accept)
        self._is_fixed = is_fixed

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in vars(instance) and self._is_fixed(instance):
            wrong, expected = "is fixed at construction", "an optimizer that is made with it"
            reject(AttributeError, instance._name, self._name, wrong, expected, value)
        super().__set__(instance, value)
