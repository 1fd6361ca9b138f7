"""Measures one point: our step, its bound and its peers, interleaved."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numba

from .. import get_num_threads, set_num_threads
from . import machine
from .cases.steps import Point
from .errors import BenchError
from .measure import Contestant, ContestantLostError, in_process, measured
from .peer import Peers, Worker
from .report.result import OURS, PointResult, Progress
from .work import Inputs, build, enough_memory, inputs
from .workers.worker_protocol import peak_memory

_UNTIL_BUSY = 0.1  # seconds until the other processes compute


def run(point: Point, seconds: float, peers: Peers, progress: Progress) -> PointResult:
    """Measure the point."""
    with using_threads(point.threads):
        try:
            given = inputs(point)
            jobs = build(point, given)
        except BenchError as error:  # too large for this machine, or a library is missing
            return PointResult(point, unavailable={OURS: str(error)})
        rivals, missing = _rivals(point, given, peers)
        contestants = in_process(jobs, point.scenario, point.threads)
        contestants += [in_worker(label, *r, point.scenario) for label, r in rivals.items()]
        with company(point.scenario):
            times = measured(contestants, point.scenario, seconds, progress)
        memory = {OURS: peak_memory(jobs[OURS])}
        for label, (worker, form) in rivals.items():
            if label in times.samples:
                memory[label] = None
                with suppress(ContestantLostError):
                    memory[label] = worker.ask({"do": "memory", "form": form})["bytes"]
    for worker in {id(worker): worker for worker, _ in rivals.values()}.values():
        with suppress(ContestantLostError):  # the next point says it
            worker.ask({"do": "drop"})  # frees the memory for the next point
    return PointResult(
        point=point,
        bytes=given.bytes,
        sizes=given.sizes,
        from_memory=given.from_memory,
        copies=given.copies,
        times=times.summaries,
        memory=memory,
        unavailable={**missing, **times.lost},
    )


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """The bound loops are Numba's own, so Numba has to know the number, too."""
    get_num_threads()  # starts the layer of threads that steps have
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    set_num_threads(threads)
    try:
        yield
    finally:
        set_num_threads(None)
        numba.set_num_threads(before)


@contextmanager
def company(scenario: str) -> Iterator[None]:
    """In "busy", other processes that compute all the time, one for each two cores."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}:\n for _ in range(10**6): pass"
    count = max(1, machine.cores() // 2) if scenario == "busy" else 0
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        if others:
            time.sleep(_UNTIL_BUSY)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _rivals(
    point: Point, given: Inputs, peers: Peers
) -> tuple[dict[str, tuple[Worker, str]], dict[str, str]]:
    """The forms of the peers, set up in their workers; and why others do not take part."""
    rivals: dict[str, tuple[Worker, str]] = {}
    missing: dict[str, str] = {}
    algorithm = point.case.use.algorithm
    if algorithm is None or not peers.names:
        return rivals, missing
    asked = {"algorithm": algorithm, "kind": point.case.kind, "dtype": point.dtype}
    request = setup_request(algorithm, point, given)
    for peer in peers.names:
        try:
            worker = peers.worker(peer, point.threads)
            forms = worker.ask({"do": "forms", **asked})["forms"]
        except ContestantLostError as error:
            missing[peer] = str(error)
            continue
        for form in forms:
            try:
                if short := enough_memory(given.needed * given.copies):
                    raise ContestantLostError(short)
                worker.ask({**request, "form": form})
                rivals[f"{peer} {form}"] = worker, form
            except ContestantLostError as error:
                missing[f"{peer} {form}"] = str(error)
    return rivals, missing


def in_worker(label: str, worker: Worker, form: str, scenario: str) -> Contestant:
    """A contestant that is one form in a worker."""
    request = {"do": "sample", "form": form, "scenario": scenario}

    def sample() -> list[float]:
        found: list[float] = worker.ask(request)["seconds"]
        return found

    return Contestant(label, sample, is_elsewhere=True)


def setup_request(algorithm: str, point: Point, given: Inputs) -> dict[str, Any]:
    """A request to set the same steps up.

    It has the gradients, not seeds: NumPy promises no version the random numbers of another one,
    and peers may need another one.
    """
    return {
        "do": "setup",
        "algorithm": algorithm,
        "kind": point.case.kind,
        "dtype": point.dtype,
        "parameters": [
            (one.shape, one.gradient, one.indices, point.case.use.start, one.bag)
            for one in given.parameters
        ],
        "copies": given.copies,
        "fresh": given.fresh,
    }
