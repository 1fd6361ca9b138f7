"""Rows that sleep while they have no gradient, and take the steps that they have missed later."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.rows.catch_up import CatchUp, SleepingTable
from ...kernels.cpu.threads.parallel import commit
from ...kernels.element import kernel
from ...kernels.idle_table import NO_STEP, SLEEP, IdleTable
from ...kernels.rule import Prologue, Rule, columns
from ...kernels.rules.gradient import COUPLED_DECAY, SCALE
from ...kernels.storage import STORAGES, real_of
from ...ops.runtime.arrays import address_of
from ...ops.runtime.bags.ids import HostIds
from ...ops.runtime.bags.pooling import Pooling
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import Update
from ..base.mapped_files import SCALARS as SCALARS
from .tables import StatefulTable

# Each row is looked at once in so many steps, a few before the scalars are gone: in turns, of which
# there is one in so many steps.
_PERIOD, _EVERY = SLEEP - 8, 8
_TURNS = _PERIOD // _EVERY


class TableAtStep(NamedTuple):
    """A parameter in whose rows steps may be missing, and how far it is."""

    key: Any  # of the parameter in `MissedSteps`
    places: SleepingTable
    now: int  # the steps that it has taken
    owners: Any  # of the memory, which another thread may exchange while loops run


NextStep = tuple[TableAtStep, tuple[float, ...], Any]
"""The next step of a table: its scalars, of the rule, then the coupled weight decay; and the source
of the rows that have a gradient, None if every row has one."""


class MissedSteps:
    """The scalars of the last steps of an optimizer's parameters, by any key of each.

    Parameters with the same scalars in all steps share a table of them.
    """

    def __init__(self) -> None:
        self.tables: dict[Any, IdleTable] = {}
        self._rules: dict[Any, Any] = {}
        # Parameters that were read by `of_span` or `of_all`; of whose stale lookups nothing is to
        # be said any more; and whose states were loaded since the last step.
        self.prepared, self._warned, self._loaded = set[Any](), set[Any](), set[Any]()
        self.mapped: dict[Any, np.ndarray] = {}  # where the scalars outlive the process

    def add(self, key: Any, rule: Rule, dtype: Any, step: int) -> None:
        """Begin with a parameter at a step that no row has missed, if it is not there."""
        form = _form(rule, dtype)
        if self._rules.get(key) == form:
            return
        # Those that begin at the same time are likely to stay alike.
        others = (self.tables[k] for k, other in self._rules.items() if other == form)
        alike = next((table for table in others if table.is_fresh and table.begun == step), None)
        if alike is None:
            alike = IdleTable(*form)
            alike.begin(step)
        self.mapped.pop(key, None)
        self._rules[key], self.tables[key] = form, alike

    def differs(self, key: Any, rule: Rule, dtype: Any) -> bool:
        """Whether a parameter was there with another rule or type of the arithmetic."""
        return self._rules.get(key) not in (None, _form(rule, dtype))

    def drop(self, key: Any) -> None:
        """Forget a parameter, none of whose rows misses a step."""
        for by_key in (self.tables, self._rules, self.mapped):
            by_key.pop(key, None)
        self.prepared.discard(key)

    def resume(self, steps: Mapping[Any, int], scalars: Mapping[Any, Any] | None = None) -> None:
        """Go on with parameters at these steps; scalars that are not given are mapped ones."""
        self.tables = {key: copy.deepcopy(table) for key, table in self.tables.items()}
        alike: dict[Any, IdleTable] = {}
        self._loaded = {*steps}
        for key, step in steps.items():
            table = self.tables[key]
            if scalars is not None and key in scalars:
                self.scalars(key)[...] = scalars[key]
            table.given[...] = self.scalars(key)
            table.begin(step)
            form = self._rules[key], step, table.given.tobytes()
            self.tables[key] = alike.setdefault(form, table)

    def scalars(self, key: Any) -> np.ndarray:
        """The scalars of the last steps, as checkpoints and files have them."""
        return self.mapped.get(key, self.tables[key].given)

    def give(self, steps: Iterable[NextStep]) -> None:
        """Note the scalars of the next step of some parameters; it may still fail."""
        next_of: dict[Any, Any] = {}
        for (key, _, now, _), scalars, _ in steps:
            next_of[key] = now + 1, scalars
        users: dict[int, list[Any]] = {}
        for key, table in self.tables.items():
            users.setdefault(id(table), []).append(key)
        for keys in users.values():
            parts: dict[Any, list[Any]] = {}
            for key in keys:
                parts.setdefault(next_of.get(key), []).append(key)
            # Those without a gradient take no step: from here on they are apart.
            for members in [*parts.values()][1:]:
                table = copy.deepcopy(self.tables[members[0]])
                self.tables.update(dict.fromkeys(members, table))
            for part, members in parts.items():
                if part is not None:
                    step, scalars = part
                    self.tables[members[0]].given[step % SLEEP] = scalars
                    for key in self.mapped.keys() & members if self.mapped else ():
                        self.mapped[key][step % SLEEP] = scalars

    def before(self, steps: Sequence[NextStep]) -> list[tuple[Any, CatchUp]]:
        """Bring rows up to date before the next step of their tables.

        With each is the key of the table if all of its rows have a row-sparse gradient, else None.
        """
        self.give(steps)
        made: list[tuple[Any, CatchUp]] = []
        for table, _, source in steps:
            n, now = table.places.rows, table.now
            if source is None:
                made.append((None, self._catch_up(table, now + 1, (0, 0, n))))
                continue
            turn, rest = divmod(now % _PERIOD, _EVERY)
            begin, end = turn * n // _TURNS, (turn + 1) * n // _TURNS
            if begin < end and rest == 0:
                made.append((None, self._catch_up(table, now, (0, begin, end - begin))))
            rows = source.indices, source.index_bytes, source.length
            made.append((table.key, self._catch_up(table, now + 1, rows)))
        return made

    def stale(self, done: Sequence[tuple[Any, CatchUp]]) -> list[Any]:
        """The parameters of a step whose gradients follow from rows that slept, each once.

        They are those of whose rows none was ever brought up to date before it was read. Where some
        were, a row may have slept since, or another process may have read it. ``done`` is what
        `before` has given, and a commit has done.
        """
        silent = self._warned | self._loaded | self.prepared
        keys = [key for key, caught_up in done if key is not None and caught_up.found_any]
        keys = [key for key in keys if key not in silent]
        self._warned.update(keys)
        self._loaded.difference_update(key for key, _ in done)
        return keys

    def set_back(self, key: Any, step: int) -> None:
        """Let a parameter go on at an earlier step, without the scalars of the steps after it."""
        table = self.tables[key] = copy.deepcopy(self.tables[key])
        discarded = np.arange(step + 1, table.step + 1)[-SLEEP:] % SLEEP
        table.given[discarded, -1] = NO_STEP
        if key in self.mapped:
            self.mapped[key][discarded, -1] = NO_STEP
        table.begin(step)

    def of_span(self, table: TableAtStep, span: tuple[int, int, int]) -> CatchUp:
        """Bring rows up to date: the address of ids, their bytes, and how many there are."""
        self.prepared.add(table.key)
        return self._catch_up(table, table.now, span)

    def of_all(self, table: TableAtStep) -> CatchUp:
        """Bring all rows up to date."""
        return self.of_span(table, (0, 0, table.places.rows))

    def wake_late(self, table: TableAtStep, last: np.ndarray) -> None:
        """Bring rows up to date whose turn would come too late, after rows have moved."""
        turns = ((np.arange(len(last)) + 1) * _TURNS - 1) // max(1, len(last)) * _EVERY
        is_late = table.now + (turns - table.now) % _PERIOD - last > _PERIOD
        if len(late := np.flatnonzero(is_late)):
            span = address_of(late), late.itemsize, len(late)
            commit([self._catch_up(table, table.now, span)])

    def _catch_up(self, table: TableAtStep, mark: int, rows: tuple[int, int, int]) -> CatchUp:
        scalars = self.tables[table.key]
        return CatchUp(table.places, scalars, table.now, mark, rows, table.owners)


def _form(rule: Rule, dtype: Any) -> tuple[Rule, np.dtype[Any]]:
    """The rule of missed steps of a parameter, and the type of its arithmetic."""
    return rule.plain or rule, real_of(STORAGES[dtype]).dtype


def sleeping_table(rule: Rule, table: StatefulTable) -> SleepingTable:
    """The places of a checked table whose last array has the last steps; its rule keeps weights."""
    *arrays, last = (entry.array for entry in table.arrays.values())
    w, *states = (STORAGES[array.dtype] for array in arrays)
    assert rule.asleep is not None
    many = kernel(rule.asleep, (), w, real_of(w), tuple(states))
    places, width = tuple(map(address_of, arrays)), math.prod(arrays[0].shape[1:])
    return SleepingTable(many, places, width, address_of(last), len(last))


def spans_of(pooling: Pooling, lists: HostIds) -> dict[int, list[tuple[int, int, int]]]:
    """The ids of bags by the number of their table, each list as `MissedSteps.of_span`."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    columns = (lists.lists[name].tolist() for name in ("ids", "id_bytes", "begin", "end"))
    for t, ids, n_bytes, begin, end in zip(pooling.ordered(pooling.of), *columns, strict=True):
        spans.setdefault(t, []).append((ids + begin * n_bytes, n_bytes, end - begin))
    return spans


def scalars_of(update: Update) -> Iterator[tuple[float, ...]]:
    """The scalars of the rule and the coupled weight decay of each parameter of an update."""
    kernel, hp = update.kernel, np.asarray(update.hp)
    if hp.ndim == 1:
        hp = hp.reshape(-1, kernel.n_scalars)
    rows = [_without_gradient(kernel.rule, kernel.prologue, row) for row in hp.tolist()]
    return map(rows.__getitem__, update.hp_of)


def _without_gradient(rule: Rule, prologue: Prologue, row: Sequence[float]) -> tuple[float, ...]:
    place, decay = columns(rule, prologue), 0.0
    for transform in prologue:
        if transform is COUPLED_DECAY:
            decay = row[place["weight_decay"]]
        elif transform is SCALE:  # of the decay, where it comes after it
            decay *= row[place["grad_scale"]]
    return (*row[: len(rule.hp)], decay)


def no_scalars(like: np.ndarray) -> np.ndarray:
    """Scalars of a state in which no row has missed a step."""
    made = np.zeros_like(like)
    made[:, -1] = NO_STEP
    return made


def check_idle(where: str, name: str, rule: Rule, *, couples: bool) -> None:
    """Refuse a rule without an idle form, or with a coupled weight decay that has none.

    Raises:
        ValueError: it is such a one.
    """
    idle = (rule.plain or rule).idle
    if idle is None:
        expected = "a rule whose steps without a gradient can be summed: that of Adam, AdamW, "
        expected += "LazyAdam, SparseAdam, RMSProp (not centered with momentum), SGD, Momentum, "
        expected += "Lion, Adagrad or row-wise Adagrad"
        reject(ValueError, where, name, "is impossible", expected, rule.update.__name__)
    if couples and not idle.coupled:
        expected = "a decoupled weight decay, as AdamWeightDecay's or AdamW's, or none"
        reject(ValueError, where, name, "is impossible", expected, "a coupled one")


def check_missed(where: str, label: str, last: Any, step: int, scalars: Any) -> None:
    """Refuse last steps that are no such ones at a step, or whose missed steps have no scalars.

    Without ``scalars`` no row may have missed a step.

    Raises:
        ValueError: there is one.
    """
    if not len(last):
        return
    oldest, newest, least = int(np.min(last)), int(np.max(last)), max(0, step - _PERIOD - 1)
    if not least <= oldest <= newest <= step:
        expected, got = f"steps from {least} to {step}", f"{oldest} to {newest}"
        reject(ValueError, where, label, "has rows of another time", expected, got)
    if scalars is not None:
        rows = np.asarray(scalars)
        fits, is_there = np.isfinite(rows).all(axis=1), rows[:, -1] != NO_STEP
        if not (fits | ~is_there).all():
            reject(ValueError, where, f"{SCALARS} of {label}", "are no numbers", "numbers", "NaN")
    missed = np.arange(oldest + 1, step + 1) % SLEEP
    if len(missed) and (scalars is None or not fits[missed].all()):
        expected = f"state {SCALARS!r} of steps {oldest + 1} to {step} beside it"
        expected += ", or state_dict(flush=True)"
        reject(ValueError, where, label, "has rows that sleep", expected, "others, or none")
