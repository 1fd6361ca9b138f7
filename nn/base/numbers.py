"""Numbers of an optimizer that may live on a CUDA device, and its count of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.storage import REALS
from ...ops.runtime import check
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from .arguments import check_kind

Number = float | DeviceArray
"""A number of the host, or an array of one element on a device."""

FLOATS = tuple(REALS)


class StepCount(np.ndarray):
    """An array of one count, which is a number where Python asks for an int or for a text."""

    def __index__(self) -> int:
        return int(self.item())

    __int__ = __index__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        return array if array.shape else array[()]  # what is computed from it is no count

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)  # read without this package, too


def on_device(
    where: str, name: str, value: Any, dtypes: Sequence[np.dtype[Any]] = FLOATS
) -> DeviceArray | None:
    """An array of one element on a device, adopted without a copy; None for everything else."""
    array = DeviceArray.adopt(where, name, getattr(value, "__fusestep_array__", value))
    if array is None:
        return None
    if array.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        reject(TypeError, where, name, "has a wrong dtype", expected, array.dtype)
    if array.size != 1:
        reject(ValueError, where, name, "has a wrong shape", "one element", array.shape)
    return array.contiguous(where, name)


def item(value: Number) -> float:
    """The number as a float; the host waits for a number on a device."""
    return float(value.numpy().reshape(())) if isinstance(value, DeviceArray) else value


def check_place(where: str, name: str, value: Any, device: int | None) -> None:
    """Refuse a number on another device than the parameters."""
    if isinstance(value, DeviceArray) and value.device != device:
        expected = "the host" if device is None else f"CUDA device {device}"
        got = f"CUDA device {value.device}"
        reject(ValueError, where, name, "lives elsewhere than the parameters", expected, got)


def loss_scale_of(where: str, value: Any) -> Number:
    """The loss scale of a user, checked: above 0 and finite in float32, or a number on a device."""
    there = on_device(where, "loss_scale", value)
    if there is not None:
        return there
    check_kind(where, "loss_scale", value, bool | int | float | np.floating, "a float or int")
    usable = 1.0 / check.LARGEST <= float(value) <= check.LARGEST
    check.in_range(where, "loss_scale", value, usable, "positive and finite in float32")
    return float(value)
