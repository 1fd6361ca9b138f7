"""Ids, offsets and weights as they are given: read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu.headers import id_lists
from ....kernels.cpu.headers.id_lists import FIXED, JOINED, LISTED, OPEN, SINGLE, IdList
from .. import check
from ..arrays import address_of, adopt
from ..errors import reject
from .pooling import Pooling, kind_of


class Given(NamedTuple):
    """The ids of the features, in the order of their tables."""

    lists: np.ndarray  # int64 [features, fields of IdList]
    real: np.dtype[Any]  # of the weights
    is_weighted: bool
    keep: Sequence[Any]  # what has their addresses

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
        """One field of all."""
        column: np.ndarray = self.lists[:, IdList._fields.index(name)]
        return column


class _Ids(NamedTuple):
    """The ids of one feature."""

    name: str  # how errors name them
    array: np.ndarray  # contiguous
    bags: int
    offsets: np.ndarray | None  # contiguous; None: all bags have ``length`` ids
    offsets_name: str
    begin: int  # of the array
    end: int
    length: int

    def record(self, weights: np.ndarray | None) -> IdList:
        """The same as the loops have it."""
        at = 0, 0, 4
        if self.offsets is not None:
            at = address_of(self.offsets), len(self.offsets), self.offsets.itemsize
        ids, n = (address_of(self.array), self.array.itemsize), self.end - self.begin
        given = 0 if weights is None else address_of(weights)
        return IdList(*ids, n, *at, self.begin, self.end, self.bags, self.length, given)


def read(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> Given:
    """The ids of all features; what offsets and ids say is looked at by loops.

    Raises:
        TypeError, ValueError: a kind, dtype or shape does not fit.
    """
    return read_plain(pooling, ids, offsets, weights) or _read_any(pooling, ids, offsets, weights)


def read_plain(
    pooling: Pooling, ids: Any, offsets: Any, weights: Any, torch: Any = None, *,
    singles: bool = False,
) -> Given | None:  # fmt: skip
    """The same in one compiled call, of plain arrays or, with ``torch``, tensors; else None.

    With ``singles`` each id of one dimension is a bag.
    """
    n, is_weighted = len(pooling.of), weights is not None
    # What is refused here is not wrong yet: Python looks at it once more, and has words for it.
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
    lists = id_lists.read(objects, form, n, pooling.real, is_weighted=is_weighted, torch=torch)
    if lists is None:
        return None
    given = Given(lists, pooling.real, is_weighted, objects)
    if singles and form == SINGLE:
        bags = given.column("bags")
        if bags[0] == 0 or (bags != bags[0]).any():
            return None
    return given


def _read_any(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> Given:
    read = _read_ids(pooling, ids, offsets)
    factors = _read_weights(pooling, read, weights)
    each = zip(read, factors or (None,) * len(read), strict=True)
    records = [own.record(own_weights) for own, own_weights in each]
    lists = np.array(pooling.ordered(records), np.int64)
    return Given(lists, pooling.real, factors is not None, (read, factors))


def find_error(pooling: Pooling, ids: Any, offsets: Any) -> None:
    """Raise for what loops have found bad, of the first feature in which something does not fit.

    Raises:
        ValueError: offsets do not fit the ids.
        IndexError: an id is out of range.
    """
    where = pooling.where
    for f, own in enumerate(_read_ids(pooling, ids, offsets)):
        _check_offsets(where, own)
        found, rows = own.array[own.begin : own.end], len(pooling.arrays[pooling.of[f]])
        if not pooling.drops and len(found):
            is_bad = (found < 0) | (found >= rows)
            if is_bad.any():
                k = int(np.argmax(is_bad))
                name, expected = f"{own.name}[{own.begin + k}]", f"0 <= id < {rows}"
                reject(IndexError, where, name, "is out of range", expected, int(found[k]))
    raise RuntimeError(f"{where}: ids or offsets were changed by another thread during the call")


def _read_ids(pooling: Pooling, ids: Any, offsets: Any) -> list[_Ids]:
    """The ids of each feature; of pooled ones with as many bags each."""
    where, n, pools = pooling.where, len(pooling.of), pooling.pools
    if not pools and offsets is not None:
        wrong, expected = "are given without pooling", "None: each id has a row of the output"
        reject(ValueError, where, "offsets", wrong, expected, type(offsets).__name__)
    if not isinstance(ids, list | tuple):
        return _read_joined(pooling, ids, offsets)
    if len(ids) != n:
        reject(ValueError, where, "ids", "have a wrong length", f"{n} arrays", len(ids))
    if offsets is not None and (not isinstance(offsets, list | tuple) or len(offsets) != n):
        expected = f"a list of {n} arrays, as the ids are"
        reject(ValueError, where, "offsets", "do not fit the ids", expected, kind_of(offsets))
    lists = []
    for f, given in enumerate(ids):
        own = None if offsets is None else offsets[f]
        lists.append(_read_list(pooling, f"ids[{f}]", given, f"offsets[{f}]", own))
    for read in lists if pools else ():
        if read.bags != lists[0].bags:
            wrong = "have another number of bags than ids[0]"
            reject(ValueError, where, read.name, wrong, lists[0].bags, read.bags)
    return lists


def _read_list(pooling: Pooling, name: str, ids: Any, offsets_name: str, offsets: Any) -> _Ids:
    where, pools, is_open = pooling.where, pooling.pools, pooling.open_ended
    array = _integers(where, name, ids)
    if pools and offsets is None:
        if array.ndim != 2:
            wrong, expected = "has a wrong shape", "(bags, length), as there are no offsets"
            reject(ValueError, where, name, wrong, expected, array.shape)
        bags, length = array.shape
        return _Ids(name, array.reshape(-1), bags, None, offsets_name, 0, array.size, length)
    if array.ndim != 1:
        reject(ValueError, where, name, "has a wrong shape", "1 dimension", array.shape)
    n = len(array)
    if not pools:
        return _Ids(name, array, n, None, offsets_name, 0, n, 1)
    bounds = _integers(where, offsets_name, offsets)
    if bounds.ndim != 1 or (len(bounds) == 0 and not is_open):
        wrong, expected = "has a wrong shape", "(bags,)" if is_open else "(bags + 1,)"
        reject(ValueError, where, offsets_name, wrong, expected, bounds.shape)
    own = _Ids(name, array, len(bounds) - (not is_open), bounds, offsets_name, 0, n, 0)
    if own.bags == 0:
        _check_offsets(where, own)
    return own


def _read_joined(pooling: Pooling, ids: Any, offsets: Any) -> list[_Ids]:
    """One array of the ids of all features, with offsets of all their bags."""
    where, n, pools = pooling.where, len(pooling.of), pooling.pools
    array = _integers(where, "ids", ids)
    if n == 1 and (offsets is None or not pools):
        return [_read_list(pooling, "ids", array, "offsets", offsets)]
    if not pools or array.ndim != 1:
        expected = f"a list of {n} arrays" + (", or all ids in 1 dimension" if pools else "")
        reject(ValueError, where, "ids", "have a wrong shape", expected, array.shape)
    if isinstance(offsets, list | tuple) or offsets is None:
        expected, got = "one array, as the ids are", type(offsets).__name__
        reject(TypeError, where, "offsets", "do not fit the ids", expected, got)
    bounds = _integers(where, "offsets", offsets)
    if bounds.ndim != 1 or len(bounds) % n != 1 % n or len(bounds) == 0:
        wrong, expected = "have a wrong shape", f"({n} * bags + 1,)"
        reject(ValueError, where, "offsets", wrong, expected, bounds.shape)
    every = _Ids("ids", array, len(bounds) - 1, bounds, "offsets", 0, len(array), 0)
    _check_ends(where, every)
    bags = every.bags // n
    firsts = bounds[::bags].tolist() if bags else [0] * (n + 1)
    if bags == 0 or firsts != sorted(firsts):  # the ids of a feature lie in between
        _check_offsets(where, every)
    return [
        every._replace(
            bags=bags, offsets=bounds[f * bags : (f + 1) * bags + 1],
            begin=firsts[f], end=firsts[f + 1],
        )
        for f in range(n)
    ]  # fmt: skip


def _integers(where: str, name: str, given: Any) -> np.ndarray:
    array = adopt(where, name, given)
    if array.dtype not in check.INDEX_DTYPES:
        reject(TypeError, where, name, "has a wrong dtype", "int32 or int64", array.dtype)
    contiguous: np.ndarray = check.contiguous(array)
    return contiguous


def _check_ends(where: str, own: _Ids) -> None:
    assert own.offsets is not None
    is_open = len(own.offsets) == own.bags
    first, last = map(int, own.offsets[[0, -1]]) if len(own.offsets) else (own.end, own.begin)
    if first != own.begin:
        reject(ValueError, where, own.offsets_name, "do not begin at 0", own.begin, first)
    if last > own.end or (last != own.end and not is_open):
        wrong, expected = "do not end at the number of ids", own.end
        reject(ValueError, where, own.offsets_name, wrong, expected, last)


def _check_offsets(where: str, own: _Ids) -> None:
    """Refuse offsets that fall, or do not lead from the first id to the last."""
    if own.offsets is None:
        return
    falls = own.offsets[1:] < own.offsets[:-1]
    if falls.any():
        k = int(np.argmax(falls)) + 1
        expected, got = f"at least {own.offsets[k - 1]}", int(own.offsets[k])
        reject(ValueError, where, f"{own.offsets_name}[{k}]", "falls", expected, got)
    _check_ends(where, own)


def _read_weights(pooling: Pooling, lists: Sequence[_Ids], weights: Any) -> list[np.ndarray] | None:
    """The weights of the ids of each feature, in the type of the arithmetic."""
    where, name, real = pooling.where, "per_sample_weights", pooling.real
    if weights is None:
        return None
    if pooling.name != "sum":
        wrong, expected = "need sums", "None, or pooling 'sum'"
        reject(ValueError, where, name, wrong, expected, f"pooling {pooling.name!r}")
    if not isinstance(weights, list | tuple):
        is_joined = all(own.array is lists[0].array for own in lists)
        n = lists[-1].end if is_joined else None
        joined = _weights(where, name, weights, real, n)
        return [joined[own.begin : own.end] for own in lists]
    if len(weights) != len(lists):
        reject(ValueError, where, name, "have a wrong length", f"{len(lists)} arrays", len(weights))
    each = zip(weights, lists, strict=True)
    return [
        _weights(where, f"{name}[{f}]", given, real, own.end - own.begin)
        for f, (given, own) in enumerate(each)
    ]


def _weights(where: str, name: str, given: Any, real: np.dtype[Any], n: int | None) -> np.ndarray:
    array = adopt(where, name, given)
    check.float_dtype(where, name, array)
    if array.dtype.itemsize > real.itemsize:
        wrong = "has a higher dtype than the arithmetic"
        reject(TypeError, where, name, wrong, real, array.dtype)
    if n is None:
        expected, got = "a list of arrays, as the ids are", "an array"
        reject(ValueError, where, name, "do not fit the ids", expected, got)
    if array.size != n:
        reject(ValueError, where, name, "has a wrong shape", f"{n} numbers", array.shape)
    flat: np.ndarray = check.contiguous(array.astype(real, copy=False)).reshape(-1)
    return flat
