"""Layout of matrices: what each thread of a device has of them, and where their sums lie.

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

from ...tables import MatrixTensor
from ..dense.tiles import are_aligned
from ..device.backend import GEOMETRY
from ..device.memory import Places
from ..device.records import Word, Words, table_of

CUT = GEOMETRY.matrices
THREADS = CUT.threads


class TileRow(NamedTuple):
    """A tensor cut into tiles; begins as `step.TensorRow`. Sums and factors lie in scratch."""

    hp: Word
    size: Word
    first_block: Word
    is_aligned: Word
    matrices: Word
    height: Word  # rows of a matrix
    width: Word  # columns of a matrix
    log_across: Word  # logarithm of the threads across a tile
    log_down: Word  # of those down a tile
    tile_height: Word
    tiles_down: Word  # of a matrix
    tiles_across: Word  # of a matrix
    row_sums: Word  # float64 [matrices, tiles_across, height]
    column_sums: Word  # float64 [matrices, tiles_down, width]
    row_factors: Word  # [matrices, height], of the arithmetic
    column_factors: Word  # [matrices, width]
    arrays: Words  # the gradient, the parameter and its states


class LineRow(NamedTuple):
    """The rows of a tensor, or its columns; those of rows come first in the table."""

    sums: Word  # in scratch
    state: Word  # address
    factors: Word  # in scratch
    hp: Word
    matrices: Word
    length: Word  # lines of a matrix
    elements: Word  # of a line
    parts: Word  # sums of a line
    log_lanes: Word  # logarithm of the lines that a group of threads has
    log_parts: Word  # of the threads that share a line
    segments: Word  # groups of a matrix
    chunks: Word  # groups of a matrix once its mean is known; of rows alone
    totals: Word = 0  # in scratch, float64 [matrices, segments]: sums of states; 0 for columns
    first_block: Word = 0
    first_chunk_block: Word = 0  # of the loop over chunks


class MatrixTables:
    """The tables, which stay from step to step; ``length`` is that of a thread's widest loads."""

    def __init__(self, tensors: Sequence[MatrixTensor], length: int, real_bytes: int) -> None:
        self.n_tensors, self._length, places = len(tensors), length, Places()
        layouts = [_laid_out(tensor, length, real_bytes, places) for tensor in tensors]
        tiles, rows, columns = (list(records) for records in zip(*layouts, strict=True))
        tiles, lines, rows = (_columns(x) for x in (tiles, rows + columns, rows))
        units = tiles.matrices * tiles.tiles_down * tiles.tiles_across
        first, self.n_blocks = _blocks(units, tiles.log_across + tiles.log_down)
        self.tiles = tiles._replace(first_block=first)
        units = lines.matrices * lines.segments
        first, self.n_line_blocks = _blocks(units, lines.log_lanes + lines.log_parts)
        logs = np.where(rows.segments > 1, _log(THREADS), rows.log_lanes)
        first_of_rows, self.n_chunk_blocks = _blocks(rows.matrices * rows.chunks, logs)
        self.lines = lines._replace(
            first_block=first,
            first_chunk_block=np.append(first_of_rows, np.zeros_like(first_of_rows)),
        )
        self.scratch_bytes = places.size

    def words(self, gradients: np.ndarray, hp: np.ndarray) -> np.ndarray:
        """Both tables, one after the other; int64 ``[T]`` addresses of gradients and scalars."""
        arrays = np.column_stack([gradients, self.tiles.arrays])
        tiled = arrays[:, :-2]  # but for the states of rows and columns
        is_aligned = (self.tiles.width % self._length == 0) & are_aligned(tiled)
        tiles = self.tiles._replace(hp=hp, is_aligned=is_aligned, arrays=arrays)
        lines = self.lines._replace(hp=np.tile(hp, 2))
        tables = table_of(tiles, self.n_tensors), table_of(lines, 2 * self.n_tensors)
        return np.concatenate(tables)


def _columns(rows: Sequence[Any]) -> Any:
    return type(rows[0])(*map(np.array, zip(*rows, strict=True)))


def _laid_out(
    tensor: MatrixTensor, length: int, real_bytes: int, places: Places
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
        0, matrices * height * width, 0, 0, matrices, height, width, *cut, *own, tensor.addresses
    )
    rows = _lines((row_sums, tensor.row_state, row_factors), matrices, height, width, across)
    column_places = column_sums, tensor.column_state, column_factors
    columns = _lines(column_places, matrices, width, height, down)
    totals = places.add(8 * matrices * int(rows.segments))
    return tile, rows._replace(totals=totals), columns


def _cut(tensor: MatrixTensor, length: int) -> tuple[int, int, int, int, int]:
    """Logarithms of the threads across and down, height of a tile, tiles down and across."""
    vectors = -(-tensor.width // length)
    # Decided by shapes, not by the device that is there: the cut is part of the order of the sums.
    across = min(_power(vectors), CUT.across)
    down = min(_power(-(-tensor.height // CUT.rounds)), THREADS // across)
    across = min(_power(vectors), THREADS // down)  # a low matrix has more of them
    band, tiles_across = down * CUT.rounds, -(-vectors // across)
    bands = -(-tensor.height // band)
    n_tiles = tensor.matrices * bands * tiles_across
    tile_bands = max(1, min(bands, CUT.most_bands, n_tiles // CUT.many_tiles))
    return _log(across), _log(down), tile_bands * band, -(-bands // tile_bands), tiles_across


def _lines(
    places: tuple[int, int, int], matrices: int, length: int, elements: int, parts: int
) -> LineRow:
    """The record of the rows, or the columns, of a tensor; ``places`` are its first fields."""
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
