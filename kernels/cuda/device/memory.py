"""Room on the device that the calls on a stream share, what is written to it, and their order.

A copy from ordinary host memory is staged by the driver before the call returns, so its source may
change at once and nothing waits for the device. (On "stream 0" of Numba's own copies it would.)
What is captured in a CUDA graph must not be copied from memory of the host that may change before
the graph runs: it travels as the arguments of a launch, which are part of the graph.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import cuda, types

from .backend import address_of, copy_in, device_id, handle_of, launch_words, new_event, storer

ALIGN = 256  # bytes
_LEAST = 1 << 16
_PER_THREAD = 2  # CU_STREAM_PER_THREAD
WORK, SUMS = range(2)
"""Kinds of room: for one launch or step, and for what several steps add to."""
WORDS = 128
"""Words that one launch writes: 1 KiB of the 4 KiB that arguments may have."""
_store = storer(types.int64)


class Places:
    """Sections of a room, one after the other."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, n_bytes: int) -> int:
        """The offset of a further section."""
        place = self.size
        self.size += -(-n_bytes // ALIGN) * ALIGN
        return place


class Held:
    """Memory on the device that belongs to one owner, and whose contents stay from call to call.

    A CUDA graph that was captured writes the contents anew whenever it runs, so after that no
    call relies on what was there; and it uses the memory, which is therefore kept.
    """

    def __init__(self) -> None:
        self._array, self._size, self._is_captured = None, 0, False
        self._content: np.ndarray = np.empty(0, np.int64)
        self._kept: list[Any] = []

    def take(self, n_bytes: int, *, capturing: bool = False) -> int:
        """The address of at least ``n_bytes``; while a graph is captured none can be taken."""
        if n_bytes > self._size:
            if capturing:
                raise RuntimeError("memory cannot be taken while a CUDA graph is being captured")
            if self._is_captured:
                self._kept.append(self._array)
            self._array, self._size = None, 0  # freed when the device is done with it
            # A power of 2, so that batches that grow from step to step seldom take new memory.
            size = max(_LEAST, 8 * WORDS, 1 << (n_bytes - 1).bit_length())
            self._array, self._size = cuda.device_array(size, np.uint8), size
            self._content = np.empty(0, np.int64)
        self._is_captured |= capturing
        return self.address

    @property
    def address(self) -> int:
        """Where it lies; 0 before any was taken."""
        return 0 if self._array is None else int(address_of(self._array))

    def write(self, words: np.ndarray, stream: Any, *, capturing: bool) -> None:
        """Have int64 ``words`` there, which are copied if others were; `WORDS` are overwritten."""
        if words.size == 0:
            return  # there may be no memory
        address = self.take(words.nbytes, capturing=capturing)
        if capturing:
            store_words(address, words, stream)
        elif self._is_captured or not np.array_equal(words, self._content):
            copy_in(address, words, stream)
            self._content = words.copy()


class Room(Held):
    """Memory on the device that every call on one stream uses, one after the other.

    What is enqueued on a stream runs in order, so a call may overwrite what an earlier one has
    left. ``with room:`` keeps other threads from enqueueing in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __enter__(self) -> Room:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@cuda.jit
def words_kernel(address, words):
    """``loop[1, 1](address, words)``: write a tuple of `WORDS` int64."""
    _store(address, words)


def store_words(address: int, words: np.ndarray, stream: Any) -> None:
    """Enqueue writing int64 ``words`` to an address; there has to be room for `WORDS`.

    There is one kernel, for `WORDS` words, so fewer are padded, and of more of them the last launch
    begins earlier.
    """
    padded = np.zeros(max(WORDS, len(words)), np.int64)
    padded[: len(words)] = words
    for begin in range(0, len(padded), WORDS):
        first = min(begin, len(padded) - WORDS)
        values = tuple(padded[first : first + WORDS].tolist())
        launch_words(words_kernel, stream, address + 8 * first, values)


_rooms: dict[tuple[int, ...], Room] = {}


def room_of(stream: Any, kind: int = WORK) -> Room:
    """The room of a stream of the current device; there is one of each ``kind``."""
    return _rooms.setdefault((device_id(), *key_of(stream), kind), Room())


def key_of(stream: Any) -> tuple[int, int]:
    """The identity of a stream of the current device."""
    handle = handle_of(stream)
    # One handle means another stream in every thread.
    return handle, threading.get_ident() if handle == _PER_THREAD else 0


def follow(stream: Any, other: Any) -> None:
    """Let what comes next on ``stream`` wait, on the device, for what is on ``other`` now."""
    event = new_event()
    event.record(other)
    event.wait(stream)
