"""Words that travel to the device as the arguments of a launch.

What is captured in a CUDA graph must not be copied from memory of the host that may change before
the graph runs. Arguments are part of the graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from .backend import tuple_storer
from .launch import on_grid

WORDS = 128
"""Words of a launch: 1 KiB of the 4 KiB that arguments may have."""


@cache
def storing() -> Any:
    """``store[1, 1](address, words)`` of a tuple of `WORDS` int64."""
    store = tuple_storer(types.int64)

    @cuda.jit
    def loop(address, words):
        store(address, words)

    return loop


def store_words(address: int, words: np.ndarray, stream: Any) -> None:
    """Enqueue writing int64 ``words`` to an address.

    The last launch begins earlier so that it is full too: there is one kernel, for `WORDS` words.
    Fewer than that are padded, so there has to be room for `WORDS`.
    """
    padded = np.zeros(max(WORDS, len(words)), np.int64)
    padded[: len(words)] = words
    for begin in range(0, len(padded), WORDS):
        first = min(begin, len(padded) - WORDS)
        values = tuple(padded[first : first + WORDS].tolist())
        on_grid(storing(), 1, 1, stream)(address + 8 * first, values)
