"""What an optimizer keeps on a CUDA device: its counts, settings and tables, and a guard.

The steps of an optimizer have one guard. A step with an index out of range closes it, and neither
that step nor a later one writes or counts anything until the host hears of it (`settle`). A step
that is skipped, because of an overflow say, closes it for itself alone.

Nothing in a step depends on what the host knows of the steps before, so it can be captured in a
CUDA graph, which then goes on counting by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...kernels.cuda.dense import scalars
from ...kernels.cuda.device.backend import copy_in, copy_out, new_event
from ...kernels.cuda.device.by_value import WORDS, store_words
from ...kernels.cuda.device.guard import FOUND, INDEX, NOTHING
from ...kernels.cuda.device.launch import on_grid
from ...kernels.cuda.device.memory import Held, key_of
from ...kernels.cuda.device.numbers import FLOAT64, KINDS
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.frameworks import on_device
from ..base.numbers import Number
from .plan import Counts
from .program import Program

Error = Callable[[int, int], IndexError]
"""Makes the error for a bad position of a step and the index there."""


class Settings(NamedTuple):
    """What the scalars of a step follow from.

    Attributes:
        loss_scale: of all gradients.
        constants: of the formula, then its bases.
        rates: the learning rate of each class of parameters.
        rule_decays: the weight decays of the classes that the rule applies.
        decays: the weight decays of the classes that become part of the gradient.
    """

    loss_scale: Number
    constants: Sequence[float]
    rates: Sequence[Number]
    rule_decays: Sequence[float]
    decays: Sequence[float]


class Resident:
    """The memory of an optimizer on a device.

    Args:
        device: its number.
        n_parameters: of the optimizer.
        bases: of the running powers of each.

    Attributes:
        bases: these.
        tables: memory for the tables of a step.
        scratch: memory that is used within a step.
        n_to_check: steps since the first one that may have found a bad index.
        may_skip: whether any step was one that may be skipped.
        pid: of the process that can use it: not of a forked one.
    """

    def __init__(self, device: int, n_parameters: int, bases: Sequence[float]) -> None:
        self._device = device
        self._n_parameters = n_parameters
        self.bases = tuple(bases)
        self._state, self._settings, self.tables, self.scratch = (Held() for _ in range(4))
        self._errors: dict[int, Error] = {}
        self._n_errors = 0
        self._graphs: set[int] = set()  # errors of steps that a graph may run at any time
        self._was_captured = False
        self._last_stream: tuple[int, int] | None = None
        self._n_unsettled = 0
        self.n_to_check = 0
        self.may_skip = False
        self.pid = os.getpid()
        with on_device(device):
            self._event = new_event()
            self._state.take(8 * (scalars.STATE + n_parameters * (1 + len(bases))))
            # Compiles and loads what a graph needs: while it is captured there is no time for that.
            place, stream = self._settings.take(8 * WORDS), cuda.default_stream()
            store_words(place, np.zeros(WORDS, np.int64), stream)
            self._begin(0, None, stream)

    @property
    def state(self) -> int:
        """The address of the memory that begins with the guard."""
        return self._state.address

    def counts_at(self, positions: np.ndarray) -> np.ndarray:
        """Addresses of the counts of some parameters."""
        return self.state + 8 * (scalars.STATE + positions)

    def powers_at(self, positions: np.ndarray) -> np.ndarray:
        """Addresses of the running powers of some parameters."""
        first = scalars.STATE + self._n_parameters
        return self.state + 8 * (first + positions * len(self.bases))

    # Counts

    def load(self, counts: Counts, powers: np.ndarray) -> None:
        """Take over the counts of the host; the host waits.

        Args:
            counts: these.
            powers: float64 ``[P, n_bases]``: the running powers.
        """
        words = np.zeros(scalars.STATE, np.int64)
        words[FOUND] = NOTHING
        words[scalars.GLOBAL_STEP] = counts.global_step[0]
        words[scalars.N_SKIPPED] = counts.skipped[0]
        state = np.concatenate([words, counts.steps, powers.ravel().view(np.int64)])
        with on_device(self._device):
            cuda.synchronize()
            copy_in(self.state, state, cuda.default_stream())
            cuda.synchronize()

    @property
    def is_unsettled(self) -> bool:
        """Whether there may be something that the host does not know."""
        return self._n_unsettled > 0 or self._was_captured

    def settle(self) -> tuple[Counts, IndexError | None]:
        """Wait for the device; the counts there, and what closed the guard, which is opened."""
        words = np.empty(scalars.STATE + self._n_parameters, np.int64)
        with on_device(self._device):
            cuda.synchronize()
            copy_out(words, self.state, cuda.default_stream())
            found, failed = int(words[FOUND]), int(words[scalars.FAILED_AT])
            position = failed if found == scalars.FAILED else found
            is_bad = 0 <= position < NOTHING
            if is_bad:
                copy_in(self.state + 8 * FOUND, np.array([NOTHING]), cuda.default_stream())
                cuda.synchronize()
        error = None
        if is_bad:
            error = self._errors[int(words[scalars.ORIGIN])](position, int(words[INDEX]))
        self._errors = {k: e for k, e in self._errors.items() if k in self._graphs}
        self._n_unsettled = self.n_to_check = 0
        steps, skipped = scalars.GLOBAL_STEP, scalars.N_SKIPPED
        return Counts(words[steps:][:1], words[skipped:][:1], words[scalars.STATE :]), error

    def remember(self, error: Error, *, capturing: bool) -> int:
        """A number for what a step may find."""
        self._n_errors += 1
        self._errors[self._n_errors] = error
        if capturing:
            self._graphs.add(self._n_errors)
        return self._n_errors

    # Steps

    def write_settings(self, settings: Settings, stream: Any, *, capturing: bool) -> int:
        """Have settings on the device; the address of the classes, which come last."""
        n_constants, n_classes = len(settings.constants), len(settings.rates)
        at_classes = scalars.SETTINGS + n_constants
        words = np.zeros(max(WORDS, at_classes + scalars.CLASS * n_classes), np.int64)
        place, numbers = self._settings.take(words.nbytes, capturing=capturing), words.view(float)
        _put(words, scalars.SCALE_AT, settings.loss_scale, place)
        numbers[scalars.SETTINGS : at_classes] = settings.constants
        for k, rate in enumerate(settings.rates):
            first = at_classes + scalars.CLASS * k
            _put(words, first + scalars.RATE_AT, rate, place)
            numbers[first + scalars.RULE_DECAY] = settings.rule_decays[k]
            numbers[first + scalars.DECAY] = settings.decays[k]
        self._settings.write(words, stream, capturing=capturing)
        return place + 8 * at_classes

    @property
    def settings(self) -> int:
        """The address of the settings."""
        return self._settings.address

    def follow_last(self, stream: Any, *, capturing: bool) -> None:
        """What comes next waits, on the device, for the step before if that was elsewhere.

        A graph has no step before: the order of its runs is the user's.
        """
        if not capturing and self._last_stream not in (None, key_of(stream)):
            self._event.wait(stream)

    def run(
        self, program: Program, origin: int, found_inf: DeviceArray | None, launch: Any
    ) -> None:
        """Enqueue a step.

        Args:
            program: what it consists of.
            origin: the number of what it may find.
            found_inf: not 0 where the step has to be skipped, or None.
            launch: where.
        """
        stream = launch.stream
        self.may_skip |= found_inf is not None or program.checks_finite
        program.check_finite(self.state + 8 * scalars.IS_NONFINITE, stream)
        # A step before a run of a graph may have been skipped, even if none could be until now.
        if self.may_skip or program.has_rows or launch.is_captured:
            self._begin(origin, found_inf, stream)
        scratch = self.scratch.address
        program.run(self.settings, self.state, scratch, launch.sorter, stream)

    def _begin(self, origin: int, found_inf: DeviceArray | None, stream: Any) -> None:
        place, kind = _place_of(found_inf)
        on_grid(scalars.begin_kernel, 1, 1, stream)(self.state, place, kind, origin)

    def has_run(self, program: Program, stream: Any, *, capturing: bool) -> None:
        """The step is enqueued."""
        self._was_captured |= capturing
        if not capturing:
            self._n_unsettled += 1
            if program.has_rows or self.n_to_check:
                self.n_to_check += 1
            self._event.record(stream)
            self._last_stream = key_of(stream)


def _put(words: np.ndarray, k: int, number: Number, place: int) -> None:
    """A number of settings: its place, how it lies there, and itself where it is the host's."""
    if isinstance(number, DeviceArray):
        words[k : k + 2] = _place_of(number)
    else:
        words[k : k + 2] = place + 8 * (k + 2), FLOAT64
        words.view(float)[k + 2] = number


def _place_of(array: DeviceArray | None) -> tuple[int, int]:
    return (0, 0) if array is None else (array.address, KINDS[array.dtype])
