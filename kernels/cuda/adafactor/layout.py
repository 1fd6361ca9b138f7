"""How Adafactor's matrices are dealt to the threads of a device, and where their sums lie.

A tile of a matrix is worked on by a group of ``2**LOG_ACROSS * 2**LOG_DOWN`` threads. A thread has
as many columns as its widest loads bring, and every ``2**LOG_DOWN``-th row. A block is one such
group where the matrix is large, and several, each with a matrix of its own, where it is small. The
cut depends on shapes and storage types alone. The order of a sum depends on them, and on whether
rows are aligned.

What follows from the sums of rows and columns is computed line by line (`line_table`): a line has
as many sums as there are tiles along it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...tables import FactoredTensor
from ..dense import tensor_table
from ..dense.tensor_table import FIRST_BLOCK, HP, IS_ALIGNED, S0, SIZE, G, W
from ..device.memory import Places
from . import line_table

THREADS = 256
ROUNDS = 8  # rows of a thread whose sums are added up at once
_LANES = 32  # threads across a matrix that is high enough: a warp reads one row
_ENOUGH_TILES = 1_024  # of a tensor: with more of them, each takes several rounds
_MOST_BANDS = 16
_NEIGHBOURS = 8  # lines next to each other that a block has at least
_CHUNK = 8  # lines of a thread, where a mean has become known
_ALIGN = 16  # bytes

# Columns of the table of tensors, int64 [T, COLUMNS], after those of every table of tensors.
(
    MATRICES,
    HEIGHT,
    WIDTH,
    LOG_ACROSS,
    LOG_DOWN,
    TILE_HEIGHT,
    TILES_DOWN,
    TILES_ACROSS,
    ROW_SUMS,  # float64 [matrices, TILES_ACROSS, height]
    COLUMN_SUMS,  # float64 [matrices, TILES_DOWN, width]
    ROW_FACTORS,  # [matrices, height], of the arithmetic
    COLUMN_FACTORS,  # [matrices, width]
    COLUMNS,
) = range(tensor_table.COLUMNS, tensor_table.COLUMNS + 13)
ROW_BYTES = 8 * COLUMNS


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
        size: bytes of both tables.
        scratch: bytes of sums and factors.
    """

    def __init__(self, tensors: Sequence[FactoredTensor], length: int, real_bytes: int) -> None:
        self.n_tensors = len(tensors)
        self._length, self._real_bytes = length, real_bytes
        self._tiles = np.zeros((len(tensors), COLUMNS), np.int64)
        self._lines = np.zeros((2 * len(tensors), line_table.COLUMNS), np.int64)
        places = Places()
        for t, tensor in enumerate(tensors):
            self._add(t, tensor, places)
        self._number_blocks()
        self.size, self.scratch = self._tiles.nbytes + self._lines.nbytes, places.size

    def _add(self, t: int, tensor: FactoredTensor, places: Places) -> None:
        matrices, height, width = tensor.matrices, tensor.height, tensor.width
        cut = _cut(tensor, self._length)
        _, _, _, down, across = cut
        of_rows, of_columns = matrices * height, matrices * width
        row_sums, column_sums = places.add(8 * of_rows * across), places.add(8 * of_columns * down)
        row_factors = places.add(self._real_bytes * of_rows)
        column_factors = places.add(self._real_bytes * of_columns)
        tile, rows, columns = self._tiles[t], self._lines[t], self._lines[t + self.n_tensors]
        tile[W], tile[SIZE] = tensor.addresses[0], matrices * height * width
        tile[S0 : S0 + len(tensor.addresses) - 1] = tensor.addresses[1:]
        own = (row_sums, column_sums, row_factors, column_factors)
        tile[MATRICES:COLUMNS] = (matrices, height, width, *cut, *own)
        _fill_lines(rows, (row_sums, tensor.row_state, row_factors), (height, width), across)
        states = (column_sums, tensor.column_state, column_factors)
        _fill_lines(columns, states, (width, height), down)
        rows[line_table.MATRICES] = columns[line_table.MATRICES] = matrices
        rows[line_table.TOTALS] = places.add(8 * matrices * int(rows[line_table.SEGMENTS]))

    def _number_blocks(self) -> None:
        tiles, lines = self._tiles, self._lines
        units = tiles[:, MATRICES] * tiles[:, TILES_DOWN] * tiles[:, TILES_ACROSS]
        logs = tiles[:, LOG_ACROSS] + tiles[:, LOG_DOWN]
        tiles[:, FIRST_BLOCK], self.n_blocks = _blocks(units, logs)
        units = lines[:, line_table.MATRICES] * lines[:, line_table.SEGMENTS]
        logs = lines[:, line_table.LOG_LANES] + lines[:, line_table.LOG_PARTS]
        lines[:, line_table.FIRST_BLOCK], self.n_line_blocks = _blocks(units, logs)
        rows = lines[: self.n_tensors]
        units = rows[:, line_table.MATRICES] * rows[:, line_table.CHUNKS]
        own = rows[:, line_table.LOG_LANES]
        logs = np.where(rows[:, line_table.SEGMENTS] > 1, _log(THREADS), own)
        rows[:, line_table.FIRST_CHUNK_BLOCK], self.n_chunk_blocks = _blocks(units, logs)

    def at(self, scratch: int, gradients: np.ndarray, hp_addresses: np.ndarray) -> np.ndarray:
        """Both tables, one after the other, as they will lie on the device.

        Args:
            scratch: address of the room for sums and factors.
            gradients: int64 ``[T]``, on the device.
            hp_addresses: int64 ``[T]``: where the scalars of each tensor will lie there.
        """
        tiles, lines = self._tiles.copy(), self._lines.copy()
        tiles[:, ROW_SUMS:COLUMNS] += scratch
        tiles[:, G], tiles[:, HP] = gradients, hp_addresses
        addresses = tiles[:, [W, G, S0]]
        rows_fit = tiles[:, WIDTH] % self._length == 0
        tiles[:, IS_ALIGNED] = rows_fit & (addresses % _ALIGN == 0).all(1)
        lines[:, [line_table.SUMS, line_table.FACTORS]] += scratch
        lines[: self.n_tensors, line_table.TOTALS] += scratch
        lines[:, line_table.HP] = np.tile(hp_addresses, 2)
        return np.concatenate([tiles.reshape(-1), lines.reshape(-1)])


def _cut(tensor: FactoredTensor, length: int) -> tuple[int, int, int, int, int]:
    """Logarithms of the threads across and down, height of a tile, tiles down and across."""
    vectors = -(-tensor.width // length)
    across = min(_power(vectors), _LANES)
    down = min(_power(-(-tensor.height // ROUNDS)), THREADS // across)
    across = min(_power(vectors), THREADS // down)  # a low matrix has more of them
    band, tiles_across = down * ROUNDS, -(-vectors // across)
    bands = -(-tensor.height // band)
    n_tiles = tensor.matrices * bands * tiles_across
    of_tile = max(1, min(bands, _MOST_BANDS, n_tiles // _ENOUGH_TILES))
    return _log(across), _log(down), of_tile * band, -(-bands // of_tile), tiles_across


def _fill_lines(
    row: np.ndarray, places: tuple[int, int, int], shape: tuple[int, int], parts: int
) -> None:
    """What is known of the rows, or the columns, of the matrices of a tensor.

    Args:
        row: of the table.
        places: of sums, states and factors.
        shape: lines of a matrix, and elements of a line.
        parts: sums of a line.
    """
    length = shape[0]
    sharing = max(1, min(_power(parts // 4 + 1) // 2, THREADS // _NEIGHBOURS))
    lanes = THREADS // sharing if parts > 1 else min(_power(length), THREADS)
    segments = -(-length // lanes)
    row[[line_table.SUMS, line_table.STATE, line_table.FACTORS]] = places
    row[[line_table.LENGTH, line_table.COUNT]] = shape
    row[[line_table.PARTS, line_table.SEGMENTS]] = parts, segments
    row[[line_table.LOG_LANES, line_table.LOG_PARTS]] = _log(lanes), _log(sharing)
    row[line_table.CHUNKS] = -(-length // (THREADS * _CHUNK)) if segments > 1 else 1


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
