"""Locks that forks of this process wait for, and hold until they are done.

A child has only the thread that forked: a lock that another one held is never released there. A
new lock in the child would not do, as what the lock guards may be half changed: lists of Numba,
the heap and tables of LLVM, queues of threads.

What is held is a generator that waits at its ``yield``: closing it is compiled code, and the
``with`` or ``finally`` in it is left whatever interrupts it. A hook can be interrupted where it
begins, most likely by a signal that came during the fork; so what is held is let go twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

_Held = Generator[None, None, None]
_holdings: list[Callable[[], _Held]] = []
_mine = threading.local()  # .forks: what each fork of this thread holds, those that wait included


def fork_between(*locks: Any) -> None:
    """Let every fork of this process wait until no other thread holds one of ``locks``.

    That lasts as long as one compilation or step. Locks are taken in the order in which steps
    take them; those given in a later call come before those of an earlier one.
    """
    _holdings[:0] = [partial(_hold, lock) for lock in locks]


def during_forks(holding: Callable[[], _Held]) -> None:
    """Let every fork take place within the ``yield`` of this generator, after it has all locks."""
    _holdings.append(holding)


def _hold(lock: Any) -> _Held:
    with lock:
        yield


def _before() -> None:
    held: list[_Held] = []
    vars(_mine).setdefault("forks", []).append(held)  # a signal handler may fork while this waits
    for holding in _holdings:
        # Listed before it is begun: whatever interrupts this, what is held by then is let go.
        held.append(holding())
        next(held[-1])


def _release() -> None:
    for held in reversed(_mine.forks[-1]):
        held.close()


def _end() -> None:
    _release()
    _mine.forks.pop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_release)
    os.register_at_fork(after_in_parent=_end, after_in_child=_end)
