"""Rows of ids of one or several maps: found, counted and handed out together."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from operator import methodcaller
from typing import Any

import numpy as np

from ....kernels.cpu import ids as kernels
from ....kernels.cpu.threads.beside import run_beside
from ....kernels.cpu.threads.parallel import get_num_threads
from ....ops.runtime.arrays import addresses_of
from ....ops.runtime.errors import reject
from .id_arrays import NO_ROWS, Admissions, UseQueue

NO_ADMISSIONS = Admissions(NO_ROWS, np.empty(0, np.int64), 0, NO_ROWS)
_SERIAL_BELOW = 8_192  # ids

# One compiled call changes slots, rows and counts, or one assignment replaces them. So whatever
# raises between two of Python's instructions leaves maps that are in order.


@contextmanager
def locked(maps: Sequence[Any]) -> Iterator[None]:
    """A context in which no other thread calls these maps."""
    taken: list[Any] = []
    locks = [id_map._lock for id_map in sorted(maps, key=id)]  # no two threads wait for each other
    # One call of C takes all locks, and one gives them back: no interrupt comes in between.
    taking = map(taken.append, filter(methodcaller("acquire"), locks))
    giving_back = map(methodcaller("release"), taken)
    try:
        deque(taking, 0)
        yield
    finally:
        deque(giving_back, 0)


class Lookup:
    """Ids of some maps, the ids of one behind those of the other; what calls have found.

    Args:
        maps: different `IdMap`, whose locks the caller has.
        bounds: where the ids of each map begin, and the end of all.
        steps: of each map the number of the step, which was checked.
        ids: int64; another thread may change them.
        times: how often each id occurs, int64; None: once.

    Attributes:
        rows: int32: of each id its row, or 0 or less where it has none.
        are_found: whether all ids have rows.
    """

    def __init__(
        self, maps: Sequence[Any], bounds: Sequence[int], steps: Sequence[int], ids: Any,
        times: Any = None,
    ) -> None:  # fmt: skip
        self._maps, self._ids, self._bounds, self._steps = maps, ids, bounds, steps
        self._times, self.rows = times, np.empty(len(ids), np.int32)
        self._threads = 1 if len(ids) < _SERIAL_BELOW else get_num_threads()
        parts = [-(-(end - begin) // kernels.PART) for begin, end in pairwise(bounds)]
        firsts = [*accumulate(parts, initial=0)]
        n_missing = np.zeros(firsts[-1], np.int64)
        at_ids, at_rows, at_missing = addresses_of((ids, self.rows, n_missing))
        at_times = 0 if times is None else addresses_of((times,))[0]
        self._calls = [
            array("q", (
                *id_map.bound(), at_ids + 8 * begin, end - begin, at_rows + 4 * begin,
                at_missing + 8 * first, at_times and at_times + 8 * begin, step, 0, 0, 0, 0,
            ))
            for id_map, (begin, end), first, step in zip(
                maps, pairwise(bounds), firsts, steps, strict=False
            )
        ]  # fmt: skip
        self._run(kernels.search, parts, self._calls)
        self.are_found = not n_missing.any()

    def _run(self, loop: Any, parts: Sequence[int], calls: Sequence[array[int]]) -> None:
        if any(parts):
            run_beside(loop, parts, [call.buffer_info()[0] for call in calls], self._threads)

    def admit(self, begin: Callable[[Sequence[tuple[int, Admissions]]], Any] | None) -> None:
        """Count the ids, and give rows to those that have none.

        Args:
            begin: called with the numbers of maps, and what these have handed out, if any rows
                were. If it raises, or an interrupt comes before its end, they are given back.

        Raises:
            ValueError: more new ids than rows. Nothing has changed then.
        """
        maps, every = self._maps, [*range(len(self._maps))]
        new = _NewIds(self) if not self.are_found else None
        lacks = [] if new is None else [new.n_to_evict(k) for k in every]
        for id_map, step in zip(maps, self._steps, strict=True):
            id_map.step, id_map.last = step, NO_ADMISSIONS
        if len(self._ids):
            self._run(kernels.count, [1] * len(maps), self._calls)
        if new is None:
            return
        try:
            evicted = [new.evicted(k, n) if n else NO_ROWS for k, n in enumerate(lacks)]
            new.admit()
            self.rows[new.places] = new.rows
            for k in every:
                rows = new.handed_out(k)
                ids = maps[k].ids_of(rows)
                maps[k].last = Admissions(rows, ids, int(new.out[k, 0]), evicted[k])
            begun = [(k, maps[k].last) for k in every if len(maps[k].last.rows)]
            if begin is not None and begun:
                begin(begun)
        except BaseException:  # nobody has got them
            for k in every:
                maps[k].take_back(new.handed_out(k), self._steps[k])
            raise


def rows_of_maps(
    maps: Sequence[Any], ids: np.ndarray, bounds: Sequence[int], steps: Sequence[int | None],
    begin: Callable[[Sequence[tuple[int, Admissions]]], Any] | None,
    times: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The rows of ids, int32; 0 for none. Arguments are those of `Lookup` and of its `admit`.

    In a map whose step is None nothing is admitted. A map may occur twice: tables can share one.
    """
    rows, every = np.empty(len(ids), np.int32), range(len(maps))
    lookups = [[k for k in every if (steps[k] is not None) is admits] for admits in (False, True)]
    if len({*maps}) < len(maps):
        lookups = [[k] for k in every]  # one after the other
    for chosen in filter(None, lookups):
        spans = [(bounds[k], bounds[k + 1]) for k in chosen]
        is_whole = len(chosen) == len(maps)
        lists = [
            x if is_whole or x is None else np.concatenate([x[a:b] for a, b in spans])
            for x in (ids, times)
        ]
        ends = [*accumulate((b - a for a, b in spans), initial=0)]
        own_steps = [steps[k] or 0 for k in chosen]
        lookup = Lookup([maps[k] for k in chosen], ends, own_steps, *lists)
        if steps[chosen[0]] is not None:
            lookup.admit(None if begin is None else partial(begin_by_key, begin, chosen))
        else:
            np.maximum(lookup.rows, 0, out=lookup.rows)
        for (a, b), (c, d) in zip(spans, pairwise(ends), strict=True):
            rows[a:b] = lookup.rows[c:d]
    return rows


def begin_by_key(
    begin: Callable[[Sequence[tuple[Any, Admissions]]], Any], keys: Sequence[Any],
    new: Sequence[tuple[int, Admissions]],
) -> None:  # fmt: skip
    """Call ``begin`` with the keys of maps in place of their numbers."""
    begin([(keys[k], admissions) for k, admissions in new])


class _NewIds:
    """The ids of a lookup that have no row.

    Attributes:
        places: their places in the lookup.
        rows: int32: their rows; 0 for none.
        out: int64 ``[maps, 4]``: as `kernels.IdCall.out`.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._maps, self._steps, self._run = lookup._maps, lookup._steps, lookup._run
        self.places = np.flatnonzero(lookup.rows <= 0)
        self._ids = lookup._ids[self.places]
        self._times = None if lookup._times is None else lookup._times[self.places]
        self._bounds = np.searchsorted(self.places, lookup._bounds).tolist()
        self._spans = [slice(*span) for span in pairwise(self._bounds)]
        self.rows, self._handed = np.empty((2, len(self._ids)), np.int32)
        self.out = np.zeros((len(self._maps), 4), np.int64)

    def handed_out(self, k: int) -> np.ndarray:
        """The rows that a map has handed out."""
        begin = self._bounds[k]
        return self._handed[begin : begin + int(self.out[k, 3])].copy()

    def n_to_evict(self, k: int) -> int:
        """How many rows a map has to give back for new ids, where it does not raise then."""
        id_map, span = self._maps[k], self._spans[k]
        ids, room = self._ids[span], int(id_map.capacity - 1 - len(id_map))
        if id_map.full == "reserved" or len(ids) <= room:
            return 0
        each, inverse = np.unique(ids, return_inverse=True)
        places = Lookup([id_map], [0, len(each)], [0], each).rows
        times = None if self._times is None else self._times[span]
        seen = np.bincount(inverse, times, len(each)) - places
        more = int(((seen >= id_map.after) & (places <= 0)).sum()) - room
        if more > 0 and id_map.full == "raise":
            expected = f"{room} new ids: so many rows are free"
            reject(ValueError, "IdMap", "ids", "do not fit", expected, room + more)
        return max(more, 0)

    def evicted(self, k: int, n: int) -> np.ndarray:
        """Rows that a map has given back: as many, or fewer, ascending, none of this step."""
        id_map, step = self._maps[k], self._steps[k]
        rows, id_map._queue = id_map._queue.take(n, id_map._rows)
        if len(rows) < n:
            # Rows of the same step may be those of other calls, before the same backward.
            rows, id_map._queue = UseQueue.of(id_map._rows, step).take(n, id_map._rows)
        rows = np.sort(rows)
        if len(rows):
            id_map.evictions += 1
            id_map._free_rows(rows, step)
        return rows

    def admit(self) -> None:
        """Let all maps hand out rows, in the order in which ids occur."""
        at_ids, at_rows, at_handed, at_out = addresses_of(
            (self._ids, self.rows, self._handed, self.out)
        )
        at_times = 0 if self._times is None else addresses_of((self._times,))[0]
        calls: list[array[int]] = [array("q")] * len(self._maps)
        waiting = [k for k, span in enumerate(self._spans) if span.start < span.stop]
        for k in waiting:
            self._maps[k].begin_step(self._steps[k])
        while waiting:
            for k in waiting:
                id_map, (begin, end) = self._maps[k], self._bounds[k : k + 2]
                now = id_map.with_room(end - begin, int(self.out[k, 2]))
                self.out[k, 2] = 0
                calls[k] = array("q", (
                    *id_map.bound(), at_ids + 8 * begin, end - begin, at_rows + 4 * begin, 0,
                    at_times and at_times + 8 * begin, self._steps[k], at_out + 32 * k,
                    at_handed + 4 * begin, now, 0,
                ))  # fmt: skip
            self._run(kernels.admit, [1] * len(waiting), [calls[k] for k in waiting])
            waiting = [k for k in waiting if self.out[k, 1] < self._bounds[k + 1] - self._bounds[k]]
        refusing = [
            k for k, m in enumerate(self._maps)
            if self.out[k, 0] and (m.after > 1 or m.chance < 1.0)
        ]  # fmt: skip
        self._run(kernels.find_admitted, [1] * len(refusing), [calls[k] for k in refusing])
