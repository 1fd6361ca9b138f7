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

from ...storage import Storage
from ..dense.tiles import CARRIERS, tile_access
from .layout import THREADS


class Strip(NamedTuple):
    """What a thread has of a tile.

    Attributes:
        matrix: number of the matrix.
        down: number of the tile from the top.
        across: number of the tile from the left.
        top: first row of the tile.
        rows: of the tile.
        column: first column of the thread.
        step: from a column of the thread to the next.
        count: columns of the thread; 0 for one that has nothing to do.
        x: place of the thread across the tile.
        y: place of the thread down the tile.
        threads_across: of the tile.
        threads_down: of the tile.
        is_aligned: whether its columns are moved by vectors.
    """

    matrix: Any
    down: Any
    across: Any
    top: Any
    rows: Any
    column: Any
    step: Any
    count: Any
    x: Any
    y: Any
    threads_across: Any
    threads_down: Any
    is_aligned: Any


@cuda.jit(device=True)
def quotient(n, divisor):
    """``n // divisor``, both below 2**32 unless the divisor is 1: a 64-bit division is slow."""
    if divisor == 1:
        return n
    return np.int64(np.uint32(n) // np.uint32(divisor))


@cache
def strips(length: int) -> Any:
    """``strip_at(row, block, thread)``: of a row of the table, for ``length`` columns a thread."""

    @cuda.jit(device=True)
    def strip_at(row, block, thread):
        across, down = np.int64(1) << row.log_across, np.int64(1) << row.log_down
        x, y = thread & (across - 1), (thread >> row.log_across) & (down - 1)
        log_group = row.log_across + row.log_down
        n_groups, group = np.int64(THREADS) >> log_group, thread >> log_group
        unit = (block - row.first_block) * n_groups + group
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
        return Strip(
            matrix, tile_down, tile_across, top, np.uint32(rows), column, np.int32(step),
            np.int32(count), np.int32(x), np.uint32(y), np.int32(across), np.uint32(down),
            row.is_aligned != 0,
        )  # fmt: skip

    return strip_at


@cache
def strip_access(storage: Storage, length: int) -> tuple[Any, Any]:
    """``load(elements, address, strip)`` and ``store(address, elements, strip)`` of one row."""
    carrier, itemsize = CARRIERS[storage.carrier], storage.itemsize
    (load_tile, store_tile), (load_one, store_one) = (tile_access(storage, n) for n in (length, 1))

    @cuda.jit(device=True)
    def load(elements, address, strip):
        if strip.is_aligned:
            load_tile(elements, address)
        else:
            one, place = cuda.local.array(1, carrier), address
            for k in range(length):
                if k < strip.count:
                    load_one(one, place)
                    elements[k] = one[0]
                    place += np.int64(strip.step) * itemsize

    @cuda.jit(device=True)
    def store(address, elements, strip):
        if strip.is_aligned:
            store_tile(address, elements)
        else:
            one, place = cuda.local.array(1, carrier), address
            for k in range(length):
                if k < strip.count:
                    one[0] = elements[k]
                    store_one(place, one)
                    place += np.int64(strip.step) * itemsize

    return load, store
