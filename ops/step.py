"""The functions under every operator and optimizer: dense steps and row steps, for any rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from ..kernels.blocks import Kernel, kernel
from ..kernels.cpu.dense import DenseStep, TensorTable
from ..kernels.cpu.measure import measure
from ..kernels.cpu.row_step import RowTable, row_update
from ..kernels.cpu.sums import accumulate
from ..kernels.cpu.workspace import Pool
from ..kernels.rules.rule import Prologue, Rule
from ..kernels.storage import STORAGES, Storage, real_of
from . import device_step, locks, pending
from .arrays import RowTensor, address_of, index_error
from .device import DeviceArray
from .device_step import Launch
from .errors import message


@dataclass(frozen=True, eq=False)
class Variables:
    """Checked variables: tensors of the same storage types of parameter and states.

    Attributes:
        tensors: for each tensor the parameter, then its states; contiguous, of one shape
            (but for the row and column means of Adafactor); all on the host, or all on one
            device.
        w: storage of the parameters.
        s: storage of each state.
        table: their addresses and sizes.
    """

    tensors: tuple[tuple[Any, ...], ...]
    w: Storage
    s: tuple[Storage, ...]
    table: TensorTable

    @classmethod
    def of(cls, tensors: Sequence[tuple[Any, ...]]) -> Variables:
        """Collect the addresses of ``tensors``, which are kept alive with the result."""
        addresses = np.zeros((len(tensors), 4), np.int64)
        first = np.zeros(len(tensors) + 1, np.int64)
        for t, arrays in enumerate(tensors):
            addresses[t, : len(arrays)] = [address_of(a) for a in arrays]
            first[t + 1] = first[t] + arrays[0].size
        w, *s = (STORAGES[array.dtype] for array in tensors[0])
        return cls(tuple(tensors), w, tuple(s), TensorTable(addresses, first))

    @property
    def real(self) -> Storage:
        """Storage of the arithmetic."""
        return real_of(self.w)

    @cached_property
    def spans(self) -> list[locks.Span]:
        """The memory of all tensors, for locking."""
        return _spans(self.tensors)

    @cached_property
    def _steps(self) -> dict[tuple[Rule, Prologue, Storage], Pool[DenseStep]]:
        return {}

    def steps(self, rule: Rule, prologue: Prologue, g: Storage) -> Pool[DenseStep]:
        """The steps of ``rule`` on these tensors, for gradients stored as ``g``."""
        key = rule, prologue, g
        if key not in self._steps:
            compiled = kernel(rule, prologue, self.w, g, self.s)
            self._steps[key] = Pool(lambda: DenseStep(compiled, self.table))
        return self._steps[key]


def _spans(tensors: Sequence[tuple[Any, ...]]) -> list[locks.Span]:
    return locks.spans_of(
        [
            (
                tuple(address_of(a) for a in arrays),
                tuple(a.nbytes for a in arrays),
                arrays[0].nbytes // max(1, arrays[0].shape[0]) if arrays[0].ndim else 0,
            )
            for arrays in tensors
        ]
    )


class RowGradient(NamedTuple):
    """A checked row-sparse gradient: contiguous ``indices [B]`` and ``values [B, ...]``."""

    indices: Any
    values: Any
    index_address: int
    values_address: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @classmethod
    def of(cls, indices: Any, values: Any) -> RowGradient:
        """With the addresses of the arrays."""
        return cls(indices, values, address_of(indices), address_of(values))


def compile_step(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    g: Storage,
    *,
    row_sparse: bool,
    every_row: bool,
) -> None:
    """Compile what depends on the rule and the storage types, before anything is written.

    Args:
        rule: as `dense_step`.
        prologue: as `dense_step`.
        variables: as `dense_step`.
        g: as `dense_step`.
        row_sparse: for a row step, not a dense one.
        every_row: for a row step that updates all rows.
    """
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    if row_sparse:
        real = compiled.real
        wanted = [compiled.block_real, accumulate(g, real), accumulate(real, real)]
        wanted += [compiled.block_zero] if every_row else []
    else:
        wanted = [compiled.block, *([compiled.measure] if compiled.measure else [])]
    for function in wanted:
        function.address  # noqa: B018


def dense_step(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: np.ndarray,
    g: Storage,
    hp: np.ndarray,
    hp_of: np.ndarray,
    launch: Launch | None = None,
) -> None:
    """One step of ``rule`` on all ``variables``, in place, in one kernel call.

    Args:
        rule: the update rule.
        prologue: what happens to the gradient before the rule.
        variables: T tensors with their states.
        gradients: int64 ``[T]``: addresses of contiguous gradients of the tensors' sizes.
        g: storage of the gradients.
        hp: at most T rows of scalars in the type of the arithmetic: the rule's, then the
            prologue's.
        hp_of: int64 ``[T]``: the row of ``hp`` that each tensor uses.
        launch: for variables on a device; the step is enqueued.
    """
    if launch is not None:
        compiled = kernel(rule, prologue, variables.w, g, variables.s)
        table = variables.table
        sizes = np.diff(table.first)
        device_step.dense_update(compiled, table.addresses, gradients, sizes, hp, hp_of, launch)
        return
    steps = variables.steps(rule, prologue, g)
    step = steps.take()
    step.gradients[:], step.hp[: len(hp)], step.hp_of[:] = gradients, hp, hp_of
    step.run()
    steps.give(step)


@cache
def _steps_on_one_tensor(
    rule: Rule, prologue: Prologue, w: np.dtype[Any], g: np.dtype[Any]
) -> Pool[DenseStep]:
    """For variables of dtype ``w`` and a gradient of dtype ``g``, wherever they lie."""
    s = (STORAGES[w],) * len(rule.states)
    compiled = kernel(rule, prologue, STORAGES[w], STORAGES[g], s)

    def make() -> DenseStep:
        nowhere = TensorTable(np.zeros((1, 4), np.int64), np.zeros(2, np.int64))
        return DenseStep(compiled, nowhere)

    return Pool(make)


def tensor_step(
    rule: Rule,
    prologue: Prologue,
    arrays: tuple[Any, ...],
    addresses: Sequence[int] | np.ndarray,
    hp: Sequence[float],
    *,
    use_locking: bool = False,
) -> None:
    """One step of ``rule`` on one tensor, in place; on a device it is enqueued.

    Args:
        rule: the update rule.
        prologue: what happens to the gradient before the rule.
        arrays: the parameter, its states and the gradient: contiguous, of one shape, all but the
            gradient of one dtype.
        addresses: those of the arrays.
        hp: the scalars of the rule, then those of the prologue.
        use_locking: hold the variables exclusively.
    """
    w, gradient = arrays[0], arrays[-1]
    if isinstance(w, DeviceArray):
        _tensor_step_on_device(rule, prologue, arrays, addresses, hp, use_locking)
        return
    steps = _steps_on_one_tensor(rule, prologue, w.dtype, gradient.dtype)
    step = steps.take()
    step.table.move(addresses[:-1], w.size)
    step.gradients[0] = addresses[-1]
    step.hp[0] = hp
    if use_locking:
        with locks.Request(_spans([arrays[:-1]]), shared=False):
            step.run()
    else:
        step.run()
    steps.give(step)


def _tensor_step_on_device(
    rule: Rule,
    prologue: Prologue,
    arrays: tuple[Any, ...],
    addresses: Sequence[int] | np.ndarray,
    hp: Sequence[float],
    use_locking: bool,
) -> None:
    *variables, gradient = arrays
    w = STORAGES[variables[0].dtype]
    compiled = kernel(rule, prologue, w, STORAGES[gradient.dtype], (w,) * len(rule.states))
    of_variables = np.zeros((1, 4), np.int64)
    of_variables[0, : len(variables)] = addresses[:-1]
    spans = _spans([tuple(variables)]) if use_locking else None
    with device_step.launch_on(arrays, spans) as launch:
        device_step.dense_update(
            compiled,
            of_variables,
            np.array(addresses[-1:], np.int64),
            np.array([gradient.size]),
            np.array([hp], compiled.real.dtype),
            np.zeros(1, np.int64),
            launch,
        )


def measure_step(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: np.ndarray,
    g: Storage,
    hp: np.ndarray,
    hp_of: np.ndarray,
) -> np.ndarray:
    """The first stage of a two-stage ``rule``; arguments as `dense_step`, nothing is written.

    Returns:
        float64 ``[T, n_measured]``: sums of squares over each tensor.
    """
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    return measure(compiled, variables.table, gradients, hp, hp_of)


def row_step(
    where: Sequence[str],
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: Sequence[RowGradient],
    hp: np.ndarray,
    hp_of: Sequence[int],
    *,
    touched_only: bool,
    drop: bool = False,
    use_locking: bool = False,
    launch: Launch | None = None,
) -> None:
    """One step of ``rule`` on tables with row-sparse gradients, in place, in one kernel call.

    Args:
        where: for each table how an error names it.
        rule: the update rule.
        prologue: what happens to a row's summed gradient before the rule.
        variables: T tables ``[N, ...]`` with their states.
        gradients: one for each table, values all of one dtype.
        hp: as in `dense_step`.
        hp_of: the row of ``hp`` that each table uses.
        touched_only: update the rows that occur (lazy), or all rows (dense-equivalent).
        drop: leave out indices that are out of range.
        use_locking: lazy calls lock the rows they touch, others the whole variables.
        launch: for variables on a device; the step is enqueued, and its guard knows of bad
            indices. Such variables are locked by whoever launches.

    Raises:
        IndexError: an index is out of range; nothing was written.
        ValueError: the tables have too many rows for the sort keys.
    """
    g = STORAGES[gradients[0].values.dtype]
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    base, stride = address_of(hp), hp.strides[0]
    tables = _row_tables(variables, gradients, [base + row * stride for row in hp_of])
    if launch is not None:
        check_keys(where[0], [(table.rows, table.length) for table in tables])
        device_step.row_update(
            compiled, tables, hp, hp_of, launch, touched_only=touched_only, drop=drop
        )
        return
    lock_spans = variables.spans if use_locking else None
    _update_rows(where, compiled, tables, gradients, touched_only, drop, lock_spans)


def table_step(
    where: str,
    rule: Rule,
    prologue: Prologue,
    variables: Sequence[Any],
    addresses: Sequence[int],
    gradient: RowGradient,
    hp: Sequence[float],
    *,
    touched_only: bool,
    drop: bool = False,
    use_locking: bool = False,
) -> None:
    """One step of ``rule`` on one table with a row-sparse gradient, in place.

    Args:
        where: how an error names the operator.
        rule: the update rule.
        prologue: as in `row_step`.
        variables: the table and its states, contiguous, of one dtype and shape.
        addresses: those of the variables.
        gradient: as in `row_step`.
        hp: the scalars of the rule, then those of the prologue.
        touched_only: as in `row_step`.
        drop: as in `row_step`.
        use_locking: as in `row_step`.

    Raises:
        IndexError, ValueError: as `row_step`.
    """
    w = STORAGES[variables[0].dtype]
    compiled = kernel(rule, prologue, w, STORAGES[gradient.dtype], (w,) * len(rule.states))
    row = np.array(hp, compiled.real.dtype)
    absent = (0,) * (4 - len(addresses))
    table = _row_table(variables[0], (*addresses, *absent), address_of(row), gradient)
    lock_spans = _spans([tuple(variables)]) if use_locking else None
    if not isinstance(variables[0], DeviceArray):
        _update_rows([where], compiled, [table], [gradient], touched_only, drop, lock_spans)
        return
    check_keys(where, [(table.rows, table.length)])
    arrays = [*variables, gradient.indices, gradient.values]
    error = None if drop else bad_index_error([(where, table.length, table.rows)])
    with (
        pending.held(),  # before the order of streams is held, as in steps of optimizers
        device_step.launch_on(arrays, lock_spans) as launch,
        device_step.checked(variables[0].device, launch, error) as guarded,
    ):
        device_step.row_update(
            compiled, [table], row[None], [0], guarded, touched_only=touched_only, drop=drop
        )


def check_rows_on_device(
    variables: Variables, gradients: Sequence[RowGradient], launch: Launch
) -> None:
    """Enqueue the check of all indices alone; a bad one closes the guard of ``launch``."""
    tables = _row_tables(variables, gradients, [0] * len(gradients))
    device_step.check_indices(tables, launch)


def _row_tables(
    variables: Variables, gradients: Sequence[RowGradient], hp_addresses: Sequence[int]
) -> list[RowTable]:
    return [
        _row_table(arrays[0], addresses, hp, gradient)
        for arrays, addresses, gradient, hp in zip(
            variables.tensors,
            variables.table.addresses.tolist(),
            gradients,
            hp_addresses,
            strict=True,
        )
    ]


def _row_table(
    w: Any, addresses: Sequence[int], hp_address: int, gradient: RowGradient
) -> RowTable:
    n_rows = w.shape[0]
    indices = gradient.indices
    return RowTable._make(
        (
            *addresses,
            hp_address,
            n_rows,
            w.size // max(1, n_rows),
            gradient.index_address,
            indices.itemsize,
            len(indices),
            gradient.values_address,
        )
    )


def _update_rows(
    where: Sequence[str],
    compiled: Kernel,
    tables: list[RowTable],
    gradients: Sequence[RowGradient],
    touched_only: bool,
    drop: bool,
    lock_spans: list[locks.Span] | None,
) -> None:
    check_keys(where[0], [(table.rows, table.length) for table in tables])
    if lock_spans is None:
        position = row_update(compiled, tables, touched_only=touched_only, drop=drop, locked=False)
    else:
        with locks.Request(lock_spans, shared=touched_only):
            position = row_update(
                compiled, tables, touched_only=touched_only, drop=drop, locked=touched_only
            )
    if position >= 0:
        raise first_bad_index(where, gradients, tables, position)


def check_keys(where: str, sizes: Sequence[tuple[int, int]]) -> None:
    """The number of a row and of an occurrence must fit into one sort key of 63 bits.

    Args:
        where: how an error names the call.
        sizes: for each table its rows and the length of its indices.

    Raises:
        ValueError: they do not fit.
    """
    n_rows, n = (sum(column) for column in zip(*sizes, strict=True))
    bits = n_rows.bit_length() + n.bit_length()
    if bits > 63:
        raise ValueError(
            message(where, "indices", "need too long sort keys", "at most 63 bits", f"{bits} bits")
            + f"; split the {n} indices into several calls"
        )


def first_bad_index(
    where: Sequence[str],
    gradients: Sequence[RowGradient | RowTensor],
    tables: list[RowTable],
    position: int,
) -> IndexError:
    """The error for ``position`` in the concatenated indices; arguments as `row_step`."""
    first = 0
    for gradient, table in zip(gradients, tables, strict=True):  # noqa: B007  (used below)
        if position < first + table.length:
            break
        first += table.length
    lists = [(label, table.length, table.rows) for label, table in zip(where, tables, strict=True)]
    return bad_index_error(lists)(position, int(gradient.indices[position - first]))


def bad_index_error(
    lists: Sequence[tuple[str, int, int]],
) -> Callable[[int, int], IndexError]:
    """What makes the error for a position in concatenated indices and the index there.

    Args:
        lists: for each list of indices how an error names it, its length, and the rows there are.
    """

    def error(position: int, index: int) -> IndexError:
        for label, length, n_rows in lists:
            if position < length:
                return index_error(label, position, index, n_rows)
            position -= length
        raise AssertionError("a position beyond all indices")

    return error
