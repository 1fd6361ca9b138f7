"""Times on a CUDA device: events around what was enqueued, contestants in turn.

Before each sample the stream is kept busy until all steps of the sample are enqueued, so that
the device never waits for the host between them: what is measured is the work of the device. How
long the host took to enqueue them is measured beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numba import config, cuda, float32, int64

from ...kernels.cuda.device.arrays import fill
from ...kernels.cuda.device.backend import address_of, copy_in
from ...ops.runtime import pending
from ..errors import BenchError
from ..report.result import BOUND

if config.ENABLE_CUDASIM:
    from ...kernels.cuda.device.simulated import tile_loader, tile_storer
else:
    from ...kernels.cuda.device.intrinsics import tile_loader, tile_storer

Enqueue = Callable[[], object]
"""Enqueues one step on the default stream."""

THREADS = 256
_COPIED_TILES = 4  # of a thread of the wider copy kernel
COPY_UNIT = 16 * THREADS * _COPIED_TILES
"""Copies are of a multiple of so many bytes."""

_SHORTEST = 2e-3  # seconds of a sample, on the device
_MOST_STEPS = 20  # of a sample; far fewer launches than a stream can hold
_FEWEST, _MOST = 9, 101  # rounds
_LONGEST_LEAD = 0.5  # seconds
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


# -- memory ---------------------------------------------------------------------------------------


def new_array(shape: int | tuple[int, ...], value: float = 0.0, dtype: Any = np.float32) -> Any:
    """An array of Numba's, filled on the device."""
    array = cuda.device_array(shape, dtype)
    if array.size:
        fill(int(address_of(array)), int(array.size), value, np.dtype(dtype), cuda.default_stream())
    return array


def normal_array(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Normal numbers; a block of them, again and again."""
    array = cuda.device_array(shape, dtype)
    n, itemsize = int(np.prod(shape)), np.dtype(dtype).itemsize
    block = np.random.default_rng(1).standard_normal(min(n, 1 << 22), np.float32).astype(dtype)
    for first in range(0, n, len(block)):
        part = block[: n - first]
        copy_in(int(address_of(array)) + first * itemsize, part, cuda.default_stream())
    return array


def free_bytes() -> int:
    """Of the device, after everything that nobody needs is given back."""
    gc.collect()
    context = cuda.current_context()
    deallocations = getattr(context, "deallocations", None)
    if deallocations is not None:
        deallocations.clear()
    return int(context.get_memory_info().free)


# -- copies ---------------------------------------------------------------------------------------


def copy_on_device(to: int, source: int, n_bytes: int) -> None:
    """Enqueue the driver's own copy.

    Raises:
        BenchError: the driver refuses.
    """
    from cuda.bindings import driver

    (error,) = driver.cuMemcpyDtoDAsync(to, source, n_bytes, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BenchError(f"cuMemcpyDtoDAsync: {error!r}")


@cache
def _copy_kernels() -> tuple[Any, Any]:
    """Copies of one and of four vectors of 16 bytes by each thread; arguments ``to, source``."""
    load: Any = tile_loader(4, 4)  # type: ignore[no-untyped-call]
    store: Any = tile_storer(4, 4)  # type: ignore[no-untyped-call]

    @cuda.jit
    def copy_one(to, source):  # type: ignore[no-untyped-def]
        a = cuda.local.array(4, float32)
        at = (int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) * 16
        load(a, source + at, 0)
        store(a, to + at, 0)

    @cuda.jit
    def copy_four(to, source):  # type: ignore[no-untyped-def]
        a, b = cuda.local.array(4, float32), cuda.local.array(4, float32)
        c, d = cuda.local.array(4, float32), cuda.local.array(4, float32)
        at = (int64(cuda.blockIdx.x) * (THREADS * 4) + cuda.threadIdx.x) * 16
        step = THREADS * 16
        load(a, source + at, 0)
        load(b, source + at + step, 0)
        load(c, source + at + 2 * step, 0)
        load(d, source + at + 3 * step, 0)
        store(a, to + at, 0)
        store(b, to + at + step, 0)
        store(c, to + at + 2 * step, 0)
        store(d, to + at + 3 * step, 0)

    return copy_one, copy_four


class Copies:
    """Plain copies on the device; the fastest of them is the bound.

    Args:
        n_bytes: of a copy; a multiple of `COPY_UNIT`.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._arrays = [new_array(n_bytes, 0, np.uint8) for _ in range(2)]
        to, source = (int(address_of(array)) for array in self._arrays)
        one, four = _copy_kernels()
        stream, tiles = cuda.default_stream(), n_bytes // 16
        self.jobs: dict[str, Enqueue] = {
            f"{BOUND}cuMemcpyDtoD": lambda: copy_on_device(to, source, n_bytes),
            f"{BOUND}copy kernel": lambda: one[tiles // THREADS, THREADS, stream](to, source),
            f"{BOUND}copy kernel, 4 vectors": lambda: four[
                tiles // (THREADS * _COPIED_TILES), THREADS, stream
            ](to, source),
        }


# -- timing ---------------------------------------------------------------------------------------


@cache
def _sleeper() -> Any:
    @cuda.jit
    def sleep(milliseconds):  # type: ignore[no-untyped-def]
        for _ in range(milliseconds):
            cuda.nanosleep(1_000_000)

    return sleep


def keep_busy(seconds: float, stream: Any = None) -> Any:
    """Enqueue work of about so long, on the default stream; the event that comes after it."""
    stream = cuda.default_stream() if stream is None else stream
    _sleeper()[1, 1, stream](max(1, round(seconds * 1e3)))
    event = cuda.event(timing=False)
    event.record(stream)
    return event


@dataclass
class Timed:
    """One contestant with its samples, in seconds a step."""

    enqueue: Enqueue  # one step
    steps: int = 2  # of a sample
    lead: float = 0.02  # seconds for which the stream is busy before one
    device: list[float] = field(default_factory=list)  # between two events on the stream
    host: list[float] = field(default_factory=list)  # that the calls took
    # Whether the host had enqueued all before the device began; else the device may have
    # waited for it.
    ahead: list[bool] = field(default_factory=list)

    def sample(self) -> None:
        """Take the steps."""
        stream = cuda.default_stream()
        begin, end = cuda.event(), cuda.event()
        before = keep_busy(self.lead)
        begin.record(stream)
        started = time.perf_counter()
        for _ in range(self.steps):
            self.enqueue()
        took = time.perf_counter() - started
        end.record(stream)
        self.ahead.append(not before.query())
        end.synchronize()
        pending.settle()  # not in the middle of a sample
        self.device.append(begin.elapsed_time(end) / 1e3 / self.steps)
        self.host.append(took / self.steps)

    def planned(self) -> Timed:
        """With as many steps as a sample should have, by a first one."""
        self.enqueue()  # compiles
        cuda.synchronize()
        self.sample()
        steps = max(1, min(_MOST_STEPS, round(_SHORTEST / max(self.device[0], 1e-9))))
        # The sleep of a thread may be shorter than asked for.
        lead = min(_LONGEST_LEAD, 2e-3 + 3 * steps * self.host[0])
        return Timed(self.enqueue, steps, lead)


def interleave(jobs: Mapping[str, Enqueue], seconds: float) -> dict[str, Timed]:
    """Every contestant once, then every contestant again, ...

    Args:
        jobs: by label.
        seconds: that the measurement may take, about.
    """
    firsts = {label: Timed(enqueue) for label, enqueue in jobs.items()}
    found = {label: first.planned() for label, first in firsts.items()}
    takes = sum(timed.lead + timed.steps * firsts[n].device[0] for n, timed in found.items())
    for _ in range(max(_FEWEST, min(_MOST, round(seconds / takes)))):
        for timed in found.values():
            timed.sample()
    return found
