"""Rows that sleep: the numbers of dense-equivalent steps, whatever comes in between."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
import fusestep
from fusestep import nn, ops
from fusestep.kernels.idle_table import IdleTable
from fusestep.nn import distributed
from fusestep.nn.distributed import RowShard, ShardedStates, alone, together
from fusestep.nn.engine.catch_up import SCALARS
from fusestep.nn.engine.tables import LAST
from helpers import BF16, EPSILON, arrays_of, assert_same_arrays, refused, unchanged

SHAPES = (90, 5), (40, 17), (7,)
COSINE = nn.CosineDecayLR(1e-4, 1e-2, 60)
MAKERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda p, **o: nn.Adam(p, 1e-2, **o),
    "Adam nesterov": lambda p, **o: nn.Adam(p, COSINE, use_nesterov=True, loss_scale=8.0, **o),
    "Adam eps": lambda p, **o: nn.Adam(p, 1e-2, eps_hat=False, **o),
    "AMSGrad": lambda p, **o: nn.Adam(p, 1e-2, use_amsgrad=True, **o),
    "Adam betas": lambda p, **o: nn.Adam(p, 1e-2, beta1=0.9, beta2=0.95, **o),
    "LazyAdam": lambda p, **o: nn.LazyAdam(p, COSINE, clipvalue=0.7, **o),
    "AdamOffload": lambda p, **o: nn.AdamOffload(p, 1e-2, **o),
    "AdamWeightDecay": lambda p, **o: nn.AdamWeightDecay(p, COSINE, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: nn.AdamWeightDecay(p, 1e-2, weight_decay=0.1, correct_bias=True, **o),
    "Momentum": lambda p, **o: nn.Momentum(p, 1e-2, 0.9, weight_decay=0.1, loss_scale=4.0, **o),
    "SGD": lambda p, **o: nn.SGD(p, 1e-2, weight_decay=0.1, **o),
    "SGD momentum": lambda p, **o: nn.SGD(p, 1e-2, 0.9, 0.5, weight_decay=0.1, **o),
    "RMSProp": lambda p, **o: nn.RMSProp(p, 1e-3, momentum=0.9, **o),
    "RMSProp centered": lambda p, **o: nn.RMSProp(p, 1e-3, centered=True, **o),
    "Adagrad": lambda p, **o: nn.Adagrad(p, 0.1, 1e-2, **o),
    "Lion": lambda p, **o: nn.Lion(p, 1e-3, weight_decay=0.1, **o),
    "RowWiseAdagrad": lambda p, **o: nn.RowWiseAdagrad(
        p[:2], learning_rate=1e-2, weight_decay=0.1, decoupled_weight_decay=True, **o),
}  # fmt: skip


def begin(seed: int = 0, dtype: Any = np.float32) -> list[np.ndarray]:
    """Parameters of three shapes; a vector has rows of one element."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in SHAPES]


def rows(rng: np.random.Generator, shape: tuple[int, ...], n: int = 9) -> nn.RowTensor:
    """A row-sparse gradient, most of whose ids are small."""
    ids = (shape[0] * rng.random(n) ** 2).astype(rng.choice(["int32", "int64"]))
    return nn.RowTensor(ids, rng.standard_normal((n, *shape[1:])).astype(np.float32), shape)


def gradients(rng: np.random.Generator, n: int) -> list[Any]:
    """Row-sparse gradients mostly, sometimes a dense one or none."""
    found: list[Any] = [rows(rng, shape) for shape in SHAPES[:n]]
    k, kind = int(rng.integers(n)), rng.random()
    if kind < 0.15:
        found[k] = rng.standard_normal(SHAPES[k]).astype(np.float32)
    elif kind < 0.3:
        found[k] = None
    return found


def rebuilt(opt: Any, make: Callable[..., Any], how: int) -> Any:
    """The optimizer as it is after a checkpoint, or a copy of it."""
    if how == 0:
        return copy.deepcopy(opt)
    if how == 1:
        return pickle.loads(pickle.dumps(opt))
    other = make([p.data.copy() for p in opt.parameters], sparse_update="catch_up")
    with unchanged(opt):
        other.load_state_dict(opt.state_dict())
    return other


def assert_near(found: np.ndarray, expected: np.ndarray, moved: np.ndarray) -> None:
    """Each step with a gradient rounds its weights."""
    allowed = 2e-5 * moved + 40.0 * EPSILON[np.dtype(np.float32)]
    assert (np.abs(found - expected) <= allowed).all()


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_random_sequences(name: str, seed: int) -> None:
    """Reads, steps, flushes, copies and checkpoints at random, on any number of threads. The
    numbers are those of dense-equivalent steps in float64; a run that was copied or resumed has the
    bits of one that was not."""
    rng, make = np.random.default_rng(seed), MAKERS[name]
    opt, twin = (make(begin(), sparse_update="catch_up") for _ in range(2))
    dense = make(begin(dtype=np.float64), sparse_update="dense_equivalent")
    moved = [np.zeros(p.shape) for p in dense.parameters]
    for _ in range(int(rng.integers(20, 120))):
        event = rng.random()
        if event < 0.1:
            twin = rebuilt(twin, make, int(rng.integers(3)))
        elif event < 0.15:
            opt.flush()
            twin.flush()
        elif event < 0.4:
            i = int(rng.integers(len(moved)))
            ids = rng.integers(0, SHAPES[i][0], (3, 2))
            for own in (opt, twin):
                fusestep.set_num_threads(int(rng.integers(1, 3)))
                own.prepare(own.parameters[i], ids)
            assert (opt._states[LAST.name][i][ids] == opt._steps[i]).all()
            rows_now = ops.SparseGatherV2()(opt.parameters[i], ids, 0)
            assert_near(rows_now, dense.parameters[i].data[ids], moved[i][ids])
        else:
            given_now = gradients(rng, len(moved))
            before = [p.data.copy() for p in dense.parameters]
            for own in (opt, twin, dense):
                fusestep.set_num_threads(int(rng.integers(1, 3)))
                own(given_now)
            for total, p, x in zip(moved, dense.parameters, before, strict=True):
                total += np.abs(p.data - x)
    assert_same_arrays(arrays_of(twin), arrays_of(opt))
    opt.flush()
    for p, expected, total in zip(opt.parameters, dense.parameters, moved, strict=True):
        assert_near(p.data, expected.data, total)
    fusestep.set_num_threads(None)


@pytest.mark.parametrize("rounding", ["master", "kahan"])
def test_beside_ways_of_rounding(rounding: str) -> None:
    """Masters and remainders are brought up to date with their weights."""
    rng = np.random.default_rng(5)
    one = nn.LazyAdam(begin(dtype=BF16), 1e-2, sparse_update="catch_up", rounding=rounding)
    whole = nn.Adam([p.data.astype(np.float32) for p in one.parameters], 1e-2)
    for _ in range(60):
        given_now = [rows(rng, shape) for shape in SHAPES]
        one(given_now)
        whole(given_now)
    one.flush()
    for p, expected in zip(one.parameters, whole.parameters, strict=True):
        np.testing.assert_allclose(p.data.astype(np.float32), expected.data, rtol=2**-8, atol=2**-9)


def test_copies_are_written() -> None:
    """A copy in 16 bits follows each row that is brought up to date."""
    w = begin()[0]
    copied = w.astype(BF16)
    opt = nn.LazyAdam([{"params": [w], "copies": [copied]}], 1e-2, sparse_update="catch_up")
    rng = np.random.default_rng(1)
    for _ in range(30):
        opt([rows(rng, SHAPES[0])])
    opt.flush()
    np.testing.assert_array_equal(copied, w.astype(BF16))


def test_gaps_beyond_the_longest_sleep() -> None:
    """Rows that nobody touches are looked at in turn, so that none sleeps for ever."""
    a, b = begin()[0], begin(dtype=np.float64)[0]
    opt = nn.AdamWeightDecay([a], COSINE, weight_decay=0.1, sparse_update="catch_up")
    dense = nn.AdamWeightDecay([b], COSINE, weight_decay=0.1, sparse_update="dense_equivalent")
    rng = np.random.default_rng(2)
    first = rows(rng, SHAPES[0], 200)
    hot = nn.RowTensor(np.array([3]), np.ones((1, 5), np.float32), SHAPES[0])
    for k in range(5_001):
        for own in (opt, dense):
            own([hot if k else first])
    assert 1_000 < (int(opt._steps[0]) - opt._states[LAST.name][0]).max() < 2_048
    opt.flush()
    others = np.arange(len(a)) != 3
    np.testing.assert_allclose(a[others], b[others], rtol=3e-6, atol=5e-6)


@pytest.mark.parametrize("make", [nn.SGD, partial(nn.Adagrad, accum=0.1)])
def test_steps_that_change_nothing(make: Callable[..., Any]) -> None:
    """A rate of 0 is one: rows stay, and sleep on."""
    rates, w = [0.1, 0.1, 0.0, 0.0, 0.1, 0.1], np.ones((7, 2), np.float32)
    opt = make([w], learning_rate=rates, sparse_update="catch_up")
    for k in range(6):
        opt((nn.RowTensor(np.array([k]), np.ones((1, 2), np.float32), (7, 2)),))
    opt.flush()
    assert ((w[:, 0] < 1.0) == (np.array([*rates, 0.0]) > 0.0)).all() and (w > 0.5).all()


def test_an_interrupt_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of missed steps is put together anew, and nothing is lost."""
    opt, twin = (nn.AdamWeightDecay(begin()[:1], 1e-2, sparse_update="catch_up") for _ in "ab")
    given_now = [(rows(np.random.default_rng(k), SHAPES[0]),) for k in range(12)]
    add = IdleTable._add_paths

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(IdleTable, "_add_paths", add)
        raise KeyboardInterrupt

    for k, own in enumerate(given_now):
        twin(own)
        if k % 4 == 3:
            monkeypatch.setattr(IdleTable, "_add_paths", interrupted)
            with pytest.raises(KeyboardInterrupt):
                opt(own)
        opt(own)
    assert_same_arrays(arrays_of(opt), arrays_of(twin))


@pytest.mark.parametrize("to", ["more rows", "hash", "range"])
def test_rows_that_move_wake_in_time(to: str, tmp_path: Path) -> None:
    """A row comes to a place whose turn is later, and wakes before its scalars are gone."""
    n, ids, one = 600, np.array([0]), np.ones((1, 2), np.float32)
    made = []
    for way in ("catch_up", "dense_equivalent"):
        table = np.random.default_rng(0).standard_normal((n, 2)).astype(np.float32)
        parameter, shard = nn.Parameter(table, "t"), RowShard(n, alone())
        opt = nn.AdamWeightDecay([parameter], 1e-3, weight_decay=0.1, sparse_update=way)
        for _ in range(2_500):
            opt((shard.route(ids).scatter(one),))
        if to == "more rows":
            opt.grow(parameter, 8 * n)
            shard = RowShard(8 * n, alone())
        else:
            distributed.save_checkpoint(tmp_path / way, opt, alone(), {"t": shard})
            shard, other = RowShard(n, alone(), order=to), nn.Parameter(np.zeros_like(table), "t")
            opt = nn.AdamWeightDecay([other], 1e-3, weight_decay=0.1, sparse_update=way)
            distributed.load_checkpoint(tmp_path / way, opt, alone(), {"t": shard})
        for _ in range(2_040):
            opt((shard.route(ids).scatter(one),))
            if way == "catch_up":
                assert (opt.global_step - opt._states[LAST.name][0]).max() < 2_048
        opt.flush()
        made.append(shard.route(np.arange(n)).gather(opt.parameters[0].data))
    np.testing.assert_allclose(made[0], made[1], atol=1e-5)


def test_another_way_of_updates_is_refused() -> None:
    """Another `sparse_update`, another optimizer that steps in between, a table made read-only."""
    w, given_now = begin()[0], (rows(np.random.default_rng(0), SHAPES[0]),)
    parameter = nn.Parameter(w, "w")
    opt, other = (nn.LazyAdam([parameter], 1e-2, sparse_update="catch_up") for _ in "ab")
    for way in ("lazy", "dense_equivalent"):
        with pytest.raises(ValueError, match="sparse_update cannot change"):
            opt.sparse_update = way
    with pytest.raises(ValueError, match="cannot change: expected 'lazy'"):
        nn.LazyAdam([w.copy()], sparse_update="lazy").sparse_update = "catch_up"
    opt(given_now)
    with unchanged(other), pytest.raises(ValueError, match="has rows that sleep"):
        other(given_now)
    opt(given_now)
    opt.flush()
    other(given_now)
    other.flush()
    opt(given_now)
    w.flags.writeable = False
    for call in (opt.flush, partial(opt.prepare, parameter, np.arange(9))):
        with unchanged(opt), pytest.raises(ValueError, match="is read-only"):
            call()


def test_parameters_that_part_and_meet() -> None:
    """Parameters share what they have missed as long as their steps are the same."""
    opt = nn.Adam(begin(), 1e-2, sparse_update="catch_up")
    rng = np.random.default_rng(0)
    every = [rows(rng, shape) for shape in SHAPES]
    opt(every)
    missed = opt._missed
    assert len({id(table) for table in missed.tables.values()}) == 1
    opt([every[0], None, every[2]])
    assert len({id(table) for table in missed.tables.values()}) == 2
    other = nn.Adam(begin(), 1e-2, sparse_update="catch_up")
    other.load_state_dict(opt.state_dict())
    assert len({id(table) for table in other._missed.tables.values()}) == 2


def test_nothing_is_written_where_nothing_is_due() -> None:
    """Saving changes no bit, nor does a lookup of rows that are up to date."""
    opt = nn.Adam(begin(), 1e-2, sparse_update="catch_up")
    rng = np.random.default_rng(0)
    for _ in range(5):
        opt([rows(rng, shape) for shape in SHAPES])
    with unchanged(opt):
        opt.state_dict()
        pickle.dumps(opt)
        copy.deepcopy(opt)
        opt.prepare(opt.parameters[0], np.zeros(0, np.int32))
    opt.prepare(opt.parameters[0].data, np.arange(90))
    with unchanged(opt):
        opt.prepare(opt.parameters[0], np.arange(90).reshape(9, 10))


def test_skipped_steps() -> None:
    """A step that is skipped is missed by no row."""
    ends = []
    for with_nan in (False, True):
        opt = nn.Adam([begin()[0]], 1e-2, sparse_update="catch_up", skip_nonfinite=True)
        rng = np.random.default_rng(0)
        for _ in range(20):
            own = rows(rng, SHAPES[0])
            if with_nan:
                opt([nn.RowTensor(own.indices, own.values * np.nan, SHAPES[0])])
            opt([own])
        opt.flush()
        ends.append(opt.parameters[0].data)
    assert_same_arrays(ends[:1], ends[1:])


def test_states_of_others(tmp_path: Path) -> None:
    """A dense state begins awake; one that sleeps is refused where nobody could wake it."""
    rng = np.random.default_rng(0)
    dense, asleep = (
        nn.Adam(begin(), 1e-2, sparse_update=how) for how in ("dense_equivalent", "catch_up")
    )
    for _ in range(5):
        given_now = [rows(rng, shape) for shape in SHAPES]
        dense(given_now)
        asleep(given_now)
    other = nn.Adam([p.data.copy() for p in dense.parameters], 1e-2, sparse_update="catch_up")
    other.load_state_dict(dense.state_dict())
    assert all((last == 5).all() for last in other._states[LAST.name])
    with refused(
        ValueError, r"has rows that sleep: expected none: state_dict\(flush=True\)", dense
    ):
        dense.load_state_dict(asleep.state_dict())
    path = str(tmp_path / "state.safetensors")
    with pytest.raises(TypeError, match="has no rows that sleep"):
        nn.save_checkpoint(asleep.parameters, path, flush=True)
    nn.save_checkpoint(asleep, path, flush=True)
    state = nn.load_checkpoint(path)
    assert not [name for name in state if name.startswith((LAST.name, SCALARS))]
    dense.load_state_dict(state)
    dense.load_state_dict(asleep.state_dict())  # all rows are up to date now


@pytest.mark.parametrize("shift", [-3_000, 1])
def test_last_steps_of_another_time(shift: int) -> None:
    """A row whose last step lies in the future, or is forgotten, is refused."""
    opt = nn.AdamWeightDecay(begin(), 1e-2, sparse_update="catch_up")
    state = opt.state_dict() | {"global_step": np.array([2_999], np.int32)}
    for p in opt.parameters:
        state[f"step.{p.name}"][:] = 2_999
        state[f"{LAST.name}.{p.name}"][:] = 2_999
    state[f"{LAST.name}.parameter_0"][4] += shift
    with refused(ValueError, r"state 'last_step.parameter_0' has rows of another time", opt):
        opt.load_state_dict(state)


def test_bags() -> None:
    """EmbeddingBags bring the rows that they pool up to date, in every form of ids."""
    rng = np.random.default_rng(4)
    tables, opts, bags = [], [], []
    for how in ("catch_up", "dense_equivalent"):
        own = begin()[:2]
        opt = nn.Adam(own, 1e-2, sparse_update=how)
        tables.append(own)
        opts.append(opt)
        bags.append(nn.EmbeddingBags(own, opt))
    joined = np.array([1, 0, 89, 39, 2, 3]), np.array([0, 1, 3, 5, 6])
    for k in range(60):
        ids = [rng.integers(0, n, (4, 3)) for n, _ in SHAPES[:2]]
        given_now = joined if k % 5 == 0 else (ids,)
        found, expected = (own(*given_now) for own in bags)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        grad = rng.standard_normal(found.shape).astype(np.float32)
        for own in bags:
            own.backward(grad)


def test_together_and_shards(tmp_path: Path) -> None:
    """A sharded table: its owner prepares the rows that others ask for."""
    whole, shape = begin()[0], SHAPES[0]
    shard = RowShard(len(whole), alone())
    table, plain = whole.copy(), whole.copy()
    opt = nn.LazyAdam([table], 1e-2, sparse_update="catch_up")
    together(opt, alone())
    dense = nn.Adam([plain], 1e-2)
    rng = np.random.default_rng(3)
    for _ in range(40):
        own = rows(rng, shape)
        route = shard.route(own.indices)
        opt.prepare(table, route.needed)
        np.testing.assert_allclose(route.gather(table), plain[own.indices], rtol=1e-5, atol=1e-5)
        opt((route.scatter(own.values),))
        dense((own,))
    shards = {"parameter_0": shard}
    distributed.save_checkpoint(tmp_path, opt, alone(), shards)
    resumed = nn.LazyAdam([np.zeros(shape, np.float32)], 1e-2, sparse_update="catch_up")
    distributed.load_checkpoint(tmp_path, resumed, alone(), shards)
    for each in (opt, resumed):
        each.flush()
    assert_same_arrays(arrays_of(opt), arrays_of(resumed))


IMPOSSIBLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a rule": (lambda p: nn.AdaMax(p, sparse_update="catch_up"), "steps without a gradient can"),
    "FTRL": (lambda p: nn.FTRL(p, sparse_update="catch_up"), "expected a rule whose steps"),
    "a decay": (
        lambda p: nn.Adam(p, weight_decay=0.1, sparse_update="catch_up"), "AdamWeightDecay's"),
    "random bits": (
        lambda p: nn.LazyAdam([p[0].astype(BF16)], sparse_update="catch_up", rounding="stochastic"),
        "excludes random bits"),
    "a mean": (
        lambda p: nn.Momentum(
            [{"params": p, "grad_centralization": True, "weight_decay": 0.1}], 0.1, 0.9,
            sparse_update="catch_up"),
        "excludes centralized decays"),
    "no such way": (lambda p: nn.Adam(p, sparse_update="later"), "is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_sleep(case: str) -> None:
    """Rules and options that have no idle form are refused, with what has one."""
    make, text = IMPOSSIBLE[case]
    with pytest.raises(ValueError, match=text):
        make(begin())


def test_bad_input() -> None:
    """Ids, tables and other optimizers that do not fit: one error, nothing written."""
    opt = nn.Adam(begin(), 1e-2, sparse_update="catch_up")
    rng = np.random.default_rng(0)
    for _ in range(3):
        opt([rows(rng, shape) for shape in SHAPES])
    p = opt.parameters[0]
    with refused(
        IndexError, r"Adam.prepare: indices\[1\] is out of range: expected 0 <= index < 90", opt
    ):
        opt.prepare(p, np.array([3, 90]))
    with refused(TypeError, "has a wrong dtype: expected int32 or int64, got float64", opt):
        opt.prepare(p, np.array([3.0]))
    with refused(ValueError, "parameter is none of the optimizer's", opt):
        opt.prepare(begin()[0], np.array([3]))
    with refused(ValueError, r"has rows that sleep: expected none: flush\(\)", opt):
        p.data = p.data.copy()
    with refused(ValueError, r"has rows that sleep: expected none: flush\(\)", opt):
        nn.SGD([p])
    with refused(ValueError, "parameters are sent after each step", opt):
        ShardedStates(opt, alone())
    opt.flush()
    p.data = p.data.copy()
    nn.SGD([p])


def test_of_others_nothing_sleeps() -> None:
    """With another sparse_update both calls find nothing to do, and still check what they get."""
    opt = nn.LazyAdam(begin())
    with unchanged(opt):
        opt.flush()
        opt.prepare(opt.parameters[0], np.array([3]))
    with pytest.raises(IndexError):
        opt.prepare(opt.parameters[0], np.array([-1]))
    assert opt.state_dict(flush=True).keys() == opt.state_dict().keys()
