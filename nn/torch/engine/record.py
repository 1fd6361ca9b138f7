"""The record of one parameter, which a step needs: checked once, then compared by a look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.headers import tensors as headers
from ....kernels.cpu.headers.arrays import OBJECT, PLAIN, ROWS, Form
from ....kernels.rule import Rule
from ....kernels.state import State
from ....ops.runtime.bags.tensor import BagTensor
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import RowGradient
from ...engine.reader import is_row_sparse
from .memory import (
    DTYPES,
    NUMBERS,
    check_single,
    check_there,
    extent,
    fits_order,
    is_as_it_lies,
    is_zerotensor,
    order_of,
)  # fmt: skip
from .part import RuleChoice
from .tensors import first_element, local, reject_shape, rows_of, table_shape, wide_dtype


class CheckedParameter(NamedTuple):
    """A parameter that has a gradient, checked, with its state; a `Record` is made from it."""

    parameter: Tensor
    group: int
    name: str
    state: dict[str, Any]
    choice: RuleChoice
    shapes: Mapping[str, tuple[int, ...]]  # of its states, in the order of the rule
    numbers: tuple[str, ...]  # its states that are single numbers
    is_new: bool  # it had no state

    @property
    def declared(self) -> dict[str, State]:
        """The states as the rule declares them, by their names here."""
        rule = self.choice.rule.on(tuple(self.parameter.shape))
        return dict(zip(self.shapes, rule.states, strict=True))


class Kind(NamedTuple):
    """Properties that the parameters of one kernel call have in common."""

    choice: RuleChoice
    rule: Rule  # of tensors of these shapes
    device: torch.device
    is_sparse: bool  # whether the gradients are
    gradient: np.dtype[Any]
    dtypes: tuple[np.dtype[Any], ...]  # of parameter and states


class Record:
    """A parameter, its states and the kind of its gradient.

    Once `tensors` are taken from it, it keeps none alive. Those of a step are the parameter, then
    its states in their order.

    Attributes:
        kind: decides with which other parameters it is updated.
        places: the numbers among its tensors of the states that a step writes, by name.
        columns: those of the parameter and of the states that the rule takes, in its order.
        is_counted: whether its updates are counted.
        begin: the place of its first element in the whole parameter, where other processes have the
            rest, if it is rounded at random; else 0.
        count: that of the float32 count of updates, which compiled code counts; -1: it has none.
        copied: those of tensors that do not lie as the kernels need it, which are updated in
            copies.
        shape: that of the parameter, or of the table whose rows a sparse gradient numbers.
        n_bytes: of each tensor, from the first to the last element.
        recorded: what a look compares; None where it cannot tell, as of distributed tensors.
        has_plain_rows: whether compiled code can read the parts of its sparse gradient.
    """

    def __init__(self, where: str, entry: CheckedParameter, gradient: Any) -> None:
        self._where, self.name, self.group, self._entry = where, entry.name, entry.group, entry
        self.label = f"the gradient of {entry.name}"
        parameter, given = local(entry.parameter), local(gradient)
        rule = entry.choice.rule.on(tuple(entry.parameter.shape))
        if parameter is not entry.parameter and (rule.measure or not rule.is_elementwise):
            wrong, expected = "is distributed", "a tensor of one process: the norm is that of all"
            reject(RuntimeError, where, entry.name, wrong, expected, type(entry.parameter).__name__)
        self._is_bags = isinstance(given, BagTensor)
        is_sparse = is_row_sparse(given)
        check_written(where, parameter, entry.name)
        order, plain = order_of(parameter), tuple(range(parameter.dim()))
        has_rows = is_sparse or rule.is_row_wise or not rule.is_elementwise
        is_copied = order is None or not is_as_it_lies(parameter) or (has_rows and order != plain)
        self._order = plain if is_copied or order is None else order
        self.copied = [0] * is_copied
        roles = {*entry.shapes, *entry.numbers}
        self._states = [name for name in entry.state if name in roles]
        self.shape = tuple(parameter.shape)
        found = {role: self._state(role, parameter) for role in entry.shapes}
        self.numbers = self._numbers_of()
        self._states = [name for name in self._states if name in found or name in self.numbers]
        self.places = {name: k for k, name in enumerate(self._states, start=1)}
        self.columns = [0, *(self.places[role] for role in entry.shapes)]
        self.copied += [self.places[role] for role, is_other in found.items() if is_other]
        step = entry.state["step"] if "step" in self.places and "step" in entry.numbers else None
        is_counted = step is not None and step.dtype == torch.float32
        self.count = self.places["step"] if is_counted else -1
        self.is_counted = "step" in entry.numbers
        self.has_own_count = self.is_counted and "step" not in self.places
        self.tensors: Sequence[Tensor] = [
            parameter,
            *(local(entry.state[name]) for name in self._states),
        ]
        self.n_bytes = [extent(t) * t.element_size() for t in self.tensors]
        self.n_sparse = 0
        if is_sparse:
            self.rows(parameter, given)
            if not self._is_bags:
                self._check_rows(given)
        else:
            self._check_dense(parameter, given)
        dtype = given.dtype if self._is_bags else DTYPES[given.dtype]
        is_random = rule.keeping is not None and bool(rule.keeping.hp)
        self.begin = first_element(where, entry.name, entry.parameter) if is_random else 0
        declared = entry.declared
        self._declared = {self.places[role]: state for role, state in declared.items()}
        dtypes = tuple(NUMBERS[self._dtype(k, self.tensors[k], parameter)] for k in self.columns)
        self.kind = Kind(entry.choice, rule, parameter.device, is_sparse, dtype, dtypes)
        self.recorded = self._recorded(entry, gradient, given)
        is_plain = self.recorded is not None and parameter.device.type == "cpu"
        is_whole = not hasattr(entry.parameter, "row_shard")
        self.has_plain_rows = is_plain and is_whole and self.n_sparse == 1
        del self._entry

    def labels(self) -> list[str]:
        """How errors name its tensors."""
        return [self.name, *(f"state {name!r} of {self.name}" for name in self._states)]

    # Checks

    def _state(self, role: str, parameter: Tensor) -> bool:
        """Check a state of the rule; whether it has to be copied."""
        entry = self._entry
        state, label = entry.state.get(role), f"state {role!r} of {entry.name}"
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
            names = ", ".join(map(str, dtypes)) if len(dtypes) == 1 else "a float"
            expected = f"{names} on {parameter.device}"
            got = f"{found.dtype} on {found.device}"
            reject(RuntimeError, self._where, label, "is elsewhere or no number", expected, got)
        check_written(self._where, found, label)
        if declared.per == "element":
            return not fits_order(found, self._order)
        is_wide = found.dtype == wide_dtype(declared, parameter.dtype)
        return not (is_wide and fits_order(found, range(found.dim())))

    def _numbers_of(self) -> tuple[str, ...]:
        """The states that are single numbers and are written with the step."""
        names, entry = [], self._entry
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
            check_written(self._where, found, label)
            names.append(name)
        return tuple(names)

    def _check_rows(self, gradient: Tensor) -> None:
        """Take over which rows the sparse dimensions of a gradient number."""
        self.n_sparse, self.shape = gradient.sparse_dim(), table_shape(gradient)
        if self._entry.choice.rule.is_row_wise and (self.n_sparse != 1 or gradient.dim() < 2):
            expected = "1 sparse dimension of a parameter of at least 2: a vector is one row"
            got = f"{self.n_sparse} of {gradient.dim()}"
            reject(RuntimeError, self._where, self.label, "has other rows", expected, got)

    def _check_dense(self, parameter: Tensor, gradient: Tensor) -> None:
        where, label = self._where, self.label
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

    # Gradients of a step

    def takes(self, gradient: Any) -> bool:
        """Whether a gradient is of this kind, so that nothing else has to be found anew."""
        given = gradient if type(gradient) is Tensor else local(gradient)
        if self._is_bags or isinstance(given, BagTensor):
            is_bags = self._is_bags and isinstance(given, BagTensor)
            return is_bags and given.dtype == self.kind.gradient
        if DTYPES.get(given.dtype) != self.kind.gradient:
            return False
        if not self.kind.is_sparse:
            return bool(given.layout == torch.strided)
        return bool(given.layout == torch.sparse_coo and given.sparse_dim() == self.n_sparse)

    def dense(self, parameter: Tensor, gradient: Any) -> Tensor:
        """A dense gradient, checked, as the kernels need it: itself, or a copy.

        Raises:
            RuntimeError: it does not fit, or has no memory.
        """
        parameter, given = local(parameter), local(gradient)
        self._check_dense(parameter, given)
        if fits_order(given, self._order):
            found: Tensor = given
            return found
        return self._new(parameter, given.dtype).copy_(given)

    def rows(self, parameter: Tensor, gradient: Any) -> RowGradient:
        """A row-sparse gradient, checked; as `rows_of`."""
        return rows_of(self._where, self.label, local(parameter), local(gradient))

    def _new(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the parameter's shape that lies as the kernels need it."""
        if 0 in self.copied:
            return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)

    # Copies

    def _dtype(self, k: int, tensor: Tensor, parameter: Tensor) -> torch.dtype:
        """The dtype with which the kernels read one of its tensors, or its copy."""
        if k == 0 or self._declared[k].per == "element":
            return tensor.dtype
        return wide_dtype(self._declared[k], parameter.dtype)

    def copies(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor, Tensor]]:
        """Number, tensor and copy for a step of each of its tensors that is copied."""
        made, parameter = [], local(tensors[0])
        for k in self.copied:
            tensor = local(tensors[k])
            dtype = self._dtype(k, tensor, parameter)
            if tensor.shape == parameter.shape:
                copy = self._new(parameter, dtype)
            else:
                copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            made.append((k, tensor, copy.copy_(tensor)))
        return made

    # What a look compares

    def _recorded(
        self, entry: CheckedParameter, gradient: Any, given: Any
    ) -> headers.RecordedTensors | None:
        written = [entry.parameter, *(entry.state[name] for name in self._states)]
        is_plain = all(map(is_, written, self.tensors)) and given is gradient
        if not is_plain or headers.layout_of(torch) is None:
            return None
        forms = [
            headers.form_of(torch, tensor, PLAIN, n_bytes=n_bytes)
            for tensor, n_bytes in zip(written, self.n_bytes, strict=True)
        ]
        dims = [(*t.shape, *t.stride()) for t in written]
        form, own, kind = self._gradient_form(entry.parameter, gradient)
        names, types = [None, *self._states, None], [*map(type, written), kind]
        every = [*forms, form], [*dims, own], names, self.count, types, self.has_own_count
        return headers.RecordedTensors(*every)

    def _gradient_form(self, parameter: Tensor, gradient: Any) -> tuple[Any, tuple[int, ...], type]:
        if self._is_bags:
            return Form(OBJECT, id(type(gradient))), (), type(gradient)
        shape = tuple(parameter.shape)
        if self.kind.is_sparse:
            form = headers.form_of(torch, gradient, ROWS)
            return form, (*shape, *(0 for _ in shape)), type(gradient)
        is_copied = 0 in self.copied
        strides = torch.empty(shape, device="meta").stride() if is_copied else parameter.stride()
        n_bytes = parameter.numel() * gradient.element_size()
        if not fits_order(gradient, self._order):  # others may fit
            gradient = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        more = {"dim": len(shape), "n_bytes": n_bytes}
        form = headers.form_of(torch, gradient, PLAIN, **more)
        return form, (*shape, *strides), type(gradient)

    def form_of(self, gradient: Tensor) -> tuple[Form, type] | None:
        """The form of another dense gradient that lies as the kernels need it, and its type."""
        if self.recorded is None:
            return None
        return headers.form_of(torch, gradient, PLAIN), type(gradient)


def check_written(where: str, tensor: Tensor, name: str) -> None:
    """Refuse a tensor that cannot be written in place, as a step does."""
    check_there(where, name, tensor)
    check_single(name, tensor)
