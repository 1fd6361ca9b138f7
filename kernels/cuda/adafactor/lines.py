"""What follows from the sums of rows and columns on a device: Adafactor's states and factors.

Rows and columns are lines here. A group of threads has some lines of a matrix; where a line has
many sums, several threads share it. Their sums are added in trees of fixed shape.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...rules import adafactor as rules
from ...rules.rule import Prologue
from ...storage import Storage, numba_type
from ..dense.tiles import CARRIERS, tile_access
from ..device.backend import load_float64, store_float64
from ..device.functions import device_function
from ..device.guard import is_closed
from ..device.records import hp_reader, row_finder
from ..device.sums import add_lanes
from .layout import THREADS, LineRow
from .strips import quotient

LOG_THREADS = THREADS.bit_length() - 1


def _line_writer(prologue: Prologue, real: Storage) -> Any:
    """``write(row, scratch, line, total, is_row)``: the new state of a line; in float64."""
    kind, scalar, real_bytes = CARRIERS[real.carrier], numba_type(real), real.itemsize
    read_hp, (load_one, store_one) = (
        hp_reader(rules.ADAFACTOR, prologue, real),
        tile_access(real, 1),
    )
    averaged_mean, held_up = device_function(rules.averaged_mean), device_function(rules.held_up)
    column_factor = device_function(rules.column_factor)

    @cuda.jit(device=True)
    def write(row, scratch, line, total, is_row):
        hp, one, state = read_hp(row.hp), cuda.local.array(1, kind), row.state + line * real_bytes
        load_one(one, state)
        one[0] = averaged_mean(one[0], scalar(total / np.float64(row.elements)), hp)
        if not is_row:
            one[0] = held_up(one[0], hp.smallest)
        store_one(state, one)
        found = np.float64(one[0])
        if not is_row:
            one[0] = scalar(column_factor(found))
            store_one(scratch + row.factors + line * real_bytes, one)
        return found

    return write


@cache
def lines_kernel(prologue: Prologue, real: Storage) -> Any:
    """``loop[n_line_blocks, THREADS](table, n_lines, scratch, guard)``: states, column factors.

    Of the rows it writes the sums of the states, since their factors need the mean.
    """
    find, write_line = row_finder(LineRow, "first_block"), _line_writer(prologue, real)

    @cuda.jit
    def loop(table, n_lines, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = find(table, n_lines, block)
        lanes, sharing = np.int64(1) << row.log_lanes, np.int64(1) << row.log_parts
        lane, part = thread & (lanes - 1), (thread >> row.log_lanes) & (sharing - 1)
        log_group = row.log_lanes + row.log_parts
        n_groups = np.int64(THREADS) >> log_group
        unit = (block - row.first_block) * n_groups + (thread >> log_group)
        matrix = quotient(unit, row.segments)
        line = (unit - matrix * row.segments) * lanes + lane
        is_there = matrix < row.matrices and line < row.length
        shared = cuda.shared.array((1, THREADS), float64)
        own = 0.0
        if is_there:
            place = scratch + row.sums + (matrix * row.parts * row.length + line) * 8
            k = np.uint64(part)
            while k < np.uint64(row.parts):
                own += load_float64(place + np.int64(k) * row.length * 8)
                k += np.uint64(sharing)
        shared[0, thread] = own
        add_lanes(shared, thread, part, sharing, lanes, 1)
        found, is_row = 0.0, row.totals != 0
        if is_there and part == 0:
            number = matrix * row.length + line
            found = write_line(row, scratch, number, shared[0, thread], is_row)
        if is_row:
            cuda.syncthreads()
            shared[0, thread] = found
            add_lanes(shared, thread, lane, lanes, 1, 1)
            if lane == 0 and is_there and part == 0:
                store_float64(scratch + row.totals + unit * 8, shared[0, thread])

    return loop


@cache
def row_factors_kernel(prologue: Prologue, real: Storage) -> Any:
    """``loop[n_chunk_blocks, THREADS](table, n_tensors, scratch, guard)``: the factors of rows.

    ``n_tensors`` rows of the table, those of rows, come first.
    """
    kind, scalar, real_bytes = CARRIERS[real.carrier], numba_type(real), real.itemsize
    find, read_hp = (
        row_finder(LineRow, "first_chunk_block"),
        hp_reader(rules.ADAFACTOR, prologue, real),
    )
    held_up, row_factor = device_function(rules.held_up), device_function(rules.row_factor)
    load_one, store_one = tile_access(real, 1)

    @cuda.jit
    def loop(table, n_tensors, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = find(table, n_tensors, block)
        log_lanes = row.log_lanes if row.segments == 1 else np.int64(LOG_THREADS)
        lanes = np.int64(1) << log_lanes
        lane, n_groups = thread & (lanes - 1), np.int64(THREADS) >> log_lanes
        unit = (block - row.first_chunk_block) * n_groups + (thread >> log_lanes)
        matrix = quotient(unit, row.chunks)
        is_there = matrix < row.matrices
        shared = cuda.shared.array((1, THREADS), float64)
        own = 0.0
        if is_there:
            totals = scratch + row.totals + matrix * row.segments * 8
            k = np.uint64(lane)
            while k < np.uint64(row.segments):
                own += load_float64(totals + np.int64(k) * 8)
                k += np.uint64(lanes)
        shared[0, thread] = own
        add_lanes(shared, thread, lane, lanes, 1, 1)
        cuda.syncthreads()
        if not is_there:
            return
        one, hp = cuda.local.array(1, kind), read_hp(row.hp)
        mean = shared[0, thread - lane] / np.float64(row.length)
        mean = held_up(mean, np.float64(hp.smallest))
        states = row.state + matrix * row.length * real_bytes
        factors = scratch + row.factors + matrix * row.length * real_bytes
        k = np.uint64((unit - matrix * row.chunks) * lanes + lane)
        while k < np.uint64(row.length):
            load_one(one, states + np.int64(k) * real_bytes)
            one[0] = scalar(row_factor(np.float64(one[0]), mean))
            store_one(factors + np.int64(k) * real_bytes, one)
            k += np.uint64(lanes * row.chunks)

    return loop
