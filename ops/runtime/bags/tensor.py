"""BagTensor, the gradient of a table whose rows were pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, floordiv, mul, sub
from typing import Any

import numpy as np

from ....kernels.cpu.bags import MOST
from ....kernels.quiet import quiet
from ..arrays import address_of, addresses_of, real_type
from ..device import is_on_device
from ..errors import reject
from ..row_step import RowGradient
from ..row_tensor import RowTensor

_n_bytes_of = attrgetter("nbytes")


class BagTensor:
    """A row-sparse gradient in which many occurrences may share a row of values.

    `EmbeddingBags` makes it. Optimizers accept it in place of a `RowTensor`, and read the gradient
    of a pooled output in place::

        dense[indices[b]] += weights[b] * values.reshape(-1, unit)[rows[b]:][:D // unit].reshape(D)

    Other code can use `to_rows`, on the host.

    Attributes:
        indices: int32 ``[B]``, in range. On a device ignored ids are there too, as -2**31.
        values: a contiguous floating array: the gradient of a pooled output.
        rows: int32 ``[B]``: where the gradient of each occurrence begins in the values, in units.
        unit: elements.
        weights: the weight of each occurrence, in the type of the arithmetic; None: all are 1.
        winners: for maxima, int32 in the form of the values: occurrence ``b`` has only the elements
            where this is ``first + b``, and no weight. None: it has all elements.
        dense_shape: ``(N, D)``; ``D`` is a multiple of the unit.
    """

    __slots__ = "dense_shape", "gradient", "unit"

    def __init__(self, gradient: RowGradient, unit: int, dense_shape: tuple[int, int]) -> None:
        self.gradient = gradient  # the values and all arrays ``[B]``
        self.unit, self.dense_shape = unit, dense_shape

    @classmethod
    def of_tables(
        cls, shapes: Sequence[tuple[int, int]], arrays: Sequence[Any], unit: int | None, ids: Any,
        rows: Any, weights: Any, winners: Any, ends: np.ndarray,
        part: Callable[[Any, slice], Any],
    ) -> list[BagTensor]:  # fmt: skip
        """The gradients of many tables.

        Args:
            shapes: those of the tables.
            arrays: the values of each table.
            unit: that of all; None: each has the width of its table.
            ids: one list for all tables; ``rows``, ``weights`` and ``winners`` too.
            rows: as the attribute.
            weights: as the attribute.
            winners: as the attribute.
            ends: where the ids of each table begin, and the end of all.
            part: ``part(list, slice)``.
        """
        places, first = ends.tolist(), ends[:-1]
        parts = [*map(slice, places, places[1:])]
        at_ids, at_rows, *values = addresses_of((ids, rows, *arrays))
        units = [unit] * len(arrays) if unit else [width for _, width in shapes]
        strides = [*map(mul, units, repeat(arrays[0].itemsize))]
        sources: dict[str, Any] = {
            "values": values, "stride": strides, "gradient_rows": (at_rows + 4 * first).tolist(),
            "first": places, "indices": (at_ids + 4 * first).tolist(), "index_bytes": repeat(4),
            "length": map(sub, places[1:], places),
            "winners": repeat(0 if winners is None else address_of(winners)),
            "n_gradients": map(floordiv, map(_n_bytes_of, arrays), strides),
        }  # fmt: skip
        of_ids = {"rows": map(part, repeat(rows), parts), "winners": repeat(winners)}
        if weights is not None:
            of_ids["weights"] = map(part, repeat(weights), parts)
            sources["weights"] = (address_of(weights) + weights.itemsize * first).tolist()
        indices = map(part, repeat(ids), parts)
        gradients = RowGradient.of_tables(indices, arrays, sources, **of_ids)
        return [*map(cls, gradients, units, shapes)]

    @property
    def indices(self) -> Any:
        """The row of each occurrence."""
        return self.gradient.indices

    @property
    def values(self) -> Any:
        """The gradient of the pooled output."""
        return self.gradient.values

    @property
    def rows(self) -> Any:
        """Where the gradient of each occurrence begins, in units."""
        return self.gradient.rows

    @property
    def weights(self) -> Any:
        """The weights, or None."""
        return self.gradient.weights

    @property
    def places(self) -> tuple[np.ndarray | None, int]:
        """The positions of the occurrences in a batch that several processes share, int64, and its
        length; None and 0 where nobody shares it.
        """
        return self.gradient.positions, self.gradient.source.whole_length

    @property
    def winners(self) -> Any:
        """The occurrence of each element of the values, numbered from `first`; or None."""
        return self.gradient.winners

    @property
    def first(self) -> int:
        """The number of the first occurrence among winners."""
        return self.gradient.source.first

    def __repr__(self) -> str:
        return (
            f"BagTensor(indices={self.indices.shape}, values={self.values.shape} "
            f"{self.dtype}, dense_shape={self.dense_shape})"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the dense tensor."""
        return self.dense_shape

    @quiet
    def to_rows(self) -> RowTensor:
        """This gradient with one row of values for each occurrence: ``B * D`` numbers.

        Products with weights are rounded to the dtype of the values.

        Raises:
            RuntimeError: the gradient is on a device.
        """
        if is_on_device(self.values):
            wrong, expected = "lives on a CUDA device", "an optimizer's step, or one on the host"
            reject(RuntimeError, "BagTensor", "the gradient", wrong, expected, "its rows")
        n, width = len(self.indices), self.dense_shape[1]
        # A row begins inside a row of the output; all rows begin at multiples of the unit.
        units = self.rows[:, None] + np.arange(width // self.unit)
        values = self.values.reshape(-1, self.unit)[units].reshape(n, width)
        if self.winners is not None:
            winners = self.winners.reshape(-1, self.unit)[units].reshape(n, width)
            values[winners != self.first + np.arange(n)[:, None]] = 0
        if self.weights is not None:
            real = np.promote_types(self.weights.dtype, real_type(values.dtype))
            values = (values.astype(real) * self.weights[:, None]).astype(values.dtype)
        return RowTensor(self.indices, values, self.dense_shape)

    def to_dense(self) -> np.ndarray:
        """The dense ``[N, D]`` array; as `RowTensor.to_dense`."""
        dense: np.ndarray = self.to_rows().to_dense()
        return dense

    # The following methods are for gradients on the host.

    @property
    def factors(self) -> Any:
        """The weights, as an array even if all are 1."""
        if self.weights is None:
            return np.ones(len(self.indices), real_type(self.dtype))
        return self.weights

    def with_arrays(self, indices: Any, values: Any, rows: Any, weights: Any) -> BagTensor:
        """A gradient of the same table for other occurrences, without winners."""
        stride = self.unit * values.itemsize
        gradient = RowGradient.shared(indices, values, rows, stride, weights)
        return BagTensor(gradient, self.unit, self.dense_shape)

    def without(self, row: int) -> BagTensor:
        """This gradient without the occurrences of a row."""
        keeps = self.indices != row
        if keeps.all():
            return self
        rest = self.without_winners()
        weights = None if rest.weights is None else rest.weights[keeps]
        return self.with_arrays(rest.indices[keeps], rest.values, rest.rows[keeps], weights)

    def without_winners(self) -> BagTensor:
        """This gradient; one of maxima with a row of values for each occurrence."""
        if self.winners is None:
            return self
        values = self.to_rows().values
        n, width = values.shape
        rows = np.arange(n, dtype=np.int32) * np.int32(width // self.unit)
        return self.with_arrays(self.indices, values, rows, None)


@quiet
def joined(tables: Sequence[Sequence[BagTensor]], divisor: int = 1) -> list[BagTensor]:
    """The gradient of each table from the gradients of several calls, concatenated in their order.

    Args:
        tables: for each table its gradients, on the host.
        divisor: a number by which the values are divided.

    Raises:
        ValueError: rows of gradients cannot be numbered in int32.
    """
    every = [[gradient.without_winners() for gradient in table] for table in tables]
    begins: dict[int, int] = {}  # of values, by the identity of arrays that ``every`` keeps
    arrays, n, unit = [], 0, every[0][0].unit
    for gradient in chain.from_iterable(every):
        if id(gradient.values) not in begins:
            begins[id(gradient.values)] = n // unit
            arrays.append(gradient.values.reshape(-1))
            n += gradient.values.size
    if n // unit > MOST:
        wrong, expected = "are too large together", f"at most {MOST} parts of rows"
        reject(ValueError, "EmbeddingBags", "the outputs", wrong, expected, n // unit)
    values = np.concatenate(arrays)
    if divisor != 1:
        real = real_type(values.dtype)
        values = (values.astype(real, copy=False) / real(divisor)).astype(values.dtype)
    gradients = []
    for table in every:
        rows = [gradient.rows + np.int32(begins[id(gradient.values)]) for gradient in table]
        is_weighted = any(gradient.weights is not None for gradient in table)
        weights = np.concatenate([gradient.factors for gradient in table]) if is_weighted else None
        indices = np.concatenate([gradient.indices for gradient in table])
        gradients.append(table[0].with_arrays(indices, values, np.concatenate(rows), weights))
    return gradients
