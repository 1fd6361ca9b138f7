"""Bags of ids on a CUDA device: read, pooled there, and turned into gradients.

The host waits for nothing, but for the gradients of ids that are one array: how many of them each
table has stands on the device. Ids and offsets are checked there; what does not fit is heard of
later (`pending`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu.bags import MOST
from ....kernels.storage import STORAGES
from ....kernels.tables import Feature
from .. import cuda, device_gradient
from ..arrays import native
from ..device import DeviceArray, may_share_memory
from ..errors import message, reject
from ..launch import launch_on
from .given import (
    Ids,
    fill_in,
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
        arrays = [feature.array for feature in self.lists]
        arrays += [feature.offsets for feature in self.lists if feature.offsets is not None]
        return arrays + (self.weights or [])


def read(pooling: Pooling, ids: Any, offsets: Any, weights: Any) -> DeviceIds:
    """The ids of all features; what stands in the arrays is looked at on the device.

    Raises:
        TypeError, ValueError: a kind, place, dtype or shape does not fit.
    """
    where, (lists, is_joined) = pooling.where, read_lists(pooling, ids, offsets)
    if is_joined and not pooling.is_ordered:
        wrong, expected = "are not in the order of their tables", "a list of ids on a device"
        reject(ValueError, where, "features", wrong, expected, "one array of ids")
    total = lists[0].n if is_joined else sum(feature.n for feature in lists)
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
        lists = [feature._replace(end=0) for feature in lists]
    return DeviceIds(pooling.ordered(lists), factors, is_joined, total)


def _converted(array: DeviceArray, real: np.dtype[Any]) -> DeviceArray:
    same: bool = array.dtype == real
    return array if same else device_gradient.converted(array, real)


class DevicePooled:
    """Bags that are pooled on a device: enqueued when this is made; as `Pooled`.

    Args:
        pooling: the tables, and how they are pooled.
        ids: those of all features.
        out: None, or what is given for the output.
        sums: whether there is an output, or only gradients of it are asked for.
        multiplies: whether gradients of weights may be asked for; None: if there are any.
    """

    def __init__(
        self, pooling: Pooling, ids: DeviceIds, out: Any = None, *, sums: bool = True,
        multiplies: bool | None = None,
    ) -> None:  # fmt: skip
        self._pooling = pooling
        like, self.batch = pooling.arrays[0], ids.lists[0].bags
        bags = [feature.bags for feature in ids.lists]
        self._shapes = pooling.output_shapes(bags)
        self._n, self._n_bags = ids.n, sum(bags)
        self._bounds = like.empty_like(_INT64, (self._n_bags + 1,))
        self._ids, self._rows = (like.empty_like(_INT32, (self._n,)) for _ in range(2))
        has_weights = ids.weights is not None or pooling.name == "mean"
        self._weights = like.empty_like(pooling.real, (self._n,)) if has_weights else None
        # Maxima are found by pooling only, and what they were decides whose gradient is whose.
        is_largest = pooling.name == "max"
        shape, sums = (self.batch, pooling.width), sums or is_largest
        self._winners = like.empty_like(_INT32, shape) if is_largest else None
        self._ends = self._ends_of(ids, like)
        is_one = pooling.pools and not isinstance(out, list | tuple)
        outputs: list[DeviceArray] = []
        if sums:
            shapes = [shape] if is_one else self._shapes
            if out is None:
                outputs = [like.empty_like(pooling.real, x) for x in shapes]
            else:
                read = [*pooling.arrays, *ids.arrays]
                outputs = read_outputs(
                    pooling, [out] if is_one else out, shapes,
                    lambda array, others: any(
                        may_share_memory(array, x) for x in (*read, *others)
                    ),
                )  # fmt: skip
        features = self._features(ids, outputs, is_one=is_one)
        launches = self._launches(features) if sums else []
        arrays = [*pooling.arrays, *ids.arrays, *outputs]
        weighted = ids.weights is not None
        self._multiplies = weighted if multiplies is None else multiplies
        self._kept = features
        with launch_on(arrays, self._error(ids, features)) as launch:
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

    def _ends_of(self, ids: DeviceIds, like: DeviceArray) -> Any:
        """Where the ids of features begin: known, or to be written on the device."""
        if ids.is_joined:
            return like.empty_like(_INT64, (len(ids.lists),))
        return np.cumsum([0, *(feature.n for feature in ids.lists)])

    def _features(self, ids: DeviceIds, outputs: list[DeviceArray], *, is_one: bool) -> Any:
        """The features as the loops see them: `FEATURES`."""
        pooling, item, n = self._pooling, self._pooling.real.itemsize, len(ids.lists)
        features, static = np.zeros(n, cuda.rows.bags.FEATURES), pooling.records()
        for name in Feature._fields:
            features[name] = static[name]
        weights: Sequence[Any] = ids.weights or [None]
        weights = weights if len(weights) == n else [*weights] * n
        for record, feature, factors in zip(features, ids.lists, weights, strict=True):
            fill_in(record, feature, factors)
        ends, bags = np.cumsum(features["n"]), features["bags"]
        features["origin"], features["first_bag"] = ends - features["n"], np.cumsum(bags) - bags
        if ids.is_joined:  # where those of a feature begin and end the device knows
            features["n"], features["begin"], features["end"] = ids.n, -1, -1
            features["begin"][0], features["end"][-1] = 0, ids.n
        elif ids.lists[0].offsets is None:
            features["begin"] = features["end"] = -1
        if not pooling.pools:
            features["column"] = pooling.columns_below(bags)
        if outputs and is_one:
            features["out"] += outputs[0].address
        elif outputs:
            features["out"] = pooling.ordered([array.address for array in outputs])
            features["stride"] = pooling.ordered([width * item for width in pooling.widths])
        wide = features["table"] | features["row_bytes"] | features["out"] | features["stride"]
        if self._winners is not None:  # which begin where columns of a whole output do
            columns = np.array(pooling.ordered(pooling.columns[:-1]))
            features["winners"] = self._winners.address + 4 * columns
            features["winners_stride"] = pooling.width
            wide |= columns * item | pooling.width * item
        features["is_aligned"] = wide % 16 == 0
        return features

    def _launches(self, features: Any) -> list[Any]:
        """Consecutive features whose tables are of one storage type."""
        pooling, launches = self._pooling, []
        storages = pooling.ordered([STORAGES[pooling.arrays[t].dtype] for t in pooling.of])
        for w, group in groupby(zip(storages, features, strict=True), itemgetter(0)):
            alike = [feature for _, feature in group]
            begin, end = alike[0]["first_bag"], alike[-1]["first_bag"] + alike[-1]["bags"]
            widest = max(feature["width"] for feature in alike)
            if end > begin:
                launches.append(cuda.rows.bags.Pooled(w, int(begin), int(end), int(widest)))
        return launches

    def _error(self, ids: DeviceIds, features: Any) -> Any:
        """The maker of the error for what does not fit, by its number (see the kernels)."""
        where, is_joined, n_offsets = self._pooling.where, ids.is_joined, 2 * self._n_bags
        named = [(x.name, x.offsets_name, x.first_offset) for x in ids.lists]
        origins, rows, most, first_bags = (
            features[name].tolist() for name in ("origin", "rows", "n", "first_bag")
        )

        def error(position: int, value: int) -> Exception:
            if position < n_offsets:
                (bag, is_end), wrong = divmod(position, 2), "does not fit"
                f = bisect(first_bags, bag) - 1
                _, name, first = named[f]
                expected = "0" if not is_end else (
                    f"at least the one before, and at most, at the end exactly, {most[f]}"
                )  # fmt: skip
                k = first + bag - first_bags[f] + is_end
                return ValueError(message(where, f"{name}[{k}]", wrong, expected, value))
            place = position - n_offsets
            if is_joined:
                expected = "0 <= id < rows of its table"
                text = message(where, f"ids[{place}]", "is out of range", expected, value)
                return IndexError(text)
            f = bisect(origins, place) - 1
            name, expected = f"{named[f][0]}[{place - origins[f]}]", f"0 <= id < {rows[f]}"
            return IndexError(message(where, name, "is out of range", expected, value))

        return error

    def gradients(self, grad: Any) -> list[BagTensor]:
        """The gradient of each table for that of the output; of joined ids the host waits.

        Raises:
            TypeError, ValueError: it does not fit the output.
        """
        pooling, unit = self._pooling, None
        if pooling.pools:
            values, unit = [self._gradient(grad)] * len(pooling.arrays), pooling.unit
        else:
            parts = read_gradients(pooling, grad, self._shapes)
            values = joined_by_table(pooling, parts, partial(_stacked, parts[0]))
        ends, lists = np.array(self._ends_of_features()), (self._ids, self._rows, self._weights)
        return BagTensor.of_tables(
            pooling.shapes, values, unit, *lists, self._winners, ends[pooling.features_before],
            DeviceArray.part,
        )  # fmt: skip

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
        real, features = pooling.real, self._kept.copy()
        made = [like.filled_like(0.0, real, (end - begin,)) for begin, end in pairwise(ends)]
        # The outputs of features are addresses that those of place 0 would have.
        features["out"] = [
            x.address - end * real.itemsize for x, end in zip(made, ends, strict=False)
        ]
        wide = features["table"] | features["row_bytes"] | values.address
        features["is_aligned"] = (wide | pooling.unit * values.itemsize) % 16 == 0
        launches = self._launches(features)
        with launch_on([*pooling.arrays, values]) as launch:
            cuda.rows.bags.multiply(
                features, self._lists(weighted=False), launches, values.address, pooling.unit,
                g=STORAGES[values.dtype], real=STORAGES[real], stream=launch.stream,
            )  # fmt: skip
        by_feature = dict(zip(pooling.order, map(native, made), strict=True))
        return [by_feature[f] for f in range(len(made))]


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
