"""The global norm of gradients on a CUDA device, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...kernels.element import kernel
from ...kernels.rules.norm import SCALED
from ...kernels.storage import Storage, real_of
from ...kernels.tables import RowTable, table_sizes
from . import cuda, pending
from .device import DeviceArray, Launch, launching
from .launch import launch_on
from .row_forms import by_storage, index_lists, row_gradient, values_by_storage, values_of
from .row_step import IndexList, bad_index_error, check_lists
from .row_tensor import RowTensor

Gradient = DeviceArray | RowTensor


def squares(where: str, gradients: Sequence[Gradient | None]) -> float:
    """The sum of squares of all gradients; the host waits for it."""
    with _global_norm(where, gradients, 1.0) as norm:
        total: float = norm.squares()
    if any(isinstance(gradient, RowTensor) for gradient in gradients):
        pending.settle()
    return total


def clip(
    where: str, gradients: Sequence[Gradient | None], results: Sequence[Gradient | None],
    limit: float,
) -> None:  # fmt: skip
    """Write the gradients times ``limit / max(norm, limit)``; nothing is waited for.

    Where they are their own results, nothing is written if the factor is 1 or an index is bad.
    """
    made = values_by_storage(results)
    with _global_norm(where, gradients, limit) as norm:
        for storage, given in values_by_storage(gradients).items():
            dense = cuda.dense.norm.DenseGradients(storage, *_described(given))
            norm.scale(dense, _described(made[storage])[0], in_place=results is gradients)


def _described(arrays: Sequence[DeviceArray]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and sizes."""
    addresses = np.array([array.address for array in arrays], np.int64)
    return addresses, np.array([array.size for array in arrays], np.int64)


def squares_at(
    like: DeviceArray, storage: Storage, addresses: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """The float64 sum of squares of each of some contiguous arrays on the device of ``like``.

    They are given by int64 addresses and numbers of elements. The host waits for the sums.
    """
    norm = cuda.dense.norm
    with launching([like]) as launch:
        given = norm.DenseGradients(storage, addresses, sizes)
        found: np.ndarray = norm.squares(given, launch.stream)
    return found


@contextmanager
def _global_norm(where: str, gradients: Sequence[Gradient | None], limit: float) -> Iterator[Any]:
    """The enqueued norm of all gradients."""
    dense, rows = by_storage(gradients)
    lists: list[IndexList] = []
    for by_place in rows.values():
        lists += index_lists(where, by_place)
        check_lists(where, lists[-len(by_place) :])
    arrays = [values_of(gradient) for gradient in gradients if gradient is not None]
    arrays += [t.indices for by_place in rows.values() for t in by_place.values()]
    with launch_on(arrays, bad_index_error(lists) if lists else None) as launch:
        norm = cuda.dense.norm
        dense_gradients = [norm.DenseGradients(g, *_described(found)) for g, found in dense.items()]
        row_squares = _row_squares(rows, launch)
        call = launch.stream, launch.guard
        with norm.global_norm(dense_gradients, row_squares, limit, *call) as enqueued:
            yield enqueued


def _row_squares(rows: dict[Storage, dict[int, RowTensor]], launch: Launch) -> list[Any]:
    """Sums of squares of row-sparse gradients, to be enqueued, by storage type."""
    found, base = [], 0
    for g, by_place in rows.items():
        sizes = table_sizes(tensor.dense_shape for tensor in by_place.values())
        tables = [
            RowTable((), n, width, row_gradient(tensor).source)
            for tensor, (n, width) in zip(by_place.values(), sizes.tolist(), strict=True)
        ]
        compiled = kernel(SCALED, (), real_of(g), g, ())
        found.append(cuda.rows.step.RowSquares(compiled, tables, launch.guard, base))
        base += sum(table.length for table in tables)
    return found
