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
from operator import attrgetter
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
_value_of = attrgetter("value")
ARRAY_TYPE = id(np.ndarray)
_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x0001, 0x0100, 0x0400
C_CONTIGUOUS_ALIGNED = _C_CONTIGUOUS | _ALIGNED

# The place of a tuple's length, and the place where the pointers to its elements begin.
LENGTH, ITEMS = object.__basicsize__, tuple.__basicsize__
PLAIN, ROWS, INDICES = range(3)
"""Kinds of layouts: of an array; of the values of a row-sparse gradient; of its indices, which come
before and are as many."""
OPEN = -1
"""As a size: any."""


class ExpectedLayout(NamedTuple):
    """Expected layout of an array, all ``int64``; the sizes lie behind it."""

    kind: int
    dtype: int  # identity
    flags: int  # others do not matter
    dim: int
    n_bytes: int  # of all elements, with an open size taken as 1


layouts_at, LAYOUT_BYTES = records(ExpectedLayout), 8 * len(ExpectedLayout._fields)


class _Query(NamedTuple):
    """Question about a tuple of arrays, all ``int64``; addresses."""

    n: int  # arrays of the tuple
    layouts: int  # [n + n_written]: addresses of each `ExpectedLayout`, then of those written
    memory: int  # [2, n_spans]
    n_spans: int
    n_written: int
    written: int  # a tuple of further arrays
    places: int  # [n_written]: where these have to lie
    type: int  # identity of that of arrays


_query_at = records(_Query)


def _lies_as_expected(array: np.ndarray) -> bool:
    """Whether every field that is read here lies at the place where this module expects it."""
    # In this order below: where a pointer leads is read only if the fields before it are right.
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
    # Each differs from the others in a field that is read: offset, order, stride, dtype or a flag.
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
    """Say which of these versions have not been tried; "" if all were."""
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
    new = untried(Python=platform.python_version(), NumPy=np.__version__)
    if new and os.environ.get(VARIABLE) != "1":
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


def addresses_of(arrays: Sequence[np.ndarray]) -> list[int]:
    """The addresses of the first elements of arrays."""
    if usable:  # as `address_of`, in code of C
        places = map(_DATA.__add__, map(id, arrays))
        return [*map(_value_of, map(ctypes.c_int64.from_address, places))]
    return [address_of(array) for array in arrays]


@njit(inline="always")
def item_of(items, k):
    """The address of element ``k`` of a tuple."""
    return load_int64(items + ITEMS + 8 * k)


@njit
def fits(actual, sizes, expected, dims, begin):
    """Whether dtype, flags and dimension, then sizes from ``begin`` on, are the expected ones."""
    if actual != expected:
        return False
    for d in range(begin, expected[2]):
        size = load_int64(dims + 8 * d)
        if size >= 0 and load_int64(sizes + 8 * d) != size:
            return False
    return True


@njit(inline="always")
def spans_at(address, n):
    """Memory in the layout of `overlaps`."""
    return carray(as_pointer(address), (2, n), np.int64)


@njit
def overlaps(spans, begin, end):
    """Whether ``begin .. end`` overlaps any span of memory.

    ``spans`` is ``[2, n]``: where they begin and where they end, in order and without
    overlap. So the last one that begins before ``end`` decides.
    """
    begins, ends = spans[0], spans[1]
    if begins.size == 0 or begin >= end:
        return False
    last = last_at_most(begins, begins.size, end - 1)
    return begins[last] < end and ends[last] > begin


def lie_in(spans: Sequence[Sequence[int]], pieces: Iterable[tuple[int, int]]) -> bool:
    """Whether any of the pieces, addresses and sizes, overlaps a span (`overlaps` in Python)."""
    begins, ends = spans
    for begin, n_bytes in pieces:
        last = bisect_left(begins, begin + n_bytes) - 1
        if n_bytes > 0 and last >= 0 and ends[last] > begin:
            return True
    return False


@njit(inline="always")
def header_at(array):
    """The header of an array."""
    return carray(as_pointer(array), 1, _header_type)[0]


@njit(inline="always")
def read_array(thing, array_type, flags):
    """Dtype, those of the ``flags`` that it has, dimension; addresses of sizes and first element.

    Of an object that is not exactly an ndarray the dtype is 0, and nothing else is read.
    """
    header = header_at(thing)
    if header.type != array_type:
        return (0, 0, 0), 0, 0
    actual = header.dtype, np.int64(header.flags) & flags, np.int64(header.ndim)
    return actual, header.shape, header.data


def _read_expected(query, things, addresses):
    """Compare a tuple of arrays with their layouts, for `Expected`."""
    c = _query_at(query, 1)[0]
    n, written, length = c.n, c.written, 1
    if load_int64(things + LENGTH) != n:
        return 0
    out, places = int64s(header_at(addresses).data, n), int64s(c.places, c.n_written)
    layouts, memory = int64s(c.layouts, n + c.n_written), spans_at(c.memory, c.n_spans)
    for k in range(n + c.n_written):
        address = layouts[k]
        layout, sizes_at = layouts_at(address, 1)[0], address + LAYOUT_BYTES
        thing = item_of(things, k) if k < n else item_of(written, k - n)
        actual, sizes, data = read_array(thing, c.type, layout.flags)
        if not fits(actual, sizes, (layout.dtype, layout.flags, layout.dim), sizes_at, 0):
            return 0
        n_bytes = layout.n_bytes
        if layout.kind == INDICES:
            length = load_int64(sizes + 8 * (layout.dim - 1))
        elif layout.kind == ROWS and load_int64(sizes) != length:
            return 0
        if layout.kind != PLAIN:
            n_bytes *= length
        # An empty array may have no memory.
        if data == 0 and n_bytes > 0:
            return 0
        if k >= n:
            if data != places[k - n]:
                return 0
            continue
        if overlaps(memory, data, data + n_bytes):
            return 0
        out[k] = data
    return 1


NOWHERE = np.zeros((2, 0), np.int64)
"""No memory, in the layout of `overlaps`."""

ArrayLayout = tuple[np.dtype, tuple[int, ...]]
"""Dtype and shape of an array. The first size is `OPEN` for the indices of a row-sparse gradient,
and for its values behind them, which are as many."""


def _layout_of(
    dtype: np.dtype, shape: tuple[int, ...], flags: int
) -> tuple[ExpectedLayout, tuple[int, ...]]:
    is_open = shape[:1] == (OPEN,)
    kind = PLAIN if not is_open else ROWS if dtype in STORAGES else INDICES
    n_bytes = math.prod(shape[is_open:]) * dtype.itemsize
    return ExpectedLayout(kind, id(dtype), flags, len(shape), n_bytes), shape


class Expected:
    """Expected arrays of a tuple: of these layouts, and outside of ``memory``.

    ``memory`` is as for `overlaps`. The arrays ``written`` belong to no tuple: they have the last
    of the layouts, and must keep the address that they have now. ``alive`` are the dtypes of the
    layouts.
    """

    def __init__(
        self, layouts: Sequence[tuple[ExpectedLayout, tuple[int, ...]]], memory: np.ndarray,
        alive: Any, written: Sequence[np.ndarray] = (),
    ) -> None:  # fmt: skip
        made = {pair: np.array([*pair[0], *pair[1]], np.int64) for pair in layouts}  # each once
        held = tuple(written)
        addresses = [address_of(made[pair]) for pair in layouts], addresses_of(held)
        kept = [np.array(each, np.int64) for each in addresses]
        # The identities and addresses in the query stay valid while these live.
        self._alive = alive, made, held, kept, memory
        lists, places = map(address_of, kept)
        spans = address_of(memory), memory.shape[1]
        fields = len(layouts) - len(held), lists, *spans, len(held), id(held), places, ARRAY_TYPE
        self._query = array("q", _Query(*fields))
        self._query_at, _ = self._query.buffer_info()

    def addresses(self, things: tuple[Any, ...]) -> np.ndarray | None:
        """The int64 addresses of ``things``; None if any of them is not as expected."""
        addresses = np.empty(self._query[0], np.int64)
        return addresses if _read.call(self._query_at, id(things), id(addresses)) else None


def expected_arrays(
    layouts: Sequence[ArrayLayout], memory: np.ndarray, written: Sequence[np.ndarray] = ()
) -> Expected:
    """Expected arrays, exactly ``ndarray``, as `Expected`; those that are written are writeable."""
    every = [(*layout, C_CONTIGUOUS_ALIGNED) for layout in layouts]
    every += [(output.dtype, output.shape, C_CONTIGUOUS_ALIGNED | _WRITEABLE) for output in written]
    return Expected([_layout_of(*layout) for layout in every], memory, every, written)


_DTYPES = *STORAGES, np.dtype(np.int32), np.dtype(np.int64)
_KINDS = np.array([(id(dtype), dtype.itemsize) for dtype in _DTYPES], np.int64).reshape(-1)
_N_FLOATS, _N_KINDS, _kinds_address = len(STORAGES), len(_DTYPES), address_of(_KINDS)


@njit
def _itemsize(kinds, is_index, dtype):
    """The size of a floating dtype, or of a dtype of indices; 0 for any other."""
    # By identity: a dtype that is equal, but another object, is left to the slower checks.
    table = int64s(kinds, 2 * _N_KINDS)
    for k in range(_N_FLOATS if is_index else 0, _N_KINDS if is_index else _N_FLOATS):
        if table[2 * k] == dtype:
            return table[2 * k + 1]
    return 0


def _read_alike_arrays(arrays, n_written, has_rows, array_type, kinds, addresses):
    """Write the addresses of a tuple's arrays; whether these are as `alike` requires."""
    n = load_int64(arrays + LENGTH)
    n_alike, out = n - 2 * has_rows, int64s(header_at(addresses).data, n)
    first, shape = (0, 0, 0), 0
    length = n_bytes = index_bytes = 0
    for k in range(n):
        is_index, flags = k == n_alike, C_CONTIGUOUS_ALIGNED | (_WRITEABLE if k < n_written else 0)
        actual, sizes, out[k] = read_array(item_of(arrays, k), array_type, flags)
        if k == 0:
            first, shape = actual, sizes
        dtype, dim = (actual[0], 1) if is_index else (first[0], first[2])
        size = _itemsize(kinds, is_index, dtype)
        if size == 0 or first[2] < has_rows:
            return 0
        if not fits(actual, sizes, (dtype, flags, dim), shape, k >= n_alike):
            return 0
        if is_index:
            length = load_int64(sizes)
        elif k > n_alike and load_int64(sizes) != length:
            return 0
        for d in range(dim):
            size *= load_int64(sizes + 8 * d)
        n_bytes, index_bytes = size if k == 0 else n_bytes, size if is_index else index_bytes
        for j in range(k):
            other = n_bytes if j < n_alike else index_bytes
            # Quadratic, but a call has a handful of arrays.
            if out[j] < out[k] + size and out[k] < out[j] + other:
                return 0
    return 1


# The compiled code contains the place of a tuple's elements, which depends on Python's version.
_read = NativeFunction(
    _read_expected,
    f"array headers {ITEMS}",
    PythonEntry(returns=True, holds_gil=True),
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
