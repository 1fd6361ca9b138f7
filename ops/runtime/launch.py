"""Launches on CUDA devices: where, in which order and under which condition calls run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from . import cuda, pending
from .device import DeviceArray, launching
from .locks import Span, overlaps


class Launch(NamedTuple):
    """The stream of a call, and the condition under which it writes."""

    stream: Any  # of Numba
    guard: int = 0  # its address on the device, or 0 for a call that cannot fail
    base: int = 0  # added to a bad position that it finds

    @property
    def call(self) -> Any:
        """The context of the launches of a `DevicePart`."""
        return cuda.device.part.LaunchContext(self.stream, self.guard)


@contextmanager
def launch_on(arrays: Sequence[DeviceArray], lock_spans: list[Span] | None) -> Iterator[Launch]:
    """A launch on the stream of the first of all arrays that a call reads or writes.

    With ``lock_spans`` no other such call uses this memory at the same time.
    """
    with (
        launching(arrays) as stream,
        nullcontext() if lock_spans is None else in_order(lock_spans, stream),
    ):
        yield Launch(stream)


@contextmanager
def checked_launch(
    arrays: Sequence[DeviceArray], error: pending.Error | None, lock_spans: list[Span] | None = None
) -> Iterator[Launch]:
    """A launch (`launch_on`) with a guard, which the host reads later; no guard without error."""
    # The guards before the order of streams, as in steps of optimizers: two threads that took the
    # locks of both the other way round would wait for each other.
    with pending.held(), launch_on(arrays, lock_spans) as launch:
        if error is None:
            yield launch
            return
        with pending.guarded(arrays[0].device, error) as guard:
            yield launch._replace(guard=guard)


# What ``use_locking=True`` means on a device: calls on overlapping memory in the order of launch.
#
# Calls on one stream run one after the other anyway. A call on another stream is made to wait, on
# the device, for the last one that used the same memory; the host waits for nothing.

_lock = threading.Lock()
_uses: list[tuple[list[Span], Any]] = []  # of memory, each with the event after it


@contextmanager
def in_order(spans: list[Span], stream: Any) -> Iterator[None]:
    """Launch what follows on ``stream`` after all earlier calls that use memory of ``spans``."""
    with _lock:
        _uses[:] = [(used, event) for used, event in _uses if not event.query()]
        for used, event in _uses:
            if any(True for _ in overlaps(used, spans)):
                event.wait(stream)
        try:
            yield
        finally:  # also what was enqueued before an error
            own = cuda.device.backend.new_event()
            own.record(stream)
            # What it waited for is behind it: the list holds the last use of a stretch of memory.
            _uses[:] = [(used, event) for used, event in _uses if not _covers(spans, used)]
            _uses.append((spans, own))


def _covers(outer: list[Span], inner: list[Span]) -> bool:
    """Whether each stretch of ``inner`` lies in one of ``outer``; both are in order."""
    k = 0
    for begin, end, _ in inner:
        while k < len(outer) and outer[k][1] <= begin:
            k += 1
        if k == len(outer) or begin < outer[k][0] or outer[k][1] < end:
            return False
    return True
