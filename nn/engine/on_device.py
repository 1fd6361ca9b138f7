"""The arrays of a step on a CUDA device: where it runs, and what it may find in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ops.runtime import cuda
from ...ops.runtime.launch import checked_launch, launch_on
from ...ops.runtime.row_step import BadIndex, IndexList, Update, bad_index_error, row_tables
from .layout import Batch
from .reader import by_storage, index_lists

ByBatch = Sequence[tuple[Batch, Any]]
"""Batches with their gradients: addresses of dense ones, or the row-sparse ones."""


def launch_updates(updates: Sequence[Update], by_batch: ByBatch, arrays: Sequence[Any]) -> None:
    """Enqueue the updates of the batches, whose scalars the host has worked out.

    They write nothing if an index turns out to be out of range. ``arrays`` are all of the step; a
    parameter first, which decides the stream.
    """
    batches, error = row_batches(by_batch)
    with checked_launch(arrays, error if batches else None) as launch:
        if len(batches) > 1:  # one checks its indices before it writes
            for batch, gradients in by_batch:
                if batch.row_sparse:
                    tables, first = row_tables(batch.variables, gradients), batches[batch]
                    cuda.rows.step.check_indices(tables, launch.guard, first, stream=launch.stream)
        for (batch, _), update in zip(by_batch, updates, strict=True):
            update.enqueue(launch._replace(base=batches.get(batch, 0)))


def are_finite(by_batch: ByBatch, arrays: Sequence[Any]) -> bool:
    """Whether all gradients are finite; the host waits for the answer."""
    if not arrays:
        return True
    with launch_on(arrays, None) as launch:
        all_finite = cuda.dense.finite.all_finite
        return all(all_finite(*own, stream=launch.stream) for own in by_storage(by_batch))


def row_batches(by_batch: ByBatch) -> tuple[dict[Batch, int], BadIndex]:
    """The row-sparse batches of a step, with the positions before each, and their error.

    Raises:
        ValueError: the tables of a batch have too many rows for its sort keys.
    """
    found: dict[Batch, int] = {}
    lists: list[IndexList] = []
    for batch, gradients in by_batch:
        if batch.row_sparse:
            found[batch] = sum(own.length for own in lists)
            lists += index_lists(batch, gradients)
    return found, bad_index_error(lists)
