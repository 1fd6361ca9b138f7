"""A gradient less the mean of each of its rows: gradient centralization.

A row is all that one index of the first axis has. Each block sums chunks of some rows in float64,
its threads in a fixed tree; then each block adds up the chunks of its rows, in a tree again, and
subtracts. So a long row is the work of many blocks, and the bits are the same in every run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...storage import Storage, numba_type
from ..device.backend import load_float64, store_float64, tile_storer
from ..device.launch import on_grid, tile_grid
from ..device.memory import room_of
from ..rows.sums import narrowing, tile_length
from .tiles import CARRIERS, sums

THREADS = 256
TILES_PER_THREAD = 8  # of a chunk
MOST_CHUNKS = 4_096  # of a row
_ALIGN = 16  # bytes


@cuda.jit(device=True)
def _add_tree(shared, thread, lane, lanes):
    """Add up the values of the threads of a row into that of its first; ``lanes`` is a power of 2.

    Every thread of the block has to call it; all may read the sum afterwards.
    """
    half = lanes >> 1
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            shared[thread] += shared[thread + half]
        half >>= 1
    cuda.syncthreads()


@cache
def chunk_sums_kernel(g: Storage, real: Storage, out: Storage, threads: int) -> Any:
    """``loop[(groups of rows, chunks), (lanes, rows)]``: float64 ``sums[row, chunk]``."""
    length, g_bytes, real_type = tile_length(g, out), g.itemsize, numba_type(real)
    load_tile, load_one = sums(g, real, length).start, sums(g, real, 1).start

    @cuda.jit
    def loop(values, n_rows, width, chunk, is_aligned, sums):
        lane, lanes = cuda.threadIdx.x, np.int64(cuda.blockDim.x)
        row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        column = np.int64(cuda.blockIdx.y) * chunk + lane * length
        end, own = min(width, (np.int64(cuda.blockIdx.y) + 1) * chunk), 0.0
        if row >= n_rows:
            end = column
        place = values + row * width * g_bytes
        tile, one = cuda.local.array(length, real_type), cuda.local.array(1, real_type)
        while column < end:
            if is_aligned and column + length <= end:
                load_tile(tile, place + column * g_bytes)
                for c in range(length):
                    own += np.float64(tile[c])
            else:
                for c in range(column, min(column + length, end)):
                    load_one(one, place + c * g_bytes)
                    own += np.float64(one[0])
            column += lanes * length
        shared = cuda.shared.array(threads, float64)
        thread = cuda.threadIdx.y * cuda.blockDim.x + lane
        shared[thread] = own
        _add_tree(shared, thread, lane, lanes)
        if lane == 0 and row < n_rows:
            store_float64(sums + (row * cuda.gridDim.y + cuda.blockIdx.y) * 8, shared[thread])

    return loop


@cache
def subtract_kernel(g: Storage, real: Storage, out: Storage, threads: int) -> Any:
    """``loop[(groups of rows, chunks), (lanes, rows)]``: each element less the mean of its row.

    ``out`` may be ``values``.
    """
    length, g_bytes, out_bytes = tile_length(g, out), g.itemsize, out.itemsize
    real_type = numba_type(real)
    write_tile, write_one = (_write_difference(g, real, out, count) for count in (length, 1))

    @cuda.jit
    def loop(values, n_rows, width, chunk, is_aligned, sums, out):
        lane, lanes = cuda.threadIdx.x, np.int64(cuda.blockDim.x)
        row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        thread = cuda.threadIdx.y * cuda.blockDim.x + lane
        shared = cuda.shared.array(threads, float64)
        own, k, n_chunks = 0.0, np.int64(lane), np.int64(cuda.gridDim.y)
        if row < n_rows:
            while k < n_chunks:
                own += load_float64(sums + (row * n_chunks + k) * 8)
                k += lanes
        shared[thread] = own
        _add_tree(shared, thread, lane, lanes)
        if row >= n_rows:
            return
        mean = real_type(shared[thread - lane] / np.float64(width))
        column = np.int64(cuda.blockIdx.y) * chunk + lane * length
        end = min(width, (np.int64(cuda.blockIdx.y) + 1) * chunk)
        source, place = values + row * width * g_bytes, out + row * width * out_bytes
        while column < end:
            if is_aligned and column + length <= end:
                write_tile(source + column * g_bytes, mean, place + column * out_bytes)
            else:
                for c in range(column, min(column + length, end)):
                    write_one(source + c * g_bytes, mean, place + c * out_bytes)
            column += lanes * length

    return loop


def _write_difference(g: Storage, real: Storage, out: Storage, length: int) -> Any:
    """``run(source, mean, place)`` on ``length`` elements."""
    load, narrow = sums(g, real, length).start, narrowing(real, out)
    real_type, out_type, store = (
        numba_type(real),
        CARRIERS[out.carrier],
        tile_storer(length, out.itemsize),
    )

    @cuda.jit(device=True)
    def run(source, mean, place):
        total, x = cuda.local.array(length, real_type), cuda.local.array(length, out_type)
        load(total, source)
        for c in range(length):
            x[c] = narrow(total[c] - mean)
        store(place, x)

    return run


def centralize(
    g: Storage,
    real: Storage,
    out: Storage,
    values: int,
    shape: tuple[int, int],
    result: int,
    stream: Any,
) -> None:
    """Enqueue writing ``values`` less the means of its rows to ``result``.

    Args:
        g: storage of the values.
        real: of the arithmetic.
        out: of the result.
        values: their address; contiguous.
        shape: rows, and elements of a row.
        result: an address, ``values`` or memory apart.
        stream: of Numba.
    """
    n_rows, width = shape
    if n_rows == 0 or width == 0:
        return
    length = tile_length(g, out)
    lanes, rows, _ = tile_grid(-(-width // length), THREADS)
    round_of_tiles = lanes * length
    most = -(-width // MOST_CHUNKS)
    chunk = max(TILES_PER_THREAD, -(-most // round_of_tiles)) * round_of_tiles
    grid, block = (-(-n_rows // rows), -(-width // chunk)), (lanes, rows)
    places = (values, result, width * g.itemsize, width * out.itemsize)
    arguments = (values, n_rows, width, chunk, int(all(x % _ALIGN == 0 for x in places)))
    with room_of(stream) as room:
        sums_place = room.take(8 * n_rows * grid[1])
        loop = chunk_sums_kernel(g, real, out, THREADS)
        on_grid(loop, grid, block, stream)(*arguments, sums_place)
        loop = subtract_kernel(g, real, out, THREADS)
        on_grid(loop, grid, block, stream)(*arguments, sums_place, result)
