"""Bags of rows: the sums of many tables' rows in one call, and whose gradient each of them gets.

Ids come as users have them: in CSR form, as int32 or int64. They are checked and copied once, one
table after the other, as the int32 that sums and row steps read; ids that count for nothing are
left out there, so that no later loop has to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ..inner import njit
from ..storage import Storage, real_of
from .compiler.compile import part
from .compiler.intrinsics import as_pointer, call_address
from .compiler.records import int64s, last_at_most, records
from .headers.arrays import address_of
from .rows import sums
from .rows.layout import PADDING
from .rows.sort import index_at
from .threads import allocation
from .threads.parallel import Arguments, Loop, get_num_threads, run_all

MOST = 2**31 - 1
"""Ids of a call, rows of a table and rows of a gradient are numbered in int32."""
_MOST_PARTS = 64  # of a feature
_FEWEST_BAGS = 8  # of a part
_SERIAL_BELOW = 8_192  # ids


class Feature(NamedTuple):
    """One list of bags, and the table whose rows are in them; addresses."""

    table: int
    w: Storage  # of the table
    rows: int
    width: int
    bags: int
    ids: int
    id_bytes: int
    n: int  # ids
    offsets: int  # [bags + 1]; 0: all bags have ``length`` ids
    offset_bytes: int
    begin: int  # the first offset, and the last one
    end: int
    length: int
    padding: int  # the id that counts for nothing, or -1
    weights: int  # [n], in the type of the arithmetic, or 0
    out: int  # of the first bag; 0: nothing is summed
    stride: int  # bytes from the sum of a bag to the next
    column: int  # of the gradient, and its rows, in units
    row: int


class _Feature(NamedTuple):
    """The same as the loops have it, all ``int64``."""

    # The `Source` of the rows that are summed.
    table: int
    row_bytes: int
    list: int
    factors: int
    accumulate: int
    rows: int
    width: int
    bags: int
    ids: int
    id_bytes: int
    offsets: int
    offset_bytes: int
    begin: int
    end: int
    length: int
    padding: int
    weights: int
    out: int
    stride: int
    column: int
    row: int
    first: int  # id in the list of all
    first_bag: int
    first_part: int
    height: int  # bags of a part


class BagsCall(NamedTuple):
    """Arguments of every loop over bags, all ``int64``."""

    features: np.ndarray  # [n_features] of `_Feature`
    n_features: int
    n_parts: int
    n_bags: int
    leaves_out: int  # whether some ids may count for nothing
    drops: int  # whether those out of range do
    means: int
    real_bytes: int
    bounds: np.ndarray  # [n_bags + 1]: where the ids of each bag begin in the list
    ids: np.ndarray  # the list, int32
    weights: np.ndarray | None  # of the ids in it, in the type of the arithmetic
    gradient_rows: np.ndarray | None  # int32, of the ids in it
    bad: np.ndarray  # [n_parts]: whether a part has found an offset or an id that does not fit
    is_bad: int


_features_at, _FEATURE_BYTES = records(_Feature), 8 * len(_Feature._fields)


@njit(inline="always")
def _own(c, index):
    """The feature of a part, with its number, and the first and last of its bags."""
    features = _features_at(c.features, c.n_features)
    f = last_at_most(features.first_part, c.n_features, index)
    begin = (index - features[f].first_part) * features[f].height
    return f, features[f], begin, min(begin + features[f].height, features[f].bags)


@njit(inline="always")
def _offset(feature, bag):
    if feature.offsets == 0:
        return bag * feature.length
    return index_at(feature.offsets, feature.offset_bytes, bag)


@njit(inline="always")
def _fits(feature, bag, begin, end):
    """Whether the offsets of a bag do: nothing outside of the ids is read then."""
    if (bag == 0 and begin != feature.begin) or (bag == feature.bags - 1 and end != feature.end):
        return False
    return feature.begin <= begin <= end <= feature.end


@njit(inline="always")
def _is_in_range(feature, row):
    return np.uint64(row) < np.uint64(feature.rows)


@part(BagsCall)
def count_kept(index, slot, c):
    """Counts of the ids of each bag that count for something."""
    _, feature, first, last = _own(c, index)
    bounds, bad = int64s(c.bounds, c.n_bags + 1), int64s(c.bad, c.n_parts)
    for bag in range(first, last):
        begin, end = _offset(feature, bag), _offset(feature, bag + 1)
        if not _fits(feature, bag, begin, end):
            bad[index] = 1
            return
        kept = 0
        for k in range(begin, end):
            row = index_at(feature.ids, feature.id_bytes, k)
            if _is_in_range(feature, row):
                kept += row != feature.padding
            elif c.drops == 0:
                bad[index] = 1
                return
        bounds[feature.first_bag + bag] = kept


@part(BagsCall)
def add_counts(index, slot, c):
    """From the counts of all bags to where their ids begin."""
    bounds, total = int64s(c.bounds, c.n_bags + 1), 0
    for bag in range(c.n_bags):
        kept = bounds[bag]
        bounds[bag] = total
        total += kept
    bounds[c.n_bags] = total


@part(BagsCall)
def find_bad(index, slot, c):
    """Whether any part has found something that does not fit."""
    bad = int64s(c.bad, c.n_parts)
    for k in range(c.n_parts):
        c.is_bad |= bad[k]


@part(BagsCall)
def lay_out(index, slot, c):
    """The ids of some bags, and their weights, to the list."""
    if c.is_bad:
        return
    _, feature, first, last = _own(c, index)
    bounds, bad = int64s(c.bounds, c.n_bags + 1), int64s(c.bad, c.n_parts)
    for bag in range(first, last):
        begin, end = _offset(feature, bag), _offset(feature, bag + 1)
        if c.leaves_out == 0:
            if not _fits(feature, bag, begin, end):
                bad[index] = 1
                return
            bounds[feature.first_bag + bag] = feature.first + begin - feature.begin
        place = bounds[feature.first_bag + bag]
        ids = carray(as_pointer(c.ids + 4 * place), end - begin, np.int32)
        kept = 0
        for k in range(begin, end):
            row = index_at(feature.ids, feature.id_bytes, k)
            if not _is_in_range(feature, row):
                if c.drops:
                    continue
                bad[index] = 1
                return
            if row == feature.padding:
                continue
            ids[kept] = row
            if feature.weights != 0:
                target, source = place + kept, k - feature.begin
                if c.real_bytes == 4:
                    _copy(c.weights, target, feature.weights, source, np.float32)
                else:
                    _copy(c.weights, target, feature.weights, source, np.float64)
            kept += 1


@njit(inline="always")
def _copy(target, k, source, n, real):
    carray(as_pointer(target), k + 1, real)[k] = carray(as_pointer(source), n + 1, real)[n]


@njit(inline="always")
def _scale(address, n, factor, real):
    numbers = carray(as_pointer(address), n, real)
    for k in range(n):
        numbers[k] /= real(factor)


@part(BagsCall)
def sum_bags(index, slot, c):
    """The sums of some bags, or their means, to where they go."""
    if c.is_bad:
        return
    f, feature, first, last = _own(c, index)
    source = c.features + f * _FEATURE_BYTES
    bounds = int64s(c.bounds, c.n_bags + 1)
    for bag in range(first, last):
        begin, end = bounds[feature.first_bag + bag], bounds[feature.first_bag + bag + 1]
        out = feature.out + bag * feature.stride
        if begin == end:
            words = carray(as_pointer(out), feature.width * c.real_bytes // 4, np.int32)
            words[:] = 0
            continue
        ids = c.ids, begin, end, feature.width, -1, 1
        call_address(feature.accumulate, out, source, *ids)
        if c.means and end - begin > 1:
            if c.real_bytes == 4:
                _scale(out, feature.width, end - begin, np.float32)
            else:
                _scale(out, feature.width, end - begin, np.float64)


@part(BagsCall)
def number_rows(index, slot, c):
    """The row of the gradient of each id of some bags, and of means the weight."""
    _, feature, first, last = _own(c, index)
    bounds = int64s(c.bounds, c.n_bags + 1)
    for bag in range(first, last):
        begin, end = bounds[feature.first_bag + bag], bounds[feature.first_bag + bag + 1]
        rows = carray(as_pointer(c.gradient_rows + 4 * begin), end - begin, np.int32)
        rows[:] = bag * feature.row + feature.column
        if c.means:
            for k in range(begin, end):
                if c.real_bytes == 4:
                    numbers = carray(as_pointer(c.weights), end, np.float32)
                    numbers[k] = np.float32(1) / np.float32(end - begin)
                else:
                    wide = carray(as_pointer(c.weights), end, np.float64)
                    wide[k] = 1.0 / (end - begin)


class Bags:
    """Bags of some features, checked and laid out, or found bad; the tables are summed with them.

    ``features`` are in the order of their tables, so that all ids of a table lie together.
    """

    def __init__(
        self, features: Sequence[Feature], *, drops: bool, means: bool, weighted: bool
    ) -> None:
        self._features, self._means = features, means
        real = real_of(features[0].w)
        n_ids, self._n_bags = sum(f.n for f in features), sum(f.bags for f in features)
        self._threads = get_num_threads() if n_ids >= _SERIAL_BELOW else 1
        leaves_out = drops or any(f.padding >= 0 for f in features)
        # Loops read a little beyond the end, to fetch.
        ids = allocation.empty((n_ids + PADDING,), np.int32)
        ids[n_ids:] = 0
        self._ids, self.bounds = ids, np.empty(self._n_bags + 1, np.int64)
        self.bounds[-1] = n_ids
        self._weights = allocation.empty((n_ids,), real.dtype) if weighted else None
        records, self._n_parts = _laid_out(features, ids, self._weights)
        self._bad = np.zeros(self._n_parts + 1, np.int64)
        self._call = Arguments(BagsCall(
            records, len(features), self._n_parts, self._n_bags, leaves_out, drops, means,
            real.itemsize, self.bounds, ids, self._weights, None, self._bad, 0,
        ))  # fmt: skip
        before = [count_kept, find_bad, add_counts] if leaves_out else []
        after = [sum_bags] if features[0].out else []
        run_all([self._loop(part) for part in (*before, lay_out, find_bad, *after)])
        self.is_bad = bool(self._call.words[_IS_BAD])
        self.real = real

    def _loop(self, function: Any) -> Loop:
        is_single = function in (find_bad, add_counts)
        n = 1 if is_single else self._n_parts
        return Loop.of(function, n, self._call.address, 1 if is_single else self._threads)

    @property
    def ids(self) -> np.ndarray:
        """int32: the ids of all bags that count."""
        return self._ids[: self.bounds[-1]]

    def rows_of_gradient(self) -> tuple[np.ndarray, np.ndarray | None]:
        """For each id the row of the gradient, int32, and its weight or None."""
        n = int(self.bounds[-1])
        found = allocation.empty((n,), np.int32)
        if self._means and self._weights is None:
            self._weights = allocation.empty((n,), self.real.dtype)
            self._call.words[_WEIGHTS] = address_of(self._weights)
        self._call.words[_GRADIENT_ROWS] = address_of(found)
        run_all([self._loop(number_rows)])
        return found, None if self._weights is None else self._weights[:n]


_IS_BAD, _WEIGHTS, _GRADIENT_ROWS = map(
    BagsCall._fields.index, ("is_bad", "weights", "gradient_rows")
)


def _laid_out(
    features: Sequence[Feature], ids: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """The records of features, and how many parts their bags are cut into."""
    form = sums.LISTED if weights is None else sums.LISTED_WEIGHTED
    lists = address_of(ids), 0 if weights is None else address_of(weights)
    found, first = [], (0, 0, 0)
    for f in features:
        height = max(_FEWEST_BAGS, -(-f.bags // _MOST_PARTS))
        add = sums.accumulate(f.w, real_of(f.w), form).address if f.out else 0
        found.append(_Feature(
            f.table, f.width * f.w.itemsize, *lists, add, f.rows, f.width, f.bags, f.ids,
            f.id_bytes, f.offsets, f.offset_bytes, f.begin, f.end, f.length, f.padding, f.weights,
            f.out, f.stride, f.column, f.row, *first, height,
        ))  # fmt: skip
        first = first[0] + f.n, first[1] + f.bags, first[2] + -(-f.bags // height)
    return np.array(found, np.int64), first[2]
