"""The parameters of an optimizer, each recorded once; a step chooses those with a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.dense import all_finite
from ....kernels.cpu.headers.arrays import lie_in
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
)
from ....kernels.cpu.threads.counts import TensorCount
from ....kernels.storage import STORAGES, real_of
from ....kernels.tables import TensorTable, row_width
from ....ops.runtime.errors import reject
from ....ops.runtime.step import Variables
from ...engine.layout import Batch
from ...engine.on_device import are_finite
from ...engine.reader import by_storage
from .memory import DTYPE_NAMES, DTYPES, Stretch, array_of, check_apart
from .part import Choice, Given, Part
from .record import Entry, Kind, Record
from .tensors import local

_FEW = 8  # parameters: to look at so many takes no longer than to fetch them before
_KEPT_SETS = 16  # of parameters that had gradients: layers may take turns


class Binding:
    """Parameters with their states, recorded as they come to have gradients.

    One step at a time uses it; it is dropped when that fails. Between two steps it keeps no tensor
    alive: another parameter in the place of one fits if it lies as that one did.

    Raises:
        RuntimeError: a tensor does not fit; in `read`.
    """

    def __init__(
        self, where: str, n_parameters: int, choices: Sequence[Choice], lengths: Sequence[int]
    ) -> None:
        self._where, self._options = where, (choices, lengths)
        self.is_large = n_parameters > _FEW
        self._records: list[Any] = [None] * n_parameters
        self._kinds: dict[Kind, int] = {}
        # Of each parameter: the number of its kind, its group, its elements, those of a row, the
        # form of its gradient, and those of what the rule takes.
        self._kind_of, self._group_of, self._sizes, self._widths, self._gradient_forms = (
            np.zeros(n_parameters, np.int64) for _ in range(5)
        )
        self._columns = np.zeros((n_parameters, 0), np.int64)
        self._n_bytes = np.zeros(1, np.int64)  # of each form that is written; else 0
        self._look = TensorLook(torch, n_parameters)
        self.count = TensorCount(self._look.counts, self._look.versions)
        self._sets: dict[bytes, list[Part]] = {}
        self._last: list[Part] = []
        self._last_key = b""
        self._stretches: list[list[int]] = [[], []]
        self._lie_apart, self._checked = True, set[bytes]()  # which sets were found apart
        self._has_copies = self._has_own_counts = False  # whether any record has

    def is_for(self, choices: Sequence[Choice], lengths: Sequence[int]) -> bool:
        """Whether groups of these sizes, with these kernels, can be those of its parameters."""
        return self._options == (choices, lengths)

    def is_of(self, parameter: Tensor, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether its only parameter is in the group in which it was recorded."""
        (record,) = self._records
        return record is None or any(p is parameter for p in groups[record.group]["params"])

    # What follows from the records

    def _record(self, i: int, record: Record) -> None:
        """Take over a parameter."""
        look, n_forms = self._look, len(record.places) + 2
        versions = look.versions
        if self._records[i] is not None:
            self._n_bytes[look.first[i] : self._gradient_forms[i]] = 0
        look.record(i, n_forms, record.recorded)
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
        self._columns[i, : len(columns)] = [first + k for k in columns]
        self._n_bytes[first : first + n_forms - 1] = record.n_bytes
        self._gradient_forms[i] = first + n_forms - 1
        self._kind_of[i] = self._kinds.setdefault(record.kind, len(self._kinds))
        self._group_of[i], self._widths[i] = record.group, row_width(record.shape)
        self._sizes[i] = math.prod(record.shape)

    def _parts_of(self, active: np.ndarray, *, is_known: bool) -> list[Part]:
        """The kernel calls for the parameters that have a gradient; sparse ones come first."""
        if is_known:
            return self._last
        key = self._last_key = active.tobytes()
        found = self._sets.get(key)
        if found is None:
            kinds = self._kind_of[active]
            each = [(k, np.flatnonzero(kinds == number)) for k, number in self._kinds.items()]
            found = [self._part(k, active[places], places) for k, places in each if len(places)]
            found.sort(key=lambda part: not part.batch.row_sparse)
            if len(self._sets) >= _KEPT_SETS:
                self._sets.clear()
            self._sets[key] = found
        self._last = found
        return found

    def _part(self, kind: Kind, positions: np.ndarray, places: np.ndarray) -> Part:
        """The kernel call for parameters of a kind, with their places among all of the step."""
        records = [self._records[i] for i in positions.tolist()]
        w, *s = (STORAGES[dtype] for dtype in kind.dtypes)
        forms = self._columns[positions, : len(kind.dtypes)]
        first = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(self._sizes[positions], out=first[1:])
        table = TensorTable(self._look.addresses[forms], first, self._widths[positions])
        variables = Variables(tuple([(record,) for record in records]), w, tuple(s), table)
        labels = tuple([f"{self._where}: {r.label}" for r in records]) if kind.is_sparse else ()
        batch = Batch(
            positions, variables, STORAGES[kind.gradient], kind.is_sparse, positions, False,
            real_of(w).carrier, labels,
        )  # fmt: skip
        numbers = tuple(name for name in records[0].numbers if name != "step")
        return Part(
            kind.choice, kind.rule, batch, forms, self._group_of[positions], numbers,
            kind.device.type == "cuda", places.tolist(),
        )  # fmt: skip

    # Steps

    def fetch(self) -> None:
        """Bring what `read` is going to look at into the caches."""
        self._look.fetch()

    def read(
        self, parameters: tuple[Tensor, ...], gradients: tuple[Any, ...], states: States,
        new: Mapping[Tensor, Any], entry_of: Callable[[int], Entry],
    ) -> Given | None:  # fmt: skip
        """What a step with these gradients is given; None if it has other parameters.

        ``entry_of`` checks a parameter that is not recorded as it is now; where it makes a state,
        ``new`` has that from then on.
        """
        held = self._new_list()
        flags = self._look.look(parameters, gradients, states, held)
        if flags & (FOREIGN | REORDERED):
            return None
        unlike = self._unlike(gradients, held) if flags & UNLIKE or self._has_own_counts else []
        entries: dict[int, Entry] = {}
        if unlike:
            with torch.no_grad():
                found = {i: entry_of(i) for i in unlike}
                entries = {i: entry for i, entry in found.items() if entry is not None}
                for i, entry in entries.items():
                    self._record(i, Record(self._where, entry, gradients[i]))
        if entries:
            held = self._new_list()
            every = {**states, **new} if new else states
            flags = self._look.look(parameters, gradients, every, held)
            for i, entry in entries.items():
                held[i] = entry.state
        left_out = [i for i in unlike if i not in entries]
        self._look.status[left_out] = ABSENT
        unseen = self._fill(entries, parameters, held)
        look, n_active, n_counts, n_versions = self._look, *self._look.found.tolist()
        active = look.active[:n_active]
        if unseen or left_out:
            active, n_counts = self._all_active()
            n_active = len(active)
        has_moved = bool(flags & MOVED or entries)
        if has_moved:
            self._settle(keeps_sets=not entries)
        counts_updates = n_counts == n_active > 0
        self.count.cut(n_counts if counts_updates else 0, n_versions)
        chosen = active.tolist()
        given = Given(
            chosen, self._parts_of(active, is_known=not (has_moved or flags & OTHERS)),
            look.addresses[self._gradient_forms], {}, counts_updates, partial(self._states, held),
            [i in entries and entries[i].is_new for i in chosen] if entries else (),
            [], unseen, [held], parameters, gradients,
        )  # fmt: skip
        self._read_gradients(given, held, needs_look=has_moved or bool(flags & UNLIKE))
        if self._has_copies:
            self._copy(given, held)
        return given

    def _new_list(self) -> list[Any]:
        return [None] * (len(self._records) + self._look.n_forms)

    def _unlike(self, gradients: tuple[Any, ...], held: list[Any]) -> list[int]:
        """The parameters with a gradient that are not as they were recorded, or not yet."""
        status, found = self._look.status.tolist(), []
        for i, (own, record) in enumerate(zip(status, self._records, strict=True)):
            if own == ABSENT:
                continue
            if own == OTHER or record is None or not record.takes(gradients[i]):
                found.append(i)
            elif record.has_own_count:
                step = held[i].get("step")
                if step is None or (isinstance(step, Tensor) and not step.is_cuda):
                    found.append(i)
        return found

    def _fill(
        self, entries: Mapping[int, Entry], parameters: Sequence[Tensor], held: list[Any]
    ) -> list[Tensor]:
        """Find by Python what a look cannot tell: the tensors of some new records."""
        look, unseen = self._look, []
        for i in entries:
            record = self._records[i]
            tensors, record.tensors = record.tensors, ()
            if look.status[i] != OTHER:
                continue
            first, n = int(look.first[i]), len(parameters)
            held[n + first : n + first + len(tensors)] = tensors
            look.addresses[first : first + len(tensors)] = [t.data_ptr() for t in tensors]
            states = entries[i].state
            unseen += [parameters[i], *(states[name] for name in record.places)]
        return unseen

    def _all_active(self) -> tuple[np.ndarray, int]:
        """The parameters that have a gradient, and how many of them have a count in memory."""
        look = self._look
        active = np.flatnonzero(look.status != ABSENT)
        every = [self._records[i] for i in active.tolist()]
        forms = [
            look.first[i] + r.count for i, r in zip(active, every, strict=True) if r.count >= 0
        ]
        look.counts[: len(forms)] = look.addresses[forms]
        return active, len(forms)

    def _states(self, held: list[Any], i: int) -> dict[str, Any]:
        record, first = self._records[i], len(self._records) + int(self._look.first[i])
        found = {name: held[first + k] for name, k in record.places.items()}
        if record.has_own_count:
            found["step"] = held[i]["step"]
        return found

    def _tensors_of(self, given: Given, held: list[Any], i: int) -> list[Tensor]:
        """A parameter and what a step writes of its states."""
        first = len(self._records) + int(self._look.first[i])
        return [given.parameters[i], *held[first + 1 : first + 1 + len(self._records[i].places)]]

    # Where tensors lie

    def _settle(self, *, keeps_sets: bool) -> None:
        """Take over where parameters and states lie now."""
        look, n = self._look, self._look.n_forms
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
        self._lie_apart, self._checked = len(starts) == len(begins), set()
        self._stretches, self._sets = memory.tolist(), {}
        if keeps_sets:  # a step of the same parameters is not made anew
            self._sets[self._last_key] = self._last
            for part in self._last:
                part.batch.variables.move(look.addresses[part.forms])

    def _read_gradients(self, given: Given, held: list[Any], *, needs_look: bool) -> None:
        """Find rows, and what compiled code did not take; all apart from what is written."""
        gradients, shares = given.gradients, False
        for part in given.parts:
            for i in part.batch.positions.tolist() if part.batch.row_sparse else ():
                given.rows[i] = self._records[i].rows(given.parameters[i], gradients[i])
        # The gradient of pooled tables is one for all of them.
        spans = {span for row in given.rows.values() for span in row.spans}
        if needs_look:
            spans |= self._dense_spans(given)
        if spans:
            shares = lie_in(self._stretches, spans)
        if not shares and (self._lie_apart or self._last_key in self._checked):
            return
        check_apart(self._where, self._all_stretches(given, held))
        if shares:  # memory of a parameter without gradient, or that was its own once
            self._forget_idle(given.active)
        self._checked.add(self._last_key)

    @torch.no_grad()
    def _dense_spans(self, given: Given) -> set[tuple[int, int]]:
        """Where the dense gradients lie; those that do not fit are replaced by copies."""
        look, spans = self._look, set()
        for i in given.active:
            record, parameter, gradient = self._records[i], given.parameters[i], given.gradients[i]
            if record.kind.is_sparse:
                continue
            if look.status[i] != FITS:
                found = record.dense(parameter, gradient)
                given.addresses[i] = found.data_ptr()
                given.held.append(found)
                if found is not gradient:
                    continue
                if form := record.form_of(gradient):
                    look.expect_gradient(i, *form)
            spans.add((int(given.addresses[i]), local(gradient).nbytes))
        return spans

    def _forget_idle(self, active: Sequence[int]) -> None:
        """Forget where parameters without a gradient lay: they are found again with one."""
        look, is_idle = self._look, np.ones(self._look.n_forms, bool)
        for i in active:
            is_idle[look.first[i] : self._gradient_forms[i]] = False
        look.addresses[: look.n_forms][is_idle] = 0
        self._settle(keeps_sets=True)

    def _all_stretches(self, given: Given, held: list[Any]) -> list[Stretch]:
        """The memory of the parameters with a gradient, of their states and of gradients."""
        found = []
        for i in given.active:
            record = self._records[i]
            named = zip(self._tensors_of(given, held, i), record.labels(), strict=True)
            found += [Stretch.of(local(tensor), name) for tensor, name in named]
            if i in given.rows:
                spans = given.rows[i].spans
                found += [Stretch(at, at + n, record.label, False, None) for at, n in spans]
            elif given.addresses[i] == local(given.gradients[i]).data_ptr():
                gradient = local(given.gradients[i])
                found.append(Stretch.of(gradient, record.label, is_written=False))
        return found

    @torch.no_grad()
    def _copy(self, given: Given, held: list[Any]) -> None:
        """Copy what does not lie as the kernels need it; the step is one of the copies."""
        for part in given.parts:
            variables = part.batch.variables
            for t, i in enumerate(part.batch.positions.tolist()):
                record = self._records[i]
                if not record.copied:
                    continue
                for k, tensor, copy in record.copies(self._tensors_of(given, held, i)):
                    variables.put(t, record.columns.index(k), copy.data_ptr())
                    given.copies.append((tensor, copy))


def has_finite(given: Given) -> bool:
    """Whether no gradient has a NaN or an infinity: one read of all of them.

    On a device the host waits for the answer.
    """
    on_host = [(p.batch, p.gradients(given)) for p in given.parts if not p.is_on_device]
    return all(all_finite(*found) for found in by_storage(on_host)) and are_finite(
        *on_device(given)
    )


def on_device(given: Given) -> tuple[list[tuple[Batch, Any]], list[Any]]:
    """The batches on devices with their gradients; the arrays of their parameters and gradients."""
    parts = [part for part in given.parts if part.is_on_device]
    places = [i for part in parts for i in part.batch.positions.tolist()]
    parameters = [array_of(local(given.parameters[i])) for i in places]
    gradients = [given.rows[i].arrays if i in given.rows else
                 (array_of(local(given.gradients[i])),) for i in places]  # fmt: skip
    by_batch = [(part.batch, part.gradients(given)) for part in parts]
    return by_batch, [*parameters, *chain.from_iterable(gradients)]


def finish(given: Given) -> None:
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
