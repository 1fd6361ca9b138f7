"""TableOptimizer: rows of tables that sleep, begin anew, or are copied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..kernels.cpu.headers.arrays import (
    NOWHERE,
    Expected,
    address_of,
    expected_arrays,
    usable,
)
from ..kernels.cpu.rows.catch_up import CatchUp, SleepingTable
from ..kernels.cpu.rows.write import RowWrite
from ..kernels.cpu.threads.parallel import commit
from ..kernels.keeping import COPY, STOCHASTIC
from ..kernels.state import PARAMETER
from ..ops.runtime import check, locks
from ..ops.runtime.arrays import adopt
from ..ops.runtime.errors import reject
from .base.file_set import MOVED, maker_of_states
from .base.groups import Groups
from .base.parameter import Parameter
from .base.stateful import StatefulOptimizer
from .engine.batch import KernelCall
from .engine.catch_up import (
    SCALARS,
    MissedSteps,
    NextStep,
    TableAtStep,
    check_idle,
    check_missed,
    no_scalars,
    scalars_of,
    sleeping_table,
)
from .engine.plan import Stepper
from .engine.reader import GradientReader
from .engine.table_rows import TableRows
from .engine.tables import LAST, WEIGHTS, StatefulTable, TableArray

_NOT_EXCLUSIVE, _SECOND = nullcontext(), itemgetter(1)
_OF_MISSED_STEPS = f"{LAST.name}.", f"{SCALARS}."  # names in states begin so


class _BoundTable(NamedTuple):
    """A table that was checked whole; it fits for as long as its arrays are as expected."""

    places: SleepingTable
    arrays: tuple[np.ndarray, ...]
    expected: Expected | None  # None where headers of arrays are not read
    is_shared: bool  # with other optimizers, in which rows may sleep


class TableOptimizer(StatefulOptimizer, TableRows):
    """The part of `FusedOptimizer` that knows rows."""

    use_locking: bool
    together: Any  # the agreement of several processes on a step, or None
    _stepper: Stepper
    _reader: GradientReader
    _missed: MissedSteps | None = None
    _bound: dict[int, _BoundTable]  # tables that were checked, until their addresses change

    @abstractmethod
    def _read_anew(self) -> None:
        """Make anew all that depends on the states and their addresses, which have changed."""

    def _let_sleep(self) -> None:
        """Begin with rows of which none has missed a step, if they may sleep.

        The scalars of missed steps are where the states are; rows go on with those there.
        """
        if self.sparse_update != "catch_up":
            return
        missed = self._missed = MissedSteps()
        for i, p in enumerate(self.parameters):
            missed.add(i, self._rule, p.dtype, 0)
        if maker_of_states() is None:
            return
        steps = self._steps.tolist()
        for i, (p, last) in enumerate(zip(self.parameters, self._states[LAST.name], strict=True)):
            like, label = missed.tables[i].given, f"state '{LAST.name}.{p.name}'"
            if self._files is not None and not self._files.has_manifest:
                check_missed(self._name, label, last, steps[i], None)
            made = self._made(f"{SCALARS}.{p.name}", like.shape, like.dtype, like)
            check_missed(self._name, label, last, steps[i], made)
            missed.mapped[i] = made
        missed.resume(dict(enumerate(steps)))

    def _check_groups(self, groups: Groups) -> None:
        """Refuse what rows that sleep cannot have."""
        super()._check_groups(groups)
        if self.sparse_update != "catch_up":
            return
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
        steps: list[NextStep] = []
        for call in calls:
            gradients = call.gradients if call.batch.row_sparse else repeat(None)
            each = zip(
                call.batch.positions.tolist(), scalars_of(call.update), gradients, strict=False
            )
            steps += [(self._table_at_step(i), scalars, g and g.source) for i, scalars, g in each]
        return [*map(_SECOND, self._missed.before(steps))]

    # The list of what belongs to a table (`TableRows`)

    def _listed(self, where: str, i: int) -> StatefulTable:
        """All that belongs to a table, checked; the last steps of its rows come last."""
        p, shapes = self.parameters[i], iter(self._reader.shapes[i])
        label = f"parameter {p.name!r}"
        arrays = {WEIGHTS.name: TableArray(label, p.array, WEIGHTS, next(shapes), PARAMETER)}
        for role, of_each in self._states.items():
            if of_each[i] is None or role == LAST.name:
                continue
            state = self._declared.get(role, WEIGHTS)
            initial: Any = PARAMETER if role == COPY.name else state.initial
            label = f"state {role!r} of {p.name!r}"
            arrays[role] = TableArray(label, of_each[i], state, next(shapes), initial)
        if LAST.name in self._states:
            last, shape = self._states[LAST.name][i], arrays[WEIGHTS.name].shape[:1] or (1,)
            label = f"state {LAST.name!r} of {p.name!r}"
            arrays[LAST.name] = TableArray(label, last, LAST, shape, float(self._steps[i]))
        return StatefulTable(where, arrays)

    def _table_of(self, call: str, parameter: Any) -> tuple[int, StatefulTable]:
        i, where = self._number_of(parameter), f"{self._name}.{call}"
        p = self.parameters[i]
        if p.is_on_device or not p.ndim:
            expected = "a parameter with rows, on the host"
            reject(RuntimeError, where, f"parameter {p.name!r}", "has none", expected, "another")
        return i, self._listed(where, i)

    def _tables_at_step(self) -> list[TableAtStep]:
        self._bound = {}
        return [self._table_at_step(i) for i in range(len(self.parameters))]

    def _table_at_step(self, i: int) -> TableAtStep:
        bound = self._bound.get(i)
        # What was changed in place (`resize`, `flags`) has another header; another thread may have
        # exchanged arrays while they were checked.
        if (
            bound is None
            or bound.arrays[0] is not self.parameters[i].array
            or bound.arrays[-1] is not self._states[LAST.name][i]
            or bound.expected is None
            or bound.expected.addresses(()) is None
        ):
            bound = self._bind(i)
        if bound.is_shared:
            self.parameters[i].check_awake(self)
        made = i, bound.places, int(self._steps[i]), bound.arrays
        return tuple.__new__(TableAtStep, made)  # no call of Python

    def _bind(self, i: int) -> _BoundTable:
        """Check a table whole, and where it lies."""
        table, keeping, missed = self._listed(self._name, i), self.keepings[i], self._missed
        assert missed is not None
        last, scalars = table.arrays[LAST.name], missed.tables[i].given
        check_missed(self._name, last.label, last.array, int(self._steps[i]), scalars)
        arrays = tuple(entry.array for entry in table.arrays.values())
        places = sleeping_table(self._rule if keeping is None else self._rule.kept(keeping), table)
        expected = expected_arrays((), NOWHERE, arrays) if usable else None
        bound = _BoundTable(places, arrays, expected, self.parameters[i].is_shared)
        self._bound[i] = bound
        return bound

    def _commit(self, each: Sequence[tuple[Any, CatchUp | RowWrite]]) -> None:
        if self._files is not None:
            self._files.check_alone()
        commit([*dict.fromkeys(map(_SECOND, each))])

    def _move(self, i: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
        if self._files is not None:
            self._files.write(MOVED, for_good=True)
        weights = arrays.pop(WEIGHTS.name)
        self.parameters[i].rebind(weights)
        for role, array in arrays.items():
            of_each = self._states[role]
            self._states[role] = (*of_each[:i], array, *of_each[i + 1 :])
        self._read_anew()
        return weights

    def _check_growth(self, call: str, i: int) -> None:
        p = self.parameters[i]
        if p.is_shared or self.together is not None:
            expected = "one of this optimizer alone, in one process"
            got = "another optimizer's too" if p.is_shared else "one that several processes step"
            reject(RuntimeError, call, f"parameter {p.name!r}", "cannot grow", expected, got)

    def prepare(self, parameter: Any, ids: Any) -> None:
        """Bring rows of a table up to date with ``sparse_update="catch_up"``, before they are read.

        Rows for which nothing is due are not written. With another ``sparse_update`` none is ever
        behind, and nothing is done. `EmbeddingBags` prepares the rows that it pools.

        Args:
            parameter: one of `parameters`, or its array.
            ids: int32 or int64, of any shape: the numbers of the rows; duplicates are welcome.

        Raises:
            TypeError: ``ids`` are no int32 or int64.
            ValueError: ``parameter`` is none of the optimizer's, or it or a state was changed in
                place.
            IndexError: an id is out of range.
            Nothing has been written then.
        """
        i, where = self._number_of(parameter), f"{self._name}.prepare"
        rows = check.contiguous(adopt(where, "ids", ids).reshape(-1), where, "ids")
        check.index_dtype(where, rows)
        check.indices_in_range(where, rows, (*self.parameters[i].array.shape, 0)[0])
        self.prepare_spans(i, ((address_of(rows), rows.itemsize, len(rows)),))

    def _between_steps(self) -> AbstractContextManager[Any]:
        return self._exclusive() if self.use_locking else _NOT_EXCLUSIVE

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._stepper.exclusive(), locks.exclusive():
            yield

    def _number_of(self, parameter: Any) -> int:
        """The number of a parameter among those of the optimizer."""
        for i, p in enumerate(self.parameters):
            if p is parameter or p.is_of(parameter):
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

    def keep_states(self, of: Sequence[bool]) -> None:
        """Keep the states of some parameters alone (`StatefulOptimizer.keep_states`)."""
        # Parameters come from the processes that step them, and nobody would write their copies.
        if any(way is COPY and not keeps for way, keeps in zip(self.keepings, of, strict=True)):
            wrong, expected = "are written where steps are taken", "parameters without copies"
            reject(ValueError, self._name, "copies", wrong, expected, "copies")
        if self._missed is not None:
            wrong = "is impossible in ShardedStates"
            expected = "another one: parameters are sent after each step, with all rows up to date"
            reject(ValueError, self._name, "sparse_update='catch_up'", wrong, expected, "it")
        super().keep_states(of)
        self._read_anew()

    def state_arrays(self) -> dict[str, Any]:
        """The arrays of `StatefulOptimizer.state_arrays`, and the scalars of missed steps."""
        arrays = super().state_arrays()
        if self._missed is not None:
            for i, p in enumerate(self.parameters):
                arrays[f"{SCALARS}.{p.name}"] = self._missed.scalars(i)
        return arrays

    def state_dict(self, *, flush: bool = False) -> dict[str, np.ndarray]:
        """Copies of all that a resumed run needs beside the parameters, by MindSpore's names.

        ``step.<parameter>`` is the number of updates of a parameter: those whose gradient was
        None have had fewer than ``global_step``.

        Args:
            flush: bring all rows up to date (`flush`), and leave out how far each is, for readers
                that know no ``sparse_update="catch_up"``. Otherwise nothing is written.
        """
        if check.flag(self._name, "flush", flush):
            self.flush()
        saved, ours = super().state_dict() | self._derived_state(self._step), _OF_MISSED_STEPS
        return {name: x for name, x in saved.items() if not (flush and name.startswith(ours))}

    def _check_values(self, arrays: Mapping[str, np.ndarray]) -> None:
        super()._check_values(arrays)
        for i, p in enumerate(self.parameters if self._missed is not None else ()):
            name, step = f"{LAST.name}.{p.name}", int(arrays[f"step.{p.name}"][0])
            scalars = arrays[f"{SCALARS}.{p.name}"]
            if address_of(arrays[name]) != address_of(self._states[LAST.name][i]):  # else later
                check_missed(self._name, f"state {name!r}", arrays[name], step, scalars)

    def _completed(self, state: dict[str, Any]) -> dict[str, Any]:
        state = super()._completed(state)
        for i, p in enumerate(self.parameters):
            last, scalars = (f"{name}{p.name}" for name in _OF_MISSED_STEPS)
            step = state.get(f"step.{p.name}", np.zeros(1))
            if self._missed is not None and last not in state:  # of a dense optimizer
                state[last] = np.full_like(self._states[LAST.name][i], step)
                state[scalars] = no_scalars(self._missed.scalars(i))
            elif self._missed is None and last in state:
                if np.any(np.asarray(state.pop(last)) != step):
                    expected, got = "none: state_dict(flush=True) wakes them", f"some, in {last!r}"
                    reject(ValueError, self._name, "state", "has rows that sleep", expected, got)
                state.pop(scalars, None)
        return state

    def _go_on_from(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._missed is None:
            return
        scalars = {i: arrays[f"{SCALARS}.{p.name}"] for i, p in enumerate(self.parameters)}
        self._missed.resume(dict(enumerate(self._steps.tolist())), scalars)
        each = zip(self.parameters, self._states[LAST.name], strict=True)
        # Else rows are read later.
        if all(arrays[f"{LAST.name}.{p.name}"] is not last for p, last in each):
            self.wake_late()

    def wake_late(self) -> None:
        """Bring rows up to date that have come to places whose turn is too late for them.

        Raises:
            ValueError: their last steps are no such ones, in a checkpoint.
        """
        self._bound = {}
        for i in range(len(self.parameters) if self._missed is not None else 0):
            self._wake_late(i)
