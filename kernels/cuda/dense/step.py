"""One step of a rule on any number of dense tensors: one launch, or some of a two-stage rule.

Each block takes a chunk of one tensor, which it finds by bisection in the table. What differs from
step to step, gradients and scalars, is in the table too, so there is one copy to the device. In the
first stage a block sums what is measured; one for each tensor then adds the sums of the chunks and
changes the scalars of the tensor. So the second stage finds them complete, the host is not asked,
and the bits are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...element import Kernel
from ..device.backend import GEOMETRY, launcher
from ..device.guard import is_closed
from ..device.memory import Places
from ..device.part import LaunchContext
from ..device.records import Word, Words, hp_reader, offsets_of, row_finder, table_of
from ..device.sums import store_part
from .tiles import are_aligned, by_chunks, length_of, reduced_tile, update_tile
from .totals import Constants, Totals

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


def _on_chunk(kernel: Kernel, make_tile: Callable[[Kernel, int], Any]) -> Any:
    """``on_chunk(table, n_tensors, *rest)``: a function of tiles on the chunk of the block."""
    find = row_finder(TensorRow, "first_block", 2 + len(kernel.s))
    read_hp = hp_reader(kernel.rule, kernel.prologue, kernel.real)
    shape = length_of(kernel), THREADS, chunk_of(kernel)
    chunk_loop = by_chunks(partial(make_tile, kernel), *shape)

    @cuda.jit(device=True)
    def on_chunk(table, n_tensors, *rest):
        row = find(table, n_tensors, cuda.blockIdx.x)
        number, hp = cuda.blockIdx.x - row.first_block, read_hp(row.hp)
        chunk_loop(number, row.size, row.is_aligned, row.arrays, (), (), hp, *rest)

    return on_chunk


_AT = offsets_of(TensorRow)
_HP, _IS_ALIGNED, _ARRAYS = (at // 8 for at in (_AT.hp, _AT.is_aligned, _AT.arrays))


class Chunks:
    """Tensors of a launch, int64 ``[T, n]`` arrays of ``[T]`` sizes, in chunks."""

    def __init__(self, chunk: int, arrays: np.ndarray, sizes: np.ndarray) -> None:
        self.counts = -(-sizes // chunk)  # blocks of each tensor
        first = np.cumsum(self.counts) - self.counts
        self.n_tensors, self.n_blocks = len(sizes), int(self.counts.sum())
        table = table_of(TensorRow(0, sizes, first, 0, arrays), self.n_tensors)
        self._words, self.n_words = table, table.size
        self._table = table.reshape(self.n_tensors, -1)
        self._arrays, self._places = self._table[:, _ARRAYS:], (b"", b"")
        self.put(arrays[:, 0], arrays[:, 1:])

    def put(self, first: np.ndarray, others: np.ndarray) -> None:
        """Take over where the first array of each tensor lies now, and where its others do."""
        places = first.tobytes(), others.tobytes()
        if places != self._places:
            self._places = places
            self._arrays[:, 0], self._arrays[:, 1:] = first, others
            self._table[:, _IS_ALIGNED] = are_aligned(self._arrays)

    def words(self, hp: Any) -> np.ndarray:
        """The int64 table, until the next call; ``hp`` are the addresses of scalars by tensor."""
        self._table[:, _HP] = hp
        return self._words

    def launch(self, loop: Any, stream: Any, *arguments: int) -> None:
        """Enqueue a loop with a block for each chunk."""
        if self.n_blocks:
            launcher(loop, self.n_blocks, THREADS, stream)(*arguments)


@cache
def chunk_sums_kernel(kernel: Kernel) -> Any:
    """``loop[blocks, THREADS](table, n_tensors, parts, guard)``: the sums of each chunk."""
    add_chunk, n_values = _on_chunk(kernel, reduced_tile), kernel.rule.n_measured

    @cuda.jit
    def loop(table, n_tensors, parts, guard):
        if is_closed(guard):
            return
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        sums = cuda.local.array(n_values, float64)
        for k in range(n_values):
            sums[k] = 0.0
        add_chunk(table, n_tensors, sums)
        shared = cuda.shared.array((n_values, THREADS), float64)
        for k in range(n_values):
            shared[k, thread] = sums[k]
        store_part(parts, block, shared, thread, THREADS, n_values)

    return loop


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
    """A `DevicePart`: the step on some tensors, of so many elements each.

    There are int64 ``[T, 1 + number of states]`` addresses of parameters and states, and ``[T]`` of
    gradients. ``constants`` are those that ``rule.factor`` takes.
    """

    def __init__(
        self, kernel: Kernel, addresses: np.ndarray, gradients: np.ndarray, sizes: np.ndarray,
        constants: Constants = (),
    ) -> None:  # fmt: skip
        self._chunks = Chunks(chunk_of(kernel), np.column_stack([gradients, addresses]), sizes)
        self._table, self.n_words, places = 0, self._chunks.n_words, Places()
        self._update, self._reduce = dense_kernel(kernel), None
        self.loops = [self._update]
        if kernel.rule.factor:
            self._reduce = chunk_sums_kernel(kernel)
            self._totals = Totals(kernel, TensorRow, constants, self._chunks.n_tensors)
            self._at_parts = places.add(8 * self._chunks.n_blocks * kernel.rule.n_measured)
            self._at_new = places.add(self._totals.scratch_bytes)
            self.loops += [self._reduce, *self._totals.loops]
        self.scratch_bytes = places.size

    def put(self, addresses: np.ndarray, gradients: np.ndarray) -> None:
        """Take over where the tensors and their gradients lie now."""
        self._chunks.put(gradients, addresses)

    def words(self, place: int, hp: Any) -> np.ndarray:
        self._table = place
        return self._chunks.words(hp)

    def enqueue(self, call: LaunchContext) -> None:
        chunks, table = self._chunks, (self._table, self._chunks.n_tensors)
        if not self._reduce:
            chunks.launch(self._update, call.stream, *table, call.guard)
            return
        parts, new = call.scratch + self._at_parts, call.scratch + self._at_new
        # In the order of the stream: sums, what follows from them, the update with the changed
        # scalars, and at last new states of tensors, whose old ones the update was given.
        chunks.launch(self._reduce, call.stream, *table, parts, call.guard)
        self._totals.follow(self._table, chunks.n_blocks, parts, new, call)
        chunks.launch(self._update, call.stream, *table, call.guard)
        self._totals.store(self._table, new, call)
