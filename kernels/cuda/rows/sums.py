"""Sums of equal rows of a gradient, written to an array of their own, where no rule takes them.

All occurrences of a row are added one after the other, in order of occurrence, as NumPy's
``add.at`` adds them: the ranges of the loops of a step (`kernels`) would round otherwise. A sum
begins with 0 there, so it is never -0. Grids are those of `kernels`; ``tables`` is a table of one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from ...rules.gradient import COUPLED_DECAY
from ...rules.norm import SCALED
from ...storage import Storage, numba_type
from ..dense.tiles import CARRIERS, by_tiles, narrowing, sums, tile_length
from ..device.backend import load_int64, store_int32, store_int64, tile_storer
from ..device.functions import device_function
from ..device.records import hp_reader, row_reader
from .kernels import add_up_rows, thread_place
from .keys import Keys, first_at_least, is_first_of_row, key_at, may_not_write, row_at
from .table import TableRow

OTHER_BIT = 62
"""Of a word of `mark_firsts_kernel`: set for a key that is not the first of its row."""

_table_at = row_reader(TableRow)


def _sum_of_row(g: Storage, real: Storage, length: int) -> Any:
    """``run(total, keys, k, table, column)``: of the row whose first key is ``k``."""
    add_up, real_type, g_bytes = add_up_rows(g, real, length), numba_type(real), g.itemsize

    @cuda.jit(device=True)
    def run(total, keys, k, table, column):
        values, limit = table.values + column * g_bytes, (row_at(keys, k) + 1) << keys.bits
        add_up(total, keys, k, limit, values, table.width * g_bytes)
        for c in range(length):
            total[c] += real_type(0)

    return run


def _write_sum(g: Storage, real: Storage, out: Storage, length: int) -> Any:
    """``run(column, keys, k, table, place)``: the sum of a row to the row at ``place``."""
    sum_of_row, narrow = _sum_of_row(g, real, length), narrowing(real, out)
    real_type, out_type, out_bytes = numba_type(real), CARRIERS[out.carrier], out.itemsize
    store = tile_storer(length, out_bytes)

    @cuda.jit(device=True)
    def run(column, keys, k, table, place):
        total, x = cuda.local.array(length, real_type), cuda.local.array(length, out_type)
        sum_of_row(total, keys, k, table, column)
        for c in range(length):
            x[c] = narrow(total[c])
        store(place + column * out_bytes, x)

    return run


@cache
def dense_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """Sums of rows to their places in an array of all rows, which holds 0 already."""
    length, out_bytes = tile_length(g, out), out.itemsize
    write = by_tiles(lambda n: _write_sum(g, real, out, n), length)

    @cuda.jit
    def loop(keys, n, bits, tables, out, is_aligned, guard):
        if may_not_write(guard, 0, n, tables, 1):
            return
        keys, (k, tile) = Keys(keys, n, bits), thread_place()
        if k < n and is_first_of_row(keys, k):
            table = _table_at(tables, 0)
            place = out + row_at(keys, k) * table.width * out_bytes
            write(tile * length, table.width, is_aligned, keys, k, table, place)

    return loop


@cache
def distinct_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """Sums of the rows that occur, one after the other, and the indices of these rows.

    ``firsts`` are the first keys of the ``n_distinct`` rows.
    """
    length, out_bytes = tile_length(g, out), out.itemsize
    write = by_tiles(lambda n: _write_sum(g, real, out, n), length)

    @cuda.jit
    def loop(keys, n, bits, tables, firsts, n_distinct, indices, out, is_aligned):
        keys, (r, tile) = Keys(keys, n, bits), thread_place()
        if r >= n_distinct:
            return
        table, k = _table_at(tables, 0), load_int64(firsts + 8 * r)
        if tile == 0:
            if table.index_bytes == 4:
                store_int32(indices + 4 * r, row_at(keys, k))
            else:
                store_int64(indices + 8 * r, row_at(keys, k))
        place = out + r * table.width * out_bytes
        write(tile * length, table.width, is_aligned, keys, k, table, place)

    return loop


@cache
def decayed_sums_kernel(g: Storage, real: Storage, w: Storage) -> Any:
    """Sums of rows with their decay, in the place of the first occurrence of each row.

    The other places, which hold 0 already, stay as they are: so do those of bad indices. The
    result has the type of the arithmetic.
    """
    length, real_bytes, w_bytes = tile_length(g, w), real.itemsize, w.itemsize
    write = by_tiles(lambda n: _write_decayed(g, real, w, n), length)
    read_hp = hp_reader(SCALED, (COUPLED_DECAY,), real)

    @cuda.jit
    def loop(keys, n, bits, tables, out, is_aligned):
        keys, (k, tile) = Keys(keys, n, bits), thread_place()
        if k >= n or not is_first_of_row(keys, k):
            return
        table, row = _table_at(tables, 0), row_at(keys, k)
        if row < table.rows:
            hp, w_row = read_hp(table.hp), load_int64(table.arrays) + row * table.width * w_bytes
            position = key_at(keys, k) & ((1 << bits) - 1)
            place = out + position * table.width * real_bytes
            write(tile * length, table.width, is_aligned, keys, k, table, place, w_row, hp)

    return loop


def _write_decayed(g: Storage, real: Storage, w: Storage, length: int) -> Any:
    """``run(column, keys, k, table, place, w_row, hp)``: the sum of a row, decayed."""
    sum_of_row, load_w = _sum_of_row(g, real, length), sums(w, real, length).start
    decay, store = device_function(COUPLED_DECAY.apply), tile_storer(length, real.itemsize)
    real_type, real_bytes, w_bytes = numba_type(real), real.itemsize, w.itemsize

    @cuda.jit(device=True)
    def run(column, keys, k, table, place, w_row, hp):
        total, x = cuda.local.array(length, real_type), cuda.local.array(length, real_type)
        sum_of_row(total, keys, k, table, column)
        load_w(x, w_row + column * w_bytes)
        for c in range(length):
            total[c] = decay(total[c], x[c], hp)
        store(place + column * real_bytes, total)

    return run


@cuda.jit
def mark_firsts_kernel(keys, n, bits, words):
    """Write ``k`` to ``words[k]``, with a high bit where key ``k`` is not the first of its row.

    The words sorted by that bit begin with the first keys of all rows that occur.
    """
    k = cuda.grid(1)
    if k < n:
        other = 0 if is_first_of_row(Keys(keys, n, bits), k) else 1
        store_int64(words + 8 * k, k | (other << OTHER_BIT))


@cuda.jit
def count_firsts_kernel(words, n, count):
    """Write to ``count`` how many sorted words are of first keys; one thread."""
    store_int64(count, first_at_least(Keys(words, n, 0), 0, n, 1 << OTHER_BIT))
