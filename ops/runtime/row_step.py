"""Row-sparse steps for any rule, under every operator and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.parallel import Prepared, commit
from ...kernels.cpu.rows.step import RowStep
from ...kernels.element import Kernel, kernel
from ...kernels.rules.rule import Prologue, Rule
from ...kernels.storage import STORAGES
from ...kernels.tables import RowTable
from . import device_step, locks, pending
from .arrays import RowTensor, address_of, index_error
from .device import DeviceArray
from .device_step import Launch
from .errors import message
from .step import Variables, spans_of


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
        launch: for variables on a device; the step is enqueued, and its guard knows of bad
            indices. Such variables are locked by whoever launches.

    Raises:
        IndexError: an index is out of range; nothing was written.
        ValueError: the tables have too many rows for the sort keys.
    """
    if launch is None:
        arguments = (where, rule, prologue, variables, gradients, hp, hp_of)
        commit([prepared_rows(*arguments, touched_only=touched_only, drop=drop)])
        return
    compiled, tables = _compiled_tables(rule, prologue, variables, gradients, hp, hp_of)
    check_keys(where[0], [(table.rows, table.length) for table in tables])
    device_step.row_update(
        compiled, tables, hp, hp_of, launch, touched_only=touched_only, drop=drop
    )


def prepared_rows(
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
) -> Prepared:
    """A step on tables on the host, to be run by `commit`; as `row_step`.

    The caller keeps ``hp`` and the gradients alive until then.
    """
    compiled, tables = _compiled_tables(rule, prologue, variables, gradients, hp, hp_of)
    return _prepared(where, compiled, tables, gradients, touched_only=touched_only, drop=drop)


def _compiled_tables(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: Sequence[RowGradient],
    hp: np.ndarray,
    hp_of: Sequence[int],
) -> tuple[Kernel, list[RowTable]]:
    g = STORAGES[gradients[0].values.dtype]
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    base, stride = address_of(hp), hp.strides[0]
    return compiled, row_tables(variables, gradients, [base + row * stride for row in hp_of])


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
    table = _row_table(variables[0], addresses, address_of(row), gradient)
    lock_spans = spans_of([tuple(variables)]) if use_locking else None
    if not isinstance(variables[0], DeviceArray):
        # Rows have locks of their own where several lazy calls hold a table together.
        locked = use_locking and touched_only
        step = _prepared(
            [where], compiled, [table], [gradient], touched_only=touched_only, drop=drop,
            locked=locked,
        )  # fmt: skip
        locks.serialized(partial(commit, [step]), lock_spans, shared=touched_only)
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
    tables = row_tables(variables, gradients, [0] * len(gradients))
    device_step.check_indices(tables, launch)


def row_tables(
    variables: Variables, gradients: Sequence[RowGradient], hp_addresses: Sequence[int]
) -> list[RowTable]:
    """The tables of a row step, as the kernels take them.

    Args:
        variables: T tables with their states.
        gradients: one for each.
        hp_addresses: the address of the scalars of each.
    """
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
            tuple(addresses),
            hp_address,
            n_rows,
            w.size // max(1, n_rows),
            gradient.index_address,
            indices.itemsize,
            len(indices),
            gradient.values_address,
        )
    )


def _prepared(
    where: Sequence[str],
    compiled: Kernel,
    tables: list[RowTable],
    gradients: Sequence[RowGradient],
    *,
    touched_only: bool,
    drop: bool,
    locked: bool = False,
) -> Prepared:
    check_keys(where[0], [(table.rows, table.length) for table in tables])
    step = RowStep(compiled, tables, touched_only=touched_only, drop=drop, locked=locked)
    if step.bad_position >= 0:
        step.release()
        raise first_bad_index(where, gradients, tables, step.bad_position)
    return step


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
