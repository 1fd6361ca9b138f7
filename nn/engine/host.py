"""Steps on the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...kernels.cpu.counts import Count
from ...kernels.cpu.process.forks import in_child
from ...kernels.cpu.rows.write import NumberWrite
from ...kernels.cpu.threads.parallel import Prepared, commit
from ...ops.runtime import locks
from ...ops.runtime.arrays import address_of
from ...ops.runtime.measured_step import Constants, measured_step, measured_together
from .batch import KernelCall
from .layout import Layout
from .plan import Plan


class Host:
    """Steps of the parameters of an optimizer on the host.

    ``total`` (int32 ``[1]``) counts its steps, ``steps`` (int64 ``[P]``) those of each parameter.
    """

    def __init__(self, where: str, total: np.ndarray, steps: np.ndarray) -> None:
        self._where, self._total, self._steps = where, total, steps
        self._lock = threading.RLock()
        _living.add(self)
        self._counted: tuple[Layout, Count] | None = None

    def exclusive(self) -> Any:
        """One step after the other: the scalars follow from the number of steps before."""
        return locks.entered(self._lock, self._where)

    def run(self, plan: Plan) -> None:
        """Write and count, in one compiled call after all that can fail.

        With locking, also what is measured is measured while no other such call writes.
        """
        if plan.use_locking:
            with locks.exclusive():
                self.run(plan._replace(use_locking=False))
            return
        if plan.conditioning.is_measured:
            plan.conditioning.measure(plan.calls)
        method, calls = plan.method, plan.calls
        if not calls and method.numbers:  # no tensor has a gradient: a rule of all of them rests
            return
        count, found = self.count(plan.given.layout), ready(calls, method.constants_of_step)
        if found is None:
            return
        updates, new = found
        if new is not None:  # with the loops: an interrupt must not find one without the other
            pairs = zip(method.numbers.values(), new, strict=True)
            updates.append(NumberWrite([(address_of(array), np.array([x])) for array, x in pairs]))
        commit([*plan.behind, *updates] if plan.behind else updates, count)

    def count(self, layout: Layout) -> Count:
        """The count of a step with gradients of this layout; the last one is kept."""
        known = self._counted  # another thread may exchange it meanwhile
        if known is None or known[0] is not layout:
            active = None if layout.is_complete else layout.active
            known = self._counted = layout, Count(self._steps, active, self._total)
        return known[1]

    def undo(self, layout: Layout) -> Callable[[], None]:
        """A function that takes back the count of a step with gradients of this layout."""
        total, steps = self._total, self._steps

        def undo() -> None:
            steps[layout.active] -= 1
            total[0] -= 1

        return undo


_living: weakref.WeakSet[Host] = weakref.WeakSet()


@in_child
def _release_locks() -> None:
    # A thread that held a lock in the parent does not exist here.
    for host in list(_living):
        host._lock = threading.RLock()


def ready(
    calls: Iterable[KernelCall], constants_of_step: Callable[[], Constants]
) -> tuple[list[Prepared], np.ndarray | None] | None:
    """The updates of calls on the host, ready for `commit`; what their rules measure is measured.

    ``constants_of_step()`` are the numbers that a rule takes which measures all tensors of a step.
    Such a rule gives new numbers of the optimizer, or, where it rests, None for everything.
    """
    updates: list[Prepared] = []  # ``list[...]()`` takes as long as the rest of this
    joint: list[Any] = []
    places: list[np.ndarray] = []
    for call in calls:
        rule, update = call.batch.rule, call.update
        if not rule.is_two_stage:
            updates.append(update.prepared())
        elif rule.scope == "step":
            joint.append(update)
            places.append(call.batch.positions)
        else:
            updates.append(measured_step(update, call.constants))  # type: ignore[arg-type]  # dense
    if not joint:
        return updates, None
    measured = measured_together(joint, places, constants_of_step())
    return measured and ([*updates, *measured[1]], measured[0])
