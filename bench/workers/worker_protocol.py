"""One timed step per request: what this benchmark and the worker processes of others share.

A worker reads pickles from its standard input and answers each with one. ``{"do": name, ...}`` asks
for what the method of that name of `_Server` returns for the others as its arguments;
``{"error": text}`` says that it failed; the end of input ends the worker.

Kinds are "dense", "rows" (one table with a row-sparse gradient), "mixed" (tables and dense
parameters) and "pooled" (tables whose rows are pooled: parameters say ``"bag": 20``, so many of
their indices in turn having one row of the gradient). Algorithms of these are "forward", "backward"
and "both", with the step that backward takes after a space.

Needs nothing but Python 3.8 and NumPy, since the library at the other end chooses the versions.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import gc
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LR = 1e-3
"""The learning rate of every step, ours and theirs."""
_WARM_UP = 3


def _nothing() -> None:
    pass


# -- scenarios ------------------------------------------------------------------------------------

SCENARIOS = (
    "loop", "pause20", "pause50", "flush", "busy", "torch", "torch-pause", "blas", "jax",
)  # fmt: skip
_FLUSHED = 2**28  # bytes at most
_PRODUCT = 1024  # rows and columns of the matrices that are multiplied: ten milliseconds or so
_PAUSE = 0.02  # seconds


class Turn(NamedTuple):
    """Steps in a row of one contestant: others first, which do not count, then those that do."""

    # Seconds of either.
    lead_in: float
    lasting: float
    steps: int  # at least, of either
    rounds: int  # of all contestants, at least

    def seconds(self, step: float) -> float:
        """How long a turn takes whose steps last so many seconds."""
        return sum(max(part, self.steps * step) for part in (self.lead_in, self.lasting))


def turn_in(scenario: str) -> Turn:
    """How long a turn is.

    The lead-in stands for the training loop that a short step is part of: threads are awake, each
    on a core of its own, and code and arrays are in the caches as far as they fit. Where something
    else comes before each step it is longer: a process that has slept or was stopped is treated
    well at first. Its threads wake up on different cores, and one that competes with another
    process goes first; that is over after four steps or so.
    """
    return Turn(5e-3, 1e-3, 1, 7) if scenario == "loop" else Turn(0.1, 0.1, 3, 3)


def last_cache_bytes() -> int:
    """Size of the largest cache of the first core; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text.endswith("K"):
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes, default=2**25)


def before_step(scenario: str, threads: int) -> Callable[[], object]:
    """The work of this process before each step of a scenario.

    Raises:
        ImportError: of "torch" and "torch-pause", where there is no PyTorch; of "jax" likewise.
    """
    if scenario == "torch":
        import torch

        torch.set_num_threads(threads)
        left, right = torch.ones(_PRODUCT, _PRODUCT), torch.ones(_PRODUCT, _PRODUCT)
        return lambda: torch.mm(left, right)
    if scenario == "torch-pause":
        work, pauses = before_step("torch", threads), itertools.cycle((0.0, _PAUSE))

        def work_and_pause() -> None:
            work()
            if pause := next(pauses):
                time.sleep(pause)

        return work_and_pause
    if scenario == "blas":  # its threads are as many as it likes: this package does not set them
        factor = np.ones((_PRODUCT, _PRODUCT), np.float32)
        product = np.empty_like(factor)
        return lambda: np.matmul(factor, factor, out=product)
    if scenario == "jax":  # likewise
        import jax

        host = jax.devices("cpu")[0]
        array = jax.device_put(np.ones((_PRODUCT, _PRODUCT), np.float32), host)
        multiply = jax.jit(lambda x: x @ x)
        return lambda: multiply(array).block_until_ready()
    if scenario == "flush":
        others = np.zeros(min(2 * last_cache_bytes(), _FLUSHED) // 8)
        return lambda: np.add(others, 1.0, out=others)
    if scenario.startswith("pause"):
        seconds = 1e-3 * int(scenario[len("pause") :])
        return lambda: time.sleep(seconds)
    return _nothing


# -- a step and what is measured of it ------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One optimizer step that can be repeated."""

    step: Callable[[], object]  # what is timed; returns when the work is done
    # What comes before each step and is not timed, such as new gradient arrays.
    load: Callable[[], object] = _nothing


def in_turn(of_sets: Sequence[Job], turns: Iterator[int]) -> Job:
    """A job that steps on sets of buffers in turn, so that nothing of the last is in the cache.

    Args:
        of_sets: the job of each set.
        turns: counts the steps. Several jobs share it: the next step, whoever takes it, is on the
            next set. If each job went round on its own, one would find in the cache what the one
            before it has just used.
    """
    if len(of_sets) == 1:
        return of_sets[0]
    now = of_sets[0]

    def load() -> None:
        nonlocal now
        now = of_sets[next(turns) % len(of_sets)]
        now.load()

    return Job(lambda: now.step(), load)


def samples(job: Job, scenario: str, before: Callable[[], object]) -> list[float]:
    """Seconds of each step of a turn; in a loop and beside a busy process only their mean.

    No garbage is collected meanwhile. Who waits for a busy process does so in one step of many, and
    the median of steps would not see it. Where a pause comes before every second step, two steps
    are a sample, likewise.
    """
    lead_in, lasting, fewest, _ = turn_in(scenario)
    found: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for seconds in (lead_in, lasting):
            found, end = [], time.perf_counter() + seconds
            while len(found) < fewest or time.perf_counter() < end:
                job.load()
                before()
                start = time.perf_counter()
                job.step()
                found.append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    if scenario == "torch-pause":
        return [sum(found[k : k + 2]) / 2 for k in range(0, len(found) - 1, 2)]
    return [sum(found) / len(found)] if scenario in ("loop", "busy") else found


def peak_memory(job: Job) -> int | None:
    """How many bytes more than before it a step needs at its peak; None where nobody counts them.

    Memory that the C library keeps for the next allocation is given back first: a step that
    takes it again would seem to need none. The pools of other allocators are not emptied.
    """
    job.load()
    _give_memory_back()
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
            reset.write("5")  # the peak is now what is in use now
    except OSError:
        return None
    before = _resident_bytes("VmRSS")
    job.step()
    return max(0, _resident_bytes("VmHWM") - before)


def _give_memory_back() -> None:
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # there is no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


# -- what a library says about itself -------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter of a case and its gradient."""

    shape: tuple[int, ...]  # of the parameter
    # float32, of that shape; where there are indices, one row for each of them.
    gradient: np.ndarray
    # int64, the rows of a row-sparse gradient, in any order and with duplicates.
    indices: np.ndarray | None
    start: np.ndarray  # float32 values of the parameter before the first step
    # How many indices in turn have one row of the gradient; None: each has its own.
    bag: int | None = None


@dataclass(frozen=True)
class Case:
    """A step as a set-up request describes it."""

    # Which step, and in which of the forms that the library has.
    algorithm: str
    form: str
    dtype: str  # of parameters and gradients
    parameters: list[Parameter]  # all parameters of one optimizer
    kind: str  # of these: "dense", "rows", "mixed" or "pooled"
    fresh: bool  # the gradients of each step are new arrays


def send(message: Any, pipe: Any) -> None:
    """Write a pickle; arrays can be read by any version of NumPy, unlike those that it pickles."""
    pickler = pickle.Pickler(pipe, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[np.ndarray] = lambda a: (np.ndarray, (a.shape, a.dtype.str, a.tobytes()))
    pickler.dump(message)
    pipe.flush()


def case_of(
    algorithm: str, form: str, kind: str, dtype: str, parameters: list[Any], fresh: bool
) -> Case:
    """A case as a request describes it: parameters are tuples, whose start may be one number."""
    found = [
        Parameter(shape, gradient, indices, np.broadcast_to(np.float32(start), shape), bag)
        for shape, gradient, indices, start, bag in parameters
    ]
    # Clipping in place leaves nothing to clip.
    return Case(algorithm, form, dtype, found, kind, fresh or algorithm == "clip-by-global-norm")


@dataclass(frozen=True)
class Replica:
    """Parameters, states and gradients of a case, in memory of their own."""

    job: Job  # takes a step on them
    # The parameters as they are now; where an algorithm has other results, those.
    values: Callable[[], Sequence[Any]]


def lookup(
    look_up: Callable[[], Any], values: Callable[[Sequence[Any]], Sequence[Any]] = list
) -> Replica:
    """A replica whose steps look rows up; ``values`` makes arrays of what the last has found."""
    found: list[Any] = []

    def step() -> None:
        found[:] = [look_up()]

    return Replica(Job(step), lambda: values(found))


def parts_of(
    part: str,
    forward: Callable[[], None],
    backward: Callable[[], None],
    values: Callable[[], Sequence[Any]],
) -> Replica:
    """A replica of pooled tables: a step is the one part, or both.

    Args:
        part: "forward", "backward" or "both".
        forward: pools rows.
        backward: takes a step with the gradient of what was pooled.
        values: what the forward has found; after a backward the tables.
    """

    def both() -> None:
        forward()
        backward()

    jobs = {"forward": Job(forward), "backward": Job(backward, forward), "both": Job(both)}
    return Replica(jobs[part], values)


# -- the server -----------------------------------------------------------------------------------


class _Server:
    """Answers requests, each with the method of its name; remembers what was set up, by form."""

    def __init__(self, load: Callable[[int], Any]) -> None:
        self._threads = int(sys.argv[-1])
        self._library = lru_cache(None)(lambda: load(self._threads))
        self._replicas: dict[str, list[Replica]] = {}
        self._jobs: dict[str, Job] = {}
        self._before = lru_cache(None)(lambda scenario: before_step(scenario, self._threads))

    def hello(self) -> dict[str, Any]:
        """The version of the library."""
        return {"version": self._library().version}

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """Names of the forms, such as "Adam(fused=True)", in which it has a step of "adam"."""
        return {"forms": [*self._library().forms(algorithm, kind, dtype)]}

    def setup(self, copies: int, warm_up: int | None = None, **described: Any) -> dict[str, Any]:
        """Make one form of a case, with so many sets of buffers.

        It takes ``warm_up`` steps before the first sample, or the library's own number.
        """
        case, library = case_of(**described), self._library()
        make = library.forms(case.algorithm, case.kind, case.dtype).get(case.form)
        if make is None:
            what = f"{case.algorithm}, {case.kind}, {case.dtype}"
            raise ValueError(f"no form {case.form!r} of {what}")
        replicas = [make(case) for _ in range(copies)]
        if warm_up is None:
            warm_up = getattr(library, "warm_up", _WARM_UP)
        for replica in replicas:
            for _ in range(warm_up):
                replica.job.load()
                replica.job.step()
        self._replicas[case.form] = replicas
        self._jobs[case.form] = in_turn([one.job for one in replicas], itertools.count())
        return {}

    def sample(self, form: str, scenario: str) -> dict[str, Any]:
        """The times of a turn."""
        return {"seconds": samples(self._jobs[form], scenario, self._before(scenario))}

    def memory(self, form: str) -> dict[str, Any]:
        """Bytes that a step needs beside its arrays; None where nobody sees them."""
        job, is_kept = self._jobs[form], getattr(self._library(), "keeps_memory", False)
        return {"bytes": None if is_kept else peak_memory(job)}

    def values(self, form: str) -> dict[str, Any]:
        """The parameters as they are now, in float32."""
        found = self._replicas[form][0].values()
        return {"arrays": [np.asarray(array, np.float32) for array in found]}

    def drop(self) -> dict[str, Any]:
        """Forget what was set up."""
        self._replicas.clear()
        self._jobs.clear()
        _give_memory_back()
        return {}

    def _answer(self, do: str, **request: Any) -> Any:
        """The answer to a request, whatever happens."""
        try:
            if do.startswith("_") or do not in vars(_Server):
                raise ValueError(f"no request {do!r}")
            return getattr(self, do)(**request)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def serve(load: Callable[[int], Any]) -> None:
    """Answer requests until the end of input.

    Args:
        load: imports the library for a number of threads, the script's last argument, and says
            about it ``version``; ``forms(algorithm, kind, dtype)``, by name the forms in which it
            has a step, each of which makes the `Replica` of a `Case`; and ``warm_up``, how many
            steps each replica takes before the first sample, if not 3. One that keeps the memory of
            its steps for the next ones, where nobody sees how much a step needs, says
            ``keeps_memory = True``.
    """
    # Libraries print to standard output; the answers keep it for themselves.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = sys.argv[-1]  # for whatever is loaded from now on
    _die_with_parent()
    server = _Server(load)
    with contextlib.suppress(EOFError):
        while True:
            send(server._answer(**pickle.load(sys.stdin.buffer)), channel)


def _die_with_parent() -> None:
    """On Linux: a worker that is stopped when its parent is killed must not stay for ever."""
    if sys.platform == "linux":
        pr_set_pdeathsig, sigkill = 1, 9
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill)
