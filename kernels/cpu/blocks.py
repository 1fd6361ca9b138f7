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

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ..element import Compiler, Kernel, element_of, values_of
from ..inner import njit
from ..rules.rule import PROLOGUE_FLAGS, RULE_FLAGS, hp_type
from ..storage import Storage, numba_type
from .cache import fingerprint
from .compile import NativeFunction
from .intrinsics import array_reader, as_pointer, tuple_reader

CPU = Compiler(
    # Cached: the same function for all blocks is compiled once for a type of the arithmetic.
    rule=cache(njit(**RULE_FLAGS)),
    part=cache(njit(**PROLOGUE_FLAGS)),
    conversion=lambda function: function,
    element=njit(error_model="numpy"),
    inlined=njit(error_model="numpy", inline="always"),
)
SUMS = {"reassoc", "contract"}
"""What a loop that adds up may do: ``reassoc`` allows packed additions."""


class Blocks(NamedTuple):
    """The machine code of a kernel, compiled when its address is first asked for."""

    update: NativeFunction
    update_zero: NativeFunction  # for a gradient that is 0 everywhere and is not read
    update_real: NativeFunction  # for one in the type of the arithmetic (summed rows)
    measure: NativeFunction | None  # the first stage of a two-stage rule
    measure_real: NativeFunction | None


@cache
def blocks(kernel: Kernel) -> Blocks:
    """The blocks of a kernel; nothing is compiled yet."""
    of_sums = kernel.with_gradient(kernel.real)
    return Blocks(
        _block(kernel),
        _block(of_sums, zero_gradient=True),
        _block(of_sums),
        _measure(kernel) if kernel.rule.measure else None,
        _measure(of_sums) if kernel.rule.measure else None,
    )


def readers(kernel: Kernel) -> tuple[Any, Any]:
    """What reads the scalars, and the arrays of the parameter and its states."""
    hp = tuple_reader(hp_type(kernel.rule, kernel.prologue), numba_type(kernel.real))
    return hp, array_reader([storage.carrier for storage in (kernel.w, *kernel.s)])


def identity(kind: str, function: Any, kernel: Kernel, *storages: Storage) -> str:
    """All that decides the machine code of a function of a rule, for the on-disk cache."""
    parts = " ".join(fingerprint(p.apply) + str(p.hp) for p in kernel.prologue)
    names = " ".join(storage.name for storage in storages)
    return (
        f"{kind} {function.__name__} {fingerprint(function)} {kernel.rule.n_measured} "
        f"{kernel.rule.hp} prologue {parts} storage {names}"
    )


@cache
def _block(kernel: Kernel, *, zero_gradient: bool = False) -> NativeFunction:
    """The loop over ``n`` contiguous elements."""
    rule, g_type = kernel.rule.update, kernel.g.carrier
    element = element_of(kernel, rule, CPU, zero_gradient=zero_gradient)
    read_hp, read_arrays = readers(kernel)

    def update(addresses, offset, g_address, n, hp_address):
        hp, arrays = read_hp(hp_address), read_arrays(addresses, offset, n)
        g = carray(as_pointer(g_address), n, g_type)
        for i in range(arrays[0].size):
            element(arrays, g, i, hp)

    kind = "zero" if zero_gradient else "block"
    return NativeFunction(update, identity(kind, rule, kernel, kernel.w, kernel.g, *kernel.s))


def _adder(n_values: int, k: int = 0) -> Any:
    """``add(sums, values)``: a tuple of sums, from number ``k`` on, and the squares of values."""
    if k == n_values:
        return CPU.inlined(lambda sums, values: ())  # noqa: ARG005
    rest = _adder(n_values, k + 1)

    def add(sums, values):
        return (sums[k] + np.float64(values[k]) * np.float64(values[k]), *rest(sums, values))

    return CPU.inlined(add)


@cache
def _measure(kernel: Kernel) -> NativeFunction:
    """The loop of a measuring block: float64 sums in the order of the machine code."""
    rule, n_values, g_type = kernel.rule.measure, kernel.rule.n_measured, kernel.g.carrier
    values, add, zeros = values_of(kernel, CPU), _adder(n_values), (0.0,) * n_values
    read_hp, read_arrays = readers(kernel)

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

    return NativeFunction(measure, identity("measure", rule, kernel, kernel.w, kernel.g, *kernel.s))
