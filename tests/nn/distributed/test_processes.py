"""Several processes of this machine: what happens in them is in the modules ``process_*``."""

from pathlib import Path

import pytest
import process_programs
from process_checks import run_parts
from process_starts import ENGINES, needs_mpi, start
from thread_processes import in_threads

PROGRAM = Path(__file__).with_name("process_programs.py")
OPTIMIZERS = ("optimizers", "decayed")
CHECKPOINTS = ("saved", "saved_states")
OTHERS = (
    "training", "some_have_no_rows", "sums", "row_sums", "sharded", "sharded_rows", "large",
    "errors", "not_waited_for")  # fmt: skip
OF_ANY_ENGINE = (
    "without_positions", "storages", "some_have_no_rows", "sums", "row_sums", "sums_that_differ",
    "sharded", "sharded_rows", "large", "custom", "memory", "skipped", "sharded_errors", "errors",
)  # fmt: skip
"""What threads do in the place of processes."""

# A start costs seconds: each engine with one number of processes, and the others as `exhaustive`.
ALWAYS = {("torch", 2), ("mpi", 3)}
EXHAUSTIVE = [pytest.mark.exhaustive]
CASES = [
    pytest.param(name, size, marks=[*marks, *([] if (name, size) in ALWAYS else EXHAUSTIVE)])
    for (name,), marks, _ in ENGINES
    for size in (4, 3, 2)
]


def run(engine: str, size: int, folder: Path, *parts: str) -> None:
    done = start(engine, size, PROGRAM, folder, *parts, cwd=folder)
    assert done.returncode == 0, done.stdout
    ended = sorted(path.name for path in folder.glob("done-*"))
    assert ended == [f"done-{rank}" for rank in range(size)], done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process(engine: str, tmp_path: Path) -> None:
    run(engine, 1, tmp_path, *OTHERS)


@pytest.mark.parametrize(("engine", "size"), CASES)
def test_processes(engine: str, size: int, tmp_path: Path) -> None:
    """All that there is: what costs seconds to start does what it can."""
    saving = CHECKPOINTS if engine == "torch" else ()  # the others' are read by other processes
    every = () if (engine, size) in ALWAYS else OPTIMIZERS
    run(engine, size, tmp_path, *every, *saving, *OTHERS, "groups")


@pytest.mark.parametrize("size", [1, 3, 4])
def test_threads(size: int, tmp_path: Path) -> None:
    """What does not depend on an engine."""
    names = (*OF_ANY_ENGINE, *(OPTIMIZERS if size == 3 else ()))
    parts = {name: process_programs.PARTS[name] for name in names}
    in_threads(size, lambda comm: run_parts(comm, parts, "threads", tmp_path))


@needs_mpi
def test_others_resume(tmp_path: Path) -> None:
    """Saved by 4, read by processes that are started later, also by some of another engine."""
    run("mpi", 4, tmp_path, *CHECKPOINTS)
    sizes = {"mpi": 3, "torch": 2}
    for engine in [param.values[0] for param in ENGINES if not param.marks[0].args[0]]:
        for done in tmp_path.glob("done-*"):
            done.unlink()
        run(engine, sizes[engine], tmp_path, "resume", "resume_states")
