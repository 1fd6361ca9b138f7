"""Geometry of launches: the numbers by which work is dealt to the threads of a device.

The order of some sums follows from them, so they are the same on every device. `backend` has the
one that is used; that of the simulator has small blocks.
"""

from __future__ import annotations

from typing import NamedTuple


class ChunkGeometry(NamedTuple):
    """Arrays are cut into chunks, one for a block."""

    threads: int
    tiles: int  # of a thread
    most: int = 0  # chunks of a row, where the rows of a matrix are cut


class MatrixGeometry(NamedTuple):
    """Matrices are cut into tiles, and their lines into segments (`matrices.layout`)."""

    threads: int = 256
    rounds: int = 8  # rows of a thread whose sums are added up at once
    across: int = 32  # threads across a matrix that is high enough: a warp reads one row
    many_tiles: int = 1_024  # of a tensor: with more of them, each takes several rounds
    most_bands: int = 16
    neighbours: int = 8  # lines next to each other that a block has at least
    chunk: int = 8  # lines of a thread, where a mean has become known


class SortGeometry(NamedTuple):
    """A tile of keys is sorted by a block, one digit a pass (`rows.sort`)."""

    digit_bits: int = 8  # of a pass
    split_bits: int = 4  # of a digit that a tile is sorted by at a time
    threads: int = 256  # of a block; a divisor of the number of digits
    group: int = 16  # threads whose values one thread adds up: best the root of all
    keys: int = 8  # of a thread
    counts: int = 4  # of a thread, in a round of `scan_kernel`
    line_bits: int = 4  # of the words between two that are left out in shared memory


class Geometry(NamedTuple):
    """The cuts of all loops; a number alone is that of the threads of a block."""

    dense: ChunkGeometry = ChunkGeometry(256, 4)
    finite: ChunkGeometry = ChunkGeometry(256, 8)
    central: ChunkGeometry = ChunkGeometry(256, 8, most=4_096)
    rows: int = 256  # and of copies
    hot: int = 64  # of rows that occur often
    totals: int = 256  # where a block adds up the sums of others
    scalars: int = 64
    matrices: MatrixGeometry = MatrixGeometry()
    sort: SortGeometry = SortGeometry()
