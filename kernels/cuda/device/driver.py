"""Copies between host and device, by address, through NVIDIA's bindings of the driver."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, Stream, launch
from numba import config, cuda, types

from ...private import cubin_of
from . import cubins
from .cubins import Cubin
from .geometry import Geometry
from .tools import check_tools

GEOMETRY = Geometry()
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_NO_CAPTURE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def _checked(result: tuple[Any, ...]) -> Any:
    """The result of a call of the driver; an error where it failed."""
    error, *values = result
    if error != _SUCCESS:
        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"CUDA driver: {name.decode()}")
    return values[0] if values else None


def address_of(array: Any) -> int:
    """The address of a device array."""
    return int(array.__cuda_array_interface__["data"][0])


def device_id() -> int:
    """The number of the current device."""
    error, device = driver.cuCtxGetDevice()
    if error == _SUCCESS:
        return int(device)
    return int(cuda.get_current_device().id)  # nothing has been done on any yet


def is_current(device: int) -> bool:
    """Whether a device is the current one of this thread, on which something was done already."""
    error, current = driver.cuCtxGetDevice()
    return bool(error == _SUCCESS and int(current) == device)


@cache
def _n_devices() -> int:
    return int(_checked(driver.cuDeviceGetCount()))


def device_at(address: int) -> int:
    """The number of the device that an address belongs to; for 0 the current one."""
    if address == 0:
        return device_id()
    if _n_devices() == 1:
        return 0
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_checked(driver.cuPointerGetAttribute(attribute, address)))


def are_on(device: int, addresses: Sequence[int]) -> bool:
    """Whether addresses, none of them 0, all belong to a device."""
    return _n_devices() == 1 or all(device_at(address) == device for address in addresses)


def new_event() -> Any:
    """An event to wait for on other streams; it takes no time."""
    return cuda.event(timing=False)


def handle_of(stream: Any) -> int:
    """The handle of a stream of Numba; 0 is that of the default stream."""
    return int(stream.handle)


def launcher(loop: Any, grid: Any, block: Any, stream: Any) -> Any:
    """The launch of a loop, to be called with its arguments, which are all ``int64``.

    Each must be an ``int`` of Python: the bindings take a number as it comes, a bool as one byte.
    """
    compiled = prepare(loop)
    if compiled is None:
        return _by_numba(loop, grid, block, stream)
    return partial(launch, _stream(handle_of(stream)), _config(grid, block), compiled)


def _by_numba(loop: Any, grid: Any, block: Any, stream: Any) -> Any:
    # A grid of few blocks is right for a few small tensors, but Numba would warn of it. The setting
    # is the process's, so it is changed for the moment that counts only.
    with _lock:
        before = config.CUDA_LOW_OCCUPANCY_WARNINGS
        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
        try:
            return loop[grid, block, stream]
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = before


_lock = threading.Lock()


@lru_cache(1 << 12)
def _config(grid: Any, block: Any) -> Any:
    return LaunchConfig(grid=grid, block=block)


_stream = lru_cache(1 << 8)(Stream.from_handle)
_compiled: dict[Any, Any] = {}


def prepare(loop: Any) -> Any:
    """Compile and load a loop whose arguments are all ``int64``, so that a launch cannot fail.

    What Numba does for a launch takes the host ten times as long as the bindings, which launch what
    this returns; None where Numba has to.
    """
    key = loop, device_id()
    if key not in _compiled:
        capability = cuda.get_current_device().compute_capability
        cubin = cubins.load(loop, capability)
        if cubin is None:
            check_tools()
            loop.compile((types.int64,) * loop.py_func.__code__.co_argcount)
            cubin = Cubin(*image) if (image := cubin_of(loop)) else None
            if cubin is not None:
                cubins.save(loop, capability, cubin)
        _compiled[key] = cubin and ObjectCode.from_cubin(cubin.code).get_kernel(cubin.entry)
    return _compiled[key]


def is_capturing(handle: int) -> bool:
    """Whether what is enqueued on the stream of a handle becomes part of a CUDA graph."""
    error, status = driver.cuStreamIsCapturing(handle)
    if error == _SUCCESS:
        return bool(status != _NO_CAPTURE)
    # The default stream cannot be asked while a stream that waits for it is captured.
    if error != driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        _checked((error,))
    return True


def _enqueue(call: Any, n_bytes: int, stream: Any, *places: Any) -> None:
    if n_bytes:
        _checked(call(*places, n_bytes, handle_of(stream)))


def copy_in(address: int, array: np.ndarray, stream: Any) -> None:
    """Enqueue a copy of a contiguous array of the host to an address of the device."""
    copy_from(address, array.ctypes.data, array.nbytes, stream)


def copy_from(address: int, source: int, n_bytes: int, stream: Any) -> None:
    """Enqueue a copy from an address of the host to one of the device."""
    _enqueue(driver.cuMemcpyHtoDAsync, n_bytes, stream, address, source)


def start_copy_out(array: np.ndarray, address: int, stream: Any) -> None:
    """Enqueue a copy from an address of the device to a contiguous pinned array."""
    _enqueue(driver.cuMemcpyDtoHAsync, array.nbytes, stream, array.ctypes.data, address)


def copy_out(array: np.ndarray, address: int, stream: Any) -> None:
    """Copy from an address of the device to a contiguous array, and wait until it is there."""
    start_copy_out(array, address, stream)
    _checked(driver.cuStreamSynchronize(handle_of(stream)))


def copy_within(address: int, source: int, n_bytes: int, stream: Any) -> None:
    """Enqueue a copy from one address of the device to another."""
    _enqueue(driver.cuMemcpyDtoDAsync, n_bytes, stream, address, source)


def fill_ones(address: int, n_bytes: int, stream: Any) -> None:
    """Enqueue setting all bits of some memory: every ``int64`` becomes -1."""
    _enqueue(driver.cuMemsetD8Async, n_bytes, stream, address, 0xFF)
