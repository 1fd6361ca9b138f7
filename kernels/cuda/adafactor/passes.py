"""Adafactor's passes over matrices on a device: squares, how large, and the update."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import Kernel, conditioned, element_of
from ...rules import adafactor as rules
from ..dense.tiles import access, in_registers, length_of
from ..device.backend import store_float64
from ..device.functions import DEVICE, device_function
from ..device.guard import is_closed
from ..device.sums import add_lanes, store_part
from .layout import CUT, THREADS
from .strips import strip_access, strip_finder


def _row_adder(kernel: Kernel) -> Any:
    """``add_row(of_columns, arrays, i, strip, hp)``: the sum over a row of a strip."""
    length, squared = length_of(kernel), device_function(rules.squared)
    values = conditioned(kernel, DEVICE)
    g_type, load_g, _ = strip_access(kernel.g, length)
    w_type, load_w, _ = strip_access(kernel.w, length)

    @cuda.jit(device=True)
    def add_row(of_columns, arrays, i, strip, hp):
        d, x = cuda.local.array(length, g_type), cuda.local.array(length, w_type)
        load_g(d, arrays[0], i, strip)
        load_w(x, arrays[1], i, strip)
        total = 0.0
        for k in range(length):
            if k < strip.count:
                _, gradient = values(x, d, k, hp)
                square = np.float64(squared(gradient, hp))
                of_columns[k] += square
                total += square
        return total

    return add_row


@cache
def squares_kernel(kernel: Kernel) -> Any:
    """``loop[n_blocks, THREADS](table, n_tensors, scratch, guard)``: sums of rows and columns.

    A thread adds up its part of some rows, the threads across the tile then each of these; the sums
    of columns stay in registers down to the end of the tile.
    """
    length, rounds, find = length_of(kernel), CUT.rounds, strip_finder(kernel)
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

    It is called ``work(tiles, of_row, of_columns, count, hp, *rest)``, with everything in
    registers: the gradient, the parameter, its states if they are stored, and the factors.
    """
    length, load_one = length_of(kernel), access(kernel.real, 1).load
    kind, load_columns, _ = strip_access(kernel.real, length)
    storages = kernel.g, kernel.w, *(kernel.s if stores else ())
    of_arrays = [strip_access(storage, length) for storage in storages]
    in_tiles = in_registers(of_arrays, length, work, first_stored=1 if stores else 2)

    @cuda.jit(device=True)
    def run(row, strip, scratch, hp, *rest):
        of_row, of_columns = cuda.local.array(1, kind), cuda.local.array(length, kind)
        column = strip.matrix * row.width + strip.column
        load_columns(of_columns, scratch + row.column_factors, column, strip)
        y = strip.y
        while y < strip.rows:
            line = strip.matrix * row.height + strip.top + np.int64(y)
            load_one(of_row, scratch + row.row_factors, line)
            i = line * row.width + strip.column
            in_tiles(i, row.arrays, (strip,), (), of_row, of_columns, strip.count, hp, *rest)
            y = np.uint32(y + strip.threads_down)

    return run


@cache
def direction_kernel(kernel: Kernel, of_parameter: bool) -> Any:
    """``loop[n_blocks, THREADS](table, n_tensors, scratch, parts, guard)``: parts of two sums.

    They are the squares of the parameter (0 if they are not asked for) and of the direction.
    """
    find, length, values = strip_finder(kernel), length_of(kernel), conditioned(kernel, DEVICE)
    direction = device_function(rules.factored_direction)

    @cuda.jit(device=True)
    def add_squares(tiles, of_row, of_columns, count, hp, own):
        for k in range(length):
            if k < count:
                value, gradient = values(tiles[1], tiles[0], k, hp)
                u = np.float64(direction(gradient, of_row[0], of_columns[k], hp))
                own[1] += u * u
                if of_parameter:
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
    assert kernel.rule.factored is not None
    find, length = strip_finder(kernel), length_of(kernel)
    element = element_of(kernel, kernel.rule.factored, DEVICE)

    @cuda.jit(device=True)
    def update(tiles, of_row, of_columns, count, hp):
        for k in range(length):
            if k < count:
                element(tiles[1:], tiles[0], k, of_row[0], of_columns[k], hp)

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
