"""Memory as compiled loops see it: ``int64``, alone or by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ..inner import njit
from .intrinsics import as_pointer


@njit(inline="always")
def int64s(address, n):
    """The ``n`` int64 at ``address``."""
    return carray(as_pointer(address), n, np.int64)


def records(cls: Any) -> Any:
    """``at(address, n)``, compiled: an array of ``n`` records with the fields of ``cls``."""
    record = np.dtype([(name, np.int64) for name in cls._fields])

    @njit(inline="always")
    def at(address, n):
        return carray(as_pointer(address), n, record)

    return at


def call_reader(cls: Any) -> Any:
    """The compiled reader of a loop's arguments: one such record.

    A record travels as one pointer. The same fields in a named tuple take seconds more to
    compile, because every function that is handed the tuple gets one argument per field.
    """
    at = records(cls)

    @njit
    def read(address):
        return at(address, 1)[0]

    return read
