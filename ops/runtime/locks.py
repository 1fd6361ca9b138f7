"""The lock of ``use_locking=True``: one for all calls of the process, which run in some order.

A call holds the lock from its first measurement to its last write, or while it is enqueued on a
device. It holds it neither while it reads what users gave, whose ``__array__`` may run any code,
nor while it waits for other processes.

The lock is held by a ``with`` of the lock itself, which is compiled code: whatever interrupts the
call, the lock is released. A context manager in Python could be interrupted before it does that.
"""

from __future__ import annotations

import threading
from typing import Any

from ...kernels.cpu.process.forks import in_child
from .errors import reject

_lock = threading.RLock()


def exclusive() -> Any:
    """The lock, to be entered by a ``with``.

    Raises:
        RuntimeError: this thread holds the lock already.
    """
    return entered(_lock, "use_locking")


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


@in_child
def _release() -> None:
    # A thread that held the lock in the parent does not exist here.
    global _lock
    _lock = threading.RLock()
