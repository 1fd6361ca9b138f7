"""The table of the tables of a row step, as it lies on the device.

Terms used by the loops over rows:

* *position*: the number of an occurrence in the concatenated index lists of all tables;
* *global row*: the number of a row among the rows of all tables, one after the other;
* *key*: ``global row << position bits | position``; sorted, keys group equal rows and keep the
  order of occurrence inside a group;
* *hot*: a row of more than `HOT` occurrences;
* *range*: a stretch of consecutive positions of one table. Hot rows are summed range by range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...tables import RowTable, range_length
from ..dense.tiles import are_aligned
from ..device.records import Word, size_of


class TableRow(NamedTuple):
    """A table with a row-sparse gradient; an occurrence is known by its position in all tables.

    Attributes:
        arrays: address of the addresses of the parameter and of its states.
        values: address that the first position would have.
        hp: of the scalars.
        rows: of the table.
        width: elements of a row.
        first_row: the global row of its first.
        first_position: of its list of indices.
        indices: address that the index of the first position would have.
        index_bytes: 4 or 8.
        range: positions of a range.
        n_ranges: of its list of indices.
        is_aligned: whether tiles are moved by vectors.
    """

    arrays: Word
    values: Word
    hp: Word
    rows: Word
    width: Word
    first_row: Word
    first_position: Word
    indices: Word
    index_bytes: Word
    range: Word
    n_ranges: Word
    is_aligned: Word


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
    n, rows = sum(table.length for table in tables), sum(table.rows for table in tables)
    last_row = rows if drop else rows - 1
    return Sizes(
        n,
        rows,
        max(table.width for table in tables),
        max(-(-table.length // range_length(table.length)) for table in tables),
        max(1, (n - 1).bit_length()),
        max(1, last_row.bit_length()),
    )


def n_words(tables: Sequence[RowTable]) -> int:
    """Of `words_of`."""
    return sum(size_of(TableRow) // 8 + len(table.addresses) for table in tables)


def words_of(
    tables: Sequence[RowTable], place: int, itemsizes: Sequence[int], hp: Sequence[int]
) -> np.ndarray:
    """The int64 table of tables and what it points at, to lie at the address ``place``.

    Args:
        tables: at least one; their ``hp`` is not used.
        place: where.
        itemsizes: bytes of an element of the gradient, then of the parameter and of each state.
        hp: addresses of the scalars of each table.
    """
    rows: list[TableRow] = []
    arrays: list[int] = []
    at_arrays, first_row, first_position = place + len(tables) * size_of(TableRow), 0, 0
    for table, own_hp in zip(tables, hp, strict=True):
        width, length = table.width, range_length(table.length)
        strides = [width * n for n in itemsizes]
        places = np.array([table.values, *table.addresses, *strides])
        rows.append(
            TableRow(
                at_arrays + 8 * len(arrays),
                table.values - first_position * strides[0],
                own_hp,
                table.rows,
                width,
                first_row,
                first_position,
                table.indices - first_position * table.index_bytes,
                table.index_bytes,
                length,
                -(-table.length // length),
                bool(are_aligned(places)),
            )
        )
        arrays += table.addresses
        first_row += table.rows
        first_position += table.length
    return np.array([*np.ravel(rows), *arrays], np.int64)
