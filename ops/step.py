"""The two functions under every operator and optimizer: a dense step and a row step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..kernels.blocks import kernel
from ..kernels.cpu.dense import TensorTable, dense_update
from ..kernels.cpu.measure import measure
from ..kernels.cpu.row_step import RowTable, row_update
from ..kernels.cpu.rows import accumulate
from ..kernels.rules.rule import Prologue, Rule
from ..kernels.storage import STORAGES, Storage, real_of
from . import locks
from .arrays import RowTensor, address_of, index_error
from .errors import message


@dataclass(frozen=True, eq=False)
class Variables:
    """Checked variables: tensors of the same storage types of parameter and states.

    Attributes:
        tensors: for each tensor the parameter, then its states; contiguous, of one shape
            (but for the row and column means of Adafactor).
        w: storage of the parameters.
        s: storage of each state.
        table: their addresses and sizes.
    """

    tensors: tuple[tuple[np.ndarray, ...], ...]
    w: Storage
    s: tuple[Storage, ...]
    table: TensorTable

    @classmethod
    def of(
        cls,
        tensors: Sequence[tuple[np.ndarray, ...]],
        known: Sequence[Sequence[int]] | None = None,
    ) -> Variables:
        """Collect the addresses of ``tensors``, unless they are ``known``.

        The arrays are kept alive with the result.
        """
        addresses = np.zeros((len(tensors), 4), np.int64)
        first = np.zeros(len(tensors) + 1, np.int64)
        for t, arrays in enumerate(tensors):
            found = known[t] if known else [address_of(a) for a in arrays]
            addresses[t, : len(arrays)] = found
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
        return locks.spans_of(
            [
                (
                    tuple(address_of(a) for a in arrays),
                    tuple(a.nbytes for a in arrays),
                    arrays[0].nbytes // max(1, arrays[0].shape[0]) if arrays[0].ndim else 0,
                )
                for arrays in self.tensors
            ]
        )


class RowGradient(NamedTuple):
    """A checked row-sparse gradient: contiguous ``indices [B]`` and ``values [B, ...]``."""

    indices: np.ndarray
    values: np.ndarray
    index_address: int
    values_address: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @classmethod
    def of(cls, indices: np.ndarray, values: np.ndarray) -> RowGradient:
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
    *,
    use_locking: bool = False,
) -> None:
    """One step of ``rule`` on all ``variables``, in place, in one kernel call.

    Args:
        rule: the update rule.
        prologue: what happens to the gradient before the rule.
        variables: T tensors with their states.
        gradients: int64 ``[T]``: addresses of contiguous gradients of the tensors' sizes.
        g: storage of the gradients.
        hp: ``[R, F]`` scalars in the type of the arithmetic: the rule's, then the prologue's.
        hp_of: int64 ``[T]``: the row of ``hp`` that each tensor uses.
        use_locking: hold the variables exclusively.
    """
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    held = locks.Request(variables.spans, shared=False) if use_locking else nullcontext()
    with held:
        dense_update(compiled, variables.table, gradients, hp, hp_of)


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

    Raises:
        IndexError: an index is out of range; nothing was written.
        ValueError: the tables have too many rows for the sort keys.
    """
    g = STORAGES[gradients[0].values.dtype]
    n_rows = sum(arrays[0].shape[0] for arrays in variables.tensors)
    check_keys(where[0], n_rows, sum(len(gradient.indices) for gradient in gradients))
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    base, stride = address_of(hp), hp.strides[0]
    tables = [
        RowTable._make(
            (
                *addresses,
                base + row * stride,
                arrays[0].shape[0],
                arrays[0].size // max(1, arrays[0].shape[0]),
                gradient.index_address,
                gradient.indices.itemsize,
                len(gradient.indices),
                gradient.values_address,
            )
        )
        for arrays, addresses, gradient, row in zip(
            variables.tensors, variables.table.addresses.tolist(), gradients, hp_of, strict=True
        )
    ]
    held = locks.Request(variables.spans, shared=touched_only) if use_locking else nullcontext()
    with held:
        position = row_update(
            compiled,
            tables,
            touched_only=touched_only,
            drop=drop,
            locked=use_locking and touched_only,
        )
    if position >= 0:
        raise first_bad_index(where, gradients, tables, position)


def check_keys(where: str, n_rows: int, n: int) -> None:
    """The number of a row and of an occurrence must fit into one sort key of 63 bits.

    Raises:
        ValueError: they do not.
    """
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
    for label, gradient, table in zip(where, gradients, tables, strict=True):
        if position < table.length:
            return index_error(label, gradient.indices, position, table.rows)
        position -= table.length
    raise AssertionError("a position beyond all indices")
