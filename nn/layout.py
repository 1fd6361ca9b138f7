"""How the gradients of one step lie: which kernel calls they need, and on what.

A layout depends on the kinds and dtypes of the gradients alone, so it is made once and used
for every later step with gradients of the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels.cpu import headers
from ..kernels.storage import STORAGES, Storage
from ..ops import check
from ..ops.arrays import RowTensor, address_of, adopt, check_row_gradient
from ..ops.errors import message
from ..ops.step import RowGradient, Variables
from .parameter import Parameter


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors of one kernel call: equal storage types of parameters, gradients and states.

    Attributes:
        positions: int64 ``[T]``: places of the tensors in optimizer order.
        variables: parameters and states.
        g: storage of the gradients.
        row_sparse: whether the gradients are.
        places: int64 ``[T]``: places among the dense, or the row-sparse, gradients.
    """

    positions: np.ndarray
    variables: Variables
    g: Storage
    row_sparse: bool
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class Layout:
    """The batches of a step.

    Attributes:
        batches: one for each kernel call.
        active: int64: places of all parameters that have a gradient.
        expected: the headers of the gradients where all are dense, else None.
        dense_bytes: int64: sizes of the dense gradients, in order.
        begins, ends: the memory of all active variables, sorted.
    """

    batches: tuple[Batch, ...]
    active: np.ndarray
    dense_bytes: np.ndarray
    expected: headers.Expected | None
    begins: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, eq=False)
class Gradients:
    """The checked gradients of one step.

    Attributes:
        layout: their layout.
        addresses: int64: addresses of the dense ones, in order.
        rows: the row-sparse ones, in order.
        keep: what must stay alive until the step is done.
    """

    layout: Layout
    addresses: np.ndarray
    rows: list[RowGradient]
    keep: object


Kind = tuple[bool, np.dtype[Any]] | None
"""Row-sparse or not, and the dtype; None without a gradient."""


def build_layout(kinds: Sequence[Kind], tensors: Sequence[tuple[np.ndarray, ...]]) -> Layout:
    """Group parameters (with their states) whose gradients are of these ``kinds``."""
    groups: dict[Any, list[int]] = {}
    for i, (kind, arrays) in enumerate(zip(kinds, tensors, strict=True)):
        if kind is not None:
            groups.setdefault((kind, *(a.dtype for a in arrays)), []).append(i)
    dense = [i for i, kind in enumerate(kinds) if kind is not None and not kind[0]]
    sparse = [i for i, kind in enumerate(kinds) if kind is not None and kind[0]]
    batches = []
    for ((row_sparse, dtype), *_), positions in groups.items():
        place = {i: k for k, i in enumerate(sparse if row_sparse else dense)}
        batches.append(
            Batch(
                np.array(positions),
                Variables.of([tensors[i] for i in positions]),
                STORAGES[dtype],
                row_sparse,
                np.array([place[i] for i in positions]),
            )
        )
    expected = None
    if len(dense) == len(kinds) and headers.usable():
        dtypes = [kind[1] for kind in kinds if kind is not None]
        expected = headers.Expected(dtypes, [arrays[0].shape for arrays in tensors])
    dense_bytes = [
        arrays[0].size * kind[1].itemsize
        for kind, arrays in zip(kinds, tensors, strict=True)
        if kind is not None and not kind[0]
    ]
    active = sorted(dense + sparse)
    spans = sorted(
        (address_of(a), address_of(a) + a.nbytes) for i in active for a in tensors[i] if a.size
    )
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T.copy()
    return Layout(
        tuple(batches),
        np.array(active, np.int64),
        np.array(dense_bytes, np.int64),
        expected,
        begins,
        ends,
    )


def shares_memory(layout: Layout, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each range of bytes, whether it overlaps a variable of the layout."""
    # Variables do not overlap: the last one that begins before a range ends decides.
    last = np.searchsorted(layout.begins, ends, side="left") - 1
    before = layout.ends[last] if len(layout.ends) else np.zeros(len(last), np.int64)
    return (last >= 0) & (before > begins) & (ends > begins)


def read_gradient(where: str, parameter: Parameter, gradient: Any) -> np.ndarray | RowGradient:
    """The checked, contiguous form of one gradient that is not None.

    Raises:
        TypeError: its kind or dtype does not fit.
        ValueError: its shape does not fit.
    """
    name = f"gradient of {parameter.name!r}"
    rows = _as_rows(where, name, gradient)
    if rows is None:
        array = adopt(where, name, gradient)
        _check_floating(where, name, array)
        if array.shape != parameter.shape:
            raise ValueError(
                message(where, name, "has a wrong shape", parameter.shape, array.shape)
            )
        return check.contiguous(array)
    if parameter.ndim == 0:
        raise ValueError(
            message(where, name, "is row-sparse", "a dense gradient", "a 0-d parameter")
        )
    if rows.dense_shape != parameter.shape:
        raise ValueError(
            message(where, name, "has a wrong dense_shape", parameter.shape, rows.dense_shape)
        )
    _check_floating(where, name, rows.values)
    check_row_gradient(where, name, rows.indices, rows.values, parameter.shape)
    return RowGradient.of(check.contiguous(rows.indices), check.contiguous(rows.values))


def _check_floating(where: str, name: str, array: np.ndarray) -> None:
    if array.dtype not in check.FLOATS:
        raise TypeError(message(where, name, "has a wrong dtype", "a floating dtype", array.dtype))


def _as_rows(where: str, name: str, gradient: Any) -> RowTensor | None:
    """A `RowTensor`, a list of them (concatenated) or a torch sparse COO tensor; else None."""
    if isinstance(gradient, RowTensor):
        return gradient
    if isinstance(gradient, list | tuple):
        return _concatenate(where, name, gradient)
    if getattr(gradient, "is_sparse", False):
        return _from_torch(where, name, gradient)
    return None


def _concatenate(where: str, name: str, parts: Sequence[Any]) -> RowTensor:
    if not parts or not all(isinstance(part, RowTensor) for part in parts):
        got = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise TypeError(message(where, name, "is no gradient", "an array or RowTensors", got))
    if len({(part.dense_shape, part.values.dtype) for part in parts}) > 1:
        raise ValueError(
            message(where, name, "has parts that differ", "one dense_shape and dtype", list(parts))
        )
    return RowTensor(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.values for part in parts]),
        parts[0].dense_shape,
    )


def _from_torch(where: str, name: str, tensor: Any) -> RowTensor:
    # The accessors with an underscore also work on a tensor that is not coalesced.
    indices = tensor._indices()
    if len(indices) != 1:
        raise ValueError(
            message(where, name, "has a wrong layout", "1 sparse dimension", len(indices))
        )
    return RowTensor(indices[0].numpy(), tensor._values().detach().numpy(), tuple(tensor.shape))
