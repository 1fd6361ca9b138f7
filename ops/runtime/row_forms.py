"""The forms in which row-sparse gradients come: RowTensors, lists of them, tensors of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import device_gradient
from .arrays import RowTensor, adopt_anywhere
from .device import device_of
from .errors import message


def as_rows(where: str, name: str, gradient: Any) -> RowTensor | None:
    """A `RowTensor`, a list of them (concatenated) or a torch sparse COO tensor; else None."""
    if isinstance(gradient, RowTensor):
        return gradient
    if isinstance(gradient, list | tuple):
        return concatenated(where, name, gradient)
    if getattr(gradient, "is_sparse", False):
        return _from_torch(where, name, gradient)
    return None


def _from_torch(where: str, name: str, tensor: Any) -> RowTensor:
    # The accessors with an underscore also work on a tensor that is not coalesced.
    indices = tensor._indices()
    if len(indices) != 1:
        raise ValueError(
            message(where, name, "has a wrong layout", "1 sparse dimension", len(indices))
        )
    return RowTensor(indices[0], tensor._values().detach(), tuple(tensor.shape))


def concatenated(where: str, name: str, parts: Sequence[Any]) -> RowTensor:
    """One row-sparse gradient out of several for the same tensor.

    Raises:
        TypeError: a part is no `RowTensor`, or there is none.
        ValueError: their shapes, dtypes or places differ.
    """
    if not parts or not all(isinstance(part, RowTensor) for part in parts):
        got = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise TypeError(message(where, name, "is no gradient", "an array or RowTensors", got))
    if len({(part.dense_shape, part.values.dtype) for part in parts}) > 1:
        raise ValueError(
            message(where, name, "has parts that differ", "one dense_shape and dtype", list(parts))
        )
    # Adopted again: the attributes of a RowTensor can be assigned to.
    arrays = [[adopt_anywhere(where, name, a) for a in (p.indices, p.values)] for p in parts]
    places = {f"part {k} of {name}": values for k, (_, values) in enumerate(arrays)}
    shape = parts[0].dense_shape
    if device_of(where, places) is not None:
        return device_gradient.concatenated([RowTensor(i, v, shape) for i, v in arrays])
    indices, values = map(np.concatenate, zip(*arrays, strict=True))
    return RowTensor(indices, values, shape)
