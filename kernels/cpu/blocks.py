"""Rules to machine code.

The loops of this package (drivers) do not know a rule. A rule is compiled into a *block*,

    update(arrays, row, rows, width, g, hp)            six int64

which updates ``rows`` rows of ``width`` elements; a driver calls it through its address.
``arrays`` is the address of the addresses of the parameter and its states, ``row`` the number of
the first row that is updated, ``g`` the address of that row's gradient, ``hp`` that of the scalars.
For an elementwise rule every element may be a row. A new rule then costs one small compilation, the
drivers are compiled once for all rules, and the dense, row-sparse, serial and parallel paths run
the very same machine code, hence give equal bits.

A rule that measures rows does so within its block: a row is read twice, the second time from the
first cache. A rule that measures tensors has another block for its first stage, which only sums:

    reduce(arrays, row, rows, width, g, hp, sums)     seven int64
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ..cache import fingerprint
from ..element import (
    Compiler,
    Kernel,
    adder,
    element_of,
    following,
    placed,
    scaling,
    scope_loader,
    scope_storer,
    values_of,
)
from ..inner import njit
from ..rule import PROLOGUE_FLAGS, RULE_FLAGS, hp_type
from ..storage import Storage, numba_type
from .compiler.compile import NativeFunction
from .compiler.intrinsics import array_reader, as_pointer, tuple_reader

CPU = Compiler(
    # Cached, so that blocks share a compiled function of the same type of the arithmetic.
    rule=cache(njit(**RULE_FLAGS)),
    part=cache(njit(**PROLOGUE_FLAGS)),
    conversion=lambda function: function,
    # Not inlined by Numba: inlined by it, the function keeps LLVM from vectorising the loop.
    element=njit(error_model="numpy"),
    inlined=njit(error_model="numpy", inline="always"),
)
SUMS = {"reassoc", "contract"}
"""Flags of a loop that sums: ``reassoc`` allows vectorised additions."""


class Blocks(NamedTuple):
    """The machine code of a kernel, compiled when its address is first asked for."""

    update: NativeFunction
    update_zero: NativeFunction  # for a gradient that is 0 everywhere and is not read
    update_real: NativeFunction  # for a gradient in the type of the arithmetic (summed rows)
    reduce: NativeFunction | None  # the first stage of a two-stage rule
    reduce_real: NativeFunction | None


@cache
def blocks(kernel: Kernel) -> Blocks:
    """The blocks of a kernel; nothing is compiled yet."""
    summed, measures = kernel.with_gradient(kernel.real), kernel.rule.is_two_stage
    block = _row_block if kernel.rule.is_row_wise else _block
    return Blocks(
        block(kernel),
        block(summed, zero_gradient=True),
        block(summed),
        _reduce(kernel) if measures else None,
        _reduce(summed) if measures else None,
    )


def readers(kernel: Kernel) -> tuple[Any, Any]:
    """Compiled readers of the scalars, and of the arrays of the parameter and its states."""
    hp = tuple_reader(hp_type(kernel.rule, kernel.prologue), numba_type(kernel.real))
    return hp, array_reader([storage.carrier for storage in kernel.storages], kernel.per)


def identity(kind: str, function: Any, kernel: Kernel, *storages: Storage) -> str:
    """A text of all that decides the machine code of a rule's function, for the on-disk cache."""
    parts = " ".join(fingerprint(p.apply) + str(p.hp) for p in kernel.prologue)
    names, rule = " ".join(storage.name for storage in storages), kernel.rule
    states = [(state.per, state.is_read) for state in rule.states]
    measured = f"{rule.n_measured} {rule.signed} {rule.scope} {rule.takes} {rule.factor_of}"
    if rule.keeping is not None:
        functions = rule.keeping.load, rule.keeping.store, rule.keeping.bits
        parts += f" kept {rule.keeping.name} {' '.join(map(_named, functions))}"
    # In other blocks neither is compiled, or it is ``function`` itself.
    for other in (rule.measure, rule.factor) if rule.is_row_wise else ():
        measured += f" {_named(other)}"
    return (
        f"{kind} {function.__name__} {fingerprint(function)} {states} {measured} "
        f"{rule.hp} prologue {parts} storage {names}"
    )


def _named(function: Any) -> str:
    return fingerprint(function) if function else "none"


@cache
def _block(kernel: Kernel, *, zero_gradient: bool = False) -> NativeFunction:
    """The loop over contiguous elements."""
    rule, g_type = kernel.rule.update, kernel.g.carrier
    element = element_of(kernel, rule, CPU, zero_gradient=zero_gradient)
    (read_hp, read_arrays), place = readers(kernel), placed(kernel, CPU)

    def update(addresses, row, rows, width, g_address, hp_address):
        arrays = read_arrays(addresses, row, rows, width)
        hp = place(read_hp(hp_address), row * width)
        g = carray(as_pointer(g_address), rows * width, g_type)
        for i in range(arrays[0].size):
            element(arrays, g, i, hp)

    kind = "zero" if zero_gradient else "block"
    return NativeFunction(update, identity(kind, rule, kernel, kernel.w, kernel.g, *kernel.s))


@cache
def _row_block(kernel: Kernel, *, zero_gradient: bool = False) -> NativeFunction:
    """The block of a rule that measures rows: each row is measured, then updated."""
    rule, g_type, g_bytes = kernel.rule.update, kernel.g.carrier, kernel.g.itemsize
    element = element_of(kernel, rule, CPU, zero_gradient=zero_gradient)
    read_hp, read_arrays = readers(kernel)
    add_up = _summing(kernel, zero_gradient=zero_gradient)
    load = scope_loader(kernel, CPU)
    store = scope_storer(kernel, CPU, len(kernel.rule.scaled_fields))
    follow, scale, place = following(kernel, CPU), scaling(kernel, CPU), placed(kernel, CPU)

    def update(addresses, row, rows, width, g_address, hp_address):
        scalars = read_hp(hp_address)
        for k in range(rows):
            arrays = read_arrays(addresses, row + k, 1, width)
            g = carray(as_pointer(g_address + k * width * g_bytes), width, g_type)
            numbers = follow(add_up(arrays, g, scalars), load(arrays), width, scalars)
            store(arrays, numbers)
            hp = place(scale(scalars, numbers), (row + k) * width)
            for i in range(arrays[0].size):
                element(arrays, g, i, hp)

    kind = "zero rows" if zero_gradient else "rows"
    return NativeFunction(update, identity(kind, rule, kernel, kernel.w, kernel.g, *kernel.s))


def _summing(kernel: Kernel, *, zero_gradient: bool = False) -> Any:
    """``add_up(arrays, g, hp)``: the float64 sums that the rule measures over some elements."""
    zeros = (0.0,) * kernel.rule.n_measured
    if not zeros:
        return CPU.inlined(lambda arrays, g, hp: ())  # noqa: ARG005
    values = values_of(kernel, CPU, zero_gradient=zero_gradient)
    add = adder(kernel.rule, CPU)

    @njit(error_model="numpy", fastmath=SUMS)
    def add_up(arrays, g, hp):
        sums = zeros
        for i in range(arrays[0].size):
            sums = add(sums, values(arrays, g, i, hp))
        return sums

    return add_up


@cache
def _reduce(kernel: Kernel) -> NativeFunction:
    """The loop of a measuring block: float64 sums in the order of the machine code."""
    rule, n_values, g_type = kernel.rule.measure, kernel.rule.n_measured, kernel.g.carrier
    add_up, (read_hp, read_arrays) = _summing(kernel), readers(kernel)

    def reduce(addresses, row, rows, width, g_address, hp_address, sums_address):
        g = carray(as_pointer(g_address), rows * width, g_type)
        totals = add_up(read_arrays(addresses, row, rows, width), g, read_hp(hp_address))
        sums = carray(as_pointer(sums_address), n_values, np.float64)
        for k in range(n_values):
            sums[k] = totals[k]

    return NativeFunction(reduce, identity("measure", rule, kernel, kernel.w, kernel.g, *kernel.s))
