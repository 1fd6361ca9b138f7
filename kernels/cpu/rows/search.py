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


@njit
def overlaps(stretches, begin, end):
    """Whether ``begin .. end`` overlaps any stretch of memory.

    ``stretches`` is ``[2, n]``: where they begin and where they end, in order and without
    overlap. So the last one that begins before ``end`` decides.
    """
    begins, ends = stretches[0], stretches[1]
    if begins.size == 0 or begin >= end:
        return False
    last = last_at_most(begins, begins.size, end - 1)
    return begins[last] < end and ends[last] > begin
