"""The frameworks whose device arrays are adopted: places, streams and new arrays.

No framework is imported here: if the caller has an array of a framework, it is imported already.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from ...kernels.storage import FOREIGN, STORAGES
from . import cuda
from .errors import message, reject


class Place(NamedTuple):
    """The place and layout of a device array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in bytes; None where it is C-contiguous
    dtype: np.dtype[Any]
    device: int
    writable: bool
    stream: int | None = None  # the handle of a stream that belongs to the array itself


class Framework:
    """The device arrays of a framework: their places, their streams, and how to make new ones.

    This class itself is for objects of unknown classes with ``__cuda_array_interface__``. Streams
    are given by their handles.
    """

    tells_device = False  # whether `signature` has the device

    def place(self, where: str, name: str, value: Any) -> Place:
        """The place of ``value``."""
        interface = value.__cuda_array_interface__
        if interface.get("mask") is not None:
            reject(TypeError, where, name, "is masked", "an array without a mask", "masked array")
        address, read_only = interface["data"]
        address, shape, strides = address or 0, tuple(interface["shape"]), interface.get("strides")
        if not address and math.prod(shape):
            reject(RuntimeError, where, name, "has no memory", f"an array of {shape}", "address 0")
        dtype = _interface_dtype(where, name, value, interface["typestr"])
        device = cuda.device.backend.device_at(address)  # the current one for address 0
        layout = address, shape, None if strides is None else tuple(strides)
        return Place(*layout, dtype, device, not read_only, interface.get("stream"))

    # A step asks for both of every array, so code of C answers where it can.
    def signature(self, value: Any) -> Any:
        """All of the place of ``value`` but its address, to be compared.

        The device is in it only if the framework ``tells_device``.
        """
        interface = value.__cuda_array_interface__
        # The letter of the interface does not tell dtypes apart that NumPy does not have.
        kind = interface["typestr"], getattr(value, "dtype", None), interface["data"][1]
        is_whole, stream = interface.get("mask") is None, interface.get("stream")
        return tuple(interface["shape"]), interface.get("strides"), *kind, stream, is_whole

    def address(self, value: Any) -> int:
        """The address of ``value`` now; 0 or None where it has no memory."""
        return int(value.__cuda_array_interface__["data"][0] or 0)

    def stream(self, device: int) -> int:  # noqa: ARG002
        """The handle of the framework's current stream; Numba has the default stream only."""
        return 0

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,  # noqa: ARG002
    ) -> tuple[Any, int]:
        """A new array on a device, which is the current one, and its address.

        Numba has NumPy's dtypes only: an array of another dtype gets the dtype of its carrier.
        """
        owner = cuda.numba.device_array(shape, carrier_of(dtype))
        return owner, int(cuda.device.backend.address_of(owner))

    def contiguous(self, value: Any) -> Any:  # noqa: ARG002
        """A C-contiguous copy of a strided array; None if the framework cannot make one."""
        return None


class _Numba(Framework):
    """Arrays of Numba, whose interface takes longer than all else of a step."""

    signature: Any = attrgetter("shape", "strides", "dtype", "stream")
    address: Any = attrgetter("gpu_data.device_ctypes_pointer.value")


class _Torch(Framework):
    tells_device = True

    @property
    def _torch(self) -> Any:
        return sys.modules["torch"]

    def place(self, where: str, name: str, value: Any) -> Place:
        check_there(where, name, value)
        dtype = _torch_dtype(where, name, str(value.dtype))
        strides = tuple(n * dtype.itemsize for n in value.stride())
        layout = value.data_ptr(), tuple(value.shape), None if value.is_contiguous() else strides
        return Place(*layout, dtype, value.device.index, True)

    def signature(self, value: Any) -> Any:
        try:
            there = value.untyped_storage().nbytes(), value.storage_offset()
        except RuntimeError:  # no memory: `place` says so
            return None
        strides = value.is_contiguous() or value.stride()
        return value.shape, *there, value.dtype, value.get_device(), strides

    address: Any = methodcaller("data_ptr")

    def stream(self, device: int) -> int:
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> tuple[Any, int]:
        kind = getattr(self._torch, dtype.name)
        owner = self._torch.empty(shape, dtype=kind, device=f"cuda:{device}")
        return owner, owner.data_ptr()

    def contiguous(self, value: Any) -> Any:
        return value.detach().contiguous()


class _CuPy(Framework):
    tells_device = True

    @property
    def _cupy(self) -> Any:
        return sys.modules["cupy"]

    def place(self, where: str, name: str, value: Any) -> Place:  # noqa: ARG002
        dtype = np.dtype(value.dtype)
        strides = None if value.flags.c_contiguous else tuple(value.strides)
        return Place(value.data.ptr, value.shape, strides, dtype, value.device.id, True)

    signature: Any = attrgetter("shape", "strides", "dtype", "data.device_id")
    address: Any = attrgetter("data.ptr")

    def stream(self, device: int) -> int:
        with self._cupy.cuda.Device(device):
            return int(self._cupy.cuda.get_current_stream().ptr)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> tuple[Any, int]:
        with self._cupy.cuda.Device(device):
            owner = self._cupy.empty(shape, dtype)
        return owner, owner.data.ptr

    def contiguous(self, value: Any) -> Any:
        with value.device:
            return self._cupy.ascontiguousarray(value)


_INTERFACE, _NUMBA, TORCH, _CUPY = Framework(), _Numba(), _Torch(), _CuPy()


def carrier_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of NumPy's own whose arrays of Numba hold elements of ``dtype``."""
    return np.dtype(STORAGES[dtype].carrier) if dtype in FOREIGN.values() else dtype


def extent(tensor: Any) -> int:
    """The number of elements from the first to the last of a PyTorch tensor, gaps included."""
    if tensor.is_contiguous() or not tensor.numel():
        return int(tensor.numel())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum(int(n - 1) * int(step) for n, step in steps)


def check_there(where: str, name: str, tensor: Any) -> None:
    """Refuse a tensor of PyTorch whose storage is too small for it.

    Its memory was freed or resized, or never existed: zero tensors, fake tensors, and tensors that
    ``torch.func`` and subclasses wrap have none.

    Raises:
        RuntimeError: the storage is too small.
    """
    try:  # the address of a zero tensor is 0
        there = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except RuntimeError:  # PyTorch says that there is no storage
        there = 0
    n = extent(tensor)
    needed = tensor.itemsize * (tensor.storage_offset() + n)
    if needed > there and n:
        reject(RuntimeError, where, name, "has no memory", f"{needed} bytes", there)


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor of PyTorch."""
    return isinstance(value, _class("torch", "Tensor"))


def framework_of(value: Any) -> Framework | None:
    """The framework of an array on a CUDA device; None for everything else."""
    # Known frameworks come before the interface, which has no letter for bfloat16 and does not tell
    # a framework's current stream.
    kind = type(value)
    framework = _of_types.get(kind)
    if framework is None:
        if is_tensor(value):
            framework = _of_types[kind] = TORCH
        elif isinstance(value, _class("cupy", "ndarray")):
            framework = _of_types[kind] = _CUPY
        elif getattr(value, "__cuda_array_interface__", None) is None:
            return None
        elif kind.__module__.startswith(("numba.", "numba_cuda.")):  # true of all of this class
            framework = _of_types[kind] = _NUMBA
        else:
            return _INTERFACE
    return None if framework is TORCH and not value.is_cuda else framework


_of_types: dict[type, Framework] = {}
known_framework = _of_types.get
"""The framework of the arrays of a class that was seen, or None."""


def _class(module: str, name: str) -> Any:
    """A class of an imported module; no class, (), if the module is not or only partly imported."""
    return getattr(sys.modules.get(module), name, ())


@cache
def lacks() -> str:
    """The package or driver that is missing for device arrays, and where to get it; or ""."""
    if find_spec("numba_cuda") is None:
        return "for arrays on devices: pip install 'fusestep[cuda13]' (or cuda12)"
    if version("numba-cuda").startswith("0.30.") and np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        return "numba-cuda 0.30 does not run with this NumPy: pip install 'numpy<2.5'"
    return "" if cuda.numba.is_available() else "Numba finds no CUDA driver"


def _torch_dtype(where: str, name: str, dtype: str) -> np.dtype[Any]:
    letters = dtype.removeprefix("torch.")
    if letters in FOREIGN:
        return FOREIGN[letters]
    try:
        result: np.dtype[Any] = np.dtype(letters)
    except TypeError:
        wrong, expected = "has a wrong dtype", "a dtype that NumPy has"
        raise TypeError(message(where, name, wrong, expected, dtype)) from None
    return result


def _interface_dtype(where: str, name: str, value: Any, typestr: str) -> np.dtype[Any]:
    # bfloat16 has no letter in the interface: torch and CuPy declare two bytes.
    for foreign_name, foreign in FOREIGN.items():
        if typestr.endswith(foreign.str[1:]) and foreign_name in str(getattr(value, "dtype", "")):
            return foreign
    dtype: np.dtype[Any] = np.dtype(typestr)
    if dtype.kind not in "fiub":
        reject(TypeError, where, name, "has a wrong dtype", "a number", typestr)
    return dtype


def on_device(device: int) -> Any:
    """A context in which a device is the current one of this thread."""
    return _HERE if cuda.device.backend.is_current(device) else cuda.numba.gpus[device]


_HERE = nullcontext()


@cache
def stream_of(device: int, handle: int) -> Any:  # noqa: ARG001  (part of the key)
    """Numba's stream for a handle on the current device."""
    return cuda.numba.external_stream(handle) if handle else cuda.numba.default_stream()
