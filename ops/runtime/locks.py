"""Locks of ``use_locking=True``: calls on overlapping memory run in some serial order.

A dense or dense-equivalent call holds its variables exclusively. Lazy row calls on the same
variables run together, and their kernels lock each row around its update. Identity is the
memory, not the Python object: two views of one buffer exclude each other.

Requests are served in order of arrival: one waits for every earlier request that it conflicts
with, so neither readers of a row nor a sweep over the table can starve. A request takes all
its memory at once, so there is no deadlock.

A place in the queue is a lock of its thread, held by a ``with`` that is compiled code from end
to end. Whatever interrupts the call, it is released; a context manager in Python could itself be
interrupted before it does that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .errors import reject

T = TypeVar("T")
Identity = tuple[int, ...]
Span = tuple[int, int, Identity]
"""First byte, byte after the last, and the variables that this memory is part of."""

_entry = threading.RLock()
_requests: list[Request] = []  # in order of arrival


class Request:
    """A request for memory, to be used once: `serialized` holds ``place`` around all of it.

    Where it is ``shared``, other lazy row calls on the same variables may hold it too.
    """

    def __init__(self, spans: list[Span], *, shared: bool) -> None:
        self.spans, self.shared = spans, shared
        self.place = threading.RLock()
        self._over: list[Request] = []  # when it leaves

    def wait(self) -> None:
        """Enter the queue and wait until the memory is free.

        Raises:
            RuntimeError: this thread has it already, or has what one before it waits for.
        """
        awaited = [self]  # then all that it waits for, also by way of others
        with entered(_entry, "use_locking"):
            for earlier in reversed(_requests):
                if any(_conflict(later, earlier) for later in awaited):
                    # Found out before this one is in the queue: a place that its own thread holds
                    # would never become free, and an error leaves nothing behind.
                    entered(earlier.place, "use_locking")
                    awaited.append(earlier)
            _requests.append(self)
        # Waited for outside of the lock of the queue: meanwhile others may enter, and leave.
        for earlier in awaited[1:]:
            with earlier.place:
                pass
        self._over = awaited[1:]

    def leave(self) -> None:
        """Tidy up after the place was released; one that was interrupted here others remove."""
        with _entry:
            over = [self, *self._over]
            self._over = []  # else each would keep the one before it
            _requests[:] = [request for request in _requests if request not in over]


def serialized(work: Callable[[], T], spans: list[Span] | None, *, shared: bool) -> T:
    """The result of ``work``, which is done while the memory of ``spans`` is held; None: at once.

    Raises:
        RuntimeError: as `Request.wait`.
    """
    if spans is None:
        return work()
    request = Request(spans, shared=shared)
    try:
        with request.place:
            request.wait()
            return work()
    finally:
        request.leave()


def entered(lock: Any, where: str) -> Any:
    """``lock``, an RLock that is to be held once.

    A signal handler, or the ``__array__`` of a gradient, runs within a call of its own thread:
    if it waited for that call to end, it would wait for ever.

    Raises:
        RuntimeError: this thread holds it already.
    """
    if lock._is_owned():
        expected, got = "a call after its end", "one from a signal handler or an array's __array__"
        reject(RuntimeError, where, "a call", "is made within another one", expected, got)
    return lock


def _after_fork_in_child() -> None:
    # The threads that held or awaited memory in the parent do not exist here.
    global _entry
    _entry = threading.RLock()
    _requests.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def spans_of(variables: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> list[Span]:
    """The memory of variables, each given by addresses, sizes in bytes and bytes of a row."""
    spans = []
    for addresses, sizes, row_bytes in variables:
        identity = (*addresses, *sizes, row_bytes)
        spans += [(a, a + n, identity) for a, n in zip(addresses, sizes, strict=True) if n]
    return sorted(spans)


def overlaps(a: list[Span], b: list[Span]) -> Iterator[tuple[Identity, Identity]]:
    """The variables whose memory overlaps, of two lists in order."""
    i = j = 0
    while i < len(a) and j < len(b):
        begin_a, end_a, identity_a = a[i]
        begin_b, end_b, identity_b = b[j]
        if begin_a < end_b and begin_b < end_a:
            yield identity_a, identity_b
        if end_a <= end_b:
            i += 1
        else:
            j += 1


def _conflict(a: Request, b: Request) -> bool:
    """Whether any memory overlaps, other than that of equal variables held by row calls."""
    # Lazy calls keep apart by row locks, which kernels find by the address of a row: only calls
    # that see the same rows find the same locks, so any other view of the memory is a conflict.
    both_shared = a.shared and b.shared
    pairs = overlaps(a.spans, b.spans)
    return any(not both_shared or identity_a != identity_b for identity_a, identity_b in pairs)
