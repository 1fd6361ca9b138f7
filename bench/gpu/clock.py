"""Times on a CUDA device: events around what was enqueued.

Before each sample the stream is kept busy until all steps of the sample are enqueued, so that
the device never waits for the host between them: what is measured is the work of the device. How
long the host took to enqueue them is measured beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
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
COPY_UNIT = 16 * THREADS * 4
"""Copies are of a multiple of so many bytes: four vectors of 16 of each thread of a block."""

_MOST_STEPS = 20  # of a sample; far fewer launches than a stream can hold
_FIRST_LEAD, _LONGEST_LEAD = 0.02, 0.5  # seconds for which the stream is busy before a sample
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
    """Free memory of the device, after everything that nobody needs is given back."""
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
def _copy_kernel() -> Any:
    """A copy of four vectors of 16 bytes by each thread; arguments ``to, source``."""
    load: Any = tile_loader(4, 4)  # type: ignore[no-untyped-call]
    store: Any = tile_storer(4, 4)  # type: ignore[no-untyped-call]

    @cuda.jit
    def copy(to, source):  # type: ignore[no-untyped-def]
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

    return copy


class Copies:
    """Plain copies on the device; the fastest of them is the bound.

    Args:
        n_bytes: of a copy; a multiple of `COPY_UNIT`.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._arrays = [new_array(n_bytes, 0, np.uint8) for _ in range(2)]
        to, source = (int(address_of(array)) for array in self._arrays)
        copy, stream = _copy_kernel(), cuda.default_stream()
        self.jobs: dict[str, Enqueue] = {
            f"{BOUND}cuMemcpyDtoD": lambda: copy_on_device(to, source, n_bytes),
            f"{BOUND}copy kernel": lambda: copy[n_bytes // COPY_UNIT, THREADS, stream](to, source),
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


class Timed:
    """A contestant that enqueues steps, timed between two events on the stream.

    Attributes:
        host: of each sample the seconds a step that the calls took.
        ahead: of each sample, whether the host had enqueued all before the device began; else the
            device may have waited for it.
    """

    def __init__(self, enqueue: Enqueue) -> None:
        self._enqueue = enqueue
        self.host: list[float] = []
        self.ahead: list[bool] = []

    def sample(self, steps: int) -> list[float]:
        """Seconds of a step on the device."""
        if not self.host:
            self._enqueue()  # compiles
            cuda.synchronize()
        steps = min(steps, _MOST_STEPS)
        # The sleep of a thread may be shorter than asked for.
        lead = min(_LONGEST_LEAD, 2e-3 + 3 * steps * self.host[-1]) if self.host else _FIRST_LEAD
        stream = cuda.default_stream()
        begin, end = cuda.event(), cuda.event()
        before = keep_busy(lead)
        begin.record(stream)
        started = time.perf_counter()
        for _ in range(steps):
            self._enqueue()
        took = time.perf_counter() - started
        end.record(stream)
        self.ahead.append(not before.query())
        end.synchronize()
        pending.settle()  # not in the middle of a sample
        self.host.append(took / steps)
        return [begin.elapsed_time(end) / 1e3 / steps]
