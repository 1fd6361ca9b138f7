"""The benchmark: its byte models, its statistics, its workers, its report and its command line."""

from __future__ import annotations

import argparse
import ast
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusestep import nn
from fusestep.bench import (
    bounds,
    cases,
    command,
    document,
    family,
    first_step,
    measure,
    no_cliff,
    peer,
    run,
    stats,
    step_case,
    traffic,
    work,
)
from fusestep.bench.result import Settings, fastest
from fusestep.bench.stats import Summary, Target
from fusestep.bench.workers import worker_protocol
from fusestep.bench.workers.worker_protocol import Job
from fusestep.kernels.cache import cache_directory

WORKERS = Path(worker_protocol.__file__).parent
SETTINGS = Settings(threads=1, quick=True)


def quiet(done: int, total: int) -> None:
    """A progress report that nobody reads."""


# -- byte models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [work.dense_adam, work.dense_amsgrad])
def test_bytes_of_dense_steps(setup: Callable[[int], work.Work]) -> None:
    made = setup(1003)
    assert made.bytes == counted(made)
    assert made.bound is not None
    assert made.bound.bytes == made.bytes
    assert len(made.bound.variables) == len(made.variables)


@pytest.mark.parametrize("name", family.FAMILY)
def test_bytes_of_every_optimizer(name: str) -> None:
    made = family.dense(name, 900)
    first_pass = family.FAMILY[name].first_pass
    arrays = sum({"w": 1, "g": 1, "s": len(made.variables) - 1}[which] for which in first_pass)
    assert made.bytes == counted(made) + arrays * made.variables[0].nbytes
    assert made.bound is not None
    assert made.bound.bytes == made.bytes


def test_every_optimizer_is_a_case() -> None:
    names = {name.removeprefix("dense-") for name in (case.name for case in cases.STEPS)}
    assert family.FAMILY.keys() <= names
    classes = {name for name, value in vars(nn).items() if isinstance(value, type)}
    optimizers = {name for name in classes if issubclass(getattr(nn, name), nn.Optimizer)}
    made = {type(member.make([np.ones((2, 2), np.float32)])) for member in family.FAMILY.values()}
    # The others are cases of their own, or another one's dense step.
    elsewhere = {"Optimizer", "Adam", "AdamOffload", "LazyAdam"}
    assert optimizers - elsewhere == {cls.__name__ for cls in made}


def test_bytes_of_many_parameters() -> None:
    made = work.many_small(7)
    assert made.bytes == counted(made)
    sizes = np.random.default_rng(0).integers(16, 4097, 7)
    assert made.shapes == [(size,) for size in sizes]


def test_bytes_of_a_row_step_on_every_row() -> None:
    made = work.rows_fused(N=100, D=8, B=50)
    assert made.bytes == counted(made)
    assert made.bound is not None
    assert made.bound.bytes == 2 * sum(array.nbytes for array in made.variables)


def test_bytes_of_a_lazy_row_step() -> None:
    made = work.rows_lazy(N=100, D=8, B=50)
    next(iter(made.jobs.values())).step()
    changed = sum(array[(array != 0).any(axis=1)].nbytes for array in made.variables)
    assert made.bytes == 2 * changed + inputs(made)


def counted(made: work.Work) -> int:
    """Bytes of the arrays themselves, variables twice."""
    return 2 * sum(array.nbytes for array in made.variables) + inputs(made)


def inputs(made: work.Work) -> int:
    return sum(array.nbytes for arrays in made.inputs.values() for array in arrays)


def test_every_step_case_says_its_traffic_and_runs() -> None:
    rows = (work.rows_fused, work.rows_lazy, work.rows_ftrl, work.rows_proximal_adagrad)
    small = {work.many_small: (3,), **dict.fromkeys(rows, (40, 4, 9))}
    for case in cases.STEPS:
        made = case.setup(*small.get(case.setup, (64,)))
        for job in made.jobs.values():
            job.load()
            job.step()
        assert all(np.isfinite(array).all() for array in made.variables)
        assert any(array.any() for array in made.variables)


def test_a_new_gradient_array_each_step() -> None:
    optimizer_step = work.many_small(2).jobs["nn.Adam"]
    optimizer_step.load()
    optimizer_step.step()
    gradients = optimizer_step.load.__closure__[0].cell_contents
    before = list(gradients)
    optimizer_step.load()
    assert not any(a is b for a, b in zip(before, gradients, strict=True))


# -- cache lines ----------------------------------------------------------------------------------


def test_row_lines_by_hand() -> None:
    # 24 floats are 96 bytes: row 0 is 0..95 (lines 0, 1), row 1 is 96..191 (1, 2),
    # row 2 is 192..287 (3, 4).
    assert traffic.row_lines(np.array([0]), 24) == 2
    assert traffic.row_lines(np.array([0, 1, 2]), 24) == 6
    assert traffic.row_lines(np.array([0, 1, 15]), 1) == 3
    assert traffic.row_lines(np.array([3, 5]), 16) == 2


def test_lazy_lines_by_hand() -> None:
    # Four occurrences of three rows of 16 floats, a line each. Gradient 4, indices 32 bytes: 1;
    # rows 3 in each of three variables, read and written: 18.
    assert traffic.lazy_lines(np.array([5, 2, 5, 9]), 16) == 4 + 1 + 18


def test_allowed_time() -> None:
    # 1000 lines at 64 GB/s take 1 us.
    assert no_cliff.allowed(1000, 64e9) == pytest.approx(33e-6)


def test_sizes_of_no_cliff() -> None:
    for D, N, batches in no_cliff.sizes():
        assert N >= 1000
        assert N * D <= 2**26
        assert batches[0] == 1
        assert max(batches) * D <= 2**27
        assert batches == [10**k for k in range(len(batches))]


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [0, 1, 2, 4])
@pytest.mark.parametrize(("variables", "has_gradient"), [(1, 1), (2, 1), (3, 0), (3, 1), (4, 1)])
def test_bounds_leave_the_arrays_as_they_are(variables: int, has_gradient: int, reads: int) -> None:
    rng = np.random.default_rng(0)
    given = [work.normal(rng, (40_003,)) for _ in range(variables + has_gradient)]
    copies = [array.copy() for array in given]
    gradient = given[-1] if has_gradient else None
    first = (tuple(given[:1] * reads),) if reads else ()
    bound = bounds.Bound(tuple(given[:variables]), gradient, first)
    jobs = bounds.jobs(bound, threads=2)
    assert len(jobs) == (3 if reads else 4)
    for job in jobs.values():
        job.step()
    for array, copied in zip(given, copies, strict=True):
        np.testing.assert_array_equal(array, copied)


# -- statistics -----------------------------------------------------------------------------------


def test_summary() -> None:
    summary = Summary.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert summary == Summary(median=3.5, p20=2.0, p80=5.0, samples=6)


@pytest.mark.parametrize(
    ("value", "at_p80", "expected"),
    [
        (2.0, 1.6, "reached"),
        (1.5, 1.5, "reached"),
        (2.0, 1.4, "reached, p80 not"),
        (1.4, 1.3, "MISSED"),
        (None, None, "n/a"),
    ],
)
def test_verdicts_of_ratios(value: float | None, at_p80: float | None, expected: str) -> None:
    assert Target("x", value, at_p80, 1.5).verdict == expected


def test_verdicts_of_times() -> None:
    def verdict(median: float, p80: float) -> str:
        return stats.time_target("t", Summary(median, 0.1, p80, 5), 0.5).verdict

    assert verdict(0.4, 0.5) == "reached"
    assert verdict(0.4, 0.6) == "reached, p80 not"
    assert verdict(0.6, 0.7) == "MISSED"


def test_ratios_are_of_medians() -> None:
    ours, theirs = Summary(2.0, 1.0, 4.0, 9), Summary(6.0, 5.0, 9.0, 9)
    target = stats.speed_target("x", ours, theirs, 2.0)
    assert (target.value, target.at_p80) == (3.0, 1.5)
    assert target.verdict == "reached, p80 not"


def test_interleaving_and_warm_up() -> None:
    order: list[str] = []
    values = {"a": iter([100.0, 1.0, 2.0, 3.0]), "b": iter([100.0, 5.0, 5.0, 5.0])}

    def contestant(label: str) -> measure.Contestant:
        def sample() -> float:
            order.append(label)
            return next(values[label])

        return measure.Contestant(label, sample)

    times = measure.interleave([contestant("a"), contestant("b")], rounds=3)
    assert "".join(order) == "abababab"
    assert times.summaries["a"].median == 2.0
    assert times.summaries["b"] == Summary(5.0, 5.0, 5.0, 3)


def test_a_contestant_that_is_lost_does_not_stop_the_others() -> None:
    def fail() -> float:
        raise measure.ContestantLostError("out of memory")

    contestants = [measure.Contestant("a", fail), measure.Contestant("b", lambda: 1.0)]
    times = measure.interleave(contestants, rounds=2)
    assert times.lost == {"a": "out of memory"}
    assert list(times.summaries) == ["b"]


def test_the_fastest_has_the_smallest_median() -> None:
    times = {"a": Summary(2, 0, 2, 3), "b": Summary(1, 1, 9, 3)}
    assert fastest(times, ["a", "b", "missing"]) == "b"
    assert fastest(times, ["missing"]) is None


class FakeClock:
    """Time that passes only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def job(self, seconds: float) -> Job:
        def step() -> None:
            self.now += seconds

        def load() -> None:
            self.now += 1000.0  # must not be counted

        return Job(step, load)


def test_a_sample_is_the_mean_of_steps_after_the_lead_in() -> None:
    clock = FakeClock()
    durations = iter([9.0, 1.0, 2.0, 3.0])

    def step() -> None:
        clock.now += next(durations)

    assert worker_protocol.sample(Job(step), lead_in=1, steps=3, clock=clock) == 2.0


def fake_case(ours: float, clock: FakeClock, **changes: Any) -> cases.StepCase:
    array = np.zeros(4, np.float32)

    def setup() -> work.Work:
        return work.Work(
            jobs={"ours": clock.job(ours)},
            variables=(array,),
            bytes=1000,
            shapes=[(4,)],
            inputs={"gradient": [array]},
            size={"elements": 4},
            bound=bounds.Bound((array, array, array)),
        )

    return cases.StepCase("fake", "a made-up case", setup, of_bound=0.9, **changes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock on which the bound takes 1 s, its slower shape 2 s."""
    clock = FakeClock()
    loops = {"slow": clock.job(2.0), "fast": clock.job(1.0)}
    monkeypatch.setattr(bounds, "jobs", lambda *_: loops)
    return clock


@pytest.mark.parametrize(("ours", "verdict"), [(1.0, "reached"), (1.1, "reached"), (1.2, "MISSED")])
def test_a_slowed_case_is_reported(clock: FakeClock, ours: float, verdict: str) -> None:
    result = step_case.run(fake_case(ours, clock), SETTINGS, peer.Peers({}, 1), quiet, clock)
    (target,) = result.targets
    assert result.bound == "bound: fast"
    assert target.value == pytest.approx(1 / ours)
    assert target.verdict == verdict
    assert result.bytes_moved == {"ours": 1000, "bound: slow": 96, "bound: fast": 96}


# -- peers ----------------------------------------------------------------------------------------

FAKE_WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(WORKERS)!r})
from worker_protocol import Job, serve

class Fake:
    version = "1.2.3"

    def __init__(self, threads):
        print("libraries print what they like")

    def job(self, request):
        if request["form"] == "unknown":
            raise KeyError("no such form")
        if request["form"] == "fatal":
            sys.stderr.write("Segmentation fault\\n")
            sys.stderr.flush()
            os._exit(9)
        return Job(lambda: time.sleep(0.002))

serve(Fake)
"""


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE_WORKER, encoding="utf-8")
    monkeypatch.setitem(peer.PEERS, "torch", script)
    monkeypatch.setattr(peer, "_SETTLE", 0.0)
    return script


def test_a_worker_answers_and_rests(fake_worker: Path) -> None:
    worker = peer.Worker(fake_worker, sys.executable, 1)
    try:
        assert worker.version == "1.2.3"
        worker.ask({"do": "setup", "form": "f", "warm_up": 1})
        answer = worker.ask({"do": "sample", "form": "f", "lead_in": 1, "steps": 2})
        assert 0.002 <= answer["seconds"] < 1
        if sys.platform == "linux":
            wait_until_stopped(worker._process.pid)
    finally:
        worker.close()
    assert worker._process.poll() is not None


def wait_until_stopped(process: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        if status.rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.01)
    raise AssertionError("the worker has not been stopped")


def test_errors_and_the_end_of_a_worker(fake_worker: Path) -> None:
    worker = peer.Worker(fake_worker, sys.executable, 1)
    try:
        with pytest.raises(measure.ContestantLostError, match="no such form"):
            worker.ask({"do": "setup", "form": "unknown", "warm_up": 1})
        for _ in range(2):
            with pytest.raises(measure.ContestantLostError, match="Segmentation fault"):
                worker.ask({"do": "setup", "form": "fatal", "warm_up": 1})
    finally:
        worker.close()


PEER = cases.PeerForms("torch", ("Adam", "unknown"), target=2.0)


@pytest.mark.usefixtures("fake_worker")
def test_a_peer_that_works(clock: FakeClock) -> None:
    with peer.peers_of({"torch": sys.executable}, 1) as peers:
        case = fake_case(1e-6, clock, peers=(PEER,))
        result = step_case.run(case, SETTINGS, peers, quiet, clock)
        assert peers.versions == {"torch": "1.2.3"}
    assert result.targets[1].what == "x torch Adam"
    assert result.targets[1].verdict == "reached"
    assert list(result.unavailable) == ["torch unknown"]


@pytest.mark.parametrize(
    ("pythons", "reason"),
    [
        ({}, "not asked for"),
        ({"torch": None}, "--torch-python"),
        ({"torch": "/dev/null"}, "cannot start"),
    ],
)
def test_a_missing_peer_is_not_available(
    pythons: dict[str, str | None], reason: str, clock: FakeClock
) -> None:
    with peer.peers_of(pythons, 1) as peers:
        case = fake_case(1.0, clock, peers=(PEER,))
        result = step_case.run(case, SETTINGS, peers, quiet, clock)
    assert reason in result.unavailable["torch Adam"]
    assert [target.verdict for target in result.targets] == ["reached", "n/a"]


def test_an_interpreter_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(FAKE_WORKER.replace("print(", "import no_such_library; print("))
    monkeypatch.setitem(peer.PEERS, "torch", script)
    peers = peer.Peers({"torch": sys.executable}, 1)
    assert peers.worker("torch") is None
    assert "no_such_library" in peers.missing["torch"]


def test_workers_need_no_fusestep() -> None:
    for path in WORKERS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                assert "fusestep" not in str(node.module)
            if isinstance(node, ast.Import):
                assert not any("fusestep" in name.name for name in node.names)


# -- the cases with a method of their own ---------------------------------------------------------


def test_no_cliff_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WIDTHS": (1, 16),
        "BATCHES": (1, 100),
        "MAX_TABLE": 2**15,
        "MAX_GRADIENT": 2**15,
        "DENSE": 2**15,
    }.items():
        monkeypatch.setattr(no_cliff, name, value)
    result = no_cliff.run(SETTINGS, quiet)
    assert [(point["D"], point["B"]) for point in result.points] == [
        (1, 1),
        (1, 100),
        (16, 1),
        (16, 100),
    ]
    for target, D in zip(result.targets, (1, 16), strict=True):
        assert target.value == max(p["of_allowed"] for p in result.points if p["D"] == D)
        assert target.lower_is_better
    assert "D=16 B=100" in result.times


def test_first_step_verdicts() -> None:
    def all_of(seconds: float) -> Summary:
        return Summary(seconds, seconds, seconds, 3)

    times = {label: all_of(0.4) for label in ("import", "nn.Adam cached", "nn.LazyAdam cached")}
    times |= {"nn.Adam cold": all_of(2.6), "nn.LazyAdam cold": all_of(3.9)}
    verdicts = {t.what: t.verdict for t in first_step.summarize(times).targets}
    missed = [what for what, verdict in verdicts.items() if verdict == "MISSED"]
    assert missed == ["first nn.Adam step, cold"]


def test_first_step_in_a_fresh_process(tmp_path: Path) -> None:
    # In the folder that the tests share, so that little is compiled.
    folder = cache_directory() or tmp_path
    imported, stepped = first_step.start("nn.Adam", str(folder), 1)
    assert imported > 0
    assert stepped > 0


# -- the report and the command line --------------------------------------------------------------


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(options)


@pytest.fixture
def small_case(monkeypatch: pytest.MonkeyPatch) -> cases.StepCase:
    """One small case in place of the table."""
    case = cases.StepCase(
        "small",
        "a small case",
        lambda: work.dense_adam(5000),
        of_bound=0.001,
        peers=(PEER,),
        rounds=3,
    )
    monkeypatch.setattr(cases, "CASES", (case,))
    monkeypatch.setattr(run, "CASES", (case,))
    return case


@pytest.fixture
def written(
    small_case: cases.StepCase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """The JSON document and the output of a run without peers."""
    path = tmp_path / "results.json"
    options = ("--json", str(path), "--peers", "none", "--quick", "--threads", "1", small_case.name)
    assert command.main(arguments(*options)) == 0
    return json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out


def test_a_run_writes_what_it_prints(written: tuple[dict[str, Any], str]) -> None:
    data, out = written
    document.check_schema(data)
    (case,) = data["cases"]
    assert case["name"] == "small"
    assert case["bytes_moved"]["ops.Adam"] == 5000 * 28
    assert case["ratios"]["ops.Adam"] == 1.0
    assert case["bound"] in case["times"]
    assert [target["verdict"] for target in case["targets"]] == ["reached", "n/a"]
    assert data["missing_peers"] == {"torch": "not asked for"}
    assert data["threads"] == 1
    for text in ("small", "ops.Adam", "reached", "n/a", "torch: n/a: not asked for"):
        assert text in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(schema=2), "expected 1, got 2"),
        (lambda d: d.pop("threads"), "missing key 'threads'"),
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d["cases"][0]["times"]["ops.Adam"].update(median="1"), "expected int or float"),
        (lambda d: d["cases"][0]["targets"][0].update(value=True), "got True"),
        (lambda d: d.update(cases={}), "expected list"),
    ],
)
def test_a_document_of_another_form_is_refused(
    written: tuple[dict[str, Any], str], change: Callable[[dict[str, Any]], object], text: str
) -> None:
    data = copy.deepcopy(written[0])
    change(data)
    with pytest.raises(ValueError, match="document") as error:
        document.check_schema(data)
    assert text in str(error.value)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments("--list")) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [case.name for case in cases.CASES]
    assert {"dense-adam", "dense-lamb", "rows-lazy", "no-cliff", "first-step"} <= {*names}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["rows-lasy"], "no case 'rows-lasy': did you mean 'rows-lazy'?"),
        (["zzz"], "no case 'zzz': there are dense-adam"),
        (["--threads", "0"], "--threads: expected a whole number from 1 to"),
        (["--threads", "many"], "got 'many'"),
        (["--threads", "100000"], "got '100000'"),
        (["--peers", "tensorflow"], "--peers: expected names out of torch, mindspore, none"),
        (["--peers", "torch,none"], "'none' excludes other names"),
        (["--torch-python", "/nowhere/python"], "--torch-python: '/nowhere/python' is no"),
        (["--mindspore-python", "/"], "--mindspore-python: '/' is no Python interpreter"),
        (["--peers", "none", "--json", "/nowhere/x.json"], "--json: cannot write"),
        (["--peers", "none", "--json", "/"], "--json: cannot write '/': is a folder"),
    ],
)
def test_wrong_options_cost_one_line(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments(*options)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("fusestep bench: ")
    assert text in line


def test_without_the_table_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command.main(arguments()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        'fusestep bench: the benchmark needs rich: install it with pip install "fusestep[bench]"'
    )


def test_select_keeps_the_order_of_the_table() -> None:
    names = ["dense-adam", "dense-amsgrad", "rows-lazy"]
    assert command.select([], names) == names
    assert command.select(["rows-lazy", "dense-*"], names) == names
    assert command.select(["rows-lazy"], names) == ["rows-lazy"]
