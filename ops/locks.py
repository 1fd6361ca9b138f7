"""What ``use_locking=True`` means: calls on overlapping memory in some serial order.

A dense or dense-equivalent call holds its variables exclusively. Lazy row calls on the same
variables run together, and their kernels lock each row around its update. Identity is the
memory, not the Python object: two views of one buffer exclude each other.

Requests are served in order of arrival: one waits for every earlier request that it conflicts
with, so neither readers of a row nor a sweep over the table can starve. A request takes all
its memory at once, so there is no deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_changed = threading.Condition()
_requests: list[_Request] = []

Span = tuple[int, int, tuple[int, ...]]
"""First byte, byte after the last, and the variables that this memory is part of."""


@dataclass(eq=False)
class _Request:
    spans: list[Span]
    shared: bool


def spans_of(variables: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> list[Span]:
    """The memory of variables, each given by addresses, sizes in bytes and bytes of a row."""
    spans = []
    for addresses, sizes, row_bytes in variables:
        identity = (*addresses, *sizes, row_bytes)
        spans += [(a, a + n, identity) for a, n in zip(addresses, sizes, strict=True) if n]
    return sorted(spans)


@contextmanager
def hold(spans: list[Span], *, shared: bool) -> Iterator[None]:
    """Hold memory exclusively, or together with other lazy row calls on the same variables.

    Args:
        spans: from `spans_of`.
        shared: for calls that lock the rows they touch.
    """
    mine = _Request(spans, shared)
    with _changed:
        _requests.append(mine)
        _changed.wait_for(lambda: not _must_wait(mine))
    try:
        yield
    finally:
        with _changed:
            _requests.remove(mine)
            _changed.notify_all()


def _must_wait(mine: _Request) -> bool:
    for other in _requests:
        if other is mine:
            return False
        if _conflict(mine, other):
            return True
    return False


def _conflict(a: _Request, b: _Request) -> bool:
    """Whether any memory overlaps, other than that of equal variables held by row calls."""
    both_shared = a.shared and b.shared
    i = j = 0
    while i < len(a.spans) and j < len(b.spans):
        begin_a, end_a, identity_a = a.spans[i]
        begin_b, end_b, identity_b = b.spans[j]
        overlap = begin_a < end_b and begin_b < end_a
        if overlap and not (both_shared and identity_a == identity_b):
            return True
        if end_a <= end_b:
            i += 1
        else:
            j += 1
    return False
