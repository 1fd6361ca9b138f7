"""New weights of rows: uniform numbers that follow from ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from ..compiler.compile import part
from ..compiler.intrinsics import as_pointer
from ..compiler.records import int64s
from ..ids import mixed_word
from ..threads.parallel import Arguments, run


class _DrawCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    ids: np.ndarray  # int64 [n]
    n: int
    width: int
    seed: int  # mixed; its bits
    bound: np.ndarray  # float32 [1]
    out: np.ndarray  # float32 [n, width]


@part(_DrawCall)
def _draw_uniform(index, slot, c):
    ids, seed = int64s(c.ids, c.n), np.uint64(c.seed)
    bound = carray(as_pointer(c.bound), 1, np.float32)[0]
    out = carray(as_pointer(c.out), (c.n, c.width), np.float32)
    for k in range(c.n):
        key = mixed_word(seed ^ np.uint64(ids[k]))
        for column in range(c.width):
            bits = mixed_word(key + np.uint64(column)) >> np.uint64(40)  # 24, which a float32 holds
            drawn = np.float32(np.int64(bits)) * np.float32(2.0**-23) - np.float32(1.0)
            out[k, column] = drawn * bound


def draw_uniform(ids: np.ndarray, width: int, seed: int, bound: float) -> np.ndarray:
    """Numbers in ``[-bound, bound)``, float32 ``[n, width]``.

    Args:
        ids: int64 ``[n]``, contiguous.
        width: columns.
        seed: of all, mixed: 64 bits as an int64.
        bound: rounded to float32.
    """
    out = np.empty((len(ids), width), np.float32)
    bounds = np.array([bound], np.float32)
    call = Arguments(_DrawCall(ids, len(ids), width, seed, bounds, out))
    if out.size:
        run(_draw_uniform, 1, call.address, 1)
    return out
