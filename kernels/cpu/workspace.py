"""Scratch memory that a call borrows and gives back, so that large calls do not page-fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

# Blocks kept for the next calls; a block belongs to one call at a time.
_KEPT = 4


class Block(NamedTuple):
    """Uninitialised int64 words and the address of the first."""

    words: np.ndarray
    address: int


_free: list[Block] = []


@contextmanager
def borrow(n_words: int) -> Iterator[Block]:
    """At least ``n_words`` uninitialised words, for one call."""
    try:
        block = _free.pop()  # atomic under the GIL, and a lost race only costs an allocation
        if block.words.size < n_words:
            block = _allocate(n_words)
    except IndexError:
        block = _allocate(n_words)
    try:
        yield block
    finally:
        if len(_free) < _KEPT:
            _free.append(block)


def _allocate(n_words: int) -> Block:
    words = np.empty(n_words, np.int64)
    return Block(words, words.ctypes.data)
