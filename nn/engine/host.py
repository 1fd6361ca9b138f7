"""Steps on the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.cpu.counts import Count
from ...kernels.cpu.numbers import NumberWrite
from ...kernels.cpu.process.forks import in_child
from ...kernels.cpu.threads.parallel import Joined, Prepared, commit
from ...kernels.quiet import quiet
from ...kernels.rule import columns
from ...ops.runtime import locks
from ...ops.runtime.arrays import address_of
from ...ops.runtime.row_step import RowUpdate
from ...ops.runtime.step import DenseUpdate, measured
from ..base.own_rules import factors_of
from .layout import NOTHING, KernelCall, Layout
from .plan import Counts, Plan

Constants = Mapping[str, float]


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
        count = self.count(plan.given.layout)
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


_living: weakref.WeakSet[Host] = weakref.WeakSet()


@in_child
def _release_locks() -> None:
    # A thread that held a lock in the parent does not exist here.
    for host in list(_living):
        host._lock = threading.RLock()


def _write(plan: Plan, count: Count) -> None:
    if plan.update.rule.scope != "step":
        commit([prepared(call, plan) for call in plan.calls], count)
        return
    if not plan.calls:  # no tensor has a gradient
        return
    update, places = plan.update, [call.batch.positions for call in plan.calls]
    known = {**dict(update.constants), **{name: x.item() for name, x in update.numbers.items()}}
    # All dense: of row-sparse gradients no such sums are taken.
    updates: list[Any] = [conditioned(call, plan) for call in plan.calls]
    found = step_together(updates, places, known)
    # A rule that rests (Prodigy while its sums are 0) writes and counts nothing. Else its numbers
    # are written with the loops: an interrupt must not find the one without the other.
    if found is not None:
        of_step, steps = found
        new = zip(update.numbers.values(), of_step, strict=True)
        numbers = NumberWrite([(address_of(array), np.array([x])) for array, x in new])
        commit([*steps, numbers], count)


def prepared(call: KernelCall, plan: Plan) -> Prepared:
    """A kernel call of a step, to be run by `commit`; what is measured is measured here."""
    if call.rates is NOTHING:
        return update_of(call).prepared()
    return _prepared_measured(call, plan)


def update_of(call: tuple[Any, ...]) -> DenseUpdate | RowUpdate:
    """A `KernelCall`, or its fields up to ``hp_of``, as it is run on the host and on devices."""
    batch, rule, prologue, touched_only, gradients, hp, hp_of, *_ = call
    own = rule, prologue, batch.variables, gradients, batch.g, hp
    if not batch.row_sparse:
        return DenseUpdate(*own, hp_of)
    return RowUpdate.of(batch.labels, *own, hp_of.tolist(), touched_only)


@quiet  # what is infinite or NaN reaches the parameter: no reason to stop half way
def _prepared_measured(call: KernelCall, plan: Plan) -> Prepared:
    """A call on tensors for whose scalars something has to be measured first."""
    update = conditioned(call, plan)
    if isinstance(update, RowUpdate) or not update.rule.is_two_stage:
        return update.prepared()
    known = dict(plan.update.constants)
    step, sums = measured(update, known)
    return completed(update, step, sums, [known] * len(sums))


def conditioned(call: KernelCall, plan: Plan) -> DenseUpdate | RowUpdate:
    """The update of a call, with the measured scalars of its gradient transform."""
    if plan.conditioning.is_measured:
        plan.conditioning.complete(call, columns(call.rule, call.prologue))
    return update_of(call)


@quiet
def step_together(
    updates: Sequence[DenseUpdate], places: Sequence[Any], known: Constants
) -> tuple[np.ndarray, list[Prepared]] | None:
    """Steps whose scalars follow from sums over all tensors of a step.

    ``places`` numbers the tensors of each update among all: sums are added up in this order.

    Returns:
        The new numbers of the optimizer, and the steps; None where the rule takes none.
    """
    rule = updates[0].rule
    sums = np.zeros((1 + max(max(own) for own in places), rule.n_measured))
    for update, own in zip(updates, places, strict=True):
        sums[own] = measured(update, known)[1]
    total = sums.sum(axis=0, keepdims=True)
    if rule.rests is not None and rule.rests(*total[0].tolist()):
        return None
    (found,) = factors_of(rule, total, [known])
    fields = rule.scaled_fields
    for update in updates:
        column = columns(rule, update.prologue)
        for name, factor in zip(fields, found, strict=False):
            update.hp[:, column[name]] *= factor
    return found[len(fields) :], [update.prepared() for update in updates]


def completed(
    update: DenseUpdate, step: Prepared | None, sums: np.ndarray, known: Sequence[Constants]
) -> Prepared:
    """A measured step with the factors of its scalars, and the new states of its tensors.

    ``step`` and ``sums`` are those of `measured`; ``known`` the constants for each tensor.
    """
    rule, column, hp = update.rule, columns(update.rule, update.prologue), update.hp
    states = update.states_of_tensors()
    every = []
    if rule.takes:
        sizes = np.maximum(1, np.diff(update.variables.table.first)).tolist()
        for t, size in enumerate(sizes):
            own = {state.name: arrays[t].item() for state, arrays in states}
            scalars = {name: hp[t, column[name]].item() for name in rule.takes if name in column}
            every.append({**scalars, **own, "size": size, **known[t]})
    found = factors_of(rule, sums, every or known)
    for k, name in enumerate(rule.scaled_fields):
        hp[:, column[name]] *= found[:, k]
    step = step or update.prepared()
    written = [arrays for state, arrays in states if not state.is_read]
    if not written:
        return step
    new = found[:, len(rule.scaled_fields) :].T
    numbers = [
        (address_of(array), np.array([x]).astype(array.dtype))
        for arrays, values in zip(written, new, strict=True)
        for array, x in zip(arrays, values, strict=True)
    ]
    return Joined((step, NumberWrite(numbers)))
