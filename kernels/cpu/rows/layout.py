"""The memory layout of one row step: its tables, its workspace and the arguments of its loops.

Terms used by the row loops:

* *position*: the number of an occurrence in the concatenated index lists of all tables;
* *global row*: the number of a row among the rows of all tables, one after the other;
* *key*: ``global row << position_bits | position``; sorted, keys group equal rows and keep
  the order of occurrence inside a group;
* *segment*: the sorted keys of one row;
* *hot*: a segment of more than `HOT` occurrences;
* *range*: a stretch of consecutive positions of one table. Hot rows are summed range by range.
"""

from __future__ import annotations

from typing import NamedTuple

from ..compile import call_reader

# Columns of the table of tables, int64 [T, COLUMNS].
(
    ARRAYS,  # address of the addresses of the parameter and its states
    VALUES,
    HP,
    ROWS,
    WIDTH,
    FIRST_ROW,
    FIRST_POSITION,
    INDICES,
    INDEX_BYTES,
    FIRST_RANGE,
    RANGE,
    COLUMNS,
) = range(12)

# Elements of ``result``.
(
    BAD_POSITION,
    MOVED,
    SORTED_KEYS,
    N_VALID,
    N_HOT,
    HOT_ELEMENTS,
    N_RESULTS,
) = range(7)

# Columns of the parts of a sweep and of the list of hot segments.
PART_TABLE, PART_BEGIN, PART_END, PART_COLUMNS = range(4)
HOT_BEGIN, HOT_END, HOT_OFFSET, HOT_TABLE, HOT_COLUMNS = range(5)


class RowCall(NamedTuple):
    """Arguments of every loop of a row step, all ``int64``."""

    # Decided by the sizes of the step.
    n_tables: int
    n: int  # positions
    position_bits: int
    row_bits: int
    digit_bits: int
    dropped_row: int  # global row that out-of-range indices get, or -1 to report them
    sort_parts: int
    scratch_bytes: int  # of a slot
    tile: int  # elements per tile of a dense-equivalent sweep
    # Decided by the kernel.
    block: int
    block_zero: int
    accumulate: int
    n_arrays: int  # of each table: the parameter and its states
    itemsizes: int  # [n_arrays]
    real_bytes: int
    # Where the sections of the borrowed block lie.
    result: int  # [N_RESULTS]
    tables: int  # [T, COLUMNS]
    addresses: int  # [T, n_arrays]
    bad: int  # [sort_parts]: first bad position of each share, or -1
    hot: int  # [n // HOT + 1, HOT_COLUMNS]
    histogram: int  # [sort_parts, 2**digit_bits]
    keys: int  # [n + PADDING]
    spare: int  # [n + PADDING]
    scratch: int  # one slice of scratch_bytes per slot
    # Of single phases.
    stripes: int  # row locks, or 0 for none
    shift: int  # of the digit that the running pass sorts by
    n_parts: int
    parts: int  # [n_parts, PART_COLUMNS], for a sweep
    hot_sums: int
    add_ranges: int
    range_numbers: int  # 0, 1, 2, ...
    measured: int  # [n] float64: at the first key of each segment what was measured of its row


# The key list is read a little beyond its end, to prefetch.
PADDING = 32

read_call = call_reader(RowCall)
