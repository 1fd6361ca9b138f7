"""Tensors cut into chunks, one for a block, and their table.

What differs from step to step, gradients and scalars, is in the table too, so a step is one copy
to the device and one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...element import Kernel
from ..device.backend import GEOMETRY
from ..device.launch import on_grid
from ..device.records import Word, Words, hp_reader, row_finder, size_of, table_of
from .tiles import are_aligned, by_chunks, length_of

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


def on_chunk(kernel: Kernel, of_tile: Callable[[Kernel, int], Any]) -> Any:
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
    """The tensors of a launch, int64 ``[T, n]`` arrays of ``[T]`` sizes, in chunks of so many.

    Those of no elements are left out.
    """

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
