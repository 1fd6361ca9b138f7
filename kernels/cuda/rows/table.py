"""The table of the tables of a row step, as it lies on the device; terms as in `cpu.layout`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...tables import RowTable, range_length

# Columns, int64 [T, COLUMNS].
(
    W,
    S0,
    S1,
    S2,
    VALUES,
    HP,
    ROWS,
    WIDTH,
    FIRST_ROW,
    FIRST_POSITION,
    INDICES,
    INDEX_BYTES,
    RANGE,
    N_RANGES,
    IS_ALIGNED,
    COLUMNS,
) = range(16)
ROW_BYTES = 8 * COLUMNS
_ALIGN = 16  # bytes


def table_of(
    tables: Sequence[RowTable], g_bytes: int = 0, variable_bytes: Sequence[int] = ()
) -> np.ndarray:
    """The table of tables; ``hp`` of each is where its scalars will lie on the device.

    Args:
        tables: at least one.
        g_bytes: of an element of the gradients.
        variable_bytes: of an element of the parameters and of each state.
    """
    made = np.zeros((len(tables), COLUMNS), np.int64)
    first_row = first_position = 0
    for table, row in zip(tables, made, strict=True):
        row[W : W + len(table.addresses)] = table.addresses
        # The loops know an occurrence by its position among those of all tables.
        row[VALUES] = table.values - first_position * table.width * g_bytes
        row[INDICES] = table.indices - first_position * table.index_bytes
        row[INDEX_BYTES], row[HP] = table.index_bytes, table.hp
        row[ROWS], row[WIDTH] = table.rows, table.width
        row[FIRST_ROW], row[FIRST_POSITION] = first_row, first_position
        row[RANGE] = range_length(table.length)
        row[N_RANGES] = -(-table.length // row[RANGE])
        strides = [table.width * n for n in (g_bytes, *variable_bytes)]
        places = [table.values, *table.addresses]
        row[IS_ALIGNED] = all(x % _ALIGN == 0 for x in (*strides, *places))
        first_row += table.rows
        first_position += table.length
    return made


class Sizes(NamedTuple):
    """What the tables of a step add up to.

    Attributes:
        n: positions.
        rows: rows of all tables.
        widest: columns of the widest table.
        most_ranges: ranges of the longest list of indices.
        position_bits: bits of a key that hold the position.
        row_bits: bits of a key that hold the row.
    """

    n: int
    rows: int
    widest: int
    most_ranges: int
    position_bits: int
    row_bits: int


def sizes_of(tables: Sequence[RowTable], *, drop: bool) -> Sizes:
    """The sizes of a step; with ``drop`` there is one row more, for dropped indices."""
    n = sum(table.length for table in tables)
    rows = sum(table.rows for table in tables)
    last_row = rows if drop else rows - 1
    return Sizes(
        n,
        rows,
        max(table.width for table in tables),
        max(-(-table.length // range_length(table.length)) for table in tables),
        max(1, (n - 1).bit_length()),
        max(1, last_row.bit_length()),
    )
