"""How many bytes a step must move, as formulas of its sizes: the table of docs/bytes.md.

Every array that a step updates is read once and written once; a gradient is read once. What a
kernel needs for itself (the sorted indices, for one) does not count: it is not part of the task.
"""

from __future__ import annotations

from dataclasses import dataclass

INDEX = 8  # bytes of an int64 index


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
