"""How Adafactor's matrices are dealt to the threads of a device, and where their sums lie.

A tile of a matrix is worked on by a group of ``2**log_across * 2**log_down`` threads. A thread has
as many columns as its widest loads bring, and every ``2**log_down``-th row. A block is one such
group where the matrix is large, and several, each with a matrix of its own, where it is small. The
cut depends on shapes and storage types alone. The order of a sum depends on them, and on whether
rows are aligned.

What follows from the sums of rows and columns is computed line by line: a line is a row or a column
of a matrix, and has as many sums as there are tiles along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...tables import FactoredTensor
from ..dense.tiles import are_aligned
from ..device.backend import GEOMETRY
from ..device.memory import Places
from ..device.records import Word, Words, table_of

CUT = GEOMETRY.matrices
THREADS = CUT.threads


class TileRow(NamedTuple):
    """A tensor cut into tiles, beginning as `chunks.TensorRow`; sums and factors are places.

    Attributes:
        matrices: how many, of ``height`` rows and ``width`` columns.
        log_across: logarithm of the threads across a tile.
        log_down: of those down a tile.
        tile_height: rows of a tile.
        tiles_down: of a matrix.
        tiles_across: of a matrix.
        row_sums: float64 ``[matrices, tiles_across, height]``.
        column_sums: float64 ``[matrices, tiles_down, width]``.
        row_factors: ``[matrices, height]``, of the arithmetic.
        column_factors: ``[matrices, width]``.
        arrays: addresses of the parameter and of the states of its shape.
    """

    g: Word
    hp: Word
    size: Word
    first_block: Word
    is_aligned: Word
    matrices: Word
    height: Word
    width: Word
    log_across: Word
    log_down: Word
    tile_height: Word
    tiles_down: Word
    tiles_across: Word
    row_sums: Word
    column_sums: Word
    row_factors: Word
    column_factors: Word
    arrays: Words


class LineRow(NamedTuple):
    """The rows of a tensor, or its columns; those of rows come first in the table.

    Attributes:
        sums: place of their sums.
        state: address of their state.
        factors: place of their factors.
        hp: address of the scalars.
        matrices: how many.
        length: lines of a matrix.
        elements: of a line.
        parts: sums of a line.
        log_lanes: logarithm of the lines that a group of threads has.
        log_parts: of the threads that share a line.
        segments: groups of a matrix.
        chunks: groups of a matrix once its mean is known; of rows alone.
        totals: place of float64 ``[matrices, segments]``: sums of the states; 0 for columns.
        first_block: the number of the first block.
        first_chunk_block: that of the loop over chunks.
    """

    sums: Word
    state: Word
    factors: Word
    hp: Word
    matrices: Word
    length: Word
    elements: Word
    parts: Word
    log_lanes: Word
    log_parts: Word
    segments: Word
    chunks: Word
    totals: Word = 0
    first_block: Word = 0
    first_chunk_block: Word = 0


class FactoredTables:
    """The tables of a step; what stays the same from step to step.

    Args:
        tensors: at least one, none of them empty; addresses on the device.
        length: elements of a thread's widest loads.
        real_bytes: of an element of the arithmetic.

    Attributes:
        n_tensors: how many.
        n_blocks: of the loops over elements.
        n_line_blocks: of the loop over lines.
        n_chunk_blocks: of the loop over rows.
        tiles: columns of the first table.
        lines: columns of the second one.
        scratch_bytes: of sums and factors.
    """

    def __init__(self, tensors: Sequence[FactoredTensor], length: int, real_bytes: int) -> None:
        self.n_tensors, self._length, places = len(tensors), length, Places()
        of_each = [_laid_out(tensor, length, real_bytes, places) for tensor in tensors]
        tiles, rows, columns = (list(of_all) for of_all in zip(*of_each, strict=True))
        tiles, lines, rows = (_columns(x) for x in (tiles, rows + columns, rows))
        units = tiles.matrices * tiles.tiles_down * tiles.tiles_across
        first, self.n_blocks = _blocks(units, tiles.log_across + tiles.log_down)
        self.tiles = tiles._replace(first_block=first)
        units = lines.matrices * lines.segments
        first, self.n_line_blocks = _blocks(units, lines.log_lanes + lines.log_parts)
        logs = np.where(rows.segments > 1, _log(THREADS), rows.log_lanes)
        of_rows, self.n_chunk_blocks = _blocks(rows.matrices * rows.chunks, logs)
        self.lines = lines._replace(
            first_block=first, first_chunk_block=np.append(of_rows, np.zeros_like(of_rows))
        )
        self.scratch_bytes = places.size

    def words(self, gradients: np.ndarray, hp: np.ndarray) -> np.ndarray:
        """Both tables, one after the other.

        Args:
            gradients: int64 ``[T]``, on the device.
            hp: int64 ``[T]``: addresses of the scalars of each tensor.
        """
        fits = self.tiles.width % self._length == 0
        is_aligned = fits & are_aligned(np.column_stack([gradients, self.tiles.arrays]))
        tiles = self.tiles._replace(g=gradients, hp=hp, is_aligned=is_aligned)
        lines = self.lines._replace(hp=np.tile(hp, 2))
        tables = table_of(tiles, self.n_tensors), table_of(lines, 2 * self.n_tensors)
        return np.concatenate([table.ravel() for table in tables])


def _columns(rows: Sequence[Any]) -> Any:
    return type(rows[0])(*map(np.array, zip(*rows, strict=True)))


def _laid_out(
    tensor: FactoredTensor, length: int, real_bytes: int, places: Places
) -> tuple[TileRow, LineRow, LineRow]:
    """The row of a tensor, and those of its rows and columns."""
    matrices, height, width = tensor.matrices, tensor.height, tensor.width
    cut = _cut(tensor, length)
    _, _, _, down, across = cut
    row_sums = places.add(8 * matrices * height * across)
    column_sums = places.add(8 * matrices * width * down)
    row_factors = places.add(real_bytes * matrices * height)
    column_factors = places.add(real_bytes * matrices * width)
    own = (row_sums, column_sums, row_factors, column_factors)
    tile = TileRow(
        0, 0, matrices * height * width, 0, 0, matrices, height, width, *cut, *own, tensor.addresses
    )
    rows = _lines((row_sums, tensor.row_state, row_factors), matrices, height, width, across)
    of_columns = column_sums, tensor.column_state, column_factors
    columns = _lines(of_columns, matrices, width, height, down)
    totals = places.add(8 * matrices * int(rows.segments))
    return tile, rows._replace(totals=totals), columns


def _cut(tensor: FactoredTensor, length: int) -> tuple[int, int, int, int, int]:
    """Logarithms of the threads across and down, height of a tile, tiles down and across."""
    vectors = -(-tensor.width // length)
    across = min(_power(vectors), CUT.across)
    down = min(_power(-(-tensor.height // CUT.rounds)), THREADS // across)
    across = min(_power(vectors), THREADS // down)  # a low matrix has more of them
    band, tiles_across = down * CUT.rounds, -(-vectors // across)
    bands = -(-tensor.height // band)
    n_tiles = tensor.matrices * bands * tiles_across
    of_tile = max(1, min(bands, CUT.most_bands, n_tiles // CUT.many_tiles))
    return _log(across), _log(down), of_tile * band, -(-bands // of_tile), tiles_across


def _lines(
    places: tuple[int, int, int], matrices: int, length: int, elements: int, parts: int
) -> LineRow:
    """What is known of the rows, or the columns, of a tensor; ``places`` are the first fields."""
    sharing = max(1, min(_power(parts // 4 + 1) // 2, THREADS // CUT.neighbours))
    lanes = THREADS // sharing if parts > 1 else min(_power(length), THREADS)
    segments = -(-length // lanes)
    chunks = -(-length // (THREADS * CUT.chunk)) if segments > 1 else 1
    logs = _log(lanes), _log(sharing)
    return LineRow(*places, 0, matrices, length, elements, parts, *logs, segments, chunks)


def _blocks(units: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, int]:
    """The first block of each tensor, and how many all have, for groups of ``2**logs`` threads."""
    blocks = -(-units // (THREADS >> logs))
    ends = np.cumsum(blocks)
    return ends - blocks, int(ends[-1])


def _power(n: int) -> int:
    """The least power of 2 that is at least ``n`` >= 1."""
    return 1 << (n - 1).bit_length()


def _log(n: int) -> int:
    return n.bit_length() - 1
