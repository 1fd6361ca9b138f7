"""Two versions compared: worktrees that come and go, and verdicts on a clock of the tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import bench_support
from bench_support import made_up, point, quiet, result
from fusestep import __main__ as main
from fusestep.bench import against, machine, measure, run, version_worker
from fusestep.bench.against import Changed
from fusestep.bench.errors import BenchError
from fusestep.bench.report import document
from fusestep.bench.report.result import OURS, SECONDS, Summary
from fusestep.bench.workers import worker_protocol

# -- two documents --------------------------------------------------------------------------------


def test_changes_between_two_documents() -> None:
    sgd, rows = point("dense/nn.SGD"), point("rows/nn.SGD")
    before = made_up(result(), result(sgd), result(rows))
    now = made_up(
        result(**{OURS: 0.02}), result(sgd, **{OURS: 0.002}), result(rows, **{OURS: 0.0102})
    )
    found = against.changes(before, now)
    assert [c.title for c in found] == [
        "dense/nn.Adam 900 float32 1 loop", "dense/nn.SGD 900 float32 1 loop",
        "rows/nn.SGD 100x8x50 zipf1.2 float32 1 loop",
    ]  # fmt: skip
    assert [c.verdict for c in found] == ["slower", "faster", "same"]
    assert found[0].ratio == Summary(2.0, *map(pytest.approx, (0.018 / 0.011, 0.022 / 0.009)), 9)


def test_what_is_no_change() -> None:
    """Only the same points are compared; two runs of 10% noise each do not prove 15%."""
    before = made_up(result(point(threads=1)), result(point(dtype="float16")))
    now = made_up(result(point(threads=2)), result(point(dtype="float16"), **{OURS: 0.0115}))
    threads, dtype = against.changes(before, now)
    assert (threads.ratio, threads.reason) == (None, "not in both results")
    assert dtype.verdict == "same"


# -- folders of two versions ----------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


SHARED = dict.fromkeys(("bench/new.py", "bench/results.schema.json", "bench/cases/new.py"), "now")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit, a change, a file that Git does not know and one that it ignores."""
    root = tmp_path / "repository"
    for part in ("bench/cases", "nn"):
        (root / part).mkdir(parents=True)
    for name in ("a.py", "bench/old.py", "nn/a.py", "bench/cases/old.py"):
        (root / name).write_text("before", encoding="utf-8")
    (root / ".gitignore").write_text("ignored.py\n", encoding="utf-8")
    git(root, "init", "--quiet", "--initial-branch=trunk")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=x")
    (root / "a.py").write_text("now", encoding="utf-8")
    for part in ("bench", "bench/cases"):
        (root / part / "old.py").unlink()
    for name in ("new.py", "ignored.py", *SHARED):
        (root / name).write_text("now", encoding="utf-8")
    monkeypatch.setattr(machine, "checkout_at_hand", lambda: root)
    return root


def files(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*.*") if path.is_file() and path.suffix != "")
    found = {str(path.relative_to(folder)): path.read_text() for path in paths}
    return {name: text for name, text in found.items() if not name.startswith(".git")}


def test_both_versions_get_the_benchmark_of_today(repository: Path) -> None:
    with against.versions("trunk") as (old, new):
        kept = {"nn/a.py": "before", **SHARED}
        assert files(old / "fusestep") == {"a.py": "before", **kept}
        assert files(new / "fusestep") == {"a.py": "now", "new.py": "now", **kept}
        assert len(git(repository, "worktree", "list").splitlines()) == 2
    assert not old.exists()
    assert not new.exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_worktree_goes_after_an_error_too(error: type[BaseException], repository: Path) -> None:
    before = git(repository, "status", "--porcelain")
    with pytest.raises(error) as raised, against.versions("HEAD") as folders:
        raise error(*folders)
    assert not any(folder.exists() for folder in raised.value.args)
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain") == before


@pytest.mark.parametrize("ref", ["no-such-branch", "", "--all", "HEAD~9"])
def test_a_commit_that_does_not_exist(ref: str, repository: Path) -> None:
    with pytest.raises(BenchError) as error, against.versions(ref):
        pass
    assert str(error.value) == f"--against: expected a results file or a commit, got {ref!r}"
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_outside_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "checkout_at_hand", lambda: None)
    with pytest.raises(BenchError) as error, against.versions("main"):
        pass
    assert str(error.value).startswith("--against main: no such file, and to compare with a commit")
    assert "\n" not in str(error.value)


# -- two workers on the clock of the tests --------------------------------------------------------


class FakeWorker:
    """Answers like `version_worker`, without taking steps; times are by version."""

    seconds: ClassVar[dict[str, Callable[[int], float]]] = {}
    errors: ClassVar[dict[str, str]] = {}
    log: ClassVar[list[str]] = []
    scenarios: ClassVar[list[str]] = []

    def __init__(self, _program: Any, _python: str, threads: int, path: Path) -> None:
        self.name = path.name
        self.samples = 0
        self.log.append(f"start {self.name} x{threads}")
        if "start" in self.errors:
            raise measure.ContestantLostError(self.errors["start"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if error := self.errors.get(f"{self.name} {request['do']}"):
            raise measure.ContestantLostError(error)
        if request["do"] != "sample":
            return {}
        self.samples += 1
        self.scenarios.append(request["scenario"])
        self.log.append(self.name)
        seconds = self.seconds[self.name](self.samples)
        is_turn = request["scenario"] != "loop"  # of as many steps as there was time for
        return {"seconds": [seconds] * (1 + is_turn * (self.samples + len(self.name)) % 3)}

    def close(self) -> None:
        self.log.append(f"end {self.name}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(against, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "seconds", {"before": lambda _: 1.0, "now": lambda _: 1.0})
    monkeypatch.setattr(FakeWorker, "errors", {})
    monkeypatch.setattr(FakeWorker, "log", [])
    monkeypatch.setattr(FakeWorker, "scenarios", [])
    monkeypatch.setattr(measure.time, "sleep", lambda _: None)
    return FakeWorker


FOLDERS = (Path("/x/before"), Path("/x/now"))


def compared(*points: Any) -> list[Changed]:
    return list(against.measure(FOLDERS, points or [point()], SECONDS, lambda *_: quiet))


FACTORS = {1.02: "same", 1.05: "slower", 4.5: "slower", 300: "slower", 0.9: "faster", 0.1: "faster"}


@pytest.mark.parametrize(("factor", "verdict"), FACTORS.items())
def test_a_slowed_version_is_reported(
    factor: float, verdict: str, fake: type[FakeWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    """However much slower: it takes part in every round."""
    fake.seconds["now"] = lambda _: factor
    (found,) = compared()
    assert found.ratio is not None
    assert found.ratio.median == pytest.approx(factor)
    assert found.verdict == verdict
    assert run.terminal.show_changes([found], run.terminal.console()) == (verdict == "slower")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "dense/nn.Adam" in line)
    assert verdict in line.split()
    assert f"{factor:.3f}" in line


def test_rounds_are_compared_with_each_other(fake: type[FakeWorker]) -> None:
    """The machine becomes twice as slow in the middle; both versions meet it in the same round."""
    for name in ("before", "now"):
        fake.seconds[name] = lambda n: 1.0 if n < 6 else 2.0
    (found,) = compared()
    assert found.ratio == Summary(1.0, 1.0, 1.0, 7)
    assert "".join(step[0] for step in fake.log if " " not in step) == "bn" * 9  # twice to warm up


def test_each_point_has_workers_of_its_own(fake: type[FakeWorker]) -> None:
    compared(point(threads=1), point("dense/nn.SGD", threads=2))
    assert [step for step in fake.log if " " in step] == [
        *("start before x1", "start now x1", "end now", "end before"),
        *("start before x2", "start now x2", "end now", "end before"),
    ]


@pytest.mark.parametrize("scenario", ["loop", "pause20", "busy"])
def test_both_versions_are_in_the_scenario(
    scenario: str, fake: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same other processes, if there are any."""
    beside = []

    @contextmanager
    def company(name: str) -> Iterator[None]:
        beside.append(name)
        yield
        assert fake.log[-1] in ("before", "now")

    monkeypatch.setattr(against, "company", company)
    (found,) = compared(point(scenario=scenario))
    assert found.verdict == "same"
    assert beside == [scenario]
    assert {*fake.scenarios} == {scenario}


@pytest.mark.parametrize("what", ["before setup", "now setup", "before sample", "now sample"])
def test_a_version_that_cannot_take_a_step(what: str, fake: type[FakeWorker]) -> None:
    """A case that is new, say; the others are compared all the same."""
    fake.errors[what] = "no form 'fusestep' of dense/nn.New"
    (found,) = compared()
    assert (found.ratio, found.reason) == (None, "no form 'fusestep' of dense/nn.New")
    assert run.terminal.show_changes([found], run.terminal.console()) == 0
    assert fake.log[-2:] == ["end now", "end before"]


def test_a_version_that_does_not_start(fake: type[FakeWorker]) -> None:
    fake.errors["start"] = "ImportError: cannot import name 'ops'"
    with pytest.raises(BenchError, match="--against: the version before does not start: Import"):
        compared()


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that compares with a version that is there."""

    @contextmanager
    def versions(ref: str) -> Iterator[tuple[Path, Path]]:
        assert ref == "main"
        yield FOLDERS

    monkeypatch.setattr(against, "versions", versions)
    return ["bench", "--size", "900", "--against", "main", "--threads", "1", "dense/nn.Adam"]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("error", "why"), [(KeyboardInterrupt(), "interrupted"), (BenchError("lost"), "lost")]
)
def test_what_was_compared_before_an_interrupt_is_shown(
    error: BaseException, why: str, given: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    compare = against._compare

    def interrupted(workers: Any, of: Any, *rest: Any) -> Changed:
        if of.case.name == "dense/nn.SGD":
            raise error
        return compare(workers, of, *rest)

    monkeypatch.setattr(against, "_compare", interrupted)
    assert main.main([*given, "dense/nn.SGD"]) == 130
    said = capsys.readouterr().out
    assert "dense/nn.Adam 900" in said
    assert f"not all was measured: {why}" in said


def test_a_slowed_version_is_the_status_of_the_command(
    fake: type[FakeWorker], given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(given) == 0
    fake.seconds["now"] = lambda _: 1.1
    assert main.main(given) == 1
    assert "1.100" in capsys.readouterr().out
    options = {"first-step": [], "--json": ["x.json"], "--plot": ["x.png"], "--peers": ["numpy"]}
    for option, value in options.items():
        assert main.main([*given, option, *value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fusestep bench: --against main: ")
        assert option in line


def test_against_an_earlier_file(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "before.json"
    document.write(path, made_up(result(**{OURS: 0.005})))
    monkeypatch.setattr(run, "measure", lambda *_: result())
    given = ["bench", "dense/nn.Adam", "--size", "900", "--peers", "none", "--threads", "1"]
    assert main.main([*given, "--against", str(path)]) == 1
    assert "2.000" in capsys.readouterr().out
    document.write(path, made_up(result(**{OURS: 0.010})))
    assert main.main([*given, "--against", str(path)]) == 0
    path.write_text("{}", encoding="utf-8")
    capsys.readouterr()
    assert main.main([*given, "--against", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "holds no results: expected results of schema 3, got None" in captured.err


def test_a_version_worker_takes_the_steps_of_the_cases() -> None:
    of = bench_support.named("rows/nn.LazyAdam")
    worker = version_worker.Version(1)
    assert list(worker.forms(of.name, "rows", "float32")) == [OURS]
    assert worker.forms(of.name, "dense", "float32") == {}
    assert worker.forms("dense/nn.New", "dense", "float32") == {}
    assert worker.forms("rows/ops.FusedSparseAdam", "rows", "float16") == {}
    given = against.inputs(point(of.name))
    request = {**against.setup_request(of.name, point(of.name), given), "form": OURS}
    case = worker_protocol.case_of(
        **{k: v for k, v in request.items() if k not in ("do", "copies")}
    )
    replica = worker.forms(of.name, "rows", "float32")[OURS](case)
    replica.job.step()
    (table,) = replica.values()
    (parameter,) = given.parameters
    assert parameter.indices is not None
    assert set(table.any(axis=1).nonzero()[0]) == set(parameter.indices)


ROOT = machine.checkout_at_hand()


@pytest.mark.skipif(ROOT is None, reason="not in a Git checkout")
def test_end_to_end(tmp_path: Path) -> None:
    """This tree as a repository of its own, then with a step that waits."""
    assert ROOT is not None
    root = tmp_path / "fusestep"
    against._copy(ROOT, root)
    git(root, "init", "--quiet")
    git(root, "add", "--force", ".")
    git(root, "commit", "--quiet", "--message=x")
    target = root / "ops" / "sgd.py"
    source = target.read_text(encoding="utf-8")
    waits = "functools.wraps(step)(lambda *arguments: (time.sleep(0.002), step(*arguments))[1])"
    slowed = f"step = ApplyMomentum.__call__\nApplyMomentum.__call__ = {waits}\n"
    target.write_text(f"{source}\nimport functools, time\n{slowed}", encoding="utf-8")
    given = ("dense/ops.ApplyMomentum", "--size", "900", "--threads", "1", "--seconds", "0.05")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fusestep", "bench", *given, "--against", "HEAD"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, check=False)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "dense/ops.ApplyMomentum" in line)
    assert "slower" in line.split()
    assert len(git(root, "worktree", "list").splitlines()) == 1
