"""Sums of equal rows of a gradient, written to an array of their own, where no rule takes them.

All occurrences of a row are added one after the other, in order of occurrence, as NumPy's
``add.at`` adds them: the ranges of the loops of a step (`rows`) would round otherwise. A sum begins
with 0 there, so it is never -0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from ...rules.gradient import COUPLED_DECAY
from ...rules.norm import SCALED
from ...rules.rule import hp_type
from ...storage import F64, Storage, numba_type
from ..dense.tiles import CARRIERS, sums
from ..device.backend import load_int64, store_int64, tile_storer, tuple_reader
from ..device.functions import device_function
from .search import first_at_least
from .update import add_up_rows, is_first_of_row, may_not_write, row_of_key

_WIDEST = 16  # bytes of a load
DECAY = hp_type(SCALED, (COUPLED_DECAY,))
"""The scalars of `decayed_sums_kernel`: those of a gradient that a decay is added to."""
OTHER_BIT = 62
"""Of a word of `mark_firsts_kernel`: set for a key that is not the first of its row."""


def tile_length(*storages: Storage) -> int:
    """Elements of a tile: as many as the widest load of the narrowest array brings."""
    return _WIDEST // min(storage.itemsize for storage in storages)


def narrowing(real: Storage, out: Storage) -> Any:
    """The conversion of a result to what is stored."""
    return device_function(out.from_wide if real is F64 else out.from_real)


@cache
def _sum_of_row(g: Storage, real: Storage, length: int) -> Any:
    """``run(total, keys, k, n, bits, values, width)``: of the row whose first key is ``k``."""
    add_up, real_type, g_bytes = add_up_rows(g, real, length), numba_type(real), g.itemsize

    @cuda.jit(device=True)
    def run(total, keys, k, n, bits, values, width):
        mask, limit = (1 << bits) - 1, (row_of_key(keys, k, bits) + 1) << bits
        add_up(total, keys, k, n, limit, mask, values, width * g_bytes)
        for c in range(length):
            total[c] += real_type(0)

    return run


@cache
def _write_sum(g: Storage, real: Storage, out: Storage) -> Any:
    """``run(keys, k, n, bits, values, width, column, place, is_aligned)``.

    It writes a tile of the sum of a row, from ``column`` on, to the row at ``place``.
    """
    length = tile_length(g, out)
    write_tile, write_one = (_write_tile(g, real, out, count) for count in (length, 1))

    @cuda.jit(device=True)
    def run(keys, k, n, bits, values, width, column, place, is_aligned):
        if is_aligned and column + length <= width:
            write_tile(keys, k, n, bits, values, width, column, place)
            return
        for c in range(min(length, width - column)):
            write_one(keys, k, n, bits, values, width, column + c, place)

    return run


def _write_tile(g: Storage, real: Storage, out: Storage, length: int) -> Any:
    """``run(keys, k, n, bits, values, width, column, place)`` on ``length`` columns."""
    sum_of_row, narrow = _sum_of_row(g, real, length), narrowing(real, out)
    real_type, out_type, store = (
        numba_type(real),
        CARRIERS[out.carrier],
        tile_storer(length, out.itemsize),
    )
    g_bytes, out_bytes = g.itemsize, out.itemsize

    @cuda.jit(device=True)
    def run(keys, k, n, bits, values, width, column, place):
        total, x = cuda.local.array(length, real_type), cuda.local.array(length, out_type)
        sum_of_row(total, keys, k, n, bits, values + column * g_bytes, width)
        for c in range(length):
            x[c] = narrow(total[c])
        store(place + column * out_bytes, x)

    return run


@cache
def dense_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """Sums of rows to their places in an array of all rows, which holds 0 already.

    ``loop[(groups of keys, groups of tiles), (tiles, keys)]``; ``tables`` is a table of one.
    """
    length, write, out_bytes = tile_length(g, out), _write_sum(g, real, out), out.itemsize

    @cuda.jit
    def loop(keys, n, tables, bits, n_rows, values, width, out, is_aligned, guard):
        if may_not_write(guard, 0, n, tables, 1):
            return
        k = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        column = (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) * length
        if k >= n or column >= width or not is_first_of_row(keys, k, bits):
            return
        place = out + row_of_key(keys, k, bits) * width * out_bytes
        write(keys, k, n, bits, values, width, column, place, is_aligned)

    return loop


@cache
def distinct_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """Sums of the rows that occur, one after the other, and the indices of these rows.

    ``loop[(groups of rows, groups of tiles), (tiles, rows)]``; ``firsts`` are the first keys of
    the ``n_distinct`` rows.
    """
    length, write, out_bytes = tile_length(g, out), _write_sum(g, real, out), out.itemsize
    store_int32 = tile_storer(1, 4)

    @cuda.jit
    def loop(keys, n, bits, firsts, n_distinct, values, width, indices, index_bytes, out, aligned):
        r = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        column = (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) * length
        if r >= n_distinct:
            return
        k = load_int64(firsts + 8 * r)
        if column == 0:
            row = row_of_key(keys, k, bits)
            if index_bytes == 4:
                word = cuda.local.array(1, types.uint32)
                word[0] = np.uint32(row)
                store_int32(indices + 4 * r, word)
            else:
                store_int64(indices + 8 * r, row)
        if column < width:
            place = out + r * width * out_bytes
            write(keys, k, n, bits, values, width, column, place, aligned)

    return loop


@cache
def decayed_sums_kernel(g: Storage, real: Storage, w: Storage) -> Any:
    """Sums of rows with their decay, in the place of the first occurrence of each row.

    The other places, which hold 0 already, stay as they are: so do those of bad indices. The
    result has the type of the arithmetic.

    ``loop[(groups of keys, groups of tiles), (tiles, keys)]``
    """
    length, real_bytes, w_bytes = tile_length(g, w), real.itemsize, w.itemsize
    write_tile, write_one = (_write_decayed(g, real, w, count) for count in (length, 1))
    read_hp = tuple_reader(DECAY, numba_type(real))

    @cuda.jit
    def loop(keys, n, bits, n_rows, values, width, w, hp, out, is_aligned):
        k = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        column = (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) * length
        if k >= n or column >= width or not is_first_of_row(keys, k, bits):
            return
        row = row_of_key(keys, k, bits)
        if row >= n_rows:
            return
        scalars, w_row = read_hp(hp), w + row * width * w_bytes
        position = load_int64(keys + 8 * k) & ((1 << bits) - 1)
        place = out + position * width * real_bytes
        if is_aligned and column + length <= width:
            write_tile(keys, k, n, bits, values, width, column, w_row, scalars, place)
            return
        for c in range(min(length, width - column)):
            write_one(keys, k, n, bits, values, width, column + c, w_row, scalars, place)

    return loop


def _write_decayed(g: Storage, real: Storage, w: Storage, length: int) -> Any:
    """``run(keys, k, n, bits, values, width, column, w_row, scalars, place)``."""
    sum_of_row, load_w = _sum_of_row(g, real, length), sums(w, real, length).start
    decay, store = device_function(COUPLED_DECAY.apply), tile_storer(length, real.itemsize)
    real_type, real_bytes = numba_type(real), real.itemsize
    g_bytes, w_bytes = g.itemsize, w.itemsize

    @cuda.jit(device=True)
    def run(keys, k, n, bits, values, width, column, w_row, scalars, place):
        total, x = cuda.local.array(length, real_type), cuda.local.array(length, real_type)
        sum_of_row(total, keys, k, n, bits, values + column * g_bytes, width)
        load_w(x, w_row + column * w_bytes)
        for c in range(length):
            total[c] = decay(total[c], x[c], scalars)
        store(place + column * real_bytes, total)

    return run


@cuda.jit
def mark_firsts_kernel(keys, n, bits, words):
    """Write ``k`` to ``words[k]``, with a high bit where key ``k`` is not the first of its row.

    The words sorted by that bit begin with the first keys of all rows that occur.
    """
    k = cuda.grid(1)
    if k < n:
        other = 0 if is_first_of_row(keys, k, bits) else 1
        store_int64(words + 8 * k, k | (other << OTHER_BIT))


@cuda.jit
def count_firsts_kernel(words, n, count):
    """Write to ``count`` how many sorted words are of first keys; one thread."""
    store_int64(count, first_at_least(words, 0, n, 1 << OTHER_BIT))
