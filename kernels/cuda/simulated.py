"""What `intrinsics` has, in plain Python, for Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``).

The simulator runs kernels as Python functions on host memory, so that their index arithmetic can
be tested without a GPU. Addresses are those of the host; vectors of 16 bytes mean nothing there.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ..cpu.intrinsics import f16_to_f32, f32_to_f16


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


def address_of(array):
    """The address of a device array, whose memory is the host's here."""
    return array._ary.ctypes.data


REPLACED = {
    f16_to_f32: lambda u: np.float32(np.uint16(u).view(np.float16)),
    f32_to_f16: lambda x: np.float16(x).view(np.uint16),
}
"""Functions that Python cannot run, and what takes their place."""
