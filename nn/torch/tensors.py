"""PyTorch's tensors as the arrays of a step, without a copy where that is possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import RowGradient

DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of parameters, states and gradients."""
DTYPE_NAMES = ", ".join(map(str, DTYPES))


def number(value: Any) -> float:
    """A hyper-parameter: a number or a tensor of one element, which may require a gradient."""
    return float(value.item() if isinstance(value, Tensor) else value)


def local(tensor: Tensor) -> Tensor:
    """The shard of a distributed tensor that is here; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_part(parameter: Tensor) -> bool:
    """Whether other processes have the rest of it."""
    shard = getattr(parameter, "row_shard", None)
    return local(parameter) is not parameter or (shard is not None and shard.comm.size > 1)


def array_of(tensor: Tensor) -> Any:
    """The array of a contiguous tensor: of NumPy, or on a CUDA device."""
    if tensor.is_cuda:
        return adopt_anywhere("a tensor", "on a device", tensor)
    detached = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has none
        return detached.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return detached.numpy()


def tensor_of(array: Any) -> Tensor:
    """The tensor of a contiguous array of the host, or of PyTorch's on a device."""
    if isinstance(array, DeviceArray):
        found: Tensor = array.owner
        return found
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor fills its memory; None where it does not."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def fits_order(tensor: Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor fills its memory in this order of dimensions."""
    return bool(tensor.permute(tuple(order)).is_contiguous())


def flat(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The elements of a tensor of this order of dimensions, as they lie in memory."""
    return tensor.detach().permute(tuple(order))


def rows_of(where: str, name: str, parameter: Tensor, gradient: Tensor) -> RowGradient:
    """The indices and values of a sparse gradient, coalesced or not.

    Raises:
        RuntimeError: it is of another shape, or has no sparse dimension.
        IndexError: it has several, and an index is out of range.
    """
    if gradient.shape != parameter.shape:
        reject_shape(where, name, tuple(parameter.shape), gradient)
    # Those without an underscore refuse a gradient with duplicates.
    indices, values = gradient._indices(), gradient._values()
    n_sparse, sizes = len(indices), parameter.shape
    if n_sparse == 1:
        indices = indices[0]
    elif n_sparse == 0 or values.dim() - 1 + n_sparse != len(sizes):
        expected, got = "at least 1 sparse dimension", n_sparse
        reject(RuntimeError, where, name, "has a wrong layout", expected, got)
    else:  # the row of a table with as many rows as these dimensions have elements
        most = torch.tensor(sizes[:n_sparse])[:, None].to(indices.device)
        if ((indices < 0) | (indices >= most)).any():
            reject(IndexError, where, name, "has an index out of range", tuple(sizes), indices)
        steps = [math.prod(sizes[k + 1 : n_sparse]) for k in range(n_sparse)]
        indices = (indices * torch.tensor(steps)[:, None].to(indices.device)).sum(0)
    if values.dtype not in DTYPES:
        reject(RuntimeError, where, name, "has a wrong dtype", "a floating dtype", values.dtype)
    # What a `ShardedEmbedding` has received; a gradient of several backwards is in no such order.
    of_batch = getattr(parameter, "row_positions", None)
    if of_batch is None or len(of_batch[0]) != len(values):
        of_batch = ()
    arrays = array_of(indices.contiguous()), array_of(values.contiguous())
    return RowGradient.of(*arrays, *of_batch)


def table_shape(gradient: Tensor) -> tuple[int, ...]:
    """That of the parameter as a table: the sparse dimensions of a gradient number its rows."""
    n_sparse = gradient.sparse_dim()
    return math.prod(gradient.shape[:n_sparse]), *gradient.shape[n_sparse:]


def reject_shape(where: str, name: str, expected: tuple[int, ...], tensor: Tensor) -> None:
    """Say that a tensor has not the shape that it should have."""
    reject(RuntimeError, where, name, "has a wrong shape", expected, tuple(tensor.shape))


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Where the memory of a tensor begins and ends."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    size = (last + 1) * tensor.element_size() if math.prod(tensor.shape) else 0
    return begin, begin + size
