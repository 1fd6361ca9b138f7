"""What ``use_locking=True`` means on a device: calls on overlapping memory in the order of launch.

Calls on one stream run one after the other anyway. A call on another stream is made to wait, on
the device, for the last one that used the same memory; the host waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .locks import Span, overlaps

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
    from ...kernels.cuda.device.backend import new_event

    with _lock:
        _uses[:] = [use for use in _uses if not use.event.query()]
        for use in _uses:
            if any(True for _ in overlaps(use.spans, spans)):
                use.event.wait(stream)
        try:
            yield
        finally:  # also what was enqueued before an error
            event = new_event()
            event.record(stream)
            # What it waited for is behind it: the list holds the last use of a stretch of memory.
            _uses[:] = [use for use in _uses if not _covers(spans, use.spans)]
            _uses.append(_Use(spans, event))


def _covers(outer: list[Span], inner: list[Span]) -> bool:
    """Whether each stretch of ``inner`` lies in one of ``outer``; both are in order."""
    k = 0
    for begin, end, _ in inner:
        while k < len(outer) and outer[k][1] <= begin:
            k += 1
        if k == len(outer) or begin < outer[k][0] or outer[k][1] < end:
            return False
    return True
