"""Reading ids on the host, and the errors of bad ids and offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu.headers import id_lists
from ....kernels.cpu.headers.id_lists import FIXED, JOINED, LISTED, OPEN, SINGLE
from ..errors import reject
from .given import Ids, fill_in, read_lists, read_weights
from .pooling import Pooling


class HostIds(NamedTuple):
    """The ids of all features on the host, in the order of their tables."""

    lists: np.ndarray  # records of `IdList`
    is_weighted: bool
    keep: Sequence[Any]  # the objects that own this memory

    def spans(self, real: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses and sizes in bytes of all that is read; weights are of type ``real``."""
        x = self.lists
        return (
            np.concatenate((x["ids"] + x["begin"] * x["id_bytes"], x["offsets"], x["id_weights"])),
            np.concatenate((
                x["n"] * x["id_bytes"],
                np.where(x["offsets"], x["n_offsets"] * x["offset_bytes"], 0),
                np.where(x["id_weights"], x["n"] * real.itemsize, 0),
            )),
        )  # fmt: skip


def read(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> HostIds:
    """The ids of all features; loops check the values of offsets and ids later.

    Raises:
        TypeError, ValueError: a kind, dtype or shape does not fit.
    """
    return read_plain(pooling, ids, offsets, weights) or _read_any(pooling, ids, offsets, weights)


def read_plain(
    pooling: Pooling, ids: Any, offsets: Any, weights: Any,
    headers_of: Callable[..., np.ndarray | None] | None = None, *, singles: bool = False,
) -> HostIds | None:  # fmt: skip
    """The ids of plain arrays, read in one compiled call; else None.

    Other objects than arrays are read with ``headers_of(objects, real)``, which gives their
    `id_lists.HEADERS`. With ``singles`` each id of one dimension is a bag.
    """
    n, is_weighted = len(pooling.of), weights is not None
    # None is no error yet: `_read_any` looks again, and says in words what is wrong.
    if not pooling.is_ordered or (is_weighted and pooling.name != "sum"):
        return None
    are_listed = [isinstance(x, list | tuple) for x in (ids, offsets, weights)]
    objects: tuple[Any, ...]
    if not any(are_listed):
        form, objects = JOINED, tuple(x for x in (ids, offsets, weights) if x is not None)
    elif are_listed != [True, offsets is not None, is_weighted]:
        return None
    else:
        are_flat = singles and getattr((*ids, None)[0], "ndim", 0) == 1
        form = SINGLE if are_flat or not pooling.pools else FIXED
        if offsets is not None:
            form = OPEN if pooling.open_ended else LISTED
        objects = (*ids, *(offsets or ()), *(weights or ()))
    if not pooling.pools and form != SINGLE:
        return None
    headers = None
    if headers_of is not None and (headers := headers_of(objects, pooling.real)) is None:
        return None
    lists = id_lists.read(
        objects, form, n, pooling.real, is_weighted=is_weighted, headers=headers
    )  # fmt: skip
    if lists is None:
        return None
    if singles and form == SINGLE:
        bags = lists["bags"]
        if bags[0] == 0 or (bags != bags[0]).any():
            return None
    return tuple.__new__(HostIds, (lists, is_weighted, objects))  # no call of Python


def _read_any(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> HostIds:
    features, is_joined = _read_features(pooling, ids, offsets)
    factors = read_weights(pooling, features, weights, is_joined=is_joined)
    each: Sequence[Any] = [None] * len(features)
    if factors is not None:
        factors = [array.astype(pooling.real, copy=False).reshape(-1) for array in factors]
        each = [factors[0][x.begin : x.end] for x in features] if is_joined else factors
    lists = np.zeros(len(features), id_lists.LISTS)
    for record, *of_feature in zip(
        lists, pooling.ordered(features), pooling.ordered(each), strict=True
    ):
        fill_in(record, *of_feature)
    return HostIds(lists, factors is not None, (features, each))


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
    for f, feature in enumerate(features):
        _check_offsets(where, feature)
        begin, rows = feature.begin, len(pooling.arrays[pooling.of[f]])
        indices = feature.array.reshape(-1)[begin : feature.end]
        if not pooling.drops and len(indices):
            is_bad = (indices < 0) | (indices >= rows)
            if is_bad.any():
                k = int(np.argmax(is_bad))
                name, expected = f"{feature.name}[{begin + k}]", f"0 <= id < {rows}"
                reject(IndexError, where, name, "is out of range", expected, int(indices[k]))
    return features


def _read_features(pooling: Pooling, ids: Any, offsets: Any) -> tuple[list[Ids], bool]:
    """The ids of each feature, and whether all lie in one array; then each has its part of it."""
    lists, is_joined = read_lists(pooling, ids, offsets)
    if not is_joined:
        for feature in lists:
            if feature.bags == 0:  # no loop checks these offsets
                _check_offsets(pooling.where, feature)
        return lists, False
    every, n = lists[0], len(lists)
    # A copy: from here on their owner may change them.
    bags, bounds = every.bags, every.offsets.copy()
    all_bags = every._replace(bags=bags * n, offsets=bounds)
    _check_ends(pooling.where, all_bags)
    firsts = bounds[::bags].tolist() if bags else [0] * (n + 1)
    if bags == 0 or firsts != sorted(firsts):  # the ids of a feature lie in between
        _check_offsets(pooling.where, all_bags)
    each = zip(range(n), lists, pairwise(firsts), strict=True)
    return [
        x._replace(offsets=bounds[f * bags : (f + 1) * bags + 1], begin=a, end=b, first_offset=0)
        for f, x, (a, b) in each
    ], True


def _check_ends(where: str, feature: Ids) -> None:
    offsets, first, last = feature.offsets, feature.end, feature.begin
    if len(offsets):
        first, last = map(int, offsets[[0, -1]])
    if first != feature.begin:
        reject(ValueError, where, feature.offsets_name, "do not begin at 0", feature.begin, first)
    if last > feature.end or (last != feature.end and len(offsets) != feature.bags):
        wrong, expected = "do not end at the number of ids", feature.end
        reject(ValueError, where, feature.offsets_name, wrong, expected, last)


def _check_offsets(where: str, feature: Ids) -> None:
    """Refuse offsets that decrease, or do not lead from the first id to the last."""
    offsets = feature.offsets
    if offsets is None:
        return
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        k = int(np.argmax(falls)) + 1
        expected, got = f"at least {offsets[k - 1]}", int(offsets[k])
        reject(ValueError, where, f"{feature.offsets_name}[{k}]", "falls", expected, got)
    _check_ends(where, feature)
