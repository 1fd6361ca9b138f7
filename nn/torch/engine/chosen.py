"""The parameters of a step, as they were recorded, beside what they are now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_, itemgetter, methodcaller, mul
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.tensor_counts import TensorCount
from ....kernels.private import part_readers
from ....ops.runtime.bags.tensor import BagTensor
from ....ops.runtime.row_step import RowGradient
from .memory import (
    PLAIN_TYPES,
    Span,
    Written,
    address_of,
    are_there,
    bytes_of,
    check_no_alias,
    dtype_of,
    is_contiguous,
    numel_of,
    shape_of,
)  # fmt: skip
from .part import ParameterBatch
from .record import Record, is_count, layout_of
from .tensors import local

_indices_of, _values_of, _to_local = *part_readers(), methodcaller("to_local")
_is_negated, _device_of, _traits_of = Tensor.is_neg, Tensor.get_device, attrgetter("traits")
Found = tuple[np.ndarray, Mapping[int, RowGradient], Sequence[Any]]
"""The gradients of a step as the first fields of `StepInputs` have them."""
_NO_ROWS: Mapping[int, RowGradient] = MappingProxyType({})


class StepInputs(NamedTuple):
    """The parameters and gradients of one step, read and checked."""

    chosen: Chosen
    gradients: Sequence[Any]
    addresses: np.ndarray  # int64: those of the dense gradients, at the places of their parameters
    rows: Mapping[int, RowGradient]  # the sparse ones, by place
    held: Sequence[Any]  # what keeps alive the memory of copies that are read
    found: Sequence[Any]  # the dict of states of each parameter
    new: Mapping[Tensor, Any]  # the states of parameters that had none
    are_new: Sequence[bool]  # of each parameter, whether it had none; empty: all had
    copies: Sequence[tuple[Tensor, Tensor]]  # what is updated in copies, and the copies

    def states(self, i: int) -> dict[str, Any]:
        """The states of a parameter that a step writes, by name."""
        record = self.chosen.records[i]
        found = dict(zip(record.traits.names, record.states, strict=True))
        return {**found, "step": self.step(i)} if record.traits.has_own_count else found

    def step(self, i: int) -> Any:
        """The count of updates of a parameter whose updates are counted."""
        record = self.chosen.records[i]
        if record.traits.has_own_count:
            return self.found[i]["step"]
        return record.states[record.traits.names.index("step")]

    def of(self, part: ParameterBatch) -> Any:
        """The gradients of a kernel call: addresses, or rows."""
        if part.batch.row_sparse:
            return [*map(self.rows.__getitem__, part.places)]
        return self.addresses if part.batch.is_all else self.addresses[part.batch.positions]


class Columns:
    """The attributes of records one by one: those that are tuples joined, the others by record.

    Attributes:
        traits: each once.
        is_one: whether all records share one, and each process has all of its parameters.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        columns = [*zip(*map(attrgetter("columns"), records), strict=True)] or [()] * 9
        self.arrays, self.singles, self.states, self.places, self.single_places, self.numels = (
            [*chain.from_iterable(own)] for own in columns[:6]
        )
        self.widths, self.groups, traits = columns[6:]
        self.traits = [*dict(zip(map(id, traits), traits, strict=True)).values()]
        self.is_one = len(self.traits) == 1 and self.traits[0].is_plain

    def of(self, name: str) -> list[Any]:
        """The joined tuples of an attribute."""
        if self.is_one:  # then it is that of each
            return [*getattr(self.records[0], name)] * len(self.records)
        return [*chain.from_iterable(map(attrgetter(name), self.records))]


class Expected:
    """The parameters and states of records, as they were."""

    def __init__(self, columns: Columns) -> None:
        self._records = records = columns.records
        self.traits = columns.traits
        # How to get states of those names, whether they are several, of whom, and what they were.
        self._states = []
        for names in {own.names for own in self.traits} - {()}:
            places, known = [*range(len(records))], columns.states
            if len(self.traits) > 1:
                places = [i for i, own in enumerate(records) if own.traits.names == names]
                known = [*chain.from_iterable([records[i].states for i in places])]
            self._states.append((itemgetter(*names), len(names) > 1, places, known))
        self._arrays, self._singles = columns.arrays, columns.singles
        self._forms = columns.places + columns.single_places + columns.numels
        self._forms += columns.of("are_contiguous") + columns.of("dtypes")
        self._is_plain = all(
            own.is_plain and not own.has_rows and not own.has_own_count for own in self.traits
        )
        self._whole: list[Tensor] = []  # parameters and states, where some are distributed
        if not self._is_plain:
            self._counts = self.places("has_own_count")
            layouts = [r.layouts or (None,) * len(r.arrays) for r in records]
            each = enumerate(chain.from_iterable(layouts))
            self._layouts = [(k, own) for k, own in each if own is not None]
            tables = [records[i] for i in self.places("has_rows")]
            self._tables = [x for record in tables for x in record.arrays]
            self._shapes = [x for record in tables for x in record.shapes]
            parts = self.places("is_distributed")
            self._parts = [records[i].parameter for i in parts]
            if parts:
                whole = [(r.parameter, *r.states[: len(r.arrays) - 1]) for r in records]
                self._whole = [*chain.from_iterable(whole)]
                firsts = [*accumulate(map(len, map(attrgetter("arrays"), records)), initial=0)]
                self._part_places = [firsts[i] for i in parts]

    def places(self, trait: str) -> list[int]:
        """The places of records that have a trait."""
        has, n = attrgetter(trait), len(self._records)
        if len({*map(bool, map(has, self.traits))}) < 2:
            return [*range(n)] if self.traits and has(self.traits[0]) else []
        return [i for i, record in enumerate(self._records) if has(record.traits)]

    @property
    def written(self) -> list[Tensor]:
        """Tensors that a step writes and whose changes autograd counts."""
        every = (self._whole or self._arrays) + self._singles
        if self.places("is_inference"):
            return [tensor for tensor in every if not tensor.is_inference()]
        return every

    def is_still(self, states: Sequence[Any]) -> bool:
        """Whether parameters and their states, by name, are the tensors that were recorded, and lie
        as they did.
        """
        try:
            for get, are_several, places, known in self._states:
                of_some = states if len(places) == len(states) else [states[i] for i in places]
                own = map(get, of_some)
                if not all(map(is_, chain.from_iterable(own) if are_several else own, known)):
                    return False
            arrays, singles = self._arrays, self._singles
            if self._whole:
                arrays = [*arrays]
                with torch.no_grad():  # the shard of a parameter may be exchanged, as by FSDP
                    for k, own in zip(self._part_places, map(_to_local, self._parts), strict=True):
                        arrays[k] = own
            found = [
                *map(address_of, arrays), *map(address_of, singles), *map(numel_of, arrays),
                *map(is_contiguous, arrays), *map(dtype_of, arrays),
            ]  # fmt: skip
            return found == self._forms and (self._is_plain or self._is_rest_still(arrays, states))
        except (KeyError, RuntimeError, TypeError):  # a state is gone, or its memory
            return False

    def _is_rest_still(self, arrays: Sequence[Tensor], states: Sequence[Any]) -> bool:
        """Whether shapes and layouts that matter are still those, and counts are numbers."""
        return (
            [*map(shape_of, self._tables)] == self._shapes
            and (not self._layouts or all(layout_of(arrays[k]) == own for k, own in self._layouts))
            and (not self._counts or all(is_count(states[i]["step"]) for i in self._counts))
        )


class Chosen:
    """The parameters that have a gradient in a step, and its kernel calls.

    Attributes:
        records, parameters, parts: those of the step.
        counted: the places of parameters whose updates are counted.
        count: counts that compiled code writes: of all parameters, or of none.
        written: the tensors that a step writes and whose changes autograd counts.
    """

    def __init__(
        self, where: str, columns: Columns, parameters: tuple[Tensor, ...],
        parts: Sequence[ParameterBatch], memory: Written,
    ) -> None:  # fmt: skip
        self._where, self.parameters, self.parts, self._memory = where, parameters, parts, memory
        self.records, expected = columns.records, Expected(columns)
        self.counted = expected.places("is_counted")
        self.has_copies = any(own.copied for own in expected.traits)
        self.has_devices = any(part.device is not None for part in parts)
        self.has_deferred = any(part.choice.sleeps for part in parts)
        self.written, self.is_still = expected.written, expected.is_still
        counts = [own.count_place for own in expected.traits]
        if -1 in counts or not counts:
            places = []
        elif columns.is_one:
            places = columns.single_places[counts[0] :: len(expected.traits[0].single_dtypes)]
        else:
            places = [record.single_places[record.traits.count_place] for record in self.records]
        self.count = TensorCount(places)
        self._expect_gradients(columns, expected)
        if not memory.has_no_alias:
            self._check_no_alias(())

    @torch.no_grad()
    def stale(self, states: Sequence[Any]) -> list[int]:
        """The places of parameters that are not as they were, or their states are not."""
        pairs = enumerate(zip(self.records, states, strict=True))
        return [i for i, (own, state) in pairs if not Expected(Columns([own])).is_still([state])]

    def _check_no_alias(self, gradients: Iterable[Span]) -> None:
        """Refuse tensors of a step that share memory which it writes to."""
        found = [*gradients]
        for record in self.records:
            pairs = zip((*record.arrays, *record.singles), record.labels(), strict=True)
            found += [Span.of(tensor, name) for tensor, name in pairs]
        check_no_alias(self._where, found)

    # Gradients

    def _expect_gradients(self, columns: Columns, expected: Expected) -> None:
        every, dense, n = self.records, self.records, len(self.records)
        self._rows = rows = [i for p in self.parts if p.batch.row_sparse for i in p.places]
        self._dense, self._strides = [*range(n)], []
        if rows:
            sparse = {*rows}
            self._dense = [i for i in self._dense if i not in sparse]
            dense = [every[i] for i in self._dense]
        self._devices = [*map(attrgetter("device"), dense)]
        if columns.is_one and not rows:
            sizes, dtype = columns.numels[:: len(every[0].numels)], every[0].traits.gradient
            self._forms = [*sizes, *[True] * n, *[dtype] * n, *[False] * n]
        else:
            strides = [*map(attrgetter("gradient_stride"), dense)]
            self._forms = [
                *map(attrgetter("size"), dense), *map(is_, strides, repeat(None)),
                *map(attrgetter("traits.gradient"), dense), *repeat(False, len(dense)),
            ]  # fmt: skip
            self._strides = [(k, own) for k, own in enumerate(strides) if own]
        self._last, self._found = [-1] * len(dense), np.zeros(n, np.int64)
        parts_of_others = expected.places("is_distributed")
        self._placements = [self.parameters[i].placements for i in parts_of_others]
        if rows:
            tables = [every[i] for i in rows]
            traits = [*map(_traits_of, tables)]
            self._dtypes = [own.gradient for own in traits]
            self._are_bags = {BagTensor} if any(own.is_bags for own in traits) else set()
            self._are_plain = all(own.n_sparse == 1 and own.is_plain for own in traits)
            self._widths = [math.prod(record.shape[1:]) for record in tables]
            self._owners = [record.parameter for record in tables]
            self._table_shapes = [record.shapes[0] for record in tables]

    def read(self, gradients: Sequence[Any]) -> Found | None:
        """The gradients of a step, if they lie as the kernels need it."""
        dense, rows = gradients, _NO_ROWS
        held: Sequence[Any] = ()
        if self._rows:
            dense = [*map(gradients.__getitem__, self._dense)]
            found = self._read_rows([*map(gradients.__getitem__, self._rows)])
            if found is None:
                return None
            rows = dict(zip(self._rows, found, strict=True))
        if self._placements:
            given = [getattr(g, "placements", None) for g in dense]
            if [own for own in given if own is not None] != self._placements:
                return None
            with torch.no_grad():
                dense = held = [*map(local, dense)]
        if not {*map(type, dense)} <= PLAIN_TYPES:
            return None
        try:
            places = [*map(address_of, dense)]
        except RuntimeError:  # it is sparse now
            return None
        forms = [
            *map(numel_of, dense), *map(is_contiguous, dense), *map(dtype_of, dense),
            *map(_is_negated, dense),
        ]  # fmt: skip
        if forms != self._forms or (
            self._strides and any(dense[k].stride() != own for k, own in self._strides)
        ):
            return None
        if places != self._last:
            sizes = bytes_of(dense)
            if (
                [*map(_device_of, dense)] != self._devices
                or not are_there(dense, places, sizes)
                or self._memory.overlaps(places, sizes)
            ):
                return None
            self._last = places
            self._found[self._dense] = places
        return self._found, rows, held

    def _read_rows(self, gradients: Sequence[Any]) -> list[RowGradient] | None:
        """Sparse gradients whose parts lie as the kernels need it; None: some do not."""
        if self._are_bags:
            are_like = {*map(type, gradients)} == self._are_bags
            if not are_like or [x.dtype for x in gradients] != self._dtypes:
                return None
            return [own.gradient for own in gradients]
        is_plain = self._are_plain and {*map(type, gradients)} <= PLAIN_TYPES
        # Of a batch that others have a part of.
        if not is_plain or any(map(hasattr, self._owners, repeat("row_positions"))):
            return None
        try:
            indices, values = [*map(_indices_of, gradients)], [*map(_values_of, gradients)]
        except RuntimeError:  # it is dense now
            return None
        every, lengths = indices + values, [*map(numel_of, indices)]
        numels = [*lengths, *map(mul, lengths, self._widths)]
        if not (
            [*map(shape_of, gradients)] == self._table_shapes
            and [*map(numel_of, every)] == numels
            and all(map(is_contiguous, every))
            and [*map(dtype_of, every)] == [torch.int64] * len(indices) + self._dtypes
            and not any(map(_is_negated, values))
            and {*map(_device_of, every)} == {-1}
        ):
            return None
        found, sizes = [*map(address_of, every)], bytes_of(every)
        if not are_there(every, found, sizes) or self._memory.overlaps(found, sizes):
            return None
        n = len(indices)
        sources = {
            "indices": found[:n], "index_bytes": repeat(8), "length": lengths, "values": found[n:],
        }  # fmt: skip
        return RowGradient.of_tables(indices, values, sources)

    def unlike(self, gradients: Sequence[Any]) -> list[int]:
        """The places of gradients that are of another kind than those recorded."""
        pairs = enumerate(zip(self.records, gradients, strict=True))
        return [i for i, (record, gradient) in pairs if not record.takes(gradient)]

    @torch.no_grad()
    def read_each(self, gradients: Sequence[Any]) -> Found:
        """The gradients of a step, which may lie anyhow, but not in what is written."""
        rows, held, spans = dict[int, RowGradient](), [], list[Span]()
        self._last = []
        for i, (record, gradient) in enumerate(zip(self.records, gradients, strict=True)):
            if record.traits.kind.is_sparse:
                rows[i] = own = record.rows(gradient)
                spans += [Span(at, at + n, record.label, False, None) for at, n in own.spans]
                continue
            held.append(found := record.dense(gradient))
            self._found[i] = found.data_ptr()
            spans.append(Span.of(found, record.label, is_written=False))
        if self._memory.overlaps([s.begin for s in spans], [s.end - s.begin for s in spans]):
            self._check_no_alias(spans)
        return self._found, rows, held

    @torch.no_grad()
    def copied(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of what does not lie as the kernels need it; the step is one of these."""
        made = []
        for part in self.parts:
            for t, i in enumerate(part.places):
                for k, tensor, copy in self.records[i].copies():
                    part.batch.variables.put(t, k, copy.data_ptr())
                    made.append((tensor, copy))
        return made
