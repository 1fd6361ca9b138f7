"""Row-sparse steps for any rule, under every operator and optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.headers import arrays as headers
from ...kernels.cpu.rows.arguments import RowTables
from ...kernels.cpu.rows.step import RowStep, row_norm
from ...kernels.cpu.threads.parallel import Prepared, commit
from ...kernels.element import Kernel, kernel
from ...kernels.rule import Prologue, Rule
from ...kernels.rules.norm import SCALED
from ...kernels.storage import Storage
from ...kernels.tables import RowSource, RowTable, table_sizes
from . import cuda, locks
from .arrays import address_of
from .check import index_error
from .device import DeviceArray, Launch
from .errors import reject
from .launch import launch_on
from .step import DenseUpdate, Variables

_NOTHING, _SOURCE_FIELDS = repeat(None), {*RowSource._fields}


class RowGradient(NamedTuple):
    """A checked row-sparse gradient: contiguous ``indices [B]`` and ``values [B, ...]``.

    On the host these are arrays of NumPy, or tensors of PyTorch, indices also ``[1, B]``.
    With ``rows`` its values are any contiguous array of which one row may be that of many
    occurrences; how they are found says `BagTensor`. The arrays keep alive what is in ``source``.
    """

    indices: Any
    values: Any
    source: RowSource
    positions: np.ndarray | None = None  # as those of a `RowTensor`; contiguous
    rows: Any = None  # int32 [B]; None: each occurrence has its own
    weights: Any = None  # [B] factors, in the type of the arithmetic; None: 1
    winners: Any = None  # int32 for each of the values, of maxima; else None

    @classmethod
    def of(
        cls, indices: Any, values: Any, positions: np.ndarray | None = None, batch_length: int = 0
    ) -> RowGradient:
        """A gradient whose occurrences have a row of values each."""
        source = RowSource(
            values=address_of(values), indices=address_of(indices), index_bytes=indices.itemsize,
            length=len(indices), whole_length=batch_length,
            positions=0 if positions is None else headers.address_of(positions),
        )  # fmt: skip
        return cls(indices, values, source, positions)

    @classmethod
    def shared(
        cls, indices: Any, values: Any, rows: Any, stride: int, weights: Any = None,
        winners: Any = None, first: int = 0,
    ) -> RowGradient:  # fmt: skip
        """A gradient whose occurrences may share rows of values, ``stride`` bytes apart."""
        source = RowSource(
            values=address_of(values), stride=stride, gradient_rows=address_of(rows), first=first,
            weights=0 if weights is None else address_of(weights), indices=address_of(indices),
            index_bytes=indices.itemsize, length=len(indices),
            winners=0 if winners is None else address_of(winners),
            n_gradients=values.nbytes // max(1, stride),
        )  # fmt: skip
        return cls(indices, values, source, None, rows, weights, winners)

    @classmethod
    def of_tables(
        cls, indices: Iterable[Any], values: Iterable[Any], sources: Mapping[str, Iterable[int]],
        rows: Iterable[Any] = _NOTHING, weights: Iterable[Any] = _NOTHING,
        winners: Iterable[Any] = _NOTHING,
    ) -> list[RowGradient]:  # fmt: skip
        """Gradients of many tables; ``sources`` are columns of their `RowSource`, else 0."""
        assert sources.keys() <= _SOURCE_FIELDS
        new, zeros = tuple.__new__, repeat(repeat(0))  # without a call of Python for each
        each = zip(*map(sources.get, RowSource._fields, zeros), strict=False)
        made = map(new, repeat(RowSource), each)
        gradients = zip(indices, values, made, _NOTHING, rows, weights, winners, strict=False)
        return [*map(new, repeat(cls), gradients)]

    def with_arrays(self, *, indices: Any = None, values: Any = None) -> RowGradient:
        """This gradient with other indices or values of its occurrences, at the same places."""
        gradient, source = self, self.source
        if indices is not None:
            n_bytes = indices.itemsize
            source = source._replace(indices=address_of(indices), index_bytes=n_bytes)
            gradient = gradient._replace(indices=indices)
        if values is not None:
            source = source._replace(values=address_of(values))
            gradient = gradient._replace(values=values)
        return gradient._replace(source=source)

    def at(self, positions: np.ndarray, batch_length: int) -> RowGradient:
        """This gradient as a part of a batch that several processes share; as a `RowTensor`."""
        source = self.source._replace(
            positions=address_of(positions), whole_length=batch_length
        )  # fmt: skip
        return self._replace(positions=positions, source=source)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Values and indices."""
        return self.values, self.indices

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Address and size in bytes of all that users gave, and that a step reads."""
        source = self.source
        spans = [(source.values, self.values.nbytes)]
        if self.rows is not None:  # all else of pooled rows is this package's own
            return spans
        spans.append((source.indices, self.indices.nbytes))
        if self.positions is not None:
            spans.append((source.positions, self.positions.nbytes))
        return spans


class RowUpdate(NamedTuple):
    """The update of some tables with row-sparse gradients by one kernel call."""

    where: Sequence[str]  # how an error names each table
    kernel: Kernel
    rows: RowTables  # T tables
    gradients: Sequence[RowGradient]  # one for each table
    hp: np.ndarray  # rows of scalars, as in `DenseUpdate`
    hp_of: np.ndarray  # int64 [T]: the row of each table
    touched_only: bool  # update the rows that occur (lazy), or all rows (dense-equivalent)
    drop: bool = False  # leave out indices that are out of range

    @classmethod
    def of(
        cls, where: Sequence[str], rule: Rule, prologue: Prologue, variables: Variables,
        gradients: Sequence[RowGradient], g: Storage, hp: np.ndarray, hp_of: Any,
        touched_only: bool,
    ) -> RowUpdate:  # fmt: skip
        """The update of variables by a rule behind a prologue.

        ``g`` is the storage of the gradients' values.

        Raises:
            ValueError: there are too many rows for sort keys.
        """
        check_keys(where[0], variables.n_rows, sum(map(_length_of, gradients)))
        compiled = kernel(rule, prologue, variables.w, g, variables.s)
        rest = gradients, hp, np.asarray(hp_of, np.int64), touched_only, False
        return tuple.__new__(cls, (where, compiled, variables.rows, *rest))  # no call of Python

    @property
    def tables(self) -> list[RowTable]:
        """The tables as a device takes them."""
        addresses = np.reshape(self.rows.addresses, (len(self.gradients), -1)).tolist()
        each = zip(addresses, self._sizes, self.gradients, strict=True)
        return [RowTable(tuple(arrays), *size, gradient.source) for arrays, size, gradient in each]

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        """The rows and the width of each table."""
        return [(n, width) for n, width in np.reshape(self.rows.sizes, (-1, 2)).tolist()]

    @property
    def lists(self) -> list[IndexList]:
        """The indices of each table."""
        each = zip(self.where, self.gradients, self._sizes, strict=True)
        return [IndexList(label, x.source.length, rows) for label, x, (rows, _) in each]

    def prepared(self) -> Prepared:
        """The step on the host, to be run by `commit`; an index out of range is an error."""
        _, compiled, tables, gradients, hp, hp_of, touched_only, drop = self
        inputs = tables, map(_source_of, gradients), hp, hp_of
        step = RowStep(compiled, *inputs, touched_only=touched_only, drop=drop)
        if step.bad_position >= 0:
            step.release()
            raise first_bad_index(self.lists, gradients, step.bad_position)
        return step

    def enqueue(self, launch: Launch) -> None:
        """The step on a device, where bad indices are found; whoever launches locks."""
        options = {"touched_only": self.touched_only, "drop": self.drop, "base": launch.base}
        tables = self.tables
        free = _free_parts(self.kernel, *options.values(), *map(_form_of, tables))
        try:
            part = free.pop()
        except IndexError:
            part = cuda.rows.step.RowStep(self.kernel, tables, **options)
        else:
            part.put(tables)
        cuda.device.part.run(part, self.hp, self.hp_of, launch)
        free.append(part)


@lru_cache(256)
def _free_parts(*form: Any) -> deque[Any]:  # noqa: ARG001  (the key)
    """The parts of device steps of one form that no step uses now."""
    return deque(maxlen=4)


def _form_of(table: RowTable) -> tuple[Any, ...]:
    """All of a table but addresses, in which steps with one part may differ."""
    source = table.source
    has = source.gradient_rows != 0, source.weights != 0, source.winners != 0
    lengths = source.index_bytes, source.length, source.whole_length, source.stride
    return (table.rows, table.width, *lengths, *has)


_source_of, _length_of = attrgetter("source"), attrgetter("source.length")
_prepared = methodcaller("prepared")
Update = DenseUpdate | RowUpdate


def run_updates(
    updates: Sequence[Update], arrays: Sequence[Any], use_locking: bool = False,
    undo: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Run updates, all or none of them: on the host at once, on a device they are enqueued.

    ``arrays`` are all that they read or write, a parameter first, which decides the stream. With
    ``use_locking`` they run alone (`locks`). On a device nothing is written if an index turns out
    to be out of range; ``undo`` is called then.
    """
    if isinstance(arrays[0], DeviceArray):
        _launch(updates, arrays, use_locking, undo)
        return
    ready = [*map(_prepared, updates)]
    if use_locking:
        with locks.exclusive():
            commit(ready)
    else:
        commit(ready)


def _launch(
    updates: Sequence[Update], arrays: Sequence[Any], use_locking: bool,
    undo: Callable[[], None] | None,
) -> None:  # fmt: skip
    lists: list[IndexList] = []
    checked: list[tuple[RowUpdate, int]] = []
    each: list[tuple[Update, int]] = []  # with the positions before its own
    base = 0
    for update in updates:
        each.append((update, base))
        if isinstance(update, RowUpdate) and not update.drop:
            checked.append((update, base))
            lists += (index_lists := update.lists)
            base += sum(indices.length for indices in index_lists)
    error = bad_index_error(lists)

    def found(position: int, index: int) -> IndexError:
        if undo is not None:
            undo()
        return error(position, index)

    with launch_on(arrays, found if checked else None, use_locking) as launch:
        stream, guard, _ = launch
        # A row step checks its indices before it writes, not before another one does.
        if len(checked) > 1 or (checked and updates[0] is not checked[0][0]):
            for row_update, base in checked:
                cuda.rows.step.check_indices(row_update.tables, guard, base, stream=stream)
        for update, base in each:
            update.enqueue(Launch(stream, guard, base))


class IndexList(NamedTuple):
    """The indices of a gradient."""

    where: str  # how an error names it
    length: int
    rows: int  # that there are


def check_keys(where: str, n_rows: int, n: int) -> None:
    """The number of a row and of an occurrence must fit into one sort key of 63 bits."""
    # The sign of a key stays 0, so that keys sort as the numbers that they are.
    bits = n_rows.bit_length() + n.bit_length()
    if bits > 63:
        wrong, fix = "need too long sort keys", f"; split the {n} indices into several calls"
        reject(ValueError, where, "indices", wrong, "at most 63 bits", f"{bits} bits", fix)


def check_lists(where: str, lists: Iterable[IndexList]) -> None:
    """Check the sort keys of some lists together (`check_keys`)."""
    sizes = [(indices.rows, indices.length) for indices in lists]
    check_keys(where, *map(sum, zip(*sizes, strict=True)))


def row_squares(
    where: str, lists: Sequence[IndexList], tables: Sequence[tuple[tuple[int, ...], RowGradient]],
    g: Storage, real: Storage,
) -> float:  # fmt: skip
    """The sum of squares of row-sparse gradients on the host, whose duplicates are summed first.

    ``lists`` are their indices, ``tables`` the shapes with the gradients; ``real`` is that of sums.

    Raises:
        IndexError: an index is out of range.
        ValueError: there are too many rows for sort keys.
    """
    check_lists(where, lists)
    sizes, nowhere = table_sizes(shape for shape, _ in tables), np.empty((len(tables), 0), np.int64)
    sources, hp = [gradient.source for _, gradient in tables], np.ones((1, 1), real.dtype)
    inputs = RowTables.of(nowhere, sizes), sources, hp
    position, total = row_norm(kernel(SCALED, (), real, g, ()), *inputs)
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
    indices = np.concatenate([np.ravel(gradient.indices) for gradient in gradients])
    return bad_index_error(lists)(position, int(indices[position]))
