"""The one parallel loop of the package, and the guard around the threading layer.

A `Loop` calls ``part(index, slot, call)`` for ``index`` in ``range(n)`` on several threads.
Each thread begins with a stretch of consecutive parts that is the same in every
call, so under OpenMP it finds in its caches what it left there in the step before, and memory is
read as it lies. When its stretch is done it helps with the others': parts are claimed one by one,
so a thread that the machine interrupts does not hold up the rest. No part's result may depend on
which thread ran it. Since all work arrives through a function's address, this is the only
function that Numba compiles with ``parallel=True``.

`run_all` runs several loops in one compiled call. Python looks at signals between its own
instructions only, so no KeyboardInterrupt falls between the loops of a step that change memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple, Protocol

import numba
import numpy as np
from numba import carray, njit, prange, types

from .cache import KernelCache
from .compile import NativeFunction, fork_between
from .headers import address_of
from .intrinsics import as_pointer, atomic_add, call_address, threads_of_numba

_LINE_BYTES = 64  # of a cache line: counters of different threads do not share one
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
            index = owner * n // threads + atomic_add(claimed + owner * _LINE_BYTES, 1)
            if index >= end:
                break
            call_address(function, index, slot, call)


@njit(nogil=True)
def _serial(function, n, call):
    for index in range(n):
        call_address(function, index, 0, call)


@njit(nogil=True)
def _serial_pair(function, n, call, last_function, last_n, last_call):
    _serial(function, n, call)
    _serial(last_function, last_n, last_call)


@njit(nogil=True)
def _serial_loops(loops, n_loops):
    fields = carray(as_pointer(loops), (n_loops, _LOOP_WORDS), np.int64)
    for k in range(n_loops):
        _serial(fields[k, 0], fields[k, 1], fields[k, 2])


@njit(parallel=True, nogil=True)
def _parallel_loops(loops, n_loops, claimed, claimed_bytes):
    fields = carray(as_pointer(loops), (n_loops, _LOOP_WORDS), np.int64)
    for k in range(n_loops):
        function, n, call, threads = fields[k, 0], fields[k, 1], fields[k, 2], fields[k, 3]
        if threads <= 1:
            _serial(function, n, call)
        else:
            for slot in prange(threads):
                _claim_parts(function, n, call, slot, threads, claimed + k * claimed_bytes)


@njit
def _available_threads():
    # Through Python, Numba takes a lock of the process each time that it is asked, and a signal
    # that ends the call while it takes that lock would leave it taken.
    return threads_of_numba()


_COMPILED = _available_threads, _serial, _serial_pair, _serial_loops, _parallel_loops
for _function in _COMPILED:
    _function._cache = KernelCache(f"loops {_function.__name__}")


class Loop(NamedTuple):
    """A loop that is ready to run: parts ``0 .. n-1`` of a function."""

    function: int  # address of a part
    n: int
    call: int  # address of the loop's arguments, which the caller keeps alive
    threads: int  # 1 and 0 run on the calling thread, without a dispatch

    @classmethod
    def of(cls, function: NativeFunction, n: int, call: int, threads: int) -> Loop:
        """On at most ``threads`` threads; compiles the function where that is still to be done."""
        return cls(function.address, n, call, min(threads, n))


_LOOP_WORDS = len(Loop._fields)


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
    _start_layer()
    available: int = _available_threads()
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
    """Load tbb from PyPI, which lies where no loader looks, unless another layer was chosen."""
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


@cache
def _start_layer() -> None:
    """Once for a process; what is compiled finds the layer then."""
    _prepare_layer()
    numba.get_num_threads()


def _layer_guard() -> AbstractContextManager[object]:
    """Workqueue aborts the process when two Python threads enter it at once."""
    return _workqueue_lock if threading_layer() in ("workqueue", None) else nullcontext()


@cache
def compile_loops() -> None:
    """Compile all loops, or read them from the cache."""
    _start_layer()
    for function in _COMPILED:
        function.compile((types.int64,) * function.py_func.__code__.co_argcount)


def start_threads() -> None:
    """Start the threading layer, as the first parallel step would."""
    run_all((Loop(0, 0, 0, 2),))


def run(function: NativeFunction, n: int, call: int, threads: int) -> None:
    """Run one loop; arguments as `Loop.of`."""
    if threads <= 1 or n <= 1:
        _serial(function.address, n, call)
    else:
        run_all((Loop.of(function, n, call, threads),))


def run_all(loops: tuple[Loop, ...]) -> None:
    """Run loops one after the other, all whatever signal comes in: memory is taken before."""
    threads = 1
    for loop in loops:
        threads = max(threads, loop[3])
    if threads == 1 and len(loops) == 2:  # a list of them takes longer to make than they to run
        (function, n, call, _), (last, last_n, last_call, _) = loops
        _serial_pair(function, n, call, last, last_n, last_call)
        return
    fields = array("q", sum(loops, ()))
    address, _ = fields.buffer_info()
    if threads == 1:
        _serial_loops(address, len(loops))
        return
    compile_loops()  # not within the guard: a thread that compiles may come to wait for it
    with _layer_guard():
        claimed = np.zeros((len(loops), threads * _LINE_BYTES), np.uint8)  # parts of each stretch
        _parallel_loops(address, len(loops), address_of(claimed), claimed.strides[0])


class Runs(Protocol):
    """What has loops that are ready to run."""

    @property
    def loops(self) -> tuple[Loop, ...]:
        """These."""


class Prepared(Runs, Protocol):
    """A step that only has to be run: all is checked and compiled, and all its memory taken."""

    def release(self) -> None:
        """Give back what it has borrowed."""


def commit(steps: Sequence[Prepared], count: Runs | None = None) -> None:
    """Write: run steps and count them, in one compiled call that nothing interrupts."""
    loops: tuple[Loop, ...] = ()
    for step in steps:
        loops += step.loops
    run_all(loops if count is None else loops + count.loops)
    for step in steps:
        step.release()
