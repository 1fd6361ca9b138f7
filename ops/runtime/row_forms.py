"""The forms of row-sparse gradients: RowTensors, lists of them, sparse tensors of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.private import parts_of
from ...kernels.storage import STORAGES, Storage
from . import device_gradient
from .bags.tensor import BagTensor
from .device import device_of
from .errors import reject
from .row_step import IndexList, RowGradient
from .row_tensor import RowTensor

Dense = dict[Storage, list[Any]]
Rows = dict[Storage, dict[int, Any]]


def by_storage(gradients: Sequence[Any]) -> tuple[Dense, Rows]:
    """Gradients by storage: lists of dense gradients, and row-sparse gradients by their places."""
    dense: Dense = {}
    rows: Rows = {}
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, RowTensor | BagTensor):
            rows.setdefault(STORAGES[gradient.dtype], {})[i] = gradient
        elif gradient is not None:
            dense.setdefault(STORAGES[gradient.dtype], []).append(gradient)
    return dense, rows


def values_of(gradient: Any) -> Any:
    """The array of a dense gradient, or of the values of a `RowTensor`."""
    return gradient.values if isinstance(gradient, RowTensor | BagTensor) else gradient


def values_by_storage(gradients: Sequence[Any]) -> Dense:
    """The values of all gradients, in order, without None."""
    values: Dense = {}
    for gradient in gradients:
        if gradient is not None:
            values.setdefault(STORAGES[gradient.dtype], []).append(values_of(gradient))
    return values


def with_values(rows: RowTensor, values: Any, indices: Any = None) -> RowTensor:
    """``rows`` with other values for their occurrences, which keep their places in a batch."""
    batch = {"positions": rows.positions, "batch_length": rows.batch_length}
    indices = rows.indices if indices is None else indices
    return RowTensor(indices, values, rows.dense_shape, **batch)


def row_gradient(rows: RowTensor | BagTensor) -> RowGradient:
    """A row-sparse gradient of contiguous, checked arrays, in the form of the kernels."""
    if isinstance(rows, BagTensor):
        return rows.gradient
    batch = () if rows.positions is None else (rows.positions, rows.batch_length)
    return RowGradient.of(rows.indices, rows.values, *batch)


def index_lists(where: str, tensors: dict[int, RowTensor]) -> list[IndexList]:
    """The indices of row-sparse gradients, which are ``x[i]`` of an operator's argument."""
    return [
        IndexList(f"{where}: x[{i}]", len(t.indices), t.dense_shape[0]) for i, t in tensors.items()
    ]


def as_rows(where: str, name: str, gradient: Any) -> RowTensor | None:
    """The `RowTensor` of any form of row-sparse gradient; None for other gradients.

    Lists of RowTensors are concatenated; a `BagTensor` gets a row of values for each occurrence.
    """
    if isinstance(gradient, RowTensor):
        return gradient
    if isinstance(gradient, BagTensor):
        return gradient.to_rows()
    if isinstance(gradient, list | tuple):
        return concatenated(where, name, gradient)
    if getattr(gradient, "is_sparse", False):
        return _from_torch(where, name, gradient)
    return None


def _from_torch(where: str, name: str, tensor: Any) -> RowTensor:
    indices, values = parts_of(tensor)
    if len(indices) != 1:
        reject(ValueError, where, name, "has a wrong layout", "1 sparse dimension", len(indices))
    return RowTensor(indices[0], values.detach(), tuple(tensor.shape))


def concatenated(where: str, name: str, parts: Sequence[Any]) -> RowTensor:
    """One row-sparse gradient out of several for the same tensor."""
    parts = [part.to_rows() if isinstance(part, BagTensor) else part for part in parts]
    if not parts or not all(isinstance(part, RowTensor) for part in parts):
        got = ", ".join(type(part).__name__ for part in parts) or "nothing"
        reject(TypeError, where, name, "is no gradient", "an array or RowTensors", got)
    if len({(part.dense_shape, part.values.dtype) for part in parts}) > 1:
        wrong, expected = "has parts that differ", "one dense_shape and dtype"
        reject(ValueError, where, name, wrong, expected, list(parts))
    if len(parts) > 1 and any(part.positions is not None for part in parts):
        wrong, expected = "has parts with positions", "one RowTensor with positions, or none"
        reject(ValueError, where, name, wrong, expected, f"{len(parts)} parts")
    for k, part in enumerate(parts):
        part.check_positions(f"{where}: part {k} of {name}")
    places = {f"part {k} of {name}": part.values for k, part in enumerate(parts)}
    if device_of(where, places) is not None:
        # Each part is checked again, since its attributes can be assigned to.
        checked = [with_values(part, part.values) for part in parts]
        gradients = [RowGradient.of(part.indices, part.values) for part in checked]
        joined = device_gradient.concatenated(gradients)
        return with_values(parts[0], joined[1], joined[0])
    indices = np.concatenate([part.indices for part in parts])
    return with_values(parts[0], np.concatenate([part.values for part in parts]), indices)
