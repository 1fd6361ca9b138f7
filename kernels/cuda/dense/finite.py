"""Is every element of arrays on the device finite? One read."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from ...storage import Storage
from ..device.backend import GEOMETRY, copy_in, copy_out, store_int64, tile_loader
from ..device.launch import on_grid
from ..device.memory import Places, room_of
from ..device.records import Word, row_finder, table_of
from .tiles import WIDEST, by_chunks, tile_length

THREADS = GEOMETRY.finite.threads
_UNSIGNED: dict[int, Any] = {2: types.uint16, 4: types.uint32, 8: types.uint64}


class ArrayRow(NamedTuple):
    """An array that is looked at; as `chunks.TensorRow`."""

    address: Word
    size: Word
    first_block: Word
    is_aligned: Word


def _look(storage: Storage, length: int) -> Any:
    """``look(i, address, is_bad)``: whether elements from ``i`` on are NaN or infinite."""
    itemsize, unsigned = storage.itemsize, _UNSIGNED[storage.itemsize]
    exponent, load = unsigned(storage.exponent), tile_loader(length, itemsize)

    @cuda.jit(device=True)
    def look(i, address, is_bad):
        tile = cuda.local.array(length, unsigned)
        load(tile, address + i * itemsize)
        for k in range(length):
            is_bad[0] |= (tile[k] & exponent) == exponent

    return look


@cache
def finite_kernel(storage: Storage) -> Any:
    """``loop[blocks, THREADS](table, n_arrays, found)``: ``found`` becomes 1 at the first NaN."""
    find = row_finder(ArrayRow, "first_block")
    look_at_chunk = by_chunks(
        lambda n: _look(storage, n), tile_length(storage), THREADS, chunk_of(storage)
    )

    @cuda.jit
    def loop(table, n_arrays, found):
        row, is_bad = find(table, n_arrays, cuda.blockIdx.x), cuda.local.array(1, types.boolean)
        is_bad[0] = False
        number = cuda.blockIdx.x - row.first_block
        look_at_chunk(number, row.size, row.is_aligned, row.address, is_bad)
        if is_bad[0]:
            store_int64(found, 1)

    return loop


def chunk_of(storage: Storage) -> int:
    """Elements that a block looks at."""
    return THREADS * GEOMETRY.finite.tiles * tile_length(storage)


class FiniteCheck:
    """The check of contiguous arrays; those of no elements are left out.

    Args:
        storage: the storage type of the arrays.
        addresses: int64 ``[T]``, on the device.
        sizes: int64 ``[T]``, elements.

    Attributes:
        words: the int64 table.
        loop: what is launched.
    """

    def __init__(self, storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> None:
        known = np.flatnonzero(sizes)
        places, blocks = addresses[known], -(-sizes[known] // chunk_of(storage))
        first = np.cumsum(blocks) - blocks
        rows = ArrayRow(places, sizes[known], first, places % WIDEST == 0)
        self._n_arrays, self._n_blocks = len(known), int(blocks.sum())
        self.words, self.loop = table_of(rows, len(known)).ravel(), finite_kernel(storage)

    def enqueue(self, table: int, found: int, stream: Any) -> None:
        """Enqueue it: the word at the address ``found`` becomes 1 at a NaN or an infinity."""
        if self._n_blocks:
            loop = on_grid(self.loop, self._n_blocks, THREADS, stream)
            loop(table, self._n_arrays, found)


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray, *, stream: Any) -> bool:
    """Whether contiguous arrays hold no NaN and no infinity; the host waits. As `FiniteCheck`."""
    check, found, places = FiniteCheck(storage, addresses, sizes), np.zeros(1, np.int64), Places()
    if check.words.size == 0:
        return True
    at_found, at_table = places.add(found.nbytes), places.add(check.words.nbytes)
    with room_of(stream) as room:
        base = room.take(places.size)
        copy_in(base + at_found, found, stream)
        copy_in(base + at_table, check.words, stream)
        check.enqueue(base + at_table, base + at_found, stream)
        copy_out(found, base + at_found, stream)
    return not found[0]
