"""Rows of PyTorch's tables: those that sleep, begin anew, or become copies of others."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ....kernels.cpu.rows.catch_up import CatchUp, SleepingTable
from ....kernels.cpu.rows.write import RowWrite
from ....kernels.cpu.threads.parallel import commit
from ....kernels.idle_table import NO_STEP, SLEEP
from ....kernels.keeping import COPY
from ....kernels.private import is_bound, version_of
from ....kernels.rule import Rule
from ....kernels.state import PARAMETER
from ....ops.runtime import check
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import Update
from ...base.file_set import MOVED
from ...engine.catch_up import (
    SCALARS,
    MissedSteps,
    NextStep,
    TableAtStep,
    check_missed,
    scalars_of,
    sleeping_table,
)
from ...engine.table_rows import TableRows
from ...engine.tables import LAST, WEIGHTS, StatefulTable, grown
from .chosen import StepInputs
from .declaration import Declaration
from .files import map_scalars
from .memory import DTYPES, array_of, check_there, tensor_of
from .options import check_group, check_rounding
from .part import Group, ParameterBatch, RuleChoice
from .sleep import (
    look_after,
    prepare_rows,
    sleeper_of,
    sleeping_of,
    watch_lookups,
    watch_saves,
)
from .state import check_asleep, check_states, group_of, name_of, place_of, updates_of
from .tensors import form_of, listed_tensor, rebind
from .threads import as_torch

_lock = threading.Lock()
_alive: list[weakref.ref[TableOptimizer]] = []  # exchanged, never changed: readers take no lock


def optimizers() -> list[TableOptimizer]:
    """All optimizers that are alive."""
    every = [optimizer() for optimizer in _alive]
    return [o for o in every if o is not None]


def optimizers_of_all(parameters: Sequence[Tensor]) -> list[list[TableOptimizer]]:
    """The optimizers of each parameter."""
    of_each: dict[int, list[TableOptimizer]] = {id(p): [] for p in parameters}
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            for key in of_each.keys() & {*map(id, group["params"])}:
                of_each[key].append(optimizer)
    return [of_each[id(p)] for p in parameters]


def optimizers_of(parameter: Tensor) -> list[TableOptimizer]:
    """The optimizers of a parameter."""
    return optimizers_of_all([parameter])[0]


class _CheckedTable(NamedTuple):
    """A table that was checked whole; it fits for as long as its tensors lie as they did."""

    chosen: tuple[RuleChoice, Rule]  # by the steps that its rows may have missed
    places: SleepingTable
    forms: Sequence[Any]  # of `form_of`
    last: Tensor  # the last steps, which no other tensor at their address is
    version: int  # of these
    now: int  # the steps that it had taken in the last call


class TableOptimizer(Declaration, TableRows):
    """The part of an optimizer that knows rows of tables."""

    _missed: MissedSteps
    _tables: dict[Tensor, _CheckedTable]
    _n_taken = 0  # steps of this object
    _saves_awake = False  # whether states are saved with all rows up to date, as tables are

    def _join(self) -> None:
        """Be found by `optimizers_of`."""
        global _alive
        with _lock:
            _alive = [*(o for o in _alive if o() not in (None, self)), weakref.ref(self)]

    def prepare(self, parameter: Tensor, ids: Any) -> None:
        """Bring rows of a table up to date with ``sparse="catch_up"``, before they are read.

        Rows for which nothing is due are not written, and autograd sees no change. With another
        ``sparse`` none is ever behind, and nothing is done. `watch` calls it for modules;
        `EmbeddingBags` and `ShardedEmbedding` call it themselves.

        Args:
            parameter: a parameter of the optimizer.
            ids: int32 or int64 of any shape, on the host: the numbers of the rows.

        Raises:
            TypeError: ``ids`` are no int32 or int64.
            ValueError: ``parameter`` is none of the optimizer's, or a state does not fit it.
            IndexError: an id is out of range.
            RuntimeError: the table or a state does not lie in memory as rows have left it.
            Nothing has been written then.
        """
        where = f"{type(self).__name__}.prepare"
        if place_of(self.param_groups, parameter) is None:
            reject(ValueError, where, "parameter", "is foreign", "one of the groups", "another")
        prepare_rows(parameter, ids, where)

    def watch(self, module: nn.Module) -> list[Any]:
        """Let lookups of ``nn.Embedding`` and ``nn.EmbeddingBag`` bring their rows up to date.

        Every ``nn.Embedding`` and ``nn.EmbeddingBag`` in ``module`` gets a forward pre-hook; what
        ``torch.compile`` has made before is compiled anew. A lookup by ``torch.nn.functional`` is
        seen by nobody: call `prepare` before it. Before
        ``state_dict`` of a module with a table of the optimizer, and of the optimizer itself, all
        rows of the table are brought up to date, so that the two fit in either order. A run that
        goes on from them has the bits of the one that has saved them; one that saves at other
        times differs by roundings.

        Args:
            module: a module, or one that contains them.

        Returns:
            A handle of each hook, with ``remove()``.

        Raises:
            ValueError: no table in it is the optimizer's.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        if {*map(id, parameters)}.isdisjoint(map(id, module.parameters())):
            where, expected = f"{type(self).__name__}.watch", "a table of the optimizer"
            reject(ValueError, where, "module", "has no table to watch", expected, "others")
        self._saves_awake = True
        if "torch._dynamo" in sys.modules:  # code that is compiled does not look for new hooks
            torch.compiler.reset()
        return [*watch_lookups(module), *watch_saves(module, parameters)]

    # The list of what belongs to a table (`TableRows`)

    def _table_of(self, call: str, parameter: Tensor) -> tuple[Tensor, StatefulTable]:
        where = f"{type(self).__name__}.{call}"
        choice = self._choice_for(where, parameter)
        state = self._with_copy(parameter, self.state.get(parameter, {}))
        return parameter, self._listed(where, parameter, parameter, choice, state)

    def _choice_for(self, where: str, parameter: Tensor) -> RuleChoice:
        group = group_of(self.param_groups, parameter)
        if group is None:
            reject(ValueError, where, "parameter", "is foreign", "one of the groups", "another")
        choice = self._choice(group).of(parameter)
        return choice.with_copy() if parameter in self._copies else choice

    def _with_copy(self, parameter: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with the copy of the parameter, if there is one: it is in no file."""
        copied = self._copies.get(parameter)
        return state if copied is None else {**state, COPY.name: copied}

    def _listed(
        self, where: str, parameter: Tensor, weights: Tensor, choice: RuleChoice,
        state: Mapping[str, Any],
    ) -> StatefulTable:  # fmt: skip
        """All that belongs to a table, checked; the last steps of its rows come last.

        ``weights`` is the parameter, or what holds the memory that it has had.
        """
        group = group_of(self.param_groups, parameter)
        shapes, rule = self.shapes(choice, weights), choice.rule.on(tuple(weights.shape))
        table = listed_tensor(where, "a table", weights, WEIGHTS, None, PARAMETER)
        arrays = {WEIGHTS.name: table}
        for (role, shape), declared in zip(shapes.items(), rule.states, strict=True):
            if state.get(role) is not None:
                is_weight = declared.initial == PARAMETER or role == COPY.name
                initial = PARAMETER if is_weight else self.initial(role, group)
                tensor = f"state {role!r}", state[role], declared, shape
                arrays[role] = listed_tensor(where, *tensor, initial)
        if (last := state.get(LAST.name)) is not None:
            tensor = f"state {LAST.name!r}", last, LAST, tuple(weights.shape[:1])
            arrays[LAST.name] = listed_tensor(where, *tensor, float(updates_of(where, state)))
        return StatefulTable(where, arrays)

    def _tables_at_step(self) -> list[TableAtStep]:
        every = [(p, self.state.get(p, {})) for group in self.param_groups for p in group["params"]]
        behind = [(p, state) for p, state in every if LAST.name in state]
        return [self._at_step(p, state, may_move=True, is_whole=True) for p, state in behind]

    def _table_at_step(self, parameter: Tensor) -> TableAtStep | None:
        state = self.state.get(parameter, {})
        return self._at_step(parameter, state) if LAST.name in state else None

    def _at_step(
        self, parameter: Tensor, state: Mapping[str, Any],
        chosen: tuple[RuleChoice, Rule] | None = None, now: int | None = None, *,
        may_move: bool = False, is_whole: bool = False,
    ) -> TableAtStep:  # fmt: skip
        """A table as the steps have left it that its rows may have missed, checked.

        Choice, rule and count of steps are those of the steps before if the next one does not give
        them. ``may_move``: rows may sleep although the table lies elsewhere than before;
        ``is_whole``: what is as it was is checked too.
        """
        where, state = type(self).__name__, self._with_copy(parameter, state)
        last, before = state[LAST.name], self._tables.get(parameter)
        if chosen is None and before is not None:
            chosen = before.chosen
        elif chosen is None:
            choice = self._choice_for(where, parameter)
            chosen = choice, choice.rule
        choice, rule = chosen
        now = updates_of(where, state) if now is None else now
        self._check_other(parameter, "a table")
        # Another thread may exchange states, and the memory of tensors: all follows from these.
        tensors = [parameter, *map(state.get, choice.states), last]
        owners = [t.detach() if isinstance(t, Tensor) else t for t in tensors]
        forms = [*map(form_of, owners)]
        look_after(parameter, self)
        version = version_of(last) if isinstance(last, Tensor) else 0
        if not is_whole and before is not None:
            is_same = before.chosen[1] is rule and before.last is last and before.version == version
            is_same = is_same and None not in forms and before.forms == forms
            if is_same and before.now <= now <= before.now + 1:
                self._tables[parameter] = before._replace(now=now)
                return TableAtStep(parameter, before.places, now, owners)
        held = {**dict(zip(choice.states, owners[1:], strict=False)), LAST.name: owners[-1]}
        table = self._listed(where, parameter, owners[0], choice, {**held, "step": now})
        if len(table.arrays) != len(tensors):
            roles = [role for role in choice.states if role in table.arrays]
            reject(RuntimeError, where, "state of a table", "lacks some", [*choice.states], roles)
        dtype = table.weights.dtype
        is_asleep = bool((table.arrays[LAST.name].array < now).any())
        if is_asleep and not may_move and before is not None and before.forms[0] != forms[0]:
            expected, got = "its memory of before; flush() goes on with what is there", "another"
            reject(RuntimeError, where, "a table", "was rebound while rows sleep", expected, got)
        if is_asleep and self._missed.differs(parameter, rule, dtype):
            expected, got = "the options and dtype of before; flush() before they change", "others"
            reject(RuntimeError, where, "a table", "has rows that sleep", expected, got)
        if before is not None and now < before.now and parameter in self._missed.tables:
            self._missed.set_back(parameter, now)
        last_steps, scalars = table.arrays[LAST.name], self._missed.tables.get(parameter)
        check_missed(where, last_steps.label, last_steps.array, now, scalars and scalars.given)
        self._missed.add(parameter, rule, dtype, now)
        map_scalars(self, parameter)
        places = sleeping_table(rule, table)
        self._tables[parameter] = _CheckedTable(chosen, places, forms, last, version, now)
        return TableAtStep(parameter, places, now, owners)

    def _host_array(self, value: Any) -> Any:
        return array_of(value.detach().contiguous()) if isinstance(value, Tensor) else value

    def _wake(self, parameter: Tensor, rows: Any) -> None:
        if LAST.name in self.state.get(parameter, {}):
            super()._wake(parameter, rows)

    @as_torch
    def _commit(self, each: Sequence[tuple[Tensor, CatchUp | RowWrite]]) -> None:
        if self._files is not None:
            self._files.files.check_alone()
        commit([*dict.fromkeys(write for _, write in each)])
        # What autograd has saved of a table is another one now.
        for parameter, write in each:
            if isinstance(write, RowWrite) or write.found_any:
                if not isinstance(write, RowWrite) and (watched := sleeping_of(parameter)):
                    watched.woken += 1
                torch.autograd.graph.increment_version(parameter)

    def _check_growth(self, call: str, parameter: Tensor) -> None:
        if parameter.grad is not None or is_bound(parameter):
            expected = "one without a gradient, copies and a loss that is alive (del loss)"
            reject(RuntimeError, call, "parameter", "cannot grow", expected, "another")

    def _move(self, parameter: Tensor, arrays: dict[str, np.ndarray]) -> Tensor:
        if self._files is not None:
            self._files.files.write(MOVED, for_good=True)
        rebind(parameter, tensor_of(arrays.pop(WEIGHTS.name)))
        if arrays:
            self.state[parameter].update({role: tensor_of(x) for role, x in arrays.items()})
        if (before := self._tables.get(parameter)) is not None:
            self._tables[parameter] = before._replace(forms=[form_of(parameter.detach())])
        return parameter

    def _bring_up(self, tables: Sequence[TableAtStep]) -> None:
        super()._bring_up(tables)
        for table in tables:
            bound = self._tables[table.key]
            if (watched := sleeping_of(table.key)) is not None:
                watched.awake = float(table.now), bound.version

    def flush_table(self, parameter: Tensor) -> None:
        """Bring all rows of a table up to date, unless the last call has, and no step since."""
        state, watched = self.state.get(parameter, {}), sleeping_of(parameter)
        last = state.get(LAST.name)
        if last is None or watched is None:
            return
        now, bound = updates_of(type(self).__name__, state), self._tables.get(parameter)
        is_same = bound is not None and bound.last is last
        if not is_same or watched.awake != (now, version_of(last)):
            self._bring_up([self._at_step(parameter, state, may_move=True, is_whole=True)])

    def _flush_before_saving(self, flush: Any) -> None:
        if check.flag(type(self).__name__, "flush", flush):
            self.flush()
        elif self._saves_awake:
            for parameter in self._missed.tables.keys() & self.state.keys():
                step = updates_of(type(self).__name__, self.state[parameter])
                # Else no row has missed a step, or somebody is writing a count that was saved.
                if self._missed.tables[parameter].given[step % SLEEP, -1] != NO_STEP:
                    self.flush_table(parameter)

    # Steps

    def behind(
        self, inputs: StepInputs, updates: Iterable[tuple[ParameterBatch, Update]],
        steps: float | list[float],
    ) -> list[tuple[Any, CatchUp]]:  # fmt: skip
        """Catching up, to be done before these updates of a step (`MissedSteps.before`)."""
        next_steps: list[NextStep] = []
        for part, update in updates:
            gradients: Any = update.gradients if part.batch.row_sparse else repeat(None)
            for i, scalars, g in zip(part.places, scalars_of(update), gradients, strict=False):
                parameter = inputs.chosen.parameters[i]
                state = inputs.new.get(parameter) or self.state[parameter]
                now = int(steps if isinstance(steps, float) else steps[i]) - 1
                table = self._at_step(parameter, state, (part.choice, part.batch.rule), now)
                next_steps.append((table, scalars, g and g.source))
        return self._missed.before(next_steps)

    def warn_of_stale(self, done: Sequence[tuple[Any, CatchUp]]) -> None:
        """Warn, once for each table, of a gradient that follows from rows that slept."""
        for parameter in self._missed.stale(done):
            name = name_of(self.param_groups, parameter)
            warnings.warn(
                f"{type(self).__name__}: the gradient of {name} follows from rows that slept, some "
                "steps behind, when they were read: call optimizer.watch(model) once, or "
                "optimizer.prepare(table, ids) before each lookup",
                RuntimeWarning,
                stacklevel=8,
            )

    # Options and state

    def _check_sleep(self, group: Group, choice: RuleChoice, name: str, parameter: Tensor) -> None:
        """Refuse what rows that sleep cannot have, and tables whose rows others have missed."""
        where, option = type(self).__name__, "sparse='catch_up'"
        self._check_other(parameter, name)
        if not choice.sleeps:
            if self.is_asleep(parameter):
                expected, got = "none: flush() before `sparse` changes", "some"
                reject(RuntimeError, where, name, "has rows that sleep", expected, got)
            self._forget(parameter)
            return
        if group["rounding"] == "stochastic":
            reject(ValueError, where, option, "excludes random bits", "another rounding", "it")

    def _check_other(self, parameter: Tensor, name: str) -> None:
        """Refuse a table whose rows sleep in another optimizer."""
        other = sleeper_of(parameter)
        if other is not None and other is not self and other.is_asleep(parameter):
            expected, got = "none: flush() of that one", f"those of a {type(other).__name__}"
            reject(RuntimeError, type(self).__name__, name, "has rows that sleep", expected, got)

    def _new_last(self, parameter: Tensor, step: int) -> Tensor:
        self._missed.drop(parameter)
        make, shape = self._making(parameter, LAST.name), tuple(parameter.shape[:1])
        if make is None:
            return parameter.new_full(shape, step, dtype=torch.int32)
        return tensor_of(make(shape, np.dtype(np.int32), step))

    def _forget(self, parameter: Tensor) -> None:
        """Forget how far the rows of a parameter are: they take all steps from now on."""
        if state := self.state.get(parameter):
            for name in (LAST.name, SCALARS):
                state.pop(name, None)
        if self._tables or self._missed.tables or self._missed.mapped:
            self._tables.pop(parameter, None)
            self._missed.drop(parameter)

    def _look_after_all(self) -> None:
        for parameter, state in self.state.items():
            if isinstance(state, dict) and LAST.name in state:
                look_after(parameter, self)

    def is_asleep(self, parameter: Tensor) -> bool:
        """Whether a row of a parameter has missed a step."""
        state, where = self.state.get(parameter, {}), type(self).__name__
        last = state.get(LAST.name)
        if last is None:
            return False
        check_there(where, f"state {LAST.name!r}", last)
        return bool((last < updates_of(where, state)).any())

    def _save_scalars(self) -> None:
        """Have the scalars of missed steps in the states."""
        for parameter in self._missed.tables.keys() & self.state.keys():
            scalars = torch.from_numpy(self._missed.tables[parameter].given.copy())
            self.state[parameter][SCALARS] = scalars

    def _begin_asleep(self, saved: Mapping[Any, Any], keys: Iterable[tuple[Tensor, Any]]) -> None:
        """Go on with the scalars of missed steps of a state that was loaded."""
        steps, loaded, where = {}, {}, type(self).__name__
        for parameter, key in keys:
            scalars = saved.get(key, {}).get(SCALARS)
            state = self.state.get(parameter, {})
            choice = self._choice_for(where, parameter)
            if scalars is None:  # of a state whose rows have taken all steps
                self._forget(parameter)
                if self._files is None or not (state and choice.sleeps):
                    continue
                state[LAST.name] = self._new_last(parameter, updates_of(where, state))
            self._tables.pop(parameter, None)
            steps[parameter] = updates_of(where, state)
            self._missed.add(parameter, choice.rule, DTYPES[parameter.dtype], steps[parameter])
            map_scalars(self, parameter)
            if scalars is not None:
                loaded[parameter] = np.asarray(scalars)
        self._missed.resume(steps, loaded)
        for parameter in steps:
            if (watched := sleeping_of(parameter)) is not None:
                watched.awake = None
            self._wake_late(parameter)

    def _with_more_rows(self, group: Group, parameter: Tensor, state: Any) -> dict[str, Any]:
        """A saved state of fewer rows than the table has, whose further rows begin anew."""
        where, n, choice = type(self).__name__, len(parameter), self._choice(group)
        # Two optimizers that go on from here count apart.
        made = {role: deepcopy(x) if np.ndim(x) == 0 else x for role, x in state.items()}
        declared = zip(choice.states, choice.rule.on(tuple(parameter.shape)).states, strict=True)
        for role, kind in (*declared, (LAST.name, LAST)):
            x = state.get(role)
            is_of_rows = kind.per in ("row", "element") and isinstance(x, Tensor) and x.dim()
            if not is_of_rows or len(x) == n:
                continue
            if len(x) > n:
                label, fix = f"state {role!r} of a table", f"; call grow({len(x)}) before"
                reject(ValueError, where, label, "has too many rows", f"at most {n}", len(x), fix)
            initial = kind.initial if kind.initial == PARAMETER else self.initial(role, group)
            if kind is LAST:
                initial = float(updates_of(where, state))
            made[role] = tensor_of(grown(array_of(x.detach().cpu().contiguous()), n, initial))
        return made

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse options and states of a state dict that the groups cannot have, and give tables
        that grow the rows that their states lack in it.
        """
        where, states = type(self).__name__, state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            options = {**group, **saved, "params": ()}
            check_group(where, options, takes_sparse=self._takes_sparse)
            check_states(where, saved["params"], states)
            method = self.method(options)
            for k, parameter in enumerate(group["params"]):
                check_rounding(where, options, method.rule, f"parameter {k}", parameter)
            rule = self._choice(options).rule
            pairs = [*zip(group["params"], saved["params"], strict=False)]
            for parameter, key in pairs:
                if key in states and getattr(parameter, "can_grow", False):
                    states[key] = self._with_more_rows(options, parameter, states[key])
                check_asleep(where, rule, parameter, states.get(key, {}))
            self._check_shapes(options, pairs, states)
