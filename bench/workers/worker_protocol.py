"""One timed step per request: what this benchmark and the worker processes of others share.

A worker reads JSON lines from its standard input and answers each with one JSON line::

    {"do": "hello"}                       -> {"version": "2.13.0"}
    {"do": "setup", "form": ..., ...}     -> {"version": "2.13.0"}
    {"do": "sample", "form": ..., ...}    -> {"seconds": 0.0123}
    {"do": "drop"}                        -> {"ok": true}

An answer ``{"error": text}`` says that the request failed; the end of input ends the worker.
Needs nothing but Python, since the library at the other end chooses the versions.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Clock = Callable[[], float]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Job:
    """One optimizer step that can be repeated.

    Args:
        step: what is timed; returns when the work is done.
        load: what comes before each step and is not timed, such as new gradient arrays.
    """

    step: Callable[[], object]
    load: Callable[[], object] = _nothing


def sample(job: Job, lead_in: int, steps: int, clock: Clock = time.perf_counter) -> float:
    """Mean seconds of ``steps`` steps in a row, after ``lead_in`` steps that do not count.

    The lead-in stands for the training loop that a short step is part of: threads are awake
    and the code is in the caches.
    """
    total = 0.0
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(lead_in + steps):
            job.load()
            start = clock()
            job.step()
            if index >= lead_in:
                total += clock() - start
    finally:
        if collecting:
            gc.enable()
    return total / steps


class Library(Protocol):
    """What a worker script says about its library."""

    version: str

    def job(self, request: dict[str, Any]) -> Job:
        """The step that a set-up request describes."""
        ...


class _Server:
    """Answers requests; remembers the library and the jobs that were set up."""

    def __init__(self, load: Callable[[int], Library]) -> None:
        self._load = load
        self._library: Library | None = None
        self._jobs: dict[str, Job] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request, whatever happens."""
        try:
            return self._answer(request)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "drop":
            self._jobs.clear()
            gc.collect()
            return {"ok": True}
        if request["do"] == "sample":
            job = self._jobs[request["form"]]
            return {"seconds": sample(job, request["lead_in"], request["steps"])}
        if self._library is None:
            self._library = self._load(int(sys.argv[1]))
        if request["do"] == "setup":
            job = self._jobs[request["form"]] = self._library.job(request)
            sample(job, request["warm_up"], 1)
        return {"version": self._library.version}


def serve(load: Callable[[int], Library]) -> None:
    """Answer requests until the end of input.

    Args:
        load: imports the library for a number of threads, the script's only argument.
    """
    # Libraries print to standard output; the answers keep it for themselves.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _die_with_parent()
    server = _Server(load)
    for line in sys.stdin:
        channel.write(json.dumps(server.answer(json.loads(line))) + "\n")
        channel.flush()


def _die_with_parent() -> None:
    """On Linux: a worker that is stopped when its parent is killed must not stay for ever."""
    if sys.platform == "linux":
        pr_set_pdeathsig, sigkill = 1, 9
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill)
