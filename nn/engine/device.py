"""Steps on a CUDA device: the host works out the scalars and enqueues the step there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ...kernels.cpu.threads.parallel import commit
from ...ops.runtime import cuda, pending
from ...ops.runtime.device import launching
from ...ops.runtime.launch import checked_launch, launch_on
from ...ops.runtime.locks import Span
from ...ops.runtime.row_step import BadIndex, IndexList, Update, bad_index_error, row_tables
from .host import Host, conditioned
from .layout import Batch
from .plan import Plan
from .reader import by_storage, index_lists

ByBatch = Sequence[tuple[Batch, Any]]
"""Batches with their gradients: addresses of dense ones, or the row-sparse ones."""


class Device:
    """Steps of the parameters of an optimizer on a device; ``host`` counts them."""

    works_on_host = False

    def __init__(self, host: Host) -> None:
        self._host, self.turn = host, host.turn

    def run(self, plan: Plan) -> None:
        """Enqueue a step, and count it.

        What it finds out of range is told by `fusestep.synchronize`, which takes the count back:
        such a step writes nothing.
        """
        given, layout, constants = plan.given, plan.given.layout, plan.update.constants
        # Nobody takes a count back while it is written.
        with pending.held():
            if layout.batches:
                arrays, is_measured = given.arrays, plan.conditioning.is_measured
                with launching(arrays) if is_measured else nullcontext():
                    updates: list[Any] = [conditioned(call, plan) for call in plan.calls]
                if constants:  # of rules that measure tensors: all are dense
                    updates = [update._replace(constants=constants) for update in updates]
                launch_updates(
                    updates, given.by_batch, arrays,
                    layout.lock_spans if plan.use_locking else None,
                    self._host.undo(layout),
                )  # fmt: skip
            commit([], self._host.count(layout))


def launch_updates(
    updates: Sequence[Update], by_batch: ByBatch, arrays: Sequence[Any],
    lock_spans: list[Span] | None = None, undo: Any = None,
) -> None:  # fmt: skip
    """Enqueue the updates of the batches, whose scalars the host has worked out.

    They write nothing if an index turns out to be out of range; ``undo`` is called then. ``arrays``
    are all of the step; a parameter first, which decides the stream.
    """
    batches, error = row_batches(by_batch)

    def found(position: int, index: int) -> IndexError:
        if undo is not None:
            undo()
        return error(position, index)

    with checked_launch(arrays, found if batches else None, lock_spans) as launch:
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
