"""Reading PyTorch's tensors without asking Python for them.

To ask 200 tensors for address, sizes and strides by Python takes longer than to update them. The
library of PyTorch has C functions for it, made for compiled models. They are handed the place in a
tensor's Python object where the tensor is, which is found on real tensors: it is the one that holds
``_cdata``. Where they are missing, or no such place is found, everything goes the slow way.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...inner import njit
from ..compile import NativeFunction
from ..intrinsics import as_pointer, call_address, load_int64
from ..machine import Entry
from ..records import int64s, overlaps, records
from .arrays import ITEMS, LENGTH, address_of
from .arrays import usable as arrays_are_read

_LIBRARY = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
_WHAT = ("layout", "dtype", "device_type", "dim", "sizes", "strides", "data_ptr")


class _Shim(NamedTuple):
    """How tensors are read, all ``int64``."""

    offset: int  # in a tensor's object, of the tensor
    strided: int  # codes of the two layouts, and of the host
    sparse: int
    cpu: int
    layout: int  # addresses of functions of a tensor, which write what was asked for
    dtype: int
    device_type: int
    dim: int
    sizes: int
    strides: int
    data_ptr: int


@cache
def shim(torch: Any) -> _Shim | None:
    """How the tensors of this PyTorch are read; None where they cannot be."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.CDLL(str(folder / _LIBRARY[sys.platform]))
        functions = [getattr(library, f"aoti_torch_get_{what}") for what in _WHAT]
    except (OSError, KeyError, AttributeError):
        return None
    if not arrays_are_read:
        return None
    samples = _samples(torch)
    offset = _offset_of(samples)
    if offset is None:
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]

    def asked(what: str, tensor: Any, kind: Any = ctypes.c_int32) -> int:
        found, place = kind(), ctypes.c_void_p(id(tensor) + offset)
        failed = functions[_WHAT.index(what)](place, ctypes.byref(found))
        return -1 if failed else int(found.value)

    dense, *_, rows = samples
    codes = asked("layout", dense), asked("layout", rows), asked("device_type", dense)
    for tensor in samples[:-1]:
        dims = asked("sizes", tensor, ctypes.c_int64), asked("strides", tensor, ctypes.c_int64)
        sizes, strides = ((ctypes.c_int64 * tensor.dim()).from_address(at) for at in dims)
        if (
            asked("dim", tensor, ctypes.c_int64) != tensor.dim()
            or asked("data_ptr", tensor, ctypes.c_int64) != tensor.data_ptr()
            or (tuple(sizes), tuple(strides)) != (tuple(tensor.shape), tensor.stride())
        ):
            return None
    return _Shim(offset, *codes, *addresses)


def _samples(torch: Any) -> list[Any]:
    matrix = torch.zeros(3, 4)
    rows = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 2), (3, 2), check_invariants=False
    )
    half = torch.zeros(5, dtype=torch.bfloat16)
    return [matrix, matrix[1:, ::2], torch.nn.Parameter(half), torch.zeros(()), rows]


def _offset_of(tensors: Sequence[Any]) -> int | None:
    """Where in the object of each of ``tensors`` its ``_cdata`` lies."""
    for offset in range(object.__basicsize__, type(tensors[0]).__basicsize__ - 7, 8):
        if all(ctypes.c_int64.from_address(id(t) + offset).value == t._cdata for t in tensors):
            return offset
    return None


NONE, DENSE, ROWS = range(3)
"""What a gradient is."""


class _Held(NamedTuple):
    """What an object should be, all ``int64``."""

    identity: int
    address: int  # of its first element


class _Wanted(NamedTuple):
    """What a gradient should be, all ``int64``."""

    kind: int
    dtype: int
    dim: int
    n_bytes: int


class _Wish(NamedTuple):
    """What tuples of tensors should be, all ``int64``; addresses."""

    n_held: int
    held: int  # [n_held] of `_Held`
    n_gradients: int
    wanted: int  # [n_gradients] of `_Wanted`
    dims: int  # of all that are not None: sizes, then strides
    memory: int  # [2, n_stretches]
    n_stretches: int
    type: int  # that of gradients
    none: int
    answer: int  # where functions of PyTorch write


_shim_at, _held_at, _wanted_at, _wish_at = map(records, (_Shim, _Held, _Wanted, _Wish))


@njit
def _asked(function, tensor, answer):
    """What a function of PyTorch writes about a tensor; -1 where it fails."""
    int64s(answer, 1)[0] = -1
    call_address(function, tensor, answer)
    return load_int64(answer)


@njit
def _code(function, tensor, answer):
    """The same of what is an ``int32``."""
    return np.int32(_asked(function, tensor, answer))


@njit
def _has_dims(function, tensor, dims, dim, answer):
    """Whether sizes or strides are these."""
    found = _asked(function, tensor, answer)
    if found == -1:
        return False
    differ = 0
    for d in range(dim):
        differ += load_int64(found + 8 * d) != load_int64(dims + 8 * d)
    return differ == 0


def _read_tensors(wish, shim, held, gradients, addresses):
    """Whether objects are what they were, and gradients as expected; addresses of dense ones."""
    c, s = _wish_at(wish, 1)[0], _shim_at(shim, 1)[0]
    if load_int64(held + LENGTH) != c.n_held or load_int64(gradients + LENGTH) != c.n_gradients:
        return 0
    objects = _held_at(c.held, c.n_held)
    for k in range(c.n_held):
        if load_int64(held + ITEMS + 8 * k) != objects[k].identity:
            return 0
        address, tensor = objects[k].address, objects[k].identity + s.offset
        if address != 0 and _asked(s.data_ptr, tensor, c.answer) != address:
            return 0
    wanted_of, dims = _wanted_at(c.wanted, c.n_gradients), c.dims
    out = int64s(addresses, c.n_gradients)
    memory = carray(as_pointer(c.memory), (2, c.n_stretches), np.int64)
    for k in range(c.n_gradients):
        wanted, gradient = wanted_of[k], load_int64(gradients + ITEMS + 8 * k)
        out[k] = 0
        if wanted.kind == NONE or gradient == c.none:
            if wanted.kind != NONE or gradient != c.none:
                return 0
            continue
        tensor = gradient + s.offset
        if load_int64(gradient + 8) != c.type:
            return 0
        layout = s.strided if wanted.kind == DENSE else s.sparse
        if _code(s.layout, tensor, c.answer) != layout:
            return 0
        if _code(s.dtype, tensor, c.answer) != wanted.dtype:
            return 0
        if _code(s.device_type, tensor, c.answer) != s.cpu:
            return 0
        if _asked(s.dim, tensor, c.answer) != wanted.dim:
            return 0
        if not _has_dims(s.sizes, tensor, dims, wanted.dim, c.answer):
            return 0
        strides, parameter = dims + 8 * wanted.dim, objects[k].identity + s.offset
        if _asked(s.dim, parameter, c.answer) != wanted.dim:
            return 0
        if not _has_dims(s.sizes, parameter, dims, wanted.dim, c.answer):
            return 0
        if not _has_dims(s.strides, parameter, strides, wanted.dim, c.answer):
            return 0
        if wanted.kind == DENSE:
            if not _has_dims(s.strides, tensor, strides, wanted.dim, c.answer):
                return 0
            out[k] = _asked(s.data_ptr, tensor, c.answer)
            if out[k] == -1 or overlaps(memory, out[k], out[k] + wanted.n_bytes):
                return 0
        dims += 16 * wanted.dim
    return 1


_read = NativeFunction(_read_tensors, f"tensors {ITEMS}", Entry(True, True))
READERS = (_read,)


class Expected:
    """What the tensors of a step should be: held ones the same objects, at the same addresses.

    ``held`` are tensors, or other objects, and addresses (0: it is not asked for). The first ones
    are the parameters of the gradients, which have to keep their sizes and strides. ``gradients``
    tell for each gradient what it is, by its kind and an example of its sizes, strides and dtype,
    which is kept alive. Dense gradients should not lie in ``memory``, which is as for `overlaps`.
    """

    def __init__(
        self,
        torch: Any,
        held: Sequence[tuple[Any, int]],
        gradients: Sequence[tuple[int, Any]],
        memory: np.ndarray,
    ) -> None:
        how = shim(torch)
        assert how is not None
        codes = _dtype_codes(torch)
        rows, dims = [], []
        for kind, example in gradients:
            if kind == NONE:
                rows.append(_Wanted(NONE, 0, 0, 0))
                continue
            n_bytes = example.numel() * example.element_size()
            rows.append(_Wanted(kind, codes[example.dtype], example.dim(), n_bytes))
            dims += [*example.shape, *example.stride()]
        identities = [_Held(id(one), address) for one, address in held]
        tables = [np.array(t, np.int64) for t in (identities, rows, dims, how)]
        self._alive = held, gradients, tables, memory, (answer := np.zeros(1, np.int64))
        held_at, rows_at, dims_at, shim_at = map(address_of, tables)
        wish = _Wish(
            len(held), held_at, len(rows), rows_at, dims_at, address_of(memory), memory.shape[1],
            id(torch.Tensor), id(None), address_of(answer),
        )  # fmt: skip
        self._wish = array("q", wish)
        self._addresses = np.zeros(len(rows), np.int64)
        self._arguments = self._wish.buffer_info()[0], shim_at
        self._out = address_of(self._addresses)

    def addresses(self, held: tuple[Any, ...], gradients: tuple[Any, ...]) -> np.ndarray | None:
        """The addresses of the dense gradients, 0 for others; None where not all is as expected.

        The array is the same in every call.
        """
        fits = _read.call(*self._arguments, id(held), id(gradients), self._out)
        return self._addresses if fits else None


@cache
def _dtype_codes(torch: Any) -> dict[Any, int]:
    """The number by which PyTorch's C functions call a dtype."""
    how, codes = shim(torch), {}
    assert how is not None
    get = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(how.dtype)
    for name in ("float32", "float64", "float16", "bfloat16"):
        example, found = torch.zeros((), dtype=getattr(torch, name)), ctypes.c_int32()
        get(id(example) + how.offset, ctypes.addressof(found))
        codes[example.dtype] = found.value
    return codes
