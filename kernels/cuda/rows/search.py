"""Bisection in the columns of a table on the device."""

from __future__ import annotations

from numba import cuda

from ..device.backend import load_int64


@cuda.jit(device=True)
def last_at_most(values, stride, n, x):
    """The last ``i < n`` whose ``int64`` at ``values + i * stride`` is at most ``x``; else 0."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) >> 1
        if load_int64(values + middle * stride) <= x:
            low = middle
        else:
            high = middle
    return low


@cuda.jit(device=True)
def first_at_least(keys, low, high, x):
    """The first ``i`` in ``low .. high`` with sorted key ``i`` at least ``x``; else ``high``."""
    while low < high:
        middle = (low + high) >> 1
        if load_int64(keys + 8 * middle) < x:
            low = middle + 1
        else:
            high = middle
    return low
