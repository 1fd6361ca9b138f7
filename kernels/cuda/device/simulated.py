"""What `intrinsics` has, in plain Python, for Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``).

The simulator runs kernels as Python functions on host memory, so that their index arithmetic can
be tested without a GPU. Addresses are those of the host; vectors of 16 bytes mean nothing there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...half import f16_to_f32, f32_to_f16

_one_at_a_time = threading.Lock()  # each thread of the device is a thread of Python


def _at(address, dtype, count):
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


def tile_loader(count, itemsize):
    """``load(tile, address)``: fill a local array with ``count`` elements."""

    def load(tile, address):
        tile[:] = _at(int(address), tile.dtype, count)

    return load


def tile_storer(count, itemsize):
    """``store(address, tile)``: write ``count`` elements of a local array."""

    def store(address, tile):
        _at(int(address), tile.dtype, count)[:] = tile

    return store


def tuple_reader(cls, scalar):
    """``read(address) -> cls`` of consecutive values of type ``scalar``."""
    dtype = np.dtype(str(scalar))

    def read(address):
        return cls(*_at(int(address), dtype, len(cls._fields)))

    return read


def load_int64(address):
    """The ``int64`` at an address."""
    return int(_at(int(address), np.dtype(np.int64), 1)[0])


def load_int32(address):
    """The ``int32`` at an address, as ``int64``."""
    return int(_at(int(address), np.dtype(np.int32), 1)[0])


def load_int8(address):
    """The ``int8`` at an address, as ``int64``."""
    return int(_at(int(address), np.dtype(np.int8), 1)[0])


def load_float32(address):
    """The ``float32`` at an address, as ``float64``."""
    return float(_at(int(address), np.dtype(np.float32), 1)[0])


def tuple_storer(scalar):
    """``store(address, values)``: write a tuple of numbers as type ``scalar``."""
    dtype = np.dtype(str(scalar))

    def store(address, values):
        _at(int(address), dtype, len(values))[:] = values

    return store


def store_int64(address, value):
    """Write an ``int64``."""
    _at(int(address), np.dtype(np.int64), 1)[0] = value


def load_float64(address):
    """The ``float64`` at an address."""
    return float(_at(int(address), np.dtype(np.float64), 1)[0])


def store_float64(address, value):
    """Write a ``float64``."""
    _at(int(address), np.dtype(np.float64), 1)[0] = value


def store_float32(address, value):
    """Write a ``float64`` as ``float32``, rounded."""
    _at(int(address), np.dtype(np.float32), 1)[0] = value


def scale_real(scalar):
    """``scale(address, factor)``: multiply a value of type ``scalar`` by a ``float64``."""
    dtype = np.dtype(str(scalar))

    def scale(address, factor):
        place = _at(int(address), dtype, 1)
        place[0] = np.float64(place[0]) * factor

    return scale


def lower_int64(address, value):
    """Make the ``int64`` at an address the smaller of itself and ``value``, atomically."""
    with _one_at_a_time:
        store_int64(address, min(load_int64(address), int(value)))


def address_of(array: Any) -> int:
    """The address of a device array, whose memory is the host's here."""
    address: int = array._ary.ctypes.data
    return address


REPLACED = {
    f16_to_f32: lambda u: np.float32(np.uint16(u).view(np.float16)),
    f32_to_f16: lambda x: np.float16(x).view(np.uint16),
}
"""Functions that Python cannot run, and what takes their place."""


def device_id() -> int:
    """The number of the current device; here there is one."""
    return 0


def device_at(address: int) -> int:
    """The number of the device that an address belongs to."""
    return 0


class _Event:
    """Everything that was launched is done."""

    def record(self, stream=0):
        pass

    def wait(self, stream=0):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


def new_event() -> Any:
    """An event to wait for on other streams."""
    return _Event()


def handle_of(stream: Any) -> int:
    """The handle of a stream; here there is one."""
    return 0


class Graph:
    """What was enqueued in ``with graph:``, to be run as often as `replay` is called."""

    recording: Graph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def __enter__(self) -> Graph:
        Graph.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        Graph.recording = None

    def replay(self) -> None:
        """Run everything, in order."""
        for call in self.calls:
            call()


def _enqueue(call: Callable[..., object], *arguments: Any) -> None:
    if Graph.recording is None:
        call(*arguments)
    else:
        Graph.recording.calls.append(partial(call, *arguments))


def _refuse_capture(what: str) -> None:
    """As the driver does: a graph that held it would read what is no longer there."""
    if Graph.recording is not None:
        raise RuntimeError(f"{what} cannot be captured")


def launcher(loop: Any, grid: Any, block: Any, stream: Any) -> Any:
    """What launches a loop, called with its arguments."""

    def launch(*arguments: Any) -> None:
        loop[grid, block, stream](*arguments)  # which is one object, whatever the grid

    return partial(_enqueue, launch)


def prepare(loop: Any) -> None:
    """Nothing is compiled."""


def is_capturing(stream: Any) -> bool:
    """Whether what is enqueued becomes part of a graph."""
    return Graph.recording is not None


def copy_in(address: int, array: np.ndarray, stream: Any) -> None:
    """Copy a contiguous array to an address."""
    _refuse_capture("a copy from memory of the host")
    ctypes.memmove(int(address), array.ctypes.data, array.nbytes)


def start_copy_out(array: np.ndarray, address: int, stream: Any) -> None:
    """Copy from an address to a contiguous array."""
    copy_out(array, address, stream)


def copy_out(array: np.ndarray, address: int, stream: Any) -> None:
    """Copy from an address to a contiguous array."""
    _refuse_capture("waiting for a copy")
    ctypes.memmove(array.ctypes.data, int(address), array.nbytes)


def copy_within(address: int, source: int, n_bytes: int, stream: Any) -> None:
    """Copy from one address to another."""
    _enqueue(ctypes.memmove, int(address), int(source), n_bytes)


def fill_ones(address: int, n_bytes: int, stream: Any) -> None:
    """Set all bits of some memory."""
    _enqueue(ctypes.memset, int(address), 0xFF, n_bytes)
