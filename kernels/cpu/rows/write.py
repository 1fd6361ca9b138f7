"""Writing rows of several arrays at once, so that nothing comes in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..compiler.compile import part
from ..compiler.intrinsics import copy_bytes
from ..compiler.records import int64s, records
from ..headers.arrays import address_of
from ..threads.parallel import Arguments, Loop


class _Array(NamedTuple):
    """An array and new values of some of its rows; all ``int64``."""

    target: int  # address
    source: int  # address
    row_bytes: int


class RowWriteCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    rows: np.ndarray  # int64 [n]
    n: int
    arrays: np.ndarray  # [n_arrays] of `_Array`
    n_arrays: int


_arrays_at = records(_Array)


@part(RowWriteCall)
def _write_rows(index, slot, c):
    rows, own = int64s(c.rows, c.n), _arrays_at(c.arrays, c.n_arrays)[index]
    for k in range(c.n):
        target = own.target + rows[k] * own.row_bytes
        copy_bytes(target, own.source + k * own.row_bytes, own.row_bytes)


class RowWrite:
    """Writing contiguous ``values[k]`` to row ``rows[k]`` of each contiguous array; see `loops`."""

    def __init__(self, rows: np.ndarray, arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        table = [
            _Array(address_of(array), address_of(values), values.nbytes // max(1, len(rows)))
            for array, values in arrays
        ]
        found = np.array(table, np.int64)
        self._keep = rows, arrays, found
        self._call = Arguments(RowWriteCall(rows, len(rows), found, len(arrays)))
        self.loops = (Loop(_write_rows.address, len(arrays), self._call.address, 1),)

    def release(self) -> None:
        """Do nothing: a write borrows no memory."""
