"""Bags whose ids go through maps, against tables with a vocabulary that is known beforehand."""

import contextlib
import copy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import BF16, assert_same_arrays, assert_same_bits, at_once, refused

D, N_IDS, CAPACITY = 4, 30, 64
DRAW = nn.UniformRows(0.3, seed=5)
EACH = np.random.default_rng(8).integers(-(2**63), 2**63 - 1, N_IDS)
OPTIMIZERS: dict[str, Any] = {
    "LazyAdam": lambda tables: nn.LazyAdam(tables, 0.1),
    "Adagrad": lambda tables: nn.Adagrad(tables, 0.3, 0.1, sparse_update="lazy"),
    "RowWiseAdagrad": lambda tables: nn.RowWiseAdagrad(tables, 0.25, 0.1),
    "Adam": lambda tables: nn.Adam(tables, 0.1, sparse_update="dense_equivalent"),
    "catch-up": lambda tables: nn.LazyAdam(tables, 0.1, sparse_update="catch_up"),
}


def empty_tables() -> list[np.ndarray]:
    return [np.zeros((CAPACITY, D), np.float32), np.ones((7, 3), np.float32)]


def batch(rng: np.random.Generator, known: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three features: two of the table with a map, one of the other; bags of 0 to 3 ids."""
    n = rng.integers(0, 4, (3, 9))
    offsets = [np.concatenate(([0], np.cumsum(own))) for own in n]
    ids = [
        rng.integers(0, bound, own[-1])
        for own, bound in zip(offsets, (known, known, 7), strict=True)
    ]
    return [EACH[ids[0]], EACH[ids[1]], ids[2]], offsets


@pytest.mark.parametrize("form", ["lists", "joined"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_by_id_are_those_of_a_known_vocabulary(name: str, form: str) -> None:
    """Rows differ; weights and states by id do not, to the last bit."""
    ids, tables, rng = nn.IdMap(CAPACITY), empty_tables(), np.random.default_rng(0)
    grows = nn.EmbeddingBags(tables, OPTIMIZERS[name](tables), features=[0, 0, 1],
                             maps=[ids, ids, None], new_rows=DRAW)  # fmt: skip
    others = empty_tables()
    rows_of = dict(
        zip(EACH.tolist(), rng.permutation(np.arange(1, N_IDS + 1)).tolist(), strict=True)
    )
    others[0][[*rows_of.values()]] = DRAW(EACH, (N_IDS, D))
    other = nn.EmbeddingBags(others, OPTIMIZERS[name](others), features=[0, 0, 1])
    for step in range(8):
        given, offsets = batch(rng, 9 + 3 * step)
        plain = [np.array([rows_of[i] for i in own.tolist()], np.int64) for own in given[:2]]
        if form == "joined":
            bounds = np.cumsum([0, *(len(own) for own in given)])
            ends = [o[:-1] + b for o, b in zip(offsets, bounds, strict=False)]
            out = grows(np.concatenate(given), np.concatenate((*ends, bounds[-1:])), step=step)
        else:
            out = grows(given, offsets, step=step)
        assert_same_bits(out, other([*plain, given[2]], offsets))
        grad = rng.standard_normal(out.shape).astype(np.float32)
        grows.backward(grad)
        other.backward(grad)
    for bags in (grows, other):
        bags.optimizer.flush()
    known, rows, *_ = ids.rows_of_ids()
    theirs = [rows_of[i] for i in known.tolist()]
    assert len(known) > 20
    assert_same_bits(tables[0][rows], others[0][theirs])
    states = other.optimizer.states_by_name(0)
    for role, state in grows.optimizer.states_by_name(0).items():
        if state.shape[:1] == (CAPACITY,):
            assert_same_bits(state[rows], states[role][theirs], role)
    looked = grows([EACH[:5], EACH[:5], np.zeros(5, int)], [np.arange(6)] * 3)
    assert len(ids) == len(known) and looked.shape == (5, 2 * D + 3)


def test_ids_without_a_row_and_padding() -> None:
    """Row 0 is read and never written; padding counts for nothing and is never admitted."""
    ids, tables = nn.IdMap(3, after=2), empty_tables()[:1]
    tables[0] = np.full((3, D), 7.0, np.float32)
    bags = nn.EmbeddingBags(
        tables, nn.SGD(tables, 1.0), "mean", padding_idx=-1, maps=[ids], new_rows=1
    )
    given = np.array([[-1, 5, 5], [-1, 8, -1], [-1, -1, -1]])
    assert bags([given], step=1)[:, 0].tolist() == [1.0, 7.0, 0.0]
    assert (ids.last.rows.tolist(), ids.last.ids.tolist(), ids.last.refused) == ([1], [5], 1)
    bags.backward(np.ones((3, D), np.float32))
    assert tables[0][:, 0].tolist() == [7.0, 0.0, 7.0]
    assert bags([given])[:, 0].tolist() == [0.0, 7.0, 0.0]
    assert (ids.find(np.array([-1])) == 0).all() and len(ids) == 1
    bags.optimizer.grow(tables[0], 5)
    with pytest.raises(ValueError, match="table 0 does not fit its map: expected 3 rows"):
        bags([given], step=2)
    ids.grow(5)
    assert bags([given], step=2)[:, 0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("padding", [-1, np.int64(-1), 2**64 - 1, [None, -1]])
def test_padding_is_an_id(padding: Any) -> None:
    """In every form; what is none is refused as without maps."""
    ids, tables = [nn.IdMap(4), nn.IdMap(4)], [np.zeros((4, D), np.float32) for _ in range(2)]
    opt, given = nn.SGD(tables), np.array([[2**64 - 1], [7]], np.uint64)
    bags = nn.EmbeddingBags(tables, opt, padding_idx=padding, maps=ids)
    bags([given, given.view(np.int64)], step=1)
    assert [len(own) for own in ids] == ([2, 1] if isinstance(padding, list) else [1, 1])
    cases: list[tuple[Any, Any]] = [("x", TypeError), ([1, 2, 3], ValueError), (2**64, ValueError)]
    for wrong, error in cases:
        with pytest.raises(error, match="padding_idx"):
            nn.EmbeddingBags(tables, opt, padding_idx=wrong, maps=ids)


def test_rows_that_are_given_back() -> None:
    """A row begins anew with another id; an eviction between forward and backward raises."""
    ids, tables = nn.IdMap(3), [np.zeros((3, D), np.float32)]
    opt = nn.LazyAdam(tables, 0.1)
    bags = nn.EmbeddingBags(tables, opt, maps=[ids], new_rows=DRAW)
    for step in range(3):
        bags([EACH[:2, None]], step=step)
        bags.backward(np.ones((2, D), np.float32))
    assert ids.evict(unused_for=0).tolist() == [1, 2]
    bags([EACH[5:6, None]], step=3)
    assert_same_bits(tables[0][1], DRAW(EACH[5:6], (1, D))[0])
    assert not opt.moment1[0][1].any() and opt.moment1[0][2].any()
    ids.evict(unused_for=0)
    before = opt.state_dict()
    with pytest.raises(RuntimeError, match="rows that were given back since the forward"):
        bags.backward(np.ones((1, D), np.float32))
    assert all(np.array_equal(before[k], x) for k, x in opt.state_dict().items())
    for is_other in (False, True):
        bags([EACH[5:6, None]], step=4)
        ids.evict(unused_for=0, keep=EACH[5:6])
        state = ids.state_dict()
        ids.load_state_dict({**state, "ids": state["ids"] + 1} if is_other else state)
        if not is_other:
            bags.backward(np.ones((1, D), np.float32))
    with pytest.raises(RuntimeError, match="rows that were given back since the forward"):
        bags.backward(np.ones((1, D), np.float32))


@pytest.mark.parametrize("form", ["lists", "joined"])
def test_features_of_a_table_keep_each_others_rows(form: str) -> None:
    """Weights are ids: no new id of one feature takes the row of an id of another."""
    ids, tables = nn.IdMap(9, full="evict"), [np.zeros((9, 1)), np.ones((7, 1))]
    bags = nn.EmbeddingBags(
        tables, nn.SGD(tables), features=[0, 1, 0], maps=[ids, None, ids], padding_idx=[None, 0, 5],
        new_rows=lambda new, shape: new.astype(float).reshape(shape))  # fmt: skip
    rng = np.random.default_rng(4)
    for step in range(200):
        given = [rng.integers(1, 30, 4), rng.integers(0, 2, 4), rng.integers(1, 30, 4)]
        if form == "joined":
            out = bags(np.concatenate(given), np.arange(13), step=step)
        else:
            out = bags([own[:, None] for own in given], step=step)
        given[2][given[2] == 5] = 0
        assert np.array_equal(out, np.stack(given, 1))
    assert ids.evictions > 100


def test_bad_input() -> None:
    """Maps, ids and steps that do not fit: one error, and no id is admitted."""
    ids, tables = nn.IdMap(CAPACITY), empty_tables()
    opt, other, more = nn.SGD(tables), nn.IdMap(7), nn.IdMap(CAPACITY)

    def make(maps: Any, features: Any = None) -> Any:
        return nn.EmbeddingBags(tables, opt, features=features, maps=maps)

    bags, plain = make([ids, None]), nn.EmbeddingBags(tables, opt)
    good = [EACH[:3, None], np.zeros((3, 1), int)]
    bags(good, step=4)
    before = ids.state_dict()
    cases: list[tuple[Any, str, Any]] = [
        (TypeError, "maps do not fit the features", lambda: make([ids])),
        (TypeError, "maps do not fit the features", lambda: make([ids, 3])),
        (ValueError, "maps do not fit the tables", lambda: make([ids, ids])),
        (ValueError, "maps do not fit the tables", lambda: make([ids, None, None], [0, 0, 1])),
        (ValueError, "maps do not fit the tables", lambda: make([ids, more, None], [0, 0, 1])),
        (ValueError, "table 0 does not fit its map", lambda: make([other, None])),
        (ValueError, "step is out of range", lambda: bags(good, step=3)),
        (TypeError, "int64 or uint64", lambda: bags([good[0].astype(np.int32), good[1]], step=5)),
        (IndexError, "out of range", lambda: bags([EACH[3:6, None], good[1] + 7], step=5)),
        (ValueError, "falls", lambda: bags([EACH[3:6], good[1][:, 0]],
                                           [np.array([0, 2, 1, 3])] * 2, step=5)),
        (ValueError, "step is of no use", lambda: plain([good[1]] * 2, step=1)),
    ]  # fmt: skip
    for error, text, call in cases:
        with refused(error, text, opt):
            call()
        assert all(np.array_equal(before[k], x) for k, x in ids.state_dict().items())


def test_tables_of_which_none_has_a_map() -> None:
    """Maps of None alone are as no maps."""
    tables = empty_tables()
    bags = nn.EmbeddingBags(tables, nn.SGD(tables), maps=[None, None])
    assert bags([np.array([[1, 2]])] * 2)[0, D:].tolist() == [2.0, 2.0, 2.0]


def test_a_step_that_another_thread_has_passed() -> None:
    """A call that has waited for a map raises where the step of the map is above its own."""
    ids, tables, is_held = nn.IdMap(CAPACITY), empty_tables()[:1], threading.Event()
    bags = nn.EmbeddingBags(tables, nn.SGD(tables), maps=[ids])

    def first() -> None:
        with ids._lock:
            is_held.set()
            time.sleep(0.1)
            ids(EACH[5:6], step=6)

    def late() -> None:
        is_held.wait()
        with pytest.raises(ValueError, match="step is out of range: expected from 6"):
            bags([EACH[:2, None]], step=1)

    at_once([first, late])
    assert (len(ids), ids.step, ids.last_uses.tolist()) == (1, 6, [6])


class Stopped(BaseException):
    """What no call expects, as an interrupt."""


class NewRows:
    """Weights of new rows; some ids have none, in an error or in one number too many."""

    def __init__(self) -> None:
        self.wrong, self.error = 0, ""  # the id, if any

    def __call__(self, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        drawn = DRAW(ids, shape)
        if self.wrong in ids.tolist():
            if self.error == "raises":
                raise Stopped("stopped")
            drawn = np.append(drawn, drawn[:1], axis=0)
        return drawn


# Tables of other widths and dtypes, and maps with other options.
EVERY = range(4)
TABLES = [(5, np.float32), (16, np.float16), (1, BF16), (33, np.float32)]
MAPS: list[dict[str, Any]] = [
    {"full": "evict"}, {"after": 2, "pending": 9}, {"chance": 0.6, "seed": 4, "full": "evict"},
]  # fmt: skip
FEATURES, PADDING = [0, 2, 0, 1, 3, 3], [None, 3, 5, None, 7, None]


def maps_of(full: str) -> list[nn.IdMap]:
    return [nn.IdMap(CAPACITY // 3, **own) for own in (*MAPS, {"full": full})]


def same_maps(found: list[nn.IdMap], expected: list[nn.IdMap]) -> None:
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_same_arrays([*a.state_dict().values()], [*b.state_dict().values()], f"map {k}")
        assert_same_arrays([*a.last], [*b.last], f"last of map {k}")
        assert (a.step, a.evictions, a.statistics()) == (b.step, b.evictions, b.statistics())


@pytest.mark.parametrize("full", ["reserved", "raise"])
@pytest.mark.parametrize("seed", range(4))
def test_maps_together_are_as_one_after_the_other(seed: int, full: str) -> None:
    """Random calls, errors and evictions; tables, states and maps are those of single maps."""
    rng, draw = np.random.default_rng(seed), NewRows()
    together, single = maps_of(full), maps_of(full)
    tables, others = (
        [np.zeros((own.capacity, d), dtype) for own, (d, dtype) in zip(single, TABLES, strict=True)]
        for _ in range(2)
    )
    make = [*OPTIMIZERS.values()][seed]
    opt, other = make(tables), make(others)
    bags = nn.EmbeddingBags(tables, opt, features=FEATURES, padding_idx=PADDING,
                            maps=[together[t] for t in FEATURES], new_rows=draw)  # fmt: skip
    plain = nn.EmbeddingBags(others, other, features=FEATURES, out_of_range="drop")
    step, seen = 1, {"error": 0, "full": 0, "found": 0, "stepped": 0}

    def look_up(
        maps: Any, ids: Any, at: int | None, begin: Any, chosen: Any = EVERY
    ) -> list[np.ndarray]:
        """Rows of the features, by one call of each map."""
        rows = [np.full(own.shape, -1, np.int64) for own in ids]
        for t in chosen:
            id_map, each = maps[t], [f for f, of in enumerate(FEATURES) if of == t]
            known = [ids[f] != (-1 if PADDING[f] is None else PADDING[f]) for f in each]
            given = np.concatenate([ids[f][k] for f, k in zip(each, known, strict=True)])
            if at is None:
                found = id_map.find(given)
            else:
                found = id_map(given, at, begin=begin and partial(begin, t))
            ends = np.cumsum([k.sum() for k in known])[:-1]
            for f, k, own in zip(each, known, np.split(found, ends), strict=True):
                rows[f][k] = own
        return rows

    def begin(t: int, new: Any) -> None:
        other.reset_rows(others[t], new.rows, draw, ids=new.ids)

    def fail(*_: Any) -> None:
        raise Stopped("stopped")

    for number in range(60):
        n_bags = int(rng.integers(1, 5))
        has_ids = rng.integers(0, 2, (len(FEATURES), 1))
        lengths = rng.integers(0, 5, (len(FEATURES), n_bags)) * has_ids
        offsets = [np.concatenate(([0], np.cumsum(own))) for own in lengths]
        ids = [rng.integers(0, 10 + number, o[-1]) for o in offsets]
        every = np.concatenate(ids)
        draw.error = str(rng.choice(["raises", "shape"]))
        draw.wrong = int(rng.choice(every)) if rng.random() < 0.6 and len(every) else -1
        at = None if rng.random() < 0.2 else step
        try:
            trial = copy.deepcopy(single)
            look_up(trial, ids, at, None)
        except ValueError:
            with refused(ValueError, "IdMap: ids do not fit", opt, tables):
                bags(ids, offsets, step=at)
            same_maps(together, single)
            seen["full"] += 1
            step += 1
            continue
        if at is not None and any(draw.wrong in id_map.last.ids.tolist() for id_map in trial):
            error = Stopped if draw.error == "raises" else ValueError
            with refused(error, "stopped" if error is Stopped else "wrong shape", opt, tables):
                bags(ids, offsets, step=at)
            for t in EVERY:
                with contextlib.suppress(Stopped):
                    look_up(single, ids, at, fail, [t])
            seen["error"] += 1
            same_maps(together, single)
            continue
        rows = look_up(single, ids, at, begin)
        out = bags(ids, offsets, step=at)
        assert_same_bits(out, plain(rows, offsets))
        same_maps(together, single)
        seen["found"] += 1
        if at is not None and rng.random() < 0.7:
            grad = rng.standard_normal(out.shape).astype(np.float32)
            bags.backward(grad)
            other([g.without(0) for g in plain.gradients(grad)])
            seen["stepped"] += 1
        assert_same_arrays(tables, others)
        if rng.random() < 0.05:
            t = int(rng.choice(EVERY))
            assert_same_bits(*(m[t].evict(unused_for=2) for m in (together, single)))
        step += int(rng.integers(0, 3))
    for optimizer in (opt, other):
        optimizer.flush()
    assert_same_arrays([*opt.state_dict().values()], [*other.state_dict().values()])
    assert_same_arrays(tables, others)
    assert min(seen["error"], seen["found"], seen["stepped"]) > 3
    assert (seen["full"] > 0) == (full == "raise")


PACKAGE = str(Path(nn.__file__).parent)


class Interrupt:
    """A trace function that raises at the begin of the n-th function of the package."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: Any, *_: Any) -> None:
        file = frame.f_code.co_filename
        self.left -= file.startswith(PACKAGE) or "contextlib" in file
        if self.left == 0:
            sys.settrace(None)
            raise Stopped


def is_free(lock: Any) -> bool:
    found: bool = lock.acquire(timeout=5)
    if found:
        lock.release()
    return found


def test_interrupts_at_the_begin_of_every_function() -> None:
    """They leave no map locked, no row that has not begun, and maps that are in order."""
    n, interrupt = 0, Interrupt(0)
    while interrupt.left <= 0:
        n += 1
        ids = [nn.IdMap(6, full="evict"), nn.IdMap(9, after=2)]
        tables = [np.zeros((own.capacity, 2), np.float32) for own in ids]
        bags = nn.EmbeddingBags(tables, nn.SGD(tables), maps=ids, new_rows=DRAW)
        bags([EACH[:4, None]] * 2, step=1)
        interrupt, before = Interrupt(n), sys.gettrace()
        try:
            sys.settrace(interrupt)
            bags([EACH[2:6, None]] * 2, step=2)
        except Stopped:
            pass
        finally:
            sys.settrace(before)
        with ThreadPoolExecutor(1) as pool:
            assert all(pool.map(is_free, [own._lock for own in ids])), n
        for own, table in zip(ids, tables, strict=True):
            known, rows, *_ = own.rows_of_ids()
            assert np.array_equal(own.find(known), rows)
            assert_same_bits(table[rows], DRAW(known, (len(known), 2)))
            nn.IdMap(own.capacity).load_state_dict(own.state_dict())
    assert n > 50
