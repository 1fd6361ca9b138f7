"""Adafactor's three passes over a tile of a matrix, as blocks for its storage types.

A tile is ``height`` rows of ``width`` elements, ``stride`` elements apart::

    squares(arrays, offset, g, height, width, stride, row_sums, column_sums, hp)
    factors(row_sums, column_sums, height, width, row_state, column_state, factors, hp)
    direction(arrays, offset, g, height, width, stride, row_factors, column_factors, hp, sum)
    update(arrays, offset, g, height, width, stride, row_factors, column_factors, hp)

``arrays`` and ``offset`` are as in `cpu.blocks`. ``factors`` works on a whole matrix: its row
factors, then its column factors. All arguments are int64: addresses and counts. The mathematics is
in `rules.adafactor`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from ...element import Kernel, conditioned, element_of
from ...rules import adafactor as rules
from ..blocks import CPU, SUMS, identity, readers
from ..compile import NativeFunction
from ..intrinsics import as_pointer


class FactoredBlocks(NamedTuple):
    """The machine code of the passes; each is compiled when its address is first asked for."""

    squares: NativeFunction
    factors: NativeFunction
    direction: NativeFunction
    update: NativeFunction


@cache
def factored_blocks(kernel: Kernel) -> FactoredBlocks:
    """The blocks of a `rule.factored`, whose states in the kernel are those of the whole shape."""
    squared, factored, w, g = rules.squared, kernel.rule.factored, kernel.w, kernel.g
    return FactoredBlocks(
        NativeFunction(_squares(kernel), identity("factored squares", squared, kernel, w, g)),
        NativeFunction(_factors(kernel), identity("factors", squared, kernel, w)),
        NativeFunction(_direction(kernel), identity("factored direction", squared, kernel, w, g)),
        NativeFunction(
            _update(kernel), identity("factored update", factored, kernel, w, g, *kernel.s)
        ),
    )


def _squares(kernel: Kernel) -> Callable[..., None]:
    load = conditioned(kernel.prologue, kernel.w, kernel.g, CPU)
    read_hp, read_arrays = readers(kernel)
    g_type, g_bytes = kernel.g.carrier, kernel.g.itemsize
    squared = rules.squared

    @njit(error_model="numpy", fastmath=SUMS)
    def add_row(w, g, column_sums, hp):
        total = 0.0
        for j in range(g.size):
            _, d = load(w, g, j, hp)
            q = np.float64(squared(d, hp))
            column_sums[j] += q
            total += q
        return total

    def squares(arrays, offset, g_address, height, width, stride, row_sums, column_sums, hp):
        scalars = read_hp(hp)
        of_row = carray(as_pointer(row_sums), height, np.float64)
        of_column = carray(as_pointer(column_sums), width, np.float64)
        of_column[:] = 0.0
        for i in range(height):
            w = read_arrays(arrays, offset + i * stride, width)[0]
            g = carray(as_pointer(g_address + i * stride * g_bytes), width, g_type)
            of_row[i] = add_row(w, g, of_column, scalars)

    return squares


def _factors(kernel: Kernel) -> Callable[..., None]:
    real = kernel.real.carrier
    read_hp, _ = readers(kernel)
    averaged_mean, held_up = rules.averaged_mean, rules.held_up
    row_factor, column_factor = rules.row_factor, rules.column_factor

    @njit(error_model="numpy")
    def average(state, sums, count, hp):
        """The moving averages; returns their mean."""
        total = 0.0
        for i in range(state.size):
            state[i] = averaged_mean(state[i], real(sums[i] / count), hp)
            total += np.float64(state[i])
        return total / max(1, state.size)

    def factors(row_sums, column_sums, height, width, row_state, column_state, out, hp_address):
        scalars = read_hp(hp_address)
        rows = carray(as_pointer(row_state), height, real)
        columns = carray(as_pointer(column_state), width, real)
        of_row = carray(as_pointer(out), height + width, real)
        mean = average(rows, carray(as_pointer(row_sums), height, np.float64), width, scalars)
        mean = held_up(mean, np.float64(scalars.smallest))
        average(columns, carray(as_pointer(column_sums), width, np.float64), height, scalars)
        for i in range(rows.size):
            of_row[i] = real(row_factor(np.float64(rows[i]), mean))
        for j in range(columns.size):
            columns[j] = held_up(columns[j], scalars.smallest)
            of_row[height + j] = real(column_factor(np.float64(columns[j])))

    return factors


def _direction(kernel: Kernel) -> Callable[..., None]:
    load = conditioned(kernel.prologue, kernel.w, kernel.g, CPU)
    read_hp, read_arrays = readers(kernel)
    real, g_type, g_bytes = kernel.real.carrier, kernel.g.carrier, kernel.g.itemsize
    factored_direction = rules.factored_direction

    @njit(error_model="numpy", fastmath=SUMS)
    def add_row(w, g, of_row, of_columns, hp):
        total = 0.0
        for j in range(g.size):
            _, d = load(w, g, j, hp)
            u = np.float64(factored_direction(d, of_row, of_columns[j], hp))
            total += u * u
        return total

    def direction(
        arrays, offset, g_address, height, width, stride, row_factors, column_factors, hp, out
    ):
        scalars = read_hp(hp)
        of_rows = carray(as_pointer(row_factors), height, real)
        of_columns = carray(as_pointer(column_factors), width, real)
        total = 0.0
        for i in range(height):
            w = read_arrays(arrays, offset + i * stride, width)[0]
            g = carray(as_pointer(g_address + i * stride * g_bytes), width, g_type)
            total += add_row(w, g, of_rows[i], of_columns, scalars)
        carray(as_pointer(out), 1, np.float64)[0] += total

    return direction


def _update(kernel: Kernel) -> Callable[..., None]:
    assert kernel.rule.factored is not None
    element = element_of(kernel.rule.factored, kernel.prologue, kernel.w, kernel.g, kernel.s, CPU)
    read_hp, read_arrays = readers(kernel)
    real, g_type, g_bytes = kernel.real.carrier, kernel.g.carrier, kernel.g.itemsize

    @njit(error_model="numpy")
    def update_row(arrays, g, of_row, of_columns, hp):
        for j in range(g.size):
            element(arrays, g, j, of_row, of_columns[j], hp)

    def update(arrays, offset, g_address, height, width, stride, row_factors, column_factors, hp):
        scalars = read_hp(hp)
        of_rows = carray(as_pointer(row_factors), height, real)
        of_columns = carray(as_pointer(column_factors), width, real)
        for i in range(height):
            row = read_arrays(arrays, offset + i * stride, width)
            g = carray(as_pointer(g_address + i * stride * g_bytes), width, g_type)
            update_row(row, g, of_rows[i], of_columns, scalars)

    return update
