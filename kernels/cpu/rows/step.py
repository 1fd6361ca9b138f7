"""One row-sparse step of a rule on any number of tables: group, sum, update."""

from __future__ import annotations

import struct
from array import array
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ...element import Kernel
from ...tables import HOT, MOST_RANGES, RowTable, ranges_of
from ..blocks import blocks
from ..compiler.compile import NativeFunction
from ..compiler.lines import LINE
from ..headers.arrays import address_of
from ..threads.parallel import Loop, get_num_threads, run, run_words
from ..threads.workspace import borrow, give_back
from . import sort, sums
from . import update as rows
from .layout import PADDING, HotSegment, RowCall, Table

SORT_SERIAL_BELOW = 8_192  # positions
UPDATE_SERIAL_BELOW = 131_072  # elements: waking a thread takes as long as updating so many
ROW_COST = 96  # elements that could be updated while one row is fetched from memory
_PARTS_PER_THREAD = 16
_SWEEP_PART = 65_536  # elements of a part of a dense-equivalent sweep
_LINE_WORDS = LINE // 8  # int64
_KEY_BITS = 63  # the sign of a key stays 0, so that keys sort as the numbers that they are

_range_numbers = np.arange(MOST_RANGES + PADDING)


def _whole_lines(words: int) -> int:
    return -(-words // _LINE_WORDS) * _LINE_WORDS


_FIELD = {name: k for k, name in enumerate(RowCall._fields)}
# Fields that loops fill in, up to the end of a line; at first there is no bad position.
_UNKNOWN = (-1, *(0,) * (_whole_lines(len(_FIELD)) - _FIELD["bad_position"] - 1))


def row_norm(kernel: Kernel, tables: list[RowTable]) -> tuple[int, float]:
    """The sum of squares of row-sparse gradients whose duplicates are summed first.

    The kernel is that of a rule that measures the gradient, for the storage types of the sums.
    Returns the position of the first bad index, or -1 (`RowStep.bad_position`), and the sum.
    """
    block = blocks(kernel).measure_real
    assert block is not None
    step = RowStep(kernel, tables, block, touched_only=True)
    total = step.measure_touched() if step.bad_position < 0 else 0.0
    step.release()
    return step.bad_position, total


@cache
def _packer(n_words: int) -> Any:
    return struct.Struct(f"{n_words}q").pack_into


class _Sizes(NamedTuple):
    """The sizes that decide how a step is cut and how much memory it borrows."""

    n: int
    sort_parts: int
    threads: int  # of the update
    ranges: tuple[tuple[int, int], ...]  # of each table: the length of a range, and their number
    sweep: tuple[tuple[int, int], ...]  # of each table: its first part, and rows of a part
    arguments: tuple[int, ...]  # the first fields of `RowCall`
    places: tuple[int, ...]  # byte at which each section behind `RowCall` begins
    words: int
    loops: tuple[int, ...]  # of the grouping: the words of each `Loop`, with 0 for its arguments
    n_parts: int  # of the update
    told: tuple[int, ...]  # the last fields of `RowCall`, which loops fill in
    carries: bool  # whether keys contain the numbers of gradient rows


def _sizes(kernel: Kernel, tables: list[RowTable], touched_only: bool, drop: bool) -> _Sizes:
    n = n_rows = widest = elements = carried = 0
    shapes, carries = [], True
    for _, _, height, width, source in tables:
        n += source.length
        n_rows += height
        elements += height * width
        widest = max(widest, width)
        shapes.append((source.length, source.whole_length or source.length, height, width))
        carried = max(carried, source.n_rows)
        carries = carries and source.rows != 0 and not (source.weights or source.winners)
    work = n * (widest + ROW_COST) if touched_only else elements
    sorts_alone, updates_alone = n < SORT_SERIAL_BELOW, work < UPDATE_SERIAL_BELOW
    threads = 1 if sorts_alone and updates_alone else get_num_threads()
    # A slot has a cache line, and the summed gradient of a row or of a tile of whole rows.
    scratch = (widest if touched_only else max(widest, rows.TILE)) * kernel.real.itemsize
    dropped_row, carried_bits = n_rows if drop else -1, carried.bit_length() if carries else 0
    shape = n, n_rows, len(kernel.row_bytes), dropped_row, kernel.real.itemsize, carried_bits
    parts = 1 if sorts_alone else threads, 1 if updates_alone else threads
    return _sizes_of(shape, tuple(shapes), *parts, scratch + LINE, touched_only)


@lru_cache(maxsize=256)
def _sizes_of(
    shape: tuple[int, ...], table_shapes: tuple[tuple[int, int, int, int], ...], sort_parts: int,
    threads: int, scratch: int, touched_only: bool,
) -> _Sizes:  # fmt: skip
    n, n_rows, n_arrays, dropped_row, real_bytes, carried_bits = shape
    ranges = tuple(ranges_of(whole_length) for _, whole_length, *_ in table_shapes)
    n_tables, n_ranges, hot_elements, n_swept, sweep = len(table_shapes), 0, 0, 0, []
    for (length, _, height, width), (_, n_own) in zip(table_shapes, ranges, strict=True):
        n_ranges += n_own
        hot_elements += length // (HOT + 1) * n_own * width
        sweep.append((n_swept, part := _sweep_rows(width)))
        n_swept += -(-height // part)
    row_bits = max(1, max(n_rows - 1, dropped_row).bit_length())
    # A radix digit has at most 11 bits, equal in all passes, and no more values than there are
    # keys, roughly.
    passes = -(-row_bits // min(11, max(4, n.bit_length() + 1)))
    digit_bits = -(-row_bits // passes)
    scratch_words = _whole_lines(scratch // 8 + 1)
    sizes = (
        len(RowCall._fields),
        n_tables * (len(Table._fields) + n_arrays),
        sort_parts,
        (n // HOT + 1) * len(HotSegment._fields),
        sort_parts << digit_bits,
        n + PADDING,
        n + PADDING,
        max(sort_parts, threads) * scratch_words,
        hot_elements * real_bytes // 8 + 1,
    )
    ends = tuple(accumulate(map(_whole_lines, sizes)))
    places = tuple(8 * end for end in ends[:-1])
    position_bits = max(1, (n - 1).bit_length())
    # If a key contains the number of its gradient row, the list of these numbers is read once, in
    # order. Otherwise it is read in the order of sorted keys, before the row can be fetched.
    if row_bits + position_bits + carried_bits > _KEY_BITS:
        carried_bits = 0
    bits = position_bits + carried_bits, carried_bits, row_bits, digit_bits
    arguments = (n_tables, n, *bits, dropped_row, sort_parts, scratch_words * 8)
    loops = _grouping(sort_parts, passes, max(sort_parts, threads), n_ranges if n > HOT else 0)
    # Rows differ in occurrences, and so parts in cost: many parts balance the threads.
    n_touched = 1 if threads == 1 else min(n, _PARTS_PER_THREAD * threads)
    n_parts = n_touched if touched_only else n_swept
    told = list(_UNKNOWN)
    told[_FIELD["n_parts"] - _FIELD["bad_position"]] = n_parts
    return _Sizes(
        n, sort_parts, threads, ranges, tuple(sweep), arguments, places, ends[-1], loops, n_parts,
        tuple(told), carried_bits > 0,
    )  # fmt: skip


def _grouping(parts: int, passes: int, threads: int, n_ranges: int) -> tuple[int, ...]:
    """The loops that sort, and sum hot rows, in the form of `_Sizes.loops`."""
    shares, once = (parts, parts), (1, 1)
    if parts == 1:
        loops = [(sort.group_serial, *once)]
    else:
        loops = [(sort.count_rows, *shares), (sort.place_rows, *once), (sort.scatter_rows, *shares)]
        for _ in range(passes - 1):
            loops += [(sort.next_digit, *once), (sort.count_digits, *shares)]
            loops += [(sort.place_digits, *once), (sort.scatter_keys, *shares)]
        loops += [(sort.finish, *once)]
    if n_ranges:
        # Hot rows are summed with the grouping, before anything is written: all threads share the
        # sum of one hot row, so its update is short.
        loops.append((rows.sum_hot_range, n_ranges, threads))
    return tuple(word for part, n, most in loops for word in (part.address, n, 0, most))


@cache
def _kernel_arguments(
    kernel: Kernel, row_block: NativeFunction | None, every_row: bool, can_be_hot: bool
) -> tuple[int, int, tuple[int, ...]]:
    """`Table.accumulate`, `Table.block_single` and the arguments of the loops for a kernel.

    They are for occurrences that have a gradient each; ``row_block`` is called for each row.
    """
    block = row_block or blocks(kernel).update_real
    single = 0
    if row_block:  # it takes numbers in the type of the arithmetic
        single = row_block.address if kernel.g == kernel.real else 0
    elif not every_row:
        single = blocks(kernel).update.address
    zero = blocks(kernel).update_zero.address if every_row else 0
    add = sums.accumulate(kernel.g, kernel.real).address
    add_ranges = sums.accumulate(kernel.real, kernel.real).address if can_be_hot else 0
    # These arrays live as long as the kernel, and this tuple is cached with it.
    n, row_bytes = len(kernel.row_bytes), address_of(kernel.row_bytes)
    kernel_arguments = block.address, zero, add_ranges, n, row_bytes
    itemsizes = kernel.g.itemsize, kernel.real.itemsize
    return add, single, (*kernel_arguments, *itemsizes, address_of(_range_numbers))


class RowStep:
    """One step of a rule on tables with row-sparse gradients.

    Occurrences of a row are summed in order (a row with more than `HOT` of them range by range of
    positions, then the sums of the ranges in order). Then the rule runs once on the row. The
    constructor checks and groups the indices and allocates all memory; then ``loops`` update rows:
    with ``touched_only`` those that occur (lazy), else all rows, with a gradient of 0 where none
    occurs (dense-equivalent).
    """

    def __init__(
        self,
        kernel: Kernel,
        tables: list[RowTable],  # at least one
        row_block: NativeFunction | None = None,  # the block for each row; None: the rule's update
        *,
        touched_only: bool,
        drop: bool = False,  # leave out indices outside of [0, N) instead of reporting them
    ) -> None:
        self._kernel, self._tables, self._shares = kernel, tables, False
        self._size = _sizes(kernel, tables, touched_only, drop)
        self._block = borrow(self._size.words)
        kernel_arguments = _kernel_arguments(
            kernel, row_block, not touched_only, self._size.n > HOT
        )
        self._write_arguments(kernel_arguments)
        call = self._block.address
        loops = array("q", self._size.loops)
        loops[2::4] = array("q", [call]) * (len(loops) // 4)
        run_words(loops)
        # The position in the concatenated lists of indices, or -1.
        self.bad_position = int(self._block.words[_FIELD["bad_position"]])
        self.loops: tuple[Loop, ...] = ()
        if self.bad_position < 0 and row_block is None:
            update = rows.TOUCHING[self._shares][1] if touched_only else rows.update_all
            n_parts, threads = self._size.n_parts, self._size.threads
            self.loops = (Loop(update.address, n_parts, call, min(threads, n_parts)),)

    def release(self) -> None:
        """Give back the borrowed block."""
        give_back(self._block)

    def _write_arguments(self, kernel_arguments: tuple[int, int, tuple[int, ...]]) -> None:
        """Write `RowCall`, then the tables, then all of their addresses.

        One call packs all of them, which is ten times as fast as assigning to a NumPy array.
        """
        size, (words, base), tables = self._size, self._block, self._tables
        sections = map(base.__add__, size.places)
        own_sum, single, call_arguments = kernel_arguments
        fields = [*size.arguments, *call_arguments, *sections, *size.told]
        g, real = self._kernel.g, self._kernel.real
        at_addresses = base + 8 * (len(fields) + len(tables) * len(Table._fields))
        first_row = first_position = first_range = 0
        for table, ranges, part in zip(tables, size.ranges, size.sweep, strict=True):
            addresses, hp, n_rows, width, source = table
            indices, index_bytes, n, values, positions, _, rows, stride, weights, winners, first, \
                _ = source  # fmt: skip
            place, add, block = base + 8 * len(fields), own_sum, single
            # Loops number occurrences through all tables, so addresses are moved back.
            if not rows:  # each occurrence has a row of its own
                stride = width * g.itemsize
                values -= first_position * stride
            elif size.carries:  # keys contain the numbers of gradient rows
                rows -= 4 * first_position
            else:
                self._shares = True
                form = sums.CHOSEN if winners else sums.WEIGHTED if weights else sums.SHARED
                add = sums.accumulate(g, real, form).address
                rows -= 4 * first_position
                if form is not sums.SHARED:
                    weights = winners or weights - first_position * real.itemsize
                    first -= first_position
                    block = 0  # even the gradient of a single occurrence has to be computed
            fields += (
                values, stride, rows, weights, first, place, at_addresses, add, block, hp,
                n_rows, width, first_row, first_position, indices, index_bytes, n, first_range,
                *ranges, *part, positions,
            )  # fmt: skip
            at_addresses += 8 * len(addresses)
            first_range += ranges[1]
            first_row += n_rows
            first_position += n
        for table in tables:
            fields += table.addresses
        _packer(len(fields))(words.data, 0, *fields)

    def measure_touched(self) -> float:
        """The sum of squares of the summed rows, in the order of the rows."""
        # There is a place for each key, with 0 for a key that does not begin a row. NumPy adds them
        # in an order that depends on their number alone, not on the threads that have measured.
        squares, threads = np.zeros(self._size.n), self._size.threads
        n_parts = min(self._size.n, _PARTS_PER_THREAD * threads)
        words = self._block.words
        words[_FIELD["measured"]], words[_FIELD["n_parts"]] = address_of(squares), n_parts
        run(rows.TOUCHING[self._shares][0], n_parts, self._block.address, threads)
        return float(squares.sum())


def _sweep_rows(width: int) -> int:
    """Rows of a part of a sweep: about `_SWEEP_PART` elements, in whole tiles."""
    tile = max(1, rows.TILE // max(width, 1))
    return max(1, _SWEEP_PART // max(width, 1) // tile) * tile
