"""The one parallel loop of the package, and the guard around the threading layer.

``run(part, n, call)`` calls ``part(index, slot, call)`` for ``index`` in ``range(n)`` on
several threads. Each thread begins with a stretch of consecutive parts that is the same in every
call, so under OpenMP it finds in its caches what it left there in the step before, and memory is
read as it lies. When its stretch is done it helps with the others': parts are claimed one by one,
so a thread that the machine interrupts does not hold up the rest. No part's result may depend on
which thread ran it. Since all work arrives through a function's address, this is the only
function that Numba compiles with ``parallel=True``.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import numba
import numpy as np
from numba import njit, prange, types

from ..cache import KernelCache
from ..compile import NativeFunction, fork_between
from .intrinsics import atomic_add, call3

_LINE_WORDS = 8  # int64 of a cache line: counters of different threads do not share one
# Of the thread that holds it, a signal handler may step too: before the loop or after it.
_workqueue_lock = threading.RLock()
fork_between(_workqueue_lock)  # before those of the compiler, which a first step takes within
_thread_budget: int | None = None
_caller = threading.local()  # .serial: this Python thread wants no others
_forked_after_openmp = False


@njit(nogil=True)
def _claim_parts(function, n, call, slot, threads, claimed):
    for k in range(threads):
        owner = (slot + k) % threads
        end = (owner + 1) * n // threads
        while True:
            index = owner * n // threads + atomic_add(claimed, owner * _LINE_WORDS, 1)
            if index >= end:
                break
            call3(function, index, slot, call)


@njit(parallel=True, nogil=True)
def _parallel(function, n, call, threads, claimed):
    for slot in prange(threads):
        _claim_parts(function, n, call, slot, threads, claimed)


@njit(nogil=True)
def _serial(function, n, call):
    for index in range(n):
        call3(function, index, 0, call)


_parallel._cache = KernelCache("parallel loop")
_serial._cache = KernelCache("serial loop")


def set_num_threads(n: int | None) -> None:
    """Use at most ``n`` threads in every later call of this process; None: as Numba is set.

    Numba's own ``numba.set_num_threads`` and ``NUMBA_NUM_THREADS`` still act: the smaller
    number wins. Results do not depend on it.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is smaller than 1.
    """
    global _thread_budget
    if n is not None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"set_num_threads: n must be an int or None, got {n!r}")
        if n < 1:
            raise ValueError(f"set_num_threads: n must be at least 1, got {n}")
    _thread_budget = n


def get_num_threads() -> int:
    """How many threads the next call may use."""
    if _forked_after_openmp or getattr(_caller, "serial", False):
        return 1
    _prepare_layer()  # before Numba is asked, which starts the layer
    available: int = numba.get_num_threads()
    return available if _thread_budget is None else min(available, _thread_budget)


@contextmanager
def serial(wanted: bool) -> Iterator[None]:
    """Within it, calls of this Python thread run on it alone, if that is ``wanted``."""
    before = getattr(_caller, "serial", False)
    _caller.serial = before or wanted
    try:
        yield
    finally:
        _caller.serial = before


def threading_layer() -> str | None:
    """The threading layer that is running in this process, or None before its first use."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _after_fork_in_child() -> None:
    # GNU OpenMP kills a forked child at its first parallel loop.
    global _forked_after_openmp
    if threading_layer() == "omp":
        _forked_after_openmp = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@cache
def _prepare_layer() -> None:
    """Make tbb from PyPI loadable, if it is installed and the user chose no other layer.

    Its library lies in a folder that the loader does not search; loaded by its full path,
    Numba finds it.
    """
    chosen = str(numba.config.THREADING_LAYER).lower()
    if chosen in ("omp", "workqueue") or threading_layer() is not None:
        return
    try:
        for file in files("tbb") or ():
            if file.name in ("libtbb.so.12", "libtbb.12.dylib"):
                path = Path(str(file.locate())).resolve()
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (PackageNotFoundError, OSError):
        return


def _layer_guard() -> AbstractContextManager[object]:
    """Workqueue aborts the process when two Python threads enter it at once."""
    return _workqueue_lock if threading_layer() in ("workqueue", None) else nullcontext()


def compile_loops() -> None:
    """Compile both loops, or read them from the cache."""
    _prepare_layer()  # either starts the layer
    _serial.compile((types.int64,) * 3)
    _parallel.compile((*(types.int64,) * 4, types.int64[::1]))


def start_threads() -> None:
    """Start the threading layer, as the first parallel step would."""
    _prepare_layer()
    with _layer_guard():
        _parallel(0, 0, 0, 2, np.zeros(2 * _LINE_WORDS, np.int64))


def run(function: NativeFunction, n: int, call: int, threads: int) -> None:
    """Run parts ``0 .. n-1`` of ``function`` with the arguments ``call`` on ``threads`` threads.

    Args:
        function: a part.
        n: number of parts.
        call: address of the loop's arguments, which the caller keeps alive.
        threads: at most this many; 1 runs on the calling thread, without a dispatch.
    """
    threads = min(threads, n)
    if threads <= 1:
        _serial(function.address, n, call)
        return
    _prepare_layer()
    with _layer_guard():
        claimed = np.zeros(threads * _LINE_WORDS, np.int64)  # parts of each stretch
        _parallel(function.address, n, call, threads, claimed)
