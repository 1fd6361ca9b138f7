"""Sums over the threads of a block and over blocks, in orders that the launch alone decides.

A block leaves up to `MOST_VALUES` float64 in memory, its *part* of as many sums. Threads are added
up in trees of fixed shape, in shared memory ``[values, threads]``.
"""

from __future__ import annotations

from numba import cuda

from .backend import load_float64, store_float64

MOST_VALUES = 3
PART_BYTES = 8 * MOST_VALUES


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
    """Add up ``shared[k, :]`` into ``shared[k, 0]``; the number of threads is a power of 2."""
    add_lanes(shared, thread, thread, threads, 1, n_values)


@cuda.jit(device=True)
def store_part(parts, block, shared, thread, threads, n_values):
    """Add up the threads of a block, as its part of the sums."""
    add_tree(shared, thread, threads, n_values)
    if thread == 0:
        for k in range(n_values):
            store_float64(parts + (block * MOST_VALUES + k) * 8, shared[k, 0])


@cuda.jit(device=True)
def share_of_parts(parts, first, end, value, thread, threads):
    """What one of ``threads`` adds up of the parts from ``first`` to ``end`` of a sum."""
    total, i = 0.0, first + thread
    while i < end:
        total += load_float64(parts + (i * MOST_VALUES + value) * 8)
        i += threads
    return total
