"""IdMap against a dict, over random sequences; admission, eviction, resume, adversarial ids."""

import copy
import pickle
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
import fusestep
from fusestep.kernels.cpu import ids as kernels
from fusestep.kernels.keeping import unmixed
from fusestep.nn.base.ids.id_map import IdMap, TooManyChangesError
from helpers import at_once, meanwhile, more
from test_interrupts import done_at, interrupt

ALL = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finalizer of splitmix64, in integers of Python."""
    x = (x + 0x9E3779B97F4A7C15) & ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ALL
    return x ^ (x >> 31)


def rounded(step: int, now: int) -> int:
    """The step in which an id without a row occurred, as it is known later."""
    for k in range(30, 0, -1):  # blocks of 2**k steps, 7 whole ones ago
        if step >> k < (now >> k) - 7:
            return step | ((1 << k) - 1)
    return step


class Model:
    """A map in plain Python."""

    def __init__(
        self, capacity: int, after: int, chance: float, seed: int, full: str, pending: int | None
    ) -> None:
        self.capacity, self.after, self.chance, self.seed = capacity, after, chance, seed
        self.full, self.step, self.pending, self.lost = full, 0, pending, [0, 0]
        self.rows: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.removed: dict[int, int] = {}
        self.free = [*range(1, capacity)]

    def admits(self, i: int, count: int) -> bool:
        drawn = mixed(mixed(i & ALL) ^ mixed(self.seed) ^ count) >> 32
        return count >= self.after and drawn < round(self.chance * 2.0**32)

    def call(self, ids: list[int], step: int, times: list[int]) -> list[int]:
        new = [i for i in dict.fromkeys(ids) if i not in self.rows]
        every = [i for i, n in zip(ids, times, strict=True) for _ in range(n)]
        new = [i for i in new if self.counts.get(i, 0) + every.count(i) >= self.after]
        if self.full == "raise" and len(new) > len(self.free):
            raise ValueError
        if self.full == "evict" and len(new) > len(self.free):
            others = [i for i in self.rows if i not in ids and self.last[i] < step]
            others.sort(key=lambda i: (self.last[i], self.rows[i]))
            self.drop(others[: len(new) - len(self.free)], step)
        self.step = step
        self.last |= {i: step for i in self.waiting() if i in ids}
        for i, n in zip(ids, times, strict=True):
            before = self.counts.get(i, 0)
            is_admitted = any(self.admits(i, k) for k in range(before + 1, before + n + 1))
            if i not in self.rows and is_admitted and self.free:
                self.rows[i] = self.free.pop(0)
            elif not before and len(self.waiting()) == self.pending:
                self.forget(self.oldest()[: max(1, self.pending // 8)])
            self.counts[i], self.last[i] = before + n, step
        return [self.rows.get(i, 0) for i in ids]

    def waiting(self) -> list[int]:
        return [i for i in self.counts if i not in self.rows]

    def oldest(self) -> list[int]:
        return sorted(
            self.waiting(), key=lambda i: (rounded(self.last[i], self.step), mixed(i & ALL))
        )

    def forget(self, ids: list[int]) -> None:
        self.lost[0] += len(ids)
        for i in ids:
            del self.counts[i]

    def drop(self, ids: list[int], step: int) -> list[int]:
        self.lost[1] += len(ids)
        rows = sorted(self.rows.pop(i) for i in ids)
        for i in ids:
            del self.counts[i]
            self.removed[i] = step
        self.free = sorted(self.free + rows)
        return rows

    def evict(self, unused: int | None, seen: int | None, keep: set[int]) -> list[int]:
        self.forget([
            i for i in self.waiting()
            if unused is not None and self.step - rounded(self.last[i], self.step) >= unused
            and (seen is None or self.counts[i] < seen) and i not in keep
        ])  # fmt: skip
        return self.drop([
            i for i in self.rows
            if (unused is None or self.step - self.last[i] >= unused)
            and (seen is None or self.counts[i] < seen) and i not in keep
        ], self.step + 1)  # fmt: skip


def assert_equal(ids: IdMap, model: Model) -> None:
    """The same rows, counts and steps of last use, by id."""
    known, rows, counts, last = (a.tolist() for a in ids.rows_of_ids())
    assert dict(zip(known, rows, strict=True)) == model.rows
    assert len(ids) == len(model.rows)
    for i, count, used in zip(known, counts, last, strict=True):
        assert (count, used) == (model.counts[i], model.last[i])
    state = ids.state_dict()
    names = "pending", "pending_counts", "pending_last_uses"
    others = {(i, model.counts[i], rounded(model.last[i], model.step)) for i in model.waiting()}
    assert {*zip(*(state[name].tolist() for name in names), strict=True)} == others
    dropped, evicted = model.lost
    numbers = {"admitted": len(known), "evicted": evicted, "pending": len(others)}
    assert ids.statistics() == {**numbers, "dropped": dropped}


def assert_whole(ids: IdMap) -> None:
    """Each row has one id, which is found in it, or is free; slots and sizes fit."""
    known, rows, counts, last = ids.rows_of_ids()
    assert np.array_equal(ids.find(known), rows) and len({*known.tolist()}) == len(rows)
    n_free, next_row = int(ids._rows.n_free[0]), int(ids._rows.next_row[0])
    free = ids._rows.free[:n_free][::-1].tolist()
    assert sorted([*free, *rows.tolist()]) == [*range(1, next_row)] and free == sorted(free)
    assert len(ids) == len(rows) and next_row <= ids.capacity == len(ids._rows.ids)
    assert (counts > 0).all() and (last <= ids.step).all()
    pending, occurrences, seen = ids._slots.pending(ids.step)
    assert len(pending) <= (ids.pending or ALL) and (seen <= ids.step).all()
    assert int(ids._entries[0]) == len(rows) + len(pending) == np.count_nonzero(ids._slots.places)
    assert (occurrences > 0).all() and not ids.find(pending).any()
    IdMap(ids.capacity).load_state_dict(ids.state_dict())


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("part", [0, *map(more, range(1, 7))])  # of 1,500 actions
@given(seed=st.integers(0, 10**9))
def test_random_sequences(part: int, seed: int) -> None:
    """Calls, lookups, evictions, copies and resumes, on any number of threads."""
    rng = np.random.default_rng([seed, part])
    capacity = int(rng.choice([2, 5, 40, 400, 5_000]))
    full = str(rng.choice(["reserved", "raise", "evict"]))
    options: dict[str, Any] = {"after": int(rng.choice([1, 1, 2, 4])), "seed": seed, "full": full}
    options["chance"] = 1.0 if full == "evict" else float(rng.choice([1.0, 0.3]))
    options["pending"] = [None, 1, 7, 60, 300][int(rng.integers(5))]
    ids, model = IdMap(capacity, remembered=10**6, **options), Model(capacity, **options)
    every = rng.integers(-(2**63), 2**63 - 1, int(rng.choice([3, 60, 900])))
    step = 0
    for _ in range(25):
        fusestep.set_num_threads(int(rng.integers(1, 3)))
        event = rng.random()
        if event < 0.1:
            unused = [None, int(rng.integers(0, rng.choice([20, 900])))][int(rng.integers(2))]
            seen = int(rng.integers(0, 6)) if unused is None or rng.random() < 0.3 else None
            keep = rng.choice(every, 3)
            freed = ids.evict(unused_for=unused, seen_less_than=seen, keep=keep)
            assert freed.tolist() == model.evict(unused, seen, {*keep.tolist()})
        elif event < 0.15:
            other = IdMap(capacity, remembered=10**6, **options)
            other.load_state_dict(ids.state_dict())
            ids, model.lost = other, [0, 0]
        elif event < 0.18 and capacity < 5_000:
            ids.grow(capacity + 7)
            model.free += range(capacity, capacity + 7)
            capacity = model.capacity = capacity + 7
        elif event < 0.22:
            old, ids = (
                ids, copy.copy(ids if rng.random() < 0.5 else pickle.loads(pickle.dumps(ids))),
            )  # fmt: skip
            old.evict(unused_for=0, forget_pending=True)  # a copy is one of its own
            old(every[:1], step)
        elif event < 0.235 and full != "raise":  # more steps than a byte has moments
            for one in range(300):
                step, i = step + int(rng.choice([1, 1, 9])), one % (len(every) + 9)
                model.call([i], step, [1])
                ids(np.array([i]), step)
        else:
            step += int(rng.integers(0, 4))
            n = int(rng.choice([0, 1, 7, 300]))
            batch = every[(len(every) * rng.random(n) ** 2).astype(int)]
            batch = batch.astype(np.uint64) if rng.random() < 0.2 else batch
            before = copy.deepcopy(model)
            times = rng.integers(1, 4, n) if rng.random() < 0.3 else None
            n_times = [1] * n if times is None else times.tolist()
            try:
                expected = model.call(batch.astype(np.int64).tolist(), step, n_times)
            except ValueError:
                model = before
                with pytest.raises(ValueError, match="do not fit: expected"):
                    ids(batch, step, times=times)
            else:
                known = {*before.rows.values()}
                rows = ids(batch, step, times=times)
                assert rows.tolist() == expected
                assert ids.holds(batch, rows)
                lost = [n for n, r in zip(n_times, expected, strict=True) if r == 0]
                assert ids.last.refused == sum(lost)
                is_new = {i: r for i, r in model.rows.items() if before.rows.get(i) != r}
                handed = zip(ids.last.ids.tolist(), ids.last.rows.tolist(), strict=True)
                assert dict(handed) == is_new
                assert {*ids.last.evicted.tolist()} <= known
        looked = rng.choice(every, (2, 5))
        found = [model.rows.get(i, 0) for i in looked.reshape(-1).tolist()]
        assert ids.find(looked).reshape(-1).tolist() == found
        assert_equal(ids, model)
        assert_whole(ids)
        since = int(rng.integers(0, model.step + 1))
        changed, rows, removed = (a.tolist() for a in ids.changed_since(since))
        used = {i: r for i, r in model.rows.items() if model.last[i] > since}
        assert dict(zip(changed, rows, strict=True)) == used
        lost = [i for i, s in model.removed.items() if s > since and i not in model.rows]
        assert removed == sorted(lost)
    fusestep.set_num_threads(None)


def longest_probe(ids: IdMap) -> int:
    """The longest way from where an id belongs to where it is."""
    full = np.flatnonzero(ids._slots.places)
    slots = len(ids._slots.places) - kernels.TAIL
    homes = ((ids._slots.hashes[full] >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32)
    return int((full - homes.astype(np.int64)).max())


@pytest.mark.parametrize("kind", ["random", "sequential", "multiples", "high bits"])
def test_adversarial_ids(kind: str) -> None:
    """At 80 % full no search is longer than 64, and an id takes at most 42 bytes."""
    n, rng = 300_000, np.random.default_rng(1)
    made = {
        "random": rng.integers(-(2**63), 2**63 - 1, n), "sequential": np.arange(n),
        "multiples": np.arange(n) * 300_001, "high bits": np.arange(n) << 40,
    }[kind]  # fmt: skip
    ids, longest, most_bytes = IdMap(n + 1), 0, 0.0
    for k, batch in enumerate(np.array_split(made, 60)):
        assert (ids(batch, k) == np.arange(len(batch)) + 1 + k * len(batch)).all()
        longest = max(longest, longest_probe(ids))
        if len(ids) >= 100_000:
            n_bytes = sum(array.nbytes for array in ids._slots[:3]) + 16 * len(ids)
            most_bytes = max(most_bytes, n_bytes / len(ids))
    assert longest <= 64
    assert most_bytes <= 42.0
    assert (ids.find(made) == np.arange(1, n + 1)).all()


@pytest.mark.parametrize("limit", [None, 70_000])
def test_bytes_of_ids_that_wait(limit: int | None) -> None:
    """At most 31 each, with a limit never more of them, and it takes no more memory then."""
    ids, rng, sizes = IdMap(1_000, after=2, pending=limit), np.random.default_rng(0), []
    for step in range(60):
        ids(rng.integers(-(2**62), 2**62, 5_000), step)
        arrays = (*ids._slots, *ids._rows, *ids._removed)
        n_bytes = sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))
        waiting = ids.statistics()["pending"]
        assert waiting == 5_000 * (step + 1) or (limit and limit * 7 // 8 <= waiting <= limit)
        assert step < 10 or n_bytes / waiting <= 31
        sizes.append(n_bytes)
    ids.evict(unused_for=3)
    fresh = 15_000 if limit is None else min(15_000, limit)
    assert ids.statistics()["pending"] == fresh and (sizes[-1] < sizes[30] + 1_000) == bool(limit)


def test_states_of_ids_that_wait() -> None:
    """Older ones, in whose step they count as seen; and more of them than there may be."""
    ids = IdMap(9, after=3)
    for step in range(40):
        ids(np.array([step]), step)
    old = {k: x for k, x in ids.state_dict().items() if k != "pending_last_uses"}
    loaded, limited = IdMap(9, after=3), IdMap(9, after=3, pending=10)
    loaded.load_state_dict(old)
    assert loaded.evict(unused_for=1).size == 0 and loaded.statistics()["pending"] == 40
    loaded(np.arange(4), 39)
    for unused, seen, left in ((None, 9, 40), (0, 2, 4)):
        loaded.evict(unused_for=unused, seen_less_than=seen)
        assert loaded.statistics()["pending"] == left
    loaded.evict(unused_for=0, keep=np.arange(3))
    assert sorted(loaded.state_dict()["pending"].tolist()) == [0, 1, 2]
    loaded.evict(forget_pending=True)
    limited.load_state_dict(ids.state_dict())
    assert sorted(limited.state_dict()["pending"].tolist()) == [*range(30, 40)]
    assert (loaded.statistics()["dropped"], limited.statistics()["dropped"]) == (40, 30)


def test_bad_input() -> None:
    """One clear error, and nothing has changed."""
    ids = IdMap(10, full="raise")
    ids(np.arange(5), 3)
    before = {name: x.copy() for name, x in ids.state_dict().items()}
    cases: list[tuple[Any, str, Any]] = [
        (TypeError, "int64 or uint64, got int32", lambda: ids(np.zeros(3, np.int32), 4)),
        (TypeError, "expected int64 or uint64, got float64", lambda: ids.find(np.ones(2))),
        (ValueError, "step is out of range: expected from 3", lambda: ids(np.arange(3), 2)),
        (ValueError, "do not fit: expected 4 new ids", lambda: ids(np.arange(5, 10), 4)),
        (ValueError, "unused_for is missing", lambda: ids.evict()),
        (ValueError, "times do not fit", lambda: ids(np.arange(3), 4, times=np.zeros(3, int))),
        (TypeError, "times have a wrong dtype", lambda: ids(np.arange(3), 4, times=np.ones(3))),
        (ValueError, "capacity is out of range: expected 10 <", lambda: ids.grow(10)),
        (ValueError, "capacity is out of range", lambda: IdMap(1)),
        (ValueError, "capacity is out of range", lambda: IdMap(2**31)),
        (ValueError, "chance is out of range", lambda: IdMap(4, chance=0.0)),
        (ValueError, "full is unknown", lambda: IdMap(4, full="later")),
        (ValueError, "pending is out of range: expected at least 1", lambda: IdMap(4, pending=0)),
        (TypeError, "pending has a wrong type", lambda: IdMap(4, pending=2.0)),  # type: ignore[arg-type]
        (ValueError, "remembered is out of range", lambda: IdMap(4, remembered=-1)),
        (ValueError, "step is out of range: expected at most 3", lambda: ids.changed_since(4)),
        (ValueError, "step is out of range: expected at least 0", lambda: ids.changed_since(-1)),
        (KeyError, "has other names", lambda: ids.load_state_dict({})),
        (ValueError, "does not fit", lambda: IdMap(4).load_state_dict(before)),
        *(
            (ValueError, "does not fit", partial(ids.load_state_dict, {**before, **wrong}))
            for wrong in (
                {"ids": np.zeros(5, np.int64)}, {"counts": np.zeros(5, np.int32)},
                {"last_uses": np.full(5, 4, np.int32)}, {"rows": np.arange(5, dtype=np.int32)})),
    ]  # fmt: skip
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    assert all(np.array_equal(before[name], x) for name, x in ids.state_dict().items())


@pytest.mark.parametrize("n", [600, 3_000])
def test_ids_that_are_chosen_to_meet(n: int) -> None:
    """More of the highest hashes than slots are behind the last: more are made, in every way."""
    chosen = unmixed(np.uint64(ALL) - np.arange(n, dtype=np.uint64)).view(np.int64)
    parts = chosen[: n // 3], chosen[n // 3 : 2 * n // 3], chosen[2 * n // 3 :]
    ids = IdMap(20_000)
    ids(parts[0], 1)
    assert ids(np.concatenate(parts[:2]), 2).tolist() == [*range(1, 1 + 2 * n // 3)]
    ids(np.arange(9_000), 3)
    assert ids(parts[2], 4).tolist() == [*range(9_001 + 2 * n // 3, 9_001 + n)]
    assert (ids.find(chosen) > 0).all() and len(ids) == 9_000 + n
    assert ids.rows_of_ids()[2].tolist() == [*[2] * (n // 3), *[1] * (len(ids) - n // 3)]
    again = IdMap(20_000)
    again.load_state_dict(ids.state_dict())
    assert np.array_equal(again.find(chosen), ids.find(chosen))
    ids.evict(seen_less_than=2)
    assert len(ids) == n // 3 and (ids.find(parts[0]) > 0).all()


def test_failures_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for growth, a `begin` that asks and raises, counts beyond 32 bits."""
    ids = IdMap(10)
    ids(np.arange(3), 1)
    zeros, made = np.zeros, []

    def fail(*given: Any) -> Any:
        if made:
            raise MemoryError
        made.append(1)
        return zeros(*given)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", fail)
        with pytest.raises(MemoryError):
            ids.grow(10**6)
    assert ids(np.arange(9), 2).tolist() == [*range(1, 10)] and ids.capacity == 10
    ids.evict(unused_for=0, keep=np.arange(3))

    def begin(_: Any) -> None:
        ids(np.array([77]), 3)
        raise KeyError

    with pytest.raises(KeyError):
        ids(np.array([50, 51]), 3, begin=begin)
    assert ids.find(np.array([0, 1, 2, 50, 51, 77])).tolist() == [1, 2, 3, 0, 0, 6]
    assert ids(np.array([0, 0]), 4, times=np.array([2**63 - 1, 1])).tolist() == [1, 1]
    assert ids.rows_of_ids()[2].max() == 2**31 - 1
    IdMap(10).load_state_dict(ids.state_dict())


def test_many_removals_are_forgotten() -> None:
    """What is forgotten raises; what is remembered is right."""
    ids = IdMap(5_000)
    for step in range(4):
        ids(np.arange(1_000) + 1_000 * step, step + 1)
    for k in range(3):
        assert len(ids.evict(unused_for=3)) == 1_000
        ids(np.arange(3), 5 + k)
    with pytest.raises(TooManyChangesError, match=r"are forgotten.*send the whole"):
        ids.changed_since(5)
    assert len(ids.changed_since(6).removed) == 1_000
    other, state = IdMap(5_000), ids.state_dict()
    # As states of several processes come.
    backwards = {name: state[name][::-1] for name in ("removed", "removed_steps")}
    other.load_state_dict({**state, **backwards})
    assert np.array_equal(other.changed_since(6).removed, ids.changed_since(6).removed)
    with pytest.raises(TooManyChangesError, match="are forgotten"):
        other.changed_since(5)
    other.evict(unused_for=0)  # the oldest are forgotten, which are at the end
    with pytest.raises(TooManyChangesError, match="are forgotten"):
        other.changed_since(6)
    for n in (0, 2, 3):
        few = IdMap(9, remembered=n)
        few(np.arange(3), 1)
        few.evict(unused_for=0)
        few(np.arange(1), 2)
        if n < 3:
            with pytest.raises(TooManyChangesError):
                few.changed_since(1)
        else:
            assert few.changed_since(1).removed.tolist() == [1, 2]
        assert few.changed_since(2).removed.size == 0


def damaged(array: np.ndarray, rng: np.random.Generator) -> Any:
    """An array with other numbers, or another dtype, length or order."""
    numbers = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 9, 50, 2**31 - 2, 2**31 - 1, 2**31, 2**63 - 1]
    kind, wrong = rng.integers(8), array.astype(np.int64)
    if kind < 4 and len(array):
        at = rng.integers(0, len(array), rng.integers(1, 4))
        wrong[at] = rng.choice(numbers if kind else wrong, len(at))
        return wrong.astype(array.dtype)
    made = [
        array[:-1], np.append(array, array[:1]), array[::-1], array.astype(">i8"), array[None],
        array.astype(np.int16), np.full(len(array), np.nan), rng.permutation(array),
    ]  # fmt: skip
    return made[rng.integers(len(made))]


@pytest.mark.parametrize("n", [400, more(10_000)])
def test_states_that_are_damaged(n: int) -> None:
    """One error, and nothing has changed; or the map that was loaded keeps to its rows."""
    rng, refused = np.random.default_rng(n), 0
    ids = IdMap(60, after=2, full="evict")
    for step in range(6):
        ids(rng.integers(0, 60, 40), step)
    ids.evict(unused_for=4)
    good = ids.state_dict()
    for k in range(n):
        names = rng.choice([*good], rng.integers(1, 3), replace=False)
        state = {**good, **{name: damaged(good[name], rng) for name in names}}
        tried = copy.copy(ids)
        try:
            tried.load_state_dict(state)
        except (TypeError, ValueError):
            refused += 1
            assert all(np.array_equal(good[name], x) for name, x in tried.state_dict().items())
        assert_whole(tried)
        if k % 4 == 0 and tried.step < 2**31 - 3:
            for step in range(3):
                rows = tried(rng.integers(0, 200, 50), tried.step + step // 2)
                assert rows.min() >= 0 and rows.max() < 60
            assert_whole(tried)
    assert n // 3 < refused < n
    with pytest.raises(TypeError, match="state has a wrong type"):
        ids.load_state_dict(None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", [{}, {"after": 2, "pending": 900}, {"full": "evict"}], ids=str)
@pytest.mark.parametrize("event", ["call", "evict", "grow", "load", "copy"])
def test_interrupts_at_every_moment(event: str, options: Any) -> None:
    """No row is lost, and those that an interrupted call has handed out are free again."""
    batches = [*np.random.default_rng(3).integers(0, 1_500, (8, 400))]
    batches[6] = unmixed(np.uint64(ALL) - np.arange(700, dtype=np.uint64)).view(np.int64)
    first, moment, kept = IdMap(1_200, **options), 0, 0
    begun: dict[int, int] = {}

    def call(ids: IdMap, k: int) -> None:
        ids(batches[k], k, begin=lambda new: begun.update(zip(new.rows, new.ids, strict=True)))

    for k in (1, 2, 3, 4, 5):
        call(first, k)
    begun_first, old = dict(begun), first.rows_of_ids()[0]
    while True:
        ids = copy.copy(first)
        begun.clear()
        begun.update(begun_first)
        does: Any = {
            "call": partial(call, ids, 6),
            "evict": partial(ids.evict, unused_for=2, forget_pending=True),
            "grow": partial(ids.grow, 5_000),
            "load": partial(ids.load_state_dict, ids.state_dict()), "copy": partial(copy.copy, ids),
        }[event]  # fmt: skip
        passed = done_at(moment, does, interrupt)
        assert_whole(ids)
        known, rows, *_ = ids.rows_of_ids()
        assert all(begun[r] == i for r, i in zip(rows.tolist(), known.tolist(), strict=True))
        kept += len(known) == len(old)
        if event != "evict" and not ids.evictions:
            assert (ids.find(old) > 0).all()
        call(ids, 7)
        assert_whole(ids)
        if passed <= moment:
            break
        moment += 1
    assert moment > 5 and kept


@pytest.mark.parametrize("n", [300, more(10_000)])
def test_threads_that_share_a_map(n: int) -> None:
    """One grows and evicts, one changes the ids and times that two others have given."""
    ids = IdMap(500, after=2, full="evict", pending=400)
    shared, times = np.arange(9_000), np.ones(9_000, np.int64)
    interval, draws = sys.getswitchinterval(), [np.random.default_rng(seed) for seed in range(4)]

    def steps(draw: Any) -> None:
        for _ in range(n):
            part = slice(0, int(draw.choice([7, 200, 9_000])))
            try:
                rows = ids(shared[part], ids.step, times=times[part])
                assert rows.min() >= 0 and rows.max() < ids.capacity
            except ValueError as error:  # a step that another thread has ended, or times
                assert "step is out of" in str(error) or "times do not" in str(error)  # noqa: PT017

    def change(_: int) -> None:
        shared[:] = draws[3].integers(-900, 900, len(shared))
        times[draws[3].integers(len(times))] = draws[3].choice([1, 2, -(2**63), 2**63 - 1])

    def grows(draw: Any) -> None:
        for k in range(n // 4):
            ids.grow(ids.capacity + 3)
            ids.evict(unused_for=int(draw.integers(3)), keep=shared[:9], forget_pending=k % 9 == 0)
            with ids._lock:
                ids(shared[:5], ids.step + 1)
                assert_whole(ids)
            if k % 9 == 0:
                ids.load_state_dict(ids.state_dict())

    sys.setswitchinterval(1e-5)
    try:
        with meanwhile(change):
            at_once([*map(partial, (steps, steps, grows), draws)])
    finally:
        sys.setswitchinterval(interval)
    assert_whole(ids)


def test_counts_at_their_end() -> None:
    """An id that waits with the largest count is drawn for again; many occurrences take no time."""
    ids = IdMap(3, full="evict")
    state = IdMap(3, after=2).state_dict()
    state |= {"pending": np.array([7]), "pending_counts": np.array([2**31 - 1], np.int32)}
    del state["pending_last_uses"]
    ids.load_state_dict(state)
    assert ids(np.array([1, 2]), 1).tolist() == [1, 2]
    assert ids(np.array([7]), 2).tolist() == [1] and ids.evictions == 2
    assert ids(np.array([7]), 3).tolist() == [1] and ids.evictions == 2
    seldom, n = IdMap(60_000, chance=1e-4), np.full(50_000, 4_096)
    seldom(np.arange(50_000), 1, times=n)
    assert abs(len(seldom) / 50_000 - (1 - np.exp(-0.4096))) < 0.01
    whole = IdMap(60_000, chance=1e-4)
    whole(np.arange(50_000), 1, times=n + 2**13 - 2)  # draws for 2 and 4, ... 4,096 more
    assert abs(len(whole) / 50_000 - (1 - np.exp(-1.2288))) < 0.01
    last = IdMap(9, chance=1e-10)
    assert not last(np.arange(8), 1, times=np.full(8, 2**62)).all()
    for step in range(2, 200):  # each step has draws of its own
        rows = last(np.arange(8), step, times=np.full(8, 2**62))
    assert rows.all()
