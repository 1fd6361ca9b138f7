"""A step of an optimizer on a CUDA device: its tables, and its launches in order.

The tables depend on addresses alone, so they are made, and copied to the device, once for a set
of gradients; scalars are computed there (`kernels.cuda.scalars`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...kernels.cuda.dense import scalars
from ...kernels.cuda.dense.finite import FiniteCheck
from ...kernels.cuda.device.backend import launcher, prepare
from ...kernels.cuda.device.memory import ALIGN, Places
from ...kernels.cuda.device.part import DevicePart, LaunchContext
from ...kernels.cuda.device.records import size_of, table_of
from ...kernels.cuda.rows.step import RowStep
from ...kernels.rule import columns
from ...kernels.storage import Storage
from .conditioning import Conditioning
from .plan import Update


class Scalars:
    """The scalars of the tensors of a part, in some type of the arithmetic."""

    def __init__(
        self, update: Update, conditioning: Conditioning, real: Storage, tensors: scalars.ScalarRow
    ) -> None:
        rule, formula = update.rule, update.formula
        self._tensors, self._n_tensors = tensors, len(tensors.updates)
        self.loop = scalars.scalars_kernel(
            formula.function,
            len(formula.constants),
            len(formula.bases),
            len(rule.hp),
            conditioning.prologue,
            conditioning.scales_decay,
            real,
        )
        n_bytes = len(columns(rule, conditioning.prologue)) * real.itemsize
        self._row_bytes = -(-n_bytes // 8) * 8 + size_of(scalars.ScalarInputs)
        self._table = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the scalars of all tensors, and of what they were computed from, aligned."""
        return -(-self._n_tensors * self._row_bytes // ALIGN) * ALIGN

    def addresses(self, place: int) -> np.ndarray:
        """Addresses of the scalars of each tensor."""
        first = place + size_of(scalars.ScalarInputs)
        return first + np.arange(self._n_tensors) * self._row_bytes

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """The int64 table, to lie at an address."""
        self._table = place
        return table_of(self._tensors._replace(hp=hp), len(hp))

    def enqueue(self, settings: int, state: int, stream: Any, *, counts_step: bool) -> None:
        """Enqueue counting the updates of the tensors, and their scalars."""
        blocks = -(-self._n_tensors // scalars.THREADS)
        launcher(self.loop, blocks, scalars.THREADS, stream)(
            self._table, self._n_tensors, settings, state, int(counts_step)
        )


class Program:
    """A step: its parts, row-sparse ones first, each with its scalars, and its tables.

    ``gradients`` are those that have to be finite, ``take`` gives memory for so many bytes.
    """

    def __init__(
        self,
        parts: Sequence[tuple[DevicePart, Scalars]],
        gradients: Sequence[tuple[Storage, np.ndarray, np.ndarray]],
        take: Callable[[int], int],
    ) -> None:
        self._parts = parts
        self._rows = [part for part, _ in parts if isinstance(part, RowStep)]
        self.has_rows = bool(self._rows)
        self._finite = [FiniteCheck(*spans) for spans in gradients]
        self.checks_finite = bool(self._finite)
        self._prepare()
        self.scratch_bytes = max((part.scratch_bytes for part, _ in parts), default=0)
        # Once to learn how long the tables are.
        places, n_words = Places(), len(self._words_at(0, 0))
        places.add(8 * n_words)
        at_rest = places.add(sum(own.n_bytes for _, own in parts))
        self.place = take(places.size)
        self.words = self._words_at(self.place, self.place + at_rest)

    def _prepare(self) -> None:
        """Compile all loops: a step that fails half way would have counted or written."""
        for part, own in self._parts:
            for loop in (*part.loops, own.loop):
                prepare(loop)
        for check in self._finite:
            prepare(check.loop)
        if not self._parts:
            prepare(scalars.count_kernel)

    def _words_at(self, place: int, rest: int) -> np.ndarray:
        """The tables, to lie at ``place``; ``rest`` is where scalars and the like will be."""
        found: list[np.ndarray] = [np.empty(0, np.int64)]
        for part, own in self._parts:
            hp = own.addresses(rest)
            found.append(own.words(place, hp))
            place += found[-1].nbytes
            found.append(part.words(place, hp))
            place += found[-1].nbytes
            rest += own.n_bytes
        self._at_finite = place
        found += [check.table for check in self._finite]
        return np.concatenate(found)

    def check_finite(self, found: int, stream: Any) -> None:
        """Enqueue the check of the gradients; the word at ``found`` becomes 1 if one is not."""
        place = self._at_finite
        for check in self._finite:
            check.enqueue(place, found, stream)
            place += check.table.nbytes

    def run(self, settings: int, state: int, scratch: int, stream: Any) -> None:
        """Enqueue the rest: nothing is counted or written before all indices are checked."""
        call = LaunchContext(stream, state, scratch)
        # A single row-sparse part checks its indices when it is sorted, before anything is written.
        # Of several the first would be written before the last is sorted: all are checked ahead.
        if len(self._rows) == 1:
            self._rows[0].sort(call)
        else:
            for rows in self._rows:
                rows.check(call)
        # Each part counts the updates of its tensors; the step itself is counted by the first one.
        for k, (_, own) in enumerate(self._parts):
            own.enqueue(settings, state, stream, counts_step=k == 0)
        if not self._parts:
            launcher(scalars.count_kernel, 1, 1, stream)(state)
        for part, _ in self._parts:
            part.enqueue(call)
