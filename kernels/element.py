"""What is compiled, a rule behind a prologue for some storage types, and its work on one element.

Nothing is compiled here: a backend says how (`Compiler`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .lazy import lazy
from .rules.rule import Prologue, Rule, columns
from .storage import F64, Storage, numba_type, real_of


@dataclass(frozen=True, eq=False)
class Kernel:
    """A rule behind a prologue for some storage types; compared by identity, see `kernel`."""

    rule: Rule
    prologue: Prologue  # what happens to the gradient first
    w: Storage  # of the parameter; the arithmetic follows it
    g: Storage  # of the gradient
    s: tuple[Storage, ...]  # of each state

    def with_gradient(self, g: Storage) -> Kernel:
        """The same for another storage of the gradient."""
        return kernel(self.rule, self.prologue, self.w, g, self.s)

    @property
    def real(self) -> Storage:
        """Storage of the arithmetic, of ``hp`` and of summed gradients."""
        return real_of(self.w)

    @lazy
    def itemsizes(self) -> np.ndarray:
        """int64: bytes of an element of the parameter, then of each state."""
        return np.array([storage.itemsize for storage in (self.w, *self.s)])

    @property
    def n_stored(self) -> int:
        """How many arrays are written: the parameter and all states but those only read."""
        return 1 + len(self.s) - self.rule.n_read

    @property
    def n_scalars(self) -> int:
        """The number of fields of a row of ``hp``."""
        return len(self.column)

    @property
    def column(self) -> dict[str, int]:
        """Where each scalar is in a row of ``hp``."""
        return columns(self.rule, self.prologue)


@cache
def kernel(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> Kernel:
    """The only kernel of ``rule`` behind ``prologue`` for these storage types."""
    return Kernel(rule, prologue, w, g, s)


class Compiler(NamedTuple):
    """How a backend compiles the functions of an element."""

    rule: Callable[..., Any]  # a function of a rule
    part: Callable[..., Any]  # that of a part of a prologue
    conversion: Callable[..., Any]  # from or to a storage type
    element: Callable[..., Any]  # what calls them
    inlined: Callable[..., Any]  # a piece of that, one of many: each must compile in no time


def compose(prologue: Prologue, compiler: Compiler) -> Any:
    """``condition(g, w, hp)``: one function out of the parts of a prologue, first part first."""
    if not prologue:
        return compiler.inlined(lambda g, w, hp: g)  # noqa: ARG005
    first, rest = compiler.part(prologue[0].apply), compose(prologue[1:], compiler)

    def composed(g, w, hp):
        return rest(first(g, w, hp), w, hp)

    return compiler.inlined(composed)


def conditioned(kernel: Kernel, compiler: Compiler, *, zero_gradient: bool = False) -> Any:
    """``load(w, g, i, hp)``: parameter and gradient after the prologue, as numbers."""
    load_w, load_g = (compiler.conversion(storage.to_real) for storage in (kernel.w, kernel.g))
    condition, real = compose(kernel.prologue, compiler), numba_type(kernel.real)

    def load(w, g, i, hp):
        x = real(load_w(w[i]))
        # Constants of the closure: Numba prunes the other branch before it types it.
        d = real(0) if zero_gradient else real(load_g(g[i]))
        return x, condition(d, x, hp)

    return compiler.inlined(load)


def _loaded(kernel: Kernel, compiler: Compiler, k: int = 0) -> Any:
    """``load(arrays, i)``: element ``i`` of the states from number ``k`` on, as numbers."""
    if k == len(kernel.s):
        return compiler.inlined(lambda arrays, i: ())  # noqa: ARG005
    to_real, real, place = compiler.conversion(kernel.s[k].to_real), numba_type(kernel.real), 1 + k
    rest = _loaded(kernel, compiler, k + 1)

    def load(arrays, i):
        return (real(to_real(arrays[place][i])), *rest(arrays, i))

    return compiler.inlined(load)


def _stored(kernel: Kernel, compiler: Compiler, k: int = 0) -> Any:
    """``store(arrays, i, values)``: element ``i`` of the arrays from number ``k`` on."""
    if k == kernel.n_stored:
        return compiler.inlined(lambda arrays, i, values: None)  # noqa: ARG005
    storage = (kernel.w, *kernel.s)[k]
    convert = compiler.conversion(storage.from_wide if kernel.real is F64 else storage.from_real)
    rest = _stored(kernel, compiler, k + 1)

    def store(arrays, i, values):
        arrays[k][i] = convert(values[k])
        rest(arrays, i, values)

    return compiler.inlined(store)


def element_of(
    kernel: Kernel, update: Callable[..., Any], compiler: Compiler, *, zero_gradient: bool = False
) -> Any:
    """``element(arrays, g, i, *rest)``: load, prologue, ``update`` and store of one element.

    ``arrays`` is a tuple, of the parameter and its states; ``rest`` is what ``update`` takes after
    the states, ``hp`` the last. With ``zero_gradient`` this is 0 and is not read.
    """
    compiled = compiler.rule(update)
    load = conditioned(kernel, compiler, zero_gradient=zero_gradient)
    load_states, store = _loaded(kernel, compiler), _stored(kernel, compiler)
    stores_states = kernel.n_stored > 1

    def element(arrays, g, i, *rest):
        x, d = load(arrays[0], g, i, rest[-1])
        new = compiled(x, d, *load_states(arrays, i), *rest)
        store(arrays, i, new if stores_states else (new,))

    return compiler.element(element)


def values_of(kernel: Kernel, compiler: Compiler) -> Any:
    """``values(arrays, g, i, hp)``: load, prologue and what the rule measures of one element."""
    assert kernel.rule.measure is not None
    compiled, load = compiler.rule(kernel.rule.measure), conditioned(kernel, compiler)
    load_states = _loaded(kernel, compiler)

    def values(arrays, g, i, hp):
        x, d = load(arrays[0], g, i, hp)
        return compiled(x, d, *load_states(arrays, i), hp)

    return compiler.element(values)
