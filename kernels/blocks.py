"""Rules to machine code.

The loops of this package (drivers) do not know a rule. A rule is compiled into a *block*,

    block(w, g, s0, s1, s2, n, hp)          seven int64: addresses, a count, an address

which updates ``n`` contiguous elements, and a driver calls it through its address. A new rule
then costs one small compilation, the drivers are compiled once for all rules, and the dense,
row-sparse, serial and parallel paths run the very same machine code, hence give equal bits.

The first stage of a two-stage rule is compiled into a block that only reads and adds up,

    measure(w, g, s0, s1, s2, n, hp, sums)  eight int64
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray

from .cache import fingerprint
from .compile import NativeFunction
from .cpu.intrinsics import as_pointer, tuple_reader
from .inner import njit
from .rules.rule import PROLOGUE_FLAGS, RULE_FLAGS, Part, Prologue, Rule, columns, hp_type
from .storage import F64, Storage, numba_type, real_of

MOST_STATES = 3
_BLOCK_ARGUMENTS = 7
_MEASURE_ARGUMENTS = 8


@dataclass(frozen=True, eq=False)
class Kernel:
    """A rule behind a prologue, compiled for its storage types.

    Attributes:
        rule: the update rule.
        prologue: what happens to the gradient first.
        w: storage of the parameter; the arithmetic follows it.
        g: storage of the gradient.
        s: storage of each state.
        block: updates contiguous elements.
        block_zero: the same for a gradient that is 0 everywhere and is not read.
        block_real: the same for a gradient in the type of the arithmetic (summed rows).
        measure: the first stage of a two-stage rule, else None.
        measure_real: the same for a gradient in the type of the arithmetic.
        real: storage of the arithmetic, of ``hp`` and of summed gradients.
    """

    rule: Rule
    prologue: Prologue
    w: Storage
    g: Storage
    s: tuple[Storage, ...]
    block: NativeFunction
    block_zero: NativeFunction
    block_real: NativeFunction
    measure: NativeFunction | None
    measure_real: NativeFunction | None
    real: Storage

    @property
    def n_scalars(self) -> int:
        """The number of fields of a row of ``hp``."""
        return len(hp_type(self.rule, self.prologue)._fields)  # type: ignore[attr-defined]

    @property
    def column(self) -> dict[str, int]:
        """Where each scalar is in a row of ``hp``."""
        return columns(self.rule, self.prologue)

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes of an element of each state; 0 for a state that the rule does not have."""
        sizes = [storage.itemsize for storage in self.s]
        first, second, third = sizes + [0] * (MOST_STATES - len(sizes))
        return first, second, third


@cache
def kernel(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> Kernel:
    """The kernel of ``rule`` for these storage types; nothing is compiled yet."""
    block, block_zero, block_real = (
        _block(rule, prologue, w, gradient, s) for gradient in (g, None, real_of(w))
    )
    measure = measure_real = None
    if rule.measure:
        measure, measure_real = (
            _measure(rule, prologue, w, gradient, s) for gradient in (g, real_of(w))
        )
    return Kernel(
        rule,
        prologue,
        w,
        g,
        s,
        block,
        block_zero,
        block_real,
        measure,
        measure_real,
        real_of(w),
    )


@cache
def _block(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage | None, s: tuple[Storage, ...]
) -> NativeFunction:
    element = _element(rule, prologue, w, g, s)
    function = _span(element, hp_type(rule, prologue), w, g, s)
    identity = _identity("block", rule.update, rule, prologue, w, g, s)
    return NativeFunction(function, _BLOCK_ARGUMENTS, identity)


@cache
def _measure(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> NativeFunction:
    values = _measured_values(rule, prologue, w, g, s)
    function = _sum_of_squares(values, rule.n_measured, hp_type(rule, prologue), w, g, s)
    identity = _identity("measure", rule.measure, rule, prologue, w, g, s)
    return NativeFunction(function, _MEASURE_ARGUMENTS, identity)


def _identity(
    kind: str,
    function: Any,
    rule: Rule,
    prologue: Prologue,
    w: Storage,
    g: Storage | None,
    s: tuple[Storage, ...],
) -> str:
    """All that decides the machine code, for the on-disk cache."""
    parts = " ".join(fingerprint(p.apply) + str(p.hp) for p in prologue)
    names = " ".join(storage.name for storage in s)
    return (
        f"{kind} {function.__name__} {fingerprint(function)} {rule.n_measured} {rule.hp} "
        f"prologue {parts} storage {w.name} {g.name if g else 'zero'} {names}"
    )


@cache
def _of_rule(function: Any) -> Any:
    """The same one for all blocks, so that it is compiled once for a type of the arithmetic."""
    return njit(**RULE_FLAGS)(function)


@cache
def _of_cpu(function: Any) -> Any:
    return njit(**PROLOGUE_FLAGS)(function)


def compose(prologue: tuple[Part, ...], of_part: Any = _of_cpu, compiled: Any = njit) -> Any:
    """One compiled function out of the parts of a prologue, first part first.

    Args:
        prologue: the parts.
        of_part: compiles the function of a part.
        compiled: compiles what joins them.
    """
    if not prologue:

        def identity(g, w, hp):
            return g

        return compiled(identity)
    first, rest = of_part(prologue[0].apply), compose(prologue[1:], of_part, compiled)

    def in_order(g, w, hp):
        return rest(first(g, w, hp), w, hp)

    return compiled(in_order)


composed = cache(compose)
"""`compose` for the CPU: the same function for all blocks behind a prologue."""


def padded(values: list[Any], filler: Any) -> list[Any]:
    """One value for each state that there may be; the filler is never used."""
    return values + [filler] * (MOST_STATES - len(values))


def _element(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage | None, s: tuple[Storage, ...]
) -> Any:
    """`element_of` a rule on the CPU."""
    update, condition = _of_rule(rule.update), composed(prologue)
    return njit(error_model="numpy")(element_of(update, condition, w, g, s, lambda f: f))


def element_of(
    update: Any,
    condition: Any,
    w: Storage,
    g: Storage | None,
    s: tuple[Storage, ...],
    compiled: Any,
) -> Any:
    """``element(w, g, states, i, hp)``: load, prologue, rule, store for one element.

    ``n_states`` and ``zero_gradient`` are constants of the closure, so that Numba prunes
    the other branches before it types them.

    Args:
        update: the compiled rule.
        condition: the compiled prologue.
        w: storage of the parameter.
        g: storage of the gradient; None: it is 0 and is not read.
        s: storage of each state.
        compiled: compiles a conversion of a storage type.
    """
    wide, real, n_states = real_of(w) is F64, numba_type(real_of(w)), len(s)

    def store_of(storage: Storage) -> Any:
        return compiled(storage.from_wide if wide else storage.from_real)

    load_w, store_w = compiled(w.to_real), store_of(w)
    load_0, load_1, load_2 = padded([compiled(storage.to_real) for storage in s], load_w)
    store_0, store_1, store_2 = padded([store_of(storage) for storage in s], store_w)
    load_g, zero_gradient = compiled(g.to_real) if g else load_w, g is None

    def element(w, g, states, i, hp):
        x = real(load_w(w[i]))
        d = real(0) if zero_gradient else real(load_g(g[i]))
        d = condition(d, x, hp)
        if n_states == 0:
            w[i] = store_w(update(x, d, hp))
        elif n_states == 1:
            x, a = update(x, d, real(load_0(states[0][i])), hp)
            w[i], states[0][i] = store_w(x), store_0(a)
        elif n_states == 2:
            x, a, b = update(x, d, real(load_0(states[0][i])), real(load_1(states[1][i])), hp)
            w[i], states[0][i], states[1][i] = store_w(x), store_0(a), store_1(b)
        else:
            a, b = real(load_0(states[0][i])), real(load_1(states[1][i]))
            x, a, b, c = update(x, d, a, b, real(load_2(states[2][i])), hp)
            w[i], states[0][i] = store_w(x), store_0(a)
            states[1][i], states[2][i] = store_1(b), store_2(c)

    return element


def _measured_values(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> Any:
    """`values_of` a rule on the CPU."""
    measure, condition = _of_rule(rule.measure), composed(prologue)
    return njit(error_model="numpy")(values_of(measure, condition, w, g, s, lambda f: f))


def values_of(
    measure: Any, condition: Any, w: Storage, g: Storage, s: tuple[Storage, ...], compiled: Any
) -> Any:
    """``values(w, g, states, i, hp)``: load, prologue and ``rule.measure`` for one element.

    Arguments as `element_of`.
    """
    load_w, load_g = compiled(w.to_real), compiled(g.to_real)
    load_0, load_1, _ = padded([compiled(storage.to_real) for storage in s], load_w)
    real, n_states = numba_type(real_of(w)), len(s)

    def values(w, g, states, i, hp):
        x = real(load_w(w[i]))
        d = condition(real(load_g(g[i])), x, hp)
        if n_states == 0:
            return measure(x, d, hp)
        if n_states == 1:
            return measure(x, d, real(load_0(states[0][i])), hp)
        return measure(x, d, real(load_0(states[0][i])), real(load_1(states[1][i])), hp)

    return values


def _state_arrays(s: tuple[Storage, ...]) -> Any:
    """``arrays(s0, s1, s2, n)``: a compiled function that makes a tuple of the states."""
    n_states = len(s)
    carriers = [storage.carrier for storage in s] + [np.uint8] * MOST_STATES
    first, second, third = carriers[:MOST_STATES]

    @njit(inline="always")
    def arrays(s0, s1, s2, n):
        if n_states == 0:
            return ()
        if n_states == 1:
            return (carray(as_pointer(s0), n, first),)
        if n_states == 2:
            return (carray(as_pointer(s0), n, first), carray(as_pointer(s1), n, second))
        return (
            carray(as_pointer(s0), n, first),
            carray(as_pointer(s1), n, second),
            carray(as_pointer(s2), n, third),
        )

    return arrays


def _span(
    element: Any, hp: type, w: Storage, g: Storage | None, s: tuple[Storage, ...]
) -> Callable[..., None]:
    """The loop of a block over ``n`` contiguous elements."""
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    w_type, g_type = w.carrier, g.carrier if g else w.carrier
    state_arrays = _state_arrays(s)

    def block(w_address, g_address, s0, s1, s2, n, hp_address):
        scalars = read_hp(hp_address)
        w = carray(as_pointer(w_address), n, w_type)
        g = carray(as_pointer(g_address), n, g_type)
        states = state_arrays(s0, s1, s2, n)
        for i in range(w.size):
            element(w, g, states, i, scalars)

    return block


def _sum_of_squares(
    values: Any, n_values: int, hp: type, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> Callable[..., None]:
    """The loop of a measuring block: float64 sums of the squares of the values.

    ``reassoc`` allows packed additions. The order is that of the machine code, so it is the
    same for every call on the same elements.
    """
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    w_type, g_type = w.carrier, g.carrier
    state_arrays = _state_arrays(s)

    @njit(error_model="numpy", fastmath={"reassoc", "contract"})
    def add_up(w, g, states, hp):
        a = b = c = 0.0
        for i in range(w.size):
            found = values(w, g, states, i, hp)
            a += np.float64(found[0]) * np.float64(found[0])
            if n_values > 1:
                b += np.float64(found[1]) * np.float64(found[1])
            if n_values > 2:
                c += np.float64(found[2]) * np.float64(found[2])
        return a, b, c

    def measure(w_address, g_address, s0, s1, s2, n, hp_address, sums_address):
        w = carray(as_pointer(w_address), n, w_type)
        g = carray(as_pointer(g_address), n, g_type)
        found = add_up(w, g, state_arrays(s0, s1, s2, n), read_hp(hp_address))
        sums = carray(as_pointer(sums_address), n_values, np.float64)
        for k in range(n_values):
            sums[k] = found[k]

    return measure
