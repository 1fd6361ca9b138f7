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
from ...rules.rule import Prologue, hp_type
from ...storage import Storage, numba_type
from ..dense.measure import add_lanes
from ..dense.tiles import CARRIERS
from ..device.backend import (
    load_float64,
    load_int64,
    store_float64,
    tile_loader,
    tile_storer,
    tuple_reader,
)
from ..device.functions import device_function
from ..device.guard import is_closed
from ..rows.search import last_at_most
from .line_table import (
    CHUNKS,
    COUNT,
    FACTORS,
    FIRST_BLOCK,
    FIRST_CHUNK_BLOCK,
    HP,
    LENGTH,
    LOG_LANES,
    LOG_PARTS,
    MATRICES,
    PARTS,
    ROW_BYTES,
    SEGMENTS,
    STATE,
    SUMS,
    TOTALS,
)
from .strips import quotient


@cache
def lines_kernel(prologue: Prologue, real: Storage, threads: int) -> Any:
    """``loop[n_line_blocks, threads](table, n_lines, guard)``: states, and factors of columns.

    Of the rows it writes the sums of the states, since their factors need the mean.
    """
    kind, scalar, real_bytes = CARRIERS[real.carrier], numba_type(real), real.itemsize
    read_hp = tuple_reader(hp_type(rules.ADAFACTOR, prologue), scalar)
    load_one, store_one = tile_loader(1, real_bytes), tile_storer(1, real_bytes)
    averaged_mean, held_up = device_function(rules.averaged_mean), device_function(rules.held_up)
    column_factor = device_function(rules.column_factor)

    @cuda.jit(device=True)
    def write_line(row, place, total, is_row):
        """The new state of a line; in float64."""
        hp, one = read_hp(load_int64(row + 8 * HP)), cuda.local.array(1, kind)
        state = load_int64(row + 8 * STATE) + place * real_bytes
        load_one(one, state)
        mean = scalar(total / np.float64(load_int64(row + 8 * COUNT)))
        one[0] = averaged_mean(one[0], mean, hp)
        if not is_row:
            one[0] = held_up(one[0], hp.smallest)
        store_one(state, one)
        found = np.float64(one[0])
        if not is_row:
            one[0] = scalar(column_factor(found))
            store_one(load_int64(row + 8 * FACTORS) + place * real_bytes, one)
        return found

    @cuda.jit
    def loop(table, n_lines, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = table + last_at_most(table + 8 * FIRST_BLOCK, ROW_BYTES, n_lines, block) * ROW_BYTES
        log_lanes, log_parts = load_int64(row + 8 * LOG_LANES), load_int64(row + 8 * LOG_PARTS)
        lanes, sharing = np.int64(1) << log_lanes, np.int64(1) << log_parts
        lane, part = thread & (lanes - 1), (thread >> log_lanes) & (sharing - 1)
        log_group = log_lanes + log_parts
        n_groups = np.int64(threads) >> log_group
        unit = (block - load_int64(row + 8 * FIRST_BLOCK)) * n_groups + (thread >> log_group)
        segments, length = load_int64(row + 8 * SEGMENTS), load_int64(row + 8 * LENGTH)
        matrix = quotient(unit, segments)
        line = (unit - matrix * segments) * lanes + lane
        is_there = matrix < load_int64(row + 8 * MATRICES) and line < length
        shared = cuda.shared.array((1, threads), float64)
        own = 0.0
        if is_there:
            n_parts = load_int64(row + 8 * PARTS)
            place = load_int64(row + 8 * SUMS) + (matrix * n_parts * length + line) * 8
            k = np.uint64(part)
            while k < np.uint64(n_parts):
                own += load_float64(place + np.int64(k) * length * 8)
                k += np.uint64(sharing)
        shared[0, thread] = own
        add_lanes(shared, thread, part, sharing, lanes, 1)
        totals = load_int64(row + 8 * TOTALS)
        found = 0.0
        if is_there and part == 0:
            found = write_line(row, matrix * length + line, shared[0, thread], totals != 0)
        if totals != 0:
            cuda.syncthreads()
            shared[0, thread] = found
            add_lanes(shared, thread, lane, lanes, 1, 1)
            if lane == 0 and is_there and part == 0:
                store_float64(totals + unit * 8, shared[0, thread])

    return loop


@cache
def row_factors_kernel(prologue: Prologue, real: Storage, threads: int) -> Any:
    """``loop[n_chunk_blocks, threads](table, n_tensors, guard)``: the factors of rows.

    ``n_tensors`` rows of the table, those of rows, come first.
    """
    kind, scalar, real_bytes = CARRIERS[real.carrier], numba_type(real), real.itemsize
    read_hp = tuple_reader(hp_type(rules.ADAFACTOR, prologue), scalar)
    load_one, store_one = tile_loader(1, real_bytes), tile_storer(1, real_bytes)
    held_up, row_factor = device_function(rules.held_up), device_function(rules.row_factor)
    log_threads = threads.bit_length() - 1

    @cuda.jit
    def loop(table, n_tensors, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        t = last_at_most(table + 8 * FIRST_CHUNK_BLOCK, ROW_BYTES, n_tensors, block)
        row = table + t * ROW_BYTES
        segments, chunks = load_int64(row + 8 * SEGMENTS), load_int64(row + 8 * CHUNKS)
        log_lanes = load_int64(row + 8 * LOG_LANES) if segments == 1 else np.int64(log_threads)
        lanes = np.int64(1) << log_lanes
        lane, n_groups = thread & (lanes - 1), np.int64(threads) >> log_lanes
        first = load_int64(row + 8 * FIRST_CHUNK_BLOCK)
        unit = (block - first) * n_groups + (thread >> log_lanes)
        matrix = quotient(unit, chunks)
        is_there = matrix < load_int64(row + 8 * MATRICES)
        shared = cuda.shared.array((1, threads), float64)
        own = 0.0
        if is_there:
            totals = load_int64(row + 8 * TOTALS) + matrix * segments * 8
            k = np.uint64(lane)
            while k < np.uint64(segments):
                own += load_float64(totals + np.int64(k) * 8)
                k += np.uint64(lanes)
        shared[0, thread] = own
        add_lanes(shared, thread, lane, lanes, 1, 1)
        cuda.syncthreads()
        if not is_there:
            return
        length, one = load_int64(row + 8 * LENGTH), cuda.local.array(1, kind)
        hp = read_hp(load_int64(row + 8 * HP))
        mean = shared[0, thread - lane] / np.float64(length)
        mean = held_up(mean, np.float64(hp.smallest))
        states = load_int64(row + 8 * STATE) + matrix * length * real_bytes
        factors = load_int64(row + 8 * FACTORS) + matrix * length * real_bytes
        k = np.uint64((unit - matrix * chunks) * lanes + lane)
        while k < np.uint64(length):
            load_one(one, states + np.int64(k) * real_bytes)
            one[0] = scalar(row_factor(np.float64(one[0]), mean))
            store_one(factors + np.int64(k) * real_bytes, one)
            k += np.uint64(lanes * chunks)

    return loop
