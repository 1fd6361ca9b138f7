"""One step of a rule on any number of dense tensors, in one launch, two or three.

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
from ..device.part import Call, placed
from ..device.records import hp_reader, row_finder
from ..device.sums import PART_BYTES
from . import measure
from .chunks import THREADS, Chunks, TensorRow, chunk_of
from .tiles import by_chunks, length_of, update_tile


@cache
def dense_kernel(kernel: Kernel) -> Any:
    """The loop of a rule, ``loop[blocks, THREADS](table, n_tensors, guard)``."""
    find = row_finder(TensorRow, "first_block", 1 + len(kernel.s))
    read_hp = hp_reader(kernel.rule, kernel.prologue, kernel.real)
    update_chunk = by_chunks(
        lambda n: update_tile(kernel, n), length_of(kernel), THREADS, chunk_of(kernel)
    )

    @cuda.jit
    def loop(table, n_tensors, guard):
        if is_closed(guard):
            return
        row = find(table, n_tensors, cuda.blockIdx.x)
        number, hp = cuda.blockIdx.x - row.first_block, read_hp(row.hp)
        update_chunk(number, row.size, row.is_aligned, row.arrays, row.g, hp)

    return loop


class DenseStep:
    """A `Part`: the step on some tensors.

    Args:
        kernel: the rule, its prologue and storage types.
        addresses: as `Chunks`.
        gradients: as `Chunks`.
        sizes: as `Chunks`.
        follow: of a two-stage rule whose ``factor`` does not say all: a `measure.totals_kernel`.
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
        self._chunks, self._table = Chunks(kernel, addresses, gradients, sizes), 0
        self.n_words = self._chunks.n_words
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
        chunks, stream = self._chunks, call.stream
        table = self._table, chunks.n_tensors
        if self._measure and chunks.n_tensors:
            chunks.launch(self._measure, stream, *table, call.scratch, call.guard)
            on_grid(self._follow, chunks.n_tensors, THREADS, stream)(
                *table, chunks.n_blocks, call.scratch, call.guard
            )
        chunks.launch(self._update, stream, *table, call.guard)


def dense_update(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp: np.ndarray,
    hp_of: np.ndarray,
    *,
    guard: int = 0,
    stream: Any,
) -> None:
    """Enqueue one step on tensors of the device, in place.

    Args:
        kernel: the rule and its storage types.
        addresses: as `Chunks`.
        gradients: as `Chunks`.
        sizes: as `Chunks`.
        hp: ``[R, F]`` scalars in the type of the arithmetic, on the host. Those of a two-stage
            rule are completed on the device.
        hp_of: int64 ``[T]``: which row of ``hp`` a tensor uses; of a two-stage rule each its own.
        guard: address of the guard of the call (`guard`), or 0.
        stream: of Numba.
    """
    if sizes.any():
        step = DenseStep(kernel, addresses, gradients, sizes)
        with placed(step, hp, hp_of, Call(stream, guard)) as call:
            step.enqueue(call)
