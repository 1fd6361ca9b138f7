"""Numbers that lie on the device: a learning rate, a loss scale, a flag, a scalar of a rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ...storage import F64, Storage
from .backend import load_float32, load_float64, load_int8, store_float32, store_float64

# How a number lies there.
INT8, FLOAT32, FLOAT64 = 1, 4, 8
KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.bool_): INT8,
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
}


@cuda.jit(device=True)
def load_number(address, kind):
    """The number at an address, as ``float64``."""
    if kind == FLOAT32:
        return np.float64(load_float32(address))
    if kind == FLOAT64:
        return load_float64(address)
    return np.float64(load_int8(address))


def multiplier(real: Storage) -> Any:
    """``multiply(address, factor)`` by a ``float64``: a scalar of a rule, rounded once."""
    load, store = (load_float64, store_float64) if real is F64 else (load_float32, store_float32)

    @cuda.jit(device=True)
    def multiply(address, factor):
        store(address, np.float64(load(address)) * factor)

    return multiply
