"""The global norm of gradients on the device, and the factor by which they are clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import cuda, float64

from ...element import Kernel, kernel
from ...rules.norm import SCALED
from ...storage import F64, Storage, real_of
from ..device.backend import (
    GEOMETRY,
    copy_in,
    copy_out,
    load_float64,
    store_float32,
    store_float64,
)
from ..device.launch import on_grid
from ..device.memory import SUMS, Places, room_of
from ..device.records import Real, offsets_of
from ..device.sums import PART_BYTES, add_tree, share_of_parts
from .chunks import Chunks
from .measure import chunk_sums_kernel
from .step import dense_kernel

THREADS = GEOMETRY.totals


class Totals(NamedTuple):
    """What the parts add up to, and what follows, as float64 and as float32."""

    squares: Real
    limit: Real
    factor: Real
    factor_32: Real


AT = offsets_of(Totals)


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

    def chunks(self, written: np.ndarray | None = None) -> Chunks:
        """The tensors of a launch of `SCALED`, which reads them and may write to others."""
        written = self.addresses if written is None else written
        return Chunks(scaling(self.storage), written[:, None], self.addresses, self.sizes)


class Squares(Protocol):
    """Parts of a sum of squares.

    Attributes:
        n_parts: how many.
    """

    n_parts: int

    def enqueue(self, parts: int, stream: Any) -> None:
        """Enqueue writing them to an address."""


def scaling(storage: Storage) -> Kernel:
    """What measures and scales arrays."""
    return kernel(SCALED, (), storage, storage, ())


class DenseSquares:
    """The squares of dense arrays, summed over each of their chunks.

    Attributes:
        loop: what is launched.
        counts: int64 ``[T]``: parts of each tensor.
        n_parts: of all.
    """

    def __init__(self, found: DenseGradients) -> None:
        self._chunks, self.loop = found.chunks(), chunk_sums_kernel(scaling(found.storage))
        self.counts, self.n_parts = self._chunks.counts, self._chunks.n_blocks
        self._table = 0

    def words(self, place: int) -> np.ndarray:
        """The int64 table, to lie at an address."""
        self._table = place
        # No scalar is used, but they are read: the table itself is memory as good as any.
        return self._chunks.words(np.full(len(self.counts), place))

    def launch(self, parts: int, stream: Any) -> None:
        """Enqueue writing them, the table being there, to an address."""
        self._chunks.launch(self.loop, stream, self._table, self._chunks.n_tensors, parts, 0)

    def enqueue(self, parts: int, stream: Any) -> None:
        """See `Squares`."""
        with room_of(stream) as room:
            place = room.take(8 * self._chunks.n_words)
            copy_in(place, self.words(place), stream)
            self.launch(parts, stream)


@cache
def total_kernel() -> Any:
    """``loop[1, THREADS](parts, n, totals)``: the sum of all parts, and the factor.

    ``factor = limit / max(norm, limit)``; NaN where the norm is not finite.
    """

    @cuda.jit
    def loop(parts, n, totals):
        thread = cuda.threadIdx.x
        shared = cuda.shared.array((1, THREADS), float64)
        shared[0, thread] = share_of_parts(parts, 0, n, 0, thread, THREADS)
        add_tree(shared, thread, THREADS, 1)
        if thread == 0:
            squares, limit = shared[0, 0], load_float64(totals + AT.limit)
            norm = math.sqrt(squares)
            factor = limit / max(norm, limit) if norm < np.inf else np.nan
            store_float64(totals + AT.squares, squares)
            store_float64(totals + AT.factor, factor)
            store_float32(totals + AT.factor_32, factor)

    return loop


class GlobalNorm:
    """The norm of gradients, enqueued on a stream; what follows from it stays on the device.

    Args:
        totals: address of the `Totals`.
        stream: of Numba.
    """

    def __init__(self, totals: int, stream: Any) -> None:
        self._totals, self._stream = totals, stream

    def squares(self) -> float:
        """The sum of squares; the host waits for it."""
        totals = np.empty(len(Totals._fields))
        copy_out(totals, self._totals, self._stream)
        return float(Totals(*totals).squares)

    def scale(self, found: DenseGradients, results: np.ndarray) -> None:
        """Enqueue writing gradients times the factor to ``results``, int64 addresses."""
        chunks, stream = found.chunks(results), self._stream
        if chunks.n_tensors == 0:
            return
        factor = AT.factor if real_of(found.storage) is F64 else AT.factor_32
        words = chunks.words(np.full(len(results), self._totals + factor))
        with room_of(stream) as room:
            place = room.take(words.nbytes)
            copy_in(place, words, stream)
            loop = dense_kernel(scaling(found.storage))
            chunks.launch(loop, stream, place, chunks.n_tensors, 0)


@contextmanager
def global_norm(
    gradients: Sequence[DenseGradients], rows: Sequence[Squares], limit: float, stream: Any
) -> Iterator[GlobalNorm]:
    """Enqueue the norm of gradients; ``with`` holds the room until what uses it is enqueued.

    Args:
        gradients: dense ones, by storage type.
        rows: row-sparse ones, by storage type.
        limit: of the norm.
        stream: of Numba.
    """
    found, places = [*map(DenseSquares, gradients), *rows], Places()
    totals, n_parts = np.array(Totals(0.0, limit, 0.0, 0.0)), sum(of.n_parts for of in found)
    at_totals, at_parts = places.add(totals.nbytes), places.add(n_parts * PART_BYTES)
    with room_of(stream, SUMS) as room:
        base = room.take(places.size)
        copy_in(base + at_totals, totals, stream)
        place = base + at_parts
        for of in found:
            if of.n_parts:
                of.enqueue(place, stream)
                place += of.n_parts * PART_BYTES
        arguments = base + at_parts, n_parts, base + at_totals
        on_grid(total_kernel(), 1, THREADS, stream)(*arguments)
        yield GlobalNorm(base + at_totals, stream)
