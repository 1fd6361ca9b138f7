"""Rules to machine code.

The loops of this package (drivers) do not know a rule. A rule is compiled into a *block*,

    update(arrays, offset, g, n, hp)            five int64

which updates ``n`` contiguous elements, and a driver calls it through its address: ``arrays`` is
the address of the addresses of the parameter and its states, ``offset`` the number of elements
before those that are updated; ``g``, of the gradient of these, and ``hp`` are addresses. A new rule
then costs one small compilation, the drivers are compiled once for all rules, and the dense,
row-sparse, serial and parallel paths run the very same machine code, hence give equal bits.

The first stage of a two-stage rule is compiled into a block that only reads and adds up,

    measure(arrays, offset, g, n, hp, sums)     six int64
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit

from ..element import Compiler, Kernel, element_of, values_of
from ..rules.rule import PROLOGUE_FLAGS, RULE_FLAGS, Prologue, Rule, hp_type
from ..storage import Storage, numba_type, real_of
from .cache import fingerprint
from .compile import NativeFunction
from .intrinsics import array_reader, as_pointer, tuple_reader

CPU = Compiler(
    rule=njit(**RULE_FLAGS),
    part=njit(**PROLOGUE_FLAGS),
    conversion=lambda function: function,
    element=njit(error_model="numpy"),
    inlined=njit(error_model="numpy", inline="always"),
)
_BLOCK_ARGUMENTS = 5
_MEASURE_ARGUMENTS = 6
SUMS = {"reassoc", "contract"}


@dataclass(frozen=True, eq=False)
class Blocks:
    """The machine code of a kernel, compiled when its address is first asked for.

    Attributes:
        update: updates contiguous elements.
        update_zero: the same for a gradient that is 0 everywhere and is not read.
        update_real: the same for a gradient in the type of the arithmetic (summed rows).
        measure: the first stage of a two-stage rule, else None.
        measure_real: the same for a gradient in the type of the arithmetic.
    """

    update: NativeFunction
    update_zero: NativeFunction
    update_real: NativeFunction
    measure: NativeFunction | None
    measure_real: NativeFunction | None


@cache
def blocks(kernel: Kernel) -> Blocks:
    """The blocks of a kernel; nothing is compiled yet."""
    rule, prologue, w, s = kernel.rule, kernel.prologue, kernel.w, kernel.s
    of_gradients = (kernel.g, None, kernel.real)
    update, zero, real = (_block(rule, prologue, w, g, s) for g in of_gradients)
    if not rule.measure:
        return Blocks(update, zero, real, None, None)
    measure, measure_real = (_measure(rule, prologue, w, g, s) for g in (kernel.g, kernel.real))
    return Blocks(update, zero, real, measure, measure_real)


@cache
def _block(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage | None, s: tuple[Storage, ...]
) -> NativeFunction:
    element = element_of(rule.update, prologue, w, g, s, CPU)
    function = _span(element, hp_type(rule, prologue), w, g, s)
    identity = _identity("block", rule.update, rule, prologue, w, g, s)
    return NativeFunction(function, _BLOCK_ARGUMENTS, identity)


@cache
def _measure(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> NativeFunction:
    assert rule.measure is not None
    values = values_of(rule.measure, prologue, w, g, s, CPU)
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


def _span(
    element: Any, hp: type, w: Storage, g: Storage | None, s: tuple[Storage, ...]
) -> Callable[..., None]:
    """The loop of a block over ``n`` contiguous elements."""
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    read_arrays, g_type = array_reader([storage.carrier for storage in (w, *s)]), (g or w).carrier

    def update(addresses, offset, g_address, n, hp_address):
        scalars = read_hp(hp_address)
        arrays = read_arrays(addresses, offset, n)
        g = carray(as_pointer(g_address), n, g_type)
        for i in range(arrays[0].size):
            element(arrays, g, i, scalars)

    return update


def _adder(n_values: int, k: int = 0) -> Any:
    """``add(sums, values)``: a tuple of sums, from number ``k`` on, and the squares of values."""
    if k == n_values:
        return CPU.inlined(lambda sums, values: ())  # noqa: ARG005
    rest = _adder(n_values, k + 1)

    def add(sums, values):
        return (sums[k] + np.float64(values[k]) * np.float64(values[k]), *rest(sums, values))

    return CPU.inlined(add)


def _sum_of_squares(
    values: Any, n_values: int, hp: type, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> Callable[..., None]:
    """The loop of a measuring block: float64 sums of the squares of the values.

    ``reassoc`` allows packed additions. The order is that of the machine code, so it is the
    same for every call on the same elements.
    """
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    read_arrays, g_type = array_reader([storage.carrier for storage in (w, *s)]), g.carrier
    add, zeros = _adder(n_values), (0.0,) * n_values

    @njit(error_model="numpy", fastmath=SUMS)
    def add_up(arrays, g, hp):
        sums = zeros
        for i in range(arrays[0].size):
            sums = add(sums, values(arrays, g, i, hp))
        return sums

    def measure(addresses, offset, g_address, n, hp_address, sums_address):
        g = carray(as_pointer(g_address), n, g_type)
        found = add_up(read_arrays(addresses, offset, n), g, read_hp(hp_address))
        sums = carray(as_pointer(sums_address), n_values, np.float64)
        for k in range(n_values):
            sums[k] = found[k]

    return measure
