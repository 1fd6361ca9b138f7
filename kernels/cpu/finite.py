"""Is every element of many arrays finite? One read, no write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from ..compile import call_reader, part
from ..inner import njit
from ..storage import Storage
from .headers import address_of
from .intrinsics import as_pointer
from .parallel import get_num_threads, run
from .search import last_at_most

_CHUNK = 65_536
_SERIAL_BELOW = 65_536  # elements
# All exponent bits set: infinity or NaN.
EXPONENTS = {"f32": 0x7F800000, "f64": 0x7FF0000000000000, "f16": 0x7C00, "bf16": 0x7F80}


class FiniteCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    addresses: int  # [T]
    first: int  # [T + 1]
    n_arrays: int
    itemsize: int
    exponent: int
    chunk: int
    found: int  # [1], set to 1 by any part


_read_call = call_reader(FiniteCall)


@njit
def _any_with_exponent(values, exponent):
    count = 0
    for i in range(values.size):
        count += (values[i] & exponent) == exponent
    return count > 0


@part
def _check_chunk(index, slot, call):
    c = _read_call(call)
    first = carray(as_pointer(c.first), c.n_arrays + 1, np.int64)
    addresses = carray(as_pointer(c.addresses), c.n_arrays, np.int64)
    flat = index * c.chunk
    end = min(flat + c.chunk, first[c.n_arrays])
    t = last_at_most(first, c.n_arrays, flat)
    found = False
    while flat < end:
        n = min(end, first[t + 1]) - flat
        address = as_pointer(addresses[t] + (flat - first[t]) * c.itemsize)
        if c.itemsize == 2:
            found |= _any_with_exponent(carray(address, n, np.uint16), np.uint16(c.exponent))
        elif c.itemsize == 4:
            found |= _any_with_exponent(carray(address, n, np.uint32), np.uint32(c.exponent))
        else:
            found |= _any_with_exponent(carray(address, n, np.uint64), np.uint64(c.exponent))
        flat += n
        t += 1
    if found:
        carray(as_pointer(c.found), 1, np.int64)[0] = 1


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether contiguous arrays of ``storage`` hold no NaN and no infinity.

    Args:
        storage: their storage type.
        addresses: int64 ``[T]``.
        sizes: int64 ``[T]``, elements.
    """
    first = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    total = int(first[-1])
    found = np.zeros(1, np.int64)
    call = FiniteCall(
        address_of(addresses),
        address_of(first),
        len(addresses),
        storage.itemsize,
        EXPONENTS[storage.name],
        _CHUNK,
        address_of(found),
    )
    arguments = np.array(call, np.int64)
    threads = get_num_threads() if total >= _SERIAL_BELOW else 1
    run(_check_chunk, -(-total // _CHUNK), address_of(arguments), threads)
    return not found[0]
