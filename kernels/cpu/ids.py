"""A map from 64-bit ids to rows: open addressing, in the order of the ids' hashes.

A slot has the hash of an id, from which the id follows, and a *place*: a row above 0, minus the
number of occurrences of an id that has no row yet, or 0 where it is empty. Beside it is a *moment*:
a byte that tells when an id without a row has occurred last. An id belongs to slot
``hash * slots >> 64`` or, if others are there, behind it. The hashes of a run of full slots ascend.
So the probes are those of Robin Hood hashing, a search ends at the first hash that is not smaller,
and the slots do not depend on the order in which ids came.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from ..inner import njit
from ..keeping import mixed
from .compiler.compile import part
from .compiler.intrinsics import as_pointer, prefetch_line
from .compiler.records import int64s

TAIL = 512
"""Slots behind the last to which an id may belong; more where chosen ids need more."""
PART = 4_096
"""Ids of a part of a search."""
_AHEAD = 12
_MOST = 2147483647
_EACH_DRAWN, _WORDS = 4_096, 4294967296.0


class IdCall(NamedTuple):
    """Arguments of the loops, all ``int64``."""

    hashes: int = 0  # uint64 [length]
    places: int = 0  # int32 [length]
    moments: int = 0  # uint8 [length]
    length: int = 0
    slots: int = 0  # those to which an id may belong
    row_ids: int = 0  # int64 [capacity]
    counts: int = 0  # int32 [capacity]
    last_uses: int = 0  # int32 [capacity]
    free: int = 0  # int32 [capacity]: n_free rows to be handed out, from the end
    n_free: int = 0  # int64 [1]
    next_row: int = 0  # int64 [1]: the first that was never handed out
    entries: int = 0  # int64 [1]: full slots
    n_removed: int = 0  # int64 [2]: ids without a row that were taken out, and with one
    capacity: int = 0
    after: int = 0  # admit an id at this occurrence
    chance: int = 0  # from then on with this chance in 2**32 at each; 2**32: always
    seed: int = 0
    most_entries: int = 0  # so many: more slots are needed
    most_pending: int = 0  # so many ids without a row: some are to be dropped
    # Of one call:
    ids: int = 0  # int64 [n]
    n: int = 0
    rows: int = 0  # int32 [n]: the places of ids; in the end 0 for one without a row
    n_missing: int = 0  # int64 [parts]: how many ids of each part have no row
    times: int = 0  # int64 [n]: how often each id occurs; 0: once
    step: int = 0
    out: int = 0  # int64 [4]: refused, ids done, 1: a slot lacks, 2: too many ids wait, admissions
    handed: int = 0  # int32 [n]: the rows of the admissions
    now: int = 0  # the moment of the step
    seen: int = 0  # uint8 [n]: the moments of entries


mixed_word = njit(inline="always")(mixed)


@njit(inline="always")
def _mixed(x):
    return mixed_word(np.uint64(x))  # of a signed one it would be another function


@njit(inline="always")
def _home(x, slots):
    # In place of ``x * slots >> 64``, which needs 128 bits; the order of hashes stays.
    return np.int64(((x >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))


@njit(inline="always")
def _slots(c):
    hashes = carray(as_pointer(c.hashes), c.length, np.uint64)
    places = carray(as_pointer(c.places), c.length, np.int32)
    return hashes, places, carray(as_pointer(c.moments), c.length, np.uint8)


@njit
def _find(hashes, places, slots, x):
    """The slot of a hash, or where it belongs."""
    i = _home(x, slots)
    while places[i] != 0 and hashes[i] < x:
        i += 1
    return i


@njit
def _empty_slot(places, i):
    """The next empty slot; 0 where there is none."""
    while places[i] != 0:
        i += 1
    return i if i < places.size - 1 else 0  # the last stays empty, so that searches end


@njit
def _insert(c, i, end, x, place, moment):
    """Put an entry into a slot; those up to the empty one move."""
    hashes, places, moments = _slots(c)
    # From the end: what is moved has left its slot before another entry comes there.
    while end > i:
        hashes[end], places[end] = hashes[end - 1], places[end - 1]
        moments[end] = moments[end - 1]
        end -= 1
    hashes[i], places[i], moments[i] = x, place, moment


@njit(inline="always")
def _fetch(c, hashes, places, k):
    i = _home(_mixed(int64s(c.ids, c.n)[k]), c.slots)
    prefetch_line(c.hashes + 8 * i)
    prefetch_line(c.places + 4 * i)


@njit(inline="always")
def _times(c, k):
    return np.int64(1) if c.times == 0 else min(int64s(c.times, c.n)[k], _MOST)


@njit(inline="always")
def _use(c, row, times):
    counts = carray(as_pointer(c.counts), c.capacity, np.int32)
    counts[row] = min(np.int64(counts[row]) + times, _MOST)
    carray(as_pointer(c.last_uses), c.capacity, np.int32)[row] = c.step


@part(IdCall)
def search(index, slot, c):
    """The places of a span of ids: each id is read once."""
    hashes, places, _ = _slots(c)
    ids, rows = int64s(c.ids, c.n), carray(as_pointer(c.rows), c.n, np.int32)
    begin, n = index * PART, 0
    end = min(begin + PART, c.n)
    for k in range(begin, end):
        # A search misses the caches once or twice: its lines are fetched so many ids before.
        if k + _AHEAD < end:
            _fetch(c, hashes, places, k + _AHEAD)
        x = _mixed(ids[k])
        i = _find(hashes, places, c.slots, x)
        # An empty slot keeps the hash of an entry that has left, so its place is asked first.
        rows[k] = places[i] if places[i] != 0 and hashes[i] == x else 0
        n += rows[k] <= 0
    int64s(c.n_missing, index + 1)[index] = n


@part(IdCall)
def count(index, slot, c):
    """Count the occurrences that have a row: on one thread."""
    rows = carray(as_pointer(c.rows), c.n, np.int32)
    for k in range(c.n):
        if k + _AHEAD < c.n:
            prefetch_line(c.counts + 4 * rows[k + _AHEAD])
            prefetch_line(c.last_uses + 4 * rows[k + _AHEAD])
        if rows[k] > 0:
            _use(c, rows[k], _times(c, k))


@njit
def _new_row(c):
    n_free, next_row = int64s(c.n_free, 1), int64s(c.next_row, 1)
    if n_free[0] > 0:
        n_free[0] -= 1
        return np.int64(carray(as_pointer(c.free), n_free[0] + 1, np.int32)[n_free[0]])
    if next_row[0] < c.capacity:
        next_row[0] += 1
        return next_row[0] - 1
    return np.int64(0)


@njit
def _is_admitted(c, x, before, times):
    key, first, last = x ^ _mixed(np.uint64(c.seed)), max(before + 1, c.after), before + times
    # A count ends at the largest number: from then on each step has draws of its own.
    above = np.int64(c.step) << 32 if before == _MOST else np.int64(0)
    m, n, refused = np.int64(first), np.int64(1), 1.0 - c.chance / _WORDS
    # The draw of an occurrence follows from the seed, the id and its number alone.
    while m + n <= last + 1:
        if np.int64(_mixed(key ^ np.uint64(above + m)) >> np.uint64(32)) < (1.0 - refused) * _WORDS:
            return True
        m += n
        if m >= first + _EACH_DRAWN:
            # From here on one draw stands for 2, 4, ... occurrences, with their joint chance.
            n, refused = 2 * n, refused * refused  # products alone are the same everywhere
    return False


@part(IdCall)
def admit(index, slot, c):
    """Give rows to the ids that have none, in the order in which they occur: on one thread.

    Where a slot lacks, or too many ids wait, it ends, and goes on in the next call.
    """
    hashes, places, moments = _slots(c)
    ids, rows = int64s(c.ids, c.n), carray(as_pointer(c.rows), c.n, np.int32)
    out, handed = int64s(c.out, 4), carray(as_pointer(c.handed), c.n, np.int32)
    entries, next_row, n_free = int64s(c.entries, 1), int64s(c.next_row, 1), int64s(c.n_free, 1)
    for k in range(out[1], c.n):
        x = _mixed(ids[k])
        i = _find(hashes, places, c.slots, x)
        is_known = places[i] != 0 and hashes[i] == x
        before, times = np.int64(0), _times(c, k)
        if is_known and places[i] > 0:  # admitted by an occurrence before
            rows[k] = places[i]
            _use(c, rows[k], times)
            continue
        end = i if is_known else _empty_slot(places, i)
        # No slot is empty, or too few. Nothing of this id has changed yet.
        if end < i or (not is_known and entries[0] >= c.most_entries):
            out[1], out[2] = k, 1
            return
        if is_known:
            before = -np.int64(places[i])
        occurrences = min(before + times, _MOST)
        row = _new_row(c) if _is_admitted(c, x, before, times) else np.int64(0)
        place = row if row > 0 else -occurrences
        if is_known:
            places[i], moments[i] = place, c.now
        elif row == 0 and entries[0] - (next_row[0] - 1 - n_free[0]) >= c.most_pending:
            for j in range(k, c.n):  # those that are to come in this call are dropped last
                i = _find(hashes, places, c.slots, _mixed(ids[j]))
                if hashes[i] == _mixed(ids[j]):
                    moments[i] = c.now
            out[1], out[2] = k, 2
            return
        else:
            _insert(c, i, end, x, place, c.now)
            entries[0] += 1
        rows[k] = row
        if row > 0:
            int64s(c.row_ids, c.capacity)[row] = ids[k]
            carray(as_pointer(c.counts), c.capacity, np.int32)[row] = occurrences
            carray(as_pointer(c.last_uses), c.capacity, np.int32)[row] = c.step
            handed[out[3]] = row
            out[3] += 1
        else:
            out[0] += times
    out[1] = c.n


@part(IdCall)
def find_admitted(index, slot, c):
    """The rows of ids that a later occurrence has admitted: on one thread."""
    hashes, places, _ = _slots(c)
    ids, rows = int64s(c.ids, c.n), carray(as_pointer(c.rows), c.n, np.int32)
    for k in range(c.n):
        if rows[k] == 0:
            x = _mixed(ids[k])
            i = _find(hashes, places, c.slots, x)
            if places[i] > 0 and hashes[i] == x:  # others wait, or were dropped
                rows[k] = places[i]
                int64s(c.out, 4)[0] -= _times(c, k)


@njit
def _give_back(c, rows, n):
    """Put rows, which ascend, among the free ones, which descend."""
    free, n_free = carray(as_pointer(c.free), c.capacity, np.int32), int64s(c.n_free, 1)
    # Merged from the back, into the room for more: nothing is overwritten before it is read.
    i, k = n_free[0] - 1, 0
    n_free[0] += n
    while k < n:
        if i >= 0 and free[i] < rows[k]:
            free[i + n - k] = free[i]
            i -= 1
        else:
            free[i + n - k] = rows[k]
            k += 1


@part(IdCall)
def remove(index, slot, c):
    """Take out ids, whose rows ascend; slots behind each move up: on one thread."""
    hashes, places, moments = _slots(c)
    ids, rows, n = int64s(c.ids, c.n), carray(as_pointer(c.rows), c.n, np.int32), 0
    for k in range(c.n):
        x = _mixed(ids[k])
        i = _find(hashes, places, c.slots, x)
        if places[i] == 0 or hashes[i] != x:
            continue
        row = places[i]
        int64s(c.n_removed, 2)[np.int64(row > 0)] += 1
        # No mark stays where an entry was: those behind move up, but none before its home.
        while places[i + 1] != 0 and _home(hashes[i + 1], c.slots) <= i:
            hashes[i], places[i] = hashes[i + 1], places[i + 1]
            moments[i] = moments[i + 1]
            i += 1
        places[i] = 0
        int64s(c.entries, 1)[0] -= 1
        if row > 0:
            int64s(c.row_ids, c.capacity)[row] = 0
            carray(as_pointer(c.counts), c.capacity, np.int32)[row] = 0
            carray(as_pointer(c.last_uses), c.capacity, np.int32)[row] = 0
            rows[n] = row
            n += 1
    _give_back(c, rows, n)


@part(IdCall)
def place(index, slot, c):
    """Put entries into empty slots: ``ids`` are hashes, ``rows`` places, 0 for none."""
    hashes, places, _ = _slots(c)
    ids, rows = int64s(c.ids, c.n), carray(as_pointer(c.rows), c.n, np.int32)
    seen = carray(as_pointer(c.seen), c.n, np.uint8)
    for k in range(c.n):
        if k + _AHEAD < c.n:
            i = _home(np.uint64(ids[k + _AHEAD]), c.slots)
            prefetch_line(c.hashes + 8 * i)
            prefetch_line(c.places + 4 * i)
        if rows[k] != 0:
            x = np.uint64(ids[k])
            i = _find(hashes, places, c.slots, x)
            end = _empty_slot(places, i)
            if end < i:
                int64s(c.out, 4)[2] = 1
                return
            _insert(c, i, end, x, rows[k], seen[k])
