"""Row-sparse steps for any rule, under every operator and optimizer."""

from __future__ import annotations

import math
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
from . import cuda, locks, pending
from .arrays import address_of
from .check import index_error
from .device import DeviceArray
from .errors import reject
from .launch import Launch, checked_launch
from .step import DenseUpdate, Variables, dense_step, prepared_dense, spans_of


class RowGradient(NamedTuple):
    """A checked row-sparse gradient: contiguous ``indices [B]`` and ``values [B, ...]``."""

    indices: Any
    values: Any
    index_address: int
    values_address: int

    @classmethod
    def of(cls, indices: Any, values: Any) -> RowGradient:
        """With the addresses of the arrays."""
        return cls(indices, values, address_of(indices), address_of(values))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Values and indices."""
        return self.values, self.indices


class RowUpdate(NamedTuple):
    """The update of some tables with row-sparse gradients by one kernel call."""

    where: Sequence[str]  # how an error names each table
    kernel: Kernel
    tables: list[RowTable]  # of the kernel's storage types
    gradients: Sequence[RowGradient]  # one for each table
    hp: np.ndarray  # rows of scalars, as in `DenseUpdate`; the tables hold their addresses
    hp_of: Sequence[int]  # the row of each table
    touched_only: bool  # update the rows that occur (lazy), or all rows (dense-equivalent)
    drop: bool = False  # leave out indices that are out of range

    @classmethod
    def of(
        cls, where: Sequence[str], rule: Rule, prologue: Prologue, variables: Variables,
        gradients: Sequence[RowGradient], *rest: Any,
    ) -> RowUpdate:  # fmt: skip
        """As the rule behind a prologue on some variables; ``rest`` is from ``hp`` on."""
        hp, hp_of, *_ = rest
        g, base = STORAGES[gradients[0].dtype], address_of(hp)
        compiled = kernel(rule, prologue, variables.w, g, variables.s)
        tables = row_tables(variables, gradients, [base + k * hp.strides[0] for k in hp_of])
        return cls(where, compiled, tables, gradients, *rest)

    def check_keys(self) -> None:
        """As `check_keys`."""
        check_keys(self.where[0], [(table.rows, table.length) for table in self.tables])


def row_step(update: RowUpdate, launch: Launch | None = None) -> None:
    """One step, in place; on a device, with a ``launch``, it is enqueued.

    An index out of range is an error, and nothing is written; on a device it is found there.
    Variables on a device are locked by whoever launches.
    """
    if launch is None:
        commit([prepared_rows(update)])
        return
    _, compiled, tables, _, hp, hp_of, touched_only, drop = update
    step = cuda.rows.step.RowStep(
        compiled, tables, touched_only=touched_only, drop=drop, sorts=launch.sorter is None,
        base=launch.base,
    )  # fmt: skip
    cuda.device.part.run(step, hp, hp_of, launch.call)


def prepared_rows(update: RowUpdate, *, locked: bool = False) -> Prepared:
    """A step on tables on the host, to be run by `commit`; as `row_step`.

    With ``locked`` each row has a lock of its own, for lazy steps that share a table.
    """
    update.check_keys()
    where, compiled, tables, gradients, *_, touched_only, drop = update
    step = RowStep(compiled, tables, touched_only=touched_only, drop=drop, locked=locked)
    if step.bad_position >= 0:
        step.release()
        raise first_bad_index(where, gradients, tables, step.bad_position)
    return step


def table_step(update: RowUpdate, variables: tuple[Any, ...], *, use_locking: bool = False) -> None:
    """One step on one table with its states, in place; on a device it is enqueued.

    With ``use_locking`` lazy steps share the table and lock its rows, others hold it exclusively.
    """
    spans = spans_of([variables]) if use_locking else None
    if isinstance(variables[0], DeviceArray):
        arrays = *variables, *update.gradients[0].arrays
        with checked_launch(arrays, error_of(update), spans) as launch:
            row_step(update, launch)
        return
    step = prepared_rows(update, locked=use_locking and update.touched_only)
    locks.serialized(partial(commit, [step]), spans, shared=update.touched_only)


def row_tables(
    variables: Variables, gradients: Sequence[RowGradient], hp_addresses: Sequence[int]
) -> list[RowTable]:
    """T tables with a gradient each, as the kernels take them."""
    of_tables = zip(
        variables.table.addresses.tolist(), variables.tensors, gradients, hp_addresses, strict=True
    )
    return [row_table(at, arrays[0].shape, g, hp) for at, arrays, g, hp in of_tables]


def row_table(
    addresses: Sequence[int], shape: tuple[int, ...], gradient: RowGradient, hp: int = 0
) -> RowTable:
    """A table with its states at ``addresses``, or none, and its scalars at ``hp``."""
    indices, _, index_address, values_address = gradient
    of_table = tuple(addresses), hp, shape[0], math.prod(shape[1:])
    of_indices = index_address, indices.itemsize, len(indices)
    return RowTable._make((*of_table, *of_indices, values_address))


Update = DenseUpdate | RowUpdate


def prepared(update: Update) -> Prepared:
    """A step on the host, to be run by `commit`."""
    return prepared_rows(update) if isinstance(update, RowUpdate) else prepared_dense(update)


def enqueue(update: Update, launch: Launch) -> None:
    """A step on a device."""
    if isinstance(update, RowUpdate):
        row_step(update, launch)
    else:
        dense_step(update, launch)


def check_keys(where: str, sizes: Sequence[tuple[int, int]]) -> None:
    """The number of a row and of an occurrence must fit into one sort key of 63 bits.

    ``sizes`` are for each table its rows and the length of its indices.
    """
    n_rows = n = 0
    for rows, length in sizes:
        n_rows, n = n_rows + rows, n + length
    bits = n_rows.bit_length() + n.bit_length()
    if bits > 63:
        wrong, fix = "need too long sort keys", f"; split the {n} indices into several calls"
        reject(ValueError, where, "indices", wrong, "at most 63 bits", f"{bits} bits", fix)


def error_of(update: Update) -> pending.Error | None:
    """What makes the error of a step on a device; None where there is none.

    Too many rows for the sort keys are an error already.
    """
    if isinstance(update, DenseUpdate):
        return None
    update.check_keys()
    labelled = zip(update.where, update.tables, strict=True)
    lists = [(label, table.length, table.rows) for label, table in labelled]
    return None if update.drop else bad_index_error(lists)


def first_bad_index(
    where: Sequence[str], gradients: Sequence[Any], tables: Sequence[RowTable], position: int
) -> IndexError:
    """The error for ``position`` in the concatenated indices of some gradients."""
    k, own = _which([table.length for table in tables], position)
    return index_error(where[k], own, int(gradients[k].indices[own]), tables[k].rows)


def bad_index_error(lists: Sequence[tuple[str, int, int]]) -> Callable[[int, int], IndexError]:
    """What makes the error for a position in concatenated indices and the index there.

    ``lists`` are for each list how an error names it, its length, and the rows there are.
    """

    def error(position: int, index: int) -> IndexError:
        k, own = _which([length for _, length, _ in lists], position)
        return index_error(lists[k][0], own, index, lists[k][2])

    return error


def _which(lengths: Sequence[int], position: int) -> tuple[int, int]:
    """In which of some lists a position of all of them is, and where in it."""
    for k, length in enumerate(lengths):
        if position < length:
            return k, position
        position -= length
    raise AssertionError("a position beyond all indices")
