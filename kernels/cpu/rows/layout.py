"""The memory layout of one row step: its tables, its workspace and the arguments of its loops.

`kernels.tables` explains the terms of the loops over rows.
"""

from __future__ import annotations

from typing import NamedTuple

from ...inner import njit
from ...tables import HOT, RowSource, Source, record_type
from ..compiler.records import records


class Table(NamedTuple):
    """A table of the step, in the order of their rows and positions; all ``int64``.

    Its record begins with the `RowSource` of its gradient. Addresses of lists are biased there, so
    that index 0 is position 0. What a form does not need is 0, and winners stand in the place of
    weights.
    """

    source: int  # where the record lies
    arrays: int  # address of the addresses of the parameter and its states
    accumulate: int  # for rows that are found like this
    block_single: int  # for a gradient as it was given; 0: there is none
    hp: int
    rows: int
    width: int
    first_row: int
    first_position: int
    first_range: int
    range: int  # positions of a range
    n_ranges: int
    first_part: int  # of a dense-equivalent sweep
    part: int  # rows of a part


class HotSegment(NamedTuple):
    """A hot segment; all ``int64``. Its record begins with the `Source` of its sums."""

    begin: int
    end: int
    table: int


class Totals(NamedTuple):
    """Sums over the tables, all ``int64``. They decide how a step is cut."""

    n: int = 0  # positions
    n_rows: int = 0
    widest: int = 0  # elements of a row
    elements: int = 0
    n_gradients: int = 0  # most gradient rows of a table whose positions share them
    carries: int = 1  # whether all tables are `SHARED`
    forms: int = 0  # a bit for each form that a table has
    n_ranges: int = 0
    hot_elements: int = 0  # of the sums of all rows that can be hot
    n_swept: int = 0  # parts of a dense-equivalent sweep


class RowCall(NamedTuple):
    """Arguments of every loop of a row step and what one loop tells the next, all ``int64``."""

    # Decided by the sizes of the step.
    n_tables: int
    n: int  # positions
    position_bits: int  # of a position and what is carried behind it
    carried_bits: int  # of the number of its gradient row; 0: none is carried
    row_bits: int
    digit_bits: int
    dropped_row: int  # global row that out-of-range indices get, or -1 to report them
    sort_parts: int
    scratch_bytes: int  # of a slot
    n_parts: int
    # Decided by the kernel.
    block: int  # for a summed gradient
    block_zero: int
    block_single: int  # `Table.block_single`
    accumulate: int  # [forms]: `Table.accumulate`
    add_ranges: int  # 0 where no row can be hot
    n_arrays: int  # of each table: the parameter and its states
    row_bytes: int  # [n_arrays, 2]: of a row of each array, for a column and beside
    g_bytes: int
    real_bytes: int
    range_numbers: int  # 0, 1, 2, ... up to those of any table, and a little beyond
    # Where the sections of the borrowed memory lie, which a plan counts from its beginning.
    tables: int  # [T] of `Table`, and behind them the addresses of their arrays
    bad: int  # [sort_parts]: first bad position of each share, or -1
    hot: int  # [n // HOT + 1] of `HotSegment`
    histogram: int  # [sort_parts, 2**digit_bits]
    keys: int  # [n + PADDING]
    spare: int  # [n + PADDING]
    scratch: int  # one slice of scratch_bytes per slot
    hot_sums: int
    # Given with each step.
    memory: int = 0
    sources: int = 0  # [T] of `RowSource`
    addresses: int = 0  # [T, n_arrays]
    sizes: int = 0  # [T, 2]
    hp: int = 0
    hp_bytes: int = 0  # of a row of scalars
    hp_of: int = 0  # [T]; 0: all tables have the first row
    measured: int = 0  # [n] float64: at the first key of each segment what was measured of its row
    # Of single phases.
    bad_position: int = -1  # -1 for none
    shift: int = 0  # of the digit that the running pass sorts by
    moved: int = 0  # whether the pass moves anything
    sorted_keys: int = 0  # where they lie
    n_valid: int = 0  # how many of them belong to rows
    n_hot: int = 0


# The key list is read a little beyond its end, to prefetch.
PADDING = 32

_tables_at, _hot_at = records(RowSource, Table), records(Source, HotSegment)
TABLE_BYTES = record_type(RowSource, Table).itemsize
HOT_BYTES = record_type(Source, HotSegment).itemsize


@njit(inline="always")
def tables_of(c):
    """The tables of a step."""
    return _tables_at(c.tables, c.n_tables)


@njit(inline="always")
def hot_of(c):
    """The hot segments of a step, with room for all that there can be."""
    return _hot_at(c.hot, c.n // HOT + 1)
