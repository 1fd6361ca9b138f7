"""Is every element of arrays on the device finite? One read."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from ...storage import Storage
from ..device.backend import GEOMETRY, copy_out, store_int64, tile_loader
from ..device.memory import Places, room_of
from ..device.records import row_finder
from .step import Chunks, TensorRow
from .tiles import by_chunks, tile_length

THREADS, _TILES = GEOMETRY.finite
_UNSIGNED: dict[int, Any] = {2: types.uint16, 4: types.uint32, 8: types.uint64}


def _look(storage: Storage, length: int) -> Any:
    """``look(i, address, is_bad)``: whether elements from ``i`` on are NaN or infinite."""
    unsigned, load = _UNSIGNED[storage.itemsize], tile_loader(length, storage.itemsize)
    exponent = unsigned(storage.exponent)

    @cuda.jit(device=True)
    def look(i, address, is_bad):
        tile = cuda.local.array(length, unsigned)
        load(tile, address, i)
        for k in range(length):
            is_bad[0] |= (tile[k] & unsigned(exponent)) == unsigned(exponent)

    return look


@cache
def finite_kernel(storage: Storage) -> Any:
    """``loop[blocks, THREADS](table, n_arrays, found)``: ``found`` becomes 1 at the first NaN."""
    find, chunk = row_finder(TensorRow, "first_block", 1), _chunk_of(storage)
    look = by_chunks(lambda n: _look(storage, n), tile_length(storage), THREADS, chunk)

    @cuda.jit
    def loop(table, n_arrays, found):
        row, is_bad = find(table, n_arrays, cuda.blockIdx.x), cuda.local.array(1, types.boolean)
        is_bad[0] = False
        look(cuda.blockIdx.x - row.first_block, row.size, row.is_aligned, row.arrays[0], is_bad)
        if is_bad[0]:
            store_int64(found, 1)

    return loop


def _chunk_of(storage: Storage) -> int:
    return THREADS * _TILES * tile_length(storage)


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray, *, stream: Any) -> bool:
    """Whether contiguous arrays hold no NaN and no infinity; the host waits.

    They are given by int64 addresses and numbers of elements.
    """
    chunks, places = Chunks(_chunk_of(storage), addresses[:, None], sizes, THREADS), Places()
    table, found = chunks.words(0 * sizes), np.zeros(1, np.int64)
    if table.size == 0:
        return True
    at_found, at_table = places.add(found.nbytes), places.add(table.nbytes)
    with room_of(stream) as room:
        base = room.take(places.size)
        room.send(base + at_found, found)
        room.send(base + at_table, table)
        arguments = base + at_table, chunks.n_tensors, base + at_found
        chunks.launch(finite_kernel(storage), stream, *arguments)
        copy_out(found, base + at_found, stream)
    return not int(found[0])
