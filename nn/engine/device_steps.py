"""Steps of optimizers on a CUDA device: what is enqueued, and what is known there."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.cpu.blocks import kernel
from ...kernels.cpu.rows.layout import HOT
from ...kernels.rules.formula import Formula, running_power
from ...ops.runtime import locks, pending
from ...ops.runtime.arrays import real_type
from ...ops.runtime.device import DeviceArray, is_captured
from ...ops.runtime.errors import message
from ...ops.runtime.launch import Launch, launch_on
from ...ops.runtime.row_step import row_tables
from ..base.numbers import FLOATS, Number, check_place, on_device
from ..schedules.base import Values
from . import captures
from .conditioning import Conditioning
from .host_steps import HostSteps
from .layout import Batch
from .on_device import error_of, row_batches
from .reader import GradientReader, Gradients, by_storage

if TYPE_CHECKING:
    from .program import Part, Program, Scalars
    from .resident import Resident

_KEPT_PROGRAMS = 4
_KEPT_KINDS = 64
_FLAGS = (*FLOATS, np.dtype(np.bool_))


class DeviceSteps(HostSteps):
    """What an optimizer does for parameters on a device; `FusedOptimizer` has the rest.

    Either states and arithmetic are there too, and a step is enqueued; or both are on the host
    (``target == "CPU"``, `HostSteps`).
    """

    _found_inf: DeviceArray | None = None
    _skipped_steps: int
    _rates: Values
    _decays: Values
    _class_of: np.ndarray
    _reader: GradientReader
    skip_nonfinite: bool

    # What the step is made of, in `FusedOptimizer`.

    def _read(
        self, gradients: tuple[Any, ...], decays: list[float], conditioning: Conditioning
    ) -> Gradients:
        raise NotImplementedError

    def _formula(self) -> Formula:
        raise NotImplementedError

    def _check_used_rates(self, rates: Sequence[Number]) -> None:
        raise NotImplementedError

    def _derive(self) -> None:
        """What is not part of the state: it is made anew in a copy."""
        self._resident: Resident | None = None
        self._forget_launches()
        if self._device is not None:
            pending.register(self)

    def _forget_launches(self) -> None:
        """An address has changed: nothing that was derived from it stays."""
        self._forget_programs()
        self._ran: dict[Any, None] = {}  # the last kinds of steps; what they launch is compiled

    def _forget_programs(self) -> None:
        self._programs: dict[Any, tuple[Program, int]] = {}

    # What is known on the device

    @property
    def found_inf(self) -> Any:
        """An array of one element on the device of the parameters, or None.

        Steps in which it is not 0 change nothing and are counted in `skipped_steps`; it is read
        where it is. float32, float64 or bool: what a loss scaler has.

        Raises:
            TypeError: what is assigned is no such array.
            ValueError: it has not one element, or lives elsewhere than the parameters.
        """
        return None if self._found_inf is None else self._found_inf.native()

    @found_inf.setter
    def found_inf(self, value: Any) -> None:
        found = None if value is None else on_device(self._name, "found_inf", value, _FLAGS)
        if value is not None and found is None:
            expected = "an array on the device of the parameters, or None"
            raise TypeError(
                message(self._name, "found_inf", "has a wrong type", expected, type(value).__name__)
            )
        check_place(self._name, "found_inf", found, self._device)
        self._found_inf = found

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped; of steps on a device it waits for them."""
        if self._device is not None:
            pending.settle()
        return self._skipped_steps

    @property
    def is_unsettled(self) -> bool:
        """Whether the device may know of steps what the host does not."""
        if self._resident is None or self._works_on_host:
            return False
        return self._resident.is_unsettled

    def settle(self) -> Exception | None:
        """Wait for all steps on the device and take over their counts; what one has found.

        `fusestep.synchronize` calls it.
        """
        assert self._resident is not None
        counts, error = self._resident.settle()
        self._forget_programs()
        self._global_step[0], self._skipped_steps = counts.global_step, counts.n_skipped
        self._steps[:] = counts.steps
        return error

    def _load_counts(self) -> None:
        """Tell the device, where it counts, how far the host is."""
        if self._resident is None:
            return
        from .resident import Counts

        bases = self._resident.bases = self._formula().bases
        powers = [
            [running_power(real_type(p.dtype), base, step) for base in bases]
            for p, step in zip(self.parameters, self._steps.tolist(), strict=True)
        ]
        counts = Counts(int(self.global_step[0]), self._skipped_steps, self._steps)
        self._resident.load(counts, np.array(powers, np.float64))

    def _residence(self) -> Resident:
        """The optimizer's memory on the device; the host knows of the last steps what it must.

        Raises:
            RuntimeError: there is none yet for these options, and a CUDA graph is being captured.
            Exception: what a step before has found, if the host waits.
        """
        resident, bases = self._resident, self._formula().bases
        # Powers of other numbers are computed anew from the counts.
        is_new = resident is None or resident.bases != bases
        must_settle = resident is not None and (is_new or self._must_settle(resident))
        captured = (is_new or must_settle) and is_captured(self.parameters[0].array)
        if is_new and captured:
            raise captures.first_of_its_kind(self._name)
        if must_settle and not captured:
            pending.synchronize()
        if resident is None:
            from .resident import Resident

            assert self._device is not None
            resident = self._resident = Resident(self._device, len(self.parameters), bases)
            weakref.finalize(self, _leave, resident).atexit = False
        if is_new:
            self._load_counts()
        return resident

    def load_state_dict(self, state: Any) -> None:
        """As `StatefulOptimizer.load_state_dict`."""
        super().load_state_dict(state)
        self._load_counts()

    def __getstate__(self) -> dict[str, Any]:
        if self._device is not None:
            pending.settle()
        state = self.__dict__.copy()
        for derived in ("_resident", "_programs", "_ran"):
            state.pop(derived, None)
        return state

    # The step

    def _step_for_device(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        if self._works_on_host:
            self._step_offloaded(gradients, conditioning)
        else:
            self._step_on_device(gradients, conditioning)

    def _step_on_device(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        """The step is enqueued; that of this thread, then that of the next."""
        with locks.entered(self._lock, self._name), pending.held():
            if self._reader.centralizes and is_captured(self.parameters[0].array):
                raise captures.centralizes(self._name)
            resident = self._residence()
            step = self._next_step()
            rates, decays = self._rates.as_given(step), self._decays.at(step)
            for rate in rates:
                check_place(self._name, "learning_rate", rate, self._device)
            self._check_used_rates(rates)
            given = self._read(gradients, decays, conditioning)
            layout = given.layout
            with launch_on(
                [
                    self.parameters[0].array,
                    *given.arrays,
                    *self._numbers_there(rates, conditioning),
                ],
                layout.lock_spans if self.use_locking else None,
                can_be_captured=True,
            ) as launch:
                self._enqueue(resident, given, conditioning, rates, decays, launch)
            if not launch.is_captured:
                self._advance(layout)

    def _numbers_there(
        self, rates: Sequence[Number], conditioning: Conditioning
    ) -> list[DeviceArray]:
        """The numbers that the step reads on the device, if it runs once.

        When a graph runs is the user's to order.
        """
        known = (*rates, conditioning.loss_scale, self._found_inf)
        found = [number for number in known if isinstance(number, DeviceArray)]
        return [] if found and is_captured(self.parameters[0].array) else found

    @property
    def _follows_steps(self) -> bool:
        """Whether the host has to know the number of the step."""
        return self._rates.follow_steps or self._decays.follow_steps

    def _must_settle(self, resident: Resident) -> bool:
        """Whether the host has to know how far the device is, or has not asked for long."""
        may_skip = resident.may_skip or self.skip_nonfinite or self._found_inf is not None
        is_behind = resident.is_unsettled and may_skip and self._follows_steps
        return is_behind or resident.n_to_check >= pending.MOST_PENDING

    def _enqueue(
        self,
        resident: Resident,
        given: Gradients,
        conditioning: Conditioning,
        rates: Sequence[Number],
        decays: list[float],
        launch: Launch,
    ) -> None:
        from .resident import Settings

        stream, capturing, formula = launch.stream, launch.is_captured, self._formula()
        kinds = self._kinds(given, conditioning)
        if capturing:
            captures.check_step(
                self._name,
                follows_steps=self._follows_steps,
                has_rows=bool(given.rows),
                sorter=launch.sorter,
            )
            if kinds not in self._ran:
                raise captures.first_of_its_kind(self._name)
        settings = Settings(
            conditioning.loss_scale,
            (*formula.constants, *formula.bases),
            rates,
            conditioning.left_to_rule(decays),
            decays,
        )
        resident.follow_last(stream, capturing=capturing)
        classes = resident.write_settings(settings, stream, capturing=capturing)
        program, origin = self._program(resident, given, conditioning, kinds, classes, launch)
        resident.tables.write(program.words, stream, capturing=capturing)
        resident.scratch.take(max(1, program.scratch_bytes), capturing=capturing)
        resident.run(program, origin, self._found_inf, launch)
        resident.has_run(program, stream, capturing=capturing)
        self._ran.pop(kinds, None)
        self._ran[kinds] = None
        if len(self._ran) > _KEPT_KINDS:
            del self._ran[next(iter(self._ran))]

    @property
    def _options_on_device(self) -> tuple[Any, ...]:
        """Options that can be assigned to and are not among the settings on the device."""
        return self.sparse_update, self.skip_nonfinite, self._formula().function

    def _kinds(self, given: Gradients, conditioning: Conditioning) -> Any:
        """On what it depends which loops a step launches."""
        row_batches = (given.rows_of(batch) for batch in given.layout.batches if batch.row_sparse)
        lengths = [sum(len(row.indices) for row in rows) for rows in row_batches]
        return (
            given.layout,
            tuple((n > 0, n > HOT) for n in lengths),
            conditioning.prologue,
            conditioning.options_on_device,
            self._options_on_device,
            self._found_inf is not None,
        )

    def _program(
        self,
        resident: Resident,
        given: Gradients,
        conditioning: Conditioning,
        kinds: Any,
        classes: int,
        launch: Launch,
    ) -> tuple[Program, int]:
        """The launches of a step, and the number of what it may find.

        They are made once for the same arrays; what a graph may run gets a number of its own.
        """
        from .program import Program

        capturing, tables = launch.is_captured, resident.tables
        is_kept = not (capturing or conditioning.is_of_one_step)
        addresses = tuple(
            (row.index_address, row.values_address, len(row.indices)) for row in given.rows
        )
        key = (
            kinds,
            given.addresses.tobytes(),
            addresses,
            conditioning.acts(given.layout.active).tobytes(),
            classes,
            launch.sorter is None,
        )
        known = self._programs.get(key) if is_kept else None
        if known is not None and known[0].place == tables.address:
            return known
        parts = self._parts(resident, given, conditioning, classes, launch)
        finite = by_storage(given) if self.skip_nonfinite else ()
        program = Program(parts, finite, partial(tables.take, capturing=capturing))
        origin = resident.remember(error_of(given), capturing=capturing) if given.rows else 0
        if is_kept:
            if len(self._programs) >= _KEPT_PROGRAMS:
                self._forget_programs()
            self._programs[key] = program, origin
        return program, origin

    def _parts(
        self,
        resident: Resident,
        given: Gradients,
        conditioning: Conditioning,
        classes: int,
        launch: Launch,
    ) -> list[tuple[Part, Scalars]]:
        """The batches of a step."""
        from ...kernels.cuda.dense import scalars
        from .program import RowsPart, Scalars, Tensors

        first_of = {id(batch): first for batch, first in row_batches(given)}
        found: list[tuple[Part, Scalars]] = []
        for batch in given.layout.batches:
            part: Part
            if batch.row_sparse:
                rows = given.rows_of(batch)
                compiled = kernel(
                    self._rule, conditioning.prologue, batch.variables.w, batch.g, batch.variables.s
                )
                part = RowsPart(
                    compiled,
                    row_tables(batch.variables, rows, [0] * len(rows)),
                    first_of[id(batch)],
                    touched_only=self.sparse_update == "lazy",
                    sorts=launch.sorter is None,
                )
            else:
                part = self._dense_part(batch, given.addresses_of(batch), conditioning)
            positions = batch.positions
            tensors = Tensors(
                resident.counts_at(positions),
                resident.powers_at(positions),
                classes + 8 * scalars.CLASS * self._class_of[positions],
                conditioning.acts(positions),
            )
            own = Scalars(
                self._formula(),
                self._rule,
                conditioning.prologue,
                batch.variables.real,
                tensors,
                scales_decay=conditioning.scales_decay,
            )
            found.append((part, own))
        return found

    def _dense_part(self, batch: Batch, gradients: np.ndarray, conditioning: Conditioning) -> Part:
        """The launches of a batch of dense tensors."""
        from .program import DensePart

        variables, prologue = batch.variables, conditioning.prologue
        compiled = kernel(self._rule, prologue, variables.w, batch.g, variables.s)
        table = variables.table
        measured = conditioning.measured_on_device(batch, gradients, compiled.column)
        return DensePart(compiled, table.addresses, gradients, np.diff(table.first), measured)


def _leave(resident: Resident) -> None:
    """The optimizer is gone; what its last steps have found is still to be told."""
    if resident.n_to_check and resident.pid == os.getpid():
        pending.bequeath(lambda: resident.settle()[1])
