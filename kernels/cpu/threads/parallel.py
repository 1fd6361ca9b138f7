"""The one parallel loop of the package.

A `Loop` calls ``part(index, slot, call)`` for ``index`` in ``range(n)`` on several threads.
Each thread begins with a span of consecutive parts that is the same in every call, so its caches
may still hold that memory from the step before, and memory is read in its order. When its span
is done, the thread helps with the other spans. Parts are claimed one by one, so a thread that
the system interrupts, or that never comes, does not hold up the rest. The result of a part must not
depend on the thread that runs it. Since a loop gets its work as the address of a function, only one
function of the package is compiled by Numba with ``parallel=True``.

`run_all` runs several loops in one compiled call and in one parallel region: threads are woken
once, and go to the next loop when all parts of a loop are done. A waiting thread only waits for
parts that are already running, never for a thread that has not begun. Python handles signals only
between its own instructions, so no KeyboardInterrupt comes between the loops of a step that change
memory.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import compress, count
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numba
import numpy as np
from numba import carray, prange

from ...inner import NO_WRAPPERS, njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import (
    as_pointer,
    atomic_add,
    call_address,
    cpu_pause,
    limit_numba,
    load_acquire,
    load_int64,
    number_from,
    sleep,
    store_clock,
    threads_of_numba,
)
from ..compiler.lines import LINE
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from ..headers.arrays import addresses_of
from . import layers as layer
from . import openmp
from .layers import (
    CLOSED,
    REGIONS_AT,
    Limit,
    add_atomically,
    available_threads,
    can_run,
    layer_guard,
    limit_of_environment,
    start_layer,
    threading_layer,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_budget: int | None = None


class _Caller(threading.local):
    """Settings of a Python thread for the loops of its calls."""

    limit: Limit | None = None
    team = 0  # the number of PyTorch's threads that may run the loops; 0: none may
    launcher: str | None = None  # `_OPENMP` or `_LAYER`: whose threads ran the last loops


_caller = _Caller()
_OPENMP, _LAYER = "openmp", "layer"
# So often a waiting thread reads a counter, in 20 to 50 ns each time, before it yields its core:
# the part that it waits for may belong to a thread that the system has suspended.
_CHECKS = 8_000


@njit
def _run_parts(function, n, call, slot, threads, claimed):
    """Run unclaimed parts, those of this thread's span first; returns how many were run."""
    done = 0
    for k in range(threads):
        owner = (slot + k) % threads
        # The same product and division as for the begin of the next span: no part is left out.
        end = (owner + 1) * n // threads
        while True:
            # Each span has its counter on a cache line of its own, so threads that work on
            # different spans do not compete for a line.
            index = owner * n // threads + atomic_add(claimed + owner * LINE, 1)
            # The counter goes on past the end: whoever comes later finds nothing left either.
            if index >= end:
                break
            call_address(function, index, slot, call)
            done += 1
    return done


@njit
def _wait(done, n):
    """Wait until a counter has reached ``n``; returns whether that took long."""
    checks = 0
    while load_acquire(done) < n:
        checks += 1
        if checks < _CHECKS:
            cpu_pause()
        else:
            sleep()
    return checks >= _CHECKS


@njit
def _serial(function, n, call):
    for index in range(n):
        call_address(function, index, 0, call)


@njit
def _work(loops, n_loops, slot, counters, counters_bytes):
    """Run one thread's share of all loops."""
    fields = carray(as_pointer(loops), (n_loops, _LOOP_WORDS), np.int64)
    for k in range(n_loops):
        function, n, call, threads = fields[k, 0], fields[k, 1], fields[k, 2], fields[k, 3]
        done = counters + k * counters_bytes
        claimed, count = done + LINE, 0
        # A loop for one thread is run by the first thread that comes: the others would have to wait
        # for a certain thread.
        if threads <= 1:
            if atomic_add(claimed, 1) == 0:
                _serial(function, n, call)
                count = n
        elif slot < threads:
            count = _run_parts(function, n, call, slot, threads, claimed)
        if count > 0:
            atomic_add(done, count)
        # After the last loop the threading layer waits, or `_join`.
        if k + 1 < n_loops:
            _wait(done, n)


@njit
def _limit_numba(threads):
    """Limit the threads of Numba's loops in this thread; returns the limit before."""
    before = np.int64(threads_of_numba())
    limit_numba(threads)
    return before


@numba.njit(parallel=True, **NO_WRAPPERS)
def _in_parallel(loops, n_loops, threads, counters, counters_bytes):
    before = _limit_numba(threads)  # without a limit the layer would wake all of its threads
    for slot in prange(threads):
        _work(loops, n_loops, slot, counters, counters_bytes)
    _limit_numba(before)


@njit
def _each_serial(loops, n_loops):
    fields = carray(as_pointer(loops), (n_loops, _LOOP_WORDS), np.int64)
    for k in range(n_loops):
        _serial(fields[k, 0], fields[k, 1], fields[k, 2])


def _call_parallel(loops, n_loops, threads, counters, counters_bytes, regions):
    # A region is counted before it begins: either a fork finds the region and leaves the threads
    # alone, or this call finds the fork and runs its loops on one thread.
    if atomic_add(regions, 1) < CLOSED:
        _in_parallel(loops, n_loops, threads, counters, counters_bytes)
        atomic_add(regions, -1)
    else:
        atomic_add(regions, -1)
        _each_serial(loops, n_loops)


class Region(NamedTuple):
    """Arguments and results of a region on threads of OpenMP, all ``int64``."""

    loops: int
    n_loops: int
    threads: int  # the number of threads that may work
    counters: int
    counters_bytes: int
    thread_number: int  # the address of `openmp.Functions.thread_number`
    team_size: int  # the address of `openmp.Functions.team_size`
    begun: int  # the number of threads that have come
    clock: int  # the clock of the second thread
    was_late: int  # whether the first thread had to wait long for others


_BEGUN, _CLOCK = (8 * Region._fields.index(name) for name in ("begun", "clock"))
_regions_at = records(Region)


def _join(region):
    """Do one thread's share of the loops of a region."""
    r = _regions_at(region, 1)[0]
    slot = number_from(r.thread_number)
    atomic_add(region + _BEGUN, 1)
    # The caller's own thread is awake anyway: the clock of the second tells whether the others are.
    if slot == 1:
        store_clock(region + _CLOCK)
    if slot < r.threads:
        _work(r.loops, r.n_loops, slot, r.counters, r.counters_bytes)
    # OpenMP would wait without yielding the core, which the awaited thread may need.
    last = r.loops + (r.n_loops - 1) * _LOOP_WORDS * 8
    is_late = _wait(r.counters + (r.n_loops - 1) * r.counters_bytes, load_int64(last + 8))
    is_late |= _wait(region + _BEGUN, number_from(r.team_size))
    if slot == 0 and is_late:
        r.was_late = 1


def _call_shared(parallel, join, region, is_forked):
    # A signal handler may have forked since the threads were checked.
    if load_int64(is_forked) == 0:
        call_address(parallel, join, region, 0, 0)
    else:
        r = _regions_at(region, 1)[0]
        _each_serial(r.loops, r.n_loops)


def _call_serial(loops, n_loops):
    _each_serial(loops, n_loops)


def _call_pair(first, last):
    for loop in (first, last):
        fields = int64s(loop, _LOOP_WORDS)
        _serial(fields[0], fields[1], fields[2])


_serial_loops = NativeFunction(_call_serial, "serial loops", PythonEntry())
_serial_pair = NativeFunction(_call_pair, "a pair of serial loops", PythonEntry())
# The calls of Numba's threading layer differ between its versions.
_parallel_loops = NativeFunction(
    _call_parallel, f"parallel loops, numba {numba.__version__}", PythonEntry()
)
_joined = NativeFunction(_join, "a thread of OpenMP")
_shared_loops = NativeFunction(_call_shared, "loops on threads of OpenMP", PythonEntry())
SHARED_LOOPS = _joined, _shared_loops
LOOPS = _serial_loops, _serial_pair, add_atomically, _parallel_loops


def set_num_threads(n: int | None) -> None:
    """Use at most ``n`` threads in every later call of this process; None: remove this limit.

    The smallest wins of ``n``, the affinity mask, the CPU quota of the container,
    ``OMP_NUM_THREADS``, ``NUMBA_NUM_THREADS`` and Numba's own ``numba.set_num_threads``, in steps
    of ``fusestep.nn.torch`` also a lowered ``torch.set_num_threads``; ``fusestep info`` says which
    one it is. Results do not depend on it.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is smaller than 1.
    """
    global _budget
    if n is not None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"set_num_threads: n must be an int or None, got {n!r}")
        if n < 1:
            raise ValueError(f"set_num_threads: n must be at least 1, got {n}")
    _budget = n


def get_num_threads() -> int:
    """The number of threads that the next call may use, without the limits of nn.torch alone."""
    most = limit_of_environment().threads
    limit = _caller.limit
    if limit is not None:
        most = min(most, limit.threads)
    # The layer is not started for one thread. Here and below, most steps call nothing.
    if most == 1 or (layer.team is None and not start_layer()):
        return 1
    most = min(most, available_threads.call())
    return most if _budget is None else min(most, _budget)


def launcher() -> str | None:
    """Tell whose threads ran the last parallel step of this Python thread.

    Returns:
        ``"openmp"`` for PyTorch's threads, which were awake; otherwise Numba's threading layer,
        such as ``"tbb"``. None if no step has used several threads. Results do not depend on it.

    Example:
        >>> import numpy as np
        >>> import fusestep
        >>> from fusestep import ops
        >>> fusestep.launcher() in (None, fusestep.threading_layer())
        True
    """
    return threading_layer() if _caller.launcher == _LAYER else _caller.launcher


def deciding_limit() -> Limit:
    """The result of `get_num_threads` in this thread, and the setting that decides it."""
    limit_of_caller = _caller.limit
    limits = [limit_of_environment(), *([limit_of_caller] if limit_of_caller else [])]
    if all(limit.threads > 1 for limit in limits):
        if start_layer():
            limits.append(Limit(available_threads.call(), "numba.set_num_threads"))
        else:
            limits.append(Limit(1, "the memory and the threads that the system has left"))
    if _budget is not None:
        limits.append(Limit(_budget, "fusestep.set_num_threads"))
    return min(limits, key=lambda limit: limit.threads)  # the first of equal limits


def limit_threads(
    limit: Limit | None, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> _R:
    """Call a function whose loops stay within a limit; an outer limit still holds."""
    before = _caller.limit
    # No context manager: an interrupt could come between its begin and the `with`.
    try:
        _caller.limit = min(filter(None, (before, limit)), default=None)
        return function(*args, **kwargs)
    finally:
        _caller.limit = before


def share_openmp_threads(
    ask: Callable[[], int], name: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: loops of the function may run on PyTorch's threads, whose number ``ask`` returns.

    If PyTorch has fewer threads than now, loops use no more; ``name`` is the function by which a
    user has lowered the number.
    """
    most = ask()  # PyTorch's default: a thread for each physical core

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def beside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if (team := ask()) < most:
                return limit_threads(Limit(team, name), function, *args, **kwargs)
            before = _caller.team
            try:  # as in `limit_threads`
                _caller.team = team
                return function(*args, **kwargs)
            finally:
                _caller.team = before

        return beside

    return decorate


class Arguments:
    """The arguments of a loop in memory: addresses of arrays, which are kept alive; 0 for None."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self._call = call
        are_arrays = [*map(np.ndarray.__instancecheck__, call)]
        numbers = [0 if own else x or 0 for x, own in zip(call, are_arrays, strict=True)]
        addresses = addresses_of([*compress(call, are_arrays)])
        for k, address in zip(compress(count(), are_arrays), addresses, strict=True):
            numbers[k] = address
        self.words = array("q", numbers)
        self.address, _ = self.words.buffer_info()


class Loop:
    """A loop that is ready to run: parts ``0 .. n-1`` of a function.

    ``words`` are what compiled code reads: the address of a part, ``n``, the address of the loop's
    arguments, which the caller keeps alive, and the number of threads that may run the loop. With
    1 or 0 threads it runs on one thread, part after part, as slot 0.
    """

    __slots__ = "address", "words"

    def __init__(self, function: int, n: int, call: int, threads: int) -> None:
        self.words = array("q", (function, n, call, threads))
        self.address, _ = self.words.buffer_info()

    @classmethod
    def of(cls, function: NativeFunction, n: int, call: int, threads: int) -> Loop:
        """A loop on at most ``threads`` threads; compiles the function if need be."""
        return cls(function.address, n, call, min(threads, n))

    def cut(self, n: int, threads: int) -> None:
        """Cut the loop into ``n`` parts, on so many threads."""
        self.words[_N], self.words[_THREADS] = n, threads


_N, _THREADS, _LOOP_WORDS = 1, 3, 4


@cache
def compile_loops() -> None:
    """Compile all loops, or read them from the cache."""
    start_layer()
    for function in LOOPS:
        function.call  # noqa: B018  (compiles)


def start_threads() -> None:
    """Start the threading layer, as the first parallel step would."""
    if get_num_threads() > 1:
        # A loop without parts for two threads only wakes them.
        run_all((Loop(0, 0, 0, 2),))


def run(function: NativeFunction, n: int, call: int, threads: int) -> None:
    """Run one loop; arguments as `Loop.of`."""
    run_all((Loop.of(function, n, call, threads),))


def run_all(loops: Sequence[Loop]) -> None:
    """Run loops one after the other; all run, whatever signal comes: memory is taken before."""
    if not loops:
        return
    # Making a list of one or two loops takes longer than running them.
    first, last = loops[0], loops[-1]
    if len(loops) <= 2 and first.words[_THREADS] <= 1 and last.words[_THREADS] <= 1:
        if first is last:
            _serial_loops.call(first.address, 1)
        else:
            _serial_pair.call(first.address, last.address)
        return
    words = array("q")
    for loop in loops:
        words += loop.words
    run_words(words)


def run_words(words: array[int]) -> None:
    """Run the loops that have these words, one after the other."""
    n_loops, threads = len(words) // _LOOP_WORDS, max(words[_THREADS::_LOOP_WORDS])
    address, _ = words.buffer_info()
    has_threads = layer.team is not None and threads <= layer.team.threads
    if threads <= 1 or not (has_threads or can_run(threads)):
        _serial_loops.call(address, n_loops)
        return
    compile_loops()  # outside of the guard, for which a thread that compiles may wait
    # Each loop counts the parts that are done, then the parts of each span that are claimed.
    counter_bytes = (1 + threads) * LINE
    counters = array("q", bytes(n_loops * counter_bytes))
    counting = counters.buffer_info()[0], counter_bytes
    team = _caller.team
    # All threads of a team come to a region, so a team that is larger than allowed is not used.
    is_allowed = 1 < team <= get_num_threads()
    if is_allowed and (omp := openmp.functions()) and openmp.is_awake(team):
        asked = omp.thread_number, omp.team_size
        region = array("q", (address, n_loops, threads, *counting, *asked, 0, 0, 0))
        region_at, _ = region.buffer_info()
        _shared_loops.call(omp.parallel, _joined.address, region_at, openmp.IS_FORKED_AT)
        openmp.record_loop(*region[-2:])
        _caller.launcher = _OPENMP
        return
    with layer_guard():
        _parallel_loops.call(address, n_loops, threads, *counting, REGIONS_AT)
        _caller.launcher = _LAYER


class Runs(Protocol):
    """A holder of loops that are ready to run."""

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops, in the order in which they run."""


class Prepared(Runs, Protocol):
    """A step that is ready to run: checked and compiled, with all of its memory allocated."""

    def release(self) -> None:
        """Give back borrowed memory."""


class Joined:
    """Several prepared steps as one."""

    def __init__(self, steps: Sequence[Prepared]) -> None:
        self._steps = steps
        self.loops = tuple(loop for step in steps for loop in step.loops)

    def release(self) -> None:
        """Give back the borrowed memory of each step."""
        for step in self._steps:
            step.release()


def commit(steps: Sequence[Prepared], count: Runs | None = None) -> None:
    """Write: run steps and count them, in one compiled call that nothing interrupts."""
    loops: tuple[Loop, ...] = ()
    for step in steps:
        loops += step.loops
    # One call for all: if a step was written but not counted, the next step would correct its bias
    # with the wrong number.
    run_all(loops if count is None else loops + count.loops)
    # Last: an interrupt here only loses scratch memory, which the next call allocates anew.
    for step in steps:
        step.release()
