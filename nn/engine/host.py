"""Steps on the host."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...kernels.cpu.counts import Count
from ...kernels.cpu.parallel import Prepared, commit
from ...kernels.rules.rule import columns
from ...ops.runtime import locks
from ...ops.runtime.row_step import RowUpdate
from ...ops.runtime.step import DenseUpdate, measure_step
from ..base.own_rules import factors_of
from .conditioning import Conditioning
from .layout import Layout
from .plan import NOTHING, Call, Classes, Counts, Plan, Update


class Host:
    """Steps of the parameters of an optimizer on the host."""

    works_on_host = True

    def __init__(self, where: str, counts: Counts) -> None:
        self._where, self.counts, self._lock = where, counts, threading.RLock()
        _living.add(self)
        self._counted: tuple[Layout, Count] | None = None

    def turn(self) -> Any:
        """One step after the other: the scalars follow from the number of steps before."""
        return locks.entered(self._lock, self._where)

    def ready(self, update: Update, classes: Classes, *, may_skip: bool) -> None:
        """Nothing comes before a step is planned."""

    def forget(self) -> None:
        """Nothing is kept that an address is part of."""

    def run(self, plan: Plan) -> None:
        """Write and count, in one compiled call after all that can fail.

        With locking, also what is measured is measured while nobody else has the memory.
        """
        count = self.count(plan.given.layout)
        if plan.use_locking:
            work = partial(_write, plan, count)
            locks.serialized(work, plan.given.layout.lock_spans, shared=False)
        else:
            _write(plan, count)

    def count(self, layout: Layout) -> Count:
        """What counts a step with gradients of this layout; the last one is kept."""
        known = self._counted  # another thread may exchange it meanwhile
        if known is None or known[0] is not layout:
            active = None if layout.is_complete else layout.active
            total = self.counts.global_step
            known = self._counted = layout, Count(self.counts.steps, active, total)
        return known[1]


_living: weakref.WeakSet[Host] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Whoever held a lock does not exist there.
    for host in list(_living):
        host._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _write(plan: Plan, count: Count) -> None:
    commit([prepared(call, plan) for call in plan.calls], count)


def prepared(call: Call, plan: Plan) -> Prepared:
    """A kernel call of a step, to be run by `commit`; what is measured is measured here."""
    if call.rates is NOTHING:
        return update_of(call).prepared()
    factored, conditioning = plan.update.factored, plan.conditioning
    return (factored.prepared if factored else prepared_measured)(call, conditioning)


def update_of(call: tuple[Any, ...]) -> DenseUpdate | RowUpdate:
    """A `Call`, or its fields up to ``hp_of``, as it is run on the host and on devices."""
    batch, rule, prologue, touched_only, gradients, hp, hp_of, *_ = call
    if not batch.row_sparse:
        return DenseUpdate(rule, prologue, batch.variables, gradients, batch.g, hp, hp_of)
    arguments = batch.labels, rule, prologue, batch.variables, gradients
    return RowUpdate.of(*arguments, hp, hp_of.tolist(), touched_only)


Complete = Callable[[np.ndarray, Call, dict[str, int]], None]
"""Completes the scalars of a two-stage rule, in their columns, from float64 ``[T, n_measured]``."""


def _multiply(squares: np.ndarray, call: Call, column: dict[str, int]) -> None:
    call.hp[:, column[call.rule.factor_of]] *= factors_of(call.rule, squares)


def prepared_measured(
    call: Call, conditioning: Conditioning, complete: Complete = _multiply
) -> Prepared:
    """A call on tensors for whose scalars something has to be measured first."""
    batch, rule, prologue, _, gradients, *hp, _, _ = call
    update = DenseUpdate(rule, prologue, batch.variables, gradients, batch.g, *hp)
    column = columns(rule, prologue)
    # What is infinite or NaN reaches the parameter; it is no reason to stop half way.
    with np.errstate(all="ignore"):
        if conditioning.is_measured:
            conditioning.complete(call, column)
        if rule.measure:
            complete(measure_step(update), call, column)
    return update.prepared()
