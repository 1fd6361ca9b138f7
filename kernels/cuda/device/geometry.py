"""Geometry of launches: the numbers by which work is dealt to the threads of a device.

The order of some sums follows from them, so they are the same on every device. `backend` has the
one that is used.
"""

from __future__ import annotations

from typing import NamedTuple


class ChunkGeometry(NamedTuple):
    """Arrays are cut into chunks, one for a block."""

    threads: int
    tiles: int  # of a thread


class SortGeometry(NamedTuple):
    """A tile of keys is sorted by a block, one digit a pass (`rows.sort`)."""

    digit_bits: int = 8  # of a pass
    split_bits: int = 4  # of a digit that a tile is sorted by at a time
    threads: int = 256  # of a block; a divisor of the number of digits
    group: int = 16  # threads whose values one thread adds up: best the root of all
    keys: int = 8  # of a thread
    counts: int = 4  # of a thread, in a round of `scan_kernel`
    line_bits: int = 4  # of the words between two that are left out in shared memory
    few: int = 16  # tiles at most whose counts each block adds up itself


class Geometry(NamedTuple):
    """The cuts of all loops; a number that says nothing else is that of the threads of a block."""

    dense: ChunkGeometry = ChunkGeometry(256, 4)
    rows: int = 256  # and of copies
    keys: int = 8  # of a thread of rows, where there are more than `many`
    many: int = 1 << 17
    hot: int = 64  # of rows that occur often
    totals: int = 256  # where a block adds up the sums of others
    sort: SortGeometry = SortGeometry()
