"""Places of the fields of PyTorch's tensors that a step reads.

Asking 200 tensors for address, sizes and strides through Python takes longer than updating them.
These fields lie at fixed places of a tensor and its storage. In the versions of PyTorch that were
tried, the places are found with the help of sample tensors, which differ in every field; the only
field that is written to, a count of changes, is tried. If a place is not found, every step goes
through Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...private import NAMES, find
from ...storage import I32, STORAGES
from . import arrays

# Bytes that are searched; a tensor, a storage and a count of changes are at least as large.
TENSOR_BYTES, STORAGE_BYTES, _VERSION_BYTES = 176, 56, 24
_WORD, _NUMBER, _CODE = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint16


class Fields(NamedTuple):
    """Places in bytes, all ``int64``."""

    tensor: int  # in the object of Python: the address of the tensor
    storage: int  # in a tensor: the address of its storage
    version: int  # the address of its count of changes, or 0 where nobody counts them
    dim: int
    sizes: int  # up to `inline` of them; of more dimensions the address of sizes and strides
    strides: int
    inline: int  # a number, not a place: so many dimensions have sizes and strides in the tensor
    offset: int  # in elements
    dtype: int
    keys: int  # dispatch keys: sparse, on a device, negated, a tensor of zeros, ...
    data: int  # in a storage: the address of its memory
    n_bytes: int
    deleter: int  # the function that frees the memory
    lazy: int  # not a place: the deleter of lazy clones, which share memory until one is written to
    changes: int  # in a count of changes: the number


class TensorLayout(NamedTuple):
    """The fields, and the numbers of the dtypes of PyTorch."""

    fields: Fields
    codes: dict[Any, int]


@cache
def layout_of(torch: Any) -> TensorLayout | None:
    """The layout of the tensors of this PyTorch; None where they are not read."""
    found = layout_or_obstacle(torch)
    if isinstance(found, TensorLayout):
        return found
    if arrays.usable and not _missing():  # else a warning has said so
        arrays.warn_of("tensors", found)
    return None


@cache
def layout_or_obstacle(torch: Any) -> TensorLayout | str:
    """The layout of the tensors of this PyTorch, or why they are not read."""
    version = torch.__version__
    if reason := arrays.why_not or arrays.untried(PyTorch=version):
        return reason
    if missing := _missing():
        return f"PyTorch {version} has no {' and no '.join(missing)}"
    # Tensors that are made in inference mode have no counts of changes.
    with torch.inference_mode(False):
        layout = _found(torch)
        if layout is None:
            return f"their fields were not found in PyTorch {version}"
        if not _counts_changes(torch, layout.fields):
            return f"changes are not counted where expected in PyTorch {version}"
    return layout


def _missing() -> list[str]:
    names = "keys", "tensor address", "storage address", "version", "lazy clone"
    return [NAMES[name].place.replace(":", ".") for name in names if find(name) is None]


def keys_of(tensor: Any) -> int:
    """The dispatch keys of a tensor of PyTorch in one number: its kind and its device."""
    return signed(find("keys")(tensor).raw_repr())


def _found(torch: Any) -> TensorLayout | None:
    samples = _samples(torch)
    tensors, storages = [t._cdata for t in samples], [t.untyped_storage() for t in samples]
    storages_at = [storage._cdata for storage in storages]
    start, end = object.__basicsize__, type(samples[0]).__basicsize__
    dtype, codes = _dtypes(torch)
    places: dict[str, int | None] = {
        "tensor": _find([id(t) for t in samples], tensors, end, start=start),
        "storage": _find(tensors, storages_at, TENSOR_BYTES),
        "dim": _find(tensors, [t.dim() for t in samples], TENSOR_BYTES),
        "offset": _find(tensors, [t.storage_offset() for t in samples], TENSOR_BYTES),
        "dtype": dtype,
        "keys": _find(tensors, [keys_of(t) for t in samples], TENSOR_BYTES, ctypes.c_int64),
        "data": _find(storages_at, [storage.data_ptr() for storage in storages], STORAGE_BYTES),
        "n_bytes": _find(storages_at, [storage.nbytes() for storage in storages], STORAGE_BYTES),
    }
    places |= _dims(samples) | _versions(torch) | _lazy(torch)
    if None in places.values():
        return None
    found = {name: place for name, place in places.items() if place is not None}
    return TensorLayout(Fields(**found), codes)


def _samples(torch: Any) -> list[Any]:
    """Tensors that differ in every field, and begin at different places of their memory."""
    # If two fields had the same numbers in all samples, one could be taken for the other.
    whole = torch.zeros(7, 5, 11)
    return [
        torch.zeros(3, 4),
        whole[1:, ::2],
        torch.nn.Parameter(torch.zeros(13, dtype=torch.bfloat16)),
        torch.zeros(9)[5],
        torch.zeros(4, 3, 2, 5, 6)[2:].transpose(1, 3),
        torch.from_numpy(np.zeros(17))[3:],
        torch.zeros(29, dtype=torch.complex64).conj().imag[7:],  # whose numbers are negated
    ]


def _values(kind: Any, at: Sequence[int], offset: int) -> list[int]:
    return [kind.from_address(address + offset).value for address in at]


def _find(
    at: Sequence[int], values: Sequence[int], end: int, kind: Any = _WORD, start: int = 0
) -> int | None:
    """The first place where memory at each address has its value."""
    size = ctypes.sizeof(kind)
    places = range(start, end - size + 1, size)
    return next((k for k in places if _values(kind, at, k) == list(values)), None)


def _find_dims(samples: Sequence[Any], dims: Sequence[Sequence[int]], start: int) -> int | None:
    for place in range(start, TENSOR_BYTES - 8 * max(map(len, dims)) + 1, 8):
        found = [_words(t._cdata + place, t.dim()) for t in samples]
        if found == [list(own) for own in dims]:
            return place
    return None


def _words(address: int, n: int) -> list[int]:
    return list((_WORD * n).from_address(address))


def _dims(samples: Sequence[Any]) -> dict[str, int | None]:
    """The places of sizes and strides, and the number of dimensions that fit there."""
    sizes = _find_dims(samples, [t.shape for t in samples], 0)
    strides = None if sizes is None else _find_dims(samples, [t.stride() for t in samples], sizes)
    if sizes is None or strides is None:
        return {"sizes": None}
    inline, more = (strides - sizes) // 8, samples[0].view(3, 1, 2, 1, 2, 1)
    if not max(t.dim() for t in samples) <= inline < more.dim():
        return {"sizes": None}
    (outside,) = _words(more._cdata + sizes, 1)
    fits = _words(outside, 2 * more.dim()) == [*more.shape, *more.stride()]
    return {"sizes": sizes if fits else None, "strides": strides, "inline": inline}


def _versions(torch: Any) -> dict[str, int | None]:
    """The place of the address of a count of changes, and the place of the number in the count.

    A tensor and its slices share a storage and a count; other tensors share neither.
    """
    tensors = [torch.zeros(3) for _ in range(4)]
    for k, tensor in enumerate(tensors):
        for _ in range(5 + k):
            tensor.add_(1.0)
    cut = [tensor[1:] for tensor in tensors]
    at, cut_at = [t._cdata for t in tensors], [t._cdata for t in cut]
    storages, counts = [t.untyped_storage()._cdata for t in tensors], {}
    for place in range(8, TENSOR_BYTES, 8):
        found = _values(_WORD, at, place)
        is_shared = found == _values(_WORD, cut_at, place)
        if is_shared and found != storages and len({0, *found}) == 5:
            counts[place] = found
    if len(counts) != 1:
        return {"version": None}
    ((place, found),) = counts.items()
    number = _find(found, [t._version for t in tensors], _VERSION_BYTES, _NUMBER, start=8)
    return {"version": place, "changes": number}


def _dtypes(torch: Any) -> tuple[int | None, dict[Any, int]]:
    """The place of the number of a dtype, and the numbers."""
    known = *STORAGES, I32.dtype, np.dtype(np.int64)
    dtypes = [getattr(torch, dtype.name) for dtype in known]
    pair = [[torch.zeros(3, dtype=dtype) for dtype in dtypes] for _ in range(2)]
    at = [[tensor._cdata for tensor in tensors] for tensors in pair]
    for place in range(0, TENSOR_BYTES, 2):
        one, other = (_values(_CODE, of, place) for of in at)
        if one == other and len({*one}) == len(dtypes):
            return place, dict(zip(dtypes, one, strict=True))
    return None, {}


def _counts_changes(torch: Any, f: Fields) -> bool:
    """Whether adding 1 at the place that was found counts one change, and changes nothing else."""
    tensors = [torch.arange(6.0) for _ in range(2)]
    tensors += [tensor.view(2, 3)[1:] for tensor in tensors]
    for tensor in tensors[:2]:
        tensor.add_(1.0)
    before, versions = _all_of(tensors), [t._version for t in tensors]
    (count,) = _words(tensors[0]._cdata + f.version, 1)
    number, words = _NUMBER.from_address(count + f.changes), _words(count, _VERSION_BYTES // 8)
    number.value += 1
    is_counted = [t._version for t in tensors] == [n + (k % 2 == 0) for k, n in enumerate(versions)]
    is_alone = _all_of(tensors) == before
    number.value -= 1
    return is_counted and is_alone and _words(count, _VERSION_BYTES // 8) == words


def _all_of(tensors: Sequence[Any]) -> list[Any]:
    """Memory and properties of tensors, but for their counts of changes."""
    memory = [_words(t._cdata, TENSOR_BYTES // 8) for t in tensors]
    memory += [_words(t.untyped_storage()._cdata, STORAGE_BYTES // 8) for t in tensors]
    said = [
        (t.shape, t.stride(), t.dtype, t.data_ptr(), t.tolist(), t.requires_grad) for t in tensors
    ]
    return [*memory, *said]


def _lazy(torch: Any) -> dict[str, int | None]:
    """The place of a storage's deleter, and the deleter that lazy clones have."""
    # A lazy clone shares its memory until PyTorch writes to one of the two. It is known by its
    # deleter, the function that will free the memory. A step writes by address, so it would change
    # both.
    plain, shared = ([torch.zeros(n) for n in (3, 5)] for _ in range(2))
    clones = [find("lazy clone")(tensor) for tensor in shared]
    plain_at, shared_at = ([t.untyped_storage()._cdata for t in x] for x in (plain, clones))
    for place in range(0, STORAGE_BYTES, 8):
        own, found = _values(_WORD, plain_at, place), _values(_WORD, shared_at, place)
        if len({*own}) == len({*found}) == 1 and own != found:
            return {"deleter": place, "lazy": signed(found[0])}
    return {"deleter": None}


def signed(word: int) -> int:
    """A word of memory as the int64 that compiled code reads."""
    return ctypes.c_int64(word).value
