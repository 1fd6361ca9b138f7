"""Statistics, plans and verdicts, on a clock that only steps move."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import psutil
import pytest
import bench_support
from bench_support import FakeClock, quiet, result
from fusestep.bench import bounds, measure, point, work
from fusestep.bench.buffers import Buffers
from fusestep.bench.cases import model_shapes, options
from fusestep.bench.cases import steps as cases
from fusestep.bench.cases import torch as torch_cases
from fusestep.bench.errors import BenchError
from fusestep.bench.measure import Contestant, ContestantLostError, Plan, interleave, plan
from fusestep.bench.peer import Peers
from fusestep.bench.report import result as figures
from fusestep.bench.report.result import OURS, PointResult, SpecialResult, Summary

from fusestep.bench.special import (  # isort: skip
    catch_up, changing_steps, dlrm_programs, dlrm_training, far_rows, first_step, id_map, rounding,
    training,
)  # fmt: skip
from fusestep.bench.workers import worker_protocol
from fusestep.bench.workers.worker_protocol import Job, before_step, in_turn, samples
from fusestep.examples.click_model import runs as click_runs
from fusestep.kernels.cache import cache_directory

# -- statistics -----------------------------------------------------------------------------------


def test_summary() -> None:
    assert Summary.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Summary(3.5, 2.0, 5.0, 6)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0, 1)


def test_a_ratio_is_of_medians_and_its_spread_of_opposite_ends() -> None:
    theirs, ours = Summary(6.0, 5.0, 9.0, 9), Summary(2.0, 1.0, 4.0, 9)
    assert figures.ratio(theirs, ours) == figures.Ratio(3.0, 1.25, 9.0)


def test_paired_ratios_are_of_the_same_round() -> None:
    """A machine that is ten times slower in one round does not show."""
    assert figures.paired([11.0, 110.0, 11.0], [10.0, 100.0, 10.0]) == Summary(1.1, 1.1, 1.1, 3)
    with pytest.raises(ValueError, match="zip"):
        figures.paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("median", "p20", "p80", "verdict"), [
    (1.04, 1.01, 1.5, "slower"),
    (1.04, 0.99, 1.5, "same"),  # the rounds do not agree
    (1.02, 1.01, 1.03, "same"),  # they agree on next to nothing
    (0.96, 0.90, 0.99, "faster"),
    (0.96, 0.90, 1.01, "same"),
    (0.98, 0.97, 0.99, "same"),
])  # fmt: skip
def test_verdicts_of_changes(median: float, p20: float, p80: float, verdict: str) -> None:
    assert figures.change(Summary(median, p20, p80, 9)) == verdict


def test_the_fastest_has_the_smallest_median() -> None:
    times = {"a": Summary(2, 0, 2, 3), "b": Summary(1, 1, 9, 3)}
    assert figures.fastest(times, ["a", "b", "missing"]) == "b"
    assert figures.fastest(times, ["missing"]) is None


# -- plans ----------------------------------------------------------------------------------------


# Seconds of a step of each contestant, ours first, and of the budget; rounds, and which
# contestants sit out how many of them.
PLANS: list[tuple[dict[str, float], float, str, Plan]] = [
    # 2 x 25 ms a round, lead-ins included; a turn of short steps lasts 5 ms and 1 ms.
    ({"a": 0.010, "b": 0.015}, 1.0, "loop", Plan(20)),
    ({"a": 1e-4, "b": 1e-3}, 1.0, "loop", Plan(83)),
    ({"a": 0.0, "b": 0.0}, 1.0, "loop", Plan(83)),
    # There are limits.
    ({"a": 10.0}, 1.0, "loop", Plan(7)),
    ({"a": 1e-3}, 1.0, "loop", Plan(101)),
    ({"a": 0.5, "b": 1e-3}, 1.0, "loop", Plan(7)),
    # Half of the budget by 48 ms; who is slow has the other half for itself, 11 turns.
    ({"a": 0.005, "b": 0.019, "slow": 0.021}, 1.0, "loop", Plan(10, {"slow": 1})),
    ({"a": 0.005, "b": 0.020}, 1.0, "loop", Plan(20)),  # four times as slow is not too slow
    ({"a": 0.005, "slow": 0.050}, 1.0, "loop", Plan(50, {"slow": 10})),
    # Two share that half; one of them has no more than the three turns that each gets.
    ({"a": 0.005, "b": 0.050, "c": 0.025}, 1.0, "loop", Plan(50, {"b": 17, "c": 10})),
    ({"a": 0.02, "slow": 9.0}, 1.0, "loop", Plan(12, {"slow": 4})),
    # Turns in other scenarios are longer: 0.2 + 0.6 s a round, and 6 turns of 6 x 0.2 s.
    ({"a": 1e-4, "b": 0.1, "slow": 0.2}, 16.0, "pause20", Plan(10, {"slow": 2})),
    ({"a": 1e-4}, 0.1, "busy", Plan(3)),
    ({"a": 1e-4}, 1e9, "busy", Plan(101)),
]


@pytest.mark.parametrize(("warm", "budget", "scenario", "expected"), PLANS)
def test_plans(warm: dict[str, float], budget: float, scenario: str, expected: Plan) -> None:
    """Rounds fill the budget, of which contestants that are much slower than ours have a half."""
    assert plan(warm, budget, scenario) == expected


# -- interleaving ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_plan", "lost", "order"), [
    (Plan(3), {}, "ababab"),  # everybody once, then everybody again
    (Plan(5, {"b": 2}), {}, "abaabaab"),  # who sits out comes back
    (Plan(3), {"b": "gone"}, "aaa"),  # who is lost in the warm-up stays out
])  # fmt: skip
def test_who_takes_turns(of_plan: Plan, lost: dict[str, str], order: str) -> None:
    taken, rounds = [], []

    def contestant(label: str) -> Contestant:
        return Contestant(label, lambda: taken.append(label) or [float(len(taken))])

    times = interleave([*map(contestant, "ab")], of_plan, lost, rounds.append)
    assert "".join(taken) == order and rounds == [*range(1, of_plan.rounds + 1)]
    places = {x: [k for k, name in enumerate(order, 1) if name == x] for x in {*order}}
    assert times.samples == places and times.lost == lost
    assert times.summaries == {label: Summary.of(found) for label, found in places.items()}


@pytest.mark.parametrize("good_turns", [0, 2])
def test_a_contestant_that_is_lost_does_not_stop_the_others(good_turns: int) -> None:
    asked: list[str] = []

    def fail() -> list[float]:
        asked.append("a")
        if len(asked) > good_turns:
            raise ContestantLostError("out of memory")
        return [1.0]

    times = interleave([Contestant("a", fail), Contestant("b", lambda: [1.0])], Plan(5))
    assert times.lost == {"a": "out of memory"}
    assert len(asked) == good_turns + 1  # and it is not asked again
    assert times.samples == {"b": [1.0] * 5}


def test_before_other_processes_start_our_threads_may_settle(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(measure.time, "sleep", lambda _: order.append("pause"))

    def contestant(label: str, elsewhere: bool) -> Contestant:
        return Contestant(label, lambda: order.append(label) or [1.0], elsewhere)

    contestants = [contestant("a", False), contestant("b", True), contestant("c", True)]
    interleave(contestants, Plan(2))
    assert order == ["a", "pause", "b", "c"] * 2


def test_single_steps_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round another job is the first; loads and what is warm do not count."""
    clock, done = FakeClock(), []
    monkeypatch.setattr(measure, "time", clock)

    def act(name: str, seconds: float) -> None:
        done.append(name)
        clock.now += seconds

    jobs = {x: Job(partial(act, x, n), partial(act, f"load {x}", 9.0)) for n, x in enumerate("ab")}
    assert measure.one_by_one(jobs, rounds=2, warm=1) == {"a": [0.0, 0.0], "b": [1.0, 1.0]}
    assert done == [name for label in "abbaab" for name in (f"load {label}", label)]


# -- samples --------------------------------------------------------------------------------------


# Seconds of either thing that comes before a step, of the steps of a turn, and its samples. In a
# loop 5 ms of the lead-in come first, then 1 ms, else a tenth of a second of either, and at least
# three steps.
TURNS: list[tuple[str, float, list[float], list[float]]] = [
    ("loop", 0.0, [0.003, 0.0025, 1e-4, 2e-4, 3e-4, 5e-4], [2.75e-4]),  # the mean
    ("loop", 25.0, [9.0, 1.0], [1.0]),
    ("pause20", 0.0075, [0.011] * 8, [0.011] * 4),
    ("pause20", 50.0, [0.5, 0.6, 0.7, 0.1, 0.2, 0.3], [0.1, 0.2, 0.3]),
    ("busy", 0.0, [0.5, 0.6, 0.7, 0.1, 0.2, 0.3], [0.2]),
    # A step after a pause and one without are a sample; a last one that has no other is left out.
    ("torch-pause", 0.0, [9.0, 9.0, 9.0, 0.05, 0.03, 0.05], [0.04]),
]


@pytest.mark.parametrize(("scenario", "before", "durations", "expected"), TURNS)
def test_turns(
    scenario: str, before: float, durations: list[float], expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What comes before a step comes after its arrays, and does not count."""
    clock, left = FakeClock(), iter(durations)
    done: list[str] = []
    monkeypatch.setattr(worker_protocol, "time", clock)

    def act(name: str) -> None:
        clock.now += next(left) if name == "step" else before
        done.append(name)

    job = Job(partial(act, "step"), partial(act, "load"))
    assert samples(job, scenario, partial(act, "other")) == pytest.approx(expected)
    assert done == ["load", "other", "step"] * len(durations)


@pytest.mark.parametrize(
    "scenario", [name for name in worker_protocol.SCENARIOS if not name.startswith("torch")]
)
def test_what_a_scenario_does_before_a_step(scenario: str) -> None:
    if scenario == "jax":
        pytest.importorskip("jax")
    begin = time.perf_counter()
    before_step(scenario, 1)()
    spent = time.perf_counter() - begin
    if scenario.startswith("pause"):
        assert spent >= 1e-3 * int(scenario[5:])


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_product_of_another_library_needs_it(library: str) -> None:
    if find_spec(library) is not None:
        pytest.skip("it is here")
    with pytest.raises(ImportError, match=library):
        before_step(library, 1)
    with pytest.raises(BenchError, match=f"--scenario {library}: needs {library}"):
        options.request(bench_support.arguments("--scenario", f"loop,{library}"))


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (5, 2)])
def test_busy_is_a_process_for_each_two_cores(cores: int, count: int, monkeypatch) -> None:
    monkeypatch.setattr(point.machine, "cores", lambda: cores)
    me = psutil.Process()
    before = set(me.children())
    with point.company("busy"):
        others = set(me.children()) - before
        assert len(others) == count
        until = time.monotonic() + 30.0
        while any(other.cpu_times().user == 0 for other in others):  # told in hundredths
            assert time.monotonic() < until
            time.sleep(0.01)
    assert set(me.children()) == before
    with point.company("loop"):
        assert set(me.children()) == before


def test_jobs_in_turn_load_what_they_step() -> None:
    done: list[str] = []

    def job(name: str) -> Job:
        return Job(lambda: done.append(f"step {name}"), lambda: done.append(f"load {name}"))

    several = in_turn([job("a"), job("b")], itertools.count())
    for _ in range(3):
        several.load()
        several.step()
    assert done == ["load a", "step a", "load b", "step b", "load a", "step a"]


# -- a point on the clock of the tests ------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The bound takes 10 s, a slower shape 20 s; our step works from memory."""
    clock = FakeClock()
    loops = {"slow": clock.job(20.0), "fast": clock.job(10.0)}
    monkeypatch.setattr(bounds, "jobs", lambda *_: loops)
    monkeypatch.setattr(worker_protocol, "time", clock)
    monkeypatch.setattr(work.machine, "last_cache_bytes", lambda: 1000)
    return clock


FORMS_OF_TORCH = {
    "rows/nn.torch.SGD": "SGD",
    "dense/nn.torch.SGD": "SGD(fused=True)",
    "rows/nn.Adam": "index_add_, Adam(fused=True)",  # it steps in a process of its own only
}


@pytest.mark.parametrize(("case", "form"), FORMS_OF_TORCH.items())
def test_pytorch_takes_the_same_steps_in_this_process(case: str, form: str) -> None:
    """Its parameters are its own, its gradients those of the point; of dense ones it is fused."""
    pytest.importorskip("torch")
    one = bench_support.point(case)
    given, subject, use = work.inputs(one), one.case.subject, one.case.use
    labels = [label for label in work.build(one, given) if label.startswith("torch-in-process")]
    assert labels == [f"torch-in-process {form}"] * use.in_process
    ours = Buffers(subject.prepare, use, np.dtype(np.float32), given.parameters)
    make = torch_cases.forms_here(str(use.algorithm), one.case.kind, "float32", 1)[form]
    of = worker_protocol.Case("", form, "float32", given.parameters, one.case.kind, True)
    theirs = make(of)
    for job in (ours.job(fresh=True), theirs.job):
        for _ in range(3):
            job.load()
            job.step()
    assert ours.parameters[0].any()
    # Adam of MindSpore adds epsilon before the bias is corrected.
    np.testing.assert_allclose(ours.parameters[0], theirs.values()[0], rtol=1e-4)


def measured(clock: FakeClock, ours: float, monkeypatch: pytest.MonkeyPatch) -> PointResult:
    """A point whose step takes ``ours`` seconds."""
    build = work.build

    def slowed(*arguments: Any) -> dict[str, Job]:
        return {**build(*arguments), OURS: clock.job(ours)}

    monkeypatch.setattr(point, "build", slowed)
    return point.run(bench_support.point(), 0.01, Peers({}), quiet)


@pytest.mark.parametrize(("ours", "from_memory", "losses"), [
    (11.4, True, ["87.7% of the bound"]),
    (11.0, True, []),
    (40.0, False, []),  # in the cache the bound is no target
])  # fmt: skip
def test_a_slowed_step_is_reported(
    clock: FakeClock, ours: float, from_memory: bool, losses: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not from_memory:
        monkeypatch.setattr(work.machine, "last_cache_bytes", lambda: 2**25)
    found = measured(clock, ours, monkeypatch)
    assert found.losses == losses
    assert found.times[OURS].median == pytest.approx(ours)
    assert found.bound is not None
    assert found.bound.label == "bound: fast"
    assert found.bound.value == pytest.approx(10 / ours)
    assert found.bytes == 900 * 28
    assert found.from_memory == from_memory


def test_threads_are_set_and_set_back(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    before = point.numba.get_num_threads()
    seen: list[int] = []
    jobs = bounds.jobs
    monkeypatch.setattr(
        bounds, "jobs",
        lambda bound, threads: seen.append(point.numba.get_num_threads()) or jobs(bound, threads),
    )  # fmt: skip
    measured(clock, 1.0, monkeypatch)
    assert set(seen) == {1}
    assert point.numba.get_num_threads() == before


def test_progress_ends_at_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(worker_protocol, "time", clock)
    told: list[float] = []
    jobs = {OURS: clock.job(3.0)}
    measure.measured(measure.in_process(jobs), "loop", 1.0, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_point_that_does_not_fit_is_not_available() -> None:
    found = point.run(bench_support.point(size="9000000G"), 0.5, Peers({}), quiet)
    assert not found.times
    assert "GB of memory are free" in found.unavailable[OURS]
    assert found.losses == []


@pytest.mark.parametrize(("times", "losses"), [
    ({"torch_fused": 0.009}, ["0.90 x torch fused"]),
    ({"torch_fused": 0.011, "torch_foreach": 0.02}, []),
    ({"torch_fused": 0.02, "torch_foreach": 0.005}, ["0.50 x torch foreach"]),
    ({"bound_x": 0.0088, "numpy_x": 0.0099}, ["88.0% of the bound", "0.99 x numpy x"]),
    # Peers are compared where nothing comes from memory, too.
    ({"from_memory": False, "bound_x": 0.001, "torch_x": 0.009}, ["0.90 x torch x"]),
])  # fmt: skip
def test_what_is_lost(times: dict[str, Any], losses: list[str]) -> None:
    """The fastest form of a peer counts, and less than 90% of the bound."""
    assert result(**times).losses == losses


# -- cases with a method of their own -------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SpecialResult]:
    """Measures a case, some values of whose module are replaced; its progress ends at the whole."""

    def measured(name: str, threads: int = 1, **values: Any) -> SpecialResult:
        module = import_module(f"fusestep.bench.special.{name.replace('-', '_')}")
        for of, value in values.items():
            monkeypatch.setattr(module, of, value)
        assert name in {case.name for case in cases.SPECIAL}
        found, told = SpecialResult(name, ""), list[float]()
        module.run(found, threads, told.append)
        assert told == sorted(told) and (told[0], told[-1]) == (0.0, 1.0)
        return found

    return measured


def test_far_rows_in_small(small: Callable[..., SpecialResult]) -> None:
    sizes = "1000x16x64", "30x5x9"
    found = small("far-rows", FAR_SIZES=sizes, ROUNDS=2)
    assert [*found.times] == [f"{size}: {part}" for size in sizes for part in far_rows.PARTS]
    plain = found.times["30x5x9: plain loop"].median
    assert found.limits["30x5x9: update alone"] == far_rows.OF_PLAIN * plain


def test_the_jobs_of_far_rows_do_the_same() -> None:
    rng = np.random.default_rng(0)
    g, drawn = rng.standard_normal((7, 20), np.float32), np.array([90, 3, 5, 17, 40, 41, 99])
    results = {}
    for label in (far_rows.STEP, far_rows.UPDATE, far_rows.PLAIN, far_rows.GROUPING):
        variables = [np.full((100, 20), x, np.float32) for x in (1.0, 0.5, 0.25)]
        jobs, grouped = far_rows.jobs_of(variables, g, drawn, 3)
        jobs[label]()
        grouped.release()
        results[label] = variables
    assert all((a == a[0, 0]).all() for a in results.pop(far_rows.GROUPING))
    for arrays in results.values():
        for array, of_step in zip(arrays, results[far_rows.STEP], strict=True):
            np.testing.assert_allclose(array, of_step, rtol=1e-5)
    assert (results[far_rows.STEP][0][drawn] != 1.0).all()


def test_far_rows_without_memory(small: Callable[..., SpecialResult]) -> None:
    with pytest.raises(BenchError, match=r"far-rows: needs .* GB"):
        small("far-rows", FAR_SIZES=("1000x16x64", "1Gx1Mx1"))


@pytest.fixture
def torch() -> Iterator[Any]:
    """PyTorch, which has as many threads afterwards as before."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    yield torch
    torch.set_num_threads(threads)


@pytest.fixture
def small_dlrm(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch, for a DLRM of which an iteration takes no time."""
    monkeypatch.setattr(model_shapes, "click_log_tables", lambda: [(50, 8), (7, 8)])
    monkeypatch.setattr(dlrm_training, "BATCH", 16)
    monkeypatch.setattr(training, "_ROUNDS", 3)
    return torch


# PyTorch's own Adagrad makes sparse tensors.
sparse_checks = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
of_fbgemm = pytest.mark.filterwarnings("ignore::DeprecationWarning:fbgemm_gpu")


@sparse_checks
@pytest.mark.usefixtures("small_dlrm")
def test_dlrm_training_in_small(small: Callable[..., SpecialResult]) -> None:
    found = small("dlrm-training", SCENARIOS=("loop", "pause20"))
    names = training.THEIRS, training.OURS, dlrm_training.LAYERS
    assert [*found.times] == [f"{s} {name}" for s in ("loop", "pause20") for name in names]
    theirs = found.times["loop torch"].median
    assert found.limits["loop nn.torch"] == theirs / dlrm_training.FASTER


@sparse_checks
def test_programs_of_a_dlrm_train_alike(small_dlrm: Any) -> None:
    """Both ways have the same losses, which fall; of the layers alone all parameters move."""
    losses = {}
    for name, (optimizers, loss) in dlrm_training.programs_of(small_dlrm).items():
        losses[name] = []
        for _ in range(30):
            for optimizer in optimizers:
                optimizer.zero_grad()
            now = loss()
            now.backward()
            losses[name].append(now.item())
            for optimizer in optimizers:
                optimizer.step()
                assert all(p.grad is not None for g in optimizer.param_groups for p in g["params"])
    ours, theirs = losses[training.OURS], losses[training.THEIRS]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert np.mean(ours[-4:]) < np.mean(ours[:4])
    assert losses[dlrm_training.LAYERS] != ours


@sparse_checks
@of_fbgemm
@pytest.mark.usefixtures("small_dlrm")
def test_dlrm_programs_in_small(
    small: Callable[..., SpecialResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs that are here have times in each scenario, and areas of each seed."""
    programs: Any = import_module("fusestep.examples.click_model.programs")
    short = click_runs.Settings(steps=2, batch=8, rows=30, held_out=300)
    monkeypatch.setattr(programs, "SHORT", short)
    found = small("dlrm-programs", SEEDS=2)
    kinds = programs.kinds_here(*programs.KINDS, programs.LAYERS)
    assert [*found.times] == [
        f"{ids}, {news}: {kind}: {part}" for ids in ("one id", "20 ids")
        for news in dlrm_programs.NEW for kind in kinds for part in ("iteration", "processor")
    ]  # fmt: skip
    learning = {programs.HIDDEN, *programs.kinds_here(*programs.KINDS[:4])}
    assert {*found.scores} == learning and all(len(x) == 2 for x in found.scores.values())


@of_fbgemm
@pytest.mark.usefixtures("torch")
def test_programs_on_hashed_ids_train_alike() -> None:
    """All steps in and after backward, in bags and lists, FBGEMM's too, come to the same losses."""
    programs: Any = import_module("fusestep.examples.click_model.programs")
    torch, sizes, losses = import_module("torch"), (50, 7), {}
    dense, rows = torch.randn(16, 13), torch.randint(0, 2**40, (2, 16, 3))
    batch = programs.hashed_batch((dense, rows, torch.ones(16)))
    for kind in programs.kinds_here(programs.FBGEMM, programs.HASHED, programs.HASHED_LIST):
        program = programs.Program(kind, sizes, 8)
        losses[kind] = []
        for _ in range(5):
            losses[kind].append(program.loss(batch).item())
            program.step(batch)
        np.testing.assert_allclose(losses[kind], next(iter(losses.values())), rtol=1e-4)
        assert losses[kind][-1] < losses[kind][0]


@pytest.mark.usefixtures("torch")
def test_new_ids_of_a_batch_are_admitted_in_the_next_one() -> None:
    programs: Any = import_module("fusestep.examples.click_model.programs")
    torch, sizes = import_module("torch"), (200, 10)
    rows = torch.stack([torch.randint(0, n, (100, 2)) for n in sizes])
    known = programs.hashed_batch((torch.randn(100, 13), rows, torch.ones(100)))
    program = programs.Program(programs.GROWING, sizes, 8)
    programs.admit(program.model, sizes)
    maps = [table.ids for table in program.model.tables.children()]
    for n_new, share in ((0, 0.0), (10, 0.05)):
        batches = programs.with_new([known], sizes, share)
        before = program.model.tables.get_submodule("0").ids.evictions
        for _ in range(4):
            program.step(next(batches))
        assert [len(ids) for ids in maps] == [*sizes]
        assert (maps[0].evictions > before) == bool(n_new) and maps[1].evictions == 0


def test_area_below_the_curve() -> None:
    programs: Any = pytest.importorskip("fusestep.examples.click_model.programs")
    metrics, rng = pytest.importorskip("sklearn.metrics"), np.random.default_rng(0)
    scores, labels = rng.standard_normal(99), rng.integers(0, 2, 99)
    assert programs.area(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores))


@pytest.mark.usefixtures("torch")
def test_rounding_in_small(small: Callable[..., SpecialResult]) -> None:
    """Each contestant is measured, and those have a limit that should reach a share."""
    sizes = {"small": (5, 3), "rows": rounding.Rows(9, 3, 4)}
    found = small("rounding", SIZES=sizes, WARM=1, ROUNDS=3, N_PROCESSES=2)
    names = {"rows": [*rounding.FORMS], "small": [*rounding.FORMS, rounding.NEW, rounding.KEPT]}
    both = [(size, scenario) for size in sizes for scenario in rounding.SCENARIOS]
    others = {rounding.DEEPSPEED, rounding.TORCHAO}  # which may not be installed
    assert {n for n in found.times if n.split(": ")[-1] not in others} == {
        *(f"{size}, {scenario}: {n}" for size, scenario in both for n in names[size]),
        *(f"2 processes: {n}" for n in rounding.IN_PROCESSES if n not in others),
        *(f"another thread counts, {how}" for how in ("alone", "beside steps")),
    }
    limited = [n for n, form in rounding.FORMS.items() if form.share < 1.0]
    assert {n for n in found.limits if n.split(", ")[0] in sizes} == {
        f"{size}, {scenario}: {n}" for size, scenario in both for n in limited
    }


def test_changing_steps_in_small(torch: Any, small: Callable[..., SpecialResult]) -> None:
    """Each contestant takes the steps of every program, and they come to the same parameters."""
    made: dict[str, list[Any]] = {}
    make_all = dict(changing_steps.PROGRAMS)

    def watched(name: str, make: Any) -> Any:
        def program(torch: Any) -> Any:
            torch.manual_seed(0)
            made.setdefault(name, []).append(make(torch))
            return made[name][-1]

        return program

    watching = {name: (watched(name, make), of) for name, (make, of) in make_all.items()}
    found = small("changing-steps", PROGRAMS=watching, TENSORS=12, WARM=1, ROUNDS=5)
    assert [*found.limits] == [f"{name}: {changing_steps.OURS}" for name in make_all]
    for programs in made.values():
        ours, loop, *_ = (program.parameters for program in programs)
        for one, other in zip(ours, loop, strict=True):
            torch.testing.assert_close(one, other)
            assert one.grad is None or not torch.equal(one, one.grad)


def test_catch_up_beside_other_steps(small: Callable[..., SpecialResult], monkeypatch) -> None:
    """The three ways take the same steps, but for two of the warm ones; ids differ each time."""
    taken, take = list[str](), catch_up.Training.take

    def counted(training: catch_up.Training, ids: np.ndarray) -> None:
        taken.append(training.optimizer.sparse_update)
        take(training, ids)

    monkeypatch.setattr(catch_up.Training, "take", counted)
    law = catch_up.Law(50, 4, "zipf1.2", 2.0)
    first, second = catch_up.batches(law, 2)
    assert len(first) == len(second) == 50 and (first != second).any()
    assert np.bincount(first).argmax() == np.bincount(second).argmax()
    found = small("catch-up", LAWS={"small": law}, ROUNDS=3, WARM=4, FLUSHES=3)
    parts = [label.rpartition(": ")[2] for label in found.times]
    assert parts == ["lazy", "catch-up", "dense-equivalent", "flush"]
    assert Counter(taken) == {"lazy": 7, "catch_up": 7 + 3, "dense_equivalent": 7 - 2}
    assert [label.rpartition(": ")[2] for label in found.limits] == ["catch-up", "flush"]


def test_maps_beside_what_people_take(small: Callable[..., SpecialResult]) -> None:
    """All ids that are looked up are known; peers and bags see the same ids."""
    known = {*id_map.ids_of(np.arange(400)).tolist()}
    for law in ("uniform", "zipf1.05"):
        ids = id_map.drawn(law, 400, 2_000, 0).tolist()
        assert {*ids} <= known and len({*ids}) > 200
    batches = {"65,536": 60, "10^6": 90}
    found = small("id-map", KNOWN={"10^5": 400}, BATCHES=batches, ROUNDS=2, ROWS=50, BAGS=6)
    parts = [label.rpartition(": ")[2] for label in found.times]
    assert parts[:4] == ["admit 400", "call of 64", "find", "call"]
    assert parts[-3:] == ["row numbers", "ids, many new", "ids, none new"]
    assert {"dict", "np.unique"} <= {*parts} and len(found.limits) == 2


def test_first_steps_are_cold_or_cached(small: Callable[..., SpecialResult]) -> None:
    folders: list[tuple[str, str]] = []

    def start(step: str, folder: str, threads: int) -> list[float]:
        folders.append((step, folder))
        is_cold = folders.count((step, folder)) == 1
        return [5.0, 9.0, 8.0] if is_cold else [0.1 * threads, 1.0, 0.5]

    found = small("first-step", threads=2, start=start)
    seconds = {"cold": 9.0, "cached": 1.0, "cold: processor": 8.0, "cached: processor": 0.5}
    assert {label: time.median for label, time in found.times.items()} == {
        "import": 0.2,
        **{f"nn.{name} {what}": t for name in ("Adam", "LazyAdam") for what, t in seconds.items()},
    }
    assert found.limits.keys() <= found.times.keys()


def test_first_step_in_a_fresh_process(tmp_path: Any) -> None:
    # In the folder that the tests share, so that little is compiled.
    folder = str(cache_directory() or tmp_path)
    imported, stepped, processor = first_step.start("nn.Adam", folder, 1)
    assert imported > 0
    assert stepped > 0
    assert processor > 0


def test_a_first_step_that_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(first_step.STEPS, "nn.Adam", "raise RuntimeError('no luck')")
    with pytest.raises(BenchError, match=r"first-step: a fresh process .* no luck"):
        first_step.start("nn.Adam", str(tmp_path), 1)
