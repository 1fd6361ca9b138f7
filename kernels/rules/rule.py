"""What an update rule is: a scalar function, the names of its scalars, its states."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from numba.extending import register_jitable

# FMA contraction and IEEE division without Numba's zero check: both are needed for packed
# code, and neither assumes away NaN or infinity.
RULE_FLAGS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}

rule_helper = register_jitable(**RULE_FLAGS)
"""Decorator of a scalar function that several rules call."""


def _constant(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


class _Constant:
    """What is compared by identity travels as the name of a constant of its module."""

    def __reduce__(self) -> Any:
        module = vars(self)[next(iter(vars(self)))].__module__
        for name, value in vars(import_module(module)).items():
            if value is self:
                return _constant, (module, name)
        raise TypeError(f"{self} cannot be pickled: it is no constant of the module {module}")


@dataclass(frozen=True, eq=False)
class Rule(_Constant):
    """An update rule; compared by identity.

    Attributes:
        update: ``update(w, g, *states, hp) -> (w, *states)``, scalars in and scalars
            out, compilable by Numba, without literals (a literal turns float32
            arithmetic into float64; constants come in through ``hp``).
        states: the role of each state, in argument order (at most three).
        hp: the fields of ``hp`` that ``update`` reads.
    """

    update: Callable[..., Any]
    states: tuple[str, ...]
    hp: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Part(_Constant):
    """One part of a prologue: ``apply(g, w, hp) -> g`` and the ``hp`` fields it reads."""

    apply: Callable[..., Any]
    hp: tuple[str, ...]


Prologue = tuple[Part, ...]


@cache
def hp_type(rule: Rule, prologue: Prologue) -> type:
    """The named tuple of scalars that ``rule`` behind ``prologue`` reads, in memory order."""
    fields = rule.hp + tuple(name for part in prologue for name in part.hp)
    return namedtuple("hp", fields)
