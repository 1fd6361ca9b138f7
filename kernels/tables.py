"""Tables of a step before a backend lays them out, and the numbers that fix its results.

Terms used by the loops over rows:

* *position*: the number of an occurrence in the concatenated index lists of all tables;
* *global row*: the number of a row among the rows of all tables, one after the other;
* *key*: ``global row << position_bits | position``; sorted, keys group equal rows and keep
  the order of occurrence inside a group. On the host the number of a gradient row may stand
  behind the position;
* *segment*: the sorted keys of one row;
* *hot*: a row, or its segment, of more than `HOT` occurrences;
* *range*: a span of consecutive positions of one table. Hot rows are summed range by range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from ctypes import c_int64
from typing import Any, NamedTuple

import numpy as np

# A row of up to HOT occurrences is summed in their order. A hotter one is summed range by
# range, each in order, and the sums of the ranges are added in order: one row then cannot hold
# up all threads, and gradients are read range after range, as they lie, not all over memory.
# These numbers fix the result to the last bit: they must not depend on the machine.
HOT = 512
_RANGE_POSITIONS = 4_096
MOST_RANGES = 64

SUM, MEAN, LARGEST = range(3)
"""Poolings of the rows of a bag."""
LEFT_OUT = -(1 << 31)
"""The mark of an ignored id in a list of pooled ids on a device."""


def ranges_of(n_positions: int) -> tuple[int, int]:
    """The length of the ranges of a table with ``n_positions``, and how many there are."""
    # Never more than MOST_RANGES ranges: each has a sum for every hot row, which is kept until the
    # row steps, and one position in HOT + 1 may begin such a row.
    length = max(_RANGE_POSITIONS, -(-n_positions // MOST_RANGES))
    return length, -(-n_positions // length)


def record_type(*fields: Any) -> np.dtype[Any]:
    """A record of ``int64`` with the fields of these named tuples, one tuple after the other."""
    return np.dtype([(name, np.int64) for part in fields for name in part._fields])


def row_width(shape: tuple[int, ...]) -> int:
    """Elements of a row of a tensor: its first axis numbers the rows. A vector is one row."""
    return math.prod(shape[1:] if len(shape) >= 2 else shape)


def has_rows(shape: tuple[int, ...]) -> bool:
    """Whether a tensor has an axis that numbers rows, and these have elements."""
    return len(shape) > 0 and row_width(shape) > 0


def table_sizes(shapes: Iterable[Sequence[int]]) -> np.ndarray:
    """Rows and width of tables of these shapes, int64 ``[T, 2]``; of a vector each is a row."""
    return np.array([(shape[0], math.prod(shape[1:])) for shape in shapes], np.int64)


class TensorTable:
    """Addresses and sizes of T tensors and their states; the same from step to step."""

    def __init__(
        self, addresses: np.ndarray, first: np.ndarray, widths: np.ndarray | None = None
    ) -> None:
        self.addresses = addresses  # int64 [T, 1 + number of states]: the parameter, its states
        self.first = first  # int64 [T + 1]: prefix sums of the tensors' sizes
        self.widths = widths  # int64 [T]: elements of a row, for rules that know rows
        self.total = int(first[-1])

    def move(self, addresses: Sequence[int], size: int) -> None:
        """Make a table of one tensor the table of another tensor."""
        self.addresses[0] = addresses
        self.first[1] = self.total = size


class Source(NamedTuple):
    """Addresses of the rows of a sum and of their lists, all ``int64``; records begin with it.

    Lists are addressed as if they began with element 0, even if they do not contain it.
    """

    values: int  # the address of row 0
    stride: int  # bytes from one row to the next
    gradient_rows: int  # the address of a list of row numbers or of keys, if the form has one
    weights: int  # the address of a list of weights, or of the winners of row 0
    first: int  # the number of place 0 among winners


class RowSource(NamedTuple):
    """The source of a row-sparse gradient, as all loops read it: addresses and numbers."""

    # The `Source` of its rows. If occurrences share them there are the number of each one's row,
    # int32 [B] (0: every occurrence has a row of its own), the bytes from one row to the next, and
    # weights of the occurrences, in the type of the arithmetic (0: all are 1).
    values: int = 0  # [B, D], or the first of the rows
    stride: int = 0
    gradient_rows: int = 0
    weights: int = 0
    first: int = 0  # the number of the first occurrence among winners
    indices: int = 0  # [B]
    index_bytes: int = 0  # 4 (int32) or 8 (int64)
    length: int = 0  # B
    # For a part of a batch that several processes share: int64 [B], the ascending positions of its
    # occurrences in the whole batch (0: this is all of the batch), and the length of the batch.
    positions: int = 0
    whole_length: int = 0
    # For maxima: int32 in the layout of the values, the occurrence that each element came from.
    winners: int = 0  # 0: no maxima
    n_gradients: int = 0  # the number of gradient rows, if occurrences may share them


assert RowSource._fields[: len(Source._fields)] == Source._fields


class RowTable(NamedTuple):
    """One ``[N, D]`` table, its states and its row-sparse gradient, on a device; addresses."""

    addresses: tuple[int, ...]  # the parameter and its states; none to read the gradient only
    rows: int  # N
    width: int  # D
    source: RowSource

    @property
    def length(self) -> int:
        """The number of occurrences."""
        return self.source.length

    @property
    def ranges(self) -> tuple[int, int]:
        """The length of its ranges, and their number."""
        return ranges_of(self.source.whole_length or self.length)

    def bounds(self) -> np.ndarray:
        """The first of its positions in each range, and its length: int64."""
        range_length, n_ranges = self.ranges
        firsts = range_length * np.arange(n_ranges + 1)
        if not self.source.positions:
            return np.minimum(firsts, self.length)
        # A part of a batch is cut where the whole batch is cut: only then has a hot row the same
        # sums as in one process with the whole batch.
        place = self.source.positions
        positions = np.ctypeslib.as_array((c_int64 * self.length).from_address(place))
        return np.searchsorted(positions, firsts)


class Feature(NamedTuple):
    """Properties of a feature that do not depend on its ids, all ``int64``."""

    table: int
    row_bytes: int
    rows: int
    width: int
    pool: int  # the address of the function that pools rows of the table, or 0
    padding: int  # the id that is ignored, or -1
    out: int  # bytes from the start of the output to the first one of the feature, or its address
    stride: int  # bytes from the output of a bag to the next
    column: int  # where its columns of the gradient begin, in units
    row: int  # units of a row of the gradient


class IdList(NamedTuple):
    """The ids of one feature in the caller's arrays, all ``int64``; addresses.

    Loops over bags copy the ids of all features into one list. On the host a record begins with the
    `Source` of the rows that are summed, which they fill in; ``first`` is the place in that list.
    """

    ids: int
    id_bytes: int
    n: int  # ids
    offsets: int  # [n_offsets]; 0: all bags have ``length`` ids
    n_offsets: int  # bags + 1, or bags: the last bag ends where the ids do
    offset_bytes: int
    begin: int  # the first offset, and the last one; -1: not known, of joined ids on a device
    end: int
    bags: int
    length: int
    id_weights: int  # [n], in the type of the arithmetic, or 0
    first_bag: int  # among those of all features
    first_part: int
    height: int  # bags of a part


class MatrixTensor(NamedTuple):
    """``[matrices, height, width]`` elements and their states; addresses."""

    addresses: tuple[int, ...]  # the parameter, then its states, those of rows and columns last
    matrices: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], addresses: Sequence[int]) -> MatrixTensor:
        """A parameter of a shape as a list of matrices, with the addresses of its states."""
        *matrices, height, width = shape
        return cls(tuple(addresses), math.prod(matrices), height, width)

    @property
    def row_state(self) -> int:
        """The address of ``[matrices, height]`` numbers."""
        return self.addresses[-2]

    @property
    def column_state(self) -> int:
        """The address of ``[matrices, width]`` numbers."""
        return self.addresses[-1]
