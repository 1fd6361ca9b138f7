"""Threading layers of Numba, which run the loops, and the threads that the environment allows.

The default is tbb, the only layer in which a caller never waits for a thread that has not begun.
If tbb is not installed, Numba takes omp, then workqueue.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba

from ...private import NAMES, look_up, lose
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import atomic_add, threads_of_numba
from ..compiler.machine import PythonEntry
from ..process.forks import during_forks, fork_between, in_child
from ..process.room import can_start
from . import tbb

# Reentrant: a signal handler in the thread that holds it may take a step, before or after the loop.
_workqueue_lock = threading.RLock()
_start_lock = threading.RLock()
# A first step takes the locks of the compiler and of Numba while it holds these.
fork_between(_workqueue_lock, _start_lock)
_problem = ""
# The number of parallel regions that run, plus `CLOSED` for each fork that has begun: a call that
# begins during a fork runs its loops on one thread. In a child that cannot have threads the number
# is at least `_WITHOUT_THREADS`.
regions = ctypes.c_int64()
REGIONS_AT = ctypes.addressof(regions)
CLOSED, _WITHOUT_THREADS = 1 << 32, 1 << 48
_without_threads = ""  # why this process cannot have threads, or ""
_tbb_has_ended = False  # whether TBB was ended for the fork that is going on


class _TeamOfThread(threading.local):
    """The threads for the loops of one Python thread: OpenMP starts a team for each."""

    threads = 1


team: Any = None  # the layer's threads; `.threads` have started; None before the layer starts


class Limit(NamedTuple):
    """A maximum number of threads, and the setting that it comes from."""

    threads: int
    source: str


@cache
def limit_of_environment() -> Limit:
    """The limit that the system and the environment set; read once in a process."""
    if _without_threads:
        return Limit(1, _without_threads)
    limits = [Limit(_cores(), "the cores of this process")]
    if (quota := _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))) is not None:
        limits.append(Limit(quota, "the CPU quota of the container"))
    limits += [
        Limit(number, name)
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
        if (number := _number(name)) is not None
    ]
    return min(limits, key=lambda limit: limit.threads)


def _cores() -> int:
    """The number of cores that this process may run on."""
    can_say = hasattr(os, "sched_getaffinity")
    return max(1, len(os.sched_getaffinity(0)) if can_say else os.cpu_count() or 1)


def _number(name: str) -> int | None:
    """A number of threads from an environment variable; None if it has none."""
    # OpenMP accepts a list: a number for each level of nested loops.
    text = os.environ.get(name, "").split(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def ignored_variables() -> list[str]:
    """Variables whose value is no number of threads; OpenMP ignores them too."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return [f"OMP_NUM_THREADS={text!r}"] if text and _number("OMP_NUM_THREADS") is None else []


def _quota(memberships: Path, mounts: Path) -> int | None:
    """Whole cores that the control groups of this process may use (versions 1 and 2), or None.

    A group is also limited by its parent groups. A container may see its own group as the root of
    the mount, whatever its path is outside.
    """
    quotas_of_groups = []
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # there are no control groups
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        places = [mounts / controllers, mounts / "cpu"] if controllers else [mounts]
        for place in places:
            group = Path(path.lstrip("/"))
            quotas_of_groups += [_quota_of(place / part) for part in (group, *group.parents)]
    quotas = [quota for quota in quotas_of_groups if quota is not None]
    return max(1, int(min(quotas))) if quotas else None


def _quota_of(group: Path) -> float | None:
    """Cores of one control group; None if it has no limit."""
    # Version 2 has both numbers in one file, version 1 a file for each.
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text("utf-8") for name in names).split()
        except (OSError, ValueError):
            continue
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # not "max", not -1
            return int(quota) / int(period)
    return None


def _ask_numba():
    return threads_of_numba()


# ``numba.get_num_threads()``, after the layer has started. Called through Python, Numba would take
# a lock of the process each time, and a signal that ends the call at that moment would leave the
# lock taken.
available_threads = NativeFunction(_ask_numba, "available threads", PythonEntry(returns=True))


def threading_layer() -> str | None:
    """The threading layer that runs in this process, or None before its first use."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def layer_problem() -> str:
    """Why the default layer, tbb, does not run although it is installed, or ""."""
    return _problem if threading_layer() not in ("tbb", None) else ""


def _add(place, value):
    return atomic_add(place, value)


add_atomically = NativeFunction(_add, "atomic add", PythonEntry(returns=True, holds_gil=True))


def _without_regions() -> Generator[None, None, None]:
    """At its ``yield`` no parallel region begins, and TBB has ended if no other thread uses it."""
    global _tbb_has_ended
    process, running = os.getpid(), 0
    try:
        if add_atomically.is_loaded:  # else no region has run; a fork cannot compile it here
            # In one addition: a region either was counted before, or finds the gate closed.
            running = add_atomically.call(REGIONS_AT, CLOSED) % CLOSED
        _tbb_has_ended = not running and _uses_tbb() and tbb.end()
        yield
    finally:
        if regions.value >= CLOSED:
            add_atomically.call(REGIONS_AT, -CLOSED)
        if _uses_tbb() and (_tbb_has_ended or os.getpid() == process):
            tbb.hold()
        if _tbb_has_ended:
            _forget_threads()
        if os.getpid() == process:
            _tbb_has_ended = False


during_forks(_without_regions)


def _forget_threads() -> None:
    if team is not None:
        team.threads = 1


def _uses_tbb() -> bool:
    return threading_layer() == "tbb" and not _without_threads


@in_child
def _look_for_threads_anew() -> None:
    global _tbb_has_ended, _without_threads
    if threading_layer() == "omp":  # GNU OpenMP kills a forked child at its first parallel loop
        _without_threads = "a fork after threads of omp had started"
    elif _uses_tbb() and not _tbb_has_ended:
        _without_threads = "a fork while other threads had used tbb"
    _forget_threads()
    _tbb_has_ended = False
    # So large that it stays above `CLOSED` whatever is added and taken away: no region begins.
    regions.value = _WITHOUT_THREADS if _without_threads else 0
    limit_of_environment.cache_clear()


def start_layer() -> bool:
    """Start Numba's layer, once, if there is room for it; returns whether it has started.

    Compiled loops find the layer then.
    """
    return team is not None or _start_layer()


def _start_layer() -> bool:
    global team
    chosen = str(numba.config.THREADING_LAYER).lower()
    if threading_layer() is None and not _has_room(chosen, limit_of_environment().threads):
        return False
    # Numba's own two locks are not enough: each thread that finds no first lock makes a new one,
    # and Numba asks for it while it holds the second. A fork waits for `_start_lock`, and so for
    # all modules that are imported under it.
    with _start_lock:
        if threading_layer() is None:
            openmp = None if chosen == "workqueue" or _load_tbb(chosen) else _openmp()
            before = openmp.omp_get_max_threads() if openmp else 0
            numba.get_num_threads()
            if openmp and threading_layer() == "omp":
                # Numba sets the number when its layer starts, for other libraries as well.
                openmp.omp_set_num_threads(before)
            elif threading_layer() == "omp" and look_up(NAMES["omp"].place) is None:
                lose("omp")  # only omp is missed: with another layer the name may be absent
        if _uses_tbb():
            tbb.hold()
    available_threads.call  # noqa: B018  (compiles)
    team = _TeamOfThread() if threading_layer() == "omp" else SimpleNamespace(threads=1)
    return True


def can_run(threads: int) -> bool:
    """Whether a loop can run on so many threads; those that have not started yet start then."""
    if not start_layer():
        return False
    if threads > team.threads:
        if not _has_room(threading_layer(), threads):
            return False
        team.threads = threads
    return True


def _has_room(layer: str | None, threads: int) -> bool:
    # Workqueue starts the largest number of threads that it can ever use.
    return can_start(numba.config.NUMBA_NUM_THREADS if layer == "workqueue" else threads - 1)


def _load_tbb(chosen: str) -> bool:
    """Load tbb of PyPI, which no loader finds, unless the user has chosen another layer."""
    global _problem
    if chosen in ("omp", "workqueue"):
        return False
    try:
        libraries = [f for f in files("tbb") or () if f.name in ("libtbb.so.12", "tbb12.dll")]
        for file in libraries:
            # For all libraries: Numba's layer finds it by the name that is loaded.
            ctypes.CDLL(str(Path(str(file.locate())).resolve()), mode=ctypes.RTLD_GLOBAL)
    except PackageNotFoundError:
        return False
    except OSError as error:
        _problem = f"tbb does not load: {error}"
        return False
    return bool(libraries)


def _openmp() -> Any:
    """The OpenMP library of Numba's layer: PyTorch's, if that was loaded first."""
    pool = look_up(NAMES["omp"].place)
    if pool is None:
        return None
    library = ctypes.CDLL(pool.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None


@cache
def layer_guard() -> AbstractContextManager[object]:
    """The lock of workqueue, which aborts the process when two Python threads enter it at once."""
    start_layer()
    return _workqueue_lock if threading_layer() == "workqueue" else nullcontext()
