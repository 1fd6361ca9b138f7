"""The three passes over a tile of a matrix, as blocks for its storage types.

A tile is ``height`` rows of ``width`` elements, ``stride`` elements apart. Three blocks are

    block(arrays, offset, g, height, width, stride, rows, columns, hp, total)

``arrays`` is as in `cpu.blocks`, and ``offset`` the number of elements before the tile. The block
``terms`` adds to float64 sums of rows and columns; ``reduce`` and ``update`` read factors of rows
and columns, and ``reduce`` adds to ``total``. The fourth block computes the factors of a whole
matrix, those of its rows, then those of its columns:

    factors(row_sums, column_sums, height, width, row_state, column_state, factors, hp)

All arguments are int64: addresses and counts. The mathematics is that of a rule with `Lines`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...cache import fingerprint
from ...element import Kernel, conditioned, element_of
from ...inner import njit
from ...rule import Lines
from ...storage import F64, Storage
from ..blocks import CPU, SUMS, identity, readers
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import as_pointer, prefetch_line
from ..compiler.lines import LINE

# Elements of a piece of a row, and bytes by which the gradient is fetched ahead: the processor's
# own prefetching ends at a page, and is too late for a loop that computes much between two loads.
_PIECE, _AHEAD = 256, 2_048


class MatrixBlocks(NamedTuple):
    """The machine code of the passes; each is compiled when its address is first asked for."""

    terms: NativeFunction
    factors: NativeFunction
    reduce: NativeFunction
    update: NativeFunction


@cache
def matrix_blocks(kernel: Kernel) -> MatrixBlocks:
    """The blocks of a rule with states of rows and columns."""
    lines, rule = lines_of(kernel), kernel.rule
    line_functions = " ".join(fingerprint(function) for function in lines if callable(function))
    held = f"{lines.smallest} {lines.smallest_mean}"

    def block(name: str, function: Any, rule_function: Any) -> NativeFunction:
        text = identity(f"matrix {name}", rule_function, kernel, kernel.w, kernel.g, *kernel.s)
        return NativeFunction(function, f"{text} lines {line_functions} {held}")

    real, terms, reduce, update = kernel.real, _terms(kernel), _reduce(kernel), _update(kernel)
    return MatrixBlocks(
        block("terms", _tile_block(kernel, F64, terms), lines.term),
        block("factors", _factors(kernel), lines.average),
        block("measure", _tile_block(kernel, real, reduce), rule.measure),
        block("update", _tile_block(kernel, real, update), rule.update),
    )


def lines_of(kernel: Kernel) -> Lines:
    """The functions of rows and columns of the rule."""
    assert kernel.rule.lines is not None
    return kernel.rule.lines


def _tile_block(kernel: Kernel, line_storage: Storage, row: Any) -> Callable[..., None]:
    """A block from ``row(arrays, g, i, row_values, column_values, hp)``, on a piece of row ``i``.

    ``row`` returns its part of the total. Values of rows and columns are of ``line_storage``.
    """
    read_hp, read_arrays = readers(kernel)
    real, g_type, g_bytes = line_storage.carrier, kernel.g.carrier, kernel.g.itemsize

    def block(
        addresses, offset, g_address, height, width, stride, rows, columns, hp_address, total
    ):
        hp, sum_of_rows = read_hp(hp_address), 0.0
        row_values = carray(as_pointer(rows), height, real)
        column_values = carray(as_pointer(columns), width, real)
        for i in range(height):
            for left in range(0, width, _PIECE):
                place, n = i * stride + left, min(_PIECE, width - left)
                here = g_address + place * g_bytes
                # It may pass the end of the gradient: a prefetch of no memory does nothing.
                for ahead in range(here + _AHEAD, here + _AHEAD + n * g_bytes, LINE):
                    prefetch_line(ahead)
                arrays = read_arrays(addresses, offset + place, n, 1)
                g = carray(as_pointer(here), n, g_type)
                sum_of_rows += row(arrays, g, i, row_values, column_values[left : left + n], hp)
        # 0: a pass without a total.
        if total != 0:
            carray(as_pointer(total), 1, np.float64)[0] += sum_of_rows

    return block


def _terms(kernel: Kernel) -> Any:
    load, term = conditioned(kernel, CPU), CPU.rule(lines_of(kernel).term)

    @njit(error_model="numpy", fastmath=SUMS)
    def row(arrays, g, i, row_sums, column_sums, hp):
        total = 0.0
        for j in range(g.size):
            _, d = load(arrays[0], g, j, hp)
            q = np.float64(term(d, hp))
            column_sums[j] += q
            total += q
        row_sums[i] += total
        return 0.0

    return row


def _factors(kernel: Kernel) -> Callable[..., None]:
    real = kernel.real.carrier
    (read_hp, _), lines = readers(kernel), lines_of(kernel)
    averaged, hold = CPU.rule(lines.average), CPU.rule(lines.hold)
    row_factor, column_factor = CPU.rule(lines.row_factor), CPU.rule(lines.column_factor)
    smallest, smallest_mean = (kernel.column[k] for k in (lines.smallest, lines.smallest_mean))

    @njit(error_model="numpy")
    def average(state, sums, count, hp):
        """The moving averages; returns their mean."""
        total = 0.0
        for i in range(state.size):
            # One thread has all lines of a matrix, in order, so the sum has no parts.
            state[i] = averaged(state[i], real(sums[i] / count), hp)
            total += np.float64(state[i])
        return total / max(1, state.size)

    def factors(row_sums, column_sums, height, width, row_state, column_state, out, hp_address):
        scalars = read_hp(hp_address)
        rows = carray(as_pointer(row_state), height, real)
        columns = carray(as_pointer(column_state), width, real)
        made = carray(as_pointer(out), height + width, real)
        mean = average(rows, carray(as_pointer(row_sums), height, np.float64), width, scalars)
        mean = hold(mean, np.float64(scalars[smallest_mean]))
        average(columns, carray(as_pointer(column_sums), width, np.float64), height, scalars)
        for i in range(rows.size):
            made[i] = real(row_factor(np.float64(rows[i]), mean))
        for j in range(columns.size):
            columns[j] = hold(columns[j], scalars[smallest])
            made[height + j] = real(column_factor(np.float64(columns[j])))

    return factors


def _reduce(kernel: Kernel) -> Any:
    load, measured = conditioned(kernel, CPU), CPU.rule(kernel.rule.measure)

    @njit(error_model="numpy", fastmath=SUMS)
    def row(arrays, g, i, row_factors, column_factors, hp):
        total, row_factor = 0.0, row_factors[i]
        for j in range(g.size):
            _, d = load(arrays[0], g, j, hp)
            u = np.float64(measured(d, row_factor, column_factors[j], hp))
            total += u * u
        return total

    return row


def _update(kernel: Kernel) -> Any:
    element = element_of(kernel, kernel.rule.update, CPU, factors=("row", "column"))

    @njit(error_model="numpy")
    def row(arrays, g, i, row_factors, column_factors, hp):
        row_factor = row_factors[i]
        for j in range(g.size):
            element(arrays, g, j, row_factor, column_factors[j], hp)
        return 0.0

    return row
