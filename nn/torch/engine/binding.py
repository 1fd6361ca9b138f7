"""The parameters of an optimizer, each recorded once; a step chooses those with a gradient."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, count, repeat
from operator import is_
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.dense import all_finite
from ....kernels.storage import STORAGES, storage_of
from ....kernels.tables import TensorTable
from ....ops.runtime.errors import reject
from ....ops.runtime.step import Variables
from ...engine.batch import Batch, RandomBits, by_storage
from ...engine.device import are_finite
from .chosen import Chosen, Columns, StepInputs
from .memory import DTYPE_NAMES, DTYPES, PLAIN_TYPES, Written, array_of
from .part import Group, ParameterBatch, RuleChoice
from .record import BatchKind, CheckedParameter, Record, RecordTraits
from .state import names_of
from .tensors import of_mesh

_KEPT_SETS = 16  # of parameters that had gradients: layers may take turns
_TRIALS = 6  # to find states as they were recorded, which another thread may change meanwhile


States = Mapping[Any, Any]
"""The states of parameters by their names."""
EntryMaker = Callable[
    [Tensor, Any, int, str, RuleChoice, dict[Tensor, Any], CheckedParameter | None],
    CheckedParameter | None,
]
"""`Declaration._entry`, of an optimizer."""


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
        self._numbers: dict[int, int] = {}  # of parameters, by their identities
        self.records: dict[int, Record] = {}
        self._kinds: dict[BatchKind, BatchKind] = {}
        self._traits: dict[RecordTraits, RecordTraits] = {}
        self._shared = set[int]()  # identities of these
        self._sets: dict[tuple[int, ...], Chosen] = {}
        self._n_kept = 0  # parameters in these sets
        self._memory: Written | None = None  # of the records
        self._examples: dict[Any, Record] = {}  # by group, dtypes and form
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
        if choices != self._choices:
            self._examples = {}
        self._parameters, self._sizes, self._choices = parameters, sizes, choices
        self._names, gone = names_of(groups), {*self.records}
        self._numbers = dict(zip(map(id, parameters), count()))
        gone -= {*map(id, parameters), *map(id, [*states])}
        groups_of = chain.from_iterable(map(repeat, range(len(sizes)), sizes))
        for p, k, name in zip(parameters, groups_of, self._names, strict=True):
            own = self.records[id(p)].checked if id(p) in self.records else None
            if own and (own.group, own.name, own.asked) != (k, name, choices[k]):
                gone.add(id(p))
        self._forget(gone)
        return True

    def forget(self) -> None:
        """Drop all records: other tensors stand in the place of theirs."""
        self._forget({*self.records})

    def _forget(self, keys: set[int]) -> None:
        """Drop the records of parameters, by their identities."""
        for key in keys:
            del self.records[key]
        if keys:
            self._sets = {key: own for key, own in self._sets.items() if keys.isdisjoint(key)}
            self._last = self._memory = None

    def _choose(self, active: Sequence[Tensor]) -> Chosen:
        """Choose the kernel calls for parameters that have a gradient; sparse ones come first."""
        keys = tuple(map(id, active))
        if len({*keys}) < len(keys):
            self._refuse_twice(keys)
        columns, n = Columns([*map(self.records.__getitem__, keys)]), len(keys)
        each = [*dict.fromkeys(id(own.kind) for own in columns.traits)]
        if len(each) == 1:
            parts = [self._part(columns, np.arange(n), n)]
        else:
            records, parts = columns.records, []
            kinds = np.array([id(record.traits.kind) for record in records])
            for kind in each:
                places = np.flatnonzero(kinds == kind)
                own = Columns([records[i] for i in places.tolist()])
                parts.append(self._part(own, places, n))
        parts.sort(key=lambda part: not part.batch.row_sparse)
        if self._memory is None:
            known = self.records.values()
            starts = [x for record in known for x in (*record.places, *record.single_places)]
            self._memory = Written(starts, [n for record in known for n in record.n_bytes])
        found = Chosen(self._where, columns, tuple(active), parts, self._memory)
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

    def _part(self, columns: Columns, positions: np.ndarray, n: int) -> ParameterBatch:
        """The kernel call for parameters of a kind, by their places among the ``n`` of a step."""
        records, traits = columns.records, columns.traits[0]
        kind, n_arrays = traits.kind, len(traits.kind.dtypes)
        w, *s = map(storage_of, kind.dtypes)
        first = np.fromiter(accumulate(columns.numels[::n_arrays], initial=0), np.int64)
        addresses = np.fromiter(columns.places, np.int64).reshape(-1, n_arrays)
        table = TensorTable(addresses, first, np.fromiter(columns.widths, np.int64))
        variables = Variables(tuple(zip(records)), w, tuple(s), table)
        labels = tuple([f"{self._where}: {r.label}" for r in records]) if kind.is_sparse else ()
        begins = np.array([record.begin for record in records])
        batch = Batch(
            kind.rule, positions, variables, STORAGES[kind.gradient], kind.is_sparse, positions,
            len(records) == n, labels, np.array(columns.groups),
            RandomBits.of(kind.rule, [record.name for record in records], begins),
        )  # fmt: skip
        numbers = tuple(name for name in traits.numbers if name != "step")
        device = kind.device.index if kind.device.type == "cuda" else None
        return ParameterBatch(kind.choice, batch, numbers, device)

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
            chosen = self._last
            if (
                chosen is None
                or len(chosen.parameters) != len(active)
                or not all(map(is_, chosen.parameters, active))
            ):
                chosen = self._sets.get(tuple(map(id, active)))
            if chosen is None:
                if not all(map(self.records.__contains__, map(id, active))):
                    left, more = self._record(active, gradients, entry_of, new)
                    began = {*began, *more}
                    active, gradients = (
                        tuple([x for i, x in enumerate(every) if i not in left])
                        for every in (active, gradients)
                    )
                chosen = self._choose(active)
            if len(states) == len(active) and all(map(is_, states, active)):
                found = [*states.values()]  # which hashes no tensor, a call of Python each
            else:
                found = [*map(states.get, active)]
            if new:
                found = [new.get(p, own) for p, own in zip(active, found, strict=True)]
            if not chosen.is_still(found):
                self._renew(chosen.stale(found), active, found)
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
            addresses, rows, held = own
            given = chosen, gradients, addresses, rows, held, found, new, are_new, copies
            return tuple.__new__(StepInputs, given)  # no call of Python
        return None

    @torch.no_grad()
    def _record(
        self, active: Sequence[Tensor], gradients: Sequence[Any], entry_of: EntryMaker,
        new: dict[Tensor, Any],
    ) -> tuple[set[int], set[int]]:  # fmt: skip
        """Record parameters that are not; the places of those that their class leaves out, and the
        identities of those that had no state.
        """
        left, began, ends = set[int](), set[int](), [*accumulate(self._sizes)]
        pending: dict[Any, list[tuple[int, CheckedParameter]]] = {}
        for i, key in enumerate(map(id, active)):
            if key in self.records:
                continue
            n = self._numbers[key]
            k = bisect_right(ends, n)
            p, gradient, name = active[i], gradients[i], self._names[n]
            form = k, p.shape, p.dtype, p.get_device(), type(gradient), gradient.dtype
            example = self._examples.get(form)
            if example and not (
                type(p) in PLAIN_TYPES
                and p.is_contiguous()
                and not hasattr(p, "row_shard")
                and example.takes(gradient)
            ):
                example = None
            like = None if example is None else example.checked
            checked = entry_of(p, gradient, k, name, self._choices[k], new, like)
            if checked is None:
                left.add(i)
                continue
            if checked.is_new:
                began.add(key)
            if example:
                pending.setdefault(form, []).append((i, checked))
            else:
                self._add(made := Record(self._where, checked, gradient))
                if made.traits.is_plain:
                    self._examples[form] = made.example()
        for form, entries in pending.items():
            example, given = self._examples[form], [checked for _, checked in entries]
            found: Sequence[Record | None] | None = example.alike(given)
            if found is None:  # not all lie alike; some may
                found = [next(iter(example.alike([own]) or ()), None) for own in given]
            for (i, checked), record in zip(entries, found, strict=True):
                if record is not None:
                    self._add(record)
                    continue
                p, gradient = active[i], gradients[i]  # one of its states lies in another way
                anew = entry_of(p, gradient, checked.group, checked.name, checked.asked, new, None)
                if anew is None:
                    left.add(i)
                else:
                    self._add(Record(self._where, anew, gradient))
        return left, began

    def _add(self, record: Record) -> None:
        own = record.traits
        if id(own) not in self._shared:  # that of an example is
            kind = self._kinds.setdefault(own.kind, own.kind)
            own = own._replace(kind=kind)
            record.traits = own = self._traits.setdefault(own, own)
            record.collect()
            self._shared.add(id(own))
        self.records[id(record.parameter)], self._memory = record, None

    @torch.no_grad()
    def _renew(
        self, places: Sequence[int], active: Sequence[Tensor], states: Sequence[Any]
    ) -> None:
        """Record parameters anew that lie elsewhere; forget those of which more has changed."""
        known = [self.records[id(active[i])] for i in places]
        self._forget({id(active[i]) for i in places})
        for i, record in zip(places, known, strict=True):
            for renewed in record.alike([record.checked._replace(state=states[i] or {})]) or ():
                self._add(renewed)


def has_finite(given: StepInputs) -> bool:
    """Whether no gradient has a NaN or an infinity: one read of all of them.

    On a device the host waits for the answer, and on a mesh all processes for each other.
    """
    chosen = given.chosen
    on_host = [(part.batch, given.of(part)) for part in chosen.parts if part.device is None]
    is_finite = all(all_finite(*found) for found in by_storage(on_host)) and all(
        are_finite(by_batch, arrays) for _, by_batch, arrays in on_devices(given)
    )
    # Each asks of each mesh, whatever it has found: the others ask too.
    parts: list[Any] = [r.parameter for r in chosen.records if r.traits.is_distributed]
    for mesh in dict.fromkeys(part.device_mesh for part in parts):
        is_finite = min(of_mesh(mesh, is_finite)) > 0.0
    return is_finite


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
            [array_of(records[parts[0].places[0]].arrays[0])],
        )
        for parts in found.values()
    ]


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
