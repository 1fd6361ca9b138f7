"""Counts of updates in PyTorch's tensors, which grow with a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from .compiler.compile import NativeFunction, part
from .compiler.intrinsics import as_pointer
from .compiler.machine import PythonEntry
from .compiler.records import int64s
from .headers.arrays import address_of
from .threads.parallel import Arguments, Loop


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


@part(TensorCountCall)
def _count_up_tensors(index, slot, c):
    places = int64s(c.counts, c.n)
    for i in range(places.size):
        # Exact up to 2**24, where PyTorch's own counts stop too.
        carray(as_pointer(places[i]), 1, np.float32)[0] += np.float32(1)


class TensorCount:
    """Counting a step of PyTorch's tensors: float32 counts of updates at ``addresses``; see
    `loops`.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        counts, self.n = np.array(addresses, np.int64), len(addresses)
        self.values = array("f", bytes(4 * self.n))  # whose numbers are those of Python
        self._call = Arguments(TensorCountCall(counts, self.n))
        self._places = address_of(counts), self.n, self.values.buffer_info()[0]
        self.loops = (Loop(_count_up_tensors.address, 1, self._call.address, 1),) if self.n else ()

    def read(self) -> bool:
        """Fill `values` with the counts of updates; whether all of at least one are equal."""
        return bool(are_equal_floats_at.call(*self._places))
