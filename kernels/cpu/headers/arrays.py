"""Reading NumPy array headers without asking NumPy for them.

Asking Python for the address, shape and flags of 200 gradients takes longer than the whole
optimizer step, and the address of a single array, by ``array.ctypes.data``, three times as long
as Adam on 1024 elements. The fields of a NumPy array object lie at fixed places, which every
extension module that was compiled against NumPy relies on. They are read in the versions that were
tried, after a test on sample arrays; if a field lies elsewhere, arrays are read through Python.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
import warnings
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...inner import njit
from ...private import TRIED
from ...storage import STORAGES
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import as_pointer, load_int64
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, last_at_most, records

_FIELDS = ("references", "type", "data", "ndim", "shape", "strides", "base", "dtype", "flags")


class _Header(ctypes.Structure):
    """An array object, as NumPy's C headers have it."""

    _fields_ = [
        (name, ctypes.c_int32 if name in ("ndim", "flags") else ctypes.c_int64) for name in _FIELDS
    ]


_header_type = np.dtype(_Header)
_DATA = _Header.data.offset
ARRAY_TYPE = id(np.ndarray)
_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x0001, 0x0100, 0x0400
C_CONTIGUOUS_ALIGNED = _C_CONTIGUOUS | _ALIGNED
ANY, SAME = -1, -2  # as a dimension: any size, and the size that was last found for `ANY`
# The place of a tuple's length, and the place where the pointers to its elements begin.
LENGTH, ITEMS = object.__basicsize__, tuple.__basicsize__


class _ArrayForm(NamedTuple):
    """Expected form of an array, all ``int64``."""

    dtype: int  # its identity
    ndim: int
    n_bytes: int = 0  # without the dimensions left open
    place: int = 0  # the address of an array that must not move
    header: int = 0  # the address of its object


class _ArrayQuery(NamedTuple):
    """Question about a tuple of arrays, all ``int64``; addresses."""

    n: int  # arrays of the tuple
    array_type: int
    flags: int
    rows: int  # [n_rows] of `_ArrayForm`
    n_rows: int
    dims: int  # of all rows
    memory: int  # [2, n_stretches]
    n_stretches: int


_forms_at, _query_at = records(_ArrayForm), records(_ArrayQuery)


def _lies_as_expected(array: np.ndarray) -> bool:
    """Whether every field that is read here lies at the place where this module expects it."""
    one = (array,)
    header, flags = _Header.from_address(id(array)), array.flags
    return (
        ctypes.c_int64.from_address(id(one) + LENGTH).value == len(one)
        and ctypes.c_int64.from_address(id(one) + ITEMS).value == id(array)
        and header.type == id(type(array))
        and header.data == array.__array_interface__["data"][0]
        and header.ndim == array.ndim
        and tuple((ctypes.c_int64 * array.ndim).from_address(header.shape)) == array.shape
        and header.dtype == id(array.dtype)
        and bool(header.flags & _C_CONTIGUOUS) == flags.c_contiguous
        and bool(header.flags & _ALIGNED) == flags.aligned
        and bool(header.flags & _WRITEABLE) == flags.writeable
    )


def _test_arrays() -> list[np.ndarray]:
    base = np.arange(24, dtype=np.float32)
    read_only = base.astype(np.float64)
    read_only.flags.writeable = False
    unaligned = np.zeros(9, np.uint8)[1:].view(np.float32)
    shaped = base.reshape(2, 3, 4)
    return [base, shaped, base[5:9], base[:0], shaped.T, base[::2], read_only, unaligned]


VARIABLE = "FUSESTEP_READ_HEADERS"


def is_switched_off() -> bool:
    """Whether the user wants no fields of objects to be read."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(
            f"fusestep: {VARIABLE} has a wrong value: expected 0, 1 or nothing, got {wanted!r}"
        )
    return wanted == "0"


def untried(**versions: str) -> str:
    """Say which of these versions have not been tried; "" if all were, or the user insists."""
    if os.environ.get(VARIABLE) == "1":
        return ""
    minors = {name: ".".join(version.split(".")[:2]) for name, version in versions.items()}
    new = [f"{name} {minor}" for name, minor in minors.items() if minor not in TRIED[name]]
    return f"not tried with {' and '.join(new)}" if new else ""


def _why_not() -> str:
    if is_switched_off():
        return f"{VARIABLE}=0"
    # An object begins with a count of references and its type, 16 bytes, as in `_FIELDS`. In a
    # build of Python where more comes first, every field would lie elsewhere.
    if (
        sys.implementation.name != "cpython"
        or np.dtype(np.intp).itemsize != 8
        or object.__basicsize__ != 16
    ):
        return "another kind of Python"
    if new := untried(Python=platform.python_version(), NumPy=np.__version__):
        return new
    is_known = all(_lies_as_expected(array) for array in _test_arrays())
    return "" if is_known else f"they lie elsewhere in NumPy {np.__version__}"


why_not = _why_not()
"""Why the headers of arrays are not read, or ""."""
usable = not why_not
"""Whether the headers of this NumPy and this Python lie as this module expects them."""


def warn_of(what: str, why: str) -> None:
    """Warn that objects are read through Python, unless the user wants it."""
    if not is_switched_off():
        warnings.warn(
            f"fusestep reads {what} through Python, which is slower: {why} ({VARIABLE}=0: no "
            "warning)",
            RuntimeWarning,
            stacklevel=3,
        )


if why_not:
    warn_of("arrays", why_not)


def address_of(array: np.ndarray) -> int:
    """The address of the first element of an array."""
    if usable:
        return ctypes.c_int64.from_address(id(array) + _DATA).value
    address: int = array.__array_interface__["data"][0]
    return address


def addresses_of(arrays: Iterable[np.ndarray]) -> list[int]:
    """The addresses of the first elements of arrays."""
    return [address_of(array) for array in arrays]


@njit(inline="always")
def header_at(array):
    """The header of an array."""
    return carray(as_pointer(array), 1, _header_type)[0]


@njit(inline="always")
def header_of(arrays, k):
    """The header of element ``k`` of a tuple of arrays."""
    return header_at(load_int64(arrays + ITEMS + 8 * k))


@njit
def _is_plain(header, array_type, dtype, flags, ndim):
    """Whether an object is exactly an ndarray, of this dtype and with these flags."""
    return (
        header.type == array_type
        and header.dtype == dtype
        and (header.flags & flags) == flags
        and header.ndim == ndim
    )


@njit
def _has_shape(header, shape, begin):
    """Whether the sizes of an array, from one dimension on, are those at an address."""
    for d in range(begin, header.ndim):
        if load_int64(header.shape + 8 * d) != load_int64(shape + 8 * d):
            return False
    return True


@njit(inline="always")
def _data_of(array, n):
    return int64s(header_at(array).data, n)


@njit
def overlaps(stretches, begin, end):
    """Whether ``begin .. end`` overlaps any stretch of memory.

    ``stretches`` is ``[2, n]``: where they begin and where they end, in order and without
    overlap. So the last one that begins before ``end`` decides.
    """
    begins, ends = stretches[0], stretches[1]
    if begins.size == 0 or begin >= end:
        return False
    last = last_at_most(begins, begins.size, end - 1)
    return begins[last] < end and ends[last] > begin


def lie_in(stretches: Sequence[Sequence[int]], spans: Iterable[tuple[int, int]]) -> bool:
    """Whether any of the spans, addresses and sizes, overlaps a stretch (`overlaps` in Python)."""
    begins, ends = stretches
    for begin, n_bytes in spans:
        last = bisect_left(begins, begin + n_bytes) - 1
        if n_bytes > 0 and last >= 0 and ends[last] > begin:
            return True
    return False


def _read_expected(query, arrays, addresses):
    """Write the addresses of a tuple's arrays if they have their forms and lie outside ``memory``.

    Returns whether all of them do, and the arrays of the further rows have not moved or changed
    their form, and can be written to.
    """
    c = _query_at(query, 1)[0]
    if load_int64(arrays + LENGTH) != c.n:
        return 0
    forms, dims, out = _forms_at(c.rows, c.n_rows), c.dims, _data_of(addresses, c.n)
    memory = carray(as_pointer(c.memory), (2, c.n_stretches), np.int64)
    length = 0
    for k in range(c.n):
        form, header = forms[k], header_of(arrays, k)
        if not _is_plain(header, c.array_type, form.dtype, c.flags, form.ndim):
            return 0
        n_bytes = form.n_bytes
        for d in range(form.ndim):
            size, dim = load_int64(header.shape + 8 * d), load_int64(dims + 8 * d)
            if dim == ANY:
                # The indices of a row-sparse gradient come first, and may have any number; the
                # values behind them have as many rows.
                length = size
            elif size != (length if dim == SAME else dim):
                return 0
            if dim < 0:
                n_bytes *= size
        dims += 8 * form.ndim
        if overlaps(memory, header.data, header.data + n_bytes):
            return 0
        out[k] = header.data
    for k in range(c.n, c.n_rows):
        form = forms[k]
        header = header_at(form.header)
        flags = C_CONTIGUOUS_ALIGNED | _WRITEABLE
        if not _is_plain(header, c.array_type, form.dtype, flags, form.ndim):
            return 0
        if header.data != form.place or not _has_shape(header, dims, 0):
            return 0
        dims += 8 * form.ndim
    return 1


NOWHERE = np.zeros((2, 0), np.int64)
"""No memory, in the form of `overlaps`."""

Form = tuple[np.dtype, tuple[int, ...]]
"""Dtype and shape of an array; a dimension can be `ANY` or `SAME`."""


class ExpectedArrays:
    """Expected arrays of a tuple: exactly ``ndarray``, of these forms, and outside of ``memory``.

    ``memory`` is as for `overlaps`. The arrays ``written`` belong to no tuple: they must be
    writable and keep the address and the form that they have now.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        memory: np.ndarray,
        *,
        writable: bool = False,
        written: Sequence[np.ndarray] = (),
    ) -> None:
        flags = C_CONTIGUOUS_ALIGNED | (_WRITEABLE if writable else 0)
        # The identities and addresses below stay valid while these live.
        self._alive: tuple[Any, ...] = (list(forms), list(written))
        rows = [
            _ArrayForm(
                id(dtype), len(shape), math.prod(n for n in shape if n >= 0) * dtype.itemsize
            )
            for dtype, shape in forms
        ]
        rows += [_ArrayForm(id(a.dtype), a.ndim, 0, address_of(a), id(a)) for a in written]
        shapes = [shape for _, shape in forms] + [array.shape for array in written]
        dims = [n for shape in shapes for n in shape]
        kept = np.array(rows, np.int64), np.array(dims, np.int64), memory
        self._alive += kept
        rows_at, dims_at, memory_at = map(address_of, kept)
        self._query = array("q", _ArrayQuery(
            len(forms), ARRAY_TYPE, flags, rows_at, len(rows), dims_at, memory_at, memory.shape[1]
        ))  # fmt: skip
        self._query_at, _ = self._query.buffer_info()

    def addresses(self, arrays: tuple[np.ndarray, ...]) -> np.ndarray | None:
        """The int64 addresses of ``arrays``; None if any array is not as expected."""
        addresses = np.empty(self._query[0], np.int64)
        return addresses if _read.call(self._query_at, id(arrays), id(addresses)) else None


class _Kind(NamedTuple):
    """Possible dtype of arrays: its identity and size."""

    dtype: int
    itemsize: int


_kinds_at = records(_Kind)
_INDEX_DTYPES = np.dtype(np.int32), np.dtype(np.int64)
_KINDS = np.array([_Kind(id(x), x.itemsize) for x in (*STORAGES, *_INDEX_DTYPES)], np.int64)
_N_FLOATS, _N_KINDS, _kinds_address = len(STORAGES), len(_KINDS), address_of(_KINDS)


@njit
def _itemsize(kinds, is_index, dtype):
    """The size of a floating dtype, or of a dtype of indices; 0 for any other."""
    known = _kinds_at(kinds, _N_KINDS)
    for k in range(_N_FLOATS if is_index else 0, _N_KINDS if is_index else _N_FLOATS):
        if known[k].dtype == dtype:
            return known[k].itemsize
    return 0


@njit
def _n_bytes(header, itemsize):
    for d in range(header.ndim):
        itemsize *= load_int64(header.shape + 8 * d)
    return itemsize


def _read_alike_arrays(arrays, n_written, has_rows, array_type, kinds, addresses):
    """Write the addresses of a tuple's arrays; whether these are as `alike` requires."""
    n = load_int64(arrays + LENGTH)
    n_alike, first, out = n - 2 * has_rows, header_of(arrays, 0), _data_of(addresses, n)
    length = n_bytes = index_bytes = 0
    for k in range(n):
        header, is_index = header_of(arrays, k), k == n_alike
        if header.type != array_type or first.ndim < has_rows:
            return 0
        dtype, ndim = (header.dtype, 1) if is_index else (first.dtype, first.ndim)
        flags = C_CONTIGUOUS_ALIGNED | (_WRITEABLE if k < n_written else 0)
        itemsize = _itemsize(kinds, is_index, dtype)
        if itemsize == 0 or not _is_plain(header, array_type, dtype, flags, ndim):
            return 0
        if not _has_shape(header, first.shape, k >= n_alike):
            return 0
        if is_index:
            length = load_int64(header.shape)
        elif k > n_alike and load_int64(header.shape) != length:
            return 0
        out[k], own = header.data, _n_bytes(header, itemsize)
        n_bytes, index_bytes = own if k == 0 else n_bytes, own if is_index else index_bytes
        for j in range(k):
            other = n_bytes if j < n_alike else index_bytes
            if out[j] < out[k] + own and out[k] < out[j] + other:
                return 0
    return 1


# The compiled code contains the place of a tuple's elements, which depends on Python's version.
_read = NativeFunction(
    _read_expected, f"array headers {ITEMS}", PythonEntry(returns=True, holds_gil=True)
)
_read_alike = NativeFunction(
    _read_alike_arrays,
    f"headers that are alike {ITEMS} {_N_KINDS}",
    PythonEntry(returns=True, holds_gil=True),
)
READERS = _read, _read_alike


def alike(arrays: tuple[Any, ...], n_written: int, *, has_rows: bool = False) -> list[int] | None:
    """The addresses of ``arrays`` of one floating dtype and one shape.

    If the tuple ``has_rows``, its last two arrays are indices and values of a row-sparse gradient
    for the others. None if an object is no plain ndarray, an array is not contiguous or aligned,
    one of the first ``n_written`` is read-only, dtypes or shapes do not fit, or two arrays overlap.
    """
    if not usable:
        return None
    addresses = np.empty(len(arrays), np.int64)
    kinds = ARRAY_TYPE, _kinds_address
    fits = _read_alike.call(id(arrays), n_written, has_rows, *kinds, id(addresses))
    return addresses.tolist() if fits else None
