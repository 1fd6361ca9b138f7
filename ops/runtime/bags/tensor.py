"""The gradient of a table whose rows were pooled, BagTensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....kernels.quiet import quiet
from ..arrays import real_type
from ..device import is_on_device
from ..errors import reject
from ..row_step import RowGradient
from ..row_tensor import RowTensor


class BagTensor:
    """A row-sparse gradient of which one row is that of many occurrences.

    `EmbeddingBags` makes them; optimizers take them where they take a `RowTensor`, and read the
    gradient of a pooled output in place::

        dense[indices[b]] += weights[b] * values.reshape(-1, unit)[rows[b]:][:D // unit].reshape(D)

    What is no optimizer of this package's `nn` takes `to_rows`, which is for those on the host.

    Attributes:
        indices: int32 ``[B]``, in range. On a device those of ids that count for nothing are there
            too, as -2**31.
        values: a contiguous floating array, that of a pooled output.
        rows: int32 ``[B]``: where the gradient of each occurrence begins in it, in units.
        unit: elements.
        weights: the factor of each occurrence, in the type of the arithmetic; None: all are 1.
        winners: int32, in the form of the values, of maxima: an occurrence ``b`` has only the
            elements where this is ``first + b``, and no weight. None: it has all.
        dense_shape: ``(N, D)``; ``D`` is a multiple of the unit.
    """

    __slots__ = "dense_shape", "source", "unit"

    def __init__(self, source: RowGradient, unit: int, dense_shape: tuple[int, int]) -> None:
        self.source = source  # all that has ``[B]`` elements, and the values
        self.unit, self.dense_shape = unit, dense_shape

    @property
    def indices(self) -> Any:
        """The row of each occurrence."""
        return self.source.indices

    @property
    def values(self) -> Any:
        """The gradient of the pooled output."""
        return self.source.values

    @property
    def rows(self) -> Any:
        """Where the gradient of each occurrence begins, in units."""
        return self.source.rows

    @property
    def weights(self) -> Any:
        """The factors."""
        return self.source.weights

    @property
    def winners(self) -> Any:
        """The occurrence of each element of the values, as `first` numbers them."""
        return self.source.winners

    @property
    def first(self) -> int:
        """The number of the first occurrence."""
        return self.source.first

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
        """The same with one row of values for each occurrence: ``B * D`` numbers.

        Products with weights are rounded to the dtype of the values.

        Raises:
            RuntimeError: it is on a device.
        """
        if is_on_device(self.values):
            wrong, expected = "lives on a CUDA device", "an optimizer's step, or one on the host"
            reject(RuntimeError, "BagTensor", "the gradient", wrong, expected, "its rows")
        n, width = len(self.indices), self.dense_shape[1]
        # A row begins in the middle of that of the output: units are the widths that all share.
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
