"""A named array, on the host or on a CUDA device, that optimizers update in place."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

import numpy as np

from ...kernels.cpu.threads import allocation
from ...ops.runtime import check
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from .arguments import check_kind


class Parameter:
    """An array with a name, adopted without a copy.

    Args:
        data: a writable, C-contiguous floating array (float32, float64, float16 or
            ``ml_dtypes.bfloat16``) of any shape, on the host or on a CUDA device (an array of
            torch, CuPy or Numba, or anything with ``__cuda_array_interface__``).
        name: its name; an optimizer names an unnamed parameter ``parameter_<i>`` by position.
        requires_grad: whether optimizers may update it.

    ``data`` can be rebound at any time to an array of the same shape; optimizers that hold the
    parameter notice. The parameter offers NumPy's array interface, or that of CUDA arrays, so
    operators take it as an array.

    Raises:
        TypeError: ``data`` is no floating array, ``name`` no str, ``requires_grad`` no bool.
        ValueError: ``data`` is read-only or not contiguous.

    >>> import numpy as np
    >>> p = Parameter(np.zeros((2, 3), np.float32), "dense.weight")
    >>> p.shape, p.name
    ((2, 3), 'dense.weight')
    """

    def __init__(self, data: Any, name: str | None = None, requires_grad: bool = True) -> None:
        if isinstance(data, Parameter):
            data = data.array
        check_kind("Parameter", "name", name, str | None, "a str")
        self._name = name
        self.requires_grad = check.flag("Parameter", "requires_grad", requires_grad)
        self._data: Any = check.variable("Parameter", "data", data)
        # Weak: a parameter often outlives the optimizers that have had it, and must not keep their
        # states in memory.
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def name(self) -> str | None:
        """The name; fixed from when an optimizer holds the parameter, which saves by it."""
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        if self._owners and value != self._name:
            wrong = "is fixed by an optimizer"
            reject(ValueError, "Parameter", "name", wrong, repr(self._name), repr(value))
        self._name = value

    @property
    def data(self) -> Any:
        """The array; assign another one of the same shape to rebind it.

        On the host it is a NumPy array, on a device what was given.
        """
        return self._data.owner if isinstance(self._data, DeviceArray) else self._data

    @data.setter
    def data(self, value: Any) -> None:
        array = check.variable("Parameter", "data", value)
        if array.shape != self._data.shape:
            wrong = "has a wrong shape"
            reject(ValueError, "Parameter", "data", wrong, self._data.shape, array.shape)
        # All owners are asked before the first one hears of the change: one that refuses leaves the
        # parameter bound as it was for all of them. The list keeps them alive in between.
        owners = list(self._owners)
        for owner in owners:
            owner.check_rebinding(self, array)
        self._data = array
        for owner in owners:
            owner.forget_addresses()

    def is_of(self, value: Any) -> bool:
        """Whether a value is this parameter, its array, or a view of all of it of another class."""
        if value is self or value is self._data or value is self.data:
            return True
        is_array = isinstance(value, np.ndarray) and isinstance(self._data, np.ndarray)
        return is_array and value.__array_interface__ == self._data.__array_interface__

    @property
    def is_shared(self) -> bool:
        """Whether several optimizers have it."""
        return len(self._owners) > 1

    def follow(self, array: DeviceArray) -> None:
        """Take over where its array on a device lies now, which an owner has checked."""
        self._data = array
        for owner in list(self._owners):
            owner.forget_addresses()

    def rebind(self, array: np.ndarray) -> None:
        """Take another array, of which the only owner knows already."""
        self._data = array

    array = property(  # read in every step, so without a call of Python
        attrgetter("_data"), doc="The array as steps see it: of NumPy, or a `DeviceArray`."
    )

    @property
    def __fusestep_array__(self) -> Any:  # operators look for it
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array."""
        dtype: np.dtype[Any] = self._data.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return int(self._data.ndim)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self._data.size)

    def asnumpy(self) -> np.ndarray:
        """The array itself; of one on a device a copy on the host, which is waited for."""
        array: np.ndarray = self._data.numpy() if self.is_on_device else self._data
        return array

    @property
    def is_on_device(self) -> bool:
        """Whether it lives on a CUDA device."""
        return isinstance(self._data, DeviceArray)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.is_on_device:
            raise AttributeError("this parameter lives on the host")
        interface: dict[str, Any] = self._data.__cuda_array_interface__
        return interface

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.is_on_device:
            raise TypeError("Parameter: it lives on a CUDA device; asnumpy() copies it to the host")
        array: np.ndarray = self._data if dtype is None else self._data.astype(dtype, copy=False)
        if copy is False and array is not self._data:
            raise ValueError(f"Parameter: a copy is needed to convert {self.dtype} to {dtype}")
        return array.copy() if copy and array is self._data else array

    def __bool__(self) -> bool:
        return bool(self.data)

    def __len__(self) -> int:
        return len(self._data)

    def __float__(self) -> float:
        return float(self.data)

    def __repr__(self) -> str:
        return f"Parameter(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def watch(self, owner: Any) -> None:
        """Have ``owner`` told about every rebinding, and of other owners; it is held weakly."""
        for other in list(self._owners):
            if other is not owner:
                other.forget_addresses()
        self._owners.add(owner)

    def check_awake(self, but: Any = None) -> None:
        """Ask its optimizers, but one, whether another one may have it."""
        for owner in list(self._owners):
            if owner is not but:
                owner.check_awake(self)

    def __getstate__(self) -> dict[str, Any]:
        # Without owners: an optimizer that is copied along watches the copy from its own
        # `__setstate__`, and one that is not must not be told about it.
        return {"_name": self.name, "requires_grad": self.requires_grad, "_data": self._data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._data = at_line(self._data)
        self._owners = weakref.WeakSet()


def writable(array: Any) -> Any:
    """``array``, or a copy that can be updated: what was unpickled can be read-only."""
    if isinstance(array, DeviceArray):
        return array
    flags = array.flags
    can_be_updated = flags.writeable and flags.c_contiguous and flags.aligned
    return array if can_be_updated else array.copy(order="C")


def assign(array: Any, numbers: np.ndarray) -> None:
    """Write numbers to an array, on the host or on a device."""
    if isinstance(array, DeviceArray):
        array.assign(numbers)
    else:
        array[...] = numbers


def at_line(array: Any) -> Any:
    """``array``, or a copy on the host that can be updated and begins at a cache line."""
    return array if isinstance(array, DeviceArray) else allocation.at_line(array)
