"""Bags of rows on the device: ids are laid out, tables pooled, and gradients find their way back.

All features of a call are worked on together. The ids that count are written to one list of int32,
one feature after the other, with `keys.LEFT_OUT` where one counts for nothing: how many there are
the host need not know. Sums are those of the host (`kernels.cpu.bags`), in the order of the ids.

An offset or an id that does not fit closes the guard. It is found by its number: that of a bag has
two, of its beginning and its end, and those of ids come behind those of all bags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32

from ...storage import F64, Storage, numba_type
from ...tables import LARGEST, LEFT_OUT, MEAN, Feature, IdList, record_type
from ..dense.tiles import access, add_next, by_tiles, tile_length, wide_loader
from ..device.backend import (
    GEOMETRY,
    launcher,
    load_float32,
    load_float64,
    load_int32,
    load_int64,
    lower_int64,
    store_float32,
    store_float64,
    store_int32,
    store_int64,
    tile_storer,
)
from ..device.guard import FOUND, INDEX, NOTHING, is_closed
from ..device.launch import on_elements, tile_grid
from ..device.memory import room_of
from ..device.records import row_finder, row_reader, words_of
from .kernels import AT_ONCE, thread_place
from .keys import Keys, index_at, lower_bound
from .sources import weighted_start


class _OnDevice(NamedTuple):
    """Fields that only devices need. Places are those in the list of all."""

    origin: int  # the place of the id at offset 0
    is_aligned: int  # whether tiles are moved by vectors
    winners: int  # address of the winners of its first output, for maxima
    winners_stride: int  # elements from those of a bag to the next


FEATURES = record_type(Feature, IdList, _OnDevice)
"""A feature as the loops see it; `Feature.out` is an address."""
DeviceFeature = words_of("DeviceFeature", Feature, IdList, _OnDevice)


class Lists(NamedTuple):
    """Lists that are written of all ids and bags: their addresses and lengths."""

    bounds: Any  # [n_bags + 1] int64: the places at which bags begin
    ids: Any  # [n] int32
    gradient_rows: Any  # [n] int32: where the gradient of each begins, in units
    weights: Any  # [n], in the type of the arithmetic; or 0
    n_bags: Any
    n: Any


_of_bag = row_finder(DeviceFeature, "first_bag")
_feature_at = row_reader(DeviceFeature)


@cuda.jit(device=True)
def _offset(feature, bag):
    if feature.offsets == 0:
        return bag * feature.length
    return index_at(feature.offsets, feature.offset_bytes, bag)


@cuda.jit(device=True)
def _bag_of(lists, place):
    """The bag in which an id lies: of those that begin there or before the last."""
    return lower_bound(Keys(lists.bounds, lists.n_bags, 0), 0, lists.n_bags, place + 1) - 1


@cuda.jit
def bounds_kernel(features, n_features, bounds, n_bags, n, guard):
    """Write where each bag begins; an offset that does not fit closes the guard."""
    bag = cuda.grid(1)
    if bag >= n_bags:
        return
    feature = _of_bag(features, n_features, bag)
    k = bag - feature.first_bag
    begin, end = _offset(feature, k), _offset(feature, k + 1)
    if k == 0 and feature.begin >= 0 and begin != feature.begin:
        lower_int64(guard + 8 * FOUND, 2 * bag)
    is_last = k == feature.bags - 1
    if end < begin or end > feature.n or (is_last and feature.end >= 0 and end != feature.end):
        lower_int64(guard + 8 * FOUND, 2 * bag + 1)
    store_int64(bounds + 8 * bag, feature.origin + begin)
    if bag == n_bags - 1:
        store_int64(bounds + 8 * n_bags, n)


@cuda.jit
def ends_kernel(features, n_features, bounds, ends):
    """Write the places at which the ids of the features begin."""
    f = cuda.grid(1)
    if f < n_features:
        bag = _feature_at(features, f).first_bag
        store_int64(ends + 8 * f, load_int64(bounds + 8 * bag))


@cuda.jit
def lay_out_kernel(features, n_features, bounds, n_bags, ids, rows, weights, n, wide, drops, guard):
    """Write the ids, where their gradients lie, and their weights, which are ``wide`` (float64).

    One that is out of range closes the guard, and is written as such.
    """
    place, lists = cuda.grid(1), Lists(bounds, ids, rows, weights, n_bags, n)
    if place >= n:
        return
    if load_int64(guard + 8 * FOUND) < 2 * n_bags:
        # No bag is known: with this no step writes anything either.
        store_int32(ids + 4 * place, -1)
        return
    bag = _bag_of(lists, place)
    feature = _of_bag(features, n_features, bag)
    k = place - feature.origin
    index = index_at(feature.ids, feature.id_bytes, k)
    kept = index
    if index < 0 or index >= feature.rows:
        kept = LEFT_OUT
        if drops == 0:
            lower_int64(guard + 8 * FOUND, 2 * n_bags + place)
            kept = -1 if index < 0 else (1 << 31) - 1
    elif index == feature.padding:
        kept = LEFT_OUT
    store_int32(ids + 4 * place, kept)
    first = (bag - feature.first_bag) * feature.row + feature.column
    store_int32(rows + 4 * place, first)
    if weights != 0 and wide != 0:
        store_float64(weights + 8 * place, load_float64(feature.id_weights + 8 * k))
    elif weights != 0:
        store_float32(weights + 4 * place, load_float32(feature.id_weights + 4 * k))


@cuda.jit
def keep_kernel(features, n_features, bounds, n_bags, n, guard):
    """Keep the offset or id that closed the guard, for the error; one thread."""
    number = load_int64(guard + 8 * FOUND)
    if number == NOTHING:
        return
    if number < 2 * n_bags:
        bag = number >> 1
        feature = _of_bag(features, n_features, bag)
        store_int64(guard + 8 * INDEX, _offset(feature, bag - feature.first_bag + (number & 1)))
        return
    place = number - 2 * n_bags
    feature = _of_bag(features, n_features, _bag_of(Lists(bounds, 0, 0, 0, n_bags, n), place))
    store_int64(guard + 8 * INDEX, index_at(feature.ids, feature.id_bytes, place - feature.origin))


def _summed(w: Storage, real: Storage, length: int, *, weighted: bool) -> Any:
    """``run(total, winners, column, feature, lists, k, end)``: a sum; how many ids counted."""
    start = weighted_start(w, real, length) if weighted else wide_loader(w, real, length)
    load, real_bytes = load_float64 if real is F64 else load_float32, real.itemsize
    w_bytes, kind = w.itemsize, numba_type(real)

    @cuda.jit(device=True)
    def plain_place(k, feature, lists):
        return feature.table + load_int32(lists.ids + 4 * k) * (feature.width * w_bytes)

    @cuda.jit(device=True)
    def weighted_place(k, feature, lists):
        return plain_place(k, feature, lists), load(lists.weights + real_bytes * k)

    place_of = weighted_place if weighted else plain_place
    add_one, add_some = (add_next(start, place_of, real, length, n) for n in (1, AT_ONCE))

    @cuda.jit(device=True)
    def run(total, winners, column, feature, lists, k, end):
        while k < end and load_int32(lists.ids + 4 * k) < 0:
            k += 1
        if k >= end:
            for c in range(length):
                total[c] = kind(0)
            return 0
        start(total, place_of(k, feature, lists), column)
        k, count = k + 1, 1
        while k < end:
            lowest = load_int32(lists.ids + 4 * k)
            if k + AT_ONCE <= end:
                for j in range(1, AT_ONCE):
                    lowest = min(lowest, load_int32(lists.ids + 4 * (k + j)))
                if lowest >= 0:
                    add_some(total, column, k, feature, lists)
                    k, count = k + AT_ONCE, count + AT_ONCE
                    continue
                lowest = load_int32(lists.ids + 4 * k)
            if lowest >= 0:
                add_one(total, column, k, feature, lists)
                count += 1
            k += 1
        return count

    return run


def _mean(w: Storage, real: Storage, length: int) -> Any:
    """Pooling of means: `_summed`, divided by the number of rows."""
    sum_up, kind = _summed(w, real, length, weighted=False), numba_type(real)

    @cuda.jit(device=True)
    def run(total, winners, column, feature, lists, k, end):
        count = sum_up(total, winners, column, feature, lists, k, end)
        if count > 1:
            for c in range(length):
                total[c] /= kind(count)
        return count

    return run


def _largest(w: Storage, real: Storage, length: int) -> Any:
    """Pooling of maxima, whose places are written to ``winners``."""
    start, kind, w_bytes = wide_loader(w, real, length), numba_type(real), w.itemsize

    @cuda.jit(device=True)
    def run(total, winners, column, feature, lists, k, end):
        count, stride = 0, feature.width * w_bytes
        for c in range(length):
            total[c] = kind(0)
            winners[c] = -1
        row = cuda.local.array(length, kind)
        while k < end:
            index = load_int32(lists.ids + 4 * k)
            if index >= 0:
                start(row, feature.table + index * stride, column)
                for c in range(length):
                    # Of equal ones the first wins, and NaN only if it is the first of all.
                    if count == 0 or row[c] > total[c]:
                        total[c] = row[c]
                        winners[c] = k
                count += 1
            k += 1
        return count

    return run


def _tile_of_bag(w: Storage, real: Storage, pooling: int, length: int, *, weighted: bool) -> Any:
    """``run(column, feature, lists, bag, is_closed)``: pool a tile of a bag, to its output."""
    if pooling == LARGEST:
        pool = _largest(w, real, length)
    elif pooling == MEAN:
        pool = _mean(w, real, length)
    else:
        pool = _summed(w, real, length, weighted=weighted)
    kind, store, is_largest = numba_type(real), access(real, length).store, pooling == LARGEST
    store_winners = tile_storer(length, 4)

    @cuda.jit(device=True)
    def run(column, feature, lists, bag, closed):
        total, winners = cuda.local.array(length, kind), cuda.local.array(length, int32)
        k = load_int64(lists.bounds + 8 * bag)
        end = load_int64(lists.bounds + 8 * (bag + 1))
        # Behind a closed guard bounds may be any numbers; then all bags are empty.
        pool(total, winners, column, feature, lists, k, k if closed else end)
        of_feature = bag - feature.first_bag
        store(total, feature.out + of_feature * feature.stride, column)
        if is_largest:
            store_winners(winners, feature.winners, of_feature * feature.winners_stride + column)

    return run


@cache
def pool_kernel(w: Storage, real: Storage, pooling: int, weighted: bool) -> Any:
    """``loop[(groups of bags, groups of tiles), (tiles, bags)]``: a thread has a tile of a bag.

    It pools the bags from ``begin`` to ``end``, whose tables are stored as ``w``. Behind a closed
    guard outputs become 0 if it ``fills`` them, or stay as they are.
    """
    length = tile_length(w)
    pool = by_tiles(lambda n: _tile_of_bag(w, real, pooling, n, weighted=weighted), length)

    @cuda.jit
    def loop(features, n_features, bounds, n_bags, ids, weights, begin, end, fills, guard):
        (k, tile), closed = thread_place(), is_closed(guard)
        bag = begin + k
        if bag >= end or (closed and fills == 0):
            return
        feature = _of_bag(features, n_features, bag)
        lists = Lists(bounds, ids, 0, weights, n_bags, 0)
        pool(tile * length, feature.width, feature.is_aligned, feature, lists, bag, closed)

    return loop


@cache
def mean_weights_kernel(real: Storage) -> Any:
    """Write to the weights of the ids of each bag 1 by how many there are that count."""
    store, kind = store_float64 if real is F64 else store_float32, numba_type(real)
    real_bytes = real.itemsize

    @cuda.jit
    def loop(bounds, n_bags, ids, n, weights):
        bag = cuda.grid(1)
        if bag >= n_bags:
            return
        # Where offsets did not fit, the bounds may be any numbers.
        begin = max(np.int64(0), load_int64(bounds + 8 * bag))
        end, count = min(n, load_int64(bounds + 8 * (bag + 1))), 0
        for k in range(begin, end):
            count += load_int32(ids + 4 * k) >= 0
        for k in range(begin, end):
            store(weights + real_bytes * k, kind(1) / kind(max(count, 1)))

    return loop


def _product_of_tile(w: Storage, g: Storage, real: Storage, length: int) -> Any:
    """``run(column, row, gradient, total)``: added to a number."""
    of_w, of_g = wide_loader(w, real, length), wide_loader(g, real, length)
    kind = numba_type(real)

    @cuda.jit(device=True)
    def run(column, row, gradient, total):
        a, b = cuda.local.array(length, kind), cuda.local.array(length, kind)
        of_w(a, row, column)
        of_g(b, gradient, column)
        for c in range(length):
            total[0] += a[c] * b[c]

    return run


@cache
def products_kernel(w: Storage, g: Storage, real: Storage) -> Any:
    """The products of rows with the gradients of their bags: a thread has an id.

    It is for the bags from ``begin`` to ``end``. What is not written, of ids that do not count, is
    0 already; the outputs of features are addresses that those of place 0 would have.
    """
    length = tile_length(w, g)
    add_up = by_tiles(lambda n: _product_of_tile(w, g, real, n), length)
    store, kind = store_float64 if real is F64 else store_float32, numba_type(real)
    w_bytes, g_bytes, real_bytes = w.itemsize, g.itemsize, real.itemsize

    @cuda.jit
    def loop(features, n_features, bounds, n_bags, ids, rows, n, begin, end, gradient, unit):
        place = cuda.grid(1)
        if place >= n:
            return
        index = load_int32(ids + 4 * place)
        if index < 0:
            return
        bag = _bag_of(Lists(bounds, ids, rows, 0, n_bags, n), place)
        if bag < begin or bag >= end:
            return
        feature = _of_bag(features, n_features, bag)
        row = feature.table + index * (feature.width * w_bytes)
        of_bag = gradient + load_int32(rows + 4 * place) * (unit * g_bytes)
        total, column = cuda.local.array(1, kind), np.int64(0)
        total[0] = kind(0)
        while column < feature.width:
            add_up(column, feature.width, feature.is_aligned, row, of_bag, total)
            column += length
        store(feature.out + real_bytes * place, total[0])

    return loop


class Pooled(NamedTuple):
    """How the tables of consecutive features of one storage type are pooled."""

    w: Storage
    first_bag: int
    end_bag: int
    widest: int


def pool(
    features: np.ndarray, lists: Lists, launches: Sequence[Pooled], ends: int, *,
    real: Storage, pooling: int, weighted: bool, drops: bool, fills: bool, guard: int, stream: Any,
) -> None:  # fmt: skip
    """Enqueue laying out the ids of features, one at least, and pooling their bags.

    Without ``launches`` there is no output. To ``ends``, unless it is 0, go the places at which the
    ids of features begin.
    """
    bounds, ids, gradient_rows, weights, n_bags, n = lists
    if n_bags == 0:
        return
    with _placed(features, stream) as table:
        places = table, len(features), bounds
        on_elements(bounds_kernel, n_bags, stream)(*places, n_bags, n, guard)
        if ends:
            on_elements(ends_kernel, len(features), stream)(*places, ends)
        if n:
            lay_out = on_elements(lay_out_kernel, n, stream)
            results = gradient_rows, weights, n, int(real is F64), int(drops)
            lay_out(*places, n_bags, ids, *results, guard)
        launcher(keep_kernel, 1, 1, stream)(*places, n_bags, n, guard)
        for w, begin, end, widest in launches:
            kernel = pool_kernel(w, real, pooling, weighted)
            tiles, lanes, groups = tile_grid(widest, tile_length(w), GEOMETRY.rows)
            grid, block = (-(-(end - begin) // lanes), groups), (tiles, lanes)
            chosen = ids, weights, begin, end, int(fills)
            launcher(kernel, grid, block, stream)(*places, n_bags, *chosen, guard)


def mean_weights(lists: Lists, real: Storage, stream: Any) -> None:
    """Enqueue writing the weights of means."""
    if lists.n_bags:
        loop = on_elements(mean_weights_kernel(real), lists.n_bags, stream)
        loop(lists.bounds, lists.n_bags, lists.ids, lists.n, lists.weights)


def multiply(
    features: np.ndarray, lists: Lists, launches: Sequence[Pooled], gradient: int,
    unit: int, *, g: Storage, real: Storage, stream: Any,
) -> None:  # fmt: skip
    """Enqueue the products of rows with a gradient, numbered in units, to the outputs."""
    if lists.n == 0:
        return
    with _placed(features, stream) as table:
        places = table, len(features), lists.bounds, lists.n_bags, lists.ids, lists.gradient_rows
        for w, begin, end, _ in launches:
            loop = on_elements(products_kernel(w, g, real), lists.n, stream)
            loop(*places, lists.n, begin, end, gradient, unit)


@contextmanager
def _placed(features: np.ndarray, stream: Any) -> Iterator[int]:
    """The address of features on the device."""
    words = features.view(np.int64)
    with room_of(stream) as room:
        table = room.take(words.nbytes)
        room.send(table, words)
        yield table
