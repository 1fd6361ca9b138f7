"""Adafactor's first pass over matrices on a device: squares, summed over rows and columns."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import Kernel, conditioned
from ...rules import adafactor as rules
from ..dense.tiles import length_of
from ..device.backend import store_float64
from ..device.functions import DEVICE, device_function
from ..device.guard import is_closed
from ..device.records import hp_reader, row_finder
from ..device.sums import add_lanes
from .layout import CUT, THREADS, TileRow
from .strips import strip_access, strips


@cache
def squares_kernel(kernel: Kernel) -> Any:
    """``loop[n_blocks, THREADS](table, n_tensors, scratch, guard)``: sums of rows and columns.

    A thread adds up its part of some rows, the threads across the tile then each of these; the sums
    of columns stay in registers down to the end of the tile.
    """
    length, rounds = length_of(kernel), CUT.rounds
    find = row_finder(TileRow, "first_block", 1 + len(kernel.s))
    read_hp = hp_reader(kernel.rule, kernel.prologue, kernel.real)
    add_row, strip_at, slots = _row_adder(kernel), strips(length), max(length, rounds)

    @cuda.jit
    def loop(table, n_tensors, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = find(table, n_tensors, block)
        strip, hp = strip_at(row, block, thread), read_hp(row.hp)
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
                    total = add_row(own, row.arrays[0], row.g, at, strip, hp)
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


def _row_adder(kernel: Kernel) -> Any:
    """``add_row(of_columns, w, g, i, strip, hp)``: the sum over a row of a strip."""
    length, squared = length_of(kernel), device_function(rules.squared)
    values = conditioned(kernel, DEVICE)
    w_type, load_w, _ = strip_access(kernel.w, length)
    g_type, load_g, _ = strip_access(kernel.g, length)

    @cuda.jit(device=True)
    def add_row(of_columns, w, g, i, strip, hp):
        x, d = cuda.local.array(length, w_type), cuda.local.array(length, g_type)
        load_w(x, w, i, strip)
        load_g(d, g, i, strip)
        total = 0.0
        for k in range(length):
            if k < strip.count:
                _, gradient = values(x, d, k, hp)
                square = np.float64(squared(gradient, hp))
                of_columns[k] += square
                total += square
        return total

    return add_row
