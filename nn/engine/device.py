"""Steps on a CUDA device: the host works out the scalars and enqueues the step there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...kernels.cpu.threads.parallel import commit
from ...ops.runtime import cuda, pending
from ...ops.runtime.device import launching
from ...ops.runtime.launch import launch_on
from ...ops.runtime.row_step import run_updates
from .batch import Batch, by_storage
from .host import Host
from .plan import Plan

ByBatch = Sequence[tuple[Batch, Any]]
"""Batches with their gradients: addresses of dense ones, or the row-sparse ones."""


class Device:
    """Steps of the parameters of an optimizer on a device; ``host`` counts them."""

    def __init__(self, host: Host) -> None:
        self._host, self.exclusive = host, host.exclusive

    def run(self, plan: Plan) -> None:
        """Enqueue a step, and count it.

        What it finds out of range is told by `fusestep.synchronize`, which takes the count back:
        such a step writes nothing.
        """
        given, layout, constants = plan.given, plan.given.layout, plan.method.constants
        # Nobody takes a count back while it is written.
        with pending.held():
            if layout.batches:
                arrays = given.arrays
                if plan.conditioning.is_measured:
                    with launching(arrays):
                        plan.conditioning.measure(plan.calls)
                updates: list[Any] = [call.update for call in plan.calls]
                if constants:  # of rules that measure tensors: all are dense
                    updates = [update._replace(constants=constants) for update in updates]
                run_updates(updates, arrays, plan.use_locking, self._host.undo(layout))
            commit([], self._host.count(layout))


def are_finite(by_batch: ByBatch, arrays: Sequence[Any]) -> bool:
    """Whether all gradients are finite; the host waits for the answer."""
    if not arrays:
        return True
    with launch_on(arrays) as launch:
        all_finite = cuda.dense.norm.all_finite
        return all(all_finite(*own, stream=launch.stream) for own in by_storage(by_batch))
