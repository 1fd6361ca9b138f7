"""Adafactor's three passes over a tile of a matrix, as blocks for its storage types.

A tile is ``height`` rows of ``width`` elements, ``stride`` elements apart::

    squares(w, g, height, width, stride, row_sums, column_sums, hp)
    factors(row_sums, column_sums, height, width, row_state, column_state, factors, hp)
    direction(w, g, height, width, stride, row_factors, column_factors, hp, sum)
    update(w, g, average, height, width, stride, row_factors, column_factors, hp)

``factors`` works on a whole matrix: its row factors, then its column factors. All arguments are
int64: addresses and counts. The mathematics is in `rules.adafactor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray

from .blocks import composed
from .cache import fingerprint
from .compile import NativeFunction
from .cpu.intrinsics import as_pointer, tuple_reader
from .inner import njit
from .rules import adafactor as rules
from .rules.rule import Prologue, hp_type
from .storage import F64, Storage, numba_type, real_of


@dataclass(frozen=True, eq=False)
class FactoredKernel:
    """The blocks for a parameter, gradient and first moment of these storage types.

    Attributes:
        prologue: what happens to the gradient first.
        w: storage of the parameter; the arithmetic follows it.
        g: storage of the gradient.
        s: storage of the first moment, None without one.
        real: storage of the arithmetic, of ``hp``, of the states of rows and columns and of the
            factors; sums are float64.
        squares, factors, direction, update: the blocks.
    """

    prologue: Prologue
    w: Storage
    g: Storage
    s: Storage | None
    real: Storage
    squares: NativeFunction
    factors: NativeFunction
    direction: NativeFunction
    update: NativeFunction

    @property
    def blocks(self) -> tuple[NativeFunction, ...]:
        """All four blocks."""
        return self.squares, self.factors, self.direction, self.update


@cache
def factored_kernel(
    prologue: Prologue, w: Storage, g: Storage, s: Storage | None
) -> FactoredKernel:
    """The blocks behind ``prologue`` for these storage types; nothing is compiled yet."""
    hp = hp_type(rules.ADAFACTOR, prologue)
    load = _conditioned(prologue, w, g)
    parts = " ".join(fingerprint(p.apply) + str(p.hp) for p in prologue)
    suffix = f"{rules.ADAFACTOR.hp} prologue {parts} storage {w.name} {g.name} "

    def block(name: str, function: Callable[..., None], count: int, more: str) -> NativeFunction:
        return NativeFunction(function, count, f"factored {name} {suffix}{more}")

    return FactoredKernel(
        prologue,
        w,
        g,
        s,
        real_of(w),
        block("squares", _squares(load, hp, w, g), 8, ""),
        _factors(hp, w, suffix),
        block("direction", _direction(load, hp, w, g), 9, ""),
        block("update", _update(load, hp, w, g, s), 9, s.name if s else "none"),
    )


def _conditioned(prologue: Prologue, w: Storage, g: Storage) -> Any:
    """``load(w, g, hp)``: the parameter and the gradient after the prologue, as numbers."""
    load_w, load_g, condition = w.to_real, g.to_real, composed(prologue)
    real = numba_type(real_of(w))

    @njit(error_model="numpy")
    def load(w, g, hp):
        x = real(load_w(w))
        return x, condition(real(load_g(g)), x, hp)

    return load


def _squares(load: Any, hp: type, w: Storage, g: Storage) -> Callable[..., None]:
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    w_type, g_type, w_bytes, g_bytes = w.carrier, g.carrier, w.itemsize, g.itemsize
    squared = rules.squared

    @njit(error_model="numpy", fastmath={"reassoc", "contract"})
    def add_row(w, g, column_sums, hp):
        total = 0.0
        for j in range(g.size):
            _, d = load(w[j], g[j], hp)
            q = np.float64(squared(d, hp))
            column_sums[j] += q
            total += q
        return total

    def squares(w_address, g_address, height, width, stride, row_sums, column_sums, hp_address):
        scalars = read_hp(hp_address)
        of_row = carray(as_pointer(row_sums), height, np.float64)
        of_column = carray(as_pointer(column_sums), width, np.float64)
        of_column[:] = 0.0
        for i in range(height):
            w = carray(as_pointer(w_address + i * stride * w_bytes), width, w_type)
            g = carray(as_pointer(g_address + i * stride * g_bytes), width, g_type)
            of_row[i] = add_row(w, g, of_column, scalars)

    return squares


def _factors(hp: type, w: Storage, suffix: str) -> NativeFunction:
    real_type = np.float64 if real_of(w) is F64 else np.float32
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    averaged_mean, held_up = rules.averaged_mean, rules.held_up
    row_factor, column_factor = rules.row_factor, rules.column_factor

    @njit(error_model="numpy")
    def average(state, sums, count, hp):
        """The moving averages; returns their mean."""
        total = 0.0
        for i in range(state.size):
            state[i] = averaged_mean(state[i], real_type(sums[i] / count), hp)
            total += np.float64(state[i])
        return total / max(1, state.size)

    def factors(row_sums, column_sums, height, width, row_state, column_state, out, hp_address):
        scalars = read_hp(hp_address)
        rows = carray(as_pointer(row_state), height, real_type)
        columns = carray(as_pointer(column_state), width, real_type)
        of_row = carray(as_pointer(out), height + width, real_type)
        mean = average(rows, carray(as_pointer(row_sums), height, np.float64), width, scalars)
        mean = held_up(mean, np.float64(scalars.smallest))
        average(columns, carray(as_pointer(column_sums), width, np.float64), height, scalars)
        for i in range(rows.size):
            of_row[i] = real_type(row_factor(np.float64(rows[i]), mean))
        for j in range(columns.size):
            columns[j] = held_up(columns[j], scalars.smallest)
            of_row[height + j] = real_type(column_factor(np.float64(columns[j])))

    return NativeFunction(factors, 8, f"factored factors {real_type.__name__} {suffix}")


def _direction(load: Any, hp: type, w: Storage, g: Storage) -> Callable[..., None]:
    real_type = np.float64 if real_of(w) is F64 else np.float32
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    w_type, g_type, w_bytes, g_bytes = w.carrier, g.carrier, w.itemsize, g.itemsize
    factored_direction = rules.factored_direction

    @njit(error_model="numpy", fastmath={"reassoc", "contract"})
    def add_row(w, g, of_row, of_columns, hp):
        total = 0.0
        for j in range(g.size):
            _, d = load(w[j], g[j], hp)
            u = np.float64(factored_direction(d, of_row, of_columns[j], hp))
            total += u * u
        return total

    def direction(
        w_address, g_address, height, width, stride, row_factors, column_factors, hp_address, out
    ):
        scalars = read_hp(hp_address)
        of_rows = carray(as_pointer(row_factors), height, real_type)
        of_columns = carray(as_pointer(column_factors), width, real_type)
        total = 0.0
        for i in range(height):
            w = carray(as_pointer(w_address + i * stride * w_bytes), width, w_type)
            g = carray(as_pointer(g_address + i * stride * g_bytes), width, g_type)
            total += add_row(w, g, of_rows[i], of_columns, scalars)
        carray(as_pointer(out), 1, np.float64)[0] += total

    return direction


def _update(load: Any, hp: type, w: Storage, g: Storage, s: Storage | None) -> Callable[..., None]:
    real_type = np.float64 if real_of(w) is F64 else np.float32
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    wide = real_of(w) is F64
    w_type, g_type, w_bytes, g_bytes = w.carrier, g.carrier, w.itemsize, g.itemsize
    store_w = w.from_wide if wide else w.from_real
    has_average = s is not None
    s = s or w  # without a first moment nothing of it is compiled
    s_type, s_bytes, load_s = s.carrier, s.itemsize, s.to_real
    store_s = s.from_wide if wide else s.from_real
    real = numba_type(real_of(w))
    factored, factored_plain = rules.factored, rules.factored_plain

    @njit(error_model="numpy")
    def update_row(w, g, average, of_row, of_columns, hp):
        for j in range(w.size):
            x, d = load(w[j], g[j], hp)
            if has_average:
                a = real(load_s(average[j]))
                x, a = factored(x, d, a, of_row, of_columns[j], hp)
                average[j] = store_s(a)
            else:
                x = factored_plain(x, d, of_row, of_columns[j], hp)
            w[j] = store_w(x)

    def update(
        w_address,
        g_address,
        average_address,
        height,
        width,
        stride,
        row_factors,
        column_factors,
        hp_address,
    ):
        scalars = read_hp(hp_address)
        of_rows = carray(as_pointer(row_factors), height, real_type)
        of_columns = carray(as_pointer(column_factors), width, real_type)
        for i in range(height):
            offset = i * stride
            w = carray(as_pointer(w_address + offset * w_bytes), width, w_type)
            g = carray(as_pointer(g_address + offset * g_bytes), width, g_type)
            average = carray(as_pointer(average_address + offset * s_bytes), width, s_type)
            update_row(w, g, average, of_rows[i], of_columns, scalars)

    return update
