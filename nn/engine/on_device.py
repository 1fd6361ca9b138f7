"""The arrays of a step on a CUDA device: where it runs, and what it may find in them."""

from __future__ import annotations

from collections.abc import Sequence

from ...ops.runtime import cuda
from ...ops.runtime.launch import checked_launch, launch_on
from ...ops.runtime.row_step import BadIndex, IndexList, Update, bad_index_error, row_tables
from .layout import Batch
from .reader import Gradients, by_storage, index_lists


def launch_updates(updates: Sequence[Update], given: Gradients) -> None:
    """Enqueue the updates of the batches, whose scalars the host has worked out.

    They write nothing if an index turns out to be out of range.
    """
    batches, error = row_batches(given)
    with checked_launch(given.arrays, error if batches else None) as launch:
        if len(batches) > 1:  # one checks its indices before it writes
            for batch, first in batches.items():
                tables = row_tables(batch.variables, given.rows_of(batch))
                cuda.rows.step.check_indices(tables, launch.guard, first, stream=launch.stream)
        for batch, update in zip(given.layout.batches, updates, strict=True):
            update.enqueue(launch._replace(base=batches.get(batch, 0)))


def are_finite(given: Gradients) -> bool:
    """Whether all gradients are finite; the host waits for the answer."""
    arrays = given.arrays
    if not arrays:
        return True
    with launch_on(arrays, None) as launch:
        all_finite = cuda.dense.finite.all_finite
        arrays_of = by_storage(given.by_batch)
        return all(all_finite(*found, stream=launch.stream) for found in arrays_of)


def row_batches(given: Gradients) -> tuple[dict[Batch, int], BadIndex]:
    """The row-sparse batches of a step, with the positions before each, and their error.

    Raises:
        ValueError: the tables of a batch have too many rows for its sort keys.
    """
    found: dict[Batch, int] = {}
    lists: list[IndexList] = []
    for batch in given.layout.batches:
        if batch.row_sparse:
            found[batch] = sum(own.length for own in lists)
            lists += index_lists(batch, given.rows_of(batch))
    return found, bad_index_error(lists)
