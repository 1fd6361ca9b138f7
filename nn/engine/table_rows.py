"""Rows of tables, of every front end: brought up to date, begun anew, copied, and more of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ...kernels.cpu.rows.catch_up import CatchUp
from ...kernels.cpu.rows.write import RowValues, RowWrite
from ...kernels.keeping import COPY
from ...ops.runtime.errors import reject
from .catch_up import MissedSteps, TableAtStep
from .tables import StatefulTable, more_rows


class TableRows(ABC):
    """The part of an optimizer that knows rows of tables.

    A front end numbers its tables by keys: those of their scalars in `MissedSteps`.
    """

    _missed: MissedSteps | None  # by rows that sleep

    # What a front end defines

    @abstractmethod
    def _table_of(self, call: str, parameter: Any) -> tuple[Any, StatefulTable]:
        """The key and the checked list of a table on the host.

        Raises:
            ValueError: ``parameter`` is none of the optimizer's, or an array does not fit.
            TypeError, RuntimeError: an array does not fit, or lies elsewhere.
        """

    @abstractmethod
    def _tables_at_step(self) -> list[TableAtStep]:
        """All tables whose rows may sleep, with what belongs to each checked whole."""

    @abstractmethod
    def _table_at_step(self, key: Any) -> TableAtStep | None:
        """The checked table of a key; None if its rows have missed nothing."""

    @abstractmethod
    def _commit(self, each: Sequence[tuple[Any, CatchUp | RowWrite]]) -> None:
        """Write rows of tables, by their keys, and tell who asks for changes.

        A `RowWrite` may be that of several tables.
        """

    @abstractmethod
    def _move(self, key: Any, arrays: dict[str, np.ndarray]) -> Any:
        """Take over longer arrays of a table; the new table, as a caller gets it."""

    @abstractmethod
    def prepare(self, parameter: Any, ids: Any) -> None:
        """Bring rows of a table up to date before they are read."""

    def _host_array(self, value: Any) -> Any:
        """An argument as NumPy takes it."""
        return value

    def _between_steps(self) -> AbstractContextManager[Any]:
        """A context between two steps of other threads, where these are one after the other."""
        return nullcontext()

    def _check_growth(self, call: str, key: Any) -> None:  # noqa: B027
        """Refuse a table that cannot grow."""

    # Rows that sleep

    def prepare_spans(self, key: Any, spans: Iterable[tuple[int, int, int]]) -> None:
        """Bring rows up to date: address, bytes and number of lists of ids."""
        missed = self._missed
        with self._between_steps():
            if missed is not None and (table := self._table_at_step(key)) is not None:
                self._commit([(key, missed.of_span(table, span)) for span in spans])

    def flush(self) -> None:
        """Bring all rows up to date, if they sleep while they have no gradient."""
        if self._missed is not None:
            with self._between_steps():
                self._bring_up(self._tables_at_step())

    def _bring_up(self, tables: Sequence[TableAtStep]) -> None:
        """Bring all rows of tables up to date."""
        missed = self._missed
        assert missed is not None
        self._commit([(table.key, missed.of_all(table)) for table in tables])

    # Rows that begin anew

    def reset_rows(
        self, parameter: Any, rows: Any, weights: Any = None, *, ids: Any = None
    ) -> None:
        """Begin rows of a table anew, as if they had never been updated.

        Their states begin as at construction, those of elements and of rows: moments and counts,
        what lies beside the weights, and the steps that rows have missed. States of columns and of
        whole parameters stay.

        Args:
            parameter: one of the optimizer's, contiguous and on the host.
            rows: int32 or int64: different row numbers.
            weights: of these rows: a number, an array or tensor ``[len(rows), ...]``, or a function
                ``weights(ids, shape)`` of NumPy's array and a shape that makes one, such as
                `fusestep.nn.UniformRows`. None: they stay as they are.
            ids: integers, one for each row, for that function; default the row numbers.

        Raises:
            TypeError: a kind or dtype does not fit.
            ValueError: a shape does not fit, a row occurs twice, ``parameter`` is none of the
                optimizer's, or it or a state was changed so that it cannot be written in place.
            IndexError: a row is out of range.
            RuntimeError: the parameter is on a device, or not contiguous.
            Nothing has been written then.

        >>> import numpy as np
        >>> from fusestep import nn
        >>> w = np.ones((3, 2), np.float32)
        >>> opt = nn.Adam([w], learning_rate=0.1)
        >>> opt((np.ones((3, 2), np.float32),))
        (True,)
        >>> opt.reset_rows(w, np.array([2]), weights=5.0)
        >>> print(w[:, 0].round(4), opt.moment1[0][:, 0].round(4))
        [0.9 0.9 5. ] [0.1 0.1 0. ]
        """
        self.reset_rows_of([(parameter, rows, weights, ids)])

    def reset_rows_of(self, tables: Sequence[tuple[Any, Any, Any, Any]]) -> None:
        """Begin rows of several tables anew, in one call.

        Args:
            tables: the arguments of `reset_rows` for each: parameter, rows, weights and ids.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as `reset_rows`.
        """
        for parameter, rows, weights, _ in tables:
            if weights is None:
                self._wake(parameter, self._host_array(rows))
        with self._between_steps():
            self._write([self._reset(*table) for table in tables])

    def _write(self, tables: Sequence[tuple[Any, RowValues]]) -> None:
        write = RowWrite([values for _, values in tables])
        self._commit([(key, write) for key, _ in tables])

    def _reset(self, parameter: Any, rows: Any, weights: Any, ids: Any) -> tuple[Any, RowValues]:
        key, table = self._table_of("reset_rows", parameter)
        new = self._host_array(weights)
        if callable(weights):
            new = lambda *of: self._host_array(weights(*of))  # noqa: E731
        return key, table.reset(self._host_array(rows), new, self._host_array(ids))

    def copy_rows(self, parameter: Any, source: Any, target: Any) -> None:
        """Let rows of a table become copies of others, with all that is kept for them.

        Args:
            parameter: one of the optimizer's, contiguous and on the host.
            source: int32 or int64: row numbers.
            target: different row numbers, as many; rows are read before any is written.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as `reset_rows`.
        """
        source = self._host_array(source)
        self._wake(parameter, source)
        with self._between_steps():
            key, table = self._table_of("copy_rows", parameter)
            self._write([(key, table.copied(source, self._host_array(target)))])

    def grow(self, parameter: Any, rows: int) -> Any:
        """Give a table more rows: it and all that is kept for its rows move to new memory.

        The new rows have weights of 0, and states as at construction. They take memory when they
        are used, where they are 0.

        Args:
            parameter: one of the optimizer's, contiguous and on the host; no other optimizer's, and
                in `nn.torch` without a gradient.
            rows: above the number of rows of now, below 2**31.

        Returns:
            The new array of the parameter; in `nn.torch` the parameter.

        Raises:
            TypeError, ValueError: ``rows`` does not fit, or as `reset_rows`.
            RuntimeError: the parameter is on a device or not contiguous, is another optimizer's
                too, has a gradient or one of ``copies``, or is stepped by several processes.
            Nothing has changed then.

        >>> import numpy as np
        >>> from fusestep import nn
        >>> opt = nn.LazyAdam([np.ones((2, 3), np.float32)])
        >>> opt.grow(opt.parameters[0], 5).shape, opt.moment1[0].shape
        ((5, 3), (5, 3))
        """
        with self._between_steps():
            key, table = self._table_of("grow", parameter)
            n = more_rows(table.where, rows, len(table.weights))
            self._check_growth(table.where, key)
            if COPY.name in table.arrays:
                expected, got = "one without copies", "one with copies"
                reject(RuntimeError, table.where, "parameter", "cannot grow", expected, got)
            if self._missed is not None:
                self._table_at_step(key)  # which checks the last steps too
            moved = self._move(key, table.grown(n))
            self._wake_late(key)
        return moved

    def _wake(self, parameter: Any, rows: Any) -> None:
        """Bring rows up to date whose weights are read."""
        if self._missed is not None and np.size(rows):
            self.prepare(parameter, rows)

    def _wake_late(self, key: Any) -> None:
        """Bring rows up to date that have come to places whose turn is too late for them."""
        missed = self._missed
        if missed is not None and (table := self._table_at_step(key)) is not None:
            missed.wake_late(table, self._host_array(table.owners[-1]))
