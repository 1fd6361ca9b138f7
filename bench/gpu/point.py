"""Measures one point on a CUDA device: our step, PyTorch's beside it, and a copy as its bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from numba import cuda

from ...kernels.cuda.device.backend import address_of
from ..buffers import Buffers
from ..cases.steps import LOOP, Point
from ..cases.subject import DTYPES
from ..errors import BenchError
from ..measure import Contestant, Times, measured
from ..report.result import BOUND, OURS, PointResult, Progress, Summary
from ..work import Inputs, inputs, jobs_of_torch
from ..workers.worker_protocol import Job
from .clock import Timed, copy_on_device, free_bytes, put, zeros

_OF_FREE = 0.9  # what arrays may take of the memory that is free


def run(point: Point, seconds: float, progress: Progress) -> PointResult:
    """Measure the point."""
    try:
        given = inputs(point)
        jobs = jobs_of(point, given)
    except BenchError as error:
        return PointResult(point, unavailable={OURS: str(error)})
    times, timed = in_turn(jobs, seconds, progress)
    kept = {label: len(found) for label, found in times.samples.items()}
    return PointResult(
        point=point,
        bytes=given.bytes,
        sizes=given.sizes,
        from_memory=given.bytes > getattr(cuda.get_current_device(), "L2_CACHE_SIZE", 0),
        copies=1,
        times=times.summaries,
        memory={OURS: None},
        unavailable=times.lost,
        host={label: Summary.of(timed[label].host[-n:]) for label, n in kept.items()},
        waited=[label for label, n in kept.items() if not all(timed[label].ahead[-n:])],
    )


def in_turn(
    jobs: Mapping[str, Job], seconds: float, progress: Progress
) -> tuple[Times, dict[str, Timed]]:
    """Times of jobs that enqueue steps, and by label what the host took for them."""
    timed = {label: Timed(job) for label, job in jobs.items()}
    contestants = [Contestant(label, one.sample) for label, one in timed.items()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grid size")  # of Numba: some kernels are small
        return measured(contestants, LOOP, seconds, progress), timed


def jobs_of(point: Point, given: Inputs) -> dict[str, Job]:
    """By label our step, PyTorch's, and a copy of as many bytes as a step moves.

    Raises:
        BenchError: the device has not enough memory for all of them.
    """
    given = replace(given, copies=1, from_memory=True)  # no fresh gradients, and one set of them
    asked, library = point.case.use.algorithm is not None, torch_of_device()
    needed, free = (1 + asked) * given.needed + given.bytes, free_bytes()
    if needed > _OF_FREE * free:
        text = f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of device memory are free"
        raise BenchError(text)
    prepare, storage = point.case.subject.prepare, DTYPES[point.dtype]
    ours = Buffers(prepare, point.case.use, storage, given.parameters, put)
    others: dict[str, list[Job]] = {}
    if asked and library is not None:
        library.cuda.empty_cache()
        with library.device("cuda"):
            others = jobs_of_torch(point, given)
    return {
        OURS: ours.job(fresh=False),
        **{label: job for label, (job,) in others.items()},
        f"{BOUND}cuMemcpyDtoD": Job(_copy(max(1, given.bytes // 2))),
    }


def _copy(n_bytes: int) -> Callable[[], None]:
    """Enqueues a copy; each byte is read and written."""
    arrays = [zeros(n_bytes, "uint8") for _ in range(2)]
    to, source = (int(address_of(array)) for array in arrays)

    def copy(keep: Any = arrays) -> None:
        del keep
        copy_on_device(to, source, n_bytes)

    return copy


def torch_of_device() -> Any:
    """PyTorch, where it is installed with CUDA; else None."""
    library = import_module("torch") if find_spec("torch") else None
    return library if library is not None and library.cuda.is_available() else None
