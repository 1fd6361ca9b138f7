"""Steps on the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from ...kernels.cpu.counts import Count
from ...kernels.cpu.process.forks import in_child
from ...kernels.cpu.rows.write import NumberWrite
from ...kernels.cpu.threads.parallel import Prepared, commit
from ...ops.runtime import locks
from ...ops.runtime.arrays import address_of
from ...ops.runtime.measured_step import measured_step, measured_together
from .layout import KernelCall, Layout
from .plan import Counts, Plan, StepMethod


class Host:
    """Steps of the parameters of an optimizer on the host."""

    def __init__(self, where: str, counts: Counts) -> None:
        self._where, self.counts, self._lock = where, counts, threading.RLock()
        _living.add(self)
        self._counted: tuple[Layout, Count] | None = None

    def turn(self) -> Any:
        """One step after the other: the scalars follow from the number of steps before."""
        return locks.entered(self._lock, self._where)

    def run(self, plan: Plan) -> None:
        """Write and count, in one compiled call after all that can fail.

        With locking, also what is measured is measured while no other such call writes.
        """
        known, layout = self._counted, plan.given.layout  # as in `count`, without a call
        count = known[1] if known is not None and known[0] is layout else self.count(layout)
        if plan.use_locking:
            with locks.turn():
                _write(plan, count)
        else:
            _write(plan, count)

    def count(self, layout: Layout) -> Count:
        """The count of a step with gradients of this layout; the last one is kept."""
        known = self._counted  # another thread may exchange it meanwhile
        if known is None or known[0] is not layout:
            active = None if layout.is_complete else layout.active
            total = self.counts.global_step
            known = self._counted = layout, Count(self.counts.steps, active, total)
        return known[1]

    def undo(self, layout: Layout) -> Callable[[], None]:
        """A function that takes back the count of a step with gradients of this layout."""
        total, _, steps = self.counts

        def undo() -> None:
            steps[layout.active] -= 1
            total[0] -= 1

        return undo


_prepared, _update_of = methodcaller("prepared"), attrgetter("update")
_living: weakref.WeakSet[Host] = weakref.WeakSet()


@in_child
def _release_locks() -> None:
    # A thread that held a lock in the parent does not exist here.
    for host in list(_living):
        host._lock = threading.RLock()


def prepared(calls: Sequence[KernelCall], method: StepMethod) -> list[Prepared]:
    """The updates of calls, ready for `commit`; what their rule measures is measured here."""
    if not method.rule.is_two_stage:
        return [*map(_prepared, map(_update_of, calls))]
    updates: list[Any] = [call.update for call in calls]  # all dense
    known = dict(method.constants)
    return [measured_step(update, [known] * len(update.gradients)) for update in updates]


def _write(plan: Plan, count: Count) -> None:
    if plan.conditioning.is_measured:
        plan.conditioning.measure(plan.calls)
    method, calls = plan.method, plan.calls
    if method.rule.scope != "step":
        ready = prepared(calls, method)
        commit([*plan.behind, *ready] if plan.behind else ready, count)
        return
    if not calls:  # no tensor has a gradient
        return
    constants = {**dict(method.constants), **{k: x.item() for k, x in method.numbers.items()}}
    # All dense: of row-sparse gradients no such sums are taken.
    dense: list[Any] = [call.update for call in calls]
    found = measured_together(dense, [call.batch.positions for call in calls], constants)
    # A rule that rests (Prodigy while its sums are 0) writes and counts nothing. Else its numbers
    # are written with the loops: an interrupt must not find the one without the other.
    if found is not None:
        values, steps = found
        new = zip(method.numbers.values(), values, strict=True)
        numbers = NumberWrite([(address_of(array), np.array([x])) for array, x in new])
        commit([*steps, numbers], count)
