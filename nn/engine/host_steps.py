"""Steps on the host of optimizers whose parameters live on a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...kernels.rules.rule import Rule
from ...ops.runtime import locks, pending
from ...ops.runtime.errors import message
from ...ops.runtime.launch import refuse_capture
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.step import Prepared, commit
from ..base.parameter import Parameter
from ..base.stateful import StatefulOptimizer
from .conditioning import Conditioning
from .layout import Batch, Layout
from .offload import rows_on_host, run_dense, run_rows
from .on_device import launching_for
from .reader import Gradients, check_rows


class Call(NamedTuple):
    """A kernel call.

    Attributes:
        batch: its tensors.
        hp: rows of scalars.
        hp_of: the row of each tensor.
        rates, decays: float64 ``[T]``: learning rate and weight decay of each tensor.
    """

    batch: Batch
    hp: np.ndarray
    hp_of: np.ndarray
    rates: np.ndarray
    decays: np.ndarray


class HostSteps(StatefulOptimizer):
    """An optimizer that can have states and arithmetic on the host, wherever its parameters are.

    `FusedOptimizer` has what such a step is made of.
    """

    _stays_on_host = False  # whatever is assigned to `target`
    _moved_to_host = False
    _lock: threading.RLock
    _rule: Rule
    sparse_update: str | None
    use_locking: bool

    def _plan(
        self, gradients: tuple[Any, ...], conditioning: Conditioning
    ) -> tuple[Gradients, list[Call]] | None:
        raise NotImplementedError

    def _prepared_dense(
        self, call: Call, gradients: np.ndarray, conditioning: Conditioning
    ) -> Prepared:
        raise NotImplementedError

    def _prepared_rows(
        self,
        call: Call,
        gradients: Sequence[RowGradient],
        hp_of: Sequence[int],
        conditioning: Conditioning,
    ) -> Prepared:
        raise NotImplementedError

    def _advance(self, layout: Layout) -> None:
        raise NotImplementedError

    def _read_anew(self) -> None:
        raise NotImplementedError

    def _load_counts(self) -> None:
        raise NotImplementedError

    # Where it runs

    @property
    def _works_on_host(self) -> bool:
        return self._device is None or self._stays_on_host or self._moved_to_host

    def _move_to(self, target: str) -> None:
        if self._device is None:
            super()._move_to(target)
        if self._stays_on_host or target == "Ascend":
            expected = (
                "'CPU': this optimizer works there" if self._stays_on_host else "'CPU' or 'GPU'"
            )
            raise ValueError(message(self._name, "target", "is impossible", expected, target))
        with locks.entered(self._lock, self._name), pending.held():
            pending.settle()
            to_host = target == "CPU"
            moved = {
                role: tuple(map(partial(_moved, to_host), self.parameters, states))
                for role, states in self._states.items()
            }
            # All of it or nothing: there may be no room.
            self._states, self._moved_to_host = moved, to_host
            self._read_anew()
            self._load_counts()

    # The step

    def _step_offloaded(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        """Parameters and gradients come to the host, which waits; the parameters go back."""
        refuse_capture(self.parameters[0].array)
        with locks.entered(self._lock, self._name):
            plan = self._plan(gradients, conditioning)
            if plan is None:
                return
            given, calls = plan
            with launching_for(given, use_locking=self.use_locking) as stream:
                rows = self._checked_rows(given, calls)
                for call in calls:
                    if call.batch.row_sparse:
                        self._run_rows_on_host(call, rows.pop(0), conditioning, stream)
                    else:
                        gradient = given.addresses_of(call.batch)
                        self._run_dense_on_host(call, gradient, conditioning, stream)
            self._advance(given.layout)

    def _checked_rows(self, given: Gradients, calls: list[Call]) -> list[list[RowGradient]]:
        """The row-sparse gradients of each call that has some; all indices are in range."""
        found = []
        for batch in (call.batch for call in calls):
            if batch.row_sparse:
                rows = rows_on_host(given.rows_of(batch))
                check_rows(batch, rows)
                found.append(rows)
        return found

    def _run_rows_on_host(
        self, call: Call, rows: list[RowGradient], conditioning: Conditioning, stream: Any
    ) -> None:
        def step(batch: Batch, t: int, gradient: RowGradient) -> None:
            of_batch = call._replace(batch=batch)
            hp_of = [int(call.hp_of[t])]
            commit([self._prepared_rows(of_batch, [gradient], hp_of, conditioning)])

        run_rows(call.batch, rows, step, stream=stream)

    def _run_dense_on_host(
        self, call: Call, gradients: np.ndarray, conditioning: Conditioning, stream: Any
    ) -> None:
        is_measured = bool(conditioning.is_measured or self._rule.measure)

        def step(batch: Batch, chosen: list[int], addresses: np.ndarray) -> None:
            rates, decays = call.rates, call.decays
            if is_measured:
                rates, decays = rates[chosen], decays[chosen]
            hp, hp_of = call.hp[call.hp_of[chosen]], np.arange(len(chosen))
            of_batch = Call(batch, hp, hp_of, rates, decays)
            commit([self._prepared_dense(of_batch, addresses, conditioning)])

        run_dense(call.batch, gradients, step, split=not is_measured, stream=stream)


def _moved(to_host: bool, parameter: Parameter, state: Any) -> Any:
    """A copy of a state, if there is one, where the arithmetic will be."""
    if state is None:
        return None
    return state.numpy() if to_host else parameter.array.holding(state)
