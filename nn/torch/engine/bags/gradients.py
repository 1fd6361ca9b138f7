"""Gradients of pooled tables, as tensors of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .....kernels.private import parts_of
from .....kernels.tables import LEFT_OUT
from .....ops.runtime.bags.tensor import BagTensor
from .....ops.runtime.device import is_on_device
from ..memory import array_of, tensor_of
from ..sleep import changes_of


def versions_of(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where tables lie, and how often they have changed."""
    return [(weight.data_ptr(), changes_of(weight)) for weight in weights]


def tensor_of_rows(gradient: Any, weight: Tensor) -> Any:
    """The gradient as PyTorch's, a row for each id; dense where it goes on from there."""
    if not isinstance(gradient, BagTensor):
        return gradient
    if is_on_device(gradient.values):
        indices, values = rows_of_bags(gradient, tensor_of)
    else:
        rows = gradient.to_rows()
        indices, values = tensor_of(rows.indices), tensor_of(rows.values)
        if not len(indices):  # PyTorch lengthens it in place when it adds others
            indices, values = indices.clone(), values.clone()
    tensor = torch.sparse_coo_tensor(
        indices.long()[None], values.to(weight.dtype), tuple(weight.shape), check_invariants=False
    )
    return tensor if weight.is_leaf else tensor.to_dense()


def rows_of_bags(gradient: BagTensor, tensor_of: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """The index and the row of each occurrence in a gradient of pooled rows, by PyTorch.

    What counts for nothing, and what is out of range, is a row of zeros: how many there are is not
    asked, since the answer would be waited for. ``tensor_of`` gives the tensors of arrays.
    """
    rows, unit, (n_rows, width) = gradient.gradient, gradient.unit, gradient.dense_shape
    indices = tensor_of(rows.indices)
    n, numbers = len(indices), torch.arange(len(indices), device=indices.device)[:, None]
    places = tensor_of(rows.rows).long()[:, None] + torch.arange(
        width // unit, device=indices.device
    )

    def in_places(array: Any) -> Tensor:
        return tensor_of(array).reshape(-1, unit)[places].reshape(n, width)

    is_known = ((indices >= 0) & (indices < n_rows))[:, None]
    places = places.clamp(0, max(0, rows.values.size // unit - 1))  # those of bad ids are any
    values = in_places(rows.values)
    if rows.winners is not None:
        is_known = is_known & (in_places(rows.winners) == gradient.first + numbers)
    if rows.weights is not None:
        factors = tensor_of(rows.weights)
        real = torch.promote_types(factors.dtype, values.dtype)
        values = (values.to(real) * factors.to(real)[:, None]).to(values.dtype)
    return indices.clamp(0, max(0, n_rows - 1)), values.where(is_known, values.new_zeros(()))


def without_row(gradient: BagTensor, row: int) -> BagTensor:
    """A gradient without the occurrences of a row."""
    if not is_on_device(gradient.values):
        return gradient.without(row)
    indices = tensor_of(gradient.indices)
    kept = array_of(indices.masked_fill(indices == row, LEFT_OUT))
    without = gradient.gradient.with_arrays(indices=kept)
    return BagTensor(without, gradient.unit, gradient.dense_shape)


def with_others(weight: Tensor, gradient: Any) -> Any:
    """The gradient of a table with what lies in ``.grad``; None for one that rests."""
    if gradient is None or is_empty(weight.grad):
        return gradient
    return weight.grad + tensor_of_rows(gradient, weight)


def no_rows(weight: Tensor) -> Tensor:
    """A sparse gradient without rows."""
    return torch.sparse_coo_tensor(tuple(weight.shape), dtype=weight.dtype)


def is_empty(gradient: Tensor | None) -> bool:
    """Whether there is no gradient, or one without rows."""
    return gradient is None or (gradient.is_sparse and parts_of(gradient)[0].shape[1] == 0)
