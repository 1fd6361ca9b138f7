"""One timed step per request: what this benchmark and the worker processes of others share.

A worker reads JSON lines from its standard input and answers each with one JSON line::

    {"do": "hello"}
        -> {"version": "2.13.0"}
    {"do": "forms", "algorithm": "adam", "kind": "dense", "dtype": "float32"}
        -> {"forms": ["Adam(foreach=True)", "Adam(fused=True)"]}
    {"do": "setup", "algorithm": ..., "form": ..., "kind": ..., "dtype": ..., "copies": 1,
     "parameters": [{"shape": [9, 4], "gradient": "/g.npy", "indices": null}],
     "fresh_gradients": false}
        -> {}
    {"do": "sample", "form": ..., "scenario": "loop", "steps": 1}
        -> {"seconds": [0.0123]}
    {"do": "memory", "form": ...}
        -> {"bytes": 4096}
    {"do": "values", "form": ..., "path": "/x.npz"}
        -> {}
    {"do": "drop"}
        -> {}

An answer ``{"error": text}`` says that the request failed; the end of input ends the worker.

Kinds are "dense", "rows" (one table with a row-sparse gradient), "mixed" (tables and dense
parameters) and "pooled" (tables whose rows are pooled: parameters say ``"bag": 20``, so many of
their indices in turn having one row of the gradient). Algorithms of these are "forward", "backward"
and "both", with the step that backward takes after a space.

A set-up may say ``"warm_up": n``, the steps before the first sample, instead of the library's own
number, and a parameter ``"start": "/w.npy"``, its values instead of zeros.

Needs nothing but Python 3.8 and NumPy, since the library at the other end chooses the versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

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
LEAD_IN, MOST_LEAD_IN = 5e-3, 20  # seconds, and steps, before a sample in a loop: one at least
TURN = 0.1  # seconds that count of a turn in a scenario other than "loop", about
FEWEST = 3  # steps that count, where one takes longer than that
_FLUSHED = 2**28  # bytes at most
_PRODUCT = 1024  # rows and columns of the matrices that are multiplied: ten milliseconds or so
_PAUSE = 0.02  # seconds


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


class Turns:
    """Sets of buffers in turn, so that a step finds nothing in the cache that the last one left.

    Several jobs can share the turns: the next step, whoever takes it, is on the next set. If each
    job went round on its own, one would find in the cache what the one before it has just used.
    """

    def __init__(self) -> None:
        self._steps = 0

    def job(self, of_sets: Sequence[Job]) -> Job:
        """A job whose steps are those of the given jobs, one for each set."""
        if len(of_sets) == 1:
            return of_sets[0]
        now = of_sets[0]

        def load() -> None:
            nonlocal now
            now = of_sets[self._steps % len(of_sets)]
            self._steps += 1
            now.load()

        return Job(lambda: now.step(), load)


def sample(job: Job, steps: int) -> float:
    """Mean seconds of ``steps`` steps in a row, after a lead-in of others that do not count.

    The lead-in stands for the training loop that a short step is part of: threads are awake, each
    on a core of its own, and code and arrays are in the caches as far as they fit.
    """
    left, lead_in = MOST_LEAD_IN, LEAD_IN
    while left and lead_in > 0:
        lead_in -= _timed(job)
        left -= 1
    return sum(_timed(job) for _ in range(steps)) / steps


def _timed(job: Job, before: Callable[[], object] = _nothing) -> float:
    job.load()
    before()
    start = time.perf_counter()
    job.step()
    return time.perf_counter() - start


def turn(job: Job, before: Callable[[], object]) -> list[float]:
    """Seconds of each step of a training loop that does something else before each.

    The loop goes on for as long before the first step that counts. A process that has slept or was
    stopped is treated well at first: its threads wake up on different cores, and one that
    competes with another process goes first. That is over after four steps or so.
    """
    found: list[float] = []
    for _ in range(2):
        end = time.perf_counter() + TURN
        found = []
        while len(found) < FEWEST or time.perf_counter() < end:
            found.append(_timed(job, before))
    return found


def samples(job: Job, scenario: str, steps: int, before: Callable[[], object]) -> list[float]:
    """Seconds of a step: the mean of so many in a loop, or those of a turn in another scenario.

    No garbage is collected meanwhile. Beside a busy process they are one sample, their mean: who
    waits for the other process does so in one step of many, and the median of steps would not see
    it. Where a pause comes before every second step, two steps are a sample, likewise.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        found = [sample(job, steps)] if scenario == "loop" else turn(job, before)
    finally:
        if collecting:
            gc.enable()
    if scenario == "torch-pause":
        return [sum(found[k : k + 2]) / 2 for k in range(0, len(found) - 1, 2)]
    return [sum(found) / len(found)] if scenario == "busy" else found


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
        return {"version": self._library().version}

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        return {"forms": [*self._library().forms(algorithm, kind, dtype)]}

    def setup(self, **request: Any) -> dict[str, Any]:
        case, library = _case(request), self._library()
        make = library.forms(case.algorithm, case.kind, case.dtype).get(case.form)
        if make is None:
            what = f"{case.algorithm}, {case.kind}, {case.dtype}"
            raise ValueError(f"no form {case.form!r} of {what}")
        replicas = [make(case) for _ in range(request["copies"])]
        for replica in replicas:
            for _ in range(request.get("warm_up", getattr(library, "warm_up", _WARM_UP))):
                replica.job.load()
                replica.job.step()
        self._replicas[case.form] = replicas
        self._jobs[case.form] = Turns().job([replica.job for replica in replicas])
        return {}

    def sample(self, form: str, scenario: str, steps: int) -> dict[str, Any]:
        return {"seconds": samples(self._jobs[form], scenario, steps, self._before(scenario))}

    def memory(self, form: str) -> dict[str, Any]:
        job, is_kept = self._jobs[form], getattr(self._library(), "keeps_memory", False)
        return {"bytes": None if is_kept else peak_memory(job)}

    def values(self, form: str, path: str) -> dict[str, Any]:
        found = enumerate(self._replicas[form][0].values())
        arrays: dict[str, Any] = {f"p{index}": np.asarray(a, np.float32) for index, a in found}
        np.savez(path, **arrays)
        return {}

    def drop(self) -> dict[str, Any]:
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


def _case(request: dict[str, Any]) -> Case:
    return Case(
        request["algorithm"],
        request["form"],
        request["dtype"],
        [_parameter(**entry) for entry in request["parameters"]],
        request["kind"],
        # Clipping in place leaves nothing to clip.
        request["fresh_gradients"] or request["algorithm"] == "clip-by-global-norm",
    )


def _parameter(
    shape: list[int],
    gradient: str,
    indices: str | None,
    start: str | None = None,
    bag: int | None = None,
) -> Parameter:
    rows = None if indices is None else np.load(indices)
    values = np.zeros(shape, np.float32) if start is None else np.load(start)
    return Parameter(tuple(shape), np.load(gradient), rows, values, bag)


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
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = sys.argv[-1]  # for whatever is loaded from now on
    _die_with_parent()
    server = _Server(load)
    for line in sys.stdin:
        channel.write(json.dumps(server._answer(**json.loads(line))) + "\n")
        channel.flush()


def _die_with_parent() -> None:
    """On Linux: a worker that is stopped when its parent is killed must not stay for ever."""
    if sys.platform == "linux":
        pr_set_pdeathsig, sigkill = 1, 9
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill)
