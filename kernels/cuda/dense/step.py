"""One step of a rule on any number of dense tensors, in one launch, or three of a two-stage rule.

Each block takes a chunk of one tensor, which it finds by bisection in the table.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ...element import Kernel
from ..device.guard import is_closed
from ..device.launch import on_grid
from ..device.part import Call
from ..device.sums import PART_BYTES
from . import measure
from .chunks import THREADS, Chunks, chunk_of, on_chunk
from .tiles import update_tile


@cache
def dense_kernel(kernel: Kernel) -> Any:
    """The loop of a rule, ``loop[blocks, THREADS](table, n_tensors, guard)``."""
    update_chunk = on_chunk(kernel, update_tile)

    @cuda.jit
    def loop(table, n_tensors, guard):
        if not is_closed(guard):
            update_chunk(table, n_tensors)

    return loop


class DenseStep:
    """A `Part`: the step on some tensors, of so many elements each.

    There are int64 ``[T, 1 + number of states]`` addresses of parameters and states, and ``[T]`` of
    gradients. ``follow`` is a `measure.totals_kernel` where ``rule.factor`` does not say all.
    """

    def __init__(
        self,
        kernel: Kernel,
        addresses: np.ndarray,
        gradients: np.ndarray,
        sizes: np.ndarray,
        follow: Any = None,
    ) -> None:
        if kernel.rule.factor:
            follow = measure.factor_kernel(kernel)
        self._follow, self._update = follow, dense_kernel(kernel)
        self._measure = measure.chunk_sums_kernel(kernel) if follow else None
        self._chunks = Chunks(chunk_of(kernel), np.column_stack([gradients, addresses]), sizes)
        self._table, self.n_words = 0, self._chunks.n_words
        self.scratch_bytes = self._chunks.n_blocks * PART_BYTES if follow else 0

    def loops(self) -> list[Any]:
        """See `Part`."""
        return [loop for loop in (self._measure, self._follow, self._update) if loop]

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `Part`."""
        self._table = place
        return self._chunks.words(hp)

    def enqueue(self, call: Call) -> None:
        """See `Part`."""
        stream, guard, _, parts = call
        chunks, table = self._chunks, (self._table, self._chunks.n_tensors)
        if self._measure and chunks.n_tensors:
            chunks.launch(self._measure, THREADS, stream, *table, parts, guard)
            follow = on_grid(self._follow, chunks.n_tensors, THREADS, stream)
            follow(*table, chunks.n_blocks, parts, guard)
        chunks.launch(self._update, THREADS, stream, *table, guard)
