"""Rows of a table on the device to a contiguous array: the forward of an embedding."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from ..device.backend import GEOMETRY, launcher, lower_int64, store_int64, tile_loader, tile_storer
from ..device.guard import FOUND
from ..device.launch import tile_grid
from .keys import index_at

# A row is copied in pieces of this many bytes, the longest that divides all rows and addresses.
PIECES = (16, 8, 4, 2)
_UNSIGNED: dict[int, Any] = {2: types.uint16, 4: types.uint32, 8: types.uint64, 16: types.uint64}


@cache
def gather_kernel(piece: int) -> Any:
    """``loop[groups of indices, (pieces, indices)]``; see `gather` for the arguments.

    ``n_pieces`` are those of a row. The rows of bad indices become 0.
    """
    unsigned, count = _UNSIGNED[piece], 2 if piece == 16 else 1
    load, store = (make(count, piece // count) for make in (tile_loader, tile_storer))

    @cuda.jit
    def loop(table, n_rows, n_pieces, indices, index_bytes, n, out, kept, guard):
        b = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if b >= n:
            return
        index = index_at(indices, index_bytes, b)
        is_bad = index < 0 or index >= n_rows
        if cuda.threadIdx.x == 0:
            store_int64(kept + 8 * b, index)
            if is_bad:
                lower_int64(guard + 8 * FOUND, b)
        words = cuda.local.array(count, unsigned)
        for k in range(count):
            words[k] = 0
        p = np.int64(cuda.threadIdx.x)
        while p < n_pieces:
            if not is_bad:
                load(words, table, (index * n_pieces + p) * count)
            store(words, out, (b * n_pieces + p) * count)
            p += cuda.blockDim.x

    return loop


def gather(
    table_place: tuple[int, int, int],  # address, rows, bytes of a row
    index_place: tuple[int, int, int],  # address, bytes of an index (4 or 8), how many
    results: tuple[int, int, int],  # addresses: of the rows, of the indices as int64, the guard
    stream: Any,
) -> None:
    """Enqueue ``out[b] = table[indices[b]]``; the position of a bad index closes the guard."""
    (table, n_rows, row_bytes), (_, _, n), (out, _, _) = table_place, index_place, results
    if n == 0:
        return
    piece = next(size for size in PIECES if not (row_bytes | table | out) % size)
    n_pieces = row_bytes // piece
    pieces, lanes, _ = tile_grid(n_pieces, 1, GEOMETRY.rows)
    loop = launcher(gather_kernel(piece), -(-n // lanes), (pieces, lanes), stream)
    loop(table, n_rows, n_pieces, *index_place, *results)
