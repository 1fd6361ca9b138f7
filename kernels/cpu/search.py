"""Binary search in sorted int64 arrays, compiled."""

from __future__ import annotations

from numba import njit


@njit
def last_at_most(values, n, x):
    """The last ``i < n`` with ``values[i] <= x``; 0 where there is none."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) >> 1
        if values[middle] <= x:
            low = middle
        else:
            high = middle
    return low
