"""Numbers that are given by their place on the device: a learning rate, a loss scale, a flag."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .backend import load_float32, load_float64, load_int8

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
        return load_float32(address)
    if kind == FLOAT64:
        return load_float64(address)
    return float(load_int8(address))
