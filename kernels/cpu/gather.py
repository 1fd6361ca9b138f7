"""Rows of a table to a contiguous array: the forward of an embedding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from .compile import part
from .intrinsics import as_pointer, prefetch_read
from .parallel import Arguments, get_num_threads, run
from .records import int64s

_ROWS_AHEAD = 8
_SERIAL_BELOW = 65_536  # bytes
_PART_BYTES = 65_536


class GatherCall(NamedTuple):
    """Arguments of the gather loop, all ``int64``."""

    table: np.ndarray
    indices: np.ndarray  # int64 [B]
    n: int
    row_bytes: int
    out: np.ndarray
    height: int  # rows per part


@part(GatherCall)
def gather_part(index, slot, c):
    """The rows of one stretch of the indices."""
    indices = int64s(c.indices, c.n)
    end = min((index + 1) * c.height, c.n)
    for b in range(index * c.height, end):
        prefetch_read(c.table + indices[min(b + _ROWS_AHEAD, end - 1)] * c.row_bytes)
        source = carray(as_pointer(c.table + indices[b] * c.row_bytes), c.row_bytes, np.uint8)
        target = carray(as_pointer(c.out + b * c.row_bytes), c.row_bytes, np.uint8)
        for k in range(target.size):
            target[k] = source[k]


def gather(table: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    """``out[b] = table[indices[b]]`` for contiguous arrays and int64 indices in range."""
    n, row_bytes = len(indices), out.nbytes // max(1, len(indices))
    height = max(1, _PART_BYTES // max(1, row_bytes))
    call = Arguments(GatherCall(table, indices, n, row_bytes, out, height))
    threads = get_num_threads() if out.nbytes >= _SERIAL_BELOW else 1
    run(gather_part, -(-n // height), call.address, threads)
