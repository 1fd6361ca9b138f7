"""One row-sparse step of a rule on any number of tables: group, sum, update."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from functools import cache, lru_cache, partial
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from ...element import Kernel
from ...tables import HOT, MOST_RANGES, RowSource
from ..blocks import blocks
from ..compiler.compile import NativeFunction
from ..compiler.lines import LINE
from ..headers.arrays import address_of
from ..threads.parallel import Loop, get_num_threads, run, run_words
from ..threads.workspace import borrow, give_back
from . import sort, sums
from . import update as rows
from .arguments import N_FORMS, OWN, Question, RowTables, lay_out, sum_up
from .layout import PADDING, HotSegment, RowCall, Table

SORT_SERIAL_BELOW = 8_192  # positions
UPDATE_SERIAL_BELOW = 131_072  # elements: waking a thread takes as long as updating so many
ROW_COST = 96  # elements that could be updated while one row is fetched from memory
_PARTS_PER_THREAD = 16
_LINE_WORDS = LINE // 8  # int64
_KEY_BITS = 63  # the sign of a key stays 0, so that keys sort as the numbers that they are

_FIRST_TOTAL, _FIRST_OF_LAST = map(Question._fields.index, ("n", "tables"))
_FORMS = Question._fields.index("forms")
_TOTALS, _LAST = slice(_FIRST_TOTAL, _FIRST_OF_LAST), slice(_FIRST_OF_LAST, None)
_UNASKED = (0,) * (len(Question._fields) - _FIRST_TOTAL)
_range_numbers = np.arange(MOST_RANGES + PADDING)


def _whole_lines(words: int) -> int:
    return -(-words // _LINE_WORDS) * _LINE_WORDS


_FIELD = {name: k for k, name in enumerate(RowCall._fields)}
_pack = struct.Struct(f"{_whole_lines(len(_FIELD))}q").pack_into
# Fields that loops fill in, up to the end of a line; at first there is no bad position.
_UNKNOWN = (-1, *(0,) * (_whole_lines(len(_FIELD)) - _FIELD["bad_position"] - 1))


def row_norm(
    kernel: Kernel, tables: RowTables, gradients: Iterable[RowSource], hp: np.ndarray
) -> tuple[int, float]:
    """The sum of squares of row-sparse gradients whose duplicates are summed first.

    The kernel is that of a rule that measures the gradient, for the storage types of the sums.
    Returns the position of the first bad index, or -1 (`RowStep.bad_position`), and the sum.
    """
    block = blocks(kernel).reduce_real
    assert block is not None
    hp_of = np.zeros(tables.places[0], np.int64)
    step = RowStep(kernel, tables, gradients, hp, hp_of, block, touched_only=True)
    total = step.measure_touched() if step.bad_position < 0 else 0.0
    step.release()
    return step.bad_position, total


class _Sizes(NamedTuple):
    """The sizes that decide how a step is cut and how much memory it borrows."""

    n: int
    threads: int  # of the update
    arguments: tuple[int, ...]  # the first fields of `RowCall`
    places: tuple[int, ...]  # byte at which each section behind `RowCall` begins
    words: int
    loops: tuple[int, ...]  # of the grouping: the words of each `Loop`, with 0 for its arguments
    n_parts: int  # of the update
    told: tuple[int, ...]  # the last fields of `RowCall`, which loops fill in
    carries: bool  # whether keys contain the numbers of gradient rows


def _sizes(
    kernel: Kernel, n_tables: int, totals: tuple[int, ...], touched_only: bool, drop: bool
) -> _Sizes:
    n, _, widest, elements, *_ = totals
    work = n * (widest + ROW_COST) if touched_only else elements
    sorts_alone, updates_alone = n < SORT_SERIAL_BELOW, work < UPDATE_SERIAL_BELOW
    threads = 1 if sorts_alone and updates_alone else get_num_threads()
    parts = 1 if sorts_alone else threads, 1 if updates_alone else threads
    shape = n_tables, len(kernel.row_bytes), kernel.real.itemsize
    return _sizes_of(totals, shape, *parts, touched_only, drop)


@lru_cache(maxsize=256)
def _sizes_of(
    totals: tuple[int, ...], shape: tuple[int, int, int], sort_parts: int, threads: int,
    touched_only: bool, drop: bool,
) -> _Sizes:  # fmt: skip
    n, n_rows, widest, _, n_gradients, carries, _, n_ranges, hot_elements, n_swept = totals
    n_tables, n_arrays, real_bytes = shape
    dropped_row, carried_bits = n_rows if drop else -1, n_gradients.bit_length() if carries else 0
    # A slot has a cache line, and the summed gradient of a row or of a tile of whole rows.
    scratch = (widest if touched_only else max(widest, rows.TILE)) * real_bytes + LINE
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
        n, threads, arguments, places, ends[-1], loops, n_parts, tuple(told), carried_bits > 0
    )  # fmt: skip


def _grouping(parts: int, passes: int, threads: int, n_ranges: int) -> tuple[int, ...]:
    """The loops that sort, and sum hot rows, in the form of `_Sizes.loops`."""
    shares, once = (parts, parts), (1, 1)
    if parts == 1:
        loops = [(sort.group_serial, *once)]
    else:
        loops = [(sort.make_keys, *shares), (sort.place_rows, *once), (sort.scatter_keys, *shares)]
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
) -> tuple[int, tuple[int, ...]]:
    """`Table.block_single` and the arguments of the loops for a kernel.

    It is for occurrences that have a gradient each; ``row_block`` is called for each row.
    """
    block = row_block or blocks(kernel).update_real
    single = 0
    if row_block:  # it takes numbers in the type of the arithmetic
        single = row_block.address if kernel.g == kernel.real else 0
    elif not every_row:
        single = blocks(kernel).update.address
    zero = blocks(kernel).update_zero.address if every_row else 0
    add_ranges = sums.accumulate(kernel.real, kernel.real, sums.OWN).address if can_be_hot else 0
    # These arrays live as long as the kernel, and this tuple is cached with it.
    n, row_bytes = len(kernel.row_bytes), address_of(kernel.row_bytes)
    kernel_arguments = block.address, zero, add_ranges, n, row_bytes
    itemsizes = kernel.g.itemsize, kernel.real.itemsize
    return single, (*kernel_arguments, *itemsizes, address_of(_range_numbers))


@cache
def _accumulators(kernel: Kernel, forms: int) -> array[int]:
    """`Table.accumulate` of forms, and of `OWN`; 0 for those that no table has."""
    add, known = partial(sums.accumulate, kernel.g, kernel.real), enumerate(sums.FORMS[:N_FORMS])
    return array("q", [add(form).address if (forms | 1) >> k & 1 else 0 for k, form in known])


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
        tables: RowTables,  # at least one
        gradients: Iterable[RowSource],  # one for each
        hp: np.ndarray,  # rows of scalars, in the type of the arithmetic
        hp_of: np.ndarray,  # int64 [T]: the row of each table
        row_block: NativeFunction | None = None,  # the block for each row; None: the rule's update
        *,
        touched_only: bool,
        drop: bool = False,  # leave out indices outside of [0, N) instead of reporting them
    ) -> None:
        sources = array("q", chain.from_iterable(gradients))
        scalars = address_of(hp), hp.strides[0], address_of(hp_of) if len(hp) > 1 else 0
        question = array("q", (*tables.places, sources.buffer_info()[0], *scalars, *_UNASKED))
        at, _ = question.buffer_info()
        sum_up.call(at)
        totals = tuple(question[_TOTALS])
        size = self._size = _sizes(kernel, tables.places[0], totals, touched_only, drop)
        self._block = borrow(size.words)
        words, call = self._block
        single, of_kernel = _kernel_arguments(kernel, row_block, not touched_only, size.n > HOT)
        # One call packs all of them, which is ten times as fast as assigning to a NumPy array.
        sections = map(call.__add__, size.places)
        _pack(words.data, 0, *size.arguments, *of_kernel, *sections, *size.told)
        forms = question[_FORMS]
        # Held until it is read: threads that ask at once may make one each, and one is cached.
        accumulators = _accumulators(kernel, forms)
        own = call + size.places[0], size.carries, single, accumulators.buffer_info()[0]
        question[_LAST] = array("q", (*own, kernel.g.itemsize, kernel.real.itemsize))
        lay_out.call(at)
        loops = array("q", size.loops)
        loops[2::4] = array("q", [call]) * (len(loops) // 4)
        run_words(loops)
        # The position in the concatenated lists of indices, or -1.
        self.bad_position = int(words[_FIELD["bad_position"]])
        self._touching = rows.TOUCHING[forms != 1 << OWN and not size.carries]
        self.loops: tuple[Loop, ...] = ()
        if self.bad_position < 0 and row_block is None:
            update = self._touching[1] if touched_only else rows.update_all
            threads = min(size.threads, size.n_parts)
            self.loops = (Loop(update.address, size.n_parts, call, threads),)

    def release(self) -> None:
        """Give back the borrowed block."""
        give_back(self._block)

    def measure_touched(self) -> float:
        """The sum of squares of the summed rows, in the order of the rows."""
        # There is a place for each key, with 0 for a key that does not begin a row. NumPy adds them
        # in an order that depends on their number alone, not on the threads that have measured.
        squares, threads = np.zeros(self._size.n), self._size.threads
        n_parts = min(self._size.n, _PARTS_PER_THREAD * threads)
        words = self._block.words
        words[_FIELD["measured"]], words[_FIELD["n_parts"]] = address_of(squares), n_parts
        run(self._touching[0], n_parts, self._block.address, threads)
        return float(squares.sum())
