"""The global norm of gradients on a CUDA device, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...kernels.element import kernel
from ...kernels.rules.norm import SCALED
from ...kernels.storage import STORAGES, Storage, real_of
from . import pending
from .arrays import RowTensor
from .device import DeviceArray
from .device_step import Launch, checked, launch_on
from .gradient_kinds import by_storage, gradient_table
from .row_step import bad_index_error, check_keys

Gradient = DeviceArray | RowTensor


def squares(where: str, gradients: Sequence[Gradient | None]) -> float:
    """The sum of squares of all gradients; the host waits for it.

    Raises:
        IndexError: an index of a `RowTensor` is out of range.
    """
    with _global_norm(where, gradients, 1.0) as norm:
        total: float = norm.squares()
    if any(isinstance(gradient, RowTensor) for gradient in gradients):
        pending.settle()
    return total


def clipped(where: str, gradients: Sequence[Gradient | None], limit: float) -> tuple[Any, ...]:
    """The gradients times ``limit / max(norm, limit)``, as new ones; nothing is waited for."""
    from ...kernels.cuda.dense.norm import DenseGradients

    results = [_empty_like(gradient) for gradient in gradients]
    with _global_norm(where, gradients, limit) as norm:
        for storage, pairs in _pairs(gradients, results).items():
            given, made = zip(*pairs, strict=True)
            norm.scale(DenseGradients(storage, *_described(given)), _described(made)[0])
    return tuple(_handed_out(g, r) for g, r in zip(gradients, results, strict=True))


def scaled(gradients: Sequence[Gradient | None], factor: float) -> tuple[Any, ...]:
    """The gradients times a factor, as new ones."""
    from .step import tensor_step

    results = [_empty_like(gradient) for gradient in gradients]
    for pairs in _pairs(gradients, results).values():
        for given, made in pairs:
            addresses = [made.address, given.address]
            tensor_step(SCALED, (), (made, given), addresses, [factor])
    return tuple(_handed_out(g, r) for g, r in zip(gradients, results, strict=True))


def _values(gradient: Gradient) -> DeviceArray:
    values: DeviceArray = gradient.values if isinstance(gradient, RowTensor) else gradient
    return values


def _empty_like(gradient: Gradient | None) -> DeviceArray | None:
    return None if gradient is None else _values(gradient).empty_like()


def _handed_out(gradient: Gradient | None, result: DeviceArray | None) -> Any:
    """A result in the form of the gradient: an array of its framework, or a `RowTensor`."""
    if gradient is None or result is None:
        return None
    if isinstance(gradient, RowTensor):
        return RowTensor(gradient.indices, result, gradient.dense_shape)
    return result.native()


def _pairs(
    gradients: Sequence[Gradient | None], results: Sequence[DeviceArray | None]
) -> dict[Storage, list[tuple[DeviceArray, DeviceArray]]]:
    """Arrays and their results, by storage type."""
    found: dict[Storage, list[tuple[DeviceArray, DeviceArray]]] = {}
    for gradient, result in zip(gradients, results, strict=True):
        if gradient is not None and result is not None:
            values = _values(gradient)
            found.setdefault(STORAGES[values.dtype], []).append((values, result))
    return found


def _described(arrays: Sequence[DeviceArray]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and sizes."""
    addresses = np.array([array.address for array in arrays], np.int64)
    return addresses, np.array([array.size for array in arrays], np.int64)


@contextmanager
def _global_norm(where: str, gradients: Sequence[Gradient | None], limit: float) -> Iterator[Any]:
    """The enqueued norm of all gradients."""
    from ...kernels.cuda.dense.norm import DenseGradients, global_norm

    dense, rows = by_storage(gradients)
    for by_place in rows.values():
        check_keys(where, [(t.dense_shape[0], len(t.indices)) for t in by_place.values()])
    arrays = [_values(gradient) for gradient in gradients if gradient is not None]
    arrays += [t.indices for by_place in rows.values() for t in by_place.values()]
    with ExitStack() as stack:
        launch = stack.enter_context(launch_on(arrays, None))
        launch = stack.enter_context(checked(arrays[0].device, launch, _error(where, rows)))
        of_dense = [DenseGradients(g, *_described(found)) for g, found in dense.items()]
        of_rows = _row_squares(rows, launch)
        yield stack.enter_context(global_norm(of_dense, of_rows, limit, launch.stream))


def _error(
    where: str, rows: dict[Storage, dict[int, RowTensor]]
) -> Callable[[int, int], IndexError] | None:
    if not rows:
        return None
    return bad_index_error(
        [
            (f"{where}: x[{i}]", len(t.indices), t.dense_shape[0])
            for by_place in rows.values()
            for i, t in by_place.items()
        ]
    )


def _row_squares(rows: dict[Storage, dict[int, RowTensor]], launch: Launch) -> list[Any]:
    """What is to be summed of row-sparse gradients, by storage type."""
    from ...kernels.cuda.rows.step import RowSquares

    found, base = [], 0
    for g, by_place in rows.items():
        tables = [gradient_table(t) for t in by_place.values()]
        compiled = kernel(SCALED, (), real_of(g), g, ())
        found.append(RowSquares(compiled, tables, launch.call, base))
        base += sum(table.length for table in tables)
    return found
