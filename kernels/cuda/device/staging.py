"""Pinned memory through which pieces of device arrays come to the host and go back.

There are two stages, so that while the host works on what lies in one, the next pieces arrive in
the other. Arrivals and departures have a stream each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda

from ...storage import Piece
from .backend import copy_in, device_id, new_event, start_copy_out
from .memory import Places, follow


class _Stage:
    """One of the two: pinned bytes, and when they are free again."""

    def __init__(self) -> None:
        self._bytes: Any = np.empty(0, np.uint8)
        self.arrived, self.free = new_event(), new_event()

    def views(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Room for pieces, one after the other."""
        places = Places()
        starts = [places.add(piece.nbytes) for piece in pieces]
        if places.size > len(self._bytes):
            # The memory that is dropped may still be on its way to the device.
            self.free.synchronize()
            self._bytes = cuda.pinned_array(places.size, np.uint8)
        return [
            self._bytes[start : start + piece.nbytes].view(piece.dtype)
            for start, piece in zip(starts, pieces, strict=True)
        ]


class Staging:
    """The two stages of the current device, and their streams."""

    def __init__(self) -> None:
        self._stages = (_Stage(), _Stage())
        self._arrivals, self._departures = cuda.stream(), cuda.stream()
        self._lock = threading.Lock()

    def run(
        self, chunks: Sequence[Sequence[Piece]], work: Callable[[int, list[np.ndarray]], None],
        stream: Any,
    ) -> None:  # fmt: skip
        """Bring each chunk of pieces to the host, work on it, and send back what goes back.

        ``work`` is called with the number of a chunk and its pieces as arrays. What is enqueued on
        the stream before comes first; what comes later waits.
        """
        with self._lock:
            # What the user has enqueued may still write what is fetched.
            follow(self._arrivals, stream)
            try:
                arriving = [self._fetch(k, chunk) for k, chunk in enumerate(chunks[:1])]
                for k, chunk in enumerate(chunks):
                    views = arriving.pop()
                    if k + 1 < len(chunks):
                        arriving.append(self._fetch(k + 1, chunks[k + 1]))
                    self._stages[k % 2].arrived.synchronize()
                    work(k, views)
                    self._send_back(k, chunk, views)
            finally:  # also what went back before an error is there before what comes next
                follow(stream, self._departures)

    def _fetch(self, k: int, chunk: Sequence[Piece]) -> list[np.ndarray]:
        stage = self._stages[k % 2]
        views = stage.views(chunk)
        # The device waits, not the host: what lay in this stage may still be on its way back.
        stage.free.wait(self._arrivals)
        for piece, view in zip(chunk, views, strict=True):
            start_copy_out(view, piece.address, self._arrivals)
        stage.arrived.record(self._arrivals)
        return views

    def _send_back(self, k: int, chunk: Sequence[Piece], views: list[np.ndarray]) -> None:
        for piece, view in zip(chunk, views, strict=True):
            if piece.goes_back:
                copy_in(piece.address, view, self._departures)
        self._stages[k % 2].free.record(self._departures)


_stagings: dict[int, Staging] = {}


def staging() -> Staging:
    """The stages of the current device; made at their first use."""
    device = device_id()
    if device not in _stagings:
        _stagings[device] = Staging()
    return _stagings[device]
