"""Counts of updates, compiled: for one parameter NumPy takes longer than an SGD step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from ..compiler.compile import NativeFunction, part
from ..compiler.intrinsics import as_pointer
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from ..headers.arrays import address_of
from .parallel import Arguments, Loop


def _compare_counts(counts, n):
    every, n_others = int64s(counts, n), 0
    for i in range(every.size):
        n_others += every[i] != every[0]
    return n_others == 0


are_equal_at = NativeFunction(_compare_counts, "counts are equal", PythonEntry(returns=True))


def are_equal(counts: np.ndarray) -> bool:
    """Whether all of at least one int64 count are equal."""
    return bool(are_equal_at.call(address_of(counts), len(counts)))


def _read_floats(addresses, n, out):
    values, places, n_others = carray(as_pointer(out), n, np.float32), int64s(addresses, n), 0
    for i in range(n):
        values[i] = carray(as_pointer(places[i]), 1, np.float32)[0]
        n_others += values[i] != values[0]
    return n_others == 0


are_equal_floats_at = NativeFunction(
    _read_floats, "float counts are equal", PythonEntry(returns=True, holds_gil=True)
)


class TensorCountCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    counts: np.ndarray  # [n]: addresses of float32 counts of updates
    n: int
    versions: np.ndarray  # [n_versions]: addresses of uint32 counts of changes, or 0
    n_versions: int


@part(TensorCountCall)
def _count_up_tensors(index, slot, c):
    places, versions = int64s(c.counts, c.n), int64s(c.versions, c.n_versions)
    for i in range(places.size):
        carray(as_pointer(places[i]), 1, np.float32)[0] += np.float32(1)
    for i in range(versions.size):
        if versions[i] != 0:
            carray(as_pointer(versions[i]), 1, np.uint32)[0] += np.uint32(1)


class TensorCount:
    """Counting a step of PyTorch's tensors; see `loops`.

    Float32 counts of updates grow by 1, and so do the counts of changes, by which autograd finds
    that a tensor is not any more what it saved. ``counts`` and ``versions`` are int64 addresses of
    both, of which each step has as many as `cut` says.
    """

    def __init__(self, counts: np.ndarray, versions: np.ndarray) -> None:
        self.values = array("f", bytes(4 * len(counts)))  # whose numbers are those of Python
        self._call = Arguments(TensorCountCall(counts, 0, versions, 0))
        self._places = address_of(counts), self.values.buffer_info()[0]
        self.loops = (Loop(_count_up_tensors.address, 1, self._call.address, 1),)
        self.n = 0

    def cut(self, n_counts: int, n_versions: int) -> None:
        """Take so many of either, the first ones."""
        self.n = self._call.words[_N_COUNTS] = n_counts
        self._call.words[_N_VERSIONS] = n_versions

    def read(self) -> bool:
        """Fill `values` with the counts of updates; whether all of at least one are equal."""
        counts, values = self._places
        return bool(are_equal_floats_at.call(counts, self.n, values))


_N_COUNTS, _N_VERSIONS = (TensorCountCall._fields.index(name) for name in ("n", "n_versions"))


class NumberCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    numbers: np.ndarray  # [n, 3] of `_Number`
    n: int


class _Number(NamedTuple):
    """A number that goes elsewhere, all ``int64``."""

    target: int
    source: int
    n_bytes: int


_numbers_at = records(_Number)


@part(NumberCall)
def _write_numbers(index, slot, c):
    numbers = _numbers_at(c.numbers, c.n)
    for i in range(numbers.size):
        number = numbers[i]
        target = carray(as_pointer(number.target), number.n_bytes, np.uint8)
        source = carray(as_pointer(number.source), number.n_bytes, np.uint8)
        for k in range(target.size):
            target[k] = source[k]


class NumberWrite:
    """Writing single numbers with a step: arrays of one element, to addresses; see `loops`."""

    def __init__(self, numbers: Sequence[tuple[int, np.ndarray]]) -> None:
        rows = [_Number(target, address_of(x), x.itemsize) for target, x in numbers]
        self._keep = numbers
        self._call = Arguments(NumberCall(np.array(rows, np.int64), len(rows)))
        self.loops = (Loop(_write_numbers.address, 1, self._call.address, 1),)

    def release(self) -> None:
        """No memory was borrowed."""


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
            # The number of counts is not told; there are as many as this one needs.
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
