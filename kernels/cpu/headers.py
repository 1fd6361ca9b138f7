"""Reading many NumPy array headers in one compiled call.

Asking Python for the address, shape and flags of 200 gradients takes longer than the whole
optimizer step. The fields of a NumPy array object lie at fixed places, which every extension
module that was compiled against NumPy relies on; `usable` tests on real arrays that they lie
where this module expects them, and callers go the slow way where it says no.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numba import njit

from ..cache import KernelCache
from .intrinsics import load_int32, load_int64
from .search import last_at_most

_TYPE = 8  # ob_type in PyObject
_HEAD = object.__basicsize__
_DATA, _NDIM, _DIMS, _DESCR, _FLAGS = _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
_C_CONTIGUOUS_ALIGNED = 0x0101


@njit
def _read(objects, array_type, descriptors, first_dim, dims, sizes, begins, ends, addresses):
    """Addresses of arrays that are as expected and lie outside of the given memory.

    Returns the first array that is not as expected, or -1.
    """
    for k in range(objects.size):
        a = objects[k]
        if load_int64(a + _TYPE) != array_type or load_int64(a + _DESCR) != descriptors[k]:
            return k
        flags = load_int32(a + _FLAGS)
        ndim = first_dim[k + 1] - first_dim[k]
        if (flags & _C_CONTIGUOUS_ALIGNED) != _C_CONTIGUOUS_ALIGNED or load_int32(
            a + _NDIM
        ) != ndim:
            return k
        shape = load_int64(a + _DIMS)
        for d in range(ndim):
            if load_int64(shape + 8 * d) != dims[first_dim[k] + d]:
                return k
        begin = load_int64(a + _DATA)
        end = begin + sizes[k]
        # The memory does not overlap itself: the last stretch that begins before the array
        # ends decides.
        last = last_at_most(begins, begins.size, end - 1)
        if begins.size > 0 and begins[last] < end and ends[last] > begin and end > begin:
            return k
        addresses[k] = begin
    return -1


_read._cache = KernelCache("array headers")


class Expected:
    """What a list of arrays should be: exactly ``ndarray``, these dtypes and shapes.

    Args:
        dtypes: the dtype of each array.
        shapes: the shape of each array.
    """

    def __init__(self, dtypes: Sequence[np.dtype], shapes: Sequence[tuple[int, ...]]) -> None:
        self._dtypes = list(dtypes)  # the identities below stay valid while these live
        self._descriptors = np.array([id(d) for d in dtypes], np.int64)
        self._first_dim = np.cumsum([0, *(len(s) for s in shapes)], dtype=np.int64)
        self._dims = np.array([n for shape in shapes for n in shape], np.int64)
        sizes = [math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
        self._sizes = np.array(sizes, np.int64)

    def addresses(
        self, arrays: Sequence[np.ndarray], begins: np.ndarray, ends: np.ndarray
    ) -> np.ndarray | None:
        """The addresses of C-contiguous, aligned ``arrays`` outside of some memory.

        Args:
            arrays: the arrays.
            begins: int64: where stretches of memory begin, in order and without overlap.
            ends: int64: where they end.

        Returns:
            int64 addresses, or None if an array is not as expected.
        """
        addresses = np.empty(len(arrays), np.int64)
        offender = _read(
            np.fromiter(map(id, arrays), np.int64, len(arrays)),
            id(np.ndarray),
            self._descriptors,
            self._first_dim,
            self._dims,
            self._sizes,
            begins,
            ends,
            addresses,
        )
        return addresses if offender < 0 else None


@njit
def _data_pointers(objects):
    for k in range(objects.size):
        objects[k] = load_int64(objects[k] + _DATA)


_data_pointers._cache = KernelCache("array addresses")


def addresses_of(arrays: Sequence[np.ndarray]) -> list[int]:
    """The addresses of the first elements of ``arrays``, which are NumPy arrays."""
    if not _pointers_are_usable():
        return [array.__array_interface__["data"][0] for array in arrays]
    return _pointers(arrays)


def _pointers(arrays: Sequence[np.ndarray]) -> list[int]:
    objects = np.fromiter(map(id, arrays), np.int64, len(arrays))
    _data_pointers(objects)
    found: list[int] = objects.tolist()
    return found


@cache
def _pointers_are_usable() -> bool:
    """Whether the address lies where this module expects it (tested on arrays)."""
    if not _has_known_objects():
        return False
    base = np.arange(24, dtype=np.float32)
    arrays: list[np.ndarray] = [
        base,
        base[5:9],
        base.reshape(2, 3, 4)[:, 1:],
        np.array(1, np.float64),
    ]
    return _pointers(arrays) == [a.__array_interface__["data"][0] for a in arrays]


def _has_known_objects() -> bool:
    return np.dtype(np.intp).itemsize == 8 and object.__basicsize__ == 16


class _Subclass(np.ndarray):
    """What must be refused, because a subclass may mean something else by its data."""


@cache
def usable() -> bool:
    """Whether the headers of this NumPy and this Python lie as expected (tested on arrays)."""
    if not _has_known_objects():
        return False
    base = np.arange(24, dtype=np.float32)
    good: list[np.ndarray] = [
        base,
        base.reshape(2, 3, 4),
        base[5:9],
        np.array(1, np.float32),
        base[:0],
    ]
    bad: list[np.ndarray] = [
        base[::2],
        base.astype(np.float64),
        base.reshape(4, 6).T,
        base.view(_Subclass),
    ]
    nowhere = np.empty(0, np.int64)

    def read(array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
        return Expected([dtype], [shape]).addresses([array], nowhere, nowhere)

    for array in good:
        found = read(array, array.dtype, array.shape)
        if found is None or found[0] != array.__array_interface__["data"][0]:
            return False
    float32 = np.dtype(np.float32)
    refused = [read(a, float32, a.shape) for a in bad] + [read(base, float32, (23,))]
    return all(found is None for found in refused)
