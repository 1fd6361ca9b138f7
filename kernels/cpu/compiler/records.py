"""Memory as compiled loops read it: arrays of ``int64``, records, and sorted lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ...inner import njit
from ...tables import record_type
from .intrinsics import as_pointer, load_int32, load_int64


@njit(inline="always")
def int64s(address, n):
    """The ``n`` int64 at ``address``."""
    return carray(as_pointer(address), n, np.int64)


@njit(inline="always")
def index_at(indices, n_bytes, k):
    """Element ``k`` of int32 or int64 indices; ``n_bytes`` is constant in a loop."""
    if n_bytes == 4:
        return np.int64(load_int32(indices + 4 * k))
    return load_int64(indices + 8 * k)


def records(*fields: Any) -> Any:
    """``at(address, n)``, compiled: an array of ``n`` records of a `record_type`.

    A record is passed as one pointer. The same fields in a named tuple take seconds more to
    compile, because every function that gets the tuple has one argument per field.
    """
    record = record_type(*fields)

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
