"""The first stage of two-stage rules: what is measured of each tensor, and what follows from it.

Each block sums the squares of its chunk, its threads in a fixed tree; one block for each tensor
then adds the sums of the chunks, in order again, and changes the scalars of the tensor. So the
second stage finds them complete, the host is not asked, and the bits are the same in every run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import Kernel
from ...rules.rule import hp_type
from ...storage import numba_type
from ..device.backend import load_float64, load_int64, scale_real, store_float64
from ..device.functions import device_function
from ..device.guard import is_closed
from ..rows.search import last_at_most
from .tensor_table import FIRST_BLOCK, HP, IS_ALIGNED, ROW_BYTES, S0, S1, SIZE, G, W
from .tiles import measured_tiles, tiles

MOST_VALUES = 3
SUMS_BYTES = 8 * MOST_VALUES


@cuda.jit(device=True)
def add_lanes(shared, thread, lane, lanes, stride, n_values):
    """As `add_tree`, for each group of threads that lie ``stride`` apart: into that of lane 0.

    All groups of a block have the same number of lanes, a power of 2.
    """
    half = lanes >> 1
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            for k in range(n_values):
                shared[k, thread] += shared[k, thread + half * stride]
        half >>= 1


@cuda.jit(device=True)
def add_tree(shared, thread, threads, n_values):
    """Add up ``shared[k, :]``, each in a tree of fixed shape, into ``shared[k, 0]``.

    The number of threads is a power of 2.
    """
    add_lanes(shared, thread, thread, threads, 1, n_values)


@cache
def chunk_sums_kernel(kernel: Kernel, threads: int, chunk: int) -> Any:
    """``loop[blocks, threads](table, n_tensors, sums, guard)``: float64 ``sums[block, value]``.

    Table and blocks are those of the dense loop.
    """
    rule, n_values = kernel.rule, kernel.rule.n_measured
    length, vector, single = measured_tiles(rule, kernel.prologue, kernel.w, kernel.g, kernel.s)
    read_hp = tiles(rule, kernel.prologue, kernel.w, kernel.g, kernel.s).read_hp
    stride = threads * length

    @cuda.jit
    def loop(table, n_tensors, sums, guard):
        if is_closed(guard):
            return
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        row = table + last_at_most(table + 8 * FIRST_BLOCK, ROW_BYTES, n_tensors, block) * ROW_BYTES
        w, g = load_int64(row + 8 * W), load_int64(row + 8 * G)
        s0, s1 = load_int64(row + 8 * S0), load_int64(row + 8 * S1)
        hp = read_hp(load_int64(row + 8 * HP))
        begin = np.uint64(block - load_int64(row + 8 * FIRST_BLOCK)) * np.uint64(chunk)
        end = min(np.uint64(load_int64(row + 8 * SIZE)), begin + np.uint64(chunk))
        own, whole = cuda.local.array(MOST_VALUES, float64), begin
        own[0] = own[1] = own[2] = 0.0
        if load_int64(row + 8 * IS_ALIGNED):
            whole = end - end % np.uint64(length)
            i = begin + np.uint64(thread) * np.uint64(length)
            while i < whole:
                vector(own, w, g, s0, s1, np.int64(i), hp)
                i += np.uint64(stride)
        i = whole + np.uint64(thread)
        while i < end:
            single(own, w, g, s0, s1, np.int64(i), hp)
            i += np.uint64(threads)
        shared = cuda.shared.array((MOST_VALUES, threads), float64)
        shared[0, thread], shared[1, thread], shared[2, thread] = own[0], own[1], own[2]
        add_tree(shared, thread, threads, n_values)
        if thread == 0:
            for k in range(n_values):
                store_float64(sums + (block * MOST_VALUES + k) * 8, shared[k, 0])

    return loop


@cache
def factor_kernel(kernel: Kernel, threads: int) -> Any:
    """``loop[n_tensors, threads](table, n_tensors, n_blocks, sums, guard)``.

    It adds the sums of a tensor's chunks and multiplies the field ``factor_of`` of its scalars.
    """
    rule, real = kernel.rule, kernel.real
    n_values, factor = rule.n_measured, device_function(rule.factor)
    fields: Any = hp_type(rule, kernel.prologue)
    offset = fields._fields.index(rule.factor_of) * real.itemsize
    scale = scale_real(numba_type(real))

    @cuda.jit
    def loop(table, n_tensors, n_blocks, sums, guard):
        if is_closed(guard):
            return
        t, thread = cuda.blockIdx.x, cuda.threadIdx.x
        row = table + t * ROW_BYTES
        first, end = load_int64(row + 8 * FIRST_BLOCK), n_blocks
        if t + 1 < n_tensors:
            end = load_int64(row + ROW_BYTES + 8 * FIRST_BLOCK)
        shared = cuda.shared.array((MOST_VALUES, threads), float64)
        for k in range(n_values):
            total, i = 0.0, first + thread
            while i < end:
                total += load_float64(sums + (i * MOST_VALUES + k) * 8)
                i += threads
            shared[k, thread] = total
        add_tree(shared, thread, threads, n_values)
        if thread == 0:
            place = load_int64(row + 8 * HP) + offset
            if n_values == 1:
                scale(place, factor(shared[0, 0]))
            elif n_values == 2:
                scale(place, factor(shared[0, 0], shared[1, 0]))
            else:
                scale(place, factor(shared[0, 0], shared[1, 0], shared[2, 0]))

    return loop
