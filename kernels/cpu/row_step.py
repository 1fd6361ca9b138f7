"""One row-sparse step of a rule on any number of tables: group, sum, update."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compile import Kernel, NativeFunction
from . import layout, rows, sort
from .layout import COLUMNS, HOT, HOT_COLUMNS, N_RESULTS, PADDING, PART_COLUMNS, RowCall
from .parallel import get_num_threads, run
from .workspace import borrow

SORT_SERIAL_BELOW = 8_192  # positions
UPDATE_SERIAL_BELOW = 32_768  # elements
_PARTS_PER_THREAD = 16
_SWEEP_PART = 65_536  # elements of a part of a dense-equivalent sweep
_TILE = 1_024  # elements of a tile of that sweep
_LINE_WORDS = 8  # int64 of a cache line

stripes = np.zeros(rows.N_STRIPES, np.int32)
"""Row locks of all calls of the process; 0 is free."""

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

    Occurrences of a row are summed in order (a row with more than ``layout.HOT`` of them in
    blocks of that size, the block sums in order), then the rule runs once on the row.

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
    n = sum(table.length for table in tables)
    n_rows = sum(table.rows for table in tables)
    threads = get_num_threads()
    sort_parts = threads if n >= SORT_SERIAL_BELOW else 1
    max_parts = _PARTS_PER_THREAD * threads + len(tables)
    row_bits = max(1, (n_rows if drop else n_rows - 1).bit_length())
    digit_bits = _digit_bits(n, row_bits)
    sizes = {
        "keys": n + PADDING,
        "spare": n + PADDING,
        "starts": n + 1,
        "histogram": sort_parts << digit_bits,
        "counts": sort_parts,
        "parts": max_parts * PART_COLUMNS,
        "hot": (n // HOT + 1) * HOT_COLUMNS,
        "scratch": threads * _scratch_words(kernel, tables, touched_only),
    }
    result = np.full(N_RESULTS, -1, np.int64)
    table_array = _table_array(kernel, tables)
    with borrow(sum(sizes.values()) + _LINE_WORDS * len(sizes)) as workspace:
        places, at = {}, workspace.ctypes.data
        for name, size in sizes.items():
            places[name] = at
            at += -(-size // _LINE_WORDS) * _LINE_WORDS * 8
        places_of_words = {name: (at - workspace.ctypes.data) // 8 for name, at in places.items()}
        for name in ("keys", "spare"):
            padding = places_of_words[name] + n
            workspace[padding : padding + PADDING] = 0
        counts = workspace[places_of_words["counts"] :][:sort_parts]
        call = np.array(
            RowCall(
                tables=table_array.ctypes.data,
                n_tables=len(tables),
                n=n,
                position_bits=max(1, (n - 1).bit_length()),
                row_bits=row_bits,
                digit_bits=digit_bits,
                dropped_row=n_rows if drop else -1,
                **places,
                scratch_bytes=sizes["scratch"] // threads * 8,
                sort_parts=sort_parts,
                shift=0,
                result=result.ctypes.data,
                max_parts=max_parts,
                row_cost=2 * (1 + len(kernel.rule.states)),
                hot_sums=0,
                add_blocks=0,
                block_numbers=0,
                block=kernel.block_real.address,
                block_zero=0 if touched_only else kernel.block_zero.address,
                accumulate=rows.accumulate(kernel.g, kernel.real).address,
                w_bytes=kernel.w.itemsize,
                s_bytes=kernel.s.itemsize,
                g_bytes=kernel.g.itemsize,
                real_bytes=kernel.real.itemsize,
                tile=_TILE,
                stripes=stripes.ctypes.data if locked else 0,
            ),
            np.int64,
        )
        _group(call, result, counts)
        if result[layout.BAD_POSITION] >= 0:
            return int(result[layout.BAD_POSITION])
        hot = _sum_hot(call, result, kernel, n, threads)
        if touched_only:
            _update_touched(call, result, tables, threads)
        else:
            _update_all(call, tables, threads)
        del hot  # the loops had its address until here
    return -1


def _digit_bits(n: int, row_bits: int) -> int:
    """Bits of a radix digit: at most 11, even passes, and no more counters than keys need."""
    most = min(11, max(4, n.bit_length() + 1))
    passes = -(-row_bits // most)
    return -(-row_bits // passes)


def _scratch_words(kernel: Kernel, tables: list[RowTable], touched_only: bool) -> int:
    """Summed gradient per slot: a row, or a tile of whole rows; in whole cache lines."""
    widest = max(table.width for table in tables)
    elements = widest if touched_only else max(widest, _TILE)
    words = -(-elements * kernel.real.itemsize // 8)
    return (-(-words // _LINE_WORDS) + 1) * _LINE_WORDS


def _table_array(kernel: Kernel, tables: list[RowTable]) -> np.ndarray:
    """The tables as the loops read them, ``[T, COLUMNS]``."""
    array = np.empty((len(tables), COLUMNS), np.int64)
    first_row = first_position = 0
    for t, table in enumerate(tables):
        # The loops know an occurrence by its position among those of all tables.
        values = table.values - first_position * table.width * kernel.g.itemsize
        array[t] = (
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
        )
        first_row += table.rows
        first_position += table.length
    return array


def _group(call: np.ndarray, result: np.ndarray, counts: np.ndarray) -> None:
    """Sort the keys and find the segments; stops at a bad index."""
    sort_parts = len(counts)
    if sort_parts == 1:
        run(sort.group_serial, 1, call, 1)
        return

    def each_share(part: NativeFunction) -> None:
        run(part, sort_parts, call, sort_parts)

    each_share(sort.keys_part)
    bad = counts[counts >= 0]
    if bad.size:
        result[layout.BAD_POSITION] = bad.min()
        return
    first, row_bits, step = (
        int(call[_FIELD[f]]) for f in ("position_bits", "row_bits", "digit_bits")
    )
    for shift in range(first, first + row_bits, step):
        call[_FIELD["shift"]] = shift
        each_share(sort.count_part)
        run(sort.offsets_part, 1, call, 1)
        if result[layout.MOVED]:
            each_share(sort.scatter_part)
            keys, spare = _FIELD["keys"], _FIELD["spare"]
            call[keys], call[spare] = call[spare], call[keys]
    each_share(sort.count_segments_part)
    each_share(sort.starts_part)
    run(sort.finish_part, 1, call, 1)


def _sum_hot(
    call: np.ndarray, result: np.ndarray, kernel: Kernel, n: int, threads: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Sum the blocks of hot rows; the returned arrays must outlive the update."""
    if n <= HOT:
        return None
    run(rows.find_hot, 1, call, 1)
    if result[layout.N_HOT] == 0:
        return None
    buffer = np.empty(int(result[layout.HOT_ELEMENTS]), kernel.real.dtype)
    n_blocks = int(result[layout.N_BLOCKS])
    numbers = np.arange(n_blocks + PADDING)
    call[_FIELD["hot_sums"]] = buffer.ctypes.data
    call[_FIELD["block_numbers"]] = numbers.ctypes.data
    call[_FIELD["add_blocks"]] = rows.accumulate(kernel.real, kernel.real).address
    run(rows.sum_hot_block, n_blocks, call, threads)
    return buffer, numbers


def _update_touched(
    call: np.ndarray, result: np.ndarray, tables: list[RowTable], threads: int
) -> None:
    n_segments = int(result[layout.N_SEGMENTS])
    if n_segments * max(table.width for table in tables) < UPDATE_SERIAL_BELOW:
        threads = 1
    if threads == 1 and len(tables) == 1:
        part = np.array((0, 0, n_segments))
        call[_FIELD["parts"]], n_parts = part.ctypes.data, 1
    else:
        run(rows.plan_touched, 1, call, 1)
        n_parts = int(result[layout.N_PARTS])
    run(rows.update_touched, n_parts, call, threads)


def _update_all(call: np.ndarray, tables: list[RowTable], threads: int) -> None:
    elements = sum(table.rows * table.width for table in tables)
    if elements < SORT_SERIAL_BELOW:
        threads = 1
    parts = np.concatenate([_sweep_parts(t, table) for t, table in enumerate(tables)])
    call[_FIELD["parts"]], call[_FIELD["max_parts"]] = parts.ctypes.data, len(parts)
    run(rows.update_all, len(parts), call, threads)


def _sweep_parts(t: int, table: RowTable) -> np.ndarray:
    """Row ranges of about `_SWEEP_PART` elements, in whole tiles: ``[P, PART_COLUMNS]``."""
    tile = max(1, _TILE // max(table.width, 1))
    height = max(1, _SWEEP_PART // max(table.width, 1) // tile) * tile
    begins = np.arange(0, table.rows, height)
    ends = np.minimum(begins + height, table.rows)
    return np.stack([np.full_like(begins, t), begins, ends], axis=1)
