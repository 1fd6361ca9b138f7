"""The tables of a row step: summed up, and laid out for its loops, in a compiled call each.

In Python both would take longer than the step itself where many tables have a few rows each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...inner import njit
from ...tables import HOT, RowSource, ranges_of, record_type
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import copy_bytes, load_int64
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from ..headers.arrays import address_of
from .layout import TABLE_BYTES, RowCall, Totals, tables_of
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
        words = array("q", addresses)
        places = words.buffer_info()[0], sizes.buffer_info()[0]
        return cls(words, sizes, (1, len(words), *places))


_sources_at, _totals_at, _calls_at = map(records, (RowSource, Totals, RowCall))
_SOURCE_BYTES = record_type(RowSource).itemsize
_ranges_of = njit(ranges_of)


@njit(inline="always")
def _size_of(sizes, t):
    return load_int64(sizes + 16 * t), load_int64(sizes + 16 * t + 8)


@njit(inline="always")
def _whole_length(source):
    return source.whole_length if source.whole_length != 0 else source.length


@njit
def _form_of(source):
    if source.gradient_rows == 0:
        return OWN
    return CHOSEN if source.winners != 0 else WEIGHTED if source.weights != 0 else SHARED


@njit
def _swept_rows(width):
    """Rows of a part of a sweep: about `_SWEEP_PART` elements, in whole tiles."""
    width = max(width, 1)
    tile = max(1, TILE // width)
    return max(1, _SWEEP_PART // width // tile) * tile


def _sum_up(sources, sizes, n_tables, totals):
    sums = _totals_at(totals, 1)[0]
    for t in range(n_tables):
        source = _sources_at(sources, n_tables)[t]
        rows, width = _size_of(sizes, t)
        form, (_, n_ranges) = _form_of(source), _ranges_of(_whole_length(source))
        sums.n += source.length
        sums.n_rows += rows
        sums.elements += rows * width
        sums.widest = max(sums.widest, width)
        sums.n_gradients = max(sums.n_gradients, source.n_gradients)
        sums.forms |= 1 << form
        if form != SHARED:
            sums.carries = 0
        sums.n_ranges += n_ranges
        # One position in HOT + 1 may begin a hot row, which has a sum in every range.
        sums.hot_elements += source.length // (HOT + 1) * n_ranges * width
        sums.n_swept += -(-rows // _swept_rows(width))


@njit(inline="always")
def _place_sections(c):
    c.tables, c.bad, c.hot = c.tables + c.memory, c.bad + c.memory, c.hot + c.memory
    c.histogram, c.keys, c.spare = c.histogram + c.memory, c.keys + c.memory, c.spare + c.memory
    c.scratch, c.hot_sums = c.scratch + c.memory, c.hot_sums + c.memory


def _lay_out(call):
    c = _calls_at(call, 1)[0]
    _place_sections(c)
    accumulate, arrays = int64s(c.accumulate, N_FORMS), c.tables + c.n_tables * TABLE_BYTES
    copy_bytes(arrays, c.addresses, 8 * c.n_tables * c.n_arrays)
    first_row = first_position = first_range = first_part = 0
    for t in range(c.n_tables):
        table, record = tables_of(c)[t], c.tables + t * TABLE_BYTES
        copy_bytes(record, c.sources + t * _SOURCE_BYTES, _SOURCE_BYTES)
        source = _sources_at(c.sources, c.n_tables)[t]
        form, (rows, width) = _form_of(source), _size_of(c.sizes, t)
        table.block_single = c.block_single
        # Loops number occurrences through all tables, so addresses are moved back.
        if form == OWN:
            table.stride = width * c.g_bytes
            table.values -= first_position * table.stride
        else:
            table.gradient_rows -= 4 * first_position
            if c.carried_bits != 0:
                form = OWN
        if form == WEIGHTED:
            table.weights -= first_position * c.real_bytes
        if form == CHOSEN:
            table.weights = table.winners
        if form >= WEIGHTED:
            table.first -= first_position
            table.block_single = 0  # even the gradient of a single occurrence has to be computed
        table.source, table.arrays = record, arrays + 8 * t * c.n_arrays
        table.accumulate, table.hp = accumulate[form], c.hp
        if c.hp_of != 0:
            table.hp += load_int64(c.hp_of + 8 * t) * c.hp_bytes
        table.rows, table.width, table.part = rows, width, _swept_rows(width)
        table.range, table.n_ranges = _ranges_of(_whole_length(source))
        table.first_row, table.first_position = first_row, first_position
        table.first_range, table.first_part = first_range, first_part
        first_row, first_position = first_row + rows, first_position + table.length
        first_range += table.n_ranges
        first_part += -(-rows // table.part)


sum_up = NativeFunction(_sum_up, "totals of a row step", PythonEntry())
lay_out = NativeFunction(_lay_out, "tables of a row step", PythonEntry())
WRITERS = sum_up, lay_out
