"""The memory layout of one row step: its tables, its workspace and the arguments of its loops.

`kernels.tables` explains the terms of the loops over rows.
"""

from __future__ import annotations

from typing import NamedTuple

from ...inner import njit
from ...tables import HOT
from ..compiler.records import records


class Table(NamedTuple):
    """A table of the step, in the order of their rows and positions; all ``int64``."""

    # The `Source` of its gradient: addresses are biased, so that index 0 is position 0.
    values: int
    stride: int
    gradient_rows: int  # 0: each position has its own
    weights: int
    first: int
    source: int  # where this record lies
    arrays: int  # address of the addresses of the parameter and its states
    accumulate: int  # for rows that are found like this
    block_single: int  # for a gradient as it was given; 0: there is none
    hp: int
    rows: int
    width: int
    first_row: int
    first_position: int
    indices: int
    index_bytes: int
    length: int  # positions
    first_range: int
    range: int  # positions of a range
    n_ranges: int
    first_part: int  # of a dense-equivalent sweep
    part: int  # rows of a part
    positions: int  # of the occurrences in a batch that this is a part of, or 0


class HotSegment(NamedTuple):
    """A hot segment; all ``int64``."""

    # The `Source` of its sums.
    values: int
    stride: int
    begin: int
    end: int
    table: int


HOT_BYTES = 8 * len(HotSegment._fields)


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
    # Decided by the kernel.
    block: int  # for a summed gradient
    block_zero: int
    add_ranges: int  # 0 where no row can be hot
    n_arrays: int  # of each table: the parameter and its states
    row_bytes: int  # [n_arrays, 2]: of a row of each array, for a column and beside
    g_bytes: int
    real_bytes: int
    range_numbers: int  # 0, 1, 2, ... up to those of any table, and a little beyond
    # Where the sections of the borrowed block lie.
    tables: int  # [T] of `Table`
    bad: int  # [sort_parts]: first bad position of each share, or -1
    hot: int  # [n // HOT + 1] of `HotSegment`
    histogram: int  # [sort_parts, 2**digit_bits]
    keys: int  # [n + PADDING]
    spare: int  # [n + PADDING]
    scratch: int  # one slice of scratch_bytes per slot
    hot_sums: int
    # Of single phases.
    bad_position: int  # -1 for none
    shift: int  # of the digit that the running pass sorts by
    moved: int  # whether the pass moves anything
    sorted_keys: int  # where they lie
    n_valid: int  # how many of them belong to rows
    n_hot: int
    n_parts: int
    measured: int  # [n] float64: at the first key of each segment what was measured of its row


# The key list is read a little beyond its end, to prefetch.
PADDING = 32

_tables_at, _hot_at = records(Table), records(HotSegment)


@njit(inline="always")
def tables_of(c):
    """The tables of a step."""
    return _tables_at(c.tables, c.n_tables)


@njit(inline="always")
def hot_of(c):
    """The hot segments of a step, with room for all that there can be."""
    return _hot_at(c.hot, c.n // HOT + 1)
