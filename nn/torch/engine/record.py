"""The record of one parameter: it is checked once, and a step asks whether it is as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.rule import Rule
from ....kernels.state import State
from ....kernels.tables import row_width
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

address_of, numel_of, is_contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
dtype_of, shape_of = attrgetter("dtype"), attrgetter("shape")


class CheckedParameter(NamedTuple):
    """A parameter that has a gradient, checked, with its state; a `Record` is made from it."""

    parameter: Tensor
    group: int
    name: str
    state: Mapping[str, Any]
    asked: RuleChoice  # of its group
    choice: RuleChoice
    shapes: Mapping[str, tuple[int, ...]]  # of its states, in the order of the rule
    numbers: tuple[str, ...]  # its states that are single numbers
    is_new: bool = False  # it had no state


class Kind(NamedTuple):
    """Properties that the parameters of one kernel call have in common."""

    choice: RuleChoice
    rule: Rule  # of tensors of these shapes
    device: torch.device
    is_sparse: bool  # whether the gradients are
    gradient: np.dtype[Any]
    dtypes: tuple[np.dtype[Any], ...]  # of parameter and states


class Record:
    """A parameter, its states and the kind of its gradient, checked.

    The tensors of a step are the parameter, then the states of the rule in its order, then those
    that are single numbers on the host.

    Attributes:
        entry: what was checked, without the state.
        kind: decides with which other parameters it is updated.
        names: those of the states that a step writes.
        n_arrays: how many of the tensors the rule takes.
        count: the place among the tensors of the float32 count of updates, which compiled code
            counts; -1: it has none.
        is_counted, has_own_count: whether its updates are counted, and whether the count is no
            tensor of the host.
        begin: the place of its first element in the whole parameter, where other processes have the
            rest, if it is rounded at random; else 0.
        copied: those of the tensors that do not lie as the kernels need it, which are updated in
            copies.
        shape: that of the parameter, or of the table whose rows a sparse gradient numbers.
        size, width: its elements, and those of a row.
        here: the tensors as they lie in this process: shards of distributed ones.
        addresses, n_bytes: of these, from the first to the last element.
        arrays, is_array: those of them that the rule takes, and whether each is one.
        numels, are_contiguous, dtypes, layouts: of the arrays; `layout_of` where it says more.
        device: the number of the device; -1 is the host.
        gradient_dtype, gradient_stride: of its gradients; None: these are contiguous.
        has_rows, shapes: whether shapes tell more than sizes, and those of the arrays.
        has_plain_rows: whether of its sparse gradient only indices and values may be others.
    """

    def __init__(self, where: str, entry: CheckedParameter, gradient: Any) -> None:
        self._where, self.entry = where, entry._replace(state={})
        self.parameter, self.name, self.group = entry.parameter, entry.name, entry.group
        self.label, state, roles = f"the gradient of {entry.name}", entry.state, (*entry.shapes,)
        parameter, given = local(entry.parameter), local(gradient)
        self.is_distributed = parameter is not entry.parameter
        rule = entry.choice.rule.on(tuple(entry.parameter.shape))
        if self.is_distributed and (rule.measure or not rule.is_elementwise):
            wrong, expected = "is distributed", "a tensor of one process: the norm is that of all"
            reject(RuntimeError, where, entry.name, wrong, expected, type(entry.parameter).__name__)
        self.is_bags = isinstance(given, BagTensor)
        is_sparse = is_row_sparse(given)
        check_written(where, parameter, entry.name)
        order, plain = order_of(parameter), (*range(parameter.dim()),)
        self.has_rows = is_sparse or rule.is_row_wise or not rule.is_elementwise
        is_copied = order is None or not is_as_it_lies(parameter)
        is_copied = is_copied or (self.has_rows and order != plain)
        self._order = plain if is_copied or order is None else order
        self.shape = self._shape = tuple(parameter.shape)
        self._declared = (None, *rule.states)
        self.copied, self.here = [0] * is_copied, [parameter]
        for k, role in enumerate(roles, start=1):
            own, is_other = self._state(k, state.get(role), role)
            self.here.append(own)
            self.copied += [k] * is_other
        self.numbers = self._numbers_of(state)
        self.names, self.n_arrays = (*roles, *self.numbers), 1 + len(roles)
        self.tensors = (entry.parameter, *[state[name] for name in self.names])
        self.here += self.tensors[self.n_arrays :]
        is_step = "step" in self.numbers
        is_float = is_step and state["step"].dtype == torch.float32
        self.count = 1 + self.names.index("step") if is_float else -1
        self.is_counted = "step" in entry.numbers
        self.has_own_count = self.is_counted and not is_step
        self.addresses = [*map(address_of, self.here)]
        self.n_bytes = [extent(t) * t.element_size() for t in self.here]
        self.arrays = self.here[: self.n_arrays]
        self.is_array = [True] * self.n_arrays + [False] * len(self.numbers)
        self.numels, self.shapes = ([*map(f, self.arrays)] for f in (numel_of, shape_of))
        self.are_contiguous = [*map(is_contiguous, self.arrays)]
        self.dtypes = [*map(dtype_of, self.arrays)]
        is_plain = self.are_contiguous if not self.copied else [False] * self.n_arrays
        each = zip(self.arrays, is_plain, strict=True)
        self.layouts = [None if is_one else layout_of(x) for x, is_one in each]
        self.gradient_stride = None if self._order == plain else parameter.stride()
        self.device, self.gradient_dtype = parameter.get_device(), given.dtype
        self.n_sparse = 0
        if is_sparse:
            self.rows(gradient)
            if not self.is_bags:
                self._check_rows(given)
        else:
            self._check_dense(given)
        self.size, self.width = math.prod(self.shape), row_width(self.shape)
        dtype = given.dtype if self.is_bags else DTYPES[given.dtype]
        is_random = rule.keeping is not None and bool(rule.keeping.hp)
        self.begin = first_element(where, entry.name, entry.parameter) if is_random else 0
        dtypes = [NUMBERS[self._dtype(k, x)] for k, x in enumerate(self.arrays)]
        self.kind = Kind(entry.choice, rule, parameter.device, is_sparse, dtype, tuple(dtypes))
        is_here = parameter.device.type == "cpu" and not hasattr(entry.parameter, "row_shard")
        self.has_plain_rows = is_here and self.n_sparse == 1 and not self.is_distributed

    def renewed(self, state: Mapping[str, Any], gradient: Any) -> Record | None:
        """The record where only memory and states are others; None where more may have changed."""
        entry, own = self.entry, local(self.parameter)
        is_same = own.dtype == self.dtypes[0] and own.get_device() == self.device
        is_same = is_same and own.shape == self._shape
        if not is_same or any(state.get(name) is None for name in (*entry.shapes, *entry.numbers)):
            return None
        return Record(self._where, entry._replace(state=state), gradient)

    def labels(self) -> list[str]:
        """How errors name its tensors."""
        return [self.name, *(f"state {name!r} of {self.name}" for name in self.names)]

    # Checks

    def _state(self, k: int, state: Any, role: str) -> tuple[Tensor, bool]:
        """A state of the rule, checked, as it lies here; whether it has to be copied."""
        where, label = self._where, f"state {role!r} of {self.name}"
        if not isinstance(state, Tensor):
            got, fix = type(state).__name__, "; the state is of another optimizer or other options"
            reject(RuntimeError, where, label, "is missing", "a tensor", got, fix)
        found, parameter, declared = local(state), self.here[0], self._declared[k]
        shape = self.entry.shapes[role] if found is state else self.shape
        if tuple(found.shape) != shape:
            reject_shape(where, label, shape, found)
        wide = wide_dtype(declared, parameter.dtype)
        is_number = found.dtype in DTYPES if declared.dtype is None else found.dtype == wide
        if found.device != parameter.device or not is_number:
            names = "a float" if declared.dtype is None else str(wide)
            expected, got = f"{names} on {parameter.device}", f"{found.dtype} on {found.device}"
            reject(RuntimeError, where, label, "is elsewhere or no number", expected, got)
        check_written(where, found, label)
        if declared.per == "element":
            return found, not fits_order(found, self._order)
        return found, not (found.dtype == wide and fits_order(found, range(found.dim())))

    def _numbers_of(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that are single numbers and are written with the step."""
        names = []
        for name in self.entry.numbers:
            found, label = state[name], f"state {name!r} of {self.name}"
            if name == "step" and is_count(found):
                continue
            if not isinstance(found, Tensor) or found.numel() != 1 or found.dtype not in NUMBERS or found.is_cuda:
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
        if self.entry.choice.rule.is_row_wise and (self.n_sparse != 1 or gradient.dim() < 2):
            expected = "1 sparse dimension of a parameter of at least 2: a vector is one row"
            got = f"{self.n_sparse} of {gradient.dim()}"
            reject(RuntimeError, self._where, self.label, "has other rows", expected, got)

    def _check_dense(self, gradient: Tensor) -> None:
        where, label, parameter = self._where, self.label, self.here[0]
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
        if self.is_bags or isinstance(given, BagTensor):
            is_bags = self.is_bags and isinstance(given, BagTensor)
            return is_bags and given.dtype == self.kind.gradient
        if DTYPES.get(given.dtype) != self.kind.gradient:
            return False
        if not self.kind.is_sparse:
            return bool(given.layout == torch.strided)
        return bool(given.layout == torch.sparse_coo and given.sparse_dim() == self.n_sparse)

    def dense(self, gradient: Any) -> Tensor:
        """A dense gradient, checked, as the kernels need it: itself, or a copy.

        Raises:
            RuntimeError: it does not fit, or has no memory.
        """
        given: Tensor = local(gradient)
        self._check_dense(given)
        return given if fits_order(given, self._order) else self._new(given.dtype).copy_(given)

    def rows(self, gradient: Any) -> RowGradient:
        """A row-sparse gradient, checked; as `rows_of`."""
        return rows_of(self._where, self.label, self.here[0], local(gradient))

    # Copies

    def _new(self, dtype: torch.dtype) -> Tensor:
        """A tensor of the parameter's shape that lies as the kernels need it."""
        parameter = self.here[0]
        if 0 in self.copied:
            return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)

    def _dtype(self, k: int, tensor: Tensor) -> torch.dtype:
        """The dtype with which the kernels read one of its tensors, or its copy."""
        declared = self._declared[k]
        is_own = declared is None or declared.per == "element"
        return tensor.dtype if is_own else wide_dtype(declared, self.here[0].dtype)

    def copies(self) -> list[tuple[int, Tensor, Tensor]]:
        """Number, tensor and copy for a step of each of its tensors that is copied."""
        made = []
        for k in self.copied:
            tensor = self.here[k]
            dtype = self._dtype(k, tensor)
            if tensor.shape == self.here[0].shape:
                copy = self._new(dtype)
            else:
                copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            made.append((k, tensor, copy.copy_(tensor)))
        return made


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The layout of a tensor that is not contiguous, or not as it lies."""
    return tensor.stride(), is_as_it_lies(tensor)


def is_count(value: Any) -> bool:
    """Whether it is a count of updates that is no tensor of the host."""
    return value.is_cuda if isinstance(value, Tensor) else isinstance(value, int | float)


def check_written(where: str, tensor: Tensor, name: str) -> None:
    """Refuse a tensor that cannot be written in place, as a step does."""
    check_there(where, name, tensor)
    check_single(name, tensor)
