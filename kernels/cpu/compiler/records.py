"""Memory as compiled loops see it: ``int64``, alone, by name, or sorted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numba import carray

from ...inner import njit
from .intrinsics import as_pointer, load_int32, load_int64


@njit(inline="always")
def int64s(address, n):
    """The ``n`` int64 at ``address``."""
    return carray(as_pointer(address), n, np.int64)


@njit(inline="always")
def index_at(indices, n_bytes, k):
    """Element ``k`` of int32 or int64 indices; the test is the same in a whole loop."""
    if n_bytes == 4:
        return np.int64(load_int32(indices + 4 * k))
    return load_int64(indices + 8 * k)


def records(cls: Any) -> Any:
    """``at(address, n)``, compiled: an array of ``n`` records with the fields of ``cls``.

    A record travels as one pointer. The same fields in a named tuple take seconds more to
    compile, because every function that is handed the tuple gets one argument per field.
    """
    record = np.dtype([(name, np.int64) for name in cls._fields])

    @njit(inline="always")
    def at(address, n):
        return carray(as_pointer(address), n, record)

    return at


@njit
def last_at_most(values, n, x):
    """The last ``i < n`` with ``values[i] <= x``, found by bisection; 0 where there is none."""
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


def lie_in(stretches: Sequence[Sequence[int]], spans: Iterable[tuple[int, int]]) -> bool:
    """The same for Python: whether any byte of spans, addresses and sizes, is in a stretch."""
    begins, ends = stretches
    for begin, n_bytes in spans:
        last = bisect_left(begins, begin + n_bytes) - 1
        if n_bytes > 0 and last >= 0 and ends[last] > begin:
            return True
    return False
