"""``fusestep bench --processes``: its options, a small run, and the arithmetic of its runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import arguments, refused_line
from fusestep.bench.cases.indices import DEFAULT, draw
from fusestep.bench.errors import BenchError
from fusestep.bench.report.table import Table, markdown
from fusestep.bench.scale_out import runs

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

# -- the options ----------------------------------------------------------------------------------


def test_without_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], Any] = find_spec
    monkeypatch.setattr(runs, "find_spec", lambda n: None if n == "torch" else find(n))
    line = refused_line(capsys, "--processes", "2")
    assert "--processes: needs PyTorch, for gloo: pip install torch" in line


@needs_torch
@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("2", [1, 2]), ("4,2, 4", [1, 2, 4]), ("64", [1, 64])]
)
def test_one_process_is_always_measured(text: str, counts: list[int], monkeypatch) -> None:
    """First with a part of the batch."""
    asked: list[int] = []
    pooled: list[int] = []
    monkeypatch.setattr(runs, "_run", lambda n, *_: asked.append(n))
    monkeypatch.setattr(runs, "_pooled", lambda n, *_: pooled.append(n))
    for table in ("measured", "pooled"):
        monkeypatch.setattr(runs, table, lambda _: Table([], [], 0))
    assert runs.main(arguments("--processes", text)) == 0
    assert asked == [1, *counts]
    assert pooled == [*counts, *counts]


FAILED = "W1 of torchrun\nTraceback:\nValueError: a table\nraise ChildFailedError(\nfailed"


@pytest.mark.parametrize(("error", "text"), [
    (subprocess.CalledProcessError(1, "python", stderr=FAILED), "ValueError: a table"),
    (subprocess.CalledProcessError(-9, "python", stderr="one\ntwo\n"), "two"),
    (subprocess.CalledProcessError(-9, "python", stderr=""), "died with"),
    (subprocess.TimeoutExpired("python", 600), "timed out after 600 seconds"),
])  # fmt: skip
def test_a_run_that_fails(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(runs.machine.subprocess, "run", fail)
    with pytest.raises(BenchError, match=f"^--processes 3: .*{text}"):
        runs._run(3, 10, 10, 1.0)


# -- a small run ----------------------------------------------------------------------------------


@needs_torch
def test_a_run(tmp_path: Path) -> None:
    """It prints a table and writes what the tables of the documents are made of."""
    path = tmp_path / "x.json"
    done = subprocess.run(
        [sys.executable, "-m", "fusestep", "bench", "--processes", "1,2", "--quick", "--json",
         str(path)],
        cwd=tmp_path, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True,
        check=False, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["rows"], data["dim"]) == (20_000, 64)
    assert [(run["processes"], run["batch"]) for run in data["runs"]] == [
        (1, 1024), (1, 4096), (2, 4096),
    ]  # fmt: skip
    tables = markdown(runs.measured(data)), markdown(runs.pooled(data))
    assert done.stdout.strip() == "\n\n".join(tables)
    shared = [(run["processes"], run["exchanges"], run["sent"] > 0) for run in data["pooled"]]
    assert shared == [(1, 3, False), (2, 4, True)]
    assert len(runs.modelled(data).rows) == len(runs.SIZES)
    for run in data["runs"]:
        _check_run(run)
    _check_bytes(data["runs"])


def _check_run(run: dict[str, Any]) -> None:
    low, median, high = run["iteration"]
    assert 0 < low <= median <= high
    assert 0 < run["outside"] <= high
    assert run["ids"] == run["batch"]
    assert run["exchanges"] == int(run["exchanges"])
    rows_of_one = -(-20_000 // run["processes"])
    assert run["table_and_states"] == 3 * rows_of_one * 64 * 4


def _check_bytes(found: list[dict[str, Any]]) -> None:
    """Nothing leaves a process that is alone; of two it is little more than has to."""
    assert [run["sent"] for run in found[:2]] == [0, 0] == [run["least"] for run in found[:2]]
    assert [run["second_per_byte"] for run in found[:2]] == [0, 0]
    two = found[2]
    assert two["second_per_byte"] > 0
    least = 0.0
    for rank, other in ((0, 1), (1, 0)):
        for seed in range(4):
            ids = draw(DEFAULT, 20_000, 4096, seed)[2048 * rank : 2048 * (rank + 1)]
            remote = ids[_owner(ids) == other]
            least += (len(np.unique(remote)) * (4 + 256) + len(remote) * 256) / 4
    assert two["least"] == least
    assert 1 < two["sent"] / two["least"] < 1.1
    assert abs(two["sent"] / (2 * runs.bytes_sent(2, 4096, 20_000)) - 1) < 0.1


def _owner(ids: np.ndarray) -> np.ndarray:
    """Of two processes, by the order that RowShard describes."""
    factor = round(0.6180339887498949 * 20_000)
    while np.gcd(factor, 20_000) > 1:
        factor += 1
    return ids * factor % 20_000 // 10_000


# -- the model ------------------------------------------------------------------------------------


def run_of(processes: int, batch: int, median: float = 0.02, **figures: float) -> dict[str, Any]:
    return {
        "processes": processes, "batch": batch, "iteration": [0.001, median, 0.03], "outside": 9.0,
        "sent": 3 * 2**20, "least": 2 * 2**20, "exchanges": 10.0, "agreement": 1e-4,
        "second_per_byte": 1e-9, "table_and_states": 2**20, **figures,
    }  # fmt: skip


@pytest.fixture
def data() -> dict[str, Any]:
    """Of 3 ms and 2 us for each id, on two cores."""
    return {
        "machine": {"cores": 2}, "rows": 1000, "dim": 64,
        "runs": [
            run_of(1, 1000, 0.005, outside=0.004, sent=0, least=0, second_per_byte=0),
            run_of(1, 4000, 0.011, outside=0.010, sent=0, least=0, second_per_byte=0),
            run_of(2, 4000), run_of(4, 4000, exchanges=12.0)],
    }  # fmt: skip


def test_a_process_without_others(data: dict[str, Any]) -> None:
    assert runs.alone(0, data) == pytest.approx(0.003)
    assert runs.alone(2500, data) == pytest.approx(0.008)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_bytes_sent(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ids of a process those of others travel: numbers, rows, gradients and two places."""
    asked = []

    def drawn(_: str, rows: int, ids: int) -> np.ndarray:
        asked.append((rows, ids))
        return np.arange(ids) % 100  # 100 different ones

    monkeypatch.setattr(runs, "draw", drawn)
    numbers, rows, gradients = 100 * 4, 100 * 256, 8000 // n * (256 + 4 + 4)
    assert runs.bytes_sent(n, 8000, 5000) == (numbers + rows + gradients) * (n - 1) / n
    assert asked == [(5000, 8000 // n)]


def test_predicted(data: dict[str, Any]) -> None:
    """The cores share what a process does by itself, not exchanges and bytes."""
    _, _, two, four = data["runs"]
    of_two = 0.003 + 2000 * 2e-6 + 10 * 1e-4 + runs.bytes_sent(2, 4000, 1000) * 1e-9
    assert runs.predicted(two, data) == pytest.approx(of_two)
    of_four = 2 * (0.003 + 1000 * 2e-6) + 12 * 1e-4 + runs.bytes_sent(4, 4000, 1000) * 1e-9
    assert runs.predicted(four, data) == pytest.approx(of_four)


@pytest.mark.parametrize("n", [8, 1024])
@pytest.mark.parametrize("network", runs.NETWORKS)
def test_iteration(n: int, network: int, data: dict[str, Any]) -> None:
    """Machines of their own: the exchanges of the last run, a message to each other process."""
    ids = 1_048_576 // n
    different = len(set(draw(DEFAULT, 1000, ids).tolist()))
    sent = (n - 1) / n * (different * 260 + ids * 264)
    expected = 0.003 + ids * 2e-6 + 12 * (n - 1) * 5e-6 + sent / (network / 8 * 1e9)
    assert runs.iteration(n, network, data) == pytest.approx(expected)
