"""The parameters of a step, as they were recorded, beside what they are now."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import add, attrgetter, ge, gt, is_, itemgetter, mul
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ....kernels.cpu.tensor_counts import TensorCount
from ....kernels.private import parts_of
from ....kernels.tables import RowSource
from ....ops.runtime.bags.tensor import BagTensor
from ....ops.runtime.row_step import RowGradient
from .memory import Stretch, check_apart
from .part import ParameterBatch
from .record import Record, address_of, dtype_of, is_contiguous, is_count, layout_of, numel_of, shape_of
from .tensors import local

# A step asks all tensors the same, one question after the other: `map` calls them from C.
_is_negated, _device_of, _storage_of = Tensor.is_neg, Tensor.get_device, Tensor.untyped_storage
_offset_of, _itemsize_of = Tensor.storage_offset, Tensor.element_size
_bytes_of = torch.UntypedStorage.nbytes
_PLAIN = {Tensor, Parameter}  # another type may answer by functions of its own


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
        found = dict(zip(record.names, record.tensors[1:], strict=True))
        return {**found, "step": self.step(i)} if record.has_own_count else found

    def step(self, i: int) -> Any:
        """The count of updates of a parameter whose updates are counted."""
        record = self.chosen.records[i]
        is_own = record.has_own_count
        return self.found[i]["step"] if is_own else record.tensors[1 + record.names.index("step")]

    def of(self, part: ParameterBatch) -> Any:
        """The gradients of a kernel call: addresses, or rows."""
        if part.batch.row_sparse:
            return [*map(self.rows.__getitem__, part.places)]
        return self.addresses if part.batch.is_all else self.addresses[part.batch.positions]


class Expected:
    """The parameters and states of records, as they were."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records, places_by_names = records, dict[tuple[str, ...], list[int]]()
        for i, record in enumerate(records):
            places_by_names.setdefault(record.names, []).append(i)
        # How to get states of those names, whether they are several, of whom, and what they were.
        self._states = [
            (itemgetter(*names), len(names) > 1, places,
             [*chain.from_iterable([records[i].tensors[1:] for i in places])])
            for names, places in places_by_names.items() if names
        ]  # fmt: skip
        self._counts = [i for i, record in enumerate(records) if record.has_own_count]
        self._is_distributed = any([record.is_distributed for record in records])
        self.tensors, self._here = self._every("tensors"), self._every("here")
        self._arrays, self._is_array = self._every("arrays"), self._every("is_array")
        self.addresses, self.n_bytes = self._every("addresses"), self._every("n_bytes")
        forms = map(self._every, ("addresses", "numels", "are_contiguous", "dtypes"))
        self._forms = [*chain.from_iterable(forms)]
        tables = [record for record in records if record.has_rows]
        self._tables = [x for record in tables for x in record.arrays]
        self._shapes = [x for record in tables for x in record.shapes]
        layouts = enumerate(self._every("layouts"))
        self._layouts = [(k, own) for k, own in layouts if own is not None]
        self._is_plain = not (self._tables or self._layouts or self._counts)

    def _every(self, name: str) -> list[Any]:
        """What all records have of something, one after the other."""
        return [*chain.from_iterable(map(attrgetter(name), self._records))]

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
            here, arrays = self._here, self._arrays
            if self._is_distributed:
                here = [*map(local, self.tensors)]
                arrays = [*compress(here, self._is_array)]
            found = [
                *map(address_of, here), *map(numel_of, arrays), *map(is_contiguous, arrays),
                *map(dtype_of, arrays),
            ]  # fmt: skip
            return found == self._forms and (self._is_plain or self._is_rest_still(arrays, states))
        except (KeyError, RuntimeError, TypeError):  # a state is gone, or its memory
            return False

    def _is_rest_still(self, arrays: Sequence[Tensor], states: Sequence[Any]) -> bool:
        """Whether shapes and layouts that matter are still those, and counts are numbers."""
        return (
            [*map(shape_of, self._tables)] == self._shapes
            and all([layout_of(arrays[k]) == own for k, own in self._layouts])
            and all([is_count(states[i]["step"]) for i in self._counts])
        )


class Chosen:
    """The parameters that have a gradient in a step, and its kernel calls.

    Attributes:
        records, parameters, parts: those of the step.
        counted, own_counts: the places of parameters whose updates are counted, and of those among
            them whose count is no tensor of the host.
        count: counts that compiled code writes: of all parameters, or of none.
        written: the tensors that a step writes and whose changes autograd counts.
    """

    def __init__(
        self, where: str, records: Sequence[Record], parts: Sequence[ParameterBatch]
    ) -> None:
        self._where, self.records, self.parts = where, records, parts
        self.parameters = tuple([record.parameter for record in records])
        self.counted = [i for i, record in enumerate(records) if record.is_counted]
        self.own_counts = [i for i in self.counted if records[i].has_own_count]
        self.has_copies = any([record.copied for record in records])
        counts = [record.addresses[record.count] for record in records if record.count >= 0]
        self.count = TensorCount(counts if len(counts) == len(records) else ())
        self._expected = Expected(records)
        self.written = [t for t in self._expected.tensors if not t.is_inference()]
        self.is_still = self._expected.is_still
        self._expect_gradients([i for p in parts if p.batch.row_sparse for i in p.places])
        self._settle()

    def stale(self, states: Sequence[Any]) -> list[int]:
        """The places of parameters that are not as they were, or their states are not."""
        pairs = enumerate(zip(self.records, states, strict=True))
        return [i for i, (record, own) in pairs if not Expected([record]).is_still([own])]

    # Where tensors lie

    def _settle(self) -> None:
        """Sort the memory that is written by where it begins."""
        begins, sizes = map(np.array, (self._expected.addresses, self._expected.n_bytes))
        begins, ends = (x[sizes > 0] for x in (begins, begins + sizes))
        order = begins.argsort(kind="stable")
        begins, reach = begins[order], np.maximum.accumulate(ends[order])
        # Of what begins before a place, how far the furthest reaches.
        self._begins, self._reach = begins.tolist(), [0, *reach.tolist()]
        # A stretch from the first to the last element may have gaps, in which others lie.
        if (begins[1:] < reach[:-1]).any():
            self._check_apart(())

    def _lie_in(self, begins: Sequence[int], sizes: Iterable[int]) -> bool:
        """Whether any of these stretches of memory overlaps what is written."""
        places = map(bisect_left, repeat(self._begins), map(add, begins, sizes))
        return any(map(gt, map(self._reach.__getitem__, places), begins))

    def _check_apart(self, gradients: Iterable[Stretch]) -> None:
        """Refuse tensors of a step that share memory which it writes to."""
        found = [*gradients]
        for record in self.records:
            pairs = zip(record.here, record.labels(), strict=True)
            found += [Stretch.of(tensor, name) for tensor, name in pairs]
        check_apart(self._where, found)

    # Gradients

    def _expect_gradients(self, rows: list[int]) -> None:
        every, sparse = self.records, {*rows}
        self._rows = rows
        self._dense = [i for i in range(len(every)) if i not in sparse]
        dense, tables = [every[i] for i in self._dense], [every[i] for i in rows]
        self._dtypes = [record.gradient_dtype for record in tables]
        self._numels = [record.size for record in dense]
        self._forms = [
            *self._numels,
            *[not record.gradient_stride for record in dense],
            *[record.gradient_dtype for record in dense],
            *[False for _ in dense],
        ]
        self._devices = [record.device for record in dense]
        self._strides = [
            (k, own.gradient_stride) for k, own in enumerate(dense) if own.gradient_stride
        ]
        self._placements = [getattr(record.parameter, "placements", None) for record in dense]
        self._are_distributed = any(self._placements)
        self._last, self._found = [-1] * len(dense), np.zeros(len(every), np.int64)
        self._are_bags = {BagTensor} if any([record.is_bags for record in tables]) else set()
        self._are_plain = all([record.has_plain_rows for record in tables])
        self._widths = [math.prod(record.shape[1:]) for record in tables]
        self._owners = [record.parameter for record in tables]
        self._table_shapes = [record.here[0].shape for record in tables]

    def read(self, gradients: Sequence[Any]) -> Found | None:
        """The gradients of a step, if they lie as the kernels need it."""
        dense, rows, held = gradients, _NO_ROWS, ()
        if self._rows:
            dense = [gradients[i] for i in self._dense]
            found = self._read_rows([gradients[i] for i in self._rows])
            if found is None:
                return None
            rows = dict(zip(self._rows, found, strict=True))
        if self._are_distributed:
            if [getattr(g, "placements", None) for g in dense] != self._placements:
                return None
            dense = held = [*map(local, dense)]
        return (self._found, rows, held) if self._fit(dense) else None

    def _fit(self, gradients: Sequence[Tensor]) -> bool:
        """Whether dense gradients lie as expected; `_found` has their addresses then."""
        if not {*map(type, gradients)} <= _PLAIN:
            return False
        try:
            found = [*map(address_of, gradients)]
        except RuntimeError:  # it is sparse now
            return False
        forms = [
            *map(numel_of, gradients), *map(is_contiguous, gradients), *map(dtype_of, gradients),
            *map(_is_negated, gradients),
        ]  # fmt: skip
        is_like = forms == self._forms and (
            not self._strides or all([gradients[k].stride() == own for k, own in self._strides])
        )
        if not is_like or found == self._last:
            return is_like
        sizes = [*map(mul, self._numels, map(_itemsize_of, gradients))]
        if not (
            [*map(_device_of, gradients)] == self._devices
            and _are_there(gradients, found, sizes)
            and not self._lie_in(found, sizes)
        ):
            return False
        self._last = found
        self._found[self._dense] = found
        return True

    def _read_rows(self, gradients: Sequence[Any]) -> list[RowGradient] | None:
        """Sparse gradients whose parts lie as the kernels need it; None: some do not."""
        if self._are_bags:
            are_like = {*map(type, gradients)} == self._are_bags
            if not are_like or [x.dtype for x in gradients] != self._dtypes:
                return None
            return [own.gradient for own in gradients]
        is_plain = self._are_plain and {*map(type, gradients)} <= _PLAIN
        # Of a batch that others have a part of.
        if not is_plain or any(map(hasattr, self._owners, repeat("row_positions"))):
            return None
        try:
            parts = [*map(parts_of, gradients)]
        except RuntimeError:  # it is dense now
            return None
        indices, values = [own for own, _ in parts], [own for _, own in parts]
        every, lengths = indices + values, [*map(numel_of, indices)]
        numels = lengths + [*map(mul, lengths, self._widths)]
        if not (
            [*map(shape_of, gradients)] == self._table_shapes
            and [*map(numel_of, every)] == numels
            and all(map(is_contiguous, every))
            and [*map(dtype_of, every)] == [torch.int64] * len(indices) + self._dtypes
            and not any(map(_is_negated, values))
            and {*map(_device_of, every)} == {-1}
        ):
            return None
        found, sizes = [*map(address_of, every)], [*map(mul, numels, map(_itemsize_of, every))]
        if not _are_there(every, found, sizes) or self._lie_in(found, sizes):
            return None
        n = len(indices)
        sources = map(RowSource, found[:n], repeat(8), lengths, found[n:])
        return [*map(RowGradient, indices, values, sources)]

    def unlike(self, gradients: Sequence[Any]) -> list[int]:
        """The places of gradients that are of another kind than those recorded."""
        pairs = enumerate(zip(self.records, gradients, strict=True))
        return [i for i, (record, gradient) in pairs if not record.takes(gradient)]

    def read_each(self, gradients: Sequence[Any]) -> Found:
        """The gradients of a step, which may lie anyhow, but not in what is written."""
        rows, held, spans = dict[int, RowGradient](), [], list[Stretch]()
        self._last = []
        for i, (record, gradient) in enumerate(zip(self.records, gradients, strict=True)):
            if record.kind.is_sparse:
                rows[i] = own = record.rows(gradient)
                spans += [Stretch(at, at + n, record.label, False, None) for at, n in own.spans]
                continue
            held.append(found := record.dense(gradient))
            self._found[i] = found.data_ptr()
            spans.append(Stretch.of(found, record.label, is_written=False))
        if self._lie_in([own.begin for own in spans], [own.end - own.begin for own in spans]):
            self._check_apart(spans)
        return self._found, rows, held

    def copied(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of what does not lie as the kernels need it; the step is one of these."""
        made = []
        for part in self.parts:
            for t, i in enumerate(part.places):
                for k, tensor, copy in self.records[i].copies():
                    part.batch.variables.put(t, k, copy.data_ptr())
                    made.append((tensor, copy))
        return made


def _are_there(tensors: Sequence[Tensor], found: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether contiguous tensors of so many bytes lie in their storages, which may be cut."""
    if not all(found) and any([n and not at for n, at in zip(sizes, found, strict=True)]):
        return False
    begins = map(mul, map(_offset_of, tensors), map(_itemsize_of, tensors))
    return all(map(ge, map(_bytes_of, map(_storage_of, tensors)), map(add, begins, sizes)))
