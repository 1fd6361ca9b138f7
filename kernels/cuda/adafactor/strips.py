"""What a thread has of a matrix, and its elements between memory and registers.

A strip is some columns of every so many rows of a tile. Where rows are aligned, the columns lie
next to each other and are moved by vectors of 16 bytes; else as many columns lie between them as
there are threads across the tile, so that the threads of a warp read what lies next to each other.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...element import Kernel
from ...storage import Storage
from ..dense.tiles import Access, access, length_of
from ..device.records import hp_reader, row_finder
from .layout import THREADS, TileRow


class Strip(NamedTuple):
    """What a thread has of a tile."""

    matrix: Any  # number of the matrix
    down: Any  # number of the tile from the top
    across: Any  # number of the tile from the left
    top: Any  # first row of the tile
    rows: Any  # of the tile
    column: Any  # first one of the thread
    step: Any  # from a column of the thread to the next
    count: Any  # columns of the thread; 0 for one that has nothing to do
    x: Any  # place of the thread across the tile
    y: Any  # place of the thread down the tile
    threads_across: Any
    threads_down: Any
    is_aligned: Any  # whether the columns are moved by vectors


@cuda.jit(device=True)
def quotient(n, divisor):
    """``n // divisor``, both below 2**32 unless the divisor is 1: a 64-bit division is slow."""
    if divisor == 1:
        return n
    return np.int64(np.uint32(n) // np.uint32(divisor))


@cuda.jit(device=True)
def place_in_group(thread, log_across, log_down, block):
    """The place of a thread across and down its group, and the number of the group.

    A group has ``2**log_across * 2**log_down`` threads, a block as many of them as it can.
    """
    log_group = log_across + log_down
    x, y = thread & ((1 << log_across) - 1), (thread >> log_across) & ((1 << log_down) - 1)
    return x, y, block * (np.int64(THREADS) >> log_group) + (thread >> log_group)


@cache
def strip_finder(kernel: Kernel) -> Any:
    """``find(table, n_tensors, block, thread)``: the row of a tensor, its scalars, and a strip."""
    find_row = row_finder(TileRow, "first_block", 2 + len(kernel.s))
    read_hp, length = hp_reader(kernel.rule, kernel.prologue, kernel.real), length_of(kernel)

    @cuda.jit(device=True)
    def find(table, n_tensors, block, thread):
        row = find_row(table, n_tensors, block)
        across, down = np.int64(1) << row.log_across, np.int64(1) << row.log_down
        x, y, unit = place_in_group(thread, row.log_across, row.log_down, block - row.first_block)
        tiles = row.tiles_across * row.tiles_down
        matrix = quotient(unit, tiles)
        rest = unit - matrix * tiles
        tile_down = quotient(rest, row.tiles_across)
        tile_across = rest - tile_down * row.tiles_across
        top = tile_down * row.tile_height
        rows = min(row.tile_height, row.height - top)
        column, step = tile_across * across * length + x, across
        if row.is_aligned != 0:
            column, step = column + x * (length - 1), np.int64(1)
        count = np.int64(0)
        if matrix < row.matrices:
            for k in range(length):
                if column + k * step < row.width:
                    count += 1
        strip = Strip(
            matrix, tile_down, tile_across, top, np.uint32(rows), column, np.int32(step),
            np.int32(count), np.int32(x), np.uint32(y), np.int32(across), np.uint32(down),
            row.is_aligned != 0,
        )  # fmt: skip
        return row, read_hp(row.hp), strip

    return find


@cache
def strip_access(storage: Storage, length: int) -> Access:
    """With a strip at the end: elements of one row, the first of them being number ``i``."""
    (kind, *movers), (_, *movers_of_one) = (access(storage, n) for n in (length, 1))

    def mover(move_tile, move_one):
        @cuda.jit(device=True)
        def move(tile, address, i, strip):
            if strip.is_aligned:
                move_tile(tile, address, i)
            else:
                one = cuda.local.array(1, kind)
                for k in range(length):
                    if k < strip.count:
                        one[0] = tile[k]  # what a load overwrites
                        move_one(one, address, i)
                        tile[k] = one[0]  # what a store has left as it was
                        i += np.int64(strip.step)

        return move

    return Access(kind, *map(mover, movers, movers_of_one))
