"""Whole arrays of the device, filled with one value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .backend import copy_in, store_int64
from .launch import on_elements

_WORD = 8  # bytes


@cuda.jit
def fill_kernel(address, n_words, word):
    """Write ``word`` to so many ``int64``."""
    i = cuda.grid(1)
    if i < n_words:
        store_int64(address + 8 * i, word)


def fill(address: int, n: int, value: Any, dtype: np.dtype[Any], stream: Any) -> None:
    """Enqueue setting ``n`` elements of ``dtype`` at an address, a multiple of 8, to ``value``."""
    pattern = np.full(_WORD // dtype.itemsize, value, dtype)
    n_words, rest = divmod(n * dtype.itemsize, _WORD)
    if n_words:
        word = int(pattern.view(np.int64)[0])
        on_elements(fill_kernel, n_words, stream)(address, n_words, word)
    copy_in(address + n_words * _WORD, pattern[: rest // dtype.itemsize], stream)
