"""Tensors cut into chunks, one for a block, and their table.

What differs from step to step, gradients and scalars, is in the table too, so a step is one copy
to the device and one launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...element import Kernel
from ..device.backend import GEOMETRY
from ..device.launch import on_grid
from ..device.records import Word, Words, size_of, table_of
from .tiles import are_aligned, length_of

THREADS = GEOMETRY.dense.threads


class TensorRow(NamedTuple):
    """A tensor of a launch."""

    g: Word  # address of the gradient
    hp: Word  # address of the scalars
    size: Word
    first_block: Word
    is_aligned: Word  # whether tiles are moved by vectors
    arrays: Words  # addresses of the parameter, then of its states


def chunk_of(kernel: Kernel) -> int:
    """Elements of a chunk: a multiple of the length of a tile, so that only ends are single."""
    return THREADS * length_of(kernel) * GEOMETRY.dense.tiles


class Chunks:
    """The tensors of a launch; those of no elements are left out.

    Args:
        chunk: elements of a chunk.
        addresses: int64 ``[T, n]``, on the device: of the parameters, then of their states.
        gradients: int64 ``[T]``, on the device.
        sizes: int64 ``[T]``: elements of each tensor.
    """

    def __init__(
        self, chunk: int, addresses: np.ndarray, gradients: np.ndarray, sizes: np.ndarray
    ) -> None:
        self._known = known = np.flatnonzero(sizes)
        self.counts = -(-sizes // chunk)  # blocks of each tensor
        first = np.cumsum(self.counts) - self.counts
        aligned, no_hp = are_aligned(np.column_stack([gradients, addresses])), 0 * sizes
        columns = (gradients, no_hp, sizes, first, aligned, addresses)
        self._rows = TensorRow(*(column[known] for column in columns))
        self.n_tensors, self.n_blocks = len(known), int(self.counts.sum())
        self.n_words = self.n_tensors * size_of(TensorRow, addresses.shape[1]) // 8

    def words(self, hp: np.ndarray) -> np.ndarray:
        """The int64 table; ``hp`` are the addresses of the scalars of each tensor."""
        return table_of(self._rows._replace(hp=hp[self._known]), self.n_tensors)

    def launch(self, loop: Any, threads: int, stream: Any, *arguments: int) -> None:
        """Enqueue a loop with a block for each chunk."""
        if self.n_blocks:
            on_grid(loop, self.n_blocks, threads, stream)(*arguments)
