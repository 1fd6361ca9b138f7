"""Counts of updates, compiled: for one parameter NumPy takes longer than an SGD step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from .compiler.compile import NativeFunction, part
from .compiler.intrinsics import as_pointer
from .compiler.machine import PythonEntry
from .compiler.records import int64s
from .headers.arrays import address_of
from .threads.parallel import Arguments, Loop


def _compare_counts(counts, n):
    # All are read, without an early end, so that the loop is vectorised.
    every, n_others = int64s(counts, n), 0
    for i in range(every.size):
        n_others += every[i] != every[0]
    return n_others == 0


are_equal_at = NativeFunction(_compare_counts, "counts are equal", PythonEntry(returns=True))


def are_equal(counts: np.ndarray) -> bool:
    """Whether all of at least one int64 count are equal."""
    return bool(are_equal_at.call(address_of(counts), len(counts)))


class CountCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    counts: np.ndarray
    positions: np.ndarray | None  # [n]; None: the first n counts
    n: int
    total: np.ndarray | None  # int32 [1]


@part(CountCall)
def _count_up(index, slot, c):
    if c.positions == 0:
        every = int64s(c.counts, c.n)
        for i in range(every.size):
            every[i] += 1
    else:
        positions = int64s(c.positions, c.n)
        for i in range(positions.size):
            # The number of counts is not passed; there are as many as this one needs.
            int64s(c.counts, positions[i] + 1)[positions[i]] += 1
    if c.total != 0:
        carray(as_pointer(c.total), 1, np.int32)[0] += 1


class Count:
    """Adding 1 to int64 counts (all, or those at positions) and to an int32 total; see `loops`."""

    def __init__(
        self, counts: np.ndarray, positions: np.ndarray | None = None,
        total: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        n = len(counts if positions is None else positions)
        self._call = Arguments(CountCall(counts, positions, n, total))
        self.loops = (Loop(_count_up.address, 1, self._call.address, 1),)
