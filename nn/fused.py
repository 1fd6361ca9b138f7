"""Optimizers that are one elementwise rule: the step, its counters and its state."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..kernels.cpu.counts import Count, are_equal
from ..kernels.cpu.finite import all_finite
from ..kernels.rules.formula import ROUNDING, Formula
from ..kernels.rules.rule import Rule, columns, factors
from ..ops.runtime import check, locks
from ..ops.runtime.errors import message
from ..ops.runtime.row_step import RowGradient, RowUpdate, prepared_rows
from ..ops.runtime.step import DenseUpdate, Prepared, commit, measure_step, prepared_dense
from .base.numbers import Number, number_of
from .base.parameter import Parameter
from .engine.conditioning import Conditioning
from .engine.device_steps import DeviceSteps
from .engine.host_steps import Call
from .engine.layout import Batch, Layout
from .engine.on_device import are_finite
from .engine.reader import GradientReader, Gradients, by_storage
from .schedules.base import Values

SPARSE_UPDATES = ("lazy", "dense_equivalent")
OPTIONS = ("use_locking", "sparse_update", "skip_nonfinite", "state_dtype")
"""The arguments that every optimizer of this kind has."""


class FusedOptimizer(DeviceSteps):
    """An optimizer whose step is an update rule: one kernel call for all dense tensors of a
    dtype (two for a two-stage rule), and one for all tables with row-sparse gradients.

    A subclass gives the rule and defines `_formula`; for a two-stage rule whose ``factor`` does
    not say all, `_complete` too.

    Args:
        rule: the update rule.
        states: the published names of its states, in its order, and their initial values.
        use_locking: concurrent calls leave parameters, states and counters as some serial
            order of the calls would.
        sparse_update: ``"lazy"``, ``"dense_equivalent"`` or None (row-sparse gradients raise).
        skip_nonfinite: a step with a NaN or an infinity in any gradient changes nothing.
        state_dtype: dtype of the states; None takes each parameter's.
        learning_rate, parameters, weight_decay, loss_scale: as `Optimizer`.
    """

    _decay_is_coupled = True
    # Where a row-sparse gradient is not taken: what was expected, and what was found.
    _rows_need: tuple[str, str | None] = (
        "sparse_update='lazy' or sparse_update='dense_equivalent' at construction",
        None,
    )

    def __init__(
        self,
        learning_rate: Any,
        parameters: Any,
        weight_decay: Any,
        loss_scale: Any,
        *,
        rule: Rule,
        states: Mapping[str, float],
        use_locking: bool,
        sparse_update: str | None,
        skip_nonfinite: bool,
        state_dtype: Any,
    ) -> None:
        self.use_locking = check.flag(self._name, "use_locking", use_locking)
        self.skip_nonfinite = check.flag(self._name, "skip_nonfinite", skip_nonfinite)
        self.sparse_update = _sparse_update(self._name, sparse_update)
        super().__init__(
            learning_rate,
            parameters,
            weight_decay,
            loss_scale,
            states=states,
            state_dtype=state_dtype,
        )
        self._skipped_steps = 0
        self._rule = rule
        self._class_of, self._classes = self._option_classes()
        self._derive()

    def _formula(self) -> Formula:
        """How the rule's scalars follow from the learning rate and the update of a tensor."""
        raise NotImplementedError

    def _check_used_rates(self, rates: Sequence[Number]) -> None:
        """Refuse learning rates that are out of the range of a subclass; before every step."""

    def _complete(self, squares: np.ndarray, call: Call, column: dict[str, int]) -> None:
        """The second half of the scalars of a two-stage rule.

        Args:
            squares: float64 ``[T, n_measured]``: what the first stage has summed.
            call: the kernel call; its ``hp`` is changed.
            column: where each scalar is in ``hp``.
        """
        call.hp[:, column[self._rule.factor_of]] *= factors(self._rule, squares)

    def _option_classes(self) -> tuple[np.ndarray, list[int]]:
        """Parameters that share all options share their scalars.

        Returns the class of each parameter, and a parameter of each class.
        """
        known: dict[Any, int] = {}
        examples: list[int] = []
        class_of = []
        for i, option in enumerate(self._groups.options):
            decay = option.decay if isinstance(option.decay, float) else id(option.decay)
            key = (id(option.rate), type(option.decay), decay, option.centralize)
            if key not in known:
                known[key] = len(known)
                examples.append(i)
            class_of.append(known[key])
        return np.array(class_of, np.int64), examples

    def _derive(self) -> None:
        """What is not part of the state: it is made anew in a copy."""
        super()._derive()
        self._lock = threading.RLock()
        self._counted: tuple[Layout, Count] | None = None
        _living.add(self)
        self._condition()
        self._read_anew()

    @property
    def _stepped(self) -> tuple[Parameter, ...]:
        """The parameters that steps change."""
        return self.parameters

    def _read_anew(self) -> None:
        """States or their places have changed: nothing that was derived from them stays."""
        self._forget_launches()
        self._reader = GradientReader(
            self._name,
            self._stepped,
            self._states_of_each(),
            self.sparse_update,
            self._rows_need,
            [i for i, option in enumerate(self._groups.options) if option.centralize],
        )

    def _condition(self) -> None:
        options = self._groups.options
        self._conditioning = Conditioning(options, self._loss_scale, coupled=self._decay_is_coupled)
        examples = [options[i] for i in self._classes]
        self._rates = Values(self._name, "learning_rate", [o.rate for o in examples])
        self._decays = Values(self._name, "weight_decay", [o.decay for o in examples])

    # The step

    def __call__(self, gradients: Sequence[Any]) -> tuple[bool, ...]:
        """One step; gradients in the order of `parameters`.

        Args:
            gradients: a tuple or list of arrays, `RowTensor`, lists of `RowTensor`, or None
                (that parameter is skipped, its own count of updates included).

        Returns:
            A True for each parameter.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: a gradient does not fit, a parameter
                or state has become read-only, or a list of learning rates is used up.
            OverflowError: ``global_step`` has reached the end of int32.
            Nothing has changed then.
        """
        return self.construct(self._as_tuple(gradients))

    def construct(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        """The step itself, for gradients of the right number."""
        return self._step_with(gradients, self._conditioning)

    def _step_with(
        self, gradients: tuple[Any, ...], conditioning: Conditioning
    ) -> tuple[bool, ...]:
        if self._device is not None:
            self._step_for_device(gradients, conditioning)
        elif self.use_locking:
            self._locked_step(gradients, conditioning)
        else:
            plan = self._plan(gradients, conditioning)
            if plan is not None:
                self._run(*plan, conditioning)
        return (True,) * len(gradients)

    def _locked_step(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        # The scalars of a step follow from the number of steps before it.
        with locks.entered(self._lock, self._name):
            plan = self._plan(gradients, conditioning)
            if plan is not None:
                work = partial(self._run, *plan, conditioning)
                locks.serialized(work, plan[0].layout.lock_spans, shared=False)

    def _run(self, given: Gradients, calls: list[Call], conditioning: Conditioning) -> None:
        """Write and count, after all that can fail."""
        steps = [self._prepared(call, given, conditioning) for call in calls]
        commit(steps, self._count(given.layout))

    def _count(self, layout: Layout) -> Count:
        """What counts a step with gradients of this layout; the last one is kept."""
        known = self._counted  # another thread may exchange it meanwhile
        if known is None or known[0] is not layout:
            active = None if layout.is_complete else layout.active
            known = self._counted = layout, Count(self._steps, active, self._global_step)
        return known[1]

    def _advance(self, layout: Layout) -> None:
        """Count a step whose writes are elsewhere."""
        commit([], self._count(layout))

    def _prepared(self, call: Call, given: Gradients, conditioning: Conditioning) -> Prepared:
        batch = call.batch
        if not batch.row_sparse:
            return self._prepared_dense(call, given.addresses_of(batch), conditioning)
        rows = given.rows_of(batch)
        return self._prepared_rows(call, rows, call.hp_of.tolist(), conditioning)

    def _prepared_rows(
        self,
        call: Call,
        gradients: Sequence[RowGradient],
        hp_of: Sequence[int],
        conditioning: Conditioning,
    ) -> Prepared:
        batch = call.batch
        return prepared_rows(
            RowUpdate.of(
                batch.labels,
                self._rule,
                conditioning.prologue,
                batch.variables,
                gradients,
                call.hp,
                hp_of,
                self.sparse_update == "lazy",
            )
        )

    def _prepared_dense(
        self,
        call: Call,
        gradients: np.ndarray,
        conditioning: Conditioning,
    ) -> Prepared:
        """What is measured first is measured here."""
        batch, prologue = call.batch, conditioning.prologue
        given = batch.variables, gradients, batch.g, call.hp, call.hp_of
        update = DenseUpdate(self._rule, prologue, *given)
        if conditioning.is_measured or self._rule.measure:
            column = columns(self._rule, prologue)
            # What is infinite or NaN reaches the parameter; it is no reason to stop half way.
            with np.errstate(all="ignore"):
                if conditioning.is_measured:
                    conditioning.complete(
                        batch, gradients, call.hp, column, call.rates, call.decays
                    )
                if self._rule.measure:
                    self._complete(measure_step(update), call, column)
        return prepared_dense(update)

    def _plan(
        self, gradients: tuple[Any, ...], conditioning: Conditioning
    ) -> tuple[Gradients, list[Call]] | None:
        """The checked gradients and the kernel calls; None for a step that is skipped.

        What can fail, fails here: nothing has been written.
        """
        step = self._next_step()
        rates, decays = self._rates.at(step), self._decays.at(step)
        self._check_used_rates(rates)
        given = self._reader.read_like_last(gradients) or self._read(
            gradients, decays, conditioning
        )
        layout = given.layout
        on_host = self._device is None
        if layout.n_row_batches and on_host and self.skip_nonfinite:
            self._reader.check_indices(given)  # a bad index is an error in a skipped step too
        if self._is_skipped(given):
            self._skipped_steps += 1
            return None
        return given, [self._call(batch, rates, decays, conditioning) for batch in layout.batches]

    def _is_skipped(self, given: Gradients) -> bool:
        return self._has_overflown() or (self.skip_nonfinite and not self._all_finite(given))

    def _has_overflown(self) -> bool:
        """Whether `found_inf` says so; it is waited for."""
        return self._found_inf is not None and number_of(self._found_inf) != 0.0

    def _all_finite(self, given: Gradients) -> bool:
        """One read of all gradients; on a device it is waited for."""
        if self._device is not None:  # the gradients are there
            return are_finite(given, by_storage(given))
        return all(all_finite(*arrays) for arrays in by_storage(given))

    def _read(
        self, gradients: tuple[Any, ...], decays: list[float], conditioning: Conditioning
    ) -> Gradients:
        def added(i: int) -> float:
            return conditioning.centralized_with(i, decays[self._class_of[i]])

        return self._reader.read(gradients, added)

    def _call(
        self, batch: Batch, rates: list[float], decays: list[float], conditioning: Conditioning
    ) -> Call:
        """The kernel call of a batch: rows of scalars, and which row each tensor uses.

        There is a row for each class of options and number of updates that occurs. As long
        as no parameter was skipped, all have the same number of updates.
        """
        real, n_classes = batch.variables.real.carrier, len(self._classes)
        steps, class_of = self._steps, self._class_of
        if not batch.is_all:
            steps, class_of = steps[batch.positions], class_of[batch.positions]
        first_step = int(steps[0])
        if n_classes <= len(steps) and are_equal(steps):
            keys, hp_of = [(first_step, k) for k in range(n_classes)], class_of
        else:
            codes, hp_of = np.unique(steps * n_classes + class_of, return_inverse=True)
            keys = [divmod(code, n_classes) for code in codes.tolist()]
        own_decays, formula = conditioning.left_to_rule(decays), self._formula()
        rows = [
            (
                *formula.at(real, rates[k], own_decays[k], step + 1),
                *map(ROUNDING[real], conditioning.scalars(self._classes[k], decays[k])),
            )
            for step, k in keys
        ]
        hp: np.ndarray = np.array(rows, real)
        if batch.row_sparse or not (conditioning.is_measured or self._rule.measure):
            return Call(batch, hp, hp_of, _NOTHING, _NOTHING)
        # What is measured differs from tensor to tensor.
        values = (np.array(of_class)[class_of] for of_class in (rates, decays))
        return Call(batch, hp[hp_of], np.arange(len(hp_of)), *values)

    def forget_addresses(self) -> None:
        """A parameter was rebound: nothing that was derived from its address stays."""
        self._reader.forget()
        self._forget_launches()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for derived in ("_reader", "_lock", "_counted", "_conditioning", "_rates", "_decays"):
            state.pop(derived, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._class_of, self._classes = self._option_classes()
        self._derive()


_NOTHING = np.empty(0)

_living: weakref.WeakSet[FusedOptimizer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for optimizer in list(_living):
        optimizer._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _sparse_update(where: str, value: str | None) -> str | None:
    if value is not None and not (isinstance(value, str) and value in SPARSE_UPDATES):
        raise ValueError(message(where, "sparse_update", "is unknown", SPARSE_UPDATES, value))
    return value
