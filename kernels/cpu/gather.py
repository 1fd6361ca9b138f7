"""Copying rows of a table to a contiguous array: the forward pass of an embedding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiler.compile import part
from .compiler.intrinsics import copy_bytes
from .compiler.lines import prefetch
from .compiler.records import int64s
from .threads.parallel import Arguments, get_num_threads, run

_ROWS_AHEAD = 8
_SERIAL_BELOW = 65_536  # bytes
_PART_BYTES = 65_536


class GatherCall(NamedTuple):
    """Arguments of the gather loop, all ``int64``; addresses."""

    n: int
    row_bytes: int
    height: int  # rows per part
    table: np.ndarray
    indices: np.ndarray  # [B]
    out: np.ndarray


@part(GatherCall)
def gather_part(index, slot, c):
    """Copy the rows of one span of the indices."""
    indices, n_bytes = int64s(c.indices, c.n), c.row_bytes
    end = min((index + 1) * c.height, c.n)
    for b in range(index * c.height, end):
        # No processor can foresee the next rows, which only the indices tell.
        if b + _ROWS_AHEAD < c.n:
            prefetch(c.table + indices[b + _ROWS_AHEAD] * n_bytes, n_bytes)
        copy_bytes(c.out + b * n_bytes, c.table + indices[b] * n_bytes, n_bytes)


def gather(table: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    """``out[b] = table[indices[b]]`` for contiguous arrays and int64 indices in range."""
    n, row_bytes = len(indices), out.nbytes // max(1, len(indices))
    height = max(1, _PART_BYTES // max(1, row_bytes))
    call = Arguments(GatherCall(
        n=n, row_bytes=row_bytes, height=height, table=table, indices=indices, out=out
    ))  # fmt: skip
    threads = get_num_threads() if out.nbytes >= _SERIAL_BELOW else 1
    run(gather_part, -(-n // height), call.address, threads)
