"""IdMap: rows for ids of 64 bits, which come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from ....kernels.cpu import ids as kernels
from ....kernels.cpu.threads.parallel import Arguments, Loop, run_all
from ....ops.runtime import check
from ....ops.runtime.errors import reject
from ..arguments import count, positive_int
from ..arguments import seed as checked_seed
from .admission import NO_ADMISSIONS, Lookup
from .id_arrays import (
    FEWEST_SLOTS,
    MOST_LOAD,
    STATE,
    Changes,
    IdRows,
    IdSlots,
    Removals,
    TooManyChangesError,
    UseQueue,
    checked_state,
    ids_of_64_bits,
)
from .id_arrays import Admissions as Admissions

_FULL = ("reserved", "raise", "evict")
_LARGEST = (1 << 31) - 1


class IdMap:
    """A map from ids of 64 bits to the rows of a table, with admission and eviction.

    Row 0 is *reserved*: ids without a row read it. Their gradient belongs to nobody: leave out what
    has row 0. The other rows are handed out in the order in which ids first occur, the lowest
    first, so they are the same for any number of threads. Threads may share a map: their calls
    happen one after the other.

    Args:
        capacity: the rows of the table, the reserved one included; from 2 to 2**31 - 1.
        after: an id gets a row at this occurrence; 1: at the first.
        chance: at each occurrence from then on it gets one with this chance, in (0, 1]. The draw
            follows from seed, id and count; where the count has ended, at 2**31 - 1, from the step
            too. Above 4,096 occurrences of one of the ``times`` a draw is for 2, then 4, 8, ... of
            them, with the chance of all.
        seed: of these draws, an int from 0 to 2**63 - 1.
        full: what becomes of new ids when all rows are taken: ``"reserved"``: they read row 0;
            ``"raise"``: a call with one raises, and nothing is admitted; ``"evict"``: the rows that
            were used least recently are given to them, of equals the lowest, but none that the same
            step uses. For both, with a chance below 1, ids that might be admitted count.
        pending: the most ids without a row whose occurrences are counted, at least 1; each takes up
            to 31 bytes. Before one more comes an eighth is dropped, as are those above it of a
            state: the ids that have not occurred for longest, as `evict` knows it; of equals, those
            of the lowest hashes. None: no limit.
        remembered: how many ids `changed_since` remembers that have lost their rows, an int from 0;
            None: a quarter as many as the table has rows, at least 1,024.

    Attributes:
        capacity: as given, or as it has grown.
        last: `Admissions` of the last call.
        step: the step of that call.
        evictions: how often rows were given back.
        ids, rows, counts, ...: copies of the arrays of `state_dict`, by names that are free.

    Raises:
        TypeError, ValueError: an argument does not fit.

    >>> ids = IdMap(4)
    >>> ids(np.array([700, -5, 700, 9, 12]), step=1).tolist()
    [1, 2, 1, 3, 0]
    >>> ids.find(np.array([[9], [8]])).tolist()
    [[3], [0]]
    >>> ids(np.array([9, 9]), step=5).tolist()
    [3, 3]
    >>> ids.evict(unused_for=3).tolist(), ids(np.array([12]), step=6).tolist()
    ([1, 2], [1])
    """

    _is_part = False  # whether other processes have ids of the same table

    def __init__(
        self, capacity: int, *, after: int = 1, chance: float = 1.0, seed: int = 0,
        full: str = "reserved", pending: int | None = None, remembered: int | None = None,
    ) -> None:  # fmt: skip
        where = "IdMap"
        for name, n, least in (("capacity", capacity, 2), ("after", after, 1)):
            count(where, name, n)
            check.in_range(where, name, n, least <= n <= _LARGEST, f"{least} to 2**31 - 1")
        self.chance = check.scalar(where, "chance", chance)
        check.in_range(where, "chance", self.chance, 0.0 < self.chance <= 1.0, "in (0, 1]")
        if full not in _FULL:
            reject(ValueError, where, "full", "is unknown", _FULL, full)
        self.pending = None if pending is None else positive_int(where, "pending", pending)
        self.remembered = None if remembered is None else count(where, "remembered", remembered)
        self.capacity, self.after, self.full = int(capacity), int(after), full
        self.seed = checked_seed(where, "seed", seed)
        self._lock = threading.RLock()
        self._rows = IdRows.empty(self.capacity)
        self.step, self.evictions = 0, 0
        self._n_removed, self._entries = np.zeros(2, np.int64), np.zeros(1, np.int64)
        self._queue, self._removed = UseQueue(), Removals()
        self._slots = IdSlots.empty()
        self._bound: tuple[int, ...] | None = None  # addresses of what the map has
        self.last = NO_ADMISSIONS

    def __len__(self) -> int:
        """The number of ids that have a row."""
        with self._lock:
            return int(self._rows.next_row[0] - 1 - self._rows.n_free[0])

    def __repr__(self) -> str:
        numbers = ", ".join(f"{n} {name}" for name, n in self.statistics().items())
        return f"IdMap({self.capacity - 1} rows: {numbers})"

    def statistics(self) -> dict[str, int]:
        """Numbers of ids; those of ``evicted`` and ``dropped`` begin anew with a loaded state.

        Returns:
            ``admitted``: ids that have a row; ``evicted``: rows that were given back; ``pending``:
            ids without a row whose occurrences are counted; ``dropped``: such that were forgotten.

        >>> ids = IdMap(4, after=2, pending=2)
        >>> ids(np.array([7, 7, 8, 9, 5, 6]), step=1).tolist(), ids
        ([1, 1, 0, 0, 0, 0], IdMap(3 rows: 1 admitted, 0 evicted, 2 pending, 2 dropped))
        """
        with self._lock:
            n, (dropped, evicted) = len(self), self._n_removed.tolist()
            waiting = int(self._entries[0]) - n
        return {"admitted": n, "evicted": evicted, "pending": waiting, "dropped": dropped}

    if not TYPE_CHECKING:  # of no name that is wrong

        def __getattr__(self, name: str) -> np.ndarray:
            if name not in STATE:
                raise AttributeError(f"IdMap has no attribute {name!r}")
            if self._is_part:
                wrong, fix = "ids of several processes share names", "save each process's by itself"
                raise RuntimeError(f"IdMap: {wrong} in a state dict: {fix}, in a file of its own")
            return self.state_dict()[name]

    def __getstate__(self) -> dict[str, Any]:
        # Also `copy.copy` makes a map of its own.
        with self._lock:
            kept = {k: x for k, x in vars(self).items() if k != "_lock"}
            arrays = {k: x.copy() for k, x in kept.items() if isinstance(x, np.ndarray)}
            parts: Any = self._slots, self._rows
            slots, rows = (part._make(map(copy, part)) for part in parts)
        return {**kept, **arrays, "_slots": slots, "_rows": rows, "_bound": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

    # Rows

    def __call__(
        self, ids: Any, step: int, *, times: Any = None,
        begin: Callable[[Admissions], Any] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The rows of ids, which are admitted and counted.

        All occurrences of an id in a call have the same row.

        Args:
            ids: int64 or uint64 of any shape; negative ones are ids too.
            step: the number of the step, not below that of the call before; to 2**31 - 1.
            times: int64 of the shape of the ids: how often each occurs, at least once; default
                once, as often as it is there.
            begin: called with `last` if rows were handed out, before another thread gets them: to
                let their weights and states begin anew (`reset_rows`). If it raises, or an
                interrupt comes before its end, they are given back.

        Returns:
            int32 of the shape of the ids.

        Raises:
            TypeError: ids, or times, of another dtype.
            ValueError: a step that goes back, times that do not fit, or more new ids than rows,
                with ``full="raise"``.
            Nothing has changed then.
        """
        where, checked = "IdMap", ids_of_64_bits("IdMap", ids)
        if times is not None:
            times = ids_of_64_bits(where, times, "times").copy()  # other threads may change theirs
            if times.shape != checked.shape or (times.size and times.min() < 1):
                expected = f"{checked.shape}, at least 1"
                reject(ValueError, where, "times", "do not fit the ids", expected, times.shape)
            times = times.reshape(-1)
        with self._lock:
            self.check_step(step)
            bounds = [0, checked.size]
            lookup = Lookup([self], bounds, [int(step)], checked.reshape(-1), times)
            lookup.admit(None if begin is None else lambda new: begin(new[0][1]))
        return lookup.rows.reshape(checked.shape)

    def check_step(self, step: Any) -> None:
        """Refuse the number of a step that is none, or below that of the last call."""
        count("IdMap", "step", step)
        is_next = self.step <= step <= _LARGEST
        check.in_range("IdMap", "step", step, is_next, f"from {self.step} to 2**31 - 1")

    def find(self, ids: Any) -> np.ndarray:
        """The rows of ids, without admission and counts: for evaluation.

        Args:
            ids: as for a call.

        Returns:
            int32 of the shape of the ids; 0 for an id that has no row.

        Raises:
            TypeError: ids of another dtype.
        """
        checked = ids_of_64_bits("IdMap.find", ids)
        with self._lock:
            rows = Lookup([self], [0, checked.size], [0], checked.reshape(-1)).rows
        looked: np.ndarray = np.maximum(rows, 0).reshape(checked.shape)
        return looked

    def bound(self) -> tuple[int, ...]:
        """The first fields of `kernels.IdCall`: what the map has, and its options."""
        if self._bound is None:
            arrays = (
                *self._slots[:3], len(self._slots.places), self._slots.n,
                *self._rows, self._entries, self._n_removed,
            )  # fmt: skip
            chance, most = max(1, round(self.chance * 2.0**32)), int(MOST_LOAD * self._slots.n)
            limit = min(self.pending or _LARGEST, _LARGEST)
            numbers = self.capacity, self.after, chance, self.seed, most, limit
            self._bound = (*Arguments(arrays).words, *numbers)
        return self._bound

    # What `Lookup` asks for

    def ids_of(self, rows: np.ndarray) -> np.ndarray:
        """The ids that have these rows."""
        ids: np.ndarray = self._rows.ids[rows]
        return ids

    def begin_step(self, step: int) -> None:
        """Have the moment of a step."""
        slots = self._slots.at(step)
        if slots.moments is not self._slots.moments:
            self._bound = None
        self._slots = slots

    def with_room(self, n: int, lacks: int) -> int:
        """Have room for ids without a row; the moment of the step.

        Args:
            n: how many there are.
            lacks: `kernels.IdCall.out` of the call that had too little.
        """
        slots, more = self._slots, 1 if self.pending else n
        enough = slots.enough_for(self._entries[0] + more)
        if lacks == 2:
            self._drop_oldest(max(1, int(self.pending or 0) // 8))
        elif enough > slots.n or lacks:
            vars(self).update(_slots=slots.resized(enough), _bound=None)  # in one instruction
        return len(self._slots.steps) - 1

    def take_back(self, rows: np.ndarray, step: int) -> None:
        """Give back rows that were handed out for nobody."""
        self._queue, rows = UseQueue(), rows[self._rows.counts[rows] > 0]
        self._free_rows(rows, step)
        self._n_removed[1] -= len(rows)

    # Eviction

    def evict(
        self, *, unused_for: int | None = None, seen_less_than: int | None = None,
        keep: Any = None, forget_pending: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Give rows back that are not used; `reset_rows` them when they are handed out again.

        Args:
            unused_for: rows that no call has used in the last so many steps. Ids without a row that
                have not occurred in them are forgotten, too; for more than 14 steps, up to a sixth
                of the steps later.
            seen_less_than: and (if both are given) ids that have occurred less often than that.
            keep: int64 or uint64: ids that stay.
            forget_pending: whether to forget the counts of ids that have no row yet.

        Returns:
            int32: the rows that are free now, ascending. New ids get the lowest first.

        Raises:
            TypeError: a kind or dtype does not fit.
            ValueError: neither bound is given, or one is negative.
        """
        where = "IdMap.evict"
        if unused_for is None and seen_less_than is None and not forget_pending:
            reject(ValueError, where, "unused_for", "is missing", "it or seen_less_than", None)
        kept = None if keep is None else ids_of_64_bits(where, keep).reshape(-1)
        check.flag(where, "forget_pending", forget_pending)
        for name, bound in (("unused_for", unused_for), ("seen_less_than", seen_less_than)):
            if bound is not None:
                count(where, name, bound)

        def are_old(last_uses: np.ndarray, counts: np.ndarray) -> np.ndarray:
            is_old = np.full(len(counts), unused_for is not None or seen_less_than is not None)
            if unused_for is not None:
                is_old &= self.step - last_uses >= unused_for
            return is_old if seen_less_than is None else is_old & (counts < seen_less_than)

        with self._lock:
            chosen: np.ndarray = self._rows.in_use()
            waiting, counts, seen = self._slots.pending(self.step)
            chosen = chosen[are_old(self._rows.last_uses[chosen], self._rows.counts[chosen])]
            is_old = are_old(seen, counts) & (unused_for is not None) | forget_pending
            if kept is not None:
                chosen = chosen[~np.isin(self._rows.ids[chosen], kept)]
                is_old &= ~np.isin(waiting, kept)
            if len(chosen):
                self.evictions += 1
                self._free_rows(chosen, self.step + 1)
            self._remove(waiting[is_old])
        return chosen

    def _free_rows(self, rows: np.ndarray, step: int) -> None:
        """Give back rows in use, which ascend."""
        ids, most = self._rows.ids[rows], self.remembered
        most = max(FEWEST_SLOTS, self.capacity // 4) if most is None else most
        self._removed = self._removed.with_more(ids, step, most)
        self._remove(ids)

    def _remove(self, ids: np.ndarray) -> None:
        """Forget ids, and give back their rows, which ascend."""
        if len(ids):
            last = (0,) * 7  # fields of other loops
            call = Arguments((*self.bound(), ids, len(ids), np.empty(len(ids), np.int32), *last))
            run_all((Loop.of(kernels.remove, 1, call.address, 1),))

    def _drop_oldest(self, n: int) -> None:
        """Forget so many ids that have no row, those that have not occurred for longest."""
        ids, _, seen = self._slots.pending(self.step)
        self._remove(ids[np.sort(np.argsort(seen, kind="stable")[:n])])  # as the slots are

    # State

    def grow(self, capacity: int) -> None:
        """Have more rows; the table grows by `FusedOptimizer.grow`.

        Args:
            capacity: as for the class, and above that of now.

        Raises:
            TypeError, ValueError: it is not.
        """
        where = "IdMap.grow"
        count(where, "capacity", capacity)
        with self._lock:
            is_more, expected = self.capacity < capacity <= _LARGEST, f"{self.capacity} < n < 2**31"
            check.in_range(where, "capacity", capacity, is_more, expected)
            rows, n = self._rows.grown(capacity), int(capacity)
            vars(self).update(_rows=rows, capacity=n, _bound=None)  # in one instruction

    def _begin_seed(self, seed: int) -> None:
        """Draw admissions from another seed from now on."""
        with self._lock:
            self.seed, self._bound = seed, None

    def holds(self, ids: np.ndarray, rows: np.ndarray) -> bool:
        """Whether ids still have the rows that a call or `find` gave them; 0 is nobody's."""
        flat, rows = ids.reshape(-1).view(np.int64), rows.reshape(-1)
        with self._lock:
            return bool(((rows == 0) | (self._rows.ids[rows] == flat)).all())

    def changed_since(self, step: int) -> Changes:
        """The rows and ids to send to a copy of the table that is as it was after a step.

        Args:
            step: the number of that step, as the calls have numbered it. What was used in step 0
                alone is never among the changes: number steps from 1.

        Raises:
            TooManyChangesError: more ids have lost their rows since than are ``remembered``.
            TypeError, ValueError: it is no int from 0 to the step of the map.
        """
        where = "IdMap.changed_since"
        count(where, "step", step)
        with self._lock:
            check.in_range(where, "step", step, step <= self.step, f"at most {self.step}")
            if step < (least := self._removed.forgotten):
                wrong, fix = "is before removals that are forgotten", "; send the whole table"
                reject(TooManyChangesError, where, "step", wrong, f"at least {least}", step, fix)
            rows = self._rows.in_use()
            rows = rows[self._rows.last_uses[rows] > step]
            removed = np.unique(self._removed.ids[self._removed.steps > step])
            return Changes(self._rows.ids[rows], rows, removed[self.find(removed) == 0])

    def rows_of_ids(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All ids that have a row: ids (int64), rows, counts and steps of last use (int32)."""
        with self._lock:
            rows = self._rows.in_use()
            return self._rows.ids[rows], rows, self._rows.counts[rows], self._rows.last_uses[rows]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Plain arrays of all that a resumed run needs, but for the arguments."""
        with self._lock:
            ids, rows, counts, last_uses = self.rows_of_ids()
            pending, occurrences, seen = self._slots.pending(self.step)
            removed, steps, forgotten = self._removed
            rest: Any = self._rows.next_row, [self.step], removed, steps, [forgotten]
            arrays: Any = ids, rows, counts, last_uses, pending, occurrences, seen, *rest
            each = zip(STATE.items(), arrays, strict=True)
            return {name: np.array(x, dtype) for (name, dtype), x in each}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, after checking all of it.

        Raises:
            KeyError, TypeError, ValueError: it is none, or of another capacity. Nothing has changed
                then.
        """
        with self._lock:
            self.take_over(self.loaded("IdMap.load_state_dict", state))

    def loaded(self, where: str, state: Mapping[str, Any]) -> IdMap:
        """A map with the arguments of this one that has a `state_dict`.

        Raises:
            KeyError, TypeError, ValueError: there is none.
        """
        made = IdMap(
            self.capacity, after=self.after, chance=self.chance, seed=self.seed, full=self.full,
            pending=self.pending, remembered=self.remembered,
        )  # fmt: skip
        capacity, arrays = made.capacity, checked_state(where, state, made.capacity)
        rows, ids = arrays["rows"], np.concatenate((arrays["ids"], arrays["pending"]))
        last, step = arrays["pending_last_uses"], int(arrays["step"][0])
        places = np.concatenate((rows, -arrays["pending_counts"]))
        made._slots, made._rows = IdSlots.of(ids, places, last, step), IdRows.of(capacity, arrays)
        made._removed = Removals(
            arrays["removed"], arrays["removed_steps"], int(arrays["forgotten"][0])
        )
        made.step, made._entries[0] = step, len(ids)
        made._drop_oldest(max(0, len(last) - (self.pending or _LARGEST)))
        return made

    def take_over(self, made: IdMap) -> None:
        """Have the ids of another map, which is of no use then."""
        with self._lock:
            if made.capacity < self.capacity:  # another thread has let this one grow
                made.grow(self.capacity)
            # Rows of before may be those of other ids now.
            kept = {"_lock": self._lock, "evictions": self.evictions + 1}
            vars(self).update({**vars(made), **kept})
