"""One step of a rule on any number of dense tensors, in one launch, or three of a two-stage rule.

Each block takes a chunk of one tensor, which it finds by bisection in the table. What differs from
step to step, gradients and scalars, is in the table too, so there is one copy to the device. In the
first stage a block sums the squares of what is measured; one for each tensor then adds the sums of
the chunks and changes the scalars of the tensor. So the second stage finds them complete, the host
is not asked, and the bits are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...element import Kernel
from ..device.backend import GEOMETRY
from ..device.functions import device_function
from ..device.guard import is_closed
from ..device.launch import on_grid
from ..device.part import Call
from ..device.records import (
    Word,
    Words,
    hp_reader,
    multiplier,
    row_finder,
    row_reader,
    size_of,
    table_of,
)
from ..device.sums import MOST_VALUES, PART_BYTES, add_tree, share_of_parts, store_part
from .tiles import are_aligned, by_chunks, length_of, measured_tile, update_tile

THREADS = GEOMETRY.dense.threads


class TensorRow(NamedTuple):
    """A tensor of a launch."""

    hp: Word  # address of the scalars
    size: Word
    first_block: Word
    is_aligned: Word  # whether tiles are moved by vectors
    arrays: Words  # addresses of the gradient, of the parameter, then of its states


def chunk_of(kernel: Kernel) -> int:
    """Elements of a chunk: a multiple of the length of a tile, so that only ends are single."""
    return THREADS * length_of(kernel) * GEOMETRY.dense.tiles


def _on_chunk(kernel: Kernel, of_tile: Callable[[Kernel, int], Any]) -> Any:
    """``run(table, n_tensors, *rest)``: a function of tiles on the chunk of the block."""
    find = row_finder(TensorRow, "first_block", 2 + len(kernel.s))
    read_hp = hp_reader(kernel.rule, kernel.prologue, kernel.real)
    shape = length_of(kernel), THREADS, chunk_of(kernel)
    of_chunk = by_chunks(partial(of_tile, kernel), *shape)

    @cuda.jit(device=True)
    def run(table, n_tensors, *rest):
        row = find(table, n_tensors, cuda.blockIdx.x)
        number, hp = cuda.blockIdx.x - row.first_block, read_hp(row.hp)
        of_chunk(number, row.size, row.is_aligned, row.arrays, (), (), hp, *rest)

    return run


class Chunks:
    """Tensors of a launch, int64 ``[T, n]`` arrays of ``[T]`` sizes, in chunks; no empty ones."""

    def __init__(
        self, chunk: int, arrays: np.ndarray, sizes: np.ndarray, threads: int = THREADS
    ) -> None:
        self._known, self._threads = np.flatnonzero(sizes), threads
        self.counts = -(-sizes // chunk)  # blocks of each tensor
        first = np.cumsum(self.counts) - self.counts
        columns = (0 * sizes, sizes, first, are_aligned(arrays), arrays)
        self._rows = TensorRow(*(column[self._known] for column in columns))
        self.n_tensors, self.n_blocks = len(self._known), int(self.counts.sum())
        self.n_words = self.n_tensors * size_of(TensorRow, arrays.shape[1]) // 8

    def words(self, hp: np.ndarray) -> np.ndarray:
        """The int64 table; ``hp`` are the addresses of the scalars of each tensor."""
        return table_of(self._rows._replace(hp=hp[self._known]), self.n_tensors)

    def launch(self, loop: Any, stream: Any, *arguments: int) -> None:
        """Enqueue a loop with a block for each chunk."""
        if self.n_blocks:
            on_grid(loop, self.n_blocks, self._threads, stream)(*arguments)


@cache
def chunk_sums_kernel(kernel: Kernel) -> Any:
    """``loop[blocks, THREADS](table, n_tensors, parts, guard)``: the squares of each chunk."""
    add_chunk, n_values = _on_chunk(kernel, measured_tile), kernel.rule.n_measured

    @cuda.jit
    def loop(table, n_tensors, parts, guard):
        if is_closed(guard):
            return
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        own = cuda.local.array(MOST_VALUES, float64)
        own[0] = own[1] = own[2] = 0.0
        add_chunk(table, n_tensors, own)
        shared = cuda.shared.array((MOST_VALUES, THREADS), float64)
        shared[0, thread], shared[1, thread], shared[2, thread] = own[0], own[1], own[2]
        store_part(parts, block, shared, thread, THREADS, n_values)

    return loop


def totals_kernel(record: Any, n_words: int, n_values: int, follow: Any) -> Any:
    """``loop[n_tensors, THREADS](table, n_tensors, n_blocks, parts, guard)``.

    It adds the parts of the blocks of a tensor and calls ``follow(shared, row)`` with what they add
    up to in ``shared[:, 0]``. The rows are of ``record``, with ``n_words`` words at the end.
    """
    row_at = row_reader(record, n_words)

    @cuda.jit
    def loop(table, n_tensors, n_blocks, parts, guard):
        if is_closed(guard):
            return
        t, thread = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        row, end = row_at(table, t), n_blocks
        if t + 1 < n_tensors:
            end = row_at(table, t + 1).first_block
        shared = cuda.shared.array((MOST_VALUES, THREADS), float64)
        for k in range(n_values):
            shared[k, thread] = share_of_parts(parts, row.first_block, end, k, thread, THREADS)
        add_tree(shared, thread, THREADS, n_values)
        if thread == 0:
            follow(shared, row)

    return loop


@cache
def factor_kernel(kernel: Kernel) -> Any:
    """`totals_kernel` of ``rule.factor``: it multiplies the field ``factor_of`` of the scalars."""
    rule, multiply = kernel.rule, multiplier(kernel.real)
    n_values, factor = rule.n_measured, device_function(rule.factor)
    offset = kernel.column[rule.factor_of] * kernel.real.itemsize

    @cuda.jit(device=True)
    def follow(shared, row):
        if n_values == 1:
            multiply(row.hp + offset, factor(shared[0, 0]))
        elif n_values == 2:
            multiply(row.hp + offset, factor(shared[0, 0], shared[1, 0]))
        else:
            multiply(row.hp + offset, factor(shared[0, 0], shared[1, 0], shared[2, 0]))

    return totals_kernel(TensorRow, 2 + len(kernel.s), n_values, follow)


@cache
def dense_kernel(kernel: Kernel) -> Any:
    """The loop of a rule, ``loop[blocks, THREADS](table, n_tensors, guard)``."""
    update_chunk = _on_chunk(kernel, update_tile)

    @cuda.jit
    def loop(table, n_tensors, guard):
        if not is_closed(guard):
            update_chunk(table, n_tensors)

    return loop


class DenseStep:
    """A `Part`: the step on some tensors, of so many elements each.

    There are int64 ``[T, 1 + number of states]`` addresses of parameters and states, and ``[T]`` of
    gradients. ``follow`` is a `totals_kernel` where ``rule.factor`` does not say all.
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
            follow = factor_kernel(kernel)
        self._follow, self._update = follow, dense_kernel(kernel)
        self._measure = chunk_sums_kernel(kernel) if follow else None
        self.loops = [loop for loop in (self._measure, self._follow, self._update) if loop]
        self._chunks = Chunks(chunk_of(kernel), np.column_stack([gradients, addresses]), sizes)
        self._table, self.n_words = 0, self._chunks.n_words
        self.scratch_bytes = self._chunks.n_blocks * PART_BYTES if follow else 0

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `Part`."""
        self._table = place
        return self._chunks.words(hp)

    def enqueue(self, call: Call) -> None:
        """See `Part`."""
        stream, guard, _, parts = call
        chunks, table = self._chunks, (self._table, self._chunks.n_tensors)
        if self._measure and chunks.n_tensors:
            chunks.launch(self._measure, stream, *table, parts, guard)
            follow = on_grid(self._follow, chunks.n_tensors, THREADS, stream)
            follow(*table, chunks.n_blocks, parts, guard)
        chunks.launch(self._update, stream, *table, guard)
