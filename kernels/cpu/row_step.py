"""One row-sparse step of a rule on any number of tables: group, sum, update."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..blocks import Kernel
from ..compile import NativeFunction
from . import layout, rows, sort
from .layout import COLUMNS, HOT, HOT_COLUMNS, N_RESULTS, PADDING, RowCall
from .parallel import get_num_threads, run
from .workspace import Block, borrow

SORT_SERIAL_BELOW = 8_192  # positions
UPDATE_SERIAL_BELOW = 32_768  # elements
_ROW_COST = 96  # elements that could be updated while one row is fetched from memory
_PARTS_PER_THREAD = 16
_SWEEP_PART = 65_536  # elements of a part of a dense-equivalent sweep
_TILE = 1_024  # elements of a tile of that sweep
_LINE_WORDS = 8  # int64 of a cache line

stripes = np.zeros(rows.N_STRIPES, np.int32)
"""Row locks of all calls of the process; 0 is free."""

_stripes_address = stripes.ctypes.data
if hasattr(os, "register_at_fork"):
    # A thread that held a row in the parent does not exist in the child.
    os.register_at_fork(after_in_child=lambda: stripes.fill(0))
_FIELD = {name: k for k, name in enumerate(RowCall._fields)}


class RowTable(NamedTuple):
    """One ``[N, D]`` table, its states, its scalars and its row-sparse gradient; addresses.

    Attributes:
        w, s0, s1, s2: the parameter and its states; absent states 0.
        hp: the scalars, in the type of the arithmetic.
        rows: N.
        width: D, elements of a row.
        indices: ``[B]``.
        index_bytes: 4 (int32) or 8 (int64).
        length: B.
        values: ``[B, D]``.
    """

    w: int
    s0: int
    s1: int
    s2: int
    hp: int
    rows: int
    width: int
    indices: int
    index_bytes: int
    length: int
    values: int


def row_update(
    kernel: Kernel, tables: list[RowTable], *, touched_only: bool, drop: bool, locked: bool
) -> int:
    """One step of ``kernel`` on tables with row-sparse gradients, in place.

    Occurrences of a row are summed in order (a row with more than ``layout.HOT`` of them range
    by range of positions, the sums of the ranges in order), then the rule runs once on the row.

    Args:
        kernel: the compiled rule and its storage types.
        tables: at least one; all of the kernel's storage types.
        touched_only: True updates the rows that occur (lazy); False all rows, those that do
            not occur with a gradient of 0 (dense-equivalent).
        drop: leave out indices outside of ``[0, N)`` instead of reporting them.
        locked: take a row's lock around its update (lazy only).

    Returns:
        -1, or the position of the first bad index in the concatenated lists; then nothing
        was written.
    """
    size = _sizes(kernel, tables, touched_only, drop)
    with borrow(size.words) as block:
        step = _RowStep(kernel, tables, size, block)
        step.prepare(kernel.block_real, touched_only=touched_only, drop=drop, locked=locked)
        step.group()
        position = step.result(layout.BAD_POSITION)
        if position < 0:
            step.sum_hot()
            step.update_touched() if touched_only else step.update_all()
    return position


def row_norm(kernel: Kernel, tables: list[RowTable]) -> tuple[int, float]:
    """The sum of squares of row-sparse gradients whose duplicates are summed first.

    Args:
        kernel: of a rule that measures the gradient; its storage types are those of the sums.
        tables: at least one; only their gradients are read.

    Returns:
        As `row_update` the position of the first bad index or -1, and the float64 sum.
    """
    size = _sizes(kernel, tables, touched_only=True, drop=False)
    with borrow(size.words) as block:
        step = _RowStep(kernel, tables, size, block)
        assert kernel.measure_real is not None
        step.prepare(kernel.measure_real, touched_only=True, drop=False, locked=False)
        step.group()
        position = step.result(layout.BAD_POSITION)
        if position >= 0:
            return position, 0.0
        step.sum_hot()
        return position, step.measure_touched()


class _Sizes(NamedTuple):
    """The sizes that decide how a step is cut and how much memory it borrows."""

    n: int
    n_rows: int
    threads: int
    sort_parts: int
    row_bits: int
    digit_bits: int
    scratch_words: int  # per slot
    places: tuple[int, ...]  # word at which each section begins
    words: int


# Sections of the borrowed block, in the order of the sizes in `_sizes`.
_CALL, _RESULT, _TABLES, _BAD, _HOT, _HISTOGRAM, _KEYS, _SPARE, _SCRATCH = range(9)


def _sizes(kernel: Kernel, tables: list[RowTable], touched_only: bool, drop: bool) -> _Sizes:
    n = n_rows = widest = 0
    for table in tables:
        n += table.length
        n_rows += table.rows
        widest = max(widest, table.width)
    # The summed gradient of a slot: a row, or a tile of whole rows.
    elements = widest if touched_only else max(widest, _TILE)
    scratch_words = _whole_lines(elements * kernel.real.itemsize // 8 + 1)
    return _sizes_of(n, n_rows, len(tables), get_num_threads(), scratch_words, drop)


@lru_cache(maxsize=256)
def _sizes_of(
    n: int, n_rows: int, n_tables: int, threads: int, scratch_words: int, drop: bool
) -> _Sizes:
    sort_parts = threads if n >= SORT_SERIAL_BELOW else 1
    row_bits = max(1, (n_rows if drop else n_rows - 1).bit_length())
    digit_bits = _digit_bits(n, row_bits)
    places, words = [], 0
    for size in (
        len(RowCall._fields),
        N_RESULTS,
        n_tables * COLUMNS,
        sort_parts,
        (n // HOT + 1) * HOT_COLUMNS,
        sort_parts << digit_bits,
        n + PADDING,
        n + PADDING,
        threads * scratch_words,
    ):
        places.append(words)
        words += _whole_lines(size)
    return _Sizes(
        n,
        n_rows,
        threads,
        sort_parts,
        row_bits,
        digit_bits,
        scratch_words,
        tuple(places),
        words,
    )


def _whole_lines(words: int) -> int:
    return -(-words // _LINE_WORDS) * _LINE_WORDS


def _digit_bits(n: int, row_bits: int) -> int:
    """Bits of a radix digit: at most 11, even passes, and no more counters than keys need."""
    most = min(11, max(4, n.bit_length() + 1))
    passes = -(-row_bits // most)
    return -(-row_bits // passes)


class _RowStep:
    """The phases of one step on a borrowed block."""

    def __init__(self, kernel: Kernel, tables: list[RowTable], size: _Sizes, block: Block) -> None:
        self._kernel = kernel
        self._tables = tables
        self._size = size
        self._block = block
        self._keep: list[np.ndarray] = []  # arrays whose addresses the loops have

    def result(self, which: int) -> int:
        """One element of the loops' results."""
        return int(self._block.words[self._size.places[_RESULT] + which])

    def _set(self, field: str, value: int) -> None:
        self._block.words[_FIELD[field]] = value

    def _run(self, part: NativeFunction, n: int, threads: int) -> None:
        run(part, n, self._block.address, threads)

    def prepare(
        self, of_row: NativeFunction, *, touched_only: bool, drop: bool, locked: bool
    ) -> None:
        """Write the arguments of the loops, ``of_row`` the block, and the list of tables."""
        size, kernel, base = self._size, self._kernel, self._block.address
        s0_bytes, s1_bytes, s2_bytes = kernel.state_bytes
        at = [base + 8 * place for place in size.places]
        call = RowCall(
            tables=at[_TABLES],
            n_tables=len(self._tables),
            n=size.n,
            position_bits=max(1, (size.n - 1).bit_length()),
            row_bits=size.row_bits,
            digit_bits=size.digit_bits,
            dropped_row=size.n_rows if drop else -1,
            keys=at[_KEYS],
            spare=at[_SPARE],
            histogram=at[_HISTOGRAM],
            bad=at[_BAD],
            sort_parts=size.sort_parts,
            shift=0,
            result=at[_RESULT],
            n_parts=1,
            parts=0,
            hot=at[_HOT],
            hot_sums=0,
            add_ranges=0,
            range_numbers=0,
            block=of_row.address,
            block_zero=0 if touched_only else kernel.block_zero.address,
            accumulate=rows.accumulate(kernel.g, kernel.real).address,
            w_bytes=kernel.w.itemsize,
            s0_bytes=s0_bytes,
            s1_bytes=s1_bytes,
            s2_bytes=s2_bytes,
            g_bytes=kernel.g.itemsize,
            real_bytes=kernel.real.itemsize,
            scratch=at[_SCRATCH],
            scratch_bytes=size.scratch_words * 8,
            tile=_TILE,
            stripes=_stripes_address if locked else 0,
            measured=0,
        )
        words = self._block.words
        words[: len(call)] = call
        words[size.places[_RESULT] : size.places[_RESULT] + N_RESULTS] = -1
        self._write_tables(size.places[_TABLES])

    def _write_tables(self, place: int) -> None:
        first_row = first_position = first_range = 0
        for table in self._tables:
            length = layout.range_length(table.length)
            # The loops know an occurrence by its position among those of all tables.
            values = table.values - first_position * table.width * self._kernel.g.itemsize
            self._block.words[place : place + COLUMNS] = (
                table.w,
                table.s0,
                table.s1,
                table.s2,
                values,
                table.hp,
                table.rows,
                table.width,
                first_row,
                first_position,
                table.indices,
                table.index_bytes,
                first_range,
                length,
            )
            first_range += -(-table.length // length)
            first_row += table.rows
            first_position += table.length
            place += COLUMNS
        self._n_ranges = first_range

    def group(self) -> None:
        """Build and sort the keys; stops at a bad index."""
        if self._size.sort_parts == 1:
            self._run(sort.group_serial, 1, 1)
            return
        self._each_share(sort.keys_part)
        place = self._size.places[_BAD]
        bad = self._block.words[place : place + self._size.sort_parts]
        if (bad >= 0).any():
            self._block.words[self._size.places[_RESULT] + layout.BAD_POSITION] = bad[
                bad >= 0
            ].min()
            return
        self._sort()
        self._run(sort.finish_part, 1, 1)

    def _each_share(self, part: NativeFunction) -> None:
        self._run(part, self._size.sort_parts, self._size.sort_parts)

    def _sort(self) -> None:
        words, keys, spare = self._block.words, _FIELD["keys"], _FIELD["spare"]
        first = int(words[_FIELD["position_bits"]])
        for shift in range(first, first + self._size.row_bits, self._size.digit_bits):
            self._set("shift", shift)
            self._each_share(sort.count_part)
            self._run(sort.offsets_part, 1, 1)
            if self.result(layout.MOVED):
                self._each_share(sort.scatter_part)
                words[keys], words[spare] = int(words[spare]), int(words[keys])

    def sum_hot(self) -> None:
        """Sum the hot rows, range by range."""
        if self._size.n <= HOT:
            return
        self._run(rows.find_hot, 1, 1)
        if self.result(layout.N_HOT) == 0:
            return
        kernel = self._kernel
        sums = np.empty(self.result(layout.HOT_ELEMENTS), kernel.real.dtype)
        numbers = np.arange(self._n_ranges + PADDING)
        self._keep += [sums, numbers]
        self._set("hot_sums", sums.ctypes.data)
        self._set("range_numbers", numbers.ctypes.data)
        self._set("add_ranges", rows.accumulate(kernel.real, kernel.real).address)
        self._run(rows.sum_hot_range, self._n_ranges, self._size.threads)

    def update_touched(self) -> None:
        """Lazy: the rule on the rows that occur."""
        widest = max(table.width for table in self._tables)
        if self._size.n * (widest + _ROW_COST) < UPDATE_SERIAL_BELOW:
            self._run(rows.update_touched, 1, 1)
            return
        # Parts differ in cost, as rows do in occurrences: many of them balance the threads.
        n_parts = min(self._size.n, _PARTS_PER_THREAD * self._size.threads)
        self._set("n_parts", n_parts)
        self._run(rows.update_touched, n_parts, self._size.threads)

    def measure_touched(self) -> float:
        """The squares of the summed rows, added up in the order of the rows."""
        sums = np.zeros(self._size.n)
        self._set("measured", sums.ctypes.data)
        n_parts = min(self._size.n, _PARTS_PER_THREAD * self._size.threads)
        self._set("n_parts", n_parts)
        self._run(rows.measure_touched, n_parts, self._size.threads)
        return float(sums.sum())

    def update_all(self) -> None:
        """Dense-equivalent: one sweep over all rows."""
        elements = sum(table.rows * table.width for table in self._tables)
        parts = np.concatenate([_sweep_parts(t, table) for t, table in enumerate(self._tables)])
        self._keep.append(parts)
        self._set("parts", parts.ctypes.data)
        self._set("n_parts", len(parts))
        threads = 1 if elements < UPDATE_SERIAL_BELOW else self._size.threads
        self._run(rows.update_all, len(parts), threads)


def _sweep_parts(t: int, table: RowTable) -> np.ndarray:
    """Row ranges of about `_SWEEP_PART` elements, in whole tiles: ``[P, PART_COLUMNS]``."""
    tile = max(1, _TILE // max(table.width, 1))
    height = max(1, _SWEEP_PART // max(table.width, 1) // tile) * tile
    begins = np.arange(0, table.rows, height)
    ends = np.minimum(begins + height, table.rows)
    return np.stack([np.full_like(begins, t), begins, ends], axis=1)
