"""Gradients sorted by what one kernel call takes together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...kernels.storage import STORAGES, Storage
from ...kernels.tables import RowTable
from .arrays import RowTensor, address_of

ByStorage = tuple[dict[Storage, list[Any]], dict[Storage, dict[int, RowTensor]]]


def by_storage(gradients: Sequence[Any]) -> ByStorage:
    """Dense gradients, and row-sparse ones by their places; None is left out."""
    dense: dict[Storage, list[Any]] = {}
    rows: dict[Storage, dict[int, RowTensor]] = {}
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, RowTensor):
            rows.setdefault(STORAGES[gradient.dtype], {})[i] = gradient
        elif gradient is not None:
            dense.setdefault(STORAGES[gradient.dtype], []).append(gradient)
    return dense, rows


def gradient_table(t: RowTensor, hp: int = 0) -> RowTable:
    """A table of which there is the gradient alone; ``hp`` is the address of its scalars."""
    return RowTable(
        addresses=(),
        hp=hp,
        rows=t.dense_shape[0],
        width=math.prod(t.dense_shape[1:]),
        indices=address_of(t.indices),
        index_bytes=t.indices.itemsize,
        length=len(t.indices),
        values=address_of(t.values),
    )
