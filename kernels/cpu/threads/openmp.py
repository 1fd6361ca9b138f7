"""The threads of PyTorch's OpenMP, on which a step right after PyTorch's own work begins at once.

After a loop these threads wait actively for another one, for some milliseconds, before they sleep.
Until then they compete with all other threads for the cores, but a loop that is given to them
begins within microseconds. When they sleep, a loop on them is slow: OpenMP ends it only when each
of its threads has come, even one for which the system has no core. So a loop runs on them if they
are awake, and otherwise on Numba's threading layer. Results do not depend on the choice.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from functools import cache
from typing import NamedTuple

import numba

from ..process.forks import in_child
from ..process.room import can_start
from .layers import threading_layer

VARIABLE = "FUSESTEP_SHARE_OPENMP"
_NOBODY = -1  # in place of a clock: OpenMP runs the loops of this thread on this thread alone
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 128  # loops
is_forked = ctypes.c_int64()  # whether a fork has left the threads behind
IS_FORKED_AT = ctypes.addressof(is_forked)


class Functions(NamedTuple):
    """Addresses of functions of an OpenMP library; all libraries use the names of GNU's."""

    parallel: int  # (function, argument, number of threads or 0, flags)
    thread_number: int
    team_size: int


def why_not() -> str:
    """Why OpenMP threads are never used for loops, or ""."""
    layer, wanted = threading_layer(), numba.config.THREADING_LAYER
    reasons = {
        f"{VARIABLE}=0": os.environ.get(VARIABLE) == "0",
        "looked for on Linux alone": sys.platform != "linux",
        f"NUMBA_THREADING_LAYER={wanted}": wanted != "default",  # the user wants that layer
        f"the threading layer is {layer or 'not started'}": layer != "tbb",  # workqueue has a lock
        "a fork leaves them behind": bool(is_forked.value),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


@cache
def functions() -> Functions | None:
    """The OpenMP functions that PyTorch calls; None if there are none, or loops may not use them.

    Numba's layer must have been started.
    """
    if why_not():
        return None
    library = ctypes.CDLL(None)
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    try:
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except AttributeError:
        return None
    return Functions(*(address or 0 for address in addresses))


class _Team(threading.local):
    """The OpenMP threads that run the loops of this Python thread, as far as they are known."""

    size = 0  # the number of threads that PyTorch reported when the clock was read
    clock = 0  # of the processor time of the second thread; 0: not known yet
    left_alone = 0  # the number of the next loops that run elsewhere
    patience = 0  # the next value of `left_alone`, after a loop that has waited for a thread


_team = _Team()


def is_awake(size: int) -> bool:
    """Whether the ``size`` OpenMP threads of this thread run now, or are not known yet."""
    if _team.size != size:
        _team.size, _team.clock = size, 0
    if _team.left_alone:
        _team.left_alone -= 1
        return False
    if _team.clock not in (0, _NOBODY):
        try:
            # The processor time of a thread that sleeps, or waits for a core, stands still.
            return time.clock_gettime_ns(_team.clock) < time.clock_gettime_ns(_team.clock)
        except OSError:  # it has ended
            _team.clock = 0
    # The next loop finds the clock. OpenMP ends the process if it cannot start threads.
    return _team.clock == 0 and can_start(size - 1)


def record_loop(clock: int, was_late: int) -> None:
    """Record what a loop has found out about the threads.

    Args:
        clock: an ``int32`` that the second thread wrote; 0: no second thread has come.
        was_late: the first thread had to wait for another one long after its own work. A thread
            that waits actively uses up its share of a core when another process wants one, and the
            system may suspend it in the middle of the next loop. So the threads are left alone for
            some loops then, for more each time.
    """
    # 32 bits of the word were written, signed: Linux numbers the clocks of threads below 0.
    _team.clock = ctypes.c_int32(clock).value or _NOBODY
    if was_late:
        _team.patience = min(2 * _team.patience + _FIRST_PATIENCE, _MOST_PATIENCE)
        _team.left_alone = _team.patience
    else:
        _team.patience = max(0, _team.patience - 1)


@in_child
def _forget_threads() -> None:
    is_forked.value = 1
    functions.cache_clear()
