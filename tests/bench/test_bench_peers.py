"""The worker processes of other libraries: they answer, rest, fail and end without us."""

import ast
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import bench_support
from bench_support import FAKE_WORKER, WORKERS, quiet, values_of
from fusestep.bench import measure, peer, point, work
from fusestep.bench.buffers import Buffers
from fusestep.bench.cases import steps as cases
from fusestep.bench.errors import BenchError
from fusestep.bench.measure import ContestantLostError
from fusestep.bench.peer import PEERS, PeerKind, Peers, Worker, find_python
from fusestep.bench.report.result import OURS, PointResult


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE_WORKER, encoding="utf-8")
    monkeypatch.setitem(PEERS, "torch", PeerKind(("numpy",), (str(script),)))
    monkeypatch.setattr(measure, "_SETTLE", 0.0)
    return script


@pytest.fixture
def worker(fake_worker: Path) -> Iterator[Worker]:
    found = Worker([str(fake_worker)], sys.executable, 1)
    yield found
    found.close()
    assert found._process.poll() is not None


def set_up(worker: Worker, form: str, name: str = "dense/nn.Adam") -> work.Inputs:
    of = bench_support.point(name)
    given = work.inputs(of)
    request = point.setup_request(str(of.case.use.algorithm), of, given)
    worker.ask({**request, "form": form})
    return given


def wait_until_stopped(process: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        if status.rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.01)
    raise AssertionError("the worker has not been stopped")


def test_a_worker_answers_and_rests(worker: Worker) -> None:
    assert worker.version == "1.2.3"
    set_up(worker, "slow")
    answer = worker.ask({"do": "sample", "form": "slow", "scenario": "loop"})
    assert answer["seconds"][0] >= 0.05
    if sys.platform == "linux":
        wait_until_stopped(worker._process.pid)
    assert worker.ask({"do": "memory", "form": "slow"})["bytes"] is not False  # and wakes up


def test_a_worker_gets_the_numbers_of_the_gradients(worker: Worker) -> None:
    given = set_up(worker, "quick", "many-small/nn.Adam")
    found = values_of(worker, "quick")
    assert len(found) == len(given.parameters) == 200
    for values, one in zip(found, given.parameters, strict=True):
        np.testing.assert_array_equal(values, -2 * one.gradient)


def test_the_end_of_a_worker(fake_worker: Path) -> None:
    fake_worker.write_text(FAKE_WORKER.replace('"quick", "slow"', '"fatal", "slow"'), "utf-8")
    with contextlib.closing(Worker([str(fake_worker)], sys.executable, 1)) as worker:
        for _ in range(2):  # the same words again
            died = pytest.raises(ContestantLostError, match=r"^Segmentation fault$")
            with died:
                set_up(worker, "fatal")
        assert worker.is_broken


def test_a_worker_that_does_not_answer(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(worker, "slow")
    monkeypatch.setattr(peer, "_TIMEOUT", 0.02)
    with pytest.raises(ContestantLostError, match="within"):
        worker.ask({"do": "sample", "form": "slow", "scenario": "loop"})
    assert worker.is_broken


# -- a point with peers ---------------------------------------------------------------------------


def measured(pythons: dict[str, str | None], name: str = "dense/nn.Adam") -> PointResult:
    with contextlib.closing(Peers(pythons)) as peers:
        return point.run(bench_support.point(name), 0.01, peers, quiet)


@pytest.mark.usefixtures("fake_worker")
def test_a_faster_peer_is_a_loss() -> None:
    found = measured({"torch": sys.executable})
    assert found.times.keys() >= {OURS, "torch quick", "torch slow", "torch on 1"}
    assert found.unavailable == {"torch unknown": "KeyError: 'no such form'"}
    assert found.peers.keys() == {"torch"}
    assert found.peers["torch"].label in ("torch quick", "torch on 1")
    assert found.peers["torch"].value < 1
    (lost,) = found.losses
    assert lost == f"{found.peers['torch'].value:.2f} x {found.peers['torch'].label}"
    assert found.memory.keys() == found.times.keys() - {k for k in found.times if "bound" in k}


def test_a_slower_peer_is_no_loss(fake_worker: Path) -> None:
    names = '"quick", "slow", "unknown", f"on {self.threads}"'
    assert names in FAKE_WORKER
    fake_worker.write_text(FAKE_WORKER.replace(names, '"slow"'), encoding="utf-8")
    found = measured({"torch": sys.executable})
    assert found.peers["torch"].value > 1
    assert found.losses == []


@pytest.mark.usefixtures("fake_worker")
def test_peers_without_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no column; of a step that only we have nobody is asked."""
    found = measured({"torch": sys.executable}, "rows/nn.Adam")
    assert (found.peers, found.unavailable) == ({}, {})
    monkeypatch.setattr(Peers, "worker", lambda *_: pytest.fail("a worker was started"))
    assert measured({"torch": sys.executable}, "dense/ops.LARSUpdate").peers == {}


def test_a_peer_that_dies_does_not_break_the_run(fake_worker: Path) -> None:
    """The point keeps its other times; the next point starts the peer again."""
    fake_worker.write_text(FAKE_WORKER.replace('"unknown"', '"dies"', 1), encoding="utf-8")
    with contextlib.closing(Peers({"torch": sys.executable, "numpy": sys.executable})) as peers:
        for _ in range(2):
            found = point.run(bench_support.point(), 0.01, peers, quiet)
            assert found.unavailable["torch dies"] == "Segmentation fault"
            assert OURS in found.times
            assert "numpy" in found.peers
            assert "torch" not in peers.missing


# -- pooled tables: the libraries that we are compared with do the same ---------------------------

# FBGEMM has an interpreter of its own: its PyTorch is of one version.
INTERPRETERS = {
    "torch": sys.executable if find_spec("torch") else None,
    "fbgemm": os.environ.get("FUSESTEP_FBGEMM_PYTHON"),
}
POOLED = [case.name for case in cases.STEPS if case.kind == "pooled"]


@pytest.fixture(scope="module", params=INTERPRETERS)
def library(request: pytest.FixtureRequest) -> Iterator[tuple[str, Worker]]:
    python = INTERPRETERS[request.param]
    if python is None:
        pytest.skip(f"{request.param} is not here: FUSESTEP_FBGEMM_PYTHON names FBGEMM's Python")
    worker = Worker(PEERS[request.param].program, python, 2)
    yield request.param, worker
    worker.close()


@pytest.mark.parametrize("name", POOLED)
def test_pooled_tables_are_those_of_peers(library: tuple[str, Worker], name: str) -> None:
    """What a forward finds, and the tables after three steps, to float32's rounding."""
    peer, worker = library
    of = bench_support.point(name, "3x50x8x40x5")
    given, use = work.inputs(of), of.case.use
    starts = [np.random.default_rng(k).standard_normal((50, 8), np.float32) for k in range(3)]
    buffers = Buffers(of.case.subject.prepare, use, work.DTYPES["float32"], given.parameters)
    for parameter, start in zip(buffers.parameters, starts, strict=True):
        parameter[...] = start
    job, found = buffers.job(fresh=False), None
    for _ in range(3):
        job.load()
        found = job.step()
    ours = buffers.parameters if use.traffic.updated else [found]
    request = point.setup_request(str(use.algorithm), of, given)
    entries = zip(request["parameters"], starts, strict=True)
    request["parameters"] = [(*entry[:3], start, entry[4]) for entry, start in entries]
    asked = {"algorithm": use.algorithm, "kind": "pooled", "dtype": "float32"}
    forms = worker.ask({"do": "forms", **asked})["forms"]
    lacking = {"torch": "RowWiseAdagrad", "fbgemm": "LazyAdam"}[peer]
    assert len(forms) == (lacking not in name)
    moved = 1.0
    if use.traffic.updated:
        moved = max(np.abs(a - b).max() for a, b in zip(ours, starts, strict=True))
    assert moved > 1e-3
    for form in forms:
        worker.ask({**request, "form": form, "warm_up": 3})
        for a, b in zip(ours, values_of(worker, form), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 + 1e-5 * moved)


# -- missing peers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("pythons", "reason"), [
    ({}, None),  # not asked for
    ({"torch": None}, "not installed here; name its Python with --torch-python"),
    ({"torch": "/dev/null"}, "cannot start /dev/null: Permission denied"),
    ({"torch": "/bin/false"}, "the worker ended with status 1"),
])  # fmt: skip
def test_a_missing_peer_does_not_break_a_run(
    pythons: dict[str, str | None], reason: str | None
) -> None:
    with contextlib.closing(Peers({**pythons, "numpy": sys.executable})) as peers:
        found = point.run(bench_support.point(), 0.01, peers, quiet)
        assert peers.missing == ({} if reason is None else {"torch": reason})
        assert peers.versions == {"numpy": np.__version__}
    assert found.unavailable == peers.missing
    assert found.peers.keys() == {"numpy"}


def test_an_interpreter_without_the_library(fake_worker: Path) -> None:
    script = FAKE_WORKER.replace("print(", "import no_such_library; print(")
    fake_worker.write_text(script, encoding="utf-8")
    with contextlib.closing(Peers({"torch": sys.executable})) as peers:
        with pytest.raises(ContestantLostError, match="no_such_library"):
            peers.worker("torch", 1)
        assert peers.missing == {"torch": "ModuleNotFoundError: No module named 'no_such_library'"}
        assert peers.versions == {}


@pytest.mark.usefixtures("fake_worker")
def test_a_worker_for_each_number_of_threads() -> None:
    with contextlib.closing(Peers({"torch": sys.executable})) as peers:
        one, two = (peers.worker("torch", threads) for threads in (1, 2))
        assert one is not two
        assert peers.worker("torch", 1) is one
        processes = [one._process, two._process]
    assert all(process.poll() is not None for process in processes)


def test_an_interpreter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"torch", "jax"}
    monkeypatch.setattr(peer, "find_spec", lambda name: object() if name in known else None)
    assert find_python("torch", None) == sys.executable
    assert find_python("optax", None) is None  # jax alone is not enough
    assert find_python("optax", sys.executable) == sys.executable
    with pytest.raises(BenchError, match="--optax-python: '/nowhere' is no Python"):
        find_python("optax", "/nowhere")


def test_another_interpreter_gets_none_of_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    environment: Callable[..., dict[str, str]] = peer._environment
    assert environment(sys.executable, 3, None)["PYTHONPATH"] == "/ours"
    assert "PYTHONPATH" not in environment("/other/python", 3, None)
    assert environment("/other/python", 3, Path("/folder"))["PYTHONPATH"] == "/folder"
    assert environment(sys.executable, 3, None)["OMP_NUM_THREADS"] == "3"


# -- the workers as files -------------------------------------------------------------------------


def test_every_peer_has_its_worker() -> None:
    for name, kind in PEERS.items():
        assert kind.program[0] == str(WORKERS / f"{name.partition('-')[0]}_worker.py")
        assert Path(kind.program[0]).is_file(), name


def test_workers_need_no_fusestep() -> None:
    """They run under interpreters that do not have it, and that are old."""
    paths = list(WORKERS.glob("*.py"))
    assert len(paths) > 3
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                assert "fusestep" not in str(node.module)
            if isinstance(node, ast.Import):
                assert not any("fusestep" in name.name for name in node.names)
