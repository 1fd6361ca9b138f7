"""Kernels, a rule behind gradient transforms for some storage types, and their work on an element.

The work on an element is a function whose lines are generated here, since a rule has any number of
states, scalars and transforms. A backend compiles it (`Compiler`). With ``FUSESTEP_SHOW=1`` in the
environment, each function is printed on stderr when it is generated. For Momentum with a coupled
weight decay, the element is::

    def function(arrays, g, i, hp):
        w = arrays[0]
        x = real(load(w[i]))
        d = real(load_g(g[i]))
        d = transform0(d, x, hp)
        new = update(x, d, number1(load1(arrays[1][i])), hp)
        arrays[0][i] = store0(stored0(new[0]))
        arrays[1][i] = store1(stored1(new[1]))

``arrays`` are the parameter and its states, ``g`` is the gradient, ``i`` the number of the element,
and ``hp`` has the scalars. ``x`` and ``d`` are parameter and gradient in the type of the
arithmetic, ``d`` after the gradient transforms. Names with a number belong to the transform, or to
the array, of that number: ``load`` and ``store`` convert from and to its storage type, ``number``
and ``stored`` are the types in between. ``update`` is the function of the rule.
"""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        """This kernel for another storage of the gradient."""
        return kernel(self.rule, self.prologue, self.w, g, self.s)

    @lazy
    def real(self) -> Storage:
        """Storage of the arithmetic, of the scalars and of summed gradients."""
        return real_of(self.w)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages of the arrays: the parameter, then the states."""
        return self.w, *self.s

    @property
    def per(self) -> tuple[str, ...]:
        """`State.per` of each array: the parameter, then the states."""
        return "element", *(state.per for state in self.rule.states)

    @lazy
    def row_bytes(self) -> np.ndarray:
        """int64 ``[arrays, 2]``: bytes of a row of each array, per column and in addition."""
        sizes = {"element": (1, 0), "row": (0, 1)}
        pairs = zip(self.storages, self.per, strict=True)
        return np.array([[n * x.itemsize for n in sizes.get(per, (0, 0))] for x, per in pairs])

    def places(self, states: tuple[State, ...]) -> tuple[int, ...]:
        """The places of some states among the arrays."""
        return tuple(1 + self.rule.states.index(state) for state in states)

    @property
    def stored(self) -> tuple[int, ...]:
        """The places of the arrays that are written: the parameter, and states not only read.

        The states beside the weight come last.
        """
        return 0, *self.places(self.rule.updated_states), *self.places(self.rule.beside)

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
    element: Callable[..., Any]  # the function of an element, which calls all of them
    inlined: Callable[..., Any]  # a function of an element that is inlined in another one


def _written(arguments: str, lines: Sequence[str], names: Mapping[str, Any]) -> Any:
    """The function of some lines, in which names stand for compiled functions and types.

    A chain of closures would do without text, but Numba translates each link anew in each kernel:
    half of a compilation.
    """
    text, scope = "\n    ".join((f"def function({arguments}):", *lines)), dict(names)
    if os.environ.get("FUSESTEP_SHOW") == "1":
        print(text, end="\n\n", file=sys.stderr)
    exec(text, scope)
    return scope["function"]


def _tuple(expressions: Iterable[str]) -> str:
    # A comma behind each: of one expression this is a tuple too.
    return f"({''.join(f'{expression}, ' for expression in expressions)})"


def _transformed(
    kernel: Kernel, compiler: Compiler, *, zero_gradient: bool
) -> tuple[list[str], dict[str, Any]]:
    """Lines that load element ``i`` of ``w`` and ``g``: ``x``, and ``d`` after the transforms."""
    names = {"real": numba_type(kernel.real), "load": compiler.conversion(kernel.w.to_real)}
    lines, keeping = ["x = real(load(w[i]))", "d = real(0)"], kernel.rule.keeping
    if keeping is not None and keeping.load is not None:
        beside, loads = _loaded(kernel, compiler, keeping.beside)
        names |= {"join": compiler.part(keeping.load), **loads}
        lines[0] = f"x = join(real(load(w[i])), {', '.join(beside)})"
    if not zero_gradient:
        names["load_g"] = compiler.conversion(kernel.g.to_real)
        lines[1] = "d = real(load_g(g[i]))"
    for k, transform in enumerate(kernel.prologue):
        names[f"transform{k}"] = compiler.part(transform.apply)
        lines.append(f"d = transform{k}(d, x, hp)")
    return lines, names


def conditioned(kernel: Kernel, compiler: Compiler) -> Any:
    """``load(w, g, i, hp)``: parameter and gradient after the gradient transforms, as numbers."""
    lines, names = _transformed(kernel, compiler, zero_gradient=False)
    return compiler.inlined(_written("w, g, i, hp", (*lines, "return x, d"), names))


def _number_type(kernel: Kernel, storage: Storage) -> Any:
    """The Numba type of a number of a storage type: that of the arithmetic, int64 for a count."""
    # As a float32, a count that grows by 1 would stop at 2**24.
    return types.int64 if storage is I32 else numba_type(kernel.real)


def _loaded(
    kernel: Kernel, compiler: Compiler, states: tuple[State, ...], *, counts: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Expressions that load element ``i`` of some states in ``arrays``, as numbers.

    With ``counts`` a count is int64, else in the type of the arithmetic as well.
    """
    values: list[str] = []
    names: dict[str, Any] = {}
    for place in kernel.places(states):
        storage = kernel.storages[place]
        number = _number_type(kernel, storage) if counts else numba_type(kernel.real)
        names |= {f"number{place}": number, f"load{place}": compiler.conversion(storage.to_real)}
        element = 0 if kernel.per[place] == "tensor" else "i"
        values.append(f"number{place}(load{place}(arrays[{place}][{element}]))")
    return values, names


def _stored(
    kernel: Kernel, compiler: Compiler, places: Iterable[int], values: Iterable[str]
) -> tuple[list[str], dict[str, Any]]:
    """Lines that store values to element ``i`` of the arrays at some places."""
    lines: list[str] = []
    names: dict[str, Any] = {}
    for place, value in zip(places, values, strict=True):
        storage = kernel.storages[place]
        convert = storage.from_wide if kernel.real is F64 else storage.from_real
        names[f"store{place}"] = compiler.conversion(convert)
        names[f"stored{place}"] = _number_type(kernel, storage)
        lines.append(f"arrays[{place}][i] = store{place}(stored{place}({value}))")
    return lines, names


def element_of(
    kernel: Kernel, update: Callable[..., Any], compiler: Compiler, *, zero_gradient: bool = False,
    factors: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """``element(arrays, g, i, *factors, hp)``: load, transform, ``update`` and store one element.

    ``arrays`` is a tuple of the parameter and its states; ``factors`` are the names of arguments
    that ``update`` takes between the states and ``hp``. With ``zero_gradient`` the gradient is 0
    and is not read.
    """
    lines, names = _transformed(kernel, compiler, zero_gradient=zero_gradient)
    states, loads = _loaded(kernel, compiler, kernel.rule.element_states)
    beside, keeping = kernel.rule.beside, kernel.rule.keeping
    n = len(kernel.stored) - len(beside)
    new = [f"new[{k}]" for k in range(n)] if n > 1 else ["new"]
    calls = [f"new = update({', '.join(('x', 'd', *states, *factors, 'hp'))})"]
    direct: list[str] = []
    if keeping is not None and keeping.bits is not None:
        # The weight alone is rounded at random; its states are stored as ever.
        direct = [f"w[i] = round(real({new.pop(0)}), bits(i, hp))"]
        names["bits"] = compiler.part(keeping.bits)
        names["round"] = compiler.conversion(kernel.w.at_random)
    elif keeping is not None:
        # What lies beside a weight follows from the weight as it will be read: stored, then loaded.
        calls.append(f"kept = keep({new[0]}, real(load(store0(stored0({new[0]})))))")
        names["keep"] = compiler.part(keeping.store)
        new += [f"kept[{k}]" for k in range(len(beside))]
    written, stores = _stored(kernel, compiler, kernel.stored[len(direct) :], new)
    return compiler.element(
        _written(
            ", ".join(("arrays, g, i", *factors, "hp")),
            ("w = arrays[0]", *lines, *calls, *direct, *written),
            {"update": compiler.rule(update), **names, **loads, **stores},
        )
    )


def values_of(kernel: Kernel, compiler: Compiler, *, zero_gradient: bool = False) -> Any:
    """``values(arrays, g, i, hp)``: load, transform and measure one element."""
    assert kernel.rule.measure is not None
    lines, names = _transformed(kernel, compiler, zero_gradient=zero_gradient)
    states, loads = _loaded(kernel, compiler, kernel.rule.element_states)
    result = f"return measure({', '.join(('x', 'd', *states, 'hp'))})"
    names |= {"measure": compiler.rule(kernel.rule.measure), **loads}
    return compiler.element(_written("arrays, g, i, hp", ("w = arrays[0]", *lines, result), names))


def adder(rule: Rule, compiler: Compiler) -> Any:
    """``add(sums, values)``: a tuple of float64 sums, with the values or their squares added."""
    # In float64: the square of a float32 beyond 1.8e19 is no float32, and in a float32 sum over a
    # long tensor the later terms would be lost in the total.
    terms = [f"wide(values[{k}])" for k in range(rule.n_measured)]
    sums = [
        f"sums[{k}] + {term if k in rule.signed else f'{term} * {term}'}"
        for k, term in enumerate(terms)
    ]
    return compiler.inlined(
        _written("sums, values", (f"return {_tuple(sums)}",), {"wide": np.float64})
    )


def following(
    kernel: Kernel, compiler: Compiler, constants: Mapping[str, float] | None = None
) -> Any:
    """``follow(sums, states, size, hp)``: `Rule.factor`: factors of scalars, then new states."""
    rule = kernel.rule
    assert rule.factor is not None
    scope_states = [state.name for state in rule.scope_states]
    names: dict[str, Any] = {"factor": compiler.rule(rule.factor)}
    taken = [f"sums[{k}]" for k in range(rule.n_measured)]
    for name in rule.takes:
        if name == "size":
            taken.append("size")
        elif name in scope_states:
            taken.append(f"states[{scope_states.index(name)}]")
        elif constants and name in constants:
            taken.append(f"constant_{name}")
            names[taken[-1]] = constants[name]
        else:
            taken.append(f"hp[{kernel.column[name]}]")
    result = f"factor({', '.join(taken)})"
    if len(rule.scaled_fields) + len(rule.factor_states) == 1:  # a number by itself
        result = f"({result},)"
    return compiler.inlined(_written("sums, states, size, hp", (f"return {result}",), names))


def scaling(kernel: Kernel, compiler: Compiler) -> Any:
    """``scale(hp, factors)``: the scalars, some multiplied by factors, each rounded once."""
    cls: Any = hp_type(kernel.rule, kernel.prologue)
    fields = kernel.rule.scaled_fields
    scalars = [
        f"real(wide(hp[{k}]) * factors[{fields.index(name)}])" if name in fields else f"hp[{k}]"
        for k, name in enumerate(cls._fields)
    ]
    names = {"cls": cls, "real": numba_type(kernel.real), "wide": np.float64}
    return compiler.inlined(_written("hp, factors", (f"return cls({', '.join(scalars)})",), names))


def placed(kernel: Kernel, compiler: Compiler) -> Any:
    """``place(hp, first)``: the scalars of elements that begin at number ``first`` of their tensor.

    With random bits these also have ``rounding_begin``, to which the number of an element is added,
    and ``rounding_key``: two words that a tensor has in a step.
    """
    keeping = kernel.rule.keeping
    if keeping is None or not keeping.hp:
        return compiler.inlined(_written("hp, first", ("return hp",), {}))
    fields = hp_type(kernel.rule, kernel.prologue)._fields  # type: ignore[attr-defined]
    scalars = [f"hp[{k}]" for k in range(len(fields))]
    low, high, *key = (f"hp[{kernel.column[name]}]" for name in keeping.hp)
    words = [f"whole(word({low}, {high}) + whole(first))", f"word({', '.join(key)})"]
    names: dict[str, Any] = {"whole": np.uint32, "word": compiler.part(_word)}
    # Behind all other fields, whose places stay as they are compiled elsewhere.
    names["cls"] = namedtuple("hp", (*fields, "rounding_begin", "rounding_key"))
    return compiler.inlined(
        _written("hp, first", (f"return cls({', '.join((*scalars, *words))})",), names)
    )


def _word(low: Any, high: Any) -> Any:
    """The word of two halves, which a float32 holds exactly."""
    return np.uint32(np.uint32(low) | np.uint32(np.uint32(high) << np.uint32(16)))


def scope_loader(kernel: Kernel, compiler: Compiler) -> Any:
    """``load(arrays)``: the states of the row or tensor with which the arrays begin, as numbers."""
    values, names = _loaded(kernel, compiler, kernel.rule.scope_states, counts=True)
    return compiler.inlined(_written("arrays", ("i = 0", f"return {_tuple(values)}"), names))


def scope_storer(kernel: Kernel, compiler: Compiler, begin: int) -> Any:
    """``store(arrays, values)``: write ``values[begin:]`` to the states of a row or tensor."""
    places = kernel.places(kernel.rule.factor_states)
    values = [f"values[{begin + k}]" for k in range(len(places))]
    lines, names = _stored(kernel, compiler, places, values)
    return compiler.inlined(_written("arrays, values", ("i = 0", *lines), names))
