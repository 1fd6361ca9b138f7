"""Room on the device that the calls on a stream share, and the order of streams.

A copy from ordinary host memory is staged by the driver before the call returns, so its source may
change at once and nothing waits for the device. (On "stream 0" of Numba's own copies it would.)
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import cuda

from .backend import address_of, device_id, handle_of, new_event

ALIGN = 256  # bytes
_LEAST = 1 << 16
_PER_THREAD = 2  # CU_STREAM_PER_THREAD
WORK, SUMS = range(2)
"""Kinds of room: for one launch or step, and for what several steps add to."""


class Places:
    """Sections of a room, one after the other."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, n_bytes: int) -> int:
        """The offset of a further section."""
        place = self.size
        self.size += -(-n_bytes // ALIGN) * ALIGN
        return place


class Room:
    """Memory on the device that every call on one stream uses, one after the other.

    What is enqueued on a stream runs in order, so a call may overwrite what an earlier one has
    left. ``with room:`` keeps other threads from enqueueing in between.
    """

    def __init__(self) -> None:
        self._array, self._size, self._address = None, 0, 0
        self._bytes: np.ndarray = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> int:
        """The address of at least ``n_bytes``."""
        if n_bytes > self._size:
            self._array, self._size = None, 0  # freed when the device is done with it
            # A power of 2, so that batches that grow from step to step seldom take new memory.
            size = max(_LEAST, 1 << (n_bytes - 1).bit_length())
            self._array = cuda.device_array(size, np.uint8)
            self._address, self._size = int(address_of(self._array)), size
        return self._address

    def to_copy(self, n_bytes: int) -> np.ndarray:
        """So many bytes of the host, for a copy that is staged before its call returns."""
        if n_bytes > len(self._bytes):
            self._bytes = np.zeros(1 << (n_bytes - 1).bit_length(), np.uint8)
        return self._bytes[:n_bytes]

    def __enter__(self) -> Room:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


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
