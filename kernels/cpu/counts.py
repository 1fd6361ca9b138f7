"""Counts of updates, compiled: for one parameter NumPy takes longer than an SGD step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from .compile import NativeFunction, part
from .headers.arrays import address_of
from .intrinsics import as_pointer
from .machine import Entry
from .parallel import Arguments, Loop
from .records import int64s


def _compare_counts(counts, n):
    every, n_others = int64s(counts, n), 0
    for i in range(every.size):
        n_others += every[i] != every[0]
    return n_others == 0


are_equal_at = NativeFunction(_compare_counts, "counts are equal", Entry(returns=True))


def are_equal(counts: np.ndarray) -> bool:
    """Whether all of at least one int64 count are equal."""
    return bool(are_equal_at.call(address_of(counts), len(counts)))


def _read_floats(addresses, n, out):
    values, places, n_others = carray(as_pointer(out), n, np.float32), int64s(addresses, n), 0
    for i in range(n):
        values[i] = carray(as_pointer(places[i]), 1, np.float32)[0]
        n_others += values[i] != values[0]
    return n_others == 0


are_equal_floats_at = NativeFunction(_read_floats, "float counts are equal", Entry(returns=True))


class FloatCountCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    addresses: np.ndarray  # [n]: of float32 counts
    n: int


@part(FloatCountCall)
def _count_up_floats(index, slot, c):
    places = int64s(c.addresses, c.n)
    for i in range(places.size):
        carray(as_pointer(places[i]), 1, np.float32)[0] += np.float32(1)


class FloatCount:
    """Adding 1 to float32 counts, each at an address of its own; see `loops`."""

    def __init__(self, addresses: np.ndarray) -> None:
        self.values = np.zeros(len(addresses), np.float32)
        self._call = Arguments(FloatCountCall(addresses, len(addresses)))
        self._read = address_of(addresses), len(addresses), address_of(self.values)
        self.loops = (Loop(_count_up_floats.address, 1, self._call.address, 1),)

    def read(self) -> bool:
        """Fill `values` with the counts; whether all of at least one are equal."""
        return bool(are_equal_floats_at.call(*self._read))


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
            int64s(c.counts, positions[i] + 1)[positions[i]] += 1
    if c.total != 0:
        carray(as_pointer(c.total), 1, np.int32)[0] += 1


class Count:
    """Adding 1 to int64 counts (all, or those at positions) and to an int32 total; see `loops`."""

    def __init__(
        self,
        counts: np.ndarray,
        positions: np.ndarray | None = None,
        total: np.ndarray | None = None,
    ) -> None:
        n = len(counts if positions is None else positions)
        self._call = Arguments(CountCall(counts, positions, n, total))
        self.loops = (Loop(_count_up.address, 1, self._call.address, 1),)
