"""Pooling bags on the host, and the gradients of tables and weights from that of the output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ....kernels.cpu import bags as kernels
from ....kernels.storage import STORAGES
from ..arrays import address_of, addresses_of
from ..errors import reject
from . import device
from .given import joined_by_table, read_gradient, read_gradients, read_outputs
from .ids import HostIds, find_error, read
from .pooling import Pooling, check_multiplies
from .tensor import BagTensor


def pool(
    pooling: Pooling, ids: Any, offsets: Any, weights: Any = None, out: Any = None, **options: Any
) -> Pooled | device.DevicePooled:
    """Pool bags; arguments as those of `ops.EmbeddingBags`, ``options`` as those of `Pooled`.

    Raises:
        TypeError, ValueError, IndexError: something does not fit.
    """
    if pooling.is_on_device:
        return device.pool(pooling, ids, offsets, weights, out, **options)
    pooled = Pooled(pooling, read(pooling, ids, offsets, weights), out, **options)
    if pooled.is_bad:
        find_error(pooling, ids, offsets)
    return pooled


class Pooled:
    """Bags that are checked and pooled, or bad; ``out`` has the result.

    Args:
        pooling: the tables, and how they are pooled.
        ids: those of all features.
        out: the caller's arrays for the output, or None.
        sums: whether to pool; else only gradients can be asked for.
        multiplies: whether gradients of weights may be asked for; None: if there are weights.

    Attributes:
        batch: the number of bags of each pooled feature.
    """

    def __init__(
        self, pooling: Pooling, ids: HostIds, out: Any = None, *, sums: bool = True,
        multiplies: bool | None = None,
    ) -> None:  # fmt: skip
        where, self._pooling, self._given = pooling.where, pooling, ids
        n, bags = sum(ids.lists["n"].tolist()), ids.lists["bags"].tolist()
        if n > kernels.MOST:
            reject(ValueError, where, "ids", "are too many", f"at most {kernels.MOST}", n)
        self._shapes = pooling.output_shapes(bags)
        self.batch = self._shapes[0][0]
        # Gradients of maxima need the winners, which only pooling finds.
        sums = sums or pooling.name == "max"
        self.out: Any = None
        features, base = pooling.records(sums=sums, weighted=ids.is_weighted), 0
        if not pooling.pools:
            features = features.copy()
            features["column"] = pooling.columns_below(bags)
        if sums:
            features, base = self._place_output(out, features)
        winners = None
        self._multiplies = ids.is_weighted if multiplies is None else multiplies
        if pooling.name == "max":
            winners = pooling.memory.empty((self.batch, pooling.width), np.int32)
        self._winners = winners
        self._bags = kernels.Bags(
            features, ids.lists, pooling.real, pooling.unit, pooling.memory, drops=pooling.drops,
            leaves_out=pooling.leaves_out, weighted=ids.is_weighted, pooling=pooling.kind,
            out=base, sums=sums, winners=winners, multiplies=self._multiplies,
        )  # fmt: skip
        self.is_bad = self._bags.is_bad
        # The ids have been copied: the caller may change, resize or free its arrays.
        self._given = ids._replace(keep=())

    def _place_output(self, out: Any, features: np.ndarray) -> tuple[np.ndarray, int]:
        """Make or take the output; returns features with their places in it, and its address."""
        pooling, real = self._pooling, self._pooling.real
        is_one = pooling.pools and not isinstance(out, list | tuple)
        shapes = [(self.batch, pooling.width)] if is_one else self._shapes
        if out is None:
            arrays = [pooling.memory.empty(shape, real) for shape in shapes]
        else:
            arrays = read_outputs(pooling, [out] if is_one else out, shapes, self._is_shared)
        self.out = arrays[0] if is_one else arrays
        if is_one:
            return features, address_of(self.out)
        features = features.copy()
        features["out"] = pooling.ordered([*map(address_of, arrays)])
        features["stride"] = pooling.ordered([width * real.itemsize for _, width in shapes])
        return features, 0

    def _is_shared(self, array: np.ndarray, others: Sequence[np.ndarray]) -> bool:
        """Whether an output shares memory with tables, ids, offsets, weights or other outputs."""
        known = (*self._pooling.arrays, *others)
        addresses, sizes = self._given.spans(self._pooling.real)
        begins = np.append(addresses, addresses_of(known))
        ends = begins + np.append(sizes, [x.nbytes for x in known])
        begin, end = address_of(array), address_of(array) + array.nbytes
        return bool(((begins < ends) & (begins < end) & (begin < ends)).any()) and begin < end

    def gradients(self, grad: Any) -> list[Any]:
        """The gradient of each table, a `BagTensor`, from the gradient of the output.

        Raises:
            TypeError, ValueError: ``grad`` does not fit the output.
        """
        pooling, bags = self._pooling, self._bags
        arrays, unit = self._gradient_arrays(grad)
        ids, rows, weights = bags.rows_of_gradient()
        ends = bags.bounds[self._bags_before()]
        return BagTensor.of_tables(
            pooling.shapes, arrays, unit, ids, rows, weights, self._winners, ends,
            np.ndarray.__getitem__,
        )  # fmt: skip

    def _bags_before(self) -> np.ndarray:
        """The number of bags before those of each table, and of all bags."""
        pooling = self._pooling
        if pooling.pools:
            return pooling.features_before * self.batch
        before = np.concatenate(([0], np.cumsum(self._given.lists["bags"])))
        return before[pooling.features_before]

    def weight_gradients(self, grad: Any) -> list[np.ndarray]:
        """The gradients of the weights of each feature, in the order of its ids.

        Raises:
            TypeError, ValueError: ``grad`` does not fit the output, or pooling is not "sum".
        """
        pooling = self._pooling
        check_multiplies(pooling, is_kept=self._multiplies)
        array = self._gradient_arrays(grad)[0][0]
        w = pooling.ordered([STORAGES[pooling.arrays[t].dtype] for t in pooling.of])
        products = self._bags.multiply(array, STORAGES[array.dtype], w)
        by_feature = dict(zip(pooling.order, products, strict=True))
        return [by_feature[f] for f in range(len(products))]

    def _gradient_arrays(self, grad: Any) -> tuple[list[np.ndarray], int | None]:
        """The array of each table that holds the gradients of its features; and their unit."""
        pooling = self._pooling
        if not pooling.pools:
            parts = read_gradients(pooling, grad, self._shapes)
            return joined_by_table(pooling, parts, partial(_stacked, parts[0].dtype)), None
        if isinstance(grad, list | tuple):
            array = np.concatenate(read_gradients(pooling, grad, self._shapes), axis=1)
        else:
            array = read_gradient(pooling, "grad", grad, (self.batch, pooling.width))
        return [array] * len(pooling.arrays), pooling.unit


def _stacked(dtype: np.dtype[Any], parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    return np.concatenate([*parts, np.empty((0, width), dtype)])
