"""Kernels, a rule behind gradient transforms for some storage types, and their work on an element.

Nothing is compiled here: a backend says how (`Compiler`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .lazy import lazy
from .rule import Prologue, Rule, columns, hp_type
from .state import State
from .storage import F64, I32, Storage, numba_type, real_of


@dataclass(frozen=True, eq=False)
class Kernel:
    """A rule behind gradient transforms for some storage types; compared by identity (`kernel`)."""

    rule: Rule
    prologue: Prologue  # gradient transforms, in their order
    w: Storage  # of the parameter; the arithmetic follows it
    g: Storage  # of the gradient
    s: tuple[Storage, ...]  # of each state

    def with_gradient(self, g: Storage) -> Kernel:
        """The same for another storage of the gradient."""
        return kernel(self.rule, self.prologue, self.w, g, self.s)

    @lazy
    def real(self) -> Storage:
        """Storage of the arithmetic, of the scalars and of summed gradients."""
        return real_of(self.w)

    @property
    def per(self) -> tuple[str, ...]:
        """As `State.per`, of each array: the parameter, then the states."""
        return "element", *(state.per for state in self.rule.states)

    @lazy
    def row_bytes(self) -> np.ndarray:
        """int64 ``[arrays, 2]``: what a row of each has, for each column and beside these."""
        sizes = {"element": (1, 0), "row": (0, 1)}
        pairs = zip((self.w, *self.s), self.per, strict=True)
        return np.array([[n * x.itemsize for n in sizes.get(per, (0, 0))] for x, per in pairs])

    def places(self, states: tuple[State, ...]) -> tuple[int, ...]:
        """Where some of the states are among the arrays."""
        return tuple(1 + self.rule.states.index(state) for state in states)

    @property
    def stored(self) -> tuple[int, ...]:
        """Places of the arrays that an element writes: the parameter, and states not only read."""
        return 0, *self.places(self.rule.updated_states)

    @property
    def n_scalars(self) -> int:
        """The number of scalars that the rule and the gradient transforms read."""
        return len(self.column)

    @property
    def column(self) -> dict[str, int]:
        """The place of each scalar in a row of them."""
        return columns(self.rule, self.prologue)


@cache
def kernel(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> Kernel:
    """The only kernel of ``rule`` behind ``prologue`` for these storage types."""
    return Kernel(rule, prologue, w, g, s)


class Compiler(NamedTuple):
    """A backend's ways to compile the functions of an element."""

    rule: Callable[..., Any]  # a function of a rule
    part: Callable[..., Any]  # a gradient transform
    conversion: Callable[..., Any]  # from or to a storage type
    element: Callable[..., Any]  # what calls them
    inlined: Callable[..., Any]  # a piece of that, one of many: each must compile in no time


def compose(prologue: Prologue, compiler: Compiler) -> Any:
    """``condition(g, w, hp)``: one function out of gradient transforms, the first one first."""
    if not prologue:
        return compiler.inlined(lambda g, w, hp: g)  # noqa: ARG005
    first, rest = compiler.part(prologue[0].apply), compose(prologue[1:], compiler)

    def composed(g, w, hp):
        return rest(first(g, w, hp), w, hp)

    return compiler.inlined(composed)


def conditioned(kernel: Kernel, compiler: Compiler, *, zero_gradient: bool = False) -> Any:
    """``load(w, g, i, hp)``: parameter and gradient after the gradient transforms, as numbers."""
    load_w, load_g = (compiler.conversion(storage.to_real) for storage in (kernel.w, kernel.g))
    condition, real = compose(kernel.prologue, compiler), numba_type(kernel.real)

    def load(w, g, i, hp):
        x = real(load_w(w[i]))
        # Constants of the closure: Numba prunes the other branch before it types it.
        d = real(0) if zero_gradient else real(load_g(g[i]))
        return x, condition(d, x, hp)

    return compiler.inlined(load)


def _number_type(kernel: Kernel, storage: Storage) -> Any:
    """The Numba type of a number of a storage type: that of the arithmetic, int64 for a count."""
    # As a float32, a count that grows by 1 would stop at 2**24.
    return types.int64 if storage is I32 else numba_type(kernel.real)


def _loaded(
    kernel: Kernel, compiler: Compiler, places: tuple[int, ...], *, counts: bool = False
) -> Any:
    """``load(arrays, i)``: element ``i`` of the arrays at some places, as numbers.

    With ``counts`` those of counts are int64, else of the arithmetic as well.
    """
    if not places:
        return compiler.inlined(lambda arrays, i: ())  # noqa: ARG005
    place, storage = places[0], (kernel.w, *kernel.s)[places[0]]
    to_real = compiler.conversion(storage.to_real)
    real = _number_type(kernel, storage) if counts else numba_type(kernel.real)
    rest = _loaded(kernel, compiler, places[1:], counts=counts)
    if kernel.per[place] == "tensor":  # a constant of the closure, as below

        def load(arrays, i):
            return (real(to_real(arrays[place][0])), *rest(arrays, i))

    else:

        def load(arrays, i):
            return (real(to_real(arrays[place][i])), *rest(arrays, i))

    return compiler.inlined(load)


def _stored(kernel: Kernel, compiler: Compiler, places: tuple[int, ...], k: int = 0) -> Any:
    """``store(arrays, i, values)``: values from number ``k`` on to element ``i`` of arrays."""
    if not places:
        return compiler.inlined(lambda arrays, i, values: None)  # noqa: ARG005
    place, storage = places[0], (kernel.w, *kernel.s)[places[0]]
    convert = compiler.conversion(storage.from_wide if kernel.real is F64 else storage.from_real)
    number, rest = _number_type(kernel, storage), _stored(kernel, compiler, places[1:], k + 1)

    def store(arrays, i, values):
        arrays[place][i] = convert(number(values[k]))
        rest(arrays, i, values)

    return compiler.inlined(store)


def element_of(
    kernel: Kernel, update: Callable[..., Any], compiler: Compiler, *, zero_gradient: bool = False
) -> Any:
    """``element(arrays, g, i, *rest)``: load, transform, ``update`` and store one element.

    ``arrays`` is a tuple, of the parameter and its states; ``rest`` is what ``update`` takes after
    the states, ``hp`` the last. With ``zero_gradient`` this is 0 and is not read.
    """
    compiled = compiler.rule(update)
    load = conditioned(kernel, compiler, zero_gradient=zero_gradient)
    load_states = _loaded(kernel, compiler, kernel.places(kernel.rule.element_states))
    store, stores_states = _stored(kernel, compiler, kernel.stored), len(kernel.stored) > 1

    def element(arrays, g, i, *rest):
        x, d = load(arrays[0], g, i, rest[-1])
        new = compiled(x, d, *load_states(arrays, i), *rest)
        store(arrays, i, new if stores_states else (new,))

    return compiler.element(element)


def values_of(kernel: Kernel, compiler: Compiler, *, zero_gradient: bool = False) -> Any:
    """``values(arrays, g, i, hp)``: load, transform and measure one element."""
    assert kernel.rule.measure is not None
    compiled = compiler.rule(kernel.rule.measure)
    load = conditioned(kernel, compiler, zero_gradient=zero_gradient)
    load_states = _loaded(kernel, compiler, kernel.places(kernel.rule.element_states))

    def values(arrays, g, i, hp):
        x, d = load(arrays[0], g, i, hp)
        return compiled(x, d, *load_states(arrays, i), hp)

    return compiler.element(values)


def adder(rule: Rule, compiler: Compiler, k: int = 0) -> Any:
    """``add(sums, values)``: a tuple of float64 sums, from number ``k`` on, and what is added."""
    if k == rule.n_measured:
        return compiler.inlined(lambda sums, values: ())  # noqa: ARG005
    rest = adder(rule, compiler, k + 1)
    # In float64: the square of a float32 beyond 1.8e19 is no float32, and in a float32 sum over a
    # long tensor the later terms would be lost in the total.
    if k in rule.signed:

        def add(sums, values):
            return (sums[k] + np.float64(values[k]), *rest(sums, values))

    else:

        def add(sums, values):
            return (sums[k] + np.float64(values[k]) * np.float64(values[k]), *rest(sums, values))

    return compiler.inlined(add)


def _taken(kernel: Kernel, compiler: Compiler, constants: Mapping[str, float], k: int = 0) -> Any:
    """``take(states, size, hp)``: what ``factor`` takes after the sums, from number ``k`` on."""
    rule = kernel.rule
    if k == len(rule.takes):
        return compiler.inlined(lambda states, size, hp: ())  # noqa: ARG005
    name, rest = rule.takes[k], _taken(kernel, compiler, constants, k + 1)
    scope_states = [state.name for state in rule.scope_states]
    if name == "size":
        return compiler.inlined(lambda states, size, hp: (size, *rest(states, size, hp)))
    if name in scope_states:
        place = scope_states.index(name)
        return compiler.inlined(lambda states, size, hp: (states[place], *rest(states, size, hp)))
    if name in constants:
        number = constants[name]
        return compiler.inlined(lambda states, size, hp: (number, *rest(states, size, hp)))
    column = kernel.column[name]
    return compiler.inlined(lambda states, size, hp: (hp[column], *rest(states, size, hp)))


def following(
    kernel: Kernel, compiler: Compiler, constants: Mapping[str, float] | None = None
) -> Any:
    """``follow(sums, states, size, hp)``: factors of scalars, then new states of the scope."""
    rule, take = kernel.rule, _taken(kernel, compiler, constants or {})
    assert rule.factor is not None
    compiled = compiler.rule(rule.factor)
    if len(rule.scaled_fields) + len(rule.factor_states) > 1:

        def follow(sums, states, size, hp):
            return compiled(*sums, *take(states, size, hp))

    else:  # a number by itself

        def follow(sums, states, size, hp):
            return (compiled(*sums, *take(states, size, hp)),)

    return compiler.inlined(follow)


def scaling(kernel: Kernel, compiler: Compiler) -> Any:
    """``scale(hp, factors)``: the scalars with the factors of some of them, each rounded once."""
    cls: Any = hp_type(kernel.rule, kernel.prologue)
    real, fields = numba_type(kernel.real), kernel.rule.scaled_fields

    def scaled(k: int) -> Any:
        if k == len(cls._fields):
            return compiler.inlined(lambda hp, factors: ())  # noqa: ARG005
        rest = scaled(k + 1)
        if cls._fields[k] not in fields:
            return compiler.inlined(lambda hp, factors: (hp[k], *rest(hp, factors)))
        place = fields.index(cls._fields[k])

        def run(hp, factors):
            return (real(np.float64(hp[k]) * factors[place]), *rest(hp, factors))

        return compiler.inlined(run)

    every = scaled(0)
    return compiler.inlined(lambda hp, factors: cls(*every(hp, factors)))


def scope_loader(kernel: Kernel, compiler: Compiler) -> Any:
    """``load(arrays)``: the states of a row or a tensor, whose arrays begin there, as numbers."""
    load = _loaded(kernel, compiler, kernel.places(kernel.rule.scope_states), counts=True)
    return compiler.inlined(lambda arrays: load(arrays, 0))


def scope_storer(kernel: Kernel, compiler: Compiler, begin: int) -> Any:
    """``store(arrays, values)``: their new values, which are those from number ``begin`` on."""
    store = _stored(kernel, compiler, kernel.places(kernel.rule.factor_states), begin)
    return compiler.inlined(lambda arrays, values: store(arrays, 0, values))
