"""Sums over the threads of a block and over blocks, in orders that the launch alone decides.

A block leaves a float64 of each sum in memory, its *part* of them. Threads are added up in trees
of fixed shape, in shared memory ``[values, threads]``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from .backend import load_float64, on_device, store_float64

# Numbers of an array in registers: an index that is not known to the compiler would put it into
# memory.


@cache
def taker(n: int, k: int = 0) -> Any:
    """``take(array)``: its first ``n`` numbers from number ``k`` on, as a tuple."""
    if k == n:
        return on_device(lambda array: ())  # noqa: ARG005
    rest = taker(n, k + 1)
    return on_device(lambda array: (array[k], *rest(array)))


@cache
def putter(n: int, begin: int = 0, k: int = 0) -> Any:
    """``put(array, values)``: its first ``n`` numbers are those of a tuple from ``begin`` on."""
    if k == n:
        return on_device(lambda array, values: None)  # noqa: ARG005
    rest, place = putter(n, begin, k + 1), begin + k

    @cuda.jit(device=True)
    def put(array, values):
        array[k] = values[place]
        rest(array, values)

    return put


@cuda.jit(device=True)
def add_lanes(shared, thread, lane, lanes, stride, n_values):
    """Add groups of ``lanes`` (a power of 2), ``stride`` apart, into lane 0, as `add_tree` does."""
    half = lanes >> 1
    while half > 0:
        # By all threads of the block, also those without a lane that adds: a barrier that some of
        # them leave out is undefined.
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
            store_float64(parts + (block * n_values + k) * 8, shared[k, 0])


@cuda.jit(device=True)
def strided_sum(place, k, end, step, stride):
    """The sum of the float64 at ``place + k * stride``, ``k + step``, and so on below ``end``."""
    # Unsigned: for signed bounds the compiler divides, to know the number of rounds.
    total, i = 0.0, np.uint64(k)
    while i < np.uint64(end):
        total += load_float64(place + np.int64(i) * stride)
        # Neighbouring threads read neighbouring parts, so that loads are coalesced.
        i += np.uint64(step)
    return total


@cuda.jit(device=True)
def strided_partial_sum(parts, first, end, value, n_values, thread, threads):
    """The share of one of ``threads`` in adding up the parts from ``first`` to ``end`` of a sum."""
    return strided_sum(parts + value * 8, first + thread, end, threads, n_values * 8)
