"""The memory of PyTorch's tensors: as arrays, without aliases."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import add, attrgetter, ge, gt, mul, not_
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


PLAIN_TYPES = {Tensor, torch.nn.Parameter}
"""Types of tensors that answer by PyTorch's own functions."""
# Of many tensors the same is asked, one question after the other: `map` calls these from C.
address_of, numel_of, is_contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
dtype_of, shape_of = attrgetter("dtype"), attrgetter("shape")
_storage_of, _bytes_of = Tensor.untyped_storage, torch.UntypedStorage.nbytes
_offset_of, _itemsize_of = Tensor.storage_offset, Tensor.element_size

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


def bytes_of(tensors: Sequence[Tensor]) -> list[int]:
    """The bytes of the elements of each tensor."""
    return [*map(mul, map(numel_of, tensors), map(_itemsize_of, tensors))]


def are_there(tensors: Sequence[Tensor], places: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether contiguous tensors of so many bytes lie in their storages, which may be cut."""
    offsets = [*map(_offset_of, tensors)]
    ends = map(add, sizes, map(mul, offsets, map(_itemsize_of, tensors))) if any(offsets) else sizes
    if not all(places) and any(compress(sizes, map(not_, places))):
        return False
    return all(map(ge, map(_bytes_of, map(_storage_of, tensors)), ends))


class Written:
    """Memory that a step may write, in the order of where it begins."""

    def __init__(self, places: Sequence[int] = (), sizes: Sequence[int] = ()) -> None:
        begins, n_bytes = np.array(places, np.int64), np.array(sizes, np.int64)
        begins, ends = (x[n_bytes > 0] for x in (begins, begins + n_bytes))
        order = begins.argsort(kind="stable")
        begins, reach = begins[order], np.maximum.accumulate(ends[order])
        # Of what begins before a place, how far the furthest reaches.
        self._begins, self._reach = begins.tolist(), [0, *reach.tolist()]
        # A span from the first to the last element may have gaps, in which others lie.
        self.has_no_alias = not (begins[1:] < reach[:-1]).any()

    def overlaps(self, begins: Sequence[int], sizes: Iterable[int]) -> bool:
        """Whether any of these spans of memory overlaps it."""
        places = map(bisect_left, repeat(self._begins), map(add, begins, sizes))
        return any(map(gt, map(self._reach.__getitem__, places), begins))


class Span(NamedTuple):
    """Memory from the first to the last element of a tensor."""

    begin: int
    end: int
    name: str
    is_written: bool
    tensor: Tensor | None  # None: it fills the span

    @classmethod
    def of(cls, tensor: Tensor, name: str, *, is_written: bool = True) -> Span:
        """The span of a tensor."""
        begin, size = tensor.data_ptr(), tensor.element_size()
        return cls(begin, begin + size * extent(tensor), name, is_written, tensor)


def check_single(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is to be written, of which two elements lie in one place."""
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


def check_no_alias(where: str, spans: Iterable[Span]) -> None:
    """Refuse tensors that share elements in memory, where one of them is written."""
    before: list[Span] = []
    for own in sorted((s for s in spans if s.end > s.begin), key=lambda s: s[:4]):
        before = [other for other in before if other.end > own.begin]
        for other in before:
            if (own.is_written or other.is_written) and _share(own, other):
                expected, got = "memory of its own", f"that of {other.name}"
                reject(RuntimeError, where, own.name, "shares memory", expected, got)
        before.append(own)


def _share(one: Span, other: Span) -> bool:
    """Whether two tensors whose spans overlap have an element in common."""
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
