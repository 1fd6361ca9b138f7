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
    """Objects that calls borrow, one call at a time; ``make`` makes another when none is free."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # Both ends of a deque are safe among threads without a lock, which a signal handler or a
        # fork could find taken.
        self.free: deque[T] = deque(maxlen=_KEPT)
        self.give: Callable[[T], None] = self.free.append

    def take(self) -> T:
        """An object that no other call has; one that is not given back is not reused."""
        try:
            return self.free.pop()
        except IndexError:
            return self._make()


class Block(NamedTuple):
    """Uninitialised int64 words and the address of the first."""

    words: np.ndarray
    address: int


_blocks: deque[Block] = deque(maxlen=_KEPT)  # a block may be too small: no `Pool`
give_back = _blocks.append


def borrow(n_words: int) -> Block:
    """Borrow at least ``n_words`` uninitialised words for one call; see `give_back`."""
    try:
        block = _blocks.pop()
    except IndexError:
        return _allocate(n_words)
    # One that is too small is dropped: the larger one will be given back in its place.
    return block if block.words.size >= n_words else _allocate(n_words)


def _allocate(n_words: int) -> Block:
    words = empty((n_words,), np.int64)
    return Block(words, address_of(words))
