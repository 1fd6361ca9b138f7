"""The arrays of a step on a CUDA device: where it runs, and what it may find in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...kernels.storage import Storage
from ...ops.runtime import pending
from ...ops.runtime.device_step import all_finite, checked, launch_on
from ...ops.runtime.row_step import bad_index_error, check_keys, check_rows_on_device, row_step
from ...ops.runtime.step import dense_step
from .layout import Batch
from .plan import Call
from .reader import Gradients


def launch_calls(calls: Sequence[Call], given: Gradients) -> None:
    """Enqueue calls whose scalars the host has worked out.

    They write nothing if an index turns out to be out of range.
    """
    arrays, batches = given.arrays, row_batches(given)
    error = error_of(given) if batches else None
    with (
        pending.held(),  # before the order of streams is held, as in operators
        launch_on(arrays, None) as launch,
        checked(arrays[0].device, launch, error) as guarded,
    ):
        if len(batches) > 1:  # one checks its indices before it writes
            for batch, first in batches:
                check_rows_on_device(batch.variables, given.rows_of(batch), guarded.after(first))
        first_of = {id(batch): first for batch, first in batches}
        for call in calls:
            batch = call.batch
            arguments = call.rule, call.prologue, batch.variables
            if batch.row_sparse:
                row_step(
                    batch.labels,
                    *arguments,
                    call.gradients,
                    call.hp,
                    call.hp_of.tolist(),
                    touched_only=call.touched_only,
                    launch=guarded.after(first_of[id(batch)]),
                )
            else:
                dense_step(*arguments, call.gradients, batch.g, call.hp, call.hp_of, launch=guarded)


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
        return all(all_finite(*found, launch) for found in by_storage)


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
