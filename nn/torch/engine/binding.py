"""The tensors of a step, bound to the kernels once, and looked at again in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.dense import all_finite
from ....kernels.cpu.headers import tensors as headers
from ....kernels.cpu.headers.arrays import lie_in
from ....kernels.cpu.headers.tensor_fields import layout_of
from ....kernels.cpu.threads.counts import TensorCount
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import RowGradient
from ...engine.layout import Kind, Layout, build_layout
from ...engine.on_device import are_finite
from ...engine.reader import Gradients, by_storage
from .memory import (
    DTYPE_NAMES,
    DTYPES,
    NUMBERS,
    Stretch,
    array_of,
    check_apart,
    check_single,
    check_there,
    fits_order,
    flat,
    in_memory,
    is_as_it_lies,
    is_zerotensor,
    order_of,
)  # fmt: skip
from .part import Choice, Entry, Given, Part
from .tensors import local, reject_shape, rows_of, table_shape, wide_dtype

_FEW = 8  # parameters: to look at so many takes no longer than to fetch them before


class Binding:
    """Parameters with their states and gradients, checked; what later steps look at again.

    ``entries`` has for each parameter an `Entry`, or None where there is no gradient. Between two
    steps no tensor is kept alive: a step finds the same objects, or it is bound anew.

    Raises:
        RuntimeError: a tensor does not fit.
    """

    def __init__(
        self, where: str, parameters: tuple[Tensor, ...], entries: Sequence[Entry | None],
        choices: Sequence[Choice],
    ) -> None:  # fmt: skip
        self._where, self.choices = where, choices
        self.lengths: list[int] = []
        self.group, self.is_large = 0, False
        self._parameters, self._entries = parameters, entries
        self.active = [entry for entry in entries if entry is not None]
        # What does not lie in memory as the kernels need it: the tensor, and its copy.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._arrays: dict[int, Any] = {}  # of the gradients
        self._memory: list[Stretch] = []
        self._numbers: list[tuple[str, ...]] = []  # of each active parameter
        self._dense = np.zeros(len(entries), np.int64)
        self._rows: dict[int, RowGradient] = {}
        self._is_plain = True  # nothing but tensors that lie as they have to
        self._expected: headers.ExpectedTensors | None = None
        kinds: list[Kind | None] = []
        arrays: list[tuple[Any, ...]] = []
        for i, entry in enumerate(entries):
            kind, own = (None, ()) if entry is None else self._bind(i, entry)
            kinds.append(kind)
            arrays.append(own)
        check_apart(where, self._memory)
        # Whether a parameter has changed while its state did not. By identities: a weak reference
        # would keep PyTorch from swapping tensors.
        self.types = {
            (id(e.parameter), id(e.state)): (e.parameter.dtype, e.parameter.device)
            for e in self.active
        }
        labels = [f"{where}: gradient of {e.name}" if e else "" for e in entries]
        self.parts = self._parts(kinds, arrays, labels)
        self._count(np.zeros(0, np.int64))

    def _bind(self, i: int, entry: Entry) -> tuple[Kind, tuple[Any, ...]]:
        where, name, given = self._where, entry.name, entry.parameter.grad
        assert given is not None
        parameter, gradient = local(entry.parameter), local(given)
        self._is_plain &= parameter is entry.parameter and gradient is given
        rule = entry.rule
        if parameter is not entry.parameter and (rule.measure or not rule.is_elementwise):
            wrong, expected = "is distributed", "a tensor of one process: the norm is that of all"
            reject(RuntimeError, where, name, wrong, expected, type(entry.parameter).__name__)
        is_sparse = gradient.layout == torch.sparse_coo
        self._check_written(parameter, name)
        order = order_of(parameter)
        plain = tuple(range(parameter.dim()))
        has_rows = is_sparse or rule.is_row_wise or not rule.is_elementwise
        if order is None or not is_as_it_lies(parameter) or (has_rows and order != plain):
            parameter, order = self._copied(parameter, in_memory(parameter.detach())), plain
        states = [self._state(entry, role, parameter, order) for role in entry.shapes]
        self._numbers.append(self._numbers_of(entry))
        label = f"the gradient of {name}"
        if is_sparse:
            self._rows[i] = rows_of(where, label, parameter, gradient)
            kind = Kind(self._rows[i].dtype, self._rows[i].indices.dtype)
            self._arrays[i] = self._rows[i]
            self._memory += [
                Stretch(begin, begin + n_bytes, label, False, None)
                for begin, n_bytes in self._rows[i].spans
            ]
        else:
            gradient = self._dense_gradient(label, parameter, gradient, order)
            kind = Kind(DTYPES[gradient.dtype])
            self._dense[i] = gradient.data_ptr()
            self._memory.append(Stretch.of(gradient, label, is_written=False))
            self._arrays[i] = array_of(flat(gradient, order))
        arrays = [  # of rows and columns there is one order
            array_of(flat(x, order) if x.dim() == parameter.dim() else x.detach(), keep=False)
            for x in (parameter, *states)
        ]
        if is_sparse:  # the sparse dimensions number the rows
            arrays = [
                array.reshape(table_shape(gradient)) if array.size == arrays[0].size else array
                for array in arrays
            ]
            if rule.is_row_wise and (gradient.sparse_dim() != 1 or gradient.dim() < 2):
                expected = "1 sparse dimension of a parameter of at least 2: a vector is one row"
                got = f"{gradient.sparse_dim()} of {gradient.dim()}"
                reject(RuntimeError, where, label, "has other rows", expected, got)
        return kind, tuple(arrays)

    def _check_written(self, tensor: Tensor, name: str) -> None:
        check_there(self._where, name, tensor)
        check_single(name, tensor)
        self._memory.append(Stretch.of(tensor, name))

    def _state(self, entry: Entry, role: str, parameter: Tensor, order: Sequence[int]) -> Tensor:
        state = entry.state[role]
        label = f"state {role!r} of {entry.name}"
        if not isinstance(state, Tensor):
            got, fix = type(state).__name__, "; the state is of another optimizer or other options"
            reject(RuntimeError, self._where, label, "is missing", "a tensor", got, fix)
        found = local(state)
        shape = entry.shapes[role] if found is state else tuple(parameter.shape)
        if tuple(found.shape) != shape:
            reject_shape(self._where, label, shape, found)
        declared = entry.declared[role]
        dtypes = DTYPES if declared.dtype is None else {wide_dtype(declared, parameter.dtype)}
        if found.device != parameter.device or found.dtype not in dtypes:
            expected, got = parameter.device, f"{found.dtype} on {found.device}"
            reject(RuntimeError, self._where, label, "is elsewhere or no number", expected, got)
        self._check_written(found, label)
        if declared.per != "element":
            wide = wide_dtype(declared, parameter.dtype)
            if found.dtype != wide or not fits_order(found, range(found.dim())):
                found = self._copied(found, found.to(wide, copy=True).contiguous())
        elif not fits_order(found, order):
            found = self._copied(found, torch.empty_like(parameter, dtype=found.dtype).copy_(found))
        self._is_plain &= found is state
        return found

    def _numbers_of(self, entry: Entry) -> tuple[str, ...]:
        """The states that are single numbers and are written with the step."""
        names = []
        for name in entry.numbers:
            found, label = entry.state[name], f"state {name!r} of {entry.name}"
            is_tensor = isinstance(found, Tensor)
            if name == "step" and (found.is_cuda if is_tensor else isinstance(found, int | float)):
                continue
            if not is_tensor or found.numel() != 1 or found.dtype not in NUMBERS or found.is_cuda:
                expected = "a tensor of one element, on the host"
                reject(RuntimeError, self._where, label, "is no number", expected, repr(found))
            if not is_as_it_lies(found):
                wrong, expected = "is a view of another number", "a number in memory"
                reject(RuntimeError, self._where, label, wrong, expected, "its negative, or a 0")
            self._check_written(found, label)
            names.append(name)
        return tuple(names)

    def _copied(self, tensor: Tensor, copy: Tensor) -> Tensor:
        self._copies.append((tensor, copy))
        self._is_plain = False
        return copy

    def _dense_gradient(
        self, label: str, parameter: Tensor, gradient: Tensor, order: Sequence[int]
    ) -> Tensor:
        where = self._where
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
        if not is_zerotensor(gradient):
            check_there(where, label, gradient)
        if fits_order(gradient, order):
            return gradient
        self._is_plain = False
        return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)

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
        for places in different.values():
            own = set(places)
            layout = build_layout(
                tuple(kind if i in own else None for i, kind in enumerate(kinds)), arrays, labels
            )
            parts += [Part.of(layout, batch, self._entries, place) for batch in layout.batches]
        return sorted(parts, key=lambda part: not part.batch.row_sparse)

    def _count(self, versions: np.ndarray) -> None:
        """The counts of updates, where all are float32 tensors on the host; else they are none."""
        steps = [e.state["step"] for e in self.active if "step" in e.numbers]
        are_written = all("step" in names for names in self._numbers)
        self.counts_updates = (
            bool(steps) and are_written and {s.dtype for s in steps} == {torch.float32}
        )
        places = [step.data_ptr() for step in steps] if self.counts_updates else []
        self.count = TensorCount(np.array(places, np.int64), versions)

    def first(self) -> Given:
        """The tensors with which it was bound."""
        states, are_new = [e.state for e in self.active], [e.is_new for e in self.active]
        return Given(self._dense, self._rows, states, are_new, self._arrays)

    # Later steps

    def keep(self, states: headers.States, lengths: list[int]) -> None:
        """Get ready for later steps, and let go of the tensors of this one."""
        self.lengths, self.group = lengths, self.active[0].group if self.active else 0
        self.is_large = len(self.active) > _FEW
        on_device = any(part.is_on_device for part in self.parts)
        if self._is_plain and not on_device and layout_of(torch) is not None:
            self._expect(states)
        else:  # the next step binds anew
            self.parts = []
        self._parameters, self._entries, self.active = (), (), []
        self._copies, self._arrays, self._rows, self._memory = [], {}, {}, []

    def _expect(self, states: headers.States) -> None:
        """Record what later steps have to find for the same kernel calls."""
        # The state of each among all states, which go in the order of their keys.
        every = {id(p): k for k, p in enumerate(states)}
        self._order = [every.get(id(e.parameter), -1) for e in self.active]
        self._is_in_order = self._order == [*range(len(states))]
        self._has_counts_of_python = any(
            "step" in e.numbers and "step" not in own
            for e, own in zip(self.active, self._numbers, strict=True)
        )
        written = {
            id(entry.parameter): {*entry.shapes, *numbers}
            for entry, numbers in zip(self.active, self._numbers, strict=True)
        }
        names = [
            [name for name in state if name in written.get(id(parameter), ())]
            for parameter, state in states.items()
        ]
        gradients: tuple[Any, ...] = tuple(e and e.parameter.grad for e in self._entries)
        kinds = [
            headers.NONE if e is None else headers.ROWS if i in self._rows else headers.DENSE
            for i, e in enumerate(self._entries)
        ]
        given = self._parameters, gradients
        self._expected = headers.ExpectedTensors(torch, *given, kinds, states, names)
        self._expected.look(*given, states)
        self._count(self._expected.versions)
        self._place(dict(zip(every, names, strict=True)))
        # Others are read with the tensors.
        self._reads_states = not self.counts_updates or any(part.numbers for part in self.parts)
        self._of_rows = [
            (i, f"the gradient of {e.name}", gradients[i].sparse_dim())
            for i, e in enumerate(self._entries)
            if e and i in self._rows
        ]

    def _place(self, names: Mapping[int, Sequence[str]]) -> None:
        """Find the tensors of the parts, and the counts, among what is written."""
        n, roles = len(self.active), {}
        for key, own in names.items():
            roles[key] = {name: n + j for j, name in enumerate(own)}
            n += len(own)
        of_roles = [roles.get(id(e.parameter), {}) for e in self.active]
        self._tables = [
            (part, np.array([[k, *(of_roles[k][role] for role in self.active[k].shapes)]
                             for k in part.places]))
            for part in self.parts
        ]  # fmt: skip
        steps = [own["step"] for own in of_roles] if self.counts_updates else []
        self._steps = np.array(steps, np.int64)

    def _active_states(self, states: headers.States) -> Sequence[dict[str, Any]]:
        """The states of each active parameter."""
        every = [*states.values()]
        return every if self._is_in_order else [every[k] if k >= 0 else {} for k in self._order]

    def fetch(self) -> None:
        """Bring what `read` is going to look at into the caches."""
        if self._expected is not None:
            self._expected.fetch()

    def read(
        self, states: headers.States, parameters: tuple[Tensor, ...], gradients: tuple[Any, ...]
    ) -> Given | None:
        """The tensors of a later step, if all else is as it was; None if it is not."""
        expected = self._expected
        if expected is None:
            return None
        found = expected.look(parameters, gradients, states)
        if found == headers.OTHER:
            return None
        own = self._active_states(states) if self._reads_states else ()
        if self._has_counts_of_python and any(isinstance(s["step"], Tensor) for s in own):
            return None
        if found == headers.MOVED:
            self._settle(expected.written)
        rows: dict[int, RowGradient] = {}
        spans: set[tuple[int, int]] = set()  # the gradient of pooled tables is one for all of them
        for i, name, n_sparse in self._of_rows:
            if gradients[i].sparse_dim() != n_sparse:
                return None
            rows[i] = row = rows_of(self._where, name, parameters[i], gradients[i])
            spans.update(row.spans)
        if spans and lie_in(expected.stretches, spans):
            return None
        return Given(expected.gradients, rows, own, (), gradients)

    def _settle(self, written: np.ndarray) -> None:
        """Take over where parameters and states lie now."""
        for part, places in self._tables:
            part.batch.variables.move(written[places])
        self.count.counts[:] = written[self._steps]

    # A step

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

    def finish(self) -> None:
        """After a first step: copy what was updated in copies, and tell autograd."""
        with torch.inference_mode():  # which may write to every tensor
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        written = [e.parameter for e in self.active]
        for entry, numbers in zip(self.active, self._numbers, strict=True):
            written += [entry.state[name] for name in (*entry.shapes, *numbers)]
        torch.autograd.graph.increment_version(written)


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
