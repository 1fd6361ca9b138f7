"""Pooling rows of many tables in one call, and the way back from gradients to rows.

Ids come in the user's form: CSR, as int32 or int64. They are checked and copied once into one list,
table after table, as the int32 that sums and row steps read. Ignored ids are left out of the list,
so no later loop has to know them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ..inner import njit
from ..storage import Storage, real_of
from ..tables import LARGEST, MEAN, Feature, record_type
from .compiler.compile import NativeFunction, part
from .compiler.intrinsics import as_pointer, call_address, copy_bytes, load_int32
from .compiler.machine import PythonEntry
from .compiler.records import index_at, int64s, last_at_most, records
from .headers.arrays import address_of
from .headers.id_lists import LISTS, lists_at
from .pooling import AHEAD, dot, largest_rows, sum_rows
from .threads import allocation
from .threads.parallel import Arguments, get_num_threads, run_words

MOST = 2**31 - 1
"""Most ids of a call, rows of a table and rows of a gradient: they are numbered in int32."""
# The cost of a row differs between tables, from the first cache to memory: with many parts of each
# table, threads end at the same time. At the begin of a part no rows are being fetched yet, so a
# part has some bags.
_MOST_PARTS = 64  # of a feature
_FEWEST_BAGS = 8  # of a part
_SERIAL_BELOW = 8_192  # ids


FEATURES = record_type(Feature)


def pool_of(w: Storage, pooling: int, *, weighted: bool) -> int:
    """The address of the function that pools rows of a table."""
    real = real_of(w)
    is_largest = pooling == LARGEST
    loop = largest_rows(w, real) if is_largest else sum_rows(w, real, weighted=weighted)
    return loop.address


class BagsCall(NamedTuple):
    """Arguments of every loop over bags, all ``int64``."""

    features: np.ndarray  # [n_features] of `Feature`
    lists: np.ndarray  # [n_features] of `IdList`
    n_features: int
    n_parts: int
    n_bags: int
    leaves_out: int  # whether some ids may be ignored
    drops: int  # whether ids out of range are ignored
    pooling: int
    real_bytes: int
    unit: int  # elements
    bounds: np.ndarray  # [n_bags + 1]: the number of each bag's first id in the list
    ends: np.ndarray  # [n_parts]: `bounds` behind each part; -1: an offset or id is bad
    ids: np.ndarray  # the list, int32
    weights: np.ndarray | None  # of the ids in the list, in the type of the arithmetic
    origins: np.ndarray | None  # int32: the number that each id of the list had in its feature
    out: int  # the address of the output; 0: `Feature.out` are addresses
    winners: np.ndarray | None  # int32, in the form of the output: places in the list
    gradient_rows: np.ndarray | None = None  # int32, of the ids in the list
    dots: np.ndarray | None = None  # [n_features, 2]: addresses of functions, and of products
    gradient: int = 0
    g_bytes: int = 0
    is_bad: int = 0  # whether any end is


_features_at = records(Feature)
_LIST_BYTES = LISTS.itemsize


def _arrange(lists, n, bag_parts, fewest, totals):
    """Put the ids of all features one after the other; total ids, bags and parts."""
    sums_of = int64s(totals, 3)
    sums_of[:] = 0
    for f in range(n):
        ids = lists_at(lists, n)[f]
        ids.first, ids.first_bag, ids.first_part = sums_of[0], sums_of[1], sums_of[2]
        ids.height = max(fewest, (ids.bags + bag_parts - 1) // bag_parts)
        sums_of[0] += ids.n
        sums_of[1] += ids.bags
        sums_of[2] += (ids.bags + ids.height - 1) // ids.height


_arranged = NativeFunction(_arrange, "arranged bags", PythonEntry(holds_gil=True))


@njit(inline="always")
def _part(c, index):
    """The number of the feature of a part, the feature, its ids, the first and last of its bags."""
    lists = lists_at(c.lists, c.n_features)
    f = last_at_most(lists.first_part, c.n_features, index)
    begin = (index - lists[f].first_part) * lists[f].height
    end = min(begin + lists[f].height, lists[f].bags)
    return f, _features_at(c.features, c.n_features)[f], lists[f], begin, end


@njit(inline="always")
def _offset(ids, bag):
    if ids.offsets == 0:
        return bag * ids.length
    if bag == ids.n_offsets:
        return ids.end
    return index_at(ids.offsets, ids.offset_bytes, bag)


@njit(inline="always")
def _fits(ids, bag, begin, end):
    """Whether the offsets of a bag lie within the ids, so that nothing else is read."""
    if (bag == 0 and begin != ids.begin) or (bag == ids.bags - 1 and end != ids.end):
        return False
    return ids.begin <= begin <= end <= ids.end


@njit(inline="always")
def _is_in_range(rows, row):
    return np.uint64(row) < np.uint64(rows)


@part(BagsCall)
def count_kept(index, slot, c):
    """Count the ids of each bag that are not ignored; later loops report bad ids."""
    _, feature, ids, first, last = _part(c, index)
    bounds, begin = int64s(c.bounds, c.n_bags + 1), _offset(ids, first)
    for bag in range(first, last):
        end, kept = _offset(ids, bag + 1), 0
        if not _fits(ids, bag, begin, end):
            int64s(c.ends, c.n_parts)[index] = -1
            return
        for k in range(begin, end):
            row = index_at(ids.ids, ids.id_bytes, k)
            kept += _is_in_range(feature.rows, row) and row != feature.padding
        bounds[ids.first_bag + bag], begin = kept, end


@part(BagsCall)
def add_counts(index, slot, c):
    """Turn the counts of all bags into the numbers of their first ids, if offsets are good."""
    bounds, ends, total = int64s(c.bounds, c.n_bags + 1), int64s(c.ends, c.n_parts), 0
    for k in range(c.n_parts):
        c.is_bad |= ends[k] < 0
    for bag in range(c.n_bags):
        kept = bounds[bag]
        bounds[bag] = total
        total += kept
    c.is_bad |= total > bounds[c.n_bags]  # where offsets were changed in between
    bounds[c.n_bags] = total


@part(BagsCall)
def find_bad(index, slot, c):
    """Find out whether offsets and ids are good, and each part ends where the next one begins."""
    bounds, ends, k = int64s(c.bounds, c.n_bags + 1), int64s(c.ends, c.n_parts), 0
    for f in range(c.n_features):
        ids, bag = lists_at(c.lists, c.n_features)[f], 0
        while bag < ids.bags:  # a range with a step would need functions of Numba
            bag += ids.height
            c.is_bad |= ends[k] < 0 or ends[k] != bounds[ids.first_bag + min(bag, ids.bags)]
            k += 1


@njit
def _copy_ids(ids, listed, rows):
    """Copy ids; whether all are in range. Without branches, so that the compiler uses vectors."""
    signs = np.int64(0)
    for k in range(len(ids)):
        row = np.int64(ids[k])
        listed[k] = row
        signs |= row | (rows - 1 - row)  # below 0 if either is
    return signs >= 0


def _loops(real: Any) -> dict[str, NativeFunction]:
    """Loops over bags for one type of the arithmetic, by their names."""

    @njit(inline="always")
    def numbers(address, n):
        return carray(as_pointer(address), n, real)

    @njit
    def lay_bags_out(c, index):
        """Copy the ids of some bags to the list, with weights; whether offsets and ids are good.

        Their owner may change them meanwhile: all that is written has its place even then.
        """
        _, feature, ids, first, last = _part(c, index)
        # Parts of a feature write equal values here, so no synchronisation is needed.
        ids.values, ids.stride = feature.table, feature.row_bytes
        ids.gradient_rows, ids.weights = c.ids, c.weights
        bounds, begin = int64s(c.bounds, c.n_bags + 1), _offset(ids, first)
        if c.leaves_out == 0:
            start, shift = begin, ids.first - ids.begin
            for bag in range(first, last):
                end = _offset(ids, bag + 1)
                if not _fits(ids, bag, begin, end):
                    return False
                bounds[ids.first_bag + bag], begin = begin + shift, end
            place, n = start + shift, begin - start
            listed = carray(as_pointer(c.ids + 4 * place), n, np.int32)
            address = ids.ids + ids.id_bytes * start
            if ids.id_bytes == 4:
                are_good = _copy_ids(carray(as_pointer(address), n, np.int32), listed, feature.rows)
            else:
                are_good = _copy_ids(int64s(address, n), listed, feature.rows)
            if ids.id_weights != 0:
                id_weights = ids.id_weights + c.real_bytes * (start - ids.begin)
                copy_bytes(c.weights + c.real_bytes * place, id_weights, c.real_bytes * n)
            int64s(c.ends, c.n_parts)[index] = place + n
            return are_good
        # Kept in registers: what is written could be any of them, for all that the compiler knows.
        id_bytes, rows, padding = ids.id_bytes, feature.rows, feature.padding
        for bag in range(first, last):
            end = _offset(ids, bag + 1)
            if not _fits(ids, bag, begin, end):
                return False
            place, behind = bounds[ids.first_bag + bag], bounds[ids.first_bag + bag + 1]
            listed = carray(as_pointer(c.ids + 4 * place), end - begin, np.int32)
            origins = carray(as_pointer(c.origins + 4 * place), end - begin, np.int32)
            weights = numbers(c.weights + c.real_bytes * place, end - begin)
            id_weights, kept = numbers(ids.id_weights, ids.n), 0
            for k in range(begin, end):
                row = index_at(ids.ids, id_bytes, k)
                if not _is_in_range(rows, row):
                    if c.drops:
                        continue
                    return False
                if row == padding:
                    continue
                if place + kept == behind:
                    return False
                listed[kept] = row
                if ids.id_weights != 0:
                    weights[kept] = id_weights[k - ids.begin]
                if c.origins != 0:
                    origins[kept] = k - ids.begin
                kept += 1
            if place + kept != behind:
                return False
            int64s(c.ends, c.n_parts)[index], begin = behind, end
        return True

    def lay_out(index, slot, c):
        """Copy the ids of some bags, and their weights, to the list."""
        if c.is_bad == 0 and not lay_bags_out(c, index):
            int64s(c.ends, c.n_parts)[index] = -1

    def pool(index, slot, c):
        """Write the sums of some bags, or their means or maxima, to the output."""
        if c.is_bad != 0:
            return
        _, feature, ids, first, last = _part(c, index)
        out, stride = c.out + feature.out + first * feature.stride, feature.stride
        table = feature.table, feature.row_bytes, feature.width
        bags = c.bounds + 8 * (ids.first_bag + first), last - first
        if c.pooling == LARGEST:
            row, next_row = feature.column * c.unit * 4, feature.row * c.unit * 4
            winners = c.winners + first * next_row + row
            call_address(feature.pool, out, stride, winners, next_row, *table, c.ids, *bags)
        else:
            lists, is_mean = (c.ids, c.weights), np.int64(c.pooling == MEAN)
            call_address(feature.pool, out, stride, *table, *lists, *bags, is_mean)

    def number_rows(index, slot, c):
        """Write the row of the gradient of each id of some bags; for means its weight too."""
        _, feature, ids, first, last = _part(c, index)
        bounds = int64s(c.bounds, c.n_bags + 1)
        for bag in range(first, last):
            begin, end = bounds[ids.first_bag + bag], bounds[ids.first_bag + bag + 1]
            rows = carray(as_pointer(c.gradient_rows + 4 * begin), end - begin, np.int32)
            rows[:] = bag * feature.row + feature.column
            if c.pooling == MEAN:
                weights = numbers(c.weights, end)
                for k in range(begin, end):
                    weights[k] = real(1) / real(end - begin)

    def multiply(index, slot, c):
        """Write the products of rows with the gradients of their bags."""
        f, feature, ids, first, last = _part(c, index)
        pairs = carray(as_pointer(c.dots), (c.n_features, 2), np.int64)
        function, products = pairs[f, 0], pairs[f, 1]
        bounds = int64s(c.bounds, c.n_bags + 1)
        for bag in range(first, last):
            row = c.gradient + (bag * feature.row + feature.column) * c.unit * c.g_bytes
            for k in range(bounds[ids.first_bag + bag], bounds[ids.first_bag + bag + 1]):
                origin = k - ids.first
                if c.origins != 0:
                    origin = np.int64(load_int32(c.origins + 4 * k))
                table_row = feature.table + load_int32(c.ids + 4 * k) * feature.row_bytes
                product = products + origin * c.real_bytes
                call_address(function, product, table_row, row, feature.width)

    loops = {}
    for function in (lay_out, pool, number_rows, multiply):
        name = function.__name__
        function.__qualname__ = f"bags {name} {real.__name__}"
        loops[name] = part(BagsCall)(function)
    return loops


_LOOPS = {real().itemsize: _loops(real) for real in (np.float32, np.float64)}
_FIELDS = {name: k for k, name in enumerate(BagsCall._fields)}


class Bags:
    """The bags of some features: checked, copied to one list of ids, and pooled.

    Args:
        features: records of `Feature`, in the order of their tables, so that all ids of a table
            lie together.
        lists: `LISTS`, of the ids of each.
        real: the type of the arithmetic.
        unit: elements, by which rows of gradients are numbered.
        memory: that of the lists.
        drops: whether ids out of range are ignored; otherwise they are bad.
        leaves_out: whether any ids may be ignored.
        pooling: `SUM`, `MEAN` or `LARGEST`.
        out: the address of the output; 0: `Feature.out` are addresses.
        sums: whether there is an output.
        winners: int32, to which the places of maxima are written.
        multiplies: whether `multiply` is going to be called.

    Attributes:
        bounds: int64 ``[bags + 1]``: the number of each bag's first id.
        is_bad: whether an offset or an id is bad.
    """

    def __init__(
        self, features: np.ndarray, lists: np.ndarray, real: np.dtype[Any], unit: int,
        memory: allocation.Recycled, *, drops: bool, leaves_out: bool, weighted: bool,
        pooling: int, out: int, sums: bool, winners: np.ndarray | None, multiplies: bool,
    ) -> None:  # fmt: skip
        n, self._lists, self._memory = len(features), lists, memory
        totals = np.empty(3, np.int64)
        _arranged.call(address_of(lists), n, _MOST_PARTS, _FEWEST_BAGS, address_of(totals))
        n_ids, n_bags, self._n_parts = totals.tolist()
        self._threads = get_num_threads() if n_ids >= _SERIAL_BELOW else 1
        # Loops fetch by ids a little beyond the end.
        ids = memory.empty((n_ids + AHEAD,), np.int32)
        ids[n_ids:] = 0
        self._ids, self.bounds = ids, np.empty(n_bags + 1, np.int64)
        self.bounds[-1] = n_ids
        self._real, self._pooling, self._loops = real, pooling, _LOOPS[real.itemsize]
        self._weights = memory.empty((n_ids,), real) if weighted else None
        # Skipped ids still get a weight gradient: 0.
        self._origins = np.empty(n_ids, np.int32) if multiplies and leaves_out else None
        self._call = Arguments(BagsCall(
            features=features, lists=lists, n_features=n, n_parts=self._n_parts, n_bags=n_bags,
            leaves_out=leaves_out, drops=drops, pooling=pooling, real_bytes=real.itemsize,
            unit=unit, bounds=self.bounds, ids=ids, weights=self._weights, origins=self._origins,
            out=out, winners=winners, ends=np.zeros(self._n_parts + 1, np.int64),
        ))  # fmt: skip
        loops = [self._loops["lay_out"], find_bad]
        if leaves_out:
            loops = [count_kept, add_counts, *loops]
        if sums:
            loops.append(self._loops["pool"])
        self._run(*loops)
        self.is_bad = bool(self._call.words[_FIELDS["is_bad"]])

    def _run(self, *loops: NativeFunction) -> None:
        """Run loops over the parts; those that look at all parts have one of their own."""
        words, call = array("q"), self._call.address
        for loop in loops:
            n = 1 if loop is find_bad or loop is add_counts else self._n_parts
            words.extend((loop.address, n, call, min(self._threads, n)))
        run_words(words)

    def _set(self, **arguments: int | np.ndarray) -> None:
        for name, value in arguments.items():
            address = address_of(value) if isinstance(value, np.ndarray) else value
            self._call.words[_FIELDS[name]] = address

    def rows_of_gradient(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The list of ids, without those that are ignored, int32; the row of the gradient for each,
        int32, and its weight or None.
        """
        n = int(self.bounds[-1])
        rows = self._memory.empty((n,), np.int32)
        if self._pooling == MEAN and self._weights is None:
            self._weights = self._memory.empty((n,), self._real)
            self._set(weights=self._weights)
        self._set(gradient_rows=rows)
        self._run(self._loops["number_rows"])
        return self._ids[:n], rows, None if self._weights is None else self._weights[:n]

    def multiply(self, gradient: np.ndarray, g: Storage, w: Sequence[Storage]) -> list[np.ndarray]:
        """The product of each id's row with the gradient of its bag: an array for each feature.

        All ids of the caller have one, ignored ids 0. ``w`` are the storages of the features'
        tables.
        """
        lengths = self._lists["n"].tolist()
        make = allocation.empty if self._origins is None else np.zeros
        products = [make((n,), self._real) for n in lengths]
        each, real = zip(w, products, strict=True), real_of(w[0])
        dots = np.array([(dot(x, g, real).address, address_of(out)) for x, out in each])
        self._set(dots=dots, gradient=gradient, g_bytes=g.itemsize)
        self._run(self._loops["multiply"])
        return products
