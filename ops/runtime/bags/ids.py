"""Reading ids on the host, and the errors of bad ids and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, attrgetter, ge, mul
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu.headers import id_lists
from ....kernels.cpu.headers.id_lists import FIXED, JOINED, LISTED, OPEN, SINGLE, IdList
from ..arrays import address_of
from ..errors import reject
from .given import Ids, read_lists, read_weights
from .pooling import Pooling

_dtype_of, _layout_of, _shape_of = map(attrgetter, ("dtype", "layout", "shape"))


class HostIds(NamedTuple):
    """The ids of all features on the host, in the order of their tables."""

    lists: np.ndarray  # int64 [features, fields of IdList]
    real: np.dtype[Any]  # of the weights
    is_weighted: bool
    keep: Sequence[Any]  # the objects that own this memory

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Address and size in bytes of all that is read."""
        found = []
        for own in map(IdList._make, self.lists.tolist()):
            found.append((own.ids + own.begin * own.id_bytes, own.n * own.id_bytes))
            if own.offsets:
                found.append((own.offsets, own.n_offsets * own.offset_bytes))
            if own.weights:
                found.append((own.weights, own.n * self.real.itemsize))
        return found

    def column(self, name: str) -> np.ndarray:
        """One field of all features."""
        column: np.ndarray = self.lists[:, IdList._fields.index(name)]
        return column


def read(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> HostIds:
    """The ids of all features; loops check the values of offsets and ids later.

    Raises:
        TypeError, ValueError: a kind, dtype or shape does not fit.
    """
    return read_plain(pooling, ids, offsets, weights) or _read_any(pooling, ids, offsets, weights)


def read_plain(
    pooling: Pooling, ids: Any, offsets: Any, weights: Any, torch: Any = None, *,
    singles: bool = False,
) -> HostIds | None:  # fmt: skip
    """The ids of plain arrays, read in one compiled call, or, with ``torch``, tensors; else None.

    With ``singles`` each id of one dimension is a bag.
    """
    n, is_weighted = len(pooling.of), weights is not None
    # None is no error yet: `_read_any` looks again, and says in words what is wrong.
    if not pooling.is_ordered or (is_weighted and pooling.name != "sum"):
        return None
    are_listed = [isinstance(given, list | tuple) for given in (ids, offsets, weights)]
    objects: tuple[Any, ...]
    if not any(are_listed):
        form, objects = JOINED, tuple(x for x in (ids, offsets, weights) if x is not None)
    elif are_listed != [True, offsets is not None, is_weighted]:
        return None
    else:
        form = SINGLE if singles or not pooling.pools else FIXED
        if offsets is not None:
            form = OPEN if pooling.open_ended else LISTED
        objects = (*ids, *(offsets or ()), *(weights or ()))
    if not pooling.pools and form != SINGLE:
        return None
    if torch is None:
        lists = id_lists.read(objects, form, n, pooling.real, is_weighted=is_weighted)
    else:
        lists = _read_tensors(objects, form, n, pooling.real, torch, is_weighted=is_weighted)
    if lists is None:
        return None
    given = tuple.__new__(HostIds, (lists, pooling.real, is_weighted, objects))
    if singles and form == SINGLE:
        bags = given.column("bags")
        if bags[0] == 0 or (bags != bags[0]).any():
            return None
    return given


def _read_tensors(
    objects: tuple[Any, ...], form: int, n: int, real: np.dtype[Any], torch: Any, *,
    is_weighted: bool,
) -> np.ndarray | None:  # fmt: skip
    """Read the ids of tensors on the host, by questions that `map` asks all of them; None where
    one is of another kind, or their lengths do not fit.
    """
    tensor, n_ids = torch.Tensor, 1 if form == JOINED else n
    is_whole = len(objects) == id_lists.n_objects(form, n, is_weighted=is_weighted)
    if not is_whole or {*map(type, objects)} != {tensor}:
        return None
    weights = objects[-n_ids:] if is_weighted else ()
    integers = objects[: len(objects) - len(weights)]
    if not (
        {*map(tensor.get_device, objects)} == {-1}
        and {*map(_layout_of, objects)} == {torch.strided}
        and all(map(tensor.is_contiguous, objects))
        and {*map(_dtype_of, integers)} <= {torch.int32, torch.int64}
        and {*map(_dtype_of, weights)} <= {getattr(torch, real.name)}
        and not any(map(tensor.is_neg, objects))
    ):
        return None
    numels, itemsizes = [*map(tensor.numel, objects)], [*map(tensor.element_size, objects)]
    offsets = map(add, map(tensor.storage_offset, objects), numels)
    in_storages = map(torch.UntypedStorage.nbytes, map(tensor.untyped_storage, objects))
    addresses = [*map(tensor.data_ptr, objects)]
    if not all(map(ge, in_storages, map(mul, offsets, itemsizes))):
        return None
    shapes = [*map(_shape_of, objects)]
    ids_dim = 2 if form == FIXED else 1
    if {*map(len, shapes[:n_ids])} != {ids_dim} or {*map(len, shapes[n_ids:])} - {1}:
        return None
    found = np.zeros((n, len(IdList._fields)), np.int64)
    columns = dict(zip(IdList._fields, found.T, strict=True))
    columns["offset_bytes"][:] = 4
    columns["ids"][:], columns["id_bytes"][:] = addresses[:n_ids], itemsizes[:n_ids]
    if form == JOINED:
        n_bags = (numels[1] - 1) // n
        if n_bags < 1 or n_bags * n != numels[1] - 1 or (is_weighted and numels[2] != numels[0]):
            return None
        bounds = objects[1][::n_bags].tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] != numels[0]:
            return None
        columns["begin"][:], columns["end"][:], columns["bags"][:] = bounds[:-1], bounds[1:], n_bags
        columns["n"][:] = columns["end"] - columns["begin"]
        columns["n_offsets"][:], columns["offset_bytes"][:] = n_bags + 1, itemsizes[1]
        columns["offsets"][:] = addresses[1] + np.arange(n) * n_bags * itemsizes[1]
        if is_weighted:
            columns["weights"][:] = addresses[2] + columns["begin"] * itemsizes[2]
        return found
    columns["n"][:] = columns["end"][:] = numels[:n]
    if form in (LISTED, OPEN):
        own = slice(n, 2 * n)
        columns["offsets"][:], columns["n_offsets"][:] = addresses[own], numels[own]
        columns["offset_bytes"][:] = itemsizes[own]
        columns["bags"][:] = columns["n_offsets"] - (form == LISTED)
    else:
        columns["bags"][:] = [own[0] for own in shapes[:n]]
        columns["length"][:] = [own[1] for own in shapes[:n]] if form == FIXED else 1
    bags = columns["bags"]
    if form != SINGLE and (bags[0] < 1 or (bags != bags[0]).any()):
        return None
    if is_weighted:
        if numels[-n:] != numels[:n]:
            return None
        columns["weights"][:] = addresses[-n:]
    return found


def _read_any(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> HostIds:
    read, is_joined = _read_features(pooling, ids, offsets)
    factors = read_weights(pooling, read, weights, is_joined=is_joined)
    each: Sequence[Any] = [None] * len(read)
    if factors is not None:
        factors = [own.astype(pooling.real, copy=False).reshape(-1) for own in factors]
        each = [factors[0][own.begin : own.end] for own in read] if is_joined else factors
    records = [_record(own, weights_) for own, weights_ in zip(read, each, strict=True)]
    lists = np.array(pooling.ordered(records), np.int64)
    return HostIds(lists, pooling.real, factors is not None, (read, each))


def _record(own: Ids, weights: np.ndarray | None) -> IdList:
    """The ids of a feature in the form of the loops."""
    at = 0, 0, 4
    if own.offsets is not None:
        at = address_of(own.offsets), len(own.offsets), own.offsets.itemsize
    ids, given = (address_of(own.array), own.array.itemsize), 0
    if weights is not None:
        given = address_of(weights)
    return IdList(*ids, own.n, *at, own.begin, own.end, own.bags, own.length, given)


def find_error(pooling: Pooling, ids: Any, offsets: Any) -> None:
    """Raise the error of the first feature with a bad offset or id; loops have found one.

    Raises:
        ValueError: offsets do not fit the ids.
        IndexError: an id is out of range, or all are good by now.
    """
    check_features(pooling, ids, offsets)
    wrong = "ids or offsets were changed by another thread during the call"
    raise IndexError(f"{pooling.where}: {wrong}")


def check_features(pooling: Pooling, ids: Any, offsets: Any) -> list[Ids]:
    """The ids of each feature, after a look at every offset and id.

    Raises:
        TypeError, ValueError: a kind, dtype or shape does not fit, or offsets do not fit the ids.
        IndexError: an id is out of range.
    """
    where, features = pooling.where, _read_features(pooling, ids, offsets)[0]
    for f, own in enumerate(features):
        _check_offsets(where, own)
        found, rows = own.array.reshape(-1)[own.begin : own.end], len(pooling.arrays[pooling.of[f]])
        if not pooling.drops and len(found):
            is_bad = (found < 0) | (found >= rows)
            if is_bad.any():
                k = int(np.argmax(is_bad))
                name, expected = f"{own.name}[{own.begin + k}]", f"0 <= id < {rows}"
                reject(IndexError, where, name, "is out of range", expected, int(found[k]))
    return features


def _read_features(pooling: Pooling, ids: Any, offsets: Any) -> tuple[list[Ids], bool]:
    """The ids of each feature, and whether all lie in one array; then each has its part of it."""
    lists, is_joined = read_lists(pooling, ids, offsets)
    if not is_joined:
        for own in lists:
            if own.bags == 0:  # no loop checks these offsets
                _check_offsets(pooling.where, own)
        return lists, False
    every, n = lists[0], len(lists)
    # A copy: from here on their owner may change them.
    bags, bounds = every.bags, every.offsets.copy()
    all_bags = every._replace(bags=bags * n, offsets=bounds)
    _check_ends(pooling.where, all_bags)
    firsts = bounds[::bags].tolist() if bags else [0] * (n + 1)
    if bags == 0 or firsts != sorted(firsts):  # the ids of a feature lie in between
        _check_offsets(pooling.where, all_bags)
    return [
        own._replace(
            offsets=bounds[f * bags : (f + 1) * bags + 1], begin=firsts[f], end=firsts[f + 1]
        )
        for f, own in enumerate(lists)
    ], True


def _check_ends(where: str, own: Ids) -> None:
    assert own.offsets is not None
    is_open = len(own.offsets) == own.bags
    first, last = map(int, own.offsets[[0, -1]]) if len(own.offsets) else (own.end, own.begin)
    if first != own.begin:
        reject(ValueError, where, own.offsets_name, "do not begin at 0", own.begin, first)
    if last > own.end or (last != own.end and not is_open):
        wrong, expected = "do not end at the number of ids", own.end
        reject(ValueError, where, own.offsets_name, wrong, expected, last)


def _check_offsets(where: str, own: Ids) -> None:
    """Refuse offsets that decrease, or do not lead from the first id to the last."""
    if own.offsets is None:
        return
    falls = own.offsets[1:] < own.offsets[:-1]
    if falls.any():
        k = int(np.argmax(falls)) + 1
        expected, got = f"at least {own.offsets[k - 1]}", int(own.offsets[k])
        reject(ValueError, where, f"{own.offsets_name}[{k}]", "falls", expected, got)
    _check_ends(where, own)
