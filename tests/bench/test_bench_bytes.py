"""The byte model against the arrays that steps really have, and the loops that move as much."""

import itertools
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from bench_support import EVERY_STEP, SOME_STEPS, named, point, use_small_models
from fusestep.bench import bounds, machine, work
from fusestep.bench.buffers import Buffers
from fusestep.bench.cases import steps as cases
from fusestep.bench.cases.optimizers import OPTIMIZERS
from fusestep.bench.cases.steps import Case
from fusestep.bench.cases.subject import DTYPES, Traffic, Use
from fusestep.bench.errors import BenchError
from fusestep.bench.measure import in_process, warm_up
from fusestep.bench.report.result import OURS
from fusestep.bench.workers.worker_protocol import Job, in_turn
from helpers import arrays_of, label, sampled, unchanged

each = pytest.mark.parametrize(("case", "dtype"), sampled(EVERY_STEP, SOME_STEPS), ids=label)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of which a step takes no time."""
    use_small_models(monkeypatch.setattr, tables=50, batch=20, width=5)


def set_up(case: Case, dtype: str) -> tuple[work.Inputs, Buffers]:
    given = work.inputs(point(case.name, dtype=dtype))
    prepare, storage = case.subject.prepare, DTYPES[dtype]
    return given, Buffers(prepare, case.use, storage, given.parameters)


# -- the model ------------------------------------------------------------------------------------

# Arrays of a parameter's size that are read before the update, or only read: what no look at
# the results shows. Lamb: gradient, parameter and two moments; LARS: gradient and parameter;
# AdaFactor: gradient for the factors, gradient and parameter (for its size) for the scale.
# Prodigy: gradient, parameter, where it began and the sum of gradients; where it began again.
READ_BEFORE = {"nn.Lamb": 4, "nn.LARS": 2, "nn.AdaFactor": 3, "ops.clip_by_global_norm": 1}
READ_BEFORE["nn.Prodigy"] = 5


def outputs(result: Any, known: list[np.ndarray]) -> int:
    """Bytes of the new arrays that a step returns."""
    arrays = [array for array in arrays_of(result) if array.ndim > 0]
    return sum(a.nbytes for a in arrays if not any(np.shares_memory(a, b) for b in known))


def counted(case: Case, dtype: str, given: work.Inputs, buffers: Buffers) -> int:
    """What a step read and wrote, by the sizes of its arrays and by what changed in them."""
    rng = np.random.default_rng(0)
    for parameter in buffers.parameters:  # next to 1, a step of LARS is nothing in 16 bit
        parameter.reshape(-1)[1::2] = 0.0
    for _, *states in (updated or (None,) for updated in buffers.prepared.updated):
        for state in states:
            state[...] = rng.uniform(0.1, 1.0, state.shape)  # so that rows without gradient change
    before = [[array.copy() for array in updated] for updated in buffers.prepared.updated]
    job = buffers.job(fresh=False)
    job.load()
    result = job.step()
    known = [array for updated in buffers.prepared.updated for array in updated]
    total = outputs(result, [*known, *buffers.parameters])
    itemsize, use = DTYPES[dtype].itemsize, case.use
    steps = not use.looks_up or use.traffic.updated > 0
    for one in given.parameters:
        total += one.gradient.size * itemsize * steps
        total += one.indices.nbytes * (use.looks_up + steps) if one.indices is not None else 0
    total += sum(of.offsets[1:].nbytes for of in buffers.bags) * (use.looks_up + steps)
    for one, old, new in zip(given.parameters, before, buffers.prepared.updated, strict=True):
        if not new:
            continue
        changed = [(a != b).reshape(len(a), -1) for a, b in zip(new, old, strict=True)]
        if one.indices is None:
            assert all(of.any() for of in changed), "an array that counts as updated was not"
            total += 2 * sum(array.nbytes for array in new)
        else:
            rows = np.any([of.any(axis=1) for of in changed], axis=0).sum()
            total += 2 * sum(int(rows) * array[0].nbytes for array in new)
    size = sum(parameter.nbytes for parameter in buffers.parameters)
    name = case.name.partition("/")[2]
    if name == "ops.LARSUpdate":
        total += size  # the weight
    for index, table in zip(buffers.indices, buffers.parameters, strict=True):
        if use.looks_up and index is not None:
            total += len(set(index.tolist())) * table[0].nbytes
    return total + READ_BEFORE.get(name, 0) * size


@each
def test_the_model_is_what_a_step_moves(case: Case, dtype: str) -> None:
    given, buffers = set_up(case, dtype)
    assert given.bytes == counted(case, dtype, given, buffers)


@pytest.mark.parametrize("name", [f"nn.{name}" for name in OPTIMIZERS])
def test_all_states_of_an_optimizer_count(name: str) -> None:
    """All arrays of a parameter's size."""
    subject = cases.SUBJECTS[name]
    parameters = [np.zeros((7, 5), np.float32)]
    prepared = subject.prepare(parameters)
    arrays = arrays_of(OPTIMIZERS[name.removeprefix("nn.")].make(parameters))
    same_size = [array for array in arrays if array.size == 35]
    (updated,), moved = prepared.updated, subject.uses["dense"].traffic
    assert len(same_size) == moved.updated + moved.read - 1
    assert len(updated) == moved.updated + moved.of_rows
    assert updated[0] is parameters[0]


def test_bytes_by_hand() -> None:
    adam = Use("adam", Traffic(3))
    assert adam.bytes_moved("dense", 4, n=10) == 280
    assert adam.bytes_moved("rows", 2, U=9, D=8, B=50) == 864 + 800 + 400
    # 6 * 100 * 8 * 4 of all rows, 50 * 8 * 4 of the gradient, 50 * 8 of the indices.
    every = replace(adam, every_row=True)
    assert every.bytes_moved("rows", 4, N=100, D=8, B=50) == 19_200 + 1_600 + 400
    # Of 5 bags, with an offset each, and of 9 rows that have a state of 4 bytes.
    bags = Use("x", Traffic(1, of_rows=1), looks_up=True)
    both = 4 * (9 + 5) * 8 + 8 * 5 + 8 * 50, 8 * 9 * 8 + 8 * 9 + (4 * 8 + 8) * 5 + 8 * 50
    assert bags.bytes_moved("pooled", 4, U=9, D=8, B=50, S=5) == sum(both)
    assert Use("x", Traffic(3, passes=(4,))).bytes_moved("dense", 4, n=1) == 44


def test_cached_and_rotating_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps get fresh gradients, large ones sets of buffers in turn."""
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 28_000)
    one = point("dense/nn.Adam", "100")  # 2,800 bytes: less than an eighth of the cache
    given = work.inputs(one)
    assert (given.copies, given.from_memory, given.fresh) == (1, False, True)
    given = work.inputs(point("dense/nn.Adam", "125"))
    assert (given.copies, given.from_memory, given.fresh) == (24, True, False)
    assert work.inputs(point("dense/nn.Adam", "10K")).copies == 1
    sets: list[Buffers] = []
    bound_of = work.bound_of
    monkeypatch.setattr(work, "bound_of", lambda own: sets.append(own) or bound_of(own))
    ours = work.build(one, given)[OURS]
    for _ in sets * 2:  # each is used once before any is used again
        ours.load()
        ours.step()
    assert len({id(own.parameters[0]) for own in sets}) == 24
    assert len({own.parameters[0].tobytes() for own in sets}) == 1 and sets[0].parameters[0].any()


def test_memory_limits_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 28_000)
    needed = 125 * 4 * 4

    class Memory:
        available = 8 * needed

    monkeypatch.setattr(work.psutil, "virtual_memory", Memory)
    assert work.inputs(point("dense/nn.Adam", "125")).copies == 2
    Memory.available = needed
    with pytest.raises(BenchError, match=r"needs 0\.0 GB, 0\.0 GB of memory are free"):
        work.inputs(point("dense/nn.Adam", "125"))


def test_nobody_meets_the_buffers_of_the_one_before() -> None:
    """Step and bounds share one turn: with turns of their own a bound would run in the cache."""
    used: list[int] = []
    turns = itertools.count()

    def job() -> Job:
        return in_turn([Job(partial(used.append, k)) for k in range(5)], turns)

    contestants = in_process({"step": job(), "a bound": job(), "another": job()})
    warm_up(contestants)
    for contestant in (*contestants, *contestants):
        contestant.sample()
    assert len(used) >= 3 * 2 * 3
    assert all(b == (a + 1) % 5 for a, b in pairwise(used))


def test_a_fresh_gradient_is_a_new_array(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    buffers = set_up(named("dense/nn.SGD"), "float32")[1]
    monkeypatch.setattr(buffers, "prepared", buffers.prepared._replace(step=given.append))
    for fresh in (True, False):
        job = buffers.job(fresh=fresh)
        for _ in range(2):
            job.load()
            job.step()
    first, second, third, fourth = (gradients[0] for gradients in given)
    assert first is not second
    np.testing.assert_array_equal(first, second)
    assert third is fourth


# -- bounds ---------------------------------------------------------------------------------------


@each
def test_a_bound_moves_what_the_model_says(case: Case, dtype: str) -> None:
    given, buffers = set_up(case, dtype)
    assert sum(p.bytes for p in work.bound_of(buffers)) == given.bytes


# What the loops follow from: others with the same are the same loops.
LOOPS = {
    (case.kind, case.use.traffic, case.use.looks_up): (case, dtype) for case, dtype in SOME_STEPS
}


@pytest.mark.parametrize(("case", "dtype"), sampled(EVERY_STEP, LOOPS.values()), ids=label)
def test_bounds_change_nothing(case: Case, dtype: str) -> None:
    """Not one bit of what a step updates or reads; they can run between two steps."""
    given, buffers = set_up(case, dtype)
    job = buffers.job(fresh=False)
    job.load()
    job.step()
    bound = work.bound_of(buffers)
    loops = bounds.jobs(bound, threads=2)
    assert list(loops)[-1] == "serial"
    with unchanged(buffers.prepared.updated, buffers.values, buffers.indices, buffers.parameters):
        for loop in loops.values():
            loop.step()
    look_ups = [p for p in bound if isinstance(p, bounds.Gather)]
    for p, table, index in zip(look_ups, buffers.parameters, buffers.indices, strict=False):
        assert_put_together(p.out, table, index)
    if len(given.parameters) == 1 and buffers.prepared.updated[0]:
        arrays = [a for p in bound if not isinstance(p, bounds.Gather) for a in p.updated]
        ours = buffers.prepared.updated[0]
        assert all(np.shares_memory(a, b) for a, b in zip(arrays, ours, strict=True))


def assert_put_together(out: np.ndarray, table: np.ndarray, index: Any) -> None:
    """All bits of the rows of each bag; of one row, the row."""
    bits = table.view(f"u{table.itemsize}")[index].reshape(len(out), -1, table.shape[1])
    np.testing.assert_array_equal(out.view(bits.dtype), np.bitwise_or.reduce(bits, axis=1))


# How many arrays are updated, read and written.
FORMS = [
    *((1, 0, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0), (4, 1, 0), (4, 2, 0), (5, 1, 0), (2, 1, 1)),
    *((0, 1, 1), (0, 2, 1), (0, 1, 0), (0, 2, 0), (0, 4, 0)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_loops_of_several_chunks(form: tuple[int, int, int], dtype: str) -> None:
    """Each shape reaches all elements, which is seen where it writes."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(70_003).astype(DTYPES[dtype]) for _ in range(sum(form))]
    updated, read, _ = form
    given, out = tuple(arrays[: updated + read]), tuple(arrays[updated + read :])
    stream = bounds.Stream(given[:updated], given[updated:], out)
    assert stream.bytes == sum(a.nbytes for a in (*arrays, *given[:updated]))
    loops = bounds.jobs([stream], threads=2)
    assert len(loops) == (4 if stream.bytes >= 2**20 else 5)
    with unchanged(*given):
        for loop in loops.values():
            for array in out:
                array.fill(1)
            loop.step()
            assert not any(array.any() for array in out)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_gather_reaches_all_rows(threads: int) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((501, 33)).astype(np.float32)
    index = rng.integers(0, 501, 2_002)
    for bag in (1, 7, 2_002):
        out = np.empty((2_002 // bag, 33), np.float32)
        gather = bounds.Gather(index, table, out)
        for loop in bounds.jobs([gather], threads).values():
            out.fill(np.nan)
            loop.step()
            assert_put_together(out, table, index)


def test_rows_of_a_bound_are_those_of_the_batch() -> None:
    """A loop that changes what it is given shows which rows it meets."""
    table = np.zeros((40, 6), np.uint32)
    rows = np.array([3, 8, 39])
    for chunk in (1, 2, 100):
        table[...] = 0
        bounds._compiled(bounds._over_rows, False)((table,), rows, np.uint32(5), chunk)
        np.testing.assert_array_equal(np.flatnonzero(table.any(axis=1)), rows)
        assert (table[rows] == 5).all()
