"""A gradient less the mean of each of its rows: gradient centralization.

A row is all that one index of the first axis has. Each block sums chunks of some rows in float64,
its threads in a fixed tree; then each block adds up the chunks of its rows, in a tree again, and
subtracts. So a long row is the work of many blocks, and the bits are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...storage import Storage, numba_type
from ..device.backend import GEOMETRY, launcher, store_float64
from ..device.launch import tile_grid
from ..device.memory import room_of
from ..device.sums import add_lanes, strided_sum
from .tiles import by_tiles, narrow_storer, rows_are_aligned, tile_length, wide_loader

THREADS, _TILES, _MOST_CHUNKS = GEOMETRY.central


def _add_tile(g: Storage, real: Storage, length: int) -> Any:
    """``add(column, first, values, own)``: elements of the row that begins there, to a float64."""
    kind, load = numba_type(real), wide_loader(g, real, length)

    @cuda.jit(device=True)
    def add(column, first, values, own):
        tile = cuda.local.array(length, kind)
        load(tile, values, first + column)
        for c in range(length):
            own[0] += np.float64(tile[c])

    return add


def _write_difference(g: Storage, real: Storage, out: Storage, length: int) -> Any:
    """``write(column, first, values, mean, out)``: elements of a row, less the mean."""
    kind, load = numba_type(real), wide_loader(g, real, length)
    store = narrow_storer(real, out, length)

    @cuda.jit(device=True)
    def write(column, first, values, mean, out):
        tile = cuda.local.array(length, kind)
        load(tile, values, first + column)
        for c in range(length):
            tile[c] -= mean
        store(tile, out, first + column)

    return write


def _over_chunk(make: Any, length: int) -> Any:
    """``run(lane, lanes, width, chunk, is_aligned, *what)``: what a thread has of a row's chunk."""
    tile_loop = by_tiles(make, length)

    @cuda.jit(device=True)
    def run(lane, lanes, width, chunk, is_aligned, *what):
        column = np.int64(cuda.blockIdx.y) * chunk + lane * length
        end = min(width, (np.int64(cuda.blockIdx.y) + 1) * chunk)
        while column < end:
            tile_loop(column, end, is_aligned, *what)
            column += lanes * length

    return run


@cache
def chunk_sums_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """``loop[(groups of rows, chunks), (lanes, rows)]``: float64 ``sums[row, chunk]``."""
    add_chunk = _over_chunk(lambda n: _add_tile(g, real, n), tile_length(g, out))

    @cuda.jit
    def loop(values, n_rows, width, chunk, is_aligned, sums):
        lane, lanes = cuda.threadIdx.x, np.int64(cuda.blockDim.x)
        row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        own, thread = cuda.local.array(1, float64), cuda.threadIdx.y * cuda.blockDim.x + lane
        own[0] = 0.0
        if row < n_rows:
            add_chunk(lane, lanes, width, chunk, is_aligned, row * width, values, own)
        shared = cuda.shared.array((1, THREADS), float64)
        shared[0, thread] = own[0]
        add_lanes(shared, thread, lane, lanes, 1, 1)
        if lane == 0 and row < n_rows:
            store_float64(sums + (row * cuda.gridDim.y + cuda.blockIdx.y) * 8, shared[0, thread])

    return loop


@cache
def subtract_kernel(g: Storage, real: Storage, out: Storage) -> Any:
    """As `chunk_sums_kernel`: each element less the mean of its row; ``out`` may be ``values``."""
    length, real_type = tile_length(g, out), numba_type(real)
    write_chunk = _over_chunk(lambda n: _write_difference(g, real, out, n), length)

    @cuda.jit
    def loop(values, n_rows, width, chunk, is_aligned, sums, out):
        lane, lanes = cuda.threadIdx.x, np.int64(cuda.blockDim.x)
        row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        thread = cuda.threadIdx.y * cuda.blockDim.x + lane
        shared = cuda.shared.array((1, THREADS), float64)
        n_chunks, own = np.int64(cuda.gridDim.y), 0.0
        if row < n_rows:
            own = strided_sum(sums + row * n_chunks * 8, lane, n_chunks, lanes, 8)
        shared[0, thread] = own
        add_lanes(shared, thread, lane, lanes, 1, 1)
        cuda.syncthreads()
        if row < n_rows:
            mean = real_type(shared[0, thread - lane] / np.float64(width))
            first = row * width
            write_chunk(lane, lanes, width, chunk, is_aligned, first, values, mean, out)

    return loop


def centralize(
    storages: Iterable[Storage], values: int, shape: tuple[int, int], result: int, stream: Any
) -> None:
    """Enqueue writing ``values`` less the means of its rows to ``result``; addresses.

    They are the same or apart, and contiguous: so many rows of so many elements. Storage types are
    those of the values, of the arithmetic and of the result.
    """
    (g, real, out), (n_rows, width) = storages, shape
    if n_rows == 0 or width == 0:
        return
    length = tile_length(g, out)
    lanes, rows, _ = tile_grid(width, length, THREADS)
    round_length, most = lanes * length, -(-width // _MOST_CHUNKS)
    chunk = max(_TILES, -(-most // round_length)) * round_length
    grid, block = (-(-n_rows // rows), -(-width // chunk)), (lanes, rows)
    arguments = values, n_rows, width, chunk, rows_are_aligned(width, (values, g), (result, out))
    with room_of(stream) as room:
        parts = room.take(8 * n_rows * grid[1])
        launcher(chunk_sums_kernel(g, real, out), grid, block, stream)(*arguments, parts)
        launcher(subtract_kernel(g, real, out), grid, block, stream)(*arguments, parts, result)
