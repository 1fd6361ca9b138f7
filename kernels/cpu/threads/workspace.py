"""Workspace that a call borrows: scratch memory, and objects that are costly to make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..headers.arrays import address_of
from .allocation import empty

# How many are kept for the next calls; each belongs to one call at a time.
_KEPT = 4

T = TypeVar("T")


class Pool(Generic[T]):
    """Objects for one call at a time, which ``make`` makes; as many as there are calls at once."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # Both ends of a deque are safe among threads without a lock, which a signal handler or a
        # fork could find taken.
        self.free: deque[T] = deque(maxlen=_KEPT)
        self.give: Callable[[T], None] = self.free.append

    def take(self) -> T:
        """One that nobody else has. It need not be given back: then it is just not reused."""
        try:
            return self.free.pop()
        except IndexError:
            return self._make()


class Block(NamedTuple):
    """Uninitialised int64 words and the address of the first."""

    words: np.ndarray
    address: int


_blocks: Pool[Block] = Pool(lambda: _allocate(1))


def borrow(n_words: int) -> Block:
    """At least ``n_words`` uninitialised words, for one call, which gives them back."""
    block = _blocks.take()
    return block if block.words.size >= n_words else _allocate(n_words)


give_back = _blocks.give


def _allocate(n_words: int) -> Block:
    words = empty((n_words,), np.int64)
    return Block(words, address_of(words))
