"""Threading layers of Numba, which run the loops, and how many threads the environment allows.

The default is tbb, the only layer in which a caller never waits for a thread that has not begun.
Where there is no wheel of it, Numba takes omp, then workqueue.
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

# Of the thread that holds it, a signal handler may step too: before the loop or after it.
_workqueue_lock = threading.RLock()
_start_lock = threading.RLock()
# Before those of the compiler and of Numba, which a first step takes within.
fork_between(_workqueue_lock, _start_lock)
_problem = ""
# How many parallel regions run, and `CLOSED` more for each fork that has begun: who comes then
# runs its loops alone. In a child without threads it is never less than `_WITHOUT_THREADS`.
regions = ctypes.c_int64()
REGIONS_AT = ctypes.addressof(regions)
CLOSED, _WITHOUT_THREADS = 1 << 32, 1 << 48
_without_threads = ""  # why
_tbb_has_ended = False  # for a fork


class _TeamOfThread(threading.local):
    """The threads for the loops of a Python thread: OpenMP starts others for each."""

    threads = 1


team: Any = None  # of the layer; .threads: how many have started; None before the layer has


class Limit(NamedTuple):
    """A number of threads that is not exceeded, and whose wish that is."""

    threads: int
    source: str


@cache
def limit_of_environment() -> Limit:
    """The limit that the system and the environment set; looked at once in a process."""
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
    """A number of threads from the environment; None where that says none."""
    # OpenMP takes a list, a number for each level of nested loops.
    text = os.environ.get(name, "").split(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def ignored_variables() -> list[str]:
    """Variables that should be a number of threads and are none: OpenMP ignores them too."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return [f"OMP_NUM_THREADS={text!r}"] if text and _number("OMP_NUM_THREADS") is None else []


def _quota(memberships: Path, mounts: Path) -> int | None:
    """Whole cores that the control groups of this process may use (versions 1 and 2), or None.

    A group is also limited by those around it. A container may see its own group as the root
    of the mount, whatever its path is outside.
    """
    found = []
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
            found += [_quota_of(place / part) for part in (group, *group.parents)]
    quotas = [quota for quota in found if quota is not None]
    return max(1, int(min(quotas))) if quotas else None


def _quota_of(group: Path) -> float | None:
    """Cores of one control group; None where it has no limit."""
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


# ``numba.get_num_threads()``, once the layer has been started. Through Python, Numba takes a lock
# of the process each time that it is asked, and a signal that ends the call while it takes that
# lock would leave it taken.
available_threads = NativeFunction(_ask_numba, "available threads", PythonEntry(returns=True))


def threading_layer() -> str | None:
    """The threading layer that is running in this process, or None before its first use."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def layer_problem() -> str:
    """Why the default layer, tbb, does not run although it is installed; "" where it does."""
    return _problem if threading_layer() not in ("tbb", None) else ""


def _add(place, value):
    return atomic_add(place, value)


add_atomically = NativeFunction(_add, "atomic add", PythonEntry(returns=True, holds_gil=True))


def _without_regions() -> Generator[None, None, None]:
    """During it no parallel region begins, and TBB has ended if no thread has a place in it."""
    global _tbb_has_ended
    process, running = os.getpid(), 0
    try:
        if add_atomically.is_loaded:  # before any region; the lock of the compiler is held here
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
    regions.value = _WITHOUT_THREADS if _without_threads else 0
    limit_of_environment.cache_clear()


def start_layer() -> bool:
    """Whether there are threads: those of Numba's layer, which starts once, when it has room.

    What is compiled finds the layer then.
    """
    return team is not None or _start_layer()


def _start_layer() -> bool:
    global team
    chosen = str(numba.config.THREADING_LAYER).lower()
    if threading_layer() is None and not _has_room(chosen, limit_of_environment().threads):
        return False
    # Numba's own two locks would not do: each thread that finds none makes the first one anew, and
    # Numba asks for it while it has the second. A fork waits for this one, and so for what is
    # imported meanwhile.
    with _start_lock:
        if threading_layer() is None:
            openmp = None if chosen == "workqueue" or _load_tbb(chosen) else _openmp()
            before = openmp.omp_get_max_threads() if openmp else 0
            numba.get_num_threads()
            if openmp and threading_layer() == "omp":
                # Numba sets it when its layer starts, for other libraries of this thread too.
                openmp.omp_set_num_threads(before)
            elif threading_layer() == "omp" and look_up(NAMES["omp"].place) is None:
                lose("omp")  # where another layer runs, there may be none
        if _uses_tbb():
            tbb.hold()
    available_threads.call  # noqa: B018  (compiles)
    team = _TeamOfThread() if threading_layer() == "omp" else SimpleNamespace(threads=1)
    return True


def can_run(threads: int) -> bool:
    """Whether a loop can run on so many threads, which then start if they have not yet."""
    if not start_layer():
        return False
    if threads > team.threads:
        if not _has_room(threading_layer(), threads):
            return False
        team.threads = threads
    return True


def _has_room(layer: str | None, threads: int) -> bool:
    # Workqueue starts all that there may ever be.
    return can_start(numba.config.NUMBA_NUM_THREADS if layer == "workqueue" else threads - 1)


def _load_tbb(chosen: str) -> bool:
    """Load tbb from PyPI, which lies where no loader looks, unless another layer was chosen."""
    global _problem
    if chosen in ("omp", "workqueue"):
        return False
    try:
        found = [f for f in files("tbb") or () if f.name in ("libtbb.so.12", "tbb12.dll")]
        for file in found:
            ctypes.CDLL(str(Path(str(file.locate())).resolve()), mode=ctypes.RTLD_GLOBAL)
    except PackageNotFoundError:
        return False
    except OSError as error:
        _problem = f"tbb does not load: {error}"
        return False
    return bool(found)


def _openmp() -> Any:
    """The library of OpenMP that Numba's layer uses, or would: PyTorch's, if that came first."""
    pool = look_up(NAMES["omp"].place)
    if pool is None:
        return None
    library = ctypes.CDLL(pool.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None


@cache
def layer_guard() -> AbstractContextManager[object]:
    """Workqueue aborts the process when two Python threads enter it at once."""
    start_layer()
    return _workqueue_lock if threading_layer() == "workqueue" else nullcontext()
