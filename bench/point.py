"""Measures one point: our step, its bound and its peers, interleaved."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np

from .. import get_num_threads, set_num_threads
from . import bounds, machine
from .cases.steps import LOOP, Point
from .cases.workloads import Gradient, Tensor
from .errors import BenchError
from .measure import (
    Contestant,
    ContestantLostError,
    Times,
    in_process,
    interleave,
    plan,
    plan_of_turns,
    warm_up,
)
from .peer import Peers, Worker
from .report.result import BOUND, OURS, PointResult, Progress, Settings
from .work import Inputs, Work, build, enough_memory, inputs
from .workers.worker_protocol import Clock, Job, peak_memory

_UNTIL_BUSY = 0.1  # seconds until the other processes compute


def run(
    point: Point,
    settings: Settings,
    peers: Peers,
    progress: Progress,
    clock: Clock = time.perf_counter,
) -> PointResult:
    """Measure the point."""
    with using_threads(point.threads):
        try:
            given = inputs(point)
            work = build(point, given)
        except BenchError as error:  # too large for this machine, or a library is missing
            return PointResult(point, 0, {}, False, 0, {}, unavailable={OURS: str(error)})
        jobs = {OURS: work.job, **work.beside, **bound_jobs(work, point.threads)}
        with _Rivals(point, given, peers) as rivals:
            ours = in_process(jobs, point.scenario, point.threads, clock)
            with company(point.scenario):
                times = _measure([*ours, *rivals.contestants], point, settings, progress)
            memory = {OURS: peak_memory(work.job), **rivals.memory(times)}
    return PointResult(
        point=point,
        bytes=given.bytes,
        size=given.sizes,
        from_memory=given.from_memory,
        copies=given.copies,
        times=times.summaries,
        memory=memory,
        unavailable={**rivals.missing, **times.lost},
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


def bound_jobs(work: Work, threads: int) -> dict[str, Job]:
    """One job for each shape of the loops; with the step they take the sets of buffers in turn."""
    copies = [bounds.jobs(bound, threads) for bound in work.bounds]
    return {
        f"{BOUND}{shape}": work.turns.job([jobs[shape] for jobs in copies]) for shape in copies[0]
    }


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


def _measure(
    contestants: list[Contestant], point: Point, settings: Settings, progress: Progress
) -> Times:
    """What is compiled at its first call is compiled in the warm-up, so that is done twice."""
    warm_up(contestants)
    warm = warm_up(contestants)
    of_each = {label: samples[0] for label, samples in warm.samples.items()}
    in_a_loop = point.scenario == LOOP
    chosen = (plan if in_a_loop else plan_of_turns)(of_each, settings.seconds)
    return interleave(contestants, chosen, warm.lost, lambda n: progress(n / chosen.rounds))


class _Rivals:
    """The peers of a point, set up in their workers.

    Attributes:
        contestants: one for each form.
        missing: why a peer, or one of its forms, does not take part.
    """

    def __init__(self, point: Point, given: Inputs, peers: Peers) -> None:
        self._point, self._given, self._peers = point, given, peers
        self._forms: dict[str, tuple[Worker, str]] = {}
        self.contestants: list[Contestant] = []
        self.missing: dict[str, str] = {}

    def __enter__(self) -> _Rivals:
        algorithm = self._point.case.use.algorithm
        if algorithm is not None and self._peers.names:
            with setup_request(algorithm, self._point.dtype, self._given) as request:
                for peer in self._peers.names:
                    self._add(peer, request)
        return self

    def _add(self, peer: str, request: dict[str, Any]) -> None:
        worker = self._peers.worker(peer, self._point.threads)
        if worker is None:
            self.missing[peer] = self._peers.missing[peer]
            return
        kind, dtype = self._point.case.kind, self._point.dtype
        asked = {"algorithm": request["algorithm"], "kind": kind, "dtype": dtype}
        try:
            forms = worker.ask({"do": "forms", **asked})["forms"]
        except ContestantLostError as error:
            self.missing[peer] = str(error)
            return
        for form in forms:
            label = f"{peer} {form}"
            if missing := enough_memory(self._given.needed * self._given.copies):
                self.missing[label] = missing
                continue
            try:
                worker.ask({"do": "setup", "form": form, **request})
            except ContestantLostError as error:
                self.missing[label] = str(error)
                continue
            self._forms[label] = worker, form
            self.contestants.append(in_worker(label, worker, form, self._point.scenario))

    def memory(self, times: Times) -> dict[str, int | None]:
        """Of the forms that have times, what a step needs beside its arrays."""
        found: dict[str, int | None] = {}
        for label, (worker, form) in self._forms.items():
            if label in times.samples:
                try:
                    found[label] = worker.ask({"do": "memory", "form": form})["bytes"]
                except ContestantLostError:
                    found[label] = None
        return found

    def __exit__(self, *_: object) -> None:
        """Free the memory of the workers for the next point."""
        for worker in {id(worker): worker for worker, _ in self._forms.values()}.values():
            with suppress(ContestantLostError):  # the next point says it
                worker.ask({"do": "drop"})


def in_worker(label: str, worker: Worker, form: str, scenario: str) -> Contestant:
    """A contestant that is one form in a worker."""
    request = {"do": "sample", "form": form, "scenario": scenario}

    def sample(steps: int) -> list[float]:
        found: list[float] = worker.ask({**request, "steps": steps})["seconds"]
        return found

    return Contestant(label, sample, is_elsewhere=True)


@contextmanager
def setup_request(algorithm: str, dtype: str, given: Inputs) -> Iterator[dict[str, Any]]:
    """What a worker needs to set the same steps up; its files are there inside the context.

    The gradients are files, not seeds: NumPy promises no version the random numbers of another
    one, and peers may need another one.
    """
    with tempfile.TemporaryDirectory(prefix="fusestep-bench-") as folder:
        parameters = [
            {
                "shape": list(tensor.shape),
                "start": _start(given.start, tensor, Path(folder) / f"{k}-start.npy"),
                **_files(gradient, Path(folder) / str(k)),
            }
            for k, (tensor, gradient) in enumerate(zip(given.tensors, given.gradients, strict=True))
        ]
        yield {
            "algorithm": algorithm,
            "dtype": dtype,
            "parameters": parameters,
            "copies": given.copies,
            "fresh_gradients": given.fresh,
        }


def _start(value: float, tensor: Tensor, path: Path) -> str | None:
    """A file of the parameter's values, if they are not zeros."""
    if value == 0.0:
        return None
    np.save(path, np.full(tensor.shape, value, np.float32))
    return str(path)


def _files(gradient: Gradient, stem: Path) -> dict[str, str | None]:
    values, index = f"{stem}-values.npy", f"{stem}-indices.npy"
    np.save(values, gradient.values)
    if gradient.indices is None:
        return {"gradient": values, "indices": None}
    np.save(index, gradient.indices)
    return {"gradient": values, "indices": index}
