"""The tensors of a step, bound to the kernels once, and looked at again in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.adafactor.step import FactoredTable
from ...kernels.cpu.counts import FloatCount
from ...kernels.cpu.dense import all_finite
from ...kernels.cpu.headers import tensors as headers
from ...kernels.lazy import lazy
from ...kernels.rules.rule import Rule
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import RowGradient
from ..engine.factored import matrices_of
from ..engine.layout import Batch, Kind, Layout, build_layout
from ..engine.on_device import are_finite
from ..engine.reader import Gradients, by_storage
from .tensors import (
    DTYPE_NAMES,
    DTYPES,
    array_of,
    fits_order,
    flat,
    local,
    order_of,
    reject_shape,
    rows_of,
    span_of,
    table_shape,
)  # fmt: skip


class Choice(NamedTuple):
    """What the options of a group decide about the kernels of its parameters."""

    rule: Rule
    states: tuple[str, ...]  # the names of those of the rule, in its order
    touched_only: bool | None  # what sparse gradients update; None: they are refused
    couples: bool  # a weight decay is added to the gradient


class Given(NamedTuple):
    """The gradients of one step."""

    addresses: np.ndarray  # int64 [P]: of the dense ones
    rows: Mapping[int, RowGradient]  # the sparse ones, by the place of the parameter
    keep: Any  # what must stay alive until the step is done


class Stretch(NamedTuple):
    """Memory of a tensor."""

    begin: int
    end: int
    name: str
    is_written: bool

    @classmethod
    def of(cls, tensor: Tensor, name: str, *, is_written: bool) -> Stretch:
        """That of a tensor, from its first element to its last."""
        return cls(*span_of(tensor), name, is_written)


class Entry(NamedTuple):
    """A parameter that has a gradient, with its state."""

    parameter: Tensor
    group: int
    name: str
    state: dict[str, Any]
    choice: Choice
    shapes: Mapping[str, tuple[int, ...]]  # of its states


@dataclass(frozen=True, eq=False)
class Part:
    """The parameters that one kernel call updates."""

    choice: Choice
    layout: Layout
    batch: Batch
    entries: list[Entry]  # [T]
    places: list[int]  # [T]: of each entry among all that have a gradient
    groups: list[int]  # those that have parameters here
    group_of: np.ndarray  # int64 [T]: the place in ``groups`` of each tensor

    def gradients(self, given: Given) -> Any:
        """Those of its parameters: addresses, or rows."""
        if self.batch.row_sparse:
            return [given.rows[i] for i in self.batch.positions.tolist()]
        return given.addresses if self.batch.is_all else given.addresses[self.batch.positions]

    @property
    def is_on_device(self) -> bool:
        """Whether its tensors are on a CUDA device."""
        return bool(self.entries[0].parameter.is_cuda)

    @lazy
    def matrices(self) -> FactoredTable | None:
        """Its tensors, where their states are those of rows and columns."""
        has_factors = self.choice.rule.factored and len(self.entries[0].shapes) == 2
        return FactoredTable(matrices_of(self.batch)) if has_factors else None


class Binding:
    """Parameters with their states and gradients, checked; what later steps look at again.

    ``entries`` has for each parameter an `Entry`, or None where there is no gradient.

    Raises:
        RuntimeError: a tensor does not fit.
    """

    def __init__(
        self, where: str, parameters: tuple[Tensor, ...], entries: Sequence[Entry | None],
        choices: Sequence[Choice],
    ) -> None:  # fmt: skip
        self._where, self._parameters, self._entries = where, parameters, entries
        self.choices = choices
        self._known: Any = []
        self.lengths: list[int] = []
        self.group = 0
        self.active = [entry for entry in entries if entry is not None]
        self.updated = [entry.parameter for entry in self.active]
        self.kinds = [(p, p.dtype, p.device) for p in self.updated]
        # What does not lie in memory as the kernels need it: the tensor, and its copy.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._arrays: dict[int, Any] = {}  # of the gradients
        self._memory: list[Stretch] = []
        self._dense = np.zeros(len(entries), np.int64)
        self._rows: dict[int, RowGradient] = {}
        self._is_plain = True  # nothing but tensors that lie as they have to
        kinds: list[Kind | None] = []
        arrays: list[tuple[Any, ...]] = []
        for i, entry in enumerate(entries):
            kind, own = (None, ()) if entry is None else self._bind(i, entry)
            kinds.append(kind)
            arrays.append(own)
        self._check_memory()
        labels = [f"{where}: gradient of {e.name}" if e else "" for e in entries]
        self.parts = self._parts(kinds, arrays, labels)
        self._counts()
        self._expect(kinds)

    def _bind(self, i: int, entry: Entry) -> tuple[Kind, tuple[Any, ...]]:
        where, name, given = self._where, entry.name, entry.parameter.grad
        assert given is not None
        parameter, gradient = local(entry.parameter), local(given)
        self._is_plain &= parameter is entry.parameter and gradient is given
        if entry.choice.rule.measure and parameter is not entry.parameter:
            wrong, expected = "is distributed", "a tensor of one process: the norm is that of all"
            reject(RuntimeError, where, name, wrong, expected, type(entry.parameter).__name__)
        is_sparse = gradient.layout == torch.sparse_coo
        order = order_of(parameter)
        plain = tuple(range(parameter.dim()))
        has_rows = is_sparse or entry.choice.rule.factored
        if order is None and torch._debug_has_internal_overlap(parameter) == 1:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a "
                f"single memory location: {name}"
            )
        if order is None or (has_rows and order != plain):
            parameter, order = self._copied(parameter, parameter.contiguous()), plain
        states = [self._state(entry, role, parameter, order) for role in entry.shapes]
        tensors = [parameter, *states]
        if is_sparse:
            self._rows[i] = rows_of(where, f"the gradient of {name}", parameter, gradient)
            kind = Kind(self._rows[i].dtype, self._rows[i].indices.dtype)
            self._arrays[i] = self._rows[i]
        else:
            gradient = self._dense_gradient(entry, parameter, gradient, order)
            kind = Kind(DTYPES[gradient.dtype])
            self._dense[i] = gradient.data_ptr()
            label = f"the gradient of {name}"
            self._memory.append(Stretch.of(gradient, label, is_written=False))
            self._arrays[i] = array_of(flat(gradient, order))
        arrays = [array_of(flat(tensor, order)) for tensor in tensors]
        if is_sparse:  # the sparse dimensions number the rows
            arrays = [array.reshape(table_shape(gradient)) for array in arrays]
        return kind, tuple(arrays)

    def _state(self, entry: Entry, role: str, parameter: Tensor, order: Sequence[int]) -> Tensor:
        state = entry.state.get(role)
        label = f"state {role!r} of {entry.name}"
        if not isinstance(state, Tensor):
            got, fix = type(state).__name__, "; the state is of another optimizer or other options"
            reject(RuntimeError, self._where, label, "is missing", "a tensor", got, fix)
        found = local(state)
        shape = entry.shapes[role] if found is state else tuple(parameter.shape)
        if tuple(found.shape) != shape:
            reject_shape(self._where, label, shape, found)
        if found.device != parameter.device or found.dtype not in DTYPES:
            expected, got = parameter.device, f"{found.dtype} on {found.device}"
            reject(RuntimeError, self._where, label, "is elsewhere or no number", expected, got)
        if shape != tuple(parameter.shape):  # of rows or columns: of the type of the arithmetic
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if found.dtype != wide or not found.is_contiguous():
                found = self._copied(found, found.to(wide, copy=True).contiguous())
        elif not fits_order(found, order):
            found = self._copied(found, torch.empty_like(parameter, dtype=found.dtype).copy_(found))
        self._is_plain &= found is state
        self._memory.append(Stretch.of(found, label, is_written=True))
        return found

    def _copied(self, tensor: Tensor, copy: Tensor) -> Tensor:
        self._copies.append((tensor, copy))
        self._is_plain = False
        return copy

    def _dense_gradient(
        self, entry: Entry, parameter: Tensor, gradient: Tensor, order: Sequence[int]
    ) -> Tensor:
        where, label = self._where, f"the gradient of {entry.name}"
        if gradient.layout != torch.strided:
            expected = "torch.strided or torch.sparse_coo"
            reject(RuntimeError, where, label, "has a wrong layout", expected, gradient.layout)
        if gradient.shape != parameter.shape:
            reject_shape(where, label, tuple(parameter.shape), gradient)
        if gradient.dtype not in DTYPES:
            reject(RuntimeError, where, label, "has a wrong dtype", "a float", gradient.dtype)
        if gradient.device != parameter.device:
            devices = parameter.device, gradient.device
            reject(RuntimeError, where, label, "is on another device", *devices)
        if fits_order(gradient, order) and not gradient.is_neg():
            return gradient
        self._is_plain = False
        return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)

    def _check_memory(self) -> None:
        """No two tensors of which one is written overlap."""
        self._memory += [
            Stretch.of(local(e.parameter), e.name, is_written=True) for e in self.active
        ]
        stretches = sorted(s for s in self._memory if s.end > s.begin)
        furthest = Stretch(0, 0, "", False)
        for stretch in stretches:
            matters = stretch.is_written or furthest.is_written
            if stretch.begin < furthest.end and matters:
                expected, got = "memory of its own", f"that of {furthest.name}"
                reject(RuntimeError, self._where, stretch.name, "shares memory", expected, got)
            furthest = max(furthest, stretch, key=lambda s: s.end)
        spans = [(s.begin, s.end) for s in stretches if s.is_written]
        self._written = np.array(spans, np.int64).reshape(-1, 2).T.copy()

    def _parts(
        self, kinds: Sequence[Kind | None], arrays: Sequence[Any], labels: Sequence[str]
    ) -> list[Part]:
        different: dict[Any, list[int]] = {}
        place: dict[int, int] = {}
        for i, entry in enumerate(self._entries):
            if entry is not None:
                place[i] = len(place)
                different.setdefault((entry.choice, entry.parameter.device), []).append(i)
        parts = []
        for (choice, _), places in different.items():
            own = set(places)
            layout = build_layout(
                tuple(kind if i in own else None for i, kind in enumerate(kinds)), arrays, labels
            )
            for batch in layout.batches:
                found = [place[i] for i in batch.positions.tolist()]
                own_entries = [self.active[k] for k in found]
                groups, group_of = np.unique([e.group for e in own_entries], return_inverse=True)
                parts.append(
                    Part(choice, layout, batch, own_entries, found, groups.tolist(), group_of)
                )
        return sorted(parts, key=lambda part: not part.batch.row_sparse)

    def _counts(self) -> None:
        """The counts of updates, where they are tensors that compiled code can read."""
        counts: list[Any] = [entry.state.get("step") for entry in self.active]
        self.counts: FloatCount | None = None
        if counts and all(
            type(c) is Tensor
            and c.dtype == torch.float32
            and not c.dim()
            and c.device.type == "cpu"
            for c in counts
        ):
            self.counts = FloatCount(np.array([c.data_ptr() for c in counts], np.int64))

    def _expect(self, kinds: Sequence[Kind | None]) -> None:
        """What later steps have to find for the same kernel calls."""
        self._expected: headers.Expected | None = None
        on_device = any(e.parameter.is_cuda for e in self.active)
        if not self._is_plain or on_device or headers.shim(torch) is None:
            return
        held: list[tuple[Any, int]] = [
            (p, p.data_ptr() if e else 0)
            for p, e in zip(self._parameters, self._entries, strict=True)
        ]
        by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        counted = ("step",) if self.counts is not None else ()
        for active in self.active:
            if names := (*active.shapes, *counted):
                by_names.setdefault(names, []).append(active.state)
        self._getters = []
        for names, dicts in by_names.items():
            names = names if len(names) > 1 else 2 * names  # of one it would be no tuple
            self._getters.append((itemgetter(*names), dicts))
            held += [(own[name], own[name].data_ptr()) for own in dicts for name in names]
        gradients: list[tuple[int, Any]] = []
        for e, kind in zip(self._entries, kinds, strict=True):
            if e is None or kind is None:
                gradients.append((headers.NONE, None))
                continue
            example = e.parameter.detach()
            if DTYPES[example.dtype] != kind.dtype:
                sizes, dtype = (example.shape, example.stride()), _torch_dtype(kind.dtype)
                example = torch.empty_strided(*sizes, dtype=dtype, device="meta")
            gradients.append((headers.ROWS if kind.row_sparse else headers.DENSE, example))
        self._expected = headers.Expected(torch, held, gradients, self._written)
        self._single = [i for i, e in enumerate(self._entries) if e and not e.parameter.dim()]
        self._of_rows = [
            (i, f"the gradient of {e.name}", e.parameter, e.parameter.grad.sparse_dim())
            for i, e in enumerate(self._entries)
            if e and i in self._rows
        ]

    def first(self) -> Given:
        """The gradients with which it was bound."""
        return Given(self._dense, self._rows, self._arrays)

    def read(
        self, states: Mapping[Tensor, Any], parameters: tuple[Tensor, ...],
        gradients: tuple[Any, ...],
    ) -> Given | None:  # fmt: skip
        """The gradients of a later step, if all else is as it was; None if it is not."""
        known, expected = self._known, self._expected
        if expected is None:
            return None
        if len(parameters) == 1:
            if states.get(parameters[0]) is not known:
                return None
        elif len(states) != len(known) or not all(map(is_, states.values(), known)):
            return None
        try:
            found = [map(getter, dicts) for getter, dicts in self._getters]
            held = parameters + tuple(chain.from_iterable(chain.from_iterable(found)))
        except KeyError:
            return None
        addresses = expected.addresses(held, gradients)
        # Nothing but a mark of a tensor tells that its numbers mean their negatives; in one with
        # dimensions the strides are others then.
        if addresses is None or any(gradients[i].is_neg() for i in self._single):
            return None
        rows = {}
        for i, name, parameter, n_sparse in self._of_rows:
            if gradients[i].sparse_dim() != n_sparse:
                return None
            rows[i] = rows_of(self._where, name, parameter, gradients[i])
        return Given(addresses, rows, gradients)

    def keep(self, states: Mapping[Tensor, Any], lengths: list[int]) -> None:
        """It was used, with these states and groups of such lengths; its gradients are let go."""
        is_one = len(self._parameters) == 1
        self._known = states.get(self._parameters[0]) if is_one else [*states.values()]
        self.lengths, self.group = lengths, self.active[0].group if self.active else 0
        self._arrays, self._rows = {}, {}
        if self._expected is None:  # the next step binds anew
            self.parts, self.active, self.updated, self._copies, self._entries = [], [], [], [], ()

    def has_finite(self, given: Given) -> bool:
        """Whether no gradient has a NaN or an infinity: one read of all of them.

        On a device the host waits for the answer.
        """
        on_host = [(p.batch, p.gradients(given)) for p in self.parts if not p.is_on_device]
        layouts = dict.fromkeys(part.layout for part in self.parts if part.is_on_device)
        return all(all_finite(*found) for found in by_storage(on_host)) and all(
            are_finite(self.on_device(layout)) for layout in layouts
        )

    def on_device(self, layout: Layout) -> Gradients:
        """The gradients of a layout on a device, for the loops there."""
        rows = [i for i in layout.active.tolist() if i in self._rows]
        dense = [i for i in layout.active.tolist() if i not in self._rows]
        arrays = [self._arrays[i] for i in layout.active.tolist()]
        return Gradients(layout, self._dense[dense], [self._rows[i] for i in rows], arrays)

    def write_back(self) -> None:
        """Copy what was updated in copies."""
        for tensor, copy in self._copies:
            tensor.detach().copy_(copy)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return next(known for known, same in DTYPES.items() if same == dtype)


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
