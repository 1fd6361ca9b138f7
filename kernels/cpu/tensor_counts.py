"""Counts that PyTorch's tensors have: of updates, and of changes; both grow with a step."""

from __future__ import annotations

from array import array
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
