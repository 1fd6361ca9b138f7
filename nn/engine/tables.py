"""A table of rows and all that belongs to it: one list, checked before anything is written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.rows.write import RowValues
from ...kernels.cpu.threads import allocation
from ...kernels.quiet import quiet
from ...kernels.state import PARAMETER, State
from ...kernels.storage import STORAGES, state_storage
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.errors import reject
from ..base.arguments import count
from ..base.stateful import LAST as LAST

WEIGHTS = State("", initial=PARAMETER)
"""The table itself, as an array of the list; no state has this name."""
_PART = 1 << 21  # bytes


class TableArray(NamedTuple):
    """An array that belongs to a table: its weights, or what is kept for its rows or all of it."""

    label: str  # in errors
    array: np.ndarray
    state: State  # of what there is one number, and its dtype
    shape: tuple[int, ...]  # that it has to have
    initial: float | str  # how a new row begins: with a number, or `PARAMETER`: as the weights


class StatefulTable:
    """The list of all arrays that belong to a table; the first has its weights.

    Args:
        where: the caller in errors.
        arrays: on the host, by their names in states; the weights come first.

    Raises:
        RuntimeError: a state has another dtype than it was declared with.
        ValueError: an array has another shape, cannot be written in place, or shares memory.
    """

    def __init__(self, where: str, arrays: dict[str, TableArray]) -> None:
        self.where, self.arrays = where, arrays
        self.weights: np.ndarray = next(iter(arrays.values())).array
        w = STORAGES[self.weights.dtype]
        for label, array, state, shape, _ in arrays.values():
            if array.shape != shape:
                reject(ValueError, where, label, "has a wrong shape", shape, array.shape)
            check.variable(where, label, array, may_count=True)
            real = state_storage(state, w).dtype
            if array.dtype != real and (state.dtype is not None or state.per != "element"):
                reject(RuntimeError, where, label, "has a wrong dtype", real, array.dtype)
        every = arrays.values()
        check.no_overlap(where, [entry.label for entry in every], [entry.array for entry in every])

    @property
    def by_row(self) -> dict[str, TableArray]:
        """The arrays that have something for each row, and the weights."""
        n = self.weights.shape[:1]
        return {
            name: entry
            for name, entry in self.arrays.items()
            if entry.state.per in ("element", "row") and entry.shape[:1] == n
        }

    @quiet
    def reset(self, rows: Any, weights: Any, ids: Any) -> RowValues:
        """Begin rows anew; arguments as those of `TableRows.reset_rows`.

        Raises: as there.
        """
        where, w = self.where, self.weights
        places = rows_in(where, "rows", rows, len(w))
        shape = (len(places), *w.shape[1:])
        named = places if ids is None else adopt(where, "ids", ids).reshape(-1)
        if named.shape != places.shape or named.dtype.kind not in "iu":
            expected, got = f"{len(places)} integers", f"{named.dtype} {named.shape}"
            reject(ValueError, where, "ids", "do not fit the rows", expected, got)
        if weights is None:
            whole: np.ndarray = w[places]
        else:
            made = weights(named, shape) if callable(weights) else weights
            whole = np.asarray(adopt(where, "weights", made) if np.ndim(made) else made)
            if whole.shape not in ((), shape):
                reject(ValueError, where, "weights", "have a wrong shape", shape, whole.shape)
            if whole.dtype.kind not in "iuf" and whole.dtype != w.dtype:
                reject(TypeError, where, "weights", "have a wrong dtype", "numbers", whole.dtype)
        # Masters begin as the weights, rounded.
        whole = np.array(whole, w.dtype, order="C")  # a copy: it may be a part of the table
        new = []
        for entry in self.by_row.values():
            n, is_weight = len(places), entry.initial == PARAMETER
            if not is_weight or not whole.ndim:  # one row for all
                n, initial = 1, whole if is_weight else entry.initial
                of_each = np.full((n, *entry.shape[1:]), initial, entry.array.dtype)
            else:
                of_each = whole.astype(entry.array.dtype, copy=False)
            new.append((entry.array, of_each))
        return RowValues(places, new)

    def copied(self, source: Any, target: Any) -> RowValues:
        """Copy rows; arguments as those of `TableRows.copy_rows`.

        Raises: as there.
        """
        where, n = self.where, len(self.weights)
        to = rows_in(where, "target", target, n)
        of = np.array(adopt(where, "source", source).reshape(-1))
        check.index_dtype(where, of)
        check.indices_in_range(where, of, n)
        if len(of) != len(to):
            wrong, expected = "has another length than target", f"{len(to)} rows"
            reject(ValueError, where, "source", wrong, expected, len(of))
        every = [entry.array for entry in self.by_row.values()]
        return RowValues(to, [(x, np.ascontiguousarray(x[of])) for x in every])

    def grown(self, rows: int) -> dict[str, np.ndarray]:
        """Copies of the arrays of rows, by name, with more rows that begin anew."""
        return {name: grown(x.array, rows, x.initial) for name, x in self.by_row.items()}


def grown(array: np.ndarray, rows: int, initial: float | str) -> np.ndarray:
    """A copy with more rows, which begin at a number, or with weights of 0.

    Pages of zeros take no memory before they are used.
    """
    made = allocation.zeros((rows, *array.shape[1:]), array.dtype)
    step = max(1, (_PART * len(array)) // max(1, array.nbytes))
    for begin in range(0, len(array), step):
        part = array[begin : begin + step]
        if part.view(np.uint8).any():
            made[begin : begin + len(part)] = part
    if initial not in (0.0, PARAMETER):
        made[len(array) :] = initial
    return made


def more_rows(where: str, rows: Any, n: int) -> int:
    """A number of rows to which a table of ``n`` rows can grow.

    Raises:
        TypeError, ValueError: it is no int, or out of range.
    """
    count(where, "rows", rows)
    check.in_range(where, "rows", rows, n < rows < 1 << 31, f"{n} < rows < 2**31")
    return int(rows)


def rows_in(where: str, name: str, rows: Any, n: int) -> np.ndarray:
    """Different row numbers in range: int64 ``[n]``.

    Raises:
        TypeError: they are no int32 or int64.
        ValueError: one occurs twice.
        IndexError: one is out of range.
    """
    numbers = adopt(where, name, rows).reshape(-1)
    check.index_dtype(where, numbers)
    numbers = numbers.astype(np.int64)  # a copy: another thread may change what was given
    check.indices_in_range(where, numbers, n)
    if not (numbers[1:] > numbers[:-1]).all() and len(np.unique(numbers)) < len(numbers):
        reject(ValueError, where, name, "has a row twice", "different ones", f"{len(numbers)} rows")
    return numbers
