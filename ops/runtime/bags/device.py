"""Bags of ids on a CUDA device: read, pooled there, and turned into gradients.

The host waits for nothing, but for the gradients of ids that are one array: how many of them each
table has stands on the device. Ids and offsets are checked there; what does not fit is heard of
later (`pending`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu.bags import MOST
from ....kernels.storage import STORAGES
from .. import cuda, device_gradient
from ..arrays import native
from ..device import DeviceArray, may_share_memory
from ..errors import message, reject
from ..launch import launch_on
from ..row_step import RowGradient
from .given import (
    Ids,
    joined_by_table,
    read_gradient,
    read_gradients,
    read_lists,
    read_outputs,
    read_weights,
)
from .pooling import Pooling, check_multiplies, kind_of
from .tensor import BagTensor

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class DeviceIds(NamedTuple):
    """The ids of all features on a device, in the order of their tables."""

    lists: list[Ids]
    weights: list[DeviceArray] | None  # of each, or one for all
    is_joined: bool  # all features have one array of ids
    n: int  # ids in all

    @property
    def arrays(self) -> list[DeviceArray]:
        """All that is read."""
        found = [own.array for own in self.lists]
        found += [own.offsets for own in self.lists if own.offsets is not None]
        return found + (self.weights or [])


def read(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> DeviceIds:
    """The ids of all features; what stands in the arrays is looked at on the device.

    Raises:
        TypeError, ValueError: a kind, place, dtype or shape does not fit.
    """
    where, (lists, is_joined) = pooling.where, read_lists(pooling, ids, offsets)
    if is_joined and not pooling.is_ordered:
        wrong, expected = "are not in the order of their tables", "a list of ids on a device"
        reject(ValueError, where, "features", wrong, expected, "one array of ids")
    total = lists[0].n if is_joined else sum(own.n for own in lists)
    if total > MOST:
        reject(ValueError, where, "ids", "are too many", f"at most {MOST}", total)
    if lists[0].bags == 0 and total and pooling.pools:
        wrong = "do not end at the number of ids"
        reject(ValueError, where, lists[0].offsets_name, wrong, total, "no bags")
    factors = read_weights(pooling, lists, weights, is_joined=is_joined)
    if factors is not None:
        factors = [_converted(array, pooling.real) for array in factors]
        factors = factors if is_joined else pooling.ordered(factors)
    if is_joined:  # how many are whose the device knows
        lists = [own._replace(end=0) for own in lists]
    return DeviceIds(pooling.ordered(lists), factors, is_joined, total)


def _converted(array: DeviceArray, real: np.dtype[Any]) -> DeviceArray:
    same: bool = array.dtype == real
    return array if same else device_gradient.converted(array, real)


class DevicePooled:
    """Bags that are pooled on a device: enqueued when this is made; as `Pooled`.

    Args:
        pooling: the tables, and how they are pooled.
        given: the ids.
        out: None, or what is given for the output.
        sums: whether there is an output, or only gradients of it are asked for.
        multiplies: whether gradients of weights may be asked for; None: if there are any.
    """

    def __init__(
        self, pooling: Pooling, given: DeviceIds, out: Any = None, *, sums: bool = True,
        multiplies: bool | None = None,
    ) -> None:  # fmt: skip
        self._pooling = pooling
        like, self.batch = pooling.arrays[0], given.lists[0].bags
        bags = [own.bags for own in given.lists]
        self._shapes = pooling.output_shapes(bags)
        self._n, self._n_bags = given.n, sum(bags)
        self._bounds = like.empty_like(_INT64, (self._n_bags + 1,))
        self._ids, self._rows = (like.empty_like(_INT32, (self._n,)) for _ in range(2))
        has_weights = given.weights is not None or pooling.name == "mean"
        self._weights = like.empty_like(pooling.real, (self._n,)) if has_weights else None
        # Maxima are found by pooling only, and what they were decides whose gradient is whose.
        is_largest = pooling.name == "max"
        shape, sums = (self.batch, pooling.width), sums or is_largest
        self._winners = like.empty_like(_INT32, shape) if is_largest else None
        self._ends = self._ends_of(given, like)
        is_one = pooling.pools and not isinstance(out, list | tuple)
        outputs: list[DeviceArray] = []
        if sums:
            shapes = [shape] if is_one else self._shapes
            if out is None:
                outputs = [like.empty_like(pooling.real, own) for own in shapes]
            else:
                read = [*pooling.arrays, *given.arrays]
                outputs = read_outputs(
                    pooling, [out] if is_one else out, shapes,
                    lambda array, others: any(
                        may_share_memory(array, x) for x in (*read, *others)
                    ),
                )  # fmt: skip
        features = self._features(given, outputs, is_one=is_one)
        launches = self._launches(features) if sums else []
        arrays = [*pooling.arrays, *given.arrays, *outputs]
        weighted = given.weights is not None
        self._multiplies = weighted if multiplies is None else multiplies
        self._kept = features
        with launch_on(arrays, self._error(given, features)) as launch:
            lists = self._lists(weighted=weighted)
            cuda.rows.bags.pool(
                features, lists, launches,
                self._ends.address if isinstance(self._ends, DeviceArray) else 0,
                real=STORAGES[pooling.real], pooling=pooling.kind, weighted=weighted,
                drops=pooling.drops, fills=out is None, guard=launch.guard, stream=launch.stream,
            )  # fmt: skip
            if pooling.name == "mean":
                real = STORAGES[pooling.real]
                cuda.rows.bags.mean_weights(self._lists(weighted=True), real, launch.stream)
        made = [native(array) for array in outputs]
        self.out: Any = out if out is not None or not made else made[0] if is_one else made

    def _lists(self, *, weighted: bool) -> Any:
        weights = self._weights.address if weighted and self._weights is not None else 0
        addresses = self._bounds.address, self._ids.address, self._rows.address, weights
        return cuda.rows.bags.Lists(*addresses, self._n_bags, self._n)

    def _ends_of(self, given: DeviceIds, like: DeviceArray) -> Any:
        """Where the ids of features begin: known, or to be written on the device."""
        if given.is_joined:
            return like.empty_like(_INT64, (len(given.lists),))
        return np.cumsum([0, *(own.n for own in given.lists)])

    def _features(self, given: DeviceIds, outputs: list[DeviceArray], *, is_one: bool) -> list[Any]:
        pooling, found, first, first_bag = self._pooling, [], 0, 0
        before = [0] * len(pooling.arrays)  # bags of the features of each table, if none is pooled
        for k, (f, own) in enumerate(zip(pooling.order, given.lists, strict=True)):
            item, width = pooling.real.itemsize, pooling.widths[f]
            column, out = pooling.columns[f], (0, width)
            if outputs and is_one:
                out = outputs[0].address + column * item, pooling.width
            elif outputs:
                out = outputs[f].address, width
            gradient_rows = before[pooling.of[f]], 1
            if pooling.pools:
                gradient_rows = column // pooling.unit, pooling.width // pooling.unit
            before[pooling.of[f]] += own.bags
            bags = first_bag, own.bags
            found.append(self._feature(given, k, f, first, bags, out, gradient_rows))
            first, first_bag = first + own.n, first_bag + own.bags
        return found

    def _feature(
        self, given: DeviceIds, k: int, f: int, first: int, bags: tuple[int, int],
        out: tuple[int, int], gradient_rows: tuple[int, int],
    ) -> Any:  # fmt: skip
        pooling, item, ids = self._pooling, self._pooling.real.itemsize, given.lists[k]
        table, padding, column = (
            pooling.arrays[pooling.of[f]],
            pooling.padding[f],
            pooling.columns[f],
        )
        width, (address, stride), winners = pooling.widths[f], out, 0
        weights, offsets, offset_bytes, begin, end = 0, 0, 4, -1, -1
        n = given.n if given.is_joined else ids.n
        if given.weights is not None:
            is_one = len(given.weights) == 1
            weights = (
                given.weights[0].address if is_one else given.weights[k].address - first * item
            )
        if ids.offsets is not None:
            offset_bytes = ids.offsets.itemsize
            offsets = ids.offsets.address + ids.first_offset * offset_bytes
            if not given.is_joined or k == 0:
                begin = 0
            if not given.is_joined or k + 1 == len(given.lists):
                end = n
        strides = width * table.itemsize, stride * item
        places = table.address, address, *strides
        if self._winners is not None:  # which begin where columns of a whole output do
            winners = self._winners.address + column * 4
            places = *places, column * item, pooling.width * item
        return cuda.rows.bags.DeviceFeature(
            table=table.address, rows=len(table), width=width,
            is_aligned=int(not any(x % 16 for x in places)),
            padding=-1 if padding is None else padding,
            ids=ids.array.address - first * ids.array.itemsize, id_bytes=ids.array.itemsize,
            weights=weights, offsets=offsets, offset_bytes=offset_bytes, length=ids.length,
            origin=first, begin=begin, end=end, most=n, first_bag=bags[0], bags=bags[1],
            out=address, winners=winners, stride=stride, winners_stride=pooling.width,
            column=gradient_rows[0], row=gradient_rows[1],
        )  # fmt: skip

    def _launches(self, features: Sequence[Any]) -> list[Any]:
        """Consecutive features whose tables are of one storage type."""
        pooling = self._pooling
        storages = pooling.ordered([STORAGES[pooling.arrays[t].dtype] for t in pooling.of])
        found: list[Any] = []
        for own, w in zip(features, storages, strict=True):
            end = own.first_bag + own.bags
            if found and found[-1].w is w:
                widest = max(own.width, found[-1].widest)
                found[-1] = found[-1]._replace(end_bag=end, widest=widest)
            else:
                found.append(cuda.rows.bags.Pooled(w, own.first_bag, end, own.width))
        return [launch for launch in found if launch.end_bag > launch.first_bag]

    def _error(self, given: DeviceIds, features: Sequence[Any]) -> Any:
        """The maker of the error for what does not fit, by its number (see the kernels)."""
        where, is_joined, n_offsets = self._pooling.where, given.is_joined, 2 * self._n_bags
        named = [(own.name, own.offsets_name, own.first_offset) for own in given.lists]
        sizes = [(feature.origin, feature.rows, feature.most) for feature in features]
        first_bags = [feature.first_bag for feature in features]

        def error(position: int, value: int) -> Exception:
            if position < n_offsets:
                (bag, is_end), wrong = divmod(position, 2), "does not fit"
                f = bisect(first_bags, bag) - 1
                _, name, first = named[f]
                expected = "0" if not is_end else (
                    f"at least the one before, and at most, at the end exactly, {sizes[f][2]}"
                )  # fmt: skip
                k = first + bag - first_bags[f] + is_end
                return ValueError(message(where, f"{name}[{k}]", wrong, expected, value))
            place = position - n_offsets
            if is_joined:
                expected = "0 <= id < rows of its table"
                text = message(where, f"ids[{place}]", "is out of range", expected, value)
                return IndexError(text)
            f = bisect([origin for origin, *_ in sizes], place) - 1
            name, origin, rows = named[f][0], *sizes[f][:2]
            expected = f"0 <= id < {rows}"
            text = message(where, f"{name}[{place - origin}]", "is out of range", expected, value)
            return IndexError(text)

        return error

    def gradients(self, grad: Any) -> list[BagTensor]:
        """The gradient of each table for that of the output; of joined ids the host waits.

        Raises:
            TypeError, ValueError: it does not fit the output.
        """
        pooling, found = self._pooling, list[BagTensor]()
        if pooling.pools:
            values = [self._gradient(grad)] * len(pooling.arrays)
        else:
            parts = read_gradients(pooling, grad, self._shapes)
            values = joined_by_table(pooling, parts, partial(_stacked, parts[0]))
        every = self._ends_of_features()
        ends = [every[f] for f in pooling.features_before]
        for t, table in enumerate(pooling.arrays):
            part, own = slice(ends[t], ends[t + 1]), values[t]
            ids, rows = self._ids.part(part), self._rows.part(part)
            weights = None if self._weights is None else self._weights.part(part)
            unit = pooling.unit if pooling.pools else table.shape[1]
            factors = weights, self._winners, part.start
            gradient = RowGradient.shared(ids, own, rows, unit * own.itemsize, *factors)
            found.append(BagTensor(gradient, unit, table.shape))
        return found

    def _gradient(self, grad: Any) -> DeviceArray:
        """The checked, contiguous gradient of the pooled output."""
        if isinstance(grad, list | tuple):
            wrong, expected = "is a list", "one array on a device"
            reject(ValueError, self._pooling.where, "grad", wrong, expected, kind_of(grad))
        shape = self.batch, self._pooling.width
        gradient: DeviceArray = read_gradient(self._pooling, "grad", grad, shape)
        return gradient

    def _ends_of_features(self) -> list[int]:
        """The places at which the ids of each feature begin, and the end of all."""
        ends = self._ends
        if isinstance(ends, DeviceArray):
            # Where offsets did not fit, these may be any numbers; no step takes the ids then.
            there = ends.numpy() if self.batch else np.zeros(len(ends), np.int64)
            ends = self._ends = np.clip(np.maximum.accumulate([*there, self._n]), 0, self._n)
        found: list[int] = np.asarray(ends).tolist()
        return found

    def weight_gradients(self, grad: Any) -> list[Any]:
        """The gradients of the weights of ids, by feature; for joined ids the host waits.

        Raises:
            TypeError, ValueError: as `Pooled.weight_gradients`.
        """
        pooling = self._pooling
        check_multiplies(pooling, is_kept=self._multiplies)
        values, ends, like = self._gradient(grad), self._ends_of_features(), pooling.arrays[0]
        real, features, found = pooling.real, [], []
        for k, own in enumerate(self._kept):
            made = like.filled_like(0.0, real, (ends[k + 1] - ends[k],))
            w_bytes = pooling.arrays[pooling.of[pooling.order[k]]].itemsize
            strides = own.width * w_bytes, pooling.unit * values.itemsize
            is_aligned = not any(x % 16 for x in (own.table, values.address, *strides))
            out = made.address - ends[k] * real.itemsize
            features.append(own._replace(out=out, is_aligned=int(is_aligned)))
            found.append(native(made))
        launches = self._launches(features)
        with launch_on([*pooling.arrays, values]) as launch:
            cuda.rows.bags.multiply(
                features, self._lists(weighted=False), launches, values.address, pooling.unit,
                g=STORAGES[values.dtype], real=STORAGES[real], stream=launch.stream,
            )  # fmt: skip
        by_feature = dict(zip(pooling.order, found, strict=True))
        return [by_feature[f] for f in range(len(found))]


def _stacked(like: DeviceArray, parts: Sequence[DeviceArray], width: int) -> DeviceArray:
    return device_gradient.joined(parts, like.empty_like(shape=(sum(map(len, parts)), width)))


def pool(
    pooling: Pooling, ids: Any, offsets: Any, weights: Any = None, out: Any = None, **options: Any
) -> DevicePooled:
    """Pool tables on a device, as `pooled.pool`; a bad id or offset is reported later.

    Raises:
        TypeError, ValueError: something does not fit.
    """
    return DevicePooled(pooling, read(pooling, ids, offsets, weights), out, **options)
