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
from ..device.records import Word, Words, table_of
from .tiles import are_aligned, length_of

THREADS = GEOMETRY.dense.threads


class TensorRow(NamedTuple):
    """A tensor of a launch.

    Attributes:
        g: address of the gradient.
        hp: of the scalars.
        size: elements.
        first_block: the number of its first block.
        is_aligned: whether tiles are moved by vectors.
        arrays: addresses of the parameter, then of its states.
    """

    g: Word
    hp: Word
    size: Word
    first_block: Word
    is_aligned: Word
    arrays: Words


def chunk_of(kernel: Kernel) -> int:
    """Elements of a chunk: a multiple of the length of a tile, so that only ends are single."""
    return THREADS * length_of(kernel) * GEOMETRY.dense.tiles


class Chunks:
    """The tensors of a launch; those of no elements are left out.

    Args:
        kernel: the rule and its storage types.
        addresses: int64 ``[T, 1 + number of states]``, on the device.
        gradients: int64 ``[T]``, on the device.
        sizes: int64 ``[T]``: elements of each tensor.

    Attributes:
        n_tensors: rows of the table.
        n_words: of the table.
        counts: int64 ``[T]``: blocks of each tensor.
        n_blocks: of all.
    """

    def __init__(
        self, kernel: Kernel, addresses: np.ndarray, gradients: np.ndarray, sizes: np.ndarray
    ) -> None:
        self._known = known = np.flatnonzero(sizes)
        self.counts = -(-sizes // chunk_of(kernel))
        ends, g, arrays = np.cumsum(self.counts), gradients[known], addresses[known]
        places = np.column_stack([g, arrays])
        self._rows = TensorRow(
            g, 0, sizes[known], (ends - self.counts)[known], are_aligned(places), arrays
        )
        self.n_tensors, self.n_blocks = len(known), int(self.counts.sum())
        self.n_words = self.n_tensors * (len(TensorRow._fields) - 1 + addresses.shape[1])

    def words(self, hp: np.ndarray) -> np.ndarray:
        """The int64 table; ``hp`` are the addresses of the scalars of each tensor."""
        return table_of(self._rows._replace(hp=hp[self._known]), self.n_tensors).ravel()

    def launch(self, loop: Any, stream: Any, *arguments: int) -> None:
        """Enqueue a loop with a block for each chunk."""
        if self.n_blocks:
            on_grid(loop, self.n_blocks, THREADS, stream)(*arguments)
