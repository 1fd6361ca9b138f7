"""How many bytes a step must move, as formulas of its sizes.

All figures are for float32 and int64 indices. A variable (parameter or state) that is updated
counts twice, since it is read and written; a gradient counts once. What a kernel needs for
itself (the sorted indices, for one) does not count: it is not part of the task.
"""

from __future__ import annotations

import numpy as np

FLOAT, INDEX, LINE = 4, 8, 64


def dense(elements: int, variables: int) -> int:
    """A dense step: ``variables`` read and written, the gradient read.

    Adam has w, m, v: 28 bytes an element. AMSGrad has vhat too: 36.
    """
    return elements * FLOAT * (2 * variables + 1)


def read(elements: int, arrays: int) -> int:
    """A pass that reads ``arrays`` and writes nothing, such as the norms of LAMB: 16 bytes."""
    return elements * FLOAT * arrays


def sweep(elements: int, variables: int) -> int:
    """Every variable read and written, no gradient: Adam 24 bytes an element."""
    return elements * FLOAT * 2 * variables


def batch(B: int, D: int) -> int:
    """A row-sparse gradient: ``[B, D]`` values and ``[B]`` indices, read."""
    return B * (D * FLOAT + INDEX)


def rows_all(N: int, D: int, B: int, variables: int) -> int:
    """A dense-equivalent row step: the whole table takes the step."""
    return sweep(N * D, variables) + batch(B, D)


def rows_touched(unique: int, D: int, B: int, variables: int) -> int:
    """A lazy row step: ``unique`` different rows take the step."""
    return sweep(unique * D, variables) + batch(B, D)


def row_lines(rows: np.ndarray, D: int) -> int:
    """Cache lines of some rows of a ``[N, D]`` array that starts on a line.

    Each row counts the lines that it spans; lines that two rows share count for both, as
    scattered accesses meet them at different times.
    """
    first = rows * (D * FLOAT) // LINE
    last = ((rows + 1) * (D * FLOAT) - 1) // LINE
    return int((last - first + 1).sum())


def lazy_lines(indices: np.ndarray, D: int, variables: int = 3) -> int:
    """Cache lines that a lazy row step touches, a line that is read and written twice.

    Per occurrence the lines of its gradient row, and its share of the indices; per different
    row the lines of the row in each variable, read and written.
    """
    B = indices.size
    gradient = row_lines(np.arange(B, dtype=np.int64), D)
    return gradient + -(-B * INDEX // LINE) + 2 * variables * row_lines(np.unique(indices), D)
