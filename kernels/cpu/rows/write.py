"""Writing rows of several arrays, or single numbers, at once: nothing comes in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..compiler.compile import part
from ..compiler.intrinsics import copy_bytes
from ..compiler.records import int64s, records
from ..headers.arrays import address_of
from ..threads.parallel import Arguments, Loop


class _Written(NamedTuple):
    """An array and new values of some of its rows; all ``int64``."""

    target: int  # address
    source: int  # address
    row_bytes: int


class RowWriteCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    rows: np.ndarray  # int64 [n]
    n: int
    arrays: np.ndarray  # [n_arrays] of `_Written`
    n_arrays: int


_arrays_at = records(_Written)


@part(RowWriteCall)
def _write_rows(index, slot, c):
    rows, written = int64s(c.rows, c.n), _arrays_at(c.arrays, c.n_arrays)[index]
    for k in range(c.n):
        target = written.target + rows[k] * written.row_bytes
        copy_bytes(target, written.source + k * written.row_bytes, written.row_bytes)


class RowWrite:
    """Writing contiguous ``values[k]`` to row ``rows[k]`` of each contiguous array; see `loops`."""

    def __init__(self, rows: np.ndarray, arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        n = max(1, len(rows))
        written = [_Written(address_of(x), address_of(new), new.nbytes // n) for x, new in arrays]
        self._write(rows, written, arrays)

    def _write(self, rows: np.ndarray, written: Sequence[_Written], keep: Any) -> None:
        """Make the loop; ``keep`` owns the memory of the arrays."""
        self._keep = keep
        call = RowWriteCall(rows, len(rows), np.array(written, np.int64), len(written))
        self._call = Arguments(call)
        self.loops = (Loop(_write_rows.address, len(written), self._call.address, 1),)

    def release(self) -> None:
        """Do nothing: a write borrows no memory."""


class NumberWrite(RowWrite):
    """Writing single numbers, from arrays of one element to addresses; see `loops`."""

    def __init__(self, numbers: Sequence[tuple[int, np.ndarray]]) -> None:
        written = [_Written(target, address_of(new), new.nbytes) for target, new in numbers]
        self._write(np.zeros(1, np.int64), written, numbers)
