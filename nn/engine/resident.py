"""The memory of an optimizer on a CUDA device: its counts, settings and tables, and a guard.

The steps of an optimizer have one guard. A step with an index out of range closes it, and neither
that step nor a later one writes or counts anything until the host hears of it (`settle`). A step
that is skipped, because of an overflow say, closes it for itself alone.

Nothing in a step depends on what the host knows of the steps before, so it can be captured in a
CUDA graph, which then goes on counting by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda

from ...kernels.cuda.dense import scalars
from ...kernels.cuda.device.backend import copy_in, copy_out, launcher, new_event
from ...kernels.cuda.device.guard import FOUND, NOTHING
from ...kernels.cuda.device.memory import WORDS, Held, key_of, store_words
from ...kernels.cuda.device.records import FLOAT64, KINDS, size_of
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.frameworks import on_device
from ...ops.runtime.launch import Launch
from ..base.numbers import Number
from .plan import Counts, Plan
from .program import Program

_STATE_BYTES = size_of(scalars.OptimizerMemory)

Error = Callable[[int, int], IndexError]
"""Makes the error for a bad position of a step and the index there."""


class Resident:
    """The memory of an optimizer on a device; ``bases`` are those of the running powers."""

    def __init__(self, device: int, n_parameters: int, bases: Sequence[float]) -> None:
        self._device, self._n_parameters, self.bases = device, n_parameters, tuple(bases)
        self._state, self._settings, self.tables, self.scratch = (Held() for _ in range(4))
        self._errors: dict[int, Error] = {}
        self._n_errors = 0
        self._graphs: set[int] = set()  # errors of steps that a graph may run at any time
        self._was_captured = False
        self._last_stream: tuple[int, int] | None = None
        self._n_unsettled = 0
        self.n_to_check = 0  # steps since the first one that may have found a bad index
        self.may_skip = False  # whether any step was one that may be skipped
        self.pid = os.getpid()  # a forked process cannot use it
        with on_device(device):
            self._event = new_event()
            self._state.take(_STATE_BYTES + 8 * n_parameters * (1 + len(bases)))
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
        return self.state + _STATE_BYTES + 8 * positions

    def powers_at(self, positions: np.ndarray) -> np.ndarray:
        """Addresses of the running powers of some parameters."""
        first = self.state + _STATE_BYTES + 8 * self._n_parameters
        return first + 8 * len(self.bases) * positions

    # Counts

    def load(self, counts: Counts, powers: np.ndarray) -> None:
        """Take over the counts of the host, and the running powers; the host waits."""
        state = scalars.OptimizerMemory(
            NOTHING, n_skipped=counts.skipped[0], global_step=counts.global_step[0]
        )
        words = np.concatenate([state, counts.steps, powers.ravel().view(np.int64)])
        with on_device(self._device):
            cuda.synchronize()
            copy_in(self.state, words, cuda.default_stream())
            cuda.synchronize()

    @property
    def is_unsettled(self) -> bool:
        """Whether there may be something that the host does not know."""
        return self._n_unsettled > 0 or self._was_captured

    def settle(self) -> tuple[Counts, IndexError | None]:
        """Wait for the device; the counts there, and what closed the guard, which is opened."""
        n_words = len(scalars.OptimizerMemory._fields)
        words = np.empty(n_words + self._n_parameters, np.int64)
        with on_device(self._device):
            cuda.synchronize()
            copy_out(words, self.state, cuda.default_stream())
            state = scalars.OptimizerMemory(*words[:n_words].tolist())
            position = state.failed_at if state.found == scalars.FAILED else state.found
            is_bad = 0 <= position < NOTHING
            if is_bad:
                copy_in(self.state + 8 * FOUND, np.array([NOTHING]), cuda.default_stream())
                cuda.synchronize()
        error = None
        if is_bad:
            error = self._errors[state.origin](position, state.bad_index)
        # A graph may run again, and find again what it was captured with.
        self._errors = {k: e for k, e in self._errors.items() if k in self._graphs}
        self._n_unsettled = self.n_to_check = 0
        counts = np.array([state.global_step]), np.array([state.n_skipped]), words[n_words:]
        return Counts(*counts), error

    def remember(self, error: Error, *, capturing: bool) -> int:
        """A number for the error that a step may find."""
        self._n_errors += 1
        self._errors[self._n_errors] = error
        if capturing:
            self._graphs.add(self._n_errors)
        return self._n_errors

    # Steps

    def write_settings(self, plan: Plan, launch: Launch) -> int:
        """Write the numbers from which scalars follow to the device; the address of the classes."""
        formula, conditioning = plan.update.formula, plan.conditioning
        constants = *formula.constants, *formula.bases
        at_constants = size_of(scalars.SettingsRow) // 8
        class_words = size_of(scalars.ClassRow) // 8
        at_classes = at_constants + len(constants)
        words = np.zeros(max(WORDS, at_classes + class_words * len(plan.rates)), np.int64)
        place = self._settings.take(words.nbytes, capturing=launch.is_captured)
        numbers = words.view(float)
        _put(words, 0, conditioning.loss_scale, place)
        numbers[3] = conditioning.bound
        numbers[at_constants:at_classes] = constants
        for k, (rate, decay) in enumerate(zip(plan.rates, plan.decays, strict=True)):
            first = at_classes + class_words * k
            _put(words, first, rate, place)
            rule_decay = decay if conditioning.leaves_decay else 0.0
            numbers[first + 3 : first + class_words] = rule_decay, decay
        self._settings.write(words, launch.stream, capturing=launch.is_captured)
        return place + 8 * at_classes

    def follow_last(self, launch: Launch) -> None:
        """Have the stream of a step wait for the step before, if that was on another stream.

        A graph has no step before: the order of its runs is the user's.
        """
        if not launch.is_captured and self._last_stream not in (None, key_of(launch.stream)):
            self._event.wait(launch.stream)

    def run(
        self, program: Program, origin: int, found_inf: DeviceArray | None, launch: Launch
    ) -> None:
        """Enqueue a step, unless ``found_inf`` is not 0; ``origin`` numbers what it may find."""
        stream, capturing = launch.stream, launch.is_captured
        self.tables.write(program.words, stream, capturing=capturing)
        scratch = self.scratch.take(max(1, program.scratch_bytes), capturing=capturing)
        # For good: a step that is skipped leaves the guard closed, so each later one has to open it
        # (`_begin`), also one that cannot be skipped itself.
        self.may_skip |= found_inf is not None or program.checks_finite
        program.check_finite(self.state + scalars.AT.is_nonfinite, stream)
        # A step before a run of a graph may have been skipped, even if none could be until now.
        if self.may_skip or program.has_rows or capturing:
            self._begin(origin, found_inf, stream)
        program.run(self._settings.address, self.state, scratch, stream)
        self._was_captured |= capturing
        if not capturing:
            self._n_unsettled += 1
            if program.has_rows or self.n_to_check:
                self.n_to_check += 1
            self._event.record(stream)
            self._last_stream = key_of(stream)

    def _begin(self, origin: int, found_inf: DeviceArray | None, stream: Any) -> None:
        place, kind = _place_of(found_inf)
        launcher(scalars.begin_kernel, 1, 1, stream)(self.state, place, kind, origin)


def _put(words: np.ndarray, k: int, number: Number, place: int) -> None:
    """Put a number among the settings: its place, its kind, and itself if it is the host's."""
    if isinstance(number, DeviceArray):
        words[k : k + 2] = _place_of(number)
    else:
        words[k : k + 2] = place + 8 * (k + 2), FLOAT64
        words.view(float)[k + 2] = number


def _place_of(array: DeviceArray | None) -> tuple[int, int]:
    return (0, 0) if array is None else (array.address, KINDS[array.dtype])
