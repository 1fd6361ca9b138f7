"""Bags that were pooled, and the gradients that follow from that of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....kernels.cpu import bags as kernels
from ....kernels.cpu.threads import allocation
from ....kernels.storage import STORAGES
from .. import check
from ..arrays import address_of, adopt
from ..errors import reject
from ..row_step import RowGradient
from . import device
from .ids import Given, find_error, read
from .pooling import Pooling, check_multiplies, kind_of
from .tensor import BagTensor

_OUT, _COLUMN = map(kernels.Feature._fields.index, ("out", "column"))


def pool(
    pooling: Pooling, ids: Any, offsets: Any, weights: Any = None, out: Any = None, **options: Any
) -> Pooled | device.DevicePooled:
    """Bags as they are given to `ops.EmbeddingBags`, pooled; ``options`` are those of `Pooled`.

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
    """Bags that were checked and pooled, or found bad; ``out`` has the result.

    Args:
        pooling: the tables, and how they are pooled.
        given: the ids.
        out: None, or what is given for the output.
        sums: whether there is an output, or only gradients of it are asked for.
        multiplies: whether gradients of weights may be asked for; None: if there are any.
    """

    def __init__(
        self, pooling: Pooling, given: Given, out: Any = None, *, sums: bool = True,
        multiplies: bool | None = None,
    ) -> None:  # fmt: skip
        where, self._pooling, self._given = pooling.where, pooling, given
        n = int(given.column("n").sum())
        if n > kernels.MOST:
            reject(ValueError, where, "ids", "are too many", f"at most {kernels.MOST}", n)
        self._shapes = self._output_shapes()
        # Maxima are found by pooling only, and what they were decides whose gradient is whose.
        sums = sums or pooling.name == "max"
        self.out: Any = None
        features, base = pooling.records(sums=sums, weighted=given.is_weighted), 0
        if not pooling.pools:
            # The gradients of a table's features are joined, one below the other.
            features, bags, before = features.copy(), given.column("bags"), self._bags_before()
            tables = np.array(pooling.ordered(pooling.of))
            features[:, _COLUMN] = np.cumsum(bags) - bags - before[tables]
        if sums:
            features, base = self._place_output(out, features)
        winners = None
        self._multiplies = given.is_weighted if multiplies is None else multiplies
        if pooling.name == "max":
            winners = allocation.empty((self.batch, pooling.width), np.dtype(np.int32))
            winners[...] = -1
        self._winners = winners
        self._bags = kernels.Bags(
            features, given.lists, pooling.real, pooling.unit, drops=pooling.drops,
            leaves_out=pooling.leaves_out, weighted=given.is_weighted, pooling=pooling.kind,
            out=base, sums=sums, at_once=out is None, winners=winners, multiplies=self._multiplies,
        )  # fmt: skip
        self.is_bad = self._bags.is_bad
        # What was given has been copied: whoever gave it may change it, resize it, or let it go.
        self._given = given._replace(keep=())

    @property
    def batch(self) -> int:
        """Bags of each feature that is pooled."""
        return self._shapes[0][0]

    def _output_shapes(self) -> list[tuple[int, int]]:
        """The shape of the output of each feature."""
        pooling, bags = self._pooling, self._given.column("bags").tolist()
        if pooling.pools:
            batch = bags[0]
            if batch * pooling.width // pooling.unit > kernels.MOST:
                wrong, expected = "is too large", f"at most {kernels.MOST} parts of rows"
                got = batch, pooling.width
                reject(ValueError, pooling.where, "the output", wrong, expected, got)
            return [(batch, width) for width in pooling.widths]
        of_feature = dict(zip(pooling.order, bags, strict=True))
        return [(of_feature[f], width) for f, width in enumerate(pooling.widths)]

    def _place_output(self, out: Any, features: np.ndarray) -> tuple[np.ndarray, int]:
        """Make the output, or take what was given for it; the features with where theirs is."""
        pooling, real = self._pooling, self._pooling.real
        is_one = pooling.pools and not isinstance(out, list | tuple)
        shapes = [(self.batch, pooling.width)] if is_one else self._shapes
        if out is None:
            arrays = [allocation.empty(shape, real) for shape in shapes]
        else:
            arrays = self._checked_outputs([out] if is_one else out, shapes)
        self.out = arrays[0] if is_one else arrays
        if is_one:
            return features, address_of(self.out)
        features, each = features.copy(), zip(arrays, shapes, strict=True)
        places = [(address_of(array), width * real.itemsize) for array, (_, width) in each]
        features[:, _OUT : _OUT + 2] = pooling.ordered(places)
        return features, 0

    def _checked_outputs(self, out: Any, shapes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        pooling, where, given = self._pooling, self._pooling.where, self._given
        if not isinstance(out, list | tuple) or len(out) != len(shapes):
            expected = f"a list of {len(shapes)} arrays"
            reject(ValueError, where, "out", "does not fit the features", expected, kind_of(out))
        names = ["out" if len(out) == 1 else f"out[{f}]" for f in range(len(out))]
        arrays = []
        for name, own, shape in zip(names, out, shapes, strict=True):
            array = check.variable(where, name, own)
            if array.dtype != pooling.real:
                reject(TypeError, where, name, "has a wrong dtype", pooling.real, array.dtype)
            if array.shape != shape:
                reject(ValueError, where, name, "has a wrong shape", shape, array.shape)
            arrays.append(array)
        read = [(address_of(table), table.nbytes) for table in pooling.arrays] + given.spans
        written = [(address_of(array), array.nbytes) for array in arrays]
        for k, (name, (at, n_bytes)) in enumerate(zip(names, written, strict=True)):
            for other, other_bytes in (*read, *written[:k]):
                if n_bytes and other_bytes and at < other + other_bytes and other < at + n_bytes:
                    wrong, expected = "shares memory with what is read", "its own memory"
                    reject(ValueError, where, name, wrong, expected, "an overlap")
        return arrays

    def gradients(self, grad: Any) -> list[Any]:
        """The gradient of each table for that of the output: a `BagTensor`.

        Raises:
            TypeError, ValueError: it does not fit the output.
        """
        pooling, bags = self._pooling, self._bags
        arrays, unit = self._gradient_arrays(grad)
        rows, weights = bags.rows_of_gradient()
        # Asking NumPy for addresses would take longer than all else: one of each array is enough.
        ends = bags.bounds[self._bags_before()].tolist()
        ids, winners = bags.ids, self._winners
        at_ids, at_rows = address_of(ids), address_of(rows)
        at_weights = 0 if weights is None else address_of(weights)
        real_bytes = 0 if weights is None else pooling.real.itemsize
        values_at = address_of(arrays[0])
        values, found = arrays[0], []
        for t, shape in enumerate(pooling.shapes):
            if arrays[t] is not values:
                values, values_at = arrays[t], address_of(arrays[t])
            begin, end, step = ends[t], ends[t + 1], unit or shape[1]
            source = RowGradient(
                ids[begin:end], values, at_ids + 4 * begin, values_at, None, 0,
                rows[begin:end], at_rows + 4 * begin, step * values.itemsize,
                None if weights is None else weights[begin:end], at_weights + real_bytes * begin,
                winners, begin,
            )  # fmt: skip
            found.append(BagTensor(source, step, shape))
        return found

    def _bags_before(self) -> np.ndarray:
        """How many bags lie before those of each table, and in all."""
        pooling = self._pooling
        if pooling.pools:
            return pooling.features_before * self.batch
        before = np.concatenate(([0], np.cumsum(self._given.column("bags"))))
        return before[pooling.features_before]

    def weight_gradients(self, grad: Any) -> list[np.ndarray]:
        """The gradient of the weight of each id, of each feature as its ids were given.

        Raises:
            TypeError, ValueError: it does not fit the output, or there are no sums.
        """
        pooling = self._pooling
        check_multiplies(pooling, is_kept=self._multiplies)
        array = self._gradient_arrays(grad)[0][0]
        w = pooling.ordered([STORAGES[pooling.arrays[t].dtype] for t in pooling.of])
        products = self._bags.multiply(array, STORAGES[array.dtype], w)
        of_feature = dict(zip(pooling.order, products, strict=True))
        return [of_feature[f] for f in range(len(products))]

    def _gradient_arrays(self, grad: Any) -> tuple[list[np.ndarray], int | None]:
        """Of each table the array in which the gradients of its features are; and their unit."""
        pooling = self._pooling
        if not pooling.pools:
            return self._joined(grad), None
        if isinstance(grad, list | tuple):
            array = np.concatenate(_gradients(pooling.where, grad, self._shapes), axis=1)
        else:
            array = _gradient(pooling.where, "grad", grad, (self.batch, pooling.width))
        return [array] * len(pooling.arrays), pooling.unit

    def _joined(self, grad: Any) -> list[np.ndarray]:
        """The gradients of the features of each table, one below the other."""
        pooling = self._pooling
        parts = _gradients(pooling.where, grad, self._shapes)
        found = []
        for t, table in enumerate(pooling.arrays):
            own = [part for part, of in zip(parts, pooling.of, strict=True) if of == t]
            nothing = np.empty((0, table.shape[1]), parts[0].dtype)
            found.append(own[0] if len(own) == 1 else np.concatenate([*own, nothing]))
        return found


def _gradients(where: str, grad: Any, shapes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """The checked gradients of several outputs."""
    if not isinstance(grad, list | tuple) or len(grad) != len(shapes):
        expected = f"a list of {len(shapes)} arrays"
        reject(ValueError, where, "grad", "does not fit the outputs", expected, kind_of(grad))
    each = zip(grad, shapes, strict=True)
    found = [_gradient(where, f"grad[{f}]", own, shape) for f, (own, shape) in enumerate(each)]
    for f, own in enumerate(found):
        if own.dtype != found[0].dtype:
            wrong = "has another dtype than grad[0]"
            reject(TypeError, where, f"grad[{f}]", wrong, found[0].dtype, own.dtype)
    return found


def _gradient(where: str, name: str, grad: Any, shape: tuple[int, int]) -> np.ndarray:
    array = adopt(where, name, grad)
    check.float_dtype(where, name, array)
    if array.shape != shape:
        reject(ValueError, where, name, "has a wrong shape", shape, array.shape)
    contiguous: np.ndarray = check.contiguous(array)
    return contiguous
