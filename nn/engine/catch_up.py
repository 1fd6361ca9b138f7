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
from ...kernels.state import State
from ...kernels.storage import STORAGES, real_of
from ...ops.runtime.arrays import address_of
from ...ops.runtime.bags.ids import HostIds
from ...ops.runtime.bags.pooling import Pooling
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import Update
from ..base.mapped_files import SCALARS as SCALARS

LAST = State("last_step", "row", dtype=np.int32)
"""The step that each row has taken last: int32 ``[N]``."""
# Each row is looked at once in so many steps, a few before the scalars are gone.
_PERIOD = SLEEP - 8


class Table(NamedTuple):
    """A parameter in whose rows steps may be missing, and what says which."""

    key: Any  # of the parameter in `MissedSteps`
    places: SleepingTable
    now: int  # the steps that it has taken

    @classmethod
    def of(cls, key: Any, rule: Rule, arrays: Sequence[Any], last: Any, now: int) -> Table:
        """A parameter and its states, of a rule that keeps the weight as it does."""
        w, *states = (STORAGES[array.dtype] for array in arrays)
        assert rule.asleep is not None
        many = kernel(rule.asleep, (), w, real_of(w), tuple(states))
        places, width = tuple(map(address_of, arrays)), math.prod(arrays[0].shape[1:])
        return cls(key, SleepingTable(many, places, width, address_of(last), len(last)), now)


class NextStep(NamedTuple):
    """The next step of a table: its scalars, and the rows that have a gradient."""

    table: Table
    scalars: tuple[float, ...]  # of the rule, then the coupled weight decay
    source: Any  # `RowSource` of a row-sparse gradient; None: every row has one


class MissedSteps:
    """The scalars of the last steps of an optimizer's parameters, by any key of each.

    Parameters with the same scalars in all steps share a table of them.
    """

    def __init__(self) -> None:
        self.tables: dict[Any, IdleTable] = {}
        self._rules: dict[Any, Any] = {}
        self.mapped: dict[Any, np.ndarray] = {}  # where the scalars outlive the process

    def add(self, key: Any, rule: Rule, real: Any, step: int) -> None:
        """Begin with a parameter at a step that no row has missed, if it is not there."""
        plain = rule.plain or rule
        form = plain, np.dtype(real)
        if self._rules.get(key) == form:
            return
        # Those that begin at the same time are likely to stay alike.
        others = (self.tables[k] for k, own in self._rules.items() if own == form)
        found = next((table for table in others if table.is_fresh and table.begun == step), None)
        if found is None:
            found = IdleTable(plain, real)
            found.begin(step)
        self.mapped.pop(key, None)
        self._rules[key], self.tables[key] = form, found

    def differs(self, key: Any, rule: Rule, real: Any) -> bool:
        """Whether a parameter was there with another rule or type of the arithmetic."""
        return self._rules.get(key) not in (None, (rule.plain or rule, np.dtype(real)))

    def drop(self, key: Any) -> None:
        """Forget a parameter, none of whose rows misses a step."""
        for known in (self.tables, self._rules, self.mapped):
            known.pop(key, None)

    def part(self) -> None:
        """Give each parameter a table of its own, whose scalars can be assigned to."""
        self.tables = {key: copy.deepcopy(table) for key, table in self.tables.items()}

    def begin(self, steps: Mapping[Any, int]) -> None:
        """Begin with parameters at these steps, with the scalars that were assigned."""
        known: dict[Any, IdleTable] = {}
        for key, step in steps.items():
            table = self.tables[key]
            table.given[...] = self.scalars(key)
            table.begin(step)
            same = self._rules[key], step, table.given.tobytes()
            self.tables[key] = known.setdefault(same, table)

    def scalars(self, key: Any) -> np.ndarray:
        """The scalars that are to be assigned to before `begin`, and kept in checkpoints."""
        return self.mapped.get(key, self.tables[key].given)

    def give(self, steps: Iterable[NextStep]) -> None:
        """Note the scalars of the next step of some parameters; it may still fail."""
        given = {own.table.key: (own.table.now + 1, own.scalars) for own in steps}
        users: dict[int, list[Any]] = {}
        for key, table in self.tables.items():
            users.setdefault(id(table), []).append(key)
        for keys in users.values():
            parts: dict[Any, list[Any]] = {}
            for key in keys:
                parts.setdefault(given.get(key), []).append(key)
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

    def before(self, steps: Sequence[NextStep]) -> Iterator[CatchUp]:
        """Bring rows up to date before the next step of their tables."""
        self.give(steps)
        for table, _, source in steps:
            n, now = table.places.rows, table.now
            if source is None:
                yield self._catch_up(table, now + 1, (0, 0, n))
                continue
            turn = now % _PERIOD
            begin, end = turn * n // _PERIOD, (turn + 1) * n // _PERIOD
            if begin < end:
                yield self._catch_up(table, now, (0, begin, end - begin))
            yield self._catch_up(table, now + 1, (source.indices, *source[1:3]))

    def of_span(self, table: Table, span: tuple[int, int, int]) -> CatchUp:
        """Bring rows up to date: the address of ids, their bytes, and how many there are."""
        return self._catch_up(table, table.now, span)

    def of_all(self, table: Table) -> CatchUp:
        """Bring all rows up to date."""
        return self._catch_up(table, table.now, (0, 0, table.places.rows))

    def wake_late(self, table: Table, last: np.ndarray) -> None:
        """Bring rows up to date whose turn would come too late, after rows have moved."""
        turns = ((np.arange(len(last)) + 1) * _PERIOD - 1) // max(1, len(last))
        is_late = table.now + (turns - table.now) % _PERIOD - last > _PERIOD
        if len(late := np.flatnonzero(is_late)):
            commit([self.of_span(table, (address_of(late), late.itemsize, len(late)))])

    def _catch_up(self, table: Table, mark: int, rows: tuple[int, int, int]) -> CatchUp:
        return CatchUp(table.places, self.tables[table.key], table.now, mark, rows)


def spans_of(pooling: Pooling, given: HostIds) -> dict[int, list[tuple[int, int, int]]]:
    """The ids of bags by the number of their table, each list as `MissedSteps.of_span`."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    columns = (given.column(name).tolist() for name in ("ids", "id_bytes", "begin", "end"))
    for t, ids, n_bytes, begin, end in zip(pooling.ordered(pooling.of), *columns, strict=True):
        found.setdefault(t, []).append((ids + begin * n_bytes, n_bytes, end - begin))
    return found


def scalars_of(update: Update) -> Iterator[tuple[float, ...]]:
    """The scalars of the rule and the coupled weight decay of each parameter of an update."""
    kernel = update.kernel
    hp = np.asarray(update.hp).reshape(-1, kernel.n_scalars).tolist()
    rows = [_without_gradient(kernel.rule, kernel.prologue, row) for row in hp]
    return (rows[k] for k in update.hp_of)


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


def check_last(where: str, label: str, last: np.ndarray, step: int) -> None:
    """Refuse last steps that lie in the future, or are too old.

    Raises:
        ValueError: there is one.
    """
    if len(last) and not (max(0, step - _PERIOD - 1) <= last.min() and last.max() <= step):
        expected = f"steps from {max(0, step - _PERIOD - 1)} to {step}"
        got = f"{last.min()} to {last.max()}"
        reject(ValueError, where, label, "has rows of another time", expected, got)


def check_resumed(
    where: str, key: str, last: np.ndarray, step: int, scalars: np.ndarray | None
) -> None:
    """Refuse last steps of files, and scalars that are not those of the steps that rows missed.

    Raises:
        ValueError: there are some, or without scalars rows sleep.
    """
    check_last(where, f"state '{LAST.name}.{key}'", last, step)
    first, label = int(last.min(initial=step)), f"state '{SCALARS}.{key}'"
    if scalars is None:
        if first < step:
            reject(ValueError, where, label, "is not of a set", "a manifest, as rows sleep", "none")
        return
    missed = scalars[np.arange(first + 1, step + 1) % SLEEP]
    is_off = scalars[:, -1] == NO_STEP
    if not (np.isfinite(scalars).all(axis=1) | is_off).all() or not np.isfinite(missed).all():
        reject(ValueError, where, label, "does not tell what rows missed", "numbers", "others")
