"""The parameters of an optimizer, each recorded once; a step chooses those with a gradient."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import is_
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.dense import all_finite
from ....kernels.keeping import key_of
from ....kernels.private import counting_changes
from ....kernels.storage import STORAGES, real_of, storage_of
from ....kernels.tables import TensorTable
from ....ops.runtime.errors import reject
from ....ops.runtime.step import Variables
from ...engine.device import are_finite
from ...engine.layout import Batch
from ...engine.reader import by_storage
from .chosen import Chosen, StepInputs
from .memory import DTYPE_NAMES, DTYPES, array_of
from .part import Group, ParameterBatch, RandomBits, RuleChoice
from .record import CheckedParameter, Kind, Record
from .state import names_of

_count_changes = counting_changes()
_KEPT_SETS = 16  # of parameters that had gradients: layers may take turns
_TRIALS = 6  # to find states as they were recorded, which another thread may change meanwhile


States = Mapping[Any, Any]
"""The states of parameters by their names."""
EntryMaker = Callable[
    [Tensor, Any, int, str, RuleChoice, dict[Tensor, Any]], CheckedParameter | None
]
"""Checks a parameter with its gradient, its group, its name and the choice of the group. A state
that it lacks is made, and put into the last argument; None: its class leaves it out."""


class Binding:
    """Parameters with their states, recorded as they come to have gradients.

    One step at a time uses it; it is dropped when that fails.

    Attributes:
        records: by the identity of a parameter, which is in a group or has a state.

    Raises:
        RuntimeError: a tensor does not fit; in `read`.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parameters: tuple[Tensor, ...] = ()
        self._sizes: Sequence[int] = ()
        self._choices: Sequence[RuleChoice] = ()
        self._names: list[str] = []
        self.records: dict[int, Record] = {}
        self._kinds: dict[Kind, Kind] = {}
        self._sets: dict[tuple[int, ...], Chosen] = {}
        self._n_kept = 0  # parameters in these sets
        self._last: Chosen | None = None

    # What follows from the records

    def arrange(
        self, parameters: tuple[Tensor, ...], sizes: Sequence[int], choices: Sequence[RuleChoice],
        groups: Sequence[Group], states: States,
    ) -> bool:  # fmt: skip
        """Take over all parameters, the sizes of groups and their choices; whether they are others
        than before.
        """
        if (
            sizes == self._sizes
            and choices == self._choices
            and all(map(is_, parameters, self._parameters))
        ):
            return False
        self._parameters, self._sizes, self._choices = parameters, sizes, choices
        self._names, gone = names_of(groups), {*self.records}
        gone -= {*map(id, parameters), *map(id, [*states])}
        groups_of = chain.from_iterable(map(repeat, range(len(sizes)), sizes))
        for p, k, name in zip(parameters, groups_of, self._names, strict=True):
            entry = self.records[id(p)].entry if id(p) in self.records else None
            if entry and (entry.group, entry.name, entry.asked) != (k, name, choices[k]):
                gone.add(id(p))
        self._forget(gone)
        return True

    def _forget(self, keys: set[int]) -> None:
        """Drop the records of parameters, by their identities."""
        for key in keys:
            del self.records[key]
        if keys:
            self._sets = {key: own for key, own in self._sets.items() if keys.isdisjoint(key)}
            self._last = None

    def _known(self, active: Sequence[Tensor]) -> Chosen | None:
        """The calls for these parameters, if they have been chosen before."""
        last = self._last
        if last and len(last.records) == len(active) and all(map(is_, last.parameters, active)):
            return last
        return self._sets.get(tuple(map(id, active)))

    def _choose(self, active: Sequence[Tensor]) -> Chosen:
        """Choose the kernel calls for parameters that have a gradient; sparse ones come first."""
        keys = tuple(map(id, active))
        if len({*keys}) < len(keys):
            self._refuse_twice(keys)
        records, places = [*map(self.records.__getitem__, keys)], dict[int, list[int]]()
        for i, record in enumerate(records):
            places.setdefault(id(record.kind), []).append(i)
        parts = [self._part(records, own) for own in places.values()]
        parts.sort(key=lambda part: not part.batch.row_sparse)
        found = Chosen(self._where, records, parts)
        self._n_kept += len(keys)
        if self._n_kept > _KEPT_SETS * len(self._parameters):
            self._sets, self._n_kept = {}, len(keys)
        self._sets[keys] = found
        return found

    def _refuse_twice(self, keys: Sequence[int]) -> NoReturn:
        """Refuse a parameter that the groups have twice."""
        named = zip(map(id, self._parameters), self._names, strict=True)
        one, other, *_ = [name for key, name in named if keys.count(key) > 1]
        expected, got = "memory of its own", f"that of {one}"
        reject(RuntimeError, self._where, other, "shares memory", expected, got)

    def _part(self, every: Sequence[Record], places: list[int]) -> ParameterBatch:
        """The kernel call for parameters of a kind, by their places among all of a step."""
        records = [every[i] for i in places]
        kind, n, positions = records[0].kind, len(records[0].kind.dtypes), np.array(places)
        w, *s = map(storage_of, kind.dtypes)
        first = np.zeros(len(places) + 1, np.int64)
        np.cumsum([record.size for record in records], out=first[1:])
        addresses = np.array([record.addresses[:n] for record in records], np.int64)
        table = TensorTable(addresses, first, np.array([record.width for record in records]))
        variables = Variables(tuple([(record,) for record in records]), w, tuple(s), table)
        labels = tuple([f"{self._where}: {r.label}" for r in records]) if kind.is_sparse else ()
        batch = Batch(
            positions, variables, STORAGES[kind.gradient], kind.is_sparse, positions,
            len(places) == len(every), real_of(w).carrier, labels,
        )  # fmt: skip
        numbers = tuple(name for name in records[0].numbers if name != "step")
        draws = None
        if kind.rule.keeping is not None and kind.rule.keeping.hp:
            keys = np.array([key_of(record.name) for record in records], np.uint64)
            draws = RandomBits(keys, np.array([record.begin for record in records]))
        return ParameterBatch(
            kind.choice, kind.rule, batch, [record.group for record in records], numbers,
            kind.device.index if kind.device.type == "cuda" else None, draws,
        )  # fmt: skip

    # Steps

    def read(
        self, active: tuple[Tensor, ...], gradients: tuple[Any, ...], states: States,
        entry_of: EntryMaker,
    ) -> StepInputs | None:  # fmt: skip
        """The inputs of a step with these parameters of the groups and their gradients.

        None: another thread changes states meanwhile.
        """
        new: dict[Tensor, Any] = {}
        began: Collection[int] = ()  # parameters that had no state, by their identities
        for _ in range(_TRIALS):
            chosen = self._known(active)
            if chosen is None:
                missing = [i for i, p in enumerate(active) if id(p) not in self.records]
                left, more = self._record(missing, active, gradients, entry_of, new)
                began = {*began, *more}
                if left:
                    active, gradients = (
                        tuple([x for i, x in enumerate(every) if i not in left])
                        for every in (active, gradients)
                    )
                chosen = self._choose(active)
            found = [*map(states.get, active)]
            if new:
                found = [new.get(p, own) for p, own in zip(active, found, strict=True)]
            if not chosen.is_still(found):
                self._renew(chosen.stale(found), active, gradients, found)
                continue
            own = chosen.read(gradients)
            if own is None:
                if unlike := chosen.unlike(gradients):
                    self._forget({id(active[i]) for i in unlike})
                    continue
                own = chosen.read_each(gradients)
            self._last = chosen
            copies = chosen.copied() if chosen.has_copies else ()
            are_new = [id(p) in began for p in active] if began else ()
            return StepInputs(chosen, gradients, *own, found, new, are_new, copies)
        return None

    def _record(
        self, places: Sequence[int], active: Sequence[Tensor], gradients: Sequence[Any],
        entry_of: EntryMaker, new: dict[Tensor, Any],
    ) -> tuple[set[int], set[int]]:  # fmt: skip
        """Record parameters; the places of those that their class leaves out, and the identities of
        those that had no state.
        """
        left, began, ends = set[int](), set[int](), [*accumulate(self._sizes)]
        numbers = {id(p): n for n, p in enumerate(self._parameters)} if places else {}
        for i in places:
            n = numbers[id(active[i])]
            k = bisect_right(ends, n)
            entry = entry_of(active[i], gradients[i], k, self._names[n], self._choices[k], new)
            if entry is None:
                left.add(i)
                continue
            if entry.is_new:
                began.add(id(active[i]))
            self._add(Record(self._where, entry, gradients[i]))
        return left, began

    def _add(self, record: Record) -> None:
        record.kind = self._kinds.setdefault(record.kind, record.kind)
        self.records[id(record.parameter)] = record

    def _renew(
        self, places: Sequence[int], active: Sequence[Tensor], gradients: Sequence[Any],
        states: Sequence[Any],
    ) -> None:  # fmt: skip
        """Record parameters anew that lie elsewhere; forget those of which more has changed."""
        known = [self.records[id(active[i])] for i in places]
        self._forget({id(active[i]) for i in places})
        for i, record in zip(places, known, strict=True):
            renewed = record.renewed(states[i] or {}, gradients[i])
            if renewed is not None:
                self._add(renewed)


def has_finite(given: StepInputs) -> bool:
    """Whether no gradient has a NaN or an infinity: one read of all of them.

    On a device the host waits for the answer.
    """
    parts = given.chosen.parts
    on_host = [(part.batch, given.of(part)) for part in parts if part.device is None]
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
    records = given.chosen.records
    return [
        (
            parts,
            [(part.batch, given.of(part)) for part in parts],
            [array_of(records[parts[0].places[0]].here[0])],
        )
        for parts in found.values()
    ]


def finish(given: StepInputs) -> None:
    """After a step: copy back what was updated in copies, and tell autograd."""
    if given.copies:
        with torch.inference_mode():  # which may write to every tensor
            for tensor, copy in given.copies:
                tensor.copy_(copy)
    _count_changes(given.chosen.written)


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
