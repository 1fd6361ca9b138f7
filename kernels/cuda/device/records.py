"""Rows of tables on the device, which kernels read by the names of their fields; and numbers.

A layout is said once, by a named tuple whose fields are a `Word` or `Real` of 8 bytes each, or
`Words`, as many as a reader is made for, at the end: kernels and the host both have it from there.
Of a row that is read, what is not used is not loaded in the end: the compiler sees to that.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from numba import cuda, types

from ...rule import Prologue, Rule, hp_type
from ...storage import Storage, numba_type
from .backend import load_int64, reader

# On the host a value that all rows have, or a column.
Word = Annotated[Any, types.int64]
Real = Annotated[Any, types.float64]
Words = Annotated[Any, types.UniTuple]


def words_of(name: str, *records: Any) -> Any:
    """A layout of a `Word` for each field of these named tuples, one tuple after the other."""
    return NamedTuple(name, [(x, Word) for record in records for x in record._fields])


def _kind_of(record: Any, n_words: int) -> Any:
    words, hints = types.UniTuple(types.int64, n_words), get_type_hints(record, include_extras=True)
    kinds = [hint.__metadata__[0] for hint in hints.values()]
    return types.NamedTuple([words if k is types.UniTuple else k for k in kinds], record)


@cache
def size_of(record: Any, n_words: int = 0) -> int:
    """Bytes of a row."""
    return 8 * sum(getattr(kind, "count", 1) for kind in _kind_of(record, n_words))


def offsets_of(record: Any) -> Any:
    """The byte at which each field begins, under its name."""
    return record(*range(0, 8 * len(record._fields), 8))


@cache
def row_reader(record: Any, n_words: int = 0) -> Any:
    """``row_at(table, k)``: row ``k`` of a table."""
    read, n_bytes = reader(_kind_of(record, n_words)), size_of(record, n_words)

    @cuda.jit(device=True)
    def row_at(table, k):
        return read(table + k * n_bytes)

    return row_at


@cache
def row_finder(record: Any, field: str, n_words: int = 0) -> Any:
    """``find(table, n, x)``: the last row with a field of at most ``x``, or the first."""
    row_at, n_bytes = row_reader(record, n_words), size_of(record, n_words)
    offset = getattr(offsets_of(record), field)

    @cuda.jit(device=True)
    def find(table, n, x):
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) >> 1
            if load_int64(table + offset + middle * n_bytes) <= x:
                low = middle
            else:
                high = middle
        return row_at(table, low)

    return find


@cache
def hp_reader(rule: Rule, prologue: Prologue, real: Storage) -> Any:
    """``read_hp(address)``: the scalars of a rule and of the gradient transforms before it."""
    cls: Any = hp_type(rule, prologue)
    return reader(types.NamedUniTuple(numba_type(real), len(cls._fields), cls))


def table_of(rows: Any, n: int) -> np.ndarray:
    """The int64 words of ``n`` rows, given as one whose fields are columns."""
    columns = [np.broadcast_to(x, n) if np.ndim(x) < 2 else x for x in rows]
    return np.column_stack(columns).astype(np.int64, copy=False).ravel()
