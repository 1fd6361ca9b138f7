"""Everything that this package does when its process forks, in one order.

1. Before the fork, its thread takes the locks of `fork_between`, then begins the generators of
   `during_forks`.
2. After the fork, parent and child end those generators and release the locks, in reverse order.
3. The child calls the functions of `in_child`, in the order in which they were registered.

A child has only the thread that forked: a lock that another thread held is never released there.
A new lock in the child is no remedy where the data that the lock guards may be half changed: lists
of Numba, the heap and tables of LLVM, queues of threads.

A lock is held by a generator that waits at its ``yield``: closing it is compiled code, and the
``with`` or ``finally`` in it is left whatever interrupts it. A hook can be interrupted where it
begins, most likely by a signal that came during the fork; so everything is released twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

_Held = Generator[None, None, None]
_holdings: list[Callable[[], _Held]] = []
_mine = threading.local()  # .forks: for each fork of this thread, the waiting too, what it holds


def fork_between(*locks: Any) -> None:
    """Let every fork of this process wait until no other thread holds one of ``locks``.

    The wait lasts as long as one compilation or step. Locks are taken in the order in which steps
    take them; those given in a later call come before those of an earlier one.
    """
    _holdings[:0] = [partial(_hold, lock) for lock in locks]


def during_forks(holding: Callable[[], _Held]) -> None:
    """Let every fork happen at the ``yield`` of this generator, which begins under all locks."""
    _holdings.append(holding)


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator: the function is called in the child of every fork, after all locks are released.

    An error or interrupt in one function does not keep the next from being called.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


def _hold(lock: Any) -> _Held:
    with lock:
        yield


def _before() -> None:
    held: list[_Held] = []
    vars(_mine).setdefault("forks", []).append(held)  # a signal handler may fork while this waits
    for holding in _holdings:
        # Listed before it is begun: if this is interrupted, whatever is held by then is released.
        held.append(holding())
        next(held[-1])


def _release() -> None:
    # Without effect at its second call: a generator that is closed stays so.
    for held in reversed(_mine.forks[-1]):
        held.close()


def _end() -> None:
    _release()
    _mine.forks.pop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_release)
    os.register_at_fork(after_in_parent=_end, after_in_child=_end)
