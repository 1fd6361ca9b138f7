"""Steps of optimizers whose parameters live on a CUDA device: there, or on the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..kernels.rules.rule import Rule
from ..ops import pending
from ..ops.device_step import Launch
from ..ops.errors import message
from ..ops.row_step import RowGradient, check_rows_on_device, row_step
from .conditioning import Conditioning
from .groups import Groups
from .layout import Batch, Layout
from .offload import rows_on_host, run_dense, run_rows
from .on_device import Launcher, launching_for, row_batches
from .parameter import Parameter
from .reader import Gradients, check_rows
from .stateful import StatefulOptimizer


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


class DeviceSteps(StatefulOptimizer):
    """What an optimizer does for parameters on a device; `FusedOptimizer` has the rest.

    Either states and arithmetic are there too, and a step is enqueued; or both are on the host
    (``target == "CPU"``).
    """

    _stays_on_host = False  # whatever is assigned to `target`
    _moved_to_host = False
    _lock: threading.Lock
    _rule: Rule
    sparse_update: str | None
    use_locking: bool
    skip_nonfinite: bool

    # What the step is made of, in `FusedOptimizer`.

    def _plan(
        self, gradients: tuple[Any, ...], conditioning: Conditioning
    ) -> tuple[Gradients, list[Call]] | None:
        raise NotImplementedError

    def _run_all(
        self,
        given: Gradients,
        calls: list[Call],
        conditioning: Conditioning,
        launch: Launch | None = None,
    ) -> None:
        raise NotImplementedError

    def _run_dense(
        self,
        call: Call,
        gradients: np.ndarray,
        conditioning: Conditioning,
        launch: Launch | None = None,
    ) -> None:
        raise NotImplementedError

    def _advance(self, layout: Layout) -> None:
        raise NotImplementedError

    def _read_anew(self) -> None:
        raise NotImplementedError

    def _derive(self) -> None:
        """What is not part of the state: it is made anew in a copy."""
        if self._device is not None:
            self._launcher = Launcher(self._device)

    def _check_groups(self, groups: Groups) -> None:
        super()._check_groups(groups)
        on_device = [p for p in (o.parameter for o in groups.options) if p.is_on_device]
        if on_device and any(option.centralize for option in groups.options):
            raise RuntimeError(
                message(
                    self._name,
                    "grad_centralization",
                    "has no CUDA kernels",
                    "parameters on the host",
                    f"{on_device[0].name or 'a parameter'} on a device",
                )
            )

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
        pending.settle()
        with self._lock:
            to_host = target == "CPU"
            moved = {
                role: tuple(map(partial(_moved, to_host), self.parameters, states))
                for role, states in self._states.items()
            }
            # All of it or nothing: there may be no room.
            self._states, self._moved_to_host = moved, to_host
            self._read_anew()

    def _step_for_device(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        if self._works_on_host:
            self._step_on_host(gradients, conditioning)
            return
        self._step_on_device(gradients, conditioning)

    # On the device

    def _step_on_device(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        """The step is enqueued; that of this thread, then that of the next."""
        with self._lock, pending.held():  # the counts stay until the step is enqueued
            if self.skip_nonfinite:
                pending.settle()  # the host waits in such a step anyway
            plan = self._plan(gradients, conditioning)
            if plan is None:
                return
            given, calls = plan
            layout = given.layout
            with self._launcher.launch(
                given,
                use_locking=self.use_locking,
                take_back=_taking_back(self, layout.active),
            ) as launch:
                if layout.n_row_batches > 1:  # one checks its indices before it writes
                    for batch, first in row_batches(given):
                        rows = given.rows_of(batch)
                        check_rows_on_device(batch.variables, rows, launch.after(first))
                self._run_all(given, calls, conditioning, launch)
                self._advance(layout)

    def _take_back(self, active: np.ndarray) -> None:
        """A step that turned out to have written nothing was not a step."""
        self._steps[active] -= 1
        self.global_step[0] -= 1

    # On the host

    def _step_on_host(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        """Parameters and gradients come to the host, which waits; the parameters go back."""
        with self._lock:
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
            row_step(
                batch.labels,
                self._rule,
                conditioning.prologue,
                batch.variables,
                [gradient],
                call.hp,
                [int(call.hp_of[t])],
                touched_only=self.sparse_update == "lazy",
            )

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
            self._run_dense(Call(batch, hp, hp_of, rates, decays), addresses, conditioning)

        run_dense(call.batch, gradients, step, split=not is_measured, stream=stream)


def _taking_back(optimizer: DeviceSteps, active: np.ndarray) -> Callable[[], None]:
    """What takes back the counts of a step; it keeps nothing alive while it waits."""
    owner = weakref.ref(optimizer)

    def take_back() -> None:
        living = owner()
        if living is not None:
            living._take_back(active)

    return take_back


def _moved(to_host: bool, parameter: Parameter, state: Any) -> Any:
    """A copy of a state, if there is one, where the arithmetic will be."""
    if state is None:
        return None
    if to_host:
        return state.numpy()
    moved = parameter.array.empty_like(state.dtype, state.shape)
    moved.assign(state)
    return moved
