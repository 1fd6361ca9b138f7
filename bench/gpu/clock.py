"""A CUDA device for the benchmark: arrays on it, and times between events.

Before each sample the stream is kept busy until all steps of the sample are enqueued, so that
the device never waits for the host between them: what is measured is the work of the device. How
long the host took to enqueue them is measured beside it.
"""

from __future__ import annotations

import gc
import time
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ...kernels.cuda.device.arrays import fill
from ...kernels.cuda.device.backend import address_of, copy_in
from ...ops.runtime import pending
from ...ops.runtime.device import DeviceArray
from ..errors import BenchError
from ..workers.worker_protocol import Job

# Seconds of a sample at least, and steps at most: far fewer launches than a stream can hold.
_SHORTEST, _MOST_STEPS = 1e-3, 20
_FIRST_LEAD, _LONGEST_LEAD = 0.02, 0.5  # seconds for which the stream is busy before a sample


def about() -> dict[str, Any]:
    """The device and its driver."""
    from cuda.bindings import driver

    device = cuda.get_current_device()
    name = getattr(device, "name", "unknown")
    error, number = driver.cuDriverGetVersion()
    known = error == driver.CUresult.CUDA_SUCCESS
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "compute_capability": ".".join(str(x) for x in device.compute_capability),
        "multiprocessors": getattr(device, "MULTIPROCESSOR_COUNT", None),
        "memory_bytes": int(cuda.current_context().get_memory_info().total),
        "cuda_of_driver": f"{number // 1000}.{number % 1000 // 10}" if known else None,
    }


# -- memory ---------------------------------------------------------------------------------------


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
    """An array of Numba's, filled on the device."""
    array = cuda.device_array(shape, dtype)
    if array.size:
        fill(int(address_of(array)), int(array.size), 0, np.dtype(dtype), cuda.default_stream())
    return array


def put(array: np.ndarray) -> Any:
    """A copy on the device, also of what `numba.cuda.to_device` does not know."""
    there = cuda.device_array(array.shape, array.dtype)
    if array.size:
        copy_in(address_of(there), np.ascontiguousarray(array), cuda.default_stream())
    return there


def get(array: Any) -> np.ndarray:
    """A copy on the host."""
    found = DeviceArray.adopt("bench", "array", array)
    return np.array(array) if found is None else np.array(found.numpy())


def free_bytes() -> int:
    """Free memory of the device, after everything that nobody needs is given back."""
    gc.collect()
    context = cuda.current_context()
    deallocations = getattr(context, "deallocations", None)
    if deallocations is not None:
        deallocations.clear()
    return int(context.get_memory_info().free)


def copy_on_device(to: int, source: int, n_bytes: int) -> None:
    """Enqueue the driver's own copy.

    Raises:
        BenchError: the driver refuses.
    """
    from cuda.bindings import driver

    (error,) = driver.cuMemcpyDtoDAsync(to, source, n_bytes, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BenchError(f"cuMemcpyDtoDAsync: {error!r}")


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
    """A job whose steps are enqueued on the default stream, timed between two events on it.

    Attributes:
        host: of each sample the seconds a step that the calls took.
        ahead: of each sample, whether the host had enqueued all before the device began; else the
            device may have waited for it.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._steps = job, 1
        self.host: list[float] = []
        self.ahead: list[bool] = []

    def sample(self) -> list[float]:
        """Seconds of a step on the device."""
        if not self.host:
            self._job.load()
            self._job.step()  # compiles
            cuda.synchronize()
        steps = self._steps
        # The sleep of a thread may be shorter than asked for.
        lead = min(_LONGEST_LEAD, 2e-3 + 3 * steps * self.host[-1]) if self.host else _FIRST_LEAD
        stream = cuda.default_stream()
        begin, end = cuda.event(), cuda.event()
        before = keep_busy(lead)
        begin.record(stream)
        started = time.perf_counter()
        for _ in range(steps):
            self._job.step()
        took = time.perf_counter() - started
        end.record(stream)
        self.ahead.append(not before.query())
        end.synchronize()
        pending.settle()  # not in the middle of a sample
        self.host.append(took / steps)
        seconds = begin.elapsed_time(end) / 1e3 / steps
        self._steps = max(1, min(_MOST_STEPS, round(_SHORTEST / max(seconds, 1e-9))))
        return [seconds]
