"""Scratch memory that a call borrows and gives back, so that large calls do not page-fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# Blocks kept for the next calls; a block belongs to one call at a time.
_KEPT = 4
_free: list[np.ndarray] = []


@contextmanager
def borrow(n_words: int) -> Iterator[np.ndarray]:
    """An uninitialised int64 array of at least ``n_words`` elements, for one call."""
    try:
        block = _free.pop()  # atomic under the GIL, and a lost race only costs an allocation
    except IndexError:
        block = None
    if block is None or block.size < n_words:
        block = np.empty(n_words, np.int64)
    try:
        yield block
    finally:
        if len(_free) < _KEPT:
            _free.append(block)
