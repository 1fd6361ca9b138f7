"""The tables of a row step: summed up, and laid out for its loops, in a compiled call each.

In Python both would take longer than the step itself where many tables have a few rows each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...inner import njit
from ...tables import HOT, RowSource, ranges_of
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import load_int64
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from ..headers.arrays import address_of
from .layout import Table
from .update import TILE

_SWEEP_PART = 65_536  # elements of a part of a dense-equivalent sweep
OWN, SHARED, WEIGHTED, CHOSEN = range(4)
"""How the gradients of a table are found: the places of these forms in `sums.FORMS`."""
N_FORMS = CHOSEN + 1


class RowTables(NamedTuple):
    """T ``[N, D]`` tables and their states, for row-sparse steps; the same from step to step."""

    addresses: Any  # int64 [T, arrays]: of the parameters and their states; it may change in place
    sizes: Any  # int64 [T, 2]: N, D
    places: tuple[int, int, int, int]  # T, arrays, and the addresses of both lists

    @classmethod
    def of(cls, addresses: np.ndarray, sizes: np.ndarray) -> RowTables:
        """The tables of these lists, which are arrays of NumPy."""
        n_tables, n_arrays = addresses.shape
        places = address_of(addresses), address_of(sizes)
        return cls(addresses, sizes, (n_tables, n_arrays, *places))

    @classmethod
    def one(cls, addresses: Sequence[int], sizes: array[int]) -> RowTables:
        """One table; its rows and width are in an ``array``."""
        own = array("q", addresses)
        places = own.buffer_info()[0], sizes.buffer_info()[0]
        return cls(own, sizes, (1, len(own), *places))


class Question(NamedTuple):
    """Arguments of both calls, all ``int64``; addresses. After `n_swept` come the second's."""

    n_tables: int
    n_arrays: int
    addresses: int
    sizes: int
    sources: int
    hp: int
    hp_bytes: int  # of a row of scalars
    hp_of: int  # 0: all tables have the first row
    # Sums over the tables, which the first call writes. They decide how the step is cut.
    n: int = 0  # positions
    n_rows: int = 0
    widest: int = 0  # elements of a row
    elements: int = 0
    n_gradients: int = 0  # most gradient rows of a table whose positions share them
    carries: int = 0  # whether all tables are `SHARED`
    forms: int = 0  # a bit for each form that a table has
    n_ranges: int = 0
    hot_elements: int = 0  # of the sums of all rows that can be hot
    n_swept: int = 0  # parts of a dense-equivalent sweep
    tables: int = 0  # where the tables are written, and behind them their addresses
    is_carried: int = 0  # whether keys contain the numbers of gradient rows
    block_single: int = 0  # `Table.block_single`
    accumulate: int = 0  # [forms]: `Table.accumulate`
    g_bytes: int = 0
    real_bytes: int = 0


_question_at, _sources_at, _tables_at = map(records, (Question, RowSource, Table))
_TABLE_BYTES = 8 * len(Table._fields)
_ranges_of = njit(ranges_of)


@njit(inline="always")
def _size_of(c, t):
    at = c.sizes + 16 * t
    return load_int64(at), load_int64(at + 8)


@njit(inline="always")
def _whole_length(source):
    return source.whole_length if source.whole_length != 0 else source.length


@njit
def _form_of(source):
    if source.rows == 0:
        return OWN
    return CHOSEN if source.argmax != 0 else WEIGHTED if source.weights != 0 else SHARED


@njit
def _swept_rows(width):
    """Rows of a part of a sweep: about `_SWEEP_PART` elements, in whole tiles."""
    width = max(width, 1)
    tile = max(1, TILE // width)
    return max(1, _SWEEP_PART // width // tile) * tile


def _sum_up(question):
    c = _question_at(question, 1)[0]
    sources, c.carries = _sources_at(c.sources, c.n_tables), 1
    for t in range(c.n_tables):
        source, form = sources[t], _form_of(sources[t])
        rows, width = _size_of(c, t)
        _, n_ranges = _ranges_of(_whole_length(source))
        c.n += source.length
        c.n_rows += rows
        c.elements += rows * width
        c.widest = max(c.widest, width)
        c.n_gradients = max(c.n_gradients, source.n_rows)
        c.forms |= 1 << form
        if form != SHARED:
            c.carries = 0
        c.n_ranges += n_ranges
        # One position in HOT + 1 may begin a hot row, which has a sum in every range.
        c.hot_elements += source.length // (HOT + 1) * n_ranges * width
        c.n_swept += -(-rows // _swept_rows(width))


def _lay_out(question):
    c = _question_at(question, 1)[0]
    n, tables, sources = (
        c.n_tables,
        _tables_at(c.tables, c.n_tables),
        _sources_at(c.sources, c.n_tables),
    )
    accumulate = int64s(c.accumulate, N_FORMS)
    at_arrays = c.tables + n * _TABLE_BYTES
    arrays, given = int64s(at_arrays, n * c.n_arrays), int64s(c.addresses, n * c.n_arrays)
    for k in range(arrays.size):
        arrays[k] = given[k]
    first_row = first_position = first_range = first_part = 0
    for t in range(n):
        own, source, form = tables[t], sources[t], _form_of(sources[t])
        rows, width = _size_of(c, t)
        own.values, own.stride, own.gradient_rows = source.values, source.stride, source.rows
        own.weights, own.first, own.block_single = source.weights, source.first, c.block_single
        # Loops number occurrences through all tables, so addresses are moved back.
        if form == OWN:
            own.stride = width * c.g_bytes
            own.values -= first_position * own.stride
        else:
            own.gradient_rows -= 4 * first_position
            if c.is_carried != 0:
                form = OWN
        if form == WEIGHTED:
            own.weights -= first_position * c.real_bytes
        if form == CHOSEN:
            own.weights = source.argmax
        if form >= WEIGHTED:
            own.first -= first_position
            own.block_single = 0  # even the gradient of a single occurrence has to be computed
        own.source, own.arrays = c.tables + t * _TABLE_BYTES, at_arrays + 8 * t * c.n_arrays
        own.accumulate, own.hp = accumulate[form], c.hp
        if c.hp_of != 0:
            own.hp += load_int64(c.hp_of + 8 * t) * c.hp_bytes
        own.rows, own.width, own.positions = rows, width, source.positions
        own.indices, own.index_bytes, own.length = source.indices, source.index_bytes, source.length
        own.range, own.n_ranges = _ranges_of(_whole_length(source))
        own.part = _swept_rows(width)
        own.first_row, own.first_position = first_row, first_position
        own.first_range, own.first_part = first_range, first_part
        first_row, first_position = first_row + rows, first_position + source.length
        first_range += own.n_ranges
        first_part += -(-rows // own.part)


sum_up = NativeFunction(_sum_up, "totals of a row step", PythonEntry())
lay_out = NativeFunction(_lay_out, "tables of a row step", PythonEntry())
WRITERS = sum_up, lay_out
