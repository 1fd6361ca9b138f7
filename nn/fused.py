"""Optimizers that are one elementwise rule: the step, its counters and its state."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels.cpu.finite import all_finite
from ..kernels.rules.gradient import COUPLED_DECAY, SCALE
from ..kernels.rules.rule import Prologue, Rule
from ..kernels.storage import STORAGES, Storage
from ..ops import check, locks
from ..ops.errors import message
from ..ops.step import compile_step, dense_step, row_step
from .checkpoint import as_state, steps_done
from .layout import Batch, Layout
from .optimizer import Optimizer
from .parameter import Parameter, writable
from .reader import GradientReader, Gradients

_Call = tuple[Batch, np.ndarray, np.ndarray]
"""A kernel call: its tensors, the rows of scalars, and the row of each tensor."""

SPARSE_UPDATES = ("lazy", "dense_equivalent")


class FusedOptimizer(Optimizer):
    """An optimizer whose step is an update rule: one kernel call for all dense tensors of a
    dtype, and one for all tables with row-sparse gradients.

    A subclass gives the rule and defines `_scalars`.

    Args:
        rule: the update rule; its states become arrays named ``<role>.<parameter>``.
        use_locking: concurrent calls leave parameters, states and counters as some serial
            order of the calls would.
        sparse_update: ``"lazy"``, ``"dense_equivalent"`` or None (row-sparse gradients raise).
        skip_nonfinite: a step with a NaN or an infinity in any gradient changes nothing.
        state_dtype: dtype of the states; None takes each parameter's.
        learning_rate, parameters, weight_decay, loss_scale: as `Optimizer`.
    """

    _decay_is_coupled = True

    def __init__(
        self,
        learning_rate: Any,
        parameters: Any,
        weight_decay: Any,
        loss_scale: Any,
        *,
        rule: Rule,
        use_locking: bool,
        sparse_update: str | None,
        skip_nonfinite: bool,
        state_dtype: Any,
    ) -> None:
        self.use_locking = check.flag(self._name, "use_locking", use_locking)
        self.skip_nonfinite = check.flag(self._name, "skip_nonfinite", skip_nonfinite)
        self.sparse_update = _sparse_update(self._name, sparse_update)
        dtype = _state_dtype(self._name, state_dtype)
        super().__init__(learning_rate, parameters, weight_decay, loss_scale)
        self.skipped_steps = 0
        self._rule = rule
        self._states = {
            role: tuple(np.zeros(p.shape, dtype or p.dtype) for p in self.parameters)
            for role in rule.states
        }
        self._steps = np.zeros(len(self.parameters), np.int64)
        self._class_of, self._classes = self._option_classes()
        self._prologue = self._build_prologue()
        self._derive()

    def _scalars(self, real: Any, lr: float, decay: float, step: int) -> tuple[Any, ...]:
        """The rule's scalars for update ``step`` = 1, 2, ... of a tensor."""
        raise NotImplementedError

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
        return np.array(class_of), examples

    def _build_prologue(self) -> Prologue:
        options = self._groups.options
        decays = self._decay_is_coupled and any(o.decay != 0.0 for o in options)
        parts = [COUPLED_DECAY] if decays else []
        return tuple(parts + ([SCALE] if self.loss_scale != 1.0 else []))

    def _derive(self) -> None:
        """What is not part of the state: it is made anew in a copy."""
        states = list(zip(*self._states.values(), strict=True)) or [()] * len(self.parameters)
        self._lock = threading.Lock()
        _living.add(self)
        self._reader = GradientReader(
            self._name,
            self._groups.options,
            states,
            self.sparse_update,
            self.loss_scale if self._decay_is_coupled else 0.0,
        )

    # The step

    def __call__(self, gradients: Sequence[Any]) -> tuple[bool, ...]:
        """One step; gradients in the order of `parameters`.

        Args:
            gradients: a tuple or list of arrays, `RowTensor`, lists of `RowTensor`, or None
                (that parameter is skipped, its own count of updates included).

        Returns:
            A True for each parameter.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: a gradient does not fit, or a list
                of learning rates is used up; then nothing has changed.
        """
        return self.construct(self._as_tuple(gradients))

    def construct(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        """The step itself, for gradients of the right number."""
        done = (True,) * len(self.parameters)
        if not self.use_locking:
            plan = self._plan(gradients)
            if plan is not None:
                self._run_all(*plan)
                self._advance(plan[0].layout)
            return done
        # The call takes its number of updates and its place in the queue for the memory at
        # once, so calls run in the order of their numbers.
        with self._lock:
            plan = self._plan(gradients)
            if plan is None:
                return done
            request = locks.Request(plan[0].layout.lock_spans, shared=False)
            self._advance(plan[0].layout)
        with request:
            self._run_all(*plan)
        return done

    def _advance(self, layout: Layout) -> None:
        if layout.is_complete:
            self._steps += 1
        else:
            self._steps[layout.active] += 1
        self.global_step += 1

    def _run_all(self, given: Gradients, calls: list[_Call]) -> None:
        for batch, hp, hp_of in calls:
            if batch.row_sparse:
                row_step(
                    batch.labels,
                    self._rule,
                    self._prologue,
                    batch.variables,
                    [given.rows[k] for k in batch.places],
                    hp,
                    hp_of.tolist(),
                    touched_only=self.sparse_update == "lazy",
                )
            else:
                addresses = given.addresses if batch.is_all else given.addresses[batch.places]
                dense_step(
                    self._rule, self._prologue, batch.variables, addresses, batch.g, hp, hp_of
                )

    def _values_at(self, step: int) -> tuple[list[float], list[float]]:
        """Learning rate and weight decay of each class; every schedule is asked once a step."""
        examples = [self._groups.options[i] for i in self._classes]
        return (
            self._each("learning_rate", [o.rate for o in examples], step),
            self._each("weight_decay", [o.decay for o in examples], step),
        )

    def _plan(self, gradients: tuple[Any, ...]) -> tuple[Gradients, list[_Call]] | None:
        """The checked gradients and the kernel calls; None for a step that is skipped.

        What can fail, fails here: nothing has been written.
        """
        rates, decays = self._values_at(self._step)
        given = self._reader.read(gradients, self._class_of, decays)
        batches = given.layout.batches
        several_row_calls = sum(batch.row_sparse for batch in batches) > 1
        if self.use_locking or self.skip_nonfinite or several_row_calls:
            self._reader.check_indices(given)
        if self.skip_nonfinite and not _finite(given):
            self.skipped_steps += 1
            return None
        for batch in batches if len(batches) > 1 else ():
            compile_step(self._rule, self._prologue, batch.variables, batch.g, batch.row_sparse)
        # A row call checks its indices before it writes, so it goes first.
        ordered = sorted(batches, key=lambda batch: not batch.row_sparse)
        return given, [(batch, *self._hp(batch, rates, decays)) for batch in ordered]

    def _hp(
        self, batch: Batch, rates: list[float], decays: list[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of scalars, and which row each tensor of the batch uses.

        There is a row for each class of options and number of updates that occurs. As long
        as no parameter was skipped, all have the same number of updates.
        """
        real, n_classes = batch.variables.real.dtype.type, len(self._classes)
        steps, class_of = self._steps, self._class_of
        if not batch.is_all:
            steps, class_of = steps[batch.positions], class_of[batch.positions]
        first_step = int(steps[0])
        if (steps == first_step).all():
            keys, hp_of = [(first_step, k) for k in range(n_classes)], class_of
        else:
            codes, hp_of = np.unique(steps * n_classes + class_of, return_inverse=True)
            keys = [divmod(code, n_classes) for code in codes.tolist()]
        rows = [
            (
                *self._scalars(real, rates[k], decays[k], step + 1),
                *self._prologue_scalars(self._classes[k], decays[k]),
            )
            for step, k in keys
        ]
        return np.array(rows, real), hp_of.astype(np.int64, copy=False)

    def _prologue_scalars(self, i: int, decay: float) -> tuple[float, ...]:
        """The scalars of the prologue of parameter ``i``, in the order of its parts."""
        scalars: tuple[float, ...] = ()
        if COUPLED_DECAY in self._prologue:
            # A centralized gradient already holds the decay: it is centralized with it.
            factor = 0.0 if self._groups.options[i].centralize else decay * self.loss_scale
            scalars += (factor, 0.0)
        if SCALE in self._prologue:
            scalars += (1.0 / self.loss_scale,)
        return scalars

    # State

    def _state_arrays(self) -> dict[str, np.ndarray]:
        arrays = super()._state_arrays()
        for role, states in self._states.items():
            for parameter, state in zip(self.parameters, states, strict=True):
                arrays[f"{role}.{parameter.name}"] = state
        for i, parameter in enumerate(self.parameters):
            arrays[f"step.{parameter.name}"] = self._steps[i : i + 1]
        return arrays

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, after checking all of it.

        A state without any ``step.<parameter>`` (as MindSpore writes it) is taken to have
        updated every parameter ``global_step`` times.

        Raises:
            KeyError: a name is missing or unknown.
            TypeError: a dtype differs.
            ValueError: a shape differs.
        """
        state = as_state(self._name, state)
        if "global_step" in state:
            steps = np.array([steps_done(self._name, state["global_step"])])
            if not any(name.startswith("step.") for name in state):
                state.update({f"step.{p.name}": steps for p in self.parameters})
        for name in (name for name in state if name.startswith("step.")):
            if not (np.asarray(state[name]) >= 0).all():
                raise ValueError(
                    message(
                        self._name, f"state {name!r}", "is out of range", "at least 0", state[name]
                    )
                )
        super().load_state_dict(state)

    def check_rebinding(self, parameter: Parameter, array: np.ndarray) -> None:
        """As `Optimizer.check_rebinding`; states are memory of this optimizer too."""
        super().check_rebinding(parameter, array)
        states = [state for role in self._states.values() for state in role]
        names = [f"a state of {self._name}"] * len(states)
        check.no_overlap(self._name, [*names, f"parameter {parameter.name!r}"], [*states, array])

    def forget_addresses(self) -> None:
        """A parameter was rebound: nothing that was derived from its address stays."""
        self._reader.forget()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for derived in ("_reader", "_lock"):
            del state[derived]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays that arrive in foreign buffers may be read-only.
        state["_steps"] = writable(state["_steps"])
        state["_states"] = {
            role: tuple(map(writable, states)) for role, states in state["_states"].items()
        }
        super().__setstate__(state)
        self._class_of, self._classes = self._option_classes()
        self._derive()


_living: weakref.WeakSet[FusedOptimizer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for optimizer in list(_living):
        optimizer._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _finite(given: Gradients) -> bool:
    """One read of all gradients."""
    arrays: dict[Storage, list[tuple[int, int]]] = {}
    for batch in given.layout.batches:
        found = arrays.setdefault(batch.g, [])
        if batch.row_sparse:
            gradients = [given.rows[place] for place in batch.places]
            found += [(g.values_address, g.values.size) for g in gradients]
        else:
            sizes = np.diff(batch.variables.table.first)
            found += zip(given.addresses[batch.places].tolist(), sizes.tolist(), strict=True)
    return all(
        all_finite(storage, *np.array(spans, np.int64).T.copy())
        for storage, spans in arrays.items()
    )


def _sparse_update(where: str, value: str | None) -> str | None:
    if value is not None and not (isinstance(value, str) and value in SPARSE_UPDATES):
        raise ValueError(message(where, "sparse_update", "is unknown", SPARSE_UPDATES, value))
    return value


def _state_dtype(where: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    try:
        dtype: np.dtype[Any] | None = np.dtype(value)
    except TypeError:
        dtype = None
    if dtype not in STORAGES:
        raise TypeError(
            message(where, "state_dtype", "has a wrong dtype", check.FLOAT_NAMES, repr(value))
        )
    return dtype
