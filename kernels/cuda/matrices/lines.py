"""States and factors of rows and columns on a device, which follow from their sums.

Rows and columns are lines here. A group of threads has some lines of a matrix; where a line has
many sums, several threads share it. Their sums are added in trees of fixed shape.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...rule import Prologue, Rule, columns
from ...storage import Storage, numba_type
from ..dense.tiles import access
from ..device.backend import store_float64
from ..device.guard import is_closed
from ..device.records import hp_reader, row_finder
from ..device.sums import add_lanes, strided_sum
from .layout import THREADS, LineRow
from .passes import lines_of, place_in_group, quotient

LOG_THREADS = THREADS.bit_length() - 1


def _line_writer(rule: Rule, prologue: Prologue, real: Storage) -> Any:
    """``write(row, scratch, line, total, is_row)``: the new state of a line; in float64."""
    (kind, load, store), scalar = access(real, 1), numba_type(real)
    lines, read_hp = lines_of(rule), hp_reader(rule, prologue, real)
    average, hold, column_factor = lines.average, lines.hold, lines.column_factor
    smallest = columns(rule, prologue)[lines.smallest]

    @cuda.jit(device=True)
    def write(row, scratch, line, total, is_row):
        hp, one = read_hp(row.hp), cuda.local.array(1, kind)
        load(one, row.state, line)
        one[0] = average(one[0], scalar(total / np.float64(row.elements)), hp)
        if not is_row:
            one[0] = hold(one[0], hp[smallest])
        store(one, row.state, line)
        found = np.float64(one[0])
        if not is_row:
            one[0] = scalar(column_factor(found))
            store(one, scratch + row.factors, line)
        return found

    return write


@cache
def lines_kernel(rule: Rule, prologue: Prologue, real: Storage) -> Any:
    """``loop[n_line_blocks, THREADS](table, n_lines, scratch, guard)``: states, column factors.

    Of the rows it writes the sums of the states, since their factors need the mean.
    """
    find, write_line = row_finder(LineRow, "first_block"), _line_writer(rule, prologue, real)

    @cuda.jit
    def loop(table, n_lines, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = find(table, n_lines, block)
        lanes, sharing = np.int64(1) << row.log_lanes, np.int64(1) << row.log_parts
        number = block - row.first_block
        lane, part, unit = place_in_group(thread, row.log_lanes, row.log_parts, number)
        matrix = quotient(unit, row.segments)
        line = (unit - matrix * row.segments) * lanes + lane
        is_there = matrix < row.matrices and line < row.length
        shared = cuda.shared.array((1, THREADS), float64)
        shared[0, thread] = 0.0
        if is_there:
            place = scratch + row.sums + (matrix * row.parts * row.length + line) * 8
            shared[0, thread] = strided_sum(place, part, row.parts, sharing, row.length * 8)
        add_lanes(shared, thread, part, sharing, lanes, 1)
        found, is_row = 0.0, row.totals != 0
        if is_there and part == 0:
            line += matrix * row.length
            found = write_line(row, scratch, line, shared[0, thread], is_row)
        if is_row:
            cuda.syncthreads()
            shared[0, thread] = found
            add_lanes(shared, thread, lane, lanes, 1, 1)
            if lane == 0 and is_there and part == 0:
                store_float64(scratch + row.totals + unit * 8, shared[0, thread])

    return loop


@cache
def row_factors_kernel(rule: Rule, prologue: Prologue, real: Storage) -> Any:
    """``loop[n_chunk_blocks, THREADS]``: factors of rows, the ``n_tensors`` first of the table."""
    find, lines = row_finder(LineRow, "first_chunk_block"), lines_of(rule)
    read_hp, hold, row_factor = hp_reader(rule, prologue, real), lines.hold, lines.row_factor
    smallest_mean = columns(rule, prologue)[lines.smallest_mean]
    (kind, load, store), scalar = access(real, 1), numba_type(real)

    @cuda.jit
    def loop(table, n_tensors, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = find(table, n_tensors, block)
        log_lanes = row.log_lanes if row.segments == 1 else np.int64(LOG_THREADS)
        lanes = np.int64(1) << log_lanes
        lane, _, unit = place_in_group(thread, log_lanes, 0, block - row.first_chunk_block)
        matrix = quotient(unit, row.chunks)
        is_there = matrix < row.matrices
        shared = cuda.shared.array((1, THREADS), float64)
        shared[0, thread] = 0.0
        if is_there:
            totals = scratch + row.totals + matrix * row.segments * 8
            shared[0, thread] = strided_sum(totals, lane, row.segments, lanes, 8)
        add_lanes(shared, thread, lane, lanes, 1, 1)
        cuda.syncthreads()
        if not is_there:
            return
        one, hp = cuda.local.array(1, kind), read_hp(row.hp)
        mean = shared[0, thread - lane] / np.float64(row.length)
        mean = hold(mean, np.float64(hp[smallest_mean]))
        first, factors = matrix * row.length, scratch + row.factors
        k = np.uint64((unit - matrix * row.chunks) * lanes + lane)
        while k < np.uint64(row.length):
            load(one, row.state, first + np.int64(k))
            one[0] = scalar(row_factor(np.float64(one[0]), mean))
            store(one, factors, first + np.int64(k))
            k += np.uint64(lanes * row.chunks)

    return loop
