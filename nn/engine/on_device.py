"""The arrays of a step on a CUDA device: where it runs, and what it may find in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...kernels.storage import Storage
from ...ops.runtime import cuda
from ...ops.runtime.launch import checked_launch, launch_on
from ...ops.runtime.row_step import bad_index_error, check_keys, enqueue, row_tables
from .host import update_of
from .layout import Batch
from .plan import Call
from .reader import Gradients


def launch_calls(calls: Sequence[Call], given: Gradients) -> None:
    """Enqueue calls whose scalars the host has worked out.

    They write nothing if an index turns out to be out of range.
    """
    batches = row_batches(given)
    with checked_launch(given.arrays, error_of(given) if batches else None) as launch:
        if len(batches) > 1:  # one checks its indices before it writes
            for batch, first in batches:
                rows = given.rows_of(batch)
                tables = row_tables(batch.variables, rows, [0] * len(rows))
                cuda.rows.step.check_indices(tables, launch.guard, first, stream=launch.stream)
        first_of = {id(batch): first for batch, first in batches}
        for call in calls:
            enqueue(update_of(call), launch.after(first_of.get(id(call.batch), 0)))


@contextmanager
def launching_for(given: Gradients, *, use_locking: bool) -> Iterator[Any]:
    """The stream of a step that itself waits for the host."""
    arrays = given.arrays
    if not arrays:
        yield None
        return
    with launch_on(arrays, given.layout.lock_spans if use_locking else None) as launch:
        yield launch.stream


def are_finite(
    given: Gradients, by_storage: Sequence[tuple[Storage, np.ndarray, np.ndarray]]
) -> bool:
    """Whether all gradients are finite; the host waits for the answer."""
    arrays = given.arrays
    if not arrays:
        return True
    with launch_on(arrays, None) as launch:
        return all(
            cuda.dense.finite.all_finite(*found, stream=launch.stream) for found in by_storage
        )


def row_batches(given: Gradients) -> list[tuple[Batch, int]]:
    """The row-sparse batches of a step, and the number of positions before each.

    Raises:
        ValueError: the tables of a batch have too many rows for its sort keys.
    """
    found, first = [], 0
    for batch in given.layout.batches:
        if batch.row_sparse:
            lengths = [len(gradient.indices) for gradient in given.rows_of(batch)]
            rows = [len(arrays[0]) for arrays in batch.variables.tensors]
            check_keys(batch.labels[0], list(zip(rows, lengths, strict=True)))
            found.append((batch, first))
            first += sum(lengths)
    return found


def error_of(given: Gradients) -> Callable[[int, int], IndexError]:
    """What makes the error for a bad position of a step."""
    return bad_index_error(
        [
            (label, len(gradient.indices), len(arrays[0]))
            for batch, _ in row_batches(given)
            for label, gradient, arrays in zip(
                batch.labels, given.rows_of(batch), batch.variables.tensors, strict=True
            )
        ]
    )
