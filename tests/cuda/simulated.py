"""The names of `kernels.cuda.device.backend` in plain Python, for Numba's simulator.

Kernels run as Python functions on host memory, so that their index arithmetic can be tested without
a GPU. Addresses are those of the host. An address that a device refuses for the width of a load or
store is refused here, too.
"""
# ruff: noqa: ARG001 (arguments are those of the real functions)

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda, types
from fusestep.kernels.cuda.device.geometry import ChunkGeometry, Geometry, SortGeometry
from fusestep.kernels.storage import f16_to_f32, f32_to_f16

GEOMETRY = Geometry(
    dense=ChunkGeometry(threads=4, tiles=1),
    rows=8,
    keys=3,
    many=16,
    hot=4,
    totals=4,
    # Tiles of 16 keys, digits of 3 bits and 1, rounds of 4 counters.
    sort=SortGeometry(
        digit_bits=4, split_bits=3, threads=4, group=2, keys=4, counts=1, line_bits=2, few=2),
)  # fmt: skip
"""A Python thread is one of the device's: arrays are short, and have several blocks even so."""

_one_at_a_time = threading.Lock()
_WIDEST = 16  # bytes of an instruction


def _aligned(address, n_bytes):
    if address % min(n_bytes, _WIDEST):
        raise ValueError(f"{address:#x} is not aligned: expected it to be for {n_bytes} bytes")
    return address


def _at(address, dtype, count):
    n_bytes = count * dtype.itemsize
    place = (ctypes.c_char * n_bytes).from_address(_aligned(address, n_bytes))
    return np.frombuffer(place, dtype)


def tile_loader(count, itemsize):
    def load(tile, address, i):
        tile[:] = _at(int(address) + int(i) * itemsize, tile.dtype, count)

    return load


def tile_storer(count, itemsize):
    def store(tile, address, i):
        _at(int(address) + int(i) * itemsize, tile.dtype, count)[:] = tile

    return store


# How numbers lie in memory, and what they become.
_NUMBERS: dict[Any, tuple[Any, Callable[[Any], Any]]] = {
    types.int32: (ctypes.c_int32, int), types.int64: (ctypes.c_int64, int),
    types.float32: (ctypes.c_float, np.float32), types.float64: (ctypes.c_double, np.float64),
}  # fmt: skip


def _size_of(kind):
    if kind in _NUMBERS:
        return ctypes.sizeof(_NUMBERS[kind][0])
    return sum(map(_size_of, kind))


def reader(kind):
    if kind in _NUMBERS:
        number, made = _NUMBERS[kind]
        n_bytes = ctypes.sizeof(number)
        return lambda address: made(number.from_address(_aligned(int(address), n_bytes)).value)
    parts, place = [], 0
    for part in kind:
        parts.append((reader(part), place))
        place += _size_of(part)
    made = getattr(kind, "instance_class", lambda *values: values)
    return lambda address: made(*[read(address + first) for read, first in parts])


load_int32, load_int64, load_float32, load_float64 = map(reader, _NUMBERS)


def storer(kind):
    number, made = _NUMBERS[kind]
    n_bytes = ctypes.sizeof(number)

    def store(address, value):
        for k, part in enumerate(value if isinstance(value, tuple) else (value,)):
            place = _aligned(int(address) + k * n_bytes, n_bytes)
            number.from_address(place).value = made(part)

    return store


store_int32, store_int64, store_float32, store_float64 = map(storer, _NUMBERS)


def _atomic(operation):
    def run(address, value):
        with _one_at_a_time:
            before = load_int64(address)
            store_int64(address, operation(before, int(value)))
        return before

    return run


lower_int64 = _atomic(min)


def address_of(array):
    return array._ary.ctypes.data


REPLACED = {
    f16_to_f32: lambda u: np.float32(np.uint16(u).view(np.float16)),
    f32_to_f16: lambda x: np.float16(x).view(np.uint16),
}
"""Functions that Python cannot run, and what takes their place."""


def on_device(function):
    return function  # as `cuda.jit(device=True)`, for what does not name `cuda`


def for_blocks(threads, blocks):
    return cuda.jit


def device_id(*_):
    return 0


device_at = handle_of = device_id  # there is one


def is_current(*_):
    return True


are_on = is_current


class _Event:
    """Everything that was launched is done."""

    def record(self, *_):
        return True

    wait = query = synchronize = record


def new_event():
    return _Event()


captures: list[list[str]] = []
"""The captures that are going on, each with what was enqueued meanwhile."""


def _enqueue(call, *arguments):
    for enqueued in captures:
        enqueued.append(str(call))
    call(*arguments)


def launcher(loop, grid, block, stream):
    def launch(*arguments):
        loop[grid, block, stream](*arguments)  # which is one object, whatever the grid

    return partial(_enqueue, launch)


def prepare(loop):
    pass  # nothing is compiled


def is_capturing(handle):
    return bool(captures)


def copy_in(address, array, stream):
    copy_from(address, array.ctypes.data, array.nbytes, stream)


def copy_from(address, source, n_bytes, stream):
    _enqueue(ctypes.memmove, int(address), source, n_bytes)


def copy_out(array, address, stream):
    _enqueue(ctypes.memmove, array.ctypes.data, int(address), array.nbytes)


start_copy_out = copy_out


def copy_within(address, source, n_bytes, stream):
    _enqueue(ctypes.memmove, int(address), int(source), n_bytes)


def fill_ones(address, n_bytes, stream):
    _enqueue(ctypes.memset, int(address), 0xFF, n_bytes)
