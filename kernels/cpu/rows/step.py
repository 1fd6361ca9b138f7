"""One row-sparse step of a rule on any number of tables: group, sum, update."""

from __future__ import annotations

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
from .arguments import N_FORMS, OWN, RowTables, lay_out, sum_up
from .layout import HOT_BYTES, PADDING, TABLE_BYTES, RowCall, Totals

SORT_SERIAL_BELOW = 8_192  # positions
UPDATE_SERIAL_BELOW = 131_072  # elements: waking a thread takes as long as updating so many
ROW_COST = 96  # elements that could be updated while one row is fetched from memory
_PARTS_PER_THREAD = 16
_LINE_WORDS = LINE // 8  # int64
_KEY_BITS = 63  # the sign of a key stays 0, so that keys sort as the numbers that they are

_NO_TOTALS = Totals()
_range_numbers = np.arange(MOST_RANGES + PADDING)
# Places of the fields that each step has anew.
_FIELD = {name: k for k, name in enumerate(RowCall._fields)}
_MEMORY, _SOURCES, _MEASURED = _FIELD["memory"], _FIELD["sources"], _FIELD["measured"]
_ADDRESSES, _SIZES, _HP_OF = _FIELD["addresses"], _FIELD["sizes"], _FIELD["hp_of"]
_HP, _HP_BYTES = _FIELD["hp"], _FIELD["hp_bytes"]
_N_PARTS, _BAD_POSITION = _FIELD["n_parts"], _FIELD["bad_position"]


def _whole_lines(words: int) -> int:
    return -(-words // _LINE_WORDS) * _LINE_WORDS


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


class _Plan(NamedTuple):
    """How a step of some sizes is cut, and how much memory it borrows."""

    call: array[int]  # `RowCall`, but for what is given with each step
    n: int  # positions
    words: int
    threads: int  # of the update
    loops: tuple[int, ...]  # of the grouping: the words of each `Loop`, with 0 for its arguments
    touching: tuple[NativeFunction, NativeFunction]  # as `rows.TOUCHING`
    accumulators: array[int]  # held for the call


def _plan(
    kernel: Kernel, row_block: NativeFunction | None, shape: tuple[int, int],
    totals: tuple[int, ...], touched_only: bool, drop: bool,
) -> _Plan:  # fmt: skip
    sizes = tuple.__new__(Totals, totals)  # no call of Python
    work = sizes.n * (sizes.widest + ROW_COST) if touched_only else sizes.elements
    sorts_alone, updates_alone = sizes.n < SORT_SERIAL_BELOW, work < UPDATE_SERIAL_BELOW
    threads = 1 if sorts_alone and updates_alone else get_num_threads()
    parts = 1 if sorts_alone else threads, 1 if updates_alone else threads
    return _plan_of(kernel, row_block, shape, sizes, *parts, touched_only, drop)


@lru_cache(maxsize=256)
def _plan_of(
    kernel: Kernel, row_block: NativeFunction | None, shape: tuple[int, int], totals: Totals,
    sort_parts: int, threads: int, touched_only: bool, drop: bool,
) -> _Plan:  # fmt: skip
    (n_tables, n_arrays), real_bytes = shape, kernel.real.itemsize
    n, n_rows, widest = totals.n, totals.n_rows, totals.widest
    dropped_row = n_rows if drop else -1
    carried_bits = totals.n_gradients.bit_length() if totals.carries else 0
    # A slot has a cache line, and the summed gradient of a row or of a tile of whole rows.
    scratch = (widest if touched_only else max(widest, rows.TILE)) * real_bytes + LINE
    row_bits = max(1, max(n_rows - 1, dropped_row).bit_length())
    # A radix digit has at most 11 bits, equal in all passes, and no more values than there are
    # keys, roughly.
    passes = -(-row_bits // min(11, max(4, n.bit_length() + 1)))
    digit_bits = -(-row_bits // passes)
    scratch_words = _whole_lines(scratch // 8 + 1)
    sections = {
        "tables": n_tables * (TABLE_BYTES // 8 + n_arrays),
        "bad": sort_parts,
        "hot": (n // HOT + 1) * HOT_BYTES // 8,
        "histogram": sort_parts << digit_bits,
        "keys": n + PADDING,
        "spare": n + PADDING,
        "scratch": max(sort_parts, threads) * scratch_words,
        "hot_sums": totals.hot_elements * real_bytes // 8 + 1,
    }
    ends = [*accumulate(map(_whole_lines, sections.values()), initial=0)]
    position_bits = max(1, (n - 1).bit_length())
    # If a key contains the number of its gradient row, the list of these numbers is read once, in
    # order. Otherwise it is read in the order of sorted keys, before the row can be fetched.
    if row_bits + position_bits + carried_bits > _KEY_BITS:
        carried_bits = 0
    n_ranges, accumulators = totals.n_ranges if n > HOT else 0, _accumulators(kernel, totals.forms)
    # Rows differ in occurrences, and so parts in cost: many parts balance the threads.
    n_touched = 1 if threads == 1 else min(n, _PARTS_PER_THREAD * threads)
    block = row_block or blocks(kernel).update_real
    if row_block:  # it takes numbers in the type of the arithmetic
        single = row_block.address if kernel.g == kernel.real else 0
    else:
        single = blocks(kernel).update.address if touched_only else 0
    call = RowCall(
        n_tables=n_tables, n=n, position_bits=position_bits + carried_bits,
        carried_bits=carried_bits, row_bits=row_bits, digit_bits=digit_bits,
        dropped_row=dropped_row, sort_parts=sort_parts, scratch_bytes=8 * scratch_words,
        n_parts=n_touched if touched_only else totals.n_swept, block=block.address,
        block_zero=0 if touched_only else blocks(kernel).update_zero.address,
        block_single=single, accumulate=accumulators.buffer_info()[0],
        add_ranges=sums.accumulate(kernel.real, kernel.real, sums.OWN).address if n > HOT else 0,
        n_arrays=n_arrays, row_bytes=address_of(kernel.row_bytes), g_bytes=kernel.g.itemsize,
        real_bytes=real_bytes, range_numbers=address_of(_range_numbers),
        **{name: 8 * end for name, end in zip(sections, ends, strict=False)},
    )  # fmt: skip
    loops = _grouping(sort_parts, passes, max(sort_parts, threads), n_ranges)
    touching = rows.TOUCHING[totals.forms != 1 << OWN and not carried_bits]
    return _Plan(
        call=array("q", call), n=n, words=ends[-1], threads=threads, loops=loops,
        touching=touching, accumulators=accumulators,
    )  # fmt: skip


def _grouping(parts: int, passes: int, threads: int, n_ranges: int) -> tuple[int, ...]:
    """The loops that sort, and sum hot rows, in the form of `_Plan.loops`."""
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
def _accumulators(kernel: Kernel, forms: int) -> array[int]:
    """`Table.accumulate` of forms, and of `OWN`; 0 for those that no table has."""
    add, numbered = partial(sums.accumulate, kernel.g, kernel.real), enumerate(sums.FORMS[:N_FORMS])
    return array("q", [add(form).address if (forms | 1) >> k & 1 else 0 for k, form in numbered])


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
        # `bad_position` is that in the concatenated lists of indices, or -1.
        sources, totals = array("q", chain.from_iterable(gradients)), array("q", _NO_TOTALS)
        n_tables, n_arrays, addresses, sizes = tables.places
        sum_up.call(sources.buffer_info()[0], sizes, n_tables, totals.buffer_info()[0])
        form = (n_tables, n_arrays), tuple(totals), touched_only, drop
        plan = self._plan = _plan(kernel, row_block, *form)
        self._block, call = borrow(plan.words), plan.call[:]
        call[_MEMORY], call[_SOURCES] = self._block.address, sources.buffer_info()[0]
        call[_ADDRESSES], call[_SIZES] = addresses, sizes
        call[_HP], call[_HP_BYTES] = address_of(hp), hp.strides[0]
        if len(hp) > 1:
            call[_HP_OF] = address_of(hp_of)
        place, _ = call.buffer_info()
        lay_out.call(place)
        loops = array("q", plan.loops)
        loops[2::4] = array("q", [place]) * (len(loops) // 4)
        run_words(loops)
        self._call, self.bad_position = call, call[_BAD_POSITION]
        self.loops: tuple[Loop, ...] = ()
        if self.bad_position < 0 and row_block is None:
            update = plan.touching[1] if touched_only else rows.update_all
            n_parts = call[_N_PARTS]
            self.loops = (Loop(update.address, n_parts, place, min(plan.threads, n_parts)),)

    def release(self) -> None:
        """Give back the borrowed block."""
        give_back(self._block)

    def measure_touched(self) -> float:
        """The sum of squares of the summed rows, in the order of the rows."""
        # There is a place for each key, with 0 for a key that does not begin a row. NumPy adds them
        # in an order that depends on their number alone, not on the threads that have measured.
        n, call, threads = self._plan.n, self._call, self._plan.threads
        squares, n_parts = np.zeros(n), min(n, _PARTS_PER_THREAD * threads)
        call[_MEASURED], call[_N_PARTS] = address_of(squares), n_parts
        run(self._plan.touching[0], n_parts, call.buffer_info()[0], threads)
        return float(squares.sum())
