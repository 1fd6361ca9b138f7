"""Adafactor's second and third pass over matrices on a device: how large, and the update."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import Kernel, conditioned, element_of
from ...rules import adafactor as rules
from ...storage import Storage
from ..dense.tiles import access, in_registers, length_of
from ..device.functions import DEVICE, device_function
from ..device.guard import is_closed
from ..device.records import hp_reader, row_finder
from ..device.sums import store_part
from .layout import THREADS, TileRow
from .strips import strip_access, strips


def _over_strip(kernel: Kernel, storages: tuple[Storage, ...], work: Any, *, stores: bool) -> Any:
    """``run(row, strip, scratch, hp, *rest)``: a function on each row of a strip.

    It is called ``work(tiles, d, of_row, of_columns, count, hp, *rest)``: the elements of arrays of
    these storages and of the gradient, and the factors of row and columns, in registers.
    """
    length, load_one = length_of(kernel), access(kernel.real, 1).load
    g_type, load_g, _ = strip_access(kernel.g, length)
    kind, load_columns, _ = strip_access(kernel.real, length)
    of_arrays = [strip_access(storage, length) for storage in storages]
    in_tiles = in_registers(of_arrays, length, work, stores=stores)

    @cuda.jit(device=True)
    def run(row, strip, scratch, hp, *rest):
        of_row, d = cuda.local.array(1, kind), cuda.local.array(length, g_type)
        of_columns, column = cuda.local.array(length, kind), strip.matrix * row.width + strip.column
        load_columns(of_columns, scratch + row.column_factors, column, strip)
        y, count = strip.y, strip.count
        while y < strip.rows:
            line = strip.matrix * row.height + strip.top + np.int64(y)
            i = line * row.width + strip.column
            load_g(d, row.g, i, strip)
            load_one(of_row, scratch + row.row_factors, line)
            in_tiles(i, row.arrays, (strip,), (), d, of_row, of_columns, count, hp, *rest)
            y = np.uint32(y + strip.threads_down)

    return run


@cache
def direction_kernel(kernel: Kernel, of_parameter: bool) -> Any:
    """``loop[n_blocks, THREADS](table, n_tensors, scratch, parts, guard)``: parts of two sums.

    They are the squares of the parameter (0 if they are not asked for) and of the direction.
    """
    find, length = row_finder(TileRow, "first_block", 1 + len(kernel.s)), length_of(kernel)
    read_hp, strip_at = hp_reader(kernel.rule, kernel.prologue, kernel.real), strips(length)
    values = conditioned(kernel, DEVICE)
    direction = device_function(rules.factored_direction)

    @cuda.jit(device=True)
    def add_squares(tiles, d, of_row, of_columns, count, hp, own):
        for k in range(length):
            if k < count:
                value, gradient = values(tiles[0], d, k, hp)
                u = np.float64(direction(gradient, of_row[0], of_columns[k], hp))
                own[1] += u * u
                if of_parameter:
                    own[0] += np.float64(value) * np.float64(value)

    run = _over_strip(kernel, (kernel.w,), add_squares, stores=False)

    @cuda.jit
    def loop(table, n_tensors, scratch, parts, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row, own = find(table, n_tensors, block), cuda.local.array(2, float64)
        strip, hp = strip_at(row, block, thread), read_hp(row.hp)
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
    find, length = row_finder(TileRow, "first_block", 1 + len(kernel.s)), length_of(kernel)
    read_hp, strip_at = hp_reader(kernel.rule, kernel.prologue, kernel.real), strips(length)
    storages = kernel.w, *kernel.s
    assert kernel.rule.factored is not None
    element = element_of(kernel, kernel.rule.factored, DEVICE)

    @cuda.jit(device=True)
    def update(tiles, d, of_row, of_columns, count, hp):
        for k in range(length):
            if k < count:
                element(tiles, d, k, of_row[0], of_columns[k], hp)

    run = _over_strip(kernel, storages, update, stores=True)

    @cuda.jit
    def loop(table, n_tensors, scratch, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = find(table, n_tensors, block)
        strip = strip_at(row, block, thread)
        if strip.count > 0:
            run(row, strip, scratch, read_hp(row.hp))

    return loop
