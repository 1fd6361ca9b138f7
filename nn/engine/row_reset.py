"""Rows of a table that begin anew, or as copies of others, with all that an optimizer keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.rows.write import RowWrite
from ...kernels.cpu.threads import allocation
from ...kernels.keeping import mixed
from ...kernels.quiet import quiet
from ...kernels.state import PARAMETER
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.errors import reject
from ..base.arguments import count
from ..base.arguments import seed as checked_seed

_PART = 1 << 21  # bytes


class RowState(NamedTuple):
    """A state with something for each row of a table, and the number with which it begins."""

    array: np.ndarray
    initial: float | str  # or `PARAMETER`


class UniformRows:
    """New weights of rows: uniform numbers that follow from seed, id and column alone.

    So an id gets the same numbers whenever, wherever and in whatever row it is admitted.

    Args:
        bound: they are in ``[-bound, bound)``.
        seed: an int from 0 to 2**63 - 1.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    >>> import numpy as np
    >>> draw = UniformRows(0.1, seed=3)
    >>> both = draw(np.array([7, 9]), (2, 4))
    >>> np.array_equal(both[1:], draw(np.array([9]), (1, 4)))
    True
    """

    def __init__(self, bound: float, seed: int = 0) -> None:
        self.bound = check.scalar_at_least_0("UniformRows", "bound", bound)
        self.seed = checked_seed("UniformRows", "seed", seed)
        self._key = np.uint64(mixed(self.seed))

    def __call__(self, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of this shape, whose first axis numbers the ids."""
        columns = np.arange(math.prod(shape[1:]), dtype=np.uint64)
        keys = mixed(self._key ^ ids.reshape(-1, 1).astype(np.uint64))
        words = mixed(keys + columns) >> np.uint64(40)  # 24 bits, which a float32 holds
        drawn = words.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        found: np.ndarray = (drawn * np.float32(self.bound)).reshape(shape)
        return found


def grown(array: np.ndarray, rows: int, initial: float | str) -> np.ndarray:
    """A copy with more rows, which begin at a number, or with weights of 0.

    Pages of zeros take no memory before they are used.
    """
    made = allocation.zeros((rows, *array.shape[1:]), array.dtype)
    step = max(1, (_PART * len(array)) // max(1, array.nbytes))
    for begin in range(0, len(array), step):
        part = array[begin : begin + step]
        if part.view(np.uint8).any():
            made[begin : begin + len(part)] = part
    if initial not in (0.0, PARAMETER):
        made[len(array) :] = initial
    return made


def more_rows(where: str, rows: Any, n: int) -> int:
    """A number of rows to which a table of ``n`` rows can grow.

    Raises:
        TypeError, ValueError: it is no int, or out of range.
    """
    count(where, "rows", rows)
    check.in_range(where, "rows", rows, n < rows < 1 << 31, f"{n} < rows < 2**31")
    return int(rows)


def rows_in(where: str, name: str, rows: Any, n: int) -> np.ndarray:
    """Different row numbers in range: int64 ``[n]``.

    Raises:
        TypeError: they are no int32 or int64.
        ValueError: one occurs twice.
        IndexError: one is out of range.
    """
    found = adopt(where, name, rows).reshape(-1)
    check.index_dtype(where, found)
    check.indices_in_range(where, found, n)
    if not (found[1:] > found[:-1]).all() and len(np.unique(found)) < len(found):
        reject(ValueError, where, name, "has a row twice", "different ones", f"{len(found)} rows")
    return np.ascontiguousarray(found, np.int64)


@quiet
def reset(
    where: str, w: np.ndarray, states: Sequence[RowState], rows: Any, weights: Any, ids: Any
) -> RowWrite:
    """Begin rows anew; arguments as those of `FusedOptimizer.reset_rows`.

    Raises: as there.
    """
    at = rows_in(where, "rows", rows, len(w))
    shape = (len(at), *w.shape[1:])
    named = at if ids is None else adopt(where, "ids", ids).reshape(-1)
    if named.shape != at.shape or named.dtype.kind not in "iu":
        expected, got = f"{len(at)} integers", f"{named.dtype} {named.shape}"
        reject(ValueError, where, "ids", "do not fit the rows", expected, got)
    if weights is None:
        whole: np.ndarray = w[at]
    else:
        given = weights(named, shape) if callable(weights) else weights
        whole = np.asarray(adopt(where, "weights", given) if np.ndim(given) else given)
        if whole.shape not in ((), shape):
            reject(ValueError, where, "weights", "have a wrong shape", shape, whole.shape)
        if whole.dtype.kind not in "iuf" and whole.dtype != w.dtype:
            reject(TypeError, where, "weights", "have a wrong dtype", "numbers", whole.dtype)
    whole = np.asarray(whole).astype(w.dtype)  # masters begin as the weights, rounded
    parts = [(w, whole), *((x, whole if own == PARAMETER else own) for x, own in states)]
    made = []
    for x, values in parts:
        filled = np.empty((len(at), *x.shape[1:]), x.dtype)
        filled[...] = values
        made.append((x, filled))
    return RowWrite(at, made)


def copied(where: str, arrays: Sequence[np.ndarray], source: Any, target: Any) -> RowWrite:
    """Copy rows; arguments as those of `FusedOptimizer.copy_rows`.

    Raises: as there.
    """
    n = len(arrays[0])
    to = rows_in(where, "target", target, n)
    of = adopt(where, "source", source).reshape(-1)
    check.index_dtype(where, of)
    check.indices_in_range(where, of, n)
    if len(of) != len(to):
        wrong, expected = "has another length than target", f"{len(to)} rows"
        reject(ValueError, where, "source", wrong, expected, len(of))
    return RowWrite(to, [(x, np.ascontiguousarray(x[of])) for x in arrays])
