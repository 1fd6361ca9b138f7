"""The global norm of gradients on the device, and the factor by which they are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...element import kernel
from ...rules.norm import SCALED
from ...storage import F64, Storage, real_of
from ..device.backend import copy_in, copy_out, load_float64, store_float32, store_float64
from ..device.launch import on_grid
from ..device.memory import SUMS, Places, room_of
from ..rows.step import RowSquares
from . import measure
from . import update as dense
from .tensor_table import COLUMNS, ROW_BYTES

THREADS = 256
# What the parts add up to, and what follows; FACTOR_32 is a float32.
SQUARES, LIMIT, FACTOR, FACTOR_32, TOTALS = range(5)


class DenseGradients(NamedTuple):
    """Dense gradients of one storage type.

    Attributes:
        storage: their storage type.
        addresses: int64 ``[T]``, on the device.
        sizes: int64 ``[T]``, elements.
    """

    storage: Storage
    addresses: np.ndarray
    sizes: np.ndarray


@cache
def total_kernel(threads: int) -> Any:
    """``loop[1, threads](sums, n, totals)``: the sum of all parts, and the factor.

    ``factor = limit / max(norm, limit)``; NaN where the norm is not finite.
    """

    @cuda.jit
    def loop(sums, n, totals):
        thread = cuda.threadIdx.x
        shared = cuda.shared.array((1, threads), float64)
        own, i = 0.0, thread
        while i < n:
            own += load_float64(sums + i * measure.SUMS_BYTES)
            i += threads
        shared[0, thread] = own
        measure.add_tree(shared, thread, threads, 1)
        if thread == 0:
            squares, limit = shared[0, 0], load_float64(totals + 8 * LIMIT)
            norm = math.sqrt(squares)
            factor = limit / max(norm, limit) if norm < np.inf else np.nan
            store_float64(totals + 8 * SQUARES, squares)
            store_float64(totals + 8 * FACTOR, factor)
            store_float32(totals + 8 * FACTOR_32, factor)

    return loop


class GlobalNorm:
    """The norm of gradients, enqueued on a stream; what follows from it stays on the device.

    ``with`` holds the room in which it lies, until what uses it is enqueued.

    Args:
        gradients: dense ones, by storage type.
        rows: row-sparse ones, by storage type.
        limit: of the norm.
        stream: of Numba.
    """

    def __init__(
        self,
        gradients: Sequence[DenseGradients],
        rows: Sequence[RowSquares],
        limit: float,
        stream: Any,
    ) -> None:
        self._gradients = gradients
        self._rows = rows
        self._limit = limit
        self._stream = stream
        self._room = room_of(stream, SUMS)
        self._totals = 0

    def __enter__(self) -> GlobalNorm:
        self._room.__enter__()
        try:
            self._enqueue()
        except BaseException:
            self._room.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._room.__exit__()

    def _enqueue(self) -> None:
        places, stream = Places(), self._stream
        places.add(8 * TOTALS)
        blocks = [int(n_blocks(found).sum()) for found in self._gradients]
        n_sums = sum(blocks) + sum(found.n_sums for found in self._rows)
        at_sums = places.add(n_sums * measure.SUMS_BYTES)
        self._totals = self._room.take(places.size)
        first = sums = self._totals + at_sums
        totals = np.zeros(TOTALS)
        totals[LIMIT] = self._limit
        copy_in(self._totals, totals, stream)
        for found, count in zip(self._gradients, blocks, strict=True):
            add_squares(found, sums, stream)
            sums += count * measure.SUMS_BYTES
        for of_rows in self._rows:
            of_rows.enqueue(sums, stream)
            sums += of_rows.n_sums * measure.SUMS_BYTES
        on_grid(total_kernel(THREADS), 1, THREADS, stream)(first, n_sums, self._totals)

    def squares(self) -> float:
        """The sum of squares; the host waits for it."""
        totals = np.empty(TOTALS)
        copy_out(totals, self._totals, self._stream)
        return float(totals[SQUARES])

    def scale(self, found: DenseGradients, results: np.ndarray) -> None:
        """Enqueue writing gradients times the factor to ``results``, int64 addresses."""
        place = FACTOR if real_of(found.storage) is F64 else FACTOR_32
        factor = np.full(len(found.sizes), self._totals + 8 * place)
        scale(found, results, factor, self._stream)


def _kernel_of(storage: Storage) -> Any:
    return kernel(SCALED, (), storage, storage, ())


def n_blocks(found: DenseGradients) -> np.ndarray:
    """How many sums `add_squares` writes for each tensor."""
    blocks: np.ndarray = -(-found.sizes // dense.chunk_of(_kernel_of(found.storage)))
    return blocks


def _table(
    found: DenseGradients, written: np.ndarray, hp_addresses: np.ndarray
) -> tuple[np.ndarray, int]:
    """The table of the dense loops; an address of scalars for each tensor."""
    columns = np.zeros((len(written), 4), np.int64)
    columns[:, 0] = written
    compiled = _kernel_of(found.storage)
    return dense.table_of(compiled, columns, found.addresses, found.sizes, hp_addresses)


def add_squares(found: DenseGradients, sums: int, stream: Any) -> None:
    """Enqueue the sums of squares of the blocks of some tensors, to an address."""
    if not found.sizes.any():
        return
    with room_of(stream) as room:
        place = room.take((1 + len(found.sizes)) * ROW_BYTES)
        copy_in(place, squares_table(found, place), stream)
        enqueue_squares(found, place, sums, stream)


def squares_table(found: DenseGradients, place: int) -> np.ndarray:
    """The table of `enqueue_squares`, to lie at the address ``place``.

    Its first row holds the scalars, which are not used: they are somewhere to be read.
    """
    table, _ = _table(found, found.addresses, np.full(len(found.sizes), place))
    return np.vstack([np.zeros((1, COLUMNS), np.int64), table])


def enqueue_squares(found: DenseGradients, place: int, sums: int, stream: Any) -> None:
    """Enqueue the sums of squares of the blocks, with the table at ``place``."""
    count, n_tensors = int(n_blocks(found).sum()), np.count_nonzero(found.sizes)
    if count == 0:
        return
    loop = squares_kernel(found.storage)
    on_grid(loop, count, dense.THREADS, stream)(place + ROW_BYTES, n_tensors, sums, 0)


def squares_kernel(storage: Storage) -> Any:
    """The loop of `enqueue_squares`."""
    compiled = _kernel_of(storage)
    return measure.chunk_sums_kernel(compiled, dense.THREADS, dense.chunk_of(compiled))


def scale(
    found: DenseGradients, results: np.ndarray, hp_addresses: np.ndarray, stream: Any
) -> None:
    """Enqueue writing arrays, times the factor at an address for each, to ``results``."""
    table, count = _table(found, results, hp_addresses)
    if count == 0:
        return
    with room_of(stream) as room:
        place = room.take(table.nbytes)
        copy_in(place, table, stream)
        loop = dense.dense_kernel(_kernel_of(found.storage))
        on_grid(loop, count, dense.THREADS, stream)(place, len(table), 0)
