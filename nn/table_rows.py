"""TableOptimizer: rows of tables that sleep, begin anew, or are copied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np

from ..kernels.cpu.rows.catch_up import CatchUp
from ..kernels.cpu.threads.parallel import commit
from ..kernels.keeping import COPY, STOCHASTIC
from ..kernels.rule import Keeping, Rule
from ..kernels.state import PARAMETER, State
from ..ops.runtime import check, locks
from ..ops.runtime.arrays import address_of, adopt, real_type
from ..ops.runtime.errors import reject
from .base.checkpoint import as_state
from .base.groups import Groups
from .base.parameter import Parameter
from .base.state_files import maker_of_states
from .base.stateful import StatefulOptimizer, States
from .engine.catch_up import (
    LAST,
    SCALARS,
    MissedSteps,
    NextStep,
    Table,
    check_idle,
    check_last,
    check_resumed,
    no_scalars,
    scalars_of,
)
from .engine.layout import KernelCall
from .engine.plan import Stepper
from .engine.row_reset import RowState, copied, grown, more_rows, reset


class TableOptimizer(StatefulOptimizer):
    """The part of `FusedOptimizer` that knows rows."""

    use_locking: bool
    sparse_update: str | None
    keepings: tuple[Keeping | None, ...]
    _rule: Rule
    _stepper: Stepper
    _missed: MissedSteps | None = None  # by rows that sleep
    together: Any  # the agreement of several processes on a step, or None

    @abstractmethod
    def _read_anew(self) -> None:
        """Make anew all that depends on the states and their addresses, which have changed."""

    def _let_sleep(self) -> None:
        """Begin with rows of which none has missed a step, if they may sleep."""
        if self.sparse_update == "catch_up":
            self._missed = MissedSteps()
            for i, p in enumerate(self.parameters):
                self._missed.add(i, self._rule, real_type(p.dtype), 0)
            if maker_of_states() is not None:
                self._map_scalars(self._missed)

    def _map_scalars(self, missed: MissedSteps) -> None:
        """Keep the scalars of missed steps where the states are, or go on with those there."""
        steps = self._steps.tolist()
        for i, (p, last) in enumerate(zip(self.parameters, self._states[LAST.name], strict=True)):
            like, own = missed.tables[i].given, (self._name, str(p.name), last, steps[i])
            if self._files is not None and not self._files.has_manifest:
                check_resumed(*own, None)
            made = self._made(f"{SCALARS}.{p.name}", like.shape, like.dtype, like)
            check_resumed(*own, made)
            missed.mapped[i] = made
        missed.part()
        missed.begin(dict(enumerate(steps)))

    def _check_sleep(self, groups: Groups) -> None:
        """Refuse what rows that sleep cannot have."""
        name, options = "sparse_update='catch_up'", groups.options
        decays = not self._rule.decays and any(o.decay != 0.0 for o in options)
        check_idle(self._name, name, self._rule, couples=decays)
        wrong, places = "", [o.parameter for o in options if o.parameter.is_on_device]
        if places:
            wrong, expected, got = "is impossible", "parameters on the host", "a CUDA device"
        elif STOCHASTIC in self.keepings:
            wrong, expected, got = "excludes random bits", "another rounding", "'stochastic'"
        elif decays and any(o.centralize for o in options):
            wrong, got = "excludes centralized decays", "grad_centralization and weight_decay"
            expected = "one of them: the mean of a decay is that of a whole row"
        if wrong:
            reject(ValueError, self._name, name, wrong, expected, got)

    def _behind(self, calls: Sequence[KernelCall]) -> Sequence[CatchUp]:
        """Catching up, to be done before these calls of a step."""
        assert self._missed is not None
        steps = []
        for call in calls:
            gradients = call.gradients if call.batch.row_sparse else repeat(None)
            of_each = scalars_of(call.update), gradients
            each = zip(call.batch.positions.tolist(), *of_each, strict=False)
            steps += [NextStep(self._table(i), own, g and g.source) for i, own, g in each]
        return [*self._missed.before(steps)]

    def _table(self, i: int) -> Table:
        keeping, last, p = self.keepings[i], self._states[LAST.name][i], self.parameters[i]
        if p.is_shared:
            p.check_awake(self)
        rule = self._rule if keeping is None else self._rule.kept(keeping)
        arrays = p.array, *self._states_at(i)
        if not all(array.flags.writeable for array in (*arrays, last)):
            name, got = f"parameter {p.name!r} or its state", "a read-only one"
            reject(ValueError, self._name, name, "is read-only", "a writable array", got)
        return Table.of(i, rule, arrays, last, int(self._steps[i]))

    def prepare(self, parameter: Any, ids: Any) -> None:
        """Bring rows of a table up to date with ``sparse_update="catch_up"``, before they are read.

        Rows for which nothing is due are not written. With another ``sparse_update`` none is ever
        behind, and nothing is done. `EmbeddingBags` prepares the rows that it pools.

        Args:
            parameter: one of `parameters`, or its array.
            ids: int32 or int64, of any shape: the numbers of the rows; duplicates are welcome.

        Raises:
            TypeError: ``ids`` are no int32 or int64.
            ValueError: ``parameter`` is none of the optimizer's.
            IndexError: an id is out of range.
            Nothing has been written then.
        """
        i, where = self._number_of(parameter), f"{self._name}.prepare"
        rows = check.contiguous(adopt(where, "ids", ids).reshape(-1), where, "ids")
        check.index_dtype(where, rows)
        check.indices_in_range(where, rows, (*self.parameters[i].shape, 0)[0])
        if self._missed is not None:
            self.prepare_spans(i, [(address_of(rows), rows.itemsize, len(rows))])

    def prepare_spans(self, i: int, spans: Sequence[tuple[int, int, int]]) -> None:
        """Bring rows of parameter ``i`` up to date: address, bytes and number of lists of ids."""
        missed = self._missed
        assert missed is not None
        with self._between_steps():
            commit([missed.of_span(self._table(i), span) for span in spans])

    def flush(self) -> None:
        """Bring all rows up to date with ``sparse_update="catch_up"``; else none is ever behind."""
        if (missed := self._missed) is not None:
            with self._between_steps():
                commit([missed.of_all(self._table(i)) for i in range(len(self.parameters))])

    def reset_rows(
        self, parameter: Any, rows: Any, weights: Any = None, *, ids: Any = None
    ) -> None:
        """Begin rows of a table anew, as if they had never been updated.

        Their states begin as at construction, those of elements and of rows: moments and counts,
        what lies beside the weights, and the steps that rows have missed. States of columns and of
        whole parameters stay.

        Args:
            parameter: one of `parameters`, or its array, on the host.
            rows: int32 or int64: different row numbers.
            weights: of these rows: a number, an array ``[len(rows), ...]``, or a function
                ``weights(ids, shape)`` that makes one of this shape, such as `UniformRows`. None:
                they stay as they are.
            ids: integers, one for each row, for that function; default the row numbers.

        Raises:
            TypeError: a kind or dtype does not fit.
            ValueError: a shape does not fit, a row occurs twice, or ``parameter`` is none of the
                optimizer's.
            IndexError: a row is out of range.
            RuntimeError: the parameter is on a device.
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
        i, where = self._table_number("reset_rows", parameter)
        self._wake(i, rows if weights is None else ())
        with self._between_steps():
            states = [*self._row_states(i).values()]
            commit([reset(where, self.parameters[i].array, states, rows, weights, ids)])

    def copy_rows(self, parameter: Any, source: Any, target: Any) -> None:
        """Let rows of a table become copies of others, with all that is kept for them.

        Args:
            parameter: one of `parameters`, or its array, on the host.
            source: int32 or int64: row numbers.
            target: different row numbers, as many; rows are read before any is written.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as `reset_rows`.
        """
        i, where = self._table_number("copy_rows", parameter)
        self._wake(i, source)
        with self._between_steps():
            states = [state.array for state in self._row_states(i).values()]
            commit([copied(where, [self.parameters[i].array, *states], source, target)])

    def grow(self, parameter: Any, rows: int) -> np.ndarray:
        """Give a table more rows: it and all that is kept for its rows move to new arrays.

        The new rows have weights of 0, and states as at construction. They take memory when they
        are used, where they are 0.

        Args:
            parameter: one of `parameters`, or its array, on the host; no other optimizer's.
            rows: above the number of rows of now, below 2**31.

        Returns:
            The new array of the parameter.

        Raises:
            TypeError, ValueError: ``rows`` does not fit, or ``parameter`` is none of the
                optimizer's.
            RuntimeError: the parameter is on a device, is another optimizer's too, has an array of
                ``copies``, or is stepped by several processes.
            Nothing has changed then.

        >>> import numpy as np
        >>> from fusestep import nn
        >>> opt = nn.LazyAdam([np.ones((2, 3), np.float32)])
        >>> opt.grow(opt.parameters[0], 5).shape, opt.moment1[0].shape
        ((5, 3), (5, 3))
        """
        i, where = self._table_number("grow", parameter)
        p, known = self.parameters[i], self._row_states(i)
        n = more_rows(where, rows, p.shape[0])
        if p.is_shared or COPY.name in known or self.together is not None:
            expected, got = "one of this optimizer alone, without copies", "another"
            reject(RuntimeError, where, f"parameter {p.name!r}", "cannot grow", expected, got)
        with self._between_steps():
            if self._files is not None:
                self._files.write("states that have moved into memory", for_good=True)
            known = self._row_states(i)
            made = {role: grown(state.array, n, state.initial) for role, state in known.items()}
            p.rebind(grown(p.array, n, 0.0))
            for role, array in made.items():
                of_each = self._states[role]
                self._states[role] = (*of_each[:i], array, *of_each[i + 1 :])
            self._read_anew()
        self.wake_late()
        found: np.ndarray = p.array
        return found

    def _table_number(self, call: str, parameter: Any) -> tuple[int, str]:
        i, where = self._number_of(parameter), f"{self._name}.{call}"
        p = self.parameters[i]
        if p.is_on_device or not p.ndim:
            expected = "a parameter with rows, on the host"
            reject(RuntimeError, where, f"parameter {p.name!r}", "has none", expected, "another")
        return i, where

    def _row_states(self, i: int) -> dict[str, RowState]:
        """The states of a parameter that have something for each row, and how they begin."""
        found, n = {}, self.parameters[i].shape[:1]
        for role, arrays in self._states.items():
            if arrays[i] is None or arrays[i].shape[:1] != n:
                continue
            if role == LAST.name:
                found[role] = RowState(arrays[i], float(self._steps[i]))
            elif role == COPY.name:
                found[role] = RowState(arrays[i], PARAMETER)
            elif (state := self._declared[role]).per in ("element", "row"):
                found[role] = RowState(arrays[i], state.initial)
        return found

    def _wake(self, i: int, rows: Any) -> None:
        """Bring rows up to date whose weights are read."""
        if self._missed is not None and np.size(rows):
            self.prepare(self.parameters[i], rows)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """A context between two steps of other threads, with ``use_locking``."""
        if not self.use_locking:
            yield
            return
        with self._stepper.turn(), locks.turn():
            yield

    def _number_of(self, parameter: Any) -> int:
        """The number of a parameter among those of the optimizer."""
        for i, p in enumerate(self.parameters):
            if p is parameter or p.data is parameter:
                return i
        wrong, got = "is none of the optimizer's", type(parameter).__name__
        expected = "a parameter or an array that it has"
        return reject(ValueError, self._name, "parameter", wrong, expected, got)

    def check_rebinding(self, parameter: Parameter, array: Any) -> None:
        """Check a new array of a parameter: no row of it sleeps (`Optimizer.check_rebinding`)."""
        super().check_rebinding(parameter, array)
        self.check_awake(parameter)

    def check_awake(self, parameter: Parameter) -> None:
        """Refuse to let go of a parameter in which rows sleep."""
        if self._missed is None:
            return
        i = self._number_of(parameter)
        if (self._states[LAST.name][i] < self._steps[i]).any():
            wrong, expected = "has rows that sleep", "none: flush() brings all up to date"
            reject(ValueError, self._name, f"parameter {parameter.name!r}", wrong, expected, "some")

    # States

    def _new_states(self, states: Sequence[State]) -> States:
        made = super()._new_states(states)
        if self.sparse_update == "catch_up":
            made[LAST.name] = tuple(
                self._made(f"{LAST.name}.{p.name}", p.shape[:1] or (1,), LAST.dtype, 0)
                for p in self.parameters
            )
        return made

    def _states_at(self, i: int) -> tuple[Any, ...]:
        """The states of parameter ``i`` that a step reads and writes: all but last steps."""
        roles = (arrays[i] for role, arrays in self._states.items() if role != LAST.name)
        return tuple(array for array in roles if array is not None)

    def state_arrays(self) -> dict[str, Any]:
        """The arrays of `StatefulOptimizer.state_arrays`, and the scalars of missed steps."""
        arrays = super().state_arrays()
        if self._missed is not None:
            for i, p in enumerate(self.parameters):
                arrays[f"{SCALARS}.{p.name}"] = self._missed.scalars(i)
        return arrays

    def state_dict(self, *, flush: bool = False) -> dict[str, np.ndarray]:
        """Copies of all that a resumed run needs beside the parameters (`Optimizer.state_dict`).

        Args:
            flush: bring all rows up to date (`flush`), and leave out how far each is, for readers
                that know no ``sparse_update="catch_up"``. Otherwise nothing is written.
        """
        if check.flag(self._name, "flush", flush):
            self.flush()
        found, ours = super().state_dict(), (f"{LAST.name}.", f"{SCALARS}.")
        return {name: x for name, x in found.items() if not (flush and name.startswith(ours))}

    def _check_values(self, arrays: Mapping[str, np.ndarray]) -> None:
        super()._check_values(arrays)
        for i, p in enumerate(self.parameters if self._missed is not None else ()):
            name, step = f"{LAST.name}.{p.name}", int(arrays[f"step.{p.name}"][0])
            own = self._states[LAST.name][i]
            if address_of(arrays[name]) != address_of(own):  # else it is read later
                check_last(self._name, f"state {name!r}", arrays[name], step)

    def _with_last_steps(self, given: dict[str, Any]) -> dict[str, Any]:
        """A state with the last steps of all rows, or without those that are not missed.

        Raises:
            ValueError: rows of it sleep, and this optimizer has no ``sparse_update="catch_up"``.
        """
        for p in self.parameters:
            last, scalars = f"{LAST.name}.{p.name}", f"{SCALARS}.{p.name}"
            step = given.get(f"step.{p.name}", given.get("global_step", np.zeros(1)))
            if self._missed is not None and last not in given:  # of a dense optimizer
                own = self.state_arrays()
                given |= {last: np.full_like(own[last], step), scalars: no_scalars(own[scalars])}
            elif self._missed is None and last in given:
                if np.any(np.asarray(given.pop(last)) != step):
                    expected, got = "none: state_dict(flush=True) wakes them", f"some, in {last!r}"
                    reject(ValueError, self._name, "state", "has rows that sleep", expected, got)
                given.pop(scalars, None)
        return given

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict` (`Optimizer.load_state_dict`); one that lets no rows sleep too.

        Raises:
            KeyError, TypeError, ValueError: as `Optimizer.load_state_dict`, or rows of it sleep,
                and this optimizer has no ``sparse_update="catch_up"``. Nothing has changed then.
        """
        given = self._with_last_steps(as_state(self._name, state))
        if self._missed is None:
            super().load_state_dict(given)
            return
        self._missed.part()
        lasts = [given.get(f"{LAST.name}.{p.name}") for p in self.parameters]
        super().load_state_dict(given)
        self._missed.begin(dict(enumerate(self._steps.tolist())))
        if all(x is not own for x, own in zip(lasts, self._states[LAST.name], strict=True)):
            self.wake_late()

    def wake_late(self) -> None:
        """Bring rows up to date that have come to places whose turn is too late for them.

        Raises:
            ValueError: their last steps are no such ones, in a checkpoint.
        """
        for i, p in enumerate(self.parameters if self._missed is not None else ()):
            last, missed = self._states[LAST.name][i], self._missed
            check_last(self._name, f"state '{LAST.name}.{p.name}'", last, int(self._steps[i]))
            assert missed is not None
            missed.wake_late(self._table(i), last)
