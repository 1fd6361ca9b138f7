"""Parts of an `IdMap`: slots of ids, rows of its table, lost ids; and its state, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu import ids as kernels
from ....kernels.cpu.threads.parallel import Arguments, Loop, run_all
from ....kernels.keeping import mixed, unmixed
from ....ops.runtime import check
from ....ops.runtime.arrays import adopt
from ....ops.runtime.errors import reject
from ..arguments import MOST_STEPS, check_kind

I32, I64 = np.dtype(np.int32), np.dtype(np.int64)
STATE: dict[str, np.dtype[Any]] = {
    "ids": I64, "rows": I32, "counts": I32, "last_uses": I32,
    "pending": I64, "pending_counts": I32, "pending_last_uses": I32, "next_row": I64,
    "step": I64, "removed": I64, "removed_steps": I64, "forgotten": I64,
}  # fmt: skip
"""The arrays of a state of a map, all of one dimension."""
OPTIONAL = frozenset(("pending_last_uses",))
"""Those that states of before lack: ids without a row were seen in the step of the state then."""

MOST_LOAD, FEWEST_SLOTS = 0.8, 1_024
"""Of the slots before there are more of them."""
_LOAD, _MOMENTS = 0.55, 256
_NO_IDS, NO_ROWS = np.empty(0, np.int64), np.empty(0, np.int32)


class Admissions(NamedTuple):
    """The rows that a call of an `IdMap` has handed out, and the ids that have got none.

    Attributes:
        rows: int32: the rows that were handed out: their states and weights begin anew
            (`reset_rows`).
        ids: int64: the ids that have got them.
        refused: the occurrences that read the reserved row.
        evicted: int32: rows that were given back for this, ascending.
    """

    rows: np.ndarray
    ids: np.ndarray
    refused: int
    evicted: np.ndarray


class Changes(NamedTuple):
    """Changes of an `IdMap`, and of the rows of its table, since a step.

    Attributes:
        ids: int64: the ids that have been used since.
        rows: int32: their rows.
        removed: int64: ids that have lost their rows since, and have none now.
    """

    ids: np.ndarray
    rows: np.ndarray
    removed: np.ndarray


class TooManyChangesError(ValueError):
    """More ids have lost their rows since than an `IdMap` remembers: send the whole table."""


class IdSlots(NamedTuple):
    """Slots of a map, as `kernels.cpu.ids` describes them; others take their place as a whole."""

    hashes: np.ndarray  # uint64
    places: np.ndarray  # int32
    moments: np.ndarray  # uint8
    n: int  # those to which an id may belong; more lie behind them
    steps: np.ndarray  # int64: of the moments, ascending

    @classmethod
    def holding(cls, n: int, tail: int, entries: Sequence[np.ndarray], steps: Any) -> IdSlots:
        """New slots with these hashes, places and moments; ``tail`` lie behind, or more."""
        hashes, places, moments = entries
        out = np.ones(4, np.int64)
        while out[2]:
            m, out[2], tail = n + tail, 0, 2 * tail
            new = np.empty(m, np.uint64), np.zeros(m, np.int32), np.empty(m, np.uint8)
            fields: Any = dict(zip(("hashes", "places", "moments"), new, strict=True))
            fields |= {"ids": hashes.view(np.int64), "n": len(hashes), "rows": places}
            fields |= {"length": m, "slots": n, "out": out, "seen": moments}
            call = Arguments(kernels.IdCall(**fields))
            run_all((Loop.of(kernels.place, 1, call.address, 1),) if len(hashes) else ())
        return cls(*new, n, steps)

    @classmethod
    def empty(cls) -> IdSlots:
        """The slots of a map without ids."""
        none = [np.empty(0, dtype) for dtype in (np.uint64, np.int32, np.uint8)]
        return cls.holding(FEWEST_SLOTS, kernels.TAIL, none, np.zeros(1, np.int64))

    @classmethod
    def of(cls, ids: np.ndarray, places: np.ndarray, last_uses: Any, step: int) -> IdSlots:
        """The slots of ids with these places; ``last_uses`` are those of the last ones, no rows."""
        steps, of_each = moments_of(np.append(last_uses, step), step)
        moments = np.zeros(len(ids), np.uint8)
        moments[len(ids) - len(last_uses) :] = of_each[:-1]
        entries, n = (mixed(ids.view(np.uint64)), places, moments), cls.empty().enough_for(len(ids))
        return cls.holding(n, kernels.TAIL, entries, steps)

    def enough_for(self, entries: Any) -> int:
        """How many slots there are to be for so many entries."""
        if entries <= MOST_LOAD * self.n:
            return self.n
        # The estimate counts an id as often as it occurs; slots never double at once for that.
        enough = int(entries / _LOAD) if entries < 4_096 else 0
        return max(enough, int(max(1.5 * self.n, entries / MOST_LOAD + 1)))

    def resized(self, n: int) -> IdSlots:
        """A copy with ``n`` slots; where there are ``n`` already, the tail is twice as long."""
        tail = (len(self.places) - self.n) * (1 + (n == self.n))
        return self.holding(n, tail, self[:3], self.steps)

    def at(self, step: int) -> IdSlots:
        """The slots with a step, which is not below the last one, as the step of now."""
        steps, moments = self.steps, self.moments
        if step <= steps[-1]:
            return self
        if len(steps) == _MOMENTS:
            steps, of_each = moments_of(steps, step)
            moments = of_each[moments]
        return self._replace(steps=np.append(steps, step), moments=moments)

    def pending(self, now: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids that have no row, how often they have occurred, and in which step last."""
        waiting, (steps, moments) = np.flatnonzero(self.places < 0), moments_of(self.steps, now)
        ids = unmixed(self.hashes[waiting]).view(np.int64)
        return ids, -self.places[waiting], steps[moments[self.moments[waiting]]]


class IdRows(NamedTuple):
    """The rows of the table of a map."""

    ids: np.ndarray  # int64
    counts: np.ndarray  # int32; 0: no id has the row
    last_uses: np.ndarray  # int32
    free: np.ndarray  # int32: rows to be handed out, the next one last
    n_free: np.ndarray  # int64 (1,)
    next_row: np.ndarray  # int64 (1,): the first that was never handed out

    @classmethod
    def empty(cls, capacity: int) -> IdRows:
        """Rows of which none was handed out."""
        # Pages that nobody has written cost nothing.
        counts, last_uses, free = (np.zeros(capacity, np.int32) for _ in range(3))
        numbers = np.array([0], np.int64), np.array([1], np.int64)
        return cls(np.zeros(capacity, np.int64), counts, last_uses, free, *numbers)

    @classmethod
    def of(cls, capacity: int, state: Mapping[str, np.ndarray]) -> IdRows:
        """The rows of a state that was checked."""
        made, rows, n = cls.empty(capacity), state["rows"], int(state["next_row"][0])
        for name in ("ids", "counts", "last_uses"):
            getattr(made, name)[rows] = state[name]
        free = 1 + np.flatnonzero(made.counts[1:n] == 0)
        made.free[: len(free)] = free[::-1]
        made.n_free[0], made.next_row[0] = len(free), n
        return made

    def grown(self, capacity: int) -> IdRows:
        """A copy with more rows."""
        n, made = int(self.next_row[0]), self.empty(capacity)
        for new, old in zip(made[:4], self[:4], strict=True):
            new[:n] = old[:n]
        return made._replace(n_free=self.n_free, next_row=self.next_row)

    def in_use(self) -> np.ndarray:
        """The rows that ids have, ascending: int32."""
        return np.flatnonzero(self.counts[: int(self.next_row[0])]).astype(np.int32)


class UseQueue(NamedTuple):
    """Rows in the order of their last uses, and these.

    A row that was used since comes behind all of them, so the queue holds until it is empty.
    """

    rows: np.ndarray = NO_ROWS
    uses: np.ndarray = NO_ROWS

    @classmethod
    def of(cls, every: IdRows, step: int) -> UseQueue:
        """The rows that were used before a step, and not since."""
        rows = every.in_use()
        rows = rows[every.last_uses[rows] < step]
        rows = rows[np.argsort(every.last_uses[rows], kind="stable")]
        return cls(rows, every.last_uses[rows])

    def take(self, n: int, every: IdRows) -> tuple[np.ndarray, UseQueue]:
        """At most ``n`` rows that were not used since; and the queue that is left."""
        (rows, uses), begin, chosen = self, 0, NO_ROWS
        while len(chosen) < n and begin < len(rows):
            end = begin + 2 * n + FEWEST_SLOTS
            some = rows[begin:end]
            fits = (every.last_uses[some] == uses[begin:end]) & (every.counts[some] > 0)
            fitting = np.flatnonzero(fits)[: n - len(chosen)]
            chosen = np.concatenate((chosen, some[fitting]))
            begin = begin + int(fitting[-1]) + 1 if len(chosen) == n else end
        return chosen, UseQueue(rows[begin:], uses[begin:])


class Removals(NamedTuple):
    """Ids that have lost their rows, and in which steps."""

    ids: np.ndarray = _NO_IDS  # int64
    steps: np.ndarray = _NO_IDS  # int64
    forgotten: int = -1  # the last step of those that are no more among them; -1: there are none

    def with_more(self, ids: np.ndarray, step: int, most: int) -> Removals:
        """The ids with more behind them; of more than ``most`` the first are forgotten."""
        every = np.concatenate((self.ids, ids))
        steps = np.concatenate((self.steps, np.full(len(ids), step, np.int64)))
        more = max(0, len(every) - most)
        # Those of several processes are not in order.
        forgotten = int(steps[:more].max(initial=self.forgotten))
        return Removals(every[more:], steps[more:], forgotten)


def ids_of_64_bits(where: str, ids: Any, name: str = "ids") -> np.ndarray:
    """Ids as contiguous int64, the bits of unsigned ones as they are."""
    adopted = adopt(where, name, ids)
    if adopted.dtype not in (I64, np.dtype(np.uint64)):
        reject(TypeError, where, name, "have a wrong dtype", "int64 or uint64", adopted.dtype)
    made: np.ndarray = check.contiguous(adopted).view(np.int64)
    return made


def checked_state(where: str, state: Mapping[str, Any], capacity: int) -> dict[str, np.ndarray]:
    """Copies of the arrays of a state that a map with so many rows can have.

    Raises:
        KeyError, TypeError, ValueError: there is no such map.
    """
    check_kind(where, "state", state, Mapping, "a dict of arrays")
    if state.keys() | OPTIONAL != STATE.keys():
        reject(KeyError, where, "state", "has other names", [*STATE], [*state])
    # Copies: another thread may change what was checked.
    arrays = {name: np.array(adopt(where, name, state[name])) for name in STATE if name in state}
    for name, array in arrays.items():
        if array.dtype != STATE[name] or array.ndim != 1:
            got = f"{array.dtype}, {array.ndim} dimensions"
            reject(TypeError, where, name, "is another array", f"{STATE[name]} [n]", got)
    rows, pending = arrays["rows"], arrays["pending"]
    if "pending_last_uses" not in arrays:
        arrays["pending_last_uses"] = np.repeat(arrays["step"][:1], len(pending)).astype(np.int32)
    next_row, step = (sum(arrays[name][:1].tolist()) for name in ("next_row", "step"))
    ranges = {
        "rows": (1, next_row - 1), "counts": (1, MOST_STEPS), "last_uses": (0, step),
        "pending_counts": (1, MOST_STEPS), "next_row": (1, capacity), "step": (0, MOST_STEPS),
        "pending_last_uses": (0, step), "removed_steps": (0, step + 1), "forgotten": (-1, step + 1),
    }  # fmt: skip
    lengths = {
        "ids": len(rows), "counts": len(rows), "last_uses": len(rows), "next_row": 1, "step": 1,
        "pending_counts": len(pending), "removed_steps": len(arrays["removed"]), "forgotten": 1,
        "pending_last_uses": len(pending),
    }  # fmt: skip
    fits = (
        all(len(arrays[name]) == n for name, n in lengths.items())
        and all(((a <= arrays[k]) & (arrays[k] <= b)).all() for k, (a, b) in ranges.items())
        and (rows[:-1] < rows[1:]).all()  # differences may not fit int32
        and len(np.unique(np.concatenate((arrays["ids"], pending)))) == len(rows) + len(pending)
    )
    if not fits:
        expected = f"rows of a map of at most {capacity} rows, and different ids"
        reject(ValueError, where, "state", "does not fit", expected, "another")
    return arrays


def moments_of(steps: np.ndarray, now: int) -> tuple[np.ndarray, np.ndarray]:
    """At most 240 different steps, to which steps before now are rounded, and of each which it is.

    The last 14 are exact; others are the last of 2, 4, 8, ... steps, 7 times as many or more ago.
    It makes no difference whether they were rounded before.
    """
    steps = steps.astype(np.int64)
    for k in range(1, 29):
        steps = np.where(steps < ((now >> k) - 7) << k, steps | ((1 << k) - 1), steps)
    rounded, moments = np.unique(steps, return_inverse=True)
    return rounded, moments.astype(np.uint8)
