"""One step of Adafactor on any number of tensors on the device, enqueued on a stream.

Matrices take three passes over their elements: sums of squares over rows and columns, the sizes of
directions and parameters, and the update. What follows from a pass is computed on the device before
the next one. Vectors take two passes, of which the first is that of any two-stage rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..blocks import Kernel
from ..factored_blocks import FactoredKernel
from . import dense, factored_layout, tensor_table
from .factored_layout import FactoredTables
from .factored_lines import lines_kernel, row_factors_kernel
from .factored_passes import direction_kernel, update_kernel
from .factored_sums import squares_kernel
from .launch import on_grid
from .measure import SUMS_BYTES
from .memory import Places, copy_scalars_and_table, room_of
from .sizes import Options, sizes_kernel

_WIDEST = 16  # bytes of a load


def length_of(kernel: FactoredKernel) -> int:
    """Elements of a thread's widest loads."""
    storages = (kernel.w, kernel.g, *([kernel.s] if kernel.s else []))
    return _WIDEST // min(storage.itemsize for storage in storages)


def vectors_update(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp: np.ndarray,
    options: Options,
    *,
    guard: int = 0,
    complete: Callable[[np.ndarray], None] | None = None,
    stream: Any,
) -> None:
    """Enqueue one step on tensors whose second moments are kept in full, in place.

    Args:
        kernel: of a rule of Adafactor.
        addresses: as `dense.dense_update`.
        gradients: as `dense.dense_update`.
        sizes: as `dense.dense_update`.
        hp: ``[T, F]``: scalars of each tensor, on the host; the device completes them.
        options: what all tensors have in common.
        guard: as `dense.dense_update`.
        complete: as `dense.dense_update`.
        stream: of Numba.
    """
    dense.dense_update(
        kernel,
        addresses,
        gradients,
        sizes,
        hp,
        np.arange(len(sizes)),
        guard=guard,
        complete=complete,
        second_loop=sizes_kernel(kernel.real, options, dense.THREADS, tensor_table.ROW_BYTES),
        stream=stream,
    )


def matrices_update(
    kernel: FactoredKernel,
    tables: FactoredTables,
    gradients: np.ndarray,
    hp: np.ndarray,
    options: Options,
    *,
    guard: int = 0,
    complete: Callable[[np.ndarray], None] | None = None,
    stream: Any,
) -> None:
    """Enqueue one step on matrices, in place.

    Args:
        kernel: the storage types.
        tables: the tensors, for the `length_of` the kernel.
        gradients: int64 ``[T]``, on the device.
        hp: ``[T, F]``: scalars of each tensor, on the host; the device completes them.
        options: what all tensors have in common.
        guard: as `dense.dense_update`.
        complete: as `dense.dense_update`.
        stream: of Numba.
    """
    scalars, places = np.ascontiguousarray(hp), Places()
    places.add(scalars.nbytes)
    at_tables, at_sums = places.add(tables.size), places.add(tables.n_blocks * SUMS_BYTES)
    at_scratch = places.add(tables.scratch)
    with room_of(stream) as room:
        base = room.take(places.size)
        hp_addresses = base + np.arange(len(scalars)) * scalars.strides[0]
        content = tables.at(base + at_scratch, gradients, hp_addresses)
        copy_scalars_and_table(base, scalars, at_tables, content, stream)
        if complete is not None:
            complete(hp_addresses)
        enqueue(kernel, tables, base + at_tables, base + at_sums, options, guard, stream)


def enqueue(
    kernel: FactoredKernel,
    tables: FactoredTables,
    table: int,
    sums: int,
    options: Options,
    guard: int,
    stream: Any,
) -> None:
    """Enqueue the loops of a step whose tables and scalars are on the device.

    Args:
        kernel: as `matrices_update`.
        tables: as `matrices_update`.
        table: address of both tables.
        sums: address of room for `SUMS_BYTES` of each block.
        options: as `matrices_update`.
        guard: as `matrices_update`.
        stream: of Numba.
    """
    prologue, w, g, real = kernel.prologue, kernel.w, kernel.g, kernel.real
    length, threads, n = length_of(kernel), factored_layout.THREADS, tables.n_tensors
    lines = table + n * factored_layout.ROW_BYTES

    def launch(loop: Any, blocks: int, *arguments: int) -> None:
        on_grid(loop, blocks, threads, stream)(*arguments, guard)

    squares = squares_kernel(prologue, w, g, length, threads, factored_layout.ROUNDS)
    launch(squares, tables.n_blocks, table, n)
    launch(lines_kernel(prologue, real, threads), tables.n_line_blocks, lines, 2 * n)
    launch(row_factors_kernel(prologue, real, threads), tables.n_chunk_blocks, lines, n)
    direction = direction_kernel(prologue, w, g, length, threads, options.scale_parameter)
    launch(direction, tables.n_blocks, table, n, sums)
    sizes = sizes_kernel(real, options, threads, factored_layout.ROW_BYTES)
    launch(sizes, n, table, n, tables.n_blocks, sums)
    launch(update_kernel(prologue, w, g, kernel.s, length, threads), tables.n_blocks, table, n)
