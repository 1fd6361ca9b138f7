"""What ``use_locking=True`` means on a device: calls on overlapping memory in the order of launch.

Calls on one stream run one after the other anyway. A call on another stream is made to wait, on
the device, for the last one that used the same memory; the host waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .locks import Span

_lock = threading.Lock()


class _Use(NamedTuple):
    spans: list[Span]
    event: Any


_uses: list[_Use] = []


@contextmanager
def in_order(spans: list[Span], stream: Any) -> Iterator[None]:
    """Launch what follows on ``stream`` after all earlier calls that use memory of ``spans``.

    Args:
        spans: memory of one device, from `locks.spans_of`.
        stream: of Numba.
    """
    from ..kernels.cuda.memory import new_event

    with _lock:
        _uses[:] = [use for use in _uses if not use.event.query()]
        for use in _uses:
            if _overlap(use.spans, spans):
                use.event.wait(stream)
        try:
            yield
        finally:  # also what was enqueued before an error
            event = new_event()
            event.record(stream)
            # What it waited for is behind it: the list holds the last use of a stretch of memory.
            _uses[:] = [use for use in _uses if not _covers(spans, use.spans)]
            _uses.append(_Use(spans, event))


def _overlap(a: list[Span], b: list[Span]) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def _covers(outer: list[Span], inner: list[Span]) -> bool:
    return all(any(x[0] <= y[0] and y[1] <= x[1] for x in outer) for y in inner)
