"""How many bytes a step must move, as formulas of its sizes: the table of docs/bytes.md.

Every array that a step updates is read once and written once; a gradient is read once. What a
kernel needs for itself (the sorted indices, for one) does not count: it is not part of the task.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INDEX, LINE = 8, 64  # bytes of an int64 index, and of a cache line


@dataclass(frozen=True)
class Traffic:
    """How many arrays of a parameter's size one step moves."""

    updated: int  # read and written: the parameter and its states
    read: int = 1  # only read: the gradient
    written: int = 0  # only written
    # For each pass before the update, which needs sums over whole tensors, how many arrays
    # it reads: the gradient; with 2, the parameter too; then the states.
    passes: tuple[int, ...] = ()
    of_rows: int = 0  # states of 4 bytes a row, read and written

    @property
    def arrays(self) -> int:
        """Arrays that pass through memory, one that is updated counted twice."""
        return 2 * self.updated + self.read + self.written + sum(self.passes)

    def dense(self, elements: int, itemsize: int) -> int:
        """A dense step; float32 Adam (three updated arrays): 28 bytes an element.

        States of rows do not count: a tensor may be one row.
        """
        return elements * itemsize * self.arrays

    def every_row(self, N: int, D: int, B: int, itemsize: int) -> int:
        """A row-sparse gradient, and all N rows take the step."""
        return 2 * N * self._row(D, itemsize) + batch(B, D, itemsize)

    def touched_rows(self, unique: int, D: int, B: int, itemsize: int) -> int:
        """A row-sparse gradient, and the ``unique`` different rows in it take the step."""
        return 2 * unique * self._row(D, itemsize) + batch(B, D, itemsize)

    def _row(self, D: int, itemsize: int) -> int:
        """A row of all that is updated."""
        return self.updated * D * itemsize + self.of_rows * 4


def gathered(unique: int, D: int, B: int, itemsize: int) -> int:
    """A lookup: ``unique`` different rows are read, and B are written, by an index each."""
    return (unique + B) * D * itemsize + B * INDEX


def batch(B: int, D: int, itemsize: int) -> int:
    """A row-sparse gradient: ``[B, D]`` values and ``[B]`` indices, read; of bags, offsets."""
    return B * (D * itemsize + INDEX)


def row_lines(rows: np.ndarray, D: int, itemsize: int = 4, begin: int = 0) -> int:
    """Cache lines of some rows of a ``[N, D]`` array that begins so many bytes after one.

    Each row counts the lines that it spans; lines that two rows share count for both, as
    scattered accesses meet them at different times.
    """
    first = (begin + rows * (D * itemsize)) // LINE
    last = (begin + (rows + 1) * (D * itemsize) - 1) // LINE
    return int((last - first + 1).sum())


def lazy_lines(indices: np.ndarray, D: int, variables: int = 3) -> int:
    """Cache lines that a lazy float32 row step touches, one that is read and written twice.

    Per occurrence the lines of its gradient row, and its share of the indices; per different
    row the lines of the row in each variable, read and written.
    """
    B = indices.size
    gradient = row_lines(np.arange(B, dtype=np.int64), D)
    return gradient + -(-B * INDEX // LINE) + 2 * variables * row_lines(np.unique(indices), D)
