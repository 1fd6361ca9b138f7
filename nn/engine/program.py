"""A step of an optimizer on a CUDA device: its tables, and its launches in order.

The tables depend on addresses alone, so they are made, and copied to the device, once for a set
of gradients; scalars are computed there (`kernels.cuda.scalars`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...kernels.cuda.dense import finite, scalars
from ...kernels.cuda.dense import update as dense
from ...kernels.cuda.device.backend import prepare
from ...kernels.cuda.device.launch import on_grid
from ...kernels.cuda.device.memory import ALIGN, Places
from ...kernels.cuda.rows import step as row_step
from ...kernels.cuda.rows.table import sizes_of
from ...kernels.element import Kernel
from ...kernels.rules.formula import Formula
from ...kernels.rules.rule import Prologue, Rule, columns
from ...kernels.storage import Storage
from ...kernels.tables import RowTable


class Part(Protocol):
    """The launches of a batch of tensors after its scalars are there.

    Attributes:
        scratch_bytes: of memory that they need.
        kept_bytes: of memory that they need and whose address is in their tables.
    """

    scratch_bytes: int
    kept_bytes: int

    def loops(self) -> list[Any]:
        """All loops that are launched."""

    def words(self, place: int, kept: int, hp: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The int64 tables of the launches, to lie at the address ``place``.

        Args:
            place: where.
            kept: address of `kept_bytes`.
            hp: int64 ``[T]``: addresses of the scalars of each tensor.
            numbers: int64 ``[T]``: addresses of what they were computed from (`scalars.USED`).
        """

    def enqueue(self, scratch: int, guard: int, sorter: Any, stream: Any) -> None:
        """Enqueue the update."""


class Measured(Protocol):
    """What completes the scalars of dense tensors on the device."""

    scratch_bytes: int

    def loops(self) -> list[Any]:
        """All loops that are launched."""

    def words(self, place: int, hp: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """As `Part.words`, without memory that is kept."""

    def enqueue(self, scratch: int, guard: int, stream: Any) -> None:
        """Enqueue measuring, and the change of the scalars."""


class DensePart:
    """Dense tensors.

    Args:
        kernel: the rule, its prologue and storage types.
        addresses: int64 ``[T, 1 + number of states]``.
        gradients: int64 ``[T]``.
        sizes: int64 ``[T]``: elements of each tensor.
        measured: completes the scalars, or None.
        follow: of a two-stage rule, as `dense.loops_of`.
    """

    kept_bytes = 0

    def __init__(
        self,
        kernel: Kernel,
        addresses: np.ndarray,
        gradients: np.ndarray,
        sizes: np.ndarray,
        measured: Measured | None,
        follow: Any = None,
    ) -> None:
        self._kernel = kernel
        self._loops = dense.loops_of(kernel, follow)
        self._arrays = addresses, gradients, sizes
        self._measured = measured
        own = dense.sums_bytes(kernel, sizes)
        self.scratch_bytes = max(own, measured.scratch_bytes if measured else 0)
        self._table = self._n_tensors = self._n_blocks = 0

    def loops(self) -> list[Any]:
        """See `Part`."""
        measured = self._measured.loops() if self._measured else ()
        return [*filter(None, self._loops), *measured]

    def words(
        self,
        place: int,
        kept: int,  # noqa: ARG002
        hp: np.ndarray,
        numbers: np.ndarray,
    ) -> np.ndarray:
        """See `Part`."""
        table, self._n_blocks = dense.table_of(self._kernel, *self._arrays, hp)
        self._table, self._n_tensors = place, len(table)
        if self._measured is None:
            return table.ravel()
        measured = self._measured.words(place + table.nbytes, hp, numbers)
        return np.concatenate([table.ravel(), measured])

    def enqueue(self, scratch: int, guard: int, sorter: Any, stream: Any) -> None:  # noqa: ARG002
        """See `Part`."""
        if self._measured is not None:
            self._measured.enqueue(scratch, guard, stream)
        dense.enqueue(
            self._loops, self._table, self._n_tensors, self._n_blocks, scratch, guard, stream
        )


class RowsPart:
    """Tables with row-sparse gradients.

    Args:
        kernel: the rule, its prologue and storage types.
        tables: at least one.
        base: the number of positions before them in the step.
        touched_only: lazy, or all rows.
        sorts: whether the keys are sorted by this package.
    """

    kept_bytes = 0

    def __init__(
        self,
        kernel: Kernel,
        tables: Sequence[RowTable],
        base: int,
        *,
        touched_only: bool,
        sorts: bool,
    ) -> None:
        sizes = sizes_of(tables, drop=False)
        self._base = base
        self._step = row_step.Step(kernel, tables, sizes, touched_only, sorts)
        self.scratch_bytes = self._step.size
        self._table = self._keys = 0

    def loops(self) -> list[Any]:
        """See `Part`."""
        return self._step.loops()

    def words(
        self,
        place: int,
        kept: int,  # noqa: ARG002
        hp: np.ndarray,
        numbers: np.ndarray,  # noqa: ARG002
    ) -> np.ndarray:
        """See `Part`."""
        self._table = place
        return self._step.table_with(hp).ravel()

    def check(self, guard: int, stream: Any) -> None:
        """Enqueue the check of the indices alone."""
        self._step.place(self._table, 0)
        self._step.check((guard, self._base), stream)

    def sort(self, scratch: int, guard: int, sorter: Any, stream: Any) -> None:
        """Enqueue the check of the indices, and sort them; they stay in the scratch memory."""
        self._step.place(self._table, scratch)
        self._keys = self._step.sorted_keys(-1, (guard, self._base), sorter, stream)

    def enqueue(self, scratch: int, guard: int, sorter: Any, stream: Any) -> None:
        """See `Part`."""
        if not self._keys:
            self.sort(scratch, guard, sorter, stream)
        self._step.update(self._keys, guard, self._base, stream)
        self._keys = 0


class Tensors(NamedTuple):
    """What the scalars of the tensors of a part depend on; int64 ``[T]`` each.

    Attributes:
        counts: addresses of their counts.
        powers: addresses of their running powers.
        classes: addresses of the settings of their classes.
        acts: whether a weight decay of the prologue is theirs.
    """

    counts: np.ndarray
    powers: np.ndarray
    classes: np.ndarray
    acts: np.ndarray


class Scalars:
    """The scalars of the tensors of a part.

    Args:
        formula: of the rule.
        rule: the rule.
        prologue: what happens to the gradient before.
        real: type of the arithmetic.
        tensors: on what they depend.
        scales_decay: see `scalars.scalars_kernel`.
    """

    def __init__(
        self,
        formula: Formula,
        rule: Rule,
        prologue: Prologue,
        real: Storage,
        tensors: Tensors,
        *,
        scales_decay: bool,
    ) -> None:
        self._tensors = tensors
        self.loop = scalars.scalars_kernel(
            formula.function,
            len(formula.constants),
            len(formula.bases),
            len(rule.hp),
            prologue,
            scales_decay,
            real,
        )
        n_bytes = len(columns(rule, prologue)) * real.itemsize
        self._row_bytes = -(-n_bytes // 8) * 8 + 8 * scalars.USED
        self._table = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the scalars of all tensors, and of what they were computed from, aligned."""
        return -(-len(self._tensors.counts) * self._row_bytes // ALIGN) * ALIGN

    def addresses(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of the scalars of each tensor, and of what they were computed from."""
        rows = place + np.arange(len(self._tensors.counts)) * self._row_bytes
        return rows, rows + self._row_bytes - 8 * scalars.USED

    def words(self, place: int, hp: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The int64 table, to lie at an address."""
        self._table = place
        table = np.zeros((len(hp), scalars.COLUMNS), np.int64)
        table[:, scalars.HP], table[:, scalars.NUMBERS] = hp, numbers
        table[:, scalars.COUNT], table[:, scalars.POWERS] = self._tensors[:2]
        table[:, scalars.CLASS_AT], table[:, scalars.ACTS] = self._tensors[2:]
        return table.ravel()

    def enqueue(self, settings: int, state: int, stream: Any, *, counts_step: bool) -> None:
        """Enqueue counting the updates of the tensors, and their scalars."""
        n_tensors = len(self._tensors.counts)
        blocks = -(-n_tensors // scalars.THREADS)
        on_grid(self.loop, blocks, scalars.THREADS, stream)(
            self._table, n_tensors, settings, state, int(counts_step)
        )


class Program:
    """A step: its parts and its tables.

    Args:
        parts: row-sparse ones first, each with its scalars.
        gradients: storage, addresses and sizes of gradients that have to be finite; none where
            that is not checked.
        take: gives memory for the tables, from its size in bytes.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Part, Scalars]],
        gradients: Sequence[tuple[Storage, np.ndarray, np.ndarray]],
        take: Callable[[int], int],
    ) -> None:
        self._parts = parts
        self._rows = [part for part, _ in parts if isinstance(part, RowsPart)]
        self._finite = [(storage, *finite.table_of(storage, *of)) for storage, *of in gradients]
        self._prepare()
        self.scratch_bytes = max((part.scratch_bytes for part, _ in parts), default=0)
        # Once to learn how long the tables are.
        places, n_words = Places(), len(self._words_at(0, 0))
        places.add(8 * n_words)
        at_rest = places.add(sum(own.n_bytes + part.kept_bytes for part, own in parts))
        self.place = take(places.size)
        self.words = self._words_at(self.place, self.place + at_rest)

    def _prepare(self) -> None:
        """Compile all loops: a step that fails half way would have counted or written."""
        for part, own in self._parts:
            for loop in (*part.loops(), own.loop):
                prepare(loop)
        for storage, *_ in self._finite:
            prepare(finite.finite_kernel(storage))
        if not self._parts:
            prepare(scalars.count_kernel)

    def _words_at(self, place: int, rest: int) -> np.ndarray:
        """The tables, to lie at ``place``; ``rest`` is where scalars and the like will be."""
        found: list[np.ndarray] = [np.empty(0, np.int64)]
        for part, own in self._parts:
            hp, numbers = own.addresses(rest)
            found.append(own.words(place, hp, numbers))
            place += found[-1].nbytes
            found.append(part.words(place, rest + own.n_bytes, hp, numbers))
            place += found[-1].nbytes
            rest += own.n_bytes + part.kept_bytes
        self._at_finite = place
        found += [table.ravel() for _, table, _ in self._finite]
        return np.concatenate(found)

    @property
    def has_rows(self) -> bool:
        """Whether indices are checked."""
        return bool(self._rows)

    @property
    def checks_finite(self) -> bool:
        """Whether gradients are checked."""
        return bool(self._finite)

    def check_finite(self, found: int, stream: Any) -> None:
        """Enqueue the check of the gradients; the word at ``found`` becomes 1 if one is not."""
        place = self._at_finite
        for storage, table, n_blocks in self._finite:
            finite.enqueue(storage, place, len(table), n_blocks, found, stream)
            place += table.nbytes

    def run(self, settings: int, state: int, scratch: int, sorter: Any, stream: Any) -> None:
        """Enqueue the rest: nothing is counted or written before all indices are checked."""
        if len(self._rows) == 1:
            self._rows[0].sort(scratch, state, sorter, stream)
        else:
            for rows in self._rows:
                rows.check(state, stream)
        for k, (_, own) in enumerate(self._parts):
            own.enqueue(settings, state, stream, counts_step=k == 0)
        if not self._parts:
            on_grid(scalars.count_kernel, 1, 1, stream)(state)
        for part, _ in self._parts:
            part.enqueue(scratch, state, sorter, stream)
