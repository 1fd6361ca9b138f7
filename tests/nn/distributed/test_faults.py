"""Processes that are killed: the others name them, and what was saved stays whole."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import more
from process_faults import EVERY, check
from process_starts import ENGINES, TIMEOUT, needs_torch, start, start_each, start_job
from process_training import Tables
from thread_processes import in_threads

PROGRAM = Path(__file__).with_name("process_faults.py")
NEVER = 60  # seconds: what takes longer hangs


def wait_for(path: Path, processes: list[Any]) -> None:
    """Until a file is there; a program that has ended before does not write it."""
    end = time.monotonic() + TIMEOUT
    while not path.exists():
        ended = [p for p in processes if p.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.02)


def assert_resumable(folder: Path, size: int) -> None:
    """By any number of processes, to the bits of one that was never disturbed."""
    steps = in_threads(size, lambda comm: check(Tables(comm, "range"), folder))
    assert len(set(steps)) == 1 and steps[0] >= EVERY


def kill_one(folder: Path, size: int, victim: int, seconds: float) -> None:
    processes = start_each(size, PROGRAM, "train", folder, cwd=folder)
    try:
        wait_for(folder / "checkpoint" / "index.json", processes)
        time.sleep(seconds)
        processes[victim].kill()
        outputs = [p.communicate(timeout=NEVER)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(size):
        said = folder / f"said-{rank}"
        if rank == victim:
            assert not said.exists()
            continue
        assert processes[rank].returncode == 0, outputs[rank]
        assert json.loads(said.read_text())["ranks"] == [victim], outputs[rank]


@needs_torch
@pytest.mark.parametrize("seed", [0, *map(more, range(1, 53))])
def test_a_killed_process_is_named_and_the_rest_can_go_on(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    size = 3 if seed < 3 else rng.randint(2, 4)
    victim = seed if seed < 3 else rng.randrange(size)
    seconds = rng.uniform(0, 1)
    print(f"{seed=}: rank {victim} of {size}, {seconds:.3f} s after the first checkpoint")
    kill_one(tmp_path, size, victim, seconds)
    for other in {1, 2, size + 1}:
        assert_resumable(tmp_path, other)
    if seed > 2 and seed % 5 == 0:  # also by real ones
        done = start("torch", size % 3 + 1, PROGRAM, "resume", tmp_path, cwd=tmp_path)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_launcher_ends_the_job(engine: str, tmp_path: Path) -> None:
    job = start_job(engine, 3, PROGRAM, "train", tmp_path, cwd=tmp_path)
    try:
        wait_for(tmp_path / "checkpoint" / "index.json", [job])
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        output = job.communicate(timeout=NEVER)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode != 0, output
    for rank in range(3):
        pid = int((tmp_path / f"pid-{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert_resumable(tmp_path, 2)
    if engine == "torch":  # real ones cost seconds to start
        return
    resumed = start(engine, 2, PROGRAM, "resume", tmp_path, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout
    assert sorted(p.name for p in tmp_path.glob("resumed-*")) == ["resumed-0", "resumed-1"]
