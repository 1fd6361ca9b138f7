"""What an update rule is: a scalar function, the names of its scalars, its states."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numba.extending import register_jitable

from ..inner import NO_WRAPPERS

# FMA contraction and IEEE division without Numba's zero check: both are needed for packed
# code, and neither assumes away NaN or infinity.
RULE_FLAGS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}

# What comes before a rule is rounded by itself, whatever the rule does with it next. (Said in
# full: a function without "fastmath" takes that of its caller.)
PROLOGUE_FLAGS: dict[str, Any] = {"error_model": "numpy", "fastmath": False}

rule_helper = register_jitable(**RULE_FLAGS, **NO_WRAPPERS)
"""Decorator of a scalar function that several rules call."""


@register_jitable(**PROLOGUE_FLAGS, **NO_WRAPPERS)
def product(x: Any, y: Any) -> Any:
    """``x * y``, rounded before it is added to anything.

    In a sum of two products either may be the one that is rounded first when the other is fused
    with the addition, and compilations differ in which: one of them has to be this.
    """
    return x * y


@rule_helper
def sign(x: Any, hp: Any) -> Any:
    """1, 0 or -1, where ``hp`` has ``one`` and ``zero``; that of a NaN is it itself."""
    return hp.one if x > hp.zero else (-hp.one if x < hp.zero else x)


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
        states: the role of each state, in argument order.
        hp: the fields of ``hp`` that ``update`` and ``measure`` read.
        measure: makes it a two-stage rule: ``measure(w, g, *states, hp)`` returns a tuple of
            values, whose squares are summed over the tensor before anything is updated. What
            follows from the sums comes to ``update`` through ``hp``.
        n_measured: how many values.
        factor: ``factor(*sums) -> float64``: what follows from the sums, a scalar function too:
            a factor of one field of ``hp``. None: it takes more than the sums of the tensor.
        factor_of: that field.
        factored: ``factored(w, g, *others, row, column, hp) -> (w, *others)``: the update of a
            matrix whose last state is kept as a factor of each row and one of each column.
        layerwise: whether LARS and THOR are published around it, with a factor for each tensor.
        decays: whether it applies the weight decay itself; else that is added to the gradient.
        n_read: how many of the last states are only read: ``update`` does not return them.
    """

    update: Callable[..., Any]
    states: tuple[str, ...]
    hp: tuple[str, ...]
    measure: Callable[..., Any] | None = None
    n_measured: int = 0
    factor: Callable[..., Any] | None = None
    factor_of: str = ""
    factored: Callable[..., Any] | None = None
    layerwise: bool = False
    decays: bool = False
    n_read: int = 0


def factors(rule: Rule, squares: np.ndarray) -> np.ndarray:
    """``[T]`` factors of ``rule.factor_of``, from the ``[T, n_measured]`` sums of squares."""
    assert rule.factor is not None
    return np.array([rule.factor(*of_tensor) for of_tensor in squares.tolist()])


@dataclass(frozen=True, eq=False)
class Part(_Constant):
    """One part of a prologue; compared by identity."""

    apply: Callable[..., Any]  # apply(g, w, hp) -> g
    hp: tuple[str, ...]  # the fields that it reads
    # scalars(decay, loss_scale): these fields for the weight decay that is added to the gradient
    # and the loss scale, as float64, compilable by Numba; None: they follow from something else.
    scalars: Callable[[float, float], tuple[float, ...]] | None = None


Prologue = tuple[Part, ...]


@cache
def hp_type(rule: Rule, prologue: Prologue) -> type:
    """The named tuple of scalars that ``rule`` behind ``prologue`` reads, in memory order."""
    fields = rule.hp + tuple(name for part in prologue for name in part.hp)
    return namedtuple("hp", fields)


@cache
def columns(rule: Rule, prologue: Prologue) -> dict[str, int]:
    """Where each scalar is in a row of ``hp``."""
    return {name: k for k, name in enumerate(hp_type(rule, prologue)._fields)}  # type: ignore[attr-defined]
