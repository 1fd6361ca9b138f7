"""The memory of PyTorch's tensors: as arrays, and apart from each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.private import zero_tensors
from ....kernels.storage import FOREIGN, STORAGES
from ....ops.runtime import check
from ....ops.runtime.arrays import adopt_anywhere
from ....ops.runtime.device import DeviceArray
from ....ops.runtime.errors import reject
from ....ops.runtime.frameworks import check_there as check_there
from ....ops.runtime.frameworks import extent as extent

DTYPES = {getattr(torch, dtype.name): dtype for dtype in STORAGES}
"""Dtypes of parameters, states and gradients."""
DTYPE_NAMES = ", ".join(map(str, DTYPES))
NUMBERS = DTYPES | {getattr(torch, dtype.name): dtype for dtype in check.INDEX_DTYPES}
"""Dtypes of states that are single numbers."""
_WHERE = "fusestep.nn.torch"
_MOST_WORK = 1_000_000  # candidates, until two tensors count as overlapping


is_zerotensor = zero_tensors()
"""Whether a tensor is one of zeros without memory."""


class _Memory:
    """Memory as NumPy takes it: ``Tensor.numpy`` would forbid PyTorch to resize it."""

    def __init__(self, address: int, shape: Any, strides: Any, itemsize: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple([n * itemsize for n in strides]),
            "typestr": f"|V{itemsize}",
        }

    @classmethod
    def of(cls, tensor: Tensor, *, owned: bool) -> _Memory:
        """The memory of a tensor; ``owned``: it lives as long as this."""
        owner, form = tensor if owned else None, (tensor.shape, tensor.stride())
        return cls(tensor.data_ptr(), *form, tensor.element_size(), owner)


def array_of(tensor: Tensor) -> Any:
    """The array of a tensor whose elements lie in memory: of NumPy, or on a CUDA device.

    It keeps the memory alive.

    Raises:
        RuntimeError: its memory was let go.
    """
    check_there(_WHERE, "a tensor", tensor)
    return array_there(tensor)


def array_there(tensor: Tensor) -> Any:
    """The array of a tensor that was checked to lie in memory; as `array_of`."""
    if tensor.is_cuda:
        return adopt_anywhere(_WHERE, "a tensor", tensor)
    return np.asarray(_Memory.of(tensor, owned=True)).view(NUMBERS[tensor.dtype])


def tensor_of(array: Any) -> Tensor:
    """The tensor of a contiguous array of the host, or of PyTorch's on a device; or itself."""
    if isinstance(array, Tensor):
        return array
    if isinstance(array, DeviceArray):
        owner: Tensor = array.owner
        if array.shape == owner.shape:
            return owner
        begin = (array.address - owner.data_ptr()) // array.itemsize  # of a part of it
        return owner.reshape(-1)[begin : begin + array.size].reshape(array.shape)
    if array.dtype in FOREIGN.values():  # which PyTorch takes by its bits
        bits = torch.from_numpy(array.view(f"i{array.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor fills its memory; None where it does not."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def is_as_it_lies(tensor: Tensor) -> bool:
    """Whether its numbers are those in its memory, not their negatives or zeros without memory."""
    return not (tensor.is_neg() or tensor.is_conj() or is_zerotensor(tensor))


def fits_order(tensor: Tensor, order: Sequence[int]) -> bool:
    """Whether its numbers fill its memory in this order of dimensions."""
    return is_as_it_lies(tensor) and bool(tensor.permute(tuple(order)).is_contiguous())


def in_memory(tensor: Tensor, where: str = _WHERE, name: str = "a tensor") -> Tensor:
    """A contiguous tensor whose numbers are those that lie there: this one, or a copy.

    Raises:
        RuntimeError: its memory was let go, or it never had any.
    """
    if is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    check_there(where, name, tensor)  # before PyTorch copies what is not there
    return tensor.contiguous().resolve_neg()


class Stretch(NamedTuple):
    """Memory from the first to the last element of a tensor."""

    begin: int
    end: int
    name: str
    is_written: bool
    tensor: Tensor | None  # None: it fills the stretch

    @classmethod
    def of(cls, tensor: Tensor, name: str, *, is_written: bool = True) -> Stretch:
        """The stretch of a tensor."""
        begin, size = tensor.data_ptr(), tensor.element_size()
        return cls(begin, begin + size * extent(tensor), name, is_written, tensor)


def check_single(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is to be written, of which two elements lie in one place.

    Raises:
        RuntimeError: they do.
    """
    if not is_single(tensor):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            f"single memory location: {name}"
        )


def is_single(tensor: Tensor) -> bool:
    """Whether all elements of a tensor lie apart."""
    if tensor.is_contiguous():
        return True
    dims, numel = sorted(zip(tensor.stride(), tensor.shape, strict=True)), tensor.numel()
    reach, is_sure = 0, True  # of the elements along shorter strides
    for stride, n in dims:
        is_sure &= n < 2 or stride > reach
        reach += (n - 1) * stride
    if is_sure or not numel:
        return True
    if any(stride == 0 and n > 1 for stride, n in dims):
        return False
    places = np.zeros(1, np.int64)
    for stride, n in dims:
        places = np.add.outer(places, stride * np.arange(n)).reshape(-1)
    return bool(len(np.unique(places)) == numel)


def check_apart(where: str, stretches: Iterable[Stretch]) -> None:
    """Refuse tensors that share elements in memory, where one of them is written.

    Raises:
        RuntimeError: two do.
    """
    before: list[Stretch] = []
    for own in sorted((s for s in stretches if s.end > s.begin), key=lambda s: s[:4]):
        before = [other for other in before if other.end > own.begin]
        for other in before:
            if (own.is_written or other.is_written) and _share(own, other):
                expected, got = "memory of its own", f"that of {other.name}"
                reject(RuntimeError, where, own.name, "shares memory", expected, got)
        before.append(own)


def _share(one: Stretch, other: Stretch) -> bool:
    """Whether two tensors whose stretches overlap have an element in common."""
    if all(s.tensor is None or order_of(s.tensor) is not None for s in (one, other)):
        return True
    mine, theirs = (
        np.asarray(
            _Memory(s.begin, (s.end - s.begin,), (1,), 1, None)
            if s.tensor is None
            else _Memory.of(s.tensor, owned=False)
        )
        for s in (one, other)
    )
    try:
        return np.shares_memory(mine, theirs, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
