"""Adafactor's second and third pass over matrices on a device: how large, and the update."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import conditioned, element_of
from ...rules import adafactor as rules
from ...rules.rule import Prologue, hp_type
from ...storage import Storage, numba_type, real_of
from ..dense.measure import MOST_VALUES, add_tree
from ..dense.tensor_table import HP, S0, G, W
from ..dense.tiles import CARRIERS
from ..device.backend import load_int64, store_float64, tile_loader, tuple_reader
from ..device.functions import DEVICE, device_function
from ..device.guard import is_closed
from .layout import COLUMN_FACTORS, HEIGHT, ROW_FACTORS, WIDTH
from .strips import row_of_table, strip_loader, strip_storer, strips


@cache
def direction_kernel(
    prologue: Prologue, w: Storage, g: Storage, length: int, threads: int, of_parameter: bool
) -> Any:
    """``loop[n_blocks, threads](table, n_tensors, sums, guard)``: float64 ``sums[block, value]``.

    The values are the squares of the parameter (0 if they are not asked for) and those of the
    direction.
    """
    real, w_type, g_type = (CARRIERS[s.carrier] for s in (real_of(w), w, g))
    real_bytes, w_bytes, g_bytes = (s.itemsize for s in (real_of(w), w, g))
    read_hp = tuple_reader(hp_type(rules.ADAFACTOR, prologue), numba_type(real_of(w)))
    load_w, load_g = strip_loader(w, length), strip_loader(g, length)
    load_columns, load_one = strip_loader(real_of(w), length), tile_loader(1, real_bytes)
    values, strip_at = conditioned(prologue, w, g, DEVICE), strips(length, threads)
    direction = device_function(rules.factored_direction)

    @cuda.jit
    def loop(table, n_tensors, sums, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = row_of_table(table, n_tensors, block)
        strip, hp = strip_at(row, block, thread), read_hp(load_int64(row + 8 * HP))
        w, g = load_int64(row + 8 * W), load_int64(row + 8 * G)
        line = strip.matrix * load_int64(row + 8 * HEIGHT) + strip.top
        width = load_int64(row + 8 * WIDTH)
        row_factors, of_row = load_int64(row + 8 * ROW_FACTORS), cuda.local.array(1, real)
        x, d = cuda.local.array(length, w_type), cuda.local.array(length, g_type)
        of_columns = cuda.local.array(length, real)
        of_w, of_u = 0.0, 0.0
        if strip.count > 0:
            column = strip.matrix * width + strip.column
            factors = load_int64(row + 8 * COLUMN_FACTORS) + column * real_bytes
            load_columns(of_columns, factors, strip)
            i = strip.y
            while i < strip.rows:
                offset = (line + np.int64(i)) * width + strip.column
                load_w(x, w + offset * w_bytes, strip)
                load_g(d, g + offset * g_bytes, strip)
                load_one(of_row, row_factors + (line + np.int64(i)) * real_bytes)
                for k in range(length):
                    if k < strip.count:
                        value, gradient = values(x, d, k, hp)
                        u = np.float64(direction(gradient, of_row[0], of_columns[k], hp))
                        of_u += u * u
                        if of_parameter:
                            of_w += np.float64(value) * np.float64(value)
                i = np.uint32(i + strip.threads_down)
        shared = cuda.shared.array((2, threads), float64)
        shared[0, thread], shared[1, thread] = of_w, of_u
        add_tree(shared, thread, threads, 2)
        if thread == 0:
            for k in range(2):
                store_float64(sums + (block * MOST_VALUES + k) * 8, shared[k, 0])

    return loop


@cache
def update_kernel(
    prologue: Prologue, w: Storage, g: Storage, s: Storage | None, length: int, threads: int
) -> Any:
    """``loop[n_blocks, threads](table, n_tensors, guard)``: parameters and first moments."""
    real, w_bytes, g_bytes = real_of(w), w.itemsize, g.itemsize
    kind, real_bytes = CARRIERS[real.carrier], real.itemsize
    w_type, g_type, s_type = (CARRIERS[storage.carrier] for storage in (w, g, s or w))
    has_average, s_bytes = s is not None, (s or w).itemsize
    read_hp = tuple_reader(hp_type(rules.ADAFACTOR, prologue), numba_type(real))
    load_w, load_g, load_s = (strip_loader(storage, length) for storage in (w, g, s or w))
    store_w, store_s = (strip_storer(storage, length) for storage in (w, s or w))
    load_columns, load_one = strip_loader(real, length), tile_loader(1, real_bytes)
    element, strip_at = _element(prologue, w, g, s), strips(length, threads)

    @cuda.jit
    def loop(table, n_tensors, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        row = row_of_table(table, n_tensors, block)
        strip = strip_at(row, block, thread)
        if strip.count == 0:
            return
        hp = read_hp(load_int64(row + 8 * HP))
        w, g, s = load_int64(row + 8 * W), load_int64(row + 8 * G), load_int64(row + 8 * S0)
        line = strip.matrix * load_int64(row + 8 * HEIGHT) + strip.top
        width = load_int64(row + 8 * WIDTH)
        row_factors, of_row = load_int64(row + 8 * ROW_FACTORS), cuda.local.array(1, kind)
        x, d = cuda.local.array(length, w_type), cuda.local.array(length, g_type)
        a, of_columns = cuda.local.array(length, s_type), cuda.local.array(length, kind)
        column = strip.matrix * width + strip.column
        factors = load_int64(row + 8 * COLUMN_FACTORS) + column * real_bytes
        load_columns(of_columns, factors, strip)
        i = strip.y
        while i < strip.rows:
            offset = (line + np.int64(i)) * width + strip.column
            load_w(x, w + offset * w_bytes, strip)
            load_g(d, g + offset * g_bytes, strip)
            if has_average:
                load_s(a, s + offset * s_bytes, strip)
            load_one(of_row, row_factors + (line + np.int64(i)) * real_bytes)
            for k in range(length):
                if k < strip.count:
                    element(x, d, a, k, of_row[0], of_columns[k], hp)
            store_w(w + offset * w_bytes, x, strip)
            if has_average:
                store_s(s + offset * s_bytes, a, strip)
            i = np.uint32(i + strip.threads_down)

    return loop


def _element(prologue: Prologue, w: Storage, g: Storage, s: Storage | None) -> Any:
    """``element(w, g, average, k, row, column, hp)``: the update of element ``k``, in registers."""
    has_average = s is not None
    rule = rules.factored if has_average else rules.factored_plain
    of_arrays = element_of(rule, prologue, w, g, (s,) if s else (), DEVICE)

    @cuda.jit(device=True)
    def element(w, g, average, k, row, column, hp):
        if has_average:
            of_arrays((w, average), g, k, row, column, hp)
        else:
            of_arrays((w,), g, k, row, column, hp)

    return element
