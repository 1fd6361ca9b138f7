"""Room on the device that the calls on a stream share, what is copied there, and order of streams.

What is copied goes through pinned memory, since a copy from other memory may wait for the stream.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import cuda

from .backend import address_of, copy_from, device_id, handle_of, new_event

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
        self.size += aligned(n_bytes)
        return place


def aligned(n_bytes: int) -> int:
    """The next offset at which a section may begin."""
    return -(-n_bytes // ALIGN) * ALIGN


class _Pinned:
    """Pinned memory out of which copies are enqueued, one part of it after the other."""

    def __init__(self) -> None:
        self.bytes: Any = np.empty(0, np.uint8)
        self.address, self.used, self.last = 0, 0, new_event()

    def begin(self, n_bytes: int) -> None:
        """Use it from the start, for so many bytes at least; the host waits for its last copies."""
        # Until then copies may read this memory, and what is written would go along with them.
        self.last.synchronize()
        self.used = 0
        if n_bytes > len(self.bytes):
            size = max(_LEAST, 2 << (n_bytes - 1).bit_length())
            self.bytes = cuda.pinned_array(size, np.uint8)
            self.address = int(self.bytes.ctypes.data)


class Room:
    """Memory on the device that every call on one stream uses, one after the other.

    What is enqueued on a stream runs in order, so a call may overwrite what an earlier one has
    left. ``with room:`` keeps other threads from enqueueing in between.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._array, self._size, self._address = None, 0, 0
        # Copies come from one of them while those from the other may still be on their way.
        self._pinned, self._other = _Pinned(), _Pinned()

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
        """So many bytes of the host, for the next `copy`."""
        pinned = self._pinned
        if pinned.used + n_bytes > len(pinned.bytes):
            pinned.last.record(self._stream)  # behind the last copy
            self._pinned, self._other = self._other, pinned
            pinned = self._pinned
            pinned.begin(n_bytes)
        found: np.ndarray = pinned.bytes[pinned.used : pinned.used + n_bytes]
        return found

    def copy(self, address: int, n_bytes: int) -> None:
        """Enqueue a copy of the bytes that `to_copy` gave to an address of the device."""
        pinned = self._pinned
        copy_from(address, pinned.address + pinned.used, n_bytes, self._stream)
        pinned.used += aligned(n_bytes)

    def send(self, address: int, array: np.ndarray) -> None:
        """Enqueue a copy of a contiguous array to an address of the device."""
        self.to_copy(array.nbytes)[:] = array.reshape(-1).view(np.uint8)
        self.copy(address, array.nbytes)

    def __enter__(self) -> Room:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_rooms: dict[tuple[int, ...], Room] = {}


def room_of(stream: Any, kind: int = WORK) -> Room:
    """The room of a stream of the current device; there is one of each ``kind``."""
    key = device_id(), *key_of(stream), kind
    # By `setdefault` two threads that make one at once get the same.
    return _rooms.get(key) or _rooms.setdefault(key, Room(stream))


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
