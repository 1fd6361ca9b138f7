"""Several processes of this machine: what happens in them is in the modules ``process_*``."""

from __future__ import annotations

from pathlib import Path

import pytest

from process_starts import ENGINES, needs_mpi, needs_torch, start

PROGRAM = Path(__file__).with_name("process_programs.py")
PARTS = (
    "without_positions", "optimizers", "decayed", "training", "storages", "some_have_no_rows",
    "sums", "row_sums", "sums_that_differ",
    "sharded", "large", "custom", "memory", "skipped", "sharded_errors",
    "saved", "saved_again", "saved_states", "broken", "of_one_rank", "errors",
)  # fmt: skip
# What costs seconds to start does all that it can.


def run(engine: str, size: int, folder: Path, *parts: str) -> None:
    done = start(engine, size, PROGRAM, folder, *parts, cwd=folder)
    assert done.returncode == 0, done.stdout
    ended = sorted(path.name for path in folder.glob("done-*"))
    assert ended == [f"done-{rank}" for rank in range(size)], done.stdout


@pytest.mark.parametrize("size", [4, 3, 2, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_processes(engine: str, size: int, tmp_path: Path) -> None:
    groups = ("groups",) if size > 1 else ()
    run(engine, size, tmp_path, *PARTS, *groups)


@needs_mpi
def test_other_numbers_of_processes_resume(tmp_path: Path) -> None:
    """Saved by 4, read by processes that were started later; in another order of rows, too."""
    run("mpi", 4, tmp_path, "saved", "saved_states")
    for size in (3, 2, 1):
        for done in tmp_path.glob("done-*"):
            done.unlink()
        run("mpi", size, tmp_path, "resume", "resume_states")


@needs_mpi
@needs_torch
def test_another_engine_resumes(tmp_path: Path) -> None:
    run("mpi", 3, tmp_path, "saved", "saved_states")
    for done in tmp_path.glob("done-*"):
        done.unlink()
    run("torch", 2, tmp_path, "resume", "resume_states")
