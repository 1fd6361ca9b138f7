"""Adafactor's first pass over matrices on a device: squares, summed over rows and columns."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import conditioned
from ...rules import adafactor as rules
from ...rules.rule import Prologue, hp_type
from ...storage import Storage, numba_type, real_of
from ..dense.measure import add_lanes
from ..dense.tensor_table import HP, G, W
from ..dense.tiles import CARRIERS
from ..device.backend import load_int64, store_float64, tuple_reader
from ..device.functions import DEVICE, device_function
from ..device.guard import is_closed
from .layout import COLUMN_SUMS, HEIGHT, ROW_SUMS, TILES_ACROSS, TILES_DOWN, WIDTH
from .strips import row_of_table, strip_loader, strips


@cache
def squares_kernel(
    prologue: Prologue, w: Storage, g: Storage, length: int, threads: int, rounds: int
) -> Any:
    """``loop[n_blocks, threads](table, n_tensors, guard)``: sums of rows and columns of tiles.

    A thread adds up its part of ``rounds`` rows, the threads across the tile then each of these;
    the sums of columns stay in registers down to the end of the tile.
    """
    read_hp = tuple_reader(hp_type(rules.ADAFACTOR, prologue), numba_type(real_of(w)))
    add_row, strip_at = _row_adder(prologue, w, g, length), strips(length, threads)
    slots = max(length, rounds)

    @cuda.jit
    def loop(table, n_tensors, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = row_of_table(table, n_tensors, block)
        strip, hp = strip_at(row, block, thread), read_hp(load_int64(row + 8 * HP))
        w, g = load_int64(row + 8 * W), load_int64(row + 8 * G)
        height, width = load_int64(row + 8 * HEIGHT), load_int64(row + 8 * WIDTH)
        first = (strip.matrix * height + strip.top) * width + strip.column
        line = strip.matrix * load_int64(row + 8 * TILES_ACROSS) + strip.across
        row_sums = load_int64(row + 8 * ROW_SUMS) + (line * height + strip.top) * 8
        shared = cuda.shared.array((slots, threads), float64)
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
                    total = add_row(own, w, g, first + np.int64(i) * width, strip, hp)
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
            line = strip.matrix * load_int64(row + 8 * TILES_DOWN) + strip.down
            column_sums = load_int64(row + 8 * COLUMN_SUMS) + (line * width + strip.column) * 8
            for k in range(length):
                if k < strip.count:
                    store_float64(column_sums + k * strip.step * 8, shared[k, thread])

    return loop


def _row_adder(prologue: Prologue, w: Storage, g: Storage, length: int) -> Any:
    """``add_row(of_columns, w, g, offset, strip, hp)``: the sum over a row of a strip."""
    w_type, g_type = CARRIERS[w.carrier], CARRIERS[g.carrier]
    w_bytes, g_bytes = w.itemsize, g.itemsize
    load_w, load_g = strip_loader(w, length), strip_loader(g, length)
    values, squared = conditioned(prologue, w, g, DEVICE), device_function(rules.squared)

    @cuda.jit(device=True)
    def add_row(of_columns, w, g, offset, strip, hp):
        x, d = cuda.local.array(length, w_type), cuda.local.array(length, g_type)
        load_w(x, w + offset * w_bytes, strip)
        load_g(d, g + offset * g_bytes, strip)
        total = 0.0
        for k in range(length):
            if k < strip.count:
                _, gradient = values(x, d, k, hp)
                square = np.float64(squared(gradient, hp))
                of_columns[k] += square
                total += square
        return total

    return add_row
