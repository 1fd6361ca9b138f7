"""Calls on a device whose indices are not known to be good yet.

Indices on a device are checked there, and a call with a bad index writes nothing
(`kernels.cuda.device.guard`). The host learns of it when it next waits for the device, in
`synchronize` or elsewhere. Then the error is raised, and the counts of the call are taken back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ...kernels.cpu.process.forks import in_child
from . import cuda
from .frameworks import on_device

MOST_PENDING = 1_024
"""The number of calls with indices after which the host waits for the device."""

Error = Callable[[int, int], Exception]
"""Makes the exception for a call, from a bad position and the index there."""


class _Guards:
    """The guards of one device, and the calls that wait for their answer."""

    def __init__(self, device: int) -> None:
        guard = cuda.device.guard
        untouched = np.array([guard.NOTHING] + [0] * (guard.WORDS - 1), np.int64)
        self._device, self._fresh = device, np.tile(untouched, (MOST_PENDING, 1))
        with on_device(device):
            self._array = cuda.numba.device_array(self._fresh.nbytes, np.uint8)
            self.address = int(cuda.device.backend.address_of(self._array))
        self.used = 0
        self.calls: list[tuple[int, Error]] = []  # by the number of the guard
        self._clear()

    def _clear(self) -> None:
        self.used, self.calls = 0, []
        with on_device(self._device):
            cuda.device.backend.copy_in(self.address, self._fresh, cuda.numba.default_stream())
            cuda.numba.synchronize()

    def settle(self) -> list[Exception]:
        """Wait for the device; returns the errors of all calls."""
        guard, words = cuda.device.guard, np.empty_like(self._fresh)
        with on_device(self._device):
            cuda.numba.synchronize()
            cuda.device.backend.copy_out(words, self.address, cuda.numba.default_stream())
        calls = self.calls
        self._clear()
        return [
            error(int(words[slot, guard.FOUND]), int(words[slot, guard.INDEX]))
            for slot, error in calls
            if words[slot, guard.FOUND] != guard.NOTHING
        ]


_lock = threading.RLock()
_guards: dict[int, _Guards] = {}


@contextmanager
def guarded(device: int, error: Error) -> Iterator[int]:
    """The address of an open guard, for a call on a device that is enqueued in this context.

    The call writes only if the guard stays open; otherwise it has an ``error``. After every
    `MOST_PENDING` calls the host waits for the device: then the error of an earlier call may be
    raised, before anything of this call has happened.
    """
    with _lock:
        guards = _guards.get(device) or _guards.setdefault(device, _Guards(device))
        if guards.used >= MOST_PENDING:
            synchronize()
        slot = guards.used
        guards.used += 1
        yield guards.address + slot * cuda.device.guard.BYTES
        # Only a call that was enqueued as a whole is recorded: otherwise the host raises another
        # error at once.
        guards.calls.append((slot, error))


def held() -> AbstractContextManager[Any]:
    """A context in which no other thread settles calls."""
    return _lock


def synchronize() -> None:
    """Wait for all calls on CUDA devices, and raise their errors.

    A row-sparse call on device arrays returns before its indices are checked. A call with an index
    out of range writes nothing; a step of `fusestep.nn` then writes no tensor at all, and its
    counts of updates are taken back when the error is raised. Later steps have counted it until
    then. The error is raised here, or by the next call that waits for the devices anyway
    (``state_dict``, ``load_state_dict``, every 1,024th row-sparse call). Without calls on a device
    this function returns at once.

    Raises:
        IndexError: an index was out of range. Further errors are in its notes.
    """
    with _lock:
        errors = [error for guards in _guards.values() for error in guards.settle()]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"also: {other}")
        raise errors[0]


def settle() -> None:
    """Wait for all devices (`synchronize`) if any check is pending."""
    with _lock:
        if any(guards.calls for guards in _guards.values()):
            synchronize()


@in_child
def _forget_calls() -> None:
    # A forked child cannot use the parent's devices.
    global _lock
    _lock = threading.RLock()
    _guards.clear()
