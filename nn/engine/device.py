"""Steps on a CUDA device: states and arithmetic are there too, and a step is enqueued."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np

from ...kernels.cpu.threads.parallel import commit
from ...kernels.cuda.dense.scalars import ClassRow, ScalarRow
from ...kernels.cuda.device.part import DevicePart, DeviceParts
from ...kernels.cuda.device.records import size_of
from ...kernels.cuda.rows.step import RowStep
from ...kernels.element import kernel
from ...kernels.formula import running_power
from ...kernels.tables import HOT
from ...ops.runtime import pending
from ...ops.runtime.arrays import real_type
from ...ops.runtime.device import DeviceArray, is_captured
from ...ops.runtime.errors import reject
from ...ops.runtime.launch import Launch, launch_on
from ...ops.runtime.row_step import row_tables
from ...ops.runtime.step import dense_part
from ..base.parameter import Parameter
from .host import Host
from .layout import Batch
from .on_device import row_batches
from .plan import Classes, Plan, Update
from .program import Program, Scalars
from .reader import by_storage
from .resident import Resident

_KEPT_PROGRAMS = 4
_KEPT_KINDS = 64


class Device:
    """Steps of parameters on a device; ``host`` has the lock of the optimizer, and counts."""

    works_on_host = False

    def __init__(
        self, where: str, parameters: Sequence[Parameter], host: Host, *, centralizes: bool
    ) -> None:
        self._where, self._parameters, self._host = where, parameters, host
        self._centralizes = centralizes
        self._resident: Resident | None = None
        self.is_in_use = True  # whether steps are taken here, not on the host
        self.forget()
        pending.register(self)

    def forget(self) -> None:
        """An address has changed: nothing that was derived from it stays."""
        self._forget_programs()
        self._ran: dict[Any, None] = {}  # the last kinds of steps; what they launch is compiled

    def _forget_programs(self) -> None:
        self._programs: dict[Any, tuple[Program, int]] = {}

    @property
    def _is_captured(self) -> bool:
        return is_captured(self._parameters[0].array)

    # What is known on the device

    @property
    def is_unsettled(self) -> bool:
        """Whether the device may know of steps what the host does not."""
        resident = self._resident
        return self.is_in_use and resident is not None and resident.is_unsettled

    def settle(self) -> Exception | None:
        """Wait for all steps on the device and take over their counts; what one has found.

        `fusestep.synchronize` calls it.
        """
        assert self._resident is not None
        counts, error = self._resident.settle()
        # Programs name the errors that they may find by numbers, and those of all steps outside of
        # graphs are used up now.
        self._forget_programs()
        for own, found in zip(self._host.counts, counts, strict=True):
            own[...] = found
        return error

    def load_counts(self) -> None:
        """Tell the device, where it counts, how far the host is."""
        resident = self._resident
        if resident is not None:
            powers = [
                [running_power(real_type(p.dtype), base, step) for base in resident.bases]
                for p, step in zip(self._parameters, self._host.counts.steps.tolist(), strict=True)
            ]
            resident.load(self._host.counts, np.array(powers, np.float64))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One step is enqueued after the other, and nothing is settled meanwhile."""
        # In this order, here and wherever both locks are taken: whoever settles has the second one,
        # and never asks for the first.
        with self._host.turn(), pending.held():
            yield

    def ready(self, update: Update, classes: Classes, *, may_skip: bool) -> None:
        """The optimizer has its memory here; the host knows of the last steps what it must.

        Raises:
            ValueError: a formula has another number of bases than that before.
            RuntimeError: there is none yet for these options, and a CUDA graph is being captured.
            Exception: what a step before has found, if the host waits.
        """
        if self._centralizes and self._is_captured:
            expected = "groups without grad_centralization"
            self._refuse_graph("a step", "centralizes gradients", expected, "one with it")
        resident, bases = self._resident, update.formula.bases
        if resident is not None and len(resident.bases) != len(bases):  # their powers lie there
            wrong, numbers = "differ in number from those before", (len(resident.bases), len(bases))
            reject(ValueError, self._where, "bases of the formula", wrong, *numbers)
        # Powers of other numbers are computed anew from the counts.
        is_new = resident is None or resident.bases != bases
        must_settle = resident is not None and (
            is_new or _must_settle(resident, classes, may_skip=may_skip)
        )
        captured = (is_new or must_settle) and self._is_captured
        if is_new and captured:
            self._refuse_first()
        # While a graph is captured nothing can be waited for: a step that should, to make room for
        # errors, leaves that to a later one.
        if must_settle and not captured:
            pending.synchronize()
        if resident is None:
            device = self._parameters[0].array.device
            resident = self._resident = Resident(device, len(self._parameters), bases)
            # What its last steps have found outlives the optimizer, until somebody waits for the
            # device. At exit nobody will, and the device may be gone.
            weakref.finalize(self, _leave, resident).atexit = False
        if is_new:
            resident.bases = bases
            self.load_counts()

    # The step

    def run(self, plan: Plan) -> None:
        """Enqueue a step."""
        given = plan.given
        numbers = (*plan.rates, plan.conditioning.loss_scale, plan.found_inf)
        there = [number for number in numbers if isinstance(number, DeviceArray)]
        if there and self._is_captured:
            there = []  # when a graph runs is the user's to order
        arrays = [self._parameters[0].array, *given.arrays, *there]
        spans = given.layout.lock_spans if plan.use_locking else None
        with launch_on(arrays, spans, can_be_captured=True) as launch:
            self._enqueue(plan, launch)
        # The host counts what it enqueues, since schedules follow that number, and takes over the
        # counts of the device when it settles. Of a graph the device alone knows how often it runs.
        if not launch.is_captured:
            commit([], self._host.count(given.layout))

    def _enqueue(self, plan: Plan, launch: Launch) -> None:
        resident, kinds = self._resident, _kinds(plan)
        assert resident is not None
        if launch.is_captured:
            self._check_captured(plan)
            if kinds not in self._ran:
                self._refuse_first()
        resident.follow_last(launch)
        classes = resident.write_settings(plan, launch)
        program, origin = self._program(resident, plan, kinds, classes, launch)
        resident.run(program, origin, plan.found_inf, launch)
        self._ran.pop(kinds, None)
        self._ran[kinds] = None
        if len(self._ran) > _KEPT_KINDS:
            del self._ran[next(iter(self._ran))]

    # What cannot become part of a CUDA graph, said before anything of it does

    def _check_captured(self, plan: Plan) -> None:
        if plan.classes.follow_steps:
            wrong, got = "follows the number of the step", "a list or a schedule of the host"
            expected = "a number, or an array on the device"
            self._refuse_graph("a rate or decay", wrong, expected, got)
        if any(row.rows is not None for row in plan.given.rows):
            wrong, expected = "has the gradient of pooled rows", "a RowTensor"
            self._refuse_graph("a row-sparse step", wrong, expected, "a BagTensor")
        if any(row.positions is not None for row in plan.given.rows):
            wrong, expected = "has positions, which lie on the host", "a gradient without"
            self._refuse_graph("a row-sparse step", wrong, expected, "a part of a batch")

    def _refuse_first(self) -> NoReturn:
        """A step that would have to compile and to take memory."""
        expected = "the same step once outside of a graph, which compiles it and takes memory"
        self._refuse_graph("a step", "is the first of its kind", expected, "none")

    def _refuse_graph(self, what: str, wrong: str, expected: str, got: str) -> NoReturn:
        reject(RuntimeError, self._where, f"{what} in a CUDA graph", wrong, expected, got)

    def _program(
        self, resident: Resident, plan: Plan, kinds: Any, classes: int, launch: Launch
    ) -> tuple[Program, int]:
        """The launches of a step, and the number of what it may find.

        They are made once for the same arrays; what a graph may run gets a number of its own.
        """
        capturing, tables = launch.is_captured, resident.tables
        given, conditioning = plan.given, plan.conditioning
        has_positions = any(row.positions is not None for row in given.rows)
        is_kept = not (capturing or conditioning.is_of_one_step or has_positions)
        addresses = tuple(
            (row.index_address, row.values_address, len(row.indices), *row.source)
            for row in given.rows
        )
        key = (
            kinds,
            given.addresses.tobytes(),
            addresses,
            conditioning.acts(given.layout.active).tobytes(),
            classes,
        )
        # The tables of a program hold addresses and lengths, which are its key. They also lie at an
        # address of their own, which changes when a larger table takes more memory.
        known = self._programs.get(key) if is_kept else None
        if known is not None and known[0].place == tables.address:
            return known
        batches, error = row_batches(given.by_batch)
        parts = _parts(resident, plan, classes, batches)
        finite = by_storage(given.by_batch) if plan.skip_nonfinite else ()
        program = Program(parts, finite, partial(tables.take, capturing=capturing))
        origin = resident.remember(error, capturing=capturing) if given.rows else 0
        if is_kept:
            if len(self._programs) >= _KEPT_PROGRAMS:
                self._forget_programs()
            self._programs[key] = program, origin
        return program, origin


def _must_settle(resident: Resident, classes: Classes, *, may_skip: bool) -> bool:
    """Whether the host has to know how far the device is, or has not asked for long."""
    may_differ = resident.is_unsettled and (resident.may_skip or may_skip)
    return (may_differ and classes.follow_steps) or resident.n_to_check >= pending.MOST_PENDING


def _kinds(plan: Plan) -> Any:
    """On what it depends which loops a step launches."""
    given, conditioning, update = plan.given, plan.conditioning, plan.update
    row_batches = (given.rows_of(batch) for batch in given.layout.batches if batch.row_sparse)
    lengths = [sum(len(row.indices) for row in rows) for rows in row_batches]
    return (
        given.layout,
        tuple((n > 0, n > HOT) for n in lengths),
        conditioning.prologue,
        conditioning.options_on_device,
        plan.touched_only,
        plan.skip_nonfinite,
        update.rule,
        update.formula.function,
        update.constants,
        plan.found_inf is not None,
    )


def _parts(
    resident: Resident, plan: Plan, classes: int, first_of: dict[Batch, int]
) -> list[tuple[DevicePart, Scalars]]:
    """The batches of a step; of a row-sparse one its positions come after others."""
    update, given, conditioning = plan.update, plan.given, plan.conditioning
    found: list[tuple[DevicePart, Scalars]] = []
    for batch in given.layout.batches:
        variables, positions, rule = batch.variables, batch.positions, update.rule.on(batch.shape)
        compiled = kernel(rule, conditioning.prologue, variables.w, batch.g, variables.s)
        part: DevicePart
        if batch.row_sparse:
            part = RowStep(
                compiled,
                row_tables(variables, given.rows_of(batch)),
                base=first_of[batch],
                touched_only=plan.touched_only,
            )
        else:
            gradients = given.addresses_of(batch)
            measured = conditioning.measured_on_device(batch, gradients, compiled.column)
            step = dense_part(compiled, variables, gradients, update.constants)
            part = DeviceParts(measured, step)
        tensors = ScalarRow(
            resident.counts_at(positions),
            resident.powers_at(positions),
            0,
            classes + size_of(ClassRow) * plan.classes.of[positions],
            conditioning.acts(positions),
        )
        found.append((part, Scalars(update, conditioning, variables.real, tensors)))
    return found


def _leave(resident: Resident) -> None:
    """The optimizer is gone; what its last steps have found is still to be told."""
    if resident.n_to_check and resident.pid == os.getpid():
        pending.bequeath(lambda: resident.settle()[1])
