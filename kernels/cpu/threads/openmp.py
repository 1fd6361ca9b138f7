"""The threads of PyTorch's OpenMP, on which a step right after PyTorch's own work begins at once.

After a loop they look for another one for some milliseconds before they sleep. Until then they
compete with all other threads for the cores, while a loop that is given to them begins within
microseconds. Once they sleep it is the other way round: OpenMP ends a loop when each of its threads
has come, also one that the system has no core for. So they are asked for a loop when they are
seen to run, and Numba's layer in all other cases. Results do not depend on it.
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
_NOBODY = -1  # in place of a clock: OpenMP runs the loops of this thread on it alone
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 128  # loops
_is_forked = False


class Functions(NamedTuple):
    """Addresses of what libraries of OpenMP export; all have the names of GNU's."""

    parallel: int  # (function, argument, number of threads or 0, flags)
    thread_number: int
    team_size: int


def obstacle() -> str:
    """The reason why loops never run on these threads; "" where they may."""
    layer, wanted = threading_layer(), numba.config.THREADING_LAYER
    obstacles = {
        f"{VARIABLE}=0": os.environ.get(VARIABLE) == "0",
        "looked for on Linux alone": sys.platform != "linux",
        f"NUMBA_THREADING_LAYER={wanted}": wanted != "default",  # who names one wants that one
        f"the threading layer is {layer or 'not started'}": layer != "tbb",  # workqueue has a lock
        "a fork leaves them behind": _is_forked,
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), "")


@cache
def functions() -> Functions | None:
    """The functions that PyTorch calls; None where there are none, or where loops may not use them.

    Numba's layer has been started.
    """
    if obstacle():
        return None
    library = ctypes.CDLL(None)
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    try:
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except AttributeError:
        return None
    return Functions(*(address or 0 for address in found))


class _Team(threading.local):
    """The threads that run the loops of this one, as far as they are known."""

    size = 0  # as PyTorch said when the clock was read
    clock = 0  # of the processor time of the second; 0: to be found out
    left_alone = 0  # in so many more loops
    patience = 0  # in how many after the next one that has to wait for a thread


_team = _Team()


def is_awake(size: int) -> bool:
    """Whether the threads of this one run now, or are still to be found; ``size``: how many."""
    if _team.size != size:
        _team.size, _team.clock = size, 0
    if _team.left_alone:
        _team.left_alone -= 1
        return False
    if _team.clock not in (0, _NOBODY):
        try:
            # Of a thread that sleeps, or waits for a core, the time stands still.
            return time.clock_gettime_ns(_team.clock) < time.clock_gettime_ns(_team.clock)
        except OSError:  # it has ended
            _team.clock = 0
    # A loop finds out. OpenMP ends the process if it cannot start threads.
    return _team.clock == 0 and can_start(size - 1)


def seen(clock: int, was_late: int) -> None:
    """Keep the findings of a loop.

    Args:
        clock: that the second thread wrote, an ``int32``; 0: none has come.
        was_late: the first thread had to wait for another long after its own work. One that looks
            for work has used up its share of a core when another process wants one, and the
            system may put it aside in the middle of the next loop. It is left alone for some loops
            then, for more each time.
    """
    _team.clock = ctypes.c_int32(clock).value or _NOBODY
    if was_late:
        _team.patience = min(2 * _team.patience + _FIRST_PATIENCE, _MOST_PATIENCE)
        _team.left_alone = _team.patience
    else:
        _team.patience = max(0, _team.patience - 1)


@in_child
def _forget_threads() -> None:
    global _is_forked
    _is_forked = True
    functions.cache_clear()
