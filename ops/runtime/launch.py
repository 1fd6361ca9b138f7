"""Launches on CUDA devices: where, in which order and under which condition calls run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from . import cuda, locks, pending
from .device import DeviceArray, Launch, launching


def launch_on(
    arrays: Sequence[DeviceArray], error: pending.Error | None = None, use_locking: bool = False
) -> AbstractContextManager[Launch]:
    """A launch on the stream of the first of all arrays that a call reads or writes.

    With an ``error`` it has a guard, which the host reads later. With ``use_locking`` it comes
    after all such launches on this device that were made before.
    """
    if error or use_locking:
        return _launch_in_order(arrays, error, use_locking)
    return launching(arrays)


@contextmanager
def _launch_in_order(
    arrays: Sequence[DeviceArray], error: pending.Error | None, use_locking: bool
) -> Iterator[Launch]:
    device = arrays[0].device
    # The guards before the order of streams, as in steps of optimizers: two threads that took the
    # locks of both the other way round would wait for each other.
    with (
        pending.held() if error else _FREE,
        launching(arrays) as launch,
        in_order(device, launch.stream) if use_locking else _FREE,
        pending.guarded(device, error) if error else _FREE as guard,
    ):
        yield Launch(launch.stream, guard or 0)


_FREE: Any = nullcontext()
_last: dict[Any, Any] = {}  # of each device, the event after the last call with use_locking


@contextmanager
def in_order(device: Any, stream: Any) -> Iterator[None]:
    """Launch what follows on ``stream`` after all earlier calls with ``use_locking``.

    Calls on one stream run one after the other anyway. A call on another stream is made to wait, on
    the device, for the last one before it; the host waits for nothing.
    """
    with locks.exclusive():
        last = _last.get(device)
        if last is not None and not last.query():
            last.wait(stream)
        try:
            yield
        finally:  # also what was enqueued before an error
            event = cuda.device.backend.new_event()
            event.record(stream)
            _last[device] = event
