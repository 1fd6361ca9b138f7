"""What ``use_locking=True`` means: calls on overlapping memory in some serial order.

A dense or dense-equivalent call holds its variables exclusively. Lazy row calls on the same
variables run together, and their kernels lock each row around its update. Identity is the
memory, not the Python object: two views of one buffer exclude each other.

Requests are served in order of arrival: one waits for every earlier request that it conflicts
with, so neither readers of a row nor a sweep over the table can starve. A request takes all
its memory at once, so there is no deadlock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

_changed = threading.Condition()
_requests: list[Request] = []

Identity = tuple[int, ...]
Span = tuple[int, int, Identity]
"""First byte, byte after the last, and the variables that this memory is part of."""


class Request:
    """A place in the queue for memory, taken when it is made; ``with`` waits and holds it.

    Args:
        spans: from `spans_of`.
        shared: whether other lazy row calls on the same variables may hold it too.
    """

    def __init__(self, spans: list[Span], *, shared: bool) -> None:
        self.spans = spans
        self.shared = shared
        with _changed:
            _requests.append(self)

    def __enter__(self) -> None:
        try:
            with _changed:
                _changed.wait_for(lambda: not _must_wait(self))
        except BaseException:  # an interrupt while waiting must not leave the place taken
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with _changed:
            if self in _requests:
                _requests.remove(self)
            _changed.notify_all()


def _after_fork_in_child() -> None:
    # The threads that held or awaited memory in the parent do not exist here.
    global _changed
    _changed = threading.Condition()
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


def _must_wait(mine: Request) -> bool:
    for other in _requests:
        if other is mine:
            return False
        if _conflict(mine, other):
            return True
    return False


def _conflict(a: Request, b: Request) -> bool:
    """Whether any memory overlaps, other than that of equal variables held by row calls."""
    both_shared = a.shared and b.shared
    pairs = overlaps(a.spans, b.spans)
    return any(not both_shared or identity_a != identity_b for identity_a, identity_b in pairs)
