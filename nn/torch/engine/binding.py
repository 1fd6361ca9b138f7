"""The parameters of an optimizer, each recorded once; a step chooses those with a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.dense import all_finite
from ....kernels.cpu.headers.arrays import NOWHERE, Expected, lie_in
from ....kernels.cpu.headers.tensors import (
    ABSENT,
    FITS,
    FOREIGN,
    MOVED,
    OTHER,
    OTHERS,
    REORDERED,
    UNLIKE,
    States,
    TensorLook,
    expected_rows,
)
from ....kernels.cpu.tensor_counts import TensorCount
from ....kernels.keeping import key_of
from ....kernels.private import parts_of
from ....kernels.storage import STORAGES, real_of, storage_of
from ....kernels.tables import RowSource, TensorTable, row_width
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import RowGradient
from ....ops.runtime.step import Variables
from ...engine.device import are_finite
from ...engine.layout import Batch
from ...engine.reader import by_storage
from .memory import DTYPE_NAMES, DTYPES, Stretch, array_of, check_apart
from .part import Chosen, ParameterBatch, RandomBits, RuleChoice, StepInputs
from .record import CheckedParameter, Kind, Record
from .tensors import local

_FEW = 8  # parameters: to look at so many takes no longer than to fetch them before
_KEPT_SETS = 16  # of parameters that had gradients: layers may take turns


Layout = tuple[Sequence[RuleChoice], Sequence[int]]
"""The choices of all groups, and how many parameters each of several has."""


class Binding:
    """Parameters with their states, recorded as they come to have gradients.

    One step at a time uses it; it is dropped when that fails. Between two steps it keeps no tensor
    alive: another parameter in the place of one fits if it lies as that one did. In steps of
    another `layout` there is another binding.

    Raises:
        RuntimeError: a tensor does not fit; in `read`.
    """

    def __init__(self, where: str, n_parameters: int, layout: Layout) -> None:
        self._where, self.layout = where, layout
        self.is_large = n_parameters > _FEW
        self._records: list[Any] = [None] * n_parameters
        self._kinds: dict[Kind, int] = {}
        # Of each parameter: the number of its kind, its group, its elements, those of a row, and
        # the places in a look of what the rule takes.
        self._kind_of, self._group_of, self._sizes, self._widths = (
            np.zeros(n_parameters, np.int64) for _ in range(4)
        )
        self._columns = np.zeros((n_parameters, 0), np.int64)
        self._n_bytes = np.zeros(1, np.int64)  # of each place that is written; else 0
        self._look = TensorLook(torch, n_parameters)
        self.count = TensorCount(self._look.counts, self._look.versions)
        self._sets: dict[bytes, Chosen] = {}
        self._last, self._last_key = Chosen([], [], [], [], [], 0, 0), b""
        self._stretches, self._memory = [list[int](), list[int]()], NOWHERE
        self._lie_apart, self._checked = True, set[bytes]()  # which sets were found apart
        # Whether any record has them: then a look alone does not tell enough.
        self._has_copies = self._has_own_counts = self._has_rows = False

    def is_of(self, parameter: Tensor, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether its only parameter is in the group in which it was recorded."""
        (record,) = self._records
        return record is None or any(p is parameter for p in groups[record.group]["params"])

    # What follows from the records

    def _record(self, i: int, record: Record) -> None:
        """Take over a parameter."""
        look, n_places = self._look, len(record.places) + 2
        versions = look.versions
        if self._records[i] is not None:
            old = int(look.first[i])
            self._n_bytes[old : old + len(self._records[i].n_bytes)] = 0
        look.record(i, n_places, record.recorded)
        if look.versions is not versions:
            self.count = TensorCount(look.counts, look.versions)
            more = np.zeros(len(look.versions) - len(self._n_bytes), np.int64)
            self._n_bytes = np.concatenate((self._n_bytes, more))
        first, columns = int(look.first[i]), record.columns
        if len(columns) > self._columns.shape[1]:
            more = np.zeros((len(self._records), len(columns) - self._columns.shape[1]), np.int64)
            self._columns = np.concatenate((self._columns, more), axis=1)
        self._records[i] = record
        self._has_copies |= bool(record.copied)
        self._has_own_counts |= record.has_own_count
        self._has_rows |= record.kind.is_sparse
        self._columns[i, : len(columns)] = [first + k for k in columns]
        self._n_bytes[first : first + n_places - 1] = record.n_bytes
        self._kind_of[i] = self._kinds.setdefault(record.kind, len(self._kinds))
        self._group_of[i], self._widths[i] = record.group, row_width(record.shape)
        self._sizes[i] = math.prod(record.shape)

    def _choose(self, active: np.ndarray, n_counts: int, n_versions: int) -> Chosen:
        """Choose the kernel calls for parameters that have a gradient; sparse ones come first."""
        key = self._last_key = active.tobytes()
        found = self._sets.get(key)
        if found is None:
            kinds = self._kind_of[active]
            each = [(k, np.flatnonzero(kinds == number)) for k, number in self._kinds.items()]
            parts = [self._part(k, active[places], places) for k, places in each if len(places)]
            parts.sort(key=lambda part: not part.batch.row_sparse)
            rows = [i for p in parts if p.batch.row_sparse for i in p.batch.positions.tolist()]
            n_counts = n_counts if n_counts == len(active) else 0
            counted = [i for i in active.tolist() if self._records[i].is_counted]
            own_counts = [i for i in counted if self._records[i].has_own_count]
            found = Chosen(
                active.tolist(), parts, rows, counted, own_counts, n_counts, n_versions,
                self._expected(rows),
            )  # fmt: skip
            if len(self._sets) >= _KEPT_SETS:
                self._sets.clear()
            self._sets[key] = found
        self.count.cut(found.n_counts, found.n_versions)
        return found

    def _expected(self, rows: Sequence[int]) -> Expected | None:
        """The expected parts of the sparse gradients of these parameters, if all are plain."""
        every = [self._records[i] for i in rows]
        if not (every and all(record.has_plain_rows for record in every)):
            return None
        tables = [(getattr(torch, record.kind.gradient.name), record.shape) for record in every]
        return expected_rows(torch, tables, self._memory)

    def _part(self, kind: Kind, positions: np.ndarray, places: np.ndarray) -> ParameterBatch:
        """The kernel call for parameters of a kind, with their places among all of the step."""
        records = [self._records[i] for i in positions.tolist()]
        w, *s = map(storage_of, kind.dtypes)
        columns = self._columns[positions, : len(kind.dtypes)]
        first = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(self._sizes[positions], out=first[1:])
        table = TensorTable(self._look.addresses[columns], first, self._widths[positions])
        variables = Variables(tuple([(record,) for record in records]), w, tuple(s), table)
        is_all = len(positions) == len(self._records)
        labels = tuple([f"{self._where}: {r.label}" for r in records]) if kind.is_sparse else ()
        batch = Batch(
            positions, variables, STORAGES[kind.gradient], kind.is_sparse, positions, is_all,
            real_of(w).carrier, labels,
        )  # fmt: skip
        numbers = tuple(name for name in records[0].numbers if name != "step")
        draws = None
        if kind.rule.keeping is not None and kind.rule.keeping.hp:
            keys = np.array([key_of(record.name) for record in records], np.uint64)
            draws = RandomBits(keys, np.array([record.begin for record in records]))
        return ParameterBatch(
            kind.choice, kind.rule, batch, columns, self._group_of[positions], numbers,
            kind.device.index if kind.device.type == "cuda" else None, places.tolist(), draws,
        )  # fmt: skip

    # Steps

    def fetch(self) -> None:
        """Bring what `read` is going to look at into the caches."""
        self._look.fetch()

    def read(
        self, parameters: tuple[Tensor, ...], gradients: tuple[Any, ...], states: States,
        choices: Sequence[RuleChoice], entry_of: Callable[..., CheckedParameter | None],
    ) -> StepInputs | None:  # fmt: skip
        """The inputs of a step with these gradients; None if the number of parameters differs.

        ``entry_of(parameters, gradients, choices, new, i)`` checks a parameter that is not recorded
        as it is now; if it makes a state, it puts that into ``new``.
        """
        look = self._look
        held = [None] * look.n_held
        flags = look.look(parameters, gradients, states, held)
        if flags & (FOREIGN | REORDERED):
            return None
        rows: dict[int, RowGradient] | None = {}
        if self._last.rows and not flags:
            rows = self._rows_like_last(parameters, gradients)
            if rows is None and self._has_other_rows(gradients):
                flags = UNLIKE
        has_others = self._last.own_counts and not self._are_numbers(held)
        if flags or self._has_copies or has_others:
            seen = parameters, gradients, held, rows
            return self._read_anew(flags, seen, states, choices, entry_of)
        given = StepInputs(
            self._last, parameters, gradients, held, self._records, look.held, look.gradients,
            rows or {},
        )  # fmt: skip
        if rows is None:
            self._read_rows(given)
        return given

    def _are_numbers(self, held: list[Any]) -> bool:
        """Whether the counts of updates in the last step that were no tensors are numbers yet."""
        return all(type((held[i] or {}).get("step")) is int for i in self._last.own_counts)

    def _rows_like_last(
        self, parameters: tuple[Tensor, ...], gradients: tuple[Any, ...]
    ) -> dict[int, RowGradient] | None:
        """Sparse gradients of the last shapes, read in one compiled call; None if any differs."""
        last = self._last
        if last.expected is None:
            return None
        parts = tuple(chain.from_iterable(map(parts_of, map(gradients.__getitem__, last.rows))))
        places = last.expected.addresses(parts)
        if places is None:
            return None
        # Rows keep the parts alive for as long as loops read at these addresses.
        rows, found = {}, places.tolist()
        for k, i in enumerate(last.rows):
            if hasattr(parameters[i], "row_positions"):  # of a batch that others have a part of
                return None
            (indices, values), (at, values_at) = parts[2 * k : 2 * k + 2], found[2 * k : 2 * k + 2]
            rows[i] = RowGradient(indices, values, RowSource(at, 8, values.size(0), values_at))
        return rows

    def _read_anew(
        self, flags: int, seen: tuple[Any, ...], states: States, choices: Sequence[RuleChoice],
        entry_of: Callable[..., CheckedParameter | None],
    ) -> StepInputs | None:  # fmt: skip
        """The inputs of a step that differs from the last one; as `read`."""
        parameters, gradients, held, rows = seen
        look, new, entries = self._look, dict[Tensor, Any](), dict[int, CheckedParameter | None]()
        must_look = flags & UNLIKE or self._has_own_counts or self._has_rows
        # Another thread may change states meanwhile: what a look has not found to fit is recorded.
        while must_look and (unlike := self._unlike(gradients, held, entries)):
            with torch.no_grad():
                for i in unlike:
                    entry = entries[i] = entry_of(parameters, gradients, choices, new, i)
                    if entry is not None:
                        self._record(i, Record(self._where, entry, gradients[i]))
            held = [None] * look.n_held
            flags = look.look(parameters, gradients, {**states, **new} if new else states, held)
            if flags & (FOREIGN | REORDERED):
                return None
        recorded = {i: entry for i, entry in entries.items() if entry is not None}
        left_out = [i for i in entries if i not in recorded]
        look.status[left_out] = ABSENT
        unseen = self._fill(recorded, parameters, held)
        n_active, n_counts, n_versions = look.found.tolist()
        active = look.active[:n_active]
        if unseen or left_out:
            active, n_counts = self._all_active()
        has_moved = bool(flags & MOVED or recorded)
        if has_moved:
            self._settle(keeps_sets=not recorded)
        if has_moved or left_out or flags & OTHERS:
            self._last = self._choose(active, n_counts, n_versions)
        every = self._last.active if recorded else []
        are_new = [i in recorded and recorded[i].is_new for i in every]
        given = StepInputs(
            self._last, parameters, gradients, held, self._records, look.held, look.gradients,
            rows or {}, new, are_new, unseen=unseen,
        )  # fmt: skip
        if not rows or entries:
            self._read_rows(given)
        if has_moved or flags & UNLIKE:
            self._read_dense(given)
        if not (self._lie_apart or self._last_key in self._checked):
            self._check_apart(given)
        return given._replace(copies=self._copied(given)) if self._has_copies else given

    def _has_other_rows(self, gradients: tuple[Any, ...]) -> bool:
        """Whether the sparse dimensions of a gradient, which no look compares, are others."""
        every = self._records
        return any(not every[i].takes(gradients[i]) for i in self._last.rows)

    def _unlike(
        self, gradients: tuple[Any, ...], held: list[Any], known: Container[int]
    ) -> list[int]:
        """The parameters with a gradient, beside known ones, that are not as they were recorded."""
        status, found = self._look.status, []
        fits = ABSENT if self._has_own_counts or self._has_rows else FITS
        for i in np.flatnonzero(status > fits).tolist():
            record = self._records[i]
            if i in known:
                continue
            if status[i] == OTHER or record is None or not record.takes(gradients[i]):
                found.append(i)
            elif record.has_own_count:
                step = held[i].get("step")
                if step is None or (isinstance(step, Tensor) and not step.is_cuda):
                    found.append(i)
        return found

    def _fill(
        self, entries: Mapping[int, CheckedParameter], parameters: Sequence[Tensor], held: list[Any]
    ) -> list[Tensor]:
        """Find by Python what a look cannot tell: the tensors of some new records."""
        look, unseen = self._look, []
        for i in entries:
            record = self._records[i]
            tensors, record.tensors = record.tensors, ()
            states = held[i] = entries[i].state
            if look.status[i] != OTHER:
                continue
            first, begin = int(look.first[i]), look.held[i]
            held[begin : begin + len(tensors) - 1] = tensors[1:]
            look.addresses[first : first + len(tensors)] = [t.data_ptr() for t in tensors]
            unseen += [parameters[i], *(states[name] for name in record.places)]
        return unseen

    def _all_active(self) -> tuple[np.ndarray, int]:
        """The parameters that have a gradient, and how many of them have a count in memory."""
        look = self._look
        active = np.flatnonzero(look.status != ABSENT)
        every = [self._records[i] for i in active.tolist()]
        counts = [
            look.first[i] + r.count for i, r in zip(active, every, strict=True) if r.count >= 0
        ]
        look.counts[: len(counts)] = look.addresses[counts]
        return active, len(counts)

    # Where tensors lie

    def _settle(self, *, keeps_sets: bool) -> None:
        """Take over where parameters and states lie now."""
        look, n = self._look, self._look.n_places
        begins, sizes = look.addresses[:n], self._n_bytes[:n]
        there = np.flatnonzero((sizes > 0) & (begins != 0))
        there = there[np.argsort(begins[there], kind="stable")]
        begins, ends = begins[there], (begins + sizes)[there]
        # A stretch from the first to the last element may have gaps, in which others lie.
        reach = np.maximum.accumulate(ends)
        starts = np.flatnonzero(np.concatenate(([True], begins[1:] >= reach[:-1]))[: len(begins)])
        last = np.concatenate((starts[1:], [len(begins)]))[: len(starts)] - 1
        memory = np.array([begins[starts], reach[last]], np.int64)
        look.keep_apart(memory)
        self._memory = memory
        self._lie_apart, self._checked = len(starts) == len(begins), set()
        self._stretches, self._sets = memory.tolist(), {}
        if keeps_sets:  # a step of the same parameters is not made anew
            self._sets[self._last_key] = self._last
            if self._last.expected is not None:
                self._last.expected.keep_apart(memory)
            for part in self._last.parts:
                part.batch.variables.move(look.addresses[part.columns])

    def _read_rows(self, given: StepInputs) -> None:
        """Find sparse gradients, apart from what is written."""
        for i in given.chosen.rows:
            record = self._records[i]
            given.rows[i] = record.rows(given.parameters[i], given.gradients[i])
        spans = set[tuple[int, int]]()  # the gradient of pooled tables is one for all of them
        spans.update(*[row.spans for row in given.rows.values()])
        self._keep_apart(spans, given)

    @torch.no_grad()
    def _read_dense(self, given: StepInputs) -> None:
        """Find dense gradients, apart from what is written; those that do not fit are copied."""
        look, spans = self._look, set()
        for i in given.chosen.active:
            record, gradient = self._records[i], given.gradients[i]
            if record.kind.is_sparse:
                continue
            if look.status[i] != FITS:
                found = record.dense(given.parameters[i], gradient)
                given.addresses[i] = found.data_ptr()
                given.held.append(found)
                if found is not gradient:
                    continue
                if form := record.form_of(gradient):
                    look.expect_gradient(i, *form)
            spans.add((int(given.addresses[i]), local(gradient).nbytes))
        self._keep_apart(spans, given)

    def _keep_apart(self, spans: Iterable[tuple[int, int]], given: StepInputs) -> None:
        """Refuse gradients in memory, by addresses and sizes, that the step writes to."""
        if spans and lie_in(self._stretches, spans):
            self._check_apart(given)
            # It was that of a parameter without a gradient, which is found again with one, or that
            # of a state that is gone.
            look, is_idle = self._look, np.ones(self._look.n_places, bool)
            for i in given.chosen.active:
                is_idle[look.first[i] : look.first[i] + len(self._records[i].places) + 1] = False
            look.addresses[: look.n_places][is_idle] = 0
            self._settle(keeps_sets=True)

    def _check_apart(self, given: StepInputs) -> None:
        """Refuse tensors of a step that share memory which it writes to."""
        found = []
        for i in given.chosen.active:
            record = self._records[i]
            named = zip(given.tensors(i), record.labels(), strict=True)
            found += [Stretch.of(local(tensor), name) for tensor, name in named]
            if i in given.rows:
                spans = given.rows[i].spans
                found += [Stretch(at, at + n, record.label, False, None) for at, n in spans]
            elif not record.kind.is_sparse:
                gradient = local(given.gradients[i])
                if given.addresses[i] == gradient.data_ptr():  # else it is copied
                    found.append(Stretch.of(gradient, record.label, is_written=False))
        check_apart(self._where, found)
        self._checked.add(self._last_key)

    @torch.no_grad()
    def _copied(self, given: StepInputs) -> list[tuple[Tensor, Tensor]]:
        """Copies of what does not lie as the kernels need it; the step is one of these."""
        made = []
        for part in given.chosen.parts:
            variables = part.batch.variables
            for t, i in enumerate(part.batch.positions.tolist()):
                record = self._records[i]
                if record.copied:
                    for k, tensor, copy in record.copies(given.tensors(i)):
                        variables.put(t, record.columns.index(k), copy.data_ptr())
                        made.append((tensor, copy))
        return made


def has_finite(given: StepInputs) -> bool:
    """Whether no gradient has a NaN or an infinity: one read of all of them.

    On a device the host waits for the answer.
    """
    parts = given.chosen.parts
    on_host = [(part.batch, part.gradients(given)) for part in parts if part.device is None]
    return all(all_finite(*found) for found in by_storage(on_host)) and all(
        are_finite(by_batch, arrays) for _, by_batch, arrays in on_devices(given)
    )


def on_devices(
    given: StepInputs,
) -> list[tuple[list[ParameterBatch], list[tuple[Batch, Any]], list[Any]]]:
    """By device the parts there, their batches with their gradients, and one of the parameters.

    All are PyTorch's, so that one tells on which stream they are used.
    """
    found: dict[int, list[ParameterBatch]] = {}
    for part in given.chosen.parts:
        if part.device is not None:
            found.setdefault(part.device, []).append(part)
    return [
        (
            parts,
            [(part.batch, part.gradients(given)) for part in parts],
            [array_of(local(given.parameters[int(parts[0].batch.positions[0])]))],
        )
        for parts in found.values()
    ]


def finish(given: StepInputs) -> None:
    """After a step: copy back what was updated in copies, and tell autograd."""
    with torch.inference_mode():  # which may write to every tensor
        for tensor, copy in given.copies:
            tensor.copy_(copy)
    if given.unseen:
        torch.autograd.graph.increment_version(given.unseen)


def check_parameter(where: str, name: str, parameter: Tensor) -> None:
    """Refuse a parameter that no kernel can update."""
    if parameter.is_complex():
        raise RuntimeError(f"{where} does not support complex parameters: {name}")
    if parameter.layout != torch.strided:
        raise RuntimeError(
            f"{where} requires dense parameter tensors: {name} is {parameter.layout}"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        wrong, got = "is on a device without kernels", parameter.device
        reject(RuntimeError, where, name, wrong, "cpu or cuda", got)
    if parameter.dtype not in DTYPES:
        reject(RuntimeError, where, name, "has a wrong dtype", DTYPE_NAMES, parameter.dtype)
