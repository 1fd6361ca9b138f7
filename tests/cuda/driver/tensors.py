"""Tensors of a PyTorch without CUDA that say that they lie on ``cuda:0``.

Their memory is that of the host, as all memory is under the driver without a device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DEVICE, _HOST = torch.device("cuda:0"), torch.device("cpu")


class _OnHost(TorchFunctionMode):
    """Whatever is asked for on the device is made on the host."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {name: _there(value) for name, value in (kwargs or {}).items()}
        return function(*map(_there, args), **given)


def _there(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return _HOST if is_device else value


def pretend() -> None:
    """From now on all tensors but single numbers, such as counts, lie there."""
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: self.dim() > 0)
    tensor.device = property(lambda self: _DEVICE if self.dim() > 0 else _HOST)
    tensor.cpu = tensor.cuda = lambda self: self
    cuda: Any = torch.cuda
    cuda.is_available, cuda.empty_cache = (lambda: True), (lambda: None)
    cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0)
    _OnHost().__enter__()
    # Within a backward there is no mode.
    arange = torch.arange
    torch.arange = lambda *given, **_: arange(*given)
