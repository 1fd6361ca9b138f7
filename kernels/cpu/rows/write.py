"""Writing rows of several arrays, or single numbers, at once: nothing comes in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..compiler.compile import part
from ..compiler.intrinsics import copy_bytes
from ..compiler.records import int64s, records
from ..headers.arrays import address_of
from ..threads.parallel import Arguments, Loop, get_num_threads

_PARALLEL_FROM = 1 << 18  # bytes


class _Written(NamedTuple):
    """An array and new values of some of its rows; all ``int64``."""

    rows: int  # address of int64 [n]
    n: int
    target: int  # address
    source: int  # address
    row_bytes: int
    stride: int  # bytes from a row of the source to the next; 0: one row for all


class RowWriteCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    arrays: np.ndarray  # [n] of `_Written`
    n: int


_arrays_at = records(_Written)


@part(RowWriteCall)
def _write_rows(index, slot, c):
    x = _arrays_at(c.arrays, c.n)[index]
    rows = int64s(x.rows, x.n)
    for k in range(x.n):
        copy_bytes(x.target + rows[k] * x.row_bytes, x.source + k * x.stride, x.row_bytes)


class RowValues(NamedTuple):
    """New values of some rows of a table."""

    rows: np.ndarray  # int64 [n]
    # Contiguous arrays of the table, and contiguous values: ``values[k]`` for row ``rows[k]``, or
    # one for all rows.
    arrays: Sequence[tuple[np.ndarray, np.ndarray]]


class RowWrite:
    """Writing values to rows of tables; see `loops`."""

    def __init__(self, tables: Sequence[RowValues]) -> None:
        written, n_bytes = [], 0
        for rows, arrays in tables:
            at_rows, n = address_of(rows), len(rows)
            for array, new in arrays:
                row_bytes, n_bytes = new.nbytes // max(1, len(new)), n_bytes + new.nbytes
                places = address_of(array), address_of(new), row_bytes
                written.append(_Written(at_rows, n, *places, row_bytes if len(new) > 1 else 0))
        self._write(written, tables, get_num_threads() if n_bytes >= _PARALLEL_FROM else 1)

    def _write(self, written: Sequence[_Written], keep: Any, threads: int) -> None:
        """Make the loop; ``keep`` owns the memory of the arrays."""
        self._keep = keep
        self._call = Arguments(RowWriteCall(np.array(written, np.int64), len(written)))
        self.loops = (Loop(_write_rows.address, len(written), self._call.address, threads),)

    def release(self) -> None:
        """Do nothing: a write borrows no memory."""


class NumberWrite(RowWrite):
    """Writing single numbers, from arrays of one element to addresses; see `loops`."""

    def __init__(self, numbers: Sequence[tuple[int, np.ndarray]]) -> None:
        first = np.zeros(1, np.int64)
        one_row = address_of(first), 1
        written = [_Written(*one_row, at, address_of(new), new.nbytes, 0) for at, new in numbers]
        self._write(written, (first, numbers), 1)
