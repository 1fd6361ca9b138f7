"""Is every element of many arrays finite? One read, no write."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray

from ..storage import Storage
from ..tables import TensorTable
from .compile import Arguments, NativeFunction
from .dense import DenseCall, update_chunk
from .intrinsics import as_pointer
from .parallel import get_num_threads, run

_CHUNK = 65_536
_SERIAL_BELOW = 65_536  # elements


@cache
def finite_check(storage: Storage) -> NativeFunction:
    """A block that looks at the gradient alone; a NaN or an infinity sets the int64 at ``hp``."""
    carrier = np.dtype(f"u{storage.itemsize}").type
    exponent = carrier(storage.exponent)

    def check_finite(arrays, offset, g, n, found):
        values, count = carray(as_pointer(g), n, carrier), 0
        for i in range(values.size):
            count += (values[i] & exponent) == exponent
        if count > 0:
            carray(as_pointer(found), 1, np.int64)[0] = 1

    return NativeFunction(check_finite, f"finite {storage.name}")


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether contiguous arrays hold no NaN and no infinity; addresses and sizes are int64."""
    table = TensorTable(addresses[:, None], np.concatenate(([0], np.cumsum(sizes))))
    found, every = np.zeros((1, 1), np.int64), np.zeros_like(addresses)
    loop = DenseCall.of(finite_check(storage), storage, table, addresses, found, every, _CHUNK)
    call = Arguments(loop)
    threads = get_num_threads() if table.total >= _SERIAL_BELOW else 1
    run(update_chunk, -(-table.total // _CHUNK), call.address, threads)
    return not found.any()
