"""The global norm of gradients on the device, and the factor by which they are clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import cuda, float64

from ...element import Kernel, kernel
from ...rule import Rule
from ...rules.norm import SCALED
from ...storage import F64, Storage, real_of
from ..device import backend
from ..device.backend import (
    GEOMETRY,
    copy_out,
    launcher,
    load_float64,
    store_float32,
    store_float64,
)
from ..device.guard import NOTHING, is_closed
from ..device.memory import SUMS, Places, room_of
from ..device.records import Real, Word, offsets_of
from ..device.sums import add_tree, strided_partial_sum
from .step import Chunks, chunk_of, chunk_sums_kernel, dense_kernel

THREADS = GEOMETRY.totals


class NormTotals(NamedTuple):
    """The sum of all parts and the factor that follows, as float64 and as float32."""

    squares: Real
    limit: Real
    factor: Real
    factor_32: Real
    gate: Word  # the guard of what is scaled in place: closed where the factor is 1, too


AT = offsets_of(NormTotals)


def _vanishing(out: Any, g: Any, hp: Any) -> Any:
    return (g - g,)  # NaN if it is NaN or infinite


FINITE = Rule(SCALED.update, SCALED.states, SCALED.hp, _vanishing, 1)
"""Its sums of squares are 0 for arrays in which all is finite, else NaN."""


def scaling(storage: Storage, rule: Rule = SCALED) -> Kernel:
    """The kernel that measures and scales arrays."""
    return kernel(rule, (), storage, storage, ())


class DenseGradients(NamedTuple):
    """Dense gradients of one storage type."""

    storage: Storage
    addresses: np.ndarray  # int64 [T], on the device
    sizes: np.ndarray  # int64 [T], elements

    def chunks(self, written: np.ndarray) -> Chunks:
        """The tensors of a launch of `scaling`, which writes to other addresses."""
        arrays = np.column_stack([self.addresses, written])
        return Chunks(chunk_of(scaling(self.storage)), arrays, self.sizes)


class Squares(Protocol):
    """Some of the parts of a sum of squares."""

    n_parts: int

    def enqueue(self, parts: int, stream: Any) -> None:
        """Enqueue writing them to an address."""


class DenseSquares:
    """The squares of dense arrays, summed over each of their chunks."""

    def __init__(self, gradients: DenseGradients, rule: Rule = SCALED) -> None:
        self._loop = chunk_sums_kernel(scaling(gradients.storage, rule))
        self._chunks = gradients.chunks(gradients.addresses)
        self.counts, self.n_parts = self._chunks.counts, self._chunks.n_blocks

    def enqueue(self, parts: int, stream: Any) -> None:
        chunks = self._chunks
        with room_of(stream) as room:
            place = room.take(8 * chunks.n_words)
            # No scalar is used, but they are read: the table itself is memory as good as any.
            room.send(place, chunks.words(np.full(len(self.counts), place)))
            chunks.launch(self._loop, stream, place, chunks.n_tensors, parts, 0)


def squares(gradients: DenseGradients, stream: Any, rule: Rule = SCALED) -> np.ndarray:
    """The float64 sum of squares of each of some arrays; the host waits for them."""
    sums = DenseSquares(gradients, rule)
    parts, ends = np.zeros(sums.n_parts), np.cumsum(sums.counts)
    if sums.n_parts:
        with room_of(stream, SUMS) as room:
            place = room.take(parts.nbytes)
            sums.enqueue(place, stream)
            copy_out(parts, place, stream)
    spans = zip((ends - sums.counts).tolist(), ends.tolist(), strict=True)
    return np.array([parts[begin:end].sum() for begin, end in spans])


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray, *, stream: Any) -> bool:
    """Whether contiguous arrays hold no NaN and no infinity; the host waits.

    They are given by int64 addresses and numbers of elements.
    """
    return not squares(DenseGradients(storage, addresses, sizes), stream, FINITE).any()


@cuda.jit
def total_kernel(parts, n, totals, guard):
    """``loop[1, THREADS]``: the sum of all parts and the factor; NaN if the norm is not finite."""
    thread, shared = cuda.threadIdx.x, cuda.shared.array((1, THREADS), float64)
    shared[0, thread] = strided_partial_sum(parts, 0, n, 0, 1, thread, THREADS)
    add_tree(shared, thread, THREADS, 1)
    if thread == 0:
        squares, limit = shared[0, 0], load_float64(totals + AT.limit)
        norm = math.sqrt(squares)
        # A norm that is not finite makes NaN of all gradients: scaled by 0 or by a number they
        # would pass for clipped ones.
        factor = limit / max(norm, limit) if norm < np.inf else np.nan
        store_float64(totals + AT.squares, squares)
        # In both types: each loop reads the factor as a scalar of its own arithmetic.
        store_float64(totals + AT.factor, factor)
        store_float32(totals + AT.factor_32, factor)
        backend.store_int64(totals + AT.gate, 0 if factor == 1.0 or is_closed(guard) else NOTHING)


class GlobalNorm(NamedTuple):
    """The norm of gradients, enqueued on a stream; what follows from it stays on the device."""

    totals: int  # address of the `NormTotals`
    stream: Any  # of Numba

    def squares(self) -> float:
        """The sum of squares; the host waits for it."""
        totals = np.empty(len(NormTotals._fields))
        copy_out(totals, self.totals, self.stream)
        return float(NormTotals(*totals).squares)

    def scale(self, gradients: DenseGradients, results: np.ndarray, *, in_place: bool) -> None:
        """Enqueue writing gradients times the factor to ``results``, int64 addresses."""
        chunks, stream = gradients.chunks(results), self.stream
        if chunks.n_tensors == 0:
            return
        factor = AT.factor if real_of(gradients.storage) is F64 else AT.factor_32
        words = chunks.words(np.full(len(results), self.totals + factor))
        with room_of(stream) as room:
            place, loop = room.take(words.nbytes), dense_kernel(scaling(gradients.storage))
            room.send(place, words)
            guard = self.totals + AT.gate if in_place else 0
            chunks.launch(loop, stream, place, chunks.n_tensors, guard)


@contextmanager
def global_norm(
    gradients: Sequence[DenseGradients], rows: Sequence[Squares], limit: float, stream: Any,
    guard: int,
) -> Iterator[GlobalNorm]:  # fmt: skip
    """Enqueue the norm of gradients and its limit; ``with`` holds the room while it is used."""
    sums, places = [*map(DenseSquares, gradients), *rows], Places()
    totals = np.array(NormTotals(0.0, limit, 0.0, 0.0, 0.0))
    n_parts = sum(of.n_parts for of in sums)
    at_totals, at_parts = places.add(totals.nbytes), places.add(n_parts * 8)
    with room_of(stream, SUMS) as room:
        base = room.take(places.size)
        room.send(base + at_totals, totals)
        place = first = base + at_parts
        for of in sums:
            if of.n_parts:
                of.enqueue(place, stream)
                place += of.n_parts * 8
        launcher(total_kernel, 1, THREADS, stream)(first, n_parts, base + at_totals, guard)
        yield GlobalNorm(base + at_totals, stream)
