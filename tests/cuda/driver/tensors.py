"""Tensors of a PyTorch without CUDA that say that they lie on ``cuda:0``.

What is asked for on the device lies in memory of the driver without a device, and belongs to the
stream that is current then; what PyTorch computes from it lies elsewhere on the host.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numba import cuda
from torch.overrides import TorchFunctionMode
import watch

_DEVICE, _HOST = torch.device("cuda:0"), torch.device("cpu")
_current = [0]
_frombuffer = torch.frombuffer


def _memory(n_bytes: int) -> Any:
    """Memory on the device that goes when its tensor goes."""
    array = cuda.device_array(max(n_bytes, 1), "u1")
    address = array.__cuda_array_interface__["data"][0]
    buffer: Any = (ctypes.c_char * array.nbytes).from_address(address)
    buffer.array = array
    watch.order.made(address, array.nbytes)
    weakref.finalize(array, watch.order.left, address, array.nbytes, _current[0])
    return buffer


class _OnDevice(TorchFunctionMode):
    """Tensors that are asked for on the device are made on the host, in the driver's memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        given = {name: _there(value) for name, value in (kwargs or {}).items()}
        found = function(*map(_there, args), **given)
        is_asked_for = any(map(_is_device, (*args, *(kwargs or {}).values())))
        is_tensor = isinstance(found, torch.Tensor) and found.layout is torch.strided
        return _moved(found) if is_asked_for and is_tensor and found.numel() else found


def _moved(tensor: Any) -> Any:
    n_bytes = tensor.numel() * tensor.element_size()
    there = _frombuffer(_memory(n_bytes), dtype=tensor.dtype, count=tensor.numel())
    there = there.view(tensor.shape)
    there.copy_(tensor.detach())
    return there.requires_grad_(tensor.requires_grad)


def _is_there(tensor: Any) -> bool:
    return tensor.dim() > 0 or watch.is_there(tensor.data_ptr())


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def _there(value: Any) -> Any:
    return _HOST if _is_device(value) else value


class _Stream:
    """``torch.cuda.Stream``; of a number, that stream."""

    def __init__(self, handle: int | None = None) -> None:
        self._made = cuda.stream() if handle is None else None
        self.cuda_stream = int(self._made.handle) if self._made else handle or 0

    def wait_stream(self, other: _Stream) -> None:
        watch.order.wait(self.cuda_stream, watch.order.event(other.cuda_stream))


@contextmanager
def _using(stream: _Stream) -> Iterator[None]:
    before, _current[0] = _current[0], stream.cuda_stream
    try:
        yield
    finally:
        _current[0] = before


def pretend() -> None:
    """From now on all tensors lie there, but for single numbers that nobody asked for there."""
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(_is_there)
    tensor.device = property(lambda self: _DEVICE if _is_there(self) else _HOST)
    tensor.get_device = lambda self: 0 if _is_there(self) else -1
    tensor.cpu = lambda self: self
    tensor.cuda = lambda self: self.to("cuda")
    library: Any = torch.cuda
    library.is_available, library.empty_cache = (lambda: True), (lambda: None)
    library.current_stream = lambda *_: _Stream(_current[0])
    library.default_stream = lambda *_: _Stream(0)
    library.Stream, library.stream, library.synchronize = _Stream, _using, cuda.synchronize
    _OnDevice().__enter__()
    run = threading.Thread.run

    def run_with_mode(thread: threading.Thread) -> None:
        with _OnDevice():  # a mode is a thread's
            run(thread)

    threading.Thread.run = run_with_mode  # type: ignore[method-assign]
    # Within a backward there is no mode.
    arange = torch.arange
    torch.arange = lambda *given, **_: arange(*given)
