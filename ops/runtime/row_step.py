"""Row-sparse steps for any rule, under every operator and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.headers import arrays as headers
from ...kernels.cpu.rows.step import RowStep, row_norm
from ...kernels.cpu.threads.parallel import Prepared, commit
from ...kernels.element import Kernel, kernel
from ...kernels.rule import Prologue, Rule
from ...kernels.rules.norm import SCALED
from ...kernels.storage import STORAGES, Storage
from ...kernels.tables import RowTable
from . import cuda, locks
from .arrays import address_of
from .check import index_error
from .device import DeviceArray
from .errors import reject
from .launch import Launch, checked_launch
from .step import DenseUpdate, Variables


class RowGradient(NamedTuple):
    """A checked row-sparse gradient: contiguous ``indices [B]`` and ``values [B, ...]``.

    With ``rows`` its values are any contiguous array of which one row may be that of many
    occurrences; how they are found says `BagTensor`.
    """

    indices: Any
    values: Any
    index_address: int
    values_address: int
    positions: np.ndarray | None = None  # as those of a `RowTensor`; contiguous
    batch_length: int = 0
    rows: Any = None  # int32 [B]; None: each occurrence has its own
    rows_address: int = 0
    stride: int = 0  # bytes from one of these rows to the next
    weights: Any = None  # [B] factors, in the type of the arithmetic; None: 1
    weights_address: int = 0
    winners: Any = None  # int32 for each of the values, of maxima; else None
    first: int = 0  # the number among the winners that occurrence 0 has

    @classmethod
    def of(cls, indices: Any, values: Any, *rest: Any) -> RowGradient:
        """A gradient with the addresses of its arrays; ``rest`` is from ``positions`` on."""
        return cls(indices, values, address_of(indices), address_of(values), *rest)

    def with_values(self, values: Any) -> RowGradient:
        """Other values of the same occurrences, which are at the same places of a batch."""
        return self._replace(values=values, values_address=address_of(values))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def source(self) -> tuple[int, ...]:
        """What else says where the rows of pooled ones lie: addresses, and numbers."""
        winners = 0 if self.winners is None else address_of(self.winners)
        return self.rows_address, self.stride, self.weights_address, winners, self.first

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Values and indices."""
        return self.values, self.indices

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Address and size in bytes of all that users gave, and that a step reads."""
        found = [(self.values_address, self.values.nbytes)]
        if self.rows is not None:  # all else of pooled rows is this package's own
            return found
        found.append((self.index_address, self.indices.nbytes))
        if self.positions is not None:
            found.append((headers.address_of(self.positions), self.positions.nbytes))
        return found


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
        """The update of variables by a rule behind a prologue; ``rest`` is from ``hp`` on."""
        hp, hp_of, *_ = rest
        g, base = STORAGES[gradients[0].values.dtype], headers.address_of(hp)
        compiled = kernel(rule, prologue, variables.w, g, variables.s)
        tables = row_tables(variables, gradients, [base + k * hp.strides[0] for k in hp_of])
        return cls(where, compiled, tables, gradients, *rest)

    @property
    def lists(self) -> list[IndexList]:
        """The indices of each table."""
        labelled = zip(self.where, self.tables, strict=True)
        return [IndexList(label, table.length, table.rows) for label, table in labelled]

    @property
    def error(self) -> BadIndex | None:
        """The maker of the error of the step on a device; None where there is none.

        Too many rows for the sort keys are an error already.
        """
        check_keys(self.where[0], self.tables)
        return None if self.drop else bad_index_error(self.lists)

    def prepared(self) -> Prepared:
        """The step on the host, to be run by `commit`; an index out of range is an error."""
        where, compiled, tables, gradients, *_, touched_only, drop = self
        check_keys(where[0], tables)
        step = RowStep(compiled, tables, touched_only=touched_only, drop=drop)
        if step.bad_position >= 0:
            step.release()
            raise first_bad_index(self.lists, gradients, step.bad_position)
        return step

    def enqueue(self, launch: Launch) -> None:
        """The step on a device, where bad indices are found; whoever launches locks."""
        step = cuda.rows.step.RowStep(
            self.kernel, self.tables, touched_only=self.touched_only, drop=self.drop,
            base=launch.base,
        )  # fmt: skip
        cuda.device.part.run(step, self.hp, self.hp_of, launch.call)


Update = DenseUpdate | RowUpdate


def table_step(update: RowUpdate, variables: tuple[Any, ...], *, use_locking: bool = False) -> None:
    """One step on one table with its states, in place; on a device it is enqueued.

    With ``use_locking`` it runs alone (`locks`).
    """
    if isinstance(variables[0], DeviceArray):
        arrays = *variables, *update.gradients[0].arrays
        with checked_launch(arrays, update.error, use_locking) as launch:
            update.enqueue(launch)
        return
    locks.serialized(partial(commit, [update.prepared()]), use_locking)


def row_tables(
    variables: Variables, gradients: Sequence[RowGradient], hp: Sequence[int] | None = None
) -> list[RowTable]:
    """T tables with a gradient each, as the kernels take them; ``hp`` as `row_table`."""
    addresses, hp = variables.table.addresses.tolist(), hp or [0] * len(gradients)
    each = zip(addresses, variables.tensors, gradients, hp, strict=True)
    return [row_table(at, arrays[0].shape, g, scalars) for at, arrays, g, scalars in each]


def row_table(
    addresses: Sequence[int], shape: tuple[int, ...], gradient: RowGradient, hp: int = 0
) -> RowTable:
    """A table with its states at ``addresses``, or none, and its scalars at ``hp``."""
    (
        indices, values, index_address, values_address, positions, batch_length,
        rows, rows_address, stride, weights, weights_address, winners, first,
    ) = gradient  # fmt: skip
    matrix = tuple(addresses), hp, shape[0], math.prod(shape[1:])
    index_list = index_address, indices.itemsize, len(indices)
    batch = (0, 0) if positions is None else (headers.address_of(positions), batch_length)
    if rows is None:
        return RowTable(*matrix, *index_list, values_address, *batch)
    shared = rows_address, stride, weights_address if weights is not None else 0
    chosen = (0, 0) if winners is None else (address_of(winners), first)
    n_rows = values.nbytes // stride
    return RowTable(*matrix, *index_list, values_address, *batch, *shared, *chosen, n_rows)


class IndexList(NamedTuple):
    """The indices of a gradient."""

    where: str  # how an error names it
    length: int
    rows: int  # that there are


def check_keys(where: str, lists: Sequence[IndexList | RowTable]) -> None:
    """The number of a row and of an occurrence must fit into one sort key of 63 bits."""
    n_rows = n = 0
    for own in lists:
        n_rows, n = n_rows + own.rows, n + own.length
    # The sign of a key stays 0, so that keys sort as the numbers that they are.
    bits = n_rows.bit_length() + n.bit_length()
    if bits > 63:
        wrong, fix = "need too long sort keys", f"; split the {n} indices into several calls"
        reject(ValueError, where, "indices", wrong, "at most 63 bits", f"{bits} bits", fix)


def row_squares(
    where: str,
    lists: Sequence[IndexList],
    tables: Sequence[tuple[tuple[int, ...], RowGradient]],
    g: Storage,
    real: Storage,
) -> float:
    """The sum of squares of row-sparse gradients on the host, whose duplicates are summed first.

    ``lists`` are their indices, ``tables`` the shapes with the gradients; ``real`` is that of sums.

    Raises:
        IndexError: an index is out of range.
        ValueError: there are too many rows for sort keys.
    """
    hp = np.ones(1, real.dtype)
    check_keys(where, lists)
    found = [row_table((), shape, gradient, address_of(hp)) for shape, gradient in tables]
    position, total = row_norm(kernel(SCALED, (), real, g, ()), found)
    if position >= 0:
        raise first_bad_index(lists, [gradient for _, gradient in tables], position)
    return total


BadIndex = Callable[[int, int], IndexError]
"""Makes the error for a position in concatenated indices and the index there."""


def bad_index_error(lists: Sequence[IndexList]) -> BadIndex:
    """The maker of the error for a position in these lists."""

    def error(position: int, index: int) -> IndexError:
        for where, length, rows in lists:
            if position < length:
                return index_error(where, position, index, rows)
            position -= length
        raise AssertionError("a position beyond all indices")

    return error


def first_bad_index(
    lists: Sequence[IndexList], gradients: Sequence[Any], position: int
) -> IndexError:
    """The error for a position in the concatenated indices of some gradients on the host."""
    indices = np.concatenate([gradient.indices for gradient in gradients])
    return bad_index_error(lists)(position, int(indices[position]))
