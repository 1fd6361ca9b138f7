"""Is every element of arrays on the device finite? One read."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from ...storage import Storage
from ..device.backend import copy_in, copy_out, load_int64, store_int64, tile_loader
from ..device.launch import on_grid
from ..device.memory import Places, room_of
from ..rows.search import last_at_most

THREADS = 256
TILES_PER_THREAD = 8
_WIDEST = 16  # bytes of a load
_UNSIGNED: dict[int, Any] = {2: types.uint16, 4: types.uint32, 8: types.uint64}
# Columns of the table, int64 [T, COLUMNS].
ADDRESS, SIZE, FIRST_BLOCK, IS_ALIGNED, COLUMNS = range(5)
_ROW = 8 * COLUMNS


@cache
def finite_kernel(storage: Storage) -> Any:
    """``loop[blocks, THREADS](table, n_arrays, found)``: ``found`` becomes 1 at the first NaN."""
    itemsize, exponent = storage.itemsize, storage.exponent
    length, unsigned = _WIDEST // itemsize, _UNSIGNED[storage.itemsize]
    load_tile, load_one = tile_loader(length, itemsize), tile_loader(1, itemsize)
    chunk = chunk_of(storage)

    @cuda.jit
    def loop(table, n_arrays, found):
        block = cuda.blockIdx.x
        row = table + last_at_most(table + 8 * FIRST_BLOCK, _ROW, n_arrays, block) * _ROW
        address, size = load_int64(row + 8 * ADDRESS), np.uint64(load_int64(row + 8 * SIZE))
        begin = np.uint64(block - load_int64(row + 8 * FIRST_BLOCK)) * np.uint64(chunk)
        end, thread = min(size, begin + np.uint64(chunk)), np.uint64(cuda.threadIdx.x)
        tile, one = cuda.local.array(length, unsigned), cuda.local.array(1, unsigned)
        whole, is_bad = begin, False
        if load_int64(row + 8 * IS_ALIGNED):
            whole = end - end % np.uint64(length)
            i = begin + thread * np.uint64(length)
            while i < whole:
                load_tile(tile, address + np.int64(i) * itemsize)
                for k in range(length):
                    is_bad |= (tile[k] & unsigned(exponent)) == unsigned(exponent)
                i += np.uint64(THREADS * length)
        i = whole + thread
        while i < end:
            load_one(one, address + np.int64(i) * itemsize)
            is_bad |= (one[0] & unsigned(exponent)) == unsigned(exponent)
            i += np.uint64(THREADS)
        if is_bad:
            store_int64(found, 1)

    return loop


def chunk_of(storage: Storage) -> int:
    """Elements that a block looks at."""
    return THREADS * TILES_PER_THREAD * _WIDEST // storage.itemsize


def table_of(storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """The table of the loop, and its number of blocks; arrays of no elements are left out.

    Args:
        storage: the storage type of the arrays.
        addresses: int64 ``[T]``, on the device.
        sizes: int64 ``[T]``, elements.
    """
    known = np.flatnonzero(sizes)
    table, blocks = np.zeros((len(known), COLUMNS), np.int64), -(-sizes[known] // chunk_of(storage))
    table[:, ADDRESS], table[:, SIZE] = addresses[known], sizes[known]
    table[:, FIRST_BLOCK] = np.cumsum(blocks) - blocks
    table[:, IS_ALIGNED] = table[:, ADDRESS] % _WIDEST == 0
    return table, int(blocks.sum())


def enqueue(
    storage: Storage, table: int, n_arrays: int, n_blocks: int, found: int, stream: Any
) -> None:
    """Enqueue the loop: the word at the address ``found`` becomes 1 at a NaN or an infinity."""
    if n_blocks:
        on_grid(finite_kernel(storage), n_blocks, THREADS, stream)(table, n_arrays, found)


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray, *, stream: Any) -> bool:
    """Whether contiguous arrays hold no NaN and no infinity; the host waits.

    Args:
        storage: as `table_of`.
        addresses: as `table_of`.
        sizes: as `table_of`.
        stream: of Numba.
    """
    table, n_blocks = table_of(storage, addresses, sizes)
    if n_blocks == 0:
        return True
    found, places = np.zeros(1, np.int64), Places()
    at_found, at_table = places.add(found.nbytes), places.add(table.nbytes)
    with room_of(stream) as room:
        base = room.take(places.size)
        copy_in(base + at_found, found, stream)
        copy_in(base + at_table, table, stream)
        enqueue(storage, base + at_table, len(table), n_blocks, base + at_found, stream)
        copy_out(found, base + at_found, stream)
    return not found[0]
