"""Reading NumPy array headers without asking NumPy for them.

Asking Python for the address, shape and flags of 200 gradients takes longer than the whole
optimizer step, and the address of a single array, by ``array.ctypes.data``, three times as long
as Adam on 1024 elements. The fields of a NumPy array object lie at fixed places, which every
extension module that was compiled against NumPy relies on; they are tested on real arrays before
they are used, and where they lie elsewhere everything goes the slow way.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from ..storage import STORAGES
from .cache import KernelCache
from .intrinsics import load_int32, load_int64
from .rows.search import overlaps

_TYPE = 8  # ob_type in PyObject
_ARRAY_TYPE = id(np.ndarray)
_HEAD = object.__basicsize__
_DATA, _NDIM, _DIMS, _DESCR, _FLAGS = _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x0001, 0x0100, 0x0400
_C_CONTIGUOUS_ALIGNED = _C_CONTIGUOUS | _ALIGNED
ANY, SAME = -1, -2  # as a dimension: any size, and the size that was last found for `ANY`
# Columns of the table of what is expected: of each array the identity of its dtype and how many
# dimensions it has; then the bytes, but for the dimensions left open, or the place and the object.
_DESCRIPTOR, _N_DIMENSIONS, _N_BYTES, _OBJECT = range(4)
_PLACE = _N_BYTES
_ITEMS = tuple.__basicsize__  # where the pointers to the elements of a tuple begin


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _half_word(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def _lies_as_expected(array: np.ndarray) -> bool:
    """Whether every field that is read here is where it is looked for."""
    a, one = id(array), (array,)
    shape = _word(a + _DIMS)
    flags = _half_word(a + _FLAGS)
    return (
        _word(id(one) + _ITEMS) == a
        and _word(a + _TYPE) == id(type(array))
        and _word(a + _DATA) == array.__array_interface__["data"][0]
        and _half_word(a + _NDIM) == array.ndim
        and tuple(_word(shape + 8 * d) for d in range(array.ndim)) == array.shape
        and _word(a + _DESCR) == id(array.dtype)
        and bool(flags & _C_CONTIGUOUS) == array.flags.c_contiguous
        and bool(flags & _ALIGNED) == array.flags.aligned
        and bool(flags & _WRITEABLE) == array.flags.writeable
    )


def _test_arrays() -> list[np.ndarray]:
    base = np.arange(24, dtype=np.float32)
    read_only = base.astype(np.float64)
    read_only.flags.writeable = False
    unaligned = np.zeros(9, np.uint8)[1:].view(np.float32)
    shaped = base.reshape(2, 3, 4)
    return [base, shaped, base[5:9], base[:0], shaped.T, base[::2], read_only, unaligned]


usable = (
    sys.implementation.name == "cpython"
    and np.dtype(np.intp).itemsize == 8
    and object.__basicsize__ == 16
    and all(_lies_as_expected(array) for array in _test_arrays())
)
"""Whether the headers of this NumPy and this Python lie as this module expects them."""


def address_of(array: np.ndarray) -> int:
    """The address of the first element of an array."""
    if usable:
        return ctypes.c_int64.from_address(id(array) + _DATA).value
    address: int = array.__array_interface__["data"][0]
    return address


@njit
def _is_plain(a, array_type, descriptor, flags, ndim):
    """Whether the object at ``a`` is exactly an ndarray, of this dtype and with these flags."""
    return (
        load_int64(a + _TYPE) == array_type
        and load_int64(a + _DESCR) == descriptor
        and (load_int32(a + _FLAGS) & flags) == flags
        and load_int32(a + _NDIM) == ndim
    )


@njit
def _read(arrays, n, array_type, flags, expected, dims, memory, addresses):
    """Addresses of the ``n`` arrays of a tuple, if they are as expected and lie elsewhere.

    Returns whether all of them are, and those of the further rows of ``expected`` are where and
    as they were, and can be written to.
    """
    first_dim = length = 0
    for k in range(n):
        a = load_int64(arrays + _ITEMS + 8 * k)
        descriptor, ndim = expected[k, _DESCRIPTOR], expected[k, _N_DIMENSIONS]
        n_bytes = expected[k, _N_BYTES]
        if not _is_plain(a, array_type, descriptor, flags, ndim):
            return False
        shape = load_int64(a + _DIMS)
        for d in range(ndim):
            size, wanted = load_int64(shape + 8 * d), dims[first_dim + d]
            if wanted == ANY:
                length = size
            elif size != (length if wanted == SAME else wanted):
                return False
            if wanted < 0:
                n_bytes *= size
        first_dim += ndim
        begin = load_int64(a + _DATA)
        if overlaps(memory, begin, begin + n_bytes):
            return False
        addresses[k] = begin
    for k in range(n, len(expected)):
        descriptor, ndim = expected[k, _DESCRIPTOR], expected[k, _N_DIMENSIONS]
        a = expected[k, _OBJECT]
        if not _is_plain(a, array_type, descriptor, _C_CONTIGUOUS_ALIGNED | _WRITEABLE, ndim):
            return False
        if load_int64(a + _DATA) != expected[k, _PLACE]:
            return False
        shape = load_int64(a + _DIMS)
        for d in range(ndim):
            if load_int64(shape + 8 * d) != dims[first_dim + d]:
                return False
        first_dim += ndim
    return True


_read._cache = KernelCache("array headers")


NOWHERE = np.zeros((2, 0), np.int64)
"""No memory, in the form of `overlaps`."""

Form = tuple[np.dtype, tuple[int, ...]]
"""Dtype and shape of an array; a dimension can be `ANY` or `SAME`."""


class Expected:
    """What the arrays of a tuple should be: exactly ``ndarray``, of these forms and elsewhere.

    Args:
        forms: the form of each array.
        memory: where the arrays should not lie, as for `overlaps`.
        writable: whether they must be.
        written: arrays that must be so too and stay where and as they are now, whatever arrays
            are given.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        memory: np.ndarray,
        *,
        writable: bool = False,
        written: Sequence[np.ndarray] = (),
    ) -> None:
        self._flags = _C_CONTIGUOUS_ALIGNED | (_WRITEABLE if writable else 0)
        self._alive = list(forms), list(written)  # the identities below stay valid while they live
        rows = [
            (id(dtype), len(shape), math.prod(n for n in shape if n >= 0) * dtype.itemsize, 0)
            for dtype, shape in forms
        ]
        rows += [(id(a.dtype), a.ndim, address_of(a), id(a)) for a in written]
        shapes = [shape for _, shape in forms] + [array.shape for array in written]
        self._rows = np.array(rows, np.int64)
        self._dims = np.array([n for shape in shapes for n in shape], np.int64)
        self._memory = memory

    def addresses(self, arrays: tuple[np.ndarray, ...]) -> np.ndarray | None:
        """The int64 addresses of as many ``arrays``; None if anything is not as expected."""
        n = len(arrays)
        if n != len(self._alive[0]):
            return None
        addresses = np.empty(n, np.int64)
        as_expected = _read(
            id(arrays),
            n,
            _ARRAY_TYPE,
            self._flags,
            self._rows,
            self._dims,
            self._memory,
            addresses,
        )
        return addresses if as_expected else None


@njit
def _read_alike(arrays, n, n_written, array_type, dtypes, addresses):
    """Addresses of the ``n`` arrays of a tuple, if they are alike and lie apart.

    Returns whether they do, and the first ``n_written`` may be written to.
    """
    first = load_int64(arrays + _ITEMS)
    if load_int64(first + _TYPE) != array_type:
        return False
    descriptor, shape = load_int64(first + _DESCR), load_int64(first + _DIMS)
    ndim = load_int32(first + _NDIM)
    is_known, n_bytes = False, 0
    for i in range(len(dtypes)):
        if dtypes[i, 0] == descriptor:
            is_known, n_bytes = True, dtypes[i, 1]
    if not is_known:
        return False
    for d in range(ndim):
        n_bytes *= load_int64(shape + 8 * d)
    for k in range(n):
        a = load_int64(arrays + _ITEMS + 8 * k)
        flags = _C_CONTIGUOUS_ALIGNED | (_WRITEABLE if k < n_written else 0)
        if not _is_plain(a, array_type, descriptor, flags, ndim):
            return False
        own_shape = load_int64(a + _DIMS)
        for d in range(ndim):
            if load_int64(own_shape + 8 * d) != load_int64(shape + 8 * d):
                return False
        addresses[k] = load_int64(a + _DATA)
        for j in range(k):
            if abs(addresses[k] - addresses[j]) < n_bytes:
                return False
    return True


_read_alike._cache = KernelCache("headers of arrays that are alike")
_FLOATS = np.array([(id(dtype), dtype.itemsize) for dtype in STORAGES], np.int64)


def alike(arrays: tuple[Any, ...], n_written: int) -> np.ndarray | None:
    """The int64 addresses of ``arrays`` of one floating dtype and one shape.

    Returns:
        None where anything is not at once as it should be: an object is no plain ndarray, an
        array is not contiguous or aligned, one of the first ``n_written`` is read-only, dtypes
        or shapes differ, or two arrays overlap.
    """
    if not usable:
        return None
    n = len(arrays)
    addresses = np.empty(n, np.int64)
    fits = _read_alike(id(arrays), n, n_written, _ARRAY_TYPE, _FLOATS, addresses)
    return addresses if fits else None


def compile_readers() -> None:
    """Compile all of this module, or read it from the cache."""
    if usable:
        array = np.zeros(1, np.float32)
        Expected([(array.dtype, array.shape)], NOWHERE).addresses((array,))
        alike((array,), 1)
