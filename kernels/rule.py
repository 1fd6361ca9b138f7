"""Update rules: a scalar function each, its scalars, its states, and what it measures."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from .idle import Idle
from .inner import NO_WRAPPERS
from .lazy import lazy
from .state import State

# FMA contraction and IEEE division without Numba's zero check: both are needed for packed
# code, and neither assumes away NaN or infinity.
RULE_FLAGS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}

# A gradient transform is rounded by itself, whatever the rule does with its result. (False must be
# written: a function without "fastmath" takes that of its caller.)
PROLOGUE_FLAGS: dict[str, Any] = {"error_model": "numpy", "fastmath": False}

rule_helper = register_jitable(**RULE_FLAGS, **NO_WRAPPERS)
"""Decorator of a scalar function that several rules call."""


@register_jitable(**PROLOGUE_FLAGS, **NO_WRAPPERS)
def product(x: Any, y: Any) -> Any:
    """``x * y``, rounded before it is added to anything.

    In a sum of two products the compiler fuses the addition with either product and rounds the
    other one first; which one, differs between compilations. So one of them has to be this.
    """
    return x * y


@rule_helper
def sign(x: Any, hp: Any) -> Any:
    """1, 0 or -1, for which the scalars have ``one`` and ``zero``; a NaN stays a NaN."""
    return hp.one if x > hp.zero else (-hp.one if x < hp.zero else x)


def _constant(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


class _Constant:
    """A constant of a module: compared by identity, and pickled as its name there."""

    def __reduce__(self) -> Any:
        module = next(part for part in vars(self).values() if callable(part)).__module__
        for name, value in vars(import_module(module)).items():
            if value is self:
                return _constant, (module, name)
        raise TypeError(f"{self} cannot be pickled: it is no constant of the module {module}")


class Lines(NamedTuple):
    """Running means over the rows and the columns of matrices, kept as the last two states.

    All are scalar functions. ``R`` and ``C`` are the states of an element's row and column. In
    their place ``update`` takes the factors ``row_factor(R, mean of all R)`` and
    ``column_factor(C)``. A tensor is measured by ``measure(g, row factor, column factor, hp)``, and
    by its parameter if the constant named ``measures_parameter`` is true.
    """

    term: Callable[..., Any]  # term(g, hp): the value that is averaged
    average: Callable[..., Any]  # average(state, mean, hp): the new state
    hold: Callable[..., Any]  # hold(x, smallest): x, or a larger number that can be a divisor
    row_factor: Callable[..., Any]
    column_factor: Callable[..., Any]
    smallest: str  # the scalar above which C is held
    smallest_mean: str  # the scalar above which the mean of all R is held
    measures_parameter: str


@dataclass(frozen=True, eq=False)
class Keeping(_Constant):
    """A way to keep a weight; compared by identity.

    Attributes:
        name: for messages, and for the on-disk cache.
        beside: the states that lie beside the weight, one for each element.
        load: ``load(w, *beside)``: the weight as a number; None where nothing lies beside it.
        store: ``store(x, rounded)``: what is written beside the weight, a tuple, for its new value
            ``x`` and what is left of this where the weight itself is stored.
        bits: ``bits(i, hp)``: 32 random bits by which element ``i`` is rounded up or down; None: to
            the nearest. ``hp`` has the scalars, and ``rounding_begin`` and ``rounding_key``.
        hp: the scalars from which these two follow.
    """

    name: str
    beside: tuple[State, ...] = ()
    load: Callable[..., Any] | None = None
    store: Callable[..., Any] | None = None
    bits: Callable[..., Any] | None = None
    hp: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Rule(_Constant):
    """An update rule; compared by identity.

    A rule may measure: sums over a row, a tensor or all tensors of a step, from which follow
    factors of some scalars before ``update`` sees them. Sums are float64, in an order that does not
    depend on the number of threads.

    Attributes:
        update: ``update(w, g, *states, hp) -> (w, *states)``, scalars in and scalars
            out, compilable by Numba, without literals (a literal turns float32
            arithmetic into float64; constants come in through ``hp``). Its states are those per
            element, and those per tensor, which it only reads.
        states: a `State` each, in argument order; a str is the name of one per element.
        hp: the scalars that ``update`` and ``measure`` read, by name: the fields of ``hp``.
        measure: ``measure(w, g, *states, hp)`` returns a tuple of values, whose squares are summed.
            It takes the states before the update.
        n_measured: the number of these values.
        signed: the places of the values that are summed themselves, not their squares.
        factor: ``factor(*sums, *takes)``, a scalar function too, returns a factor of each scalar of
            ``factor_of``, then the new states of its scope. None: no such function, the factors
            need more than the sums.
        factor_of: the scalar that gets a factor, or a tuple of such scalars.
        scope: what is summed over, and has one factor: ``"row"``, ``"tensor"`` or ``"step"``. A
            row is measured and updated while it is in the caches.
        takes: the arguments of ``factor`` after the sums, by name: ``"size"``, the number of
            elements of the scope; states of the scope; scalars; or constants of the optimizer. With
            the scope ``"step"`` they are numbers of the optimizer, the first of which ``factor``
            replaces, and constants.
        rests: with the scope ``"step"``, ``rests(*sums)``: whether the step is left out.
        lines: for a rule on matrices with a state per row and one per column.
        matrix: the rule for tensors of two or more axes, if it differs.
        layerwise: whether LARS and THOR are published around it, with a factor for each tensor.
        decays: whether the rule applies the weight decay itself; otherwise that is added to the
            gradient.
        keeping: how the weight is kept; None: in one array. The last of the states lie beside the
            weight then, and no function of the rule takes them.
        plain: the rule whose weight this one keeps in another way.
        idle: what steps without a gradient do, many at once; None: no such form is known.
    """

    update: Callable[..., Any]
    states: tuple[Any, ...]
    hp: tuple[str, ...]
    measure: Callable[..., Any] | None = None
    n_measured: int = 0
    factor: Callable[..., Any] | None = None
    factor_of: str | tuple[str, ...] = ""
    signed: tuple[int, ...] = ()
    scope: str = "tensor"
    takes: tuple[str, ...] = ()
    rests: Callable[..., bool] | None = None
    lines: Lines | None = None
    matrix: Rule | None = None
    layerwise: bool = False
    decays: bool = False
    keeping: Keeping | None = None
    plain: Rule | None = None
    idle: Idle | None = None

    def __post_init__(self) -> None:
        if isinstance(self.states, tuple):  # else `check_rule` says what is wrong
            states = [State(state) if isinstance(state, str) else state for state in self.states]
            object.__setattr__(self, "states", tuple(states))

    def __reduce__(self) -> Any:
        return super().__reduce__() if self.plain is None else (_kept, (self.plain, self.keeping))

    def kept(self, keeping: Keeping) -> Rule:
        """The rule of weights that are kept in another way.

        Raises:
            ValueError: it is a rule on matrices, or of weights that are kept so already.
        """
        return _kept(self, keeping)

    @lazy
    def asleep(self) -> Rule | None:
        """The rule of many steps without a gradient; None where no such form is known."""
        if self.plain is not None and self.keeping is not None:
            return None if self.plain.asleep is None else self.plain.asleep.kept(self.keeping)
        if self.idle is None:
            return None
        return Rule(self.idle.update, self.states, self.idle.fields(len(self.states)))

    @lazy
    def beside(self) -> tuple[State, ...]:
        """The states that lie beside the weight."""
        return () if self.keeping is None else self.keeping.beside

    @lazy
    def _own_states(self) -> tuple[State, ...]:
        return self.states[: len(self.states) - len(self.beside)]

    @lazy
    def names(self) -> tuple[str, ...]:
        """The names of the states."""
        return tuple(state.name for state in self.states)

    @lazy
    def is_row_wise(self) -> bool:
        """Whether a row has to be updated as a whole."""
        return self.scope == "row"

    @property
    def scaled_fields(self) -> tuple[str, ...]:
        """The scalars for which ``factor`` returns factors."""
        return (self.factor_of,) if isinstance(self.factor_of, str) else self.factor_of

    @property
    def element_states(self) -> tuple[State, ...]:
        """The states that ``update`` and ``measure`` take."""
        return tuple(s for s in self._own_states if s.per in ("element", "tensor"))

    @property
    def updated_states(self) -> tuple[State, ...]:
        """The states that ``update`` returns."""
        return tuple(s for s in self._own_states if s.per == "element" and not s.is_read)

    @property
    def scope_states(self) -> tuple[State, ...]:
        """The states that ``factor`` may take."""
        return tuple(s for s in self.states if s.per == self.scope)

    @property
    def factor_states(self) -> tuple[State, ...]:
        """The states that ``factor`` returns."""
        return tuple(s for s in self.scope_states if not s.is_read)

    @lazy
    def is_elementwise(self) -> bool:
        """Whether every state has the shape of the parameter."""
        return all(state.per == "element" for state in self.states)

    @lazy
    def is_two_stage(self) -> bool:
        """Whether whole tensors have to be measured before anything is updated."""
        return self.measure is not None and not self.is_row_wise

    def on(self, shape: tuple[int, ...]) -> Rule:
        """The rule of a tensor of a shape."""
        is_matrix = self.matrix is not None and len(shape) >= 2 and math.prod(shape) > 0
        return self.matrix if is_matrix and self.matrix else self

    def shape_of(self, state: State, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a state of a tensor."""
        if state.per == "row":
            rows = shape[:-1] if self.lines else shape[:1]
            return rows if len(shape) >= 2 else (1,)
        if state.per == "column":
            return (*shape[:-2], shape[-1])
        return shape if state.per == "element" else (1,)


@cache
def _kept(rule: Rule, keeping: Keeping) -> Rule:
    if rule.keeping is not None or rule.lines or rule.matrix:
        raise ValueError(f"the weight of this rule cannot be kept as {keeping.name}")
    states = (*rule.states, *keeping.beside)
    return replace(rule, states=states, keeping=keeping, plain=rule)


def factors(rule: Rule, sums: np.ndarray, named: Sequence[Mapping[str, float]]) -> np.ndarray:
    """float64 ``[T, n]``: the results of `Rule.factor` from the sums of T tensors.

    ``sums`` are ``[T, n_measured]``; ``named`` has, for each tensor, the values that `Rule.takes`
    names.
    """
    assert rule.factor is not None
    arguments = sums.tolist()
    if rule.takes:
        arguments = [
            [*values, *map(names.__getitem__, rule.takes)]
            for values, names in zip(arguments, named, strict=True)
        ]
    results = np.array([*starmap(rule.factor, arguments)], np.float64).reshape(len(arguments), -1)
    # The sign of a NaN depends on how often Python has run the function.
    results[np.isnan(results)] = np.nan
    return results


@dataclass(frozen=True, eq=False)
class GradientTransform(_Constant):
    """A scalar function on the gradient before the rule (decay, scale, clip), and its scalars."""

    apply: Callable[..., Any]  # apply(g, w, hp) -> g
    hp: tuple[str, ...]  # the scalars that it reads
    # scalars(decay, factor, bound): these scalars for a weight decay that is added to the gradient,
    # a factor of the gradient and a bound of elements, as float64.
    scalars: Callable[[float, float, float], tuple[float, ...]]


Prologue = tuple[GradientTransform, ...]
"""Gradient transforms in the order in which they are applied."""


@cache
def hp_type(rule: Rule, prologue: Prologue) -> type:
    """The named tuple of scalars that ``rule`` behind ``prologue`` reads, in memory order."""
    fields = rule.hp + tuple(name for transform in prologue for name in transform.hp)
    fields += () if rule.keeping is None else rule.keeping.hp
    return namedtuple("hp", fields)


@cache
def columns(rule: Rule, prologue: Prologue) -> dict[str, int]:
    """The place of each scalar in a row of them."""
    return {name: k for k, name in enumerate(hp_type(rule, prologue)._fields)}  # type: ignore[attr-defined]
