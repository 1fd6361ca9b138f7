"""The passes over matrices on a device: sums of rows and columns, what is measured, the update.

What a thread has of a matrix is a strip: some columns of every so many rows of a tile. Where rows
are aligned, the columns lie next to each other and are moved by vectors of 16 bytes; else as many
columns lie between them as there are threads across the tile, so that the threads of a warp read
what lies next to each other.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...element import Kernel, conditioned, element_of
from ...rule import Lines, Rule
from ...storage import Storage
from ..dense.tiles import Access, access, in_registers, length_of
from ..device.backend import store_float64
from ..device.functions import DEVICE, device_function
from ..device.guard import is_closed
from ..device.records import hp_reader, row_finder
from ..device.sums import add_lanes, store_part
from .layout import CUT, THREADS, TileRow


class Strip(NamedTuple):
    """A thread's part of a tile."""

    matrix: Any  # number of the matrix
    down: Any  # number of the tile from the top
    across: Any  # number of the tile from the left
    top: Any  # first row of the tile
    rows: Any  # of the tile
    column: Any  # first one of the thread
    step: Any  # from a column of the thread to the next
    count: Any  # columns of the thread; 0 for one that has nothing to do
    x: Any  # place of the thread across the tile
    y: Any  # place of the thread down the tile
    threads_across: Any
    threads_down: Any
    is_aligned: Any  # whether the columns are moved by vectors


def lines_of(rule: Rule) -> Lines:
    """The functions of rows and columns of a rule, for the device."""
    assert rule.lines is not None
    functions: Any = (device_function(x) if callable(x) else x for x in rule.lines)
    return Lines(*functions)


@cuda.jit(device=True)
def quotient(n, divisor):
    """``n // divisor``, both below 2**32 unless the divisor is 1: a 64-bit division is slow."""
    if divisor == 1:
        return n
    return np.int64(np.uint32(n) // np.uint32(divisor))


@cuda.jit(device=True)
def place_in_group(thread, log_across, log_down, block):
    """Place of a thread across and down a group of ``2**logs`` threads, and the group's number."""
    log_group = log_across + log_down
    x, y = thread & ((1 << log_across) - 1), (thread >> log_across) & ((1 << log_down) - 1)
    return x, y, block * (np.int64(THREADS) >> log_group) + (thread >> log_group)


@cache
def _strip_finder(kernel: Kernel) -> Any:
    """``find(table, n_tensors, block, thread)``: the row of a tensor, its scalars, and a strip."""
    find_row = row_finder(TileRow, "first_block", 2 + len(kernel.s))
    read_hp, length = hp_reader(kernel.rule, kernel.prologue, kernel.real), length_of(kernel)

    @cuda.jit(device=True)
    def find(table, n_tensors, block, thread):
        row = find_row(table, n_tensors, block)
        across, down = np.int64(1) << row.log_across, np.int64(1) << row.log_down
        x, y, unit = place_in_group(thread, row.log_across, row.log_down, block - row.first_block)
        tiles = row.tiles_across * row.tiles_down
        matrix = quotient(unit, tiles)
        rest = unit - matrix * tiles
        tile_down = quotient(rest, row.tiles_across)
        tile_across = rest - tile_down * row.tiles_across
        top = tile_down * row.tile_height
        rows = min(row.tile_height, row.height - top)
        column, step = tile_across * across * length + x, across
        if row.is_aligned != 0:
            column, step = column + x * (length - 1), np.int64(1)
        count = np.int64(0)
        if matrix < row.matrices:
            for k in range(length):
                if column + k * step < row.width:
                    count += 1
        strip = Strip(
            matrix, tile_down, tile_across, top, np.uint32(rows), column, np.int32(step),
            np.int32(count), np.int32(x), np.uint32(y), np.int32(across), np.uint32(down),
            row.is_aligned != 0,
        )  # fmt: skip
        return row, read_hp(row.hp), strip

    return find


@cache
def _strip_access(storage: Storage, length: int) -> Access:
    """Access to elements of one row from number ``i`` on; it takes a strip at the end."""
    (kind, *movers), (_, *movers_of_one) = (access(storage, n) for n in (length, 1))

    def mover(move_tile, move_one):
        @cuda.jit(device=True)
        def move(tile, address, i, strip):
            if strip.is_aligned:
                move_tile(tile, address, i)
            else:
                one = cuda.local.array(1, kind)
                for k in range(length):
                    if k < strip.count:
                        one[0] = tile[k]  # what a load overwrites
                        move_one(one, address, i)
                        tile[k] = one[0]  # what a store has left as it was
                        i += np.int64(strip.step)

        return move

    return Access(kind, *map(mover, movers, movers_of_one))


def _row_adder(kernel: Kernel) -> Any:
    """``add_row(column_sums, arrays, i, strip, hp)``: the sum over a row of a strip."""
    length, term = length_of(kernel), lines_of(kernel.rule).term
    values = conditioned(kernel, DEVICE)
    g_type, load_g, _ = _strip_access(kernel.g, length)
    w_type, load_w, _ = _strip_access(kernel.w, length)

    @cuda.jit(device=True)
    def add_row(column_sums, arrays, i, strip, hp):
        d, x = cuda.local.array(length, g_type), cuda.local.array(length, w_type)
        load_g(d, arrays[0], i, strip)
        load_w(x, arrays[1], i, strip)
        total = 0.0
        for k in range(length):
            if k < strip.count:
                _, gradient = values(x, d, k, hp)
                q = np.float64(term(gradient, hp))
                column_sums[k] += q
                total += q
        return total

    return add_row


@cache
def terms_kernel(kernel: Kernel) -> Any:
    """``loop[n_blocks, THREADS](table, n_tensors, scratch, guard)``: sums of rows and columns.

    A thread adds up its part of some rows, the threads across the tile then each of these; the sums
    of columns stay in registers down to the end of the tile.
    """
    length, rounds, find = length_of(kernel), CUT.rounds, _strip_finder(kernel)
    add_row, slots = _row_adder(kernel), max(length, rounds)

    @cuda.jit
    def loop(table, n_tensors, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row, hp, strip = find(table, n_tensors, block, thread)
        first = (strip.matrix * row.height + strip.top) * row.width + strip.column
        line = strip.matrix * row.tiles_across + strip.across
        row_sums = scratch + row.row_sums + (line * row.height + strip.top) * 8
        shared = cuda.shared.array((slots, THREADS), float64)
        own = cuda.local.array(length, float64)
        for k in range(length):
            own[k] = 0.0
        band = np.uint32(0)
        while band < strip.rows:
            cuda.syncthreads()  # what was there has been read
            i = np.uint32(band + strip.y)
            for k in range(rounds):
                total = 0.0
                if i < strip.rows and strip.count > 0:
                    at = first + np.int64(i) * row.width
                    total = add_row(own, row.arrays, at, strip, hp)
                shared[k, thread] = total
                i = np.uint32(i + strip.threads_down)
            add_lanes(shared, thread, strip.x, strip.threads_across, 1, rounds)
            if strip.x == 0 and strip.count > 0:
                i = np.uint32(band + strip.y)
                for k in range(rounds):
                    if i < strip.rows:
                        store_float64(row_sums + np.int64(i) * 8, shared[k, thread])
                    i = np.uint32(i + strip.threads_down)
            band = np.uint32(band + strip.threads_down * np.uint32(rounds))
        cuda.syncthreads()
        for k in range(length):
            shared[k, thread] = own[k]
        lane, lanes = np.int64(strip.y), np.int64(strip.threads_down)
        add_lanes(shared, thread, lane, lanes, strip.threads_across, length)
        if strip.y == 0:
            line = strip.matrix * row.tiles_down + strip.down
            column_sums = scratch + row.column_sums + (line * row.width + strip.column) * 8
            for k in range(length):
                if k < strip.count:
                    store_float64(column_sums + k * strip.step * 8, shared[k, thread])

    return loop


def _over_strip(kernel: Kernel, work: Any, *, stores: bool = True) -> Any:
    """``run(row, strip, scratch, hp, *rest)``: a function on each row of a strip.

    It is called ``work(tiles, row_factor, column_factors, count, hp, *rest)``, with everything in
    registers: the gradient, the parameter, the states of elements if they are stored, and the
    factors.
    """
    length, load_one = length_of(kernel), access(kernel.real, 1).load
    kind, load_columns, _ = _strip_access(kernel.real, length)
    storages = kernel.g, kernel.w, *(kernel.s[:-2] if stores else ())
    accesses = [_strip_access(storage, length) for storage in storages]
    stored = range(1, len(accesses) if stores else 1)
    in_tiles = in_registers(accesses, length, work, stored=stored)

    @cuda.jit(device=True)
    def run(row, strip, scratch, hp, *rest):
        row_factor, column_factors = cuda.local.array(1, kind), cuda.local.array(length, kind)
        column = strip.matrix * row.width + strip.column
        load_columns(column_factors, scratch + row.column_factors, column, strip)
        y = strip.y
        while y < strip.rows:
            line = strip.matrix * row.height + strip.top + np.int64(y)
            load_one(row_factor, scratch + row.row_factors, line)
            i = line * row.width + strip.column
            in_tiles(
                i, row.arrays, (strip,), (), row_factor, column_factors, strip.count, hp, *rest
            )
            y = np.uint32(y + strip.threads_down)

    return run


@cache
def measure_kernel(kernel: Kernel, measures_parameter: bool) -> Any:
    """``loop[n_blocks, THREADS]``: parts of two sums, of squares: parameters, what is measured."""
    find, length, values = _strip_finder(kernel), length_of(kernel), conditioned(kernel, DEVICE)
    measured = device_function(kernel.rule.measure)

    @cuda.jit(device=True)
    def add_squares(tiles, row_factor, column_factors, count, hp, own):
        for k in range(length):
            if k < count:
                value, gradient = values(tiles[1], tiles[0], k, hp)
                u = np.float64(measured(gradient, row_factor[0], column_factors[k], hp))
                own[1] += u * u
                if measures_parameter:
                    own[0] += np.float64(value) * np.float64(value)

    run = _over_strip(kernel, add_squares, stores=False)

    @cuda.jit
    def loop(table, n_tensors, scratch, parts, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        (row, hp, strip), own = find(table, n_tensors, block, thread), cuda.local.array(2, float64)
        own[0] = own[1] = 0.0
        if strip.count > 0:
            run(row, strip, scratch, hp, own)
        shared = cuda.shared.array((2, THREADS), float64)
        shared[0, thread], shared[1, thread] = own[0], own[1]
        store_part(parts, block, shared, thread, THREADS, 2)

    return loop


@cache
def update_kernel(kernel: Kernel) -> Any:
    """``loop[n_blocks, THREADS](table, n_tensors, scratch, guard)``: parameters and states."""
    find, length = _strip_finder(kernel), length_of(kernel)
    element = element_of(kernel, kernel.rule.update, DEVICE, factors=("row", "column"))

    @cuda.jit(device=True)
    def update(tiles, row_factor, column_factors, count, hp):
        for k in range(length):
            if k < count:
                element(tiles[1:], tiles[0], k, row_factor[0], column_factors[k], hp)

    run = _over_strip(kernel, update)

    @cuda.jit
    def loop(table, n_tensors, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row, hp, strip = find(table, n_tensors, block, thread)
        if strip.count > 0:
            run(row, strip, scratch, hp)

    return loop
