"""The record of one parameter: it is checked once, and a step asks whether it is as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.rule import Rule
from ....kernels.tables import row_width
from ....ops.runtime.bags.tensor import BagTensor
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import RowGradient
from ...engine.reader import is_row_sparse
from .memory import (
    DTYPES,
    NUMBERS,
    PLAIN_TYPES,
    address_of,
    are_there,
    bytes_of,
    check_single,
    check_there,
    dtype_of,
    extent,
    fits_order,
    is_as_it_lies,
    is_contiguous,
    is_zerotensor,
    numel_of,
    order_of,
    shape_of,
)  # fmt: skip
from .part import RuleChoice
from .tensors import (
    first_element,
    gradient_here,
    local,
    reject_shape,
    rows_of,
    table_shape,
    wide_dtype,
)


class CheckedParameter(NamedTuple):
    """A parameter that has a gradient, checked, with its state; a `Record` is made from it."""

    parameter: Tensor
    name: str
    state: Mapping[str, Any]
    is_new: bool  # it had no state
    group: int
    asked: RuleChoice  # of its group
    choice: RuleChoice
    shapes: Mapping[str, tuple[int, ...]]  # of its states, in the order of the rule
    numbers: tuple[str, ...]  # its states that are single numbers

    def alone(self) -> CheckedParameter:
        """The checked parameter without its state."""
        return self._replace(state={})


class BatchKind(NamedTuple):
    """Properties that the parameters of one kernel call have in common."""

    choice: RuleChoice
    rule: Rule  # of tensors of these shapes
    device: torch.device
    is_sparse: bool  # whether the gradients are
    gradient: np.dtype[Any]
    dtypes: tuple[np.dtype[Any], ...]  # of parameter and states


class RecordTraits(NamedTuple):
    """Properties of records beside tensors and sizes; records that are alike share them."""

    kind: BatchKind  # decides with which other parameters one is updated
    # Of the states that a step writes: of the rule in its order, then single numbers on the host.
    names: tuple[str, ...]
    numbers: tuple[str, ...]  # those of the single numbers
    # The place among the singles of the float32 count of updates, which compiled code counts; -1:
    # there is none.
    count_place: int
    is_counted: bool  # its updates are counted
    has_own_count: bool  # the count is no tensor
    is_plain: bool  # one process has all of it, contiguous and as it lies
    is_distributed: bool
    has_rows: bool  # shapes tell more than sizes
    is_bags: bool  # the gradient is that of pooled rows
    n_sparse: int  # sparse dimensions of the gradient; 0: it is dense, or that of pooled rows
    gradient: Any  # PyTorch's dtype of it
    single_dtypes: tuple[torch.dtype, ...]
    copied: tuple[int, ...]  # the arrays that do not lie as the kernels need it, and are copied
    is_inference: bool  # autograd counts no changes of some of its tensors


class Record:
    """A parameter, its states and the kind of its gradient, checked.

    Attributes:
        checked: what was checked of the parameter, without its state.
        columns: attributes that steps join; see `Columns`.
        traits: what it has in common with others.
        states: those of `RecordTraits.names`.
        arrays, singles: the parameter with the states of the rule, and the single numbers, as they
            lie in this process: shards of distributed ones.
        places, single_places, n_bytes: their addresses, and the bytes from the first to the last
            element of all.
        begin: the place of its first element in the whole parameter, where other processes have the
            rest, if it is rounded at random; else 0.
        shape: that of the parameter, or of the table whose rows a sparse gradient numbers.
        size, width: its elements, and those of a row.
        numels, are_contiguous, dtypes, shapes: of the arrays.
        layouts: their `layout_of`; nothing where shapes tell it.
        device: its number; -1 is the host.
        gradient_stride: of dense gradients; None: these are contiguous.
    """

    def __init__(self, where: str, checked: CheckedParameter, gradient: Any) -> None:
        self._where, self.checked, state = where, checked.alone(), checked.state
        self.parameter, self.name, roles = checked.parameter, checked.name, (*checked.shapes,)
        self.label, parameter = f"the gradient of {checked.name}", local(checked.parameter)
        given = gradient_here(checked.parameter, gradient)
        is_distributed = parameter is not checked.parameter
        rule = checked.choice.rule.on(tuple(checked.parameter.shape))
        is_bags, is_sparse = isinstance(given, BagTensor), is_row_sparse(given)
        check_written(where, parameter, self.name)
        order, plain = order_of(parameter), (*range(parameter.dim()),)
        has_rows = is_sparse or rule.is_row_wise or not rule.is_elementwise
        is_copied = order is None or not is_as_it_lies(parameter) or (has_rows and order != plain)
        self._order = plain if is_copied or order is None else order
        self.shape = tuple(parameter.shape)
        self._declared = (None, *rule.states)
        self.arrays: tuple[Tensor, ...] = (parameter,)
        copied = [0] * is_copied
        for k, role in enumerate(roles, start=1):
            own, is_other = self._state(k, state.get(role), role)
            self.arrays = (*self.arrays, own)
            copied += [k] * is_other
        numbers = self._numbers_of(state)
        names = (*roles, *numbers)
        self.states = tuple([state[name] for name in names])
        self.singles = self.states[len(roles) :]
        self._place()
        self.numels, self.are_contiguous, self.dtypes, self.shapes = (
            tuple(map(f, self.arrays)) for f in (numel_of, is_contiguous, dtype_of, shape_of)
        )
        is_whole = not (is_distributed or hasattr(self.parameter, "row_shard"))
        is_plain = all(self.are_contiguous) and not copied
        self.layouts = () if is_plain else tuple(map(layout_of, self.arrays))
        is_plain = is_plain and is_whole
        self.device = parameter.get_device()
        self.gradient_stride = None if self._order == plain else parameter.stride()
        n_sparse = given.sparse_dim() if is_sparse and not is_bags else 0
        if is_sparse:
            self.rows(gradient)
            if not is_bags:
                self._check_rows(given)
        else:
            self._check_dense(given)
        self.size, self.width = math.prod(self.shape), row_width(self.shape)
        dtype = given.dtype if is_bags else DTYPES[given.dtype]
        is_random = rule.keeping is not None and bool(rule.keeping.hp)
        self.begin = first_element(where, self.name, self.parameter) if is_random else 0
        dtypes = tuple([NUMBERS[self._dtype(k, x)] for k, x in enumerate(self.arrays)])
        is_counted, is_step = "step" in checked.numbers, "step" in numbers
        is_float = is_step and state["step"].dtype == torch.float32
        self.traits = RecordTraits(
            BatchKind(checked.choice, rule, parameter.device, is_sparse, dtype, dtypes),
            names, numbers, numbers.index("step") if is_float else -1, is_counted,
            is_counted and not is_step, is_plain, is_distributed, has_rows, is_bags, n_sparse,
            given.dtype, tuple(map(dtype_of, self.singles)), tuple(copied),
            any(map(Tensor.is_inference, (*self.arrays, *self.singles))),
        )  # fmt: skip
        self.collect()

    def collect(self) -> None:
        """Make `columns` of the other attributes."""
        self.columns = (
            self.arrays, self.singles, self.states, self.places, self.single_places, self.numels,
            self.width, self.checked.group, self.traits,
        )  # fmt: skip

    def _place(self) -> None:
        """Take over where the tensors lie."""
        self.places = tuple(map(address_of, self.arrays))
        self.single_places = tuple(map(address_of, self.singles))
        every = *self.arrays, *self.singles
        self.n_bytes = tuple([extent(t) * t.element_size() for t in every])

    def alike(self, given: Sequence[CheckedParameter]) -> list[Record] | None:
        """Records of tensors that lie as these did, of this or of other parameters of the group
        with gradients of this kind; None: some may differ.
        """
        traits, n_arrays, n = self.traits, len(self.shapes), len(given)
        states = [tuple(map(own.state.get, traits.names)) for own in given]
        arrays = [(own.parameter, *x[: n_arrays - 1]) for own, x in zip(given, states, strict=True)]
        singles = [own[n_arrays - 1 :] for own in states]
        whole, alone = [*chain.from_iterable(arrays)], [*chain.from_iterable(singles)]
        every = whole + alone
        if not traits.is_plain or not {*map(type, every)} <= PLAIN_TYPES:
            return None
        places = [*map(address_of, every)]
        if not (
            [*map(shape_of, whole)] == [*self.shapes] * n
            and [*map(dtype_of, whole)] == [*self.dtypes] * n
            and [*map(dtype_of, alone)] == [*traits.single_dtypes] * n
            and all(map(is_contiguous, every))
            and not any(map(Tensor.is_neg, every))
            and {*map(Tensor.get_device, whole)} == {self.device}
            and {*map(Tensor.get_device, alone)} <= {-1}
            and {*map(numel_of, alone)} <= {1}
            and {*map(Tensor.is_inference, every)} == {traits.is_inference}
            and are_there(every, places, bytes_of(every))
            and (not traits.has_own_count or all(is_count(own.state.get("step")) for own in given))
        ):
            return None
        at, at_alone, made = iter(places), iter(places[len(whole) :]), []
        for checked, own, tensors, numbers in zip(given, states, arrays, singles, strict=True):
            record = Record.__new__(Record)
            vars(record).update(vars(self))
            record.parameter, record.states = checked.parameter, own
            record.arrays, record.singles, record.name = tensors, numbers, checked.name
            record.label, record.checked = f"the gradient of {checked.name}", checked.alone()
            record.places = tuple(islice(at, n_arrays))
            record.single_places = tuple(islice(at_alone, len(numbers)))
            record.collect()
            made.append(record)
        return made

    def example(self) -> Record:
        """A record without tensors, for `alike`."""
        made = Record.__new__(Record)
        vars(made).update(vars(self))
        made.checked = self.checked._replace(parameter=torch.empty(0))
        made.parameter, made.states, made.arrays, made.singles = made.checked.parameter, (), (), ()
        made.collect()
        return made

    def labels(self) -> list[str]:
        """How errors name its tensors."""
        return [self.name, *(f"state {name!r} of {self.name}" for name in self.traits.names)]

    # Checks

    def _state(self, k: int, state: Any, role: str) -> tuple[Tensor, bool]:
        """A state of the rule, checked, as it lies here; whether it has to be copied."""
        where, label = self._where, f"state {role!r} of {self.name}"
        if not isinstance(state, Tensor):
            got, fix = type(state).__name__, "; the state is of another optimizer or other options"
            reject(RuntimeError, where, label, "is missing", "a tensor", got, fix)
        found, parameter, declared = local(state), self.arrays[0], self._declared[k]
        shape = self.checked.shapes[role]
        if found is not state:
            shape = self.checked.choice.rule.shape_of(declared, self.shape)
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
        for name in self.checked.numbers:
            found, label = state[name], f"state {name!r} of {self.name}"
            if name == "step" and is_count(found):
                continue
            if not isinstance(found, Tensor) or found.numel() != 1 or found.dtype not in NUMBERS:
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
        n_sparse, self.shape = gradient.sparse_dim(), table_shape(gradient)
        if self.checked.choice.rule.is_row_wise and (n_sparse != 1 or gradient.dim() < 2):
            expected = "1 sparse dimension of a parameter of at least 2: a vector is one row"
            got = f"{n_sparse} of {gradient.dim()}"
            reject(RuntimeError, self._where, self.label, "has other rows", expected, got)

    def _check_dense(self, gradient: Tensor) -> None:
        where, label, parameter = self._where, self.label, self.arrays[0]
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
        traits = self.traits
        if given.dtype != traits.gradient or isinstance(given, BagTensor) != traits.is_bags:
            return False
        if traits.is_bags or not traits.kind.is_sparse:
            return traits.is_bags or bool(given.layout == torch.strided)
        return bool(given.layout == torch.sparse_coo and given.sparse_dim() == traits.n_sparse)

    def dense(self, gradient: Any) -> Tensor:
        """A dense gradient, checked, as the kernels need it: itself, or a copy.

        Raises:
            RuntimeError: it does not fit, or has no memory.
        """
        given: Tensor = gradient_here(self.parameter, gradient)
        self._check_dense(given)
        return given if fits_order(given, self._order) else self._new(given.dtype).copy_(given)

    def rows(self, gradient: Any) -> RowGradient:
        """A row-sparse gradient, checked; as `rows_of`."""
        return rows_of(self._where, self.label, self.arrays[0], local(gradient))

    # Copies

    def _new(self, dtype: torch.dtype) -> Tensor:
        """A tensor of the parameter's shape that lies as the kernels need it."""
        parameter = self.arrays[0]
        if 0 in self.traits.copied:
            return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)

    def _dtype(self, k: int, tensor: Tensor) -> torch.dtype:
        """The dtype with which the kernels read one of its tensors, or its copy."""
        declared = self._declared[k]
        is_own = declared is None or declared.per == "element"
        return tensor.dtype if is_own else wide_dtype(declared, self.arrays[0].dtype)

    def copies(self) -> list[tuple[int, Tensor, Tensor]]:
        """Number, tensor and copy for a step of each of its tensors that is copied."""
        made = []
        for k in self.traits.copied:
            tensor = self.arrays[k]
            dtype = self._dtype(k, tensor)
            if tensor.shape == self.arrays[0].shape:
                copy = self._new(dtype)
            else:
                copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            made.append((k, tensor, copy.copy_(tensor)))
        return made


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The layout of a tensor that is not contiguous, or not as it lies."""
    return tensor.stride(), is_as_it_lies(tensor)


def is_count(value: Any) -> bool:
    """Whether it is a count of updates that is no tensor."""
    return isinstance(value, int | float)


def check_written(where: str, tensor: Tensor, name: str) -> None:
    """Refuse a tensor that cannot be written in place, as a step does."""
    check_there(where, name, tensor)
    check_single(name, tensor)
